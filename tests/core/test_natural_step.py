"""TRPO's step: the natural gradient to its full length, the KL bound kept, and θ unchanged if there is no step.

The pieces have laws of their own in ``tests/functional/test_natural_gradient.py``. Here they meet policies and batches; what
is claimed of a step is computed again from the probabilities of the policies before and after.
"""

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot import PPO_UNCLIPPED, TRPO, Constraint, Interrupted, NotFiniteError, Objective, Reuse, SurefootError
from surefoot.accel.steps import compiled_stepper
from surefoot.control.networks import EPISODE_STARTS, LSTM_STATE
from surefoot.control.policy import ActorCritic
from surefoot.control.spaces import BARE
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.minibatches import global_count, rows_of
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import Credit, Evaluation, LearnerState, Policy, Rollout
from surefoot.core.steps.eager import EagerPasses
from surefoot.core.steps.trpo import NaturalStepper, damped_fisher
from surefoot.functional import token_entropy, token_log_probs
from surefoot.recipes.control import Network

from .token_world import TokenCollector, Transformer
from .worlds import DOUBLE, Choice, TinyPolicy, parameters, random_rollout, state, update

ADAM = AdamSettings(0.01)
GOLDEN = Path(__file__).parent.parent / "golden" / "golden.json"
BATCHED = replace(TRPO, reuse=Reuse(2, 1), normalise_advantages="batch")


def constrained(objective: Objective = BATCHED, **changes: Any) -> Objective:
    return replace(objective, trust_region=replace(Constraint(), **changes))


def actor_and_critic(policy: Policy) -> tuple[Tensor, Tensor]:
    own = {id(p) for p in policy.critic_parameters()}
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in policy.parameters():
        sides[id(parameter) in own].append(parameter.detach().flatten().clone())
    return torch.cat(sides[0]), torch.cat(sides[1])


def kl_between(before: Policy, after: Policy, rollout: Rollout) -> float:
    """Mean exact KL over what is kept, from the probabilities."""
    with torch.no_grad():
        old, new = (p(rollout.inputs, rollout.actions).distribution.logits.log_softmax(-1) for p in (before, after))
    return float((old.exp() * (old - new)).sum(-1)[rollout.mask].mean())


def surrogate_of(policy: Policy, rollout: Rollout, advantages: Tensor) -> float:
    """Mean ρÂ over what is kept."""
    with torch.no_grad():
        ratio = (policy(rollout.inputs, rollout.actions).log_probs - rollout.old_log_probs).exp()
    return float((ratio * advantages)[rollout.mask].mean())


# ---- the Fisher matrix --------------------------------------------------------------------------------------------------


def in_control(box: bool, lstm: int | None = None) -> tuple[Policy, Rollout]:
    """A policy of control in float64, off its initial symmetry, and what it would have done."""
    action_space = spaces.Box(-1, 1, (2,)) if box else spaces.Discrete(3)
    generator = torch.Generator().manual_seed(1)
    policy = ActorCritic(spaces.Box(-9, 9, (3,)), action_space, Network(hidden=(4, 3), lstm=lstm), True, generator).double()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE) / 3)
        inputs = {BARE: torch.randn(3, 4, 3, generator=generator, dtype=DOUBLE)}
        if lstm is None:
            actions = policy.step(inputs)[0].sample(generator)
        else:  # every row begins anew at some step, and remembers something before
            inputs[EPISODE_STARTS] = torch.eye(3, 4, dtype=torch.bool).roll(1, 1)
            inputs[LSTM_STATE] = torch.randn(3, 2, 2, lstm, generator=generator, dtype=DOUBLE)
            actions = torch.randint(3, (3, 4), generator=generator)
        here = policy(inputs, actions)
    mask = torch.rand(3, 4, generator=generator) < 0.8
    zeros, none = torch.zeros_like(mask, dtype=DOUBLE), torch.zeros_like(mask)
    return policy, Rollout(
        inputs=inputs,
        actions=actions,
        mask=mask,
        old_log_probs=here.log_probs,
        values=here.values,
        next_values=zeros,
        rewards=torch.randn(3, 4, generator=generator, dtype=DOUBLE),
        terminated=none,
        truncated=none,
        unit="step" if lstm is None else "row",
        old_distribution=here.distribution,
    )


