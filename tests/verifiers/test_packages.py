"""Mathematics and JSON schemas, verified in processes with a time limit."""

import importlib.util
import json as encoding
import os
import time
from pathlib import Path
from typing import Any

import pytest
from forked import children

from surefoot.errors import SurefootError
from surefoot.language.rewards.terms import FunctionReward
from surefoot.verifiers import json, math, processes

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.fixture(scope="module", autouse=True)
def _leave_no_process():
    yield
    processes.close()


def workers() -> list[int]:
    """The processes that check answers."""
    return [pid for pid in children(os.getpid()) if b"surefoot.verifiers.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_answers_that_are_equal_as_mathematics() -> None:
    pytest.importorskip("math_verify")
    cases = [
        (r"so it is $\frac{1}{2}$", "0.5", 1),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
        ("the answer is 12", "12", 1),
        ("the answer is 13", "12", 0),
        (r"$x^2 + 2x + 1$", "(x+1)^2", 1),
        (r"$\{1, 2\}$", r"\{2, 1\}", 1),
        (r"$(1, 2)$", "(2, 1)", 0),
        (r"\boxed{5}. That is wrong; correcting: \boxed{7}", "7", 1),
        (r"I get \boxed{7}.\n\nWait.\n</think>\n\nIt is \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"\boxed{7}. No: \boxed{5}", "7", 0),
        (r"\boxed{7}. No: \boxed{7", "7", 0),
        (r"\boxed{7}", r"First \boxed{5}, then \boxed{7}", 1),
        ("$–7$", "-7", 1),
        ("0.333333", r"\frac{1}{3}", 1),
        ("0.0000001", "0", 0),
        ("0.0000001", "0.0000002", 0),
        (r"$10^{-20}$", "0", 0),
        (r"$(10^{-8}, 2)$", "(0, 2)", 0),
        (r"$1.0 \cdot 10^{-8}$", "0.00000001", 1),
        ("no idea", "12", 0),
        ("", "12", 0),
    ]
    responses, answers, scores = map(list, zip(*cases, strict=True))
    assert math(responses, answers) == scores


@pytest.mark.slow
def test_a_resource_bomb_fails_only_its_response_and_process() -> None:
    pytest.importorskip("math_verify")
    assert math(["12"], ["12"], workers=1) == [1]  # the process is there
    started = time.monotonic()
    bombs = ["9**9**9**9", "$9^{9^{9^{9}}}$", r"$\prod_{i=1}^{10000000} i$"]
    assert math([*bombs, "12"], ["12"] * 4, seconds=3.0, workers=1) == [0, 0, 0, 1]
    assert time.monotonic() - started < 60
    assert len(workers()) <= 1


@pytest.mark.slow
def test_import_time_does_not_count_towards_the_time_limit(tmp_path: Path, monkeypatch: Any) -> None:
    processes.close()
    slow = "import time\ntime.sleep(3)\ndef parse(text, **_): return [text.strip('$')]\ndef verify(a, b, **_): return a == b\n"
    (tmp_path / "math_verify.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.syspath_prepend(str(tmp_path))  # where it is looked for before training begins
    try:
        assert math(["12"], ["12"], seconds=0.5, workers=1) == [1]
    finally:
        processes.close()


def test_an_invalid_answer_is_an_error_of_the_row() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(SurefootError, match=r"^response 2: answer='': is not a formula"):
        math(["1", "1"], ["1", ""], workers=1)


def test_json_that_fits_its_schema() -> None:
    pytest.importorskip("jsonschema")
    cases = {
        '{"age": 3}': 1,
        'Here:\n```json\n{"age": 3, "name": "x"}\n```\n': 1,
        '{"age": "3"}': 0,
        "{}": 0,
        '{"age": NaN}': 0,
        "age: 3": 0,
        "[" * 100_000: 0,
        "": 0,
    }
    assert json(list(cases), [SCHEMA] * len(cases), workers=1) == list(cases.values())
    assert json(["3"], [encoding.dumps({"type": "integer"})]) == [1]


def test_an_endless_pattern_fails_only_its_response() -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "string", "pattern": "^(a+)+$"}
    assert json(['"aa"', encoding.dumps("a" * 50 + "b"), '"a"'], [schema] * 3, seconds=1.0, workers=1) == [1, 0, 1]


def test_an_invalid_schema_is_an_error_of_the_row() -> None:
    for schema, what in (
        ({"type": "objekt"}, "schema: is not a valid JSON schema"),
        ({"$ref": "http://localhost/x"}, "schema: refers to 'http://localhost/x', which is not in it"),
        ("{", "is not JSON"),
        (3, "is a int; it must be a table"),
    ):
        pytest.importorskip("jsonschema")
        with pytest.raises(SurefootError, match=what):
            json(['{"a": 1}'], [schema], workers=1)


@pytest.mark.parametrize(("name", "package"), [("math", "math-verify"), ("json", "jsonschema")])
def test_a_missing_package_is_one_line_before_training(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(SurefootError, match=rf"needs {package}, which is not installed; run: pip install .*\[verifiers\]'"):
        FunctionReward(f"surefoot.verifiers:{name}")
