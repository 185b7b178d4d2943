"""Compare answers as text, as numbers, as mathematics or against a JSON schema, and extract the answer from a response.

Mathematics and JSON use packages of the extra ``verifiers``, in separate processes with a time limit.
"""

import json as encoding
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from surefoot.errors import SurefootError
from surefoot.verifiers.processes import bounded, check_in_processes, check_package, requires

_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.M | re.S)
_DIGITS, _EXPONENT = 400, 400
"""maximum digits and exponent of a number: 1e999999999 would fill the memory"""
_PLAIN = str.maketrans({"−": "-", **dict.fromkeys(",$€£ ")})
NUMERAL = (
    r"(?:(?<![\w.)\]])[-+−])?"  # a sign, unless it subtracts from what stands before it
    r"[$€£]?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)
"""the pattern of a number that is no fraction"""
_NUMBER = re.compile(NUMERAL + r"(?: ?/ ?[0-9]+(?:\.[0-9]+)?)?")


def exact(
    responses: Sequence[str], answer: Sequence[Any], *, case: bool = True, space: bool = False, after: str = ""
) -> list[float]:
    """1 for each response that equals its answer, else 0.

    case    distinguish upper and lower case
    space   compare white space exactly; else strip it, and treat each run of it as one blank
    after   compare only the text after the last occurrence of this marker, such as ``"####"``; a response without it is wrong.
            "": compare the whole response
    """

    def normal(text: str) -> str:
        text = text if space else " ".join(text.split())
        return text if case else text.casefold()

    actual = [following(response, after) for response in responses]
    expected = list(texts(answer, "answer"))
    return [float(a is not None and normal(a) == normal(e)) for a, e in zip(actual, expected, strict=True)]


def numeric(
    responses: Sequence[str],
    answer: Sequence[Any],
    *,
    tolerance: float = 0.0,
    relative: float = 0.0,
    after: str = "",
) -> list[float]:
    """1 for each response whose last number is the answer: ``|actual − expected| ≤ max(tolerance, relative · |expected|)``.

    Numbers are compared exactly, as fractions: 0.5, 1/2, .50 and 5e-1 are equal. Commas may separate thousands.

    answer      numbers, or texts whose last number counts, such as worked solutions
    after       search only after the last occurrence of this marker; "": everywhere
    """
    if not (tolerance >= 0 and relative >= 0):
        raise SurefootError(f"tolerance={tolerance}, relative={relative}: both must be 0 or more")
    scores = []
    for row, (response, text) in enumerate(zip(responses, texts(answer, "answer"), strict=True)):
        expected = last_number(following(text, after) or text)
        if expected is None:
            raise SurefootError(f"answer={text!r} (of response {row + 1}): has no number in it; correct the row")
        actual = last_number(following(response, after) or "")
        allowed = max(Fraction(tolerance), Fraction(relative) * abs(expected))
        scores.append(float(actual is not None and abs(actual - expected) <= allowed))
    return scores


def last_number(text: str) -> Fraction | None:
    """The last number of a text; None if it has none, or one that can't be used (1/0, 1e999)."""
    numbers = _NUMBER.findall(text)
    return _fraction(numbers[-1]) if numbers else None


def plain_number(text: str) -> str:
    """A number without currency and separators of thousands, as Python reads it."""
    return text.translate(_PLAIN)


def _fraction(text: str) -> Fraction | None:
    above, _, below = plain_number(text).partition("/")
    mantissa, _, exponent = above.lower().partition("e")
    if max(len(mantissa), len(below)) > _DIGITS or len(exponent) > len("-400") or abs(int(exponent or 0)) > _EXPONENT:
        return None
    divisor = Fraction(below or 1)
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0) / divisor if divisor else None


def texts(column: Sequence[Any], name: str) -> Iterable[str]:
    """The values of a column as texts. Raises SurefootError for a value that is neither text nor a number."""
    for row, value in enumerate(column):
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise SurefootError(f"{name}={value!r} (of response {row + 1}): must be text or a number; correct the row")
        yield value if isinstance(value, str) else repr(value)


def fenced(response: str) -> str:
    """The last fenced block of a response, or the whole response if it has none."""
    blocks: list[str] = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def following(text: str, marker: str) -> str | None:
    """The text after the last marker, or all of it if the marker is ""; None if the text doesn't contain the marker."""
    if not marker:
        return text
    _, separator, rest = text.rpartition(marker)
    return rest if separator else None


def reject_constant(word: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python's ``json`` accepts by default."""
    raise ValueError(f"{word} is not JSON")


def _check_math() -> None:
    check_package("math_verify", "math-verify", "math")


def _check_json() -> None:
    check_package("jsonschema", "jsonschema", "json")


@requires(_check_math)
@bounded()
def math(
    responses: Sequence[str], answer: Sequence[Any], *, after: str = "", seconds: float = 5.0, workers: int = 0
) -> list[float]:
    """1 for each response whose final formula or number equals the answer as mathematics, by ``math-verify``.

    answer      LaTeX or plain, such as ``\\sqrt{2}/2``, ``(1, 2)``, or a whole solution with its answer boxed
    after       search only after the last occurrence of this marker; "": everywhere
    seconds     time limit for each response; one that takes longer, such as 9**9**9**9, is wrong
    workers     number of processes; 0: one for each core
    """
    _check_math()
    actual = [following(response, after) or "" for response in responses]
    return check_in_processes("math", list(zip(actual, texts(answer, "answer"), strict=True)), seconds, workers)


@requires(_check_json)
@bounded()
def json(responses: Sequence[str], schema: Sequence[Any], *, seconds: float = 5.0, workers: int = 0) -> list[float]:
    """1 for each response that is valid JSON for its schema (``jsonschema``): its last fenced block, or the whole response.

    schema      a JSON schema, as a table or as text; draft 2020-12 unless it names another. References must stay inside it
    seconds     time limit for each response; a schema's pattern may take forever on some texts
    workers     number of processes; 0: one for each core
    """
    _check_json()
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
