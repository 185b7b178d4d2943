"""Reach a number: ``3 5 7=22:`` is ``3*5+7``, or any expression that uses each number once. Difficulty: how many numbers."""

import ast
import operator
import random
import re
from collections import Counter
from fractions import Fraction

from surefoot.language.tasks.task import Row, Task

LARGEST = 20
"""number in a problem"""
_LONGEST = 400
"""characters of an expression; longer ones are wrong"""
_EXPRESSION = re.compile(r"(\s*(?<![0-9])[0-9]{1,9}(?![0-9])|\s*[-+*/()])*\s*")
_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


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
    if len(text) > _LONGEST or not _EXPRESSION.fullmatch(text):
        return None
    plain = re.sub(r"\b0+(?=[0-9])", "", " ".join(text.split()))  # Python has no 07
    numbers: list[int] = []
    try:
        return _value(ast.parse(plain, mode="eval").body, numbers), numbers
    except (ArithmeticError, LookupError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """The value of a parsed expression, whose numbers are added to a list. Raises LookupError for any other syntax."""
    if isinstance(node, ast.BinOp):
        return Fraction(_SIGNS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers)))
    if not isinstance(node, ast.Constant):
        raise LookupError(node)
    numbers.append(int(str(node.value)))
    return Fraction(numbers[-1])


TASK = Task(
    about="reach a number: 3 5 7=22: is 3*5+7, each number once; difficulty: how many numbers",
    draw=draw,
    difficulties=(2, 8),
    usual=3,
    slip=slip,
    key=lambda row: f"{sorted(row['numbers'])}={row['target']}",
    right=right,
)
