"""Control runs with planted faults, really trained: the findings name the fault and nothing else."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import surefoot
from surefoot.store.events import Message

from .conftest import trained

BANDIT = "tests.findings:Bandit"
SMALL = {"rollout": {"environments": 4, "steps": 32}, "seed": 1}
FEW = {"reuse": {"epochs": 4, "minibatches": 1}}


class Bandit(gymnasium.Env[np.ndarray, int]):
    """Episodes of one step, which shows nothing: what an arm pays is up to ``pays(arm, episode)``."""

    def __init__(self, pays: Any) -> None:
        self.observation_space, self.action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)
        self.pays, self.episode = pays, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.episode += 1
        return np.zeros(1, np.float32), float(self.pays(action, self.episode, self.np_random)), True, False, {}


def test_a_far_too_high_learning_rate_is_reported_as_divergence() -> None:
    fast = {"optimizer": {"learning_rate": 0.1, "schedule": "constant", "max_grad_norm": None}}
    objective = {"reuse": {"epochs": 20, "minibatches": 2}, "trust_region": {"clip": 0.2, "schedule": "constant"}}
    findings = trained("CartPole-v1", steps=1_280, objective=objective, **fast, **SMALL)
    assert findings["kl_runaway"].severity == "serious"
    assert "0.1" in findings["kl_runaway"].advice[0], "what it is set to"
    assert "clip_idle" not in findings


def test_a_far_too_small_epsilon_saturates_the_clip() -> None:
    objective = {"reuse": {"epochs": 40, "minibatches": 1}, "trust_region": {"clip": 0.005, "schedule": "constant"}}
    findings = trained("CartPole-v1", steps=1_280, objective=objective, optimizer={"learning_rate": 3e-3}, **SMALL)
    assert findings["clip_saturated"].evidence[0].value > 0.3
    assert "(it is 40)" in findings["clip_saturated"].advice[0]


class Far(Bandit):
    """Pays for how near an action is to the middle of its bounds."""

    def __init__(self, low: float, high: float) -> None:
        self.middle, self.reach = (low + high) / 2, (high - low) / 2
        super().__init__(lambda action, *_: 1 - abs(float(action[0]) - self.middle) / self.reach)
        self.action_space = spaces.Box(low, high, (1,), np.float32)


@pytest.mark.parametrize(
    ("low", "high", "beyond"),
    [
        (100, 1000, True),
        (-50, 40, False),
        *(pytest.param(*b, True, marks=pytest.mark.slow) for b in ((-1e-3, 1e-3), (400, 1e5))),
    ],
)
def test_bounds_that_the_policy_does_not_meet_are_named_as_the_cause(low: float, high: float, beyond: bool) -> None:
    def findings(**fields: Any) -> Any:
        settings = {"objective": FEW, "optimizer": {"learning_rate": 1e-4}, **SMALL, **fields}
        return trained(BANDIT, lambda: Far(low, high), steps=2_560, **settings)

    flat = findings(normalise={"actions": False})["return_flat"]
    assert "bounds" in flat.cause
    assert "normalise.actions = true" in flat.advice[0]
    clipped = next(evidence for evidence in flat.evidence if evidence.metric == "actions_clipped")
    assert (clipped.value > 0.9) is beyond
    stretched = findings().get("return_flat")
    assert stretched is None or "bounds" not in stretched.cause


def test_an_unstable_critic_is_reported() -> None:
    optimizer = {"critic_learning_rate": 3.0, "critic_max_grad_norm": None}
    findings = trained("CartPole-v1", steps=3_840, optimizer=optimizer, objective={"gae_lambda": 1.0, **FEW}, **SMALL)
    assert findings["critic_misleads"].evidence[0].value < -0.1


@pytest.mark.parametrize("what", ["observations", "rewards"])
def test_a_normaliser_that_clips_often_is_reported_as_saturated(what: str) -> None:
    findings = trained("CartPole-v1", steps=1_280, normalise={what: True, "clip": 0.05}, **SMALL)
    assert f"normalised {what} are clipped at ±normalise.clip = 0.05" in findings["normaliser_saturated"].what
    assert "normaliser_saturated" not in trained("CartPole-v1", steps=1_280, normalise={what: True}, **SMALL)


def test_a_target_kl_that_is_always_exceeded_is_reported() -> None:
    objective = {"target_kl": 1e-9, "reuse": {"epochs": 4, "minibatches": 2}}
    findings = trained("CartPole-v1", steps=2_560, objective=objective, **SMALL)
    assert "objective.target_kl = 1e-09" in findings["passes_end_at_once"].what


def test_a_line_search_without_room_takes_no_step() -> None:
    region = {"delta": 50.0, "tries": 1, "damping": 0.0}
    findings = trained("CartPole-v1", steps=2_560, algorithm="TRPO", objective={"trust_region": region}, **SMALL)
    assert findings["no_step_taken"].evidence[0].value < 0.5


def test_an_environment_without_rewards_is_reported_once_and_early() -> None:
    few = {"rollout": {"environments": 4, "steps": 16}, "objective": {"reuse": {"epochs": 1, "minibatches": 2}}}
    heard: list[Any] = []
    surefoot.train(lambda: Bandit(lambda *_: 0.0), steps=5_120, evaluation={"episodes": 0}, display=heard.append, **few)
    lines = [event.text for event in heard if isinstance(event, Message)]
    (line,) = [line for line in lines if line.startswith("! step ") and "return has been 0 throughout" in line]
    assert int(line.split()[2].rstrip(",").replace(",", "")) <= 1_280, "at a quarter of the budget, not at its end"
