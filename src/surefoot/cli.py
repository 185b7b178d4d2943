"""The command line: parse, pick a recipe, call. Errors are one line on stderr and exit code 2."""

import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from surefoot import __version__
from surefoot.algorithms import LADDER
from surefoot.cli_attempts import attempt_flags, attempts_from, best_of_n, refuse_for_agents
from surefoot.cli_chat import chat
from surefoot.cli_check import check
from surefoot.cli_demo import demo
from surefoot.cli_inspect import inspect
from surefoot.cli_language import data, generate
from surefoot.cli_memory import memory
from surefoot.cli_merge import merge
from surefoot.cli_new import new
from surefoot.cli_report import compare, report
from surefoot.cli_rounds import rounds
from surefoot.cli_runs import display_for, final_line, run_folder, spread, tell
from surefoot.config import parse_value, read_toml, recipe_fields, to_toml
from surefoot.errors import Interrupted, SurefootError
from surefoot.kinds import Recipe
from surefoot.recipes import find_recipe, presets
from surefoot.run.visible import visible, visible_json
from surefoot.sections import MAX_SEED

if TYPE_CHECKING:
    from surefoot.compare.report import Report
    from surefoot.control.agent import Agent

SHORT = {"algorithm", "steps", "seed", "device"}
"""recipe fields that have a flag without a table before it, listed with the command's own"""


def main() -> NoReturn:
    """Run the command line and exit: 0, 2 for anything the user can mend, 130 after Ctrl-C or SIGTERM."""
    sys.path.insert(0, os.getcwd())  # so that module:function finds the user's own file, as with python -m
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except Interrupted as stop:
        fail(str(stop), 130)
    except SurefootError as error:
        fail(str(error), 2)
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "surefoot"
        fail(f"{error.format_message()} (see: {command} --help)", 2)
    except (click.Abort, KeyboardInterrupt):
        fail("stopped", 130)
    except OSError as error:
        fail(
            f"{error.filename or 'writing'}: {error.strerror or error}; mend that, then repeat the command, or resume the run",
            2,
        )


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr, and out; what an error quotes can't move the terminal's cursor."""
    print(f"surefoot: {visible(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def recipe_flags(command: Callable[..., Any], without: Collection[str] = ("kind", "task")) -> Callable[..., Any]:
    """A flag for every field of the recipe: --objective.gae-lambda 0.9."""
    for name, described in reversed(list(recipe_fields())):
        if name in without:
            continue
        flag = "--" + name.replace("_", "-")
        help_text = described.meaning if name in SHORT else f"{described.meaning} [{described.type}]"
        command = click.option(flag, name.replace(".", "__"), metavar="VALUE", help=help_text)(command)
    return command


def comparison_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that train many cells; a flag for every field of the recipe but the algorithm."""
    command = recipe_flags(command, without=("kind", "task", "algorithm"))
    command = click.option("--json", "as_json", is_flag=True, help="Print results.json on stdout, progress on stderr.")(command)
    command = click.option("--run-dir", type=click.Path(path_type=Path), help="Folder of all runs, tables and the plot.")(
        command
    )
    for flag, default, least, text in (
        ("--jobs", 1, 1, "Trainings at a time, each in a process of its own."),
        ("--episodes", 20, 0, "Greedy episodes that judge each final agent."),
        ("--seeds", 3, 1, "Train this many seeds of each: seed, seed + 1, …"),
    ):
        command = click.option(flag, type=click.IntRange(min=least), default=default, show_default=True, help=text)(command)
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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="surefoot")
def cli() -> None:
    """Policy-gradient learning, from REINFORCE to PPO."""


