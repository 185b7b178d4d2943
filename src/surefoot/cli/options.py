"""The words of a command line, before click reads them: which of them are an option's value.

click gives an option the next word, whatever it is. A switch that is named without a value is on, and no other option takes the
next option for its value.
"""

from collections.abc import Sequence

import click

from surefoot.errors import SurefootError

TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")
"""words after a switch that are its value"""


class Switch(click.Option):
    """An option that is true or false, and true by its name alone."""


class Group(click.Group):
    """A group whose commands get their words with every switch's value written out."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, words = super().resolve_command(ctx, args)
        return name, command, words if command is None else with_values(command, words)


def with_values(command: click.Command, words: Sequence[str]) -> list[str]:
    """The words with ``=true`` behind the name of every switch that has no value.

    Raises SurefootError for an option whose value would be the next option.
    """
    options = {name: option for option in command.params if isinstance(option, click.Option) for name in option.opts}
    result: list[str] = []
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        option = options.get(word)
        if option is None or option.is_flag:
            result.append(word)
        elif isinstance(option, Switch) and (not rest or rest[0].lower() not in TRUTHS):
            result.append(f"{word}=true")
        elif rest and rest[0].startswith("--"):
            raise SurefootError(f"{word}: has no value before {rest[0]}; give one, or write {word}={rest[0]} if that is it")
        else:
            result += [word, *rest[: option.nargs]]
            del rest[: option.nargs]
    return result + rest
