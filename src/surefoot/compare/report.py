"""Write comparisons as files and runs as pages: report.md, results.json, plots, and the HTML page of ``surefoot report``.

The page loads nothing from elsewhere, and shows text of models and names as plain text.
"""

import base64
import importlib.util
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tomli_w

from surefoot import __version__
from surefoot.compare.across_tasks import AGGREGATES, TaskComparison
from surefoot.compare.plots import Panel, draw_panel, draw_profiles, panels_of, run_colour
from surefoot.compare.runs import ABSENT, SCORES, Comparison, SavedRun, differences_between, distinguishing_fields, short_text
from surefoot.compare.statistics import (
    Results,
    finite,
    interquartile_mean,
    interval_text,
    markdown_table,
    number,
    numbers,
    present,
    with_interval,
)
from surefoot.diagnostics.metrics import title_of
from surefoot.errors import require_package, to_install
from surefoot.files import write_bytes, write_text
from surefoot.recipes.base import SCHEDULES
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.reading import flatten
from surefoot.store.public import ENVIRONMENT, REMOVED, public_table
from surefoot.terminal import visible, visible_lines

Draw = Callable[[dict[str, Any], Path], None]
SAMPLES = 12
LONGEST_TEXT = 600
"""characters of a sample's text that the page shows"""


# ---- comparisons of algorithms ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """A finished comparison."""

    folder: Path
    results: dict[str, Any]
    """the contents of results.json"""
    text: str
    """Markdown, with columns that line up in plain text"""
    plot: Path | None
    """None if matplotlib is not installed"""

    @property
    def last_line(self) -> str:
        """Where the files are, and how to get a missing plot."""
        if self.plot is not None:
            return f"plot, report.md and results.json are in {self.folder}/"
        return (
            f"report.md and results.json are in {self.folder}/; for the plot run: {to_install('plots')}, "
            "and repeat the command (it trains nothing again)"
        )


def write_report(folder: Path, results: dict[str, Any], text: str, draw: Draw) -> Report:
    """Write results.json, report.md and the plot; ``draw`` writes a plot file; it is not called without matplotlib."""
    results = finite(results)
    plot, picture = None, ""
    if matplotlib_installed():
        plot = folder / "plot.png"
        draw(results, plot)
        draw(results, plot.with_suffix(".svg"))
        picture = "\n![the same as curves](plot.png)\n"
    write_text(folder / "results.json", json.dumps(results, allow_nan=False))
    write_text(folder / "report.md", f"{text}\n{picture}")
    return Report(folder, results, text, plot)


def matplotlib_installed() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def score_table(by_name: Mapping[str, Results], score: str) -> str:
    """One row per algorithm: mean and interquartile mean with their intervals, and every seed."""
    rows = []
    for name, results in by_name.items():
        scores = present(results, score)
        each = numbers([result.get(score) for result in results])
        rows.append([name, *with_interval(scores), *with_interval(scores, interquartile_mean), each])
    return markdown_table(["algorithm", "mean", "95 % interval", "IQM", "95 % interval", "each seed"], rows)


def shared_settings(recipe: ControlRecipe) -> str:
    """Network, optimizer, γ and normalisation of a recipe, in words."""
    network, optimizer, normalise = recipe.network, recipe.optimizer, recipe.normalise
    widths = f"{network.custom}" if network.custom else f"{'-'.join(map(str, network.hidden))} {network.activation}"
    widths += f", then an LSTM of {network.lstm}" if network.lstm else ""
    trunk = "one trunk shared with the critic" if network.shared_trunk else "separate networks for policy and critic"
    schedule = {"linear": "falling linearly to zero", "cosine": "falling to zero as a cosine"}.get(
        optimizer.schedule, optimizer.schedule if optimizer.schedule in SCHEDULES else f"scheduled by {optimizer.schedule}"
    )
    schedule += f" after a warm-up of {optimizer.warmup:g}" if optimizer.warmup else ""
    critics = f" ({optimizer.critic_learning_rate:g} for the critic)" if optimizer.critic_learning_rate else ""
    limit = "no gradient clip" if optimizer.max_grad_norm is None else f"gradients clipped at norm {optimizer.max_grad_norm:g}"
    name = {"adam": "AdamW" if optimizer.weight_decay else "Adam", "rmsprop": "RMSprop"}[optimizer.kind]
    limit += f", weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else ""
    chosen = normalise.observations
    observations = "observations" if isinstance(chosen, bool) else f"observations ({', '.join(chosen)})"
    normalised = [what for what, on in ((observations, chosen), ("rewards", normalise.rewards)) if on]
    return (
        f"{widths}, {trunk}; {name} {optimizer.learning_rate:g}{critics}, {schedule}, {limit}; "
        f"γ = {recipe.objective.gamma:g}; {' and '.join(normalised) or 'nothing'} normalised"
    )


