"""The interface of B environments that step together, and the default: a loop over them in this process.

In every autoreset mode, ``step`` returns the observation that comes next, the one an episode was truncated on, and whether a
row's action was ignored, so all modes yield the same transitions. Observations are dicts of arrays; if a task masks actions,
the mask of the next action is one entry.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces

from surefoot.control.environments.observations import (
    RESET,
    STEP,
    Reader,
    as_end,
    as_number,
    call_failure,
    check_tuple,
    copied,
    numbers_in,
    score_and_life,
)
from surefoot.control.environments.records import ENDS, REWARDS, Record, Replayed
from surefoot.control.spaces import Array, Observations, action_dtype, as_float32, nester
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError

MakeEnvironment = Callable[[], "gymnasium.Env[Any, Any]"]
Lost = dict[int, str]
"""environments that were not restored exactly -> what was different in their replay; empty if they can't be replayed"""


@dataclass
class Step:
    """The result of one step of B environments.   All [B] unless noted."""

    observations: Observations
    """input of the next action: parts [B, ...], and "action_mask" [B, choices] if the task masks actions"""
    rewards: Array
    terminated: Array
    truncated: Array
    ignored: Array
    """True where the action was not taken (the row in which a NEXT_STEP environment resets)"""
    final_observations: dict[int, Observations] = field(default_factory=dict)
    """environment -> the observation its episode was truncated on, if the next row shows another"""
    scores: Array | None = None
    """the task's own rewards in float64, for episode returns; ``rewards`` may be changed for learning (Atari: their signs)"""
    life_lost: Array | None = None
    """True where ``terminated`` ends the value but not the episode (Atari: a lost life); None: nowhere"""
    final_infos: dict[int, dict[str, float]] = field(default_factory=dict)
    """environment -> the numbers in the info of its episode's last step, by name; for every episode that ended"""

    @cached_property
    def done(self) -> Array:
        """[B] True where an episode ended."""
        ended: Array = self.terminated | self.truncated
        return ended if self.life_lost is None else ended & ~self.life_lost


