"""The KL penalty: its gradient, where it is zero, and the updates of β."""

import copy
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import PPO_PENALTY, PPO_PENALTY_ADAPTIVE, PPO_UNCLIPPED, Objective, Penalty, Reuse
from surefoot.core.credit import assign_credit
from surefoot.core.learner import BETA_RANGE, Learner, LearnerSettings
from surefoot.core.minibatches import rows_of, with_penalised
from surefoot.core.objective import Batch, old_kl
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import Evaluation, LearnerState, Metrics, Rollout, map_tensors
from surefoot.core.traces import Recorder

from .worlds import TinyPolicy, gradient, gradient_of, moved, random_rollout

EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "sampled"])
UNITS = pytest.mark.parametrize(("unit", "exact"), [("step", True), ("row", False)])
GOLDEN = Path(__file__).parent.parent / "golden" / "golden.json"


def same(a: Tensor, b: Tensor) -> None:
    assert a.abs().max() > 1e-3, "a gradient of zero would prove nothing"
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def priced(beta: float, **changes: Any) -> Objective:
    return replace(PPO_PENALTY, trust_region=Penalty(beta), **changes)


def sampled(rollout: Rollout) -> Rollout:
    """The same where no distribution is known, as on text."""
    return replace(rollout, old_distribution=None)


def elsewhere(seed: int, unit: str = "step") -> tuple[TinyPolicy, Rollout]:
    """A policy, and experience of another one: ratios and both distributions differ everywhere."""
    policy, other = (TinyPolicy(s, memory=unit == "row") for s in (seed, seed + 50))
    return policy, moved(random_rollout(other, seed, rows=6, unit=unit), seed, size=0.0)


# ---- gradients ----------------------------------------------------------------------------------------------------------


@EXACT
def test_a_penalty_of_weight_zero_has_the_unclipped_gradient(exact: bool) -> None:
    policy, rollout = elsewhere(0)
    rollout = rollout if exact else sampled(rollout)
    same(gradient(policy, rollout, priced(0.0)), gradient(policy, rollout, PPO_UNCLIPPED))
    gap = gradient(policy, rollout, priced(1.0)) - gradient(policy, rollout, PPO_UNCLIPPED)
    assert gap.abs().max() > 1e-3, "and of another weight it has not"


@UNITS
def test_at_the_old_policy_a_penalty_of_any_weight_has_the_unclipped_gradient(unit: str, exact: bool) -> None:
    """There the KL is 0, its smallest."""
    policy = TinyPolicy(1, memory=unit == "row")
    rollout = random_rollout(policy, 1, unit=unit)
    rollout = rollout if exact else sampled(rollout)
    same(gradient(policy, rollout, priced(1000.0)), gradient(policy, rollout, PPO_UNCLIPPED))


