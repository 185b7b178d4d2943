"""Write docs/reference/ and docs/troubleshooting.md from the code: docstrings, fields, metrics, options, findings.

Also write src/surefoot/recipes/arguments.pyi, the types of the keyword arguments of ``surefoot.train``.

    python docs/generate.py            write the pages
    python docs/generate.py --check    write nothing; exit 1 and list the stale pages

Nothing here depends on the machine or the width of a terminal: docstrings and signatures are copied from the source,
and tables are made only from names, defaults and meanings.
"""

import argparse
import ast
import inspect
import json
import re
import runpy
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import click
import griffe

from surefoot.cli.main import COMMANDS, cli
from surefoot.cli.options import BooleanOption
from surefoot.core.algorithms import ALGORITHMS, LADDER, Reuse, switches_between
from surefoot.diagnostics.findings import checkpoints_lost, files_damaged, findings_in, tracker_failed
from surefoot.diagnostics.metrics import METRICS, SHOWN, TIMING, Metric
from surefoot.inspector.clip_table import clip_table_page
from surefoot.recipes.fields import KINDS, RecipeField, recipe_fields
from surefoot.recipes.reading import make_recipe
from surefoot.recipes.supervised import DpoRecipe, PreferenceSettings
from surefoot.store.finding import Finding
from surefoot.store.reading import History

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by docs/generate.py; change the code it describes instead. -->"
MATH_PAGE = "[math.md](../math.md)"

FUNCTIONAL = (
    "returns",
    "surrogates",
    "kl",
    "critics",
    "groups",
    "preferences",
    "likelihood",
    "shaping",
    "routing",
    "natural_gradient",
)
"""the files of surefoot.functional in the order of the page; masking is last"""
TITLES = {"kl": "KL divergence"}

API: dict[str, dict[str, tuple[str, ...]]] = {
    "Functions": {
        "surefoot.runs.api": ("train", "resume", "evaluate"),
        "surefoot.runs.api.loading": ("load",),
        "surefoot.store.traces": ("read_trace",),
    },
    "Callbacks": {"surefoot.runs.callbacks": ("Callback", "Run")},
    "A loop of your own": {"surefoot.runs.loop": ("Loop",)},
    "Agents, results and traces": {
        "surefoot.control.agent": ("Agent",),
        "surefoot.control.evaluate": ("EvaluationResult",),
        "surefoot.core.traces": ("Trace", "TracedRow", "Visits"),
    },
    "Switches": {"surefoot.core.algorithms": ("Objective", "Reuse", "Clip", "Penalty", "Constraint", "ClippedWeight")},
    "Verifiers and the sandbox": {
        "surefoot.verifiers.answers": ("exact", "numeric", "math", "json"),
        "surefoot.verifiers.programs": ("code",),
        "surefoot.sandbox": ("run", "Limits", "Outcome"),
        "surefoot.language.tasks": ("rows", "demonstrations", "verify"),
    },
    "Errors": {"surefoot.errors": ("SurefootError", "NotFiniteError", "Interrupted")},
    "The contract between collecting and learning": {
        "surefoot.core.rollout": ("Rollout", "Evaluation", "Credit", "Policy", "Collector", "LearnerState"),
    },
    "The loop and its parts": {
        "surefoot.core.loop": ("run_loop",),
        "surefoot.core.credit": ("assign_credit",),
        "surefoot.core.learner": ("Learner", "LearnerSettings"),
        "surefoot.core.optimizer": ("AdamSettings",),
    },
}
BRIEF = {"Switches", "The contract between collecting and learning", "The loop and its parts"}
"""sections with a sentence for each name: their fields are in the page of the recipe, or in the docstrings of short files"""
METHODS = {
    "Agent": ("predict", "value", "save"),
    "EvaluationResult": ("to_json",),
    "Run": ("learning_rate", "log", "stop"),
    "Objective": ("needs_whole_episodes",),
    "Learner": ("__init__", "update", "state_dict", "load_state_dict"),
}
"""classes of which only these methods are shown; of others, every public one"""


# ---- small pieces of Markdown -----------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; pipes inside cells are escaped, and a cell is one line."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").splitlines()) for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *(line(row) for row in rows)])


def code(text: object) -> str:
    return f"`{text}`"


