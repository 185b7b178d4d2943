"""Compare runs, report on them, train several algorithms to compare them, and tune recipes."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.help import RecipeCommand
from surefoot.cli.options import (
    COUNT,
    PATH,
    RUN,
    IntRange,
    changes_from,
    check_out,
    complete_task,
    json_option,
    option,
    preset_option,
    recipe_flags,
    reject_options,
    run_named,
    together,
)
from surefoot.cli.output import echo, echo_json
from surefoot.core.algorithms import LADDER, MAX_COUNT
from surefoot.errors import SurefootError, require_package
from surefoot.files import check_name, write_bytes

if TYPE_CHECKING:
    from surefoot.compare.across_tasks import TaskComparison
    from surefoot.compare.report import Report
    from surefoot.compare.runs import SavedRun


across_tasks_options = together(
    option("--by", metavar="FIELD", help="Compare the values of a recipe's field over all tasks."),
    option("--score", metavar="METRIC", help="With --by: the metric. [default: the first score that all runs have]"),
    option(
        "--range",
        "ranges",
        multiple=True,
        metavar="TASK=LOW:HIGH",
        help="With --by: scores that count as 0 and 1. [default: the worst and the best run of the task]",
    ),
)
"""options that group runs by task and by a field of their recipes"""


def tasks_compared(
    command: str, runs: Sequence["SavedRun"], by: str | None, score: str | None, ranges: tuple[str, ...]
) -> "TaskComparison | None":
    """The comparison that ``--by`` asks for; None without it.

    Raises SurefootError for its options without it, and as ``compare_across_tasks`` does.
    """
    if by is None:
        if score or ranges:
            raise SurefootError(f"{command}: --score and --range need --by FIELD; add it, such as --by algorithm")
        return None
    from surefoot.compare.across_tasks import compare_across_tasks

    ends: dict[str, tuple[float, float]] = {}
    for text in ranges:
        task, pair = _range(text)
        if task in ends:
            raise SurefootError(f"--range {text}: {task} has a range already; give each task one")
        ends[task] = pair
    return compare_across_tasks(runs, by, score, ends)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=RUN, metavar="RUN RUN...")
@across_tasks_options
@option("--figure", type=PATH, help="With --by: file for the performance profiles (.png or .svg).")
@json_option
def compare(
    runs: tuple[Path, ...], by: str | None, score: str | None, ranges: tuple[str, ...], figure: Path | None, as_json: bool
) -> None:
    """Compare the settings and results of runs.

    Runs that differ only in their seed form one group. With --by, scores of several tasks are normalised and aggregated:
    interquartile mean, median, mean, optimality gap, and the probability of improvement, with 95 % intervals.
    """
    from surefoot.compare.plots import draw_profiles
    from surefoot.compare.report import across_tasks_text, comparison_text
    from surefoot.compare.runs import Comparison, compare_runs, read_run
    from surefoot.store.reading import FINGERPRINTS

    if len(runs) < 2:
        raise SurefootError(f"compare {runs[0]}: is only one run; name two or more")
    resolved = [run.resolve() for run in runs]
    for index, run in enumerate(runs):
        if resolved[index] in resolved[:index]:
            raise SurefootError(f"compare: {run} is named twice; name each run once")
    if figure is not None:
        if by is None:
            raise SurefootError("compare: --figure needs --by FIELD; add it, such as --by algorithm")
        require_package("matplotlib", "plots", f"--figure {figure}")
        if figure.suffix not in (".png", ".svg"):
            raise SurefootError(f"--figure {figure}: name a .png or .svg file")
        if figure.is_dir():
            raise SurefootError(f"--figure {figure}: is a folder; name a file")
    loaded = [read_run(run) for run in runs]
    tasks = tasks_compared("compare", loaded, by, score, ranges)
    comparison = compare_runs(loaded) if tasks is None else tasks
    if as_json:
        echo_json(comparison.to_json())
    else:
        echo(comparison_text(comparison) if isinstance(comparison, Comparison) else across_tasks_text(comparison))
        if len(runs) == 2 and all((run / FINGERPRINTS).is_file() for run in runs):
            echo(f"\nwhether and where they part: surefoot diff {runs[0]} {runs[1]}")
    if figure is not None and tasks is not None:
        figure.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(figure, draw_profiles(tasks, "png" if figure.suffix == ".png" else "svg"))


@click.command()
@click.argument("a", type=RUN)
@click.argument("b", type=RUN)
@json_option
@click.pass_context
def diff(ctx: click.Context, a: Path, b: Path, as_json: bool) -> None:
    """Find the first iteration and stage in which runs A and B part, and the cause.

    Exits with 0 if all iterations that both have are the same to the last bit, 1 if they differ, and 2 if none can be compared.
    """
    from surefoot.diagnostics.differences import compare_runs

    difference = compare_runs(a, b)
    if as_json:
        echo_json(difference.to_json())
    else:
        echo("\n".join(difference.lines))
    ctx.exit(0 if difference.same else 1 if difference.compared else 2)


def _range(text: str) -> tuple[str, tuple[float, float]]:
    """``TASK=LOW:HIGH`` as its parts."""
    task, _, ends = text.partition("=")
    low, _, high = ends.partition(":")
    try:
        numbers = float(low), float(high)
    except ValueError:
        raise SurefootError(f"--range {text}: write TASK=LOW:HIGH, such as CartPole-v1=20:500") from None
    if not numbers[0] < numbers[1] or not all(map(math.isfinite, numbers)):
        raise SurefootError(f"--range {text}: LOW must be below HIGH; swap or correct them")
    return task, numbers


@click.command()
@click.argument("runs", nargs=-1, required=True, type=RUN, metavar="RUN...")
@option("--out", type=PATH, help="HTML file to write. [default: RUN/report.html; report.html for several runs]")
@option("--figures", type=click.Choice(["svg", "png"]), help="Also write the curves as files, next to the page.")
@across_tasks_options
def report(
    runs: tuple[Path, ...], out: Path | None, figures: str | None, by: str | None, score: str | None, ranges: tuple[str, ...]
) -> None:
    """Write an HTML report of one or more runs.

    The page has findings, curves, samples, recipe, environment, and the commands to repeat the runs. With --by it also has the
    tables of surefoot compare --by and the performance profiles.
    """
    from surefoot.compare.report import write_figures, write_page
    from surefoot.compare.runs import read_run

    path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    check_out(path, ".html")
    loaded = [read_run(run) for run in runs]
    tasks = tasks_compared("report", loaded, by, score, ranges)
    write_page(loaded, path, tasks)
    echo(f"{path}, {path.stat().st_size / 1000:,.0f} kB")
    if figures is not None:
        folder = path.with_name(f"{path.stem}-figures")
        written = write_figures(loaded, folder, figures, tasks)
        echo(f"{len(written)} figures in {folder}/")


results_option = option("--json", "as_json", is_flag=True, help="Print results.json on stdout and progress on stderr.")
comparison_options = together(
    option("--seeds", type=COUNT, default=3, help="Seeds of each: seed, seed + 1, …"),
    option("--episodes", type=IntRange(0, MAX_COUNT), default=20, help="Greedy episodes to evaluate each final agent."),
    option("--jobs", type=COUNT, default=1, help="Trainings at a time, one process each."),
    option("--run-dir", type=PATH, help="Folder of all runs, the tables and the plot."),
    results_option,
    partial(recipe_flags, without=("kind", "task", "algorithm")),
)
"""options of commands that train many runs; every recipe field is a flag, except the algorithm"""


def settings_from(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a comparison from ``comparison_options``; whatever is not one of its own is a recipe field."""
    own = {"folder": "run_dir", "seeds": "seeds", "episodes": "episodes", "jobs": "jobs"}
    settings = {name: options.pop(option) for name, option in own.items()}
    return {**settings, "changes": changes_from(options)}


