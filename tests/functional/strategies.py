"""What hypothesis draws: batches of steps with every kind of end and mask, and tensors of numbers.

Numbers are drawn by a seed and flags as the bits of one integer: fast, and what matters (shapes, ends, masks) still shrinks.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from . import oracles

DOUBLE = torch.float64

CONSTANTS = pytest.mark.parametrize(
    ("constant", "count", "dtype"),
    [
        (0.1, 3, torch.float32),
        (1e6 / 3, 7, DOUBLE),
        (-123.456, 300, torch.bfloat16),
        (7.3, 300, torch.float32),
        (0.0, 1, DOUBLE),
    ],
)
"""constants whose mean is rounded to something beside them"""

scalars = st.floats(-10, 10, allow_subnormal=False)
discounts = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
lambdas = st.sampled_from([0.0, 0.3, 0.95, 1.0])
seeds = st.integers(0, 10_000)
bits = st.integers(0, 2**16 - 1)


def random(seed: int, *shape: int) -> Tensor:
    """float64 normal numbers; every third seed gives small integers, so that ties and zeros come up."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return (3 * x).round() if seed % 3 == 1 else 2 * x


def flags(number: int, *shape: int) -> Tensor:
    """A bool tensor from the bits of a number; from 0 comes all False."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for i in range(mask.numel()):
        mask.view(-1)[i] = bool(number >> (i % 16) & 1)
    return mask


def masks(*shape: int) -> st.SearchStrategy[Tensor]:
    return bits.map(lambda number: flags(number, *shape))


def tensors(*shape: int) -> st.SearchStrategy[Tensor]:
    return seeds.map(lambda seed: random(seed, *shape))


@dataclass(frozen=True)
class Batch:
    """B rows of T steps."""

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    gamma: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.rewards.shape[0], self.rewards.shape[1]

    @property
    def flags(self) -> dict[str, Tensor]:
        return {"terminated": self.terminated, "truncated": self.truncated}

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    def args(self, *names: str) -> list[Tensor]:
        return [getattr(self, name) for name in names or ("rewards", "values", "next_values")]

    def rows(self) -> list[oracles.Row]:
        columns = [x.tolist() for x in (*self.args(), self.terminated, self.truncated, self.mask)]
        return [oracles.Row(*row) for row in zip(*columns, strict=True)]

    def table(self, oracle: Any, *args: float) -> Tensor:
        """An oracle's answer at every step, 0 at masked ones."""
        return torch.tensor(
            [
                [oracle(row, t, self.gamma, *args) if row.mask[t] else 0.0 for t in range(len(row.rewards))]
                for row in self.rows()
            ],
            dtype=DOUBLE,
        )

    def filled(self, where: Tensor, what: float) -> "Batch":
        """The same with every number replaced where the flag says so."""
        fill = {
            name: torch.where(where, what, x) for name, x in zip(("rewards", "values", "next_values"), self.args(), strict=True)
        }
        return replace(self, **fill)


def batches(
    masked: bool = False, telescoping: bool = False, min_steps: int = 1, max_steps: int = 6
) -> st.SearchStrategy[Batch]:
    """Random steps, with ends of both kinds, also on one step; about a quarter of the steps have each.

    telescoping  next_values are the true successors' values; else any number, which is what ``next_values`` may hold
    """

    def build(rows: int, steps: int, seed: int, keep: int, ends: tuple[int, int, int, int], gamma: float) -> Batch:
        rewards, values, following = random(seed, 3, rows, steps)
        mask = ~flags(keep, rows, steps) if masked else torch.ones(rows, steps, dtype=torch.bool)
        terminated, truncated = flags(ends[0] & ends[1], rows, steps), flags(ends[2] & ends[3], rows, steps)
        if telescoping:
            last = random(seed + 1, rows).tolist()
            columns = (x.tolist() for x in (values, mask, truncated, following))
            actual = [oracles.successors(v, end, *rest) for end, v, *rest in zip(last, *columns, strict=True)]
            following = torch.tensor(actual, dtype=DOUBLE).nan_to_num()
        return Batch(rewards, values, following, terminated, truncated, mask, gamma)

    ends = st.tuples(bits, bits, bits, bits)
    return st.builds(build, st.integers(1, 2), st.integers(min_steps, max_steps), seeds, bits, ends, discounts)
