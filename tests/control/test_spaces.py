"""Spaces: observations keep every leaf, all kinds of actions reach the environment, and both survive saving."""

import json
import math
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

import surefoot
from surefoot import ALGORITHMS, PPO_CLIP, NotFiniteError, SurefootError
from surefoot.control.agent import Agent
from surefoot.control.environments.looped import LoopedEnvironments
from surefoot.control.environments.vector import VectorEnvironments
from surefoot.control.evaluate import greedy_episode
from surefoot.control.spaces import (
    SpaceError,
    channels_last,
    choices,
    image_shape,
    mapped,
    observation_parts,
    read_mask,
    space_from_json,
    space_to_json,
)

from .tiny import Endless, Sampled, fresh_state, small, world_of

IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
NESTED = spaces.Dict(
    {
        "camera": spaces.Dict({"front": IMAGE, "size": spaces.Box(-1, 1, (2, 2), np.float64)}),
        "type": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary(2)]),
        "values": spaces.Box(-np.inf, np.inf, ()),
    }
)
OBSERVATIONS = {
    "vector": spaces.Box(-1, 1, (3,)),
    "matrix": spaces.Box(-1, 1, (2, 3), np.float64),
    "number": spaces.Box(-1, 1, ()),
    "bytes": spaces.Box(0, 255, (8,), np.uint8),
    "image": IMAGE,
    "discrete": spaces.Discrete(4, start=2),
    "multidiscrete": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multibinary": spaces.MultiBinary(3),
    "nested": NESTED,
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=-1),
    "multidiscrete": spaces.MultiDiscrete([2, 4, 3], start=[5, -3, 0]),
    "one choice": spaces.MultiDiscrete([3]),
    "table": spaces.MultiDiscrete(np.array([[2, 3], [2, 2]]), dtype=np.int32),
    "multibinary": spaces.MultiBinary(3),
    "grid": spaces.MultiBinary((2, 2)),
    "box": spaces.Box(-1, 1, (2,)),
    "doubles": spaces.Box(-1, 1, (2, 2), np.float64),
    "number": spaces.Box(-1, 1, ()),
}
FOR_CONTROL = [name for name, value in ALGORITHMS.items() if not value.compares_in_groups]
IN_EVERY_SPACE = {"PPO_CLIP", "TRPO"}
"""algorithms that meet every space: two ways to take a step"""


def pairs(names: Iterable[str], *usual: str) -> list[Any]:
    """Two algorithms with every space of these names, the others with the usual ones."""
    return [(algorithm, name) for name in names for algorithm in FOR_CONTROL if algorithm in IN_EVERY_SPACE or name in usual]


TINY: dict[str, Any] = {
    "rollout": {"environments": 2, "steps": 8},
    "evaluation": {"episodes": 1},
    "normalise": {"observations": True, "rewards": True},
}


# ---- everything trains ------------------------------------------------------------------------------------------------


def assert_trained(agent: surefoot.Agent) -> None:
    """Every part of the policy has moved, and to finite numbers."""
    fresh = Agent(agent.recipe, agent.observation_space, agent.action_space).policy
    for (name, now), before in zip(agent.policy.named_parameters(), fresh.parameters(), strict=True):
        assert now.isfinite().all(), name
        assert not torch.equal(now, before), name


@pytest.mark.parametrize(("algorithm", "action"), pairs(ACTIONS, "discrete", "box"))
def test_every_algorithm_trains_every_kind_of_action(algorithm: str, action: str) -> None:
    objective = ALGORITHMS[algorithm]
    make = partial(Sampled, OBSERVATIONS["vector"], ACTIONS[action])
    agent = surefoot.train(lambda: make(), objective, steps=40, objective=small(objective), **TINY)
    assert_trained(agent)
    sent, _ = agent.predict(OBSERVATIONS["vector"].sample())
    assert ACTIONS[action].contains(sent)


@pytest.mark.parametrize(("algorithm", "seen"), pairs(OBSERVATIONS, "nested"))
def test_every_algorithm_trains_every_kind_of_observation(algorithm: str, seen: str) -> None:
    objective = ALGORITHMS[algorithm]
    make = partial(Sampled, OBSERVATIONS[seen], spaces.Discrete(2))
    network = {"shared_trunk": objective.constraint is None}
    agent = surefoot.train(lambda: make(), objective, steps=24, objective=small(objective), network=network, **TINY)
    assert_trained(agent)


