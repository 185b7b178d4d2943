"""Environments stepped together, behind one small interface: a lean loop of our own, or any Gymnasium vector environment.

Whatever the autoreset mode underneath, ``step`` says which observation comes next, which one an episode ended on, and
whether a row's action was ignored; so all modes yield the same kept transitions. Observations are dicts of their leaves;
where a task masks actions, which its first reset tells, the mask of the next action is one entry of them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from surefoot.control.environments.atari import ATARI, make_atari
from surefoot.control.environments.faults import at_fault, making_failed
from surefoot.control.environments.observations import Reader, copied
from surefoot.control.environments.returned import RESET, STEP, as_number, given, score_and_life
from surefoot.control.environments.simulator import mujoco_to_logging
from surefoot.control.environments.vector import check_complete, check_infos, said, stated_mode
from surefoot.control.spaces import MASK, Array, Misfit, Observations, as_float32
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, cause_of, place_of
from surefoot.recipes.import_object import append_working_folder, import_object

MakeEnvironment = Callable[[], "gymnasium.Env[Any, Any]"]


@dataclass
class Step:
    """What one step of B environments gave.   All [B] unless said."""

    observations: Observations
    """what the next action is chosen from: leaves [B, ...], and "action_mask" [B, choices] where the task masks"""
    rewards: Array
    terminated: Array
    truncated: Array
    ignored: Array
    """True where this row's action was not taken (the row in which a NEXT_STEP environment resets)"""
    final_observations: dict[int, Observations] = field(default_factory=dict)
    """environment -> the leaves its episode was truncated on, where they are not the next row's"""
    scores: Array | None = None
    """what the task itself counts, for episode returns, where ``rewards`` are changed for learning (Atari: their signs)"""
    going_on: Array | None = None
    """True where ``terminated`` ends the value only and the episode goes on (Atari: a lost life); None where nowhere"""

    @cached_property
    def over(self) -> Array:
        """[B] True where an episode ended."""
        ended: Array = self.terminated | self.truncated
        return ended if self.going_on is None else ended & ~self.going_on