@cli.command()
@click.argument("what")
@click.option("--seeds", type=click.IntRange(min=1), default=1, help="Train this many seeds in turn: seed, seed + 1, …")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Folder of the run; with --name, the folder above it.")
@click.option("--name", help="Name of the run; its folder is runs/NAME unless --run-dir says otherwise.")
@click.option("--checkpoint-every", type=click.IntRange(min=1), metavar="STEPS", help="Steps between checkpoints.")
@click.option("--dry-run", is_flag=True, help="Print the resolved recipe and its arithmetic, and stop.")
@click.option("--quiet", is_flag=True, help="Show nothing while training.")
@recipe_flags
def train(
    what: str,
    seeds: int,
    run_dir: Path | None,
    name: str | None,
    checkpoint_every: int | None,
    dry_run: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Train WHAT: a recipe's name (surefoot list), a .toml file, or an environment id."""
    changes = changes_from(flags)
    if checkpoint_every is not None:
        changes.setdefault("checkpoint", {})["every"] = checkpoint_every
    recipe = find_recipe(what, changes)
    if dry_run:
        click.echo(describe(recipe))
        return
    from surefoot.api import start

    results = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        one = recipe.model_copy(update={"seed": seed})
        folder = run_folder(one, run_dir, name, several=seeds > 1)
        start(one, folder, display=display_for(one, folder, quiet))
        results.append(final_line(one, folder))
        tell(results[-1][0])
    if seeds > 1:
        tell(spread([score for _, score in results]))


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=1), help="Extend the run to this many steps.")
@click.option("--allow-changes", is_flag=True, help="Accept a config.toml that was changed since the checkpoint.")
@click.option("--quiet", is_flag=True, help="Show nothing while training.")
def resume(run: Path, steps: int | None, allow_changes: bool, quiet: bool) -> None:
    """Continue the interrupted RUN exactly, or extend a finished one."""
    from surefoot import api
    from surefoot.run.places import check_is_run

    check_is_run(run)
    api.resume(run, steps=steps, allow_changes=allow_changes, display=display_for(None, run, quiet))
    recipe = find_recipe(str(run / "config.toml"))
    tell(final_line(recipe, run)[0])


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--episodes", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True)
@click.option("--task", help="Evaluate an agent on another task than the one trained on.")
@click.option("--data", "rows_file", help="Language: judge on these rows instead of the run's held-out ones.")
@click.option("--rows", type=click.IntRange(min=1), help="Language: how many rows; as the recipe says if not given.")
@attempt_flags
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    run: Path,
    episodes: int,
    seed: int,
    task: str | None,
    rows_file: str | None,
    rows: int | None,
    as_json: bool,
    **attempts: Any,
) -> None:
    """Judge RUN (its best checkpoint, else its latest): an agent by whole greedy episodes, a model on held-out rows."""
    from surefoot import api
    from surefoot.run.folder import checkpoint_to_load

    checkpoint = checkpoint_to_load(run)
    if kind_of(run) != "control":
        from surefoot.language.evaluate import evaluate_run, table

        told = evaluate_run(run, data=rows_file, rows=rows, seed=seed, attempts=attempts_from(**attempts))
        click.echo(visible_json(told) if as_json else table(told))
        return
    refuse_for_agents(attempts)
    result = api.evaluate(agent_in(checkpoint), task, episodes=episodes, seed=seed)
    if as_json:
        click.echo(json.dumps({**result.to_json(), "checkpoint": str(checkpoint)}))
        return
    click.echo(f"return {result.mean_return:.2f} ± {result.std_return:.2f} over {episodes} greedy episodes (seed {seed})")
    click.echo(f"lengths {min(result.lengths)} to {max(result.lengths)}; checkpoint {checkpoint}")


@cli.command()
@click.argument("task")
@click.option("--rung", "rungs", type=click.IntRange(0, len(LADDER) - 1), multiple=True, help="Only this one; repeatable.")
@click.option("--batches", type=click.IntRange(min=2), default=100, show_default=True, help="Under a frozen θ, for variance.")
@comparison_flags
def ladder(
    task: str,
    rungs: tuple[int, ...],
    batches: int,
    seeds: int,
    run_dir: Path | None,
    episodes: int,
    jobs: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Climb from REINFORCE to PPO on TASK, one switch at a time: tables and a plot. Repeat it to continue."""
    from surefoot.compare.ladder import climb

    show_report(climb(task, changes_from(flags), seeds, run_dir, rungs, batches, episodes, jobs, stderr=as_json), as_json)


@cli.command(name="compare-algorithms")
@click.argument("task")
@click.option("--algorithms", required=True, metavar="A,B,C", help="Names, with commas between them (surefoot list).")
@comparison_flags
def compare_algorithms(
    task: str,
    algorithms: str,
    seeds: int,
    run_dir: Path | None,
    episodes: int,
    jobs: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train several algorithms on TASK with the same budget and seeds: tables and a plot. Repeat it to continue."""
    from surefoot.compare import algorithms as comparison

    names, changes = [name.strip() for name in algorithms.split(",")], changes_from(flags)
    show_report(comparison.compare_algorithms(task, names, changes, seeds, run_dir, episodes, jobs, stderr=as_json), as_json)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--episodes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="As in surefoot evaluate.")
