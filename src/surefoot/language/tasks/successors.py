"""Write the digit that follows each: ``3917=`` is ``4028``. The difficulty is how many digits.

Every digit can be verified separately, so rewards per step suit this task.
"""

import random
from collections.abc import Sequence

from surefoot.language.tasks.task import Row, Task


def draw(draw: random.Random, difficulty: int) -> Row:
    """Draw random digits."""
    digits = "".join(draw.choices("0123456789", k=difficulty))
    return {"prompt": f"{digits}=", "answer": "".join(map(after, digits))}


def after(digit: str) -> str:
    """The digit that follows; 0 follows 9."""
    return str((int(digit) + 1) % 10)


def slip(draw: random.Random, row: Row) -> str:
    """Guess about half of the digits."""
    return "".join(draw.choice("0123456789") if draw.random() < 0.5 else right for right in row["answer"])


def steps(prompts: Sequence[str], responses: Sequence[str]) -> list[list[tuple[int, float]]]:
    """A reward per step: 1 for each right digit at its place, 0 for a wrong one, −1 for each extra character."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        right = [float(after(digit) == written) for digit, written in zip(prompt.removesuffix("="), response, strict=False)]
        values = right + [-1.0] * (len(response) - len(right))
        scores.append([(place + 1, value) for place, value in enumerate(values)])
    return scores


steps.per = "step"  # type: ignore[attr-defined]


TASK = Task(
    about="write the digit that follows each: 3917= is 4028; difficulty: how many digits",
    draw=draw,
    difficulties=(2, 40),
    usual=8,
    slip=slip,
)