@pytest.mark.parametrize(
    ("algorithm", "action"),
    pairs([name for name, space in ACTIONS.items() if not isinstance(space, spaces.Box)], "multidiscrete"),
)
def test_every_algorithm_trains_every_kind_of_choice_under_masks(algorithm: str, action: str) -> None:
    objective = ALGORITHMS[algorithm]
    make = partial(Sampled, OBSERVATIONS["vector"], ACTIONS[action], masked=True)
    seen: list[Any] = []
    agent = surefoot.train(lambda: make(), objective, steps=64, objective=small(objective), callback=seen.append, **TINY)
    assert_trained(agent)
    assert all(math.isfinite(metrics[name]) for metrics in seen for name in ("entropy", "policy_loss", "gradient_norm_policy"))


@pytest.mark.parametrize("action", ACTIONS)
def test_stored_actions_equal_sent_ones_and_belong_to_the_space(action: str) -> None:
    space = ACTIONS[action]
    single = [Sampled(OBSERVATIONS["vector"], space) for _ in range(2)]
    rollout = world_of(lambda: single.pop(0), PPO_CLIP, **TINY).collector.collect(fresh_state())
    environment = rollout and Sampled.latest
    sent = np.stack(environment.taken).reshape(8, -1)
    stored = rollout.actions[1].reshape(8, -1).numpy()
    if isinstance(space, spaces.Box):
        assert np.array_equal(sent, stored.clip(-1, 1))
        assert environment.taken[0].dtype == space.dtype
    else:
        start = getattr(space, "start", np.zeros(space.shape))
        assert np.array_equal(sent, stored + np.reshape(start, -1))
    assert rollout.actions.dtype == (torch.float32 if isinstance(space, spaces.Box) else torch.int64)


# ---- leaves -----------------------------------------------------------------------------------------------------------


def test_leaves_are_named_by_their_path_and_keep_the_order_of_the_space() -> None:
    actual = observation_parts(NESTED)
    assert list(actual) == ["camera.front", "camera.size", "type.0", "type.1", "values"]
    assert [leaf.dtype.name for leaf in actual.values()] == ["uint8", "float64", "int64", "int8", "float32"]
    assert list(observation_parts(spaces.Discrete(3))) == ["observation"]
    ordered = spaces.Dict(OrderedDict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(2))]))
    assert list(observation_parts(ordered)) == ["b", "a"]


@pytest.mark.parametrize("mode", ["looped", *(mode.name for mode in AutoresetMode)])
def test_every_leaf_of_every_step_equals_the_environments_observation(mode: str) -> None:
    single = [Sampled(NESTED, spaces.Discrete(2), masked=True, seed=b) for b in range(3)]
    if mode == "looped":
        environments: Any = LoopedEnvironments(iter(single).__next__, 3, 1, "sampled")
    else:
        makers = [partial(next, iter([env])) for env in single]
        environments = VectorEnvironments(SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode]), 1, "sampled")
    observations, finals = environments.reset(), 0
    for _ in range(12):
        for b, env in enumerate(single):
            for path, leaf in observation_parts(NESTED).items():
                assert np.array_equal(observations[path][b], np.asarray(leaf.select(env.shown), leaf.dtype)), path
            if not env.over or mode == "looped":
                assert np.array_equal(observations["action_mask"][b], env.mask)
            assert observations["action_mask"][b].any()
        step = environments.step(observations["action_mask"].argmax(-1))
        observations = step.observations
        for b, final in step.final_observations.items():
            finals += 1
            assert set(final) == set(observation_parts(NESTED))
            assert final["type.0"] == single[b].last["type"][0]
            assert np.array_equal(final["camera.front"], single[b].last["camera"]["front"])
    assert (finals > 0) == (mode != "NEXT_STEP")


def test_images_and_choices_are_kept_as_they_are_and_only_numbers_are_normalised() -> None:
    make = partial(Sampled, NESTED, spaces.Discrete(2))
    world = world_of(lambda: make(), PPO_CLIP, **TINY)
    for part in range(3):
        rollout = world.collector.collect(fresh_state(part))
    normaliser = world.agent.observation_normaliser
    assert list(normaliser.shapes) == ["camera.size", "values"]
    assert normaliser.mean.shape == (5,)
    assert rollout.inputs["camera.front"].dtype == torch.uint8
    assert rollout.inputs["camera.front"].shape == (2, 8, 36, 40, 3)
    assert set(rollout.inputs["type.0"].unique().tolist()) == {-1, 0, 1}
    assert set(rollout.inputs["type.1"].unique().tolist()) == {0, 1}
    assert rollout.inputs["camera.size"].shape == (2, 8, 2, 2)
    assert rollout.inputs["camera.size"].abs().max() > 1  # scaled by their own deviation
    only_images = world_of(lambda: Sampled(IMAGE, spaces.Discrete(2)), PPO_CLIP, **TINY)
    assert only_images.agent.observation_normaliser is None


