"""Write src/surefoot/recipes/arguments.pyi: the types of the keyword arguments of ``surefoot.train``, from the recipes' fields.

docs/generate.py calls ``arguments_module`` and keeps the file current.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from surefoot.recipes.base import Section
from surefoot.recipes.fields import KINDS
from surefoot.recipes.presets import presets
from surefoot.recipes.rows import ROW_FIELDS

OWN = ("kind", "task", "algorithm")
"""fields that are parameters of ``train`` themselves, or follow from the task"""
OBJECTS = {
    "RewardTerm": ("function",),
    "RewardSettings": ("gold",),
    "Network": ("custom",),
    "OptimizerSettings": ("schedule",),
    "LanguageOptimizer": ("schedule",),
    "Clip": ("schedule",),
}
"""fields that also take a function"""
FUNCTION = "Callable[..., Any]"
ROWS = "Iterable[Mapping[str, Any]]"
ROW_NAMES = {field.rpartition(".")[2] for field in ROW_FIELDS} | {"data"}
"""fields that also take rows"""
FROM_PYTHON = {"start": "Any"}
"""fields that take objects from Python too, whose types recipes can't import"""
HEADER = '''"""Types of the keyword arguments of ``surefoot.train``, for editors and type checkers.

Written by docs/generate.py from the recipes; change the fields of the recipes instead.
"""
'''


class Writer:
    """Collects a TypedDict for every section that a recipe has, each after those that it uses."""

    def __init__(self) -> None:
        self.tables: dict[str, str] = {}
        self.imports: dict[str, set[str]] = {"typing": {"Any", "Literal", "TypedDict"}}

    def text(self, annotation: Any) -> str:
        """A field's annotation in Python, with a table or a value for each section."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self.text(arguments[0])
        if origin is Literal:
            return f"Literal[{', '.join(map(quoted, arguments))}]"
        if origin in (types.UnionType, Union):
            return " | ".join(dict.fromkeys(self.text(argument) for argument in arguments))
        if origin is tuple:
            return f"{self.abstract(Sequence)}[{self.text(arguments[0])}]"
        if origin in (dict, Mapping):
            return f"{self.abstract(Mapping)}[{', '.join(self.text(argument) for argument in arguments)}]"
        if origin is Callable or annotation is Callable:
            return f"{self.abstract(Callable)}[..., Any]"
        if annotation in (Any, type(None)):
            return "None" if annotation is type(None) else "Any"
        if dataclasses.is_dataclass(annotation) or issubclass(annotation, Section):
            return f"{self.table(annotation)} | {self.value(annotation)}"
        return self.value(annotation)

    def abstract(self, kind: Any) -> str:
        self.imports.setdefault("collections.abc", set()).add(kind.__name__)
        return str(kind.__name__)

    def value(self, kind: Any) -> str:
        if kind.__module__ != "builtins":
            self.imports.setdefault(kind.__module__, set()).add(kind.__qualname__)
        return str(kind.__qualname__)

    def table(self, section: Any) -> str:
        """The name of the TypedDict of a section, which is written on the first call."""
        name = f"{section.__name__}Table"
        if name not in self.tables:
            self.tables[name] = typed_dict(name, f"The fields of ``{section.__name__}``.", self.fields(section))
        return name

    def fields(self, section: Any) -> dict[str, str]:
        if dataclasses.is_dataclass(section):
            hints = typing.get_type_hints(section)
            fields = {field.name: self.text(hints[field.name]) for field in dataclasses.fields(section)}
        else:
            fields = {name: self.text(field.annotation) for name, field in section.model_fields.items()}
        for name in OBJECTS.get(section.__name__, ()):
            fields[name] = f"{self.abstract(Callable)}[..., Any] | {fields[name]}"
        for name in ROW_NAMES & fields.keys():
            self.abstract(Iterable), self.abstract(Mapping)
            fields[name] = f"{'str | ' * (name == 'data')}{ROWS} | {fields[name]}"
        if "reward" in fields:  # also the terms alone
            fields["reward"] += f" | {FUNCTION} | Sequence[RewardTermTable | RewardTerm | {FUNCTION}]"
        return fields


def quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def typed_dict(name: str, docstring: str, fields: Mapping[str, str]) -> str:
    lines = "\n".join(f"    {field}: {kind}" for field, kind in fields.items())
    return f'class {name}(TypedDict, total=False):\n    """{docstring}"""\n{lines}'


def arguments_module() -> str:
    """The text of src/surefoot/recipes/arguments.pyi."""
    writer = Writer()
    kinds = {name: writer.fields(recipe) for name, recipe in KINDS.items()}
    kinds = {
        name: {f: FROM_PYTHON.get(f, text) for f, text in fields.items() if f not in OWN} for name, fields in kinds.items()
    }
    everything: dict[str, list[str]] = {}
    for fields in kinds.values():
        for field, text in fields.items():
            everything.setdefault(field, []).extend(text.split(" | "))
    any_kind = {field: " | ".join(dict.fromkeys(texts)) for field, texts in everything.items()}
    parts = list(writer.tables.values())
    parts.append(typed_dict("ControlArguments", 'The fields of a recipe of kind "control".', kinds["control"]))
    parts.append(typed_dict("Arguments", "The fields of recipes of all kinds.", any_kind))
    lines = (f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(writer.imports.items()))
    return "\n\n".join([f"{HEADER}\n" + "\n".join(lines), names_of_presets(), *parts]) + "\n"


def names_of_presets() -> str:
    """A Literal for the names of each result: agents by the ids that presets are tuned for, models by preset."""
    tables = presets()
    tuned = {task for table in tables.values() for task in table.get("tuned_for", ()) if not set(task) & set("*?[")}
    agents = {name for name, table in tables.items() if table.get("kind", "control") == "control" and "task" in table}
    rewards = {name for name, table in tables.items() if table.get("kind") == "reward"}
    models = {name for name, table in tables.items() if table.get("kind", "control") != "control"} - rewards
    about = {
        "AgentTask": (tuned | agents, "environment ids that a preset is tuned for"),
        "ModelTask": (models, "presets that train a language model"),
        "RewardModelTask": (rewards, "presets that train a reward model"),
    }
    return "\n".join(
        f'{name} = Literal[{", ".join(map(quoted, sorted(values)))}]\n"""{text}"""' for name, (values, text) in about.items()
    )
