"""The loop of every algorithm, in control and language: collect -> credit -> update -> report."""

import time
from collections.abc import Callable

from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner
from surefoot.core.rollout import Collector, LearnerState, Metrics, Rollout
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.ranks.collectives import sum_count

FAULTS_IN_A_ROW = 3


def run_loop(
    collector: Collector,
    learner: Learner,
    state: LearnerState,
    on_iteration: Callable[[LearnerState, Metrics], bool],
    on_fault: Callable[[str], None] = lambda message: None,
    on_rollout: Callable[[Rollout], None] = lambda rollout: None,
) -> None:
    """Train until the budget is spent or ``on_iteration`` returns True.

    collector      samples with the learner's policy
    on_iteration   called after each iteration with the state and its metrics; checkpoints, logs and displays run from here
    on_fault       called with one line, the NotFiniteError's message, when an update is skipped because a number is not finite
    on_rollout     called with each rollout before the update

    Raises SurefootError after three consecutive skipped updates.
    """
    while state.steps < state.total_steps:
        timer, start = state.timer, time.perf_counter()
        rollout: Rollout | None = None
        try:
            with timer.section("collecting") as collecting, learner.resting():
                rollout = collector.collect(state)
            on_rollout(rollout)
            with timer.section("learning") as learning:
                with timer.detail("credit"):
                    credit = assign_credit(rollout, learner.objective)
                metrics = {**rollout.metrics, **learner.update(rollout, credit, state)}
            steps, state.faults = sum_count(rollout.steps, rollout.rewards), 0
        except NotFiniteError as fault:
            state.faults += 1
            on_fault(str(fault))
            if state.faults == FAULTS_IN_A_ROW:
                suspects = "the environment or the sampler"
                if rollout is not None and rollout.rewards[rollout.mask].isfinite().all():
                    suspects = "network.custom, or lower the learning rate or the entropy bonus"
                raise SurefootError(
                    f"{fault}; {FAULTS_IN_A_ROW} consecutive updates were skipped; fix {suspects}, then resume from the last "
                    "checkpoint"
                ) from fault
            continue
        state.steps += steps
        state.iteration += 1
        metrics |= {
            "seconds_collecting": collecting.seconds,
            "seconds_learning": learning.seconds,
            "steps_per_second": steps / (time.perf_counter() - start),
        }
        if on_iteration(state, metrics):
            return
