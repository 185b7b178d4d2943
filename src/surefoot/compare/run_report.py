"""``surefoot report``: runs as one page of HTML that needs nothing else. It asks the network for nothing, and text is text."""

import base64
import json
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from surefoot import __version__
from surefoot.compare.report import matplotlib_is_there, number
from surefoot.compare.run_plots import colour_of, draw_panel, panels_of
from surefoot.compare.runs import JUDGED, Run, differences_between, fields_of, flat
from surefoot.diagnostics.findings import Finding
from surefoot.errors import missing_extra
from surefoot.files import write_bytes, write_text
from surefoot.recipes.reading import to_toml
from surefoot.terminal import visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SAMPLES = 12
LONGEST = 600
"""letters of a sample's text that are shown"""
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


def write_report(runs: Sequence[Run], out: Path) -> None:
    """Write the page, whole or not at all. Raises SurefootError where matplotlib is missing."""
    _require_matplotlib()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(runs))


def write_figures(runs: Sequence[Run], folder: Path, kind: Any) -> list[Path]:
    """Write each picture as a file; their paths. Raises SurefootError where matplotlib is missing."""
    _require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for panel in panels_of(runs):
        paths.append(folder / f"{panel.name}.{kind}")
        write_bytes(paths[-1], draw_panel(panel, runs, kind))
    return paths


def _require_matplotlib() -> None:
    if not matplotlib_is_there():
        raise missing_extra("matplotlib", "plots", "surefoot report")


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    title = runs[0].recipe.title if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="soft">{_text(runs[0].name if len(runs) == 1 else ", ".join(run.name for run in runs))}</p>',
        _overview(runs),
        "<h2>Findings</h2>",
        *(_findings(run, alone=len(runs) == 1) for run in runs),
        "<h2>Curves</h2>",
        _curves(runs),
        *_samples(runs),
        "<h2>Recipe</h2>",
        *_recipes(runs),
        "<h2>Environment</h2>",
        _environment(runs),
        "<h2>Do it again</h2>",
        *(_again(run) for run in runs),
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
    """Anything as text of a page: markup is escaped, what has no shape is shown as a number."""
    return escape(visible(str(value)))


def _overview(runs: Sequence[Run]) -> str:
    scores = [metric for metric in JUDGED if any(run.last(metric) is not None for run in runs)][:4]
    header = ["run", "seed", "state", "time", *scores]
    rows = []
    for index, run in enumerate(runs):
        swatch = f'<span class="swatch" style="background:{colour_of(index)}"></span>'
        cells = [f"<td>{swatch}{_text(run.name)}</td>", f'<td class="n">{run.recipe.seed}</td>', f"<td>{_text(run.state)}</td>"]
        cells.append(f'<td class="n">{_text(duration(run.seconds))}</td>')
        cells += [f'<td class="n">{_text(number(run.last(metric)))}</td>' for metric in scores]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    numeric = {"seed", "time", *scores}
    heads = "".join(f'<th class="n">{_text(name)}</th>' if name in numeric else f"<th>{_text(name)}</th>" for name in header)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _findings(run: Run, alone: bool) -> str:
    name = "" if alone else f"<h3>{_text(run.name)}</h3>"
    if not run.findings:
        return f'{name}<p class="well">No findings in {len(run.rows):,} iterations.</p>'
    return name + "".join(map(_finding, run.findings))


def _finding(finding: Finding) -> str:
    tried = "".join(f"<li>{_text(advice)}</li>" for advice in finding.advice)
    seen = "; ".join(_text(evidence) for evidence in finding.evidence)
    return (
        f'<div class="finding {finding.severity}"><p><b>{finding.severity}</b>: {_text(finding.what)}.</p>'
        f'<p class="soft">Why: {_text(finding.cause)}.</p><p class="small">Try:</p><ul>{tried}</ul>'
        f'<p class="soft small">{seen}</p></div>'
    )


