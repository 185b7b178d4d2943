"""Import the user's functions and classes, named as ``module:name`` or ``file.py:name`` in a recipe.

The working folder joins Python's path only when something is imported, and as its last entry. So a command that only reads an
untrusted folder runs no module from it.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot.errors import SurefootError, cause_of, did_you_mean, place_of

SAFE_PATH, OURS = "PYTHONSAFEPATH", "while surefoot starts it"
"""the variable that keeps Python from putting the working folder first on its path, and the value that we set"""


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
    except Exception as error:
        advice = f"; {remedy}" if remedy else ""
        why = cause_of(error) + (f" in {where}" if (where := place_of(error)) else "")
        raise SurefootError(
            f"{field}={path!r}: can't be imported ({why}); it must name module:function or file.py:function{advice}"
        ) from None


def _member(imported: ModuleType, module: str, name: str) -> Any:
    if hasattr(imported, name):
        return getattr(imported, name)
    raise AttributeError(f"{module} has no {name!r}{did_you_mean(name, [each for each in dir(imported) if each[0] != '_'])}")


def append_working_folder() -> None:
    """Put the working folder last on Python's path."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


@contextmanager
def python_safe_path() -> Iterator[None]:
    """Let processes that start inside the context import their first modules from where they are installed.

    Otherwise they would search the working folder first. ``multiprocessing`` then gives them this process's path.
    """
    os.environ[SAFE_PATH] = os.environ.get(SAFE_PATH) or OURS
    try:
        yield
    finally:
        unset_python_safe_path()


def unset_python_safe_path() -> None:
    """Undo ``python_safe_path``. Processes that start inside it call this first, for the sake of their own children."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]


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
