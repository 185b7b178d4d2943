"""Environments with several agents, with PettingZoo's interfaces, which need no package here.

Parallel environments: every agent of every copy is a row, and one policy acts for all. Turn-based ones (AEC) become a Gymnasium
environment, seen from the seat of one agent.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from surefoot.control.environments.looped import Step, episode_seed
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
    reported_in,
)
from surefoot.control.environments.records import ENDS, REWARDS, Replayed
from surefoot.control.spaces import BARE, MASK, Array, Observations, SpaceError, as_float32, choices, is_nested, mask_of, nester
from surefoot.errors import SurefootError
from surefoot.recipes.callables import import_object

SEEDS = 2**31
"""seeds that every environment takes are below this"""
SHOWN = 16
"""agents whose returns are metrics, at most"""


def copies_of(made: Any) -> list[Any]:
    """The parallel environments in an object: itself, or those of SuperSuit's vector environments; empty if there are none."""
    if isinstance(made, gymnasium.Env) or is_turn_based(made):
        return []
    if hasattr(made, "possible_agents"):
        return [made]
    inner = [getattr(each, "par_env", None) for each in getattr(made, "vec_envs", [made])]
    return inner if all(hasattr(each, "possible_agents") for each in inner) else []


def is_turn_based(made: Any) -> bool:
    """Whether an object has PettingZoo's turn-based interface (AEC)."""
    return hasattr(made, "possible_agents") and hasattr(made, "agent_iter")


