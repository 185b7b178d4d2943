"""Write the digit that follows each: ``3917=`` is ``4028``. The difficulty is how many digits.

Each digit can be checked by itself, so this is a task for rewards of steps.
"""

import random
from collections.abc import Sequence

from surefoot.language.tasks.task import Row, Task


def draw(draw: random.Random, difficulty: int) -> Row:
    """Digits with repetition."""
    digits = "".join(draw.choices("0123456789", k=difficulty))
    return {"prompt": f"{digits}=", "answer": "".join(map(after, digits))}


def after(digit: str) -> str:
    """The digit that follows; 0 follows 9."""
    return str((int(digit) + 1) % 10)


def slip(draw: random.Random, row: Row) -> str:
    """Every other digit is guessed."""
    return "".join(draw.choice("0123456789") if draw.random() < 0.5 else right for right in row["answer"])


def steps(prompts: Sequence[str], responses: Sequence[str]) -> list[list[tuple[int, float]]]:
    """A reward of steps: 1 for each digit that is right at its place, 0 for another, −1 for each sign too many."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        right = [float(after(digit) == said) for digit, said in zip(prompt.removesuffix("="), response, strict=False)]
        worth = right + [-1.0] * (len(response) - len(right))
        found.append([(place + 1, value) for place, value in enumerate(worth)])
    return found


steps.per = "step"  # type: ignore[attr-defined]


TASK = Task(
    about="write the digit that follows each: 3917= is 4028; difficulty: how many digits",
    draw=draw,
    difficulties=(2, 40),
    usual=8,
    slip=slip,
    key=lambda row: row["prompt"],
)
