"""TOML as tables and values, for those who need no recipe: nothing here imports what a recipe is made of."""

import tomllib
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises SurefootError when it is missing, a folder, or not TOML (with the line).
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:  # of TOML, of UTF-8, or of a number with thousands of digits
        raise SurefootError(f"{path}: not TOML ({error})") from None
    except OSError as error:
        raise SurefootError(f"{path}: can't be read ({error.strerror}); check the path") from None


def parse_value(text: str) -> Any:
    """A flag's text as TOML would read it (0.9, true, [64, 64]); a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # no TOML, or a number with thousands of digits
        return text
