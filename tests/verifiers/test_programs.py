"""Code against tests: forms of tests, passing programs, and scores. Attacks are in tests/sandbox."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot import sandbox, verifiers
from surefoot.errors import SurefootError
from surefoot.language.rewards.terms import FunctionReward
from surefoot.verifiers import code
from surefoot.verifiers.programs import parsed, same

ADD = [{"call": "add", "args": [1, 2], "expected": 3}, {"call": "add", "kwargs": {"a": 2, "b": 2}, "expected": 4}]
ECHO = [{"stdin": "1\n2\n", "stdout": "3\n"}, {"stdin": "4\n5", "stdout": "9"}]


@pytest.mark.usefixtures("sandboxed")
def test_code_is_scored_by_all_of_its_tests() -> None:
    right, half, wrong = "def add(a, b): return a + b", "def add(a, b): return 3", "def add(a, b)"
    assert code([right, half, wrong], [ADD] * 3) == [1, 0, 0]
    assert code([right, half, wrong], [ADD] * 3, partial=True, workers=2) == [1, 0.5, 0]
    assert code([right], [json.dumps(ADD)]) == [1]


@pytest.mark.usefixtures("sandboxed")
def test_the_last_fenced_block_is_the_code() -> None:
    answer = "First:\n```\n1/0\n```\nNo, so:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    assert code([answer], [ADD]) == [1]


@pytest.mark.usefixtures("sandboxed")
def test_scripts_are_scored_by_their_output() -> None:
    right = "print(int(input()) + int(input()), ' ')\nprint()"
    assert code([right, "print(3)", "print(3); 1/0"], [ECHO] * 3, partial=True) == [1, 0.5, 0]
    assert code([right], [[*ECHO, {"call": "none", "expected": 0}]]) == [0]


@pytest.mark.usefixtures("sandboxed")
def test_a_resource_bomb_fails_only_its_response() -> None:
    right, bomb = "def add(a, b): return a + b", "while True: pass"
    assert code([right, bomb, right], [ADD] * 3, seconds=2) == [1, 0, 1]


@pytest.mark.usefixtures("sandboxed")
def test_scripts_that_hang_take_the_time_of_one_unless_each_counts() -> None:
    hangs, scripts = "while True: pass", [{"stdin": "", "stdout": "1"}] * 400
    started = time.monotonic()
    assert code([hangs], [scripts], seconds=0.2) == [0]
    assert time.monotonic() - started < 60, "400 of them would take 80 s at least"


@pytest.mark.usefixtures("sandboxed")
def test_after_the_deadline_no_further_script_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[float] = []

    def run(*arguments: Any, **limits: Any) -> Any:
        began.append(time.monotonic())
        return sandbox.run(*arguments, **limits)

    monkeypatch.setattr("surefoot.verifiers.programs.run", run)
    reward = FunctionReward("surefoot.verifiers:code", arguments={"partial": True, "seconds": 0.2}, deadline=0.5)
    with pytest.raises(SurefootError, match=r"took longer than reward\.deadline"):
        reward([""], ["while True: pass"], {"tests": [[{"stdin": "", "stdout": "1"}] * 20]})
    rejected = time.monotonic()
    time.sleep(0.8)  # time for two or three more
    assert began
    assert max(began) < rejected


@pytest.mark.parametrize("name", ["code", "math"])
def test_the_longest_time_of_hanging_responses_is_computed_and_a_warning_if_too_long(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.verifiers.processes.available_cores", lambda: 2)
    monkeypatch.setattr(getattr(verifiers, name), "ready", None)
    reward = FunctionReward(f"surefoot.verifiers:{name}")
    assert reward.longest(9, {}) == 5 * 5.0
    assert FunctionReward(f"surefoot.verifiers:{name}", arguments={"seconds": 2, "workers": 9}).longest(10, {}) == 2 * 2.0
    assert reward.deadline_notes((24, {})) == []
    (note,) = reward.deadline_notes((24, {}), (64, {}), (8, {}))
    assert "if all 64 responses hang, a call takes 160 s and the run ends at reward.deadline=60 s" in note
    assert "set reward.deadline = 200, or lower arguments.seconds" in note
    assert FunctionReward("surefoot.verifiers:exact").deadline_notes((10**9, {})) == []
    for wrong in ({"workers": "2"}, {"seconds": "long"}, {"seconds": float("inf")}):
        with pytest.raises(SurefootError, match=rf"surefoot\.verifiers:{name}'.*longest"):
            FunctionReward(f"surefoot.verifiers:{name}", arguments=wrong).deadline_notes((64, {}))


def test_where_all_tests_count_a_response_may_hang_in_every_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers.code, "ready", None)
    script = {"stdin": "", "stdout": "1"}
    columns = {"tests": [json.dumps([script]), [script] * 3 + ADD, ADD]}
    of_all = FunctionReward("surefoot.verifiers:code", arguments={"partial": True, "workers": 2})
    assert of_all.longest(10, columns) == 5 * 5.0 * (3 + 1)  # and all calls together in one sandbox
    assert of_all.longest(10, {"tests": [ADD]}) == 5 * 5.0
    assert FunctionReward("surefoot.verifiers:code", arguments={"workers": 2}).longest(10, columns) == 5 * 5.0
    with pytest.raises(SurefootError, match=r"verifiers:code': tests \(of row 2\): must be a list with at least one test"):
        of_all.deadline_notes((10, {"tests": [ADD, []]}))


@pytest.mark.usefixtures("sandboxed")
def test_code_is_a_reward_function_with_arguments() -> None:
    reward = FunctionReward("surefoot.verifiers:code", arguments={"partial": True})
    assert reward(["add: "], ["def add(a, b): return 3"], {"tests": [ADD]}).total.tolist() == [0.5]
    with pytest.raises(SurefootError, match="requires 'tests'; available: answer, partial, prompts, responses"):
        reward.check_columns(["answer"])


@pytest.mark.usefixtures("sandboxed")
def test_settings_that_cannot_work_are_rejected_before_training() -> None:
    for settings, what in (
        ({"megabytes": 1}, "megabytes=1: Python does not start with so little memory; raise it"),
        ({"megabytes": 1e3}, r"megabytes=1000\.0: must be a whole number"),
        ({"seconds": 0}, "seconds=0: must be a number above 0 and at most 86,400"),
        ({"seconds": float("nan")}, "seconds=nan: must be"),
        ({"seconds": float("inf")}, "seconds=inf: must be"),
        ({"seconds": "5"}, "seconds='5': must be"),
        ({"workers": -1}, "workers=-1: must be a whole number 0 or more"),
        ({"partial": 1}, "partial=1: must be true or false"),
    ):
        reward = FunctionReward("surefoot.verifiers:code", arguments=settings)
        with pytest.raises(SurefootError, match=f"verifiers:code': {what}"):
            reward.check_rows({"tests": [ADD]})
        if "partial" not in settings:
            with pytest.raises(SurefootError, match=f"^{what}"):
                code(["def add(a, b): return a + b"], [ADD], **settings)
        with pytest.raises(SurefootError, match=r"^tests: has 1 entries for 2 responses"):
            code(["", ""], [ADD])


def test_without_bubblewrap_it_is_rejected_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._interpreter.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SurefootError, match=r"^reward\.function='surefoot\.verifiers:code': .*install the package bubblewrap"):
        FunctionReward("surefoot.verifiers:code")


def test_tests_of_another_shape_are_rejected() -> None:
    for tests, what in (
        ([], "must be a list with at least one test"),
        ("[", "is not JSON"),
        ({"call": "f"}, "must be a list"),
        ([1], r"tests\[0\]: is a int; a test must be a table"),
        ([{}], r"tests\[0\]: has nothing; a test needs call and expected"),
        ([{"call": "f"}], "has call; a test needs"),
        ([{"stdin": "", "expected": 1}], "has stdin, expected; a test needs"),
        ([{"call": "f", "expected": 1, "stdin": "", "stdout": ""}], "a test needs"),
        ([{"call": "f", "expected": 1, "argz": []}], "a test needs"),
        ([{"call": "f", "expected": 1, "args": 3}], r"tests\[0\]\.args=3: is a int"),
        ([{"call": "f", "expected": 1.5, "tolerance": -1}], r"tests\[0\]\.tolerance=-1: must be a number 0 or more"),
        ('[{"call": "f", "expected": 1, "tolerance": 1e999}]', r"tests\[0\]\.tolerance=inf: must be"),
        ('[{"call": "f", "expected": NaN}]', "is not JSON"),
        ([{"call": "f", "expected": float("nan")}], r"tests\[0\]: has a value that no JSON result equals"),
        ([{"call": "f", "expected": {1}}], r"tests\[0\]: has a value that no JSON result equals"),
        ([{"call": "f(1)", "expected": 1}], r"tests\[0\]\.call='f\(1\)': is not the name of a function"),
        ([{"stdin": 1, "stdout": "x"}], r"tests\[0\]\.stdin=1: is a int"),
    ):
        with pytest.raises(SurefootError, match=what):
            parsed(tests, "tests")


def test_nulls_filled_in_by_parquet_are_ignored() -> None:
    call = {"call": "f", "args": None, "expected": None, "stdin": None, "stdout": None}
    script = {"call": None, "args": None, "expected": None, "stdin": "a", "stdout": "b"}
    assert parsed([call, script], "tests") == [{"call": "f", "expected": None}, {"stdin": "a", "stdout": "b"}]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_a_value_is_the_same_as_itself_and_not_as_itself_in_a_list(value: Any) -> None:
    assert same(json.loads(json.dumps(value)), value)
    assert not same([value], value)
    assert not same(value, [value])


def test_equal_values_compare_equal() -> None:
    for value, expected, tolerance, is_same in (
        (True, 1, 0, False),
        (0, False, 0, False),
        (1, 1.0, 0, True),
        (0.1 + 0.2, 0.3, 0, True),
        (0.31, 0.3, 0, False),
        (0.31, 0.3, 0.02, True),
        (10**17, 10**17 + 1, 0, False),
        (10**4000, 1.0, 0, False),
        ("1", 1, 0, False),
        (None, False, 0, False),
        ([1, [2]], [1, [2]], 0, True),
        ([1, 2], [2, 1], 0, False),
        ({"a": 1}, {"a": 1, "b": 2}, 0, False),
    ):
        assert same(value, expected, tolerance) is is_same
