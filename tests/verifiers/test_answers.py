"""Short answers: equality of texts and of numbers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import SurefootError
from surefoot.verifiers import exact, numeric
from surefoot.verifiers.answers import last_number


@given(st.text(), st.text())
def test_exact_is_equality_up_to_white_space(a: str, b: str) -> None:
    assert exact([a], [a]) == [1.0]
    assert exact([f"  {a}\n"], [a]) == [1.0]
    assert exact([a], [b]) == [float(a.split() == b.split())]
    assert exact([a], [b], space=True) == [float(a == b)]


def test_letter_case_and_markers_are_by_switch() -> None:
    assert exact(["Paris", "paris", "rome"], ["paris"] * 3) == [0, 1, 0]
    assert exact(["Paris", "paris", "rome"], ["paris"] * 3, case=False) == [1, 1, 0]
    assert exact(["so #### 4", "4", "#### 5 #### 4", "#### 4 5"], [4] * 4, after="####") == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 5.", 5),
        ("1 or 2, so 3", 3),
        ("1,234,567.50 in all", Fraction("1234567.5")),
        ("1,2345", 2345),
        ("-3/4", Fraction(-3, 4)),
        ("1 / 3", Fraction(1, 3)),
        ("7-5", 5),
        ("x = -5", -5),
        ("−5", -5),
        ("-$1,200", -1200),
        (".5", Fraction(1, 2)),
        ("2.5e-3", Fraction(1, 400)),
        ("1e999999999999", None),
        ("1e401", None),
        ("1" * 500, None),
        ("1/0", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_is_read(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


@given(st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=10**6))
def test_every_fraction_is_read_as_it_is_written(number: Fraction) -> None:
    assert last_number(f"so it is {number}.") == number
    assert last_number(f"{number.numerator:,}") == number.numerator


def test_numbers_match_within_the_tolerance() -> None:
    assert numeric(["3.14", "3.15", "none"], ["3.14159"] * 3, tolerance=0.002) == [1, 0, 0]
    assert numeric(["99", "98"], [100, 100], relative=0.01) == [1, 0]
    assert numeric(["0.1", "1/10", "0.10000000001"], [0.1] * 3) == [1, 1, 0]
    assert numeric(["7, then 4"], ["2+2 is 4 #### 4"], after="####") == [0]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: numeric(["1"], ["none"]), r"answer='none' \(of response 1\): has no number"),
        (lambda: numeric(["1"], [None]), r"answer=None \(of response 1\): must be text or a number"),
        (lambda: exact(["1", "2"], ["1", ["2"]]), r"answer=\['2'\] \(of response 2\)"),
        (lambda: numeric(["1"], [1], tolerance=-1), "tolerance=-1"),
    ],
)
def test_an_invalid_row_is_rejected(call, what: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SurefootError, match=what):
        call()
