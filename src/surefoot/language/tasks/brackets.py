"""Close what is open: ``([]{=`` is ``})``. The difficulty is how many brackets stand there."""

import random

from surefoot.language.tasks.task import Row, Task

CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


def draw(draw: random.Random, difficulty: int) -> Row:
    """Brackets that open, and some that close what was opened last; at least one stays open."""
    given, open_ = "", ""
    for place in range(difficulty):
        if open_ and draw.random() < 0.4 and (len(open_) > 1 or place < difficulty - 1):
            given, open_ = given + CLOSING[open_[-1]], open_[:-1]
        else:
            bracket = draw.choice(tuple(CLOSING))
            given, open_ = given + bracket, open_ + bracket
    return {"prompt": f"{given}=", "answer": "".join(CLOSING[bracket] for bracket in reversed(open_))}


def slip(draw: random.Random, row: Row) -> str:
    """The last bracket is closed by one of another kind."""
    *before, last = row["answer"]
    return "".join(before) + draw.choice([bracket for bracket in CLOSING.values() if bracket != last])


TASK = Task(
    about="close what is open: ([]{= is }); difficulty: how many brackets stand there",
    draw=draw,
    difficulties=(1, 60),
    usual=6,
    slip=slip,
    key=lambda row: row["prompt"],
)
