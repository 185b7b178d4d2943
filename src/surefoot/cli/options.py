"""Options that commands share: a flag for every recipe field, boolean options, finite numbers.

click gives an option the next word, whatever it is. Here a boolean option needs no value, and no option takes the next option
as its value.
"""

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from surefoot.core.algorithms import ALGORITHMS, MAX_COUNT
from surefoot.core.seeding import MAX_SEED
from surefoot.errors import SurefootError
from surefoot.files import BOOLEAN_WORDS, RUNS
from surefoot.store.manifest import MANIFEST

ALIASES = {"optimizer.learning_rate": ("--lr", "--learning-rate"), "objective.gamma": ("--gamma",)}
"""more flags of fields that people look for under shorter names"""


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(*names: str, **form: Any) -> Decorator:
    """An option whose help ends with its default, if it has one."""
    return click.option(*names, **{"show_default": "default" in form, **form})


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order of the help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        return functools.reduce(lambda made, each: each(made), reversed(options), command)

    return add


class BooleanOption(click.Option):
    """An option that is true without a value; ``--option false`` turns it off."""


class BooleanOrListOption(BooleanOption):
    """One that also takes names. A word after it that may also be an argument is a name if the line has all arguments."""


class Group(click.Group):
    """A group whose commands get ``=true`` after every boolean option without a value."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, words = super().resolve_command(ctx, args)
        if command is None or ctx.resilient_parsing:  # a line that is being completed may end in an option without its value
            return name, command, words
        return name, command, with_boolean_values(command, words)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands with their whole summaries; click would end them at the width of the terminal."""
        self.format_section(ctx, formatter, "Commands", self.list_commands(ctx))

    def format_section(self, ctx: click.Context, formatter: click.HelpFormatter, title: str, names: Iterable[str]) -> None:
        """Some of the commands under a title."""
        commands = [(name, command) for name in names if (command := self.get_command(ctx, name))]
        with formatter.section(title):
            formatter.write_dl([(name, command.get_short_help_str(limit=1_000)) for name, command in commands])


def with_boolean_values(command: click.Command, words: Sequence[str]) -> list[str]:
    """The words with ``=true`` after every boolean option that has no value.

    Raises SurefootError if the value of an option would be the next option.
    """
    options = {name: option for option in command.params if isinstance(option, click.Option) for name in option.opts}
    wanted = [parameter.nargs for parameter in command.params if isinstance(parameter, click.Argument)]
    result: list[str] = []
    unclear: list[int] = []
    """places in the result before words that may be names or arguments"""
    given = 0
    """words that may be arguments"""
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        option = options.get(word)
        if option is None or option.is_flag:
            given += not word.startswith("-")
            result.append(word)
        elif isinstance(option, BooleanOption) and not (rest and (rest[0].lower() in BOOLEAN_WORDS or rest[0].startswith("["))):
            if isinstance(option, BooleanOrListOption) and rest and not rest[0].startswith("-"):
                unclear.append(len(result))
            result.append(f"{word}=true")
        elif rest and rest[0].startswith("--"):
            raise SurefootError(f"{word}: has no value before {rest[0]}; give one, or write {word}={rest[0]} if that is it")
        else:
            result += [word, *rest[: option.nargs]]
            del rest[: option.nargs]
    given += max(0, len(rest) - 1)
    for place in reversed(unclear):
        if min(wanted, default=0) >= 0 and given > sum(wanted):
            option_name, names = result[place].removesuffix("=true"), result.pop(place + 1)
            result[place] = f"{option_name}={names}"
            given -= 1
    return result + rest


class IntRange(click.IntRange):
    """A whole number, shown as N."""

    name = "integer"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"


class FiniteFloat(click.FloatRange):
    """A number that is neither NaN nor infinite, shown as X."""

    name = "number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "X"

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()  # click: "x<=None"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error of click."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def recipe_flags(command: Callable[..., Any], without: Collection[str] = ("kind", "task")) -> Callable[..., Any]:
    """Add a flag for every field of the recipe, such as ``--objective.gae-lambda 0.9``."""
    from surefoot.recipes.fields import BOOLEAN, recipe_fields

    for name, field in reversed(list(recipe_fields())):
        if name in without:
            continue
        flag = "--" + name.replace("_", "-")
        boolean = field.type.startswith(BOOLEAN)
        form: dict[str, Any] = {"metavar": "VALUE"}
        if boolean:
            form = {"cls": BooleanOption, "metavar": "[true|false]"}
            if field.type != BOOLEAN:
                form = {"cls": BooleanOrListOption, "metavar": "[true|false|NAMES]"}
        form["help"] = field.help
        form["shell_complete"] = functools.partial(complete_value, BOOLEAN if boolean else field.type, name)
        command = click.option(flag, *ALIASES.get(name, ()), name.replace(".", "__"), **form)(command)
    return command


