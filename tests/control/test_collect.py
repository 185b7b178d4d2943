"""Rollout collection: stored steps match the environments', episodes may be cut, and a non-finite value stops one rollout."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import surefoot
from surefoot import A2C, PPO_CLIP, REINFORCE, TRPO, NotFiniteError, SurefootError
from surefoot.control.collect.episodes import RECENT_EPISODES
from surefoot.control.world import ControlWorld
from surefoot.core.credit import assign_credit
from surefoot.core.learner import START_TOLERANCE
from surefoot.core.rollout import Rollout, tensors_in
from surefoot.runs.factory import make_learner

from .tiny import ENDS, Clockwork, Endless, bare, clockworks, fresh_state, one_by_one, small, world_of

BOX = spaces.Box(np.float32([-0.5, -1.0]), np.float32([0.25, 2.0]))


def collecting(single: Sequence[Any], steps: int = 12, algorithm: Any = PPO_CLIP, **fields: Any) -> ControlWorld:
    """Our loop over the given environments."""
    rollout = {"environments": len(single), "steps": steps, **fields.pop("rollout", {})}
    return world_of(one_by_one(single), algorithm, rollout=rollout, **fields)


def vectorised(single: Sequence[Any], mode: str, steps: int, **fields: Any) -> ControlWorld:
    """Gymnasium's vector environment over the given environments."""
    makers = [partial(next, iter([env])) for env in single]

    def vector() -> SyncVectorEnv:
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode])

    return world_of(vector, PPO_CLIP, rollout={"environments": len(single), "steps": steps}, **fields)


