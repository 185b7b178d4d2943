"""``surefoot ladder``: PPO is REINFORCE plus five fixes, on one task, each rung one switch above the one before.

Everything but the switches is the same on all rungs: network, optimizer, normalisation, γ, budget, seeds. One thing cannot be:
rungs 0 and 1 learn from whole episodes, since nothing stands for what a cut one would still have earned. They run episodes one
after the other until as many steps are there as the other rungs have in a batch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.compare.algorithms import refuse_unused
from surefoot.compare.cells import Cell, check_trainable, default_folder, folder_of, recipe_tables, run_cells, seeds_of
from surefoot.compare.gradients import Samples, noise_of, sample_gradients
from surefoot.compare.ladder_report import report_text
from surefoot.compare.plots import draw_ladder
from surefoot.compare.progress import Overall
from surefoot.compare.report import Report, finite, write_report
from surefoot.core.algorithms import ALGORITHMS, LADDER, Objective, switches_that_are_on
from surefoot.errors import SurefootError
from surefoot.files import read_table, write_text
from surefoot.recipes.changes import merge_tables, without_critic, without_tuned_for
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import recipe_table
from surefoot.recipes.reading import control_recipe, to_table
from surefoot.runs import api
from surefoot.runs.checkpoint import latest_checkpoint

NAMES = tuple(next(name for name, value in ALGORITHMS.items() if value == rung) for rung in LADDER)
MEASURED = 4
"""rungs whose gradients are compared at one θ: the first four, which make one update per batch"""
FROZEN = 0.1
"""the share of the budget after which the top rung's θ is frozen for that"""

REFUSED = {
    "baseline": "is what the ladder's second and third rungs turn",
    "normalise_advantages": "is off on all rungs, as subtracting the mean would make the first two the same",
}
"""switches that can't be set for all rungs, and why"""


def climb(
    what: str,
    changes: Mapping[str, Any],
    seeds: int,
    folder: Path | None = None,
    rungs: Sequence[int] = (),
    batches: int = 100,
    episodes: int = 20,
    jobs: int = 1,
    stderr: bool = False,
) -> Report:
    """Train the rungs on every seed, measure the noise of their gradients, and say how they did. The same call again continues.

    what      as for ``surefoot train``: an environment id, a preset, a .toml file
    changes   fields of the recipe for all rungs; a switch counts from the rung on that turns it
    seeds     how many; the first is the recipe's
    folder    where runs, results.json, report.md and the plot go; default: in runs/, named after task and budget
    rungs     which to train; all six unless given
    batches   under the frozen θ, for the gradients' variance
    episodes  of the greedy evaluation of each final agent
    jobs      trainings at a time, each in a process of its own where there are several

    Raises SurefootError before anything is written for what can't be trained, and Interrupted after a signal.
    """
    for rung in rungs:
        if not 0 <= rung < len(LADDER):
            raise SurefootError(f"rung={rung}: the ladder has rungs 0 to {len(LADDER) - 1}")
    refuse_unused(changes.get("objective", {}), dict(zip(NAMES, LADDER, strict=True)))
    chosen = sorted(set(rungs)) or list(range(len(LADDER)))
    recipes = {NAMES[rung]: rung_recipe(what, rung, changes) for rung in chosen}
    for rung in chosen:
        if rung and rung_recipe(what, rung - 1, changes).objective == recipes[NAMES[rung]].objective:
            raise SurefootError(
                f"rung={rung}: what is set for all rungs turns off what {NAMES[rung]} adds to {NAMES[rung - 1]}; leave it out"
            )
    measured = {name: recipes[name].objective for name in NAMES[:MEASURED] if name in recipes}
    top = rung_recipe(what, len(LADDER) - 1, changes)
    # Gradients are measured on whole episodes, so the task must be able to run those whatever rungs are trained.
    also = {"frozen": top, "gradients": rung_recipe(what, 0, changes)} if measured else {}
    check_trainable({**recipes, **also}, episodes)
    request = {"command": "ladder", "seeds": seeds, "episodes": episodes, "recipes": recipe_tables(recipes)}
    frozen = Cell("frozen", top, until=max(1, round(FROZEN * top.steps)))
    if measured:
        request["frozen"] = {"batches": batches, "until": frozen.until, **recipe_tables({"recipe": top})}
    folder = folder or default_folder("ladder", top)
    cells = [Cell(name, recipe) for name in recipes for recipe in seeds_of(recipes[name], seeds)]
    with folder_of(folder, request):
        everything = [*([frozen] if measured else []), *cells]
        steps = sum(cell.steps for cell in everything)
        overall = Overall(steps + (batches * top.batch_size if measured else 0), stderr)
        try:
            done = run_cells(folder, everything, episodes, jobs, overall)[bool(measured) :]
            gradients = _gradients(folder, frozen, measured, batches, overall) if measured else None
        finally:
            overall.close()
        clip = top.objective.clip
        results = {
            **request,
            "rungs": {NAMES[rung]: rung for rung in chosen},
            "clip": None if clip is None else clip.clip if clip.clip_high is None else clip.clip_high,
            "results": {name: [result for result in done if result["label"] == name] for name in recipes},
            "gradients": gradients,
        }
        return write_report(folder, results, report_text(results, recipes, top), draw_ladder)


