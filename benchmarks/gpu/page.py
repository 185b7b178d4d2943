"""Write the table of speeds of docs/benchmarks/gpu.md from benchmarks/results/gpu.jsonl.

    python benchmarks/gpu/page.py

The results are those steps of several reports of ``one.py`` and ``several.py`` that passed, put together by hand without the
numbers that other steps on the same GPU disturb; ``alone`` marks those that had the machine to themselves, whose times count.
"""

import json
from pathlib import Path
from typing import Any

from surefoot.compare.statistics import markdown_table

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "benchmarks" / "gpu.md", ROOT / "benchmarks" / "results" / "gpu.jsonl"
SPEED = "speed of "


def speeds(report: dict[str, Any]) -> str:
    """The seconds of an update, measured and planned."""
    lines = []
    for step in report["steps"]:
        numbers = step["numbers"]
        if step["name"].startswith(SPEED):
            measured, planned = numbers["learning_seconds"], numbers["learning_planned"]
            tokens = f"{numbers['tokens_per_second_learning']:,.0f}"
            name = step["name"].removeprefix(SPEED)
            lines.append([name, f"{measured:.2f}", f"{planned:.2f}", f"{measured / planned:.1f}", tokens])
    return markdown_table(["run", "measured, s", "planned, s", "measured / planned", "tokens per second"], lines)


def main() -> None:
    """The command."""
    one = json.loads(RESULTS.read_text("utf-8").splitlines()[0])
    before, begin, rest = PAGE.read_text("utf-8").partition("<!-- begin: speeds -->\n")
    assert begin, f"{PAGE} has no place for the table"
    PAGE.write_text(f"{before}{begin}{speeds(one)}\n<!-- end -->{rest.partition('<!-- end -->')[2]}", "utf-8")


if __name__ == "__main__":
    main()
