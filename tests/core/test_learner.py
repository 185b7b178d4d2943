"""Learner and loop: number and size of the steps, early stopping, and no effect of a failed batch.

``test_ladder.py`` and ``test_invariances.py`` check what a gradient is; here is what is done with it.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import A2C, PPO_CLIP, PPO_PENALTY, PPO_UNCLIPPED, REINFORCE, Clip, NotFiniteError, Objective, Reuse, SurefootError
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings, rounding
from surefoot.core.loop import run_loop
from surefoot.core.minibatches import global_count, rows_of
from surefoot.core.objective import Batch, loss
from surefoot.core.optimizer import BETAS, AdamSettings, FlatOptimizer, scheduled
from surefoot.core.rollout import Credit, Evaluation, LearnerState, Metrics, Policy, Rollout

from .worlds import DOUBLE, TinyPolicy, gradient, gradient_of, moved, parameters, random_rollout, state, update

ADAM = AdamSettings(0.01)
GOLDEN = Path(__file__).parent.parent / "golden" / "golden.json"


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# ---- how often ----------------------------------------------------------------------------------------------------------


class Watched(TinyPolicy):
    """Notes which rows every forward pass reads: the first feature is the row's number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        self.seen.append(inputs[..., 0].flatten().int().tolist())
        return super().forward(inputs, actions, mask)


def numbered(policy: Policy, rollout: Rollout) -> Rollout:
    """Steps numbered from 0 in their first input, scored anew."""
    inputs = rollout.inputs.clone()
    inputs[..., 0] = torch.arange(rollout.mask.numel(), dtype=DOUBLE).view(rollout.mask.shape)
    with torch.no_grad():
        here = policy(inputs, rollout.actions, rollout.mask)
    return replace(rollout, inputs=inputs, old_log_probs=here.log_probs)


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (4, 3)])
def test_epochs_times_minibatches_take_exactly_that_many_optimizer_steps(epochs: int, minibatches: int) -> None:
    policy, at = TinyPolicy(), state()
    learner = Learner(policy, replace(PPO_CLIP, reuse=Reuse(epochs, minibatches)), LearnerSettings(ADAM))
    metrics = update(learner, random_rollout(policy, 0), at)
    assert at.updates == epochs * minibatches
    assert int(learner.optimizers["policy"].state_dict()["step"]) == epochs * minibatches
    assert metrics["epochs"] == epochs


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_every_kept_step_is_visited_once_per_epoch_in_a_new_order(micro_batch: int | None) -> None:
    policy = Watched()
    rollout = numbered(policy, random_rollout(policy, 0))
    policy.seen.clear()
    learner = Learner(policy, replace(PPO_CLIP, reuse=Reuse(3, 4)), LearnerSettings(ADAM, micro_batch=micro_batch))
    update(learner, rollout)
    visits = [number for batch in policy.seen for number in batch]
    kept = rollout.mask.flatten().nonzero().flatten().tolist()
    assert 0 < len(kept) < rollout.mask.numel()
    epochs = [visits[i : i + len(kept)] for i in range(0, len(visits), len(kept))]
    assert [sorted(epoch) for epoch in epochs] == [kept] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    if micro_batch is None:
        sizes = [len(batch) for batch in policy.seen]
        assert len(sizes) == 12
        assert max(sizes) - min(sizes) <= 1
    else:
        assert max(len(batch) for batch in policy.seen) == micro_batch


def test_rows_are_visited_whole() -> None:
    policy = Watched()
    rollout = numbered(policy, random_rollout(policy, 0, rows=5, unit="row"))
    policy.seen.clear()
    update(Learner(policy, replace(PPO_CLIP, reuse=Reuse(2, 2)), LearnerSettings(ADAM)), rollout)
    rows = [tuple(batch[i : i + 6]) for batch in policy.seen for i in range(0, len(batch), 6)]
    assert sorted(rows) == sorted([tuple(range(6 * i, 6 * i + 6)) for i in range(5)] * 2)


# ---- how far: optimizer and schedules -----------------------------------------------------------------------------------


def test_flat_adam_takes_the_golden_steps() -> None:
    """Those of torch; with the same epsilon TensorFlow's first step is almost four times smaller."""
    (case,) = (case for case in json.loads(GOLDEN.read_text("utf-8")) if case["name"] == "adam_torch_vs_tf_eps")
    x, expected = case["inputs"], case["expected"]
    assert (x["beta1"], x["beta2"]) == BETAS
    parameter, results = nn.Parameter(torch.zeros(1, dtype=torch.float64)), []
    flat = FlatOptimizer([parameter], AdamSettings(x["lr"], epsilon=x["eps"], max_grad_norm=None))
    for slope in x["grads"]:
        flat.zero()
        (slope * parameter).sum().backward()
        flat.step(flat.gradient_norm())
        results.append(float(parameter.detach()))
    assert results == pytest.approx(expected["torch"], abs=case["tolerance"])
    assert results[0] != pytest.approx(expected["tf1"][0], rel=0.5)


