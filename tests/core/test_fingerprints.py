"""Laws of fingerprints: what changes a hash, what does not, and that they change no result."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import PPO_CLIP, TRPO, Objective, Reuse
from surefoot.core import fingerprints
from surefoot.core.credit import assign_credit
from surefoot.core.fingerprints import CHUNK, Fingerprints, measure
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Rollout

from .worlds import TinyPolicy, random_rollout

ONE = replace(PPO_CLIP, reuse=Reuse(1, 1))
laws = settings(settings.get_profile("core"))
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])


def hashed(x: Tensor, start: int = 0) -> int:
    return int(measure(x, start)[0]) % 2**64


@laws
@given(dtypes, st.integers(1, 300), st.data())
def test_a_change_of_one_bit_anywhere_changes_the_hash(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    x = torch.randint(0, 2, (size,)).to(dtype)
    raw = x.clone().view(torch.uint8)
    bits = 1 if dtype == torch.bool else 8
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, bits - 1))
    assert hashed(raw.view(dtype)) != hashed(x)


@laws
@given(st.integers(0, 40), st.integers(0, 40))
def test_parts_of_a_tensor_have_together_the_hash_and_the_sums_of_the_whole(first: int, second: int) -> None:
    """Also where a part begins inside a chunk and ends in another."""
    ends = [0, first * CHUNK // 20, first * CHUNK // 20 + second * CHUNK // 20 + 3]
    x = torch.randn(ends[-1])
    parts = [(x[a:b], a) for a, b in itertools.pairwise(ends)]
    assert sum(hashed(part, start) for part, start in parts) % 2**64 == hashed(x)
    sums = torch.tensor([[float(a), float(b)] for part, start in parts for _, a, b in [measure(part, start)]]).sum(0)
    torch.testing.assert_close(sums, torch.tensor(measure(x)[1:], dtype=sums.dtype))


@laws
@given(dtypes, st.integers(0, 3 * CHUNK), st.integers(0, 3 * CHUNK))
def test_another_device_has_the_same_hash_and_sums(dtype: torch.dtype, size: int, start: int) -> None:
    x = (3 * torch.randn(size)).to(dtype)
    number, *sums = fingerprints._measure_on_device(x, start)
    assert int(number) % 2**64 == hashed(x, start)
    torch.testing.assert_close([float(each) for each in sums], [float(each) for each in measure(x, start)[1:]])


def updated(objective: Objective = ONE, change: float = 0.0, taken: bool = True, rollout: Rollout | None = None) -> Learner:
    policy = TinyPolicy(seed=1)
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(1e-2)))
    learner.fingerprints = Fingerprints(1) if taken else None
    rollout = rollout or random_rollout(policy, seed=2)
    rollout = replace(rollout, rewards=rollout.rewards + change)
    learner.update(rollout, assign_credit(rollout, objective), LearnerState.seeded(1, 100))
    return learner


def rows(learner: Learner) -> dict[str, list[object]]:
    assert learner.fingerprints is not None
    assert learner.fingerprints.row is not None
    return learner.fingerprints.row


@pytest.mark.parametrize("objective", [ONE, TRPO])
def test_stages_before_a_change_stay_and_those_after_it_differ(objective: Objective) -> None:
    before, after = rows(updated(objective)), rows(updated(objective, change=1e-6))
    assert list(before)[:6] == ["weights", "inputs", "actions", "log_probs", "rewards", "advantages"]
    assert [name for name in before if before[name] != after[name]] == ["rewards", "advantages", "gradient", "updated"]


def test_what_masked_steps_hold_changes_nothing() -> None:
    rollout = random_rollout(TinyPolicy(seed=1), seed=2)
    spoiled = replace(rollout, rewards=torch.where(rollout.mask, rollout.rewards, 7.0))
    assert not rollout.mask.all()
    assert rows(updated(rollout=spoiled))["rewards"] == rows(updated(rollout=rollout))["rewards"]


def test_fingerprints_change_no_weight() -> None:
    with_them, without = updated(), updated(taken=False)
    for one, other in zip(with_them.policy.parameters(), without.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_costly_fingerprints_become_rare_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "SHARE", 1e-6)
    learner = updated()
    lines: list[str] = []
    learner.fingerprints = taker = Fingerprints(show=lines.append)
    assert isinstance(learner.policy, TinyPolicy)
    state, taken = LearnerState.seeded(1, 100), []
    for state.iteration in range(fingerprints.MEASURED + 3):
        rollout = random_rollout(learner.policy, seed=2)
        learner.update(rollout, assign_credit(rollout, ONE), state)
        taken.append(taker.row is not None)
    assert taken == [True] * (fingerprints.MEASURED + 1) + [False] * 2
    assert taker.every is not None
    assert taker.every & (taker.every - 1) == 0
    assert ["of one iteration in" in line for line in lines] == [True]