@pytest.mark.parametrize(
    ("shape", "last", "channels_height_width"),
    [
        ((84, 84), False, (1, 84, 84)),
        ((84, 96, 3), True, (3, 84, 96)),
        ((3, 84, 96), False, (3, 84, 96)),
        ((4, 84, 96, 3), True, (12, 84, 96)),
        ((4, 3, 84, 96), False, (12, 84, 96)),
    ],
)
def test_the_channels_of_an_image_are_the_smaller_of_two_axes(shape: Any, last: bool, channels_height_width: Any) -> None:
    assert (channels_last(shape), image_shape(shape)) == (last, channels_height_width)


# ---- what does not fit ------------------------------------------------------------------------------------------------


PAIR = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
WRONG = [
    (PAIR, {"a": np.zeros(3), "b": 1}, r"a: has shape \(3,\)"),
    (spaces.MultiBinary(2), np.array([0, 2], np.int8), r"an observation \[0 2\] outside MultiBinary\(2\)"),
    (IMAGE, np.zeros((36, 40, 3)), "an observation of float64 where its space has uint8"),
]


@pytest.mark.parametrize(("space", "shown", "message"), WRONG)
def test_predict_rejects_what_is_not_of_the_space(space: Any, shown: Any, message: str) -> None:
    agent = surefoot.train(lambda: Sampled(space, spaces.Discrete(2)), PPO_CLIP, steps=1, objective=small(PPO_CLIP), **TINY)
    for method in (agent.predict, agent.value):
        with pytest.raises(SurefootError, match=message):
            method(shown)
    if space is PAIR:
        with pytest.raises(SurefootError, match="2 batch sizes"):
            agent.predict({"a": np.zeros((3, 2)), "b": np.zeros(2, int)})


# ---- acting -----------------------------------------------------------------------------------------------------------


def test_predict_reads_one_observation_or_many_of_any_space_and_rows_do_not_depend_on_one_another() -> None:
    for space in (NESTED, IMAGE, spaces.Discrete(4, start=2)):
        make = partial(Sampled, space, spaces.Discrete(2))
        agent = surefoot.train(make, PPO_CLIP, steps=1, objective=small(PPO_CLIP), **TINY)
        rows = [space.sample() for _ in range(5)]
        many = concatenate(space, rows, create_empty_array(space, 5))
        values = agent.value(many)
        assert values.shape == agent.predict(many)[0].shape == (5,)
        for row, value in zip(rows, values, strict=True):
            assert agent.value(row) == pytest.approx(float(value), abs=1e-5)
            assert agent.predict(row)[0] in (0, 1)


def test_an_agent_with_nested_observations_is_loaded_unchanged(tmp_path: Path) -> None:
    make = partial(Sampled, NESTED, ACTIONS["table"], masked=True)
    agent = surefoot.train(lambda: make(), PPO_CLIP, steps=32, objective=small(PPO_CLIP), **TINY)
    agent.save(tmp_path / "agent")
    again = surefoot.load(tmp_path / "agent")
    assert (again.observation_space, again.action_space) == (agent.observation_space, agent.action_space)
    observation = NESTED.sample()
    assert np.array_equal(agent.predict(observation)[0], again.predict(observation)[0])
    assert agent.value(observation) == again.value(observation)


EVERYTHING = [*OBSERVATIONS.values(), *ACTIONS.values(), spaces.Discrete(3, dtype=np.int32), spaces.MultiBinary((3,))]
EVERYTHING += [spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3))])]  # a dict keeps its order
EVERYTHING += [spaces.Box(np.float32([-1, -np.inf]), np.float32([np.inf, 2.5])), spaces.Box(-np.inf, np.inf, (2,), np.float16)]


@pytest.mark.parametrize("space", EVERYTHING, ids=str)
def test_spaces_survive_json(space: Any) -> None:
    again = space_from_json(json.loads(json.dumps(space_to_json(space))))
    assert again == space
    assert again.dtype == space.dtype
    assert list(observation_parts(again)) == list(observation_parts(space))