def escaped(text: str) -> str:
    """Prose from the source as Markdown: what is not between backticks is protected from being markup."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    return "".join(part if i % 2 else re.sub(r"([\\_*<\[\]])", r"\\\1", part) for i, part in enumerate(parts))


def shown(value: Any) -> str:
    """A default in a recipe's syntax."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


def prose(docstring: str) -> str:
    """A docstring as Markdown: paragraphs as prose, aligned columns and examples as code."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", docstring)
    done = []
    for number, paragraph in enumerate(text.split("\n\n")):
        if paragraph.startswith(">>> "):  # ``help`` shows examples
            continue
        first, *shapes = re.split(r"\s{3,}", paragraph) if number == 0 else [paragraph]
        if re.search(r"\S {2,}\S", first) or "\n " in first:
            rows = argument_rows(paragraph)
            done.append("\n".join(f"- {name}: {meaning}" for name, meaning in rows) if rows else f"```text\n{paragraph}\n```")
            continue
        done.append(escaped(first))
        if shapes:  # "sentence.   [..., T]   source."
            shape, *source = shapes
            done.append(f"Shapes: {code(shape.rstrip('.').removeprefix('All ').removesuffix(' alike'))}")
            done += map(escaped, source)
    return "\n\n".join(done)


def argument_rows(paragraph: str) -> list[tuple[str, str]]:
    """The rows of two aligned columns, arguments or ``values`` and what they mean; empty if the paragraph has other text."""
    lines = paragraph.splitlines()
    names = r"(?:\w+(?:, \w+)*|``[^`]+``)(?: \[[^\]]*\])?"
    first = re.match(names + r" {2,}(?=\S)", lines[0])
    rows: list[tuple[str, str]] = []
    for line in lines if first else ():
        name, meaning = line[: first.end()], line[first.end() :]
        if re.fullmatch(names + " +", name):
            rows.append((code(name.strip().strip("`")), escaped(meaning)))
        elif name.isspace() and rows:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {escaped(meaning.strip())}")
        else:
            return []
    return rows


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTICE, *parts]).rstrip() + "\n"


# ---- functions and classes, read without importing them ---------------------------------------------------------------


def doc_of(thing: griffe.Object | griffe.Alias) -> str:
    assert thing.docstring is not None, f"{thing.path} has no docstring"
    return str(thing.docstring.value)


def described_function(thing: griffe.Function, level: int, owner: str = "") -> str:
    """A function; a method whose signature is short has it in its heading."""
    signature = signature_of(thing)
    short = bool(owner) and len(signature) <= 60
    heading = f"{'#' * level} {code(f'{owner}{signature if short else thing.name}')}"
    return "\n\n".join([heading, *([] if short else [f"```py\n{signature}\n```"]), prose(doc_of(thing))])


def is_field(member: griffe.Object | griffe.Alias) -> bool:
    plain = isinstance(member, griffe.Attribute) and "property" not in member.labels
    return plain and member.annotation is not None and "ClassVar" not in str(member.annotation)


def signature_of(thing: griffe.Function) -> str:
    """The names of the arguments with their defaults, and the type of the result, except for tensors and None."""
    node = ast.parse(textwrap.dedent(thing.source)).body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.args = [argument for argument in arguments.args if argument.arg != "self"]
    result = ast.unparse(node.returns) if node.returns else "None"
    shown = "" if result in ("None", "Any") or "Tensor" in result else f" -> {result}"
    return f"{thing.name}({ast.unparse(arguments)}){shown}".replace("'", '"')  # as ruff formats it


def described_class(thing: griffe.Class, level: int) -> str:
    parts = [f"{'#' * level} {code(thing.name)}", prose(doc_of(thing))]
    methods = METHODS.get(thing.name)
    constructor = thing.members.get("__init__")
    if isinstance(constructor, griffe.Function) and "dataclass" not in thing.labels:  # those of dataclasses are made up
        if methods is None or "__init__" in methods:
            parts.append(f"```py\n{signature_of(constructor).replace('__init__', thing.name)}\n```")
    else:
        fields = [m for m in thing.members.values() if is_field(m) and not m.name.startswith("_")]
        if fields:
            parts.append("\n".join(map(field_line, fields)))
    for member in thing.members.values():
        if member.name.startswith("_") or (methods is not None and member.name not in methods):
            continue
        if "property" in member.labels:
            parts.append(f"{code(f'{thing.name}.{member.name}')} (property): {escaped(doc_of(member))}")
        elif isinstance(member, griffe.Function):
            parts.append(described_function(member, level + 1, f"{thing.name}."))
    missing = set(methods or ()) - set(thing.members)
    assert not missing, f"{thing.path} has no {missing}"
    return "\n\n".join(parts)


def field_line(field: Any) -> str:
    """A field of a dataclass: its type, default and meaning."""
    text = textwrap.dedent(field.source)
    source = ast.parse(text).body[0]
    assert isinstance(source, ast.AnnAssign)
    kind = code(ast.get_source_segment(text, source.annotation))
    default = "" if source.value is None else f", {code(ast.get_source_segment(text, source.value))}"
    return f"- {code(field.name)} ({kind}{default})" + (f": {escaped(field.docstring.value)}" if field.docstring else "")


def described(thing: griffe.Object | griffe.Alias, level: int) -> str:
    if isinstance(thing, griffe.Function):
        return described_function(thing, level)
    assert isinstance(thing, griffe.Class), thing
    return described_class(thing, level)


def functional_page(package: griffe.Module) -> str:
    public = set(package["functional"].exports or ())
    parts = [
        prose(doc_of(package["functional"])),
        f"For the purpose of each formula, and how one follows from another, see {MATH_PAGE}.",
    ]
    names = set()
    for name in (*FUNCTIONAL, "masking"):
        module = package[f"functional.{name}"]
        members = [m for m in module.members.values() if m.name in public and not m.is_alias]
        names |= {member.name for member in members}
        source = f"[functional/{name}.py](../../src/surefoot/functional/{name}.py)"
        parts += [f"## {TITLES.get(name, name.replace('_', ' ').capitalize())}", f"{prose(doc_of(module))}\n\n{source}"]
        parts += [described(member, 3) for member in members if member.name != "Aggregation"]
    named = {"Aggregation"}  # a type, spelled out where it is used
    assert names == public, f"not on the page: {public - names}"
    parts.append(f"The type {code(named.pop())} is one of the four names that `aggregate` accepts.")
    return page("`surefoot.functional`", *parts)


def api_page(package: griffe.Module) -> str:
    parts = [
        "The names in the first five sections are those of `surefoot` itself (`surefoot.train`, `surefoot.Objective`, …). The "
        "last two sections are for your own tasks beyond Gymnasium and language: see "
        "[write your own collector](../how-to/write-your-own-collector.md)."
    ]
    for title, modules in API.items():
        parts.append(f"## {title}")
        if title == "Switches":
            names = ", ".join(map(code, ALGORITHMS))
            parts.append(
                f"Algorithms are values of `Objective`: {names}; `ALGORITHMS` has them by name, `LADDER` the first six in "
                "order. [The recipe](recipe.md#objective) has every switch, and what each algorithm sets."
            )
        for module, names in modules.items():
            members = package[module.removeprefix("surefoot.")].members
            folder = f"src/{module.replace('.', '/')}"
            origin = f"{folder}/__init__.py" if (ROOT / folder).is_dir() else f"{folder}.py"
            parts.append(f"From [{origin.removeprefix('src/')}](../../{origin}).")
            if title in BRIEF:
                parts.append("\n".join(f"- {code(name)}: {escaped(first_sentence(doc_of(members[name])))}" for name in names))
            else:
                parts += [described(members[name], 3) for name in names]
    exported = set(package.exports or ()) - {"functional", "LADDER", "ALGORITHMS", *ALGORITHMS}
    listed = {name for modules in API.values() for names in modules.values() for name in names}
    assert exported <= listed, f"public, but not on the page: {exported - listed}"
    return page("Python API", *parts)


def first_sentence(docstring: str) -> str:
    """Up to the first full stop at the end of a word."""
    return re.split(r"(?<=[.])\s", " ".join(docstring.split()), maxsplit=1)[0].removesuffix(".")


# ---- recipe, metrics, command line ------------------------------------------------------------------------------------


def recipe_page() -> str:
    groups: dict[str, list[str]] = {}
    for name, about in recipe_fields():
        section = name.partition(".")[0] if "." in name else ""
        default = "required" if name == "task" else code(shown(about.default))
        kind = kind_of(about)
        about_it = (f"{kind}, {default}" if kind else default) + "".join(elsewhere(name, about))
        groups.setdefault(section, []).append(f"- {code(name)} ({about_it}): {escaped(' '.join(about.meaning.split()))}")
    parts = [
        'Every field of a recipe, with its kind, where the default does not show it, and its default; `none` is "not set". '
        "To use the fields on the command line, in a file or from Python, see [recipes](../how-to/recipes.md).",
    ]
    for section, rows in groups.items():
        parts.append(f"## {f'`[{section}]`' if section else 'Top level'}")
        if section == "objective":
            parts.append(
                'The defaults are those of `algorithm = "custom"`, which is REINFORCE. A named algorithm starts from its own '
                "values, in the table below ([math.md](../math.md))."
            )
        parts.append("\n".join(rows))
        if section == "objective":
            parts += [
                "### What the named algorithms set",
                family(name for name in BASES if name not in without_critic()),
                "[The others](../math.md#algorithms-without-a-critic) have no critic.",
            ]
    parts += ["## Presets", "`surefoot train NAME --dry-run` prints all of a preset.", preset_list()]
    return page("Recipe", *parts)


def elsewhere(name: str, first: RecipeField) -> Iterator[str]:
    """The choices and the default that a field has in other kinds of runs than the first, such as ``; text: `1e-05```."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for kind in KINDS if name != "kind" else ():
        for field in (about for other, about in recipe_fields(kind) if other == name):
            words = field.type.replace(" | ", " or ") if " | " in field.type and field.type != first.type else ""
            kinds.setdefault((words, code(shown(field.default))), []).append(kind)
    for (words, default), names in kinds.items():
        if words or default != code(shown(first.default)):
            label = "text" if len(names) == len(KINDS) - 1 else ", ".join(names)
            yield f"; {label}: {words}{', ' * bool(words)}{default}"


