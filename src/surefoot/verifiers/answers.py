"""Short answers: texts that are the same, and numbers that are close enough."""

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from surefoot.errors import SurefootError
from surefoot.verifiers.extract import following

_DIGITS, _EXPONENT = 400, 400
"""digits of a number and size of its exponent, beyond which it is none: 1e999999999 would fill the memory"""
_PLAIN = str.maketrans({"−": "-", **dict.fromkeys(",$€£ ")})
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+−])?"  # a sign, where nothing stands before it that it would subtract from
    r"[$€£]?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
    r"(?: ?/ ?[0-9]+(?:\.[0-9]+)?)?"
)


def exact(
    responses: Sequence[str], answer: Sequence[Any], *, case: bool = True, space: bool = False, after: str = ""
) -> list[float]:
    """1 for each response that is its answer.

    case    whether upper and lower case differ
    space   whether white space counts; else it is trimmed, and any run of it is one blank
    after   compare only what follows the last of this text, such as ``"####"``; a response without it is wrong. "": all of it
    """

    def normal(text: str) -> str:
        text = text if space else " ".join(text.split())
        return text if case else text.casefold()

    found = [following(response, after) for response in responses]
    wanted = list(texts(answer, "answer"))
    return [float(got is not None and normal(got) == normal(want)) for got, want in zip(found, wanted, strict=True)]


def numeric(
    responses: Sequence[str],
    answer: Sequence[Any],
    *,
    tolerance: float = 0.0,
    relative: float = 0.0,
    after: str = "",
) -> list[float]:
    """1 for each response whose last number is the answer: ``|given − wanted| ≤ max(tolerance, relative · |wanted|)``.

    Numbers are compared exactly, as fractions: 0.5, 1/2, .50 and 5e-1 are one. Commas may stand between thousands.

    answer      numbers, or texts whose last number counts, such as a worked solution's
    after       look only behind the last of this text; "": anywhere
    """
    if not (tolerance >= 0 and relative >= 0):
        raise SurefootError(f"tolerance={tolerance}, relative={relative}: both must be 0 or more")
    scores = []
    for row, (response, text) in enumerate(zip(responses, texts(answer, "answer"), strict=True)):
        wanted = last_number(following(text, after) or text)
        if wanted is None:
            raise SurefootError(f"answer={text!r} (of response {row + 1}): has no number in it")
        given = last_number(following(response, after) or "")
        allowed = max(Fraction(tolerance), Fraction(relative) * abs(wanted))
        scores.append(float(given is not None and abs(given - wanted) <= allowed))
    return scores


def last_number(text: str) -> Fraction | None:
    """The last number of a text; None where there is none, or none that a sum could be done with (1/0, 1e999)."""
    found = _NUMBER.findall(text)
    return _fraction(found[-1]) if found else None


def _fraction(text: str) -> Fraction | None:
    above, _, below = text.translate(_PLAIN).partition("/")
    mantissa, _, exponent = above.lower().partition("e")
    if max(len(mantissa), len(below)) > _DIGITS or len(exponent) > len("-400") or abs(int(exponent or 0)) > _EXPONENT:
        return None
    divisor = Fraction(below or 1)
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0) / divisor if divisor else None


def texts(column: Sequence[Any], name: str) -> Iterable[str]:
    """A column of texts and numbers as texts."""
    for row, value in enumerate(column):
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise SurefootError(f"{name}={value!r} (of response {row + 1}): must be text or a number")
        yield value if isinstance(value, str) else repr(value)