def _curves(runs: Sequence[Run]) -> str:
    images = []
    for panel in panels_of(runs):
        data = base64.b64encode(draw_panel(panel, runs)).decode()
        last = ", ".join(f"{run.name}: {number(run.last(panel.metrics[0]))}" for run in runs)
        about = _text(f"{panel.title} over steps. {panel.unit}. Last of {panel.metrics[0]}: {last}")
        images.append(f'<img src="data:image/svg+xml;base64,{data}" alt="{about}">')
    if not images:
        return '<p class="soft">One iteration makes no curve yet.</p>'
    what = '<p class="soft small">Over steps. Pale: every iteration; strong: smoothed.</p>'
    return f'{what}<div class="curves">{"".join(images)}</div>'


def _samples(runs: Sequence[Run]) -> Iterable[str]:
    for run in runs:
        if (found := run.samples()) is None or not found[1]:
            continue
        steps, samples = found
        chosen = [samples[i * len(samples) // min(SAMPLES, len(samples))] for i in range(min(SAMPLES, len(samples)))]
        numbers = [name for name in ("reward", "gold", "kl") if name in chosen[0]]
        yield f"<h2>What {_text(run.name)} says, at step {steps:,}</h2>"
        head = "".join(f'<th class="n">{name}</th>' for name in numbers)
        rows = []
        for sample in chosen:
            cells = "".join(f'<td class="n">{_text(_score(sample.get(name)))}</td>' for name in numbers)
            cells += (
                f'<td class="text soft">{_said(sample.get("prompt", ""))}</td><td class="text">{_said(sample["response"])}</td>'
            )
            rows.append(f"<tr>{cells}</tr>")
        yield f"<table><thead><tr>{head}<th>prompt</th><th>response</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _said(text: Any) -> str:
    """What a model or a row says, line breaks kept, cut where it is long."""
    text = str(text)
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return "\n".join(map(_text, shown.split("\n")))


def _score(value: Any) -> str:
    return f"{value:+.2f}" if isinstance(value, (int, float)) else "–"


def _recipes(runs: Sequence[Run]) -> Iterable[str]:
    if len(runs) > 1:
        differing = differences_between([{**fields_of(run.recipe), "seed": run.recipe.seed} for run in runs])
        if differing:
            heads = "".join(f"<th>{_text(run.name)}</th>" for run in runs)
            rows = "".join(
                f"<tr><td>{_text(field)}</td>{''.join(f'<td>{_text(_plain(value))}</td>' for value in values)}</tr>"
                for field, values in differing.items()
            )
            yield f"<table><thead><tr><th>differs</th>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        else:
            yield "<p>All recipes are the same.</p>"
    for run in runs:
        table = "\n".join(map(_text, to_toml(run.recipe).split("\n")))
        if run.changed:
            yield f"<p>{_text(run.name)}: config.toml was changed since the checkpoint: {_text('; '.join(run.changed))}</p>"
        yield f"<details><summary>{_text(run.name)}: config.toml</summary><pre>{table}</pre></details>"


def _plain(value: Any) -> str:
    return (
        "none"
        if value is None
        else json.dumps(value, ensure_ascii=False)
        if isinstance(value, (dict, list, bool))
        else str(value)
    )


def _environment(runs: Sequence[Run]) -> str:
    """Versions and the like; the folder that a run began in is nobody's business."""
    tables = [
        dict(flat({key: value for key, value in run.environment.items() if key not in ("command", "working_folder", "seed")}))
        for run in runs
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = []
    for name in names:
        values = dict.fromkeys(_plain(table.get(name)) for table in tables)
        rows.append(f"<tr><td>{_text(name)}</td><td>{_text(', '.join(values))}</td></tr>")
    return f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else '<p class="soft">environment.json can’t be read.</p>'


def _again(run: Run) -> str:
    command = run.environment.get("command")
    began = ""
    if isinstance(command, list) and command:
        words = ["surefoot" if Path(str(command[0])).name in ("surefoot", "__main__.py") else Path(str(command[0])).name]
        began = f'<p class="soft small">It was begun by <code>{_text(shlex.join([*words, *map(str, command[1:])]))}</code></p>'
    file = f"{run.path}/config.toml"
    return (
        f"<h3>{_text(run.name)}</h3><pre>surefoot train {_text(shlex.quote(file))}</pre>"
        f'<p class="soft small">With the versions above, the same machine type and {run.recipe.threads} '
        f"{'thread' if run.recipe.threads == 1 else 'threads'}, the numbers are the same to the last bit.</p>{began}"
    )
