"""The ``surefoot`` command: load the subcommand, run it, print errors in one line on stderr with exit code 2."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from surefoot import __version__
from surefoot.cli.options import Group
from surefoot.cli.output import echo
from surefoot.cli.ranks import AGENT, RANK_OPTIONS, RANKED, leave_line
from surefoot.errors import (
    Interrupted,
    LabelsNeededError,
    RankLostError,
    SurefootError,
    did_you_mean,
    in_command,
    limit_reached,
)
from surefoot.ranks.launching import join_ranks, launch_of, leave_ranks
from surefoot.terminal import Output, on_terminal, phases_shown, visible

COMMANDS = {
    name: f"surefoot.cli.{module}"
    for module, names in {
        "agents": ("evaluate", "export", "pull", "push", "watch"),
        "check": ("check", "memory"),
        "compare": ("compare", "compare-algorithms", "diff", "ladder", "report", "tune"),
        "inspect": ("inspect", "label"),
        "language": ("best-of-n", "chat", "data", "generate", "merge", "score", "serve"),
        "new": ("demo", "new"),
        "train": ("list", "resume", "rounds", "train", "verify"),
    }.items()
    for name in names
}
"""the module of each command, which is imported when the command is called, so that ``--help`` is fast"""
GROUPS = {
    "Start": ("demo", "new", "list", "check", "train", "resume"),
    "Look": ("inspect", "evaluate", "watch", "report", "verify"),
    "Compare": ("compare", "diff", "compare-algorithms", "ladder", "tune"),
    "Language": ("data", "memory", "rounds", "label", "generate", "chat", "best-of-n", "score", "serve", "merge"),
    "Share": ("export", "push", "pull"),
}
"""the commands as ``surefoot`` alone shows them"""
RESUMABLE = ("train", "resume", "demo", "ladder", "compare-algorithms", "rounds", "tune")
"""commands that train, so that a run may be left"""


def main() -> NoReturn:
    """Run the command line and exit: 0, 1 if a check fails or runs differ, 2 for a user error, 130 after a signal."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        join_if_ranked(sys.argv[1:])
        with in_command(), phases_shown(on_terminal):
            sys.exit(cli.main(prog_name="surefoot", standalone_mode=False) or 0)
    except Interrupted as stop:
        fail(str(stop), 130)
    except LabelsNeededError as needed:
        echo(str(needed))
        sys.exit(0)
    except RankLostError as error:
        fail(str(error), 2, shown=AGENT not in os.environ)  # its agent reports which one
    except SurefootError as error:
        fail(str(error), 2)
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.exceptions.NoArgsIsHelpError as nothing:  # a group without a command shows its help on several lines
        click.echo(nothing.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "surefoot"
        text = hint_for(error) if isinstance(error, click.NoSuchOption) else None
        fail(f"{text or error.format_message()} (see: {command} --help)", 2)
    except (click.Abort, KeyboardInterrupt):
        fail("stopped; repeat the command to continue" if sys.argv[1:2] and sys.argv[1] in RESUMABLE[2:] else "stopped", 130)
    except (RuntimeError, MemoryError, ImportError) as error:
        if (limit := limit_reached(error)) is None:
            raise
        fail(limit, 2)
    except OSError as error:
        what, why = error.filename or "writing", error.strerror or error
        resumable = ", or resume the run" if sys.argv[1:2] and sys.argv[1] in RESUMABLE else ""
        fail(limit_reached(error) or f"{what}: {why}; fix that, then repeat the command{resumable}", 2)


def hint_for(error: click.NoSuchOption) -> str | None:
    """A message for an option of commands with ranks, or of another library, such as ``--total_timesteps``; None for another.

    Click suggests options of similar spelling.
    """
    from surefoot.recipes.reading import OTHER_LIBRARIES

    option, command = error.option_name, error.ctx.command if error.ctx else cli
    if option in RANK_OPTIONS and command.name not in RANKED:
        return f"{option}: only {', '.join(RANKED[:-1])} and {RANKED[-1]} run on several ranks; leave it out"
    known = [name for parameter in command.params for name in parameter.opts]
    fields = OTHER_LIBRARIES.get(option.lstrip("-").replace("-", "_"), ())
    meant = [flag for field in fields if (flag := "--" + field.replace("_", "-")) in known]
    last = option.lstrip("-").rpartition(".")[2]  # the same name in another table
    meant = meant or [flag for flag in known if flag.endswith(f".{last}")]
    return f"No such option {option!r}. Did you mean {', '.join(map(repr, meant))}?" if meant else None


def join_if_ranked(words: Sequence[str]) -> None:
    """Join the ranks that a launcher started, before anything can fail on one of them."""
    if launch_of(os.environ) is not None and words and words[0] in RANKED and not {"-h", "--help"} & set(words):
        join_ranks()


def fail(message: str, code: int, shown: bool = True) -> NoReturn:
    """Print one line on stderr, with control characters made visible, and exit; of several ranks the first prints.

    Another rank leaves its message for the first, unless they have not joined.
    """
    line, launch = visible(" ".join(message.split())), launch_of(os.environ)
    joined = launch is not None and leave_ranks(line)
    printed = shown and not (joined and launch is not None and launch.rank)
    leave_line(line, printed)
    if printed:
        print(f"surefoot: {line}", file=Output(sys.stderr), flush=True)
    sys.exit(code)


class Commands(Group):
    """The group of ``COMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by what they are for."""
        for title, names in GROUPS.items():
            self.format_section(ctx, formatter, title, names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        here = vars(importlib.import_module(COMMANDS[cmd_name])).values()
        return next(each for each in here if isinstance(each, click.Command) and each.name == cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            raise click.UsageError(f"{args[0]}: no such command{did_you_mean(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="surefoot")
def cli() -> None:
    """Train policies with REINFORCE, PPO and the algorithms between them, in control and language.

    Begin with "surefoot demo". "surefoot COMMAND --help" explains a command.
    """