def written_out(policy: TinyPolicy, rollout: Rollout, exact: bool) -> Tensor:
    """The gradient of the mean KL over kept entries: from every action's probability, or from the samples."""
    here = policy(rollout.inputs, rollout.actions)
    log_new = here.distribution.logits.log_softmax(-1)
    if exact:
        log_old = rollout.old_distribution.logits.log_softmax(-1)
        kl = (log_old.exp() * (log_old - log_new)).sum(-1)
    else:
        ratio = (here.log_probs - rollout.old_log_probs).exp()
        kl = ratio - 1 - ratio.log()
    grads = torch.autograd.grad(kl[rollout.mask].mean(), list(policy.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


@EXACT
@pytest.mark.parametrize("unit", ["step", "row"])
def test_the_penalty_adds_beta_times_the_gradient_of_the_kl_written_out(unit: str, exact: bool) -> None:
    policy, rollout = elsewhere(2, unit)
    rollout = rollout if exact else sampled(rollout)
    credit = assign_credit(rollout, PPO_UNCLIPPED)
    plain, penalised = (gradient_of(policy, rollout, credit, o) for o in (PPO_UNCLIPPED, priced(2.5)))
    same(penalised - plain, 2.5 * written_out(policy, rollout, exact))


def test_the_sampled_penalty_has_the_exact_gradient_in_expectation_also_away_from_the_old_policy() -> None:
    """Every action of every state once, weighted by π_old: no samples, so no noise."""
    policy, rollout = elsewhere(3)
    old = rollout.old_distribution.logits.log_softmax(-1)
    total = torch.zeros(())
    for action in range(old.shape[-1]):
        here = policy(rollout.inputs, torch.full_like(rollout.actions, action))
        batch = Batch(None, rollout.actions, None, old[..., action], *[rollout.values] * 3)
        total = total + (old[..., action].exp() * old_kl(replace(here, distribution=None), batch))[rollout.mask].mean()
    gradient = torch.autograd.grad(total, list(policy.parameters()), allow_unused=True, materialize_grads=True)
    same(torch.cat([g.flatten() for g in gradient]), written_out(policy, rollout, exact=True))


def test_masked_entries_of_the_old_distribution_may_be_nan() -> None:
    policy, rollout = elsewhere(1, "row")
    assert not rollout.mask.all()
    nan = map_tensors(lambda x: torch.where(rollout.mask.unsqueeze(-1), x, torch.nan), rollout.old_distribution)
    expected = gradient(policy, rollout, priced(2.0))
    same(gradient(policy, replace(rollout, old_distribution=nan), priced(2.0)), expected)


# ---- a penalty on some samples (KL-Cov) ---------------------------------------------------------------------------------


def on_share(fraction: float, beta: float = 2.5, **changes: Any) -> Objective:
    return replace(PPO_PENALTY, trust_region=Penalty(beta, fraction=fraction), **changes)


@UNITS
def test_a_penalty_on_all_samples_is_the_penalty_and_one_on_none_is_no_penalty_to_the_last_bit(unit: str, exact: bool) -> None:
    policy, rollout = elsewhere(1, unit)
    rollout = rollout if exact else sampled(rollout)
    assert torch.equal(gradient(policy, rollout, on_share(1.0)), gradient(policy, rollout, priced(2.5)))
    assert torch.equal(gradient(policy, rollout, on_share(0.0)), gradient(policy, rollout, PPO_UNCLIPPED))
    some = gradient(policy, rollout, on_share(0.3))
    for limit in (priced(2.5), PPO_UNCLIPPED):
        assert (some - gradient(policy, rollout, limit)).abs().max() > 1e-4


def test_the_samples_are_chosen_once_over_the_whole_batch_and_before_a_normalisation() -> None:
    """Three epochs of minibatches, in another order each, penalise the same samples."""
    policy = TinyPolicy(5, exact=False)
    objective = on_share(0.2, reuse=Reuse(3, 4), normalise_advantages="minibatch")
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(0.02)))
    learner.recorder = Recorder(every=1, rows=6)
    rollout, state = random_rollout(policy, 3, rows=6), LearnerState.seeded(0, 1000)
    credit = assign_credit(rollout, objective)
    batch = with_penalised(rows_of(rollout, credit), 0.2)
    assert batch.penalised is not None
    assert int(batch.penalised.sum()) == int(0.2 * int(rollout.mask.sum()))
    learner.update(rollout, credit, state)
    trace = learner.recorder.take(state)
    assert trace is not None
    chosen = torch.zeros_like(rollout.mask)
    chosen[rollout.mask] = batch.penalised
    for row in trace.rows:
        assert row.visits.penalty_kl is not None
        steps = slice(row.start, row.start + len(row.mask))
        for visit in row.visits.penalty_kl[1:]:  # θ has moved
            assert torch.equal(visit > 0, chosen[row.row, steps])


def test_beta_adapts_to_the_kl_of_all_samples_also_where_it_weighs_some() -> None:
    objective = replace(ADAPTIVE, trust_region=Penalty(1.0, target=0.01, fraction=0.1))
    metrics, moves, _ = run(objective, 0.025, 4)
    assert [of["kl_after"] for of in metrics] == pytest.approx(moves)
    assert all(of["penalty_kl"] < of["kl_after"] for of in metrics)  # type: ignore[operator]


# ---- β ------------------------------------------------------------------------------------------------------------------


def run(
    objective: Objective, learning_rate: float, batches: int, state: LearnerState | None = None, **settings: Any
) -> tuple[list[Metrics], list[float], LearnerState]:
    """Updates on fresh batches: their metrics, and the mean KL from old to new policy, computed here from probabilities."""
    policy, metrics, moves = TinyPolicy(5), [], []
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(learning_rate), **settings))
    state = state or LearnerState.seeded(0, 1000)
    for number in range(batches):
        rollout = random_rollout(policy, number, rows=6)
        before = copy.deepcopy(policy)
        metrics.append(learner.update(rollout, assign_credit(rollout, objective), state))
        with torch.no_grad():
            old, new = (p(rollout.inputs, rollout.actions).distribution.logits.log_softmax(-1) for p in (before, policy))
        moves.append(float((old.exp() * (old - new)).sum(-1)[rollout.mask].mean()))
    return metrics, moves, state


def rule(beta: float, kl: float, target: float) -> float:
    """The paper's, once more."""
    if kl < target / 1.5:
        return beta / 2
    return beta * 2 if kl > 1.5 * target else beta


ADAPTIVE = replace(PPO_PENALTY_ADAPTIVE, reuse=Reuse(epochs=2, minibatches=2))


