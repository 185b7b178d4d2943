"""Search for better settings of a recipe with Optuna: ``surefoot tune``.

The folder of a study contains its settings (request.json), Optuna's database (study.db), one ordinary run folder per trial and
seed (trials/N-seedS), the best recipe (best.toml) and results.json. Any number of processes may work on a study, of one
command or of several. Each trial is locked by the process that trains it. A running trial without a lock was killed; the next
process continues it from the checkpoints of its runs, so no trial is lost or counted twice.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any

from surefoot.compare.cells import REQUEST, default_folder, is_trained, reached, run_listener, train_or_resume
from surefoot.compare.processes import OverallProgress, Parent, run_works
from surefoot.compare.report import interval_note
from surefoot.compare.statistics import finite, interval_text, mean, mean_interval, number, numbers, with_interval
from surefoot.compare.tune.study import FIXED, WAIT, Plan, Study, usable_database
from surefoot.core.algorithms import check_count
from surefoot.core.rollout import EvaluationReport
from surefoot.errors import Interrupted, SurefootError, require_package
from surefoot.files import read_toml, write_text
from surefoot.ranks.launching import check_single_process
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import resolve_recipe
from surefoot.recipes.reading import flatten, to_toml
from surefoot.recipes.spaces import parsed_space, space_for
from surefoot.runs.callbacks import Callback, Run
from surefoot.runs.display import joined
from surefoot.runs.factory import make_world
from surefoot.runs.session import Session, budget_lines
from surefoot.store.checkpoint import latest_checkpoint
from surefoot.store.folder import folder_lock, match_settings
from surefoot.store.manifest import read_listed_table
from surefoot.store.reading import FINISHED
from surefoot.terminal import wrapped

if TYPE_CHECKING:
    import optuna

ENOUGH = 4
"""trials from which the importance of fields is estimated"""


@dataclass(frozen=True)
class Result:
    """The state of a study after a command."""

    folder: Path
    results: dict[str, Any]
    """the contents of results.json"""
    text: str
    """for a terminal"""


def tune(
    what: str,
    space: Path | Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    trials: int = 20,
    seeds: int = 2,
    jobs: int = 1,
    prune: bool = True,
    confirm: int = 0,
    folder: Path | None = None,
    stderr: bool = False,
) -> Result:
    """Search for better settings of a recipe, or continue the search in the same folder.

    what      as for ``surefoot train``: a preset, a .toml file or an environment id
    space     the values to try: a .toml file or its tables; default: the shipped space for the recipe
    changes   recipe fields to change for all trials
    preset    the preset to start from, instead of the one tuned for the task
    trials    number of trials in the study, with those of earlier commands
    seeds     number of runs per trial; the first seed is the recipe's
    jobs      number of trials at a time; more than one in separate processes
    prune     stop trials whose evaluations are below the median of the others'
    confirm   number of new seeds on which to train the best recipe and the initial one; 0: none
    folder    default: in runs/, named after task and budget
    stderr    print progress to stderr

    Raises SurefootError for a missing extra, a space or recipe that can't be used, before writing anything, and for a folder
    with another study; Interrupted after a signal.
    """
    require_package("optuna", "tune", "surefoot tune")
    _check_counts(trials, seeds, jobs, confirm)
    recipe = resolve_recipe(what, changes, preset=preset).recipe
    if space is None:
        _, parts = space_for(what, recipe, FIXED)
    else:
        table, where = (read_toml(space), str(space)) if isinstance(space, Path) else (space, "space")
        parts = parsed_space(table, recipe, FIXED, where)
    plan = Plan(recipe, parts, seeds, prune)
    folder = folder or default_folder("tune", recipe)
    check_single_process(folder)
    if not (folder / REQUEST).exists():
        _check_trainable(recipe)
    with folder_lock(folder, REQUEST, WAIT):
        match_settings(folder / REQUEST, plan.to_json(), "choose another --run-dir")
    return _run(folder, trials, jobs, confirm, stderr)


def resume_study(folder: Path, *, trials: int | None = None, jobs: int = 1, confirm: int = 0, stderr: bool = False) -> Result:
    """Continue the study in a folder with its own settings. ``trials`` is None for the number of the last command.

    Raises SurefootError if the folder has no study, or if code that its recipe names has changed.
    """
    require_package("optuna", "tune", "surefoot tune")
    check_single_process(folder)
    plan = Plan.read(folder)
    match_settings(folder / REQUEST, plan.to_json(), "begin another study")
    if trials is None:
        with usable_database(folder):
            trials = Study(folder, plan).wanted
    _check_counts(trials, plan.seeds, jobs, confirm)
    return _run(folder, trials, jobs, confirm, stderr)


def _check_counts(trials: int, seeds: int, jobs: int, confirm: int) -> None:
    for name, count, least in (("trials", trials, 1), ("seeds", seeds, 1), ("jobs", jobs, 1), ("confirm", confirm, 0)):
        check_count(name, count, least=least)


def _check_trainable(recipe: Recipe) -> None:
    """Raise SurefootError for a recipe that can't start, or whose runs have no score. Write nothing."""
    if isinstance(recipe, ControlRecipe) and not recipe.evaluation.episodes:
        raise SurefootError("evaluation.episodes=0: trials are ranked by their evaluations; set it to 1 or more")
    table = dict(flatten(recipe.table))
    if "data.held_out" in table and table["data.held_out"] == "none":
        raise SurefootError("data.held_out=none: trials are ranked by held-out rows; set it to a file of rows")
    world = make_world(recipe)
    try:
        Session(recipe, world, None)
    finally:
        world.close()


