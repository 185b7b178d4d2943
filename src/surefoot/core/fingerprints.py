"""Fingerprints of an iteration: for each stage a hash of its tensors, and two sums by which others can see how far they are.

Two runs with the same hashes computed the same bits. The hash and the sums are sums over the elements, so threads, devices and
ranks may share the work; a stage whose numbers several ranks hold in parts has the fingerprint that one process would give it.
"""

import math
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surefoot.core.optimizer import FlatParameters, Optimizer, Parts
from surefoot.core.rollout import Credit, LearnerState, Rollout, tensors_in
from surefoot.core.steps import PendingStep
from surefoot.ranks.collectives import all_max, bit_sum, exact_device, exchange, in_float64, rank

CHUNK = 2**13
"""elements that a CPU hashes at a time, so that what is computed of them stays in its cache, and numpy on one thread"""
BLOCK = 2**20
"""elements that another device hashes at a time, so that it has few calls, and little memory"""
GOLDEN = 0x9E3779B97F4A7C15
MEASURED = 10
"""iterations whose time decides how often fingerprints are taken"""
SHARE = 0.01
"""of an iteration's time that they may take"""
LARGEST_TAKEN = 2**20
"""bytes of the actions of an iteration that a rank records: their shape, and float32 numbers in base64"""
WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int32"}
"""whole numbers as wide as an element, or half as wide"""
HIGH = 0x5851F42D4C957F2D
"""an odd factor of the upper half of an element"""

Fingerprint = list[Any]
"""16 hexadecimal digits; √Σx²; Σ±x, with signs that depend on the position. A sum that is not finite is None"""


@cache
def _weights() -> tuple[Any, Any]:
    """Odd factors of the words, and signs of the elements, the same everywhere and always.   [CHUNK] int64, [CHUNK] float64"""
    drawn = np.random.PCG64(0).random_raw(CHUNK)
    return (drawn | np.uint64(1)).view(np.int64), np.where(drawn >> np.uint64(63), 1.0, -1.0)


@cache
def _factor(index: int) -> int:
    """An odd factor of a whole chunk, tensor or rank."""
    mixed = _mixed(index + 1) | 1
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _mixed(number: int) -> int:
    """A whole number of 64 bits, another for each one."""
    number = number * GOLDEN % 2**64
    return (number ^ number >> 29) * 0xBF58476D1CE4E5B9 % 2**64


