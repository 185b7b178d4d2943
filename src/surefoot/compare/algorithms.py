"""``surefoot compare-algorithms``: several algorithms on one task, with the same budget and the same seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from surefoot.compare.cells import Cell, check_trainable, default_folder, folder_of, recipe_tables, run_cells, seeds_of
from surefoot.compare.plots import draw_comparison
from surefoot.compare.progress import Overall
from surefoot.compare.report import COUNT, Report, average, how_sure, score_table, seeds_in_words, setting_of, write_report
from surefoot.compare.statistics import markdown_table
from surefoot.core.algorithms import ALGORITHMS, Objective, switches_that_are_on
from surefoot.errors import SurefootError
from surefoot.recipes.changes import without_critic
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import as_control, unknown_algorithm

SCORES = {
    "last_100_mean": "Return in training: the mean of the last 100 training episodes, actions sampled.",
    "greedy_mean": "Return of the final agent, acting greedily.",
    "average_return": "Return averaged over the whole run: the area under the curve, divided by its length.",
}


def compare_algorithms(
    what: str,
    algorithms: Sequence[str],
    changes: Mapping[str, Any],
    seeds: int,
    folder: Path | None = None,
    episodes: int = 20,
    jobs: int = 1,
    stderr: bool = False,
) -> Report:
    """Train every algorithm on every seed and say how they did. The same call again continues or reports anew.

    what        as for ``surefoot train``: an environment id, a preset, a .toml file
    algorithms  names from ``ALGORITHMS``; each is trained in the recipe that ``surefoot train --algorithm`` gives it
    changes     fields of the recipe for all of them; a switch that an algorithm has off stays off there
    seeds       how many; the first is the recipe's
    folder      where runs, results.json, report.md and the plot go; default: in runs/, named after task and budget
    episodes    of the greedy evaluation of each final agent
    jobs        trainings at a time, each in a process of its own where there are several

    Raises SurefootError before anything is written for what can't be trained, and Interrupted after a signal.
    """
    recipes = recipes_for(what, algorithms, changes)
    check_trainable(recipes, episodes)
    request = {"command": "compare-algorithms", "seeds": seeds, "episodes": episodes, "recipes": recipe_tables(recipes)}
    folder = folder or default_folder("compare", next(iter(recipes.values())))
    cells = [Cell(name, recipe) for name in recipes for recipe in seeds_of(recipes[name], seeds)]
    with folder_of(folder, request):
        overall = Overall(sum(cell.steps for cell in cells), stderr)
        try:
            done = run_cells(folder, cells, episodes, jobs, overall)
        finally:
            overall.close()
        by_name = {name: [result for result in done if result["label"] == name] for name in recipes}
        results = {**request, "results": by_name}
        return write_report(folder, results, report_text(by_name, recipes, seeds, episodes), draw_comparison)


def recipes_for(what: str, algorithms: Sequence[str], changes: Mapping[str, Any]) -> dict[str, ControlRecipe]:
    """One recipe per algorithm, with the changes laid over it.

    Raises SurefootError for a name that is unknown or there twice, and for a switch that none of them has on.
    """
    for name in algorithms:
        if name not in ALGORITHMS:
            raise unknown_algorithm("algorithms", name)
    twice = sorted({name for name in algorithms if list(algorithms).count(name) > 1})
    if twice:
        raise SurefootError(f"algorithms: {twice[0]!r} is there twice; name each once")
    wanted = dict(changes.get("objective", {}))
    refuse_unused(wanted, {name: ALGORITHMS[name] for name in algorithms})
    recipes = {}
    for name in algorithms:
        kept = switches_that_are_on(ALGORITHMS[name], wanted)
        fields = {**changes, "algorithm": name, **({"objective": kept} if wanted else {})}
        try:
            recipes[name] = as_control(find_recipe(what, without_critic(ALGORITHMS[name], fields)))
        except SurefootError as error:
            raise SurefootError(f"{name}: {error}" if len(algorithms) > 1 else str(error)) from None
    return recipes


def refuse_unused(wanted: Mapping[str, Any], bases: Mapping[str, Objective]) -> None:
    """Raise SurefootError for a change that ``switches_that_are_on`` keeps for none of the algorithms."""
    unused = set(_leaves(wanted)).difference(*(_leaves(switches_that_are_on(base, wanted)) for base in bases.values()))
    if unused:
        raise SurefootError(f"objective.{min(unused)}: none of {', '.join(bases)} has this switch on; leave the flag out")


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def report_text(
    by_name: Mapping[str, list[dict[str, Any]]], recipes: Mapping[str, ControlRecipe], seeds: int, episodes: int
) -> str:
    """The tables, and what they are made of."""
    recipe = next(iter(recipes.values()))
    parts = [f"# {recipe.task}: {', '.join(recipes)}"]
    parts.append(f"{recipe.steps:,} environment steps for each of {seeds_in_words(recipe.seed, seeds)}.")
    for score, title in SCORES.items():
        if score != "greedy_mean" or episodes:
            parts.append(title + (f" {episodes} episodes for each seed." if score == "greedy_mean" else ""))
            parts.append(score_table(by_name, score))
    header = ["algorithm", "switches", "batch", "batches", "updates", "largest ratio", "seconds"]
    rows = []
    for name, results in by_name.items():
        counts = (average(results, key, COUNT) for key in ("rollouts", "updates"))
        last = (average(results, "ratio_max"), average(results, "seconds", COUNT))
        rows.append([name, switches_in_words(recipes[name].objective), batch_of(recipes[name]), *counts, *last])
    parts += ["What each is and did, averaged over seeds.", markdown_table(header, rows)]
    parts.append("\n".join(f"- {line}." for line in notes(recipes, seeds)))
    return "\n\n".join(parts)


def batch_of(recipe: ControlRecipe) -> str:
    """What is collected before each update."""
    rollout = recipe.rollout
    if not recipe.objective.needs_whole_episodes:
        return f"{recipe.batch_size:,} steps"
    if rollout.at_least is not None:
        return f"whole episodes, {rollout.at_least:,} steps or more"
    return f"{rollout.environments * rollout.episodes} whole episodes"


def switches_in_words(objective: Objective) -> str:
    """What an objective has on."""
    reuse, region = objective.reuse, objective.trust_region
    critic = f"critic, λ = {objective.gae_lambda:g}"
    parts = [{None: "no baseline", "mean": "mean return as baseline", "critic": critic}[objective.baseline]]
    if reuse is not None:
        parts.append(f"{reuse.epochs} × {reuse.minibatches} updates")
    if region is not None:
        first, *others = ((f.name, getattr(region, f.name), f.default) for f in fields(region))
        changed = ", ".join(f"{name} {value}" for name, value, default in others if value != default)
        parts.append(f"{first[0]} {first[1]}" + (f" ({changed})" if changed else ""))
    if objective.normalise_advantages is not None:
        parts.append("advantages normalised")
    return ", ".join(parts)


def notes(recipes: Mapping[str, ControlRecipe], seeds: int) -> list[str]:
    """What a reader must know to judge the tables."""
    first, *others = ((r.network, r.optimizer, r.normalise, r.objective.gamma) for r in recipes.values())
    alike = all(other == first for other in others)
    shared = f"Setting: {setting_of(next(iter(recipes.values())))}" if alike else "Settings differ; they are in results.json"
    return [
        "Each algorithm is what `surefoot train --algorithm` makes of it for this task: the switches in which it differs from "
        "the algorithm that the recipe was tuned for are its own, all other settings are the recipe's",
        shared,
        "A training ends with the batch that reaches the budget",
        "IQM: the mean of the middle half of the seeds",
        how_sure(seeds),
    ]