def test_flat_adam_moves_the_policy_in_place_and_continues_from_its_state() -> None:
    policy = TinyPolicy()
    objective = replace(PPO_CLIP, reuse=Reuse(1, 2))
    learner = Learner(policy, objective, LearnerSettings(ADAM))
    update(learner, random_rollout(policy, 0))
    again = Learner(copy.deepcopy(policy), objective, LearnerSettings(ADAM))
    again.load_state_dict(learner.state_dict())
    fresh = Learner(copy.deepcopy(policy), objective, LearnerSettings(ADAM))
    rollout = random_rollout(policy, 1)
    for one in (learner, again, fresh):
        update(one, rollout)
    assert torch.equal(parameters(policy), parameters(again.policy))
    assert not torch.equal(parameters(policy), parameters(fresh.policy)), "without the moments it goes elsewhere"


def test_a_saved_optimizer_state_is_a_copy() -> None:
    policy = TinyPolicy()
    first, second = Learner(policy, A2C, LearnerSettings(ADAM)), Learner(copy.deepcopy(policy), A2C, LearnerSettings(ADAM))
    update(first, random_rollout(policy, 0))
    second.load_state_dict(first.state_dict())
    saved = copy.deepcopy(second.state_dict())
    update(first, random_rollout(policy, 1))
    torch.testing.assert_close(second.state_dict(), saved, rtol=0, atol=0)


def test_the_gradient_is_scaled_down_to_max_grad_norm_and_never_up() -> None:
    policy = TinyPolicy()
    rollout = random_rollout(policy, 0)
    raw = gradient(policy, rollout, A2C)
    for limit in (float(raw.norm()) / 3, float(raw.norm()) / 1.001, float(raw.norm()) * 3):
        learner = Learner(copy.deepcopy(policy), A2C, LearnerSettings(AdamSettings(0.01, max_grad_norm=limit)))
        metrics = update(learner, rollout)
        taken = learner.optimizers["policy"].gradients
        torch.testing.assert_close(taken, raw * min(1.0, limit / float(raw.norm())), rtol=1e-5, atol=0)
        assert metrics["gradient_norm_policy"] == pytest.approx(float(raw.norm())), "what is logged is the norm before"


class Repeated:
    """A collector with one rollout, rescored each time; anything in ``script`` that is raised or changed comes first."""

    def __init__(self, policy: TinyPolicy, steps: int = 10, script: list[Callable[[Rollout], Rollout]] | None = None) -> None:
        self.policy, self.steps, self.script = policy, steps, list(script or [])

    def collect(self, at: LearnerState) -> Rollout:
        rollout = replace(random_rollout(self.policy, 0), steps=self.steps)
        return self.script.pop(0)(rollout) if self.script else rollout

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, tree: dict[str, Any]) -> None: ...


def rates_of_a_run(schedule: str, learning_rate: float, updates: int) -> tuple[list[float], list[float]]:
    """What Adam used, and what was logged, at every iteration."""
    policy = TinyPolicy()
    learner = Learner(policy, A2C, LearnerSettings(AdamSettings(learning_rate), schedule=schedule))  # type: ignore[arg-type]
    used, logged = [], []

    def note(at: LearnerState, metrics: Metrics) -> bool:
        used.append(learner.optimizers["policy"].learning_rate)
        logged.append(metrics["learning_rate"])
        return False

    run_loop(Repeated(policy), learner, state(10 * updates), note)
    return used, logged  # type: ignore[return-value]


def test_linear_learning_rate_matches_golden() -> None:
    """The first update has the full rate, the last lr0/num_updates and not 0."""
    (case,) = (case for case in json.loads(GOLDEN.read_text("utf-8")) if case["name"] == "lr_linear_anneal")
    used, logged = rates_of_a_run("linear", case["inputs"]["lr0"], case["inputs"]["num_updates"])
    assert used == pytest.approx(case["expected"]["lr"], abs=case["tolerance"])
    assert logged == used


def test_schedules_fall_with_the_budget_and_a_function_is_checked() -> None:
    left = (1.0, 0.75, 0.5, 0.0)
    assert [scheduled("x", "constant", share) for share in left] == [1.0] * 4
    assert [scheduled("x", "linear", share) for share in left] == list(left)
    assert [scheduled("x", "cosine", share) for share in left] == pytest.approx([1.0, 0.5 + 0.125**0.5, 0.5, 0.0])
    assert scheduled("x", lambda share: 3 * share, 0.5) == 1.5
    for wrong in (lambda share: -share, lambda share: torch.inf, lambda share: 1 / 0):
        with pytest.raises(SurefootError, match=r"^x: the function r"):
            scheduled("x", wrong, 1.0)


