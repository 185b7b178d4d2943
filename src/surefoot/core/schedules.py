"""Schedules of the learning rate and of the clip: factors that depend on the remaining share of the budget."""

import math
from collections.abc import Callable
from typing import Literal

from surefoot.core.algorithms import Objective
from surefoot.errors import SurefootError, cause_of

ScheduleFunction = Callable[[float], float]
"""from the remaining share of the budget, 1 at the start, to a factor"""
Schedule = Literal["constant", "linear", "cosine", "adaptive"] | ScheduleFunction


def check_adaptive(objective: Objective, warmup: float) -> None:
    """Raise SurefootError if the learning rate can't follow the KL."""
    if objective.reuse is None or objective.constraint is not None:
        raise SurefootError(
            "optimizer.schedule='adaptive': follows the KL of reused batches, which this objective does not have; set "
            "constant, linear or cosine"
        )
    if warmup:
        raise SurefootError(
            f"optimizer.warmup={warmup:g}: schedule = 'adaptive' sets the learning rate of every step; set warmup = 0"
        )


def scheduled(field: str, schedule: Schedule, left: float) -> float:
    """The factor of a schedule when ``left`` of the budget remains. Raises SurefootError for a function that returns none."""
    if not callable(schedule):
        factors = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
        if schedule not in factors:
            raise SurefootError(f"{field}={schedule!r}: is the name of a function; pass the function itself")
        return factors[schedule]
    try:
        factor = float(schedule(left))
    except Exception as error:
        raise SurefootError(f"{field}: the function raised {cause_of(error)} for {left:g}; fix it") from error
    if not 0 <= factor < math.inf:
        raise SurefootError(f"{field}: the function returned {factor:g} for {left:g}; return a finite factor of at least 0")
    return factor
