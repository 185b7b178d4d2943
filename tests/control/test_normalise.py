"""Running normalisers: exact over all kept steps, frozen while acting, and saved with the agent."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import surefoot
from surefoot import PPO_CLIP, SurefootError
from surefoot.control.export import export_agent
from surefoot.control.normalise import ObservationNormaliser, RewardNormaliser, running_returns
from surefoot.control.world import ControlWorld
from surefoot.core.loop import run_loop
from surefoot.core.rollout import LearnerState
from surefoot.runs.factory import make_learner

from .tiny import Clockwork, Endless, Sampled, bare, clockworks, fresh_state, one_by_one, world_of

GOLDEN = Path(__file__).parents[1] / "golden" / "golden.json"
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in json.loads(GOLDEN.read_text("utf-8"))}

BOTH = {"observations": True, "rewards": True}
GAMMA = 0.9


def normalising(single: Sequence[Any], steps: int = 10, clip: float = 10.0) -> ControlWorld:
    rollout = {"environments": len(single), "steps": steps}
    fields: dict[str, Any] = {"normalise": {**BOTH, "clip": clip}, "rollout": rollout}
    return world_of(one_by_one(single), PPO_CLIP, **{**fields, "objective": {"gamma": GAMMA, "reuse": {"minibatches": 1}}})


def buffers(agent: surefoot.Agent) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in agent.named_buffers()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def discounted_of(single: Sequence[Clockwork]) -> np.ndarray:
    """[B, T] the discounted return up to each step of its own episode, by its definition."""
    rows = []
    for env in single:
        row = []
        for t, step in enumerate(env.log):
            episode = [past.reward for past in env.log[: t + 1] if past.episode == step.episode]
            row.append(sum(reward * GAMMA**age for age, reward in enumerate(reversed(episode))))
        rows.append(row)
    return np.array(rows)


# ---- moments ----------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31 - 1), parts=st.integers(1, 5), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_running_moments_are_numpys_over_all_kept_data(seed: int, parts: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    normaliser, kept = ObservationNormaliser(bare((3,)), 10.0), []
    for _ in range(parts):
        x = scale * (generator.standard_normal((2, 5, 3)) + 2).astype(np.float32)
        mask = generator.random((2, 5)) < 0.7
        x[~mask] = np.nan
        normaliser.update(torch.from_numpy(x), torch.from_numpy(mask))
        kept.append(x[mask])
    data = np.concatenate(kept).astype(np.float64)
    if len(data):
        np.testing.assert_allclose(normaliser.mean, data.mean(0), rtol=1e-12)
        np.testing.assert_allclose(normaliser.var, data.var(0), rtol=1e-9, atol=1e-18)
    assert normaliser.count == len(data)
    assert normaliser.mean.dtype == normaliser.var.dtype == torch.float64


def test_an_update_in_which_nothing_is_kept_changes_nothing() -> None:
    for rows in (0, 7):
        normaliser = ObservationNormaliser(bare((2,)), 10.0)
        if rows:
            normaliser.update(torch.rand(1, rows, 2), torch.ones(1, rows, dtype=torch.bool))
        before = {name: buffer.clone() for name, buffer in normaliser.named_buffers()}
        normaliser.update(torch.full((1, 4, 2), torch.nan), torch.zeros(1, 4, dtype=torch.bool))
        if rows:
            assert_same(before, dict(normaliser.named_buffers()))
        assert normaliser(bare(torch.rand(2)))["observation"].isfinite().all()


def test_moments_for_rewards_are_those_of_the_discounted_return_which_restarts_after_any_end() -> None:
    single = clockworks()
    world = normalising(single, steps=13)
    for part in range(4):
        world.collector.collect(fresh_state(part))
        seen = discounted_of(single)
        np.testing.assert_allclose(world.agent.reward_normaliser.var, seen.var(), rtol=1e-12)
        over = [env.log[-1].terminated or env.log[-1].truncated for env in single]
        np.testing.assert_allclose(world.collector.discounted, np.where(over, 0, seen[:, -1]), rtol=1e-12)


# ---- the discounted return --------------------------------------------------------------------------------------------


def test_golden_the_accumulator_is_reset_at_a_truncation_as_in_baselines_and_not_as_in_gymnasium() -> None:
    case = CASES["gymnasium_normalizereward_truncation_leak"]
    x = {name: torch.tensor([case["inputs"][name]], dtype=torch.float64) for name in ("rewards", "terminated", "truncated")}
    ended = x["terminated"].bool() | x["truncated"].bool()
    keep, nothing = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, dtype=torch.float64)
    ours, carried = running_returns(x["rewards"], ended, keep, nothing, case["inputs"]["gamma"])
    expected = case["expected"]["baselines_accumulator"]
    np.testing.assert_allclose(ours[0], expected, rtol=0, atol=case["tolerance"])
    assert carried.tolist() == pytest.approx(expected[-1:])
    assert abs(float(ours[0, 3]) - case["expected"]["gymnasium_1_4_accumulator"][3]) > 1


@given(seed=st.integers(0, 2**31 - 1), cut=st.integers(1, 11))
def test_the_discounted_return_does_not_depend_on_where_rollouts_are_cut(seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    keep = torch.rand(3, 12, generator=generator) < 0.8
    ended = (torch.rand(3, 12, generator=generator) < 0.2) & keep
    nothing = torch.zeros(3, dtype=torch.float64)
    whole, last = running_returns(rewards, ended, keep, nothing, GAMMA)
    first, carried = running_returns(rewards[:, :cut], ended[:, :cut], keep[:, :cut], nothing, GAMMA)
    second, carried = running_returns(rewards[:, cut:], ended[:, cut:], keep[:, cut:], carried, GAMMA)
    assert torch.equal(torch.cat([first, second], 1)[keep], whole[keep])
    assert torch.equal(carried, last)


def test_masked_rows_change_no_statistics() -> None:
    keep = torch.tensor([[True, True, False, True, False, True]])
    rewards = torch.tensor([[1.0, 2.0, torch.nan, 3.0, torch.inf, 4.0]])
    ended = torch.tensor([[False, True, False, False, True, False]])
    ours, carried = running_returns(rewards, ended, keep, torch.zeros(1), 0.5)
    assert ours[keep].tolist() == [1.0, 2.5, 3.0, 5.5]
    assert carried.tolist() == [5.5]


# ---- some parts of an observation -------------------------------------------------------------------------------------

ARM = spaces.Dict(angle=spaces.Box(-5, 5, (2,)), speed=spaces.Box(-5, 5, ()))
ROBOT = spaces.Dict(
    arm=ARM, place=spaces.Box(-5, 5, (3,)), gear=spaces.Discrete(3), eye=spaces.Box(0, 255, (36, 36, 3), np.uint8)
)


def of_parts(observations: Any, space: Any = ROBOT) -> ControlWorld:
    fields = {"rollout": {"environments": 2, "steps": 8}, "normalise": {"observations": observations}}
    return world_of(lambda: Sampled(space, spaces.Discrete(2)), **fields)


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [
        (True, {"arm.angle", "arm.speed", "place"}),
        (False, set()),
        (["arm"], {"arm.angle", "arm.speed"}),
        (["arm.speed", "place", "place"], {"arm.speed", "place"}),
    ],
)
def test_only_the_chosen_parts_are_normalised_and_the_others_are_as_observed(chosen: Any, parts: set[str]) -> None:
    world = of_parts(chosen)
    for part in range(2):
        rollout = world.collector.collect(fresh_state(part))
    raw = world.collector.raw.observations
    seen = {path for path in raw if not np.array_equal(rollout.inputs[path].numpy(), raw[path])}
    assert seen == parts


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            ["plce"],
            r"^normalise\.observations=\['plce'\]: the observation has no part 'plce'; did you mean 'place'\? \(parts: 'arm\.",
        ),
        (
            ["eye"],
            r"^normalise\.observations=\['eye'\]: 'eye' is an image, bits or a choice, which are never normalised; leave it",
        ),
    ],
)
def test_an_unknown_part_to_normalise_is_rejected(chosen: Any, message: str) -> None:
    with pytest.raises(SurefootError, match=message):
        of_parts(chosen)


# ---- frozen, then updated ---------------------------------------------------------------------------------------------


def test_statistics_are_frozen_within_a_rollout_and_updated_after_it() -> None:
    single = clockworks()
    world = normalising(single)
    for part in range(4):
        before = buffers(world.agent)
        rollout = world.collector.collect(fresh_state(part))
        raw = torch.from_numpy(np.stack([[step.observation for step in env.log[-10:]] for env in single]))
        rewards = torch.tensor([[step.reward for step in env.log[-10:]] for env in single])
        mean, var = before["observation_normaliser.mean"], before["observation_normaliser.var"]
        expected = ((raw - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
        torch.testing.assert_close(rollout.inputs["observation"], expected.float())
        expected = (rewards / (before["reward_normaliser.var"] + 1e-8).sqrt()).clamp(-10, 10)
        torch.testing.assert_close(rollout.rewards, expected.float())
        assert torch.equal(rollout.reward_parts["environment"], rewards)
        after = buffers(world.agent)
        for name in before:
            assert not torch.equal(before[name], after[name]), name


class Clock(gymnasium.Env[np.ndarray, Any]):
    """Whole numbers below 100, after a large one that never changes."""

    def __init__(self, offset: float, kind: Any) -> None:
        self.observation_space, self.action_space = spaces.Box(-9e12, 9e12, (2,), kind), spaces.Discrete(2)
        self.offset = offset

    def seen(self) -> np.ndarray:
        return (self.np_random.integers(0, 100, 2) + self.offset).astype(self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.seen(), 0.0, False, bool(self.np_random.random() < 0.3), {}


@pytest.mark.parametrize("kind", [np.int64])
def test_a_small_part_of_a_large_number_is_normalised_before_it_becomes_float32(kind: Any, tmp_path: Path) -> None:
    """In rollouts with their final observations, in predictions, values and exported files."""
    results: list[list[Any]] = []
    for offset in (0, 1_700_000_000):
        world = normalising([Clock(offset, kind) for _ in range(2)])
        _, rollout = (world.collector.collect(fresh_state(seed)) for seed in (1, 2))
        seen = np.array([[3, 70], [90, 4]], kind) + kind(offset)
        export_agent(world.agent, file := tmp_path / f"{offset}.pt2", "torch")
        logits = torch.export.load(file).module()(torch.from_numpy(seen.astype(np.float64)))[1]
        results.append([rollout.inputs["observation"], rollout.values, rollout.next_values, world.agent.value(seen), logits])
        assert rollout.inputs["observation"].dtype == torch.float32
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-4, atol=1e-5)


def test_rollouts_count_parts_that_never_change_and_steps_outside_their_bounds() -> None:
    rows = {"environments": 2, "steps": 10}
    for normalised, constant in ((False, 1), (True, 0)):
        fields: dict[str, Any] = {"rollout": rows, "normalise": {"observations": normalised}}
        world = world_of(one_by_one([Clock(1.7e12, np.float64) for _ in range(2)]), PPO_CLIP, **fields)
        metrics = world.collector.collect(fresh_state()).metrics
        assert metrics["observations_constant"] == constant, "as the policy reads it"
        assert metrics["observations_outside"] == 0
    narrow = [Clock(0, np.float32) for _ in range(2)]
    for each in narrow:
        each.observation_space = spaces.Box(0, np.array([99, 49], np.float32))
    world = world_of(one_by_one(narrow), PPO_CLIP, rollout=rows)
    metrics = world.collector.collect(fresh_state()).metrics
    assert metrics["observations_outside"] == (world.collector.raw.observations["observation"][..., 1] > 49).mean()  # type: ignore[union-attr]
    assert 0 < metrics["observations_outside"] < 1  # type: ignore[operator]


def test_the_final_observation_is_seen_through_the_same_statistics() -> None:
    """V of a truncated episode's last observation goes through the normaliser as it stood when the rollout was made."""
    single = clockworks([((4, "truncated"),)])
    world = normalising(single, steps=10)
    world.collector.collect(fresh_state())
    frozen = world.agent.normaliser()
    rollout = world.collector.collect(fresh_state())
    t = int(rollout.truncated[0].nonzero()[0])
    final = torch.from_numpy(single[0].log[10 + t].successor)
    torch.testing.assert_close(rollout.next_values[0, t], world.policy.values(frozen(bare(final))).detach())