def in_a_page(unit: str) -> tuple[Policy, Rollout]:
    policy = TinyPolicy(4, memory=unit == "row")
    return policy, random_rollout(policy, 4, rows=5, unit=unit)


WORLDS = {
    "Discrete": lambda: in_control(box=False),
    "Box": lambda: in_control(box=True),
    "LSTM": lambda: in_control(box=False, lstm=3),
    "steps": lambda: in_a_page("step"),
    "rows": lambda: in_a_page("row"),
}


def explicit_hessian(policy: Policy, rollout: Rollout, exact: bool = True) -> Tensor:
    """Of the mean KL at θ_old in the actor's parameters, by autograd twice on a function of one flat vector."""
    own = {id(p) for p in policy.critic_parameters()}
    named = {name: p.detach() for name, p in policy.named_parameters() if id(p) not in own}
    flat = torch.cat([p.flatten() for p in named.values()])

    def mean_kl(vector: Tensor) -> Tensor:
        parts = vector.split([p.numel() for p in named.values()])
        moved = {name: part.view_as(p) for (name, p), part in zip(named.items(), parts, strict=True)}
        here = torch.func.functional_call(policy, moved, (rollout.inputs, rollout.actions, rollout.mask))
        if exact:
            return rollout.old_distribution.kl(here.distribution)[rollout.mask].mean()
        ratio = (here.log_probs - rollout.old_log_probs).exp()
        return (ratio - 1 - ratio.log())[rollout.mask].mean()

    return torch.autograd.functional.hessian(mean_kl, flat)


@pytest.mark.parametrize(
    ("world", "micro_batch"), [("Discrete", None), ("Box", 2), ("LSTM", 2), ("steps", None), ("rows", 2), ("rows", None)]
)
def test_the_fisher_vector_product_of_a_policy_is_that_of_the_explicit_hessian(world: str, micro_batch: int | None) -> None:
    policy, rollout = WORLDS[world]()
    hessian = explicit_hessian(policy, rollout)
    actor = [p for p in policy.parameters() if id(p) not in {id(q) for q in policy.critic_parameters()}]
    batch = rows_of(rollout, assign_credit(rollout, TRPO))
    passes, count = EagerPasses(policy, TRPO, micro_batch), global_count(batch, "token-mean")
    matvec = damped_fisher(passes.curvature(batch, count, actor), damping=0.1)
    assert len(list(passes.parts(batch))) > 1 or micro_batch is None
    assert hessian.abs().max() > 1e-3
    for seed in range(2):
        v = torch.randn(len(hessian), generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
        torch.testing.assert_close(matvec(v), hessian @ v + 0.1 * v, rtol=1e-9, atol=1e-10)


def test_the_fisher_vector_product_of_a_transformer_is_the_difference_of_two_gradients() -> None:
    """Whose attention is fused, and on text, where the KL is that of the samples."""
    policy = Transformer(0, width=4)
    rollout = TokenCollector(policy, beta=0.0, responses=3).collect(LearnerState.seeded(0, 1))
    policy.double()
    with torch.no_grad():
        old = policy(rollout.inputs, rollout.actions, rollout.mask).log_probs
    batch = rows_of(replace(rollout, old_log_probs=old), assign_credit(rollout, TRPO))
    actor, count = list(policy.parameters()), global_count(batch, "token-mean")

    def gradient(shift: Tensor) -> Tensor:
        parts = shift.split([p.numel() for p in actor])
        moved = {n: p + x.view_as(p) for (n, p), x in zip(policy.named_parameters(), parts, strict=True)}
        ratio = torch.func.functional_call(policy, moved, (batch.inputs, batch.actions)).log_probs - old
        kl = (ratio.exp() - 1 - ratio)[rollout.mask].mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(kl, actor, allow_unused=True, materialize_grads=True)])

    generator = torch.Generator().manual_seed(0)
    v = torch.randn(sum(p.numel() for p in actor), generator=generator, dtype=DOUBLE)
    expected = (gradient(1e-4 * v) - gradient(-1e-4 * v)) / 2e-4
    actual = damped_fisher(EagerPasses(policy, TRPO).curvature(batch, count, actor), damping=0.0)(v)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