def _run(folder: Path, wanted: int, jobs: int, confirm: int, stderr: bool) -> Result:
    """Train the missing trials, ``jobs`` at a time, confirm the best, and write the results."""
    with usable_database(folder):
        return _run_study(Study(folder, Plan.read(folder)), wanted, jobs, confirm, stderr)


def _run_study(study: Study, wanted: int, jobs: int, confirm: int, stderr: bool) -> Result:
    folder, plan = study.folder, study.plan
    study.optuna.set_user_attr("wanted", wanted)
    cost = plan.seeds * plan.recipe.steps
    with OverallProgress((wanted + confirm) * cost, stderr) as progress:
        for line in budget_lines(plan.recipe, 0):
            progress.print(line)
        ended = study.ended
        progress.skip("earlier trials", ended * cost)
        missing = wanted - ended
        if ended:
            progress.print(f"{ended} of {wanted} trials had already ended")
        workers = {f"worker {index}": partial(work_on, folder, wanted) for index in range(max(0, min(jobs, missing)))}
        _work(workers, jobs, progress, folder, lambda: f"{study.ended} of {wanted} trials ended")
        best = study.best
        if best is None:
            reasons = (trial.user_attrs.get(name) for trial in study.trials for name in ("error", "rejected"))
            first = next((f"the first error: {reason}" for reason in reasons if reason), None)
            why = first or "repeat the command when those in other processes have ended"
            raise SurefootError(f"{folder}: none of {len(study.trials)} trials was completed; {why}")
        confirmed = _confirm(study, best, confirm, jobs, progress) if confirm else None
    with folder_lock(folder, REQUEST, WAIT):  # another process may end now too
        results = finite(results_of(study, best, confirmed))
        write_text(folder / "results.json", json.dumps(results, allow_nan=False))
        write_text(folder / "best.toml", best_toml(study, best))
    return Result(folder, results, result_text(study, best, confirmed))


def _work(works: Mapping[str, Any], jobs: int, progress: OverallProgress, folder: Path, state: Any) -> dict[str, Any]:
    """Do all works. Raises Interrupted, with the state, after a signal, and SurefootError with the first failure."""
    results: dict[str, Any] = {}
    failures: list[str] = []
    try:
        run_works(works, jobs, progress, results.__setitem__, lambda name, message: failures.append(message))
    except (Interrupted, KeyboardInterrupt):
        raise Interrupted(f"stopped with {state()}; repeat the command to continue") from None
    if failures:
        remedy = "" if failures[0].startswith(str(folder)) else "; repeat the command to continue"
        raise SurefootError(f"{failures[0]}{remedy}")
    return results


def _confirm(
    study: Study, best: "optuna.trial.FrozenTrial", count: int, jobs: int, progress: OverallProgress
) -> dict[str, list[float]]:
    """The scores of the best and of the initial recipe on new seeds and new evaluation episodes or samples, by label."""
    plan = study.plan
    labels = {f"trial {best.number}": study.values(best)}
    if study.values(best) != plan.own_values:
        labels["initial recipe"] = {}
    works = {}
    (study.folder / "confirm").mkdir(exist_ok=True)
    for name, values in labels.items():
        for index in range(count):
            recipe = plan.seeded(plan.seeds + index, {**values, "evaluation.seed": plan.recipe.evaluation.seed + 1})
            path = study.folder / "confirm" / f"{name.replace(' ', '-')}-seed{recipe.seed}"
            works[f"{name}/{index}"] = partial(train_run, path, recipe)
    progress.print(f"training {' and '.join(labels)} on {count} new seeds")
    done = _work(works, jobs, progress, study.folder, lambda: "the confirmation unfinished")
    return {name: [done[f"{name}/{index}"] for index in range(count) if f"{name}/{index}" in done] for name in labels}


# ---- the trials of a study, one after another -------------------------------------------------------------------------


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
        chosen = study.suggest(trial).items()
        values = (f"{field.rpartition('.')[2]} {value:{'.4g' if isinstance(value, float) else ''}}" for field, value in chosen)
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
    if not is_trained(path, recipe.steps) or not (isinstance(recipe, ControlRecipe) or (path / FINISHED).is_file()):
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


