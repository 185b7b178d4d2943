"""The ledger: verdicts follow from intervals alone, cells resume, and the page matches the results."""

import re
import runpy
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = st.floats(-10, 10, allow_nan=False)


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The folder of the scripts is on the path, as when one of them is run."""
    sys.path.append(str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def ledger() -> Any:
    import ledger

    return ledger


def bound(low: float, middle: float, high: float, limit: float, above: bool = True) -> Any:
    from claims import Bound

    low, middle, high = sorted((low, middle, high))
    return Bound("x", middle, low, high, limit, above)


def test_the_page_matches_the_results(ledger: Any) -> None:
    text = (ROOT / "docs" / "ledger.md").read_text("utf-8")
    between = text.partition(ledger.BEGIN)[2].partition(ledger.END)[0].strip()
    assert between == ledger.page().strip(), "run: python benchmarks/ledger.py table"


@settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.booleans()), max_size=4))
def test_a_claim_is_confirmed_only_if_every_interval_supports_it(parts: list[tuple[float, float, float, float, bool]]) -> None:
    from claims import verdict_of

    bounds = [bound(*part) for part in parts]
    inside = [b.low > b.limit if b.above else b.high < b.limit for b in bounds]
    outside = [b.high < b.limit if b.above else b.low > b.limit for b in bounds]
    expected = "refuted" if any(outside) else "confirmed" if bounds and all(inside) else "undecided"
    assert verdict_of(bounds) == expected


def test_one_run_has_no_interval_and_decides_nothing() -> None:
    from claims import single, verdict_of

    assert verdict_of([single("x", [1.0])]) == "undecided"
    assert single("x", [1.0]).number == "x: 1.00 (1 run)"
    assert single("x", [1.0, 1.0]).number == "x: 1.00 (1.00 to 1.00)"
    assert verdict_of([single("x", [1.0, 1.0])]) == "confirmed"


def test_missing_cells_decide_nothing_whatever_the_finished_ones_show(ledger: Any) -> None:
    from claims import decided

    experiment = ledger.EXPERIMENTS["E13"]
    claim = replace(experiment.claims[0], bounds=lambda results: [bound(1, 2, 3, 0)])
    needed = [name for name in experiment.cells if claim.needs(name)]
    some = {name: {} for name in needed[1:]}
    assert decided(claim, experiment, some).text == f"undecided, {len(needed) - 1} of {len(needed)} cells"
    assert decided(claim, experiment, some | {needed[0]: {}}).text == "confirmed"
    assert decided(claim, experiment, {}).bounds == ()


def test_every_claim_has_a_source_a_rule_a_protocol_and_cells(ledger: Any) -> None:
    keys = [claim.key for experiment in ledger.EXPERIMENTS.values() for claim in experiment.claims]
    assert len(set(keys)) == len(keys)
    assert [experiment.key for experiment in ledger.EXPERIMENTS.values()] == [f"E{number}" for number in range(1, 15)]
    for experiment in ledger.EXPERIMENTS.values():
        assert experiment.protocol
        assert experiment.core_hours > 0
        for claim in experiment.claims:
            assert claim.source
            assert claim.rule
            assert any(map(claim.needs, experiment.cells)), claim.key


def test_every_result_belongs_to_a_cell_and_has_the_code_and_hardware_that_made_it(ledger: Any) -> None:
    from claims import LEDGER
    from record import read

    files = {cell.file for experiment in ledger.EXPERIMENTS.values() for cell in experiment.cells.values()}
    for experiment in LEDGER.glob("*.jsonl"):
        for name, result in read(experiment.with_suffix("")).items():
            assert experiment.with_suffix("") / name in files
            made = result["made_with"]
            assert made["threads"] == 1
            assert made["source"], name
            assert made["cpu"]


def test_results_written_at_once_are_all_kept_and_a_second_one_replaces_the_first(tmp_path: Path) -> None:
    from record import read, write

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: write(tmp_path / "E" / f"cell-{n % 20}", {"value": n}), range(40)))
    kept = read(tmp_path / "E")
    assert sorted(kept) == list(kept)
    assert {name: kept[name]["value"] % 20 for name in kept} == {f"cell-{n}": n for n in range(20)}
    assert [path.name for path in tmp_path.iterdir()] == ["E.jsonl"]


def test_recipes_of_cells_that_were_never_run_can_be_made(tmp_path: Path) -> None:
    from claims import ablation, ladder, reviews, training

    from surefoot.compare.ladder import rung_recipe

    for preset, changes in reviews.METHODS.values():
        assert reviews.recipe_of(tmp_path, 1, preset, changes).seed == 1
    for place in reviews.PLACES:
        recipe = reviews.recipe_of(tmp_path, 1, "reviews", reviews.kl_changes(place, 0.3))
        assert (recipe.reference.beta, recipe.objective.reference_coefficient) == (
            (0.3, 0.0) if place == "reward" else (0.0, 0.3)
        )
    for algorithm, region in ablation.REGIONS.values():
        changes = {"objective": {"trust_region": region}} if region else {}
        assert training.recipe_of("Hopper-v5", algorithm, 1, changes).objective.reuse.minibatches == 32
    for task in ladder.TASKS.values():
        assert rung_recipe(task, 5, {"engine": "compiled"}).engine == "compiled"


@pytest.mark.parametrize("key", ["E8", "E9", "E10", "E11", "E12"])
def test_the_recipes_of_cells_that_train_control_runs_are_valid(
    ledger: Any, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only training is replaced; of seeds that differ in nothing else, the first one is enough."""
    from claims import training, tuning

    made = []

    def kept(folder: Path, cell: Any, *others: Any) -> dict[str, Any]:
        made.append(cell.recipe)
        return {"label": cell.label, "curves": {}, "last_100_mean": 0.0}

    monkeypatch.setattr(training.cells, "train_cell", kept)
    monkeypatch.setattr(tuning, "best_rate", lambda tried, score: max(tried))
    own = [cell for cell in ledger.EXPERIMENTS[key].cells.values() if cell.file.parent.name == key and cell.name.endswith("-1")]
    for cell in own:
        if not any(word in cell.name for word in ("random", "sorting", "cost")):
            (tmp_path / cell.name).mkdir()
            assert cell.work(tmp_path / cell.name)["task"] == made[-1].task
    assert made


