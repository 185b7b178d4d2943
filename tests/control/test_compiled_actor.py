"""The compiled actor samples the same actions as the agent from the same noise, also after updates."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from surefoot.control.agent import CompiledActor
from surefoot.control.spaces import MASK
from surefoot.control.world import ControlWorld
from surefoot.core.credit import assign_credit
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner

from .test_spaces import NESTED
from .tiny import Sampled, fresh_state

VECTOR = spaces.Box(-1, 1, (3,))


@pytest.mark.parametrize(
    ("seen", "action", "masked", "normalised", "lstm"),
    [
        pytest.param(VECTOR, spaces.Discrete(5, start=-1), True, True, None, marks=pytest.mark.slow),
        pytest.param(VECTOR, spaces.Box(-0.5, 0.75, (2, 2), np.float64), False, True, None, marks=pytest.mark.slow),
        pytest.param(VECTOR, spaces.MultiDiscrete([2, 4, 3]), True, False, None, marks=pytest.mark.slow),
        pytest.param(NESTED, spaces.MultiBinary(3), False, True, None, marks=pytest.mark.slow),
        (VECTOR, spaces.Discrete(5), True, True, 4),
    ],
)
def test_a_compiled_actor_does_what_the_agent_does_whatever_was_learned_in_between(
    seen: spaces.Space[Any], action: spaces.Space[Any], masked: bool, normalised: bool, lstm: int | None, programs: str
) -> None:
    make = partial(Sampled, seen, action, masked=masked)
    table = {
        "task": "of:the-test",
        "rollout": {"environments": 2, "steps": 8},
        "objective": {"reuse": {"epochs": 2, "minibatches": 1}},
        "normalise": {"observations": normalised},
        "optimizer": {"learning_rate": 0.1},
        "network": {"lstm": lstm},
    }
    recipe = make_recipe(table)
    world = ControlWorld(recipe, lambda: make())
    learner, state, agent = make_learner(recipe, world.policy), fresh_state(), world.agent
    compiled = CompiledActor(agent)
    world.collector.actor = compiled.actor
    starts = np.array([True, False])
    for _ in range(3):
        rollout = world.collector.collect(state)
        learner.update(rollout, assign_credit(rollout, recipe.objective), state)
        ours, theirs = (act(torch.Generator().manual_seed(5)) for act in (compiled.actor, agent.actor))
        before = world.collector.lstm_state
        for _ in range(4):  # they draw the same noise, one after the other
            actual, expected = (act(world.collector.observations, before, starts) for act in (ours, theirs))
            torch.testing.assert_close(actual[0], expected[0])
            torch.testing.assert_close(actual[2], expected[2])
            before = expected[2]
            np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-6)
            assert actual[1].dtype == expected[1].dtype
            stored = actual[0].clone()
            actual[1][:] = 0  # an environment may change its argument
            assert torch.equal(actual[0], stored)
    assert compiled.program is not None
    world.close()


def test_only_the_compiled_engine_uses_the_compiled_actor() -> None:
    for engine, compiled in (("compiled", True), ("eager", False)):
        world = ControlWorld(make_recipe({"task": "CartPole-v1", "engine": engine}))
        assert isinstance(getattr(world.collector.actor, "__self__", None), CompiledActor) is compiled
        world.close()


@pytest.mark.parametrize(
    ("seen", "action", "masked"),
    [
        pytest.param(VECTOR, spaces.Discrete(5), True, id="masks"),
        pytest.param(NESTED, spaces.MultiDiscrete([2, 3]), True, id="parts, a picture among them"),
    ],
)
def test_compiled_updates_with_masks_and_parts_are_those_of_the_eager_engine(
    seen: spaces.Space[Any], action: spaces.Space[Any], masked: bool, programs: str
) -> None:
    table = {
        "task": "of:the-test",
        "engine": "compiled",
        "rollout": {"environments": 2, "steps": 8},
        "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
        "optimizer": {"learning_rate": 0.01},
    }
    results = []
    for engine in ("compiled", "eager"):
        recipe = make_recipe(table)
        world = ControlWorld(recipe, lambda: Sampled(seen, action, masked=masked))
        world.collector.actor = world.agent.actor  # the same actions
        learner, state = make_learner(recipe, world.policy), fresh_state()
        if engine == "eager":
            learner.use_eager()
        rollout = world.collector.collect(state)
        metrics = learner.update(rollout, assign_credit(rollout, recipe.objective), state)
        results.append((metrics, world.policy.state_dict(), rollout.inputs))
        world.close()
    (ours, our_weights, inputs), (theirs, their_weights, _) = results
    assert (MASK in inputs) is masked
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    torch.testing.assert_close(our_weights, their_weights, rtol=1e-3, atol=1e-4)
