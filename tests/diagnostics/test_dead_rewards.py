"""A reward that is constant is reported during the run, once."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import surefoot
from surefoot.store.events import Message


class Nothing(gymnasium.Env[np.ndarray, int]):
    """Episodes of three steps without any reward."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(1, self.steps / 3, np.float32), 0.0, self.steps == 3, False, {}


def messages(task: Any, **fields: Any) -> list[str]:
    heard: list[str] = []
    surefoot.train(task, display=lambda event: heard.append(event.text) if isinstance(event, Message) else None, **fields)
    return heard


def test_an_environment_without_rewards_is_reported_once() -> None:
    few = {"rollout": {"environments": 4, "steps": 16}, "objective": {"reuse": {"epochs": 1, "minibatches": 2}}}
    heard = messages(Nothing, steps=5_120, evaluation={"episodes": 0}, **few)
    (line,) = [line for line in heard if line.startswith("! step ")]
    assert "return has been 0 throughout" in line
    assert int(line.split()[2].rstrip(",").replace(",", "")) <= 1_280, "at a quarter of the budget, not at its end"


@pytest.mark.parametrize("algorithm", ["PPO_CLIP", "GRPO"])
def test_a_reward_that_is_always_zero_is_reported_once(algorithm: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "dead.py").write_text("def dead(responses):\n    return [0.0] * len(responses)\n")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} "}) + "\n" for i in range(8)))
    heard = messages(
        "language",
        algorithm=algorithm,
        model="pocket",
        steps=160,
        data={"train": str(tmp_path / "prompts.jsonl")},
        reward={"terms": f"{tmp_path / 'dead.py'}:dead", "missing_eos": None},
        sampling={"prompts": 4, "samples": 2, "max_tokens": 4},
        objective={"reuse": {"epochs": 1, "minibatches": 1}},
    )
    (line,) = [line for line in heard if "one and the same score" in line]
    assert "serious" in line
    assert int(line.split()[2].rstrip(",")) <= 40
