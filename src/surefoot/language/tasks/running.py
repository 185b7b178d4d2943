"""Write running sums, last digits alone: ``3917=`` is ``3230`` (3, 12, 13, 20). The difficulty is how many digits.

Each digit can be checked by itself: it must follow from the one before, as it was written, and the digit of the problem.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

from surefoot.language.tasks.task import Row, Task


def draw(draw: random.Random, difficulty: int) -> Row:
    """Digits with repetition."""
    digits = "".join(draw.choices("0123456789", k=difficulty))
    return {"prompt": f"{digits}=", "answer": "".join(str(total % 10) for total in accumulate(map(int, digits)))}


def slip(draw: random.Random, row: Row) -> str:
    """Every other step is guessed; the others are right, whatever they follow."""
    written = ""
    for digit in row["prompt"].removesuffix("="):
        guessed = draw.random() < 0.5
        written += draw.choice("0123456789") if guessed else str((int(written[-1:] or "0") + int(digit)) % 10)
    return written


def steps(prompts: Sequence[str], responses: Sequence[str]) -> list[list[tuple[int, float]]]:
    """1 for each digit that is the last digit of the one before it and the problem's, 0 for another; a reward of steps.

    Nothing more is earned after so many digits as the problem has, and nothing with what is no digit or follows none.
    """
    return [
        [(place + 1, float(right)) for place, right in enumerate(_right(*pair))]
        for pair in zip(prompts, responses, strict=True)
    ]


steps.per = "step"  # type: ignore[attr-defined]


def _right(prompt: str, response: str) -> list[bool]:
    digits = prompt.removesuffix("=")
    before = ["0", *response]
    return [
        new.isdecimal() and old.isdecimal() and new.isascii() and old.isascii() and int(new) == (int(old) + int(digit)) % 10
        for old, digit, new in zip(before, digits, response, strict=False)
    ]


TASK = Task(
    about="write running sums, last digits alone: 3917= is 3230; difficulty: how many digits",
    draw=draw,
    difficulties=(2, 40),
    usual=8,
    slip=slip,
    key=lambda row: row["prompt"],
)
