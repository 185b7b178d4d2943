"""Train by a recipe, resume a run, refresh reward models in rounds, and list what can be trained."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli import lasting_imports
from surefoot.cli.help import RecipeCommand
from surefoot.cli.options import (
    COUNT,
    PATH,
    RUN,
    FiniteFloat,
    IntRange,
    changes_from,
    complete_task,
    json_option,
    option,
    preset_option,
    quiet_option,
    recipe_flags,
)
from surefoot.cli.output import display_for, echo, echo_json, echo_result, number, result_line
from surefoot.cli.ranks import folder_on_ranks, launch_ranks, rank_options
from surefoot.core.algorithms import MAX_COUNT
from surefoot.core.seeding import MAX_SEED
from surefoot.errors import SurefootError
from surefoot.files import RUNS, check_name
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import TENSOR_IDS
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.presets import ResolvedRecipe, find_recipe, presets, resolve_recipe
from surefoot.recipes.reading import to_toml
from surefoot.terminal import wrapped

if TYPE_CHECKING:
    from surefoot.runs.display import Display


@click.command(cls=RecipeCommand)
@click.argument("what", shell_complete=complete_task)
@option(
    "--seeds", type=COUNT, default=1, help="Train this many seeds, one after the other: seed, seed + 1, …", show_default=False
)
@option("--run-dir", type=PATH, help="Run folder; with --name, its parent folder.")
@option("--name", help="Name of the run; its folder is runs/NAME, or DIR/NAME with --run-dir DIR.")
@preset_option
@option("--checkpoint-every", type=COUNT, metavar="STEPS", help="Steps between checkpoints.")
@option("--dry-run", is_flag=True, help="Print the resolved recipe and its batch arithmetic; train nothing.")
@option("--profile", is_flag=True, help="Print the seconds of each part.")
@rank_options
@quiet_option
@recipe_flags
def train(
    what: str,
    seeds: int,
    run_dir: Path | None,
    name: str | None,
    preset: str | None,
    checkpoint_every: int | None,
    dry_run: bool,
    profile: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Train WHAT: a preset, .toml file, or environment (id or file).

    "surefoot list" shows the presets. Every field of the recipe is a flag; values are parsed as TOML, and a list
    of names may be words with commas.

    \b
    surefoot train CartPole-v1 --steps 50_000
    surefoot train corridor.py --steps 100_000 --lr 1e-3
    surefoot train language --model MODEL --data.train prompts.jsonl --reward.terms file.py:function
    """
    if name is not None:
        check_name("--name", name)
    changes = changes_from(flags)
    if checkpoint_every is not None:
        changes.setdefault("checkpoint", {})["every"] = checkpoint_every
    resolved = resolve_recipe(what, changes, preset=preset)
    recipe, origin = resolved.recipe, resolved.origin
    if dry_run:
        echo(dry_run_text(resolved))
        return
    if launch_ranks():
        return
    with lasting_imports():
        from surefoot.ranks.collectives import on_first, rank
        from surefoot.runs.api import start

    if recipe.seed + seeds - 1 > MAX_SEED:
        raise SurefootError(f"--seeds={seeds}: the last seed would be above {MAX_SEED}; lower --seed")
    several = [recipe.model_copy(update={"seed": seed}) for seed in range(recipe.seed, recipe.seed + seeds)]
    folders = [folder_on_ranks(each.seed, partial(run_folder, each, run_dir, name, several=seeds > 1)) for each in several]
    on_first(lambda: check_all_free(folders))  # before the first of them trains
    scores = []
    for seeded, folder in zip(several, folders, strict=True):
        start(seeded, folder, display=display_for(seeded, folder, quiet, origin), origin=origin, profile=profile)
        if rank() == 0:
            line, score = result_line(seeded, folder)
            scores.append(score)
            echo_result(line)
    if seeds > 1 and rank() == 0:
        echo_result(spread(scores))


