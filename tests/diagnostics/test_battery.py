"""The battery of healthy runs and planted faults: a cell trains and is judged, and the page has the table of the results."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.diagnostics.findings import RUN_CHECKS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def battery() -> Iterator[Any]:
    sys.path.append(str(ROOT / "benchmarks"))
    import findings

    yield findings
    sys.path.remove(str(ROOT / "benchmarks"))


def test_a_planted_fault_is_trained_judged_and_caught(battery: Any, tmp_path: Path) -> None:
    line = json.loads(json.dumps(battery.train("still", 1, tmp_path, steps=2_560)))
    line["alarms"] = battery.judge(battery.trained_run(line))
    assert set(line["alarms"]) & set(battery.faults(line)), line
    assert battery.can_appear("kl_runaway", line)
    assert not battery.can_appear("reward_hacked", line), "there is nothing to read"
    assert "1/1 (2%–100%)" in battery.tables([line])


def test_exact_intervals_are_those_of_clopper_and_pearson(battery: Any) -> None:
    for count, of, low, high in ((0, 10, 0, 0.3085), (10, 10, 0.6915, 1), (1, 20, 0.00127, 0.2487), (5, 10, 0.1871, 0.8129)):
        assert battery.exact_interval(count, of) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_every_case_is_a_valid_recipe_and_every_finding_of_a_run_has_a_case(battery: Any) -> None:
    names = {check.__name__ for check in RUN_CHECKS} | {"few_groups_with_signal"}
    assert names == set(battery.READS) == {case.faults[0] for case in battery.CASES.values() if case.faults}
    for name, case in battery.CASES.items():
        assert set(case.faults) <= names, name
        case.made(1, Path("start"))


def test_the_page_has_the_table_of_all_cells_and_few_healthy_runs_have_a_serious_finding(battery: Any) -> None:
    lines = battery.read_results()
    trained = {(line["name"], line["seed"]) for line in lines if "columns" in line}
    assert trained == {(name, seed) for name, case in battery.CASES.items() for seed in case.seeds}
    page = battery.PAGE.read_text("utf-8")
    assert battery.with_table(page, battery.tables(lines)) == page, "run: python benchmarks/findings.py page"
    healthy = [line for line in lines if battery.held_out(line) and not battery.faults(line)]
    serious = [line["name"] for line in healthy if "serious" in line["alarms"].values()]
    assert len(serious) <= 0.05 * len(healthy), serious
