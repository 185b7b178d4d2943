"""What a study searches, and its trials in Optuna's database, each locked by the process that trains it."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from surefoot.compare.cells import REQUEST, reached
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, cause_of
from surefoot.files import read_table
from surefoot.recipes.base import Recipe
from surefoot.recipes.reading import flatten, make_recipe
from surefoot.recipes.spaces import Choices, Range, Space, parsed_space, with_values
from surefoot.store.folder import CHANGE_NOTHING, MEASURES, folder_lock

if TYPE_CHECKING:
    import optuna

SCORED = "is part of how runs are scored, so its trials could not be compared"
CHANGES_NOTHING = "changes no score"
FIXED = {
    **dict.fromkeys(MEASURES, SCORED),
    "evaluation": SCORED,
    **dict.fromkeys((*CHANGE_NOTHING, "device", "threads", "checkpoint", "traces"), CHANGES_NOTHING),
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
        table = self.recipe.table
        return {"command": "tune", "recipe": table, "space": space, "seeds": self.seeds, "prune": self.prune}

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """The plan of a study. Raises SurefootError if the folder has none."""
        if not (folder / REQUEST).is_file():
            raise SurefootError(f"{folder}: has no study to resume; begin one with: surefoot tune WHAT --run-dir {folder}")
        try:
            request = read_table(folder / REQUEST)
        except SurefootError as error:
            raise SurefootError(f"{error}; choose another --run-dir") from None
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
        table = dict(flatten(self.recipe.table))
        inside = all(part.has(table[field]) for field, part in self.space.items())
        return {field: table[field] for field in self.space} if inside else None

    @property
    def evaluations(self) -> int:
        """The number of evaluations of a run, if its batches are small."""
        return -(-self.recipe.steps // self.recipe.evaluate_every)


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
