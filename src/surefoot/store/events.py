"""The events that a session publishes. Displays, findings, trackers, traces, samples and callbacks are its listeners.

A run publishes, in this order: ``RunStart``; ``InitialSamples`` (if it has a folder and samples responses); for each iteration
``RolloutEnd``, ``UpdateEnd``, ``EvaluationEnd`` (if the iteration has an evaluation), ``IterationEnd``; last ``RunEnd``. A
``CheckpointSaved`` comes when its files are on the disk, which may be in a later iteration. A ``Message`` or
``FindingReported`` may come at any time, and a ``Phase`` when the run begins with something else. Trackers
(``runs/trackers``) and users' callbacks (``runs/callbacks.py``) are listeners too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.fingerprints import Fingerprint
from surefoot.core.rollout import EvaluationReport, LearnerState, Metrics, Rollout
from surefoot.core.traces import Trace
from surefoot.store.finding import Finding

Sample = dict[str, Any]
"""``prompt`` and ``response``, ``reward`` and other scores: numbers, or None"""


@dataclass(frozen=True)
class RunStart:
    """Before the first iteration of this process; a resumed run has its earlier rows in ``folder / "metrics.jsonl"``."""

    state: LearnerState
    folder: Path | None
    evaluate_every: int = 0
    """steps between evaluations; 0: there are none"""
    becomes: int = 0
    """the budget in whole iterations, as far as it is known"""


@dataclass(frozen=True)
class Phase:
    """What the run does from now on: collecting, learning, ``evaluating at step 1,024``, saving; empty at its end."""

    text: str


@dataclass(frozen=True)
class InitialSamples:
    """Responses of the policy before its first update: to the held-out prompts, or else those of the first rollout."""

    state: LearnerState
    samples: Sequence[Sample]


@dataclass(frozen=True)
class RolloutEnd:
    """A batch was collected."""

    rollout: Rollout


@dataclass(frozen=True)
class UpdateEnd:
    """The policy was updated; ``trace`` is set if this update is traced, ``fingerprints`` if it has them."""

    state: LearnerState
    metrics: Metrics
    trace: Trace | None
    fingerprints: Mapping[str, Fingerprint] | None = None


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
    """A checkpoint is on the disk; ``state`` may be of a later iteration."""

    state: LearnerState
    path: Path


@dataclass(frozen=True)
class RunEnd:
    """The run has ended or was stopped; ``failed`` if an error ended it, in training or export. Listeners close their files."""

    state: LearnerState
    folder: Path | None
    failed: bool


@dataclass(frozen=True)
class FindingReported:
    """A check of the run has found something; a ``Message`` with its line comes before."""

    steps: int
    finding: Finding


@dataclass(frozen=True)
class Message:
    """One line for the user."""

    text: str


Event = (
    RunStart
    | Phase
    | InitialSamples
    | RolloutEnd
    | UpdateEnd
    | EvaluationEnd
    | IterationEnd
    | CheckpointSaved
    | RunEnd
    | FindingReported
    | Message
)
Listener = Callable[[Event], bool | None]
