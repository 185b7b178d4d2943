"""What a task with a verifier is, and the short ones: sorting, addition, counting, reversing, brackets."""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefoot.core.seeding import derived_seed

Row = dict[str, Any]
"""a problem: ``prompt``, ``answer``, and the other columns that its verifier needs"""
HELD_OUT = 5
"""one problem in so many is a test problem and never trained on"""
CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
LETTERS = "abcde"
"""of counting: few, so that most counts are neither 0 nor 1"""


def is_answer(row: Row, response: str) -> bool:
    """Whether a response is the one right answer, apart from white space around it."""
    return bool(response.strip() == row["answer"])


@dataclass(frozen=True)
class Task:
    """One kind of problem."""

    about: str
    """one line, with an example"""
    draw: Callable[[random.Random, int], Row]
    """draws a problem of a difficulty, with its right answer"""
    difficulties: tuple[int, int]
    """the smallest and the largest"""
    usual: int
    """the default difficulty"""
    slip: Callable[[random.Random, Row], str]
    """the answer of a careless teacher"""
    key: Callable[[Row], str] = lambda row: str(row["prompt"])
    """problems with the same key are the same problem: training and test share none"""
    right: Callable[[Row, str], bool] = is_answer
    """whether a response, which may be any text, solves a problem"""

    def held_out(self, row: Row) -> bool:
        """Whether a problem belongs to the test rows; independent of the seed."""
        return derived_seed("held out", self.key(row)) % HELD_OUT == 0


@dataclass(frozen=True)
class Game:
    """A task of several turns, which an environment scores."""

    about: str
    """one line, with an example"""
    difficulties: tuple[int, int]
    """the smallest and the largest"""
    usual: int
    """the default difficulty"""
    rows: Callable[[int, int, int], list[Row]]
    """so many rows, by seed and difficulty"""
    demonstrations: Callable[[int, int, int, float], list[Row]]
    """the same of a teacher's games, as ``messages``, with the share in which the teacher is careless"""


def _draw_sorting(draw: random.Random, difficulty: int) -> Row:
    digits = "".join(draw.choices("0123456789", k=difficulty))
    return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def _slip_sorting(draw: random.Random, row: Row) -> str:
    """Sort all digits but the last."""
    digits: str = row["prompt"].removesuffix("=")
    return "".join(sorted(digits[:-1])) + digits[-1]


SORTING = Task(
    about="sort digits: 52814= is 12458; difficulty: how many digits",
    draw=_draw_sorting,
    difficulties=(2, 40),
    usual=5,
    slip=_slip_sorting,
    key=lambda row: row["answer"],  # the multiset: the same digits in another order are the same problem
)


def _draw_addition(draw: random.Random, difficulty: int) -> Row:
    a, b = draw.randrange(10**difficulty), draw.randrange(10**difficulty)
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def _slip_addition(draw: random.Random, row: Row) -> str:
    """Add column by column and forget to carry."""
    a, b = row["prompt"].removesuffix("=").split("+")
    width = max(len(a), len(b))
    columns = zip(a.zfill(width), b.zfill(width), strict=True)
    return str(int("".join(str((int(x) + int(y)) % 10) for x, y in columns)))


ADDITION = Task(
    about="add two numbers: 27+58= is 85; difficulty: digits of each",
    draw=_draw_addition,
    difficulties=(1, 30),
    usual=2,
    slip=_slip_addition,
    key=lambda row: "+".join(sorted(row["prompt"].removesuffix("=").split("+"))),  # 27+58 and 58+27 are one problem
)


def _draw_counting(draw: random.Random, difficulty: int) -> Row:
    word, letter = "".join(draw.choices(LETTERS, k=difficulty)), draw.choice(LETTERS)
    return {"prompt": f"{letter} in {word}=", "answer": str(word.count(letter))}


def _slip_counting(draw: random.Random, row: Row) -> str:
    """Overlook the last letter, or count one too many."""
    letter, _, word = row["prompt"].removesuffix("=").split()
    return str(word[:-1].count(letter) if word.endswith(letter) else word.count(letter) + 1)


COUNTING = Task(
    about="count a letter: a in abacab= is 3; difficulty: how many letters",
    draw=_draw_counting,
    difficulties=(3, 60),
    usual=8,
    slip=_slip_counting,
)


def _draw_reversing(draw: random.Random, difficulty: int) -> Row:
    word = "".join(draw.choices(string.ascii_lowercase, k=difficulty))
    return {"prompt": f"{word}=", "answer": word[::-1]}


def _slip_reversing(draw: random.Random, row: Row) -> str:
    """Swap two neighbours."""
    answer, place = row["answer"], draw.randrange(len(row["answer"]) - 1)
    return str(answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :])


REVERSING = Task(
    about="write letters backwards: horse= is esroh; difficulty: how many letters",
    draw=_draw_reversing,
    difficulties=(2, 60),
    usual=6,
    slip=_slip_reversing,
)


def _draw_brackets(draw: random.Random, difficulty: int) -> Row:
    """Open brackets and close some of the last opened; at least one stays open."""
    written, open_ = "", ""
    for place in range(difficulty):
        if open_ and draw.random() < 0.4 and (len(open_) > 1 or place < difficulty - 1):
            written, open_ = written + CLOSING[open_[-1]], open_[:-1]
        else:
            bracket = draw.choice(tuple(CLOSING))
            written, open_ = written + bracket, open_ + bracket
    return {"prompt": f"{written}=", "answer": "".join(CLOSING[bracket] for bracket in reversed(open_))}


def _slip_brackets(draw: random.Random, row: Row) -> str:
    """Close the last bracket with another kind."""
    *before, last = row["answer"]
    return "".join(before) + draw.choice([bracket for bracket in CLOSING.values() if bracket != last])


BRACKETS = Task(
    about="close open brackets: ([]{= is }); difficulty: how many brackets are in the prompt",
    draw=_draw_brackets,
    difficulties=(1, 60),
    usual=6,
    slip=_slip_brackets,
)
