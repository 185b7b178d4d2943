"""The ratchet: source, tests and docs stay below docs/size.toml, which is lowered as they shrink."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_source_tests_and_docs_are_not_larger_than_allowed() -> None:
    made = subprocess.run([sys.executable, ROOT / ".ci" / "size"], capture_output=True, text=True)
    assert made.returncode == 0, f"{made.stdout}{made.stderr}make something smaller, or say in docs/size.toml which issue pays"
