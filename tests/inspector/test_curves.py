"""Columns follow a file that grows or is truncated; downsampled curves keep all extremes."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.inspector import curves
from surefoot.inspector.curves import AT_A_TIME, Columns, curve, grid_of, numbers, running_mean
from surefoot.store.reading import History, rows_together


def write(path: Path, rows: list[dict[str, Any]], mode: str = "a") -> None:
    with path.open(mode) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"iteration": i, "steps": 10 * i, "kl": 1.0 / i, "score": None if i % 3 else float(i)} for i in range(start, stop)]


@pytest.fixture
def columns(tmp_path: Path) -> Columns:
    write(tmp_path / "metrics.jsonl", rows(1, 8))
    return Columns(tmp_path / "metrics.jsonl")


def test_later_lines_are_appended_and_new_metrics_are_nan_before(columns: Columns) -> None:
    assert columns.read_on() == 7
    write(columns.path, [{**row, "late": 2.0} for row in rows(8, 10)])
    assert columns.read_on() == 9
    assert columns.columns["steps"].tolist() == [10.0 * i for i in range(1, 10)]
    assert np.isnan(columns.columns["late"][:7]).all()
    assert columns.columns["late"][7:].tolist() == [2.0, 2.0]
    assert set(columns.names()) == {"iteration", "steps", "kl", "score", "late"}


def test_columns_stay_of_one_length_whatever_a_line_holds(columns: Columns) -> None:
    columns.read_on()
    drawn = columns.columns
    write(columns.path, [{**row, "kl": None} for row in rows(8, 10)])
    write(columns.path, [{**row, "kl": "no number"} for row in rows(10, 12)])
    columns.read_on()
    write(columns.path, rows(12, 14))
    assert columns.read_on() == 11
    assert {len(column) for column in columns.columns.values()} == {11}
    assert np.isnan(columns.columns["kl"][7:9]).all()
    assert columns.columns["kl"][9:].tolist() == [1 / 12, 1 / 13]
    assert {len(column) for column in drawn.values()} == {7}, "what is being drawn does not grow"


def test_rows_with_other_keys_and_in_another_order_keep_their_own_numbers(tmp_path: Path) -> None:
    """Whatever the keys and however many rows are read at a time."""
    draw = random.Random(1)
    written = []
    for i in range(20_000):
        chosen = draw.sample(["kl", "entropy", "reward", "gold"], draw.choice([2, 2, 2, 4]))
        written.append({"iteration": i, "steps": i} | {name: draw.choice([None, float(i), -1.0]) for name in chosen})
    write(tmp_path / "metrics.jsonl", written)
    assert (tmp_path / "metrics.jsonl").stat().st_size > AT_A_TIME // 2
    for at_a_time in (AT_A_TIME, 5_000, 10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(curves, "AT_A_TIME", at_a_time)
            columns = Columns(tmp_path / "metrics.jsonl")
            assert columns.read_on() == len(written)
        for name in ("steps", "kl", "entropy", "reward", "gold"):
            wanted = [math.nan if row.get(name) is None else row[name] for row in written]
            np.testing.assert_array_equal(columns.columns[name], wanted)


def test_a_line_is_read_once_it_is_complete(columns: Columns) -> None:
    with columns.path.open("a") as file:
        file.write('{"iteration": 8, "steps":')
    assert columns.read_on() == 7
    with columns.path.open("a") as file:
        file.write(' 80, "kl": 0.5}\n')
    assert columns.read_on() == 8
    assert columns.columns["kl"][-1] == 0.5


def test_a_line_out_of_order_is_skipped(columns: Columns) -> None:
    write(columns.path, [{"iteration": 8, "steps": 2**40, "kl": 1.0}])
    assert columns.read_on() == 8
    write(columns.path, rows(9, 11))
    assert columns.read_on() == 9
    assert columns.columns["steps"].tolist() == [10.0 * i for i in (1, 2, 3, 4, 5, 6, 7, 9, 10)]


def line(i: int, end: str = "}") -> bytes:
    return f'{{"iteration": {i}, "steps": {10 * i}, "kl": {1 / i!r}{end}'.encode()


DAMAGE = st.sampled_from(
    [
        b"",
        b"{}",
        b"null",
        b"[1, 2]",
        b"\xff\xfe",
        line(7) + b", " + line(8),
        line(5, ', "x": "no number"}'),
        line(5, ', "x": {"y": 1}}'),
        line(5, ', "x": [1]}'),
        line(5, ', "x": [{}'),
        b"{}]}",
        line(6, ', "x'),
        b'y": 3}',
        line(5, ', "x": ' + "9" * 400 + "}"),
        b'{"iteration": 5.0, "steps": 50}',
        b'{"iteration": true, "steps": 50}',
        b'{"iteration": 5, "steps": "50"}',
        b'{"iteration": 5, "steps": true}',
        b'{"iteration": -5, "steps": 50}',
        b'{"iteration": 5, "steps": 1e30}',
        b'{"iteration": 5, "steps": 9007199254740993}',
    ]
)
SOUND = st.builds(
    lambda i, end: line(i, end),
    st.integers(1, 30),
    st.sampled_from(["}", ', "x": null}', ', "x": NaN}', ', "x": 12345678901234567890}', ', "x": -0.0}', ', "x": true}\r']),
)


@given(st.lists(st.one_of(SOUND, DAMAGE), max_size=12), st.lists(SOUND, max_size=30))
def test_whatever_the_lines_hold_the_rows_and_the_damage_are_those_of_check(
    tmp_path_factory: pytest.TempPathFactory, damaged: list[bytes], sound: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in [*sound, *damaged]))
    columns, history = Columns(path), History(path.read_bytes())
    assert columns.read_on() == len(history.rows)
    for name, column in columns.columns.items():
        expected = np.array([row.get(name) for row in history.rows], dtype=np.float64)
        assert np.array_equal(column, expected, equal_nan=True)
        assert np.array_equal(np.signbit(column), np.signbit(expected))
    assert (columns.fault or "") == ((history.fault or "").split(" and ")[0] if history.damaged else "")


def test_an_object_over_several_lines_is_not_a_row() -> None:
    """As many objects as lines, but other ones."""
    split = line(7) + b"," + line(8) + b"\n" + b'{"iteration": 9' + b"\n" + b' "steps": 90}' + b"\n"
    with pytest.raises(ValueError, match="one object per line"):
        rows_together(split, 3)


def test_damaged_lines_are_counted_over_several_reads(columns: Columns) -> None:
    columns.read_on()
    assert columns.fault is None
    with columns.path.open("a") as file:
        file.write("damaged\n")
    columns.read_on()
    assert columns.fault == "has 8 lines, of which line 8 can't be read"
    write(columns.path, [*rows(8, 9), *rows(3, 4), *rows(9, 10)])
    assert columns.read_on() == 9
    assert columns.fault == "has 11 lines, of which 2 lines, the first of them line 8, can't be read"
    write(columns.path.with_name("other"), rows(1, 4), "w")
    columns.path.with_name("other").replace(columns.path)
    columns.read_on()
    assert columns.fault is None, "resuming has removed them"


def test_a_file_that_a_resumed_run_truncated_is_read_again(columns: Columns, tmp_path: Path) -> None:
    assert columns.read_on() == 7
    write(tmp_path / "other", rows(1, 4), "w")
    (tmp_path / "other").replace(columns.path)
    assert columns.read_on() == 3
    columns.path.unlink()
    assert columns.read_on() == 0


def test_few_iterations_are_not_averaged(columns: Columns) -> None:
    columns.read_on()
    grid = grid_of([columns], -np.inf, np.inf, 100)
    result = curve(columns, "score", grid, 1)
    assert grid.tolist() == [10.0 * i for i in range(1, 8)]
    assert numbers(result.high) == numbers(result.low) == numbers(result.smooth) == [None, None, 3.0, None, None, 6.0, None]
    assert numbers(curve(columns, "nothing", grid, 1).high) == [None] * 7


def test_no_spike_of_many_iterations_is_lost(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(size=5_000)
    values[generator.integers(0, 5_000, 40)] = np.nan
    values[3_333] = 99.0
    path = tmp_path / "metrics.jsonl"
    write(path, [{"iteration": i, "steps": i, "x": None if np.isnan(v) else v} for i, v in enumerate(values.tolist())])
    run = Columns(path)
    run.read_on()
    grid = grid_of([run], 1_000.0, 4_500.0, 100)
    result = curve(run, "x", grid, 50)
    assert len(grid) == 100
    assert (grid[0], grid[-1]) == (1_000.0, 4_500.0)
    assert result.high.max() == 99.0
    for before, at, low, high, smooth in zip(grid, grid[1:], result.low[1:], result.high[1:], result.smooth[1:], strict=False):
        span = values[int(before) + 1 : int(at) + 1]
        assert (low, high) == (np.nanmin(span), np.nanmax(span))
        assert smooth == pytest.approx(np.nanmean(values[int(at) - 49 : int(at) + 1]))


def test_runs_of_different_lengths_share_a_grid(tmp_path: Path) -> None:
    runs = []
    for name, every in (("a", 7), ("b", 11)):
        write(tmp_path / name, [{"iteration": i, "steps": every * i, "x": float(i)} for i in range(1, 20)])
        runs.append(Columns(tmp_path / name))
        runs[-1].read_on()
    grid = grid_of(runs, -np.inf, np.inf, 1000)
    assert set(grid.tolist()) == {7.0 * i for i in range(1, 20)} | {11.0 * i for i in range(1, 20)}
    highs = dict(zip(grid.tolist(), curve(runs[0], "x", grid, 1).high.tolist(), strict=True))
    assert highs[7.0 * 12] == 12.0
    assert np.isnan(highs[11.0])


def test_a_running_mean_has_a_window_and_skips_missing_values() -> None:
    x = np.array([1.0, 3.0, np.nan, 5.0, 100.0])
    assert running_mean(x, 2).tolist() == [1.0, 2.0, 3.0, 5.0, 52.5]
    assert np.isnan(running_mean(np.array([np.nan, 1.0]), 1)[0])
    assert running_mean(np.array([1.0, np.inf, 2.0, 4.0]), 2).tolist() == [1.0, 1.0, 2.0, 3.0], "one infinity ends no curve"


def test_a_long_file_is_served_in_part_at_first_and_complete_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "AT_A_TIME", 1_000)
    write(tmp_path / "metrics.jsonl", rows(1, 2_000))
    whole, hasty = Columns(tmp_path / "metrics.jsonl"), Columns(tmp_path / "metrics.jsonl")
    assert whole.read_on() == 1_999
    seen = [hasty.read_on(0.0) for _ in range(3)]
    assert 0 < seen[0] < seen[1] < seen[2] < 200, "each time a part"
    with hasty.lock:
        assert hasty.read_on(0.01) == seen[2], "while another thread reads, what is known"
    hasty.read_all()
    assert hasty.columns.keys() == whole.columns.keys()
    for name, column in whole.columns.items():
        assert np.array_equal(hasty.columns[name], column, equal_nan=True)


def test_reading_all_ends_before_a_line_that_is_not_whole(columns: Columns) -> None:
    with columns.path.open("a") as file:
        file.write('{"iteration": 8, "st')
    columns.read_all()
    assert columns.read_on() == 7