def kind_of(field: RecipeField) -> str:
    """The kind of a field in few words; none if its default or its meaning shows it."""
    kind, default = re.sub(r"whole number from [01]\b(?! to)", "whole number", field.type), field.default
    plain = {bool: "true | false", int: "whole number", float: "number", list: "list", dict: "table"}
    if kind == plain.get(type(default)):
        return ""
    if " | " in kind and all(f"{choice}: " in field.meaning for choice in kind.split(" | ")):
        return ""
    for words, short in (("whole number", "integer"), ("true | false", "boolean"), (" | ", " or ")):
        kind = kind.replace(words, short)
    return kind.removesuffix(" or none") if default is None else kind


def preset_list() -> str:
    """A link to each preset, with the comment that it begins with."""
    lines = []
    for path in sorted(resources.files("surefoot.recipes.presets").iterdir(), key=lambda path: path.name):
        if path.name.endswith(".toml"):
            about = re.match(r"(?:#.*\n)*", path.read_text("utf-8"))
            assert about is not None, "an empty match at least"
            text = " ".join(line.removeprefix("#").strip() for line in about[0].splitlines())
            name = path.name.removesuffix(".toml")
            about_it = re.sub(r" \(docs/.*?\)|: surefoot train .*", "", first_sentence(text))
            lines.append(f"- [{code(name)}](../../src/surefoot/recipes/presets/{path.name}): {escaped(about_it)}")
    return "\n".join(lines)


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