# ---- numbers ----------------------------------------------------------------------------------------------------------


def test_the_clip_is_a_setting() -> None:
    world = normalising(clockworks(), clip=0.5)
    world.collector.collect(fresh_state())
    rollout = world.collector.collect(fresh_state())
    for part in (rollout.inputs["observation"], rollout.rewards):
        assert part.abs().max() == 0.5


@pytest.mark.parametrize("constant", [0.1, 3e38])
def test_a_constant_feature_stays_finite(constant: float) -> None:
    class Constant(Endless):
        def reset(self, **_: Any) -> Any:
            return np.float32([constant, 0]), {}

        def step(self, action: Any) -> Any:
            return np.float32([constant, self.np_random.random()]), 1.0, False, False, {}

    world = normalising([Constant(), Constant()], steps=10)
    for part in range(3):
        rollout = world.collector.collect(fresh_state(part))
        assert rollout.inputs["observation"].isfinite().all()
        assert all(buffer.isfinite().all() for buffer in buffers(world.agent).values())
    assert rollout.inputs["observation"][..., 0].abs().max() < 1e-3


# ---- the critic's unit ------------------------------------------------------------------------------------------------


def settled(deviation: float, unit: float) -> RewardNormaliser:
    """A normaliser with this deviation, whose critic's values are in this unit."""
    normaliser = RewardNormaliser(GAMMA, 10.0)
    normaliser.var.fill_(deviation**2)
    normaliser.unit.fill_(unit)
    return normaliser


