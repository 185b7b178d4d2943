"""Train several algorithms on one task with the same budget and seeds: ``surefoot compare-algorithms``."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from surefoot.compare.cells import (
    Cell,
    check_counts,
    default_folder,
    locked_folder,
    recipe_tables,
    run_cells,
    seeds_of,
)
from surefoot.compare.plots import draw_comparison
from surefoot.compare.processes import OverallProgress
from surefoot.compare.report import Report, interval_note, rendered, score_table, seeds_text, shared_settings, write_report
from surefoot.compare.statistics import COUNT, Results, average, markdown_table
from surefoot.core.algorithms import ALGORITHMS, Objective, algorithm_named, switches_that_are_on
from surefoot.errors import SurefootError
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import as_control, flatten, unknown_algorithm, without_critic

SCORES = {
    "last_100_mean": "Return in training: the mean of the last 100 training episodes, actions sampled.",
    "greedy_mean": "Return of the final agent, acting greedily.",
    "average_return": "Return averaged over the whole run: the area under the curve, divided by its length.",
}


ABLATION = {
    "no-clip": ("PPO_UNCLIPPED", ("value_coefficient", "entropy_coefficient")),
    "fixed-penalty": ("PPO_PENALTY", ("value_coefficient", "entropy_coefficient")),
    "adaptive-penalty": ("PPO_PENALTY_ADAPTIVE", ("value_coefficient", "entropy_coefficient")),
    "clip": ("PPO_CLIP", ("value_coefficient", "entropy_coefficient")),
    "clip+value": ("PPO_CLIP", ("entropy_coefficient",)),
    "clip+value+entropy": ("PPO_CLIP", ()),
}
"""PPO's objective, term by term (arXiv 1707.06347, equations 6 to 9): an algorithm, and the coefficients that are 0"""
ENTROPY = 0.01
"""weight of the entropy bonus in ``ABLATION`` if the recipe has none; the paper's for Atari"""


def compare_algorithms(
    task: str,
    algorithms: Sequence[str] | None,
    changes: Mapping[str, Any],
    seeds: int,
    folder: Path | None = None,
    episodes: int = 20,
    jobs: int = 1,
    stderr: bool = False,
) -> Report:
    """Train every algorithm on every seed and report the scores. The same call again continues, or writes the report again.

    task        as for ``surefoot train``: an environment id, a preset or a .toml file
    algorithms  names from ``ALGORITHMS``; each is trained with the recipe of ``surefoot train --algorithm``; None: ``ABLATION``
    changes     recipe fields to change for all algorithms; a switch that is off in an algorithm stays off
    seeds       number of seeds; the first is the recipe's
    folder      folder for runs, results.json, report.md and the plot; default: in runs/, named after task and budget
    episodes    number of greedy episodes that evaluate each final agent
    jobs        number of runs at a time; more than one run in separate processes
    stderr      print progress to stderr

    Raises SurefootError for a count out of bounds or a recipe that can't be trained, before writing anything, and Interrupted
    after a signal.
    """
    check_counts(seeds, episodes, jobs)
    recipes = ablation_of(task, changes) if algorithms is None else recipes_for(task, algorithms, changes)
    request = {"command": "compare-algorithms", "seeds": seeds, "episodes": episodes, "recipes": recipe_tables(recipes)}
    folder = folder or default_folder("compare", next(iter(recipes.values())))
    cells = [Cell(name, recipe) for name in recipes for recipe in seeds_of(recipes[name], seeds)]
    with locked_folder(folder, request, recipes):
        with OverallProgress(sum(cell.steps for cell in cells), stderr) as progress:
            by_name = run_cells(folder, cells, episodes, jobs, progress)
        results = {**request, "results": by_name}
        return write_report(folder, results, report_text(by_name, recipes, seeds, episodes), draw_comparison)


def recipes_for(task: str, algorithms: Sequence[str], changes: Mapping[str, Any]) -> dict[str, ControlRecipe]:
    """The recipe of each algorithm, with the changes applied.

    Raises SurefootError for an unknown or repeated name, and for a change to a switch that is off in all algorithms.
    """
    algorithms = [algorithm_named(name) for name in algorithms]
    for name in algorithms:
        if name not in ALGORITHMS:
            raise unknown_algorithm("algorithms", name)
    twice = sorted({name for name in algorithms if list(algorithms).count(name) > 1})
    if twice:
        raise SurefootError(f"algorithms: {twice[0]!r} is listed twice; list each algorithm once")
    switches = dict(changes.get("objective", {}))
    check_switches_used(switches, {name: ALGORITHMS[name] for name in algorithms})
    recipes = {}
    for name in algorithms:
        kept = switches_that_are_on(ALGORITHMS[name], switches)
        fields = {**changes, "algorithm": name, **({"objective": kept} if switches else {})}
        try:
            recipes[name] = as_control(find_recipe(task, without_critic(ALGORITHMS[name], fields)))
        except SurefootError as error:
            raise SurefootError(f"{name}: {error}" if len(algorithms) > 1 else str(error)) from None
    return recipes


