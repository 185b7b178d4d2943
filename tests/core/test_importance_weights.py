"""Importance weights for a sampler that is not the policy: exact without a cap, and no effect without a mismatch."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.core.algorithms import GRPO, PPO_CLIP, REINFORCE, REINFORCE_BASELINE, Objective, Reuse
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.core.traces import Recorder
from surefoot.functional import importance_weights, sampler_ratio
from surefoot.functional.surrogates import ImportanceMode

from .test_groups import same, world
from .worlds import gradient

laws = settings(settings.get_profile("core"))
MODES: tuple[ImportanceMode, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
DOUBLE = torch.float64
CLIPPED = replace(PPO_CLIP, reuse=Reuse(1, 1), baseline=None, gae_lambda=1.0)

# ---- the weights --------------------------------------------------------------------------------------------------------

tables = st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=3, max_size=3)


def log_probs_of(table: list[list[float]]) -> Tensor:
    """log π of both tokens of every response of two tokens, of a vocabulary of three; the first token is the context of the
    second.   [9, 2]
    """
    log_policy = torch.tensor(table, dtype=DOUBLE).log_softmax(-1)
    first, second = torch.tensor(list(product(range(3), repeat=2))).T
    return torch.stack([log_policy[0, first], log_policy[first, second]], -1)


@laws
@given(tables, tables, st.lists(st.floats(-2, 2), min_size=9, max_size=9))
def test_without_a_bound_the_mean_over_the_samplers_responses_is_the_policys(
    old_table: list[list[float]], sampler_table: list[list[float]], worth: list[float]
) -> None:
    old, sampler, value = log_probs_of(old_table), log_probs_of(sampler_table), torch.tensor(worth, dtype=DOUBLE)
    for mode in MODES:
        weights = importance_weights(old, sampler, torch.inf, mode)
        if mode.startswith("sequence"):
            means = [(sampler.sum(-1).exp() * weights[:, 0] * value).sum(), (old.sum(-1).exp() * value).sum()]
        else:  # of the second token, given the first
            means = [(p.exp() * value).view(3, 3).sum(-1) for p in (sampler[:, 1] + weights[:, 1].log(), old[:, 1])]
        torch.testing.assert_close(*means, atol=1e-9, rtol=0)


@laws
@given(tables, tables, st.floats(1, 4))
def test_a_cap_bounds_every_weight_and_changes_none_below_it(
    old_table: list[list[float]], sampler_table: list[list[float]], cap: float
) -> None:
    old, sampler = log_probs_of(old_table), log_probs_of(sampler_table)
    for mode in MODES:
        free, weights = (importance_weights(old, sampler, bound, mode) for bound in (torch.inf, cap))
        assert torch.equal(free, sampler_ratio(old, sampler, sequence=mode.startswith("sequence")))
        below = free <= cap
        assert torch.equal(weights[below], free[below])
        assert (weights[~below] == (cap if mode.endswith("truncate") else 0.0)).all()


def test_a_response_much_likelier_under_the_policy_has_a_finite_weight() -> None:
    old, sampler = torch.full((1, 400), -0.1), torch.full((1, 400), -3.0)
    assert importance_weights(old, sampler, 2.0, "sequence_truncate").eq(2).all()
    assert importance_weights(old, sampler, 2.0, "sequence_mask").eq(0).all()


# ---- the objective ------------------------------------------------------------------------------------------------------


def with_sampler(r: Rollout) -> Rollout:
    """The rollout with the log-probabilities of a sampler that is not the policy; NaN where masked."""
    assert r.old_log_probs is not None
    noise = 0.3 * torch.randn(r.mask.shape, generator=torch.Generator().manual_seed(5), dtype=r.old_log_probs.dtype)
    return replace(r, behaviour_log_probs=torch.where(r.mask, r.old_log_probs - noise, torch.nan))


def ratios(r: Rollout) -> Tensor:
    assert r.old_log_probs is not None
    assert r.behaviour_log_probs is not None
    return sampler_ratio(r.old_log_probs, r.behaviour_log_probs, r.mask)


def weights_of(r: Rollout, cap: float, mode: ImportanceMode) -> Tensor:
    assert r.old_log_probs is not None
    assert r.behaviour_log_probs is not None
    return importance_weights(r.old_log_probs, r.behaviour_log_probs, cap, mode, r.mask)


@pytest.mark.parametrize(
    ("objective", "mode"), list(zip((REINFORCE, REINFORCE_BASELINE, CLIPPED, GRPO), MODES, strict=True)), ids=MODES
)
def test_samples_of_the_policy_itself_change_nothing_bit_for_bit(objective: Objective, mode: ImportanceMode) -> None:
    net, r = world(1)
    corrected = replace(objective, importance_cap=2.0, importance_mode=mode)
    plain = gradient(net, r, objective)
    assert torch.equal(gradient(net, r, corrected), plain), "without log-probabilities of the sampler"
    assert torch.equal(gradient(net, replace(r, behaviour_log_probs=r.old_log_probs), corrected), plain), "with its own"
    assert torch.equal(gradient(net, with_sampler(r), objective), plain), "without a cap nobody reads them"
    assert not torch.equal(gradient(net, with_sampler(r), corrected), plain)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_advantages_times_the_weights(mode: ImportanceMode) -> None:
    net, r = world(2)
    r, objective = with_sampler(r), replace(REINFORCE, gamma=1.0)
    credit, weights = assign_credit(r, objective), weights_of(r, 1.2, mode)
    assert (weights[r.mask] != ratios(r)[r.mask]).any()
    by_hand = replace(credit, advantages=torch.where(r.mask, credit.advantages * weights, credit.advantages))
    corrected = replace(objective, importance_cap=1.2, importance_mode=mode)
    learners = [Learner(copy.deepcopy(net), each, LearnerSettings(AdamSettings(1e-3))) for each in (corrected, objective)]
    for learner, each in zip(learners, (credit, by_hand), strict=True):
        learner.update(r, each, LearnerState.seeded(0, 1))
    same(*(learner.optimizers["policy"].gradients for learner in learners))


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
@settings(max_examples=5, deadline=None)
@given(st.integers(1, 6))
def test_micro_batches_do_not_matter(mode: ImportanceMode, size: int) -> None:
    net, r = world(3)
    corrected = replace(GRPO, importance_cap=1.1, importance_mode=mode)
    same(gradient(net, with_sampler(r), corrected), gradient(net, with_sampler(r), corrected, micro_batch=size))


def test_the_metrics_are_the_mean_weight_and_the_share_above_the_cap() -> None:
    net, r = world(4)
    r, objective = with_sampler(r), replace(CLIPPED, importance_cap=1.1)
    metrics = Learner(net, objective, LearnerSettings(AdamSettings(1e-3))).update(
        r, assign_credit(r, objective), LearnerState.seeded(0, 1)
    )
    ratio, capped = ratios(r)[r.mask], metrics["importance_capped"]
    assert metrics["importance_weight"] == pytest.approx(float(ratio.clamp(max=1.1).mean()))
    assert capped == pytest.approx(float((ratio > 1.1).double().mean()))
    assert capped is not None
    assert 0 < capped < 1


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_a_trace_has_the_samplers_log_probabilities_and_the_weight_of_every_visit(mode: ImportanceMode) -> None:
    net, r = world(4)
    r, objective = with_sampler(r), replace(GRPO, reuse=Reuse(2, 2), importance_cap=1.1, importance_mode=mode)
    learner, state = Learner(net, objective, LearnerSettings(AdamSettings(1e-3))), LearnerState.seeded(0, 1)
    learner.recorder = Recorder(1, 3)
    learner.update(r, assign_credit(r, objective), state)
    trace: Any = learner.recorder.take(state)
    assert (trace.importance_cap, trace.importance_mode) == (1.1, mode)
    for row in trace.rows:
        steps = slice(row.start, row.start + len(row.rewards))
        expected = weights_of(r, 1.1, mode)[row.row, steps]
        assert r.behaviour_log_probs is not None
        assert torch.equal(row.behaviour_log_probs[row.mask], r.behaviour_log_probs[row.row, steps][row.mask])
        for k in range(2):
            torch.testing.assert_close(row.visits.weights[k][row.mask], expected[row.mask])
        assert not row.visits.gradient_flows[:, (expected == 0) & row.mask].any()