def dry_run_text(resolved: ResolvedRecipe) -> str:
    """The output of ``--dry-run``: the resolved recipe, its preset, parameter counts, and the batch arithmetic."""
    from surefoot.runs.factory import prepared_world

    with closing(prepared_world(resolved.recipe, environments=1)) as world:  # one is enough; the recipe may have thousands
        arithmetic = world.arithmetic()
    origin = [resolved.origin.line] if resolved.origin else []
    return "\n".join([to_toml(resolved.recipe), *(f"# {line}" for line in (*origin, *arithmetic))])


def run_folder(recipe: Recipe, run_dir: Path | None, name: str | None, several: bool) -> Path:
    """The folder of a run. Generated names never collide; names from the user are used as they are."""
    suffix = f"-seed{recipe.seed}" if several else ""
    if name is not None:
        return (run_dir or RUNS) / f"{name}{suffix}"
    if run_dir is not None:
        return run_dir / f"seed{recipe.seed}" if several else run_dir
    from surefoot.store.folder import task_label

    base = RUNS / f"{task_label(recipe.trained)}-{recipe.algorithm.lower()}-{recipe.seed}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def check_all_free(folders: Sequence[Path]) -> None:
    """Raise SurefootError if a folder is in use, unless a run began there before its ranks were restarted."""
    from surefoot.ranks.launching import note
    from surefoot.store.folder import check_free

    for folder in folders:
        if not note(f"began {folder}"):
            check_free(folder)


def spread(scores: list[float | None]) -> str:
    """Mean, standard deviation and minimum of the scores of several seeds."""
    import numpy as np

    finite = [score for score in scores if score is not None]
    if not finite:
        return "no seed has a score"
    mean, std = float(np.mean(finite)), float(np.std(finite, ddof=min(1, len(finite) - 1)))
    return f"{len(finite)} seeds: mean {number(mean)}, standard deviation {number(std)}, worst {number(min(finite))}"


@click.command()
@click.argument("run", type=RUN)
@option("--steps", type=COUNT, help="Extend the run to this many steps in total.")
@option("--allow-changes", is_flag=True, help="Accept changes to config.toml since the checkpoint.")
@rank_options
@quiet_option
def resume(run: Path, steps: int | None, allow_changes: bool, quiet: bool) -> None:
    """Resume an interrupted RUN, or extend a finished one.

    Training continues exactly from the last checkpoint.
    """
    from surefoot.store.reading import check_is_run

    check_is_run(run)
    if launch_ranks():
        return
    with lasting_imports():
        from surefoot.ranks.collectives import rank
        from surefoot.runs import api

    api.resume(run, steps=steps, allow_changes=allow_changes, display=display_for(None, run, quiet))
    if rank() == 0:
        echo_result(result_line(find_recipe(str(run / "config.toml")), run)[0])


@click.command()
@click.argument("run", type=RUN)
@option("--iteration", type=COUNT, metavar="K", help="Verify this iteration. [default: the last one]")
@option("--all", "every", is_flag=True, help="Verify every iteration, from the start.")
@json_option
@click.pass_context
def verify(ctx: click.Context, run: Path, iteration: int | None, every: bool, as_json: bool) -> None:
    """Execute iterations of RUN again and compare them with its fingerprints.

    It begins at the nearest earlier checkpoint, else at the start, with the run's number of ranks, and writes nothing to RUN.

    Exits with 0 if they repeat to the last bit, or, on another machine, are close; with 1 if they differ.
    """
    with lasting_imports():
        from surefoot.ranks.collectives import rank
        from surefoot.runs import verify as verifying

    if iteration is not None and every:
        raise SurefootError(f"--iteration {iteration}: --all has every iteration; give one of the two")
    plan = verifying.plan_of(run, iteration, every)
    if launch_ranks(plan.ranks):
        return
    if rank() == 0:
        echo(plan.line, err=as_json)
    verified = verifying.verify(plan)
    if rank() == 0:
        echo_json(verified.to_json()) if as_json else echo(verified.line)
    ctx.exit(int(not verified.passed))