def seeds_text(first: int, count: int) -> str:
    """``3 seeds (1 to 3)``"""
    return f"seed {first}" if count == 1 else f"{count} seeds ({first} to {first + count - 1})"


def interval_note(seeds: int) -> str:
    """How the intervals were computed; one seed has none."""
    text = "Intervals: 95 %, Student's t over seeds, Welch's for differences"
    return f"{text}; one seed has no interval: train more seeds" if seeds == 1 else text


# ---- comparisons of runs ---------------------------------------------------------------------------------------------


def _names(runs: Sequence[SavedRun]) -> str:
    """The folders of runs without what is before their last part; of many, the first and their number."""
    names = [short_text(run.path.name) for run in runs]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … ({len(names)})"


def comparison_text(comparison: Comparison) -> str:
    """A comparison of runs as text for a terminal, which is also Markdown."""
    groups = comparison.groups
    lines = [
        markdown_table(
            ["group", "runs", "seeds", "state"],
            [[each.name, _names(each.runs), *_seeds_and_states(each.runs)] for each in groups],
        )
    ]
    if comparison.fields:
        common = {field: values for field, values in comparison.fields.items() if ABSENT not in values}
        rows = [[field, *map(short_text, values)] for field, values in common.items()]
        lines += ["Differences between the recipes:", markdown_table(["field", *(group.name for group in groups)], rows)]
        if len(common) < len(comparison.fields):
            others = len(comparison.fields) - len(common)
            lines.append(f"And {others} fields that only some of these kinds of recipe have (--json prints them).")
    elif len(groups) == 1:
        lines.append("The recipes differ only in the seed.")
    for metric in comparison.metrics:
        lines += [f"{metric}, last known value:", _scores(comparison, metric)]
    if "reward.terms" in comparison.fields:
        lines.append("The rewards differ: compare gold, or score all runs by one reward (surefoot evaluate RUN --reward TERM).")
    counts = [max((len(group.scores(metric)) for metric in comparison.metrics), default=0) for group in groups]
    lines.append(f"{interval_note(min(filter(None, counts), default=len(groups[0].runs)))}.")
    if comparison.environments:
        rows = [[name, ", ".join(dict.fromkeys(map(short_text, values)))] for name, values in comparison.environments.items()]
        lines += ["Other differences that may matter:", markdown_table(["in environment.json", "values"], rows)]
    return "\n\n".join([*lines, *(line for group in groups for line in _notices(group.runs))])


def _notices(runs: Sequence[SavedRun]) -> list[str]:
    """What a reader must know about runs: edited recipes, and findings."""
    lines = []
    for run in runs:
        if run.changed:
            lines.append(f"{visible(str(run.path))}: changed since the checkpoint: {'; '.join(map(visible, run.changed))}")
        lines += [f"{visible(str(run.path))}: {finding.line}" for finding in run.findings if finding.severity != "note"]
    return lines


def _seeds_and_states(runs: Sequence[SavedRun]) -> tuple[str, str]:
    seeds = [run.recipe.seed for run in runs]
    twice = " (one seed twice)" if len(set(seeds)) < len(seeds) else ""
    return ", ".join(map(str, sorted(seeds))) + twice, "; ".join(dict.fromkeys(run.state for run in runs))


