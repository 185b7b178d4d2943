"""Read and check what environments return: observations, action masks, rewards and infos; report what is wrong with them.

The first reset decides whether a task masks actions: ``info["action_mask"]`` is present, or absent, in every later step too.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np

from surefoot.control.spaces import (
    MASK,
    NOT_FINITE,
    Array,
    Observations,
    SpaceError,
    as_float32,
    check_action_space,
    choices,
    mask_of,
    observation_parts,
    part_named,
)
from surefoot.errors import SurefootError, cause_of, place_of

INFO_KEY = "surefoot"
"""key of ``info`` under which an environment may report {"score": number, "life_lost": bool}; see ``Step``"""
REPORTED = ("score", "life_lost")
SUCCESS = ("is_success", "success")
"""numbers in ``info`` that become metrics if an environment has them"""
RESUME_OR_REPEAT = "resume the run, or repeat the command"
"""remedy after a failed evaluation, which may belong to either"""
METHOD = "action_masks"
"""the method of sb3-contrib's environments whose result is used like ``info["action_mask"]``"""
LIKE_A_MASK = re.compile(
    r"(action|move|valid|legal|avail|allowed|possible).*mask|mask.*(action|move|valid|legal|avail|allowed)"
)
MAYBE_A_MASK = re.compile(
    r"^(masks?|valid|legal|available|allowed|forbidden)$|(action|move).*(valid|legal|avail|allowed|feasib)|"
    r"(valid|legal|avail|allowed|possible|feasib|admiss|permit|forbid).*(action|move)"
)
LOOKED_AT = 8
"""infos of an environment in which a mask under another name is searched for"""
STEP = ("observation", "reward", "terminated", "truncated", "info")
RESET = ("observation", "info")


class Reader:
    """Reads the observations and masks of environments with given spaces, one or many at a time.

    Raises SurefootError when a space is not supported; the methods raise SpaceError for values that don't fit their space.
    """

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], count: int, task: str
    ) -> None:
        self.count = count
        self.parts = observation_parts(observation_space, task)
        self.action_space = check_action_space(action_space, task)
        self.choices = choices(action_space)
        self.masked: bool | None = None
        """whether the task masks actions; None before the first reset"""
        self.elsewhere = ""
        """what seems to return masks instead of ``info``"""
        self.unseen = LOOKED_AT * count

    def empty(self) -> Observations:
        """Arrays for all environments, to be filled by ``store``."""
        return {path: np.zeros((self.count, *part.shape), part.dtype) for path, part in self.parts.items()}

    def store(self, observations: Observations, index: int, observation: Any, info: Any, acting: bool) -> None:
        """Write one environment's observation into its row, and its mask if an action follows."""
        for path, part in self.parts.items():
            observations[path][index] = part.read(observation)
        if acting and self._has_mask(info or {}):
            if MASK not in observations:
                observations[MASK] = self._all_allowed()
            observations[MASK][index] = mask_of(self.action_space, info[MASK])

    def row(self, observations: Observations, index: int) -> Observations:
        """A copy of one environment's row."""
        return {path: observations[path][index].copy() for path in self.parts}

    def one(self, observation: Any) -> Observations:
        """A copy of the parts of a single observation."""
        return {path: np.array(part.read(observation), part.dtype) for path, part in self.parts.items()}

    def batch(self, observations: Any) -> Observations:
        """Copies of the parts of a vector environment's observations, in C order."""
        return {
            path: np.array(part.read(observations, (self.count,)), part.dtype, order="C") for path, part in self.parts.items()
        }

    def masks(self, infos: dict[str, Any], needed: Array) -> Observations:
        """The masks in a vector environment's infos, all true for rows that need none; empty if the task has no masks."""
        present = needed & np.broadcast_to(infos.get(f"_{MASK}", MASK in infos), needed.shape)
        if MASK not in infos:
            self._look_elsewhere(infos)
        masks = self._all_allowed()
        for index in np.flatnonzero(needed):
            info = {MASK: _row_of(infos[MASK], int(index))} if present[index] else {}
            try:
                if self._has_mask(info):
                    masks[index] = mask_of(self.action_space, info[MASK])
            except SpaceError as error:
                raise SpaceError(f"{error} in environment {index}") from None
        return {MASK: masks} if self.masked else {}

    def _has_mask(self, info: dict[str, Any]) -> bool:
        present = MASK in info
        if not present and self.unseen:
            self._look_elsewhere(info)
        if self.masked is None:
            self.masked = present
        if present != self.masked:
            raise SpaceError(
                "an action mask, unlike at its first reset" if present else "no action mask, unlike at its first reset"
            )
        return present

    def _look_elsewhere(self, info: Mapping[str, Any]) -> None:
        """Raise SpaceError if there is a mask under another name."""
        if self.unseen == 0 or self.masked or self.choices is None:
            return
        self.unseen -= 1
        if place := self.elsewhere or near_mask(info, self.choices):
            raise SpaceError(f"no info['{MASK}'], but {place}, which looks like an action mask; return it as info['{MASK}']")

    def _all_allowed(self) -> Array:
        return np.ones((self.count, sum(self.choices or ())), bool)