# ---- the programs of the compiled engine --------------------------------------------------------------------------------


def uncompiled(
    name: str, function: Callable[..., tuple[Tensor, ...]], arguments: Any, *others: Any
) -> Callable[[list[Tensor]], list[Tensor]]:
    """A program that runs the function itself, so that its law holds in float64 and without a compiler."""
    return lambda tensors: list(function(*tensors))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.accel.passes.program_of", uncompiled)
    monkeypatch.setattr("surefoot.accel.passes.require_programs", lambda: None)


def compiled(policy: Policy, objective: Objective, rows: int, micro_batch: int | None = None) -> tuple[Learner, Any]:
    """A learner with compiled passes, and these."""
    making = partial(compiled_stepper, rows=rows)
    learner = Learner(policy, objective, LearnerSettings(ADAM, micro_batch=micro_batch, stepper=making))
    stepper: Any = learner.stepper
    stepper.compiled.critic = stepper.eager.critic  # the loop of Adam is of float32
    return learner, stepper.compiled.passes


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    ("world", "changes"), [("Discrete", {"kl_estimator": "exact"}), ("Box", {"entropy_coefficient": 0.1}), ("steps", {})]
)
def test_a_compiled_natural_step_equals_the_eager_one(world: str, changes: dict[str, Any]) -> None:
    """With the same KL, the same tries, and the same critic after it, in one part and in several."""
    results = []
    for rows, micro_batch in ((None, None), ("all", None), ("all", 1)):
        policy, rollout = WORLDS[world]()
        objective = replace(BATCHED, **changes)
        if rows is None:
            learner, passes = Learner(policy, objective, LearnerSettings(ADAM)), None
        else:
            learner, passes = compiled(policy, objective, int(rollout.mask.sum()), micro_batch)
        before = [x.clone() for x in actor_and_critic(policy)]
        metrics = update(learner, rollout)
        assert metrics["step_taken"] == 1
        assert passes is None or len(passes.programs) == 3
        assert all(not torch.equal(a, b) for a, b in zip(before, actor_and_critic(policy), strict=True))
        results.append((metrics, actor_and_critic(policy)))
    for metrics, moved in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-8, abs=1e-11)
        torch.testing.assert_close(moved, results[0][1], rtol=1e-8, atol=1e-10)


# ---- the step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sampled"])
def test_the_full_step_is_the_natural_gradient_to_the_length_that_the_bound_allows(exact: bool) -> None:
    """With the system solved densely: θ − θ_old = √(2δ / xᵀHx) x, x = H⁻¹g, H damped in both places."""
    policy, rollout = in_a_page("step")
    rollout = rollout if exact else replace(rollout, old_distribution=None)
    objective = constrained(replace(BATCHED, normalise_advantages=None), delta=1e-6, cg_iterations=200)
    before, _ = actor_and_critic(policy)
    hessian = explicit_hessian(policy, rollout, exact) + 0.1 * torch.eye(len(before), dtype=DOUBLE)
    credit = assign_credit(rollout, objective)
    ratio = (policy(rollout.inputs, rollout.actions).log_probs - rollout.old_log_probs).exp()
    actor = [p for p in policy.parameters() if id(p) not in {id(q) for q in policy.critic_parameters()}]
    g = torch.cat([x.flatten() for x in torch.autograd.grad((ratio * credit.advantages)[rollout.mask].mean(), actor)])
    x = torch.linalg.solve(hessian, g)
    expected = (2e-6 / (x @ hessian @ x)).sqrt() * x
    metrics = Learner(policy, objective, LearnerSettings(ADAM)).update(rollout, credit, state())
    assert (metrics["step_taken"], metrics["line_search_tries"]) == (1.0, 1.0)
    gap = actor_and_critic(policy)[0] - before - expected
    assert gap.abs().max() < 5e-4 * expected.abs().max(), "the solver stops at a residual of 1e-5"