@pytest.mark.parametrize(("steps", "minibatches"), [(10, 4), (40, 16)])
def test_a_warm_up_rises_at_every_step_however_many_a_rollout_has(
    steps: int, minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, which moves θ; after the warm-up, linear begins where constant would be."""
    used: list[float] = []
    take = FlatOptimizer.step
    monkeypatch.setattr(FlatOptimizer, "step", lambda self, norm, scale: (used.append(scale), take(self, norm, scale))[1])
    policy = TinyPolicy()
    objective = replace(PPO_CLIP, reuse=Reuse(1, minibatches))
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(0.01), schedule="linear", warmup=0.5))
    logged: list[Any] = []
    run_loop(Repeated(policy, steps), learner, state(80), lambda _, metrics: logged.append(metrics["learning_rate"]) or False)
    assert used[:16] == pytest.approx([(index + 1) / 16 for index in range(16)])
    assert used[16:] == pytest.approx([1 - steps * (index // minibatches) / 40 for index in range(16)])
    assert logged == pytest.approx([0.01 * scale for scale in used[minibatches - 1 :: minibatches]]), "the last step's"


def test_linear_clip_falls_to_zero_with_the_budget_on_both_sides() -> None:
    """A quarter of the way through, the gradient is that of three quarters of both bounds; dual clip is no such bound."""
    policy = TinyPolicy(exact=False)
    rollout = moved(random_rollout(policy, 0, rows=20), 0)
    credit = assign_credit(rollout, PPO_CLIP)
    linear = replace(PPO_CLIP, reuse=Reuse(1, 1), trust_region=Clip(0.4, 0.8, 3.0, schedule="linear"))
    learner = Learner(copy.deepcopy(policy), linear, LearnerSettings(AdamSettings(0.0, max_grad_norm=None)))
    for steps, share in ((0, 1.0), (25, 0.75), (50, 0.5)):
        metrics = learner.update(rollout, credit, replace(state(), steps=steps))
        fixed = replace(PPO_CLIP, trust_region=Clip(0.4 * share, 0.8 * share, 3.0))
        near(learner.optimizers["policy"].gradients, gradient_of(policy, rollout, credit, fixed))
        low, high = 1 - 0.4 * share, 1 + 0.8 * share
        ratio = (policy(rollout.inputs, rollout.actions).log_probs - rollout.old_log_probs).exp()[rollout.mask]
        outside = ((ratio < low) | (ratio > high)).double().mean()
        assert metrics["ratio_outside"] == pytest.approx(float(outside))


# ---- the critic ---------------------------------------------------------------------------------------------------------


def critic_and_policy(policy: TinyPolicy) -> tuple[Tensor, Tensor]:
    own = {id(p) for p in policy.critic_parameters()}
    critic = torch.cat([p.detach().flatten() for p in policy.parameters() if id(p) in own])
    return critic, torch.cat([p.detach().flatten() for p in policy.parameters() if id(p) not in own])


def test_the_value_loss_moves_the_critic_and_no_parameter_of_the_policy() -> None:
    """With advantages of zero only the critic has anything to learn."""
    for critic_adam in (None, ADAM):
        policy = TinyPolicy()
        learner = Learner(policy, A2C, LearnerSettings(ADAM, critic_adam))
        rollout = random_rollout(policy, 0)
        critic, rest = critic_and_policy(policy)
        update(learner, rollout, advantages=torch.zeros_like(rollout.rewards), returns=rollout.values + 3)
        after = critic_and_policy(policy)
        assert torch.equal(after[1], rest)
        assert not torch.equal(after[0], critic)


def test_a_separate_critic_has_its_own_learning_rate() -> None:
    policy = TinyPolicy()
    critic, rest = critic_and_policy(policy)
    learner = Learner(policy, A2C, LearnerSettings(AdamSettings(0.003), AdamSettings(0.02)))
    update(learner, random_rollout(policy, 0))
    after = critic_and_policy(policy)
    # Adam's first step is about the learning rate in every coordinate.
    assert float((after[0] - critic).abs().max()) == pytest.approx(0.02, rel=0.05)
    assert float((after[1] - rest).abs().max()) == pytest.approx(0.003, rel=0.05)


def test_a_separate_critic_has_its_own_gradient_clip() -> None:
    """However large the critic's error, the policy's step is what it would be without."""
    policy = TinyPolicy()
    rollout = random_rollout(policy, 0)
    advantages = assign_credit(rollout, A2C).advantages
    results = []
    for error in (1.0, 1000.0):
        learner = Learner(
            copy.deepcopy(policy),
            A2C,
            LearnerSettings(AdamSettings(0.01, max_grad_norm=0.05), AdamSettings(0.01, max_grad_norm=0.1)),
        )
        update(learner, rollout, advantages=advantages, returns=rollout.values + error)
        results.append({name: optimizer.gradients.clone() for name, optimizer in learner.optimizers.items()})
    assert torch.equal(results[0]["policy"], results[1]["policy"])
    assert float(results[0]["policy"].norm()) == pytest.approx(0.05, rel=1e-3)
    assert float(results[1]["critic"].norm()) == pytest.approx(0.1, rel=1e-3)
    assert not torch.equal(results[0]["critic"], results[1]["critic"])


def test_value_clip_stops_a_critic_that_has_moved_far_enough_towards_its_target() -> None:
    """V moved 1 since the rollout with ε = 0.2. On towards the target: no gradient. Back: the whole one."""
    policy = TinyPolicy()
    rollout = random_rollout(policy, 0)
    nothing = torch.zeros_like(rollout.rewards)
    plain, clipped = (replace(A2C, value_clip=clip) for clip in (None, 0.2))
    moved_by_one = replace(rollout, values=rollout.values - 1)
    for target, free in ((5.0, False), (-5.0, True)):
        credit = Credit(nothing, rollout.values + target)
        here = gradient_of(policy, moved_by_one, credit, clipped)
        expected = gradient_of(policy, moved_by_one, credit, plain)
        assert expected.norm() > 0.1
        assert torch.equal(here, expected if free else torch.zeros_like(expected))


def test_the_value_loss_is_weighted_by_its_coefficient_without_a_half() -> None:
    """c_v · mean (V − R̂)²: an error of 2 everywhere costs 4."""
    policy = TinyPolicy()
    rollout = random_rollout(policy, 0)
    credit = Credit(torch.zeros_like(rollout.rewards), rollout.values + 2)
    one, half = (gradient_of(policy, rollout, credit, replace(A2C, value_coefficient=c)) for c in (1.0, 0.5))
    near(one, 2 * half)
    assert update(Learner(policy, A2C, LearnerSettings(ADAM)), rollout, **vars(credit))["value_loss"] == pytest.approx(4.0)


# ---- the other switches -------------------------------------------------------------------------------------------------


def test_the_entropy_bonus_raises_entropy() -> None:
    for coefficient, rises in ((0.1, True), (0.0, False)):
        policy = TinyPolicy(critic=False)
        rollout = random_rollout(policy, 0)
        learner = Learner(policy, replace(REINFORCE, entropy_coefficient=coefficient), LearnerSettings(ADAM))
        nothing = torch.zeros_like(rollout.rewards)
        entropies = [update(learner, random_rollout(policy, 0), advantages=nothing)["entropy"] for _ in range(5)]
        differences = torch.tensor(entropies).diff()
        assert bool((differences > 0).all()) == rises
        assert rises or (differences == 0).all()


@pytest.mark.parametrize(
    ("clip", "ratio", "advantage", "flows"),
    [
        (Clip(0.2), 1.25, 1.0, False),
        (Clip(0.2, clip_high=0.3), 1.25, 1.0, True),
        (Clip(0.3, clip_high=0.2), 0.75, -1.0, True),
        (Clip(1.0), 1.95, 1.0, True),  # ε = 1: no bound below
        (Clip(0.2, dual_clip=3.0), 5.0, -1.0, False),
    ],
)
def test_the_gradient_is_zero_exactly_where_the_clip_is_active(clip: Clip, ratio: float, advantage: float, flows: bool) -> None:
    """The quadrants of SPEC section 3 through the whole learner, with clip-higher and dual clip; and what is logged."""
    policy = TinyPolicy(critic=False, exact=False)
    rollout = random_rollout(policy, 0, holes=False)
    old = rollout.old_log_probs - torch.tensor(ratio).double().log()
    rollout = replace(rollout, old_log_probs=old)
    credit = Credit(torch.full_like(old, advantage), torch.zeros_like(old))
    objective = Objective(reuse=Reuse(1, 1), trust_region=clip)
    gradient = gradient_of(policy, rollout, credit, objective)
    free = gradient_of(policy, rollout, credit, replace(objective, trust_region=None))
    near(gradient, free if flows else torch.zeros_like(free))
    assert free.norm() > 0.01
    metrics = Learner(policy, objective, LearnerSettings(ADAM)).update(rollout, credit, state())
    high = clip.clip if clip.clip_high is None else clip.clip_high
    assert metrics["clip_active"] == float(not flows)
    assert metrics["ratio_outside"] == float(not 1 - clip.clip <= ratio <= 1 + high)


class Table(Policy):
    """The same softmax at every state."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities, dtype=DOUBLE).log())

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        log_probs = self.logits.log_softmax(-1)
        return Evaluation(log_probs[actions], torch.zeros(actions.shape, dtype=DOUBLE))


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize(
    ("estimator", "old", "target"),
    [
        ("k1", [1, 1, 2, 4], lambda now, reference: 0 * now.sum()),
        ("k2", [1, 1, 2, 4], kl),
        ("k3", [1, 1, 2, 4], lambda now, reference: kl(reference, now)),
        ("ratio_k3", [3, 3, 1, 1], kl),
    ],
)
def test_what_each_estimator_of_the_reference_kl_pulls_towards(
    estimator: str, old: list[int], target: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Each action as often as θ_old would take it in eight draws, so that the mean over samples is the expectation.

    From θ_old's own samples k2 has the gradient of KL(π_θ‖π_ref), k3 that of KL(π_ref‖π_θ), k1 none; ρ·k3 is right also when
    θ has moved on.
    """
    policy = Table([0.125, 0.125, 0.25, 0.5])
    before = torch.tensor([count / 8 for count in old], dtype=DOUBLE).log()
    reference = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=DOUBLE).log()
    actions = torch.tensor([[a for a, count in enumerate(old) for _ in range(count)]])
    rollout = replace(
        random_rollout(TinyPolicy(), 0, rows=1, steps=8, holes=False),
        actions=actions,
        old_log_probs=before[actions],
        ref_log_probs=reference[actions],
        old_distribution=None,
    )
    objective = Objective(reuse=Reuse(1, 1), reference_coefficient=0.5, reference_estimator=estimator)  # type: ignore[arg-type]
    nothing = torch.zeros(1, 8, dtype=DOUBLE)
    gradient = gradient_of(policy, rollout, Credit(nothing, nothing), objective)
    (expected,) = torch.autograd.grad(0.5 * target(policy.logits.log_softmax(-1), reference), [policy.logits])
    near(gradient, expected)


def test_advantages_are_normalised_once_over_the_batch_or_over_each_minibatch() -> None:
    """The one is what comes of advantages that were normalised by hand before, the other is not."""
    policy = TinyPolicy(critic=False)
    rollout = random_rollout(policy, 0)
    kept = rollout.rewards[rollout.mask]
    by_hand = (rollout.rewards - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt()
    expected = trained(policy, rollout, None, by_hand)
    near(trained(policy, rollout, "batch", rollout.rewards), expected)
    assert not torch.allclose(trained(policy, rollout, "minibatch", rollout.rewards), expected, rtol=0, atol=1e-4)


def trained(policy: TinyPolicy, rollout: Rollout, scheme: Any, advantages: Tensor) -> Tensor:
    """Parameters after two epochs of three minibatches."""
    learner = Learner(copy.deepcopy(policy), Objective(reuse=Reuse(2, 3), normalise_advantages=scheme), LearnerSettings(ADAM))
    update(learner, rollout, advantages=advantages)
    return parameters(learner.policy)


# ---- early stop ---------------------------------------------------------------------------------------------------------

STOPPING = replace(PPO_UNCLIPPED, reuse=Reuse(epochs=10, minibatches=2), target_kl=0.01)


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_epochs_stop_when_the_kl_has_passed_one_and_a_half_times_its_target(estimator: str) -> None:
    policy, at = TinyPolicy(), state()
    learner = Learner(policy, replace(STOPPING, kl_estimator=estimator), LearnerSettings(AdamSettings(0.01)))
    rollout = random_rollout(policy, 0, rows=8)
    old = copy.deepcopy(policy)
    metrics = update(learner, rollout, at)
    assert metrics["stopped_early"] == 1.0
    assert 2 <= at.updates < 20
    assert metrics["epochs"] == at.updates // 2
    with torch.no_grad():
        before, after = (p(rollout.inputs, rollout.actions).distribution for p in (old, policy))
    assert 0.005 < float(before.kl(after)[rollout.mask].mean()) < 0.05, "the step that would go further was not taken"


def test_epochs_go_on_when_the_policy_does_not_move() -> None:
    policy, at = TinyPolicy(), state()
    learner = Learner(policy, replace(STOPPING, target_kl=1e-9), LearnerSettings(AdamSettings(0.0)))
    metrics = update(learner, random_rollout(policy, 0), at)
    assert (metrics["stopped_early"], metrics["epochs"], at.updates) == (0.0, 10.0, 20)


def test_the_kl_is_measured_from_the_old_policy_to_the_new() -> None:
    """Exactly, and by k3 in the mean over all actions; mean(new − old) would have the other sign."""
    policy, other = TinyPolicy(0, exact=False), TinyPolicy(1)
    rollout = moved(random_rollout(other, 0, holes=False), 0, size=0.0)
    metrics = update(
        Learner(policy, replace(PPO_UNCLIPPED, reuse=Reuse(1, 1), kl_estimator="exact"), LearnerSettings(ADAM)), rollout
    )
    fresh = TinyPolicy(0)
    with torch.no_grad():
        old, new = (p(rollout.inputs, rollout.actions) for p in (other, fresh))
    logs = [x.distribution.logits.log_softmax(-1) for x in (old, new)]
    assert metrics["kl_exact"] == pytest.approx(float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()))
    log_ratio = new.log_probs - old.log_probs
    assert metrics["kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()))


def test_an_exact_kl_without_a_distribution_is_rejected_with_the_remedy() -> None:
    policy = TinyPolicy()
    learner = Learner(policy, replace(STOPPING, kl_estimator="exact"), LearnerSettings(ADAM))
    with pytest.raises(SurefootError, match=r"kl_estimator='exact'.*set k3"):
        update(learner, replace(random_rollout(policy, 0), old_distribution=None))


# ---- the ratio at the start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("objective", "unit"), [(A2C, "step"), (PPO_CLIP, "row")], ids=["A2C", "PPO_CLIP"])
def test_the_ratio_at_the_start_is_one(objective: Objective, unit: str) -> None:
    policy = TinyPolicy(memory=unit == "row")
    metrics = update(Learner(policy, objective, LearnerSettings(AdamSettings(0.05))), random_rollout(policy, 0, unit=unit))
    assert metrics["ratio_at_start"] == pytest.approx(1.0, abs=1e-12)
    if objective.reuse:
        assert metrics["ratio_max"] > 1.01 > 0.99 > metrics["ratio_min"], "and then the policy moves"  # type: ignore[operator]


@pytest.mark.parametrize("gap", [-1e-3, 1e-3])
def test_one_action_with_a_wrong_log_probability_is_rejected(gap: float) -> None:
    policy = TinyPolicy()
    rollout = random_rollout(policy, 0)
    one = torch.zeros_like(rollout.mask)
    one.view(-1)[rollout.mask.flatten().nonzero()[3]] = True
    off = replace(rollout, old_log_probs=rollout.old_log_probs + gap * one)
    with pytest.raises(SurefootError, match="ratio_at_start"):
        update(Learner(policy, A2C, LearnerSettings(ADAM)), off)


def test_what_rounding_may_explain_grows_with_the_largest_kept_log_probability() -> None:
    rollout = random_rollout(TinyPolicy(), 0)
    old = torch.where(rollout.mask, -100.0, -1e9).float()
    assert rounding(replace(rollout, old_log_probs=old)) == pytest.approx(8 * 2**-23 * 100)


def test_a_policy_that_rounds_may_disagree_with_its_past() -> None:
    policy = TinyPolicy(exact=False)
    metrics = update(Learner(policy, A2C, LearnerSettings(ADAM)), moved(random_rollout(policy, 0), 0))
    assert abs(metrics["ratio_at_start"] - 1) > 0.1  # type: ignore[operator]


def test_a_rollout_that_kept_its_graph_trains_as_one_without() -> None:
    """A collector that forgets ``no_grad`` would make ρ constant and the critic chase itself, silently."""
    policy = TinyPolicy()
    rollout = random_rollout(policy, 0)
    here = policy(rollout.inputs, rollout.actions)
    attached = replace(rollout, old_log_probs=here.log_probs, values=here.values)
    near(gradient(policy, attached, PPO_CLIP), gradient(policy, rollout, PPO_CLIP))


# ---- what is not finite -------------------------------------------------------------------------------------------------


def marks(learner: Learner) -> list[Tensor]:
    """Everything that an update may change."""
    moments = [tensor for tree in learner.state_dict().values() for tensor in tree.values()]
    return [tensor.clone() for tensor in (parameters(learner.policy), *moments)]


def breaks(name: str, value: float, rollout: Rollout) -> Rollout:
    """The rollout with one number of one tensor replaced at a kept step."""
    broken = getattr(rollout, name).clone()
    broken.view(-1)[rollout.mask.flatten().nonzero()[0]] = value
    return replace(rollout, **{name: broken})


@pytest.mark.parametrize(
    ("name", "value", "terms", "critic_adam"),
    [
        ("rewards", torch.inf, ["policy_loss", "value_loss"], None),
        ("rewards", torch.nan, ["policy_loss", "value_loss"], ADAM),
        ("inputs", torch.nan, ["policy_loss", "value_loss", "entropy"], None),
        ("ref_log_probs", -torch.inf, ["reference_loss"], ADAM),
    ],
)
def test_a_value_that_is_not_finite_is_named_and_changes_nothing(
    name: str, value: float, terms: list[str], critic_adam: AdamSettings | None
) -> None:
    policy, at = TinyPolicy(), state()
    objective = replace(A2C, reference_coefficient=0.1, reference_estimator="k1")
    learner = Learner(policy, objective, LearnerSettings(ADAM, critic_adam))
    update(learner, random_rollout(policy, 0), at)
    before = marks(learner)
    with pytest.raises(NotFiniteError, match=r"update 2: .*not finite; the step was not taken") as raised:
        update(learner, breaks(name, value, random_rollout(policy, 1)), at)
    assert all(term in str(raised.value) for term in terms)
    assert all(torch.equal(a, b) for a, b in zip(before, marks(learner), strict=True))
    assert at.updates == 1
    update(learner, random_rollout(policy, 1), at)
    assert at.updates == 2
    assert all(tensor.isfinite().all() for tensor in marks(learner))


def test_a_new_term_of_the_loss_that_is_not_finite_takes_no_step() -> None:
    class New:
        def add_gradient(self) -> dict[str, float]:
            return {"new_loss": float("nan")}

    policy = TinyPolicy()
    learner, before = Learner(policy, A2C, LearnerSettings(ADAM)), parameters(policy)
    learner.auxiliary_loss = New()
    with pytest.raises(NotFiniteError, match=r"update 1: new_loss not finite; the step was not taken"):
        update(learner, random_rollout(policy, 0))
    assert torch.equal(parameters(policy), before)


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_the_loss_is_the_sum_of_its_terms_by_their_coefficients(entropy: float) -> None:
    """So nothing in ``metrics`` is in the loss, and no term is left out of ``terms``."""
    objective = replace(PPO_PENALTY, entropy_coefficient=entropy, reference_coefficient=0.3, value_coefficient=0.7)
    policy = TinyPolicy()
    rollout = moved(random_rollout(policy, 0), 0)
    batch = rows_of(rollout, assign_credit(rollout, objective))
    evaluation = policy(batch.inputs, batch.actions)
    parts = loss(evaluation, batch, objective, denominator=global_count(batch, objective.aggregation), beta=0.5)
    weights = {"policy_loss": 1.0, "penalty_kl": 0.5, "value_loss": 0.7, "reference_loss": 0.3}
    if entropy:
        weights["entropy"] = -entropy
    assert set(parts.terms) == set(weights)
    assert {"kl", "ratio_outside"} <= set(parts.metrics)
    near(parts.total.detach(), torch.stack([weights[name] * x for name, x in parts.terms.items()]).sum())


def test_a_gradient_that_is_not_finite_behind_finite_losses_is_named() -> None:
    class Steep(TinyPolicy):
        def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
            evaluation = super().forward(inputs, actions, mask)
            return replace(evaluation, log_probs=evaluation.log_probs + (self.head.bias * 0).square().sum().sqrt())

    policy = Steep()
    rollout = random_rollout(policy, 0)
    before = parameters(policy)
    with pytest.raises(NotFiniteError, match=r"gradient norm .* with finite losses"):
        update(Learner(policy, A2C, LearnerSettings(ADAM)), rollout)
    assert torch.equal(parameters(policy), before)


def test_a_metric_that_is_not_finite_is_null_and_stops_nothing() -> None:
    """Entropy that a policy can't tell, without a coefficient on it; explained variance of constant returns."""

    class Vague(TinyPolicy):
        def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
            evaluation = super().forward(inputs, actions, mask)
            return replace(evaluation, entropy=torch.full_like(evaluation.entropy, torch.nan))

    policy, at = Vague(), state()
    rollout = random_rollout(policy, 0)
    metrics = update(Learner(policy, A2C, LearnerSettings(ADAM)), rollout, at, returns=torch.ones_like(rollout.rewards))
    assert at.updates == 1
    assert metrics["entropy"] is None
    assert metrics["explained_variance"] is None
    with pytest.raises(NotFiniteError, match="entropy"):
        update(Learner(policy, replace(A2C, entropy_coefficient=0.01), LearnerSettings(ADAM)), random_rollout(policy, 0), at)


# ---- the loop -----------------------------------------------------------------------------------------------------------


def good(rollout: Rollout) -> Rollout:
    return rollout


def bad(rollout: Rollout) -> Rollout:
    return breaks("rewards", torch.nan, rollout)


def unseen(rollout: Rollout) -> Rollout:
    raise NotFiniteError("observation 3 is nan")


def loop(
    script: list[Callable[[Rollout], Rollout]], total: int = 40, stop: int | None = None
) -> tuple[LearnerState, list[str]]:
    """A run of ten steps per iteration; its state and what was said of faults."""
    policy, at, messages = TinyPolicy(), state(total), []
    learner = Learner(policy, A2C, LearnerSettings(ADAM))
    run_loop(Repeated(policy, 10, script), learner, at, lambda s, _: s.iteration == stop, messages.append)
    return at, messages


def test_the_loop_runs_until_the_budget_is_spent() -> None:
    at, messages = loop([])
    assert (at.steps, at.iteration, at.updates, at.faults, messages) == (40, 4, 4, 0, [])


def test_the_loop_stops_if_the_callback_returns_true() -> None:
    at, _ = loop([], stop=2)
    assert (at.steps, at.iteration) == (20, 2)


def wild(rollout: Rollout) -> Rollout:
    return breaks("inputs", torch.nan, rollout)


@pytest.mark.parametrize("fault", [bad, unseen, wild])
def test_three_consecutive_faults_end_the_run(fault: Callable[[Rollout], Rollout]) -> None:
    with pytest.raises(SurefootError, match=r"(not finite|nan).*3 consecutive updates were skipped") as raised:
        loop([good, fault, fault, fault, good])
    assert not isinstance(raised.value, NotFiniteError)
    assert ("learning rate" in str(raised.value)) is (fault is wild), "no step size mends a reward"


def test_a_good_update_resets_the_count_of_faults() -> None:
    at, messages = loop([bad, unseen, good, unseen, bad, good])
    assert (at.updates, at.faults, len(messages)) == (4, 0, 4)


def test_the_count_of_faults_survives_a_checkpoint() -> None:
    """A run that resumes in the middle of a row of faults does not begin to count anew."""
    at = state()
    at.faults = 2
    other = state()
    other.load_state_dict(at.state_dict())
    policy = TinyPolicy()
    with pytest.raises(SurefootError, match="3 consecutive updates"):
        run_loop(Repeated(policy, 10, [bad]), Learner(policy, A2C, LearnerSettings(ADAM)), other, lambda s, m: False)


# ---- the state ----------------------------------------------------------------------------------------------------------


def test_learner_state_continues_its_streams_and_counts() -> None:
    at = state()
    at.steps, at.iteration, at.updates, at.faults = 30, 3, 12, 1
    for stream in at.generators.values():
        torch.rand(7, generator=stream)
    saved = copy.deepcopy(at.state_dict())
    drawn = {name: torch.rand(5, generator=stream) for name, stream in at.generators.items()}
    other = LearnerState.seeded(99, 100)
    other.load_state_dict(saved)
    assert (other.steps, other.iteration, other.updates, other.faults) == (30, 3, 12, 1)
    for name, stream in other.generators.items():
        assert torch.equal(torch.rand(5, generator=stream), drawn[name])


def test_a_run_can_be_extended() -> None:
    """The budget is the new state's own."""
    other = state(200)
    other.load_state_dict(replace(state(100), steps=100).state_dict())
    assert (other.total_steps, other.steps, other.remaining) == (200, 100, 0.5)


# ---- the loss itself ----------------------------------------------------------------------------------------------------


def test_the_parts_of_a_split_batch_add_up_to_the_whole() -> None:
    """Loss and terms alike, with the whole batch's count as denominator."""
    policy = TinyPolicy(memory=True)
    rollout = moved(random_rollout(policy, 0, rows=5, unit="row"), 0)
    objective = replace(PPO_CLIP, entropy_coefficient=0.1, reference_coefficient=0.1, kl_estimator="exact")
    batch = rows_of(rollout, assign_credit(rollout, objective))
    denominator = global_count(batch, objective.aggregation)

    def terms(part: Batch) -> dict[str, Tensor]:
        parts = loss(policy(part.inputs, part.actions), part, objective, denominator=denominator)
        return {"total": parts.total.detach(), **parts.terms, **parts.metrics}

    parts = [Batch(**{name: cut(x, slice(i, i + 2)) for name, x in vars(batch).items()}) for i in (0, 2, 4)]
    for name, whole in terms(batch).items():
        near(sum(terms(part)[name] for part in parts), whole)  # type: ignore[arg-type]


def cut(tree: Any, rows: slice) -> Any:
    if isinstance(tree, Tensor):
        return tree[rows]
    return tree if tree is None else replace(tree, **{name: cut(x, rows) for name, x in vars(tree).items()})