KEPT = torch.ones(1, 3, dtype=torch.bool)


def test_targets_of_rewards_alone_are_in_units_of_the_deviation_and_targets_of_values_keep_theirs() -> None:
    part, none = torch.tensor([[1.0, 2.0, -3.0]]), torch.zeros(1, 3)
    normaliser = settled(8.0, 2.0)
    normaliser.follow_critic(none, part, KEPT)
    assert float(normaliser.unit) == 2.0
    normaliser.follow_critic(none, none, KEPT)
    assert float(normaliser.unit) == 2.0, "targets of zeros fit every unit"
    normaliser.follow_critic(part, none, KEPT)
    assert float(normaliser.unit) == pytest.approx(8.0)


@given(
    st.floats(0.1, 100),
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=3, max_size=3),
)
def test_the_unit_is_the_one_in_which_the_targets_are_nearest_to_those_in_the_tasks_units(
    deviation: float, unit: float, parts: list[tuple[float, float]]
) -> None:
    p, b = (torch.tensor([column], dtype=torch.float64) for column in zip(*parts, strict=True))
    normaliser = settled(deviation, unit)
    normaliser.follow_critic(p, b, KEPT)
    found = float(normaliser.unit)
    low, high = sorted((float(normaliser.deviation), unit))
    assert low * (1 - 1e-9) <= found <= high * (1 + 1e-9)
    exact = float(normaliser.deviation) * p + unit * b

    def miss(candidate: float) -> float:
        return float((candidate * (p + b) - exact).square().sum())

    assert all(miss(found) <= miss(other) * (1 + 1e-9) + 1e-6 for other in np.linspace(low, high, 21))


