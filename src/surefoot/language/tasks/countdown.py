"""Reach a number: ``3 5 7=22:`` is ``3*5+7``, or any expression that uses each number once. The difficulty is how many numbers.

A small parser reads numbers, + - * / and round brackets; Python evaluates nothing.
"""

import random
import re
from collections import Counter
from fractions import Fraction

from surefoot.language.tasks.task import Row, Task

LARGEST = 20
"""number in a problem"""
_LONGEST = 400
"""characters of an expression; longer ones are wrong"""
_SYMBOL = re.compile(r"\s*([0-9]{1,9}|[-+*/()])")


def draw(draw: random.Random, difficulty: int) -> Row:
    """Draw numbers and the value of a random expression of them; every partial result is an integer from 0 to 999."""
    while True:
        numbers = [draw.randint(1, LARGEST) for _ in range(difficulty)]
        expression, value = _random_expression(draw, numbers)
        if value is not None:
            shuffled = draw.sample(numbers, len(numbers))
            prompt = f"{' '.join(map(str, shuffled))}={value}:"
            return {"prompt": prompt, "answer": expression, "numbers": shuffled, "target": value}


def _random_expression(draw: random.Random, numbers: list[int]) -> tuple[str, int | None]:
    """A random expression of the numbers, with brackets around every part, and its value; None if that is out of range."""
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
    """Replace one sign by another."""
    answer = row["answer"]
    place = draw.choice([index for index, letter in enumerate(answer) if letter in "+-*/"])
    return str(answer[:place] + draw.choice("+-*/".replace(answer[place], "")) + answer[place + 1 :])


def right(row: Row, response: str) -> bool:
    """Whether a response uses each number once and equals the target."""
    result = evaluate(response)
    return result is not None and result[0] == row["target"] and Counter(result[1]) == Counter(row["numbers"])


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and its numbers, from left to right; None if it is invalid or divides by 0."""
    if len(text) > _LONGEST:
        return None
    symbols, place = [], 0
    text = text.rstrip()
    while place < len(text):
        symbol = _SYMBOL.match(text, place)
        if symbol is None:
            return None
        symbols.append(symbol[1])
        place = symbol.end()
    try:
        parser = _Parser(symbols)
        value = parser.sum()
        return (value, parser.numbers) if parser.done else None
    except (ArithmeticError, LookupError, ValueError, RecursionError):
        return None


class _Parser:
    """Recursive descent: a sum has products, a product has atoms, an atom is a number or a sum in brackets."""

    def __init__(self, symbols: list[str]) -> None:
        self.symbols, self.place = symbols, 0
        self.numbers: list[int] = []

    @property
    def done(self) -> bool:
        return self.place == len(self.symbols)

    def sum(self) -> Fraction:
        value = self.product()
        while not self.done and self.symbols[self.place] in "+-":
            value = value + self.product() if self.next() == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.atom()
        while not self.done and self.symbols[self.place] in "*/":
            value = value * self.atom() if self.next() == "*" else value / self.atom()
        return value

    def atom(self) -> Fraction:
        symbol = self.next()
        if symbol == "(":
            value = self.sum()
            if self.next() != ")":
                raise ValueError("a bracket is not closed")
            return value
        self.numbers.append(int(symbol))  # ValueError for a sign
        return Fraction(self.numbers[-1])

    def next(self) -> str:
        self.place += 1
        return self.symbols[self.place - 1]


TASK = Task(
    about="reach a number: 3 5 7=22: is 3*5+7, each number once; difficulty: how many numbers",
    draw=draw,
    difficulties=(2, 8),
    usual=3,
    slip=slip,
    key=lambda row: f"{sorted(row['numbers'])}={row['target']}",
    right=right,
)
