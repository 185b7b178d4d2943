"""Starts a command as several ranks, by torchrun's agent in this process."""

import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from surefoot.cli.options import COUNT, POSITIVE, option, together
from surefoot.errors import SurefootError
from surefoot.files import read_text
from surefoot.processes import exit_cause
from surefoot.ranks.launching import DEFAULT_TIMEOUT, TIMEOUT, launch_of, note, restarts
from surefoot.signals import STOPPING

RANKED = ("train", "resume", "rounds", "demo", "verify")
"""commands that several ranks run together"""
RANK_OPTIONS = ("--ranks", "--max-restarts", "--rank-timeout")
AGENT = "SUREFOOT_AGENT"
"""environment variable of ranks that a command of ours started: a folder for their last lines. The command reports a rank that
died, and the last line of another if none was printed"""


class Ranks(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click
    """A number of ranks, or ``auto``: one per GPU."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number, or a usage error of click."""
        if value != "auto":
            return int(COUNT.convert(value, param, ctx))
        import torch

        if not torch.cuda.device_count():
            raise SurefootError("--ranks auto: this machine has no GPU that PyTorch can use; give a number")
        return torch.cuda.device_count()


def _keep(context: click.Context, parameter: click.Parameter, value: float | None) -> None:
    """Keep a value for ``launch_ranks``; the command itself doesn't get it."""
    context.meta[f"ranks.{parameter.name}"] = value


kept: Any = {"callback": _keep, "expose_value": False}
ranks_option = option(
    "--ranks", type=Ranks(), metavar="N|auto", help="Train as this many processes; auto: one per GPU. [default: 1]", **kept
)
rank_options = together(
    option(
        "--rank-timeout",
        type=POSITIVE,
        metavar="SECONDS",
        help=f"Wait at most this long for the slowest rank. [default: {DEFAULT_TIMEOUT:g}]",
        **kept,
    ),
    option(
        "--max-restarts",
        type=click.IntRange(0),
        metavar="N",
        help="Restart all ranks up to N times after one has died.",
        **kept,
    ),
    ranks_option,
)
"""``launch_ranks`` reads what they set"""


def launch_ranks(default: int | None = None) -> bool:
    """Run this command line as several ranks and return True when they have ended; False if this process is to run it.

    default   their number, if the command line gives none

    Raises SurefootError if a launcher has started another number of ranks, or if a rank died.
    """
    given = click.get_current_context().meta
    ranks, max_restarts, rank_timeout = (given.get(f"ranks.{name}") for name in ("ranks", "max_restarts", "rank_timeout"))
    launch = launch_of(os.environ)
    ranks = default if ranks is None and launch is None else ranks
    if launch is not None:
        if ranks is not None and ranks != launch.size:
            raise SurefootError(f"--ranks {ranks}: {launch.launcher} has started {launch.size}; leave it out")
        return False
    if rank_timeout is not None:
        os.environ[TIMEOUT] = str(rank_timeout)
    if ranks is None or ranks == 1:
        if max_restarts is not None:
            raise SurefootError(f"--max-restarts {max_restarts}: is for several ranks; set --ranks, or leave it out")
        return False
    _run_agent(ranks, max_restarts or 0)
    return True


def folder_on_ranks(seed: int, choose: Callable[[], Path]) -> Path:
    """The folder that the first rank chooses for a run; after a restart the one that it chose before."""
    from surefoot.ranks.collectives import on_first

    key = f"folder of seed {seed}"
    return on_first(lambda: Path(note(key) or note(key, str(choose())) or choose()))


def _run_agent(ranks: int, max_restarts: int) -> None:
    """Run torchrun's agent until all ranks have ended. Exits with the code of a rank that has printed its error."""
    import logging

    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # of some of the agent's loggers: a rank that fails prints its own line
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        signals_to_handle=",".join(number.name for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN),
    )
    try:
        with tempfile.TemporaryDirectory() as lines:
            os.environ[AGENT] = lines
            try:
                elastic_launch(config, sys.executable)("-m", "surefoot", *sys.argv[1:])
            except ChildFailedError as error:
                _report(error, Path(lines))
    except SignalException:
        sys.exit(130)  # the first rank has printed where it stopped


def leave_line(line: str, printed: bool) -> None:
    """Leave a rank's last line for the command that started it, if there is one."""
    if folder := os.environ.get(AGENT):
        with suppress(OSError):
            (Path(folder) / f"{restarts():04} {'printed' if printed else 'silent'} {os.getpid()}").write_text(line)


def _report(error: Any, lines: Path) -> NoReturn:
    """End as the rank that failed first, with a line that no rank has printed: the first rank may be the one that hangs."""
    number, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        left = sorted(lines.iterdir())
        last = [file for file in left if file.name[:4] == left[-1].name[:4]]  # of the last attempt
        if last and " silent " in last[-1].name and " printed " not in last[0].name:
            raise SurefootError(read_text(last[0]))
        sys.exit(failure.exitcode)
    why = exit_cause(failure.exitcode)
    raise SurefootError(f"rank {number} was ended by {why}; continue from the last checkpoint with: surefoot resume RUN")
