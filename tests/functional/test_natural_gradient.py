"""Parts of the trust-region step: curvature, its inverse, and the line search."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import DOUBLE, random, seeds

STATES, HIDDEN, ACTIONS = 5, 3, 3
SHAPES = [(HIDDEN, 2), (HIDDEN,), (ACTIONS, HIDDEN), (ACTIONS,)]
SIZE = sum(math.prod(shape) for shape in SHAPES)


def network(flat: Tensor, states: Tensor) -> Tensor:
    """Logits of a small tanh network, its parameters in one vector."""
    parts = flat.split([math.prod(shape) for shape in SHAPES])
    w, b, v, c = (part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True))
    return torch.tanh(states @ w.T + b) @ v.T + c


def mean_kl(new: Tensor, old: Tensor, states: Tensor) -> Tensor:
    """KL(π_old‖π_new) written out, so that no function under test is its own oracle."""
    log_new, log_old = network(new, states).log_softmax(-1), network(old, states).log_softmax(-1)
    return (log_old.exp() * (log_old - log_new)).sum(-1).mean()


def fisher(flat: Tensor, states: Tensor) -> Tensor:
    """E[∇ log π ∇ log πᵀ], every state and every action, one backward pass each."""
    total = torch.zeros(SIZE, SIZE, dtype=DOUBLE)
    leaf = flat.clone().requires_grad_()
    for state in states:
        log_pi = network(leaf, state).log_softmax(-1)
        for a in range(ACTIONS):
            (score,) = torch.autograd.grad(log_pi[a], leaf, retain_graph=True)
            total += log_pi[a].exp().item() * torch.outer(score, score)
    return total / len(states)


def setting(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return random(3 * seed, SIZE) / 3, random(3 * seed + 3, STATES, 2), random(seed + 5, SIZE)


# Fisher-vector products.


@pytest.mark.parametrize(("seed", "damping"), [(0, 0.0), (1, 0.1)])
def test_fisher_vector_product_is_hessian_times_vector_plus_damping(seed: int, damping: float) -> None:
    flat, states, v = setting(seed)
    leaf = flat.clone().requires_grad_()
    ours = F.fisher_vector_product(mean_kl(leaf, flat, states), [leaf], damping)(v)
    hessian = torch.autograd.functional.hessian(lambda new: mean_kl(new, flat, states), flat)
    torch.testing.assert_close(ours, hessian @ v + damping * v, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ours, fisher(flat, states) @ v + damping * v, rtol=1e-9, atol=1e-10)
    assert not ours.requires_grad


def test_several_parameters_are_one_flat_vector_in_their_order() -> None:
    flat, states, v = setting(1)
    leaves = [
        part.reshape(shape).clone().requires_grad_()
        for part, shape in zip(flat.split([math.prod(s) for s in SHAPES]), SHAPES, strict=True)
    ]
    kl = mean_kl(torch.cat([leaf.reshape(-1) for leaf in leaves]), flat, states)
    ours = F.fisher_vector_product(kl, iter(leaves), 0.1)(v)
    torch.testing.assert_close(ours, fisher(flat, states) @ v + 0.1 * v, rtol=1e-9, atol=1e-10)


def test_a_parameter_without_effect_on_the_kl_has_only_damping() -> None:
    seen, unseen = (torch.zeros(n, dtype=DOUBLE, requires_grad=True) for n in (3, 2))
    kl = F.categorical_kl(torch.zeros(3, dtype=DOUBLE), seen)
    v = torch.tensor([1.0, 2.0, 4.0, 5.0, 6.0], dtype=DOUBLE)
    product = F.fisher_vector_product(kl, [seen, unseen], 0.5)(v)
    p = 1 / 3
    expected = [p * (x - 7 / 3) + 0.5 * x for x in (1.0, 2.0, 4.0)] + [2.5, 3.0]
    assert product.tolist() == pytest.approx(expected)


# Conjugate gradient.


def positive_definite(seed: int, n: int) -> Tensor:
    m = random(3 * seed, n, n) / 2
    return m @ m.T + torch.eye(n, dtype=DOUBLE)


@given(seeds, st.integers(1, 8))
def test_conjugate_gradient_solves_positive_definite_systems(seed: int, n: int) -> None:
    matrix, b = positive_definite(seed, n), random(seed + 1, n)
    x = F.conjugate_gradient(lambda v: matrix @ v, b, iterations=4 * n, tolerance=1e-24)
    torch.testing.assert_close(x, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-8)


def test_conjugate_gradient_stops_after_its_iterations_or_at_its_tolerance() -> None:
    matrix, b = positive_definite(1, 6), random(3, 6)
    calls = 0

    def matvec(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return matrix @ v

    F.conjugate_gradient(matvec, b, iterations=3, tolerance=0.0)
    assert calls == 3
    calls = 0
    F.conjugate_gradient(lambda v: matvec(v) * 0 + v, b)  # the identity is solved at once
    assert calls == 1
    x = F.conjugate_gradient(lambda v: matrix @ v, b, iterations=100, tolerance=1e-4)
    residual = b - matrix @ x
    assert 1e-20 < residual @ residual <= 1e-4
    tight = b - matrix @ F.conjugate_gradient(lambda v: matrix @ v, b, iterations=100)
    assert tight @ tight <= 1e-10


def test_conjugate_gradient_of_a_zero_gradient_is_no_step_and_computes_no_product() -> None:
    def matvec(v: Tensor) -> Tensor:
        raise AssertionError("nothing to solve")

    assert F.conjugate_gradient(matvec, torch.zeros(3)).tolist() == [0, 0, 0]
    assert F.conjugate_gradient(matvec, torch.ones(3), iterations=0).tolist() == [0, 0, 0]


# Line search.

outcomes = st.tuples(
    st.sampled_from([-1.0, 0.0, 1e-9, 1.0, math.nan, math.inf]), st.sampled_from([0.0, 0.005, 0.01, 0.010001, 1.0, math.nan])
)


@pytest.mark.parametrize("as_tensor", [False, True])
@given(st.lists(outcomes, min_size=10, max_size=10), st.integers(1, 10), st.sampled_from([0.5, 0.8]))
def test_line_search_takes_the_longest_step_that_improves_within_the_trust_region(
    as_tensor: bool, table: list[tuple[float, float]], tries: int, shrink: float
) -> None:
    full = torch.tensor([1.0, -2.0], dtype=DOUBLE)
    seen: list[list[float]] = []

    def evaluate(step: Tensor) -> tuple[float | Tensor, float | Tensor]:
        seen.append(step.tolist())
        improvement, kl = table[len(seen) - 1]
        return (torch.tensor(improvement), torch.tensor(kl, dtype=DOUBLE)) if as_tensor else (improvement, kl)

    ours = F.line_search(evaluate, full, 0.01, shrink=shrink, tries=tries)
    good = [j for j, (improvement, kl) in enumerate(table[:tries]) if improvement > 0 and kl <= 0.01]
    lengths = [shrink**j for j in range(good[0] + 1 if good else tries)]
    for step, length in zip(seen, lengths, strict=True):
        assert step == pytest.approx([length, -2 * length])
    if good:
        assert ours is not None
        assert ours.tolist() == seen[-1]
    else:
        assert ours is None


def test_line_search_by_default_tries_ten_steps_shrunk_by_four_fifths() -> None:
    norms: list[float] = []

    def evaluate(step: Tensor) -> tuple[float, float]:
        norms.append(step.norm().item())
        return -1.0, 0.0

    assert F.line_search(evaluate, torch.tensor([3.0, 4.0], dtype=DOUBLE), 0.01) is None
    assert norms == pytest.approx([5 * 0.8**j for j in range(10)])


@given(seeds)
def test_the_accepted_step_of_a_real_policy_improves_and_stays_within_the_trust_region(seed: int) -> None:
    """The pieces together on a softmax bandit, with both claims computed again from the probabilities."""
    old, advantages = random(3 * seed, 4) / 2, random(3 * seed + 3, 4)
    leaf = old.clone().requires_grad_()

    def outcome(logits: Tensor) -> tuple[float, float]:
        p, q = ([math.exp(x) for x in row.tolist()] for row in (old, logits))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        gain = sum((b - a) * w for a, b, w in zip(p, q, advantages.tolist(), strict=True))
        return gain, sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    (g,) = torch.autograd.grad((leaf.softmax(-1) * advantages).sum(), leaf)
    matvec = F.fisher_vector_product(F.categorical_kl(old, leaf), [leaf], 0.1)
    direction = F.conjugate_gradient(matvec, g)
    full = (2 * 0.01 / (direction @ matvec(direction))).sqrt() * direction
    step = F.line_search(lambda s: outcome(old + s), full, 0.01)
    assert step is not None
    gain, kl = outcome(old + step)
    assert gain > 0
    assert 0.001 < kl <= 0.01


def test_the_whole_step_keeps_the_dtype_of_its_parameters() -> None:
    dtype = torch.float32
    leaf = torch.zeros(3, dtype=dtype, requires_grad=True)
    matvec = F.fisher_vector_product(F.categorical_kl(leaf.detach(), leaf), [leaf], 0.1)
    direction = F.conjugate_gradient(matvec, torch.tensor([1.0, 0.0, -1.0], dtype=dtype))
    step = F.line_search(lambda s: (1.0, 0.0), direction, 0.01)
    assert step is not None
    assert matvec(direction).dtype == direction.dtype == step.dtype == dtype
