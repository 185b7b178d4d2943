"""The surrogate objective: the four quadrants, pessimism, clip bounds, and its gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import DOUBLE, masks, random, seeds

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
ratios = st.floats(0.01, 5)
advantage = st.floats(0.01, 10) | st.floats(-10, -0.01)


def one(x: float) -> Tensor:
    return torch.tensor(x, dtype=DOUBLE, requires_grad=True)


def clipped(ratio: float, a: float, low: float, high: float, dual: float | None = None) -> float:
    """min(ρÂ, clip(ρ)Â), and cÂ at least where Â < 0, in plain Python."""
    value = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return max(value, dual * a) if dual is not None and a < 0 else value


# Values.


@given(ratios, advantage | st.just(0.0), st.floats(0.05, 0.5), st.none() | st.floats(0.05, 0.5), st.none() | st.just(3.0))
def test_clipped_surrogate_is_the_smaller_of_the_two_branches(
    ratio: float, a: float, clip: float, clip_high: float | None, dual: float | None
) -> None:
    ours = F.clipped_surrogate(one(ratio), one(a), clip, clip_high, dual).item()
    assert ours == pytest.approx(clipped(ratio, a, clip, clip if clip_high is None else clip_high, dual), rel=1e-12)


@given(st.floats(-20, 2), st.floats(-20, 2))
def test_importance_ratio_is_formed_from_the_difference_of_logs(new: float, old: float) -> None:
    assert F.importance_ratio(one(new), one(old)).item() == pytest.approx(math.exp(new - old), rel=1e-14)


def test_importance_ratio_of_improbable_actions_is_a_number() -> None:
    """exp(log π_θ) / exp(log π_old) would be 0/0 in float32."""
    far = torch.tensor([-200.0])
    assert F.importance_ratio(far, far).item() == 1
    assert F.importance_ratio(far + 1, far).item() == pytest.approx(math.e, rel=1e-4)


bounds = st.floats(0.05, 0.6)
dual_bounds = st.none() | st.floats(1.7, 4)  # above every 1 + ε_high, as it must be


@given(ratios, advantage, bounds, st.none() | bounds, dual_bounds)
def test_clip_is_active_exactly_where_the_gradient_is_zero(
    ratio: float, a: float, clip: float, clip_high: float | None, dual: float | None
) -> None:
    rho = one(ratio)
    gradient = torch.autograd.grad(F.clipped_surrogate(rho, one(a), clip, clip_high, dual), rho)[0].item()
    active = F.clip_active(rho, one(a), clip, clip_high, dual)
    assert active.dtype == torch.bool
    assert gradient == (0.0 if active.item() else a)


def test_at_advantage_zero_there_is_no_gradient_and_no_clip_to_report() -> None:
    ratio = torch.tensor([0.5, 1.0, 1.5, 4.0], requires_grad=True)
    surrogate = F.clipped_surrogate(ratio, torch.zeros(4), 0.2, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(surrogate.sum(), ratio)
    assert gradient.tolist() == [0, 0, 0, 0]
    assert not F.clip_active(ratio, torch.zeros(4), 0.2, dual_clip=3.0).any()


@given(ratios, bounds, st.none() | bounds)
def test_ratio_outside_looks_at_the_band_alone(ratio: float, clip: float, clip_high: float | None) -> None:
    outside = F.ratio_outside(one(ratio), clip, clip_high)
    assert outside.dtype == torch.bool
    assert outside.item() is (ratio < 1 - clip or ratio > 1 + (clip if clip_high is None else clip_high))


# What the gradient is. A softmax small enough to sum over every action: no sampling, no tolerance for noise.


def policy(seed: int, actions: int = 4) -> tuple[Tensor, Tensor]:
    """(logits, log π of every action)."""
    logits = random(3 * seed, actions).requires_grad_()
    return logits, F.token_log_probs(logits.expand(actions, -1), torch.arange(actions))


def expected_gradient(seed: int, weights: Tensor) -> Tensor:
    """Σ π(a) w(a) ∇ log π(a) with ∇_i log π(a) = 1[a=i] − π_i, in loops."""
    logits = random(3 * seed, len(weights)).tolist()
    total = sum(map(math.exp, logits))
    pi = [math.exp(x) / total for x in logits]
    return torch.tensor(
        [sum(pi[a] * weights[a].item() * ((a == i) - pi[i]) for a in range(len(pi))) for i in range(len(pi))], dtype=DOUBLE
    )


@given(seeds, seeds)
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(seed: int, other: int) -> None:
    a = random(other, 4)
    expected = expected_gradient(seed, a)
    for surrogate in (
        F.unclipped_surrogate,
        lambda ratio, a: F.clipped_surrogate(ratio, a, 0.2),
        lambda ratio, a: F.clipped_surrogate(ratio, a, 0.2, 0.3, dual_clip=3.0),
    ):
        logits, log_probs = policy(seed)
        ratio = F.importance_ratio(log_probs, log_probs.detach())
        (gradient,) = torch.autograd.grad((log_probs.detach().exp() * surrogate(ratio, a)).sum(), logits)
        torch.testing.assert_close(gradient, expected, **CLOSE)


@given(seeds, seeds, seeds)
def test_reweighted_old_samples_have_the_new_policys_expected_advantage(new: int, old: int, other: int) -> None:
    """E_old[ρÂ] = E_θ[Â], in value and in gradient."""
    a = random(other, 4)
    logits, log_probs = policy(new)
    _, old_log_probs = policy(old)
    old_probs = old_log_probs.detach().exp()
    ratio = F.importance_ratio(log_probs, old_log_probs.detach())
    reweighted = (old_probs * F.unclipped_surrogate(ratio, a)).sum()
    weights = [math.exp(x) for x in logits.tolist()]
    direct = sum(w * x for w, x in zip(weights, a.tolist(), strict=True)) / sum(weights)
    assert reweighted.item() == pytest.approx(direct, abs=1e-10)
    (gradient,) = torch.autograd.grad(reweighted, logits)
    torch.testing.assert_close(gradient, expected_gradient(new, a), **CLOSE)


# The ratio of a whole response.


@given(seeds, masks(3, 5))
def test_the_ratio_of_a_response_is_the_geometric_mean_of_its_tokens_ratios(seed: int, mask: Tensor) -> None:
    new, old = random(3 * seed, 2, 3, 5)
    actual = F.sequence_ratio(new, old, mask)
    for row in range(3):
        kept = [t for t in range(5) if mask[row, t]]
        product = math.prod(math.exp(float(new[row, t] - old[row, t])) for t in kept)
        for t in range(5):
            expected = product ** (1 / len(kept)) if t in kept else 1.0
            assert actual[row, t].item() == pytest.approx(expected, rel=1e-12)


def test_the_sequence_ratio_gives_all_tokens_the_same_gradient() -> None:
    new = torch.tensor([[0.3, -0.2, 0.5, 9.0]], dtype=DOUBLE, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    ratio = F.sequence_ratio(new, torch.zeros(1, 4, dtype=DOUBLE), mask)
    (gradient,) = torch.autograd.grad((ratio * mask).sum() / 3, new)
    torch.testing.assert_close(gradient, mask.to(DOUBLE) * math.exp(0.2) / 3, **CLOSE)
