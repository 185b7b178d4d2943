"""``surefoot rounds``: pairs, reward model, PPO; and again."""

from pathlib import Path
from typing import Any

import click

from surefoot.algorithms import MAX_COUNT
from surefoot.cli_attempts import Finite
from surefoot.cli_echo import echo, echo_json
from surefoot.cli_runs import display_for
from surefoot.errors import SurefootError
from surefoot.kinds import LanguageRecipe, Recipe
from surefoot.recipes import find_recipe
from surefoot.run.places import check_name


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--rounds", "count", type=click.IntRange(1, MAX_COUNT), default=3, show_default=True, help="How many, in all.")
@click.option(
    "--judge",
    metavar="TERM",
    help="Who labels pairs: module:function, file.py:function, or a reward model's folder or run. [default: reward.gold]",
)
@click.option(
    "--pairs", type=click.IntRange(10, MAX_COUNT), default=512, show_default=True, help="Prompts per round, answered twice."
)
@click.option("--noise", type=Finite(min=0), default=0.0, show_default=True, help="Of labels: σ(difference / noise) chooses.")
@click.option("--new-only", is_flag=True, help="Train reward models on their own round's pairs alone, without older ones.")
@click.option("--name", help="The folder is runs/NAME. [default: the recipe's name, and -rounds]")
@click.option("--run-dir", type=click.Path(path_type=Path), help="The folder of all rounds; with --name, the folder above it.")
@click.option("--quiet", is_flag=True, help="No display while training; warnings are told.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, and nothing else.")
def rounds(
    recipe: Path,
    count: int,
    judge: str | None,
    name: str | None,
    run_dir: Path | None,
    quiet: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Refresh the reward model as PPO goes on: rounds by RECIPE, a .toml file of kind "language" whose reward is a model.

    Each round samples pairs of the policy as it is, has them labelled, trains the reward model on them and on older ones, and
    continues PPO against it. Repeat the command to continue; a larger --rounds adds to what is there.
    """
    if name is not None:
        check_name("--name", name)
    if recipe.suffix != ".toml":
        raise SurefootError(f"{recipe}: rounds need a recipe's file; name a .toml of kind = 'language'")
    found = find_recipe(str(recipe))
    if not isinstance(found, LanguageRecipe):
        raise SurefootError(f"{recipe}: is of kind {found.kind!r}; rounds continue PPO, kind = 'language'")
    who = judge or found.reward.gold
    if who is None:
        raise SurefootError("--judge: nobody labels the pairs; name a function or a reward model, or set reward.gold")
    from surefoot.rounds import Plan, go_rounds, table
    from surefoot.run.dashboard import Display, Silent

    def shown(one: Recipe, run: Path) -> Display:
        return Silent() if as_json else display_for(one, run, quiet)

    folder = (run_dir or Path("runs")) / name if name else run_dir or Path("runs") / f"{recipe.stem}-rounds"
    told = go_rounds(Plan(found, who, **settings), folder, count, shown, lambda line: echo(line, err=as_json))
    if as_json:
        echo_json({"rounds": told})
    else:
        echo(f"\n{table(told)}\nthe rounds are in {folder}")
