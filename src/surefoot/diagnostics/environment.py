"""An environment before it is trained on: Gymnasium's own checker, and some steps of chance."""

import math
import time
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from surefoot.control.actions import Bounds
from surefoot.control.environments.looped import MakeEnvironment, maker, task_name
from surefoot.control.environments.observations import Reader, broken_parts
from surefoot.control.environments.returned import RESET, STEP, as_number, given
from surefoot.control.spaces import NOT_FINITE, Array, Misfit, as_float32
from surefoot.diagnostics.check import Check
from surefoot.errors import SurefootError, cause_of

STEPS = 500
EXPECTED = ("different from the unwrapped version", "we recommend using", "probably too low", "probably too high")
"""in warnings about what Surefoot handles: wrappers, and Box actions or observations of any range, infinite ones too"""


def check_environment(
    task: str | MakeEnvironment, arguments: dict[str, Any], seed: int = 1, stretched: bool = True, log_std: float = 0.0
) -> list[Check]:
    """What the checker says, and what chance earns in ``STEPS`` steps: the reward's spread, ends, speed.

    stretched, log_std   of the recipe: ``normalise.actions``, ``network.log_std``
    """
    name = task_name(task)
    try:
        environment = maker(task, arguments)()
    except Exception as error:
        cause = str(error) if isinstance(error, SurefootError) else cause_of(error)
        return [Check("environment", "failed", f"{name} can't be made: {cause}")]
    if not isinstance(environment, gymnasium.Env):
        environment.close()
        return [Check("environment", "ok", f"{name} is a vector environment, which Gymnasium's checker does not take")]
    try:
        actions = check_bounds(environment.action_space, stretched, math.exp(log_std))
        return [_checked(name, environment), *actions, *_stepped(environment, seed)]
    finally:
        environment.close()


def _checked(name: str, environment: "gymnasium.Env[Any, Any]") -> Check:
    own = environment.unwrapped if name in gymnasium.registry else environment
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check_env(own, skip_render_check=True, skip_close_check=True)
        except Exception as error:
            return Check("environment", "failed", f"{name}: Gymnasium's checker refuses it ({cause_of(error)})", "mend that")
    told = [" ".join(str(each.message).split()) for each in said]
    told = [_plain(text) for text in told if "WARN:" in text and not any(words in text for words in EXPECTED)]
    if told:
        return Check(
            "environment", "warning", f"{name}: Gymnasium's checker warns: {'; '.join(dict.fromkeys(told))}", "mend that"
        )
    return Check("environment", "ok", f"{name} passes Gymnasium's checker")


