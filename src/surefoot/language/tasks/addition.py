"""Add two numbers: ``27+58=`` is ``85``. The difficulty is how many digits the numbers have at most."""

import random

from surefoot.language.tasks.task import Row, Task


def draw(draw: random.Random, difficulty: int) -> Row:
    """Two numbers from 0 on."""
    a, b = draw.randrange(10**difficulty), draw.randrange(10**difficulty)
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def slip(draw: random.Random, row: Row) -> str:
    """Column by column, and what should be carried is forgotten."""
    a, b = row["prompt"].removesuffix("=").split("+")
    width = max(len(a), len(b))
    columns = zip(a.zfill(width), b.zfill(width), strict=True)
    return str(int("".join(str((int(x) + int(y)) % 10) for x, y in columns)))


def key(row: Row) -> str:
    """27+58 and 58+27 are one problem."""
    return "+".join(sorted(row["prompt"].removesuffix("=").split("+")))


TASK = Task(
    about="add two numbers: 27+58= is 85; difficulty: digits of each",
    draw=draw,
    difficulties=(1, 30),
    usual=2,
    slip=slip,
    key=key,
)
