"""Gymnasium vector environments behind the same interface as the loop, in any autoreset mode; and EnvPool as one of them."""

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from surefoot.control.environments.atari import ATARI, AtariSettings, atari_settings
from surefoot.control.environments.looped import Lost, Step, episode_seed
from surefoot.control.environments.observations import (
    INFO_KEY,
    METHOD,
    REPORTED,
    RESET,
    STEP,
    Reader,
    as_end,
    as_number,
    as_rows,
    check_tuple,
    final_numbers,
    masks_of_rows,
    reported_in,
)
from surefoot.control.environments.records import ENDS, REWARDS, Hook, Record, as_arrays, claim, close_all, has_hook
from surefoot.control.spaces import MASK, Array, Observations, SpaceError, as_float32, nester
from surefoot.errors import SurefootError, cause_of, missing_extra, place_of

REPLAYED = 1_000_000
"""numbers in the actions since a reset that a checkpoint keeps, to replay them"""
PROBE_STEPS = 8
"""steps in which an environment may show that it writes into its arrays"""


class VectorEnvironments:
    """Any Gymnasium vector environment, in its own autoreset mode (SAME_STEP, NEXT_STEP or DISABLED).

    It can't be replayed episode by episode. A resumed run loads its state with ``load_state_dict``, or else replays all
    environments since their last reset together and compares what they return. After too many actions it starts new episodes.

    first   the number of the first environment, if these are a slice of more
    make    makes the vector environment again: processes of one that fails in a replay may be gone
    """

    def __init__(
        self,
        environments: VectorEnv[Any, Any, Any],
        seed: int,
        name: str,
        first: int = 0,
        make: Callable[[], VectorEnv[Any, Any, Any]] | None = None,
    ) -> None:
        check_attributes(environments, name)
        self.environments, self.seed, self.name, self.first, self.make = environments, seed, name, first, make
        claim(getattr(environments.unwrapped, "envs", ()), self, name)
        self.count = environments.num_envs
        self.observation_space: gymnasium.Space[Any] = environments.single_observation_space
        self.action_space: gymnasium.Space[Any] = environments.single_action_space
        self.reader = Reader(self.observation_space, self.action_space, self.count, name)
        self.masks_of_rows = None if self.reader.choices is None else masks_of_rows(environments)
        self.nested = nester(self.action_space)
        self.mode = autoreset_mode_of(environments, name)
        self.done = np.zeros(self.count, bool)
        self.resets, self.steps = 0, 0
        self.observations: Observations = {}
        self.record: Record | None = None
        """what was done since the last reset; None: too much to replay, or the environment saves its state"""
        self.probed = False

    def reset(self) -> Observations:
        # Different episodes each time. Gymnasium annotates the seed as int.
        seeds: Any = [episode_seed(self.seed, self.first + index, self.resets) for index in range(self.count)]
        self.steps, self.done = 0, np.zeros(self.count, bool)
        with self._errors():
            try:
                returned = self.environments.reset(seed=seeds)
            except (TypeError, gymnasium.error.Error):  # some take a single integer
                returned = self.environments.reset(seed=seeds[0])
            observations, infos = check_tuple(returned, RESET)
            infos = _of_all(infos, self.count)
        self.resets += 1
        self.record = None if has_hook(self.environments) else Record(self.resets - 1)
        self.observations = self._read(observations, infos, ~self.done)
        if self.record is not None:
            self.record.add_observations(self.observations)
        return self.observations

    def restart(self, index: int) -> tuple[Observations, list[int]]:
        return self.reset(), list(range(self.count))  # a vector environment can't restart single rows

    def step(self, actions: Array, active: Array | None = None) -> Step:
        if active is not None and not active.all():
            raise SurefootError(
                f"{self.name}: a vector environment can't run whole episodes side by side; use an objective with a critic, "
                "or a task that makes single environments"
            )
        self.steps += 1
        if self.record is not None:
            self.record.actions.append(np.array(actions))
            self.record = None if self.steps * self.record.actions[0].size > REPLAYED else self.record
        with self._errors():
            observations, rewards, *ends, infos = check_tuple(self.environments.step(self.nested(actions)), STEP)
            rewards = as_rows(rewards, "rewards", self.count)  # copied: it may reuse its arrays
            terminated, truncated = (as_rows(end, name, self.count) for end, name in zip(ends, STEP[2:], strict=False))
            infos = _of_all(infos, self.count)
        step_infos, ended, ignored, finals = infos, terminated | truncated, np.zeros(self.count, bool), {}
        check_infos(self.mode, ended, self.done, infos, self.name)
        cut = np.flatnonzero(truncated & ~terminated).tolist()
        if self.mode is AutoresetMode.SAME_STEP:
            read = self._read(observations, infos, ~ignored)
            final = infos.get("final_obs", ())
            if isinstance(final, np.ndarray) and final.ndim > 1:  # all rows ended, so that the object array is one of numbers
                final = final.astype(self.observation_space.dtype)
            with self._errors():
                finals = {i: self.reader.one(final[i]) for i in cut}
            self._check_reuse(finals, read, final, observations)
        elif self.mode is AutoresetMode.DISABLED:
            read = self._read(observations, infos, ~ended)
            finals = {i: self.reader.row(read, i) for i in cut}
            if ended.any():
                masks = read.get(MASK)
                with self._errors():
                    observations, infos = check_tuple(self.environments.reset(options={"reset_mask": ended}), RESET)
                    infos = _of_all(infos, self.count)
                read = self._read(observations, infos, ended)
                if masks is not None:
                    read[MASK] = np.where(ended[:, None], read[MASK], masks)
        else:  # NEXT_STEP: the row after an end only resets; the observation before it was the final one
            ignored = self.done
            terminated, truncated = terminated & ~ignored, truncated & ~ignored
            self.done = terminated | truncated
            read = self._read(observations, infos, ~self.done)
        over = truncated if isinstance(self.environments, EnvPool) else terminated | truncated  # EnvPool's lives terminate
        with self._errors():
            scores = np.where(ignored, 0, info_values(step_infos, "score", rewards.astype(np.float64)))
            life_lost = info_values(step_infos, "life_lost", np.zeros(self.count, bool)) & ~ignored & ~over
        self.observations = read
        rewards = as_float32(np.where(ignored, 0, rewards))
        step = Step(read, rewards, terminated | life_lost, truncated, ignored, finals, scores, life_lost)
        if self.record is not None:
            for each in (read, *finals.values()):
                self.record.add_observations(each)
            self.record.add(REWARDS, rewards.tobytes() + scores.tobytes())
            self.record.add(ENDS, step.terminated.tobytes() + truncated.tobytes() + life_lost.tobytes())
        last_infos = step_infos.get("final_info", {}) if self.mode is AutoresetMode.SAME_STEP else step_infos
        step.final_infos = final_numbers(last_infos, step.done)
        return step

    def _check_reuse(self, finals: dict[int, Observations], read: Observations, final: Any, observations: Any) -> None:
        """Raise SurefootError if final observations are those after the reset, as the environment writes into one array.

        Equal observations may be right, so an environment of the same kind is made once, and its arrays are looked at.
        """
        equal = [i for i, row in finals.items() if all(np.array_equal(row[path], read[path][i]) for path in row)]
        shown = [(part.select(final[i]), part.select(observations)) for i in equal for part in self.reader.parts.values()]
        one = any(isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.shares_memory(a, b) for a, b in shown)
        makers: Any = getattr(self.environments.unwrapped, "env_fns", ())
        if not one and (not equal or not makers or self.probed):
            return
        self.probed = True
        if one or self._reuses_arrays(makers[0]):
            raise SurefootError(
                f"{self.name}: in SAME_STEP, info['final_obs'] of environments {equal} is the observation after the reset, as "
                "the environment returns one array that it writes into; return copies"
            )

    def _reuses_arrays(self, make: Callable[[], Any]) -> bool:
        """Whether an environment writes into an observation that it has returned; False if it doesn't run here."""
        with contextlib.suppress(Exception), contextlib.closing(make()) as one:
            shown = one.reset(seed=0)[0]
            for _ in range(PROBE_STEPS):
                before = self.reader.one(shown)
                following = one.step(one.action_space.sample())[0]
                if any(not np.array_equal(x, before[path]) for path, x in self.reader.one(shown).items()):
                    return True
                shown = following
        return False

    def _read(self, observations: Any, infos: dict[str, Any], acting: Array) -> Observations:
        """The observations, and the masks of the rows that act next."""
        with self._errors():
            if self.masks_of_rows is not None and MASK not in infos:
                masks = list(self.masks_of_rows(acting))
                if len(masks) != self.count:
                    raise SpaceError(f"{len(masks)} rows of {METHOD}() where {self.count} are needed")
                infos = {**infos, MASK: masks}
            return self.reader.batch(observations) | self.reader.masks(infos, acting)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the environments as a SurefootError that names the call."""
        try:
            yield
        except (Exception, SystemExit) as error:
            what = f"gave {error}" if isinstance(error, SpaceError) else f"raised {cause_of(error)}"
            call = f"call {self.steps} of step()" if self.steps else "reset()"
            if self.done.any() and not isinstance(error, SpaceError):  # only in NEXT_STEP
                call += f", which resets {np.flatnonzero(self.done).tolist()}, has metadata['autoreset_mode']={self.mode.name}"
            line = f" ({where})" if (where := place_of(error)) else ""
            raise SurefootError(f"{self.name}: {what}, in {call}; fix the environment{line}") from error

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"resets": self.resets}
        if has_hook(self.environments):
            with self._errors():
                state |= {"state": Hook(self.environments).save(), "observations": self.observations, "done": self.done}
        elif self.record is not None:
            state |= {"record": self.record.saved(None), "count": self.count}
        return {"vectors": {str(self.first): state}}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Observations, Lost]:
        saved = as_arrays(state.get("vectors", {}).get(str(self.first), {}))  # none if single environments were saved
        self.resets = saved.get("resets", 0)
        if saved.get("count") == self.count and not has_hook(self.environments):  # other ranks hold other rows
            if different := self._replay(saved["record"]):
                self.resets = saved["resets"]
                return self._start_again(), dict.fromkeys(range(self.count), different)
            return self.observations, {}
        first = self.reset()  # the environments allocate what the state goes into
        old = saved.get("observations", {})
        if not has_hook(self.environments) or _shapes(old) != _shapes(first):
            return first, dict.fromkeys(range(self.count), "")
        with self._errors():
            Hook(self.environments).load(saved["state"])
        self.resets -= 1  # as when it was saved
        self.done, self.observations = saved["done"], old
        return old, {}

    def _start_again(self) -> Observations:
        """Reset the environments after a replay in which they may have failed."""
        try:
            return self.reset()
        except SurefootError:
            if self.make is None:
                raise
        close_all([self.environments])
        self.environments = self.make()
        claim(getattr(self.environments.unwrapped, "envs", ()), self, self.name)
        self.masks_of_rows = None if self.reader.choices is None else masks_of_rows(self.environments)
        return self.reset()

    def _replay(self, saved: dict[str, Any]) -> str:
        """Replay all environments since a reset; return what was different, in words."""
        self.resets = saved["number"]
        try:
            self.reset()
            for actions in saved["actions"]:
                self.step(actions)
        except SurefootError as error:
            return str(error)
        different = "" if self.record is None else self.record.difference(saved["hashes"])
        return different and f"its {len(saved['actions']):,} steps since the last reset had other {different}"

    def mark(self) -> None:
        """Nothing: its episodes are not replayed one by one."""

    def close(self) -> None:
        close_all([self.environments])


def _shapes(observations: Observations) -> dict[str, tuple[int, ...]]:
    return {path: values.shape for path, values in observations.items()}


def check_attributes(environments: VectorEnv[Any, Any, Any], name: str) -> None:
    """Raise SurefootError for a vector environment that lacks attributes of Gymnasium's interface; ``VectorEnv`` sets none."""
    required = ("num_envs", "single_observation_space", "single_action_space")
    lacking = [name for name in required if not hasattr(environments, name)]
    if lacking:
        kind = type(environments).__name__
        raise SurefootError(
            f"task={name!r}: made a vector environment ({kind}) without {' and '.join(lacking)}, which Gymnasium's interface "
            "requires; set them, or make single environments (gymnasium.Env)"
        )
    count = environments.num_envs
    if not isinstance(count, (int, np.integer)) or count < 1:
        raise SurefootError(f"task={name!r}: num_envs={count!r} of its vector environment is not a whole number of at least 1")


