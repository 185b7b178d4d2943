"""Metrics of responses: diversity, length, likelihood, win rate, pass@k, and the KL of best-of-n."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.language.metrics import (
    best_of_n_kl,
    distinct_n,
    eos_rate,
    mean_length,
    mean_log_likelihood,
    pass_at_k,
    repeated_share,
    win_rate,
)

batches = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8)


def test_distinct_n_is_the_share_of_distinct_n_grams():
    assert distinct_n(["abab"], 1) == 2 / 4
    assert distinct_n(["abab"], 2) == 2 / 3
    assert distinct_n(["ab", "ab"], 2) == 1 / 2
    assert distinct_n([[7, 8, 9], [8, 9]], 2) == 2 / 3
    assert distinct_n([[1, 2], [3, 4]], 2) == 1, "no pair spans two responses"
    assert distinct_n([[1], [2]], 2) is None


@given(batches, st.integers(1, 3))
def test_repeating_a_batch_halves_distinct_n(batch, n):
    once = distinct_n(batch, n)
    twice = distinct_n(batch + batch, n)
    assert (once is None and twice is None) or twice == pytest.approx(once / 2)


def test_repeated_share_is_one_minus_the_share_of_distinct_responses():
    assert repeated_share(["a", "b", "c"]) == 0
    assert repeated_share(["a", "a", "a", "a"]) == 3 / 4
    assert repeated_share([[1, 2], [1, 2], [1]]) == pytest.approx(1 / 3)
    assert repeated_share([]) == 0


def test_means_are_over_responses_or_over_tokens_for_any_batching():
    nan = math.nan
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, nan, nan]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    assert (mean_length(mask), eos_rate(torch.tensor([True, False, True, True]))) == (2, 0.75)
    assert mean_log_likelihood([(log_probs, mask)]) == -2.5
    assert mean_log_likelihood([(log_probs[:1], mask[:1]), (log_probs[1:], mask[1:])]) == -2.5
    assert mean_log_likelihood([]) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_a_tie_is_half_a_win_so_that_win_rates_of_both_sides_sum_to_one(pairs):
    ours, theirs = torch.tensor(pairs, dtype=torch.float32).unbind(-1)
    assert win_rate(ours, theirs) + win_rate(theirs, ours) == pytest.approx(1)
    assert win_rate(ours, theirs) == pytest.approx(sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs))


# ---- pass@k and best-of-n -----------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_k_subsets_with_a_success():
    for n in range(1, 8):
        for k in range(1, n + 1):
            for right in range(n + 1):
                subsets = list(combinations([True] * right + [False] * (n - right), k))
                share = sum(map(any, subsets)) / len(subsets)
                assert float(pass_at_k(torch.tensor([right]), n, k)) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_accurate_when_binomials_overflow():
    n, k = 10_000, 5_000
    expected = [1 - math.comb(n - c, k) / math.comb(n, k) for c in (0, 1)]
    actual = pass_at_k(torch.tensor([0, 1, n - k + 1, n]), n, k).tolist()
    assert actual == pytest.approx([*expected, 1, 1], abs=1e-12)
    tiny = float(pass_at_k(torch.tensor([1]), 10**7, 1))
    assert tiny == pytest.approx(1e-7, rel=1e-8)


IMPOSSIBLE = ((1, 4, 5), (1, 4, 0), (5, 4, 1), (-1, 4, 1))
"""successes, samples, k"""


@pytest.mark.parametrize(
    ("call", "line"),
    [
        *((lambda counts=counts: pass_at_k(torch.tensor([counts[0]]), *counts[1:]), "must be from") for counts in IMPOSSIBLE),
        (lambda: distinct_n(["a"], 0), "n=0: is too small; set at least 1"),
        (lambda: best_of_n_kl(0), "n=0: is too small; set at least 1"),
        (lambda: win_rate(torch.zeros(2), torch.zeros(1)), r"shapes \[2\] and \[1\]"),
    ],
)
def test_impossible_counts_and_shapes_are_rejected(call, line):
    with pytest.raises(ValueError, match=line):
        call()


@pytest.mark.parametrize("n", [1, 4, 64])
def test_best_of_n_kl_bounds_the_exact_kl_and_is_its_limit(n):
    def exact(answers):
        """KL of the best of n, with this number of equally likely answers and distinct rewards."""
        ranks = torch.arange(answers + 1, dtype=torch.float64) / answers
        best = ranks.pow(n).diff()
        return float(torch.xlogy(best, best * answers).sum())

    assert exact(200_000) == pytest.approx(best_of_n_kl(n), abs=1e-3)
    assert exact(5) <= best_of_n_kl(n) + 1e-12