def measure(x: Tensor, start: int = 0) -> tuple[Any, Any, Any]:
    """The hash of a tensor, a whole number modulo 2⁶⁴, and Σx² and Σ±x in float64. A change of one element changes the hash.

    start   index of its first element in a larger tensor, whose hash and sums are those of its parts, added
    """
    if x.device.type != "cpu":
        return _measure_on_device(x.detach().reshape(-1).contiguous(), start)
    low, (factors, signs) = x.dtype == torch.bfloat16, _weights()  # numpy has no bfloat16, and its calls take less time
    x = x.float() if low else x.view(torch.uint8) if x.dtype == torch.bool else x
    # Not by numpy(), after which the memory of the tensor can't be resized, as that of idle roles is.
    values: Any = np.ascontiguousarray(np.from_dlpack(x.detach()).reshape(-1))
    words = values.view("<i2")[1::2] if low else values.view(WORDS[values.itemsize])
    number, square, sign, end = 0, 0.0, 0.0, start + len(values)
    for first in range(start // CHUNK * CHUNK, end, CHUNK):
        begin, stop = max(first, start), min(first + CHUNK, end)
        part, at = slice(begin - start, stop - start), slice(begin - first, stop - first)
        exact = values[part].astype(np.float64)
        if values.itemsize == 8:
            pairs = words.reshape(-1, 2)[part].astype(np.int64)
            whole = pairs[:, 0] + pairs[:, 1] * HIGH
        else:
            whole = words[part].astype(np.int64)
        number += int(whole.dot(factors[at])) * _factor(first // CHUNK)
        square, sign = square + exact.dot(exact), sign + exact.dot(signs[at])
    return number, square, sign


def _measure_on_device(flat: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, by few calls and without waiting for the device."""
    device = flat.device
    factors, signs = torch.from_numpy(_weights()[0]).to(device), torch.from_numpy(_weights()[1]).to(exact_device(device))
    number = torch.zeros((), dtype=torch.int64, device=device)
    square, sign = torch.zeros((2,), dtype=torch.float64, device=exact_device(device))
    for first in range(start // CHUNK * CHUNK, start + len(flat), BLOCK):
        part = flat[max(0, first - start) : first - start + BLOCK]
        before = max(0, start - first)
        around = (before, -(before + len(part)) % CHUNK)
        words = part.view(getattr(torch, WORDS[part.element_size()])).to(torch.int64)
        if part.element_size() == 8:
            words = words[::2] + words[1::2] * HIGH
        sums = (pad(words, around).view(-1, CHUNK) * factors).sum(1)
        of_chunks = torch.tensor([_factor(first // CHUNK + index) for index in range(len(sums))], device=device)
        exact = pad(in_float64(part), around).view(-1, CHUNK)
        number, square, sign = number + (sums * of_chunks).sum(), square + exact.square().sum(), sign + (exact @ signs).sum()
    return number, square, sign


def _bits(parts: Parts) -> list[int]:
    return [int(bit_sum(x)) for x, _ in parts]


Group = FlatParameters | Optimizer


def _joined(groups: Iterable[Group], gradients: bool = False) -> Parts:
    """What this rank has of some groups of parameters, as parts of one tensor: they are the same in one group or in two."""
    parts, start = [], 0
    for group in groups:
        parts += [(x, start + first) for x, first in group.parts(gradients)]
        start += sum(p.numel() for p in group.parameters)
    return parts


class Fingerprints:
    """The fingerprints of some iterations of a learner: of every one, if that takes less than ``SHARE`` of the time.

    every   iterations between two, a power of 2; None: as many as the first ``MEASURED`` iterations show to be needed
    show    called with a line on the first rank if not every iteration will have one
    """

    def __init__(self, every: int | None = None, show: Callable[[str], None] = print) -> None:
        self.every, self.show = every, show
        self.wanted = True
        """the next iteration has them, whatever ``every``: the first, and those after checkpoints, where ``verify`` begins. It
        has the actions too: another processor would round to others, with which a simulator soon is elsewhere"""
        self._taken: list[Any] | None = None
        """the actions of this rank, if this iteration records them"""
        self.row: dict[str, Fingerprint] | None = None
        """of the last update; None if it was not due, or not finished"""
        self._parts: list[tuple[str, int, Any, Any, Any]] = []
        """stage and factor of what ``measure`` returned"""
        self._updated: list[Any] = []
        self._bits: list[int] = []
        """of the weights after the last update: what was measured, and their sums of bits"""
        self.seconds, self.iterations, self._began = 0.0, -1, time.perf_counter()
        """what they have taken since the first iteration, which may have compiled programs, and of how many"""

    def due(self, state: LearnerState) -> bool:
        """Whether the iteration that is being updated has fingerprints; the same on all ranks."""
        self._parts, self.row = [], None
        return self.wanted or (state.iteration + 1) % (self.every or 1) == 0

    def begin(self, groups: Iterable[Group], rollout: Rollout, credit: Credit) -> None:
        """Add the stages before an update of some groups of parameters."""
        began = time.perf_counter()
        actions = rollout.actions  # choices are the same elsewhere
        small = self.wanted and actions.is_floating_point() and actions.nbytes <= LARGEST_TAKEN
        numbers = b64encode(actions.float().cpu().contiguous().numpy().tobytes()).decode() if small else ""
        self._taken = [list(actions.shape), numbers] if small else None
        parts = _joined(groups)
        if self._updated and _bits(parts) == self._bits:  # nobody has moved them since the last update
            self._parts = [("weights", *numbers) for numbers in self._updated]
        else:
            self._add("weights", parts)
        mask, rows = rollout.mask, len(rollout.mask)
        every_step = bool(mask.all())
        kept = rows * mask.shape[1] if every_step else int(mask.sum())
        before = exchange((rows, kept))[: rank()]
        rows_before, kept_before = (sum(counts) for counts in zip((0, 0), *before, strict=True))

        def decided(*tensors: Tensor | None) -> list[Parts]:
            """What masked steps hold may be anything."""
            chosen = [x if every_step else x[mask.bool()] for x in tensors if x is not None]
            return [[(x, kept_before * x.numel() // max(1, kept))] for x in chosen]

        self._add("inputs", *([(x, rows_before * x.numel() // max(1, rows))] for x in tensors_in(rollout.inputs)))
        self._add("actions", *decided(rollout.actions), [(mask.sum(-1), rows_before)])
        self._add("log_probs", *decided(rollout.old_log_probs, rollout.behaviour_log_probs, rollout.ref_log_probs))
        self._add("rewards", *decided(rollout.rewards))
        self._add("advantages", *decided(credit.advantages))
        self.seconds += time.perf_counter() - began

    def first_step(self, step: PendingStep, order: Sequence[Tensor]) -> None:
        """Add the first step of an update before it is taken, and the order in which rows were drawn for it.

        A step whose gradient is inside a program has the terms of its loss and the norms of its gradient instead.
        """
        began = time.perf_counter()
        # Every rank has an order of its own.
        self._add("order", [(x, rank() * CHUNK * CHUNK) for x in order[:1]])
        if step.gradients_of:
            self._add("gradient", _joined(step.gradients_of, gradients=True))
        elif rank() == 0:
            numbers = torch.tensor([*step.norms.values(), *step.terms.values()], dtype=torch.float64)
            self._add("terms", [(numbers, 0)])
        self.seconds += time.perf_counter() - began

    def end(self, groups: Iterable[Group]) -> None:
        """Add the stage after an update, and sum up those of all ranks."""
        began = time.perf_counter()
        self.wanted, parts, before = False, _joined(groups), len(self._parts)
        self._add("updated", parts)
        self._updated, self._bits = [numbers for _, *numbers in self._parts[before:]], _bits(parts)
        whole: dict[str, list[Any]] = {}
        mine = [(stage, factor * int(number), float(a), float(b)) for stage, factor, number, a, b in self._parts]
        ranks, taken = zip(*exchange((mine, self._taken)), strict=True)
        for of_rank in ranks:
            for stage, *numbers in of_rank:
                whole[stage] = [before + x for before, x in zip(whole.get(stage, (0, 0.0, 0.0)), numbers, strict=True)]
        self.row = {
            stage: [f"{_mixed(number):016x}", *(x if math.isfinite(x) else None for x in (math.sqrt(square), sign))]
            for stage, (number, square, sign) in whole.items()
        }
        if all(taken):
            self.row["taken"] = list(taken)
        self._measure(time.perf_counter() - began)

    def _add(self, stage: str, *tensors: Parts) -> None:
        """Add tensors to those of a stage, each in the parts that this rank has."""
        for number, parts in enumerate(tensors):
            for x, start in parts:
                self._parts.append((stage, _factor(-100 - number), *measure(x, start)))

    @property
    def share(self) -> float:
        """What they take of the time since the first iteration."""
        return self.seconds / (time.perf_counter() - self._began)

    def _measure(self, seconds: float) -> None:
        """Decide how often, from the largest share of any rank."""
        self.iterations, self.seconds = self.iterations + 1, self.seconds + seconds
        if self.iterations == 0:
            self.seconds, self._began = 0.0, time.perf_counter()
        if self.every is None and self.iterations == MEASURED:
            share = float(all_max(torch.tensor(self.share)))
            self.every = 1 << math.ceil(math.log2(max(1.0, share / SHARE)))
            if self.every > 1 and rank() == 0:
                self.show(f"fingerprints (for verify): now of one iteration in {self.every}; they take {share:.1%} of its time")
