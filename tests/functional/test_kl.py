"""KL estimators, as metrics and as losses, and the rules that adapt the coefficient.

Distributions are small enough to sum over every outcome, so expectations here are exact.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import DOUBLE, random, seeds

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def divergence(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def pair(seed: int, n: int = 4) -> tuple[Tensor, Tensor, list[float], list[float]]:
    """Logits of p (with gradient) and q, and their probabilities as lists."""
    p, q = random(3 * seed, 2, n) / 2
    return p.clone().requires_grad_(), q, softmax(p.tolist()), softmax(q.tolist())


def reverse_gradient(p: list[float], q: list[float]) -> Tensor:
    """d KL(p‖q) / d logits of p: p_i (log p_i/q_i − KL)."""
    kl = divergence(p, q)
    return torch.tensor([a * (math.log(a / b) - kl) for a, b in zip(p, q, strict=True)], dtype=DOUBLE)


def forward_gradient(p: list[float], q: list[float]) -> Tensor:
    """d KL(q‖p) / d logits of p: p_i − q_i."""
    return torch.tensor([a - b for a, b in zip(p, q, strict=True)], dtype=DOUBLE)


# Estimators as metrics.


@given(seeds)
def test_each_estimator_is_its_formula(seed: int) -> None:
    log_p, log_q = random(seed, 2, 5)
    for i, (a, b) in enumerate(zip(log_p.tolist(), log_q.tolist(), strict=True)):
        x = b - a
        assert F.kl_k1(log_p, log_q)[i].item() == pytest.approx(-x, abs=1e-12)
        assert F.kl_k2(log_p, log_q)[i].item() == pytest.approx(x * x / 2, abs=1e-12)
        assert F.kl_k3(log_p, log_q)[i].item() == pytest.approx(math.exp(x) - 1 - x, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("shift", [1e-4, -1e-4])
def test_k3_of_a_small_step_keeps_its_digits_in_float32(shift: float) -> None:
    """exp(x) − 1 − x would be rounding noise: x²/2 is 5e-9."""
    log_p = torch.zeros(1)
    expected = shift**2 / 2 + shift**3 / 6
    assert F.kl_k3(log_p, log_p + shift).item() == pytest.approx(expected, rel=2e-3)


# Estimators as losses, on p's own samples.


@given(seeds)
def test_in_the_loss_k1_has_no_expected_gradient_k2_has_kls_and_k3_the_other_directions(seed: int) -> None:
    logits_p, logits_q, p, q = pair(seed)
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    probability = torch.tensor(p, dtype=DOUBLE)
    expected = {F.kl_k1: torch.zeros(4, dtype=DOUBLE), F.kl_k2: reverse_gradient(p, q), F.kl_k3: forward_gradient(p, q)}
    for estimator, gradient in expected.items():
        loss = (probability * estimator(log_p, log_q)).sum()
        torch.testing.assert_close(torch.autograd.grad(loss, logits_p, retain_graph=True)[0], gradient, **CLOSE)


@given(seeds)
def test_with_a_differentiable_ratio_every_unbiased_metric_has_the_right_gradient(seed: int) -> None:
    logits_p, logits_q, p, q = pair(seed)
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    ratio = F.importance_ratio(log_p, log_p.detach())
    for estimator in (F.kl_k1, F.kl_k3):
        loss = (torch.tensor(p, dtype=DOUBLE) * ratio * estimator(log_p, log_q)).sum()
        gradient = torch.autograd.grad(loss, logits_p, retain_graph=True)[0]
        torch.testing.assert_close(gradient, reverse_gradient(p, q), **CLOSE)


# Exact values.


@given(seeds, st.integers(1, 6))
def test_categorical_kl_is_its_sum_in_the_order_of_its_arguments(seed: int, n: int) -> None:
    logits_p, logits_q, p, q = pair(seed, n)
    assert F.categorical_kl(logits_p, logits_q).item() == pytest.approx(divergence(p, q), abs=1e-12)
    assert F.categorical_kl(logits_q, logits_p).item() == pytest.approx(divergence(q, p), abs=1e-12)


@given(seeds)
def test_categorical_kl_has_the_gradient_of_its_definition_in_both_arguments(seed: int) -> None:
    logits_p, logits_q, p, q = pair(seed)
    (first,) = torch.autograd.grad(F.categorical_kl(logits_p, logits_q), logits_p)
    (second,) = torch.autograd.grad(F.categorical_kl(logits_q, logits_p), logits_p)
    torch.testing.assert_close(first, reverse_gradient(p, q), **CLOSE)
    torch.testing.assert_close(second, forward_gradient(p, q), **CLOSE)


@given(seeds, st.floats(-100, 100))
def test_kl_ignores_a_shift_of_the_logits_and_is_zero_for_equal_distributions(seed: int, c: float) -> None:
    logits_p, logits_q, p, q = pair(seed)
    assert F.categorical_kl(logits_p + c, logits_q - c).item() == pytest.approx(divergence(p, q), abs=1e-11)
    assert F.categorical_kl(logits_p, logits_p + c).item() == pytest.approx(0, abs=1e-12)


def test_impossible_outcomes_add_nothing_to_kl_and_no_nan_to_its_gradient() -> None:
    p = torch.tensor([0.3, -torch.inf, 0.1], dtype=DOUBLE, requires_grad=True)
    q = torch.tensor([0.2, -torch.inf, 0.9], dtype=DOUBLE, requires_grad=True)
    kl = F.categorical_kl(p, q)
    assert kl.item() == pytest.approx(divergence(softmax([0.3, 0.1]), softmax([0.2, 0.9])))
    for gradient in torch.autograd.grad(kl, (p, q)):
        assert torch.isfinite(gradient).all()
        assert gradient[1] == 0
        assert gradient[0] != 0


def test_kl_from_an_impossible_to_a_possible_outcome_is_finite_and_the_other_way_infinite() -> None:
    some, all_ = torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, 0.0])
    assert F.categorical_kl(some, all_).item() == pytest.approx(math.log(2))
    assert F.categorical_kl(all_, some).item() == math.inf


@pytest.mark.parametrize("seed", range(2))
def test_gaussian_kl_is_the_integral_of_its_definition(seed: int) -> None:
    """∫ p (log p − log q), by the trapezoid rule, dimension by dimension."""
    mean_p, log_std_p, mean_q, log_std_q = (random(seed, 4, 2, 3) / 4).unbind(0)
    grid = torch.linspace(-40, 40, 200_001, dtype=DOUBLE)

    def log_density(mean: float, log_std: float) -> Tensor:
        return -((grid - mean) ** 2) / (2 * math.exp(2 * log_std)) - log_std - math.log(2 * math.pi) / 2

    kl = F.gaussian_kl(mean_p, log_std_p, mean_q, log_std_q)
    assert kl.shape == (2,)
    for row in range(2):
        total = 0.0
        for d in range(3):
            log_p = log_density(mean_p[row, d].item(), log_std_p[row, d].item())
            log_q = log_density(mean_q[row, d].item(), log_std_q[row, d].item())
            total += torch.trapezoid(log_p.exp() * (log_p - log_q), grid).item()
        assert kl[row].item() == pytest.approx(total, rel=1e-8)


# The rules.

betas = st.floats(1e-4, 100)


@pytest.mark.parametrize("as_tensor", [False, True])
@given(betas, st.floats(0, 0.1), st.sampled_from([0.003, 0.01, 0.03]))
def test_beta_halves_below_and_doubles_above_the_band_and_stays_within_it(
    as_tensor: bool, beta: float, kl: float, target: float
) -> None:
    expected = beta / 2 if kl < target / 1.5 else beta * 2 if kl > 1.5 * target else beta
    if as_tensor:
        for b in (beta, torch.tensor(beta, dtype=DOUBLE)):
            assert float(F.adapt_kl_penalty(b, torch.tensor(kl, dtype=DOUBLE), target)) == expected
    else:
        assert F.adapt_kl_penalty(beta, kl, target) == expected


def test_beta_stays_at_the_edges_of_the_band() -> None:
    for kl in (2.0, 4.5):
        assert F.adapt_kl_penalty(1.0, kl, 3.0) == 1.0
        assert F.adapt_kl_penalty(torch.tensor(1.0), torch.tensor(kl), 3.0).item() == 1.0


@pytest.mark.parametrize("as_tensor", [False, True])
@given(betas, st.floats(-20, 40), st.floats(0.5, 10), st.integers(1, 512))
def test_proportional_control_moves_beta_by_the_clipped_relative_error(
    as_tensor: bool, beta: float, kl: float, target: float, n: int
) -> None:
    error = max(-0.2, min(0.2, kl / target - 1))
    expected = beta * (1 + error * n / 10_000)
    measured = torch.tensor(kl, dtype=DOUBLE) if as_tensor else kl
    assert float(F.proportional_kl_control(beta, measured, target, n, 10_000)) == pytest.approx(expected, rel=1e-12)


@given(st.floats(1e-5, 1e-2), st.floats(0, 10), st.floats(1e-4, 1))
def test_an_adapted_learning_rate_moves_by_half_towards_the_target_kl_within_its_bounds(
    rate: float, kl: float, target: float
) -> None:
    adapted = F.adapt_learning_rate(rate, kl, target)
    assert 1e-5 <= adapted <= 1e-2
    if kl > 2 * target:
        assert adapted == max(rate / 1.5, 1e-5)
    elif kl == 0 or kl >= target / 2:
        assert adapted == rate
    else:
        assert adapted == min(1.5 * rate, 1e-2)


# ---- the samples that a penalty is limited to (KL-Cov) ------------------------------------------------------------------


def test_kl_cov_by_hand() -> None:
    """Two answers of two tokens: "a b", right, Â = 1, with π = ½ and ¼; "a c", wrong, Â = −1, with π = ½ and ⅛.

    In units of log 2, log π is −1, −2, −1, −3 with mean −7/4, and Â has mean 0. Equation 10 gives ¾, −¼, −¾, 5/4: the unlikely
    wrong token first, then the likely right one. k = ½ of N = 4 tokens chooses these two.
    """
    log_probs = torch.tensor([[1 / 2, 1 / 4], [1 / 2, 1 / 8]], dtype=DOUBLE).log()
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=DOUBLE)
    terms = F.covariance_terms(log_probs, advantages)
    torch.testing.assert_close(terms / math.log(2), torch.tensor([[0.75, -0.25], [-0.75, 1.25]], dtype=DOUBLE))
    assert F.largest_share(terms, 0.5).tolist() == [[True, False], [False, True]]
    assert F.largest_share(terms, 0.25).tolist() == [[False, False], [False, True]]
    assert F.largest_share(torch.arange(100.0), 0.29).sum() == 29, "0.29 · 100 is 28.999999999999996"


@given(seeds, st.floats(0.1, 10), st.floats(-3, 3))
def test_the_mean_term_is_the_covariance_and_scaled_or_shifted_advantages_leave_their_order(
    seed: int, scale: float, shift: float
) -> None:
    x, a = random(3 * seed, 2, 12)
    terms = F.covariance_terms(x, a)
    assert float(terms.mean()) == pytest.approx(float(torch.cov(torch.stack((x, a)), correction=0)[0, 1]), rel=1e-9)
    assert torch.equal(F.covariance_terms(x, scale * a + shift).argsort(), terms.argsort())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 100))
def test_the_largest_share_is_what_counting_gives_and_equal_entries_stay_together(values: list[int], percent: int) -> None:
    most = percent * len(values) // 100
    expected = [sum(other >= x for other in values) <= most for x in values]
    assert F.largest_share(torch.tensor(values, dtype=DOUBLE), percent / 100).tolist() == expected
    assert F.largest_share(torch.tensor(values, dtype=DOUBLE), 1.0).all()
    assert not F.largest_share(torch.tensor(values, dtype=DOUBLE), 0.0).any()
