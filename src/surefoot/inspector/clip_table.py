"""Write a page as one self-contained HTML file: no server, no network, no build step. The clip table is one.

Browsers load no JavaScript modules from a file, so the front end's modules become one script, each in its own scope.
"""

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from surefoot import __version__
from surefoot.errors import SurefootError
from surefoot.files import read_text

IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w/]+)\.js";$', re.M)
EXPORT = re.compile(r"^export (function|async function|const) (\w+)", re.M)
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""content security policy: only inline code, no requests"""


def static(name: str, own: Path | None = None) -> str:
    """The content of a file of a page: from its own folder if it is there, else of the front end."""
    if own is not None and (own / name).is_file():
        return read_text(own / name)
    return (resources.files("surefoot.inspector") / "static" / name).read_text("utf-8")


def bundle(name: str, own: Path | None = None) -> str:
    """A module and its imports as one classic script."""
    done: dict[str, str] = {}
    _add(name, own, done)
    return "\n".join(['"use strict";', *done.values()])


def _add(name: str, own: Path | None, done: dict[str, str]) -> None:
    text = static(f"{name}.js", own)
    for _, other in IMPORT.findall(text):
        if other not in done:
            _add(other, own, done)
    body = IMPORT.sub(lambda match: f"const {{ {match[1]} }} = _{match[2]};", text)
    names = ", ".join(exported for _, exported in EXPORT.findall(text))
    body = EXPORT.sub(r"\1 \2", body)
    assert not re.search(r"^(import|export)\b", body, re.M), f"{name}.js: this form of import or export is not supported"
    done[name] = f"const _{name} = (() => {{\n{body}return {{ {names} }};\n}})();"


def single_page(title: str, script: str, data: Any, styles: Sequence[str], own: Path | None = None) -> str:
    """A page in one file.

    script   name of its module; the page's data is JSON in the element with the id "samples"
    styles   names of style sheets
    own      folder of the page's own files, beside those of the front end
    """
    held = json.dumps(data).replace("<", "\\u003c")  # a name must not end the script
    style = "".join(static(name, own) for name in styles)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main id="page"></main>
<footer><p class="hint">Surefoot {__version__}</p></footer>
<script type="application/json" id="samples">{held}</script>
<script>
{bundle(script, own)}
</script>
</body>
</html>
"""


def clip_table_page(runs: list[dict[str, Any]] | None = None) -> str:
    """The page, with the samples of some runs from ``traces.on_a_page``."""
    title = "The clip table" if not runs else f"The clip table: {', '.join(run['name'] for run in runs)}"
    return single_page(title, "clip", runs or [], ["style.css"])


def clip_table_of_runs(runs: list[Any]) -> str:
    """The page with the samples of some run folders.

    Raises SurefootError if a path is not a run, or no run has traces of a loss with ratios.
    """
    if not runs:
        return clip_table_page()
    from surefoot.inspector.traces import on_a_page
    from surefoot.store.reading import check_is_run

    for run in runs:
        check_is_run(run)
    tables = on_a_page(runs)
    if not tables:
        raise SurefootError(
            f"{runs[0]}: has no traces of a loss with ratios; train with several passes over each batch and traces.rows >= 1"
        )
    return clip_table_page(tables)
