"""A run from its recipe to its end: what hangs on the loop (evaluation, tracking, checkpoints, display, signals)."""

import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from surefoot.core.learner import START_TOLERANCE, Learner
from surefoot.core.loop import run_loop
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Metrics, Policy, World
from surefoot.core.traces import Recorder
from surefoot.diagnostics.monitor import Watch
from surefoot.errors import Interrupted, SurefootError
from surefoot.files import made_from, steps_named
from surefoot.recipes.base import Recipe
from surefoot.recipes.reading import to_table
from surefoot.runs.checkpoint import keep_only_this, latest_checkpoint, load_checkpoint, prune, require, save_checkpoint
from surefoot.runs.display import Display
from surefoot.runs.folder import RunFolder, recipe_differences, scored_alike
from surefoot.runs.traces import SampleFolder, TraceFolder
from surefoot.runs.trackers.metrics_jsonl import Tracker, read_metrics

PATIENCE = 25
"""seconds that an iteration may take to finish after a first signal"""
Callback = Callable[[Metrics], bool | None]


def make_learner(recipe: Recipe, policy: Policy) -> Learner:
    """The learner that a recipe asks for."""
    settings = recipe.optimizer
    critic = None
    if settings.critic_learning_rate is not None:
        critic = AdamSettings(settings.critic_learning_rate, settings.epsilon, settings.critic_max_grad_norm)
    return Learner(
        policy,
        recipe.objective,
        AdamSettings(settings.learning_rate, settings.epsilon, settings.max_grad_norm),
        critic,
        settings.schedule,
        settings.micro_batch,
        recipe.compiled_rows,
        settings.warmup,
        settings.micro_batch_tokens,
    )


