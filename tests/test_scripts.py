"""Everything that benchmarks, examples and docs scripts import from Surefoot exists, also inside functions."""

import ast
import importlib
import json
import subprocess
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


def test_every_name_that_a_script_imports_exists() -> None:
    for path in SCRIPTS:
        for line, module, name in imported(path):
            found = importlib.import_module(module)
            exists = hasattr(found, name) or (hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None)
            assert exists, f"{path}:{line}: {module} has no {name}"


@pytest.mark.parametrize(("seconds", "code"), [(1300.0, 0), (1301.0, 1)])
def test_ci_names_its_dearest_tests_and_longest_waits_and_fails_above_2600_seconds(
    seconds: float, code: int, tmp_path: Path
) -> None:
    rows = [["a", 900.0, 900.0], ["a", 1250.0, 1200.0], ["b", seconds, 1300.0], ["c", 10.0, 300.0], ["", 40.0, 0.0]]
    (tmp_path / "costs").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run([ROOT / ".ci" / "costs", tmp_path / "costs"], capture_output=True, text=True, check=False)
    assert done.returncode == code
    names = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith(" ")]
    assert names == ["b", "a", "c", "c", "b", "a"]
