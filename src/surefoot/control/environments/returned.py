"""What a single environment's step and reset return, looked at before it is used: Gymnasium's interface is easy to miss."""

from typing import Any

import numpy as np

from surefoot.control.environments.vector import SAID
from surefoot.control.spaces import Misfit

STEP = ("observation", "reward", "terminated", "truncated", "info")
RESET = ("observation", "info")


def given(returned: Any, names: tuple[str, ...]) -> Any:
    """What was returned, if it is as many values as there are names; otherwise a Misfit that says which."""
    if isinstance(returned, tuple) and len(returned) == len(names):
        return returned
    what = f"{len(returned)} values" if isinstance(returned, tuple) else f"one {type(returned).__name__}"
    raise Misfit(f"{what} where Gymnasium's interface has {len(names)} ({', '.join(names)})")


def as_number(reward: Any) -> float:
    """A reward as a float; a Misfit where it is none. An array of one number is none, as in Gymnasium's checker."""
    if isinstance(reward, str) or (isinstance(reward, np.ndarray) and reward.ndim):  # float would read these
        raise Misfit(f"a reward of {_kind(reward)} where a number is due")
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise Misfit(f"a reward of {_kind(reward)} where a number is due") from None


def _kind(value: Any) -> str:
    return f"shape {np.shape(value)}" if isinstance(value, np.ndarray) else f"type {type(value).__name__}"


def score_and_life(info: Any, reward: float) -> tuple[float, bool]:
    """What one environment says of a step: its true score, else the reward is it, and whether a life was lost."""
    says = info.get(SAID, {}) if isinstance(info, dict) else {}
    return float(says.get("score", reward)), bool(says.get("life_lost", False))
