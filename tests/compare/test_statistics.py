"""Interquartile mean, intervals and tables, against their definitions and independent computations."""

import math

import numpy as np
import pytest

from surefoot.compare.across_tasks import improvement_interval, share_interval, task_mean
from surefoot.compare.statistics import (
    band,
    interquartile_mean,
    interval,
    markdown_table,
    mean,
    mean_interval,
    score_interval,
    t_quantile,
    with_interval,
)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 2, 3, 4], 2.5),
        ([7], 7),
        ([0, 1, 8], (0.25 * 0 + 1 + 0.25 * 8) / 1.5),
        ([0, 1, 2, 3, 100], (0.75 * 1 + 2 + 0.75 * 3) / 2.5),
    ],
)
def test_the_interquartile_mean_weights_border_values_by_their_share(scores, expected):
    assert float(interquartile_mean(scores)) == pytest.approx(expected, abs=1e-12)


def test_both_means_use_the_last_axis():
    rows = np.random.default_rng(1).normal(size=(5, 7))
    for statistic in (mean, interquartile_mean):
        np.testing.assert_allclose(statistic(rows), [float(statistic(row)) for row in rows])


def test_intervals_of_means_are_students_and_of_differences_welchs():
    """Bounds from SciPy 1.17: t.interval, ttest_ind(equal_var=False).confidence_interval."""
    x, y = [1.0, 5.0, 9.0, 4.0], [2.0, 2.5, 1.0]
    np.testing.assert_allclose(mean_interval(x), (-0.507462, 10.007462), rtol=1e-5)
    np.testing.assert_allclose(mean_interval(x, y), (-2.168029, 8.001362), rtol=2e-4)
    np.testing.assert_allclose([t_quantile(n) for n in (1, 2, 9, math.inf)], [12.7062, 4.30265, 2.26216, 1.95996], rtol=2e-4)


@pytest.mark.parametrize("seeds", [3, 10])
def test_95_percent_intervals_contain_the_truth_in_93_to_97_percent_of_experiments(seeds, monkeypatch):
    """Normal scores; those of the mean are Student's. 1,000 experiments, whose own error is 0.7 %."""
    monkeypatch.setattr("surefoot.compare.statistics.RESAMPLES", 400)
    rng, hits, total = np.random.default_rng(seeds), np.zeros(2), 1000
    for _ in range(total):
        tasks = [rng.normal(level, 1 + level, seeds) for level in (0, 1, 2)]
        bounds = (score_interval(tasks[0], interquartile_mean), interval(task_mean, tasks))
        hits += [low <= truth <= high for (low, high), truth in zip(bounds, (0, 1), strict=True)]
    assert np.all((hits / total > 0.93) & (hits / total < 0.97)), hits / total


@pytest.mark.parametrize(("count", "share"), [(3, 1.0), (3, 0.0), (5, 0.6)])
def test_shares_of_few_runs_have_intervals_inside_0_and_1_with_a_width(count, share):
    low, high = share_interval(share, lambda p: p * (1 - p) / count)
    assert 0 <= low <= share <= high <= 1
    assert high - low > 0.4
    wins, losses = [np.full(count, share + 1)], [np.zeros(count)]
    assert improvement_interval(wins, losses)[0] < 0.75


def test_one_seed_has_no_interval():
    assert (
        mean_interval([4.0])
        == (-math.inf, math.inf)
        == mean_interval([1.0, 2.0], [3.0])
        == score_interval([4.0], interquartile_mean)
    )
    assert with_interval([4.0]) == ("4.00", "–")


@pytest.mark.parametrize("scores", [[], [[1.0, 2.0]]])
def test_intervals_reject_empty_and_two_dimensional_input(scores):
    with pytest.raises(ValueError, match="scores"):
        mean_interval(scores)


def test_a_band_is_the_interval_of_the_mean_at_every_point():
    curves = np.random.default_rng(4).normal(size=(6, 3)) * [1, 10, 100]
    centre, low, high = band(curves)
    np.testing.assert_allclose(centre, curves.mean(0))
    np.testing.assert_allclose(np.transpose([low, high]), [mean_interval(curves[:, point]) for point in range(3)])


def test_columns_of_tables_are_aligned():
    text = markdown_table(["name", "n"], [["a", "10,000"], ["long name", "–"]])
    assert text.splitlines() == [
        "| name      |      n |",
        "|-----------|-------:|",
        "| a         | 10,000 |",
        "| long name |      – |",
    ]