@click.option("--out", type=click.Path(path_type=Path), help="The MP4; RUN/videos/TASK-STEP-seedSEED.mp4 if not given.")
@click.option("--size", metavar="WIDTHxHEIGHT", default="320x240", show_default=True)
@click.option("--fps", type=click.FloatRange(1, 240), metavar="N", help="Frames a second, if not the environment's own.")
@click.option("--max-steps", type=click.IntRange(min=1), default=10_000, show_default=True, help="Cut episodes off there.")
@click.option("--checkpoint", metavar="best|last|STEP", help="Which agent; the best, else the last, if not given.")
@click.option("--task", help="Watch it on another task than the one trained on.")
@click.option("--no-caption", is_flag=True, help="Leave out the small print: step, reward, return so far.")
@click.option("--traced", metavar="last|all|STEPS", help="Film the episodes in the run's traces instead, for surefoot inspect.")
def watch(
    run: Path,
    episodes: int,
    seed: int,
    out: Path | None,
    size: str,
    fps: float | None,
    max_steps: int,
    checkpoint: str | None,
    task: str | None,
    no_caption: bool,
    traced: str | None,
) -> None:
    """Film greedy episodes of the agent in RUN as an MP4. Needs no display."""
    from surefoot.control.video import film, size_from_text
    from surefoot.run.folder import chosen_checkpoint, output_file

    pixels = size_from_text(size)
    if traced is not None:
        from surefoot.control.traced_film import film_traces

        source = click.get_current_context().get_parameter_source
        for name in ("episodes", "seed", "out", "max_steps", "checkpoint", "task"):
            if source(name) is click.core.ParameterSource.COMMANDLINE:
                flag = name.replace("_", "-")
                raise SurefootError(f"--{flag}: --traced films what the run did in training; leave --{flag} out")
        for line in film_traces(run, traced, size=pixels, fps=fps, caption=not no_caption):
            click.echo(line)
        return
    found = chosen_checkpoint(run, checkpoint)
    agent = agent_in(found)
    path = out or output_file(run, found, task or agent.recipe.task, "videos", f"-seed{seed}.mp4")
    other = None if task == agent.recipe.task else task
    filmed = film(
        agent, path, other, episodes=episodes, seed=seed, size=pixels, fps=fps, max_steps=max_steps, caption=not no_caption
    )
    click.echo(filmed.line())


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", type=click.Choice(["onnx", "torch"]), metavar="onnx|torch", default="onnx", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="The file; RUN/exports/TASK-STEP.onnx (or .pt2) if not given.")
@click.option("--checkpoint", metavar="best|last|STEP", help="Which agent; the best, else the last, if not given.")
def export(run: Path, format: str, out: Path | None, checkpoint: str | None) -> None:
    """Write the agent in RUN as a file for other programs: observations in, greedy actions out, normaliser included."""
    from surefoot.control.export import ENDINGS, export_agent
    from surefoot.run.folder import chosen_checkpoint, output_file

    found = chosen_checkpoint(run, checkpoint)
    agent = agent_in(found)
    path = out or output_file(run, found, agent.recipe.task, "exports", ENDINGS[format])
    click.echo(export_agent(agent, path, format, found.absolute().name).line())


for command in (generate, chat, best_of_n, rounds, data, demo, inspect, memory, merge, check, report, compare, new):
    cli.add_command(command)


@cli.command(name="list")
def list_() -> None:
    """List the tuned recipes, and what else can be trained."""
    from surefoot.algorithms import ALGORITHMS

    known_recipes = presets()
    width = max(len(name) for name in known_recipes)
    click.echo("recipes (surefoot train NAME, or any of its ids):")
    for name, table in known_recipes.items():
        text = {"sft": "SFT", "reward": "reward model", "dpo": "DPO"}.get(
            table.get("kind", ""), table.get("algorithm", "PPO_CLIP")
        )
        served = table.get("tuned_for") or [table.get("model", "a model of your own") if "kind" in table else "any other id"]
        click.echo(f"  {name:<{width}}  {text}, {table['steps']:,} steps: {', '.join(served)}")
    click.echo(f"algorithms (--algorithm NAME): {', '.join(ALGORITHMS)}")
    import gymnasium

    known = sorted(name for name in gymnasium.registry if "/" not in name)
    click.echo(f"environment ids that Gymnasium knows here: {', '.join(known)}")


def agent_in(checkpoint: Path) -> "Agent":
    """The agent of a checkpoint.

    Raises SurefootError when it is a model of language.
    """
    from surefoot import api
    from surefoot.control.agent import Agent

    found = api.load(checkpoint)
    if not isinstance(found, Agent):
        raise SurefootError(f"{checkpoint}: holds a model of language and no agent; see surefoot evaluate RUN, and generate")
    return found


def kind_of(run: Path) -> str:
    """What a run trains; "control" for a saved agent, which has no recipe beside it."""
    config = run / "config.toml"
    return str(read_toml(config).get("kind", "control")) if config.is_file() else "control"


def describe(recipe: Recipe) -> str:
    """What --dry-run prints: the resolved recipe, parameter counts, and the batch arithmetic."""
    from surefoot.worlds import make_world

    world = make_world(recipe)
    world.close()
    return "\n".join([to_toml(recipe), *(f"# {line}" for line in world.arithmetic())])


def show_report(report: "Report", as_json: bool) -> None:
    """Tables for a person, or all of it for a program."""
    click.echo(json.dumps(report.results) if as_json else f"\n{report.text}\n")
    click.echo(report.last_line, err=as_json)
