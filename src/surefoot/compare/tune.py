"""Search for better settings of a recipe with Optuna: ``surefoot tune``.

The folder of a study contains its settings (request.json), Optuna's database (study.db), one ordinary run folder per trial and
seed (trials/N-seedS), the best recipe (best.toml) and results.json. Any number of processes may work on a study, of one
command or of several. Each trial is locked by the process that trains it. A running trial without a lock was killed; the next
process continues it from the checkpoints of its runs, so no trial is lost or counted twice.
"""

import contextlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from surefoot.compare.cells import (
    REQUEST,
    default_folder,
    folder_lock,
    reached,
    read_result,
    run_listener,
    train_or_resume,
)
from surefoot.compare.processes import OverallProgress, Parent, run_works
from surefoot.compare.report import interval_note
from surefoot.compare.statistics import difference_interval, finite, interval_text, mean, number, numbers, with_interval
from surefoot.core.algorithms import check_count
from surefoot.core.ranks import check_single_process
from surefoot.core.rollout import EvaluationReport
from surefoot.core.seeding import derived_seed
from surefoot.errors import Interrupted, SurefootError, cause_of, missing_extra
from surefoot.files import read_table, read_toml, write_text
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import resolve_recipe
from surefoot.recipes.reading import flatten, make_recipe, to_table, to_toml
from surefoot.recipes.search_space import Choices, Range, Space, parsed_space, space_for, with_values
from surefoot.runs import api
from surefoot.runs.callbacks import Callback, Run
from surefoot.runs.checkpoint import latest_checkpoint
from surefoot.runs.display import joined
from surefoot.runs.folder import FREE, MEASURES, match_settings
from surefoot.runs.reading import FINISHED
from surefoot.runs.session import Session
from surefoot.terminal import wrapped

if TYPE_CHECKING:
    import optuna

SCORED = "is part of how runs are scored, so its trials could not be compared"
CHANGES_NOTHING = "changes no score"
FIXED = {
    **dict.fromkeys(MEASURES, SCORED),
    "evaluation": SCORED,
    **dict.fromkeys((*FREE, "device", "threads", "checkpoint", "traces"), CHANGES_NOTHING),
    "kind": "determines what is trained",
    "model": "determines what is trained",
    "steps": "is the budget that all trials share",
    "seed": "is the first of the seeds that all trials share",
    "algorithm": "switches many fields at once: compare algorithms with surefoot compare-algorithms",
}
"""fields that can't be searched, and why"""
DATABASE = "study.db"
WAIT = 120.0
"""seconds to wait for another process that chooses its next trial"""
CRASHES = 3
"""a trial whose process dies so many times without progress has failed"""
FAILURES = 3
"""if so many trials fail and none succeeds, the study stops"""
WARM_UP = 1 / 3
"""share of a run's evaluations that are too early to prune it"""
ENOUGH = 4
"""trials from which the importance of fields is estimated"""


@dataclass(frozen=True)
class Plan:
    """What a study searches, and how it scores a trial."""

    recipe: Recipe
    """the recipe that the search starts from"""
    space: Space
    seeds: int
    """each trial trains the recipe's seed, seed + 1, …; its value is the mean of their best evaluations"""
    prune: bool
    """stop trials whose evaluations are below the median of the others'"""

    def to_json(self) -> dict[str, Any]:
        """The contents of request.json."""
        space = {field: part.to_json() for field, part in self.space.items()}
        table = to_table(self.recipe)
        return {"command": "tune", "recipe": table, "space": space, "seeds": self.seeds, "prune": self.prune}

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """The plan of a study. Raises SurefootError if the folder has none."""
        if not (folder / REQUEST).is_file():
            raise SurefootError(f"{folder}: has no study to resume; begin one with: surefoot tune WHAT --run-dir {folder}")
        request = read_result(folder / REQUEST)
        if request.get("command") != "tune":
            raise SurefootError(f"{folder}: is the folder of another command; choose another --run-dir")
        recipe = make_recipe(request["recipe"])
        space = parsed_space(request["space"], recipe, FIXED, str(folder / REQUEST))
        return cls(recipe, space, request["seeds"], request["prune"])

    def seeded(self, index: int, values: Mapping[str, Any]) -> Recipe:
        """The recipe of a trial with a seed. Raises SurefootError if the values don't fit each other."""
        return with_values(self.recipe, {**values, "seed": self.recipe.seed + index})

    @cached_property
    def own_values(self) -> dict[str, Any] | None:
        """The recipe's own values of the searched fields; None if the space doesn't contain them."""
        table = dict(flatten(to_table(self.recipe)))
        inside = all(part.has(table[field]) for field, part in self.space.items())
        return {field: table[field] for field in self.space} if inside else None

    @property
    def evaluations(self) -> int:
        """The number of evaluations of a run, if its batches are small."""
        return -(-self.recipe.steps // self.recipe.evaluate_every)


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
) -> "Result":
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
    require_optuna()
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


