"""Join what slices of the environments return, and cut a saved state into slices."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from surefoot.control.environments.looped import Step
from surefoot.control.environments.shared import BY_ENVIRONMENT


def concatenate(parts: Sequence[Any]) -> Any:
    """Arrays [b, ...] of every slice as one array [B, ...]; dicts of arrays entry by entry; None stays None."""
    if isinstance(parts[0], dict):
        return {name: concatenate([part[name] for part in parts]) for name in parts[0]}
    return None if parts[0] is None else np.concatenate(parts)


def concatenate_steps(steps: Sequence[Step], firsts: Sequence[int]) -> Step:
    """The steps of every slice as one; ``firsts`` are the indices of their first environments."""
    whole: dict[str, Any] = {
        field.name: concatenate([getattr(step, field.name) for step in steps])
        for field in fields(Step)
        if field.name not in BY_ENVIRONMENT
    }
    return Step(**(whole | joined([by_environment(step) for step in steps], firsts)))


def by_environment(step: Step) -> dict[str, dict[int, Any]]:
    """The fields of a step that map an environment's index to a value."""
    return {name: getattr(step, name) for name in BY_ENVIRONMENT}


def joined(parts: Sequence[dict[str, dict[int, Any]]], firsts: Sequence[int]) -> dict[str, dict[int, Any]]:
    """``by_environment`` of every slice as one."""
    return {
        name: {first + index: value for first, part in zip(firsts, parts, strict=True) for index, value in part[name].items()}
        for name in BY_ENVIRONMENT
    }


def slice_state(state: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The state of some of the environments, as arrays: tensors would make a worker import torch."""
    if "episodes" not in state:  # of a vector environment
        return state
    logs = {index - rows.start: state["actions"].get(str(index)) for index in range(rows.start, rows.stop)}
    return {
        "episodes": list(state["episodes"][rows]),
        "actions": {str(local): np.asarray(log) for local, log in logs.items() if log is not None},
        "observations": _each(state["observations"], lambda values: np.asarray(values)[rows]),
    }


def join_states(parts: Sequence[dict[str, Any]], firsts: Sequence[int]) -> dict[str, Any]:
    """The states of slices of environments as one; ``firsts`` are the numbers of their first environments."""
    if "episodes" not in parts[0]:  # of a vector environment
        return parts[0]
    state: dict[str, Any] = {"episodes": [], "actions": {}}
    for first, part in zip(firsts, parts, strict=True):
        state["episodes"] += part["episodes"]
        state["actions"] |= {str(first + int(local)): log for local, log in part["actions"].items()}
    return state | {"observations": concatenate([part["observations"] for part in parts])}


def _each(tree: Any, function: Callable[[Any], Any]) -> Any:
    return {name: _each(below, function) for name, below in tree.items()} if isinstance(tree, dict) else function(tree)
