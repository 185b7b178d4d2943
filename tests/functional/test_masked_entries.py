"""Laws of all functions: masks, flags, dtypes, shapes and signatures.

The tables below name every public function once; a function that is in none of them fails the last tests.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot import functional as F

from .strategies import DOUBLE, flags, masks, random, seeds

FLAGS = {"terminated": torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]]), "truncated": torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]])}
ENDS = {name: flag.bool() for name, flag in FLAGS.items()}


@dataclass(frozen=True)
class Masked:
    """A function as one of some tensors [2, 4] and a mask [2, 4].

    least  kept entries that a row needs for its gradient to exist at all (a standard deviation of one number has none)
    still  positions among the tensors that get no gradient by design
    """

    call: Callable[..., Tensor]
    tensors: int = 1
    least: int = 0
    still: tuple[int, ...] = ()


def _moments(x: Tensor, mask: Tensor) -> Tensor:
    return torch.stack(tuple(F.masked_moments(x, mask)[1:]))


MASKED: dict[str, Masked] = {
    "gae": Masked(lambda *x, mask: F.gae(*x, **ENDS, gamma=0.9, lam=0.8, mask=mask), 3),
    "n_step_advantages": Masked(lambda *x, mask: F.n_step_advantages(*x, **ENDS, gamma=0.9, n=3, mask=mask), 3),
    "discounted_returns": Masked(lambda *x, mask: F.discounted_returns(*x, **ENDS, gamma=0.9, mask=mask), 2),
    "successor_values": Masked(
        lambda v, final, mask: F.successor_values(
            v, torch.ones(2, dtype=v.dtype), truncated=ENDS["truncated"] & mask.bool(), final_values=final, mask=mask
        ),
        2,
    ),
    "explained_variance": Masked(lambda v, r, mask: F.explained_variance(v, r, mask), 2, least=2),
    "group_advantages": Masked(lambda r, mask: F.group_advantages(r, mask), least=2),
    "group_advantages unscaled": Masked(lambda r, mask: F.group_advantages(r, mask, scale=False)),
    "leave_one_out_advantages": Masked(lambda r, mask: F.leave_one_out_advantages(r, mask)),
    "pair_advantages": Masked(lambda r, h, mask: F.pair_advantages(r, h, 0.5, mask), 2, still=(0,)),
    "masked_mean": Masked(F.masked_mean),
    "masked_var": Masked(F.masked_var),
    "masked_moments": Masked(_moments),
    "whiten": Masked(lambda x, mask: F.whiten(x, mask)),
    "whiten scale only": Masked(lambda x, mask: F.whiten(x, mask, shift_mean=False)),
    "whiten by given moments": Masked(
        lambda x, mask: F.whiten(
            x, mask, moments=F.Moments(torch.tensor(9.0), torch.tensor(0.5, dtype=x.dtype), torch.tensor(2.0, dtype=x.dtype))
        )
    ),
    "kl_shaped_rewards": Masked(lambda r, p, q, mask: F.kl_shaped_rewards(r, p, q, mask, 0.1), 3, still=(1, 2)),
    "expert_load": Masked(lambda x, mask: F.expert_load(torch.stack((x, -x), -1).flatten(0, 1), 1, mask.flatten())[1]),
    "covariance_terms": Masked(lambda p, a, mask: F.covariance_terms(p, a, mask), 2),
    "sequence_ratio": Masked(lambda p, q, mask: F.sequence_ratio(p, q, mask), 2),
    "sampler_ratio": Masked(lambda p, q, mask: F.sampler_ratio(p, q, mask), 2),
    "sampler_ratio of responses": Masked(lambda p, q, mask: F.sampler_ratio(p, q, mask, sequence=True), 2),
    "importance_weights": Masked(lambda p, q, mask: F.importance_weights(p, q, 2.0, mask=mask), 2),
    "importance_weights masked by response": Masked(
        lambda p, q, mask: F.importance_weights(p, q, 2.0, "sequence_mask", mask), 2
    ),
    "aggregate": Masked(lambda x, mask: F.aggregate(x, mask, "token-mean")),
    "aggregate sequence-mean": Masked(lambda x, mask: F.aggregate(x, mask, "sequence-mean")),
    "aggregate sequence-sum": Masked(lambda x, mask: F.aggregate(x, mask, "sequence-sum")),
    "aggregate constant": Masked(lambda x, mask: F.aggregate(x, mask, "constant")),
}
POISONS = [math.nan, math.inf, -math.inf, 1e308]


def inputs_of(entry: Masked, seed: int) -> list[Tensor]:
    return [x + 0.01 * i for i, x in enumerate(random(3 * seed, entry.tensors, 2, 4))]  # 3·seed: no ties


def with_gradients(entry: Masked, tensors: list[Tensor], mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    output = entry.call(*leaves, mask=mask)
    weights = random(0, *output.shape)
    gradients = torch.autograd.grad((output * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    return output.detach(), list(gradients)


@pytest.mark.parametrize("name", MASKED)
@given(seeds, masks(2, 4), st.sampled_from(POISONS))
def test_what_is_masked_never_reaches_values_or_gradients(name: str, seed: int, mask: Tensor, poison: float) -> None:
    entry = MASKED[name]
    mask = mask.clone()
    mask[:, : entry.least] = True
    clean = [torch.where(mask, x, 0) for x in inputs_of(entry, seed)]
    poisoned = [torch.where(mask, x, poison) for x in clean]
    value, gradients = with_gradients(entry, clean, mask)
    same_value, same_gradients = with_gradients(entry, poisoned, mask)
    assert torch.isfinite(value).all()
    assert torch.equal(value, same_value)
    for i, (gradient, same) in enumerate(zip(gradients, same_gradients, strict=True)):
        assert torch.isfinite(gradient).all()
        assert torch.equal(gradient, same)
        assert (gradient[~mask] == 0).all()
        if i in entry.still:
            assert (gradient == 0).all()


# Flags may be bool, or 0 and 1 of any dtype.

KINDS = [torch.float64, torch.bfloat16, torch.int64, torch.uint8]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_masks_of_zeros_and_ones_equal_bool_masks(kind: torch.dtype) -> None:
    mask = flags(0b10111101, 2, 4)
    for name, entry in MASKED.items():
        tensors = inputs_of(entry, 5)
        assert torch.equal(entry.call(*tensors, mask=mask.to(kind)), entry.call(*tensors, mask=mask)), name


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ends_of_zeros_and_ones_equal_bool_ends(kind: torch.dtype) -> None:
    r, v, following = random(3, 3, 2, 4)
    last = following[:, 0]

    def all_of(terminated: Tensor, truncated: Tensor) -> list[Tensor]:
        ends = {"terminated": terminated, "truncated": truncated, "gamma": 0.9}
        return [
            F.gae(r, v, following, lam=0.8, **ends),
            F.n_step_advantages(r, v, following, n=3, **ends),
            F.discounted_returns(r, following, **ends),
            F.td_residual(r, v, following, terminated=terminated, gamma=0.9),
            F.successor_values(v, last, truncated=truncated),
            F.successor_values(v, last, truncated=truncated, final_values=following),
        ]

    numbers = all_of(*(flag.to(kind) for flag in FLAGS.values()))
    assert all(torch.equal(a, b) for a, b in zip(numbers, all_of(*ENDS.values()), strict=True))


def test_gae_can_be_vmapped_and_traced() -> None:
    def advantages(rewards: Tensor, ended: Tensor) -> Tensor:
        return F.gae(rewards, rewards, rewards, terminated=ended, truncated=ended, gamma=0.9, lam=0.8)

    rewards, ended = torch.arange(6.0).view(2, 3), torch.tensor([[False, True, False], [False, False, False]])
    traced = make_fx(advantages, tracing_mode="fake")(rewards, torch.zeros_like(ended))
    for function in (torch.vmap(advantages), traced):
        assert torch.equal(function(rewards, ended), advantages(rewards, ended))


# dtype follows the inputs.

MASK = flags(0b11111101, 2, 4)
TOKENS = torch.tensor([2, 0])
PLAIN: dict[str, Callable[[Callable[..., Tensor]], Tensor | tuple[Tensor, ...]]] = {
    "td_residual": lambda x: F.td_residual(x(), x(), x(), terminated=ENDS["terminated"], gamma=0.9),
    "successor_values": lambda x: F.successor_values(x(), x(2), truncated=ENDS["truncated"], final_values=x(), mask=MASK),
    "importance_ratio": lambda x: F.importance_ratio(x(), x()),
    "unclipped_surrogate": lambda x: F.unclipped_surrogate(x(), x()),
    "weighted_surrogate": lambda x: F.weighted_surrogate(x(), x().abs(), x(), 1.2),
    "clipped_surrogate": lambda x: F.clipped_surrogate(x().abs(), x(), 0.2, 0.3, dual_clip=3.0),
    "value_loss": lambda x: F.value_loss(x(), x(), x(), clip=0.2),
    "kl_k1": lambda x: F.kl_k1(x(), x()),
    "kl_k2": lambda x: F.kl_k2(x(), x()),
    "kl_k3": lambda x: F.kl_k3(x(), x()),
    "categorical_kl": lambda x: F.categorical_kl(x(), x()),
    "gaussian_kl": lambda x: F.gaussian_kl(x(), x(), x(), x()),
    "adapt_kl_penalty": lambda x: (
        F.adapt_kl_penalty(0.1, x().mean().abs(), 0.01),
        F.adapt_kl_penalty(x(2)[0], 0.3, 0.01),
        F.adapt_kl_penalty(x(2)[0], x(2)[1], 0.01),
    ),
    "proportional_kl_control": lambda x: (
        F.proportional_kl_control(0.1, x().mean(), 6.0, 8, 100),
        F.proportional_kl_control(x(2)[0], 3.0, 6.0, 8, 100),
        F.proportional_kl_control(x(2)[0], x(2)[1], 6.0, 8, 100),
    ),
    "token_log_probs": lambda x: F.token_log_probs(x(), TOKENS, 0.7),
    "token_entropy": lambda x: F.token_entropy(x(), 0.7),
    "place_scores": lambda x: F.place_scores(x(2), MASK),
    "overlong_penalty": lambda x: F.overlong_penalty(x().abs(), 3, 2.5),
    "masked_moments": lambda x: F.masked_moments(x(), MASK),
    "merge_moments": lambda x: F.merge_moments(F.masked_moments(x(), MASK), F.masked_moments(x(), None)),
    "bradley_terry_loss": lambda x: F.bradley_terry_loss(x(), x()),
    "dpo_loss": lambda x: F.dpo_loss(x(), x(), x(), x(), 0.1, label_smoothing=0.1),
    "ipo_loss": lambda x: F.ipo_loss(x(), x(), x(), x(), 0.1, label_smoothing=0.1),
    "kto_loss": lambda x: F.kto_loss(x(), x(), x() > 0, x(), 0.1),
    "simpo_loss": lambda x: F.simpo_loss(x(), x(), 2.0, 1.0),
    "orpo_loss": lambda x: F.orpo_loss(-x().abs() - 0.1, -x().abs() - 0.1, 0.1),
    "load_balance": lambda x: F.load_balance(x(2).abs(), x(2).abs(), x(2).abs()[0]),
    "aggregate by a global count": lambda x: F.aggregate(x(), MASK, "token-mean", denominator=torch.tensor(17)),
    **{
        name: (lambda x, entry=entry: entry.call(*(x() for _ in range(entry.tensors)), mask=MASK))
        for name, entry in MASKED.items()
        if name not in ("masked_moments", "whiten by given moments", "successor_values")
    },
}
OTHER_LIBRARIES = {
    "clip_active": "bool out: test_surrogates.py",
    "ratio_outside": "bool out: test_surrogates.py",
    "largest_share": "bool out: test_kl.py",
    "fisher_vector_product": "takes a graph: test_natural_gradient.py",
    "conjugate_gradient": "takes a function: test_natural_gradient.py",
    "line_search": "takes a function: test_natural_gradient.py",
    "chunked_likelihood": "takes a function: test_likelihood.py",
    "adapt_learning_rate": "numbers alone: test_kl.py",
    "Moments": "a type",
    "Aggregation": "a type",
}


@pytest.mark.parametrize("name", PLAIN)
def test_dtype_follows_the_inputs_float32_is_float64_up_to_rounding_and_no_input_changes(name: str) -> None:
    def run(dtype: torch.dtype) -> list[Tensor]:
        made: list[tuple[Tensor, Tensor]] = []

        def make(*shape: int) -> Tensor:
            x = random(3 * len(made) + 3, *(shape or (2, 4))).to(dtype)
            made.append((x, x.clone()))
            return x

        output = PLAIN[name](make)
        assert made
        assert all(torch.equal(x, before) for x, before in made)
        tensors = list(output) if isinstance(output, tuple) else [output]
        assert [x.dtype for x in tensors] == [dtype] * len(tensors)
        return [x.double() for x in tensors]

    run(torch.bfloat16)
    for single, double in zip(run(torch.float32), run(DOUBLE), strict=True):
        torch.testing.assert_close(single, double, rtol=1e-5, atol=1e-5)
    assert torch.equal(MASK, flags(0b11111101, 2, 4))


# The contract itself.


def test_every_public_function_is_held_to_these_laws() -> None:
    named = {name.split()[0] for name in (*MASKED, *PLAIN)} | set(OTHER_LIBRARIES)
    assert named == set(F.__all__)


def test_every_function_with_an_optional_mask_is_in_the_masked_table() -> None:
    with_mask = {
        name for name in F.__all__ if inspect.isfunction(f := getattr(F, name)) and "mask" in inspect.signature(f).parameters
    }
    assert with_mask == {name.split()[0] for name in MASKED} | {"place_scores"}


def test_flags_and_discounts_are_keyword_only() -> None:
    """Two of them swapped by position would be silent."""
    staircase = [F.discounted_returns, F.successor_values, F.td_residual, F.n_step_advantages, F.gae]
    for flag in ("terminated", "truncated", "final_values", "gamma", "lam", "n"):
        flags = [p for f in staircase if (p := inspect.signature(f).parameters.get(flag))]
        assert flags
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in flags), flag
