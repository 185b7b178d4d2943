"""Things of the user's own, named as ``module:name`` or ``file.py:name`` in a recipe.

The working folder is on Python's path only once something is imported from there, and last: a folder of a stranger's, in which
a command merely reads, gives Python no module.
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

from surefoot.errors import SurefootError, cause_of, place_of


def import_object(field: str, path: str, remedy: str = "") -> Any:
    """What ``module:name`` or ``file.py:name`` stands for, imported as Python does; nothing is evaluated.

    A module is also found in the working folder, after all that is installed. A file is found from there, and read anew on
    every call; the modules beside it are not put on the path.
    Raises SurefootError, naming the recipe's field, when there is no such thing.
    """
    module, _, name = path.rpartition(":")
    try:
        if not (module and name):
            raise ValueError("it is not two names with a colon between them")
        if module.endswith(".py"):
            return getattr(_from_file(Path(module)), name)
        append_working_folder()
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        advice = f"; {remedy}" if remedy else ""
        why = cause_of(error) + (f" in {where}" if (where := place_of(error)) else "")
        raise SurefootError(
            f"{field}={path!r}: can't be imported ({why}); it must name module:function or file.py:function{advice}"
        ) from None


def append_working_folder() -> None:
    """Have modules found in the working folder too, from now on."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


SAFE, OURS = "PYTHONSAFEPATH", "while surefoot starts it"
"""the variable that keeps Python from putting its working folder first on its path, and the value that we give it"""


@contextmanager
def python_safe_path() -> Iterator[None]:
    """Processes that are started meanwhile import what they need to begin from where it is installed, and not from the
    working folder. ``multiprocessing`` then gives them this process's path.
    """
    os.environ[SAFE] = os.environ.get(SAFE) or OURS
    try:
        yield
    finally:
        unset_python_safe_path()


def unset_python_safe_path() -> None:
    """In a process that was started like that: what it starts itself is as it would be without us."""
    if os.environ.get(SAFE) == OURS:
        del os.environ[SAFE]


def _from_file(path: Path) -> ModuleType:
    """The module of a file; it takes its place among Python's modules, where dataclasses look for their own."""
    found = path.expanduser().resolve()
    if not found.is_file():
        raise FileNotFoundError(f"there is no file {found}")
    name = f"_surefoot_{found.stem}"
    specification = importlib.util.spec_from_file_location(name, found)
    assert specification is not None, "the suffix .py has a loader"
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module
