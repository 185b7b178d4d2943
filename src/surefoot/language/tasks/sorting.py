"""Sort digits: ``52814=`` is ``12458``. The difficulty is how many."""

import random

from surefoot.language.tasks.task import Row, Task


def draw(draw: random.Random, difficulty: int) -> Row:
    """Digits with repetition."""
    digits = "".join(draw.choices("0123456789", k=difficulty))
    return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def slip(draw: random.Random, row: Row) -> str:
    """The last digit stays where it was, behind the others."""
    digits: str = row["prompt"].removesuffix("=")
    return "".join(sorted(digits[:-1])) + digits[-1]


TASK = Task(
    about="sort digits: 52814= is 12458; difficulty: how many digits",
    draw=draw,
    difficulties=(2, 40),
    usual=5,
    slip=slip,
    key=lambda row: row["answer"],  # the multiset: another order of the same digits is no new problem
)
