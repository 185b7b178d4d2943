"""The user's functions and classes: imported by name, or passed as Python objects, of which a recipe keeps the names.

The working folder joins Python's path only when something is imported, and as its last entry. So a command that only reads an
untrusted folder runs no module from it.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pydantic

from surefoot.errors import SurefootError, cause_of, did_you_mean, place_of

Functions = Mapping[str, Callable[..., Any]]
"""field of the recipe, such as ``reward.terms[0].function`` -> the function"""
GOLD = "reward.gold"
NETWORK = "network.custom"
SYMMETRY = "rollout.symmetry"
TURNS = "turns.environment"
SCHEDULE, CLIP_SCHEDULE = "optimizer.schedule", "objective.trust_region.schedule"
OBJECTS = (NETWORK, SYMMETRY, SCHEDULE, CLIP_SCHEDULE, TURNS)
"""fields with one function or class, besides those of the reward"""


def term_field(place: int) -> str:
    """The field of a term's function."""
    return f"reward.terms[{place}].function"


def tool_field(place: int) -> str:
    """The field of a tool."""
    return f"turns.tools[{place}]"


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
    again = f"surefoot.{'load' if field == NETWORK else 'resume'}(run, {_keyword(field)})"
    evaluated = "evaluate what train returned, " if field.startswith("reward") else ""
    return SurefootError(
        f"{field}={path!r}: was passed as a Python object, which no file contains; pass it again, as in {again}, "
        f"{evaluated}or put it into a file and name it file.py:function"
    )


def _keyword(field: str) -> str:
    """The argument of ``train`` that passes a field's function: ``reward=function``, ``network={"custom": function}``."""
    table, *names = field.split(".")
    value = "function"
    if field.endswith("]") and table == "turns":
        return 'turns={"tools": [function]}'
    for name in () if table == "reward" else reversed(names):
        value = f'{{"{name}": {value}}}'
    return f"{table}={value}"


def find_function(field: str, path: str, functions: Functions) -> str | Callable[..., Any]:
    """The function of a recipe's field if it was passed as an object, else its name.

    Raises SurefootError if the name stands for an object that was not passed and that nothing can import.
    """
    if field in functions:
        return functions[field]
    if not is_importable(path):
        raise passed_again(field, path)
    return path


def load_function(field: str, path: str, functions: Functions) -> Any:
    """The function of a recipe's field: passed as an object, or imported by its name."""
    function = find_function(field, path, functions)
    return import_object(field, function) if isinstance(function, str) else function


def take_objects(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """The fields of a recipe with names in place of functions and classes, and these by field."""
    taken, functions = dict(fields), dict[str, Callable[..., Any]]()
    if "reward" in fields:
        taken["reward"], functions = take_functions(fields["reward"])
    for field in OBJECTS:
        taken = _taken(taken, field.split("."), field, functions)
    if isinstance(turns := taken.get("turns"), Mapping) and isinstance(tools := turns.get("tools"), (list, tuple)):
        functions |= {tool_field(place): tool for place, tool in enumerate(tools) if callable(tool)}
        taken["turns"] = {**turns, "tools": [object_path(tool) if callable(tool) else tool for tool in tools]}
    if isinstance(optimizer := taken.get("optimizer"), Mapping) and callable(rate := optimizer.get("learning_rate")):
        raise SurefootError(
            f"optimizer.learning_rate={object_path(rate)!r}: is a function; set the largest rate, and optimizer.schedule to a "
            "function from the remaining share of the budget, 1 to 0, to a factor of that rate"
        )
    return taken, functions


def _taken(table: Mapping[str, Any], keys: list[str], field: str, functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """The table with a name in place of the function at nested keys, if there is one; ``functions`` gets it."""
    value = table.get(keys[0])
    if len(keys) == 1 and callable(value):
        functions[field] = value
        return {**table, keys[0]: object_path(value)}
    if isinstance(value, pydantic.BaseModel):
        value = value.model_dump(exclude_unset=True)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if len(keys) == 1 or not isinstance(value, Mapping):
        return dict(table)
    return {**table, keys[0]: _taken(value, keys[1:], field, functions)}


def take_functions(reward: Any) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """The reward of a recipe with names in place of functions, and the functions by field.

    reward  a function; a text that is a term; a list of functions and terms; or a table, whose ``terms``, their ``function``
            and ``gold`` may be functions. None and "none" are returned unchanged

    Raises SurefootError for anything else.
    """
    if reward in (None, "none"):
        return reward, {}
    if callable(reward) or isinstance(reward, (str, Sequence)):
        reward = {"terms": reward}
    if not isinstance(reward, Mapping):
        raise SurefootError(
            f"reward={reward!r:.60}: is not a function, a list of terms or a table; "
            'set for example reward={"terms": [{"model": "runs/reward"}]}'
        )
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


def with_task(functions: Functions | None, task: Callable[..., Any] | None) -> Functions:
    """Functions by field, with the task if it was passed as an object too."""
    return {**(functions or {}), **({} if task is None else {"task": task})}


def check_functions(functions: Functions, recorded: Mapping[str, str | None]) -> None:
    """Raise SurefootError if a function is passed for a field that names another one.

    recorded  the names in the recipe, by field
    """
    for field, function in functions.items():
        path = object_path(function)
        if recorded.get(field) != path:
            raise SurefootError(
                f"{field.partition('.')[0]}={path!r}: the run has {field}={recorded.get(field)!r}; pass the functions that it "
                "began with, in the same order"
            )


def _imported(module: str, name: str) -> Any:
    """What a name stands for; None if there is no such thing."""
    try:
        return attrgetter(name)(importlib.import_module(module))
    except Exception:  # a module may raise anything
        return None


# ---- by name ---------------------------------------------------------------------------------------------------------------


def import_object(field: str, path: str, remedy: str = "") -> Any:
    """The object that ``module:name`` or ``file.py:name`` names.

    Installed modules come before modules in the working folder. A file is read again on every call; modules in its folder are
    not on the path.

    Raises SurefootError, with the recipe's field, if it can't be imported.
    """
    module, _, name = path.rpartition(":")
    try:
        if not (module and name):
            raise ValueError("it is not two names with a colon between them")
        if module.endswith(".py"):
            return _member(_from_file(Path(module)), module, name)
        append_working_folder()
        return _member(importlib.import_module(module), module, name)
    except (Exception, SystemExit) as error:  # a script may exit when it is imported
        why = cause_of(error) + (f" in {where}" if (where := place_of(error)) else "")
        advice = "it must name module:function or file.py:function" + (f"; {remedy}" if remedy else "")
        if where or isinstance(error, SyntaxError):
            advice = "install it, or run in its folder" if isinstance(error, ModuleNotFoundError) else "fix the file"
            if module.endswith(".py") and isinstance(error, ModuleNotFoundError):
                advice += f" and name {Path(module).stem}:{name} (a file imports only what is installed)"
        raise SurefootError(f"{field}={path!r}: can't be imported ({why}); {advice}") from None


def _member(imported: ModuleType, module: str, name: str) -> Any:
    if hasattr(imported, name):
        return getattr(imported, name)
    raise AttributeError(f"{module} has no {name!r}{did_you_mean(name, [each for each in dir(imported) if each[0] != '_'])}")


def append_working_folder() -> None:
    """Put the working folder last on Python's path."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def _from_file(path: Path) -> ModuleType:
    """The module of a file, registered in ``sys.modules``, where dataclasses look for it."""
    file = path.expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"_surefoot_{file.stem}"
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None, "the suffix .py has a loader"
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module
