"""Short answers: equality of texts and of numbers."""

from fractions import Fraction
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import SurefootError
from surefoot.language.rewards.terms import FunctionReward
from surefoot.verifiers import exact, numeric
from surefoot.verifiers.answers import fenced
from surefoot.verifiers.numbers import number_in


@given(st.text(), st.text())
def test_exact_is_equality_up_to_white_space(a: str, b: str) -> None:
    assert exact([a], [a]) == [1.0]
    assert exact([f"  {a}\n"], [a]) == [1.0]
    one, other = normalize("NFC", a), normalize("NFC", b)
    assert exact([a], [b]) == [float(one.split() == other.split())]
    assert exact([a], [b], space=True) == [float(one == other)]
    assert exact([normalize("NFD", a)], [one]) == [1.0]


def test_letter_case_and_markers_are_by_switch() -> None:
    assert exact(["Paris", "paris", "rome"], ["paris"] * 3) == [0, 1, 0]
    assert exact(["Paris", "paris", "rome"], ["paris"] * 3, case=False) == [1, 1, 0]
    assert exact(["so #### 4", "4", "#### 5 #### 4", "#### 4 5"], [4] * 4, after="####") == [1, 0, 1, 0]


def test_the_number_in_is_read() -> None:
    for text, number in (
        ("1 or 2, so 3", 3),
        ("1,234,567.50 in all", Fraction("1234567.5")),
        ("1,2345", 2345),
        ("1 / 3", Fraction(1, 3)),
        ("7-5", 5),
        ("−5", -5),
        ("-$1,200", -1200),
        (".5", Fraction(1, 2)),
        ("2.5e-3", Fraction(1, 400)),
        ("1e999999999999", None),
        ("1e401", None),
        ("1" * 500, None),
        ("–5", -5),
        ("1e‑3", Fraction(1, 1000)),
        (r"$\frac{3}{4}$", Fraction(3, 4)),
        (r"-\dfrac34", Fraction(-3, 4)),
        (r"3\tfrac{1}{2}", Fraction(7, 2)),
        ("-3 1/2", Fraction(-7, 2)),
        (r"\boxed{4{,}200}", 4200),
        (r"4\,200", 4200),
        (r"90^{\circ}", 90),
        (r"\[\boxed{\text{5}}\]", 5),
        ("25 cm^2, which is", 25),
        (r"\boxed{25\text{ cm}^2}", 25),
        ("9.8 m/s^{2}", Fraction("9.8")),
        ("5x^2 or 5m^2", None),
        ("negative 5", None),
        ("2^{10}", None),
        (r"\frac{\sqrt{2}}{2}", None),
        ("3½", None),
        (r"2\pi", None),
        ("1/0", None),
        ("", None),
    ):
        assert number_in(text) == number


@given(st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=10**6))
def test_every_fraction_is_read_as_it_is_written(number: Fraction) -> None:
    assert number_in(f"so it is {number}.") == number
    assert number_in(f"{number.numerator:,}") == number.numerator


def test_with_a_marker_the_number_after_it_counts() -> None:
    responses = ["2, so #### 42, as 6 · 7", "#### x = 42", "#### –42", "#### no", "7, then 42"]
    assert numeric(responses, [42] * 5, after="####") == [1, 1, 0, 0, 0]
    assert numeric(["#### 4"], ["so 12 and 7 #### 4 of 9"], after="####") == [1]


def test_answers_in_other_notations_are_read() -> None:
    for answer, number in ((r"\frac{3}{4}", "0.75"), ("4{,}200", "4200"), ("50%", "50"), ("2+2=4", "4"), ("It's 5!", "5")):
        assert numeric([number, "1"], [answer] * 2) == [1, 0]


def test_an_answer_that_is_not_one_number_is_rejected_before_training() -> None:
    for answer in (
        "2^{10}",
        r"\sqrt{2}",
        r"\frac{x}{2}",
        r"2\pi",
        "3x",
        "5k",
        "1.5 million",
        "1.5×10^3",
        "5!",
        "5 ± 2",
        "½",
        "1_000",
        "1,23",
        "1.234,5",
        "4 200",
        "1:30",
        "2025-01-05",
        "0x1F",
        "1/2/3",
        "1, 2",
        "3 and 4",
        "3 + 4",
        "10-5",
        "minus 5",
        "5 to 8",
        "5 ft 3 in",
        "٣",
    ):
        reward = FunctionReward("surefoot.verifiers:numeric")
        with pytest.raises(
            SurefootError, match=r"numeric': answer=.* \(of row 2\): is not one number; correct the row, or use"
        ):
            reward.check_rows({"answer": [1, answer]})


def test_fenced_blocks_are_those_of_commonmark() -> None:
    for response, block in (
        ("~~~py\na\n~~~", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("> ```\n> a\n> ```", "a\n"),
        ("  ```\n  a\n  ```", "a\n"),
        ("</think>\n```\na\n```\nDone.", "a\n"),
        ("```\nb\n```\n```\na\n", "a\n"),
        ("```\na\n    ```\n``` x\n```\n", "a\n    ```\n``` x\n"),
        ("``` a ```", "``` a ```"),
    ):
        assert fenced(response) == block


def test_numbers_match_within_the_tolerance() -> None:
    assert numeric(["3.14", "3.15", "none"], ["3.14159"] * 3, tolerance=0.002) == [1, 0, 0]
    assert numeric(["99", "98"], [100, 100], relative=0.01) == [1, 0]
    assert numeric(["0.1", "1/10", "0.10000000001"], [0.1] * 3) == [1, 1, 0]


def test_an_invalid_row_is_rejected() -> None:
    for call, what in (
        (lambda: numeric(["1"], [None]), r"answer=None \(of response 1\): must be text or a number"),
        (lambda: exact(["1", "2"], ["1", ["2"]]), r"answer=\['2'\] \(of response 2\)"),
        (lambda: numeric(["1"], [1], tolerance=-1), "tolerance=-1"),
        (lambda: numeric(["1"], [1], tolerance=float("inf")), "tolerance=inf: must be a number 0 or more"),
        (lambda: numeric(["1"], [1], relative="1"), "relative='1'"),
        (lambda: numeric(["1"], [1], after=4), "after=4: must be text"),
        (lambda: exact(["1", "2"], ["1"]), "answer: has 1 entries for 2 responses"),
    ):
        with pytest.raises(SurefootError, match=what):
            call()