def ablation_of(task: str, changes: Mapping[str, Any]) -> dict[str, ControlRecipe]:
    """The recipe of each row of ``ABLATION``: PPO's objective without some of its terms, all else as in the recipe.

    Raises SurefootError as ``recipes_for``.
    """
    full = recipes_for(task, list(dict.fromkeys(name for name, _ in ABLATION.values())), changes)
    recipes = {}
    for label, (name, off) in ABLATION.items():
        objective = full[name].objective
        weights: dict[str, Any] = {"entropy_coefficient": objective.entropy_coefficient or ENTROPY, **dict.fromkeys(off, 0.0)}
        recipes[label] = full[name].model_copy(update={"objective": replace(objective, **weights)})
    return recipes


def check_switches_used(switches: Mapping[str, Any], bases: Mapping[str, Objective]) -> None:
    """Raise SurefootError for a change to a switch that is off in all algorithms."""
    used = (dict(flatten(switches_that_are_on(base, switches))) for base in bases.values())
    unused = set(dict(flatten(switches))).difference(*used)
    if unused:
        raise SurefootError(f"objective.{min(unused)}: this switch is off in {', '.join(bases)}; leave the flag out")


def report_text(by_name: Mapping[str, Results], recipes: Mapping[str, ControlRecipe], seeds: int, episodes: int) -> str:
    """The Markdown report: a table of each score, the algorithms' settings, and notes."""
    first, *others = recipes.values()
    titles = {
        name: title + (f" {episodes} episodes for each seed." if name == "greedy_mean" else "")
        for name, title in SCORES.items()
    }
    header = ["algorithm", "switches", "batch", "batches", "updates", "largest ratio", "seconds"]
    rows = []
    for name, results in by_name.items():
        counts = (average(results, key, COUNT) for key in ("rollouts", "updates"))
        last = (average(results, "ratio_max"), average(results, "seconds", COUNT))
        rows.append([name, switches_text(recipes[name].objective), batch_text(recipes[name]), *counts, *last])
    return rendered(
        "algorithms.md",
        first=first,
        recipes=recipes,
        seeds=seeds_text(first.seed, seeds),
        scores=[(title, score_table(by_name, name)) for name, title in titles.items() if name != "greedy_mean" or episodes],
        settings=markdown_table(header, rows),
        shared=shared_settings(first) if all(_shared(other) == _shared(first) for other in others) else "",
        intervals=interval_note(seeds),
    ).rstrip()


def _shared(recipe: ControlRecipe) -> tuple[Any, ...]:
    return recipe.network, recipe.optimizer, recipe.normalise, recipe.objective.gamma


def batch_text(recipe: ControlRecipe) -> str:
    """The size of the batch that is collected before each update, in words."""
    rollout = recipe.rollout
    if not recipe.objective.needs_whole_episodes:
        return f"{recipe.batch_size:,} steps"
    if rollout.at_least is not None:
        return f"whole episodes, at least {rollout.at_least:,} steps"
    return f"{rollout.environments * rollout.episodes} whole episodes"


def switches_text(objective: Objective) -> str:
    """The switches that are on in an objective, in words."""
    reuse, region = objective.reuse, objective.trust_region
    critic = f"critic, λ = {objective.gae_lambda:g}"
    parts = [{None: "no baseline", "mean": "mean return as baseline", "critic": critic}[objective.baseline]]
    if reuse is not None:
        parts.append(f"epochs {reuse.epochs}, minibatches {reuse.minibatches}")
    if region is not None:
        first, *others = ((f.name, getattr(region, f.name), f.default) for f in fields(region))
        changed = ", ".join(f"{name} {value}" for name, value, default in others if value != default)
        parts.append(f"{first[0]} {first[1]}" + (f" ({changed})" if changed else ""))
    if objective.normalise_advantages is not None:
        parts.append("advantages normalised")
    if objective.baseline == "critic" and not objective.value_coefficient:
        parts.append("no value loss")
    if objective.entropy_coefficient:
        parts.append(f"entropy × {objective.entropy_coefficient:g}")
    return ", ".join(parts)
