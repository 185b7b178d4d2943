"""Commands that train many cells to compare them: the ladder, and algorithms of one's choice."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.algorithms import LADDER, MAX_COUNT
from surefoot.cli_echo import echo, echo_json
from surefoot.cli_train import changes_from, recipe_flags

if TYPE_CHECKING:
    from surefoot.compare.report import Report


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
        command = click.option(flag, type=click.IntRange(least, MAX_COUNT), default=default, show_default=True, help=text)(
            command
        )
    return command


@click.command()
@click.argument("task")
@click.option("--rung", "rungs", type=click.IntRange(0, len(LADDER) - 1), multiple=True, help="Only this one; repeatable.")
@click.option(
    "--batches", type=click.IntRange(2, MAX_COUNT), default=100, show_default=True, help="Under a frozen θ, for variance."
)
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


@click.command(name="compare-algorithms")
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


def show_report(report: "Report", as_json: bool) -> None:
    """Tables for a person, or all of it for a program."""
    if as_json:
        echo_json(report.results)
    else:
        echo(f"\n{report.text}\n")
    echo(report.last_line, err=as_json)