@pytest.mark.parametrize(("delta", "unit"), [(0.001, "row"), (0.3, "step")])
def test_after_every_accepted_step_the_kl_is_within_the_bound_and_the_surrogate_higher(delta: float, unit: str) -> None:
    policy, taken = TinyPolicy(3, memory=unit == "row"), []
    objective = constrained(replace(BATCHED, normalise_advantages=None), delta=delta, damping=0.01)
    learner = Learner(policy, objective, LearnerSettings(ADAM))
    for number in range(6):
        rollout = random_rollout(policy, number, rows=6, unit=unit)
        before, credit = copy.deepcopy(policy), assign_credit(rollout, objective)
        metrics = learner.update(rollout, credit, state())
        kl = kl_between(before, policy, rollout)
        gains = [surrogate_of(each, rollout, credit.advantages) for each in (before, policy)]
        assert metrics["kl_after"] == pytest.approx(kl, rel=1e-8, abs=1e-14)
        assert metrics["surrogate_improvement"] == pytest.approx(gains[1] - gains[0], rel=1e-6, abs=1e-12)
        if metrics["step_taken"]:
            taken.append(kl)
            assert 0 < kl <= delta
            assert gains[1] > gains[0]
        else:
            assert torch.equal(actor_and_critic(policy)[0], actor_and_critic(before)[0])
    assert len(taken) >= 5
    assert max(taken) > delta / 4, "and the bound is made use of"


def test_a_step_that_is_too_long_is_shortened_by_fifths() -> None:
    """Without damping and with a large δ the KL outgrows its quadratic: the first lengths are rejected."""
    policy = TinyPolicy(3)
    rollout = random_rollout(policy, 2, rows=6)
    metrics = update(Learner(policy, constrained(delta=0.5, damping=1e-4), LearnerSettings(ADAM)), rollout)
    short = TinyPolicy(3)
    tries = int(metrics["line_search_tries"] or 0)
    assert metrics["step_taken"] == 1.0
    assert 1 < tries <= 10
    one_less = update(Learner(short, constrained(delta=0.5, damping=1e-4, tries=tries - 1), LearnerSettings(ADAM)), rollout)
    assert (one_less["step_taken"], one_less["line_search_tries"]) == (0.0, tries - 1)
    old = actor_and_critic(TinyPolicy(3))[0]
    full = TinyPolicy(3)
    wide = Learner(full, constrained(delta=0.5, damping=1e-4), LearnerSettings(ADAM))
    torch.testing.assert_close(length(wide, rollout) * 0.8 ** (tries - 1), (actor_and_critic(policy)[0] - old).norm())


def length(learner: Learner, rollout: Rollout) -> Tensor:
    """The length of the full step, whether or not it is accepted."""
    seen: list[Tensor] = []
    original = NaturalStepper._full_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NaturalStepper, "_full_step", lambda *of: seen.append(original(*of)) or seen[-1])  # type: ignore[func-returns-value]
        update(learner, rollout)
    return seen[0].norm()


class Slippery(TinyPolicy):
    """Scores as usual with gradient; without, as if every move had gone terribly far. ``fall`` is raised on the third look."""

    def __init__(self, fall: BaseException | None = None) -> None:
        super().__init__(6)
        self.start, self.fall, self.looks = None, fall, 0

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        evaluation = super().forward(inputs, actions, mask)
        if torch.is_grad_enabled() or self.start is None or torch.equal(self.start, self.head.bias):
            return evaluation
        self.looks += 1
        if self.fall is not None and self.looks == 3:
            raise self.fall
        far = evaluation.distribution.logits + 9 * torch.eye(4, dtype=DOUBLE)[0]
        return replace(evaluation, distribution=Choice(far))


