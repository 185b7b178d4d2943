"""Guess a number in several turns: the model asks ``4``, is told ``higher`` or ``lower``, and asks again.

Halving what is left finds any of 2^d − 1 numbers in d turns. The difficulty is d.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.language.tasks.task import Row

ABOUT = "guess a number from 1 to 2^d - 1, being told higher or lower; of several turns"
DIFFICULTIES = (2, 6)
"""how many turns halving needs"""
USUAL = 3
_TURNS = 12
"""after which a teacher stops"""


class Guess:
    """The one who knows: rows have ``secret`` and ``highest``.

    A turn that finds the secret earns 1 and is the last; one that says no number in the range earns 0 and is the last, too.
    """

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Tells the range."""
        try:
            self.secret, self.highest = int(row["secret"]), int(row["highest"])
        except KeyError as missing:
            raise SurefootError(f"rows of guess have a column {missing}; make them with surefoot data make guess") from None
        return opening(self.highest)

    def step(self, response: str) -> tuple[list[dict[str, str]], float, bool]:
        """Tells where the secret is."""
        said = response.strip()
        if not re.fullmatch(r"[0-9]{1,4}", said) or not 1 <= int(said) <= self.highest:
            return [], 0.0, True
        if int(said) == self.secret:
            return [], 1.0, True
        return [hint(int(said), self.secret)], 0.0, False


def opening(highest: int) -> list[dict[str, str]]:
    """How a game begins."""
    return [{"role": "user", "content": f"1 to {highest}"}]


def hint(said: int, secret: int) -> dict[str, str]:
    """What is answered to a wrong guess."""
    return {"role": "user", "content": "higher" if secret > said else "lower"}


def rows(count: int, seed: int = 0, difficulty: int | None = None) -> list[Row]:
    """``count`` games ``{"secret", "highest"}``; training and test draw from the same numbers.

    Raises SurefootError for a difficulty that there is not.
    """
    highest = _highest(difficulty)
    draw = random.Random(derived_seed(seed, "games", highest))
    return [{"secret": draw.randint(1, highest), "highest": highest} for _ in range(count)]


def demonstrations(count: int, seed: int = 0, difficulty: int | None = None, *, sloppy: float = 0.6) -> list[Row]:
    """Games of a teacher as ``messages``, who halves what is left, and in a share ``sloppy`` of the turns guesses anywhere in
    it.
    """
    draw = random.Random(derived_seed(seed, "player"))
    return [{"messages": _played(draw, row["secret"], row["highest"], sloppy)} for row in rows(count, seed, difficulty)]


def _played(draw: random.Random, secret: int, highest: int, sloppy: float) -> list[dict[str, str]]:
    messages, low, high = opening(highest), 1, highest
    for _ in range(_TURNS):
        said = draw.randint(low, high) if draw.random() < sloppy else (low + high) // 2
        messages.append({"role": "assistant", "content": str(said)})
        if said == secret:
            break
        messages.append(hint(said, secret))
        low, high = (said + 1, high) if secret > said else (low, said - 1)
    return messages


def _highest(difficulty: int | None) -> int:
    level = USUAL if difficulty is None else difficulty
    if not DIFFICULTIES[0] <= level <= DIFFICULTIES[1]:
        raise SurefootError(f"difficulty={level}: guess has {DIFFICULTIES[0]} to {DIFFICULTIES[1]}")
    return int(2**level - 1)
