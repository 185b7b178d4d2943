"""The clip table as one HTML file that needs nothing else: no server, no network, no build step.

The modules that the server sends as they are become one script, each in a scope of its own, because a browser loads no module
from a file.
"""

import html
import json
import re
from importlib import resources
from typing import Any

from surefoot.errors import SurefootError

IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w/]+)\.js";$', re.M)
EXPORT = re.compile(r"^export (function|async function|const) (\w+)", re.M)
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""of a page that runs what it holds and may ask nobody for anything"""


def static(name: str) -> str:
    """The text of a file of the front end."""
    return (resources.files("surefoot.inspector") / "static" / name).read_text("utf-8")


def bundle(name: str) -> str:
    """A module and all that it imports as one classic script."""
    done: dict[str, str] = {}
    _add(name, done)
    return "\n".join(['"use strict";', *done.values()])


def _add(name: str, done: dict[str, str]) -> None:
    text = static(f"{name}.js")
    for _, other in IMPORT.findall(text):
        if other not in done:
            _add(other, done)
    body = IMPORT.sub(lambda found: f"const {{ {found[1]} }} = _{found[2]};", text)
    names = ", ".join(found for _, found in EXPORT.findall(text))
    body = EXPORT.sub(r"\1 \2", body)
    assert not re.search(r"^(import|export)\b", body, re.M), f"{name}.js: an import or export in a form that is not bundled"
    done[name] = f"const _{name} = (() => {{\n{body}return {{ {names} }};\n}})();"


def clip_table_page(runs: list[dict[str, Any]] | None = None) -> str:
    """The page, with the samples of some runs as ``samples.on_a_page`` gives them."""
    title = "The clip table" if not runs else f"The clip table: {', '.join(run['name'] for run in runs)}"
    held = json.dumps(runs or []).replace("<", "\\u003c")  # so that no name ends the script
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{static("style.css")}</style>
</head>
<body>
<main id="page"></main>
<script type="application/json" id="samples">{held}</script>
<script>
{bundle("clip")}
</script>
</body>
</html>
"""


def written_page(runs: list[Any]) -> str:
    """The page with the samples of some run folders.

    Raises SurefootError when a path is no run, or none of the runs has traces of a loss with ratios.
    """
    if not runs:
        return clip_table_page()
    from surefoot.inspector.samples import on_a_page
    from surefoot.runs.folder import check_is_run

    for run in runs:
        check_is_run(run)
    found = on_a_page(runs)
    if not found:
        raise SurefootError(
            f"{runs[0]}: has no traces of a loss with ratios; train a policy in several passes, with traces.rows of 1 or more"
        )
    return clip_table_page(found)
