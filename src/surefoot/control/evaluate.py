"""Evaluate agents: whole episodes, each with its own seed and frozen normalisers; or one greedy episode step by step."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from surefoot.control.agent import Agent, with_lstm_state
from surefoot.control.environments import make_environments, task_name
from surefoot.control.environments.agents import AgentEnvironments
from surefoot.control.environments.looped import LoopedEnvironments, MakeEnvironment, episode_seed
from surefoot.control.environments.observations import (
    RESUME_OR_REPEAT,
    mean_numbers,
    non_finite,
    not_finite_message,
    score_and_life,
)
from surefoot.control.spaces import MASK, Array, SpaceError, check_agreement, mapped, mask_of
from surefoot.core.seeding import any_algorithm, stream
from surefoot.errors import NotFiniteError, SurefootError, announce, check_stopped
from surefoot.files import check_flags, check_whole
from surefoot.ranks.collectives import exchange, rank, together, world_size

Episode = tuple[float, int, dict[str, float]]
"""return, length and numbers in the last info"""
EVALUATION_ENVIRONMENTS = 10
"""environments that step together, at most"""
MAX_EPISODE_STEPS = 1_000_000
"""steps after which an episode counts as endless"""
LIMIT = "limit it (gymnasium.wrappers.TimeLimit, or max_episode_steps), or set evaluation.episodes = 0"
LONG_EPISODE_STEPS = 50_000
"""steps after which a line is announced about it"""


@dataclass(frozen=True)
class EvaluationResult:
    """Undiscounted, unnormalised returns of whole episodes in true scores, in the order of the episodes."""

    mean_return: float
    std_return: float
    returns: list[float]
    lengths: list[int]
    episodes: int
    seed: int
    checkpoint: str | None = field(default=None, compare=False)
    info: dict[str, float | None] = field(default_factory=dict)
    """means of the numbers in the last info of the episodes, by the names in ``rollout.info``"""
    note: str = ""
    """how the task differs from the one trained on, if that does not prevent an evaluation"""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


@torch.inference_mode()
def evaluate_agent(
    agent: Agent,
    task: str | MakeEnvironment,
    arguments: dict[str, Any],
    episodes: int,
    seed: int,
    deterministic: bool = True,
    shared: bool = False,
) -> EvaluationResult:
    """Run ``episodes`` whole episodes, the likeliest action at every step unless ``deterministic`` is False.

    Episode i is reset with the seed of (seed, i mod width, i div width, "evaluation"), with width the number of environments.
    The same call always gives the same result, on episodes that training has not seen.
    shared   each rank runs its share of the episodes; all of them must call this, and get the result of one process

    Raises SurefootError when the task's spaces are not the agent's, bounds of observations aside.
    """
    check_whole(1, episodes=episodes)
    check_whole(0, seed=seed)
    check_flags(deterministic=deterministic)
    width = min(episodes, EVALUATION_ENVIRONMENTS)
    environments = make_environments(task, arguments, width, seed, "evaluation")
    try:
        if not isinstance(environments, LoopedEnvironments | AgentEnvironments):
            raise SurefootError(f"task={task_name(task)!r}: evaluation needs single environments, not a vector environment")
        note = check_same_spaces(agent, environments, task_name(task))
        return replace(_run(agent, environments, episodes, seed, deterministic, shared), note=note)
    finally:
        environments.close()


def _run(
    agent: Agent,
    environments: LoopedEnvironments | AgentEnvironments,
    episodes: int,
    seed: int,
    deterministic: bool,
    shared: bool,
) -> EvaluationResult:
    size, returns = environments.size, environments.returns
    width = environments.count // size
    quota = np.array([len(range(b, episodes, width)) for b in range(width)])
    if shared:
        quota[[b for b in range(width) if b % world_size() != rank()]] = 0
        with together():
            mine = _finished_episodes(agent, environments, quota.repeat(size), seed, deterministic)
        rows = [list(chain(*of_ranks)) for of_ranks in zip(*exchange(mine), strict=True)]
    else:
        rows = _finished_episodes(agent, environments, quota.repeat(size), seed, deterministic)
    ended = [list(map(_of_agents, zip(*rows[at : at + size], strict=True))) for at in range(0, len(rows), size)]
    ordered = [ended[i % width][i // width] for i in range(episodes)]
    values = [row[0] for row in ordered]
    return EvaluationResult(
        mean_return=float(np.mean(values)),
        std_return=float(np.std(values)),
        returns=values,
        lengths=[row[1] for row in ordered],
        episodes=episodes,
        seed=seed,
        info=mean_numbers((row[2] for row in ordered), agent.recipe.rollout.info, returns),
    )


def _of_agents(episodes: tuple[Episode, ...]) -> Episode:
    """The episodes of the agents of a copy as one: their mean return, the longest length, and all numbers."""
    totals, lengths, numbers = zip(*episodes, strict=True)
    return float(np.mean(totals)), max(lengths), {name: x for each in numbers for name, x in each.items()}


def _finished_episodes(
    agent: Agent, environments: LoopedEnvironments | AgentEnvironments, quota: Array, seed: int, deterministic: bool
) -> list[list[Episode]]:
    """Return, length and numbers of the episodes of each environment, of which ``quota`` has the number.

    An environment without episodes stays in the batch: the last bits of a matrix product depend on the number of rows.
    """
    width = environments.count
    ended: list[list[Episode]] = [[] for _ in range(width)]
    running, length = np.zeros(width), np.zeros(width, np.int64)
    normalise, convert, policy = agent.normaliser(), agent.action_converter(), agent.policy
    generator = stream(seed, "evaluation")
    observations, take_step = any_algorithm()(environments.reset)(), any_algorithm()(environments.step)
    lstm_state, starts = policy.initial_lstm_state(width), np.ones(width, bool)
    _check(environments.name, non_finite(observations), length)
    warned = False
    while (active := quota > 0).any():
        check_stopped()
        inputs = with_lstm_state(normalise(agent.tensors(observations)), lstm_state, starts)
        distribution, lstm_state = policy.step(inputs)
        actions = distribution.mode() if deterministic else distribution.sample(generator)
        step = take_step(convert(actions.cpu()), active)
        running += step.rewards if step.scores is None else step.scores
        length += ~step.ignored
        bad = non_finite(step.observations, step.final_observations, step.rewards, step.scores)
        _check(environments.name, bad, length)
        starts = step.done
        for index in np.flatnonzero(starts):
            ended[index].append((float(running[index]), int(length[index]), step.final_infos[int(index)]))
            running[index], length[index] = 0.0, 0
            quota[index] -= 1
        longest = length.max()
        if longest >= MAX_EPISODE_STEPS:
            raise SurefootError(
                f"task={environments.name!r}: an episode did not end within {MAX_EPISODE_STEPS:,} steps of evaluation; {LIMIT}"
            )
        if longest == LONG_EPISODE_STEPS and not warned:
            warned = True
            announce(
                f"evaluation: an episode of {environments.name} has run for {LONG_EPISODE_STEPS:,} steps, and the evaluation "
                f"waits for its end (at most {MAX_EPISODE_STEPS:,} steps); {LIMIT}"
            )
        observations = step.observations
    return ended


def _check(name: str, bad: dict[int, str], length: Any) -> None:
    if bad:
        index, what = next(iter(bad.items()))
        raise NotFiniteError(
            f"{not_finite_message(name, what, index, length[index])}, in an evaluation; fix the "
            f"environment, or set another evaluation.seed (--seed of a command), then {RESUME_OR_REPEAT}"
        )


@dataclass(frozen=True)
class EpisodeStep:
    """The state of an episode after ``step`` steps; step 0 is the reset."""

    step: int
    observation: Any
    """as the environment returned it, copied: it may write into its arrays"""
    reward: float
    """true score of the last step"""
    total: float
    """the return so far"""
    done: bool
    """terminated or truncated"""
    mask: Array | None = None
    """action mask [choices] as the environment returned it; None without one, or when no action follows"""


def greedy_episode(
    agent: Agent, environment: gymnasium.Env[Any, Any], name: str, seed: int, episode: int, limit: int
) -> Iterator[EpisodeStep]:
    """Reset, then take the likeliest action until the episode ends or ``limit`` steps are taken; yield every state.

    Episode i is the i-th that ``surefoot evaluate`` runs with this seed, whatever the number of episodes.
    Raises SurefootError, naming the step, when the environment fails.
    """
    first = episode_seed(seed, episode % EVALUATION_ENVIRONMENTS, episode // EVALUATION_ENVIRONMENTS, "evaluation")
    try:
        observation, info = environment.reset(seed=first)
    except Exception as error:
        raise _failure(name, error, "reset()", episode, 0) from error
    at, state = EpisodeStep(0, copy.deepcopy(observation), 0.0, 0.0, False, copy.deepcopy(info.get(MASK))), None
    yield at
    while not at.done and at.step < limit:
        try:
            mask = None if at.mask is None else mask_of(agent.action_space, at.mask)[None]
        except SpaceError as misfit:
            raise SurefootError(f"action_mask: is {misfit}") from None
        actions, state = agent.predict(
            _batch_of_one(agent.observation_space, at.observation), state, deterministic=True, action_mask=mask
        )
        action = mapped(lambda x: x[0], actions)  # of a batch of one
        action = int(action) if isinstance(agent.action_space, spaces.Discrete) else action
        step = at.step + 1
        try:
            observation, reward, terminated, truncated, info = environment.step(action)
            score, _ = score_and_life(info, float(reward))
        except Exception as error:
            raise _failure(name, error, "step()", episode, step) from error
        done = bool(terminated or truncated)
        shown = copy.deepcopy((observation, None if done else info.get(MASK)))
        at = EpisodeStep(step, shown[0], score, at.total + score, done, shown[1])
        yield at


def _batch_of_one(space: gymnasium.Space[Any], observation: Any) -> Any:
    """The observation as a batch, as in evaluation: the last bits of a matrix product depend on that."""
    if isinstance(space, spaces.Dict):
        return {key: _batch_of_one(part, observation[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_batch_of_one(part, value) for part, value in zip(space.spaces, observation, strict=True))
    return np.asarray(observation)[None]


def _failure(name: str, error: Exception, call: str, episode: int, step: int) -> SurefootError:
    what = f"raised {type(error).__name__}: {error} in {call}"
    return SurefootError(f"task={name!r}: {what}, episode {episode}, step {step}; fix the environment")


def check_same_spaces(
    agent: Agent, environment: gymnasium.Env[Any, Any] | LoopedEnvironments | AgentEnvironments, name: str
) -> str:
    """A note if the bounds of observations differ from those that the agent was trained on; else an empty text.

    Raises SurefootError if something else differs.
    """
    try:
        note = check_agreement(agent.spaces, (environment.observation_space, environment.action_space))
    except SpaceError as error:
        raise SurefootError(f"task={name!r}: has {error}; choose a task with these spaces, or train a new agent") from None
    return note and f"{name} has {note}"
