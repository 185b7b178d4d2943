"""TOML as tables and values, for those who need no recipe: nothing here imports what a recipe is made of."""

import tomllib
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.files import parsed, read_text


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises SurefootError when it is missing, a folder, or not TOML (with the line).
    """
    text = read_text(path)
    try:
        found: dict[str, Any] = parsed(text, tomllib.loads)
    except ValueError as error:
        raise SurefootError(f"{path}: not TOML ({error})") from None
    return found


def parse_value(text: str) -> Any:
    """A flag's text as TOML would read it (0.9, true, [64, 64]); a bare word is a string."""
    try:
        return parsed(f"value = {text}", tomllib.loads)["value"]
    except ValueError:
        return text