# ---- what a rollout holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [False, True], ids=["discrete", "box"])
@pytest.mark.parametrize("mode", ["looped", "SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_a_rollout_holds_what_happened_and_the_values_of_the_true_successors_in_every_autoreset_mode(
    mode: str, box: bool
) -> None:
    single = clockworks(**({"action_space": spaces.Box(-9, 9, (2,), np.float32)} if box else {}))
    fields: dict[str, Any] = {"normalise": {"observations": False, "rewards": False, "actions": False}}
    world = collecting(single, 14, **fields) if mode == "looped" else vectorised(single, mode, 14, **fields)
    before, ends = [0, 0, 0], set()
    for _ in range(3):  # rollouts follow on one another without a gap
        rollout = world.collector.collect(fresh_state())
        for b, env in enumerate(single):
            kept = rollout.mask[b]
            happened = env.log[before[b] : before[b] + int(kept.sum())]
            before[b] = len(env.log)
            assert len(happened) == int(kept.sum())
            assert rollout.inputs["observation"][b][kept].tolist() == [step.observation.tolist() for step in happened]
            assert rollout.actions[b][kept].tolist() == [step.action.tolist() for step in happened]
            assert rollout.rewards[b][kept].tolist() == [step.reward for step in happened]
            ended = torch.stack([rollout.terminated[b][kept], rollout.truncated[b][kept]], -1)
            assert ended.tolist() == [[step.terminated, step.truncated] for step in happened]
            ends |= set(map(tuple, ended.tolist()))
            here = world.agent.values(bare(np.stack([step.observation for step in happened])))
            torch.testing.assert_close(rollout.values[b][kept], here)
            following = world.agent.values(bare(np.stack([step.successor for step in happened])))
            goes_on = ~rollout.terminated[b][kept]
            torch.testing.assert_close(rollout.next_values[b][kept][goes_on], following[goes_on])
        assert rollout.mask.all() or mode == "NEXT_STEP"
    assert len(ends) == 4


@pytest.mark.parametrize("action_space", [spaces.Discrete(3), BOX], ids=["discrete", "box"])
def test_old_log_probs_are_what_the_policy_gives_for_the_stored_actions(action_space: Any) -> None:
    world = collecting(clockworks(action_space=action_space))
    rollout = world.collector.collect(fresh_state())
    again = world.policy(rollout.inputs, rollout.actions)
    assert torch.equal(again.log_probs, rollout.old_log_probs)
    assert torch.equal(again.values, rollout.values)
    outputs = world.policy.actor_head(world.policy.actor_trunk(rollout.inputs))
    if isinstance(action_space, spaces.Discrete):
        theirs = torch.distributions.Categorical(logits=outputs).log_prob(rollout.actions)
    else:
        theirs = torch.distributions.Normal(outputs, world.policy.log_std.exp()).log_prob(rollout.actions).sum(-1)
    torch.testing.assert_close(theirs, rollout.old_log_probs)
    assert not rollout.old_log_probs.requires_grad


@pytest.mark.parametrize("lstm", [None, 4])
def test_a_rollout_does_not_change_with_the_policy(lstm: int | None) -> None:
    """A Gaussian's log σ is a parameter: a view of it would follow θ, and KL(π_old‖π) would miss how σ changed."""

    class Boxed(Endless):
        action_space = BOX

    network, reuse = {"hidden": [8], "lstm": lstm}, {"minibatches": 2}
    world = collecting([Boxed(), Boxed()], steps=6, network=network, objective={"reuse": reuse})
    rollout = world.collector.collect(fresh_state())
    before = [x.clone() for x in tensors_in(rollout)]
    with torch.no_grad():
        for parameter in world.policy.parameters():
            parameter.add_(1)
    assert all(torch.equal(x, y) for x, y in zip(tensors_in(rollout), before, strict=True))


def test_box_actions_are_stored_unclipped_and_sent_clipped() -> None:
    single = clockworks(action_space=BOX)
    fields: dict[str, Any] = {"network": {"log_std": 0.5}, "normalise": {"actions": False}}
    rollout = collecting(single, steps=50, **fields).collector.collect(fresh_state())
    stored, low, high = rollout.actions.numpy(), BOX.low, BOX.high
    sent = np.stack([[step.action for step in env.log] for env in single])
    assert np.array_equal(sent, np.clip(stored, low, high))
    for side in (stored < low, stored > high):
        assert 0.05 < side.mean() < 0.8
    assert rollout.metrics["actions_clipped"] == pytest.approx(((stored < low) | (stored > high)).mean())


def test_the_same_stream_gives_the_same_rollout_and_another_a_different_one() -> None:
    def actions(seed: int) -> torch.Tensor:
        return collecting(clockworks(), steps=40).collector.collect(fresh_state(seed)).actions

    assert torch.equal(actions(1), actions(1))
    assert not torch.equal(actions(1), actions(2))


def test_without_a_critic_values_are_zero() -> None:
    rollout = collecting(clockworks(), algorithm=REINFORCE).collector.collect(fresh_state())
    assert not rollout.values.any()
    assert not rollout.next_values.any()


@pytest.mark.parametrize("scale", [1.0, 0.005])
def test_the_ratio_at_the_start_is_one_up_to_the_rounding_of_float32(scale: float) -> None:
    """A policy with σ = 0.005 multiplies the rounding of its means by 200; that once ended a run of 800,000 steps."""
    world = collecting(clockworks(action_space=spaces.Box(-1, 1, (24,), np.float32)), steps=32)
    assert world.policy.log_std is not None
    with torch.no_grad():
        world.policy.log_std.fill_(math.log(scale))
        world.policy.actor_head.weight.mul_(100)
    rollout = world.collector.collect(fresh_state())
    old, mean = rollout.old_log_probs, rollout.old_distribution.mean
    assert old is not None
    ulp = torch.finfo(torch.float32).eps * (1 + mean.abs())
    by_rounding = replace(rollout.old_distribution, mean=mean + 2 * ulp).log_prob(rollout.actions)  # another order of sums
    assert ((by_rounding - old).abs().max() > START_TOLERANCE) == (scale < 1)
    learner = make_learner(world.recipe, world.policy)
    for scored, allowed in ((by_rounding, True), (old + 0.1, False)):
        seen = replace(rollout, old_log_probs=scored)
        with nullcontext() if allowed else pytest.raises(SurefootError, match="ratio_at_start"):
            learner.update(seen, assign_credit(seen, learner.objective), fresh_state())


# ---- whole episodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("episodes", [1, 2])
def test_in_whole_episode_mode_every_environment_runs_just_its_episodes_and_is_masked_after(episodes: int) -> None:
    single = clockworks()
    collector = collecting(single, algorithm=REINFORCE, rollout={"episodes": episodes}).collector
    done = np.zeros(3, int)
    for part in range(3):
        rollout = collector.collect(fresh_state())
        first = part * episodes
        lengths = [sum(rows[e % len(rows)][0] for e in range(first, first + episodes)) for rows in ENDS]
        assert rollout.mask.sum(1).tolist() == lengths
        assert rollout.mask.shape[1] == max(lengths)
        assert (rollout.terminated | rollout.truncated).sum(1).tolist() == [episodes] * 3
        for b, length in enumerate(lengths):
            assert rollout.mask[b, :length].all()
            assert (rollout.terminated | rollout.truncated)[b, length - 1]
            assert not rollout.rewards[b, length:].any()
            happened = single[b].log[done[b] : done[b] + length]
            assert rollout.rewards[b, :length].tolist() == [step.reward for step in happened]
        assert rollout.steps == sum(lengths)
        done += lengths
        assert [len(env.log) for env in single] == done.tolist()


# ---- statistics of episodes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_least", [1, 10, 40])
def test_whole_episodes_until_there_are_enough_steps_end_as_soon_as_they_may_and_never_in_part(at_least: int) -> None:
    single = clockworks()
    rollout_fields = {"environments": 3, "at_least": at_least, "episodes": 5}
    world = world_of(one_by_one(single), REINFORCE, rollout=rollout_fields)
    total = 0
    for _ in range(2):
        rollout = world.collector.collect(fresh_state())
        total += rollout.steps
        assert rollout.steps == int(rollout.mask.sum()) >= at_least
        ended = rollout.terminated | rollout.truncated
        for row in range(3):
            kept = rollout.mask[row].nonzero().flatten()
            assert kept.tolist() == list(range(len(kept))), "from the first step on, without a gap"
            assert ended[row, kept[-1]], "the last kept step ends an episode"
        reached = int((rollout.mask.cumsum(1).sum(0) >= at_least).nonzero()[0])  # the step at which there were enough
        running = rollout.mask[:, reached + 1 :] if reached + 1 < rollout.mask.shape[1] else rollout.mask[:, :0]
        for row in range(3):
            later = int(running[row].sum())
            assert not ended[row, reached : reached + later].any(), "no episode begins once there are enough"
    assert sum(len(env.log) for env in single) == total, "what was not kept was not stepped"


def finished(single: Sequence[Clockwork]) -> list[tuple[float, int]]:
    """(return, length) of every finished episode, in the order in which they ended."""
    rows = []
    for b, env in enumerate(single):
        for episode in range(env.episode + 1):
            steps = [(t, step) for t, step in enumerate(env.log) if step.episode == episode]
            if steps and (steps[-1][1].terminated or steps[-1][1].truncated):
                rows.append((steps[-1][0], b, sum(step.reward for _, step in steps), len(steps)))
    return [(total, length) for _, _, total, length in sorted(rows)]


def test_episode_statistics_are_undiscounted_unnormalised_and_over_the_last_hundred_episodes() -> None:
    single = clockworks()
    collector = collecting(single, steps=25, normalise={"rewards": True}).collector
    for part in range(8):
        metrics = collector.collect(fresh_state(part)).metrics
        rows = finished(single)
        assert metrics["episodes"] == len(rows)
        assert metrics["episode_return"] == pytest.approx(np.mean([row[0] for row in rows[-RECENT_EPISODES:]]))
        assert metrics["episode_length"] == pytest.approx(np.mean([row[1] for row in rows[-RECENT_EPISODES:]]))
    assert len(rows) > RECENT_EPISODES == 100


def test_before_the_first_end_episode_statistics_are_null() -> None:
    metrics = collecting(clockworks([((50, "terminated"),)]), steps=20).collector.collect(fresh_state()).metrics
    assert metrics == {"episode_return": None, "episode_length": None, "episodes": 0, "observations_constant": 0}


def test_masked_rows_of_next_step_environments_count_nowhere() -> None:
    single = clockworks()
    world = vectorised(single, "NEXT_STEP", 20, normalise={"observations": True, "rewards": True})
    collector, steps = world.collector, 0
    for part in range(3):
        rollout = collector.collect(fresh_state(part))
        assert not rollout.mask.all()
        assert rollout.steps == rollout.mask.sum()
        steps += rollout.steps
        assert sum(len(env.log) for env in single) == steps
    seen = np.concatenate([[step.observation for step in env.log] for env in single])
    normaliser = world.agent.observation_normaliser
    assert normaliser.count == world.agent.reward_normaliser.count == len(seen) == steps
    np.testing.assert_allclose(normaliser.mean, seen.mean(0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(normaliser.var, seen.var(0, dtype=np.float64), rtol=1e-12)
    rows = finished(single)
    assert sorted(row[:2] for row in collector.log.finished) == sorted(rows)
    assert rollout.metrics["episodes"] == len(rows)


# ---- not finite -------------------------------------------------------------------------------------------------------


class Poisoned(Clockwork):
    """A Clockwork that once gives a value that is not finite: at step ``at`` of episode ``episode`` (0 is its reset)."""

    def poison(self, what: str, value: float, episode: int, at: int) -> "Poisoned":
        self.what, self.value, self.place = what, value, (episode, at)
        return self

    def look(self) -> np.ndarray:
        observation = super().look()
        if self.what == "observation" and (self.episode, self.t) == self.place:
            observation[2] = self.value
        return observation

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        if self.what == "reward" and (self.episode, self.t) == self.place:
            reward = self.value
        return observation, reward, *rest


def with_poison(what: str, value: float, episode: int, at: int, ends: Sequence[Any] = ENDS) -> list[Clockwork]:
    healthy = clockworks(ends)
    return [healthy[0], Poisoned(1, ends[1]).poison(what, value, episode, at), healthy[2]]


def assert_sound(world: ControlWorld, rollout: Rollout) -> None:
    assert rollout.inputs["observation"].isfinite().all()
    for name in ("old_log_probs", "values", "next_values", "rewards"):
        assert getattr(rollout, name).isfinite().all(), name
    for name, buffer in world.agent.named_buffers():
        assert buffer.isfinite().all(), name


@pytest.mark.parametrize(
    ("what", "episode", "at", "value"),
    [
        ("reward", 0, 3, math.nan),
        ("reward", 0, 5, 1e300),  # at the end of an episode
        ("observation", 0, 3, -math.inf),
        ("observation", 0, 5, math.nan),  # the final observation of a truncated episode
        ("observation", 1, 0, math.inf),  # the first observation of the next episode
    ],
    ids=["reward", "last reward", "observation", "final observation", "observation of a reset"],
)
def test_a_value_that_is_not_finite_is_reported_and_collection_continues(
    what: str, episode: int, at: int, value: float
) -> None:
    ends = [ENDS[0], ((5, "truncated"), (2, "both")), ENDS[2]]
    single = with_poison(what, value, episode, at, ends)
    world = collecting(single, steps=12, normalise={"observations": True, "rewards": True})
    before = {name: buffer.clone() for name, buffer in world.agent.named_buffers()}
    step = at or 5
    with pytest.raises(NotFiniteError, match=rf"the {what} of environment 1 at step {step} of its episode is not finite"):
        world.collector.collect(fresh_state())
    for name, buffer in world.agent.named_buffers():
        assert torch.equal(buffer, before[name]), name
    for part in range(3):
        rollout = world.collector.collect(fresh_state(part))
        assert_sound(world, rollout)
        assert math.isfinite(rollout.metrics["episode_return"])


def test_a_first_observation_that_is_not_finite_is_named_before_it_reaches_the_normaliser() -> None:
    world = collecting(with_poison("observation", math.nan, 0, 0), normalise={"observations": True})
    with pytest.raises(NotFiniteError, match="the observation of environment 1 at step 0 of its episode is not finite"):
        world.collector.collect(fresh_state())
    assert_sound(world, world.collector.collect(fresh_state()))


def test_a_large_but_finite_observation_is_accepted() -> None:
    class Large(Endless):
        def step(self, action: Any) -> Any:
            return np.float32([3e38, 3e38]), 1.0, False, False, {}

    world = collecting([Large()], steps=4, normalise={"observations": True})
    assert_sound(world, world.collector.collect(fresh_state()))


def test_after_a_fault_the_statistics_of_the_other_environments_are_still_right() -> None:
    ends = [((3, "terminated"), (2, "truncated")), ((9, "terminated"),), ((4, "truncated"),)]
    single = with_poison("reward", math.nan, 0, 3, ends)  # at the very step at which environment 0 ends an episode
    collector = collecting(single, steps=10).collector
    with pytest.raises(NotFiniteError):
        collector.collect(fresh_state())
    for part in range(3):
        collector.collect(fresh_state(part))
    assert sorted(row[:2] for row in collector.log.finished) == sorted(finished(single)), "the broken episode has no end"


def test_after_a_fault_the_memory_of_the_other_environments_is_still_right() -> None:
    """Environment 0 ends an episode at the step of the fault and environment 2 has begun one: only the first starts anew."""
    ends = [((3, "terminated"), (9, "truncated")), ((9, "terminated"),), ((2, "terminated"), (9, "truncated"))]
    network = {"hidden": [8], "lstm": 4}
    collector = collecting(
        with_poison("reward", math.nan, 0, 3, ends), steps=8, network=network, objective={"reuse": {"minibatches": 1}}
    ).collector
    with pytest.raises(NotFiniteError):
        collector.collect(fresh_state())
    assert collector.starts.tolist() == [True, True, False]


def test_after_a_fault_no_discounted_return_leaks_into_another_episode() -> None:
    ends = [((3, "terminated"),), ((30, "terminated"),), ((30, "terminated"),)]
    single = with_poison("reward", math.nan, 0, 5, ends)
    world = collecting(single, steps=2, normalise={"rewards": True})
    world.collector.collect(fresh_state())
    world.collector.collect(fresh_state())
    with pytest.raises(NotFiniteError):
        world.collector.collect(fresh_state())
    assert not world.collector.discounted.any()


@pytest.mark.parametrize("strict", [True, False])
def test_actions_that_are_not_finite_are_reported_as_an_error_of_the_policy(strict: bool) -> None:
    class Picky(Endless):
        action_space = BOX

        def step(self, action: Any) -> Any:
            assert not strict or np.isfinite(action).all(), "no number"
            return np.float32(action), 1.0, False, False, {}

    world = collecting([Picky()], steps=4)
    with torch.no_grad():
        next(world.policy.parameters()).fill_(math.nan)
    with pytest.raises(SurefootError, match=r"^policy: its actions are not finite for finite observations; fix"):
        world.collector.collect(fresh_state())


def test_two_environments_that_fail_at_once_both_start_new_episodes() -> None:
    single = [Poisoned(0, ENDS[0]).poison("reward", math.nan, 0, 2), Poisoned(1, ENDS[1]).poison("observation", math.nan, 0, 2)]
    world = collecting(single, steps=10)
    with pytest.raises(NotFiniteError, match="the reward of environment 0 at step 2"):
        world.collector.collect(fresh_state())
    assert [env.episode for env in single] == [1, 1]
    assert_sound(world, world.collector.collect(fresh_state()))


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_collection_continues_with_a_vector_environment_too(mode: str) -> None:
    single = with_poison("reward", math.nan, 0, 3)
    world = vectorised(single, mode, 12)
    with pytest.raises(NotFiniteError, match="the reward of environment 1 at step 3"):
        world.collector.collect(fresh_state())
    rollout = world.collector.collect(fresh_state())
    assert_sound(world, rollout)
    assert rollout.inputs["observation"][:, 0, 2].tolist() == [0, 0, 0]  # all began anew


def always(value: float) -> Callable[[], Any]:
    class Always(Endless):
        def step(self, action: Any) -> Any:
            return np.zeros(2, np.float32), value, False, False, {}

    return Always


def test_three_faults_in_a_row_stop_training_and_one_does_not() -> None:
    with pytest.raises(SurefootError, match=r"environment 0 at step 1 .* 3 consecutive updates were skipped"):
        surefoot.train(always(math.nan), A2C, steps=100, rollout={"environments": 2, "steps": 5})
    single = with_poison("reward", math.nan, 2, 1)
    fields: dict[str, Any] = {"rollout": {"environments": 3, "steps": 8}, "evaluation": {"episodes": 0}}
    seen: list[Any] = []
    surefoot.train(one_by_one(single), A2C, steps=120, callback=seen.append, **fields)
    assert seen[-1]["steps"] >= 120
    assert sum(len(env.log) for env in single) > seen[-1]["steps"]  # the discarded rollout was not counted


# ---- continuing -------------------------------------------------------------------------------------------------------


def test_a_restored_collector_continues_bit_for_bit() -> None:
    def world() -> ControlWorld:
        fields = {"rollout": {"environments": 3, "steps": 40}, "normalise": {"observations": True, "rewards": True}}
        return world_of("CartPole-v1", PPO_CLIP, **fields)

    original, again = world(), world()
    original.collector.collect(fresh_state(1))
    again.load({**original.checkpoint_parts(), "collector": original.collector.state_dict()}, Path("here"), True)
    for part in range(2, 5):
        a, b = original.collector.collect(fresh_state(part)), again.collector.collect(fresh_state(part))
        assert torch.equal(a.inputs["observation"], b.inputs["observation"])
        for name in ("actions", "rewards", "old_log_probs", "values", "next_values", "terminated", "truncated"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert a.metrics == b.metrics
    for (name, buffer), (_, other) in zip(original.agent.named_buffers(), again.agent.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name


class Ticking(Endless):
    """A clock whose pace is its own."""

    def __init__(self, pace: float) -> None:
        self.pace, self.t = pace, 0

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.float32([self.t * self.pace, 0]), 1.0, False, False, {}


def test_a_lost_environment_is_reported_and_its_running_statistics_start_again() -> None:
    original = collecting([Ticking(0.1) for _ in range(3)], steps=10, normalise={"rewards": True})
    original.collector.collect(fresh_state())
    again = collecting([Ticking(pace) for pace in (0.1, 0.2, 0.1)], steps=10, normalise={"rewards": True})
    lines = again.load({**original.checkpoint_parts(), "collector": original.collector.state_dict()}, Path("here"), True)
    assert len(lines) == 1
    assert "environments [1]" in lines[0]
    assert "not exact" in lines[0]
    collector = again.collector
    assert [(record.number, len(record.actions)) for record in again.environments.records] == [(0, 10), (1, 0), (0, 10)]
    assert collector.running_length.tolist() == [10, 0, 10]
    assert collector.running_return.tolist() == [10, 0, 10]
    assert (collector.discounted != 0).tolist() == [True, False, True]


# ---- what vector environments can't do is rejected --------------------------------------------------------------------


def vector_task() -> SyncVectorEnv:
    return SyncVectorEnv([Clockwork, Clockwork])


@pytest.mark.parametrize("mode", [mode.name for mode in AutoresetMode])
def test_a_vector_environment_may_write_all_its_arrays_again_and_change_what_it_is_given(mode: str) -> None:
    """Observations, rewards and both kinds of ends; and its actions, which a rollout keeps."""

    class Reusing(SyncVectorEnv):
        kept: Any = None

        def step(self, actions: Any) -> Any:
            fresh = super().step(np.copy(actions))
            actions *= 0
            if self.kept is None:
                self.kept = [np.copy(part) for part in fresh[:4]]
            for mine, theirs in zip(self.kept, fresh[:4], strict=True):
                mine[...] = theirs
            return *self.kept, fresh[4]

    def rollout(kind: Any) -> Any:
        ends = (((3, "truncated"), (2, "terminated")), ((4, "truncated"),))
        rows = [partial(Clockwork, index, end) for index, end in enumerate(ends)]
        world = world_of(
            lambda: kind(rows, autoreset_mode=AutoresetMode[mode]), PPO_CLIP, rollout={"environments": 2, "steps": 12}
        )
        return world.collector.collect(fresh_state())

    ours, theirs = rollout(Reusing), rollout(SyncVectorEnv)
    for name in ("actions", "rewards", "terminated", "truncated", "mask"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert theirs.truncated.any()
    assert ours.actions.any()


@pytest.mark.parametrize(("algorithm", "fields"), [(PPO_CLIP, {}), (TRPO, {"network": {"lstm": 4}})], ids=["ppo", "trpo lstm"])
def test_a_rollout_continues_if_environments_only_reset(algorithm: Any, fields: Any) -> None:
    """In NEXT_STEP environments that end together, of a rollout of one step."""

    def ending() -> SyncVectorEnv:
        rows = [partial(Clockwork, index, ((3, "truncated"),)) for index in range(2)]
        return SyncVectorEnv(rows, autoreset_mode=AutoresetMode.NEXT_STEP)

    seen: list[Any] = []
    few = {"rollout": {"environments": 2, "steps": 1}, "evaluation": {"episodes": 0}, "objective": small(algorithm), **fields}
    surefoot.train(ending, algorithm, steps=24, callback=seen.append, **few)
    assert [row["steps"] for row in seen] == list(range(2, 25, 2)), "a step in which all reset counts for nothing"


def test_whole_episodes_and_evaluations_of_a_vector_environment_are_rejected_before_training() -> None:
    with pytest.raises(SurefootError, match=r"task='vector_task'.*whole episodes.*REINFORCE needs them"):
        surefoot.train(vector_task, REINFORCE, steps=60)
    seen: list[Any] = []
    with pytest.raises(SurefootError, match=r"evaluation\.episodes=10: .*vector environment; set evaluation\.episodes = 0"):
        surefoot.train(vector_task, A2C, steps=60, callback=seen.append)
    assert not seen