def test_rows_that_are_not_kept_and_numbers_that_are_not_finite_change_no_unit() -> None:
    normaliser = settled(8.0, 2.0)
    part = torch.tensor([[1.0, 2.0, 5.0]])
    normaliser.follow_critic(part, torch.full((1, 3), math.nan), KEPT)
    assert float(normaliser.unit) == 2.0
    normaliser.follow_critic(torch.tensor([[0.0, 0.0, 9.0]]), part, torch.tensor([[True, True, False]]))
    assert float(normaliser.unit) == 2.0


def test_in_every_iteration_the_value_is_that_of_a_critic_that_learned_without_the_normaliser() -> None:
    fields: dict[str, Any] = {
        "objective": {"gamma": 0.98, "reuse": {"epochs": 20, "minibatches": 4}},
        "rollout": {"environments": 2, "steps": 64},
        "optimizer": {"learning_rate": 1e-2, "max_grad_norm": None},
    }

    def values(rewards: bool) -> list[float]:
        world = world_of(one_by_one([Endless(), Endless()]), PPO_CLIP, normalise={"rewards": rewards}, **fields)
        found: list[float] = []

        def keep(state: LearnerState, metrics: Any) -> bool:
            found.append(float(world.agent.value(np.zeros(2, np.float32))))
            return state.iteration == 5

        run_loop(world.collector, make_learner(world.recipe, world.policy), fresh_state(), keep)
        return found

    expected = values(rewards=False)
    assert 8 < expected[0] < 20 < 30 < expected[-1] < 51, "the return is 50, and the first iterations don't know it"
    assert values(rewards=True) == pytest.approx(expected, rel=0.08)


# ---- part of the agent ------------------------------------------------------------------------------------------------


def trained() -> surefoot.Agent:
    fields: dict[str, Any] = {"normalise": BOTH, "evaluation": {"episodes": 0}, "rollout": {"environments": 2, "steps": 50}}
    return surefoot.train("Pendulum-v1", PPO_CLIP, steps=300, objective={"reuse": {"epochs": 1, "minibatches": 2}}, **fields)


def test_evaluating_acting_and_valuing_change_no_statistic() -> None:
    agent = trained()
    before = buffers(agent)
    surefoot.evaluate(agent, episodes=3)
    surefoot.evaluate(agent, episodes=3, deterministic=False)
    agent.predict(np.ones((5, 3), np.float32))
    agent.value(np.ones(3, np.float32))
    assert_same(before, buffers(agent))


def test_an_evaluation_sees_observations_through_the_statistics_and_its_returns_are_not_normalised() -> None:
    agent = trained()
    with_them = surefoot.evaluate(agent, episodes=3)
    agent.reward_normaliser.var.fill_(1e6)
    assert surefoot.evaluate(agent, episodes=3) == with_them
    agent.observation_normaliser.mean += 1.0
    assert surefoot.evaluate(agent, episodes=3).returns != with_them.returns
