"""``surefoot new``: a folder with a recipe, an environment or a reward, and a test, which pass as they are."""

import json
import re
from importlib import resources
from pathlib import Path

from surefoot.errors import SurefootError

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_scaffold(folder: Path, *, language: bool = False) -> list[Path]:
    """Write a task's first files into a new folder; their paths.

    Raises SurefootError when the folder holds something already, or its name can't be one.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", folder.name):
        raise SurefootError(f"name={folder.name!r}: must begin with a letter or digit and hold letters, digits, - and _ alone")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SurefootError(f"{folder}: is there already and not empty; choose another name")
    written = {
        file.name.removesuffix(".template"): file.read_text("utf-8")
        for file in (resources.files(__package__) / ("language" if language else "control")).iterdir()
    }
    if language:
        rows = [{"prompt": f"{letter}: ", "letter": letter} for letter in LETTERS]
        held_out = rows[4::6]
        written["prompts.jsonl"] = _lines([row for row in rows if row not in held_out])
        written["held_out.jsonl"] = _lines(held_out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise SurefootError(f"{folder}: can't be written ({error.strerror}); choose another place") from None
    return [folder / name for name in sorted(written)]


def _lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
