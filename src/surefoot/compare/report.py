"""Write comparisons as files and runs as pages: report.md, results.json, plots, and the HTML page of ``surefoot report``.

The page loads nothing from elsewhere, and shows text of models and names as plain text.
"""

import base64
import importlib.util
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from surefoot import __version__
from surefoot.compare.across_tasks import AGGREGATES, TaskComparison
from surefoot.compare.plots import draw_panel, draw_profiles, panels_of, run_colour
from surefoot.compare.runs import (
    ABSENT,
    SCORES,
    Comparison,
    Group,
    SavedRun,
    differences_between,
    distinguishing_fields,
    short_text,
)
from surefoot.compare.statistics import (
    Results,
    finite,
    interquartile_mean,
    interval_text,
    markdown_table,
    number,
    numbers,
    of_seeds,
    present,
    with_interval,
)
from surefoot.errors import missing_extra, to_install
from surefoot.files import write_bytes, write_text
from surefoot.recipes.base import SCHEDULES
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.reading import flatten
from surefoot.store.finding import Finding
from surefoot.store.public import ENVIRONMENT, REMOVED, public_table
from surefoot.terminal import visible

Draw = Callable[[dict[str, Any], Path], None]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SAMPLES = 12
LONGEST_TEXT = 600
"""characters of a sample's text that the page shows"""
STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #6a6a70; --line: #8884; --page: #fff; --card: #f6f6f8;
  --serious: #b3261e; --warning: #9a5b00; --note: #3b6ea5; --well: #2e7d4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --soft: #a0a0a8; --page: #161618; --card: #202024;
  --serious: #ff8a80; --warning: #f0b45c; --note: #8ab4e8; --well: #7cc79a; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .2rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.6rem 0 .8rem; padding-top: .8rem; border-top: 1px solid var(--line) }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere }
p { margin: .3rem 0; max-width: 48rem } .soft { color: var(--soft) } .small { font-size: .85rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; max-width: 100%; overflow-x: auto }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 500; font-size: .85rem; white-space: nowrap } td.n, th.n { text-align: right }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 14rem }
.swatch { display: inline-block; width: 1.1em; height: .22em; border-radius: 2px; vertical-align: .25em; margin-right: .5em }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 1rem 1.6rem }
.curves img { width: 100%; display: block }
.finding { border-left: 3px solid; padding: .1rem 0 .1rem .9rem; margin: .9rem 0; max-width: 56rem }
.finding b { text-transform: capitalize } .finding ul { margin: .3rem 0; padding-left: 1.1rem }
.serious { border-color: var(--serious) } .serious b { color: var(--serious) }
.warning { border-color: var(--warning) } .warning b { color: var(--warning) }
.note { border-color: var(--note) } .note b { color: var(--note) } .well { color: var(--well) }
pre { background: var(--card); border-radius: 6px; padding: .8rem 1rem; overflow-x: auto;
  font: 13px/1.5 ui-monospace, Menlo, monospace }
details { margin: .5rem 0 } summary { cursor: pointer; color: var(--soft) }
@media print { body { max-width: none; padding: 0 } h2 { break-after: avoid } img { break-inside: avoid } }
"""


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
        each = numbers(of_seeds(results, score))
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


def comparison_text(comparison: Comparison) -> str:
    """A comparison of runs as text for a terminal, which is also Markdown."""
    groups = comparison.groups
    lines = [markdown_table(["group", "runs", "seeds", "state"], [_group_row(group) for group in groups])]
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
            changed = "; ".join(map(visible, run.changed))
            lines.append(f"{visible(str(run.path))}: changed since the checkpoint: {changed}")
        lines += [f"{visible(str(run.path))}: {finding.line}" for finding in run.findings if finding.severity != "note"]
    return lines


def _group_row(group: Group) -> list[str]:
    return [group.name, str(len(group.runs)), *_seeds_and_states(group.runs)]


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
    require_matplotlib()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(runs, tasks))


def write_figures(runs: Sequence[SavedRun], folder: Path, kind: Any, tasks: TaskComparison | None = None) -> list[Path]:
    """Write each plot as a file, and return their paths. Raises SurefootError if matplotlib is not installed."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for panel in panels_of(runs):
        paths.append(folder / f"{panel.name}.{kind}")
        write_bytes(paths[-1], draw_panel(panel, runs, kind))
    if tasks is not None:
        paths.append(folder / f"profiles.{kind}")
        write_bytes(paths[-1], draw_profiles(tasks, kind))
    return paths