class Environments(Protocol):
    """B environments of one kind."""

    name: str
    count: int
    observation_space: gymnasium.Space[Any]
    """of one environment"""
    action_space: gymnasium.Space[Any]
    """of one environment"""

    def reset(self) -> Observations:
        """Begin; the first observations."""
        ...

    def step(self, actions: Array, active: Array | None = None) -> Step:
        """Act in every environment, or in the active ones only; an ended one is ready for its next episode after."""
        ...

    def restart(self, index: int) -> tuple[Observations, list[int]]:
        """Abandon one environment's episode and begin its next: the current observations, and who began anew."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Observations, list[int]]:
        """Continue from there: the current observations, and the environments that could not be brought back exactly."""
        ...

    def close(self) -> None: ...


def episode_seed(seed: int, environment: int, episode: int, purpose: str = "training") -> int:
    """The seed of one episode: a function of run, environment and episode number, so that any episode can be replayed.

    Training and evaluation draw from different seeds, whatever the numbers: an agent is not judged on what it has seen.
    """
    words = [seed, environment, episode] + ([1] if purpose == "evaluation" else [])
    return derived_seed(*words)


class LoopedEnvironments:
    """B environments stepped one after the other in this process, each reset as soon as it ends.

    Every episode is reset with ``episode_seed``, and the actions since that reset are kept, so that a checkpoint can bring
    an environment back by replaying them.
    """

    def __init__(self, make: MakeEnvironment, count: int, seed: int, name: str, purpose: str = "training") -> None:
        self.count, self.seed, self.name, self.purpose = count, seed, name, purpose
        self.environments = [make() for _ in range(count)]
        self.observation_space: gymnasium.Space[Any] = self.environments[0].observation_space
        self.action_space: gymnasium.Space[Any] = self.environments[0].action_space
        self.reader = Reader(self.observation_space, self.action_space, count, name)
        self.observations = self.reader.empty()
        self.episodes = [-1] * count
        self.actions: list[list[Any]] = [[] for _ in range(count)]
        self.marked: list[tuple[int, list[Any], int]] = []
        self._discrete = isinstance(self.action_space, spaces.Discrete)
        self.first = 0  # the number of environment 0, where these are a part of more
        self.place: Any = [0, -1, -1]  # environment, episode and step of the last call, for whoever must say what went wrong

    def reset(self) -> Observations:
        for index in range(self.count):
            self._begin(index, self.episodes[index] + 1)
        return copied(self.observations)

    def restart(self, index: int) -> tuple[Observations, list[int]]:
        self._begin(index, self.episodes[index] + 1)
        return copied(self.observations), [index]

    def _begin(self, index: int, episode: int) -> None:
        self.episodes[index] = episode
        self.actions[index] = []
        number = self.first + index
        self.place[:] = number, episode, 0
        try:
            seed = episode_seed(self.seed, number, episode, self.purpose)
            observation, info = given(self.environments[index].reset(seed=seed), RESET)
        except (Exception, SystemExit) as error:
            raise self._failure(index, error) from error
        self._store(index, observation, info, True)

    def step(self, actions: Array, active: Array | None = None) -> Step:
        count = self.count
        rewards, scores, finals = np.zeros(count), np.zeros(count), {}
        terminated, truncated, going_on = np.zeros(count, bool), np.zeros(count, bool), np.zeros(count, bool)
        for index in range(count) if active is None else np.flatnonzero(active).tolist():
            rewards[index], term, trunc, scores[index], life_lost = self.act(index, actions[index])
            going_on[index] = life_lost and not (term or trunc)
            terminated[index], truncated[index] = term or going_on[index], trunc
            if term or trunc:
                if trunc and not term:
                    finals[index] = self.reader.one_of(self.observations, index)
                self._begin(index, self.episodes[index] + 1)
        ignored = np.zeros(count, bool) if active is None else ~active
        earned, scores = as_float32(rewards), as_float32(scores)
        return Step(copied(self.observations), earned, terminated, truncated, ignored, finals, scores, going_on)

    def mark(self) -> None:
        self.marked = [(episode, log, len(log)) for episode, log in zip(self.episodes, self.actions, strict=True)]

    def led_to_mark(self, index: int) -> tuple[int, Array]:
        episode, log, count = self.marked[index]
        return episode, np.array(log[:count], self.action_space.dtype)

    def act(self, index: int, action: Any) -> tuple[float, bool, bool, float, bool]:
        """One action in one environment, remembered for replay: reward, terminated, truncated, score, life lost."""
        action = int(action) if self._discrete else np.asarray(action)
        self.actions[index].append(np.copy(action))  # the environment may change what it is given
        self.place[:] = self.first + index, self.episodes[index], len(self.actions[index])
        try:
            observation, reward, terminated, truncated, info = given(self.environments[index].step(action), STEP)
            reward = as_number(reward)  # an array would take None for NaN
            score, life_lost = score_and_life(info, reward)
        except (Exception, SystemExit) as error:
            raise self._failure(index, error) from error
        terminated, truncated = bool(terminated), bool(truncated)
        self._store(index, observation, info, not (terminated or truncated))
        return reward, terminated, truncated, score, life_lost

    def _store(self, index: int, observation: Any, info: Any, acting: bool) -> None:
        try:
            self.reader.one_into(self.observations, index, observation, info, acting)
        except (TypeError, ValueError) as error:
            raise self._failure(index, error) from error

    def _failure(self, index: int, error: BaseException) -> SurefootError:
        what = f"gave {error}" if isinstance(error, Misfit) else f"raised {cause_of(error)}"
        place = self.first + index, self.episodes[index], len(self.actions[index])
        return SurefootError(at_fault(self.name, place, what, self.purpose, place_of(error)))

    def state_dict(self) -> dict[str, Any]:
        logs = {str(i): np.array(log, self.action_space.dtype) for i, log in enumerate(self.actions) if log}
        return {"episodes": list(self.episodes), "actions": logs, "observations": copied(self.observations)}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Observations, list[int]]:
        if "episodes" not in state:  # a vector environment's
            return self.reset(), list(range(self.count))
        if len(state["episodes"]) != self.count:
            raise SurefootError(
                f"rollout.environments={self.count}: the checkpoint has {len(state['episodes'])} environments; set that many"
            )
        lost = []
        for index, episode in enumerate(state["episodes"]):
            self._begin(index, episode)
            actions = np.asarray(state["actions"].get(str(index), ()))
            if not (self._replays(index, actions) and self._stands_at(index, state["observations"])):
                lost.append(index)
                self._begin(index, episode + 1)
        return copied(self.observations), lost

    def _replays(self, index: int, actions: Array) -> bool:
        """Whether the episode takes the same actions again without ending or failing."""
        try:
            return not any(terminated or truncated for _, terminated, truncated, *_ in (self.act(index, a) for a in actions))
        except SurefootError:
            return False

    def _stands_at(self, index: int, expected: dict[str, Any]) -> bool:
        """Whether the observation is the one it was, its mask included."""
        if set(expected) != set(self.observations):
            return False
        pairs = ((self.observations[path][index], np.asarray(expected[path])[index]) for path in expected)
        return all(np.array_equal(now, before, equal_nan=True) for now, before in pairs)

    def close(self) -> None:
        for environment in self.environments:
            environment.close()


class VectorEnvironments:
    """Any Gymnasium vector environment, in its own autoreset mode (SAME_STEP, NEXT_STEP or DISABLED).

    It can't be replayed episode by episode, so a resumed run begins new episodes: resuming is not exact.
    """

    def __init__(self, environments: VectorEnv[Any, Any, Any], seed: int, name: str) -> None:
        check_complete(environments, name)
        self.environments, self.seed, self.name = environments, seed, name
        self.count = environments.num_envs
        self.observation_space: gymnasium.Space[Any] = environments.single_observation_space
        self.action_space: gymnasium.Space[Any] = environments.single_action_space
        self.reader = Reader(self.observation_space, self.action_space, self.count, name)
        self.mode = stated_mode(environments, name)
        self.over = np.zeros(self.count, bool)
        self.resets, self.steps = 0, 0

    def reset(self) -> Observations:
        # Each time other episodes. The seed is annotated int by Gymnasium.
        seeds: Any = [episode_seed(self.seed, index, self.resets) for index in range(self.count)]
        self.steps, self.over = 0, np.zeros(self.count, bool)
        with self._named():
            try:
                observations, infos = self.environments.reset(seed=seeds)
            except (TypeError, gymnasium.error.Error):  # some take one whole number for all
                observations, infos = self.environments.reset(seed=seeds[0])
        self.resets += 1
        return self._read(observations, infos, ~self.over)

    def restart(self, index: int) -> tuple[Observations, list[int]]:
        return self.reset(), list(range(self.count))  # a vector environment can't be restarted in part

    def step(self, actions: Array, active: Array | None = None) -> Step:
        if active is not None and not active.all():
            raise SurefootError(
                f"{self.name}: a vector environment can't run whole episodes side by side; use an objective with a critic, "
                "or a task that makes single environments"
            )
        self.steps += 1
        with self._named():
            observations, rewards, terminated, truncated, infos = self.environments.step(actions)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)  # theirs may be written again
        told, ended, ignored, finals = infos, terminated | truncated, np.zeros(self.count, bool), {}
        check_infos(self.mode, ended, self.over, infos, self.name)
        cut = np.flatnonzero(truncated & ~terminated).tolist()
        if self.mode is AutoresetMode.SAME_STEP:
            seen = self._read(observations, infos, ~ignored)
            with self._named():
                finals = {i: self.reader.one(infos["final_obs"][i]) for i in cut}
        elif self.mode is AutoresetMode.DISABLED:
            seen = self._read(observations, infos, ~ended)
            finals = {i: self.reader.one_of(seen, i) for i in cut}
            if ended.any():
                masks = seen.get(MASK)
                with self._named():
                    observations, infos = self.environments.reset(options={"reset_mask": ended})
                seen = self._read(observations, infos, ended)
                if masks is not None:
                    seen[MASK] = np.where(ended[:, None], seen[MASK], masks)
        else:  # NEXT_STEP: a row after an end resets, whatever its action; its observation before was the final one
            ignored = self.over
            terminated, truncated = terminated & ~ignored, truncated & ~ignored
            self.over = terminated | truncated
            seen = self._read(observations, infos, ~self.over)
        rewards = as_float32(np.where(ignored, 0, rewards))
        scores = as_float32(np.where(ignored, 0, said(told, "score", rewards)))
        going_on = said(told, "life_lost", np.zeros(self.count, bool)) & ~ignored & ~truncated
        return Step(seen, rewards, terminated | going_on, truncated, ignored, finals, scores, going_on)

    def _read(self, observations: Any, infos: dict[str, Any], acting: Array) -> Observations:
        """The leaves, and the masks of those who act next."""
        with self._named():
            return self.reader.all(observations) | self.reader.masks(infos, acting)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """What the environments do wrong, as a SurefootError that says in which call."""
        try:
            yield
        except (Exception, SystemExit) as error:
            what = f"gave {error}" if isinstance(error, Misfit) else f"raised {cause_of(error)}"
            call = f"call {self.steps} of step()" if self.steps else "reset()"
            if self.over.any() and not isinstance(error, Misfit):  # in NEXT_STEP alone
                call += f", which resets {np.flatnonzero(self.over).tolist()}, says metadata['autoreset_mode']={self.mode.name}"
            line = f" ({where})" if (where := place_of(error)) else ""
            raise SurefootError(f"{self.name}: {what}, in {call}; mend the environment{line}") from error

    def state_dict(self) -> dict[str, Any]:
        return {"resets": self.resets}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Observations, list[int]]:
        self.resets = state.get("resets", 0)  # none, where single environments were saved
        return self.reset(), list(range(self.count))

    def close(self) -> None:
        self.environments.close()


def make_environments(
    task: str | MakeEnvironment, arguments: dict[str, Any], count: int, seed: int, purpose: str = "training"
) -> Environments:
    """B environments of a task: a Gymnasium id, ``module:function``, or a callable that makes an Env or a VectorEnv.

    Raises SurefootError when the task can't be made, naming the extra to install where that is the reason.
    """
    name = task_name(task)
    made: list[Any] = []
    try:
        try:
            make = maker(task, arguments, purpose)
            made.append(make())
            while len(made) < count and not isinstance(made[0], VectorEnv):
                made.append(make())
        except SurefootError:
            raise
        except Exception as error:
            raise making_failed(name, error) from error
        if isinstance(made[0], VectorEnv):
            return VectorEnvironments(made[0], seed, name)
        if not isinstance(made[0], gymnasium.Env):
            raise SurefootError(f"task={name!r}: made a {type(made[0]).__name__}, not a gymnasium.Env")
        if len({id(environment) for environment in made}) < count:
            raise SurefootError(f"task={name!r}: gave the same environment twice; make a new one on every call")
        ready = iter(made)
        return LoopedEnvironments(lambda: next(ready), count, seed, name, purpose)
    except BaseException:
        close_all(made)
        raise


def close_all(environments: Iterable[Any]) -> None:
    """Close what was made, whatever it is, when something else has gone wrong already."""
    for environment in environments:
        with contextlib.suppress(Exception):
            environment.close()


def maker(task: str | MakeEnvironment, arguments: dict[str, Any], purpose: str = "training") -> Callable[[], Any]:
    """The function of no arguments that makes one environment of a task; Atari's are others for evaluation.

    MuJoCo is listened to before it first speaks, whoever makes the environment.
    """
    make = _maker(task, arguments, purpose)

    def heard() -> Any:
        mujoco_to_logging(task)
        made = make()
        mujoco_to_logging(task)  # for those who import it when called
        return made

    return heard


def _maker(task: str | MakeEnvironment, arguments: dict[str, Any], purpose: str) -> Callable[[], Any]:
    if callable(task):
        return lambda: task(**arguments)
    function = task.partition(":")[2]
    if function:  # Gymnasium imports the module of an id such as module:Robot-v0
        append_working_folder()
    if function and not function.rpartition("-v")[2].isdigit():
        found = import_object(
            "task", task, "a function that can't be imported is passed itself, as in surefoot.resume(run, task=make)"
        )
        return lambda: found(**arguments)
    if task.startswith(ATARI):
        return lambda: make_atari(task, purpose, **arguments)
    return lambda: gymnasium.make(task, disable_env_checker=True, **arguments)


def task_name(task: str | MakeEnvironment) -> str:
    """How a task is called in messages and folders."""
    return task if isinstance(task, str) else str(getattr(task, "__name__", type(task).__name__))
