"""Multiply ``a=347,b=862`` with a tool: the model calls ``multiply`` and answers with the result.

A pocket model can't multiply such numbers itself. It copies them most easily if they stand as in the call, and the result if
all have the same length. The difficulty is the number of digits; the result has twice as many.
"""

import random
from collections.abc import Sequence
from itertools import islice, repeat
from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.language.tasks.task import Row

ABOUT = "multiply a=347,b=862 by calling the tool multiply; two turns"
DIFFICULTIES = (1, 6)
"""digits"""
USUAL = 3


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def right(responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for the right number, else 0."""
    return [float(response.strip() == wanted) for response, wanted in zip(responses, answer, strict=True)]


def rows(count: int, seed: int = 0, difficulty: int | None = None) -> list[Row]:
    """``count`` problems ``{"prompt", "answer"}``.

    Raises SurefootError for a difficulty out of range.
    """
    return [{"prompt": f"a={a},b={b}", "answer": str(a * b)} for a, b in _factors(count, seed, difficulty)]


def demonstrations(count: int, seed: int = 0, difficulty: int | None = None, *, sloppy: float = 0.6) -> list[Row]:
    """A teacher's solutions as ``messages``; in a share ``sloppy`` of the problems the teacher guesses instead of calling."""
    draw = random.Random(derived_seed(seed, "guesses"))
    return [{"messages": _solution(draw, a, b, sloppy)} for a, b in _factors(count, seed, difficulty)]


def _factors(count: int, seed: int, difficulty: int | None) -> list[tuple[int, int]]:
    digits = USUAL if difficulty is None else difficulty
    if not DIFFICULTIES[0] <= digits <= DIFFICULTIES[1]:
        raise SurefootError(f"difficulty={digits}: out of range for calculator; choose {DIFFICULTIES[0]} to {DIFFICULTIES[1]}")
    draw, numbers = random.Random(derived_seed(seed, "problems", digits)), range(10 ** (digits - 1), 10**digits)
    drawn = ((draw.choice(numbers), draw.choice(numbers)) for _ in repeat(None))
    return list(islice(((a, b) for a, b in drawn if a * b >= 10 ** (2 * digits - 1)), count))


def _solution(draw: random.Random, a: int, b: int, sloppy: float) -> list[dict[str, Any]]:
    question, answer = {"role": "user", "content": f"a={a},b={b}"}, str(a * b)
    if draw.random() < sloppy:
        guess = draw.randrange(10 ** (len(answer) - 1), 10 ** len(answer))
        return [question, {"role": "assistant", "content": str(guess)}]
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": answer},
        {"role": "assistant", "content": answer},
    ]
