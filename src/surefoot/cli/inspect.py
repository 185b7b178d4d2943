"""Open the inspector in a browser, or write the clip table."""

import contextlib
import importlib.util
import os
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

import click

from surefoot.cli.options import PATH, RUN, IntRange, option
from surefoot.cli.output import echo
from surefoot.errors import SurefootError, missing_extra
from surefoot.files import RUNS
from surefoot.terminal import is_terminal


@click.command()
@click.argument("runs", nargs=-1, type=RUN, metavar="[RUN|FOLDER]...")
@option("--clip-table", is_flag=True, help="Write the clip table as one HTML file, with samples of the runs.")
@option("--out", type=PATH, help="File of the clip table. [default: clip-table.html]")
@option(
    "--port", type=IntRange(0, 65535), default=0, help="Port of the inspector. [default: any free port]", show_default=False
)
@option("--no-browser", is_flag=True, help="Print the address; open no browser.")
def inspect(runs: tuple[Path, ...], clip_table: bool, out: Path | None, port: int, no_browser: bool) -> None:
    """Open the inspector for runs in a browser.

    It shows curves, findings, samples, and the effect of PPO on each step or token. A FOLDER of runs, by default runs/, opens
    as a table to filter, compare, tag and delete them. It is reachable only from this machine. Ctrl-C stops it.
    """
    if not clip_table:
        if out is not None:
            raise SurefootError("--out: is for the page that --clip-table writes; add --clip-table, or leave it out")
        if not runs and not RUNS.is_dir():
            raise SurefootError(
                "inspect: there is no folder runs/ here; name a run, such as runs/cartpole-v1-ppo_clip-1, or a folder of runs, "
                "or use --clip-table, which needs none"
            )
        show_runs(list(runs) or [RUNS], port, no_browser)
        return
    from surefoot.files import write_text, writing
    from surefoot.inspector.clip_table import clip_table_of_runs

    path = out or Path("clip-table.html")
    content = clip_table_of_runs(list(runs))
    with writing(path, "choose another --out"):
        write_text(path, content)
    echo(f"{path}: the clip table{', with samples' if runs else ''}; open it in any browser, no network needed")
    if not no_browser and has_desktop():
        webbrowser.open(path.absolute().as_uri())


def show_runs(runs: list[Path], port: int, no_browser: bool) -> None:
    """Serve the inspector until Ctrl-C."""
    require_server("the inspector")
    from surefoot.inspector.server import serve

    note = "it works once, and the button Invite there lets in another. Ctrl-C stops the inspector."
    in_browser(lambda ready, entered: serve(runs, port, ready, entered), note, no_browser)


def require_server(what: str) -> None:
    """Raise SurefootError if the packages of the inspector's server are missing."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "inspector", what)


def in_browser(serve: Callable[[Callable[[str], None], Callable[[], None]], None], note: str, no_browser: bool) -> None:
    """Serve pages until Ctrl-C, print their address, and open it on a machine with a desktop.

    serve   called with two functions: one for the address when it can be opened, one for when a browser has used it
    note    printed below the address
    """
    from surefoot.inspector.access import LoginFile

    login = LoginFile()
    if threading.current_thread() is threading.main_thread():
        login.delete_on_signal()

    def ready(address: str) -> None:
        echo(f"{address}\nopen it in a browser on this machine; {note}")
        if not no_browser and has_desktop() and (file := login.write(address)):
            webbrowser.open(file)

    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve(ready, login.delete)
    finally:
        login.delete()


def has_desktop() -> bool:
    """Whether stdout is a terminal on a machine with a desktop."""
    desktop = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return is_terminal(sys.stdout) and bool(desktop)
