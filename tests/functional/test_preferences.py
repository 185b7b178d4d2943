"""Losses on pairs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import DOUBLE, random, seeds

scores = st.floats(-15, 15)


def tensor(x: float) -> Tensor:
    return torch.tensor(x, dtype=DOUBLE, requires_grad=True)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@given(scores, scores)
def test_bradley_terry_loss_is_minus_the_log_chance_that_the_chosen_wins(chosen: float, rejected: float) -> None:
    c, r = tensor(chosen), tensor(rejected)
    loss = F.bradley_terry_loss(c, r)
    assert loss.item() == pytest.approx(-math.log(sigmoid(chosen - rejected)), rel=1e-9, abs=1e-12)
    by_chosen, by_rejected = torch.autograd.grad(loss, (c, r))
    assert by_chosen.item() == pytest.approx(-sigmoid(rejected - chosen), rel=1e-9, abs=1e-12)
    assert by_rejected.item() == -by_chosen.item()


def test_a_very_wrong_pair_has_a_finite_loss_and_a_full_gradient() -> None:
    chosen = torch.tensor([-1000.0], requires_grad=True)
    loss = F.bradley_terry_loss(chosen, torch.zeros(1))
    loss.sum().backward()
    assert loss.item() == 1000
    assert chosen.grad is not None
    assert chosen.grad.item() == -1
    assert F.bradley_terry_loss(torch.tensor([1000.0]), torch.zeros(1)).item() == 0


@given(seeds, st.sampled_from([0.05, 0.1, 0.5]))
def test_dpo_is_bradley_terry_on_beta_times_the_log_ratio_to_the_reference(seed: int, beta: float) -> None:
    chosen, rejected, ref_chosen, ref_rejected = random(seed, 4, 3)
    ours = F.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta).tolist()
    rows = zip(*(x.tolist() for x in (chosen, rejected, ref_chosen, ref_rejected)), strict=True)
    expected = [-math.log(sigmoid(beta * (c - rc) - beta * (r - rr))) for c, r, rc, rr in rows]
    assert ours == pytest.approx(expected, rel=1e-10)


@given(seeds, st.sampled_from([1.0, 2.5]), st.sampled_from([0.0, 1.6]))
def test_simpo_is_bradley_terry_on_means_with_a_head_start_to_overcome(seed: int, beta: float, margin: float) -> None:
    chosen, rejected = random(seed, 2, 3)
    ours = F.simpo_loss(chosen, rejected, beta, margin).tolist()
    expected = [
        -math.log(sigmoid(beta * c - beta * r - margin)) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    assert ours == pytest.approx(expected, rel=1e-10)


@given(seeds, st.sampled_from([0.0, 0.1, 1.0]))
def test_orpo_is_the_loss_of_the_chosen_answer_and_that_of_its_odds_over_the_other(seed: int, weight: float) -> None:
    chosen, rejected = (-x.abs() - 0.01 for x in random(seed, 2, 3))
    ours = F.orpo_loss(chosen, rejected, weight).tolist()
    for i, (c, r) in enumerate(zip(chosen.exp().tolist(), rejected.exp().tolist(), strict=True)):
        ratio = (c / (1 - c)) / (r / (1 - r))
        assert ours[i] == pytest.approx(-math.log(c) - weight * math.log(ratio / (1 + ratio)), rel=1e-8)


def test_orpo_of_certain_answers_is_finite_and_has_a_finite_gradient() -> None:
    both = torch.tensor([0.0, -1e-9, -500.0], requires_grad=True)
    for other in (0.0, -1e-9, -500.0):
        (gradient,) = torch.autograd.grad(F.orpo_loss(both, torch.tensor(other), 0.1).sum(), both)
        assert gradient.isfinite().all()


@given(seeds, st.floats(0, 0.5))
def test_label_smoothing_is_the_expected_loss_when_labels_are_swapped_that_often(seed: int, rate: float) -> None:
    chosen, rejected, ref_chosen, ref_rejected = random(seed, 4, 3)
    ours = F.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.3, label_smoothing=rate).tolist()
    for i, x in enumerate((0.3 * ((chosen - rejected) - (ref_chosen - ref_rejected))).tolist()):
        assert ours[i] == pytest.approx(-(1 - rate) * math.log(sigmoid(x)) - rate * math.log(sigmoid(-x)), rel=1e-9)


@given(seeds, st.sampled_from([0.05, 0.1, 0.5]))
def test_kto_depends_on_how_far_an_answer_moved_beyond_the_baseline_alone(seed: int, beta: float) -> None:
    answer, reference, baseline, shift = random(seed, 4, 4)
    labels = torch.tensor([1, 0, 1, 0])
    here = F.kto_loss(answer, reference, labels, baseline, beta)
    moved = F.kto_loss(answer + shift, reference, labels, baseline + shift, beta)
    assert moved.tolist() == pytest.approx(here.tolist(), rel=1e-9)
    rewards = (beta * (answer - reference - baseline)).tolist()
    expected = [1 - sigmoid(x) if label else 1 - sigmoid(-x) for x, label in zip(rewards, labels.tolist(), strict=True)]
    assert here.tolist() == pytest.approx(expected, rel=1e-9)


def test_kto_far_from_the_baseline_is_bounded_and_has_no_gradient() -> None:
    """Unlike DPO: an answer that can't be won back no longer pulls."""
    answer = torch.tensor([-1e6, 1e6], requires_grad=True)
    loss = F.kto_loss(answer, torch.zeros(2), torch.tensor([True, False]), torch.tensor(0.0), 0.1)
    assert loss.tolist() == [1.0, 1.0]
    (slope,) = torch.autograd.grad(loss.sum(), answer)
    assert slope.tolist() == [0.0, 0.0]