BASES = {
    **dict.fromkeys(("ACTOR_CRITIC", "REINFORCE_BASELINE", "RLOO", "ONLINE_DPO"), "REINFORCE"),
    "A2C": "ACTOR_CRITIC",
    "PPO_UNCLIPPED": "A2C",
    "PPO_PENALTY_ADAPTIVE": "PPO_PENALTY",
    **dict.fromkeys(("PPO_CLIP", "PPO_PENALTY", "TRPO"), "PPO_UNCLIPPED"),
    **dict.fromkeys(("GRPO", "REINFORCE_PLUS_PLUS"), "PPO_CLIP"),
    **dict.fromkeys(("DR_GRPO", "DAPO", "GSPO", "CISPO", "KL_COV"), "GRPO"),
}
"""the algorithm that each is described by its differences from"""


def family(names: Iterable[str]) -> str:
    """The switches in which each algorithm differs from another, as in a recipe."""

    def value(x: Any) -> str:
        if is_dataclass(x) and not isinstance(x, type):
            set_here = {f.name: getattr(x, f.name) for f in fields(x)}
            plain = {f.name: f.default for f in fields(x)}
            first = next(iter(set_here))
            chosen = {name: y for name, y in set_here.items() if name == first or y != plain[name] or isinstance(x, Reuse)}
            return "{ " + ", ".join(f"{name} = {value(y)}" for name, y in chosen.items()) + " }"
        return '"none"' if x is None else json.dumps(x)

    def differences(name: str) -> str:
        different = switches_between(ALGORITHMS[BASES[name]], ALGORITHMS[name])
        return ", ".join(code(f"{switch} = {value(new)}") for switch, (_, new) in different.items())

    return table(("algorithm", "based on", "with"), [(code(n), code(BASES[n]), differences(n)) for n in names])


