"""Commands that train by a recipe, and the flags that change one."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

from surefoot.algorithms import MAX_COUNT
from surefoot.cli_echo import echo
from surefoot.cli_runs import display_for, final_line, run_folder, spread, tell
from surefoot.cli_words import Switch
from surefoot.config import SWITCH, recipe_fields, to_toml
from surefoot.errors import SurefootError
from surefoot.recipes import Found, find, find_recipe, presets
from surefoot.toml import parse_value

SHORT = {"algorithm", "steps", "seed", "device"}
"""recipe fields that have a flag without a table before it, listed with the command's own"""


def recipe_flags(command: Callable[..., Any], without: Collection[str] = ("kind", "task")) -> Callable[..., Any]:
    """A flag for every field of the recipe: --objective.gae-lambda 0.9; one that is true or false needs no value to be true."""
    for name, described in reversed(list(recipe_fields())):
        if name in without:
            continue
        flag = "--" + name.replace("_", "-")
        help_text = described.meaning if name in SHORT else f"{described.meaning} [{described.type}]"
        switch = described.type == SWITCH
        form: dict[str, Any] = {"cls": Switch, "metavar": "[true|false]"} if switch else {"metavar": "VALUE"}
        command = click.option(flag, name.replace(".", "__"), help=help_text, **form)(command)
    return command


def changes_from(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags that were given, as nested tables; values are read as TOML would read them."""
    tables: dict[str, Any] = {}
    for name, text in flags.items():
        if text is None:
            continue
        *path, leaf = name.split("__")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise SurefootError(f"{'.'.join(path)}: was set both as a whole and in part; choose one")
        table[leaf] = parse_value(text)
    return tables


@click.command()
@click.argument("what")
@click.option("--seeds", type=click.IntRange(1, MAX_COUNT), default=1, help="Train this many seeds in turn: seed, seed + 1, …")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Folder of the run; with --name, the folder above it.")
@click.option("--name", help="Name of the run; its folder is runs/NAME unless --run-dir says otherwise.")
@click.option(
    "--preset", metavar="NAME", help="Preset that gives what you don't; none: plain defaults. [default: the tuned one]"
)
@click.option("--checkpoint-every", type=click.IntRange(min=1), metavar="STEPS", help="Steps between checkpoints.")
@click.option("--dry-run", is_flag=True, help="Print the resolved recipe and its arithmetic, and stop.")
@click.option("--quiet", is_flag=True, help="No display while training; warnings are told.")
@recipe_flags
def train(
    what: str,
    seeds: int,
    run_dir: Path | None,
    name: str | None,
    preset: str | None,
    checkpoint_every: int | None,
    dry_run: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Train WHAT: a recipe's name (surefoot list), a .toml file, or an environment id."""
    changes = changes_from(flags)
    if checkpoint_every is not None:
        changes.setdefault("checkpoint", {})["every"] = checkpoint_every
    found = find(what, changes, preset=preset)
    recipe = found.recipe
    if dry_run:
        echo(describe(found))
        return
    from surefoot.api import start

    results = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        one = recipe.model_copy(update={"seed": seed})
        folder = run_folder(one, run_dir, name, several=seeds > 1)
        start(one, folder, display=display_for(one, folder, quiet, found.origin), origin=found.origin)
        results.append(final_line(one, folder))
        tell(results[-1][0])
    if seeds > 1:
        tell(spread([score for _, score in results]))


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=1), help="Extend the run to this many steps.")
@click.option("--allow-changes", is_flag=True, help="Accept a config.toml that was changed since the checkpoint.")
@click.option("--quiet", is_flag=True, help="No display while training; warnings are told.")
def resume(run: Path, steps: int | None, allow_changes: bool, quiet: bool) -> None:
    """Continue the interrupted RUN exactly, or extend a finished one."""
    from surefoot import api
    from surefoot.run.places import check_is_run

    check_is_run(run)
    api.resume(run, steps=steps, allow_changes=allow_changes, display=display_for(None, run, quiet))
    recipe = find_recipe(str(run / "config.toml"))
    tell(final_line(recipe, run)[0])


@click.command(name="list")
def list_() -> None:
    """List the tuned recipes, and what else can be trained."""
    from surefoot.algorithms import ALGORITHMS

    known_recipes = presets()
    width = max(len(name) for name in known_recipes)
    echo("recipes (surefoot train NAME, or any of its ids):")
    for name, table in known_recipes.items():
        text = {"sft": "SFT", "reward": "reward model", "dpo": "DPO"}.get(
            table.get("kind", ""), table.get("algorithm", "PPO_CLIP")
        )
        served = table.get("tuned_for") or [table.get("model", "a model of your own") if "kind" in table else "any other id"]
        echo(f"  {name:<{width}}  {text}, {table['steps']:,} steps: {', '.join(served)}")
    echo(f"algorithms (--algorithm NAME): {', '.join(ALGORITHMS)}")
    import gymnasium

    known = sorted(name for name in gymnasium.registry if "/" not in name)
    echo(f"environment ids that Gymnasium knows here: {', '.join(known)}")


def describe(found: Found) -> str:
    """What --dry-run prints: the resolved recipe, what of it is a preset's, parameter counts, and the batch arithmetic."""
    from surefoot.worlds import make_world

    world = make_world(found.recipe, environments=1)  # what is printed depends on one; the recipe may ask for thousands
    world.close()
    origin = [found.origin.line] if found.origin else []
    return "\n".join([to_toml(found.recipe), *(f"# {line}" for line in (*origin, *world.arithmetic()))])