def rung_recipe(what: str, rung: int, changes: Mapping[str, Any]) -> ControlRecipe:
    """The recipe of one rung: what the task's own says apart from the objective; of that, γ and how a batch is reused.

    Raises SurefootError for a change that would take the ladder's steps away.
    """
    wanted = dict(changes.get("objective", {}))
    for name, why in REFUSED.items():
        if wanted.get(name, "none") != "none":
            raise SurefootError(f"objective.{name}={wanted[name]!r}: {why}; leave the flag out")
    base, table = LADDER[rung], without_tuned_for(recipe_table(what))
    tuned = dict(table.pop("objective", {}))
    own = {name: tuned[name] for name in ("gamma", "reuse") if tuned.get(name, "none") != "none"}
    objective = switches_that_are_on(base, merge_tables(own, {k: v for k, v in wanted.items() if k not in REFUSED}))
    table = without_critic(
        base, {**merge_tables(table, {k: v for k, v in changes.items() if k != "objective"}), "algorithm": NAMES[rung]}
    )
    recipe = control_recipe({**table, "objective": objective})
    if not recipe.objective.needs_whole_episodes:
        return recipe
    rollout = recipe.rollout
    alone = {"environments": 1, "at_least": rollout.at_least or recipe.batch_size, "workers": rollout.workers and 1}
    return control_recipe(merge_tables(to_table(recipe), {"rollout": alone}))


def _gradients(folder: Path, frozen: Cell, measured: Mapping[str, Objective], batches: int, overall: Overall) -> dict[str, Any]:
    """The noise of the measured rungs' gradients under the frozen agent, from where it was kept or anew."""
    file = folder / "gradients.json"
    if file.exists():
        return read_table(file)
    checkpoint = latest_checkpoint(folder / frozen.name / "checkpoints")
    assert checkpoint is not None, "a cell that is finished has a checkpoint"
    agent, size = api.load(checkpoint), frozen.recipe.batch_size

    def on_batch(done: int) -> None:
        overall.step("gradients", done * size)

    samples = sample_gradients(agent, list(measured.values()), batches, size, frozen.recipe.seed, on_batch=on_batch)
    found = _measurement(samples, list(measured), int(checkpoint.name), agent.recipe.seed)
    write_text(file, json.dumps(found))
    overall.say(f"gradients of {len(measured)} rungs on {batches} batches of {found['steps_per_batch']:,.0f} steps measured")
    return found


def _measurement(samples: Samples, names: Sequence[str], step: int, seed: int) -> dict[str, Any]:
    noise = dict(zip(names, map(asdict, noise_of(samples.gradients)), strict=True))
    found: dict[str, Any] = finite(
        {
            "frozen_at": step,
            "frozen_seed": seed,
            "batches": samples.gradients.shape[1],
            "steps_per_batch": sum(samples.steps) / len(samples.steps),
            "episodes": samples.episodes,
            "cut": samples.cut,
            "noise": noise,
        }
    )
    return found
