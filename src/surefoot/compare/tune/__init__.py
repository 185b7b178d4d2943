"""Search for better settings of a recipe with Optuna: ``surefoot tune``.

The folder of a study contains its settings (request.json), Optuna's database (study.db), one ordinary run folder per trial and
seed (trials/N-seedS), the best recipe (best.toml) and results.json. Any number of processes may work on a study, of one
command or of several. Each trial is locked by the process that trains it. A running trial without a lock was killed; the next
process continues it from the checkpoints of its runs, so no trial is lost or counted twice.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.compare.cells import REQUEST, default_folder
from surefoot.compare.processes import OverallProgress, run_works
from surefoot.compare.statistics import finite
from surefoot.compare.tune.result import best_toml, result_text, results_of
from surefoot.compare.tune.study import FIXED, WAIT, Plan, Study, usable_database
from surefoot.compare.tune.trials import train_run, work_on
from surefoot.core.algorithms import check_count
from surefoot.errors import Interrupted, SurefootError, require_package
from surefoot.files import read_toml, write_text
from surefoot.ranks.launching import check_single_process
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import resolve_recipe
from surefoot.recipes.reading import flatten
from surefoot.recipes.spaces import parsed_space, space_for
from surefoot.runs.factory import make_world
from surefoot.runs.session import Session
from surefoot.store.folder import folder_lock, match_settings

if TYPE_CHECKING:
    import optuna


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

    Raises SurefootError if the folder has no study.
    """
    require_package("optuna", "tune", "surefoot tune")
    check_single_process(folder)
    plan = Plan.read(folder)
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
        results = finite(results_of(study, best, confirmed))
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
    (study.folder / "confirm").mkdir(exist_ok=True)
    for name, values in labels.items():
        for index in range(count):
            recipe = plan.seeded(plan.seeds + index, {**values, "evaluation.seed": plan.recipe.evaluation.seed + 1})
            path = study.folder / "confirm" / f"{name.replace(' ', '-')}-seed{recipe.seed}"
            works[f"{name}/{index}"] = partial(train_run, path, recipe)
    progress.print(f"training {' and '.join(labels)} on {count} new seeds")
    done = _work(works, jobs, progress, study.folder, lambda: "the confirmation unfinished")
    return {name: [done[f"{name}/{index}"] for index in range(count) if f"{name}/{index}" in done] for name in labels}
