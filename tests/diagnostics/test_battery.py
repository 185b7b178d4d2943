"""The battery of healthy runs and planted faults: a cell trains and is judged, and the page has the table of the results."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def battery() -> Iterator[Any]:
    sys.path.append(str(ROOT / "benchmarks"))
    import findings

    yield findings
    sys.path.remove(str(ROOT / "benchmarks"))


def test_a_planted_fault_is_trained_judged_and_caught(battery: Any, tmp_path: Path) -> None:
    cell = json.loads(json.dumps(battery.train("still", 1, tmp_path, steps=1_280)))
    run = battery.stored("still", 1, cell["columns"])
    judged = battery.judge(run)
    assert set(judged["alarms"]) & set(judged["faults"]), judged
    assert {"return_flat", "kl_runaway"} <= set(judged["tested"])
    assert not {"reward_hacked", "chosen_less_likely"} & set(judged["tested"]), "there is nothing to read"
    assert "1 of 1 (2% to 100%)" in battery.tables([judged])


def test_exact_intervals_are_those_of_clopper_and_pearson(battery: Any) -> None:
    for count, of, low, high in ((0, 10, 0, 0.3085), (10, 10, 0.6915, 1), (1, 20, 0.00127, 0.2487), (5, 10, 0.1871, 0.8129)):
        assert battery.exact_interval(count, of) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_every_case_is_a_valid_recipe_and_names_checks(battery: Any) -> None:
    names = {check.__name__ for check in battery.RUN_CHECKS}
    for name, case in battery.CASES.items():
        assert set(case.faults) <= names, name
        case.made(1, Path("start"))


def test_the_page_has_the_table_of_the_results_and_few_healthy_runs_have_a_serious_finding(battery: Any) -> None:
    judged = json.loads(battery.JUDGED.read_text("utf-8"))["runs"]
    page = battery.PAGE.read_text("utf-8")
    assert battery.with_table(page, battery.tables(judged)) == page, "run: python benchmarks/findings.py page"
    healthy = [run for run in judged if run["held_out"] and not run["faults"]]
    serious = [run for run in healthy if "serious" in run["alarms"].values()]
    assert len(serious) <= 0.05 * len(healthy), serious
