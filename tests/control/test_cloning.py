"""Behaviour cloning: maximum likelihood on rows, in a run like any other."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import surefoot
from surefoot.control.collect.cloning import RowCollector, read_rows
from surefoot.control.normalise import action_converter, stored_actions
from surefoot.control.spaces import flat_action, mapped
from surefoot.core.algorithms import PPO_CLIP, REINFORCE
from surefoot.errors import SurefootError

from .test_mixed import ARM, Arm
from .tiny import QUIET, fresh_state, world_of

FEW: dict[str, Any] = {**QUIET, "network": {"hidden": [8]}, "seed": 2}


class Copy(gymnasium.Env[Any, Any]):
    """Earns 1 for the sign of the number shown."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2, start=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.shown = 0, self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.shown, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, self.time = float(action == 5 + (self.shown[0] > 0)), self.time + 1
        self.shown = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.shown, reward, False, self.time == 8, {}


def written(folder: Path, rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def signs(tmp_path: Path) -> str:
    numbers = np.random.default_rng(0).uniform(-1, 1, 100)
    return written(tmp_path, [{"observation": [x], "action": 5 + int(x > 0)} for x in numbers])


def cloned(data: Any, folder: Path | None = None, **fields: Any) -> surefoot.Agent:
    settings = {**FEW, "steps": 6_400, "optimizer": {"learning_rate": 0.01}, "cloning": {"data": data, "batch": 64}, **fields}
    return surefoot.train(Copy, REINFORCE, run_dir=folder, **settings)


def test_a_clone_does_what_its_rows_show_and_training_starts_from_it(signs: str, tmp_path: Path) -> None:
    agent = cloned(signs, tmp_path / "clone", evaluation={"episodes": 5})
    assert surefoot.evaluate(agent, Copy, episodes=10).mean_return > 7.5
    settings = {**FEW, "rollout": {"environments": 2, "steps": 16}, "normalise": {"observations": False}}
    further = surefoot.train(Copy, PPO_CLIP, start=str(tmp_path / "clone"), steps=32, **settings)
    assert surefoot.evaluate(further, Copy, episodes=10).mean_return > 7.5


def test_an_epoch_has_every_row_once(signs: str) -> None:
    world = world_of(Copy, REINFORCE, cloning={"data": signs, "batch": 50}, steps=100, **FEW)
    assert isinstance(world.collector, RowCollector)
    state, seen = fresh_state(), []
    for _ in range(2):
        rollout = world.collector.collect(state)
        seen.append(rollout.inputs["observation"].flatten())
        state.steps += rollout.steps
    every, _ = read_rows(signs, world.agent)
    assert torch.equal(torch.cat(seen).sort().values, every["observation"].flatten().sort().values)
    assert rollout.metrics["data_epochs"] == 1.0
    world.close()


def test_the_loss_is_the_mean_negative_log_likelihood(signs: str) -> None:
    settings, losses = {**FEW, "cloning": {"data": signs, "batch": 100}, "steps": 100}, list[Any]()
    world = world_of(Copy, REINFORCE, **settings)
    rollout = world.collector.collect(fresh_state())
    surefoot.train(Copy, REINFORCE, callback=lambda metrics: losses.append(metrics["policy_loss"]), **settings)
    with torch.no_grad():
        likelihood = world.policy(rollout.inputs, rollout.actions).log_probs.mean()
    assert losses[0] == pytest.approx(-float(likelihood), rel=1e-5)
    world.close()


def test_a_run_resumes_to_the_same_weights(signs: str, tmp_path: Path) -> None:
    settings: Any = {"steps": 640, "normalise": {"observations": True}}
    whole = cloned(signs, tmp_path / "whole", **settings)
    cloned(signs, tmp_path / "cut", **settings, callback=lambda metrics: metrics["iteration"] == 3)
    resumed = surefoot.resume(tmp_path / "cut", task=Copy)
    for name, ours in whole.state_dict().items():
        assert torch.equal(ours, resumed.state_dict()[name]), name
    with Path(signs).open("a") as file:
        file.write(json.dumps({"observation": [0.5], "action": 6}) + "\n")
    with pytest.raises(SurefootError, match="has other rows than when the checkpoint was written"):
        surefoot.resume(tmp_path / "cut", task=Copy, steps=1280)


def test_rows_may_be_passed_as_they_are(signs: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Path(signs).read_text().splitlines()]
    one, other = cloned(signs, steps=128), cloned(rows, tmp_path / "run", steps=128)
    assert torch.equal(one.policy.actor_head.weight, other.policy.actor_head.weight)


def test_stored_actions_are_the_inverse_of_what_is_sent_and_sigma_stays() -> None:
    box, several = spaces.Box(np.float32([-2, 0]), np.float32([2, 5])), spaces.MultiDiscrete([2, 3], start=[4, 0])
    for space in (ARM, box, several, Copy.action_space):
        space.seed(0)
        sent = np.stack([flat_action(space, space.sample()) for _ in range(50)])
        again = action_converter(space, True)(stored_actions(space, True, sent))
        np.testing.assert_allclose(again, sent, rtol=1e-5, atol=1e-6)


def test_mixed_actions_are_cloned_and_sigma_stays(tmp_path: Path) -> None:
    ARM.seed(0)
    actions = [mapped(lambda x: np.asarray(x).tolist(), ARM.sample()) for _ in range(40)]
    data = written(tmp_path, [{"observation": [0, 0], "action": action} for action in actions])
    agent = surefoot.train(Arm, REINFORCE, cloning={"data": data, "batch": 40}, steps=400, **FEW)
    assert agent.policy.log_std is not None
    assert agent.policy.log_std.abs().sum() == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"observation": [0.5, 0.1], "action": 5}], r"line 1: .*has shape \(2,\)"),
        (
            [{"observation": [0.5], "action": 5}, {"observation": [0.5], "action": 7}],
            r"line 2: its action 7.0 is not of Discrete",
        ),
        ([{"observation": [0.5], "action": [5]}], r"actions of shape \(1,\)"),
        ([{"observation": [0.5], "action": 5.7}], r"line 1: its action 5.7 is not of Discrete"),
        ([{"observation": [0.5]}], "line 1: is not a row such as"),
        (['{"observation": [0.5], "action": 5, "action": 6}'], "line 1: is not a row such as"),
        ([{"observation": [None], "action": 5}], "line 1"),
        ([], "has no rows"),
    ],
)
def test_a_wrong_row_is_one_line_that_names_it(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SurefootError, match=message):
        cloned(written(tmp_path, rows))