def test_a_failed_line_search_leaves_the_policy_unchanged_and_still_fits_the_critic() -> None:
    policy, at = Slippery(), state()
    rollout = random_rollout(policy, 0, rows=6)
    policy.start = policy.head.bias.detach().clone()
    actor, critic = actor_and_critic(policy)
    metrics = update(Learner(policy, BATCHED, LearnerSettings(ADAM)), rollout, at)
    assert policy.looks == 10
    assert (metrics["step_taken"], metrics["line_search_tries"], metrics["surrogate_improvement"]) == (0.0, 10.0, 0.0)
    assert metrics["kl_after"] == 0.0
    after = actor_and_critic(policy)
    assert torch.equal(after[0], actor)
    assert not torch.equal(after[1], critic)
    assert at.updates == 2, "both are the critic's"


def test_an_interrupted_line_search_leaves_the_policy_unchanged() -> None:
    policy = Slippery(Interrupted("stop"))
    rollout = random_rollout(policy, 0, rows=6)
    policy.start = policy.head.bias.detach().clone()
    before = parameters(policy)
    with pytest.raises(Interrupted):
        update(Learner(policy, BATCHED, LearnerSettings(ADAM)), rollout)
    assert policy.looks == 3
    assert torch.equal(parameters(policy), before)


def test_without_a_gradient_there_is_no_step() -> None:
    policy, at = TinyPolicy(), state()
    rollout = random_rollout(policy, 0)
    actor, critic = actor_and_critic(policy)
    metrics = update(Learner(policy, BATCHED, LearnerSettings(ADAM)), rollout, at, advantages=torch.zeros_like(rollout.rewards))
    assert (metrics["step_taken"], metrics["line_search_tries"], metrics["gradient_norm_policy"]) == (0.0, 0.0, 0.0)
    after = actor_and_critic(policy)
    assert torch.equal(after[0], actor)
    assert not torch.equal(after[1], critic)


class Straight(TinyPolicy):
    """A policy whose KL is 0 whatever its parameters."""

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        evaluation = super().forward(inputs, actions, mask)
        return replace(evaluation, distribution=Choice(evaluation.distribution.logits * 0))


def test_without_curvature_there_is_no_step_unless_there_is_damping() -> None:
    policy = Straight()
    rollout = random_rollout(policy, 0)
    actor, _ = actor_and_critic(policy)
    metrics = update(Learner(policy, constrained(damping=0.0), LearnerSettings(ADAM)), rollout)
    assert (metrics["step_taken"], metrics["line_search_tries"]) == (0.0, 0.0)
    assert metrics["gradient_norm_policy"] > 1e-3  # type: ignore[operator]
    assert torch.equal(actor_and_critic(policy)[0], actor)
    assert update(Learner(policy, constrained(damping=0.1), LearnerSettings(ADAM)), rollout)["step_taken"] == 1.0


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_the_scale_of_the_rewards_does_not_change_the_step(scale: float) -> None:
    ends = []
    for factor in (1.0, scale):
        policy = TinyPolicy()
        rollout = random_rollout(policy, 0)
        advantages = assign_credit(rollout, TRPO).advantages * factor
        metrics = update(
            Learner(policy, replace(BATCHED, normalise_advantages=None), LearnerSettings(ADAM)), rollout, advantages=advantages
        )
        assert metrics["step_taken"] == 1.0
        ends.append(actor_and_critic(policy)[0])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


def test_micro_batches_do_not_change_the_step() -> None:
    ends, metrics = [], []
    for size in (None, 2):
        policy = TinyPolicy(2, memory=True)
        rollout = random_rollout(policy, 2, rows=6, unit="row")
        metrics.append(update(Learner(policy, BATCHED, LearnerSettings(ADAM, micro_batch=size)), rollout))
        ends.append(parameters(policy))
    assert metrics[0]["step_taken"] == 1.0
    torch.testing.assert_close(*ends, rtol=1e-8, atol=1e-10)
    assert metrics[1]["kl_after"] == pytest.approx(metrics[0]["kl_after"], rel=1e-7)
    assert metrics[1]["line_search_tries"] == metrics[0]["line_search_tries"]