def test_beta_moves_once_per_batch_by_the_kl_over_the_whole_of_it() -> None:
    messages, moves, state = run(ADAPTIVE, 0.025, 16)
    beta = 1.0
    for metrics, kl in zip(messages, moves, strict=True):
        assert metrics["kl_after"] == pytest.approx(kl, rel=1e-9)
        assert metrics["beta"] == beta, "what is told is the weight that was used"
        beta = rule(beta, kl, 0.01)
    assert state.coefficients == {"beta": beta}
    steps = [b["beta"] / a["beta"] for a, b in pairwise(messages)]  # type: ignore[operator]
    assert set(steps) == {0.5, 1.0, 2.0}, "this example shows all three cases"


def test_a_fixed_beta_is_that_of_the_recipe_also_after_a_resume() -> None:
    state = LearnerState.seeded(0, 1000)
    state.coefficients["beta"] = 7.0
    messages, moves, _ = run(priced(3.0, reuse=Reuse(4, 3)), 0.05, 4, state)
    assert [metrics["beta"] for metrics in messages] == [3.0] * 4
    assert [metrics["kl_after"] for metrics in messages] == pytest.approx(moves)
    assert state.coefficients == {"beta": 7.0}


def test_beta_adapts_after_an_early_stop_too() -> None:
    stopping = replace(ADAPTIVE, reuse=Reuse(4, 1), target_kl=0.001, trust_region=Penalty(3.0, target=1e-4))
    messages, moves, state = run(stopping, 0.05, 3)
    assert all(metrics["stopped_early"] for metrics in messages)
    assert min(moves) > 1.5e-4
    assert [metrics["beta"] for metrics in messages] == [3.0, 6.0, 12.0], "it starts at the recipe's"
    assert state.coefficients["beta"] == 24.0


def test_micro_batches_do_not_change_the_kl_that_beta_follows() -> None:
    whole, parts = (run(ADAPTIVE, 0.025, 3, micro_batch=size)[0] for size in (None, 9))
    for a, b in zip(whole, parts, strict=True):
        assert a["kl_after"] == pytest.approx(b["kl_after"], rel=1e-9)
        assert a["beta"] == b["beta"]


class FixedKL:
    """A distribution with a fixed KL."""

    def __init__(self, like: Tensor, value: float) -> None:
        self.like, self.value = like, value

    def kl(self, other: "FixedKL") -> Tensor:
        return torch.zeros_like(self.like) + other.value


class FixedKLPolicy(TinyPolicy):
    """A policy with a fixed KL to any other."""

    kl = 0.0

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        evaluation = super().forward(inputs, actions, mask)
        return replace(evaluation, distribution=FixedKL(evaluation.log_probs, self.kl))


def betas(kls: list[float], penalty: Penalty) -> list[float]:
    """β after each batch, for fixed values of the KL."""
    policy, state, results = FixedKLPolicy(0), LearnerState.seeded(0, 1000), []
    objective = replace(ADAPTIVE, reuse=Reuse(1, 1), trust_region=penalty)
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(0.0)))
    rollout = random_rollout(policy, 0, holes=False)
    for kl in kls:
        policy.kl = kl
        metrics = learner.update(rollout, assign_credit(rollout, objective), state)
        assert metrics["kl_after"] == pytest.approx(kl)
        results.append(state.coefficients["beta"])
    return results


def test_beta_follows_the_golden_case() -> None:
    (case,) = (case for case in json.loads(GOLDEN.read_text("utf-8")) if case["name"] == "ppo_penalty_adaptive_beta")
    x = case["inputs"]
    actual = [betas([kl], Penalty(x["beta"], x["d_targ"]))[0] for kl in x["d"]]
    assert actual == pytest.approx(case["expected"]["beta_next"], abs=case["tolerance"])


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.5), (1.0, 2.0)])
def test_beta_stays_within_its_range(kl: float, factor: float) -> None:
    actual = betas([kl] * 24, Penalty(3.0, target=0.01))
    assert actual == [3.0 * factor ** min(batch, 20) for batch in range(1, 25)]
    assert BETA_RANGE == 2**20


def test_the_penalised_kl_is_a_metric() -> None:
    """Over the minibatches on the way, so less than at the end; and 0 in the first."""
    metrics, _, _ = run(priced(1.0, reuse=Reuse(4, 1)), 0.01, 1)
    assert 0 < metrics[0]["penalty_kl"] < metrics[0]["kl_after"]  # type: ignore[operator]
    assert run(priced(1.0, reuse=Reuse(1, 1)), 0.01, 1)[0][0]["penalty_kl"] == pytest.approx(0, abs=1e-12)


# ---- the switch ---------------------------------------------------------------------------------------------------------


def test_the_penalties_are_one_switch_away_from_the_unclipped() -> None:
    for objective in (PPO_PENALTY, PPO_PENALTY_ADAPTIVE):
        assert replace(objective, trust_region=None) == PPO_UNCLIPPED
    assert (PPO_PENALTY.penalty, PPO_PENALTY_ADAPTIVE.penalty) == (Penalty(1.0), Penalty(1.0, target=0.01))
    assert PPO_PENALTY.clip is None