def preferences() -> str:
    """What the losses on pairs and labelled answers read, and their defaults."""
    rows = []
    for loss in get_args(PreferenceSettings.model_fields["loss"].annotation):
        made = make_recipe({"kind": "dpo", "model": "m", "data": {"train": "t"}, "preference": {"loss": loss}})
        assert isinstance(made, DpoRecipe)
        rows.append(
            (
                code(f'preference.loss = "{loss}"'),
                "labelled answers" if loss == "kto" else "pairs",
                "the reference" if made.has_reference else "nothing; log π per token",
                code(shown(made.reference.beta)),
            )
        )
    return table(('with `kind = "dpo"`', "rows", "log π is compared with", "`reference.beta`"), rows)


def without_critic() -> list[str]:
    """The algorithms beyond the ladder that have no critic."""
    return [name for name, objective in ALGORITHMS.items() if objective.baseline != "critic" and objective not in LADDER]


def math_page() -> str:
    """The page on the math, whose tables of the family are generated."""
    text = (ROOT / "docs" / "math.md").read_text("utf-8")
    names = without_critic()
    for block, content in (("algorithms without a critic", family(names)), ("losses on preferences", preferences())):
        begin, end = f"<!-- begin: {block}, from docs/generate.py -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        assert found, f"docs/math.md has no line {begin}"
        text = f"{before}{begin}\n{content}\n\n{end}{rest.partition(end)[2]}"
    return text


def bounds(metric: Metric) -> str:
    if metric.low is not None and metric.high is not None:
        return f"{metric.low:g} to {metric.high:g}"
    if metric.low is not None:
        return f"≥ {metric.low:g}"
    return "–" if metric.high is None else f"≤ {metric.high:g}"


def metrics_page() -> str:
    rows = []
    for name, metric in METRICS.items():
        label = SHOWN[name][0] if name in SHOWN else ""
        shown_as = f" ({label})" if label and label.replace(" ", "_") != name else ""
        healthy = f" **Healthy: {bounds(metric)}.**" if metric.why_low or metric.why_high else ""
        rows.append(f"- {code(name)}{shown_as}: {escaped(metric.meaning)}.{healthy}")
    timing = ", ".join(code(name) for name in TIMING)
    return page(
        "Metrics",
        "Every key of `metrics.jsonl`, one JSON object per iteration, and of [trackers](../how-to/log-to-trackers.md). A value "
        "may be `null` if it is not defined, and a key is absent if the algorithm doesn't have it. In brackets is the label on "
        "the display, which shows a remedy if a value leaves its healthy range, a rule of thumb. To interpret them, see "
        "[read the metrics](../how-to/read-the-metrics.md); if something goes wrong, [troubleshooting](../troubleshooting.md).",
        "\n".join(rows),
        f"Two runs of the same recipe and seed on the same machine agree in every key except {timing}.",
    )


def placeholder(parameter: click.Parameter) -> str:
    if parameter.metavar:
        return parameter.metavar
    kind = parameter.type
    return {
        "integer range": "N",
        "integer": "N",
        "number": "X",
        "float range": "X",
        "float": "X",
        "path": "PATH",
        "text": "TEXT",
    }.get(kind.name, kind.name.upper())


def option_line(option: click.Option) -> tuple[str, str]:
    """An option with its value, and its meaning."""
    value = "" if option.is_flag else f" {placeholder(option)}"
    text = option.help or ""
    if option.show_default:
        text += f" Default: `{option.default}`."
    return code(f"{', '.join(option.opts)}{value}"), escaped(text.strip())


