import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.language.metrics import distinct_n, eos_rate, mean_length, mean_log_likelihood, repeated_share, win_rate

batches = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8)


def test_distinct_n_counts_different_grams_over_all():
    assert distinct_n(["abab"], 1) == 2 / 4
    assert distinct_n(["abab"], 2) == 2 / 3
    assert distinct_n(["ab", "ab"], 2) == 1 / 2
    assert distinct_n([[7, 8, 9], [8, 9]], 2) == 2 / 3


def test_distinct_n_never_spans_two_responses():
    assert distinct_n([[1], [2]], 2) is None
    assert distinct_n([[1, 2], [3, 4]], 2) == 1


@given(batches, st.integers(1, 3))
def test_distinct_n_of_a_batch_twice_is_half(batch, n):
    once = distinct_n(batch, n)
    twice = distinct_n(batch + batch, n)
    assert (once is None and twice is None) or twice == pytest.approx(once / 2)


def test_distinct_0_is_refused():
    with pytest.raises(ValueError, match="n=0: must be at least 1"):
        distinct_n(["a"], 0)


def test_repeated_share_is_zero_where_all_differ_and_nearly_one_where_none_does():
    assert repeated_share(["a", "b", "c"]) == 0
    assert repeated_share(["a", "a", "a", "a"]) == 3 / 4
    assert repeated_share([[1, 2], [1, 2], [1]]) == pytest.approx(1 / 3)
    assert repeated_share([]) == 0


@given(batches)
def test_repeated_share_is_at_least_half_when_everything_is_there_twice(batch):
    assert 0.5 <= repeated_share(batch + batch) < 1


def test_lengths_and_ends_are_means_over_responses():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    assert mean_length(mask) == 2
    assert eos_rate(torch.tensor([True, False, True, True])) == 0.75


def test_mean_log_likelihood_is_per_token_whatever_the_batches():
    nan = math.nan
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, nan, nan]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    assert mean_log_likelihood([(log_probs, mask)]) == -2.5
    assert mean_log_likelihood([(log_probs[:1], mask[:1]), (log_probs[1:], mask[1:])]) == -2.5
    assert mean_log_likelihood([]) is None


def test_a_draw_is_half_a_win():
    assert win_rate(torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([0.0, 2.0, 4.0, -1.0])) == 2.5 / 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_win_rates_of_the_two_sides_add_up_to_one(pairs):
    ours, theirs = torch.tensor(pairs, dtype=torch.float32).unbind(-1)
    assert win_rate(ours, theirs) + win_rate(theirs, ours) == pytest.approx(1)


def test_win_rate_needs_one_score_each():
    with pytest.raises(ValueError, match=r"shapes \[2\] and \[1\]"):
        win_rate(torch.zeros(2), torch.zeros(1))
