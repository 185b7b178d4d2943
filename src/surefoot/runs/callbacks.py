"""Callbacks: a user's code at the events of a run, with the agent and the state at hand."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from surefoot.core.learner import RATE_SCALE, finite_or_none
from surefoot.core.rollout import EvaluationReport, LearnerState, Metrics, World
from surefoot.core.seeding import any_algorithm
from surefoot.errors import SurefootError, did_you_mean
from surefoot.recipes.base import Recipe
from surefoot.store.events import CheckpointSaved, EvaluationEnd, Event, IterationEnd, Listener, RunEnd, RunStart

MetricsCallback = Callable[[Metrics], bool | None]
"""called with the metrics of each iteration; True stops the run"""


class Run:
    """The run that a callback belongs to."""

    def __init__(self, recipe: Recipe, world: World, state: LearnerState, folder: Path | None) -> None:
        self.recipe, self.state, self.folder = recipe, state, folder
        self.metrics: Metrics = {}
        """the latest row of metrics.jsonl; empty before the first"""
        self.failed = False
        """at the end: whether an error ended the run"""
        self.stop_requested = False
        self._world = world
        self._logged: Metrics = {}

    @property
    def agent(self) -> Any:
        """The agent or language model in training, with its current weights; ``agent.save(folder)`` keeps them."""
        return self._world.result

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.state.steps

    @property
    def learning_rate(self) -> float:
        """The learning rate, without its schedule. A new value holds from the next update on, and after resuming; a separate
        critic's rate changes by the same factor.
        """
        return self._base_rate * self.state.coefficients.get(RATE_SCALE, 1.0)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not 0 < value < float("inf"):
            raise SurefootError(f"learning_rate={value}: must be a finite number above 0")
        self.state.coefficients[RATE_SCALE] = value / self._base_rate

    @property
    def _base_rate(self) -> float:
        return self.recipe.optimizer.learning_rate

    def log(self, metrics: Mapping[str, float | None]) -> None:
        """Add numbers to this iteration's row of metrics.jsonl, and so to every tracker; before the first, to its row.

        Call it in ``on_start``, ``on_evaluation`` or ``on_iteration``. A number that is not finite becomes null.
        Raises SurefootError for a value that is not a number.
        """
        for name, value in metrics.items():
            try:
                self._logged[str(name)] = None if value is None else finite_or_none(float(value))
            except (TypeError, ValueError):
                raise SurefootError(f"log: {name}={value!r} is not a number; log numbers, or None") from None

    def stop(self) -> None:
        """Stop after this iteration, with a checkpoint."""
        self.stop_requested = True

    def add_logged(self, metrics: Metrics) -> None:
        """Move what was logged into a row. Raises SurefootError for the name of a metric that the run writes itself."""
        taken = sorted(set(self._logged) & set(metrics))
        if taken:
            raise SurefootError(f"log: {taken[0]!r} is a metric of the run itself; choose another name")
        metrics |= self._logged
        self._logged = {}


class Callback:
    """Code at the events of a run: override what you need.

    An exception in a callback ends training as it is; the run can be resumed from its last checkpoint.
    """

    def on_start(self, run: Run) -> None:
        """Before the first iteration of this process; ``run.steps`` is above 0 in a resumed run."""

    def on_evaluation(self, run: Run, report: EvaluationReport) -> bool | None:
        """After an evaluation, before the row of its iteration is written. True stops the run."""

    def on_iteration(self, run: Run, metrics: Metrics) -> bool | None:
        """After an update, before the iteration's row, ``metrics``, is written. True stops the run."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """When a checkpoint is on the disk in ``path``; training may have gone on since its iteration."""

    def on_end(self, run: Run) -> None:
        """When training has ended, was stopped, or has failed (``run.failed``)."""


class CallbackListener:
    """Passes a run's events to callbacks, in their order; a listener that comes before the run's own."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        self.run, self.callbacks = run, callbacks

    @any_algorithm()
    def __call__(self, event: Event) -> bool | None:
        """Raises whatever a callback raises."""
        run, stops = self.run, []
        match event:
            case RunStart():
                for callback in self.callbacks:
                    callback.on_start(run)
            case EvaluationEnd():
                stops = [callback.on_evaluation(run, event.report) for callback in self.callbacks]
            case IterationEnd():
                run.metrics = event.metrics
                stops = [callback.on_iteration(run, event.metrics) for callback in self.callbacks]
                run.add_logged(event.metrics)
            case CheckpointSaved():
                for callback in self.callbacks:
                    callback.on_checkpoint(run, event.path)
            case RunEnd():
                run.failed = event.failed
                with ExitStack() as ending:  # all of them, also after an exception
                    for callback in reversed(self.callbacks):
                        ending.callback(callback.on_end, run)
        run.stop_requested |= any(stops)
        return run.stop_requested if isinstance(event, IterationEnd) else None


def check_callbacks(callbacks: object) -> list[Callback]:
    """One callback or several as a list. Raises SurefootError for anything else, such as a class instead of an object."""
    several: list[Any] = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    for callback in several:
        if not isinstance(callback, Callback):
            raise SurefootError(
                f"callbacks={callback!r}: is not a callback; give objects of classes that inherit from surefoot.Callback"
            )
        kinds = Callback, type(callback)  # of objects, attributes such as on_gpu = True are no methods
        called, own = ([n for n in dir(each) if n.startswith("on_") and callable(getattr(each, n))] for each in kinds)
        for name in sorted(set(own) - set(called)):
            what = f"nothing calls its {name}{did_you_mean(name, called)}"
            raise SurefootError(f"callbacks={type(callback).__name__}: {what}; a run calls {', '.join(called)}")
    return several


def metrics_listener(callback: MetricsCallback) -> Listener:
    """The listener that passes the metrics of each iteration to a function. Raises SurefootError if it is none."""
    if not callable(callback):
        raise SurefootError(f"callback={callback!r}: is not a function; give one that takes the metrics of an iteration")

    @any_algorithm()
    def listener(event: Event) -> bool | None:
        return callback(event.metrics) if isinstance(event, IterationEnd) else None

    return listener