def autoreset_mode_of(environments: VectorEnv[Any, Any, Any], name: str) -> AutoresetMode:
    """The autoreset mode in a vector environment's metadata.

    Raises SurefootError when there is none, or when its sub-environments have another: rows that reset differently would
    be read wrongly and separate episodes joined.
    """
    stated = (environments.metadata or {}).get("autoreset_mode")
    try:
        mode = AutoresetMode(stated)
    except ValueError:
        raise SurefootError(
            f"task={name!r}: metadata['autoreset_mode']={stated!r} of this vector environment is not an autoreset mode; set "
            f"it to one of {', '.join(f'AutoresetMode.{allowed.name}' for allowed in AutoresetMode)}"
        ) from None
    get_attr: Any = getattr(environments.unwrapped, "get_attr", lambda name: ())  # Gymnasium's own have it
    stated_by = {i: row.get("autoreset_mode") for i, row in enumerate(get_attr("metadata")) if isinstance(row, dict)}
    inner = {index: value for index, value in stated_by.items() if value is not None}
    others = [f"{index} {getattr(value, 'name', value)}" for index, value in inner.items() if value != mode]
    if others:
        raise SurefootError(
            f"task={name!r}: mixed autoreset modes: the vector environment has {mode.name}, its environments "
            f"{', '.join(others)}; make them all reset the same way"
        )
    return mode


