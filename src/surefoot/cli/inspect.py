"""Pages in the browser: the inspector, the clip table, and the comparison of answers by a person."""

import contextlib
import getpass
import os
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

import click

from surefoot.cli.options import PATH, RUN, IntRange, check_out, option
from surefoot.cli.output import echo, echo_json
from surefoot.errors import SurefootError, did_you_mean, require_package
from surefoot.files import RUNS, write_text, writing
from surefoot.people.log import CLOSED, LABELS, LabelLog, Queue, Round, labels_of_all, pair_rows, rounds_of
from surefoot.terminal import is_terminal

QUESTION = "Which is better?"


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
    from surefoot.inspector.clip_table import clip_table_of_runs

    path = out or Path("clip-table.html")
    check_out(path, ".html")
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
        require_package(package, "inspector", what)


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


# ---- labels of people ----


@click.command()
@click.argument("what", type=RUN, metavar="RUN|FILE")
@click.option("--who", help="Name of the person, also that of the file of labels. [default: your login]")
@click.option("--question", default=QUESTION, show_default=True, help="What the page asks.")
@click.option("--report", is_flag=True, help="Print how well the labels agree; open no page.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--export", type=PATH, metavar="FILE", help="Write the labels as rows of prompt, chosen and rejected.")
@click.option("--close", is_flag=True, help="Let the round train on the labels that there are, before all pairs have one.")
@click.option("--port", type=IntRange(0, 65535), default=0, help="Port of the page. [default: any free port]")
@click.option("--no-browser", is_flag=True, help="Print the address; open no browser.")
def label(
    what: Path,
    who: str | None,
    question: str,
    report: bool,
    as_json: bool,
    export: Path | None,
    close: bool,
    port: int,
    no_browser: bool,
) -> None:
    """Compare pairs of answers, or of clips, on a page in the browser.

    RUN is a folder of "surefoot rounds --judge people", or the run of an agent with preferences.judge = "people". FILE has a
    line of JSON for each pair: prompt, a and b, or video_a and video_b. Each label is on the disk before the next pair is
    shown. Ctrl-C stops the page; repeat the command to go on.
    """
    queue, labels, here = place_of(what)
    if report or as_json or export is not None or close:
        if report or as_json:
            _report(queue, labels, as_json)
        if export is not None:
            _export(queue, labels, export)
        if close:
            _close(what, here)
        return
    try:
        who = getpass.getuser() if who is None else who
    except (KeyError, OSError):  # as in containers
        raise SurefootError("--who: is needed, since this account has no name; add --who NAME") from None
    require_server("the page")
    from surefoot.inspector.labelling import Comparison, application
    from surefoot.inspector.server import listen

    after = f"Every pair has a label. surefoot label {what} --export rows.jsonl writes them as rows."
    if here is not None and here.closed:
        after = f"The training of {here.folder.name} has begun; labels from now on belong to the next round."
    elif here is not None:
        after = f"Every pair has a label. You may go on, or stop with Ctrl-C in the terminal and {_next(what)}."
    with contextlib.closing(LabelLog(labels / f"{who}.jsonl", queue, who)) as log:
        page = Comparison(log, question, after)
        in_browser(
            lambda ready, entered: listen(lambda at, token: application(page, at, token, entered), port, ready),
            f"it works once. {who} labels the pairs of {queue.path} in {labels}. Ctrl-C stops the page.",
            no_browser,
        )


def place_of(what: Path) -> tuple[Queue, Path, Round | None]:
    """The pairs, the folder of the logs, and the round of a run, or a file.

    Raises SurefootError for anything else, and for a run whose next pairs are not sampled yet.
    """
    if what.is_dir():
        rounds = rounds_of(what)
        if not rounds:
            raise SurefootError(
                f"{what}: has no pairs to label; sample them with: surefoot rounds RECIPE --judge people --name {what.name}"
            )
        return rounds[-1].queue, rounds[-1].folder / LABELS, rounds[-1]
    if not what.exists():
        near = did_you_mean(str(what), map(str, [*RUNS.glob("*"), *what.parent.glob("*")]))
        raise SurefootError(f"{what}: no such file or folder{near or '; name a folder of rounds, or a file of pairs'}")
    return Queue(what), what.with_name(f"{what.stem}-{LABELS}"), None


def _report(queue: Queue, labels: Path, as_json: bool) -> None:
    from surefoot.people import agreement

    report = agreement.of_people(queue, labels_of_all(queue, labels))
    if as_json:
        echo_json(report)
        return
    for line in agreement.lines(report) or [f"{labels}: has no labels yet"]:
        echo(line)


def _export(queue: Queue, labels: Path, file: Path) -> None:
    """Write the labels as rows; a pair that somebody found equal has no chosen answer, and TRL has no row for it."""
    from surefoot.language.data.rows import rows_text

    if any("video_a" in pair for pair in queue.pairs):
        raise SurefootError(f"--export {file}: clips have no rows of text; read {labels}")
    if file.resolve().parent == labels.resolve() or file.resolve() == queue.path.resolve():
        raise SurefootError(f"--export {file}: has the pairs, or labels of them; choose another file")
    given = labels_of_all(queue, labels)
    decided = [label for label in given if label.preference in ("a", "b")]
    rows = pair_rows(queue, decided, 1)
    if not rows:
        raise SurefootError(f"--export {file}: {labels} has no labels; label pairs first")
    with writing(file, "choose another --export"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, rows_text(rows))
    left_out = sum(not label.repeat for label in given) - len(rows)
    echo(f"{file}: {len(rows)} rows{f'; {left_out} labels are left out (equal, or skipped)' if left_out else ''}")


def _close(what: Path, here: Round | None) -> None:
    if here is None:
        raise SurefootError(f"--close: is for a folder of rounds, and {what} is a file; use --export FILE")
    if here.closed:
        raise SurefootError(f"--close: {here.folder / CLOSED} is there already; {_next(what)}")
    earlier = [each for each in rounds_of(what) if each.folder != here.folder]
    here.close(earlier)
    echo(f"{here.folder}: closed; {_next(what)}")


def _next(what: Path) -> str:
    """How the run, or the rounds, go on."""
    return f"run surefoot resume {what}" if (what / "config.toml").is_file() else "repeat the command that asked for labels"
