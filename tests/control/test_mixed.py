"""Actions of several parts: one policy over choices and numbers, which every environment gets in the form of its space."""

import operator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as torch_distributions

import surefoot
from surefoot.control.collect import ControlCollector
from surefoot.control.evaluate import greedy_episode
from surefoot.control.export import export_agent
from surefoot.control.policy import Factored
from surefoot.control.replay import replay
from surefoot.control.spaces import SpaceError, check_action_space, choices, flat_action, mapped, mask_of, nester, numbers
from surefoot.core.algorithms import PPO_CLIP, TRPO
from surefoot.diagnostics.recipe import check_environment
from surefoot.errors import SurefootError

from .tiny import QUIET, fresh_state, small, world_of

ARM = spaces.Dict(
    {
        "aim": spaces.Box(np.float32([-2, 0]), np.float32([2, 5])),
        "hand": spaces.Tuple([spaces.MultiDiscrete([[2, 3]], start=[[1, 5]]), spaces.MultiBinary(2)]),
        "tool": spaces.Discrete(3, start=-1),
        "force": spaces.Box(-1, 1, (1, 1), np.float64),
    }
)
FEW: dict[str, Any] = {**QUIET, "rollout": {"environments": 2, "steps": 12}, "network": {"hidden": [8]}, "seed": 3}


class Arm(gymnasium.Env[Any, Any]):
    """Takes nothing but members of its space; reward and observation depend on every part. With a mask per part."""

    def __init__(self, masked: bool = True) -> None:
        self.masked = masked
        self.observation_space, self.action_space = spaces.Box(-9, 9, (2,), np.float32), ARM

    def look(self) -> tuple[Any, dict[str, Any]]:
        self.tools = np.array([True, self.t % 2 == 0, self.t % 3 == 0])
        seen = np.array([self.t, self.total], np.float32)
        return seen, {"action_mask": {"tool": self.tools, "hand": (None, [1, 1, 0, 1])}} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.total = 0, float(self.np_random.uniform())
        return self.look()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert ARM.contains(action), action
        assert not self.masked or self.tools[action["tool"] + 1], "a forbidden tool"
        assert not self.masked or action["hand"][1][1] == 1, "a forbidden bit"
        flat = np.concatenate([np.ravel(x) for x in (action["aim"], *action["hand"], action["tool"], action["force"])])
        self.t, self.total = self.t + 1, float(np.clip(self.total + flat @ np.linspace(-1, 1, len(flat)) / 8, -9, 9))
        return *(look := self.look())[:1], float(flat.sum()), False, self.t == 5, look[1]


def unmasked() -> Arm:
    return Arm(masked=False)


def vector() -> Any:
    return gymnasium.vector.SyncVectorEnv([Arm, Arm])


def mixture(rows: int, seed: int = 0) -> Factored:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, generator=draw).index_put((torch.tensor(0), torch.tensor(2)), torch.tensor(-torch.inf))
    return Factored(logits.expand(rows, 2, 3), torch.randn(2, generator=draw).expand(rows, 2), torch.full((rows, 2), -0.5))


# ---- the distribution -------------------------------------------------------------------------------------------------


def test_log_probability_entropy_and_kl_are_the_sums_of_torchs_parts() -> None:
    one, other = mixture(7), mixture(7, seed=1)
    actions = one.sample(torch.Generator().manual_seed(2))
    pairs = []
    for each in (one, other):
        chosen = torch_distributions.Independent(torch_distributions.Categorical(logits=each.logits[:1]), 1)
        drawn = torch_distributions.Independent(torch_distributions.Normal(each.mean[:1], each.log_std[:1].exp()), 1)
        pairs.append((chosen, drawn))
    chosen, drawn = pairs[0]
    torch.testing.assert_close(one.log_prob(actions), chosen.log_prob(actions[:, :2]) + drawn.log_prob(actions[:, 2:]))
    torch.testing.assert_close(one.entropy()[:1], chosen.entropy() + drawn.entropy())
    kl = sum(torch_distributions.kl_divergence(a, b) for a, b in zip(*pairs, strict=True))
    torch.testing.assert_close(one.kl(other)[:1], kl)