def _row_of(masks: Any, index: int) -> Any:
    """The mask of one environment, from those of all; of a Dict, from those of all for each part."""
    if isinstance(masks, Mapping):  # Gymnasium adds who has which: "_part"
        return {key: _row_of(part, index) for key, part in masks.items() if f"_{key}" in masks or not str(key).startswith("_")}
    return masks[index]


class MaskMethod(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts what ``action_masks()`` returns into ``info["action_mask"]``, if an action follows and no mask is there."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = check_tuple(self.env.reset(seed=seed, options=options), RESET)
        return observation, self._with_mask(info)

    def step(self, action: Any) -> Any:
        *outcome, terminated, truncated, info = check_tuple(self.env.step(action), STEP)
        over = np.any(terminated) or np.any(truncated)
        return *outcome, terminated, truncated, info if over else self._with_mask(info)

    def _with_mask(self, info: Any) -> Any:
        if (info is not None and not isinstance(info, dict)) or MASK in (info or {}):
            return info
        return {**(info or {}), MASK: self.env.get_wrapper_attr(METHOD)()}


def with_masks(environment: Any) -> Any:
    """A single environment whose masks are in its infos, if sb3-contrib's method returns them; any other as it is."""
    if not isinstance(environment, gymnasium.Env) or not environment.has_wrapper_attr(METHOD):
        return environment
    return MaskMethod(environment) if callable(environment.get_wrapper_attr(METHOD)) else environment


def masks_of_rows(environments: Any) -> Callable[[Array], Any] | None:
    """What returns a mask for each row that acts, by sb3-contrib's method of a vector environment or of those in it; None if
    neither has it.
    """
    if callable(method := getattr(environments, METHOD, None)):
        return lambda acting: method()
    inner = getattr(environments.unwrapped, "envs", ())
    having = [isinstance(each, gymnasium.Env) and each.has_wrapper_attr(METHOD) for each in inner]
    if any(having):
        if not all(having):
            raise SurefootError(
                f"{METHOD}(): environments {[n for n, has in enumerate(having) if not has]} lack it; give it to all"
            )
        methods = [each.get_wrapper_attr(METHOD) for each in inner]
        return lambda acting: [method() if acts else None for method, acts in zip(methods, acting, strict=True)]
    if not inner and getattr(environments.unwrapped, "env_fns", None):  # in other processes
        call = environments.unwrapped.call
        return (lambda acting: call(METHOD)) if all(call("has_wrapper_attr", METHOD)) else None
    return None


def masks_elsewhere(environment: Any) -> str:
    """A method or an array of an environment that looks like action masks, as in a message; empty if there is none."""
    layers = [environment]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    for layer in () if isinstance(environment, MaskMethod) else layers:
        for name in (name for name in dir(layer) if not name.startswith("_") and LIKE_A_MASK.search(name.lower())):
            value = getattr(layer, name, None)
            if callable(value) and not _needs_arguments(value):
                return f"{name}()"
            if isinstance(value, (np.ndarray, list, tuple)):
                return name
    return ""


def near_mask(info: Mapping[str, Any], sizes: Sequence[int]) -> str:
    """The entry of an info, or of those of a vector environment, that looks like an action mask; empty if none does."""
    for key, value in info.items():
        name = str(key).lower().replace("-", "_")
        if name.startswith("_") or not (LIKE_A_MASK.search(name) or MAYBE_A_MASK.search(name)):
            continue
        try:
            array = np.asarray(value)
            fits = array.ndim > 0 and array.shape[-1] == sum(sizes) and array.dtype.kind in "biuf"
            fits = fits and bool(((array == 0) | (array == 1)).all())
        except ValueError:  # lists that differ in length
            array, fits = np.zeros(1), False
        if fits or (array.ndim > 0 and LIKE_A_MASK.search(name)):
            return f"info[{key!r}]"
    return ""


def _needs_arguments(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters
    )


def copied(observations: Observations) -> Observations:
    """The observations in new arrays."""
    return {path: values.copy() for path, values in observations.items()}


def check_tuple(returned: Any, names: tuple[str, ...]) -> Any:
    """Return what ``step`` or ``reset`` returned if it is a tuple of as many values as ``names``; else raise SpaceError."""
    if isinstance(returned, tuple) and len(returned) == len(names):
        return returned
    what = f"{len(returned)} values" if isinstance(returned, tuple) else f"one {type(returned).__name__}"
    raise SpaceError(f"{what} where Gymnasium's interface has {len(names)} ({', '.join(names)})")


def as_number(reward: Any, name: str = "reward") -> float:
    """A reward as a float; SpaceError if it is not a number. Like Gymnasium's checker, rejects an array with one entry."""
    if isinstance(reward, float):
        return float(reward)
    if not (isinstance(reward, (str, np.complexfloating)) or (isinstance(reward, np.ndarray) and reward.ndim)):
        with suppress(TypeError, ValueError):  # float would read those too
            return float(reward)
    kind = f"shape {reward.shape}" if isinstance(reward, np.ndarray) and reward.ndim else f"type {type(reward).__name__}"
    raise SpaceError(f"a {name} of {kind} instead of a number")


def as_end(flag: Any, name: str) -> bool:
    """``terminated`` or ``truncated`` of one environment; SpaceError unless it is a boolean, or 0 or 1."""
    if isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    if np.ndim(flag):
        raise SpaceError(f"{name} of shape {np.shape(flag)} instead of True or False")
    if flag not in (0, 1):
        raise SpaceError(f"{name}={flag!r} instead of True or False")
    return bool(flag)


def as_rows(values: Any, name: str, count: int) -> Array:
    """The rewards or ends of B environments, copied; SpaceError unless they are B numbers or booleans."""
    array = np.array(values)
    if array.shape != (count,):
        raise SpaceError(f"{name} of shape {array.shape} where {(count,)} is needed")
    if array.dtype.kind not in "biuf":
        raise SpaceError(f"{name} of type {array.dtype} instead of {'numbers' if name == 'rewards' else 'booleans'}")
    if name != "rewards" and array.dtype != bool and not np.isin(array, (0, 1)).all():
        raise SpaceError(f"{name} of {array.tolist()} instead of booleans")
    return array if name == "rewards" else array.astype(bool)


def reported_in(info: Any, known: Sequence[str] = REPORTED) -> Mapping[str, Any]:
    """What ``info["surefoot"]`` has; SpaceError for a key that is not known, or for anything but a dict."""
    reported = info.get(INFO_KEY, {}) if isinstance(info, Mapping) else {}
    if not isinstance(reported, Mapping):
        raise SpaceError(f"info['{INFO_KEY}'] of type {type(reported).__name__} instead of a dict of {' and '.join(REPORTED)}")
    if unknown := [key for key in reported if key not in known]:
        what = f"which may have only {' and '.join(REPORTED)}" if known else "which is not read from this kind of environment"
        raise SpaceError(f"{unknown[0]!r} in info['{INFO_KEY}'], {what}")
    return reported


def score_and_life(info: Any, reward: float) -> tuple[float, bool]:
    """The true score of a step (the reward unless ``info["surefoot"]`` has another), and whether a life was lost."""
    if not (reported := reported_in(info)):
        return reward, False
    score = as_number(reported["score"], "score") if "score" in reported else reward
    return score, as_end(reported.get("life_lost", False), f"{INFO_KEY}.life_lost")


def numbers_in(info: Any) -> dict[str, float]:
    """The numbers in an info by name: booleans, integers, floats and arrays without axes."""
    if not isinstance(info, Mapping):
        return {}
    numbers = {str(name): _number(value) for name, value in info.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def final_numbers(infos: Mapping[str, Any], ended: Array) -> dict[int, dict[str, float]]:
    """``numbers_in`` of each environment that ended, from the infos of all: arrays [B] and their masks, ``_name``."""
    numbers: dict[int, dict[str, float]] = {index: {} for index in np.flatnonzero(ended).tolist()}
    for name, values in infos.items() if numbers else ():
        if str(name).startswith("_") or not isinstance(values, np.ndarray) or values.shape != ended.shape:
            continue
        present = np.broadcast_to(infos.get(f"_{name}", True), ended.shape)
        for index in numbers:
            if present[index] and (number := _number(values[index])) is not None:
                numbers[index][str(name)] = number
    return numbers


def mean_numbers(
    episodes: Iterable[Mapping[str, float]], names: Sequence[str] | None, more: Sequence[str] = ()
) -> dict[str, float | None]:
    """The mean of each number over the episodes that have it; None if none has it, or if it is not finite.

    names   None: those of ``SUCCESS`` that any episode has
    more    further names, of numbers that some episodes have
    """
    rows = list(episodes)
    columns = {name: [row[name] for row in rows if name in row] for name in (*(SUCCESS if names is None else names), *more)}
    with np.errstate(over="ignore", invalid="ignore"):
        means = {name: float(np.mean(column)) if column else math.nan for name, column in columns.items()}
    return {
        name: mean if math.isfinite(mean) else None for name, mean in means.items() if columns[name] or name in (names or ())
    }


def _number(value: Any) -> float | None:
    """A number as a float; None for anything else."""
    if not isinstance(value, (bool, int, float, np.generic)) and not (isinstance(value, np.ndarray) and value.ndim == 0):
        return None
    array = np.asarray(value)
    return float(array) if array.dtype.kind in "biuf" else None


def non_finite(
    observations: Observations,
    finals: dict[int, Observations] | None = None,
    rewards: Array | None = None,
    scores: Array | None = None,
) -> dict[int, str]:
    """environment -> the first part of its observations (final ones included), its reward or its score, if not finite."""
    finals = finals or {}
    bad: dict[int, str] = {}
    floats = [path for path, values in observations.items() if values.dtype.kind == "f"]
    if finals or not all(np.isfinite(as_float32(observations[path])).all() for path in floats):
        for path in floats:
            for index, values in enumerate(observations[path]):
                both = (values, *([finals[index][path]] if index in finals else []))
                if not all(np.isfinite(as_float32(part)).all() for part in both):
                    bad.setdefault(index, part_named(path))
    for name, numbers in (("reward", rewards), ("score", scores)):
        if numbers is not None and not (finite := np.isfinite(as_float32(numbers))).all():
            for index in np.flatnonzero(~finite).tolist():
                bad.setdefault(index, name)
    return dict(sorted(bad.items()))


def not_finite_message(task: str, what: str, environment: int, step: int) -> str:
    """The start of an error about an entry of ``non_finite``."""
    return f"{task}: the {what} of environment {environment} at step {step} of its episode is {NOT_FINITE}"


def call_failure(name: str, position: Any, error: BaseException, purpose: str) -> SurefootError:
    """The error for a call in which an environment raised one, or returned what can't be used."""
    what = f"gave {error}" if isinstance(error, SpaceError) else f"raised {cause_of(error)}"
    return SurefootError(environment_failure(name, position, what, purpose, place_of(error)))


def environment_failure(name: str, position: Any, what: str, purpose: str = "training", line: str = "") -> str:
    """One line: which environment failed, how, in which call, and the remedy.

    position   environment, episode (-1 while it is made) and step (0 in a reset)
    line       file and line of the user's code, if known

    In training there is no checkpoint before an environment's first reset, so the remedy then does not mention one.
    """
    environment, episode, step = position
    where = "while it was made" if episode < 0 else f"in {'step()' if step else 'reset()'}, episode {episode}, step {step}"
    fix = f"fix the environment{f' ({line})' if line else ''}"
    if purpose == "evaluation":
        return f"{name}: environment {environment} of the evaluation {what} {where}; {fix}, then {RESUME_OR_REPEAT}"
    then = ", then resume with --allow-changes" if episode > 0 or step else ""
    return f"{name}: environment {environment} {what} {where}; {fix}{then}"