def require_matplotlib(purpose: str = "surefoot report") -> None:
    """Raise SurefootError, naming the extra, if matplotlib is not installed."""
    if not matplotlib_installed():
        raise missing_extra("matplotlib", "plots", purpose)


def page(runs: Sequence[SavedRun], tasks: TaskComparison | None = None) -> str:
    """The HTML page of some runs, with a comparison over tasks if there is one."""
    title = runs[0].recipe.title if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="soft">{_text(runs[0].name if len(runs) == 1 else ", ".join(run.name for run in runs))}</p>',
        _overview(runs),
        *([] if tasks is None else _across_tasks(tasks)),
        "<h2>Findings</h2>",
        *(_findings(run, alone=len(runs) == 1) for run in runs),
        "<h2>Curves</h2>",
        _curves(runs),
        *_samples(runs),
        "<h2>Recipe</h2>",
        *_recipes(runs),
        "<h2>Environment</h2>",
        _environment(runs),
        "<h2>Reproduce</h2>",
        *(_reproduction(run) for run in runs),
        f'<p class="soft small">Written by surefoot {_text(__version__)}.</p>',
    ]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n<main>\n{body}\n</main>\n</body></html>\n'


def _text(value: Any) -> str:
    """Any value as text of the page: markup is escaped, unprintable characters become escape sequences."""
    return escape(visible(str(value)))


def _overview(runs: Sequence[SavedRun]) -> str:
    scores = [metric for metric in SCORES if any(run.last(metric) is not None for run in runs)][:4]
    header = ["run", "seed", "state", "time", *scores]
    rows = []
    for index, run in enumerate(runs):
        swatch = f'<span class="swatch" style="background:{run_colour(index)}"></span>'
        texts = [run.name, run.recipe.seed, run.state, duration(run.seconds), *(number(run.last(name)) for name in scores)]
        first, *others = map(_text, texts)
        rows.append([swatch + first, *others])
    return _html_table(header, rows, dict.fromkeys(["seed", "time", *scores], "n"))


def _across_tasks(tasks: TaskComparison) -> Iterable[str]:
    yield f"<h2>{_text(tasks.field)} compared over {len(tasks.ranges)} task{'s' if len(tasks.ranges) > 1 else ''}</h2>"
    for caption, header, rows in across_tasks_tables(tasks):
        yield f'<p class="soft small">{_text(caption)}</p>'
        yield _html_table(header, [[_text(cell) for cell in row] for row in rows])
    yield f'<p class="soft small">{_text(_across_tasks_note(tasks))}</p>'
    alt = _text(f"Performance profiles of {tasks.metric}: the share of runs above each normalised score, by {tasks.field}")
    yield f'<div class="curves">{_image(draw_profiles(tasks), alt)}</div>'


