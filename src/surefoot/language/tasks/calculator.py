"""Multiply ``a=347,b=862`` with a tool: the model calls ``multiply`` and answers with the result.

A pocket model can't multiply such numbers itself. It copies them most easily if they stand as in the call, and the result if
all have the same length. The difficulty is the number of digits; the result has twice as many.
"""

import random
from collections.abc import Sequence
from itertools import islice, repeat
from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.language.tasks.task import Game, Row


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


def rows(count: int, seed: int, digits: int) -> list[Row]:
    """``count`` problems ``{"prompt", "answer"}``."""
    return [{"prompt": f"a={a},b={b}", "answer": str(a * b)} for a, b in _factors(count, seed, digits)]


def demonstrations(count: int, seed: int, digits: int, sloppy: float) -> list[Row]:
    """A teacher's solutions as ``messages``; in a share ``sloppy`` of the problems the teacher guesses instead of calling."""
    draw = random.Random(derived_seed(seed, "guesses"))
    return [{"messages": _solution(draw, a, b, sloppy)} for a, b in _factors(count, seed, digits)]


def _factors(count: int, seed: int, digits: int) -> list[tuple[int, int]]:
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


GAME = Game("multiply a=347,b=862 by calling the tool multiply; two turns", (1, 6), 3, rows, demonstrations)
