"""Train the trials of a study, one after another, and prune those that are not worth their time."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.compare.cells import reached, run_listener, train_or_resume
from surefoot.compare.processes import Parent
from surefoot.compare.statistics import mean, number, numbers
from surefoot.compare.tune.study import Plan, Study, usable_database
from surefoot.core.rollout import EvaluationReport
from surefoot.errors import Interrupted, SurefootError
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.runs.callbacks import Callback, Run
from surefoot.runs.display import joined
from surefoot.store.checkpoint import latest_checkpoint
from surefoot.store.manifest import read_listed_table
from surefoot.store.reading import FINISHED

if TYPE_CHECKING:
    import optuna


class Pruner(Callback):
    """Reports the evaluations of a trial's run to the study, and stops the run if the trial is not worth its time.

    scores   of the trial's runs before this one
    best     score of this run so far, if it is resumed
    """

    def __init__(self, trial: "optuna.Trial", plan: Plan, scores: Sequence[float], best: float | None) -> None:
        self.trial, self.plan, self.scores = trial, plan, scores
        self.best = -math.inf if best is None else best
        self.reported = set(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        self.pruned = False

    def on_evaluation(self, run: Run, report: EvaluationReport) -> bool | None:
        """Report the mean of the best scores so far; True if the trial is pruned."""
        if report.score is None or not math.isfinite(report.score):
            return None
        self.best = max(self.best, report.score)
        step = len(self.scores) * (self.plan.evaluations + 1) + run.steps // self.plan.recipe.evaluate_every
        if step not in self.reported:
            self.reported.add(step)
            self.trial.report(float(mean([*self.scores, self.best])), step)
        self.pruned = self.plan.prune and run.steps < run.recipe.steps and self.trial.should_prune()
        if self.pruned:
            self.trial.set_user_attr("pruned", True)
        return self.pruned


def work_on(folder: Path, wanted: int, parent: Parent) -> None:
    """Train trials until the study has as many as wanted.

    Raises Interrupted after a signal, or if the parent is gone, when the run is saved; SurefootError if all trials fail.
    """
    with usable_database(folder):
        _train_trials(Study(folder, Plan.read(folder)), wanted, parent)


def _train_trials(study: Study, wanted: int, parent: Parent) -> None:
    while not parent.stopped():
        with study.claim(wanted) as trial:
            if trial is None:
                return
            try:
                outcome = run_trial(study, trial, parent)
            except (Interrupted, KeyboardInterrupt):
                trial.set_user_attr("stopped", True)
                raise
            except SurefootError as error:
                study.fail(trial, str(error))
                outcome = f"failed: {error}"
        best = study.best
        shown = "" if best is None else f"best {number(best.value)} (trial {best.number})"
        values = (f"{field.rpartition('.')[2]} {_short(value)}" for field, value in study.suggest(trial).items())
        for line in joined([f"[{study.ended}/{wanted}] trial {trial.number}: {outcome}", shown, *values]):
            parent.print(line)
        study.check_some_succeed()


def run_trial(study: Study, trial: "optuna.Trial", parent: Parent) -> str:
    """Train the runs of a trial and record its value; the outcome in a few words.

    Raises SurefootError if a run fails, and Interrupted if it is stopped.
    """
    import optuna

    plan, values = study.plan, study.suggest(trial)
    scores: list[float] = list(trial.user_attrs.get("scores", ()))
    names = [f"{trial.number}-seed{plan.recipe.seed + index}" for index in range(plan.seeds)]
    pruned, best = bool(trial.user_attrs.get("pruned")), None  # True if it was killed after the decision
    for index in range(len(scores), plan.seeds):
        try:
            recipe = plan.seeded(index, values)
        except SurefootError as error:  # bad, not broken: the sampler should learn to avoid it
            trial.set_user_attr("rejected", str(error))
            study.optuna.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return f"rejected: {error}"
        path = study.folder / "trials" / names[index]
        if not pruned:
            pruner = Pruner(trial, plan, scores, best_score(path))
            score = train_run(path, recipe, parent, pruner)
            pruned = pruner.pruned
        if pruned:
            best = best_score(path)
            break
        scores.append(score)
        trial.set_user_attr("scores", scores)
    for name in names:  # also those that were left out
        parent.step(name, plan.recipe.steps)
    if pruned:
        study.optuna.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return f"pruned at {number(best)}"
    value = float(mean(scores))
    study.optuna.tell(trial, value)
    return number(value) + (f" (seeds: {numbers(scores)})" if len(scores) > 1 else "")


def train_run(path: Path, recipe: Recipe, parent: Parent, *callbacks: Callback) -> float:
    """Train a run or resume it, unless it is finished, and return its best score.

    Raises SurefootError if no evaluation has a score, and Interrupted if the parent is gone.
    """
    if reached(path) < recipe.steps or not (isinstance(recipe, ControlRecipe) or (path / FINISHED).is_file()):
        listener = run_listener(path.name, Parent(parent.step, lambda line: None))  # findings are in the run's files
        train_or_resume(path, recipe, listener, lambda metrics: parent.stopped(), callbacks)
        if parent.stopped():
            raise Interrupted(f"{path.name}: stopped at step {reached(path)}")
    parent.step(path.name, recipe.steps)
    score = best_score(path)
    if score is None and not any(isinstance(each, Pruner) and each.pruned for each in callbacks):
        raise SurefootError(f"{path}: no evaluation has a finite score; see: surefoot check {path}")
    return -math.inf if score is None else score


def best_score(path: Path) -> float | None:
    """The best score of a run's evaluations, by which it chose ``best/``; None without one."""
    checkpoint = latest_checkpoint(path / "checkpoints")
    return None if checkpoint is None else read_listed_table(checkpoint / "progress.json").get("best")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
