"""Box actions: finite bounds map to −1 … 1 for the policy, and bounds of ±1 change no bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

import surefoot
from surefoot import PPO_CLIP
from surefoot.control.agent import CompiledActor
from surefoot.control.evaluate import greedy_episode
from surefoot.control.export import export_agent
from surefoot.control.normalise import ActionBounds
from surefoot.recipes.presets import presets
from surefoot.recipes.reading import control_recipe, without_tuned_for

from .tiny import Endless, fresh_state, world_of

FAR = spaces.Box(np.float32([100, -1e-3]), np.float32([1000, 1e-3]))
FEW: dict[str, Any] = {
    "rollout": {"environments": 2, "steps": 8},
    "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
    "evaluation": {"episodes": 0},
}
finite = st.floats(-(2.0**100), 2.0**100, width=32)


class Far(Endless):
    """Keeps the actions that it gets; episodes are cut after four steps."""

    action_space = FAR
    got: list[np.ndarray]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.got = 0, []
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.got.append(np.array(action))
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), float(action[0]), False, self.t == 4, {}


def together() -> SyncVectorEnv:
    return SyncVectorEnv([Far, Far])


def one(low: float, high: float) -> spaces.Box:
    return spaces.Box(low, high, (1,), np.float32)


def stretched(actions: Any) -> np.ndarray:
    """What FAR's environments get for actions of the policy, derived here once more."""
    unit = np.clip(np.asarray(actions, np.float64), -1, 1)
    return np.stack([100 + 900 * (unit[..., 0] + 1) / 2, 1e-3 * unit[..., 1]], -1)


# ---- the formula ------------------------------------------------------------------------------------------------------


@given(finite, finite, finite)
def test_the_environment_always_gets_an_action_of_its_space(a: float, b: float, drawn: float) -> None:
    space = one(min(a, b), max(a, b))
    for wanted in (True, False):
        assert space.contains(ActionBounds(space, wanted).apply(torch.tensor([drawn])).numpy())


@pytest.mark.parametrize(("low", "high"), [(100, 1000), (-1e-3, 1e-3), (0, 1), (-2, 2), (-5, -3), (-3e38, 3e38)])
def test_the_ends_and_the_middle_of_the_policys_range_are_those_of_the_box(low: float, high: float) -> None:
    given_ = ActionBounds(one(low, high), True).apply(torch.tensor([[-1.0], [0.0], [1.0], [-7.0], [7.0]]))
    np.testing.assert_allclose(given_[:, 0], [low, low / 2 + high / 2, high, low, high], rtol=1e-6)


def test_a_number_bounded_by_one_goes_through_to_the_last_bit_beside_others_that_are_stretched() -> None:
    space = spaces.Box(np.float32([-1, 0, -1, -np.inf]), np.float32([1, 4, np.inf, 2]))
    drawn = torch.tensor([[0.1, 0.5, 7.7, -9.3], [-0.0, 0.0, -0.0, -0.0]])
    actual = ActionBounds(space, True).apply(drawn)
    assert actual.dtype == drawn.dtype
    for column in (0, 2, 3):
        np.testing.assert_array_equal(actual[:, column].numpy().view(np.int32), drawn[:, column].numpy().view(np.int32))
    assert actual[:, 1].tolist() == [3.0, 2.0]
    assert not ActionBounds(spaces.Box(-1, 1, (2, 3)), True).rescales
    assert not ActionBounds(space, False).rescales


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_the_largest_float_is_not_a_bound(dtype: Any) -> None:
    largest = float(np.finfo(dtype).max)
    bounds = ActionBounds(spaces.Box(dtype(-largest), dtype(largest), (2,), dtype), True)
    assert not bounds.rescales
    assert not bounds.bounded.any()


def test_the_metric_counts_clipped_numbers_among_bounded_ones() -> None:
    space = spaces.Box(np.float32([100, -np.inf, -np.inf]), np.float32([1000, np.inf, 2]))
    drawn = torch.tensor([[1.5, 1e9, 1.5], [0.5, 1e9, 2.5]])
    assert ActionBounds(space, True).clipped(drawn).tolist() == [[True, False], [False, True]]
    assert ActionBounds(space, False).clipped(drawn).tolist() == [[True, False], [True, True]]


