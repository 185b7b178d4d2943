"""Write letters backwards: ``horse=`` is ``esroh``. The difficulty is how many."""

import random
import string

from surefoot.language.tasks.task import Row, Task


def draw(draw: random.Random, difficulty: int) -> Row:
    """Any letters."""
    word = "".join(draw.choices(string.ascii_lowercase, k=difficulty))
    return {"prompt": f"{word}=", "answer": word[::-1]}


def slip(draw: random.Random, row: Row) -> str:
    """Two neighbours change places."""
    answer, place = row["answer"], draw.randrange(len(row["answer"]) - 1)
    return str(answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :])


TASK = Task(
    about="write letters backwards: horse= is esroh; difficulty: how many letters",
    draw=draw,
    difficulties=(2, 60),
    usual=6,
    slip=slip,
    key=lambda row: row["prompt"],
)