def check_infos(mode: AutoresetMode, ended: Array, resetting: Array, infos: dict[str, Any], name: str) -> None:
    """Raise SurefootError when a step shows that rows don't reset as in the autoreset mode of the metadata.

    ended        [B] rows that are terminated or truncated
    resetting    [B] rows that ended one step ago, which a NEXT_STEP environment uses to reset
    """
    final = infos.get("final_obs")
    present = np.zeros(len(ended), bool) if final is None else np.array(infos.get("_final_obs", [x is not None for x in final]))
    if mode is AutoresetMode.SAME_STEP:
        wrong, what = ended & ~present, "ended without info['final_obs']"
    elif present.any():
        wrong, what = present, "gave info['final_obs'], as in SAME_STEP"
    elif mode is AutoresetMode.NEXT_STEP:
        wrong, what = ended & resetting, "ended again in the step that should have reset them"
    else:
        return
    if wrong.any():
        raise SurefootError(
            f"task={name!r}: mixed autoreset modes: the vector environment has {mode.name}, but its environments "
            f"{np.flatnonzero(wrong).tolist()} {what}; set metadata['autoreset_mode'] to what all of them do"
        )


def _of_all(infos: Any, count: int) -> dict[str, Any]:
    """The infos of all environments as one mapping of arrays; SpaceError unless they are that, or a list of one for each."""
    if isinstance(infos, (list, tuple)) and len(infos) == count and all(isinstance(row, Mapping) for row in infos):
        infos = _columns(infos)  # as SuperSuit's vector environments return them
    if not isinstance(infos, Mapping):
        raise SpaceError(f"infos of type {type(infos).__name__} instead of one dict for all environments")
    if not isinstance(finals := infos.get("final_info", {}), Mapping):
        raise SpaceError(f"infos['final_info'] of type {type(finals).__name__} instead of one dict for all environments")
    return dict(infos)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The infos of single environments as Gymnasium joins them: an array for each name, and ``_name``: who has it."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        present = np.array([name in row for row in rows])
        values = [row[name] for row in rows if name in row]
        if all(isinstance(value, Mapping) for value in values):
            columns[name] = _columns([row.get(name, {}) for row in rows])
        else:
            plain = all(isinstance(value, (bool, int, float, np.generic)) for value in values)
            columns[name] = np.zeros(len(rows), np.result_type(*values) if plain else object)
            for index, value in zip(np.flatnonzero(present), values, strict=True):
                columns[name][index] = value
        columns[f"_{name}"] = present
    return columns