def bare_space(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """A PettingZoo observation space without its action mask."""
    if not isinstance(space, spaces.Dict) or MASK not in space.spaces:
        return space
    rest = {key: part for key, part in space.spaces.items() if key != MASK}
    return rest[BARE] if list(rest) == [BARE] else spaces.Dict(rest)


def as_gymnasium(observation: Any, info: Any) -> tuple[Any, dict[str, Any]]:
    """An agent's observation without its action mask, and its info with it."""
    if not isinstance(observation, Mapping) or MASK not in observation:
        return observation, dict(info or {})
    rest = {key: part for key, part in observation.items() if key != MASK}
    return rest[BARE] if list(rest) == [BARE] else rest, {**(info or {}), MASK: observation[MASK]}


class AgentEnvironments(Replayed):
    """Copies of a parallel environment. Row i is agent i mod n of copy i div n, and all share one policy.

    An agent that ended waits, ignored, until its copy is over. Seeds, checkpoints and replays are those of
    ``LoopedEnvironments``, by copy.

    make    makes a copy, or SuperSuit's vector environment of several
    count   rows; more than that if it is no multiple of the agents
    """

    def __init__(
        self, make: Callable[[], Any], count: int, seed: int, name: str, purpose: str = "training", first: int = 0
    ) -> None:
        self.seed, self.name, self.purpose, self.first = seed, name, purpose, first
        copies = copies_of(make())
        self.agents: list[Any] = list(copies[0].possible_agents)
        if not self.agents:
            raise SurefootError(f"task={name!r}: has no possible_agents; name its agents there")
        self.size = len(self.agents)
        while len(copies) * self.size < count:
            copies += copies_of(make())
        del copies[-(-count // self.size) :]
        self.count = len(copies) * self.size
        self.returns = tuple(f"return_{agent}" for agent in self.agents[:SHOWN])
        self.observation_space, self.action_space = shared_spaces(copies[0], self.agents, name)
        super().__init__(copies, self.action_space, name)
        self.nested = int if isinstance(self.action_space, spaces.Discrete) else nester(self.action_space)
        self.reader = Reader(self.observation_space, self.action_space, self.count, name)
        self.observations = self.reader.empty()
        self.ended = np.zeros(self.count, bool)
        """[B] agents that wait until their copy is over"""
        self.totals = np.zeros(self.count)
        """[B] the agents' returns so far"""

    def restart(self, index: int) -> tuple[Observations, list[int]]:
        copy = index // self.size
        self.begin_next(copy)
        return copied(self.observations), list(self.rows_of(copy))

    def step(self, actions: Array, active: Array | None = None) -> Step:
        ignored = self.ended.copy() if active is None else self.ended | ~active
        step = self._empty(ignored)
        for copy in range(len(self.environments)):
            rows = self.rows_of(copy)
            if active is not None and not active[rows].any():
                continue
            self._act(copy, actions[rows], step)
            if self.ended[rows].all():
                self.begin_next(copy, whole=True)
        step.observations, step.rewards = copied(self.observations), as_float32(step.rewards)
        return step

    def _empty(self, ignored: Array) -> Step:
        rewards, (terminated, truncated) = np.zeros(self.count), np.zeros((2, self.count), bool)
        return Step({}, rewards, terminated, truncated, ignored, scores=rewards.copy())

    def begin(self, index: int, episode: int) -> None:
        """Reset one copy to an episode."""
        rows = self.rows_of(index)
        seed = episode_seed(self.seed, self.first // self.size + index, episode, self.purpose) % SEEDS
        with self._errors(index):
            self.begin_record(index, episode)
            seen, infos = check_tuple(self.environments[index].reset(seed=seed), RESET)
            for row, agent in zip(rows, self.agents, strict=True):
                self._store(row, _of(agent, "observation", seen), infos.get(agent), True)
        self.ended[rows], self.totals[rows] = False, 0.0

    def _act(self, copy: int, actions: Array, step: Step) -> None:
        """Act in one copy, and write what its agents get into the step."""
        record, environment = self.records[copy], self.environments[copy]
        record.actions.append(np.copy(actions))
        living = [(row, agent) for row, agent in zip(self.rows_of(copy), self.agents, strict=True) if not self.ended[row]]
        with self._errors(copy):
            moves = {agent: self.nested(actions[row % self.size].copy()) for row, agent in living}
            returned = check_tuple(environment.step(moves), STEP)
            for row, agent in living:
                self._read(row, agent, returned, step)
                if not self.ended[row] and agent not in environment.agents:
                    raise SpaceError(f"agent {agent!r} left neither terminated nor truncated")

    def _read(self, row: int, agent: Any, returned: Any, step: Step) -> None:
        """What one agent gets in a step."""
        seen, rewards, terminated, truncated, infos = returned
        reward, info = as_number(_of(agent, "reward", rewards)), infos.get(agent)
        reported_in(info, ())
        terminal = as_end(_of(agent, "terminated", terminated), "terminated")
        cut = as_end(_of(agent, "truncated", truncated), "truncated")
        self._store(row, _of(agent, "observation", seen), info, not (terminal or cut))
        record = self.records[row // self.size]
        record.add(REWARDS, np.float64(reward).tobytes())
        record.add(ENDS, bytes((terminal, cut)))
        self.totals[row] += reward
        self.ended[row] = terminal or cut
        if step.ignored[row]:
            return
        assert step.scores is not None
        step.rewards[row] = step.scores[row] = reward
        step.terminated[row], step.truncated[row] = terminal, cut
        if terminal or cut:
            step.final_infos[row] = {**numbers_in(info), f"return_{agent}": float(self.totals[row])}
        if cut and not terminal:
            step.final_observations[row] = self.reader.row(self.observations, row)

    def _store(self, row: int, observation: Any, info: Any, acting: bool) -> None:
        observation, info = as_gymnasium(observation, info)
        self.reader.store(self.observations, row, observation, info, acting)
        self.records[row // self.size].add_observations(self.observations, row, acting)

    def repeat(self, index: int, action: Any) -> bool:
        self._act(index, action, self._empty(self.ended.copy()))
        return bool(self.ended[self.rows_of(index)].all())

    @contextlib.contextmanager
    def _errors(self, copy: int) -> Iterator[None]:
        """Raise errors of a copy as a SurefootError that names the call."""
        try:
            yield
        except (Exception, SystemExit) as error:
            position = self.first // self.size + copy, self.records[copy].number, len(self.records[copy].actions)
            raise call_failure(self.name, position, error, self.purpose) from error

    def mark(self) -> None:
        """Nothing: single rows are not replayed."""


def shared_spaces(environment: Any, agents: list[Any], name: str) -> tuple[Any, Any]:
    """The spaces of observations and actions of all agents. Raises SurefootError if they differ."""
    found = [(bare_space(environment.observation_space(agent)), environment.action_space(agent)) for agent in agents]
    for agent, (seen, acts) in zip(agents, found, strict=True):
        for kind, space, other in (("observations", seen, found[0][0]), ("actions", acts, found[0][1])):
            if space != other:
                raise SurefootError(
                    f"task={name!r}: agent {agent!r} has {kind} {space}, agent {agents[0]!r} has {other}, and one policy acts "
                    "for all; pad them (supersuit: pad_observations_v0, pad_action_space_v0)"
                )
    return found[0]


def _of(agent: Any, name: str, values: Any) -> Any:
    """What a dict by agent has for one; SpaceError if it has nothing."""
    if not isinstance(values, Mapping):
        raise SpaceError(f"{name}s of type {type(values).__name__} instead of a dict by agent")
    if agent not in values:
        raise SpaceError(f"no {name} of agent {agent!r}")
    return values[agent]


# ---- turn by turn -----------------------------------------------------------------------------------------------------


class Seat(gymnasium.Env[Any, Any]):
    """A turn-based environment (AEC) from the seat of one agent; the others move between its turns.

    The reward of a step is all that the agent gets until its next turn.

    seat       the agent; None: one by chance in every episode
    opponent   how the others move: "random", or a function of (observation, action mask or None, numpy generator), or its
               "module:function"
    """

    def __init__(self, environment: Any, seat: Any = None, opponent: Any = "random", name: str = "seat") -> None:
        self.environment, self.seat, self.name = environment, seat, name
        agents = list(environment.possible_agents)
        if seat is not None and seat not in agents:
            raise SurefootError(f"environment.seat={seat!r}: {name} has no agent of this name; choose one of {agents}")
        self.observation_space, self.action_space = shared_spaces(environment, agents, name)
        self.metadata = dict(getattr(environment, "metadata", {}))
        self.render_mode = getattr(environment, "render_mode", None)
        chance = isinstance(opponent, str) and opponent == "random"
        self.opponent = self._by_chance if chance else opponent
        if isinstance(self.opponent, str):
            self.opponent = import_object("environment.opponent", self.opponent, "or pass the function itself")
        self.agent: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        agents = list(self.environment.possible_agents)
        for _ in range(1_000):  # a game that ends before the agent's first turn is none
            self.environment.reset(seed=int(self.np_random.integers(SEEDS)))
            self.agent = agents[int(self.np_random.integers(len(agents)))] if self.seat is None else self.seat
            observation, _, terminated, truncated, info = self._turn()
            if not (terminated or truncated):
                return observation, info
        raise SpaceError(f"no turn of agent {self.agent!r} in 1,000 games")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.environment.step(action)
        return self._turn()

    def _turn(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Let the others move until it is the agent's turn, or its game is over."""
        environment = self.environment
        while environment.agents and environment.agent_selection != self.agent:
            seen, _, terminated, truncated, info = environment.last()
            seen, info = as_gymnasium(seen, info)
            over = terminated or truncated
            environment.step(None if over else self.opponent(seen, info.get(MASK), self.np_random))
        if self.agent not in environment.agents:
            raise SpaceError(f"no last turn of agent {self.agent!r}, in which its game ends")
        seen, reward, terminated, truncated, info = environment.last()
        return (*as_gymnasium(seen, info)[:1], float(reward), terminated, truncated, as_gymnasium(seen, info)[1])

    def _by_chance(self, observation: Any, mask: Any, generator: np.random.Generator) -> Any:
        space: Any = self.action_space
        if mask is None:
            space.seed(int(generator.integers(SEEDS)))
            return space.sample()
        allowed, sizes = mask_of(space, mask), choices(space)
        start = getattr(space, "start", 0)
        if sizes is None or is_nested(space):
            raise SpaceError(f'opponent="random" has no moves under a mask for {space}; write one as a function')
        options = np.split(allowed, np.cumsum(sizes)[:-1])
        move: Array = np.reshape([generator.choice(np.flatnonzero(each)) for each in options], space.shape) + start
        return move if space.shape else int(move)

    def render(self) -> Any:
        return self.environment.render()

    def close(self) -> None:
        self.environment.close()
