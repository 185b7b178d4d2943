"""``surefoot chat``: talk to a model on the terminal, or by lines from a pipe."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from surefoot.algorithms import MAX_COUNT
from surefoot.cli_attempts import Finite
from surefoot.cli_echo import echo
from surefoot.errors import SurefootError
from surefoot.seeding import MAX_SEED

if TYPE_CHECKING:
    from surefoot.language.chat import Chat

ASK = "> "


@click.command()
@click.argument("model")
@click.option(
    "--max-tokens", type=click.IntRange(1, MAX_COUNT), default=256, show_default=True, help="Of an answer, EOS included."
)
@click.option("--temperature", type=Finite(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--greedy", is_flag=True, help="The likeliest token each time, instead of sampling.")
@click.option("--stop", multiple=True, help="Text that ends an answer, besides EOS; repeatable.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=1, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Where the model computes.")
@click.option("--trust-remote-code", is_flag=True, help="Let a model's own code from the hub run.")
def chat(model: str, device: str, trust_remote_code: bool, **manner: Any) -> None:
    """Talk to MODEL: a run, a checkpoint, a transformers folder or a hub id.

    The conversation is kept by the model's chat template; without one each line is a prompt by itself. /reset forgets it,
    /quit, Ctrl-D and Ctrl-C leave. Control characters in an answer are shown and not obeyed. Lines may come from a pipe:
    then answers alone are on stdout.
    """
    if not all(manner["stop"]):
        raise SurefootError("--stop '': is empty; name a text")
    from surefoot.language.chat import Chat, Manner
    from surefoot.language.trained import writer
    from surefoot.worlds import check_device

    check_device(device)
    language_model = writer(model, trust_remote_code)
    language_model.model.to(device)  # type: ignore[arg-type]
    talk(Chat(language_model, Manner(**manner)), sys.stdin.isatty())


def talk(conversation: "Chat", terminal: bool) -> None:
    """Lines in, answers out, until there are no more; ``terminal``: whether a person types them.

    Raises SurefootError for a line from a pipe that can't be answered. A person is told, and may try another.
    """
    how = "the chat template keeps the conversation" if conversation.remembers else NO_TEMPLATE
    echo(f"{how}{'; /reset forgets it' * conversation.remembers}; /quit leaves" if terminal else how, err=not terminal)
    try:
        for line in lines_of(terminal):
            if line == "/quit":
                return
            if line == "/reset":
                conversation.reset()
                echo("forgotten", err=not terminal)
                continue
            try:
                conversation.answer(line, show)
            except SurefootError as error:
                if not terminal:
                    raise
                echo(str(error), err=True, nl=False)
            echo()
    except KeyboardInterrupt:
        echo()


NO_TEMPLATE = "this model has no chat template: each line is a prompt by itself, and is continued"


def lines_of(terminal: bool) -> Iterator[str]:
    """Lines as they come, without their end; from a terminal with a mark that asks for them, and a history."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not terminal:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (with it, input() edits lines and remembers them)
    while True:
        try:
            line = input(ASK)
        except EOFError:
            echo()
            return
        if line:
            yield line


def show(piece: str) -> None:
    """Print part of an answer at once."""
    echo(piece, nl=False)
    sys.stdout.flush()
