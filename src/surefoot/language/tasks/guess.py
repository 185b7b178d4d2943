"""Guess a number in several turns: the model writes ``4``, the environment replies ``higher`` or ``lower``, and so on.

Binary search needs at most d turns for 2^d − 1 numbers. The difficulty is d.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.language.tasks.task import Game, Row

_TURNS = 12
"""after which the teacher stops"""


class Guess:
    """The environment; rows have ``secret`` and ``highest``.

    The right number earns 1 and ends the game; a turn that is no number in the range earns 0 and ends it too.
    """

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """The prompt: the range."""
        try:
            self.secret, self.highest = int(row["secret"]), int(row["highest"])
        except KeyError as missing:
            raise SurefootError(
                f"task='guess': its rows need a column {missing}; make them with surefoot data make guess"
            ) from None
        return opening(self.highest)

    def step(self, response: str) -> tuple[list[dict[str, str]], float, bool]:
        """Compare a guess with the secret."""
        guess = response.strip()
        if not re.fullmatch(r"[0-9]{1,4}", guess) or not 1 <= int(guess) <= self.highest:
            return [], 0.0, True
        if int(guess) == self.secret:
            return [], 1.0, True
        return [hint(int(guess), self.secret)], 0.0, False


def opening(highest: int) -> list[dict[str, str]]:
    """The first message of a game."""
    return [{"role": "user", "content": f"1 to {highest}"}]


def hint(guess: int, secret: int) -> dict[str, str]:
    """The reply to a wrong guess."""
    return {"role": "user", "content": "higher" if secret > guess else "lower"}


def rows(count: int, seed: int, turns: int) -> list[Row]:
    """``count`` games ``{"secret", "highest"}``, of ``turns`` by binary search; training and test have the same numbers."""
    highest = 2**turns - 1
    draw = random.Random(derived_seed(seed, "games", highest))
    return [{"secret": draw.randint(1, highest), "highest": highest} for _ in range(count)]


def demonstrations(count: int, seed: int, turns: int, sloppy: float) -> list[Row]:
    """A teacher's games as ``messages``: binary search, with a random guess in the remaining range in a share ``sloppy`` of the
    turns.
    """
    draw = random.Random(derived_seed(seed, "player"))
    return [{"messages": _play(draw, row["secret"], row["highest"], sloppy)} for row in rows(count, seed, turns)]


def _play(draw: random.Random, secret: int, highest: int, sloppy: float) -> list[dict[str, str]]:
    messages, low, high = opening(highest), 1, highest
    for _ in range(_TURNS):
        guess = draw.randint(low, high) if draw.random() < sloppy else (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret:
            break
        messages.append(hint(guess, secret))
        low, high = (guess + 1, high) if secret > guess else (low, guess - 1)
    return messages


GAME = Game("guess a number from 1 to 2^d - 1, with hints higher or lower; several turns", (2, 6), 3, rows, demonstrations)