def resume_study(folder: Path, *, trials: int | None = None, jobs: int = 1, confirm: int = 0, stderr: bool = False) -> "Result":
    """Continue the study in a folder with its own settings. ``trials`` is None for the number of the last command.

    Raises SurefootError if the folder has no study.
    """
    require_optuna()
    check_single_process(folder)
    plan = Plan.read(folder)
    if trials is None:
        with usable_database(folder):
            trials = Study(folder, plan).wanted
    _check_counts(trials, plan.seeds, jobs, confirm)
    return _run(folder, trials, jobs, confirm, stderr)


def require_optuna() -> None:
    """Raise SurefootError if the extra ``tune`` is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise missing_extra("optuna", "tune", "surefoot tune")


def _check_counts(trials: int, seeds: int, jobs: int, confirm: int) -> None:
    for name, count, least in (("trials", trials, 1), ("seeds", seeds, 1), ("jobs", jobs, 1), ("confirm", confirm, 0)):
        check_count(name, count, least=least)


def _check_trainable(recipe: Recipe) -> None:
    """Raise SurefootError for a recipe that can't start, or whose runs have no score. Write nothing."""
    if isinstance(recipe, ControlRecipe) and not recipe.evaluation.episodes:
        raise SurefootError("evaluation.episodes=0: trials are ranked by their evaluations; set it to 1 or more")
    table = dict(flatten(to_table(recipe)))
    if "data.held_out" in table and table["data.held_out"] == "none":
        raise SurefootError("data.held_out=none: trials are ranked by held-out rows; set it to a file of rows")
    world = api.make_world(recipe)
    try:
        Session(recipe, world, None)
    finally:
        world.close()


# ---- the study --------------------------------------------------------------------------------------------------------


