"""The events that a session publishes. Displays, findings, trackers, traces, samples and callbacks are its listeners.

A run publishes, in this order: ``RunStart``; for each iteration ``RolloutEnd``, ``UpdateEnd``, ``EvaluationEnd`` (if the
iteration has an evaluation), ``IterationEnd``, ``CheckpointSaved`` (if it has a checkpoint); last ``RunEnd``. A ``Message``
may come at any time. To log a run elsewhere, write a listener, as in ``runs/trackers``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.rollout import EvaluationReport, LearnerState, Metrics, Rollout
from surefoot.core.traces import Trace

Sample = dict[str, Any]
"""``prompt`` and ``response``, ``reward`` and other scores: numbers, or None"""


@dataclass(frozen=True)
class RunStart:
    """Before the first iteration of this process; a resumed run has its earlier rows in ``folder / "metrics.jsonl"``."""

    state: LearnerState
    folder: Path | None


@dataclass(frozen=True)
class RolloutEnd:
    """A batch was collected."""

    rollout: Rollout


@dataclass(frozen=True)
class UpdateEnd:
    """The policy was updated; ``trace`` is set if this update is traced."""

    state: LearnerState
    metrics: Metrics
    trace: Trace | None


@dataclass(frozen=True)
class EvaluationEnd:
    """The policy was evaluated."""

    state: LearnerState
    report: EvaluationReport


@dataclass(frozen=True)
class IterationEnd:
    """An iteration is complete; ``metrics`` is its row of metrics.jsonl. A listener that returns True stops the run."""

    state: LearnerState
    metrics: Metrics


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is on the disk."""

    state: LearnerState
    path: Path


@dataclass(frozen=True)
class RunEnd:
    """The run has ended or was stopped; ``failed`` if an error ended it. Listeners close their files."""

    state: LearnerState
    folder: Path | None
    failed: bool


@dataclass(frozen=True)
class Message:
    """One line for the user."""

    text: str


Event = RunStart | RolloutEnd | UpdateEnd | EvaluationEnd | IterationEnd | CheckpointSaved | RunEnd | Message
Listener = Callable[[Event], bool | None]
Callback = Callable[[Metrics], bool | None]
"""called with the metrics of each iteration; True stops the run"""


def callback_listener(callback: Callback) -> Listener:
    """The listener that passes the metrics of each iteration to a user's callback."""

    def listener(event: Event) -> bool | None:
        return callback(event.metrics) if isinstance(event, IterationEnd) else None

    return listener
