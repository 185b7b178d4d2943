"""Things of the user's own, named as ``module:name`` in a recipe."""

import importlib
from typing import Any

from surefoot.errors import SurefootError


def imported(field: str, path: str, remedy: str = "") -> Any:
    """What ``module:name`` stands for, imported as Python does; nothing is evaluated.

    Raises SurefootError, naming the recipe's field, when there is no such thing.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        advice = f"; {remedy}" if remedy else ""
        raise SurefootError(
            f"{field}={path!r}: can't be imported ({type(error).__name__}: {error}); it must name module:function{advice}"
        ) from None
