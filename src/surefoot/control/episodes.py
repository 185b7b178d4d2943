"""One greedy episode in a plain environment, step by step: for those who look at it (videos, exports)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from surefoot.control.agent import Agent
from surefoot.control.environments.looped import episode_seed
from surefoot.control.environments.returned import score_and_life
from surefoot.control.evaluate import SIDE_BY_SIDE
from surefoot.control.spaces import MASK, Array
from surefoot.errors import SurefootError


@dataclass(frozen=True)
class Moment:
    """The state of an episode after ``step`` steps; step 0 is the reset."""

    step: int
    observation: Any
    """as the environment gave it"""
    reward: float
    """of the step that led here: the task's true score, where the environment says one"""
    total: float
    """the return so far"""
    over: bool
    """terminated or truncated"""
    mask: Array | None = None
    """which actions may follow [choices], as the environment gave it; None where it gave none, or none follows"""


def greedy_episode(
    agent: Agent, environment: gymnasium.Env[Any, Any], name: str, seed: int, episode: int, limit: int
) -> Iterator[Moment]:
    """Reset, then the likeliest action until the episode is over or ``limit`` steps are taken.

    Episode i is the i-th that ``surefoot evaluate`` judges with this seed, whatever the number of episodes.
    Raises SurefootError, naming the step, when the environment fails.
    """
    first = episode_seed(seed, episode % SIDE_BY_SIDE, episode // SIDE_BY_SIDE, "evaluation")
    try:
        observation, info = environment.reset(seed=first)
    except Exception as error:
        raise _failure(name, error, "reset()", episode, 0) from error
    moment, state = Moment(0, observation, 0.0, 0.0, False, info.get(MASK)), None
    yield moment
    while not moment.over and moment.step < limit:
        mask = None if moment.mask is None else np.asarray(moment.mask)[None]
        actions, state = agent.predict(
            _batch_of_one(agent.observation_space, moment.observation), state, deterministic=True, action_mask=mask
        )
        action = actions[0]
        action = int(action) if isinstance(agent.action_space, spaces.Discrete) else action
        step = moment.step + 1
        try:
            observation, reward, terminated, truncated, info = environment.step(action)
            score, _ = score_and_life(info, float(reward))
        except Exception as error:
            raise _failure(name, error, "step()", episode, step) from error
        over = bool(terminated or truncated)
        moment = Moment(step, observation, score, moment.total + score, over, None if over else info.get(MASK))
        yield moment


def _batch_of_one(space: gymnasium.Space[Any], observation: Any) -> Any:
    """The observation as a batch: evaluation works on batches too, and the last bits of a product depend on it."""
    if isinstance(space, spaces.Dict):
        return {key: _batch_of_one(part, observation[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_batch_of_one(part, value) for part, value in zip(space.spaces, observation, strict=True))
    return np.asarray(observation)[None]


def _failure(name: str, error: Exception, call: str, episode: int, step: int) -> SurefootError:
    what = f"raised {type(error).__name__}: {error} in {call}"
    return SurefootError(f"task={name!r}: {what}, episode {episode}, step {step}; mend the environment")


def check_same_spaces(agent: Agent, environment: gymnasium.Env[Any, Any], name: str) -> None:
    """Raise SurefootError unless the agent was trained on such observations and actions."""
    found = (environment.observation_space, environment.action_space)
    if found != (agent.observation_space, agent.action_space):
        raise SurefootError(
            f"task={name!r}: has spaces {found}, the agent was trained on ({agent.observation_space}, {agent.action_space})"
        )
