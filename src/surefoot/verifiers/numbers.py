"""Read numbers in texts: plain, with currency and separators of thousands, as fractions, and as LaTeX writes them."""

import re
from collections import deque
from fractions import Fraction

_DIGITS, _EXPONENT = 400, 400
"""maximum digits and exponent of a number: 1e999999999 would fill the memory"""
MINUS = "‐‑‒–−﹣－"
"""hyphens, an en dash and signs that stand for a minus"""
_PLAIN = str.maketrans({**dict.fromkeys(MINUS, "-"), **dict.fromkeys(",$€£")})
NUMERAL = (
    rf"(?:(?<![\w.)\]])[-+{MINUS}])?"  # a sign, unless it subtracts from what stands before it
    r"[$€£]?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    rf"(?:[eE][-+{MINUS}]?[0-9]+)?"
)
"""the pattern of a number that is no fraction"""
_NUMBER = re.compile(NUMERAL + r"(?: [0-9]+/[0-9]+(?![0-9/.])| ?/ ?[0-9]+(?:\.[0-9]+)?)?")  # 5, 5 1/2, 1/2
_MIXED = re.compile(r"(\S+) ([0-9]+)/([0-9]+)")
_WRAPPED = re.compile(r"\\(?:boxed|fbox|text(?:bf|rm|it)?|math(?:bf|rm|it)|mbox)\s*\{([^{}]*)\}")
_ARGUMENT = r"\s*(?:\{\s*([-+]?[0-9]+(?:\.[0-9]+)?)\s*\}|([0-9]))"
_FRACTION = re.compile(r"\\[dtc]?frac" + _ARGUMENT * 2)
_UNIT = r"(?<![a-zA-Z\\])(?:[cdkm]m|ft|yd|mi|in|feet|units?|(?<=[\s/])[ms])|\\(?:text|mathrm|mbox)\s*\{[^{}]*\}"
_WRITTEN = (
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!;:]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"), ""),  # 4{,}200
    (re.compile(r"\\[()\[\]]|\\(?:left|right|displaystyle)(?![a-zA-Z])"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°"), ""),
    (re.compile(rf"({_UNIT})\s*\^\s*(?:[23]|\{{[23]\}})"), r"\1"),  # 25 cm^2
)
_PART_BEFORE = re.compile(r"[\^_√]\s*\{?\s*$|[\w}]\{\s*$|\\(?:sqrt|cdot|times|pm|div)\s*$|(?i:\b(?:minus|negative))\s+$")
_PART_AFTER = re.compile(r"\s*(?:[\^√π]|[½⅓⅔¼¾¹²³⁰-⁹]|\\(?:sqrt|pi|cdot|times|pm|div|frac)|\}\s*\{)")
"""what makes a number a part of an expression"""
_DECORATION = r"[\s$€£%*#:=()\[\]{}\"'`.|<>≈~,;!?]*"
_ALLOWED_BEFORE = re.compile(r"(?:^|[\s=:(\[{|<>≈~\"'“‘*#`$€£])$")
_ALLOWED_AFTER = re.compile(r"(?:$|[\s.,;:!?)\]}|<>\"'”’*`$€£%])")
_TERMS_BEFORE = re.compile(
    rf"[0-9)}}](?:[,.:/'’]|[ \t]*[+*/^×·÷±{MINUS}-]?[ \t]+|[ \t]*[,;][ \t]*|\W*\b(?:or|and)\b\W*(?:[a-zA-Z]\s*=\s*)?)$"
    r"|[0-9]\s*\b(?:x|to|plus|times|over|(?:out )?of|ft|feet|foot|hours?|minutes?|pounds?|dollars?)\b\s+(?:and\s+)?$"
    r"|[√±×·÷]\s*$|\\(?!approx|implies|[rR]ightarrow|therefore|quad|qquad|to\b)[a-zA-Z]+\s*$"
)
_TERMS_AFTER = re.compile(
    rf"\s*[+/^_×·÷±π√∞²³]|[{MINUS}-]\w|[ \t]+[{MINUS}*-][ \t]+[a-z]\b|\s*\\(?!quad|qquad|implies|\\)[a-zA-Z]"
    r"|[ \t]*(?:hundred|thousand|million|billion|trillion|dozen)\b|[.,:][0-9]"
)
"""what makes a correct answer more than a number"""


def number_in(text: str, last: bool = True) -> Fraction | None:
    """The last or first number of a text; None if it has none, one that can't be used (1/0, 1e999), or a part of a formula."""
    text = _plain(text)
    found = _pick(text, last)
    return None if found is None or _in_formula(text, found) else _fraction(found.group())


def correct_number(text: str, last: bool) -> Fraction | None:
    """The number that a correct answer is, or with which a solution ends; None for anything that may be read in another way:
    formulas, dates, times, several numbers, numbers with a magnitude.

    last   read the last number; else the first
    """
    text = _plain(text)
    found = _pick(text, last)
    if found is None or _in_formula(text, found):
        return None
    before, after = text[: found.start()], text[found.end() :]
    after = after if last else after.partition("\n")[0]
    if re.search(r"[^\W\d_]", before + after):
        if not _ALLOWED_BEFORE.search(before) or not _ALLOWED_AFTER.match(after):
            return None
        if _TERMS_BEFORE.search(before) or _TERMS_AFTER.match(after):
            return None
    else:  # no words: nothing but the number, or a calculation with its result
        if not re.fullmatch(rf"(?:.*=)?{_DECORATION}", before, re.S) or not re.fullmatch(_DECORATION, after):
            return None
        if "!" in after or re.search(r"[0-9]\s*[,.:]?\s*$", before):
            return None
    return _fraction(found.group())


def plain_number(text: str) -> str:
    """A number without currency and separators of thousands, as Python reads it."""
    return text.translate(_PLAIN).replace(" ", "")


def _in_formula(text: str, found: re.Match[str]) -> bool:
    return bool(_PART_BEFORE.search(text[: found.start()]) or _PART_AFTER.match(text, found.end()))


def _pick(text: str, last: bool) -> re.Match[str] | None:
    found = _NUMBER.finditer(text)
    return deque(found, maxlen=1).pop() if last and _NUMBER.search(text) else next(found, None)


def _plain(text: str) -> str:
    """A text without the LaTeX that may surround or separate a number."""
    if not text.isascii() or not {"\\", "{", "^"}.isdisjoint(text):
        for pattern, replacement in _WRITTEN:
            text = pattern.sub(replacement, text)
        text = _FRACTION.sub(_divided, text)
        while (shorter := _WRAPPED.sub(r"\1", text)) != text:
            text = shorter
        text = _FRACTION.sub(_divided, text)
    return text


def _divided(match: re.Match[str]) -> str:
    above, below = match[1] or match[2], match[3] or match[4]
    sign = "-" if above.startswith("-") != below.startswith("-") else ""
    mixed = " " if match.start() and match.string[match.start() - 1].isdigit() else ""
    return f"{mixed}{sign}{above.lstrip('+-')}/{below.lstrip('+-')}"


def _fraction(text: str) -> Fraction | None:
    if mixed := _MIXED.fullmatch(text):
        whole, part = _fraction(mixed[1]), _fraction(f"{mixed[2]}/{mixed[3]}")
        if whole is None or part is None:
            return None
        return whole - part if plain_number(mixed[1]).startswith("-") else whole + part
    above, _, below = plain_number(text).partition("/")
    mantissa, _, exponent = above.lower().partition("e")
    if max(len(mantissa), len(below)) > _DIGITS or len(exponent) > len("-400") or abs(int(exponent or 0)) > _EXPONENT:
        return None
    divisor = Fraction(below or 1)
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0) / divisor if divisor else None
