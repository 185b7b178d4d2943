"""Write the tables of docs/benchmarks/gpu.md from benchmarks/results/gpu.jsonl.

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
RESUMED = "tensors equal after resuming"
SPEED = "speed of "


def checks(report: dict[str, Any]) -> str:
    """What each step checked: exact resumption, its first and last loss, or the losses of two runs."""
    lines = []
    for step in report["steps"]:
        numbers = step["numbers"]
        if not step["name"].startswith(SPEED):
            resumed = f"all {numbers[RESUMED]} tensors" if RESUMED in numbers else ""
            lines.append([step["name"], resumed, _losses(numbers)])
    return markdown_table(["step", "equal after resuming", "loss"], lines)


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


def _losses(numbers: dict[str, Any]) -> str:
    if "loss" in numbers:
        return f"{numbers['loss'][0]:.4g} … {numbers['loss'][-1]:.4g}"
    pairs = [value for name, value in numbers.items() if name.startswith("loss ")]
    return "; ".join(f"{ours:.6g} and {theirs:.6g}" for ours, theirs in pairs[:2])


def main() -> None:
    """The command."""
    one, two = (json.loads(line) for line in RESULTS.read_text("utf-8").splitlines())
    text = PAGE.read_text("utf-8")
    for name, table in (("speeds", speeds(one)), ("checks", checks(one)), ("two ranks", checks(two))):
        before, begin, rest = text.partition(f"<!-- begin: {name} -->\n")
        assert begin, f"{PAGE} has no place for {name}"
        text = f"{before}{begin}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