@pytest.fixture
def one(ledger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An experiment with one cell that counts how often it works."""
    from claims import Cell, Experiment

    calls: list[Path] = []

    def work(folder: Path) -> dict[str, Any]:
        calls.append(folder)
        return {"value": len(calls)}

    monkeypatch.setattr(ledger, "RUNS", tmp_path / "runs")
    cell = Cell("a", work, tmp_path / "results" / "a")
    return Experiment("E0", "", "", {"a": cell}, (), 1.0), calls


def test_a_finished_cell_is_skipped(ledger: Any, one: Any, tmp_path: Path) -> None:
    experiment, calls = one
    for _ in range(2):
        assert ledger.run_cells(experiment, [], tmp_path / "runs") == 0
    assert calls == [tmp_path / "runs" / "results" / "a"]
    assert experiment.results()["a"]["value"] == 1
    assert experiment.results()["a"]["made_with"]["threads"] == 1


def test_the_cpu_time_of_a_cell_has_its_stopped_attempts(
    ledger: Any, one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, calls = one
    clock = iter([0.0, 5.0, 100.0, 102.0])  # before and after each attempt
    monkeypatch.setattr(ledger, "cpu_seconds", lambda: next(clock))

    def stops_once(folder: Path) -> dict[str, Any]:
        calls.append(folder)
        if len(calls) == 1:
            raise RuntimeError("stopped")
        return {}

    twice = replace(experiment, cells={"a": replace(experiment.cells["a"], work=stops_once)})
    assert ledger.run_cells(twice, [], tmp_path / "runs") == 1
    assert ledger.run_cells(twice, [], tmp_path / "runs") == 0
    assert twice.results()["a"]["cpu_seconds"] == 7.0


def test_repeating_a_claim_keeps_its_results_and_shows_both(
    ledger: Any, one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from claims import Claim, exact

    experiment, calls = one
    claim = Claim("E0.1", "", "", "", lambda results: [exact("x", results["a"]["value"], 1.5)])
    monkeypatch.setattr(ledger, "CLAIMS", {"E0.1": (experiment, claim)})
    ledger.run_cells(experiment, [], tmp_path / "runs")
    for _ in range(2):  # the second finds what the first made
        assert ledger.repeat("E0.1", jobs=1) == 0
    assert len(calls) == 2
    assert calls[0].parents[1] != calls[1].parents[1], "nothing that cells share is shared with the ledger's"
    assert experiment.results()["a"]["value"] == 1
    shown = capsys.readouterr().out
    assert "E0.1 ledger: refuted; x: 1.00, claimed > 1.5" in shown
    assert "E0.1 again:  confirmed; x: 2.00, claimed > 1.5" in shown


def test_a_cell_of_another_process_is_skipped(ledger: Any, one: Any, tmp_path: Path) -> None:
    experiment, calls = one
    folder = tmp_path / "results" / "a"  # named after the file, which another experiment may share
    folder.mkdir(parents=True)
    with filelock.FileLock(folder / ".cell.lock"):
        assert ledger.run_cells(experiment, [], tmp_path) == 0
    assert not calls


@pytest.mark.timeout(60)
def test_a_cell_runs_after_those_that_it_reads_and_waits_for_one_that_another_process_works_on(
    ledger: Any, one: Any, tmp_path: Path
) -> None:
    experiment, _ = one
    order: list[str] = []
    lock = filelock.FileLock(tmp_path / "runs" / "results" / "slow" / ".cell.lock", thread_local=False)

    def named(name: str, first: tuple[Any, ...] = ()) -> Any:
        def work(folder: Path) -> dict[str, Any]:
            order.append(name)
            if name == "quick":
                lock.release()  # the other process stops when "quick" has run, so "quick" did not wait for it
            return {}

        return replace(experiment.cells["a"], name=name, work=work, file=tmp_path / "results" / name, first=first)

    first = named("slow"), named("quick")
    last = replace(experiment, cells={"last": named("last", first), "other": named("other", first)})
    Path(lock.lock_file).parent.mkdir(parents=True)
    lock.acquire()
    assert ledger.run_cells(last, [], tmp_path / "runs") == 0
    assert order == ["quick", "slow", "last", "other"]


def test_the_rate_of_a_tuned_cell_has_the_highest_mean_over_the_cells_that_try_it(one: Any, tmp_path: Path) -> None:
    from claims import Cell, tuning
    from record import write

    experiment, _ = one

    def trial(rate: float, seed: int, value: float) -> Cell:
        write(file := tmp_path / "tried" / f"{rate:g}-{seed}", {"value": value})
        return replace(experiment.cells["a"], name=file.name, file=file)

    scores = {1e-3: (5.0, 0.0), 2e-3: (3.0, 3.0), 4e-3: (4.0, 1.5)}
    tried = {rate: [trial(rate, seed, value) for seed, value in enumerate(values)] for rate, values in scores.items()}

    def run(rate: float) -> Cell:
        return replace(experiment.cells["a"], work=lambda folder: {"trained_with": rate})

    cell = tuning.tuned(run, tried, lambda result: float(result["value"]))
    assert cell.work(tmp_path) == {"learning_rate": 2e-3, "trained_with": 2e-3}
    assert [each.name for each in cell.first] == ["0.001-0", "0.001-1", "0.002-0", "0.002-1", "0.004-0", "0.004-1"]
    assert (cell.name, cell.file) == ("a", experiment.cells["a"].file)


def test_each_finished_cell_has_the_rate_that_its_tuning_gives() -> None:
    from claims import algorithms, reviews, tuning
    from record import finished

    def rate_of(cell: Any) -> float:
        return float(finished(cell.file)["learning_rate"])

    edges = set()
    for task in algorithms.FOUR:
        best = tuning.best_rate(algorithms.tried_rates(task), algorithms.last_return)
        assert {rate_of(algorithms.a2c_cell(task, seed)) for seed in algorithms.SEEDS} == {best}
        edges |= {task} if best == max(algorithms.A2C_RATES) else set()
    assert edges == {task for task in algorithms.FOUR if task.partition("-")[0] in algorithms.A2C_LOSES}
    for method in reviews.METHODS:
        best = tuning.best_rate(reviews.tried_rates(method), reviews.proxy)
        assert {rate_of(reviews.method_cell(method, seed)) for seed in reviews.SEEDS} == {best}


def test_a_cell_that_fails_leaves_no_result_and_stops_no_other(
    ledger: Any, one: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from claims import Cell
    from record import finished

    experiment, calls = one

    def fails(folder: Path) -> dict[str, Any]:
        raise ValueError("no peer")

    bad = Cell("bad", fails, experiment.cells["a"].file.with_name("bad"))
    both = replace(experiment, cells={"bad": bad, **experiment.cells})
    assert ledger.run_cells(both, [], tmp_path) == 1
    assert "E0 bad: failed: ValueError: no peer" in capsys.readouterr().err
    assert not finished(bad.file)
    assert len(calls) == 1


def test_the_page_of_the_language_demo_has_its_tables() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "language.py"))
    page = script["PAGE"].read_text("utf-8")
    assert script["with_part"](page, script["tables"]()) == page, "run benchmarks/language.py table"


def test_the_paper_s_own_scores_rank_as_in_the_paper_and_reversed_ones_do_not() -> None:
    from claims.ablation import ABLATION_SEEDS, PAPER, SEVEN, beside_paper, paper_order

    def results(sign: float) -> dict[str, Any]:
        cells = {f"{task}-random-1": {"last_100_mean": -10.0} for task in SEVEN}
        for task in SEVEN:
            for region, score in PAPER.items():
                cells |= {f"{task}-{region}-{seed}": {"last_100_mean": sign * score} for seed in ABLATION_SEEDS}
        return cells

    assert paper_order(results(1.0))[0].value == pytest.approx(1.0)
    assert paper_order(results(-1.0))[0].fails
    table, chance = beside_paper(results(1.0))
    assert [line.split()[-2] for line in table.splitlines()[2:4]] == ["1", "2"]
    assert chance.endswith("Without `none` the correlation is 1.00.")
    assert re.search(r"above 0\.5[0-4] once in twenty times", chance)  # one-sided 5 % for eleven ranks: 0.52 to 0.54
    assert beside_paper(dict(list(results(1.0).items())[:-1])) == []


def test_runs_that_two_experiments_share_have_the_settings_of_both() -> None:
    from claims import ablation, peers, sweeps, training

    for region in ablation.PRESET_REGIONS:
        algorithm, settings = ablation.REGIONS[region]
        plain = training.recipe_of("Swimmer-v5", algorithm, 1, training.MUJOCO, preset="mujoco")
        changed = {**training.MUJOCO, "objective": {"trust_region": settings}}
        assert plain == training.recipe_of("Swimmer-v5", algorithm, 1, changed, preset="mujoco")
        cell = ablation.ablation_cell("Swimmer-v5", region, 1)
        assert cell.file == peers.mujoco_file("surefoot", "Swimmer-v5", algorithm, 1)
    for region, clip in ablation.EPSILONS.items():
        objective = {"trust_region": {"clip": clip}, "reuse": {"epochs": 10}}
        grid = training.recipe_of("HalfCheetah-v5", "PPO_CLIP", 1, {**training.MUJOCO, "objective": objective})
        paper = {**training.MUJOCO, "objective": {"trust_region": {"clip": clip}}}
        assert grid == training.recipe_of("HalfCheetah-v5", "PPO_CLIP", 1, paper, preset="mujoco")
        cell = ablation.ablation_cell("HalfCheetah-v5", region, 1)
        assert cell.file == sweeps.grid_cell("HalfCheetah", clip, 10, 1).file
    assert sweeps.grid_cell("HalfCheetah", 0.2, 10, 1).file == peers.mujoco_file("surefoot", "HalfCheetah-v5", "PPO_CLIP", 1)


def test_cells_that_cannot_run_are_one_line_and_exit_code_2(ledger: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for work in (
        lambda: ledger.repeat("E12.2", jobs=1),
        lambda: ledger.run_cells(ledger.EXPERIMENTS["E4"], ["x"], ledger.RUNS),
    ):
        with pytest.raises(SystemExit, match="2"):
            work()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("E12.2: can't be repeated here: 49 games")
    assert second.startswith("--only x: E4 has no such cell; its cells are ")