def complete_value(kind: str, name: str, ctx: click.Context, option: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the value of a field by its type and name: its choices, the names of algorithms and trackers, or files."""
    from surefoot.recipes.base import TrackerName

    named = {"algorithm": (*ALGORITHMS, "custom"), "trackers": get_args(TrackerName), "model": ("pocket",)}
    words = kind.split(" | ")
    choices = [word for word in words if word != "string"]
    if name in named:
        choices = list(named[name])
    elif not choices[1:] or not all(re.fullmatch(r"\w+", word) for word in choices):
        choices = []
    files = [CompletionItem(incomplete, type="file")] if {"string", "list"} & set(words) and name != "trackers" else []
    return [*map(CompletionItem, starting_with(incomplete, choices)), *files]


def starting_with(incomplete: str, names: Iterable[str]) -> list[str]:
    """The names that complete a word, in any case of letters."""
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_task(ctx: click.Context, argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete WHAT: presets, environment ids of Gymnasium and of tensor environments, and files."""
    import gymnasium

    from surefoot.recipes.control import TENSOR_IDS
    from surefoot.recipes.presets import presets

    names = starting_with(incomplete, (*presets(), *sorted(gymnasium.registry), *TENSOR_IDS))
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


def complete_preset(ctx: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a preset."""
    from surefoot.recipes.presets import presets

    return starting_with(incomplete, ("none", *presets()))


def run_named(text: str) -> str:
    """The folder of a run that is named without one, unless there is a file or folder of that name here.

    It is ``runs/NAME`` in this folder, or in the nearest folder above it that has one.
    """
    if Path(text).name != text or text.startswith(".") or Path(text).exists():
        return text
    above = ["", *("../" * steps for steps in range(1, len(Path.cwd().parts)))]
    return next((str(named) for up in above if (named := up / RUNS / text).is_dir()), text)


class RunPath(click.Path):
    """The folder of a run, or its name alone if it is in runs/."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        return super().convert(run_named(value) if isinstance(value, str) else value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the names of the runs in runs/, and folders."""
        return complete_run(ctx, param, incomplete)


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of the runs in runs/, and folders."""
    runs = sorted(path.parent.name for path in RUNS.glob("*/config.toml"))
    return [*map(CompletionItem, starting_with(incomplete, runs)), CompletionItem(incomplete, type="dir")]


def changes_from(flags: dict[str, Any]) -> dict[str, Any]:
    """The recipe flags on the command line as nested tables; values are parsed as TOML."""
    from surefoot.recipes.reading import parse_flag

    tables: dict[str, Any] = {}
    for name, text in flags.items():
        if text is None:
            continue
        *path, leaf = name.split("__")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise SurefootError(f"{'.'.join(path)}: is set both as a whole and in part; choose one")
        table[leaf] = parse_flag(run_named(text) if name == "start" else text)
    return tables


def reject_options(names: Iterable[str], reason: str) -> None:
    """Raise SurefootError if the current command line sets one of these parameters, which would have no effect."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in names and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise SurefootError(f"{option.opts[0]}: {reason}; leave it out")


def check_out(out: Path, ending: str, source: Path | None = None) -> str:
    """A note for the output if a file of rows will be replaced. Raises SurefootError unless the name has the ending, and for
    rows that a run wrote or the command reads.
    """
    if out.suffix != ending or out.is_dir():
        raise SurefootError(f"--out {out}: name a file that ends in {ending}")
    if not out.exists() or ending != ".jsonl":
        return ""
    if (out.parent / MANIFEST).exists() or (source and out.resolve().is_relative_to(source.resolve())):
        raise SurefootError(f"--out {out}: is a file of a run, or one that this command reads; choose another file")
    return ", replacing the rows that were there"


def check_stop_texts(stop: Iterable[str]) -> None:
    """Raise SurefootError for an empty ``--stop``."""
    if not all(stop):
        raise SurefootError("--stop '': is empty; name a text")


COUNT = IntRange(1, MAX_COUNT)
PATH = click.Path(path_type=Path)
RUN = RunPath(path_type=Path)
POSITIVE = FiniteFloat(min=0, min_open=True)

json_option = option("--json", "as_json", is_flag=True, help="Print one JSON object.")
preset_option = option(
    "--preset",
    metavar="NAME",
    help="Preset to start from; none: plain defaults. [default: the one tuned for WHAT]",
    shell_complete=complete_preset,
)
quiet_option = option("--quiet", is_flag=True, help="Show warnings only.")
device_option = option("--device", default="cpu", help="Device of the models.")
trust_option = option("--trust-remote-code", is_flag=True, help="Run a model's own code from the hub.")
temperature_option = option("--temperature", type=POSITIVE, default=1.0, help="Sampling temperature.")
greedy_option = option("--greedy", is_flag=True, help="Take the most likely token instead of sampling.")
stop_option = option("--stop", multiple=True, help="Text that ends a response, as EOS does; repeatable.")
tool_option = option(
    "--tool",
    "tools",
    multiple=True,
    metavar="FILE:FUNCTION",
    help="Function that the model can call; repeatable. [default: the run's tools]",
)
no_tools_option = option("--no-tools", is_flag=True, help="Call no tools, also if the run has some.")
special_option = option("--special-tokens", is_flag=True, help="Keep special tokens in the text of responses.")


def _with_class(ctx: click.Context, parameter: click.Parameter, task: str | None) -> str | None:
    from surefoot.recipes.control import with_class

    return None if task is None else with_class(task)


task_option = option("--task", callback=_with_class, help="Another task than the one trained on.")
checkpoint_option = option("--checkpoint", metavar="best|last|STEP", help="Checkpoint to use. [default: best, else last]")


def seed_option(default: int, help_text: str = "Random seed.") -> Decorator:
    """``--seed N``."""
    return option("--seed", type=IntRange(0, MAX_SEED), default=default, help=help_text)
