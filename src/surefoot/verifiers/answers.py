"""Compare answers as text, as numbers, as mathematics or against a JSON schema, and extract the answer from a response.

Mathematics and JSON use packages of the extra ``verifiers``, in separate processes with a time limit.
"""

import json as encoding
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any
from unicodedata import normalize

from surefoot.errors import SurefootError, require_package
from surefoot.verifiers.numbers import correct_number, number_in
from surefoot.verifiers.processes import check_count, check_in_processes, check_number, check_text, reward_function


def _check_texts(*, answer: Sequence[Any] = (), after: Any = "", **_: Any) -> None:
    check_text("after", after)
    list(texts(answer, "answer"))


@reward_function(_check_texts)
def exact(
    responses: Sequence[str], answer: Sequence[Any], *, case: bool = True, space: bool = False, after: str = ""
) -> list[float]:
    """1 for each response that equals its answer (both in NFC), else 0.

    case    distinguish upper and lower case
    space   compare white space exactly; else strip it, and treat each run of it as one blank
    after   compare only the text after the last occurrence of this marker, such as ``"####"``; a response without it is wrong.
            "": compare the whole response
    """

    def normal(text: str) -> str:
        text = normalize("NFC", text if space else " ".join(text.split()))
        return text if case else text.casefold()

    check_text("after", after)
    actual = [following(response, after) for response in responses]
    expected = list(texts(answer, "answer", len(responses)))
    return [float(a is not None and normal(a) == normal(e)) for a, e in zip(actual, expected, strict=True)]


def _check_numeric(*, answer: Sequence[Any] = (), tolerance: Any = 0, relative: Any = 0, after: Any = "") -> None:
    check_number("tolerance", tolerance)
    check_number("relative", relative)
    check_text("after", after)
    _numbers(answer, after)


@reward_function(_check_numeric)
def numeric(
    responses: Sequence[str], answer: Sequence[Any], *, tolerance: float = 0.0, relative: float = 0.0, after: str = ""
) -> list[float]:
    """1 for each response whose number is the answer: ``|actual − expected| ≤ max(tolerance, relative · |expected|)``.

    It is the last number of a response or, with a marker, the first number after it. Numbers are compared exactly, as
    fractions: 0.5, 1/2, .50, 5e-1 and \\frac{1}{2} are equal. Commas may separate thousands. A number within a formula, such as
    2^{10}, is not read.

    answer      numbers, or texts of which one number is read the same way, such as worked solutions
    after       the number follows the last occurrence of this marker; "": the last number counts

    Raises SurefootError for an answer that may be read in another way, such as 2^{10}, 1:30, 1.5 million or 3 and 4.
    """
    _check_numeric(tolerance=tolerance, relative=relative, after=after)
    scores = []
    for response, expected in zip(responses, _numbers(answer, after, len(responses)), strict=True):
        actual = number_in(following(response, after) or "", last=not after)
        allowed = max(Fraction(tolerance), Fraction(relative) * abs(expected))
        scores.append(float(actual is not None and abs(actual - expected) <= allowed))
    return scores


def _numbers(answer: Sequence[Any], after: str, count: int | None = None) -> list[Fraction]:
    """The correct numbers. Raises SurefootError for an answer that is none."""
    numbers = []
    for row, text in enumerate(texts(answer, "answer", count)):
        marked = following(text, after) if after else None
        number = correct_number(marked or text, last=not marked)
        if number is None:
            raise SurefootError(
                f"answer={text!r:.200} (of response {row + 1}): is not one number; correct the row, or use "
                "surefoot.verifiers:math"
            )
        numbers.append(number)
    return numbers


def texts(column: Sequence[Any], name: str, count: int | None = None) -> Iterable[str]:
    """The values of a column as texts. Raises SurefootError for a value that is neither text nor a number.

    count   the number of responses, which must have one each
    """
    check_count(column, name, count)
    for row, value in enumerate(column):
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise SurefootError(f"{name}={value!r} (of response {row + 1}): must be text or a number; correct the row")
        yield value if isinstance(value, str) else repr(value)


def fenced(response: str) -> str:
    """The last fenced block of a response as CommonMark defines it, or the whole response if it has none.

    Fences are of backticks or tildes, may be indented or stand in lists and quotes, and an open one ends with the response.
    """
    blocks = [token.content for token in _markdown().parse(response) if token.type == "fence"]
    return blocks[-1] if blocks else response


@cache
def _markdown() -> Any:
    from markdown_it import MarkdownIt

    # HTML: a line such as </think> would make a fence below it a part of its block
    return MarkdownIt("commonmark").disable(["html_block", "inline"])


def following(text: str, marker: str) -> str | None:
    """The text after the last marker, or all of it if the marker is ""; None if the text doesn't contain the marker."""
    if not marker:
        return text
    _, separator, rest = text.rpartition(marker)
    return rest if separator else None


def reject_constant(word: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python's ``json`` accepts by default."""
    raise ValueError(f"{word} is not JSON")


_check_math = partial(require_package, "math-verify", "verifiers", "surefoot.verifiers:math")
_check_json = partial(require_package, "jsonschema", "verifiers", "surefoot.verifiers:json")


@reward_function(_check_texts, ready=_check_math)
def math(
    responses: Sequence[str], answer: Sequence[Any], *, after: str = "", seconds: float = 5.0, workers: int = 0
) -> list[float]:
    """1 for each response whose final formula or number equals the answer as mathematics, by ``math-verify``: what the last
    ``\\boxed`` contains, else the last formula.

    answer      LaTeX or plain, such as ``\\sqrt{2}/2``, ``(1, 2)``, or a whole solution with its answer boxed
    after       search only after the last occurrence of this marker; "": everywhere
    seconds     time limit for each response; one that takes longer, such as 9**9**9**9, is wrong
    workers     number of processes; 0: one for each core
    """
    _check_math()
    check_text("after", after)
    actual = [following(response, after) or "" for response in responses]
    expected = texts(answer, "answer", len(responses))
    return check_in_processes("math", list(zip(actual, expected, strict=True)), seconds, workers)


@reward_function(lambda schema=(), **_: [_schema(value, row) for row, value in enumerate(schema)], ready=_check_json)
def json(responses: Sequence[str], schema: Sequence[Any], *, seconds: float = 5.0, workers: int = 0) -> list[float]:
    """1 for each response that is valid JSON for its schema (``jsonschema``): its last fenced block, or the whole response.

    schema      a JSON schema, as a table or as text; draft 2020-12 unless it names another. References must stay inside it
    seconds     time limit for each response; a schema's pattern may take forever on some texts
    workers     number of processes; 0: one for each core
    """
    _check_json()
    check_count(schema, "schema", len(responses))
    rows = [(text, _schema(value, row)) for row, (text, value) in enumerate(zip(responses, schema, strict=True))]
    return check_in_processes("json", rows, seconds, workers)


def _schema(value: Any, row: int) -> Any:
    if isinstance(value, str):
        try:
            value = encoding.loads(value)
        except ValueError as error:
            raise SurefootError(f"schema (of response {row + 1}): is not JSON ({error}); correct the row") from None
    if not isinstance(value, (bool, Mapping)):
        raise SurefootError(
            f"schema (of response {row + 1}): is a {type(value).__name__}; it must be a table, or a table as JSON text"
        )
    return value
