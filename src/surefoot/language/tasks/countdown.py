"""Reach a number: ``3 5 7=22:`` is ``3*5+7``, or any sum that uses each number once. The difficulty is how many numbers.

A response is read by a parser of its own, for numbers, + - * / and round brackets; nothing is evaluated by Python.
"""

import random
import re
from collections import Counter
from fractions import Fraction

from surefoot.language.tasks.task import Row, Task

LARGEST = 20
"""of the numbers"""
_LONGEST = 400
"""characters of an expression that is still read"""
_WORD = re.compile(r"\s*([0-9]{1,9}|[-+*/()])")


def draw(draw: random.Random, difficulty: int) -> Row:
    """Numbers, and what a random sum of them gives: whole and from 0 to 999 all the way."""
    while True:
        numbers = [draw.randint(1, LARGEST) for _ in range(difficulty)]
        expression, value = _sum(draw, numbers)
        if value is not None:
            given = draw.sample(numbers, len(numbers))
            return {"prompt": f"{' '.join(map(str, given))}={value}:", "answer": expression, "numbers": given, "target": value}


def _sum(draw: random.Random, numbers: list[int]) -> tuple[str, int | None]:
    """A random expression of the numbers, bracketed throughout where it matters, and its value; None where that is unfit."""
    parts: list[tuple[str, int]] = [(str(number), number) for number in numbers]
    while len(parts) > 1:
        (left, a), (right, b) = (parts.pop(draw.randrange(len(parts))) for _ in range(2))
        sign = draw.choice("++--*/" if a <= 12 or b <= 12 else "+-")
        if sign == "/" and (b == 0 or a % b):
            sign = "-"
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]
        if not 0 <= value <= 999:
            return "", None
        parts.append((f"{_bracketed(left)}{sign}{_bracketed(right)}", value))
    return parts[0]


def _bracketed(expression: str) -> str:
    return expression if expression.isdigit() else f"({expression})"


def slip(draw: random.Random, row: Row) -> str:
    """One sign is mistaken for another."""
    answer = row["answer"]
    place = draw.choice([index for index, letter in enumerate(answer) if letter in "+-*/"])
    return str(answer[:place] + draw.choice("+-*/".replace(answer[place], "")) + answer[place + 1 :])


def right(row: Row, response: str) -> bool:
    """Whether a response uses each number once, and gives the target."""
    found = evaluated(response)
    return found is not None and found[0] == row["target"] and Counter(found[1]) == Counter(row["numbers"])


def evaluated(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and its numbers, from left to right; None where it is none, or divides by 0."""
    if len(text) > _LONGEST:
        return None
    words, place = [], 0
    text = text.rstrip()
    while place < len(text):
        word = _WORD.match(text, place)
        if word is None:
            return None
        words.append(word[1])
        place = word.end()
    try:
        reader = _Reader(words)
        value = reader.sum()
        return (value, reader.numbers) if reader.done else None
    except (ArithmeticError, LookupError, ValueError, RecursionError):
        return None


class _Reader:
    """By recursive descent: a sum is of products, a product of atoms, an atom a number or a sum in brackets."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.place = words, 0
        self.numbers: list[int] = []

    @property
    def done(self) -> bool:
        return self.place == len(self.words)

    def sum(self) -> Fraction:
        value = self.product()
        while not self.done and self.words[self.place] in "+-":
            value = value + self.product() if self.next() == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.atom()
        while not self.done and self.words[self.place] in "*/":
            value = value * self.atom() if self.next() == "*" else value / self.atom()
        return value

    def atom(self) -> Fraction:
        word = self.next()
        if word == "(":
            value = self.sum()
            if self.next() != ")":
                raise ValueError("a bracket is not closed")
            return value
        self.numbers.append(int(word))  # ValueError for a sign
        return Fraction(self.numbers[-1])

    def next(self) -> str:
        self.place += 1
        return self.words[self.place - 1]


TASK = Task(
    about="reach a number: 3 5 7=22: is 3*5+7, each number once; difficulty: how many numbers",
    draw=draw,
    difficulties=(2, 8),
    usual=3,
    slip=slip,
    key=lambda row: f"{sorted(row['numbers'])}={row['target']}",
    right=right,
)
