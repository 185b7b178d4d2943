"""Laws of log-probability and entropy from logits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot import functional as F

from .strategies import DOUBLE, random, seeds

temperatures = st.sampled_from([0.5, 0.7, 1.0, 2.0])


def probabilities(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


@given(seeds, temperatures)
def test_token_log_prob_is_the_log_of_its_softmax_share(seed: int, temperature: float) -> None:
    logits = random(seed, 2, 3, 4)
    tokens = torch.randint(4, (2, 3), generator=torch.Generator().manual_seed(seed))
    ours = F.token_log_probs(logits, tokens, temperature)
    assert ours.shape == (2, 3)
    for b in range(2):
        for t in range(3):
            share = probabilities(logits[b, t].tolist(), temperature)[tokens[b, t]]
            assert ours[b, t].item() == pytest.approx(math.log(share), abs=1e-11)


@given(seeds, temperatures)
def test_entropy_is_minus_the_expected_log_probability(seed: int, temperature: float) -> None:
    logits = random(seed, 3, 4)
    for row, entropy in zip(logits.tolist(), F.token_entropy(logits, temperature).tolist(), strict=True):
        expected = -sum(p * math.log(p) for p in probabilities(row, temperature))
        assert entropy == pytest.approx(expected, abs=1e-11)


@given(seeds, st.floats(-1e4, 1e4))
def test_a_shift_of_the_logits_is_invisible(seed: int, shift: float) -> None:
    logits, tokens = random(seed, 3, 4), torch.tensor([0, 1, 3])
    for f in (lambda x: F.token_log_probs(x, tokens, 0.7), lambda x: F.token_entropy(x, 0.7)):
        torch.testing.assert_close(f(logits + shift), f(logits), rtol=0, atol=1e-9)


def test_entropy_is_greatest_when_uniform_and_zero_when_certain() -> None:
    assert F.token_entropy(torch.zeros(5, dtype=DOUBLE)).item() == pytest.approx(math.log(5))
    assert F.token_entropy(torch.tensor([0.0, -torch.inf, -torch.inf])).item() == 0
    assert F.token_entropy(torch.tensor([0.0, -1e4])).item() == 0


def test_temperature_divides_logits_and_not_log_probs() -> None:
    logits, token = torch.tensor([2.0, 1.0, 0.0], dtype=DOUBLE), torch.tensor(0)
    ours = F.token_log_probs(logits, token, 0.7).item()
    assert ours == pytest.approx(math.log(probabilities([2, 1, 0], 0.7)[0]))
    assert ours != pytest.approx(math.log(probabilities([2, 1, 0], 1.0)[0]) / 0.7, abs=0.1)


def test_tokens_of_any_integer_dtype_index_alike() -> None:
    logits = random(3, 2, 4)
    expected = F.token_log_probs(logits, torch.tensor([3, 1]))
    for kind in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(F.token_log_probs(logits, torch.tensor([3, 1], dtype=kind)), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forbidden_choices_get_no_probability_and_no_gradient(temperature: float) -> None:
    logits = torch.tensor([0.3, -torch.inf, 1.2], dtype=DOUBLE, requires_grad=True)
    p, q = probabilities([0.3, 1.2], temperature)
    entropy = F.token_entropy(logits, temperature)
    log_prob = F.token_log_probs(logits, torch.tensor(2), temperature)
    assert entropy.item() == pytest.approx(-p * math.log(p) - q * math.log(q))
    assert log_prob.item() == pytest.approx(math.log(q))
    for output in (entropy, log_prob):
        (gradient,) = torch.autograd.grad(output, logits)
        assert torch.isfinite(gradient).all()
        assert gradient[1] == 0
        assert gradient[0] != 0
    assert F.token_log_probs(logits, torch.tensor(1), temperature).item() == -math.inf


@given(seeds)
def test_log_prob_has_the_score_as_gradient(seed: int) -> None:
    """∂ log π(a) / ∂ logit_i = 1[a=i] − π_i: zero in expectation."""
    logits = random(seed, 4).requires_grad_()
    share = probabilities(logits.tolist(), 1.0)
    for a in range(4):
        (gradient,) = torch.autograd.grad(F.token_log_probs(logits, torch.tensor(a)), logits)
        assert gradient.tolist() == pytest.approx([(a == i) - share[i] for i in range(4)], abs=1e-11)