def _image(svg: bytes, alt: str) -> str:
    return f'<img src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}" alt="{alt}">'


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]], classes: Mapping[str, str] | None = None) -> str:
    """A table of cells that are HTML already. ``classes`` maps a column to its CSS class; an empty header is left out."""
    kinds = [f' class="{classes[name]}"' if classes and name in classes else "" for name in header]
    cells = [[f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    heads = "".join(f"<th{kind}>{_text(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    return f"<table>{f'<thead><tr>{heads}</tr></thead>' if any(header) else ''}<tbody>{body}</tbody></table>"


def duration(seconds: float) -> str:
    """Seconds as ``80 s``, ``15 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _findings(run: SavedRun, alone: bool) -> str:
    name = "" if alone else f"<h3>{_text(run.name)}</h3>"
    if not run.findings:
        return f'{name}<p class="well">No findings in {len(run.rows):,} iterations.</p>'
    return name + "".join(map(_finding, run.findings))


def _finding(finding: Finding) -> str:
    advice = "".join(f"<li>{_text(line)}</li>" for line in finding.advice)
    evidence = "; ".join(_text(line) for line in finding.evidence)
    return (
        f'<div class="finding {finding.severity}"><p><b>{finding.severity}</b>: {_text(finding.what)}.</p>'
        f'<p class="soft">Why: {_text(finding.cause)}.</p><p class="small">Try:</p><ul>{advice}</ul>'
        f'<p class="soft small">{evidence}</p></div>'
    )


def _curves(runs: Sequence[SavedRun]) -> str:
    images = []
    for panel in panels_of(runs):
        last = ", ".join(f"{run.name}: {number(run.last(panel.metrics[0]))}" for run in runs)
        alt = _text(f"{panel.title} over steps. {panel.unit}. Last of {panel.metrics[0]}: {last}")
        images.append(_image(draw_panel(panel, runs), alt))
    if not images:
        return '<p class="soft">Curves need at least two iterations.</p>'
    caption = '<p class="soft small">Over steps. Pale: every iteration; strong: smoothed.</p>'
    return f'{caption}<div class="curves">{"".join(images)}</div>'


def _samples(runs: Sequence[SavedRun]) -> Iterable[str]:
    for run in runs:
        if (latest := run.samples()) is None or not latest[1]:
            continue
        steps, samples = latest
        chosen = [samples[i * len(samples) // min(SAMPLES, len(samples))] for i in range(min(SAMPLES, len(samples)))]
        columns = [name for name in ("reward", "gold", "kl") if name in chosen[0]]
        yield f"<h2>Samples of {_text(run.name)} at step {steps:,}</h2>"
        rows = []
        for sample in chosen:
            texts = (_sample_text(sample.get("prompt", "")), _sample_text(sample["response"]))
            rows.append([*(_score(sample.get(name)) for name in columns), *texts])
        classes: dict[str, str] = {**dict.fromkeys(columns, "n"), "prompt": "text soft", "response": "text"}
        yield _html_table([*columns, "prompt", "response"], rows, classes)


def _sample_text(text: Any) -> str:
    """A prompt or a response, with its line breaks, truncated if it is long."""
    text = str(text)
    shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
    return "\n".join(map(_text, shown.split("\n")))


def _score(value: Any) -> str:
    return f"{value:+.2f}" if isinstance(value, (int, float)) else "–"


def _recipes(runs: Sequence[SavedRun]) -> Iterable[str]:
    if len(runs) > 1:
        differing = differences_between([{**distinguishing_fields(run.recipe), "seed": run.recipe.seed} for run in runs])
        if differing:
            hidden = {field for run in runs for field in public_table(run.recipe.table, places=True)[1]}
            shown = {field: [REMOVED] * len(runs) if field in hidden else values for field, values in differing.items()}
            rows = [[_text(field), *(_text(_plain(value)) for value in values)] for field, values in shown.items()]
            yield _html_table(["field", *(run.name for run in runs)], rows)
        else:
            yield "<p>All recipes are the same.</p>"
    for run in runs:
        public, hidden_here = public_table(run.recipe.table, places=True)
        table = "\n".join(map(_text, tomli_w.dumps(public).split("\n")))
        if run.changed:
            lines = [line if (field := line.partition(": ")[0]) not in hidden_here else field for line in run.changed]
            yield f"<p>{_text(run.name)}: changed since the checkpoint: {_text('; '.join(lines))}</p>"
        yield f"<details><summary>{_text(run.name)}: config.toml</summary><pre>{table}</pre></details>"


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list, bool)) else str(value)


def _environment(runs: Sequence[SavedRun]) -> str:
    """A table of environment.json, without the folder in which the run was started: a page may be published."""
    shown = {"git", "preset", *ENVIRONMENT} - {"seed"}
    tables = [dict(flatten({key: value for key, value in run.environment.items() if key in shown})) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [[_text(name), _text(", ".join(dict.fromkeys(_plain(table.get(name)) for table in tables)))] for name in names]
    return _html_table(["", ""], rows) if rows else '<p class="soft">environment.json can’t be read.</p>'


def _reproduction(run: SavedRun) -> str:
    command = run.environment.get("command")
    started = ""
    if isinstance(command, list) and command:
        words = ["surefoot" if Path(str(command[0])).name in ("surefoot", "__main__.py") else Path(str(command[0])).name]
        started = f'<p class="soft small">Started with <code>{_text(shlex.join([*words, *map(str, command[1:])]))}</code></p>'
    file = f"{run.path}/config.toml"
    return (
        f"<h3>{_text(run.name)}</h3><pre>surefoot train {_text(shlex.quote(file))}</pre>"
        f'<p class="soft small">With the versions above, the same machine type and {run.recipe.threads} '
        f"{'thread' if run.recipe.threads == 1 else 'threads'}, the numbers are identical to the last bit.</p>{started}"
    )