@click.command(cls=RecipeCommand)
@click.argument("task", shell_complete=complete_task)
@option("--rung", "rungs", type=IntRange(0, len(LADDER) - 1), multiple=True, help="Only this rung; repeatable.")
@option("--batches", type=IntRange(2, MAX_COUNT), default=100, help="Batches for the variance, with θ frozen.")
@comparison_options
def ladder(task: str, rungs: tuple[int, ...], batches: int, as_json: bool, **options: Any) -> None:
    """Train TASK from REINFORCE to PPO, step by step.

    Each rung of the ladder adds one switch of the objective. Prints tables and saves a plot. Repeat the command to continue.
    """
    from surefoot.compare.ladder import run_ladder

    show_report(run_ladder(task, rungs=rungs, batches=batches, stderr=as_json, **settings_from(options)), as_json)


@click.command(name="compare-algorithms", cls=RecipeCommand)
@click.argument("task", shell_complete=complete_task)
@option("--algorithms", metavar="A,B,C", help="Names, separated by commas (surefoot list).")
@option("--ablation", is_flag=True, help="PPO without clip, with penalties, with its clip, value loss and entropy bonus.")
@comparison_options
def compare_algorithms(task: str, algorithms: str | None, ablation: bool, as_json: bool, **options: Any) -> None:
    """Train several algorithms on TASK and compare them.

    All get the same budget and seeds. Prints tables and saves a plot. Repeat the command to continue.
    """
    from surefoot.compare import algorithms as comparison

    if (algorithms is None) is not ablation:
        raise SurefootError("--algorithms: name what to compare, as in --algorithms A2C,PPO_CLIP, or give --ablation, not both")
    names = None if algorithms is None else [name.strip() for name in algorithms.split(",")]
    show_report(comparison.compare_algorithms(task, names, stderr=as_json, **settings_from(options)), as_json)