# ---- masks as environments give them ----------------------------------------------------------------------------------


def test_choices_are_counted_per_part_of_an_action() -> None:
    counted = {name: choices(space) for name, space in ACTIONS.items()}
    assert counted == {
        "discrete": (3,),
        "multidiscrete": (2, 4, 3),
        "one choice": (3,),
        "table": (2, 3, 2, 2),
        "multibinary": (2, 2, 2),
        "grid": (2, 2, 2, 2),
        "box": None,
        "doubles": None,
        "number": None,
    }


@pytest.mark.parametrize(
    ("mask", "sizes", "message"),
    [
        ([0, 0, 0], (3,), "allows no action"),
        ([True, True, False, False], (2, 2), "allows no action"),
        ([1, 1], (3,), "length 2 where its action space needs length 3"),
        ([[1, 1, 1]], (3,), r"shape \(1, 3\) where its action space needs shape \(3,\)"),
        ([math.nan, 1, 1], (3,), "values other than 0 and 1"),
        (["yes", "no", "no"], (3,), "values other than 0 and 1"),
        ([[1, 1], [1]], (3,), "not an array"),
        (None, (3,), r"shape \(\)"),
        ([1, 1], None, "Box actions can't be masked"),
    ],
)
def test_an_invalid_mask_is_rejected(mask: Any, sizes: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        read_mask(mask, sizes)


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_masks_may_be_numbers_or_booleans(dtype: Any) -> None:
    allowed = read_mask(np.array([0, 1, 1, 0, 1], dtype), (3, 2))
    assert allowed.tolist() == [False, True, True, False, True]
    assert allowed.dtype == bool


# ---- lists ------------------------------------------------------------------------------------------------------------


class Listing(Endless):
    """Shows lists."""

    def __init__(self, shown: Any) -> None:
        self.shown = shown

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.shown, {}

    def step(self, action: Any) -> Any:
        return self.shown, 1.0, True, False, {}


@pytest.mark.parametrize("shown", [[0.5, -1], (0.5, -1)], ids=["a list", "a tuple"])
def test_lists_of_numbers_are_read_as_arrays_by_environments_predict_and_videos_alike(shown: Any) -> None:
    world = world_of(lambda: Listing(shown))
    rollout = world.collector.collect(fresh_state())
    assert rollout.inputs["observation"][0, 0].tolist() == [0.5, -1]
    agent = world.agent
    assert agent.predict(shown, deterministic=True)[0] == agent.predict(np.float32(shown), deterministic=True)[0]
    assert len(list(greedy_episode(agent, Listing(shown), "Listing", 0, 0, 5))) == 2
    world.close()


@pytest.mark.parametrize(
    ("shown", "message"),
    [([[0.5], [0.5, 1]], "lists that differ in length"), ([None, 1], "a list that contains more than numbers")],
)
def test_other_lists_are_rejected_by_environments_and_predict_alike(shown: Any, message: str) -> None:
    with pytest.raises(SurefootError, match=message):
        world_of(lambda: Listing(shown))
    world = world_of(lambda: Listing([0.5, -1]))
    with pytest.raises(SurefootError, match=message):
        world.agent.predict(shown)
    world.close()


class Huge(Listing):
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self) -> None:
        super().__init__(np.array([1e300, 0]))


@pytest.mark.parametrize("task", [Huge, lambda: SyncVectorEnv([Huge])], ids=["looped", "vector"])
def test_numbers_too_large_for_float32_are_rejected_with_that_reason(task: Any) -> None:
    world = world_of(lambda: Listing([0, 0]))
    with pytest.raises(NotFiniteError, match=r"observation of environment 0 at step 0 .* not finite as float32, whose largest"):
        world_of(task, rollout={"environments": 1, "steps": 8}).collector.collect(fresh_state())
    with pytest.raises(SurefootError, match="observation: is not finite as float32, whose largest"):
        world.agent.predict([1e300, 0])
    world.close()


def test_lists_of_whole_numbers_are_no_image() -> None:
    with pytest.raises(SpaceError, match="int64 where its space has uint8"):
        observation_parts(spaces.Box(0, 255, (36, 36), np.uint8))["observation"].read(np.zeros((36, 36), int).tolist())


def test_a_list_in_a_tree_is_a_leaf() -> None:
    assert mapped(len, {"a": ([1, 2], "x"), "b": [(3,)]}) == {"a": (2, 1), "b": 1}