def check_bounds(space: Any, stretched: bool, spread: float) -> list[Check]:
    """Whether what an untrained policy of Box actions draws, 0 ± ``spread``, goes with their bounds; nothing for others."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return []
    bounds = Bounds(space, stretched)
    low, high = (np.asarray(end, np.float64).reshape(-1) for end in (space.low, space.high))
    within = np.array([_normal(b / spread) - _normal(a / spread) for a, b in zip(low, high, strict=True)])
    finite = bounds.finite.numpy()
    wide = finite & (np.where(finite, high / 2 - low / 2, 0) > 10 * spread)
    odd = ~bounds.moved.numpy() & ((low != -1) | (high != 1)) & (wide | (within < 0.2))
    index = int(odd.argmax())
    where = f"bounds {low[index]:,.6g} to {high[index]:,.6g}" + (f" (number {index} of {len(low)})" if len(low) > 1 else "")
    if not odd.any():
        how = "over which −1 … 1 of the policy is stretched" if bounds.moved[index] else "to which actions are clipped"
        return [Check("actions", "ok", f"{where}, {how}")]
    drawn = f"an untrained policy draws 0 ± {spread:.3g}, "
    drawn += f"of which {within[index]:.0%} is within" if within[index] < 0.2 else "a small part of that"
    fix = "set normalise.actions = true" if finite[index] else "scale actions to about ±1, by a wrapper"
    return [Check("actions", "warning", f"{where}: {drawn}", fix)]


def _normal(x: float) -> float:
    """Φ(x)."""
    return (1 + math.erf(x / math.sqrt(2))) / 2


def _stepped(environment: "gymnasium.Env[Any, Any]", seed: int) -> list[Check]:
    """Random actions, episode after episode."""
    rewards: list[float] = []
    returns: list[float] = [0.0]
    terminated = truncated = False
    ends = 0
    try:
        reader = Reader(environment.observation_space, environment.action_space, 1, "")
    except SurefootError as error:
        return [Check("observation", "failed", str(error))]
    environment.action_space.seed(seed)
    begun = time.perf_counter()
    try:
        observation, info = given(environment.reset(seed=seed), RESET)
        _look(reader, observation, info)
        for _ in range(STEPS):
            mask = info.get("action_mask") if isinstance(info, dict) else None
            discrete = isinstance(environment.action_space, gymnasium.spaces.Discrete) and mask is not None
            action = (
                environment.action_space.sample(np.asarray(mask, np.int8)) if discrete else environment.action_space.sample()
            )
            observation, reward, terminated, truncated, info = given(environment.step(action), STEP)
            rewards.append(float(as_float32(as_number(reward))))  # what training makes of it
            _look(reader, observation, None if terminated or truncated else info)
            returns[-1] += float(reward)
            if terminated or truncated:
                ends += 1
                returns.append(0.0)
                observation, info = given(environment.reset(), RESET)
                _look(reader, observation, info)
    except Misfit as misfit:
        return [Check("observation", "failed", f"step {len(rewards)} of chance gave {misfit}", "mend the environment")]
    except Exception as error:
        return [
            Check("reward", "failed", f"step {len(rewards) + 1} of chance raised {cause_of(error)}", "mend the environment")
        ]
    speed = len(rewards) / (time.perf_counter() - begun)
    return [
        _earned(np.array(rewards), np.array(returns), ends),
        Check("speed", "ok", f"{speed:,.0f} steps/s in one environment, without learning"),
    ]


def _earned(rewards: Array, returns: Array, ends: int) -> Check:
    """What chance earns, and whether that can be learned from.

    returns   of episodes, the last of which has not ended
    """
    if not np.isfinite(rewards).all():
        count = int((~np.isfinite(rewards)).sum())
        return Check("reward", "failed", f"{count} of {STEPS} rewards are {NOT_FINITE}", "mend the environment")
    whole = returns[:-1] if len(returns) > 1 else returns
    earned = f"chance earns {np.mean(rewards):.3g} ± {np.std(rewards):.3g} a step"
    earned += (
        f", {np.mean(whole):.4g} ± {np.std(whole):.3g} an episode ({ends} ended)" if ends else f"; no episode ended in {STEPS}"
    )
    largest = np.max(np.abs(rewards))
    if np.ptp(rewards) == 0 and (ends < 2 or np.ptp(whole) == 0):
        fix = "look whether it can differ; a reward on the way, or easier first episodes, help"
        return Check("reward", "warning", f"{earned}: it never differs, so chance finds nothing to learn from", fix)
    if largest > 100:
        fix = "set normalise.rewards = true, or scale it to order 1"
        return Check("reward", "warning", f"{earned}; the largest is {largest:,.4g}, which is hard on a critic", fix)
    return Check("reward", "ok", earned)


def _look(reader: Reader, observation: Any, info: Any) -> None:
    """Read it as training does, with the mask where an action follows; Misfit for what would stop a training."""
    leaves = reader.empty()
    reader.one_into(leaves, 0, observation, info, info is not None)
    for what in broken_parts(leaves, None, {}).values():
        raise Misfit(f"an {what} that is {NOT_FINITE}")


def _plain(text: str) -> str:
    """A warning of Gymnasium's without its colours and its label."""
    text = "".join(c for c in text if c.isprintable()).replace("[33m", "").replace("[0m", "")
    return text.removeprefix("WARN: ").rstrip(".")
