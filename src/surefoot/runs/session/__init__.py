"""A run from its recipe to its end: the loop with evaluation, checkpoints and signals, published as events."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.core.fingerprints import Fingerprints
from surefoot.core.loop import run_loop
from surefoot.core.rollout import EvaluationReport, LearnerState, Metrics, Rollout, World
from surefoot.core.traces import Recorder
from surefoot.diagnostics.findings import RunMonitor
from surefoot.errors import Interrupted, LabelsNeededError, NotCompiledError, SurefootError, announced, checked
from surefoot.files import made_from, steps_named
from surefoot.ranks.collectives import (
    broadcast_weights,
    check_same_weights,
    exchange,
    from_first,
    on_first,
    rank,
    together,
    world_size,
)
from surefoot.recipes.base import Recipe
from surefoot.recipes.callables import Functions
from surefoot.recipes.control import COMPILED
from surefoot.runs.callbacks import Callback, CallbackListener, Run
from surefoot.runs.factory import make_learner
from surefoot.runs.machine_use import MachineUse
from surefoot.runs.profile import Profile
from surefoot.runs.session.arithmetic import arithmetic
from surefoot.runs.session.saving import Saver
from surefoot.runs.trackers.delivery import tracker_listeners
from surefoot.sharding import is_sharded
from surefoot.signals import GRACE_SECONDS, SignalHandler
from surefoot.store.checkpoint import keep_only_this, latest_checkpoint, load_checkpoint, prune, require
from surefoot.store.events import (
    CheckpointSaved,
    EvaluationEnd,
    Event,
    FindingReported,
    InitialSamples,
    IterationEnd,
    Listener,
    Message,
    Phase,
    RolloutEnd,
    RunEnd,
    RunStart,
    UpdateEnd,
)
from surefoot.store.finding import Finding
from surefoot.store.folder import FIRST_CHECKPOINT, RunFolder, machine, scored_alike
from surefoot.store.manifest import MANIFEST
from surefoot.store.metrics import RowFile, fingerprint_file, metrics_file
from surefoot.store.source import kept_by, sources_of
from surefoot.store.traces import SampleFolder, TraceFolder
from surefoot.terminal import Output, phases_shown

WAITED_FOR = {"evaluating": "evaluation", "saving": "checkpoint"}
"""what a first signal waits for, by the beginning of the phase; otherwise the iteration"""


class EvaluationStoppedError(Interrupted):
    """A first signal has ended an evaluation, which the resumed run repeats."""


class Session:
    """One run in progress.

    recipe      what to train, and how
    world       made from the recipe
    folder      the run's folder; None writes nothing. Of several ranks only the first has one
    listeners   receive every event; of several ranks only the first has some
    callbacks   of the user; they receive every event and may add metrics
    objects     functions and classes that were passed as objects, by field, and the task if it was one
    profile     measure where the seconds go; of several ranks the first does

    Events go to callbacks, then to the run's own listeners (traces, samples, trackers, findings), then to ``listeners``.
    ``RunEnd`` goes the other way round, because the last listener closes first.

    With several ranks, every rank has a session. All of them collect, learn and evaluate; the first one writes and shows the
    run. They agree at the end of each iteration whether to stop, and an error on one of them ends all (``together``).
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        folder: RunFolder | None,
        listeners: Sequence[Listener] = (),
        callbacks: Sequence[Callback] = (),
        objects: Functions | None = None,
        profile: bool = False,
    ) -> None:
        self.recipe, self.world, self.folder, self.listeners = recipe, world, folder, list(listeners)
        self.callbacks = callbacks
        self.learner = make_learner(recipe, world.policy, objects)
        self.learner.auxiliary_loss = world.auxiliary_loss
        self.sharded = is_sharded(world.policy)
        """whether every rank reads and writes its own part of a checkpoint"""
        self.state = LearnerState.seeded(recipe.seed, recipe.steps)
        self.previous_steps = 0
        """steps before this iteration"""
        self.best: float | None = None
        self.since_best = 0
        """evaluations since the best one"""
        self.best_at: int | None = None
        """the steps of the best one"""
        self.lacks_best = False
        """whether best/ lacks the weights of the checkpoint that the run continues from"""
        self.sources = sources_of(recipe.table, objects)
        """the code of the user that the run rests on"""
        self.code = kept_by(world, objects)
        self.saved = False
        """whether a checkpoint is on the disk or being written; the first one is on the disk before training goes on"""
        self.began = time.monotonic()
        self.row_files: list[RowFile] = []
        """those of metrics and fingerprints, if the run has a folder"""
        self.pending: dict[str, Any] | None = None
        """an iteration whose evaluation failed: its metrics, and the steps before it"""
        self.signals = SignalHandler(self._acknowledge)
        self.phase = ""
        """what the run does now"""
        self.machine_use = MachineUse(recipe.device)
        self.sampled = False
        """whether the samples before the first update are published"""
        self.kept = folder is not None
        """whether the run has a folder, perhaps that of the first rank; set when it starts"""
        self.lines: list[str] = []
        """messages of this rank, if it is not the first, which shows them"""
        self.saver = Saver(self._publish_checkpoint)
        self.opening: tuple[str, ...] = ()
        """lines to publish first"""
        self.use_eager: Callable[[], Recipe] | None = None
        """makes the world go on without compiled programs, if the run may; it returns the recipe of the rest"""
        self.profiled = profile and rank() == 0
        self.profile: Profile | None = None
        """set when the run starts, if it is profiled"""

    # ---- continue ----------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Path, allow_changes: bool) -> None:
        """Continue from a checkpoint of this run.

        Raises SurefootError when the recipe has changed since (unless allowed), or the run has nothing left to do.
        """
        checkpoint = from_first(checkpoint.absolute())  # ranks read their shards from the folder of the first
        parts = on_first(lambda: self._read(checkpoint))
        self.pending = parts.get("pending") or None
        with made_from(checkpoint):
            with together() if self.sharded else nullcontext():
                lines = self.world.load(parts, checkpoint, allow_changes)
            lines += self.code.lost(parts["attributes"])
            for line in lines:
                self.message(line)
            with together():
                self._load_learner(parts["learner"], checkpoint)
                self.state.load_state_dict(parts["state"])
            best = checkpoint.parent.parent / "best"
            self.lacks_best = self._lacks_best(parts)
            self.best, self.since_best, self.best_at = on_first(lambda: self._best_of(parts, best))
        self.saved = True

    def _read(self, checkpoint: Path) -> dict[str, Any]:
        """The parts of a checkpoint from which this run can continue."""
        parts = load_checkpoint(checkpoint, in_files=("agent", "learner") if self.sharded else ())
        require(parts, ("agent", "recipe", "state", "learner", "collector", "progress", "code", "attributes"), checkpoint)
        with made_from(checkpoint):
            run_folder, done = checkpoint.parent.parent, parts["state"]["steps"]
            if done != steps_named(checkpoint.name):
                raise SurefootError(
                    f"{checkpoint}: has the state after other steps than those in its name; use an older checkpoint"
                )
            exported = not self.world.exports_model or self.folder is None or self.folder.finished_at == done
            if done >= self.recipe.steps and exported and not parts.get("pending") and not self._lacks_best(parts):
                raise SurefootError(f"{run_folder}: finished, {done} steps are done; extend it with --steps above {done}")
        return parts

    def _load_learner(self, saved: dict[str, Any], checkpoint: Path) -> None:
        if set(saved) != set(self.learner.optimizers):
            raise SurefootError(
                f"{checkpoint}: has optimizers for {', '.join(saved)}, the recipe asks for "
                f"{', '.join(self.learner.optimizers)}; undo the change of optimizer.critic_learning_rate or of the algorithm"
            )
        self.learner.load_state_dict(saved)

    def _lacks_best(self, parts: dict[str, Any]) -> bool:
        """Whether a kill came between the first checkpoint and the best weights, which are the same."""
        at = parts["progress"].get("best_at")
        return from_first(
            at == parts["state"]["steps"] and self.folder is not None and not (self.folder.best / str(at) / MANIFEST).exists()
        )

    def _best_of(self, parts: dict[str, Any], folder: Path) -> tuple[float | None, int, int | None]:
        """The best score, if it was measured as this recipe measures scores, the evaluations since, and its steps."""
        best, progress = latest_checkpoint(folder), parts["progress"]
        score, at = progress["best"], progress.get("best_at")
        if score is None or (best is None and not self.lacks_best):
            return None, 0, None
        measured = parts["recipe"] if best is None else load_checkpoint(best)["recipe"]
        if scored_alike(measured, self.recipe.table) and parts["code"]["code"] == self.sources["code"]:
            return float(score), int(progress.get("since_best", 0)), at
        self.message("the evaluation settings or the code have changed: the best score so far no longer counts")
        return None, 0, None

    # ---- run ---------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the budget is spent, a listener stops the run, or a signal does; then export the model.

        Raises Interrupted after a signal, once everything is saved.
        """
        run_folder = None if self.folder is None else self.folder.path
        self.kept = from_first(self.folder is not None)
        if self.kept:
            self.saver = Saver(self._publish_checkpoint, self.sharded)
        broadcast_weights(self.world.policy)
        with together():
            self.listeners = [*self._own_listeners(), *self.listeners]
        self.previous_steps = self.state.steps
        failed = True
        becomes = whole_budget(self.recipe, self.state.steps)
        try:
            with together():
                self.publish(RunStart(self.state, run_folder, self._evaluate_every(), becomes))
            self._publish_opening()
            with self.signals, announced(self.message), phases_shown(self.in_phase), arithmetic(self.recipe):
                self._publish_initial_samples()
                if self.lacks_best:
                    self._copy_best()
                    self.saver.write()
                for line in self.world.try_longest(self.learner):  # the same on all ranks
                    if rank() == 0:
                        self.message(line)
                if self.profiled:
                    self.profile = Profile(self.state.timer, run_folder, self.recipe.device)
                    self.profile.begin()
                if not self._finish_pending():
                    self._train()
                with self.in_phase("saving"):
                    self.saver.wait()
            if self.recipe.iteration_steps is None and self.state.steps > self.recipe.steps:
                self.message(f"steps={self.recipe.steps}: became {self.state.steps:,}, since only whole iterations train")
            for line in [] if self.profile is None else self.profile.finish():
                self.message(line)
            if self.signals.stop_requested and self.state.steps < self.state.total_steps:
                raise Interrupted(f"stopped at step {self.state.steps}")
            with self.in_phase("saving the result"):
                self._export()
            failed = False
        except (Interrupted, SurefootError) as stop:
            failed = not isinstance(stop, (Interrupted, LabelsNeededError))
            self._hand_over(stop)
            raise
        finally:
            with ExitStack() as closing:  # in reverse order; each, also after an error or a second signal in another
                shown = None if self.folder is None else self.folder.shown
                closing.callback(self.publish, RunEnd(self.state, shown, failed))
                closing.callback(self._begin, "")
                closing.callback(self._close_saver)
                if self.profile is not None:
                    closing.callback(self.profile.close)

    def _close_saver(self) -> None:
        """Wait for the last checkpoint, and show an error in writing it."""
        if error := self.saver.close():
            self.message(f"! {error}")

    def _train(self) -> None:
        """Run the loop; if a program can't be compiled, and the engine was not asked for, go on with the eager one.

        The iteration in which that happens does not count. Several ranks stop instead: one may fail where others don't.
        """
        self._begin("collecting")
        loop = partial(run_loop, on_iteration=self._end_update, on_fault=self.message, on_rollout=self._publish_rollout)
        try:
            loop(self.world.collector, self.learner, self.state)
        except LabelsNeededError:
            self._save_now()
            raise
        except NotCompiledError as error:
            if self.use_eager is None or world_size() > 1:
                raise
            self.message(f"engine: eager from here on ({str(error).removeprefix(COMPILED).partition(';')[0]})")
            self.recipe = self.use_eager()
            self.learner.use_eager()
            if self.folder is not None:
                self.folder.change_engine(self.recipe)
            loop(self.world.collector, self.learner, self.state)

    def publish(self, event: Event) -> bool:
        """Pass an event to every listener, in order; True if one of them returns True.

        Raises what a listener raises; at the end of the run, after all of them have closed what they have open.
        """
        if isinstance(event, RunEnd):
            with ExitStack() as closing:
                for listener in reversed(self.listeners):
                    closing.callback(listener, event)
            return False
        with self.state.timer.detail("logging"):
            answers = [listener(event) for listener in self.listeners]  # all of them, also after a True
        return any(answers)

    def report(self, finding: Finding) -> None:
        """Publish a finding, for trackers."""
        self.publish(FindingReported(self.state.steps, finding))

    def _report_failure(self, finding: Finding) -> None:
        """Publish a finding with its line, for the user."""
        self.message(f"! step {self.state.steps:,}, {finding.line}")
        self.report(finding)

    def message(self, line: str) -> None:
        """Publish one line for the user, or keep it for the first rank."""
        if rank() == 0:
            self.publish(Message(line))
        else:
            self.lines.append(line)

    def _evaluate_every(self) -> int:
        """Steps between evaluations; 0 if the recipe has nothing to evaluate on."""
        recipe: Any = self.recipe
        rows = recipe.evaluation.episodes if recipe.kind == "control" else recipe.data.held_out
        return recipe.evaluate_every if rows else 0

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self.publish(Phase(phase))

    @contextmanager
    def in_phase(self, text: str) -> Iterator[None]:
        """Publish what the run does in this block, and afterwards what it did before."""
        before = self.phase
        self._begin(text)
        yield
        self._begin(before)

    def _acknowledge(self) -> None:
        """Show that a first signal was seen, from another thread."""
        if rank() == 0:
            what = next((name for begin, name in WAITED_FOR.items() if self.phase.startswith(begin)), "iteration")
            if what == "evaluation" and self.recipe.kind == "control" and world_size() == 1:
                what = "step of the evaluation"
            line = f"stopping after this {what}, within {GRACE_SECONDS} s; Ctrl-C again to quit at once"
            print(line, file=Output(sys.stderr), flush=True)

    def _publish_opening(self) -> None:
        """Publish the lines about the model and the warnings, and those of other ranks that are not the same."""
        mine = (*self.opening, *budget_lines(self.recipe, self.state.steps), *self.world.model_summary, *self.world.warnings)
        lines = exchange(mine)
        for line in mine if rank() == 0 else ():
            self.message(line)
        for number, others in enumerate(lines[1:] if rank() == 0 else (), 1):
            for line in others:
                if line not in mine:
                    self.message(f"rank {number}: {line}")

    def _own_listeners(self) -> list[Listener]:
        """Callbacks, and what every run has: files and trackers if there is a folder, and findings on the first rank."""
        monitor = RunMonitor(self.recipe, self.message, self.report)
        run_folder = None if self.folder is None else self.folder.path
        callbacks: list[Listener] = []
        if self.callbacks:
            callback_run = Run(self.recipe, self.world, self.state, run_folder)
            callbacks = [CallbackListener(callback_run, self.callbacks)]
        return [*callbacks, *self._files(), *([] if rank() else [monitor])]

    def _files(self) -> list[Listener]:
        """The listeners that write in the run's folder, and the trackers."""
        if self.recipe.fingerprints and self.kept:
            self.learner.fingerprints = self.learner.fingerprints or Fingerprints(show=self.message)
        if self.folder is None:
            return []
        run_folder, steps, traces = self.folder.path, self.state.steps, self.recipe.traces
        self.row_files = [metrics_file(run_folder, self.state.iteration - (self.pending is not None), self.message)]
        if self.learner.fingerprints is not None:
            here = {**machine(self.recipe, world_size()), "steps": self.recipe.steps}
            self.row_files.append(fingerprint_file(run_folder, self.state.iteration, here))
        if traces.rows:
            self.learner.recorder = Recorder(self.recipe.trace_every, traces.rows, self.world.row_details)
        return [
            TraceFolder(run_folder / "traces", steps, traces.max_megabytes, self.message),
            SampleFolder(run_folder / "samples", steps),
            *self.row_files,
            *tracker_listeners(self.recipe, run_folder, self._report_failure),
        ]

    def _publish_rollout(self, rollout: Rollout) -> None:
        self._publish_initial_samples()
        with together():
            self.saver.report()
            self.publish(RolloutEnd(rollout))
            self._begin("learning")

    def _publish_initial_samples(self) -> None:
        """Publish samples of the policy before its first update, once; without held-out prompts those of the first rollout."""
        if not self.kept or self.sampled or self.state.updates:
            return
        if samples := self.world.samples():
            self.sampled = True
            with together():
                self.publish(InitialSamples(self.state, samples))

    def _finish_pending(self) -> bool:
        """Finish the iteration whose evaluation failed before; whether training stops there."""
        if self.pending is None:
            return False
        pending, self.pending = self.pending, None
        self.previous_steps = pending["previous"]
        return self._end_iteration(self.state, pending["metrics"])

    def _end_update(self, state: LearnerState, metrics: Metrics) -> bool:
        """End the iteration that has collected and learned; whether the run stops."""
        with state.timer.detail("logging"):
            used = self.machine_use.measure()
        stop = self._end_iteration(state, metrics | used)
        if self.profile is not None:
            self.profile.end_iteration()
        return stop

    def _end_iteration(self, state: LearnerState, metrics: Metrics) -> bool:
        """Evaluate, publish and save after an update; whether the run stops."""
        finished = state.steps >= state.total_steps
        evaluating = finished or self._crossed(self.recipe.evaluate_every)
        with together():
            self.saver.report()
            metrics = self._publish_update(metrics)
        if evaluating:
            with state.timer.detail("evaluation"):
                metrics |= self._evaluate_or_save(metrics)
        with together():
            stop = self.publish(IterationEnd(state, metrics)) or self.signals.stop_requested
        patience = self.recipe.evaluation.patience
        stop, waited = self._agree(stop or (evaluating and patience is not None and self.since_best >= patience))
        first = not self.saved and (waited or evaluating)
        with state.timer.detail("checkpoint"):
            if finished or stop or first or self._crossed(self.recipe.checkpoint_every):
                with self.in_phase(f"saving at step {state.steps:,}"):
                    self._save()
                    self.saver.write()
            else:
                self.saver.write()  # the best weights
        self.previous_steps = state.steps
        self._begin("collecting")
        return stop

    def _agree(self, stop: bool) -> tuple[bool, bool]:
        """Whether any rank stops, and whether the first checkpoint is due; the first rank publishes the others' messages."""
        waited = time.monotonic() - self.began >= FIRST_CHECKPOINT
        if world_size() == 1:
            return stop, waited
        values = exchange((stop, self.signals.stop_requested, self.lines, waited))
        stops, signalled, lines, late = zip(*values, strict=True)
        self.lines = []
        for number, of_rank in enumerate(lines if rank() == 0 else ()):
            for line in of_rank:
                self.message(f"rank {number}: {line}")
        if any(signalled):  # an assignment of False would undo a signal that has come since the exchange
            self.signals.stop_requested = True
        return any(stops), any(late)

    def _publish_update(self, metrics: Metrics) -> Metrics:
        """Publish an update with its trace; its metrics, which begin with the counts."""
        state, recorder, fingerprints = self.state, self.learner.recorder, self.learner.fingerprints
        counts: Metrics = {"iteration": state.iteration, "steps": state.steps, "updates": state.updates}
        metrics = counts | metrics
        trace = None if recorder is None else recorder.take(state)
        self.publish(UpdateEnd(state, metrics, trace, None if fingerprints is None else fingerprints.row))
        return metrics

    def _evaluate_or_save(self, metrics: Metrics) -> Metrics:
        """Metrics of an evaluation. If it fails or is stopped, save the update first; resuming repeats the evaluation."""
        try:
            return self._evaluate()
        except (Exception, EvaluationStoppedError) as error:
            if world_size() == 1 or (isinstance(error, SurefootError) and error.on_all_ranks):
                self.pending = {"previous": self.previous_steps, "metrics": metrics}
                with self.in_phase(f"saving at step {self.state.steps:,}"):
                    self._save_now()
            raise

    def _check_stopped(self) -> None:
        if self.signals.stop_requested and world_size() == 1:  # ranks stop together, after the evaluation
            raise EvaluationStoppedError(f"stopped at step {self.state.steps}")

    def _crossed(self, every: int) -> bool:
        """Whether this iteration crossed a multiple of ``every`` steps; the same in a resumed run."""
        return self.state.steps // every > self.previous_steps // every

    def _evaluate(self) -> Metrics:
        with self.learner.resting(), self.in_phase(f"evaluating at step {self.state.steps:,}"), checked(self._check_stopped):
            report = self.world.evaluate()
        with together():
            if self.best is None and self.folder is not None:
                # No best score was restored, so anything in best/ has scores that can't be compared.
                for path in prune(self.folder.best, keep=0):
                    self.message(f"removed {self.folder.as_shown(str(path))}: its score can't be compared with those to come")
        if report is None:
            return {}
        self._keep_best(report)
        with together():
            self.publish(EvaluationEnd(self.state, report))
            return report.metrics

    def _keep_best(self, report: EvaluationReport) -> None:
        score = report.score if report.score is not None and math.isfinite(report.score) else None
        self.since_best += int(score is not None)
        if score is None or (self.best is not None and score <= self.best):
            return
        self.best, self.since_best, self.best_at = score, 0, self.state.steps
        self._copy_best()

    def _copy_best(self) -> None:
        if not self.kept:
            return
        best = None if self.folder is None else self.folder.best / str(self.state.steps)
        self.saver.copy(best, self.world.checkpoint_parts, keep_only_this)

    # ---- checkpoints -------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Copy what a checkpoint holds."""
        if not self.kept:
            return
        check_same_weights(self.world.policy)
        collector = self.world.collector.state_dict()  # of all ranks
        path = None if self.folder is None else self.folder.checkpoints / str(self.state.steps)

        def clean(written: Path) -> None:
            prune(written.parent, self.recipe.checkpoint.keep)

        self.saver.copy(path, lambda: self._checkpoint_parts(collector), clean, self.row_files, resumable=True)
        if self.learner.fingerprints is not None:
            self.learner.fingerprints.wanted = True
        if not self.saved:  # so a folder without checkpoints belongs to a run that has saved none
            self.saver.write_first()
            self.saved = True

    def _save_now(self) -> None:
        """Save, and wait until it is on the disk."""
        self._save()
        self.saver.write()
        self.saver.wait()

    def _publish_checkpoint(self, path: Path) -> None:
        """Publish a checkpoint that is on the disk now, but not the best one."""
        if self.folder is not None and path.parent == self.folder.checkpoints:
            self.publish(CheckpointSaved(self.state, path))

    def _checkpoint_parts(self, collector: dict[str, Any]) -> dict[str, Any]:
        return {
            **self.world.checkpoint_parts(),
            "recipe": self.recipe.table,
            "learner": self.learner.state_dict(),
            "collector": collector,
            "state": self.state.state_dict(),
            "progress": {"best": self.best, "since_best": self.since_best, "best_at": self.best_at},
            "pending": self.pending or {},
            "attributes": self.code.changed(),
            "code": self.sources,  # the world has sources of its own: data and base weights
        }

    def _hand_over(self, stop: Interrupted | SurefootError) -> None:
        """Give the exception that ends the run what it has trained, and what is no error the next command."""
        if stop.result is not None:  # of a run in a callback of this one
            return
        stop.result = self.world.result
        if isinstance(stop, LabelsNeededError) and self.folder is not None:
            stop.args = (self.folder.as_shown(str(stop)),)
        if isinstance(stop, Interrupted):
            remedy = "a run without run_dir can't be resumed; the exception's attribute result is what it has trained"
            if self.folder is not None:
                ranks = f" --ranks {world_size()}" if world_size() > 1 else ""
                remedy = f"continue with: surefoot resume {self.folder.shown}{ranks}"
            stop.args = (f"{stop}; {remedy}",)

    def _export(self) -> None:
        with together():
            if self.folder is not None:
                lines = self.world.finish(self.folder.path)
                if lines and self.best_at not in (None, self.state.steps):
                    lines.append(f"it has the weights of step {self.best_at:,}, whose evaluation was the best")
                for line in lines:
                    self.message(self.folder.as_shown(line))
                if self.world.exports_model:
                    self.folder.finish(self.state.steps)
        if self.kept and not self.sharded:
            broadcast_weights(self.world.policy)  # the first rank has loaded the best ones


def whole_budget(recipe: Recipe, done: int) -> int:
    """The budget in whole iterations after ``done`` steps, if the steps of an iteration are known."""
    each = recipe.iteration_steps or 1
    return done + max(0, -(-(recipe.steps - done) // each)) * each


def budget_lines(recipe: Recipe, done: int) -> list[str]:
    """What the budget becomes after ``done`` steps, if it is not a multiple of an iteration."""
    each, becomes = recipe.iteration_steps, whole_budget(recipe, done)
    if each is None or becomes == recipe.steps:
        return []
    iterations, more = (becomes - done) // each, " more" if done else ""
    many = f"{iterations:,}{more} iterations" if iterations > 1 else f"one{more} iteration"
    return [f"steps={recipe.steps}: becomes {becomes:,}, since only whole iterations train ({many} of {each:,} steps)"]
