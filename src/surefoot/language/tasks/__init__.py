"""Tasks whose truth is known, made by seeded programs.

Those of ``TASKS`` can be checked: ``rows`` makes problems, ``demonstrations`` what a sloppy teacher answers, and ``verify`` is
the reward function that recipes name, ``surefoot.language.tasks:verify``. ``reviews`` stands for what people prefer.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, did_you_mean
from surefoot.language.tasks import (
    addition,
    brackets,
    countdown,
    counting,
    guess,
    reasoning_gym,
    reversing,
    sorting,
    successors,
)
from surefoot.language.tasks.task import Row, Task, is_answer

TASKS: dict[str, Task] = {
    "sorting": sorting.TASK,
    "addition": addition.TASK,
    "counting": counting.TASK,
    "reversing": reversing.TASK,
    "brackets": brackets.TASK,
    "countdown": countdown.TASK,
    "successors": successors.TASK,
}
GAMES = {"guess": guess}
"""tasks of several turns: an environment knows what is right, and ``verify`` doesn't"""
_TRIES = 2_000
"""draws in a row that give nothing new, after which there is nothing new"""


def rows(name: str, count: int, seed: int = 0, difficulty: int | None = None, *, test: bool = False) -> list[Row]:
    """``count`` problems ``{"prompt", "answer", "task", …}``, the same for the same arguments.

    name         of ``TASKS`` or ``GAMES``, or ``reasoning_gym/NAME``
    difficulty   as the task counts it; none: its usual one
    test         problems that no training rows have, whatever their seed; each prompt once

    Raises SurefootError for an unknown name or difficulty, and where there are not so many test problems.
    """
    if name.startswith(reasoning_gym.PREFIX):
        if difficulty is not None:
            raise SurefootError(f"difficulty={difficulty}: {name} has none here; leave it out")
        return reasoning_gym.rows(name, count, derived_seed(seed, "problems", name), test=test)
    if name in GAMES:
        games: list[Row] = GAMES[name].rows(count, derived_seed(seed, "test") if test else seed, difficulty)
        return games
    task = find(name)
    level = task.usual if difficulty is None else difficulty
    least, greatest = task.difficulties
    if not least <= level <= greatest:
        raise SurefootError(f"difficulty={level}: {name} has {least} to {greatest}")
    problems = _problems(task, random.Random(derived_seed(seed, "problems", name, level)), level, test)
    found = [row | {"task": name} for row, _ in zip(problems, range(count), strict=False)]
    if len(found) < count:
        kind = "test" if test else "training"
        raise SurefootError(f"rows={count}: {name} of difficulty {level} has {len(found)} {kind} problems; ask for fewer")
    return found


def demonstrations(
    name: str, count: int, seed: int = 0, difficulty: int | None = None, *, sloppy: float = 0.6, test: bool = False
) -> list[Row]:
    """``rows`` with a ``completion`` instead of an answer: a teacher's, who is careless in a share ``sloppy`` of them.

    What supervised training starts from, where reinforcement learning is to find out what is right.
    """
    if not 0 <= sloppy <= 1:
        raise SurefootError(f"sloppy={sloppy}: is a share of the rows, from 0 to 1")
    if name.startswith(reasoning_gym.PREFIX) and sloppy:
        raise SurefootError(f"sloppy={sloppy}: {name} has right answers alone; set 0")
    if name in GAMES:
        shown = derived_seed(seed, "test") if test else seed
        played: list[Row] = GAMES[name].demonstrations(count, shown, difficulty, sloppy=sloppy)
        return played
    draw = random.Random(derived_seed(seed, "teacher", name))
    return [
        {"prompt": row["prompt"], "completion": find(name).slip(draw, row) if draw.random() < sloppy else row["answer"]}
        for row in rows(name, count, seed, difficulty, test=test)
    ]


def verify(prompts: Sequence[str], responses: Sequence[str], task: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    """1 for each response that solves its problem: a reward function for rows of any of these tasks, mixed as you like."""
    scores = []
    for number, (response, name) in enumerate(zip(responses, task, strict=True)):
        right = is_answer if str(name).startswith(reasoning_gym.PREFIX) else find(str(name)).right
        row = {"prompt": prompts[number], **{key: column[number] for key, column in columns.items()}}
        try:
            scores.append(float(right(row, response)))
        except KeyError as missing:
            raise SurefootError(f"rows of {name} have a column {missing}, which is missing here; make them anew") from None
    return scores


def find(name: str) -> Task:
    """A task by name; SurefootError where there is none."""
    if name not in TASKS:
        known = f"; there are {', '.join((*TASKS, *GAMES))}, and {reasoning_gym.PREFIX}NAME"
        raise SurefootError(f"task={name!r}: is unknown{did_you_mean(name, (*TASKS, *GAMES)) or known}")
    return TASKS[name]


def _problems(task: Task, draw: random.Random, level: int, test: bool) -> Iterator[Row]:
    """Problems of one side of the split, until nothing new comes: test problems once each, for training again and again."""
    seen: set[str] = set()
    idle = 0
    while idle < _TRIES:
        row = task.draw(draw, level)
        if task.held_out(row) == test and row["prompt"] not in seen:
            idle = 0
            if test:
                seen.add(row["prompt"])
            yield row
        else:
            idle += 1