def test_the_entropy_bonus_is_part_of_the_surrogate() -> None:
    """With nothing to gain, a bonus makes the policy more undecided, and a metric says by how much it gained."""
    policy = TinyPolicy()
    rollout = random_rollout(policy, 0, holes=False)
    with torch.no_grad():
        before = policy(rollout.inputs, rollout.actions).entropy.mean()
    objective = replace(BATCHED, entropy_coefficient=0.5, normalise_advantages=None)
    metrics = update(Learner(policy, objective, LearnerSettings(ADAM)), rollout, advantages=torch.zeros_like(rollout.rewards))
    with torch.no_grad():
        after = policy(rollout.inputs, rollout.actions).entropy.mean()
    assert metrics["step_taken"] == 1.0
    assert after > before
    assert metrics["surrogate_improvement"] == pytest.approx(0.5 * float(after - before), rel=1e-6)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    policy, at = TinyPolicy(), state()
    learner = Learner(policy, BATCHED, LearnerSettings(ADAM))
    update(learner, random_rollout(policy, 0), at)
    rollout, before = random_rollout(policy, 1), parameters(policy)
    broken = rollout.rewards.clone()
    broken.view(-1)[rollout.mask.flatten().nonzero()[0]] = torch.nan
    with pytest.raises(NotFiniteError, match=r"policy_loss.*not finite; the step was not taken"):
        update(learner, replace(rollout, rewards=broken), at)
    assert torch.equal(parameters(policy), before)


# ---- golden -------------------------------------------------------------------------------------------------------------


class Table(Policy):
    """One state, a logit per action."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities, dtype=DOUBLE).log())

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        logits = self.logits.expand(*actions.shape, -1)
        return Evaluation(token_log_probs(logits, actions), token_entropy(logits), None, Choice(logits))


@pytest.mark.parametrize(
    ("name", "counts", "tries"), [("trpo_step_softmax_uniform", [1, 1, 1], 1), ("trpo_step_baselines_rule", [90, 7, 3], 2)]
)
def test_the_step_of_a_tabular_policy_matches_golden(name: str, counts: list[int], tries: int) -> None:
    """Every action as often as its probability says, so that the mean over the batch is the exact surrogate. The second case
    is a neighbour's rule, which takes a step beyond δ: ours takes it at half the length."""
    (case,) = (case for case in json.loads(GOLDEN.read_text("utf-8")) if case["name"] == name)
    x, expected = case["inputs"], case["expected"]
    policy = Table(x["probs"])
    start = policy.logits.detach().clone()
    actions = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).unsqueeze(-1)
    ones, zeros = torch.ones_like(actions, dtype=torch.bool), torch.zeros(actions.shape, dtype=DOUBLE)
    with torch.no_grad():
        here = policy(zeros, actions)
    ends = {"terminated": ones, "truncated": ~ones}
    rollout = Rollout(zeros, actions, ones, here.log_probs, zeros, zeros, zeros, **ends, old_distribution=here.distribution)
    bound = Constraint(x["max_kl"], x["damping"], 10, x["backtrack_coeff"], x["max_backtracks"])
    objective = replace(TRPO, baseline=None, gae_lambda=1.0, reuse=None, trust_region=bound)
    advantages = torch.tensor(x["adv"], dtype=DOUBLE)[actions]
    metrics = Learner(policy, objective, LearnerSettings(ADAM)).update(rollout, Credit(advantages, advantages), state())
    step = torch.tensor(expected["full_step"], dtype=DOUBLE) * x["backtrack_coeff"] ** (tries - 1)
    torch.testing.assert_close(policy.logits.detach() - start, step, rtol=0, atol=1e-8)
    assert (metrics["step_taken"], metrics["line_search_tries"]) == (1.0, tries)
    if tries == 1:
        assert metrics["kl_after"] == pytest.approx(expected["trace"][0]["kl_old_new"], abs=1e-9)
        assert metrics["surrogate_improvement"] == pytest.approx(expected["trace"][0]["improve"], abs=1e-9)


# ---- the critic ---------------------------------------------------------------------------------------------------------


