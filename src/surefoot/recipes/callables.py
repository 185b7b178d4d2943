"""Reward functions that are passed as Python objects: a recipe has their names, the run the objects."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot.errors import SurefootError

Functions = Mapping[str, Callable[..., Any]]
"""field of the recipe, such as ``reward.terms[0].function`` -> the function"""
GOLD = "reward.gold"


def term_field(place: int) -> str:
    """The field of a term's function."""
    return f"reward.terms[{place}].function"


def object_path(thing: Any) -> str:
    """The name of a function or class, ``module:qualified.name``.

    If importing that name would not return the object (a lambda, a closure, an instance, anything of a script or notebook), the
    name contains "<", and ``is_importable`` is False.
    """
    module = getattr(thing, "__module__", None) or type(thing).__module__
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__qualname__
    path = f"{module}:{name}"
    if "<" in name or (module != "__main__" and _imported(module, name) is thing):
        return path
    return f"{module}:<{name}>"


def is_importable(path: str) -> bool:
    """Whether a name of ``object_path`` stands for an object that another process can import."""
    return "<" not in path.rpartition(":")[2]


def passed_again(field: str, path: str) -> SurefootError:
    """The error for a function that was passed from Python and is not at hand."""
    return SurefootError(
        f"{field}={path!r}: was passed as a Python object, which no file contains; pass it again, as in "
        "surefoot.resume(run, reward=function), or put it into a file and name it file.py:function"
    )


def take_functions(reward: Any) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """The reward of a recipe with names in place of functions, and the functions by field.

    reward  a function; a list of functions and terms; or a table, whose ``terms``, their ``function`` and ``gold`` may be
            functions. Anything else is returned unchanged
    """
    if callable(reward):
        reward = [reward]
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        reward = {"terms": reward}
    if not isinstance(reward, Mapping):
        return reward, {}
    table, functions = dict(reward), dict[str, Callable[..., Any]]()
    terms = table.get("terms", ())
    if callable(terms):
        terms = [terms]
    if isinstance(terms, Sequence) and not isinstance(terms, str):
        written: list[Any] = []
        for place, term in enumerate(terms):
            function = term.get("function") if isinstance(term, Mapping) else term
            if callable(function):
                functions[term_field(place)] = function
                term = {**(term if isinstance(term, Mapping) else {}), "function": object_path(function)}
            written.append(term)
        table = {**table, "terms": written} if written else table
    if callable(gold := table.get("gold")):
        functions[GOLD], table["gold"] = gold, object_path(gold)
    return table, functions


def check_functions(functions: Functions, recorded: Mapping[str, str | None]) -> None:
    """Raise SurefootError if a function is passed for a field that names another one.

    recorded  the names in the recipe, by field
    """
    for field, function in functions.items():
        path = object_path(function)
        if recorded.get(field) != path:
            raise SurefootError(
                f"reward={path!r}: the run has {field}={recorded.get(field)!r}; pass the functions that it began with, in the "
                "same order"
            )


def _imported(module: str, name: str) -> Any:
    """What a name stands for; None if there is no such thing."""
    try:
        thing: Any = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except Exception:  # a module may raise anything
        return None
    return thing