def test_settings_that_do_not_fit_rows_are_rejected(signs: str) -> None:
    with pytest.raises(SurefootError, match="set algorithm = 'REINFORCE'"):
        surefoot.train(Copy, PPO_CLIP, cloning={"data": signs}, **FEW)
    with pytest.raises(SurefootError, match=r"network.lstm=4: cloning learns from single rows"):
        cloned(signs, network={"lstm": 4})
    with pytest.raises(SurefootError, match="can't be read"):
        cloned("nowhere.jsonl")


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_a_data_set_of_minari_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    seen = np.linspace(-1, 1, 9, dtype=np.float32)[:, None]
    buffer = minari.data_collector.EpisodeBuffer(
        observations=seen,
        actions=5 + (seen[:-1, 0] > 0),
        rewards=np.ones(8),
        terminations=np.zeros(8, bool),
        truncations=np.arange(8) == 7,
    )
    spaces_ = {"observation_space": Copy.observation_space, "action_space": Copy.action_space}
    minari.create_dataset_from_buffers("signs/copy-v0", [buffer] * 3, **spaces_)
    world = world_of(Copy, REINFORCE, cloning={"data": "minari:signs/copy-v0"}, steps=10, **FEW)
    assert isinstance(world.collector, RowCollector)
    assert world.collector.actions.tolist() == (seen[:-1, 0] > 0).astype(int).tolist() * 3
    with pytest.raises(SurefootError, match=r"minari:none-v0'.*can't be opened"):
        read_rows("minari:none-v0", world.agent)
    world.close()