# ---- results.json, best.toml, and lines for a terminal ----------------------------------------------------------------


def results_of(study: Study, best: "optuna.trial.FrozenTrial", confirmed: Mapping[str, list[float]] | None) -> dict[str, Any]:
    """The contents of results.json."""
    trials = [
        {
            "number": trial.number,
            "state": state_of(trial),
            "value": trial.value if trial.state.name == "COMPLETE" else None,
            "scores": trial.user_attrs.get("scores", []),
            "values": study.values(trial),
            "error": trial.user_attrs.get("error") or trial.user_attrs.get("rejected"),
        }
        for trial in study.trials
    ]
    more = {"best": best.number, "importance": importance(study), "confirmed": confirmed}
    return {**study.plan.to_json(), "trials": trials, **more}


def state_of(trial: "optuna.trial.FrozenTrial") -> str:
    """``complete``, ``pruned``, ``rejected`` (its values don't fit each other), ``failed`` or ``running``."""
    if "rejected" in trial.user_attrs:
        return "rejected"
    return {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())


def importance(study: Study) -> dict[str, float]:
    """How much of the difference between good and other trials each field explains (PED-ANOVA, arXiv 2304.10255).

    Empty for fewer than ``ENOUGH`` complete trials.
    """
    import optuna

    if sum(1 for trial in study.trials if trial.state.name == "COMPLETE") < ENOUGH:
        return {}
    shares = optuna.importance.get_param_importances(study.optuna, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    return {field: float(share) for field, share in shares.items()}


def best_toml(study: Study, best: "optuna.trial.FrozenTrial") -> str:
    """The recipe of the best trial, with a comment that says where it comes from."""
    plan = study.plan
    searched = "".join(f"#   {field} = {json.dumps(value)}\n" for field, value in study.values(best).items())
    return (
        f"# The best of {len(study.trials)} trials of surefoot tune: trial {best.number}, {number(best.value)} on "
        f"{plan.seeds} {'seed' if plan.seeds == 1 else 'seeds'}. It differs from the initial recipe in these fields only:\n"
        f"{searched}\n{to_toml(plan.seeded(0, study.values(best)))}"
    )


def result_text(study: Study, best: "optuna.trial.FrozenTrial", confirmed: Mapping[str, list[float]] | None) -> str:
    """The result in lines for a terminal."""
    trials, plan = study.trials, study.plan
    counts = Counter(map(state_of, trials)).items()
    lines = joined([f"{len(trials)} trials:", *(f"{count} {state}" for state, count in counts)])
    lines += ["", f"best: trial {best.number}, {_trial_score(best)}"]
    lines += [f"    {field} = {json.dumps(value)}" for field, value in study.values(best).items()]
    initial = next((trial for trial in trials if study.values(trial) == plan.own_values), None)
    if initial is not None and initial.number != best.number:
        score = _trial_score(initial) if initial.state.name == "COMPLETE" else state_of(initial)
        lines.append(f"initial recipe: trial {initial.number}, {score}")
    shares = importance(study)
    if shares:
        lines += joined(["importance (PED-ANOVA):", *(f"{field} {share:.0%}" for field, share in shares.items())])
    lines += ["", *_confirmed_lines(study, confirmed)]
    lines.append(f"train the best recipe with: surefoot train {study.folder / 'best.toml'}")
    if running := len(trials) - study.ended:
        lines.append(f"trials that still run in other processes: {running}; repeat the command when they have ended")
    return "\n".join(map(wrapped, lines))


def _trial_score(trial: "optuna.trial.FrozenTrial") -> str:
    scores = trial.user_attrs.get("scores", [])
    if len(scores) < 2:
        return number(trial.value)
    return f"{number(trial.value)} ± {number(stdev(scores))} (seeds: {numbers(scores)})"


def _confirmed_lines(study: Study, confirmed: Mapping[str, list[float]] | None) -> list[str]:
    """The scores on new seeds, or a warning that the best of several scores is too high."""
    if confirmed is None:
        return [
            "The best of several noisy scores is too high: expect less on other seeds. To measure how much:",
            f"    surefoot tune {study.folder} --resume --confirm 5",
        ]
    first = study.plan.recipe.seed + study.plan.seeds
    lines = [f"on new seeds ({first} to {first + len(next(iter(confirmed.values()))) - 1}):"]
    for name, scores in confirmed.items():
        value, interval = with_interval(scores)
        lines.append(f"    {name}: {value} (95 % interval {interval}; seeds: {numbers(scores)})")
    if len(confirmed) == 2:
        tuned, initial = confirmed.values()
        low, high = mean_interval(tuned, initial)
        judged = "better" if low > 0 else "worse" if high < 0 else "these seeds don't separate them"
        lines.append(f"    difference: {number(float(mean(tuned) - mean(initial)))} ({interval_text(low, high)}): {judged}")
    return [*lines, f"    {interval_note(len(next(iter(confirmed.values()))))}."]