class Study:
    """The trials of a study, in Optuna's database."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        import optuna
        import sqlalchemy

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder, self.plan = folder, plan
        # Without a pool: Optuna leaves its connections open.
        connect = {"connect_args": {"timeout": WAIT}, "poolclass": sqlalchemy.pool.NullPool}
        warm_up = math.ceil(plan.evaluations * WARM_UP)
        pruner = optuna.pruners.MedianPruner(n_warmup_steps=warm_up) if plan.prune else optuna.pruners.NopPruner()
        with folder_lock(folder, REQUEST, WAIT):  # two processes can't create the tables of one database
            (folder / "trials").mkdir(exist_ok=True)
            url = sqlalchemy.URL.create("sqlite", database=str((folder / DATABASE).absolute()))
            storage = optuna.storages.RDBStorage(url.render_as_string(), engine_kwargs=connect)
            self.optuna = optuna.create_study(
                storage=storage, study_name="surefoot", direction="maximize", pruner=pruner, load_if_exists=True
            )

    @property
    def trials(self) -> "list[optuna.trial.FrozenTrial]":
        """All trials that have begun, in order."""
        return [trial for trial in self.optuna.get_trials(deepcopy=False) if trial.state.name != "WAITING"]

    @property
    def ended(self) -> int:
        """The number of trials that are over, with or without a value."""
        return sum(trial.state.is_finished() for trial in self.trials)

    @property
    def wanted(self) -> int:
        """The number of trials that the last command asked for."""
        return int(self.optuna.user_attrs.get("wanted", 1))

    @property
    def best(self) -> "optuna.trial.FrozenTrial | None":
        """The complete trial with the highest value, the first of several; None if no trial is complete."""
        complete = [trial for trial in self.trials if trial.state.name == "COMPLETE"]
        return max(complete, key=lambda trial: -math.inf if trial.value is None else trial.value, default=None)

    @contextlib.contextmanager
    def claim(self, wanted: int) -> "Iterator[optuna.Trial | None]":
        """A trial to train, locked: one whose process was killed, else a new one; None if there are ``wanted`` already."""
        with folder_lock(self.folder, REQUEST, WAIT):
            trial, lock = self._killed() or self._new(wanted) or (None, None)
        try:
            yield trial
        finally:
            if lock is not None:
                lock.release()

    def _killed(self) -> "tuple[optuna.Trial, filelock.BaseFileLock] | None":
        import optuna

        for frozen in self.trials:
            if frozen.state.name != "RUNNING" or (lock := self._lock(frozen.number)) is None:
                continue
            if self.optuna.get_trials(deepcopy=False)[frozen.number].state.is_finished():  # before the lock was free
                lock.release()
                continue
            trial = optuna.Trial(self.optuna, frozen._trial_id)
            steps = sum(reached(path) for path in (self.folder / "trials").glob(f"{frozen.number}-seed*"))
            stuck = steps <= trial.user_attrs.get("reached", -1)
            crashes = trial.user_attrs.get("crashes", 0) + 1 if stuck and not trial.user_attrs.get("stopped") else 0
            for name, value in (("reached", steps), ("crashes", crashes), ("stopped", False)):
                trial.set_user_attr(name, value)
            if crashes < CRASHES:
                self.suggest(trial)
                return trial, lock
            self.fail(trial, f"its process died {CRASHES} times at step {steps:,}; see whether the memory is enough")
            lock.release()
        return None

    def _new(self, wanted: int) -> "tuple[optuna.Trial, filelock.BaseFileLock] | None":
        import optuna

        begun = len(self.trials)
        if begun >= wanted:
            return None
        if not self.optuna.get_trials(deepcopy=False) and self.plan.own_values is not None:
            own = {field: label(value) for field, value in self.plan.own_values.items()}
            self.optuna.enqueue_trial(own)  # the first trial is the recipe as it is
        # A sampler per trial, so that a study that was stopped continues with the numbers it would have had.
        self.optuna.sampler = optuna.samplers.TPESampler(seed=derived_seed(self.plan.recipe.seed, begun, "trial"))
        trial = self.optuna.ask()
        lock = self._lock(trial.number)
        assert lock is not None, "nobody else knows the trial"
        trial.set_user_attr("reached", 0)
        self.suggest(trial)
        return trial, lock

    def _lock(self, trial: int) -> filelock.BaseFileLock | None:
        """The lock of a trial; None if another process has it."""
        lock = filelock.FileLock(self.folder / "trials" / f".{trial}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return None
        return lock

    def suggest(self, trial: "optuna.Trial") -> dict[str, Any]:
        """The trial's value of each field; the same if it has values already."""
        return {field: _suggest(trial, field, part) for field, part in self.plan.space.items()}

    def values(self, trial: "optuna.trial.FrozenTrial") -> dict[str, Any]:
        """The values of a trial that has begun; without those that a kill left open."""
        space = self.plan.space
        return {field: _unlabelled(space[field], value) for field, value in trial.params.items() if field in space}

    def fail(self, trial: "optuna.Trial", error: str) -> None:
        """Record that a trial has failed."""
        import optuna

        trial.set_user_attr("error", error)
        self.optuna.tell(trial, state=optuna.trial.TrialState.FAIL)

    def check_some_succeed(self) -> None:
        """Raise SurefootError if several trials have failed and none was good."""
        states = [trial.state.name for trial in self.trials]
        if "COMPLETE" not in states and states.count("FAIL") >= FAILURES:
            error = next(trial.user_attrs.get("error") for trial in self.trials if trial.state.name == "FAIL")
            raise SurefootError(f"{self.folder}: {FAILURES} trials have failed and none was completed; the first: {error}")


def label(value: Any) -> Any:
    """A value as a choice of Optuna, which stores numbers and text."""
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else value


def _unlabelled(part: Range | Choices, value: Any) -> Any:
    return next(each for each in part.values if label(each) == value) if isinstance(part, Choices) else value


def _suggest(trial: "optuna.Trial", field: str, part: Range | Choices) -> Any:
    if isinstance(part, Choices):
        return _unlabelled(part, trial.suggest_categorical(field, [label(value) for value in part.values]))
    if part.whole:
        return trial.suggest_int(field, int(part.low), int(part.high), log=part.log, step=int(part.step or 1))
    return trial.suggest_float(field, part.low, part.high, log=part.log, step=part.step)


