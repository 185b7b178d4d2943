"""Traces: the numbers add up for every objective, a visit has the state of θ at its time, and tracing changes no update."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from chain import check_chain
from torch import Tensor

from surefoot import (
    A2C,
    CISPO,
    GRPO,
    GSPO,
    KL_COV,
    ONLINE_DPO,
    PPO_CLIP,
    PPO_PENALTY,
    PPO_UNCLIPPED,
    REINFORCE,
    REINFORCE_BASELINE,
    RLOO,
    TRPO,
    Clip,
    ClippedWeight,
    NotFiniteError,
    Objective,
    Penalty,
    Reuse,
)
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.loop import run_loop
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.core.traces import Recorder, Trace, choose_segments, longest_segment

from .token_world import TokenCollector, Transformer
from .worlds import TinyPolicy, moved, parameters, random_rollout

REUSE = Reuse(epochs=3, minibatches=2)
DUAL = replace(PPO_CLIP, trust_region=Clip(0.1, clip_high=0.3, dual_clip=1.5))


def traced(
    objective: Objective, rollout: Rollout, policy: TinyPolicy, rate: float = 0.03, **settings: Any
) -> tuple[Trace, Learner]:
    """The trace of one update of a copy of the policy, and its learner."""
    learner = Learner(copy.deepcopy(policy), objective, LearnerSettings(AdamSettings(rate), **settings))
    learner.recorder = Recorder(every=1, rows=len(rollout.mask))
    at = LearnerState.seeded(0, 1000)
    learner.update(rollout, assign_credit(rollout, objective), at)
    trace = learner.recorder.take(at)
    assert trace is not None
    assert learner.recorder.take(at) is None, "a trace is taken once"
    return trace, learner


CASES = {
    "clip": (replace(PPO_CLIP, reuse=REUSE, normalise_advantages="minibatch"), {"unclipped", "clipped"}),
    "whole batch": (replace(PPO_CLIP, reuse=REUSE, normalise_advantages="batch"), {"unclipped", "clipped"}),
    "dual clip": (replace(DUAL, reuse=REUSE), {"unclipped", "clipped", "dual_clip"}),
    "unclipped": (replace(PPO_UNCLIPPED, reuse=REUSE), {"unclipped"}),
    "penalty": (replace(PPO_PENALTY, reuse=REUSE), {"unclipped"}),
    "trpo": (replace(TRPO, reuse=REUSE, normalise_advantages="minibatch"), {"unclipped"}),
    "a2c": (A2C, {"log_prob"}),
    "mean": (REINFORCE_BASELINE, {"log_prob"}),
    "reinforce": (REINFORCE, {"log_prob"}),
}
IN_GROUPS = {
    "grpo": (replace(GRPO, reuse=REUSE), {"unclipped", "clipped"}),
    "gspo": (replace(GSPO, reuse=REUSE), {"unclipped", "clipped"}),
    "rloo": (RLOO, {"log_prob"}),
    "online dpo": (ONLINE_DPO, {"log_prob"}),
    "cispo": (replace(CISPO, reuse=REUSE, trust_region=ClippedWeight(1.05)), {"weighted"}),
    "kl-cov": (replace(KL_COV, reuse=REUSE, trust_region=Penalty(2.0, fraction=0.3)), {"unclipped"}),
    "left out": (replace(GRPO, reuse=REUSE, drop_above_kl=0.01), {"unclipped", "clipped", "left_out"}),
}


@pytest.mark.parametrize(
    ("name", "unit"), [(name, "step") for name in CASES] + [(name, "row") for name in ("whole batch", "trpo", *IN_GROUPS)]
)
def test_every_number_of_a_trace_follows_from_its_inputs(name: str, unit: str) -> None:
    objective, branches = (CASES | IN_GROUPS)[name]
    policy = TinyPolicy(critic=objective.baseline == "critic", memory=unit == "row", exact=False)
    whole = objective.baseline != "critic"
    rollout = random_rollout(policy, 3, rows=6, steps=12, unit=unit, whole=whole)
    if objective.leaves_old_policy:
        rollout = moved(rollout, 4)
    trace, _ = traced(objective, rollout, policy, micro_batch=5 if unit == "step" else 2)
    met = check_chain(trace, objective.normalise_advantages, objective.leaves_old_policy)
    assert met == branches
    assert (trace.gamma, trace.clip) == (objective.gamma, objective.clip and objective.clip.clip)
    kept = int(rollout.mask.any(-1).sum())
    assert len({row.row for row in trace.rows}) == len(trace.rows) == kept
    visits = trace.rows[0].visits
    assert (visits.values is None) == (objective.baseline != "critic")
    epochs, minibatches = (3, 2) if objective.reuse else (1, 1)
    extra = int(objective.constraint is not None)
    assert len(visits.updates) == epochs + extra
    for row in trace.rows:  # once in every pass, in one of its minibatches
        for k, updates in enumerate(row.visits.updates[extra:, row.mask]):
            assert ((updates - extra) // minibatches == k).all()


def test_a_token_world_adds_up_in_every_traced_iteration() -> None:
    objective = replace(
        PPO_CLIP, gamma=1.0, reuse=Reuse(epochs=4, minibatches=4), normalise_advantages="batch", value_coefficient=0.1
    )
    collector = TokenCollector(policy := Transformer(1), 0.05)
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(3e-3, max_grad_norm=1.0)))
    learner.recorder = recorder = Recorder(every=2 * collector.responses, rows=3)
    traces: list[Trace] = []

    def keep(state: LearnerState, metrics: object) -> bool:
        traces.extend([trace] if (trace := recorder.take(state)) else [])
        return False

    run_loop(collector, learner, LearnerState.seeded(1, 6 * collector.responses), keep)
    assert [trace.iteration for trace in traces] == [1, 3, 5]
    assert [trace.steps for trace in traces] == [i * collector.responses for i in (1, 3, 5)]
    for trace in traces:
        check_chain(trace, "batch")
        assert all(row.ref_log_probs is not None for row in trace.rows)
        assert all((row.visits.updates[0] // 16 == trace.iteration - 1).all() for row in trace.rows)
    assert len({tuple(row.row for row in trace.rows) for trace in traces}) == 3, "other rows each time"


def test_a_visit_has_the_policy_of_its_time() -> None:
    """Pass 0 sees θ_old, pass 1 the θ that one pass leads to."""
    policy = TinyPolicy()
    rollout = random_rollout(policy, 1, rows=4, steps=8)
    one, two = (replace(PPO_CLIP, reuse=Reuse(epochs, 1)) for epochs in (1, 2))
    trace, _ = traced(two, rollout, policy)
    _, after_one = traced(one, rollout, policy)
    with torch.no_grad():
        evaluations = [p(rollout.inputs, rollout.actions) for p in (policy, after_one.policy)]
    assert not torch.allclose(evaluations[0].log_probs, evaluations[1].log_probs, atol=1e-3)
    for row in trace.rows:
        steps = slice(row.start, row.start + len(row.mask))
        for k, evaluation in enumerate(evaluations):
            for seen, truth in ((row.visits.log_probs, evaluation.log_probs), (row.visits.values, evaluation.values)):
                torch.testing.assert_close(seen[k][row.mask], truth[row.row, steps][row.mask])
        assert torch.equal(row.visits.ratio[0][row.mask], torch.ones_like(row.visits.ratio[0][row.mask]))


def test_advantages_are_normalised_by_the_moments_of_their_own_minibatch() -> None:
    """All rows are traced and none has a mask, so that the moments can be made from what the trace itself holds."""
    policy = TinyPolicy()
    rollout = replace(random_rollout(policy, 1, rows=4, steps=8, holes=False), terminated=torch.zeros(4, 8, dtype=torch.bool))
    rollout = replace(rollout, truncated=rollout.terminated)
    trace, _ = traced(replace(PPO_CLIP, reuse=REUSE, normalise_advantages="minibatch"), rollout, policy)

    def all_of(name: str) -> Tensor:
        return torch.cat([getattr(row.visits, name)[1] for row in trace.rows])

    raw, updates = torch.cat([row.advantages for row in trace.rows]), all_of("updates")
    assert sorted(updates.unique().tolist()) == [2, 3]
    for update in (2, 3):
        mine = updates == update
        assert mine.sum() == 16
        torch.testing.assert_close(all_of("mean")[mine], raw[mine].mean().expand(16))
        torch.testing.assert_close(all_of("variance")[mine], raw[mine].var(correction=0).expand(16))


@pytest.mark.parametrize(("name", "unit"), [("clip", "step"), ("penalty", "row"), ("trpo", "row"), ("a2c", "step")])
def test_tracing_changes_no_weight(name: str, unit: str) -> None:
    objective, _ = CASES[name]
    policy = TinyPolicy(critic=objective.baseline == "critic", memory=unit == "row")
    rollout = random_rollout(policy, 3, rows=6, steps=12, unit=unit, whole=objective.baseline != "critic")
    _, watched = traced(objective, rollout, policy, micro_batch=4)
    alone = Learner(copy.deepcopy(policy), objective, LearnerSettings(AdamSettings(0.03), micro_batch=4))
    alone.update(rollout, assign_credit(rollout, objective), LearnerState.seeded(0, 1000))
    assert torch.equal(parameters(watched.policy), parameters(alone.policy))
    assert not torch.equal(parameters(watched.policy), parameters(policy))


def test_steps_not_visited_are_marked_when_the_kl_ends_the_passes() -> None:
    policy = TinyPolicy()
    rollout = random_rollout(policy, 1, rows=6, steps=8)
    objective = replace(PPO_CLIP, reuse=Reuse(8, 4), target_kl=1e-3)
    trace, _ = traced(objective, rollout, policy, rate=0.1)
    check_chain(trace, None)
    passes = len(trace.rows[0].visits.updates)
    assert passes < 8
    last = torch.cat([row.visits.updates[-1][row.mask] for row in trace.rows])
    assert (last >= 0).any()
    assert (last == -1).any()
    whole = torch.cat([row.visits.updates[:-1][:, row.mask] for row in trace.rows], 1)
    assert (whole >= 0).all()


@pytest.mark.parametrize("unit", ["step", "row"])
def test_masked_entries_are_zeros_whatever_the_rollout_holds_there(unit: str) -> None:
    policy = TinyPolicy()
    rollout = random_rollout(policy, 1, rows=6, steps=12, unit=unit)
    rollout.mask[:, 2] = False  # as a tool's words between those of the policy
    holes = ~rollout.mask
    assert holes.any()
    broken = {
        name: getattr(rollout, name).masked_fill(holes, torch.nan)
        for name in ("rewards", "values", "next_values", "old_log_probs", "ref_log_probs")
    }
    trace, _ = traced(replace(PPO_CLIP, reuse=REUSE), replace(rollout, **broken), policy)
    seen = 0
    for row in trace.rows:
        for x in (row.rewards, row.values, row.next_values, row.td_residuals, row.advantages, row.old_log_probs):
            assert (x[~row.mask] == 0).all()  # type: ignore[index]
        assert (row.visits.updates[:, ~row.mask] == -1).all()
        seen += int((~row.mask).sum())
    assert seen, "no piece had a hole"


def test_a_skipped_update_leaves_no_trace() -> None:
    policy = TinyPolicy()
    rollout = random_rollout(policy, 1, rows=4, steps=8)
    objective, at = replace(PPO_CLIP, reuse=REUSE), LearnerState.seeded(0, 1000)
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(0.01)))
    learner.recorder = Recorder(every=1000, rows=2)
    credit = assign_credit(rollout, objective)
    with pytest.raises(NotFiniteError):
        learner.update(rollout, replace(credit, returns=credit.returns * torch.nan), at)
    learner.update(rollout, credit, at)
    trace = learner.recorder.take(at)
    assert trace is not None
    assert all(len(row.visits.updates) == 3 for row in trace.rows)
    check_chain(trace, None)


# ---- which iterations, which rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "every"), [(10, 25), (10, 3), (7, 20)])
def test_iterations_that_cross_a_multiple_are_traced(size: int, every: int) -> None:
    policy = TinyPolicy()
    rollout = replace(random_rollout(policy, 1, holes=False), steps=size)
    recorder, credit = Recorder(every, rows=1), assign_credit(rollout, PPO_CLIP)
    for first in range(0, 20 * size, size):
        at = LearnerState.seeded(0, 1000)
        at.steps = first
        started = recorder.begin(rollout, credit, PPO_CLIP, at, 1.0, 0.0) is not None
        assert started == any(step % every == 0 for step in range(first, first + size))


def test_traced_rows_are_spread_change_and_skip_rows_without_a_decision() -> None:
    rollout = random_rollout(TinyPolicy(), 1, rows=8, steps=6, holes=False)
    rollout.mask[2] = False
    seen = [[row for row, _ in choose_segments(rollout, 2, iteration)] for iteration in range(7)]
    assert all(len(set(rows)) == 2 for rows in seen)
    assert {row for rows in seen for row in rows} == {0, 1, 3, 4, 5, 6, 7}
    assert len(choose_segments(rollout, 20, 0)) == 7


@pytest.mark.parametrize(
    ("kept", "ends", "start", "stop"),
    [
        ("111111", "010000", 2, 6),
        ("111111", "001001", 0, 3),  # the first of equals
        ("110111", "010001", 3, 6),  # the row that an autoreset ignores
        ("101101", "000001", 0, 6),  # what a tool wrote, between tokens of the policy
        ("011110", "000000", 1, 5),
        ("100111", "001000", 0, 6),  # an end where nothing was decided ends nothing
    ],
)
def test_the_longest_piece_of_an_episode_is_shown(kept: str, ends: str, start: int, stop: int) -> None:
    mask, ended = (torch.tensor([c == "1" for c in text]) for text in (kept, ends))
    assert longest_segment(mask, ended) == slice(start, stop)
