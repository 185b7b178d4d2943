"""Things of the user's own, named as ``module:name`` or ``file.py:name`` in a recipe."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot.errors import SurefootError, cause_of, place_of


def imported(field: str, path: str, remedy: str = "") -> Any:
    """What ``module:name`` or ``file.py:name`` stands for, imported as Python does; nothing is evaluated.

    A file is found from the working directory and read anew on every call; the modules beside it are not put on the path.
    Raises SurefootError, naming the recipe's field, when there is no such thing.
    """
    module, _, name = path.rpartition(":")
    try:
        if not (module and name):
            raise ValueError("it is not two names with a colon between them")
        return getattr(_from_file(Path(module)) if module.endswith(".py") else importlib.import_module(module), name)
    except Exception as error:
        advice = f"; {remedy}" if remedy else ""
        why = cause_of(error) + (f" in {where}" if (where := place_of(error)) else "")
        raise SurefootError(
            f"{field}={path!r}: can't be imported ({why}); it must name module:function or file.py:function{advice}"
        ) from None


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
