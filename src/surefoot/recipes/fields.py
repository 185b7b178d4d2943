"""The kinds of recipes and their fields: type, default and meaning, for help, suggestions and reference pages."""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

from surefoot.core.algorithms import MAX_COUNT, Objective
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.supervised import DpoRecipe, RewardRecipe, SftRecipe

KINDS: dict[str, type[Recipe]] = {
    "control": ControlRecipe,
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "dpo": DpoRecipe,
    "language": LanguageRecipe,
}
"""every kind of run, by name"""
BOOLEAN = "true | false"
"""the type of a boolean field"""
TOP_LEVEL = {"algorithm", "steps", "seed", "device"}
"""fields whose types need no explanation"""


@dataclass(frozen=True)
class RecipeField:
    """A field of a recipe, for help and reference pages."""

    name: str
    type: str
    default: Any
    meaning: str

    @property
    def help(self) -> str:
        """The meaning, with the type if that needs to be shown."""
        return self.meaning if self.type == BOOLEAN or self.name in TOP_LEVEL else f"{self.meaning} [{self.type}]"


def recipe_fields(kind: str | None = None) -> Iterator[tuple[str, RecipeField]]:
    """Every field of a kind's recipe, or of all kinds, as (dotted name, its description), in order."""
    seen = set()
    for one in KINDS if kind is None else [kind]:
        for field in _fields_of(one):
            if field.name not in seen:
                seen.add(field.name)
                yield field.name, field


@cache  # a schema takes 20 ms, and every recipe that is made needs it
def _fields_of(kind: str) -> tuple[RecipeField, ...]:
    schema = KINDS[kind].model_json_schema()
    return tuple(_fields(KINDS[kind].__name__, schema, schema["$defs"], ""))


def _fields(owner: str, node: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str) -> Iterator[RecipeField]:
    for name, described in node["properties"].items():
        dotted = f"{prefix}{name}"
        options = described.get("anyOf", [described])
        tables = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
        if not tables:
            kind = " | ".join(map(_type_name, options))
            yield RecipeField(dotted, kind, described.get("default"), _meaning(owner, name))
        elif len(options) > 1:  # a table that is off by default
            yield RecipeField(dotted, "table | none", "none", _meaning(owner, name))
        for table in tables:
            yield from _fields(table, definitions[table], definitions, f"{dotted}.")


def _recipe_modules() -> list[ModuleType]:
    """The modules whose classes recipes consist of; a test keeps the classes' names unique."""
    recipes = f"{Recipe.__module__.rpartition('.')[0]}."
    return [module for key, module in list(sys.modules.items()) if key.startswith(recipes) or key == Objective.__module__]


def _meaning(owner: str, name: str) -> str:
    """The text under a field of a class, or of the class that it has the field from; "" without one."""
    cls = next(vars(module)[owner] for module in _recipe_modules() if owner in vars(module))
    texts = (_texts_under_fields(base.__module__).get((base.__name__, name)) for base in cls.__mro__)
    return next((text for text in texts if text is not None), "")


@cache
def _texts_under_fields(module: str) -> dict[tuple[str, str], str]:
    """The text under each field of a module's classes, by class and field, from one look at the source.

    pydantic's ``use_attribute_docstrings`` reads the same, but parses the module again for each class.
    """
    texts: dict[tuple[str, str], str] = {}
    if not module.startswith("surefoot."):  # a base of pydantic or Python
        return texts
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:  # installed without sources
        return texts
    for cls in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(cls.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[cls.name, name] = inspect.cleandoc(text)
    return texts


def _type_name(option: Mapping[str, Any]) -> str:
    if "enum" in option:
        return " | ".join(str(value) for value in option["enum"])
    if "const" in option:
        return str(option["const"])
    names = {"null": "none", "integer": "whole number", "object": "table", "array": "list", "boolean": BOOLEAN}
    name = names.get(option.get("type", ""), str(option.get("type", "any")))
    least, most = option.get("minimum"), option.get("maximum")
    if least is None or most is None:
        return name
    return f"{name} from {least:,}" if most >= MAX_COUNT else f"{name} from {least:,} to {most:,}"  # no need to read the bound
