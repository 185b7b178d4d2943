"""Fingerprints of an iteration: for each stage a hash of its tensors, and two sums by which others can see how far they are.

Two runs with the same hashes computed the same bits. The hash and the sums are sums over the elements, so threads, devices and
ranks may share the work; a stage whose numbers several ranks hold in parts has the fingerprint that one process would give it.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.core.optimizer import FlatParameters, Optimizer, Parts
from surefoot.core.rollout import Credit, LearnerState, Rollout, tensors_in
from surefoot.core.steps import PendingStep
from surefoot.ranks.collectives import all_max, bit_sum, exact_device, exchange, rank, world_size

CHUNK = 2**16
"""elements that are hashed at a time, so that what is computed of them stays in the processor's cache"""
GOLDEN = 0x9E3779B97F4A7C15
MEASURED = 10
"""iterations whose time decides how often fingerprints are taken"""
SHARE = 0.01
"""of an iteration's time that they may take"""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""whole numbers as wide as an element, or half as wide"""

Fingerprint = list[Any]
"""16 hexadecimal digits; √Σx²; Σ±x, with signs that depend on the position. A sum that is not finite is None"""


@cache
def _weights(device: torch.device) -> tuple[Any, Any]:
    """Odd factors of the words, and signs of the elements, the same everywhere and always.   [CHUNK] int64, [CHUNK] float64"""
    drawn = np.random.PCG64(0).random_raw(CHUNK)
    factors, signs = (drawn | np.uint64(1)).view(np.int64), np.where(drawn >> np.uint64(63), 1.0, -1.0)
    of_words = factors if device.type == "cpu" else torch.from_numpy(factors).to(device)
    return of_words, torch.from_numpy(signs).to(exact_device(device))


@cache
def _factor(index: int) -> int:
    """An odd factor of a whole chunk, tensor or rank."""
    mixed = _mixed(index + 1) | 1
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _mixed(number: int) -> int:
    """A whole number of 64 bits, another for each one."""
    number = number * GOLDEN % 2**64
    return (number ^ number >> 29) * 0xBF58476D1CE4E5B9 % 2**64


def measure(x: Tensor, start: int = 0) -> Iterator[tuple[int, Any, Any, Any]]:
    """The hash of a tensor, and Σx² and Σ±x in float64, in parts to be added. A change of one element changes the hash.

    start   index of its first element in a larger tensor, whose parts are those of all its parts

    Of each part a factor of its hash, the hash [] int64, and both sums [] float64; the hash is that of the tensor modulo 2⁶⁴.
    On a CPU numpy computes the hash, since its calls take less time.
    """
    flat = x.detach().reshape(-1)
    size, (factors, signs) = flat.numel(), _weights(x.device)
    if start == 0 and 0 < size <= CHUNK:  # the usual case, without its arithmetic
        yield 1, *_sums(flat, factors[:size], signs[:size])
        return
    for chunk in range(start // CHUNK, -(-(start + size) // CHUNK)):
        first = chunk * CHUNK - start
        part = flat[max(0, first) : first + CHUNK]
        at = slice(max(0, -first), max(0, -first) + part.numel())
        yield _factor(chunk) if chunk else 1, *_sums(part, factors[at], signs[at])


def _sums(part: Tensor, factors: Any, signs: Tensor) -> tuple[Any, Tensor, Tensor]:
    words = part.view(WORDS[part.element_size()])
    if part.element_size() == 8:
        low, high = words.view(-1, 2).unbind(1)
        words = low.to(torch.int64) + high * _factor(-2)
    else:
        words = words.to(torch.int64)
    exact = part.to(signs.device).to(torch.float64)
    hashed = words.numpy().dot(factors) if part.device.type == "cpu" else (words * factors).sum()
    return hashed, exact.dot(exact), exact.dot(signs)


def _bits(tensors: Iterable[Parts]) -> list[int]:
    return [int(bit_sum(x)) for parts in tensors for x, _ in parts]


Group = FlatParameters | Optimizer


class Fingerprints:
    """The fingerprints of some iterations of a learner: of every one, if that takes less than ``SHARE`` of the time.

    every   iterations between two, a power of 2; None: as many as the first ``MEASURED`` iterations show to be needed
    """

    def __init__(self, every: int | None = None) -> None:
        self.every, self.message = every, ""
        """the message says so once if not every iteration has one"""
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
        return (state.iteration + 1) % (self.every or 1) == 0 or state.iteration == 0

    def begin(self, groups: Iterable[Group], rollout: Rollout, credit: Credit) -> None:
        """Add the stages before an update of some groups of parameters."""
        began = time.perf_counter()
        parts = [group.parts() for group in groups]
        if self._updated and _bits(parts) == self._bits:  # nobody has moved them since the last update
            self._parts = [("weights", *numbers) for numbers in self._updated]
        else:
            self._add("weights", *parts)
        mask, rows = rollout.mask, len(rollout.mask)
        every_step = bool(mask.all())
        kept = rows * mask.shape[1] if every_step else int(mask.sum())
        counts = exchange((rows, kept)) if world_size() > 1 else []
        rows_before, kept_before = (sum(each[i] for each in counts[: rank()]) for i in (0, 1))

        def decided(*tensors: Tensor | None) -> list[Parts]:
            """What masked steps hold may be anything."""
            chosen = [x if every_step else x[mask.bool()] for x in tensors if x is not None]
            return [[(x, kept_before * (x.numel() // kept) if kept else 0)] for x in chosen]

        inputs = tensors_in(rollout.inputs)
        self._add("inputs", *([(x, rows_before * (x.numel() // rows) if rows else 0)] for x in inputs))
        self._add("actions", *decided(rollout.actions), [(mask.sum(-1), rows_before)])
        self._add("log_probs", *decided(rollout.old_log_probs, rollout.behaviour_log_probs, rollout.ref_log_probs))
        self._add("rewards", *decided(rollout.rewards))
        self._add("advantages", *decided(credit.advantages))
        self.seconds += time.perf_counter() - began

    def first_step(self, step: PendingStep, order: Sequence[Tensor]) -> None:
        """Add the first step of an update before it is taken, and the order in which rows were drawn for it.

        A step whose gradient is inside a program has the terms of its loss and the norms of its gradient.
        """
        began = time.perf_counter()
        # Every rank has an order of its own.
        self._add("order", [(x, rank() * CHUNK * CHUNK) for x in order[:1]])
        numbers = torch.tensor([*step.norms.values(), *step.terms.values()], dtype=torch.float64)
        gradients = [group.parts(gradients=True) for group in step.gradients_of]
        self._add("gradient", *gradients or [[(numbers, 0)] if rank() == 0 else []])
        self.seconds += time.perf_counter() - began

    def end(self, groups: Iterable[Group]) -> None:
        """Add the stage after an update, and sum up those of all ranks."""
        began = time.perf_counter()
        parts, before = [group.parts() for group in groups], len(self._parts)
        self._add("updated", *parts)
        self._updated, self._bits = [numbers for _, *numbers in self._parts[before:]], _bits(parts)
        whole: dict[str, list[Any]] = {}
        for each in exchange(
            [(stage, factor * int(number), float(a), float(b)) for stage, factor, number, a, b in self._parts]
        ):
            for stage, *numbers in each:
                whole[stage] = [before + x for before, x in zip(whole.get(stage, (0, 0.0, 0.0)), numbers, strict=True)]
        self.row = {
            stage: [f"{_mixed(number):016x}", *(x if math.isfinite(x) else None for x in (math.sqrt(square), sign))]
            for stage, (number, square, sign) in whole.items()
        }
        self._measure(time.perf_counter() - began)

    def _add(self, stage: str, *tensors: Parts) -> None:
        """Add tensors to those of a stage, each in the parts that this rank has."""
        for number, parts in enumerate(tensors):
            for x, start in parts:
                for factor, *measured in measure(x, start):
                    self._parts.append((stage, factor * _factor(-100 - number), *measured))

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
            if self.every > 1:
                self.message = (
                    f"fingerprints: of one iteration in {self.every} from here on, since they take {share:.1%} of its time"
                )
