"""Slices of the environments: join what they return, cut a saved state, and share the arrays of a step in memory.

With memory that a process shares with its workers (Linux), an answer is a copy, not a pickle.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from surefoot.control.environments.looped import Step
from surefoot.control.environments.records import as_arrays
from surefoot.control.spaces import Array
from surefoot.errors import SurefootError

OBSERVATIONS = "observations/"
BY_ENVIRONMENT = ("final_observations", "final_infos")
"""fields of ``Step`` that map an environment's index to a value"""
Layout = np.dtype[np.void]
"""of a record with a field for each array"""


def concatenate(parts: Sequence[Any]) -> Any:
    """Arrays [b, ...] of every slice as one array [B, ...]; dicts of arrays entry by entry.

    Raises SurefootError if dicts differ, as when only some slices have action masks.
    """
    if isinstance(parts[0], dict):
        if odd := set().union(*parts).difference(set(parts[0]).intersection(*parts)):
            raise SurefootError(f"{min(odd)}: only some environments return it; fix them, so that all do or none does")
        return {name: concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)


def concatenate_steps(steps: Sequence[Step], firsts: Sequence[int]) -> Step:
    """The steps of every slice as one; ``firsts`` are the indices of their first environments."""
    arrays = concatenate([arrays_of(step) for step in steps])
    return step_of(arrays, **joined([by_environment(step) for step in steps], firsts))


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
    if "rows" in state:
        return {"rows": as_arrays(state["rows"][rows])}
    return {"vectors": {first: part for first, part in state.get("vectors", {}).items() if int(first) == rows.start}}


def join_states(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of slices of environments as one."""
    if "rows" in parts[0]:
        return {"rows": [row for part in parts for row in part["rows"]]}
    return {"vectors": {first: vector for part in parts for first, vector in part["vectors"].items()}}


# ---- memory ---------------------------------------------------------------------------------------------------------------


def new_memory(layout: Layout) -> int | None:
    """A file in memory that has room for the arrays; None if this system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("surefoot")
    except OSError:
        return None
    try:
        os.ftruncate(file, layout.itemsize)
    except OSError:  # larger than a file may be
        os.close(file)
        return None
    return file


def mapped(layout: Layout, file: int) -> dict[str, Array]:
    """The arrays in the file, which is closed; the memory lasts as long as they do."""
    try:
        record = np.ndarray((), layout, mmap.mmap(file, layout.itemsize))
    finally:
        os.close(file)
    return {name: record[name] for name in layout.names or ()}


def layout_of(arrays: Mapping[str, Array]) -> Layout:
    """The layout of copies of these arrays."""
    return np.dtype([(name, array.dtype, array.shape) for name, array in arrays.items()], align=True)


def arrays_of(step: Step) -> dict[str, Array]:
    """The arrays of a step by name, parts of observations too."""
    parts = {OBSERVATIONS + path: array for path, array in step.observations.items()}
    others = {field.name: getattr(step, field.name) for field in fields(Step) if field.name not in BY_ENVIRONMENT}
    return parts | {name: array for name, array in others.items() if name != "observations" and array is not None}


def step_of(arrays: Mapping[str, Array], **by_environment: Any) -> Step:
    """A step with copies of the arrays, and its other fields."""
    whole: dict[str, Any] = {"observations": {}, **by_environment}
    for name, array in arrays.items():
        part = name.startswith(OBSERVATIONS)
        (whole["observations"] if part else whole)[name.removeprefix(OBSERVATIONS)] = array.copy()
    return Step(**whole)