def _scores(comparison: Comparison, metric: str) -> str:
    against = comparison.against_first(metric)
    rows = []
    for group in comparison.groups:
        scores = group.scores(metric)
        row = [group.name, *with_interval(scores), *with_interval(scores, interquartile_mean)]
        if len(comparison.groups) > 1:
            lead = against.get(group.name)
            row.append("–" if lead is None else f"{number(lead['difference'])} ({interval_text(*lead['interval'])})")
        rows.append([*row, numbers(group.of_seeds(metric))])
    more = [f"minus {comparison.groups[0].name}"] if len(comparison.groups) > 1 else []
    return markdown_table(["group", "mean", "95 % interval", "IQM", "95 % interval", *more, "each seed"], rows)


TextTable = tuple[str, list[str], list[list[str]]]
"""a line above the table, its header and its rows"""


def across_tasks_text(comparison: TaskComparison) -> str:
    """A comparison over tasks as text for a terminal, which is also Markdown."""
    parts = [f"{caption}\n\n{markdown_table(header, rows)}" for caption, header, rows in across_tasks_tables(comparison)]
    runs = [run for by_task in comparison.runs.values() for of_task in by_task.values() for run in of_task]
    return "\n\n".join([*parts, _across_tasks_note(comparison), *_notices(runs)])


def _across_tasks_note(comparison: TaskComparison) -> str:
    fewest = min(count for row in comparison.results["results"].values() for count in row["runs"].values())
    return f"{interval_note(fewest)}."


def across_tasks_tables(comparison: TaskComparison) -> list[TextTable]:
    """Aggregates, ranges and scores of a comparison over tasks."""
    results = comparison.results["results"]
    first, rows = next(iter(results)), []
    for value, row in results.items():
        cells = [f"{number(row[name]['value'])} ({interval_text(*row[name]['interval'])})" for name in AGGREGATES]
        better = row.get("improvement")
        last = "–" if better is None else f"{number(better['value'])} ({interval_text(*better['interval'])})"
        rows.append([short_text(value), str(sum(row["runs"].values())), *cells, last])
    header = [comparison.field, "runs", "IQM", "median", "mean", "optimality gap", f"P(better than {short_text(first)})"]
    ranges = [[short_text(task), number(low), number(high)] for task, (low, high) in comparison.ranges.items()]
    each = []
    for value, by_task in comparison.runs.items():
        for task, runs in by_task.items():
            scores = comparison.scores[value][task]
            cells = [short_text(value), short_text(task), number(float(np.mean(scores))), numbers(scores)]
            each.append([*cells, *_seeds_and_states(runs)])
    caption = f"{comparison.metric}, last known value, normalised per task; in brackets: 95 % intervals:"
    return [
        (caption, header, rows),
        ("Scores that count as 0 and 1:", ["task", "0", "1"], ranges),
        ("Scores as they are:", [comparison.field, "task", "mean", "each seed", "seeds", "state"], each),
    ]


# ---- the page of runs ------------------------------------------------------------------------------------------------


def write_page(runs: Sequence[SavedRun], out: Path, tasks: TaskComparison | None = None) -> None:
    """Write the HTML page atomically, with a comparison over tasks if there is one.

    Raises SurefootError if matplotlib is not installed.
    """
    require_package("matplotlib", "plots", "surefoot report")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(runs, tasks))


def write_figures(runs: Sequence[SavedRun], folder: Path, kind: Any, tasks: TaskComparison | None = None) -> list[Path]:
    """Write each plot as a file, and return their paths. Raises SurefootError if matplotlib is not installed."""
    require_package("matplotlib", "plots", "surefoot report")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for panel in panels_of(runs):
        paths.append(folder / f"{panel.name}.{kind}")
        write_bytes(paths[-1], draw_panel(panel, runs, kind))
    if tasks is not None:
        paths.append(folder / f"profiles.{kind}")
        write_bytes(paths[-1], draw_profiles(tasks, kind))
    return paths