# ---- everyone agrees --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_predict_evaluation_and_exported_files_scale_actions_alike(tmp_path: Path) -> None:
    world = world_of(Far, PPO_CLIP, **FEW)
    rollout = world.collector.collect(fresh_state())
    for environment, drawn in zip(world.environments.environments, rollout.actions, strict=True):  # type: ignore[attr-defined]
        assert environment.got == [], "every fourth step resets"
        np.testing.assert_allclose(rollout.reward_parts["environment"][0], stretched(rollout.actions[0])[:, 0], rtol=1e-6)
        assert drawn.abs().max() < 10, "what is stored is as the policy drew it"
    agent = world.agent
    with torch.no_grad():
        agent.policy.actor_head.weight.mul_(400)
    seen = np.random.default_rng(1).uniform(-1, 1, (50, 2)).astype(np.float32)
    mean = agent.policy.step(agent.normaliser()(agent.tensors({"observation": seen})))[0].mean.detach()
    assert ((mean.abs() > 1).any(), (mean.abs() < 1).any()) == (True, True)
    action, _ = agent.predict(seen, deterministic=True)
    np.testing.assert_allclose(action, stretched(mean), rtol=1e-5, atol=1e-9)
    episode = [moment.reward for moment in greedy_episode(agent, Far(), "Far", 0, 0, 9)][1:]
    evaluation = surefoot.evaluate(agent, Far, episodes=1)
    assert evaluation.returns[0] == pytest.approx(sum(episode))
    assert min(episode) >= 100
    for format, ending in (("torch", "pt2"), ("onnx", "onnx")):
        export_agent(agent, tmp_path / f"a.{ending}", format)  # compares the file with predict
    theirs = torch.export.load(tmp_path / "a.pt2").module()(torch.from_numpy(seen))[0]
    np.testing.assert_allclose(theirs, action, rtol=1e-5, atol=1e-9)
    onnxruntime = pytest.importorskip("onnxruntime")
    theirs = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(["action"], {"observation": seen})[0]
    np.testing.assert_allclose(theirs, action, rtol=1e-5, atol=1e-9)
    compiled, starts = CompiledActor(agent), np.ones(50, bool)
    assert compiled.agent.action_converter()(mean).tolist() == action.tolist()
    _, sent, _ = agent.actor(torch.Generator().manual_seed(1))({"observation": seen}, None, starts)
    assert all(FAR.contains(each) for each in sent)
    world.close()


def test_worker_processes_and_vector_environments_get_what_the_loop_gets() -> None:
    earned = []
    for task, backend in (("Far", "loop"), ("Far", "workers"), ("together", "loop")):
        fields = {**FEW, "rollout": {**FEW["rollout"], "backend": backend}, "seed": 5}
        world = world_of(globals()[task], PPO_CLIP, **fields)
        earned.append(world.collector.collect(fresh_state()).reward_parts["environment"][:, :4])  # rows of the first episode
        world.close()
    assert float(earned[0].min()) >= 100
    assert torch.equal(earned[0], earned[1])
    assert torch.equal(earned[0], earned[2])


def test_bounds_of_one_change_nothing() -> None:
    weights = []
    for wanted in (True, False):
        agent = surefoot.train("MountainCarContinuous-v0", PPO_CLIP, steps=64, normalise={"actions": wanted}, **FEW)
        weights.append(agent.state_dict())
    for name, ours in weights[0].items():
        assert torch.equal(ours, weights[1][name]), name


@pytest.mark.parametrize("name", ["pendulum", "mujoco"])  # whose tasks have bounds of ±2 and ±3, too
def test_a_preset_keeps_the_actions_that_its_results_were_measured_with(name: str) -> None:
    assert control_recipe(without_tuned_for(presets()[name])).normalise.actions is False