def test_the_critic_is_fitted_as_a_separate_critic_of_any_other_algorithm_is() -> None:
    """Same passes, same minibatches in the same order, same optimizer: the policy's way of moving has no say in it."""
    objective = replace(TRPO, reuse=Reuse(3, 4))
    other = replace(PPO_UNCLIPPED, reuse=Reuse(3, 4))
    ends = []
    for each, settings in ((objective, (ADAM,)), (objective, (AdamSettings(1.0), ADAM)), (other, (ADAM, ADAM))):
        policy, at = TinyPolicy(), state()
        rollout = random_rollout(policy, 0)
        metrics = update(Learner(policy, each, LearnerSettings(*settings)), rollout, at)
        assert metrics["epochs"] == 3
        assert at.updates == 12 + (each is objective)
        ends.append(actor_and_critic(policy)[1])
    assert torch.equal(ends[0], ends[1]), "without settings of its own the ordinary ones are the critic's"
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-12, atol=1e-14)
    assert not torch.equal(ends[0], actor_and_critic(TinyPolicy())[1])


class CountingLoss:
    """An auxiliary loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def add_gradient(self) -> dict[str, float]:
        self.calls += 1
        return {"sft_loss": 1.0}


def test_an_auxiliary_loss_does_not_train_the_critic_alone() -> None:
    ends = []
    for auxiliary in (None, CountingLoss()):
        policy = TinyPolicy()
        learner = Learner(policy, BATCHED, LearnerSettings(ADAM))
        learner.auxiliary_loss = auxiliary
        metrics = update(learner, random_rollout(policy, 0))
        ends.append((parameters(policy), metrics))
    assert auxiliary is not None
    assert auxiliary.calls == 0
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    learner = Learner(TinyPolicy(), replace(PPO_UNCLIPPED, reuse=Reuse(2, 1)), LearnerSettings(ADAM, AdamSettings(0.02)))
    learner.auxiliary_loss = auxiliary
    update(learner, random_rollout(TinyPolicy(), 0))
    assert auxiliary.calls == 2, "where the policy moves too it is called for each step"


def test_a_linear_schedule_is_the_critics() -> None:
    """The policy's step has no learning rate, and is the same whatever is left of the budget."""
    ends, rates = [], []
    for steps in (0, 50):
        policy = TinyPolicy()
        metrics = update(
            Learner(policy, BATCHED, LearnerSettings(ADAM, schedule="linear")),
            random_rollout(policy, 0),
            replace(state(), steps=steps),
        )
        ends.append(actor_and_critic(policy))
        rates.append(metrics["learning_rate"])
    assert rates == [0.01, 0.005]
    assert torch.equal(ends[0][0], ends[1][0])
    assert not torch.equal(ends[0][1], ends[1][1])


def test_without_a_critic_only_the_step_is_taken() -> None:
    policy, at = TinyPolicy(critic=False), state()
    objective = replace(TRPO, baseline="mean", gae_lambda=1.0, reuse=None)
    learner = Learner(policy, objective, LearnerSettings(ADAM))
    before = copy.deepcopy(policy)
    rollout = random_rollout(policy, 0, whole=True)
    metrics = update(learner, rollout, at)
    assert (metrics["step_taken"], metrics["epochs"], at.updates) == (1.0, 0.0, 1)
    assert "learning_rate" not in metrics
    assert 0 < kl_between(before, policy, rollout) <= 0.01
    learner.load_state_dict(learner.state_dict())


class HalfShared(TinyPolicy):
    """A critic with a head of its own on the policy's trunk."""

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        assert self.critic_head is not None
        return self.critic_head.parameters()


def test_a_critic_head_on_a_shared_trunk_is_rejected_before_any_update() -> None:
    policy = HalfShared(shared=True)
    rollout, before = random_rollout(policy, 0), parameters(policy)
    with pytest.raises(SurefootError, match=r"trust_region='constraint'.*critic_parameters\(\)"):
        update(Learner(policy, TRPO, LearnerSettings(ADAM)), rollout)
    assert torch.equal(parameters(policy), before)


# ---- the switch ---------------------------------------------------------------------------------------------------------


def test_trpo_is_one_switch_away_from_the_unclipped() -> None:
    assert replace(TRPO, trust_region=None) == PPO_UNCLIPPED
    assert TRPO.constraint == Constraint(delta=0.01, damping=0.1, cg_iterations=10, shrink=0.8, tries=10)
    assert (TRPO.clip, TRPO.penalty) == (None, None)