def own_options(command: click.Command) -> list[tuple[str, str]]:
    """The lines of a command's options, without the fields of a recipe."""
    return [option_line(each) for each in command.params if isinstance(each, click.Option) and not is_recipe_flag(each)]


def all_commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command; for a group, each of its commands."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    for own in sorted(command.commands):
        yield from all_commands(f"{name} {own}", command.commands[own])


def command_part(name: str, command: click.Command, shared: set[tuple[str, str]]) -> str:
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    own = own_options(command)
    usage = " ".join(["surefoot", name, *(str(argument.name).upper() for argument in arguments)])
    parts = [f"## `surefoot {name}`", *help_parts(inspect.cleandoc(command.help or ""))]
    if arguments:
        parts.insert(1, code(usage))
    lines = [f"- {flag}: {text}" for flag, text in own if (flag, text) not in shared]
    if also := [flag for flag, text in own if (flag, text) in shared]:
        lines.append(f"- [shared](#shared-options): {', '.join(also)}")
    if lines:
        parts.append("\n".join(lines))
    if len(own) < len(options):  # their meanings are in the page of the recipe alone
        parts.append("Also a flag for every field of the [recipe](recipe.md).")
    return "\n\n".join(parts)


def help_parts(text: str) -> Iterator[str]:
    """The paragraphs of a command's help; those that click prints as they are, after ``\\b``, are examples."""
    text = re.sub(r"MODEL is a run, a checkpoint, a transformers folder or\s+a\s+hub\s+id\.\s*", "", text).strip()  # said once
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield f"```text\n{paragraph.removeprefix(chr(8)).strip()}\n```"
        else:
            yield escaped(paragraph)


def is_recipe_flag(option: click.Option) -> bool:
    return option.metavar == "VALUE" or isinstance(option, BooleanOption)


def shared_lines(commands: Sequence[tuple[str, click.Command]]) -> list[tuple[str, str]]:
    """Options that three commands describe alike, or two if no other has a flag of that name; they are described once."""
    counts = Counter(line for _, command in commands for line in own_options(command))
    meanings = Counter(flag.partition(" ")[0] for flag, _ in counts)
    return [line for line, count in sorted(counts.items()) if count >= (2 if meanings[line[0].partition(" ")[0]] == 1 else 3)]


def cli_page() -> str:
    actual = ((name, cli.get_command(click.Context(cli), name)) for name in sorted(COMMANDS))
    commands = [each for name, command in actual if command is not None for each in all_commands(name, command)]
    shared = shared_lines(commands)
    return page(
        "Command line",
        "`surefoot --help` and `surefoot COMMAND --help` show the same on a terminal; `-h` is short for `--help`. "
        "`python -m surefoot` is the same program. MODEL is a run, a checkpoint, a transformers folder or a hub id.",
        "Exit codes: 0, done; 1, `check` found something serious, or `diff` or `verify` a difference; 2, an error: one line on "
        "stderr names the field, the value and the remedy; 130, stopped by Ctrl-C or SIGTERM: the run is saved and resumes.",
        "## Shared options",
        "\n".join(f"- {flag}: {text}" for flag, text in shared),
        *(command_part(name, command, set(shared)) for name, command in commands),
    )


# ---- what goes wrong --------------------------------------------------------------------------------------------------


TROUBLES = runpy.run_path(str(ROOT / "docs" / "troubles.py"))["TROUBLES"]
FOUND_AS = re.compile(r'Finding\(\s*"(\w+)"')
SETTING = re.compile(r"\b[a-z]\w*(?:\.[a-z]\w*)+(?: = (?:[\d.]*\d|'\w+'))?|\b[a-z]+_\w+\b")
BEFORE = """- **It does not install, or a part is missing:** `surefoot check` looks at this machine, and lists what is missing
  and how to get it.
- **It stops with one line and exit code 2:** the line names the field, its value, what is wrong with it and the remedy.
- **A recipe has never run before:** `surefoot check RECIPE` tries its environment, or its model and reward, in seconds
  ([check a run](how-to/check-a-run.md)).
- **It was interrupted:** `surefoot resume RUN` continues ([resume](how-to/resume.md))."""