@click.command()
@click.argument("recipe", type=PATH)
@option("--rounds", "count", type=COUNT, default=3, help="Total number of rounds.")
@option("--judge", metavar="TERM", help="Judge of the pairs: people, or a term as in reward.terms. [default: reward.gold]")
@option("--pairs", type=IntRange(1, MAX_COUNT), default=512, help="Prompts per round, with two answers each.")
@option(
    "--noise", type=FiniteFloat(min=0), default=0.0, help="Label noise: an answer wins with probability σ(difference / noise)."
)
@option("--new-only", is_flag=True, help="Train each reward model on the pairs of its own round only.")
@option("--stop-at-chance", is_flag=True, help="Stop where the reward model predicts new labels no better than chance.")
@option("--wait", is_flag=True, help="With --judge people: wait for the labels, and go on when they are there.")
@option("--name", help="The folder is runs/NAME. [default: the recipe's name with -rounds]")
@option("--run-dir", type=PATH, help="Folder of all rounds; with --name, the folder that contains it.")
@rank_options
@quiet_option
@json_option
def rounds(
    recipe: Path,
    count: int,
    judge: str | None,
    name: str | None,
    run_dir: Path | None,
    quiet: bool,
    as_json: bool,
    wait: bool,
    **options: Any,
) -> None:
    """Alternate between reward-model training and PPO.

    RECIPE is a .toml file of kind "language" whose reward is a reward model. Each round samples pairs of answers from the
    current policy, labels them, trains the reward model on them and on the older pairs, and continues PPO with it.

    Repeat the command to continue. A larger --rounds adds rounds.
    """
    if name is not None:
        check_name("--name", name)
    if recipe.suffix != ".toml":
        raise SurefootError(f"{recipe}: is not a recipe file; name a .toml of kind = 'language'")
    language_recipe = find_recipe(str(recipe))
    if not isinstance(language_recipe, LanguageRecipe):
        raise SurefootError(f"{recipe}: is of kind {language_recipe.kind!r}; rounds need kind = 'language'")
    labeller = judge or language_recipe.reward.gold
    if labeller is None:
        raise SurefootError("--judge: nothing labels the pairs; name a function or a reward model, or set reward.gold")
    from surefoot.runs.rounds import RoundsSettings, rounds_table, run_rounds

    settings = RoundsSettings(language_recipe, labeller, **options)
    if launch_ranks():
        return
    from surefoot.ranks.collectives import rank
    from surefoot.runs.display import Display

    def display(current: Recipe, run: Path) -> "Display":
        return Display() if as_json else display_for(current, run, quiet)

    folder = (run_dir or RUNS) / name if name else run_dir or RUNS / f"{recipe.stem}-rounds"
    results = run_rounds(settings, folder, count, display, lambda line: echo(line, err=as_json), wait)
    if rank() > 0:
        return
    if as_json:
        echo_json({"rounds": results})
    else:
        echo(f"\n{rounds_table(results)}\nthe rounds are in {folder}" if results else f"the rounds are in {folder}")


@click.command(name="list")
def list_() -> None:
    """List presets, algorithms and environment ids."""
    import gymnasium

    from surefoot.core.algorithms import ALGORITHMS

    tables = presets()
    width = max(len(name) for name in tables)
    labels = {"sft": "SFT", "reward": "reward model", "dpo": "DPO"}
    echo("presets (surefoot train NAME, or one of its ids):")
    for name, table in tables.items():
        label = labels.get(table.get("kind", ""), table.get("algorithm", "PPO_CLIP"))
        others = table.get("model", "your model") if "kind" in table else table.get("task", "any other id")
        tasks = table.get("tuned_for") or [others]
        echo(wrapped(f"  {name:<{width}}  {label}, {table['steps']:,} steps: {', '.join(tasks)}", indent=width + 4))
    ids = sorted(name for name in gymnasium.registry if "/" not in name)
    names = {
        "algorithms (--algorithm NAME)": ALGORITHMS,
        "environment ids of Gymnasium": ids,
        "tensor environments (surefoot train ID)": TENSOR_IDS,
    }
    for heading, each in names.items():
        echo(wrapped(f"{heading}: {', '.join(each)}"))
