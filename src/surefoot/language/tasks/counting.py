"""Count a letter: ``a in banana=`` is ``3``. The difficulty is how many letters there are."""

import random

from surefoot.language.tasks.task import Row, Task

LETTERS = "abcde"
"""few, so that most counts are neither 0 nor 1"""


def draw(draw: random.Random, difficulty: int) -> Row:
    """A word of few different letters, and one of them."""
    word, letter = "".join(draw.choices(LETTERS, k=difficulty)), draw.choice(LETTERS)
    return {"prompt": f"{letter} in {word}=", "answer": str(word.count(letter))}


def slip(draw: random.Random, row: Row) -> str:
    """The last letter is not looked at, or one too many is seen."""
    letter, _, word = row["prompt"].removesuffix("=").split()
    return str(word[:-1].count(letter) if word.endswith(letter) else word.count(letter) + 1)


TASK = Task(
    about="count a letter: a in abacab= is 3; difficulty: how many letters",
    draw=draw,
    difficulties=(3, 60),
    usual=8,
    slip=slip,
    key=lambda row: row["prompt"],
)
