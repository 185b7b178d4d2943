"""Arguments of ``train`` that are Python objects: agents, rows, functions and sections become fields of a recipe."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.control.agent import Agent
from surefoot.control.environments.looped import MakeEnvironment
from surefoot.core.algorithms import Objective
from surefoot.errors import SurefootError
from surefoot.recipes.base import Recipe, Section
from surefoot.recipes.callables import check_functions, take_objects
from surefoot.recipes.reading import named_functions
from surefoot.recipes.rows import with_row_fields
from surefoot.store.reading import ROWS, START

Task = str | Path | MakeEnvironment


def take_agent(fields: dict[str, Any], run_dir: str | Path | None) -> tuple[dict[str, Any], Agent | None]:
    """The fields with the place where an agent that is passed as ``start`` will be saved, and that agent."""
    agent = fields.get("start")
    if not isinstance(agent, Agent):
        return fields, None
    return {**fields, "start": None if run_dir is None else str(Path(run_dir) / START)}, agent


def take_rows(fields: dict[str, Any], run_dir: str | Path | None) -> tuple[dict[str, Any], list[Path]]:
    """The fields with paths in place of rows that were passed as objects, and the files that have these rows.

    The paths are those of copies in the run's folder, or the files themselves without one.
    """
    files: list[Path] = []

    def named(field: str, value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if not are_rows(value):
            return value
        files.append(rows_file(value, field))
        return str(files[-1] if run_dir is None else Path(run_dir) / ROWS / files[-1].name)

    data = fields.get("data")
    if are_rows(data) or isinstance(data, str):
        fields = {**fields, "data": {"train": data}}
    return with_row_fields(fields, named), files


def are_rows(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, os.PathLike))


def rows_file(rows: Any, field: str) -> Path:
    """A file with rows that were passed as objects, which exists as long as this process."""
    from surefoot.language.data.sources import process_folder, save_rows

    return save_rows(rows, process_folder(), field)


def functions_again(recipe: Recipe, **fields: Any) -> dict[str, Callable[..., Any]]:
    """The functions and classes in fields that ``train`` got as well.

    Raises SurefootError for another function than the recipe names, and for anything but functions in a table.
    """
    passed = {name: value for name, value in fields.items() if value is not None}
    taken, functions = take_objects(plain_fields(passed))
    check_functions(functions, named_functions(recipe))
    for field in (field for name in sorted(taken.keys() - {"reward"}) for field in _leaves(taken[name], name)):
        if field not in functions:
            raise SurefootError(
                f"{field}: only functions and classes that train got are passed again; change other settings in config.toml, "
                "and set allow_changes=True"
            )
    return functions


def _leaves(value: Any, field: str) -> Iterator[str]:
    """The dotted names of all values in nested tables."""
    if not isinstance(value, Mapping):
        yield field
        return
    for name, part in value.items():
        yield from _leaves(part, f"{field}.{name}")


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as recipe tables; sections and objectives may be values too."""
    plain = dict(fields)
    for key, value in fields.items():
        if isinstance(value, Section):
            plain[key] = value.model_dump(exclude_unset=True)
        elif isinstance(value, Objective):
            plain[key] = asdict(value)
        elif isinstance(value, os.PathLike):
            plain[key] = os.fspath(value)
    return plain


def task_reference(task: Task) -> str:
    """A callable's name as a recipe writes it, ``module:qualified.name``; a string or path is its own."""
    if isinstance(task, (str, os.PathLike)):
        return os.fspath(task)
    if not callable(task):
        raise SurefootError(
            f"task={task!r}: is not a task; give a Gymnasium id, 'module:function', or a function that makes an environment"
        )
    return f"{task.__module__}:{getattr(task, '__qualname__', type(task).__qualname__)}"


def task_place(task: Task) -> tuple[str, str]:
    """The file and name behind a task, equal for a class, ``file.py:Class`` and ``file:Class``; an id has itself as name.

    Nothing is imported: the recipe of an agent from elsewhere may name code that was not asked for.
    """
    module, _, name = task_reference(task).rpartition(":")
    if isinstance(task, str):
        file = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    else:
        file = getattr(sys.modules.get(module), "__file__", None) or module
    return str(Path(file).resolve()) if module else "", name


def reject(**arguments: Any) -> None:
    """Raise SurefootError for an argument that is for agents if there is a model, or the other way round."""
    agent, model = "an agent, evaluated over episodes", "a model, evaluated on held-out rows"
    kinds = {"data": agent, "rows": agent, "reward": agent, "network": "a language model, not an agent"}
    for name, value in arguments.items():
        if value is not None:
            raise SurefootError(f"{name}={value!r}: this is {kinds.get(name, model)}; leave it out")
