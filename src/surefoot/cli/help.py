"""Help of commands with a flag for every field of a recipe: the common ones first, the others by table or kind on request."""

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from surefoot.cli.output import echo
from surefoot.errors import SurefootError, did_you_mean
from surefoot.files import read_toml
from surefoot.recipes.fields import KINDS, recipe_fields
from surefoot.recipes.presets import presets

COMMON = (
    "algorithm",
    "steps",
    "seed",
    "device",
    "model",
    "data.train",
    "reward.terms",
    "rollout.environments",
    "rollout.steps",
    "network.hidden",
    "normalise.observations",
    "objective.gamma",
    "optimizer.learning_rate",
    "evaluation.every",
)
"""fields on the first page of help"""
EXAMPLES = """{command} WHAT: WHAT is missing (an environment id, a file with an environment, a preset or a .toml file).
Two examples:

  {command} CartPole-v1 --steps 100_000
  {command} language --model MODEL --data.train prompts.jsonl --reward.terms reward.py:score --steps 10_000

See also: surefoot list (presets and ids), surefoot new NAME (an environment to start from), {command} --help."""
"""what a command shows without WHAT"""
TOP = "top level"
HELP = ("-h", "--help")


class RecipeCommand(click.Command):
    """A command with recipe flags. ``--help`` shows the common ones; ``--help TABLE``, ``WHAT --help`` and ``--help all``
    show more.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            echo(EXAMPLES.format(command=ctx.command_path), err=True)
            ctx.exit(2)
        words = args[: args.index("--")] if "--" in args else args
        if not ctx.resilient_parsing and (at := [i for i, word in enumerate(words) if word in HELP]):
            topics = [word for word in words[at[0] + 1 :] if not word.startswith("-")]
            task = words[0] if not words[0].startswith("-") else None
            echo(self._help(ctx, topics[0] if topics else None, task))
            ctx.exit()
        return super().parse_args(ctx, args)

    def _help(self, ctx: click.Context, topic: str | None, task: str | None) -> str:
        formatter = ctx.make_formatter()
        if topic is None and task is None:
            self.format_help(ctx, formatter)
        else:
            self.format_usage(ctx, formatter)
            self._format_tables(ctx, formatter, self._fields_about(topic, task or ""))
        return formatter.getvalue().rstrip("\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command's own options, the common fields, and where the others are."""
        recipe = self._recipe_options()
        own = [p for p in self.get_params(ctx) if isinstance(p, click.Option) and p not in recipe.values()]
        for title, options in (("Options", own), ("Common fields of the recipe", [recipe[n] for n in COMMON if n in recipe])):
            with formatter.section(title):
                formatter.write_dl(records(ctx, options))
        with formatter.section("More fields"):
            command = ctx.command_path
            rows = [
                (f"{command} --help TABLE", f"the fields of a table: {', '.join(self._tables(recipe))}"),
                (f"{command} WHAT --help", f"those that WHAT has, or a kind of recipe: {', '.join(KINDS)}"),
                (f"{command} --help all", f"all {len(recipe)} fields"),
            ]
            formatter.write_dl(rows)

    def _recipe_options(self) -> dict[str, click.Option]:
        """The flags of recipe fields by the dotted names of their fields."""
        by_name = {option.name: option for option in self.params if isinstance(option, click.Option)}
        names = (name for name, _ in recipe_fields())
        return {name: by_name[flag] for name in names if (flag := name.replace(".", "__")) in by_name}

    def _tables(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(name.partition(".")[0] for name in names if "." in name))

    def _fields_about(self, topic: str | None, task: str) -> dict[str, click.Option]:
        """The flags that a word stands for: all, a table, or what is trained. Raises SurefootError for any other word.

        "reward" is a table after ``--help``, and a kind before it.
        """
        recipe = self._recipe_options()
        tables = self._tables(recipe)
        if topic not in tables and (kind := kind_of_task(topic or task)) is not None:
            texts = {name: field.help for name, field in recipe_fields(kind)}
            recipe = {name: copy.copy(option) for name, option in recipe.items() if name in texts}
            for name, option in recipe.items():
                option.help = texts[name]
            return recipe
        word = topic or task
        if word not in (known := ("all", *tables, *KINDS)):
            raise SurefootError(f"--help {word}: no such topic{did_you_mean(word, known)} (known: {', '.join(known)})")
        return {name: option for name, option in recipe.items() if word in ("all", name.partition(".")[0])}

    def _format_tables(self, ctx: click.Context, formatter: click.HelpFormatter, fields: dict[str, click.Option]) -> None:
        tables: dict[str, list[click.Option]] = {}
        for name, option in fields.items():
            tables.setdefault(f"[{name.partition('.')[0]}]" if "." in name else TOP, []).append(option)
        for table, options in tables.items():
            with formatter.section(table):
                formatter.write_dl(records(ctx, options))


def records(ctx: click.Context, options: Iterable[click.Parameter]) -> list[tuple[str, str]]:
    """The rows of a list of options."""
    return [record for option in options if (record := option.get_help_record(ctx)) is not None]


def kind_of_task(what: str) -> str | None:
    """The kind of recipe that a kind, a preset, a file or an environment id stands for; None for any other word.

    Ids are recognised by their form, so that help needs no import of Gymnasium.
    """
    if what in KINDS:
        return what
    tables = presets()
    if what in tables or (what.endswith(".toml") and Path(what).is_file()):
        table: dict[str, Any] = tables[what] if what in tables else read_toml(Path(what))
        return str(table.get("kind", "control"))
    return "control" if re.search(r"-v\d+$|[:/]", what) else None