def page(runs: Sequence[SavedRun], tasks: TaskComparison | None = None) -> str:
    """The HTML page of some runs, with a comparison over tasks if there is one."""
    public = [public_table(run.recipe.table, places=True) for run in runs]
    hidden = {field for _, fields in public for field in fields}
    differing = differences_between([{**distinguishing_fields(run.recipe), "seed": run.recipe.seed} for run in runs])
    values: dict[str, Any] = {
        "version": __version__,
        "title": runs[0].recipe.title if len(runs) == 1 else f"{len(runs)} runs",
        "runs": runs,
        "overview": _overview(runs),
        "swatches": [run_colour(index) for index in range(len(runs))],
        "tasks": tasks,
        "curves": [(_base64(draw_panel(panel, runs)), _described(panel, runs)) for panel in panels_of(runs)],
        "sampled": [(run, *sampled) for run in runs if (sampled := _sampled(run)) is not None],
        "longest_text": LONGEST_TEXT,
        "differing": [
            [field, *(REMOVED if field in hidden else _plain(value) for value in values)] for field, values in differing.items()
        ],
        "recipes": [
            (
                run,
                [line if (field := line.partition(": ")[0]) not in removed else field for line in run.changed],
                tomli_w.dumps(table),
            )
            for run, (table, removed) in zip(runs, public, strict=True)
        ],
        "environment": _environment_rows(runs),
        "commands": [(run, f"surefoot train {shlex.quote(f'{run.path}/config.toml')}", _started_with(run)) for run in runs],
    }
    if tasks is not None:
        note = _across_tasks_note(tasks)
        values |= {"task_tables": across_tasks_tables(tasks), "task_note": note, "profiles": _base64(draw_profiles(tasks))}
    return rendered("report.html", **values)


def _overview(runs: Sequence[SavedRun]) -> dict[str, Any]:
    scores = [metric for metric in SCORES if any(run.last(metric) is not None for run in runs)][:4]
    titles = [title_of(name) for name in scores]
    return {
        "header": ["run", "seed", "state", "time", *titles],
        "classes": dict.fromkeys(["seed", "time", *titles], "n"),
        "rows": [
            [run.name, run.recipe.seed, run.state, duration(run.seconds), *(number(run.last(name)) for name in scores)]
            for run in runs
        ],
    }


def _base64(svg: bytes) -> str:
    return base64.b64encode(svg).decode()


def _described(panel: Panel, runs: Sequence[SavedRun]) -> str:
    """A plot in words, for those who can't see it."""
    last = ", ".join(f"{run.name}: {number(run.last(panel.metrics[0]))}" for run in runs)
    return f"{panel.title} over steps. {panel.unit}. Last of {panel.metrics[0]}: {last}"


def duration(seconds: float) -> str:
    """Seconds as ``80 s``, ``15 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _sampled(run: SavedRun) -> tuple[int, list[str], list[dict[str, Any]]] | None:
    """The step of a run's last samples, the scores that they have, and some of them; None without any."""
    if (latest := run.samples()) is None or not latest[1]:
        return None
    steps, samples = latest
    count = min(SAMPLES, len(samples))
    chosen = [samples[i * len(samples) // count] for i in range(count)]
    return steps, [name for name in ("reward", "gold", "kl") if name in chosen[0]], chosen


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list, bool)) else str(value)


def _environment_rows(runs: Sequence[SavedRun]) -> list[list[str]]:
    """environment.json, without the folder in which the run was started: a page may be published."""
    shown = {"git", "preset", *ENVIRONMENT} - {"seed"}
    tables = [dict(flatten({key: value for key, value in run.environment.items() if key in shown})) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    return [[name, ", ".join(dict.fromkeys(_plain(table.get(name)) for table in tables))] for name in names]


def _started_with(run: SavedRun) -> str:
    """The command that started a run; empty if unknown."""
    command = run.environment.get("command")
    if not isinstance(command, list) or not command:
        return ""
    program = Path(str(command[0])).name
    return shlex.join(["surefoot" if program == "__main__.py" else program, *map(str, command[1:])])


# ---- templates -------------------------------------------------------------------------------------------------------


@jinja2.pass_eval_context
def _shown(context: jinja2.nodes.EvalContext, value: Any) -> Any:
    """A value as text of a page, with escapes for unprintable characters; in Markdown the value itself."""
    return value if not context.autoescape or hasattr(value, "__html__") else visible_lines(str(value))


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("surefoot.compare"),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def rendered(template: str, **values: Any) -> str:
    """A template with its values; markup in the values of an HTML page is escaped."""
    return _environment().get_template(template).render(values)
