"""How good a finished run of language is: on held-out rows, beside the model that it started from."""

from pathlib import Path
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.files import read_toml
from surefoot.language.adapters.files import load_trained
from surefoot.language.analysis.attempts import Attempts, attempted
from surefoot.language.analysis.attempts import lines as attempt_lines
from surefoot.language.analysis.calibration import calibration
from surefoot.language.analysis.calibration import lines as calibration_lines
from surefoot.language.analysis.metrics import win_rate
from surefoot.language.data.rows import check_unchanged
from surefoot.language.online.answers import Answers
from surefoot.language.online.world import LanguageWorld
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.recipes.base import Recipe
from surefoot.recipes.language import LanguageRecipe, SupervisedRecipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.runs.checkpoint import load_checkpoint, require
from surefoot.runs.folder import checkpoint_to_load, recipe_differences
from surefoot.runs.paths import check_is_run

LABELS = {"kl": "KL to reference, nats", "log_likelihood": "log π of demonstrations"}
"""what the table calls what the metric's name does not tell"""


def evaluate_run(
    run: Path,
    *,
    data: str | None = None,
    rows: int | None = None,
    seed: int | None = None,
    attempts: Attempts | None = None,
) -> dict[str, Any]:
    """Judge the best checkpoint of a run (the last, where there is no best) on held-out rows.

    data       other rows than the recipe's held-out ones
    rows       how many of them; default as the recipe says
    seed       of the samples
    attempts   also answer each prompt so many times, and tell accuracy, pass@k and a majority vote: for online runs

    Of SFT and reward models the held-out loss, and accuracy. Of an online run reward, gold, KL, length and diversity of both
    the trained model and its start, on the same prompts with the same random numbers, and how often the trained one wins; and
    the mean log π of a token of the demonstrations that ``evaluation.demonstrations`` names. Where there is a critic, how well
    it foretells what its answers earn (``calibration``).
    Raises SurefootError when the folder is no run of language, there are no rows to judge on, or its reward tells of no
    attempt whether it is right.
    """
    check_is_run(run)
    checkpoint = checkpoint_to_load(run)
    written = make_recipe(read_toml(run / "config.toml"))
    recipe = changed(written, data, rows, seed)
    if attempts is not None and recipe.kind != "language":
        raise SurefootError(
            f"--samples {attempts.samples}: needs a reward, which a run of kind = {recipe.kind!r} has not; see surefoot data "
            "accuracy, or judge an online run"
        )
    if isinstance(recipe, LanguageRecipe):
        world: LanguageWorld | SupervisedWorld = LanguageWorld(recipe)
    else:
        assert isinstance(recipe, SupervisedRecipe)
        world = SupervisedWorld(recipe)
    trees = load_checkpoint(checkpoint)
    require(trees, ("agent", "recipe"), checkpoint)
    told: dict[str, Any] = {"kind": recipe.kind, "checkpoint": str(checkpoint), "steps": int(checkpoint.name)}
    if differences := recipe_differences(trees["recipe"], written):
        told["config_changed"] = differences
    if not isinstance(world, LanguageWorld):
        if isinstance(world, SupervisedWorld):
            check_unchanged(trees.get("sources", {}), world.frozen)
        load_trained(world.policy, trees["agent"], checkpoint)
        judged = world.evaluate()
        assert judged is not None
        return told | dict(judged.metrics)
    check_unchanged(trees.get("sources", {}), world.frozen)
    # The policy as it was loaded is the model that training started from. A reward that is no verifier is refused first.
    solved = {} if attempts is None else {"samples": attempts.samples, "start": attempted(world, attempts)}
    before, start = _judged(world, world.answers())
    load_trained(world.policy, trees["agent"], checkpoint)
    world.collector.beta = trees.get("beta", world.collector.beta)  # what the critic was trained for
    answers = world.answers()
    after, trained = _judged(world, answers)
    foretold = calibration(world, answers)
    if attempts is not None:
        told["attempts"] = {**solved, "trained": attempted(world, attempts)}
    samples = [{**row, "start": old["response"]} for row, old in zip(trained, start, strict=True)]
    told |= {"rows": len(samples), "start": before, "trained": after}
    for name in ("reward", "gold"):
        if name in trained[0]:
            both = [(new[name], old[name]) for new, old in zip(trained, start, strict=True)]
            scored = [pair for pair in both if None not in pair]
            ours, theirs = torch.tensor(scored).reshape(-1, 2).unbind(-1)
            told[f"win_rate_{name}"] = win_rate(ours, theirs) if scored else None
    if foretold is not None:
        told["calibration"] = foretold
    return told | {"samples": samples}


def _judged(world: LanguageWorld, answers: Answers) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    judged = world.evaluate(answers)
    assert judged is not None
    return {name.removeprefix("held_out_"): value for name, value in judged.metrics.items()}, judged.samples


def changed(recipe: Recipe, data: str | None, rows: int | None, seed: int | None) -> Recipe:
    """A run's recipe with other rows to judge on."""
    table = to_table(recipe)
    held_out = data or table.get("data", {}).get("held_out", "none")
    if held_out == "none":
        raise SurefootError("data.held_out='none': this run holds nothing out to judge on; name a file with --data FILE")
    table["data"]["held_out"] = held_out
    wanted = {"rows": rows, "seed": seed}
    table["evaluation"] |= {name: value for name, value in wanted.items() if value is not None}
    table["evaluation"]["rows"] = table["evaluation"]["rows"] or 256
    table["check_memory"] = False  # it is training's that would be checked
    return make_recipe(table)


def table(told: dict[str, Any]) -> str:
    """What ``evaluate_run`` found, for a person."""
    lines = [f"{told['kind']} run after {told['steps']:,} steps; checkpoint {told['checkpoint']}"]
    if "config_changed" in told:
        lines.append(f"config.toml was changed since the checkpoint: {'; '.join(told['config_changed'])}")
    if "trained" not in told:
        found = {name: value for name, value in told.items() if name.startswith("held_out_")}
        return "\n".join([*lines, *(f"{name.replace('_', ' '):24}{value:>12.4f}" for name, value in found.items())])
    lines.append(f"{'':24}{'start':>12}{'trained':>12}   on {told['rows']} held-out prompts")
    for name, before in told["start"].items():
        shown = ("–" if value is None else f"{value:.3f}" for value in (before, told["trained"][name]))
        label = LABELS.get(name, name.replace("_", " "))
        lines.append(f"{label:24}" + "".join(f"{value:>12}" for value in shown))
    if "attempts" in told:
        lines += attempt_lines(told["attempts"]["start"], told["attempts"]["trained"], told["attempts"]["samples"])
    for name in (name for name in told if name.startswith("win_rate_")):
        share = "–" if told[name] is None else f"{told[name]:.1%}"
        lines.append(f"{'wins by ' + name.removeprefix('win_rate_'):24}{'':>12}{share:>12}")
    if "calibration" in told:
        lines += calibration_lines(told["calibration"])
    return "\n".join(lines)