@click.command(cls=RecipeCommand)
@click.argument("what", shell_complete=complete_task)
@option("--space", type=PATH, metavar="FILE", help="TOML file of fields and values to try. [default: one for WHAT]")
@option("--trials", type=COUNT, help="Trials of the study, with those of earlier commands. [default: 20]")
@option("--seeds", type=COUNT, default=2, help="Runs of each trial: seed, seed + 1, …")
@option("--jobs", type=COUNT, default=1, help="Trials at a time, one process each.")
@option(
    "--confirm",
    type=IntRange(0, MAX_COUNT),
    default=0,
    help="New seeds on which the best and the initial recipe are trained at the end.",
)
@option("--no-pruning", is_flag=True, help="Train every trial to its end.")
@option("--resume", is_flag=True, help="WHAT is a study's folder or its name: continue it with its settings.")
@option("--name", help="Name of the study; its folder is runs/NAME, or DIR/NAME with --run-dir DIR.")
@option("--run-dir", type=PATH, help="Folder of the study; with --name, the folder that contains it.")
@preset_option
@results_option
@recipe_flags
def tune(
    what: str,
    space: Path | None,
    trials: int | None,
    seeds: int,
    jobs: int,
    confirm: int,
    no_pruning: bool,
    resume: bool,
    name: str | None,
    run_dir: Path | None,
    preset: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Search for better settings of WHAT: a preset, .toml file or environment id.

    Each trial trains the recipe with other values on a few seeds. Bad trials are stopped early. Repeat the command to continue;
    start it several times to work on one study in several processes. Flags change the recipe of all trials.

    \b
    surefoot tune CartPole-v1 --steps 20_000 --trials 30 --jobs 2
    surefoot tune sft --model MODEL --data.train rows.jsonl --data.held-out held.jsonl --space space.toml
    """
    from surefoot.compare import tune as tuning

    require_package("optuna", "tune", "surefoot tune")
    if resume:
        reject_options({*flags, "space", "seeds", "no_pruning", "name", "run_dir", "preset"}, "a study keeps its settings")
        result = tuning.resume_study(Path(run_named(what)), trials=trials, jobs=jobs, confirm=confirm, stderr=as_json)
    else:
        if name is not None:
            check_name("--name", name)
        result = tuning.tune(
            what,
            space,
            changes_from(flags),
            preset=preset,
            trials=20 if trials is None else trials,
            seeds=seeds,
            jobs=jobs,
            prune=not no_pruning,
            confirm=confirm,
            folder=(run_dir or Path("runs")) / name if name else run_dir,
            stderr=as_json,
        )
    if as_json:
        echo_json(result.results)
    else:
        echo(f"\n{result.text}")


def show_report(report: "Report", as_json: bool) -> None:
    """Print the tables, or everything as JSON."""
    if as_json:
        echo_json(report.results)
    else:
        echo(f"\n{report.text}\n")
    echo(report.last_line, err=as_json)
