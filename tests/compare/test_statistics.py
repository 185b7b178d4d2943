"""Interquartile mean, bootstrap intervals and tables, against their definitions and independent computations."""

import numpy as np
import pytest

from surefoot.compare.report import score_table
from surefoot.compare.statistics import band, bootstrap_interval, interquartile_mean, markdown_table, mean


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 2, 3, 4], 2.5),
        ([4, 1, 100, 3, 2, -50, 5, 0], 2.5),
        ([7], 7),
        ([0, 10], 5),
        ([0, 1, 8], (0.25 * 0 + 1 + 0.25 * 8) / 1.5),
        ([0, 1, 2, 3, 100], (0.75 * 1 + 2 + 0.75 * 3) / 2.5),
    ],
)
def test_the_interquartile_mean_weights_border_values_by_their_share(scores, expected):
    assert float(interquartile_mean(scores)) == pytest.approx(expected, abs=1e-12)


def test_a_seed_without_a_score_is_a_dash():
    cells = [{"last_100_mean": 500.0}, {"last_100_mean": None}, {}]
    assert "500.0, –, –" in score_table({"A": cells}, "last_100_mean")


def test_an_outlier_moves_the_mean_and_not_the_interquartile_mean():
    scores = np.arange(8.0)
    spoiled = np.where(scores == 7, 1e9, scores)
    assert interquartile_mean(scores) == interquartile_mean(spoiled)
    assert mean(spoiled) > 1e8


def test_both_means_use_the_last_axis():
    rows = np.random.default_rng(1).normal(size=(5, 7))
    for statistic in (mean, interquartile_mean):
        np.testing.assert_allclose(statistic(rows), [float(statistic(row)) for row in rows])


def test_the_interval_covers_the_true_value_at_about_its_nominal_rate():
    """20 normal scores, 100 times: 95 % nominal; the percentile bootstrap is a little short for so few (about 93 %)."""
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(100):
        low, high = bootstrap_interval(rng.normal(3.0, 2.0, 20))
        hits += low <= 3.0 <= high
    assert 0.86 <= hits / 100 <= 0.99


def test_the_interval_of_a_large_sample_is_that_of_the_normal_approximation():
    scores = np.random.default_rng(3).normal(size=1000)
    half = 1.96 * scores.std() / np.sqrt(1000)
    low, high = bootstrap_interval(scores)
    assert low == pytest.approx(scores.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(scores.mean() + half, abs=0.15 * half)


def test_the_interval_of_three_values_lies_within_them_and_is_deterministic():
    low, high = bootstrap_interval([1.0, 5.0, 9.0])
    assert (low, high) == (1.0, 9.0) == bootstrap_interval([1.0, 5.0, 9.0])
    assert bootstrap_interval([4.0]) == (4.0, 4.0)


@pytest.mark.parametrize("scores", [[], [[1.0, 2.0]]])
def test_intervals_reject_empty_and_two_dimensional_input(scores):
    with pytest.raises(ValueError, match="scores"):
        bootstrap_interval(scores)


def test_a_band_is_the_bootstrap_interval_of_the_mean_at_every_point():
    curves = np.random.default_rng(4).normal(size=(6, 3)) * [1, 10, 100]
    centre, low, high = band(curves)
    np.testing.assert_allclose(centre, curves.mean(0))
    for point in range(3):
        expected = bootstrap_interval(curves[:, point])
        width = expected[1] - expected[0]
        assert low[point] == pytest.approx(expected[0], abs=0.1 * width)
        assert high[point] == pytest.approx(expected[1], abs=0.1 * width)


def test_columns_of_tables_are_aligned():
    text = markdown_table(["name", "n"], [["a", "10,000"], ["long name", "–"]])
    assert text.splitlines() == [
        "| name      |      n |",
        "|-----------|-------:|",
        "| a         | 10,000 |",
        "| long name |      – |",
    ]