class Environments(Protocol):
    """B environments of one kind."""

    name: str
    count: int
    first: int
    """the number of the first environment: 0, unless these are a rank's share of more"""
    observation_space: gymnasium.Space[Any]
    """of one environment"""
    action_space: gymnasium.Space[Any]
    """of one environment"""

    def reset(self) -> Observations:
        """Start a new episode in every environment; return the first observations."""
        ...

    def step(self, actions: Array, active: Array | None = None) -> Step:
        """Act in every environment, or only in the active ones; those whose episode ends are reset."""
        ...

    def restart(self, index: int) -> tuple[Observations, list[int]]:
        """Abandon one environment's episode; return the current observations and the environments that restarted."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Observations, Lost]:
        """Restore a state; return the current observations and the environments that start new episodes instead."""
        ...

    def mark(self) -> None:
        """Remember where the current episodes stand; a rollout begins."""
        ...

    def close(self) -> None: ...


_two_numbers = struct.Struct("<dd").pack


def episode_seed(seed: int, environment: int, episode: int, purpose: str = "training") -> int:
    """The seed of one episode, a function of run seed, environment and episode number, so that any episode can be replayed.

    Training and evaluation never share seeds, so an agent is not evaluated on episodes it has seen.
    """
    words = [seed, environment, episode] + ([1] if purpose == "evaluation" else [])
    return derived_seed(*words)


def check_same_actions(found: Sequence[gymnasium.Space[Any]], name: str, numbers: Iterable[int]) -> None:
    """Raise SurefootError if environments, with these numbers, have other actions than the first: one policy acts in all."""
    for number, space in zip(numbers, found, strict=False):
        if space != found[0]:
            raise SurefootError(
                f"{name}: environment {number} has {space}, the first has {found[0]}; make all with the same actions"
            )


class LoopedEnvironments(Replayed):
    """B environments stepped one after the other in this process, each reset as soon as its episode ends.

    Every episode is reset with ``episode_seed``.
    """

    def __init__(
        self, make: MakeEnvironment, count: int, seed: int, name: str, purpose: str = "training", first: int = 0
    ) -> None:
        self.count, self.seed, self.name, self.purpose = count, seed, name, purpose
        made = [make() for _ in range(count)]
        self.observation_space: gymnasium.Space[Any] = made[0].observation_space
        self.action_space: gymnasium.Space[Any] = made[0].action_space
        super().__init__(made, self.action_space, name)
        check_same_actions([each.action_space for each in self.environments], name, range(first, first + count))
        self.reader = Reader(self.observation_space, self.action_space, count, name)
        self.observations = self.reader.empty()
        self.marked: list[tuple[Record, int]] = []
        self._discrete, self._nested = isinstance(self.action_space, spaces.Discrete), nester(self.action_space)
        self.first = first
        """the number of the first environment, if these are a slice of more"""
        self.position: Any = [0, -1, -1]  # environment, episode and step of the last call, for error messages

    def restart(self, index: int) -> tuple[Observations, list[int]]:
        self.begin_next(index)
        return copied(self.observations), [index]

    def begin(self, index: int, episode: int) -> None:
        """Reset one environment to an episode."""
        number = self.first + index
        try:
            self.begin_record(index, episode)
            self.position[:] = number, episode, 0
            seed = episode_seed(self.seed, number, episode, self.purpose)
            observation, info = check_tuple(self.environments[index].reset(seed=seed), RESET)
        except (Exception, SystemExit) as error:
            raise self._failure(index, error) from error
        self._store(index, observation, info, True)

    def step(self, actions: Array, active: Array | None = None) -> Step:
        count = self.count
        numbers, finals, infos = np.zeros((2, count)), {}, {}
        rewards, scores = numbers
        terminated, truncated, life_lost = np.zeros(count, bool), np.zeros(count, bool), np.zeros(count, bool)
        for index in range(count) if active is None else np.flatnonzero(active).tolist():
            rewards[index], term, trunc, scores[index], lost, info = self.act(index, actions[index])
            life_lost[index] = lost and not (term or trunc)
            terminated[index], truncated[index] = term or life_lost[index], trunc
            if term or trunc:
                infos[index] = numbers_in(info)
                if trunc and not term:
                    finals[index] = self.reader.row(self.observations, index)
                self.begin_next(index, whole=True)
        ignored = np.zeros(count, bool) if active is None else ~active
        rewards = as_float32(rewards)
        return Step(copied(self.observations), rewards, terminated, truncated, ignored, finals, scores, life_lost, infos)

    def mark(self) -> None:
        self.marked = [(record, len(record.actions)) for record in self.records]

    def actions_before_mark(self, index: int) -> tuple[int, Array]:
        """The episode of an environment at the last mark, and the actions sent to it before the mark."""
        record, count = self.marked[index]
        return record.number, np.array(record.actions[:count], action_dtype(self.action_space))

    def act(self, index: int, action: Any) -> tuple[float, bool, bool, float, bool, Any]:
        """Take one action in one environment and log it: reward, terminated, truncated, score, life lost, info."""
        action = int(action) if self._discrete else np.asarray(action)
        record = self.records[index]
        record.actions.append(action if self._discrete else action.copy())  # the environment may change its argument
        self.position[:] = self.first + index, record.number, len(record.actions)
        try:
            returned = self.environments[index].step(self._nested(action))
            observation, reward, terminated, truncated, info = check_tuple(returned, STEP)
            reward = as_number(reward)  # an array would turn None into NaN
            terminated, truncated = as_end(terminated, "terminated"), as_end(truncated, "truncated")
            score, life_lost = score_and_life(info, reward)
        except (Exception, SystemExit) as error:
            raise self._failure(index, error) from error
        self._store(index, observation, info, not (terminated or truncated))
        record.add(REWARDS, _two_numbers(reward, score))
        if terminated or truncated or life_lost:
            record.add(ENDS, f"{len(record.actions)} {terminated} {truncated} {life_lost};".encode())
        return reward, terminated, truncated, score, life_lost, info

    def _store(self, index: int, observation: Any, info: Any, acting: bool) -> None:
        try:
            self.reader.store(self.observations, index, observation, info, acting)
        except Exception as error:
            raise self._failure(index, error) from error
        self.records[index].add_observations(self.observations, index, acting)

    def _failure(self, index: int, error: BaseException) -> SurefootError:
        position = self.first + index, self.records[index].number, len(self.records[index].actions)
        return call_failure(self.name, position, error, self.purpose)

    def repeat(self, index: int, action: Any) -> bool:
        _, terminated, truncated, *_ = self.act(index, action)
        return terminated or truncated
