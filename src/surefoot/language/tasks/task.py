"""What a task with a verifier is: problems drawn by difficulty, what answers each, and how a sloppy teacher answers."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefoot.core.seeding import derived_seed

Row = dict[str, Any]
"""a problem: ``prompt``, ``answer``, and the columns that its verifier needs besides"""
HELD_OUT = 5
"""one problem in so many is never trained on"""


def is_answer(row: Row, response: str) -> bool:
    """The one right answer, white space around it aside."""
    return bool(response.strip() == row["answer"])


@dataclass(frozen=True)
class Task:
    """One kind of problem."""

    about: str
    """in a line, with an example"""
    draw: Callable[[random.Random, int], Row]
    """a problem of a difficulty; its answer is right"""
    difficulties: tuple[int, int]
    """the least and the greatest"""
    usual: int
    """the difficulty that is meant when none is named"""
    slip: Callable[[random.Random, Row], str]
    """what a teacher writes who is careless this time"""
    key: Callable[[Row], str]
    """problems of one key are one problem: training and test share none"""
    right: Callable[[Row, str], bool] = is_answer
    """whether a response solves a problem; it may be any text"""

    def held_out(self, row: Row) -> bool:
        """Whether a problem belongs to the test rows, whatever the seed."""
        return derived_seed("held out", self.key(row)) % HELD_OUT == 0
