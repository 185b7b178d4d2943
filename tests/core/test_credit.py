"""Credit assignment: every baseline against forward sums in plain Python, over random masks and both kinds of ends."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import A2C, ACTOR_CRITIC, REINFORCE, REINFORCE_BASELINE, Objective
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import Rollout

from .worlds import DOUBLE, TinyPolicy, random_rollout

laws = settings(settings.get_profile("core"))
UNITS = st.sampled_from(["step", "row"])
DISCOUNTS = st.sampled_from([0.0, 0.9, 1.0])
LAMBDAS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def rollout(seed: int, unit: str = "step") -> Rollout:
    return random_rollout(TinyPolicy(seed), seed, unit=unit)


def to_come(r: Rollout, row: int, start: int) -> list[int]:
    """The kept steps from ``start`` to the end of its trace, that end included."""
    steps = []
    for t in range(start, r.mask.shape[1]):
        if r.mask[row, t]:
            steps.append(t)
            if r.terminated[row, t] or r.truncated[row, t]:
                break
    return steps


def table(r: Rollout, worth: Callable[[int, int], float]) -> Tensor:
    """A number for every kept step, 0 at the others."""
    rows, time = r.mask.shape
    return torch.tensor([[worth(row, t) if r.mask[row, t] else 0.0 for t in range(time)] for row in range(rows)], dtype=DOUBLE)


def returns(r: Rollout, gamma: float) -> Tensor:
    return table(r, lambda row, t: sum(gamma**k * float(r.rewards[row, step]) for k, step in enumerate(to_come(r, row, t))))


def advantages(r: Rollout, gamma: float, lam: float) -> Tensor:
    """Â = Σ (γλ)^k δ, with δ written out."""

    def residual(row: int, t: int) -> float:
        following = 0.0 if r.terminated[row, t] else gamma * float(r.next_values[row, t])
        return float(r.rewards[row, t]) + following - float(r.values[row, t])

    return table(r, lambda row, t: sum((gamma * lam) ** k * residual(row, step) for k, step in enumerate(to_come(r, row, t))))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# ---- baselines ----------------------------------------------------------------------------------------------------------


@laws
@given(st.integers(0, 999), UNITS, DISCOUNTS)
def test_without_a_baseline_an_action_is_worth_its_return(seed: int, unit: str, gamma: float) -> None:
    r = rollout(seed, unit)
    credit = assign_credit(r, replace(REINFORCE, gamma=gamma))
    close(credit.advantages, returns(r, gamma))
    close(credit.returns, credit.advantages)


@laws
@given(st.integers(0, 999), UNITS, DISCOUNTS)
def test_the_mean_baseline_subtracts_the_mean_return_of_all_kept_steps(seed: int, unit: str, gamma: float) -> None:
    r = rollout(seed, unit)
    credit = assign_credit(r, replace(REINFORCE_BASELINE, gamma=gamma))
    expected = returns(r, gamma)
    kept = expected[r.mask].tolist()
    close(credit.advantages, torch.where(r.mask, expected - sum(kept) / len(kept), 0.0))
    close(credit.returns, expected)
    assert credit.advantages.sum().abs() < 1e-10


@laws
@given(st.integers(0, 999), UNITS, DISCOUNTS, LAMBDAS)
def test_with_a_critic_an_action_is_worth_its_gae(seed: int, unit: str, gamma: float, lam: float) -> None:
    r = rollout(seed, unit)
    credit = assign_credit(r, replace(A2C, gamma=gamma, gae_lambda=lam))
    expected = advantages(r, gamma, lam)
    close(credit.advantages, expected)
    close(credit.returns, torch.where(r.mask, expected + r.values, 0.0))


# ---- the critic's targets -----------------------------------------------------------------------------------------------


@laws
@given(st.integers(0, 999), LAMBDAS, LAMBDAS)
def test_value_lambda_moves_the_targets_and_not_the_advantages(seed: int, lam: float, value_lambda: float) -> None:
    r = rollout(seed)
    credit = assign_credit(r, replace(A2C, gae_lambda=lam, value_lambda=value_lambda))
    close(credit.advantages, advantages(r, 0.99, lam))
    close(credit.returns, torch.where(r.mask, advantages(r, 0.99, value_lambda) + r.values, 0.0))


# ---- ends and masks -----------------------------------------------------------------------------------------------------


def three_steps(**changes: Tensor) -> Rollout:
    """Rewards 1, 2, 4; V = ½ on the way, 10 at what is seen after the second step, 20 after the last."""
    base = random_rollout(TinyPolicy(0), 0, rows=1, steps=3, holes=False)
    numbers = {
        "rewards": torch.tensor([[1.0, 2.0, 4.0]]),
        "values": torch.tensor([[0.5, 0.5, 0.5]]),
        "next_values": torch.tensor([[0.5, 10.0, 20.0]]),
        "terminated": torch.zeros(1, 3, dtype=torch.bool),
        "truncated": torch.zeros(1, 3, dtype=torch.bool),
    }
    return replace(base, **(numbers | changes))


MIDDLE = torch.tensor([[False, True, False]])
PLAIN = replace(ACTOR_CRITIC, gamma=1.0)


def test_termination_ends_value() -> None:
    """1 + 2 − 0.5: nothing after the second step counts, the 10 included."""
    credit = assign_credit(three_steps(terminated=MIDDLE), PLAIN)
    assert credit.advantages.tolist() == [[2.5, 1.5, 23.5]]
    assert credit.returns.tolist() == [[3.0, 2.0, 24.0]]


def test_truncation_ends_only_the_trace() -> None:
    """1 + 2 + 10 − 0.5: the value of the final observation stands for what would have come."""
    credit = assign_credit(three_steps(truncated=MIDDLE), PLAIN)
    assert credit.advantages.tolist() == [[12.5, 11.5, 23.5]]
    assert credit.returns.tolist() == [[13.0, 12.0, 24.0]]


def test_the_end_of_the_batch_bootstraps() -> None:
    unbroken = three_steps(next_values=torch.tensor([[0.5, 0.5, 20.0]]))
    assert assign_credit(unbroken, PLAIN).returns.tolist() == [[27.0, 26.0, 24.0]]


@pytest.mark.parametrize(
    ("objective", "unit"), [(REINFORCE, "row"), (REINFORCE_BASELINE, "step"), (replace(A2C, value_lambda=1.0), "row")]
)
def test_masked_entries_have_no_credit_and_are_never_read(objective: Objective, unit: str) -> None:
    r = rollout(3, unit)
    assert not r.mask.all()
    poisoned = {name: torch.where(r.mask, getattr(r, name), torch.nan) for name in ("rewards", "values", "next_values")}
    here, there = assign_credit(r, objective), assign_credit(replace(r, **poisoned), objective)
    for clean, after in ((here.advantages, there.advantages), (here.returns, there.returns)):
        assert (clean[~r.mask] == 0).all()
        assert torch.equal(clean, after)


def test_the_successor_of_a_terminated_step_may_be_anything() -> None:
    r = rollout(3)
    assert r.terminated.any()
    poisoned = replace(r, next_values=torch.where(r.terminated, torch.nan, r.next_values))
    assert torch.equal(assign_credit(r, A2C).advantages, assign_credit(poisoned, A2C).advantages)


def test_credit_is_before_any_normalisation() -> None:
    r = rollout(5)
    assert torch.equal(
        assign_credit(r, A2C).advantages, assign_credit(r, replace(A2C, normalise_advantages="batch")).advantages
    )