def test_samples_have_the_entropy_of_the_distribution_and_never_a_padded_option() -> None:
    big = mixture(50_000)
    actions = big.sample(torch.Generator().manual_seed(0))
    assert actions[:, 0].unique().tolist() == [0, 1]
    assert actions[:, 1].unique().tolist() == [0, 1, 2]
    assert float(-big.log_prob(actions).mean()) == pytest.approx(float(big.entropy()[0]), abs=0.02)
    assert torch.equal(big.mode()[0, :2], big.logits[0].argmax(-1).float())


def test_the_forms_of_an_action_are_inverse() -> None:
    ARM.seed(1)
    for action in (ARM.sample() for _ in range(20)):
        again = nester(ARM)(flat_action(ARM, action))
        assert ARM.contains(again)
        assert np.array_equal(flat_action(ARM, again), flat_action(ARM, action))
    assert choices(ARM) == (2, 3, 2, 2, 3)
    box = numbers(ARM)
    assert box is not None
    assert box.high.tolist() == [2, 5, 1]


# ---- masks ------------------------------------------------------------------------------------------------------------


def test_a_mask_for_each_part_is_the_mask_of_all() -> None:
    by_part = {"tool": [1, 0, 1], "hand": (None, [1, 1, 0, 1])}
    assert mask_of(ARM, by_part).astype(int).tolist() == [1] * 5 + [1, 1, 0, 1] + [1, 0, 1]
    assert np.array_equal(mask_of(ARM, mask_of(ARM, by_part)), mask_of(ARM, by_part))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"tools": [1, 1, 1]}, "for 'tools', which is no part"),
        ({"tool": [1, 1]}, "length 2 where its action space needs length 3"),
        ({"tool": [0, 0, 0]}, "allows no action"),
        ({"aim": [1, 1]}, "can't be masked"),
    ],
)
def test_a_wrong_mask_of_a_part_is_an_error(mask: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        mask_of(ARM, mask)


def test_a_part_that_is_not_supported_is_named() -> None:
    with pytest.raises(SurefootError, match=r'action space part "a.b": Text is not supported'):
        check_action_space(spaces.Dict({"a": spaces.Dict({"b": spaces.Text(3)})}), "x")
    with pytest.raises(SurefootError, match="action space Dict is not supported"):
        check_action_space(spaces.Dict({}), "x")


# ---- environments -----------------------------------------------------------------------------------------------------


class Rows:
    """The same arm as a tensor environment."""

    single_observation_space, single_action_space = spaces.Box(-9, 9, (2,), np.float32), ARM

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device, self.arms = num_envs, device, [Arm() for _ in range(num_envs)]

    def _all(self, looks: list[Any]) -> Any:
        masks = torch.from_numpy(np.stack([mask_of(ARM, info["action_mask"]) for _, info in looks]))
        return torch.from_numpy(np.stack([seen for seen, _ in looks])), {"action_mask": masks}

    def reset(self, *, seed: int | None = None) -> Any:
        return self._all([arm.reset(seed=seed) for arm in self.arms])

    def step(self, actions: Any) -> Any:
        rewards, looks = [], []
        for row, arm in enumerate(self.arms):
            action = mapped(operator.itemgetter(row), mapped(torch.Tensor.numpy, actions))
            action = {**action, "hand": tuple(map(lambda x, s: x.astype(s.dtype), action["hand"], ARM["hand"].spaces))}
            action |= {"tool": np.int64(action["tool"]), "force": np.float64(action["force"])}
            seen, reward, _, over, info = arm.step(action)
            rewards.append(reward)
            looks.append(arm.reset() if over else (seen, info))
        no = torch.zeros(self.num_envs, dtype=torch.bool)
        return *(looked := self._all(looks))[:1], torch.tensor(rewards), no, no, looked[1]


def rows(num_envs: int, device: str = "cpu") -> Rows:
    return Rows(num_envs, device)


@pytest.mark.parametrize("network", [{"hidden": [8]}, {"hidden": [8], "lstm": 4}], ids=["plain", "lstm"])
def test_every_environment_gets_members_of_its_space_and_the_ratio_starts_at_one(network: Any) -> None:
    earned = {}
    for task, backend in ((Arm, "loop"), (Arm, "workers"), (vector, "loop"), (rows, "loop")):
        settings = {**FEW, "network": network, "rollout": {**FEW["rollout"], "backend": backend}}
        world = world_of(task, PPO_CLIP, **settings)
        rollout = world.collector.collect(fresh_state())
        assert rollout.actions.shape == (2, 12, 8)
        with torch.no_grad():
            again = world.policy(rollout.inputs, rollout.actions).log_probs
        torch.testing.assert_close(again, rollout.old_log_probs)
        assert rollout.metrics["actions_clipped"]
        earned[task, backend] = rollout.reward_parts["environment"]
        world.close()
    assert torch.equal(earned[Arm, "loop"], earned[Arm, "workers"])


@pytest.mark.parametrize("algorithm", [PPO_CLIP, TRPO], ids=["ppo", "trpo"])
def test_a_run_resumes_to_the_same_weights_and_a_loaded_agent_acts_the_same(algorithm: Any, tmp_path: Path) -> None:
    settings: Any = {**FEW, "steps": 96, "objective": small(algorithm)}
    whole = surefoot.train(Arm, algorithm, run_dir=tmp_path / "whole", **settings)
    surefoot.train(Arm, algorithm, run_dir=tmp_path / "cut", callback=lambda m: m["iteration"] == 2, **settings)
    resumed = surefoot.resume(tmp_path / "cut", task=Arm)
    for name, ours in whole.state_dict().items():
        assert torch.equal(ours, resumed.state_dict()[name]), name
    loaded = surefoot.load(tmp_path / "whole")
    for batch in ((), (3,)):
        seen, mask = np.ones((*batch, 2), np.float32), {"tool": np.broadcast_to([0, 0, 1], (*batch, 3))}
        ours, theirs = (each.predict(seen, deterministic=True, action_mask=mask)[0] for each in (resumed, loaded))
        assert np.array_equal(flat_action(ARM, ours, batch), flat_action(ARM, theirs, batch))
        assert np.all(ours["tool"] == 1)
    assert ARM.contains(ours := whole.predict(np.ones(2, np.float32))[0]), ours
    episode = [moment.reward for moment in greedy_episode(whole, Arm(), "Arm", 0, 0, 9)][1:]
    assert surefoot.evaluate(loaded, Arm, episodes=1).returns[0] == pytest.approx(sum(episode))


def test_a_traced_episode_replays_to_the_same_rewards() -> None:
    world = world_of(unmasked, PPO_CLIP, **FEW)
    assert isinstance(world.collector, ControlCollector)
    rollout = world.collector.collect(fresh_state())
    about = world.row_details(rollout, 1, slice(5, 9))
    row: Any = type("Row", (), {"row": 1, "about": about, "actions": rollout.actions[1, 5:9]})
    row.reward_parts = {"environment": rollout.reward_parts["environment"][1, 5:9]}
    row.terminated, row.truncated = rollout.terminated[1, 5:9], rollout.truncated[1, 5:9]
    again = world_of(unmasked, PPO_CLIP, **{**FEW, "rollout": {"environments": 1, "steps": 4}})
    assert len(list(replay(row, again.environments, world.agent.action_converter()))) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(("format", "lstm"), [("torch", None), ("onnx", None), pytest.param("onnx", 4, marks=pytest.mark.slow)])
def test_an_exported_file_acts_as_the_agent_does(format: str, lstm: int | None, tmp_path: Path) -> None:
    world = world_of(Arm, PPO_CLIP, **{**FEW, "network": {"hidden": [8], "lstm": lstm}})
    exported = export_agent(world.agent, tmp_path / ("a.pt2" if format == "torch" else "a.onnx"), format)
    for part in ("action.aim [N, 2]", "action.hand.0 [N, 1, 2]", "action.tool [N]", "logits [N, 5, 3]", "mean [N, 3]"):
        assert part in exported.signature
    world.close()


def test_check_steps_masks_and_compares_them() -> None:
    findings = check_environment(Arm, {})
    assert [finding.what for finding in findings if finding.severity == "serious"] == []


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PPO_CLIP, TRPO], ids=["ppo", "trpo"])
def test_the_compiled_engine_learns_the_same(algorithm: Any) -> None:
    weights = []
    for engine in ("eager", "compiled"):
        settings: Any = {**FEW, "steps": 96, "objective": small(algorithm), "engine": engine}
        weights.append(surefoot.train(Arm, algorithm, **settings).state_dict())
    for name, ours in weights[0].items():
        torch.testing.assert_close(ours, weights[1][name], rtol=1e-3, atol=1e-4)