class Session:
    """One run in progress.

    recipe     what to do
    world      made from it
    folder     where to write; None writes nothing
    display    who shows it
    callback   called with each iteration's metrics; True stops the run
    """

    def __init__(
        self, recipe: Recipe, world: World, folder: RunFolder | None, display: Display, callback: Callback | None = None
    ) -> None:
        self.recipe, self.world, self.folder, self.display, self.callback = recipe, world, folder, display, callback
        self.learner = make_learner(recipe, world.policy)
        self.learner.auxiliary_loss = world.auxiliary_loss
        self.state = LearnerState.seeded(recipe.seed, recipe.steps)
        self.best: float | None = None
        self.since_best = 0
        """evaluations since the best one"""
        self.tracker: Tracker | None = None
        self.traces: TraceFolder | None = None
        self.samples: SampleFolder | None = None
        self.watch = Watch(recipe, display.say)
        self.warned = False
        self.untold: dict[str, Any] | None = None
        """an iteration whose evaluation failed: its metrics, and how many steps there were before it"""
        self.signals = StopOnSignal()

    def restore(self, checkpoint: Path, allow_changes: bool) -> None:
        """Continue from a checkpoint of this run.

        Raises SurefootError when the recipe has changed since (unless allowed), or the run has nothing left to do.
        """
        trees = load_checkpoint(checkpoint)
        require(trees, ("agent", "recipe", "state", "learner", "collector", "progress"), checkpoint)
        with made_from(checkpoint):
            self._continue_from(trees, checkpoint, allow_changes)

    def _continue_from(self, trees: dict[str, Any], checkpoint: Path, allow_changes: bool) -> None:
        changed = recipe_differences(trees["recipe"], self.recipe)
        if changed and not allow_changes:
            raise SurefootError(
                f"{checkpoint.parent.parent / 'config.toml'}: changed since the checkpoint ({'; '.join(changed)}); "
                "undo it, or pass --allow-changes"
            )
        done = trees["state"]["steps"]
        if done != steps_named(checkpoint.name):
            raise SurefootError(f"{checkpoint}: holds the state after other steps than its name says; use an older checkpoint")
        left = not self.world.exports_model or self.folder is None or self.folder.finished_at == done
        self.untold = trees.get("untold") or None
        if done >= self.recipe.steps and left and self.untold is None:
            raise SurefootError(
                f"{checkpoint.parent.parent}: finished, {done} of {self.recipe.steps} steps are done; extend it with --steps N"
            )
        for line in self.world.load(trees, checkpoint):
            self.display.say(line)
        if set(trees["learner"]) != set(self.learner.optimizers):
            raise SurefootError(
                f"{checkpoint}: has optimizers for {', '.join(trees['learner'])}, the recipe asks for "
                f"{', '.join(self.learner.optimizers)}; undo the change of optimizer.critic_learning_rate or of the algorithm"
            )
        self.learner.load_state_dict(trees["learner"])
        self.state.load_state_dict(trees["state"])
        self._restore_best(trees["progress"], checkpoint.parent.parent / "best")

    def _restore_best(self, progress: dict[str, Any], folder: Path) -> None:
        """The best score so far, where it was given as scores are now: by the recipe that lies beside the best weights."""
        best = latest_checkpoint(folder)
        if best is None or progress["best"] is None:
            return
        if scored_alike(load_checkpoint(best)["recipe"], to_table(self.recipe)):
            self.best, self.since_best = float(progress["best"]), int(progress.get("since_best", 0))
        else:
            self.display.say("evaluations are scored otherwise than before: the best so far is forgotten")

    def run(self) -> None:
        """Train until the budget is spent, the callback stops it, or a signal does.

        Raises Interrupted after a signal, once everything is saved.
        """
        if self.folder is not None:
            self.tracker = Tracker(self.folder.path, self.state.iteration, self.state.steps, self.display.say)
            self.watch.begin(read_metrics(self.tracker.path))
            self.samples = SampleFolder(self.folder.path / "samples", self.state.steps)
            settings = self.recipe.traces
            self.traces = TraceFolder(self.folder.path / "traces", self.state.steps, settings.max_megabytes)
            if settings.rows:
                self.learner.recorder = Recorder(self.recipe.trace_every, settings.rows, self.world.describe)
        self.previous = self.state.steps
        try:
            with self.signals:
                if not self._tell_untold():
                    run_loop(self.world.collector, self.learner, self.state, self._on_iteration, self.display.say)
        finally:
            if self.tracker is not None:
                self.tracker.close()
        self.watch.end(None if self.folder is None else self.folder.path)
        if self.signals.requested and self.state.steps < self.state.total_steps:
            where = "; nothing was kept: a run with a folder (run_dir) can be resumed"
            if self.folder is not None:
                where = f"; continue with: surefoot resume {self.folder.path}"
            raise Interrupted(f"stopped at step {self.state.steps}{where}")

    def _tell_untold(self) -> bool:
        """Finish the iteration whose evaluation failed, as if it had not; whether training stops there."""
        if self.untold is None:
            return False
        untold, self.untold = self.untold, None
        self.previous = untold["previous"]
        return self._on_iteration(self.state, untold["metrics"])

    def _on_iteration(self, state: LearnerState, metrics: Metrics) -> bool:
        finished = state.steps >= state.total_steps
        counts: Metrics = {"iteration": state.iteration, "steps": state.steps, "updates": state.updates}
        metrics = counts | metrics
        worse_for_long = False
        self._write_trace()
        if finished or self._passed(self.recipe.evaluate_every):
            try:
                metrics |= self._evaluate()
            except SurefootError:  # what was learned is kept, and the evaluation is made again on resuming
                self.untold = {"previous": self.previous, "metrics": metrics}
                self._save()
                raise
            patience = self.recipe.evaluation.patience
            worse_for_long = patience is not None and self.since_best >= patience
        if self.tracker is not None:
            self.tracker.write(metrics, state.steps)
        self._warn(metrics.get("ratio_at_start"))
        self.watch.add(metrics)
        self.display.show(state, metrics)
        stop = bool(self.callback and self.callback(metrics)) or self.signals.requested or worse_for_long
        if finished or stop or self._passed(self.recipe.checkpoint_every):
            self._save()
        self.previous = state.steps
        return stop

    def _warn(self, ratio_at_start: float | None) -> None:
        """Say once that training scores actions otherwise than the rollout; where it computes in float32, that was an error."""
        if ratio_at_start is None or self.warned or abs(ratio_at_start - 1) <= START_TOLERANCE:
            return
        self.warned = True
        self.display.say(
            f"warning: ratio_at_start={ratio_at_start:.4f} at step {self.state.steps:,}: it is 1 where training scores actions "
            "as the rollout did. In bfloat16 both round, and ratios, clip fractions and KL have that noise; float32 has none"
        )

    def _passed(self, every: int) -> bool:
        """Whether this iteration crossed a multiple of ``every`` steps; the same in a resumed run."""
        return self.state.steps // every > self.previous // every

    def _evaluate(self) -> Metrics:
        judged = self.world.evaluate()
        if self.best is None and self.folder is not None:
            prune(self.folder.best, keep=0)  # a best by another measure
        if judged is None:
            return {}
        score = judged.score if judged.score is not None and math.isfinite(judged.score) else None
        self.since_best += int(score is not None)
        if score is not None and (self.best is None or score > self.best):
            self.best, self.since_best = score, 0
            if self.folder is not None:
                best = self.folder.best / str(self.state.steps)
                save_checkpoint(best, self.world.trees())
                keep_only_this(best)
                prune(self.folder.best, keep=1)
        if judged.samples:
            if self.samples is not None:
                self.samples.write(self.state.steps, judged.samples)
            self.display.samples(self.state.steps, judged.samples)
        return judged.metrics

    def _write_trace(self) -> None:
        recorder = self.learner.recorder
        trace = None if recorder is None else recorder.take(self.state)
        if trace is not None and self.traces is not None and (line := self.traces.write(trace)):
            self.display.say(line)

    def _save(self) -> None:
        if self.folder is None:
            return
        assert self.tracker is not None
        trees = {
            **self.world.trees(),
            "recipe": to_table(self.recipe),
            "learner": self.learner.state_dict(),
            "collector": self.world.collector.state_dict(),
            "state": self.state.state_dict(),
            "progress": {"best": self.best, "since_best": self.since_best},
            "untold": self.untold or {},
        }
        save_checkpoint(self.folder.checkpoints / str(self.state.steps), trees, self.tracker.written())
        prune(self.folder.checkpoints, self.recipe.checkpoint.keep)


class StopOnSignal:
    """Within ``with``, a first signal sets ``requested``; a second, or 25 seconds, raises Interrupted at once.

    Interrupted loses nothing either: the run resumes exactly from its last checkpoint. Outside the main thread, where
    Python allows no handlers, this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave back
        if self.requested and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise Interrupted("stopped at once; the run resumes from its last checkpoint")
        self.requested = True
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._too_long)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def _too_long(self, number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"the iteration took over {PATIENCE} s to finish; the run resumes from its last checkpoint")
