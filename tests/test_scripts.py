"""Everything that benchmarks, examples and docs scripts import from Surefoot exists, also inside functions."""

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each import from Surefoot."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "surefoot":
            yield from ((node.lineno, str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_that_a_script_imports_exists(path: Path) -> None:
    for line, module, name in imported(path):
        found = importlib.import_module(module)
        exists = hasattr(found, name) or (hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None)
        assert exists, f"{path}:{line}: {module} has no {name}"
