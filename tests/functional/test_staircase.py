"""TD residuals, n-step advantages, GAE, returns, and successor values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from . import oracles
from .strategies import DOUBLE, Batch, batches, discounts, lambdas, random, seeds

TIGHT = {"rtol": 1e-10, "atol": 1e-9}


def gae(batch: Batch, lam: float, masked: bool = True) -> Tensor:
    mask = batch.mask if masked else None
    return F.gae(*batch.args(), **batch.flags, gamma=batch.gamma, lam=lam, mask=mask)


def n_step(batch: Batch, n: int) -> Tensor:
    return F.n_step_advantages(*batch.args(), **batch.flags, gamma=batch.gamma, n=n, mask=batch.mask)


def returns(batch: Batch) -> Tensor:
    rewards, following = batch.args("rewards", "next_values")
    return F.discounted_returns(rewards, following, **batch.flags, gamma=batch.gamma, mask=batch.mask)


# Each function is its definition.


@given(batches())
def test_td_residual_is_reward_plus_discounted_successor_minus_value(batch: Batch) -> None:
    delta = F.td_residual(*batch.args(), terminated=batch.terminated, gamma=batch.gamma)
    torch.testing.assert_close(delta, batch.table(oracles.td_residual), **TIGHT)


@given(batches(masked=True), st.integers(1, 8))
def test_n_step_advantage_is_the_discounted_sum_of_n_residuals(batch: Batch, n: int) -> None:
    torch.testing.assert_close(n_step(batch, n), batch.table(oracles.n_step_advantage, n), **TIGHT)


@given(batches(masked=True), lambdas)
def test_gae_is_the_lambda_weighted_mean_of_n_step_advantages(batch: Batch, lam: float) -> None:
    torch.testing.assert_close(gae(batch, lam), batch.table(oracles.lambda_mix, lam), **TIGHT)


@given(batches(), lambdas)
def test_gae_without_a_mask_is_the_lambda_weighted_mean_of_n_step_advantages(batch: Batch, lam: float) -> None:
    torch.testing.assert_close(gae(batch, lam, masked=False), batch.table(oracles.lambda_mix, lam), **TIGHT)


@given(batches(masked=True))
def test_discounted_returns_are_rewards_to_go_with_the_value_of_what_was_cut_off(batch: Batch) -> None:
    torch.testing.assert_close(returns(batch), batch.table(oracles.discounted_return), **TIGHT)


@given(batches(masked=True), seeds, st.booleans(), st.booleans())
def test_successor_value_is_that_of_the_true_successor(batch: Batch, seed: int, cut: bool, finals: bool) -> None:
    values, mask, last = batch.values, batch.mask, random(seed, batch.shape[0])
    truncated = batch.truncated if cut else None
    final_values = batch.next_values if finals else None
    ours = F.successor_values(values, last, truncated=truncated, final_values=final_values, mask=mask)
    for b in range(batch.shape[0]):
        expected = oracles.successors(
            values[b].tolist(),
            last[b].item(),
            mask[b].tolist(),
            None if truncated is None else truncated[b].tolist(),
            None if final_values is None else final_values[b].tolist(),
        )
        assert ours[b][mask[b]].tolist() == torch.tensor(expected, dtype=DOUBLE)[mask[b]].tolist()


# The two ends of lambda, and of n.


@given(batches(masked=True, telescoping=True))
def test_gae_with_lambda_one_is_return_minus_value(batch: Batch) -> None:
    expected = torch.where(batch.mask, batch.table(oracles.discounted_return) - batch.values, 0)
    torch.testing.assert_close(gae(batch, 1.0), expected, **TIGHT)


def test_n_step_advantage_of_fewer_than_one_step_is_rejected() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="n=0"):
        F.n_step_advantages(x, x, x, terminated=x, truncated=x, gamma=0.9, n=0)


# Linearity.


# Ends: termination ends value, truncation ends only the trace.


@given(
    batches(masked=True, min_steps=2),
    st.integers(0, 4),
    st.sampled_from([(True, False), (False, True), (True, True)]),
    lambdas,
    st.sampled_from([math.nan, math.inf, 1e30]),
)
def test_steps_after_an_end_do_not_affect_steps_before_it(
    batch: Batch, end: int, kind: tuple[bool, bool], lam: float, poison: float
) -> None:
    end = min(end, batch.shape[1] - 2)
    batch.mask[:, end] = True
    batch.terminated[:, end], batch.truncated[:, end] = kind
    after = torch.arange(batch.shape[1]).expand(batch.shape) > end
    poisoned = batch.filled(after, poison)
    for credit in (lambda b: gae(b, lam), lambda b: n_step(b, 4), returns):
        before = credit(batch)[:, : end + 1]
        assert torch.isfinite(before).all()
        assert torch.equal(credit(poisoned)[:, : end + 1], before)
    if batch.mask.all():
        assert torch.equal(gae(poisoned, lam, masked=False)[:, : end + 1], gae(batch, lam)[:, : end + 1])


@given(batches(masked=True, min_steps=2), lambdas)
def test_no_gradient_crosses_an_end(batch: Batch, lam: float) -> None:
    end = (batch.shape[1] - 1) // 2
    batch.mask[:, end] = batch.truncated[:, end] = True
    after = torch.arange(batch.shape[1]).expand(batch.shape) > end
    args = [x.requires_grad_() for x in batch.filled(after, math.nan).args()]
    for credit in (
        F.gae(*args, **batch.flags, gamma=batch.gamma, lam=lam, mask=batch.mask),
        F.n_step_advantages(*args, **batch.flags, gamma=batch.gamma, n=4, mask=batch.mask),
    ):
        for gradient in torch.autograd.grad(credit[:, : end + 1].sum(), args):
            assert torch.isfinite(gradient).all()
            assert (gradient[:, end + 1 :] == 0).all()


@given(batches(masked=True), lambdas, st.sampled_from([math.nan, math.inf, -1e30]))
def test_next_values_may_hold_anything_where_terminated(batch: Batch, lam: float, poison: float) -> None:
    anything = torch.where(batch.terminated, poison, batch.next_values)
    rewards, values = batch.rewards, batch.values
    kwargs = {**batch.flags, "gamma": batch.gamma, "mask": batch.mask}
    assert torch.equal(F.gae(rewards, values, anything, lam=lam, **kwargs), gae(batch, lam))
    assert torch.equal(F.n_step_advantages(rewards, values, anything, n=3, **kwargs), n_step(batch, 3))
    assert torch.equal(F.discounted_returns(rewards, anything, **kwargs), returns(batch))
    delta = F.td_residual(rewards, values, anything, terminated=batch.terminated, gamma=batch.gamma)
    clean = F.td_residual(*batch.args(), terminated=batch.terminated, gamma=batch.gamma)
    assert torch.equal(delta, clean)


def test_truncation_bootstraps_and_termination_does_not() -> None:
    rewards, values, following = torch.tensor([[1.0]]), torch.tensor([[0.25]]), torch.tensor([[10.0]])
    yes, no = torch.tensor([[True]]), torch.tensor([[False]])
    kwargs = {"gamma": 0.5, "lam": 0.9}
    assert F.gae(rewards, values, following, terminated=no, truncated=yes, **kwargs).item() == 5.75
    assert F.gae(rewards, values, following, terminated=no, truncated=no, **kwargs).item() == 5.75
    assert F.gae(rewards, values, following, terminated=yes, truncated=no, **kwargs).item() == 0.75
    assert F.gae(rewards, values, following, terminated=yes, truncated=yes, **kwargs).item() == 0.75
    for truncated in (yes, no):
        cut = F.discounted_returns(rewards, following, terminated=no, truncated=truncated, gamma=0.5)
        assert cut.item() == 6.0
        over = F.discounted_returns(rewards, following, terminated=yes, truncated=truncated, gamma=0.5)
        assert over.item() == 1.0


# Masks: kept steps are all that there is.


@given(batches(masked=True), lambdas)
def test_dropping_masked_steps_gives_the_same_numbers_at_kept_ones(batch: Batch, lam: float) -> None:
    outputs = gae(batch, lam), n_step(batch, 3), returns(batch)
    for b in range(batch.shape[0]):
        keep = batch.mask[b]
        if not keep.any():
            continue
        rewards, values, following = (x[b][keep] for x in batch.args())
        flags = {"terminated": batch.terminated[b][keep], "truncated": batch.truncated[b][keep]}
        compact = (
            F.gae(rewards, values, following, **flags, gamma=batch.gamma, lam=lam),
            F.n_step_advantages(rewards, values, following, **flags, gamma=batch.gamma, n=3),
            F.discounted_returns(rewards, following, **flags, gamma=batch.gamma),
        )
        for whole, alone in zip(outputs, compact, strict=True):
            assert torch.equal(whole[b][keep], alone)


@given(batches(min_steps=2), seeds, lambdas)
def test_next_step_autoreset_rows_give_the_same_step_result(batch: Batch, seed: int, lam: float) -> None:
    """The same episodes told in two ways, environment by environment.

    SAME_STEP hands over the final observation at the end itself; NEXT_STEP one row later, in a row whose action is ignored
    (its value is the final observation's, everything else in it is garbage).
    """
    finals, last = random(seed, *batch.shape), random(seed + 1, batch.shape[0])
    for b in range(batch.shape[0]):
        values, flags = batch.values[b], {name: x[b] for name, x in batch.flags.items()}
        following = F.successor_values(values, last[b], truncated=flags["truncated"], final_values=finals[b])
        same_step = F.gae(batch.rewards[b], values, following, **flags, gamma=batch.gamma, lam=lam)

        rows: list[tuple[float, float, bool, bool, bool]] = []
        for t in range(batch.shape[1]):
            terminated, truncated = bool(flags["terminated"][t]), bool(flags["truncated"][t])
            rows.append((batch.rewards[b, t].item(), values[t].item(), terminated, truncated, True))
            if terminated or truncated:
                rows.append((math.nan, finals[b, t].item(), False, False, False))
        observation_to_come = last[b]
        if batch.ended[b, -1]:  # the batch is full before the ignored row comes: its observation is the one to come
            rows.pop()
            observation_to_come = finals[b, -1]
        columns = list(zip(*rows, strict=True))
        rewards, row_values = torch.tensor(columns[:2], dtype=DOUBLE)
        terminated, truncated, mask = torch.tensor(columns[2:])
        following = F.successor_values(row_values, observation_to_come, truncated=truncated, mask=mask)
        next_step = F.gae(
            rewards, row_values, following, terminated=terminated, truncated=truncated, gamma=batch.gamma, lam=lam, mask=mask
        )
        assert torch.equal(next_step[mask], same_step)


# Shapes.


@given(batches(masked=True), lambdas)
def test_rows_are_independent_and_leading_dimensions_are_free(batch: Batch, lam: float) -> None:
    whole = gae(batch, lam), n_step(batch, 3), returns(batch)
    for b in range(batch.shape[0]):
        row = [x[b] for x in batch.args()]
        flags = {name: x[b] for name, x in batch.flags.items()} | {"gamma": batch.gamma, "mask": batch.mask[b]}
        alone = (
            F.gae(*row, lam=lam, **flags),
            F.n_step_advantages(*row, n=3, **flags),
            F.discounted_returns(row[0], row[2], **flags),
        )
        assert all(torch.equal(a[b], c) for a, c in zip(whole, alone, strict=True))
    args = [x[None, :, None] for x in batch.args()]
    flags = {name: x[None, :, None] for name, x in batch.flags.items()}
    deeper = F.gae(*args, **flags, gamma=batch.gamma, lam=lam, mask=batch.mask[None, :, None])
    assert torch.equal(deeper[0, :, 0], whole[0])


@given(batches(masked=True), lambdas, discounts)
def test_flags_of_one_row_serve_all_rows(batch: Batch, lam: float, gamma: float) -> None:
    flags = {name: x[0] for name, x in batch.flags.items()} | {"gamma": gamma, "mask": batch.mask[0]}
    wide = {name: x.expand(batch.shape) if isinstance(x, Tensor) else x for name, x in flags.items()}
    args = batch.args()
    assert torch.equal(F.gae(*args, lam=lam, **flags), F.gae(*args, lam=lam, **wide))
    assert torch.equal(F.n_step_advantages(*args, n=3, **flags), F.n_step_advantages(*args, n=3, **wide))
    assert torch.equal(F.discounted_returns(args[0], args[2], **flags), F.discounted_returns(args[0], args[2], **wide))
    last = args[2][:, -1]
    assert torch.equal(
        F.successor_values(args[1], last, mask=flags["mask"]), F.successor_values(args[1], last, mask=wide["mask"])
    )