def words(text: str) -> str:
    """A finding's words as Markdown, with its metrics and settings as code."""
    return escaped(SETTING.sub(lambda match: code(match[0]), text))


def described_causes(findings: Iterable[Finding]) -> Iterator[str]:
    """Each cause, and what to try, the likeliest first; what an earlier cause says already is not repeated."""
    causes: set[str] = set()
    tried: set[str] = set()
    for finding in findings:
        if finding.cause not in causes:
            advice = [each for each in finding.advice if each not in tried]
            tries = list(map(words, advice))
            tries += ["as above"] if len(advice) < len(finding.advice) else []
            yield f"- {words(finding.cause)[:1].upper()}{words(finding.cause)[1:]}. **Try** {'; '.join(tries)}."
        causes.add(finding.cause)
        tried.update(finding.advice)


def trouble(name: str, heading: str, more: str, runs: list[Any]) -> str:
    """A symptom, and its finding as it comes out of each run; a row that is None is a line that can't be read.

    A table in place of rows has the errors of trackers, a text what is wrong with checkpoints or files.
    """
    found: list[Finding] = []
    for run in runs:
        lines = run if isinstance(run, list) else []
        others = [tracker_failed(*failed) for failed in run.items()] if isinstance(run, dict) else []
        if isinstance(run, str):
            others = [checkpoints_lost(run) if name == "checkpoints_lost" else files_damaged([run])]
        history = History("".join("?\n" if row is None else json.dumps(row) + "\n" for row in lines).encode())
        findings = {finding.name: finding for finding in findings_in(history, others=others)}
        assert name in findings, f"the run that is to show {name} shows {list(findings)}"
        found.append(findings[name])
    metrics = ", ".join(dict.fromkeys(code(evidence.metric) for finding in found for evidence in finding.evidence))
    title = Path(more.partition("#")[0]).stem.replace("-", " ")
    first = f"{code(name)} ({found[0].severity}): {words(found[0].what)}."
    look = f" Look at {metrics}." if metrics else ""
    return "\n\n".join([f"### {heading}", f"{first}{look} More: [{title}]({more}).", "\n".join(described_causes(found))])


def troubleshooting_page() -> str:
    troubles = runpy.run_path(str(ROOT / "docs" / "troubles.py"))["TROUBLES"]
    sources = sorted((ROOT / "src" / "surefoot" / "diagnostics").glob("*.py"))
    names = {name for source in sources for name in FOUND_AS.findall(source.read_text("utf-8"))}
    here = {name for symptoms in troubles.values() for name in symptoms}
    assert names == here, f"findings and docs/troubles.py differ in {names ^ here}"
    parts = [
        "What you see, why, and what to try, in this order. `surefoot check RUN` finds which of these hold in your run, and "
        "prints them with your numbers; those below are an example's. [The reference](reference/metrics.md) explains the "
        "metrics.",
        f"## Before training\n\n{BEFORE}",
    ]
    for title, symptoms in troubles.items():
        parts += [f"## {title}", *(trouble(name, *about) for name, about in symptoms.items())]
    return page("Troubleshooting", *parts)


# ---- writing ----------------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    package = griffe.load("surefoot", search_paths=[str(ROOT / "src")])
    assert isinstance(package, griffe.Module)
    return {
        REFERENCE / "functional.md": functional_page(package),
        REFERENCE / "api.md": api_page(package),
        REFERENCE / "recipe.md": recipe_page(),
        REFERENCE / "metrics.md": metrics_page(),
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "clip-table.html": clip_table_page(),
        ROOT / "docs" / "how-ppo-works.html": runpy.run_path(str(ROOT / "docs" / "how_ppo_works.py"))["how_ppo_works_page"](),
        ROOT / "docs" / "math.md": math_page(),
        ROOT / "docs" / "troubleshooting.md": troubleshooting_page(),
        ROOT / "src" / "surefoot" / "recipes" / "arguments.pyi": runpy.run_path(str(ROOT / "docs" / "arguments.py"))[
            "arguments_module"
        ](),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    check = parser.parse_args().check
    stale = {path: text for path, text in pages().items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8", newline="\n")
        print(f"{path.relative_to(ROOT).as_posix()}: {'stale; run: python docs/generate.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
