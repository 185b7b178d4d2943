"""``start``: a new training begins from an agent or a run, with its weights and normalisers."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import surefoot
from surefoot.errors import SurefootError
from surefoot.store.checkpoint import load_checkpoint
from surefoot.store.events import Message
from surefoot.store.folder import checkpoint_to_load

TASK = "Pendulum-v1"


def trained(task: str = TASK, steps: int = 64, **fields: Any) -> surefoot.Agent:
    small = {"rollout": {"environments": 2, "steps": 32}, "evaluation": {"episodes": 0}, "traces": {"rows": 0}}
    normalise = {"normalise": {"observations": True, "rewards": True}}
    few = {} if "algorithm" in fields else {"objective": {"reuse": {"epochs": 2, "minibatches": 2}}}
    return surefoot.train(task, preset="none", steps=steps, **{**small, **normalise, **few, **fields})


def first_policy(**fields: Any) -> dict[str, torch.Tensor]:
    """The weights that a run begins with: those after updates that move nothing."""
    return trained(optimizer={"learning_rate": 1e-30}, seed=5, **fields).policy.state_dict()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trained(run_dir=tmp_path / "first")
    return tmp_path / "first"


def test_training_starts_from_the_weights_of_a_run_or_an_agent(run: Path) -> None:
    weights = surefoot.load(run).policy.state_dict()
    for start in (str(run), run, surefoot.load(run), run / "checkpoints" / checkpoint_to_load(run).name):
        begun = first_policy(start=start)
        assert all(torch.equal(begun[name], tensor) for name, tensor in weights.items())
    assert not all(torch.equal(first_policy()[name], tensor) for name, tensor in weights.items())


def test_another_log_std_is_rejected_because_the_learned_one_comes_along(tmp_path: Path) -> None:
    trained(network={"log_std": -3.0}, run_dir=tmp_path / "sharp")
    learned = surefoot.load(tmp_path / "sharp").policy.state_dict()["log_std"]
    assert torch.equal(first_policy(start=str(tmp_path / "sharp"), network={"log_std": -3.0})["log_std"], learned)
    with pytest.raises(SurefootError, match=r"network\.log_std=0\.0: start=.* was trained with -3\.0; set that"):
        first_policy(start=str(tmp_path / "sharp"))


def test_normaliser_statistics_come_along(run: Path) -> None:
    before = surefoot.load(run)
    after = trained(start=str(run), seed=2)
    for name in ("observation_normaliser", "reward_normaliser"):
        count = getattr(before, name).state_dict()["count"]
        assert (getattr(after, name).state_dict()["count"] > count).all(), "counting goes on"


def test_a_critic_is_new_where_the_agent_has_none(tmp_path: Path) -> None:
    actor = trained(algorithm="REINFORCE", run_dir=tmp_path / "actor").policy.state_dict()
    begun = first_policy(start=str(tmp_path / "actor"))
    assert all(torch.equal(begun[name], tensor) for name, tensor in actor.items())
    assert set(begun) > set(actor)


def test_a_resumed_run_does_not_start_again(run: Path, tmp_path: Path) -> None:
    agent = surefoot.load(run)
    whole = trained(start=agent, run_dir=tmp_path / "whole", steps=256)
    trained(start=str(run), run_dir=tmp_path / "half", steps=128)
    for file in sorted(run.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    resumed = surefoot.resume(tmp_path / "half", steps=256)
    weights = whole.policy.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.policy.state_dict().items())


def test_an_agent_that_was_passed_is_kept_for_a_run_that_starts_again(run: Path, tmp_path: Path) -> None:
    agent = surefoot.load(run)
    trained(start=agent, run_dir=tmp_path / "second")
    saved = load_checkpoint(tmp_path / "second" / "start")["agent"]
    assert all(torch.equal(saved[f"policy.{name}"], tensor) for name, tensor in agent.policy.state_dict().items())
    first = surefoot.load(tmp_path / "second").policy.state_dict()
    for folder in ("checkpoints", "best"):
        for file in sorted((tmp_path / "second" / folder).rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
    again = surefoot.resume(tmp_path / "second").policy.state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in again.items()), "stopped before its first checkpoint"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"task": "CartPole-v1"},
            r"^start='.*': the task has observations Box.*, the agent was trained on Box.*; choose an agent of the same",
        ),
        ({"network": {"hidden": (32,)}}, r"^network\.hidden=\(32,\): start='.*' was trained with \(64, 64\); set that$"),
        (
            {"normalise": {"observations": False}},
            r"^normalise\.observations=False: start='.*' was trained with True; set that$",
        ),
        ({"start": "nowhere"}, "^start: nowhere: no such run folder"),
    ],
)
def test_an_agent_that_does_not_fit_is_rejected_and_leaves_no_folder(
    fields: dict[str, Any], line: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(SurefootError, match=line):
        trained(**{"start": str(run), "run_dir": tmp_path / "new", **fields})
    assert not (tmp_path / "new").exists()


class Prices(gymnasium.Env[Any, Any]):
    """Prices up to a highest one, as numbers and as a picture, and an action with bounds."""

    def __init__(self, high: int = 100, bound: float = 1.0, kind: Any = np.float32) -> None:
        self.observation_space = spaces.Dict(now=spaces.Box(0, high, (3,), kind), map=spaces.Box(0, high, (36, 36), np.uint8))
        self.action_space, self.high = spaces.Box(-bound, bound, (2,)), high

    def seen(self) -> dict[str, Any]:
        now = self.np_random.uniform(0, self.high, 3).astype(self.observation_space["now"].dtype)
        return {"now": now, "map": np.full((36, 36), now[0], np.uint8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.seen(), 1.0, False, self.t >= 10, {}


def test_other_bounds_of_observations_are_a_note_wherever_an_agent_meets_them_and_anything_else_an_error(
    tmp_path: Path,
) -> None:
    """An image keeps the scale that the agent was trained with."""
    small: dict[str, Any] = {"rollout": {"environments": 2, "steps": 32}, "evaluation": {"episodes": 0}}
    small |= {"network": {"hidden": []}, "objective": {"reuse": {"epochs": 1, "minibatches": 2}}}
    agent = surefoot.train(Prices, steps=64, seed=1, run_dir=tmp_path / "run", **small)
    assert surefoot.evaluate(agent, Prices, episodes=1).note == ""
    other = lambda: Prices(120)  # noqa: E731
    note = 'has other bounds than the agent was trained on (observation "now": 0 to 120 instead of 0 to 100; '
    assert note in surefoot.evaluate(agent, other, episodes=1).note
    heard: list[str] = []
    tell = lambda event: heard.append(event.text) if isinstance(event, Message) else None  # noqa: E731
    resumed = surefoot.resume(tmp_path / "run", task=other, steps=128, display=tell, allow_changes=True)
    begun = surefoot.train(other, steps=64, seed=1, start=agent, display=tell, **small)
    assert sum(note in line for line in heard) == 2
    for each in (resumed, begun):
        assert [float(x) for name, x in each.policy.named_buffers() if name.endswith("range")] == [100, 100]
    for differs in (lambda: Prices(bound=2.0), lambda: Prices(kind=np.float64)):
        tries: list[Any] = [
            lambda task: surefoot.evaluate(agent, task, episodes=1),
            lambda task: surefoot.resume(tmp_path / "run", task=task, steps=192),
            lambda task: surefoot.train(task, steps=64, seed=1, start=agent, **small),
        ]
        for attempt in tries:
            with pytest.raises(SurefootError, match=r"has (actions|observations) .* was trained on [^;]*; (choose|resume)"):
                attempt(differs)