def info_values(infos: dict[str, Any], key: str, default: Array) -> Array:
    """[B] the values under ``info["surefoot"][key]``, and ``default`` for environments without one.

    In SAME_STEP, the infos of an episode's last step are in ``infos["final_info"]``.
    """
    result = default.copy()
    for source in (infos, infos.get("final_info")):
        reported = reported_in(source, (*REPORTED, *(f"_{each}" for each in REPORTED)))
        if key in reported:
            rows = np.asarray(reported.get(f"_{key}", np.ones(len(result), bool)))
            values = np.asarray(reported[key])[rows]
            if values.dtype.kind not in "biuf":  # such as NumPy's booleans in Gymnasium's own vector environments
                values = [as_number(x, key) if key == "score" else as_end(x, f"{INFO_KEY}.{key}") for x in values]
            result[rows] = values
    return result


class EnvPool(VectorEnv[Any, Any, Any]):
    """EnvPool's environments of one id, written in C++ and stepped by its own threads, in NEXT_STEP mode.

    A pool takes its seed when it is made, so a reset with a seed makes a new one.
    Raises SurefootError when EnvPool is not installed, does not have the id, or rejects the arguments.
    """

    def __init__(self, task: str, count: int, arguments: dict[str, Any]) -> None:
        self.task, self.num_envs = task, count
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.atari: AtariSettings | None = None
        self.arguments = arguments
        if task.startswith(ATARI):
            self.atari, rest = atari_settings(arguments)
            self.arguments = {**_atari_arguments(self.atari), **rest}
        self.pool = self._make(0)
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)

    def _make(self, seed: int) -> Any:
        try:
            envpool = importlib.import_module("envpool")
        except ImportError:
            raise missing_extra("envpool", "envpool", "rollout.backend='envpool'") from None
        name = self.task.removeprefix(ATARI)
        if name not in envpool.list_all_envs():
            raise SurefootError(
                f"rollout.backend='envpool': EnvPool has no {name!r}; set rollout.backend = 'workers' or 'loop'"
            )
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")  # about the float64 bounds of its own spaces
                pool = envpool.make(name, env_type="gymnasium", num_envs=self.num_envs, seed=seed, **self.arguments)
                self.single_observation_space: gymnasium.Space[Any] = pool.observation_space
                self.single_action_space: gymnasium.Space[Any] = pool.action_space
                return pool
        except Exception as error:
            raise SurefootError(
                f"task={self.task!r}: EnvPool could not make it with environment={self.arguments} ({cause_of(error)})"
            ) from error

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.pool.close()
            self.pool = self._make(int(np.ravel(seed)[0]) & 0x7FFFFFFF)
        observations, infos = self.pool.reset()
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.pool.step(np.asarray(actions))
        if self.atari is None:
            return observations, rewards, terminated, truncated, infos
        # A lost life ends EnvPool's episode, and its reset continues the game; the info shows when the game is over.
        lost = terminated & ~infos["terminated"].astype(bool)
        learned = np.sign(rewards) if self.atari.sign_rewards else rewards
        return observations, learned, terminated, truncated, {**infos, INFO_KEY: {"score": rewards, "life_lost": lost}}

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close()


def _atari_arguments(settings: AtariSettings) -> dict[str, Any]:
    """The settings under EnvPool's names."""
    if not settings.preprocess:
        raise SurefootError("environment.preprocess=false: EnvPool always preprocesses Atari frames; set it to true")
    return {
        "noop_max": settings.noop_max,
        "frame_skip": settings.frame_skip,
        "img_height": settings.screen_size,
        "img_width": settings.screen_size,
        "stack_num": settings.stack,
        "use_fire_reset": settings.fire,
        "episodic_life": settings.episodic_life,
        "reward_clip": False,
    }