# ---- one trial --------------------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def usable_database(folder: Path) -> Iterator[None]:
    """Turn an error of the database into one line that names its file."""
    import optuna
    import sqlalchemy.exc

    try:
        yield
    except (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = cause_of(getattr(error, "orig", None) or error)
        raise SurefootError(f"{folder / DATABASE}: can't be used ({cause}); restore it, or choose another --run-dir") from None


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
                outcome = _run_trial(study, trial, parent)
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


def _run_trial(study: Study, trial: "optuna.Trial", parent: Parent) -> str:
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
    return None if checkpoint is None else read_table(checkpoint / "progress.json").get("best")


# ---- the result -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The state of a study after a command."""

    folder: Path
    results: dict[str, Any]
    """the contents of results.json"""
    text: str
    """for a terminal"""


def _run(folder: Path, wanted: int, jobs: int, confirm: int, stderr: bool) -> Result:
    """Train the missing trials, ``jobs`` at a time, confirm the best, and write the results."""
    with usable_database(folder):
        return _run_study(Study(folder, Plan.read(folder)), wanted, jobs, confirm, stderr)


def _run_study(study: Study, wanted: int, jobs: int, confirm: int, stderr: bool) -> Result:
    folder, plan = study.folder, study.plan
    study.optuna.set_user_attr("wanted", wanted)
    cost = plan.seeds * plan.recipe.steps
    with OverallProgress((wanted + confirm) * cost, stderr) as progress:
        ended = study.ended
        progress.skip("earlier trials", ended * cost)
        missing = wanted - ended
        if ended:
            progress.print(f"{ended} of {wanted} trials had already ended")
        workers = {f"worker {index}": partial(work_on, folder, wanted) for index in range(max(0, min(jobs, missing)))}
        _work(workers, jobs, progress, folder, lambda: f"{study.ended} of {wanted} trials ended")
        best = study.best
        if best is None:
            raise SurefootError(f"{folder}: none of {len(study.trials)} trials was completed; {_first_reason(study)}")
        confirmed = _confirm(study, best, confirm, jobs, progress) if confirm else None
    with folder_lock(folder, REQUEST, WAIT):  # another process may end now too
        results = finite(_results(study, best, confirmed))
        write_text(folder / "results.json", json.dumps(results, allow_nan=False))
        write_text(folder / "best.toml", best_toml(study, best))
    return Result(folder, results, result_text(study, best, confirmed))


def _first_reason(study: Study) -> str:
    reasons = (trial.user_attrs.get(name) for trial in study.trials for name in ("error", "rejected"))
    first = next((reason for reason in reasons if reason), None)
    return f"the first error: {first}" if first else "repeat the command when those in other processes have ended"


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
    for name, values in labels.items():
        for index in range(count):
            recipe = plan.seeded(plan.seeds + index, {**values, "evaluation.seed": plan.recipe.evaluation.seed + 1})
            path = study.folder / "confirm" / f"{name.replace(' ', '-')}-seed{recipe.seed}"
            works[f"{name}/{index}"] = partial(_confirmation, path, recipe)
    progress.print(f"training {' and '.join(labels)} on {count} new seeds")
    done = _work(works, jobs, progress, study.folder, lambda: "the confirmation unfinished")
    return {name: [done[f"{name}/{index}"] for index in range(count) if f"{name}/{index}" in done] for name in labels}


def _confirmation(path: Path, recipe: Recipe, parent: Parent) -> float:
    path.parent.mkdir(parents=True, exist_ok=True)
    return train_run(path, recipe, parent)


def _results(study: Study, best: "optuna.trial.FrozenTrial", confirmed: Mapping[str, list[float]] | None) -> dict[str, Any]:
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
    counts: dict[str, int] = {}
    for trial in trials:
        counts[state_of(trial)] = counts.get(state_of(trial), 0) + 1
    lines = joined([f"{len(trials)} trials:", *(f"{count} {state}" for state, count in counts.items())])
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
    spread = math.sqrt(float(mean([(score - float(mean(scores))) ** 2 for score in scores])) * len(scores) / (len(scores) - 1))
    return f"{number(trial.value)} ± {number(spread)} (seeds: {numbers(scores)})"


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
        low, high = difference_interval(tuned, initial)
        judged = "better" if low > 0 else "worse" if high < 0 else "these seeds don't separate them"
        lines.append(f"    difference: {number(float(mean(tuned) - mean(initial)))} ({interval_text(low, high)}): {judged}")
    return [*lines, f"    {interval_note(len(next(iter(confirmed.values()))))}."]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
