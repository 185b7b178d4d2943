"""Invalid ends, scores and batches from environments are reported in one line; an error in close() loses nothing."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import surefoot
from surefoot import SurefootError
from surefoot.control.environments.looped import LoopedEnvironments
from surefoot.control.environments.vector import VectorEnvironments

SEED = 7


class Faulty(gymnasium.Env[Any, Any]):
    """Episodes of three steps, with other ends, or a close() that raises."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, truncated: Any = None, raises: bool = False, score: float | None = None) -> None:
        self.truncated, self.raises, self.info = truncated, raises, {} if score is None else {"surefoot": {"score": score}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        truncated = self.t == 3 if self.truncated is None else self.truncated
        return np.zeros(2, np.float32), 1.0, False, truncated, self.info

    def close(self) -> None:
        if self.raises:
            raise RuntimeError("the window is gone")


SMALL: dict[str, Any] = {
    "steps": 16,
    "rollout": {"environments": 2, "steps": 8},
    "objective": {"reuse": {"epochs": 1, "minibatches": 2}},
}


@pytest.mark.parametrize("truncated", [np.bool_(False), 0, np.zeros((), bool), torch.tensor(False)], ids=repr)
def test_an_end_may_be_any_boolean(truncated: Any) -> None:
    environments = LoopedEnvironments(lambda: Faulty(truncated), 1, SEED, "tiny")
    environments.reset()
    assert not environments.step(np.zeros(1, np.int64)).done.any()


@pytest.mark.parametrize("vector", [False, True])
def test_a_close_that_raises_loses_nothing(vector: bool, tmp_path: Path) -> None:
    def make() -> Any:
        return SyncVectorEnv([partial(Faulty, raises=True)] * 2) if vector else Faulty(raises=True)

    changes = {**SMALL, "evaluation": {"episodes": 0}} if vector else SMALL
    agent = surefoot.train(make, run_dir=tmp_path / "run", display=False, **changes)
    assert surefoot.load(tmp_path / "run").policy.state_dict().keys() == agent.policy.state_dict().keys()
    if not vector:
        assert surefoot.evaluate(agent, make, episodes=2).returns == [3.0, 3.0]


def test_an_unexpected_error_in_an_evaluation_saves_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("surefoot.control.world.evaluate_agent", fail)
    with pytest.raises(ZeroDivisionError):
        surefoot.train(Faulty, run_dir=tmp_path / "run", display=False, **SMALL)
    monkeypatch.undo()
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["16"]
    surefoot.resume(tmp_path / "run", task=Faulty, display=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("score", [np.nan, np.inf, 1e308])
def test_a_score_that_is_not_finite_is_reported_as_a_reward_is(score: float, tmp_path: Path) -> None:
    with pytest.raises(SurefootError, match="the score of environment 0 at step 1 of its episode is not finite"):
        surefoot.train(partial(Faulty, score=score), run_dir=tmp_path / "run", display=False, **{**SMALL, "steps": 160})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rewards": np.ones((2, 1))}, "gave rewards of shape (2, 1) where (2,) is needed, in call 1 of step()"),
        ({"rewards": 1.0}, "gave rewards of shape () where (2,) is needed"),
        ({"rewards": np.array(["a", "b"])}, "gave rewards of type <U1 instead of numbers"),
        ({"rewards": [None, 1.0]}, "gave rewards of type object instead of numbers"),
        ({"terminated": np.zeros(3, bool)}, "gave terminated of shape (3,) where (2,) is needed"),
        ({"truncated": np.array([None, None])}, "gave truncated of type object instead of booleans"),
        ({"truncated": [0.0, 0.5]}, "gave truncated of [0.0, 0.5] instead of booleans"),
        ({"infos": [{}, 1]}, "gave infos of type list instead of one dict for all environments"),
        ({"infos": {"final_info": [{}, {}]}}, "gave infos['final_info'] of type list instead of one dict"),
    ],
    ids=str,
)
def test_results_of_a_vector_environment_in_another_form_are_reported(changed: dict[str, Any], message: str) -> None:
    vector = SyncVectorEnv([Faulty, Faulty], autoreset_mode=AutoresetMode.SAME_STEP)
    step = vector.step

    def other(actions: Any) -> Any:
        names = ("observations", "rewards", "terminated", "truncated", "infos")
        return tuple({**dict(zip(names, step(actions), strict=True)), **changed}.values())

    vector.step = other  # type: ignore[method-assign]
    environments = VectorEnvironments(vector, SEED, "tiny")
    environments.reset()
    with pytest.raises(SurefootError) as caught:
        environments.step(np.zeros(2, np.int64))
    assert f"tiny: {message}" in str(caught.value)


@pytest.mark.parametrize("count", ["2", 0, None])
def test_a_vector_environment_needs_a_number_of_environments(count: Any) -> None:
    vector = SyncVectorEnv([Faulty, Faulty])
    vector.num_envs = count
    with pytest.raises(SurefootError, match=rf"num_envs={count!r} of its vector environment is not a whole number"):
        VectorEnvironments(vector, SEED, "tiny")
