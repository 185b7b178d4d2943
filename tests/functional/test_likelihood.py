"""Log-probability and entropy from logits."""

import math
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


# ---- in chunks ----------------------------------------------------------------------------------------------------------


def scored(seed: int, rows: int, chunk: int | None, temperature: float) -> list[Tensor]:
    """Log-probabilities, entropy, and the gradient of a random sum of both; ``chunk`` None is the naive way."""
    hidden, weight, bias = random(seed, rows, 5), random(seed + 1, 7, 5), random(seed + 2, 7)
    for leaf in (hidden, weight, bias):
        leaf.requires_grad_()
    tokens = torch.randint(7, (rows,), generator=torch.Generator().manual_seed(seed))

    def head(rows: Tensor) -> Tensor:
        return 4 * torch.tanh(rows @ weight.T + bias)

    if chunk is None:
        actual = F.token_log_probs(head(hidden), tokens, temperature), F.token_entropy(head(hidden), temperature)
    else:
        actual = F.chunked_likelihood(hidden, tokens, head, temperature, chunk)
    total = sum((x * random(seed + 3 + i, rows)).sum() for i, x in enumerate(actual))
    return [*actual, *torch.autograd.grad(total, (hidden, weight, bias))]


@given(seeds, st.integers(1, 9), st.integers(1, 10), temperatures)
def test_chunks_equal_the_unchunked_computation_in_value_and_gradient(
    seed: int, rows: int, chunk: int, temperature: float
) -> None:
    for ours, naive in zip(scored(seed, rows, chunk, temperature), scored(seed, rows, None, temperature), strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)


@given(
    seeds, st.integers(1, 9), st.integers(1, 8), temperatures, st.sampled_from(["both", "log_probs", "entropy"]), st.booleans()
)
def test_chunks_of_a_linear_head_have_the_gradient_of_autograd(
    seed: int, rows: int, chunk: int, temperature: float, used: str, biased: bool
) -> None:
    head = torch.nn.Linear(5, 7, bias=biased, dtype=torch.float64)
    tokens = torch.randint(7, (rows,), generator=torch.Generator().manual_seed(seed))
    results = []
    for of in (head, lambda x: head(x)):  # only the first is known to be linear
        hidden = random(seed, rows, 5).requires_grad_()
        both = F.chunked_likelihood(hidden, tokens, of, temperature, chunk)
        chosen = {"both": both, "log_probs": both[:1], "entropy": both[1:]}[used]
        total = sum((x * random(seed + 3 + place, rows)).sum() for place, x in enumerate(chosen))
        results.append([*both, *torch.autograd.grad(total, (hidden, *head.parameters()))])
    for ours, naive in zip(*results, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)


def test_a_linear_head_in_chunks_passes_frozen_weights_impossible_tokens_and_autocast() -> None:
    head, tokens = torch.nn.Linear(5, 7), torch.arange(6)
    with torch.no_grad():
        head.bias[6] = -torch.inf
    head.weight.requires_grad_(False)
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        results = []
        for of in (head, lambda x: head(x)):
            hidden = random(1, 6, 5).float().requires_grad_()
            with context:
                log_probs, entropy = F.chunked_likelihood(hidden, tokens, of, 0.7, 4)
            assert log_probs.dtype == entropy.dtype == torch.float32
            (log_probs + entropy).sum().backward()
            results.append([log_probs.detach(), entropy.detach(), hidden.grad, head.bias.grad[:6].clone()])
            assert hidden.grad is not None
            assert hidden.grad.isfinite().all()
            head.zero_grad()
        for ours, naive in zip(*results, strict=True):
            torch.testing.assert_close(ours, naive, rtol=1e-2, atol=1e-2)
        assert head.weight.grad is None


def test_chunks_can_be_differentiated_twice() -> None:
    """Natural steps differentiate a gradient."""
    twice = []
    for chunk, linear in ((100, False), (2, False), (2, True)):
        head = torch.nn.Linear(5, 7, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(random(0, 7, 5))
            head.bias.zero_()
        hidden = random(1, 6, 5).requires_grad_()
        of = head if linear else lambda x, head=head: head(x)
        log_probs, entropy = F.chunked_likelihood(hidden, torch.arange(6), of, 0.7, chunk)
        total = log_probs.square().sum() + entropy.square().sum()
        gradients = torch.autograd.grad(total, (hidden, head.weight), create_graph=True)
        twice.append(torch.autograd.grad(sum(x.square().sum() for x in gradients), (hidden, head.weight)))
    assert twice[0][1].abs().max() > 1e-3
    for other in twice[1:]:
        torch.testing.assert_close(other, twice[0], rtol=1e-12, atol=1e-12)


def test_empty_input_gives_empty_output() -> None:
    log_probs, entropy = F.chunked_likelihood(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), lambda x: x, 1.0, 3)
    assert log_probs.shape == entropy.shape == (0,)


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits, tokens = random(0, 4, 7).bfloat16(), torch.arange(4)
    log_probs, _ = F.chunked_likelihood(logits, tokens, lambda x: x, 0.7, 2)
    assert torch.equal(log_probs, F.token_log_probs(logits.float(), tokens, 0.7))


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors made under it that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage())
        return made

    def count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.seen or not size:
            return
        self.seen.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self.seen.discard(place)
            self.now -= size

        weakref.finalize(storage, gone)


def most_alive(rows: int, vocabulary: int, chunk: int, width: int = 4, linear: bool = False, used: slice = slice(None)) -> int:
    """The most bytes alive at once, forward and backward of the outputs in ``used``, of what is made of the hidden states."""
    hidden, head = torch.randn(rows, width, requires_grad=True), torch.nn.Linear(width, vocabulary, bias=False)
    tokens = torch.arange(rows)
    with Alive() as alive:
        both = F.chunked_likelihood(hidden, tokens, head if linear else lambda x: head(x), 1.0, chunk)
        sum(x.sum() for x in both[used]).backward()  # type: ignore[union-attr]
    return alive.peak


@pytest.mark.parametrize(
    ("linear", "used"), [(False, slice(None)), (True, slice(1)), (True, slice(1, 2))], ids=["both", "log_probs", "entropy"]
)
def test_no_more_than_a_chunk_of_logits_is_alive_in_forward_and_backward(linear: bool, used: slice) -> None:
    """Whether both outputs get gradient or one, as the log-probabilities of SFT."""
    rows, vocabulary = 64, 5_000
    logits = rows * vocabulary * 4
    whole, parts = (most_alive(rows, vocabulary, chunk, linear=linear, used=used) for chunk in (rows, 4))
    assert whole > 3 * logits, "what it costs otherwise"
    assert parts < whole / 8
    assert most_alive(4 * rows, vocabulary, 4, linear=linear, used=used) < 1.1 * parts, "and it does not grow with the rows"


def test_a_linear_head_needs_no_gradient_of_all_its_weights_for_each_chunk() -> None:
    rows, vocabulary, width = 64, 5_000, 64
    naive, ours = (most_alive(rows, vocabulary, 4, width, linear) for linear in (False, True))
    weights = vocabulary * width * 4
    assert ours < naive - 0.9 * weights
    assert ours < 2.5 * weights, "the weights, one gradient of them, and a chunk of logits"
