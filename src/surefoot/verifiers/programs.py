"""Run responses as code against tests. The code runs in a sandbox, which never contains the expected results."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from surefoot.calls import in_threads, overdue
from surefoot.errors import SurefootError
from surefoot.files import available_cores
from surefoot.sandbox import STARTUP, Call, Limits, Outcome, check, run
from surefoot.verifiers.answers import fenced, reject_constant
from surefoot.verifiers.processes import check_count, check_limits, check_number, reward_function

CLOSE = 1e-9
"""relative tolerance for floats"""
_CALL, _SCRIPT = {"call", "args", "kwargs", "expected", "tolerance"}, {"stdin", "stdout"}


@dataclass(frozen=True)
class CodeResult:
    """The test results of one response."""

    passed: list[bool]
    """one for each test"""
    outcomes: list[Outcome]
    """of the sandboxes: one for all calls, one for each script"""


def _times(arguments: Mapping[str, Any], columns: Mapping[str, Sequence[Any]]) -> int:
    """How many sandboxes of one response may hang: one, or with ``partial`` as many as the longest list of tests needs."""
    if not arguments["partial"]:
        return 1
    rows = [parsed(tests, f"tests (of row {row})") for row, tests in enumerate(columns.get("tests", ()), 1)]
    return max((any("call" in test for test in tests) + sum("stdin" in test for test in tests) for tests in rows), default=1)


def _check_code(*, tests: Sequence[Any] = (), megabytes: Any = 1024, **_: Any) -> None:
    for row, value in enumerate(tests):
        parsed(value, f"tests (of response {row + 1})")
    check_number("megabytes", megabytes, above=0, most=2**40, whole=True)
    check()
    _check_memory(megabytes)


@cache
def _check_memory(megabytes: int) -> None:
    """Raise SurefootError unless an empty program runs in a sandbox of this size."""
    if run("", limits=Limits(memory=megabytes * 2**20, seconds=STARTUP)).ended != "done":
        raise SurefootError(f"megabytes={megabytes}: Python does not start with so little memory; raise it, such as to 1024")


@reward_function(_check_code, ready=check, times=_times)
def code(
    responses: Sequence[str],
    tests: Sequence[Any],
    *,
    partial: bool = False,
    seconds: float = 5.0,
    megabytes: int = 1024,
    workers: int = 0,
) -> list[float]:
    """1 for each response whose code passes all of its tests. The code is its last fenced block, or the whole response.

    tests       for each response a list, or a list as JSON text, of calls ``{"call": "add", "args": [1, 2], "expected": 3}``
                (optionally with ``kwargs`` and an absolute ``tolerance``) and scripts ``{"stdin": "1 2", "stdout": "3"}``,
                compared line by line without trailing blanks
    partial     return the share of tests that pass, instead of all or nothing
    seconds     time limit for all calls of a response together, and for each script
    megabytes   memory limit
    workers     number of sandboxes at a time; 0: one for each core

    Functions must return JSON values: a tuple counts as a list, and a set or a custom object passes no test.
    Raises SurefootError for invalid tests, and if no sandbox can start; code never runs without one.
    """
    check_limits(seconds, workers)
    check_count(tests, "tests", len(responses))
    _check_code(megabytes=megabytes)
    limits = Limits(seconds=seconds, memory=megabytes * 2**20)
    expected = [parsed(column, f"tests (of response {row + 1})") for row, column in enumerate(tests)]
    rows = list(zip(responses, expected, strict=True))
    results = in_threads(lambda row: run_tests(*row, limits, every=partial), rows, workers or available_cores())
    return [sum(r.passed) / len(r.passed) if partial else float(all(r.passed)) for r in results]


def run_tests(
    response: str, tests: Sequence[Mapping[str, Any]], limits: Limits | None = None, *, every: bool = True
) -> CodeResult:
    """Run a response's code on tests from ``parsed``, and compare the results. No script begins after the deadline of a caller.

    every   if False, tests after a script that failed don't run and count as failed
    """
    source = fenced(response)
    passed: dict[int, bool] = {}
    outcomes = []
    called = {row: test for row, test in enumerate(tests) if "call" in test}
    if called:
        calls: list[Call] = [(t["call"], t.get("args", []), t.get("kwargs", {})) for t in called.values()]
        outcome = run(source, calls=calls, limits=limits)
        outcomes.append(outcome)
        lines = outcome.output.split(b"\n")[:-1]
        whole = outcome.ended == "done" and len(lines) == len(calls)
        for index, (row, test) in enumerate(called.items()):
            passed[row] = whole and _returns(lines[index], test)
    for row, test in enumerate(tests):
        if "stdin" in test and (overdue() or not (every or all(passed.values()))):
            passed[row] = False
        elif "stdin" in test:
            outcome = run(source, stdin=test["stdin"], limits=limits)
            outcomes.append(outcome)
            passed[row] = outcome.ended == "done" and _lines(outcome.output.decode(errors="replace")) == _lines(test["stdout"])
    return CodeResult([passed[row] for row in range(len(tests))], outcomes)


def parsed(tests: Any, field: str) -> list[dict[str, Any]]:
    """Tests as a list of checked tables. Raises SurefootError, which names the field, for invalid tests."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests, parse_constant=reject_constant)
        except ValueError as error:
            raise SurefootError(f"{field}: is not JSON ({error}); correct the row") from None
    if not isinstance(tests, list) or not tests:
        raise SurefootError(f"{field}: must be a list with at least one test; correct the row")
    return [_checked(test, f"{field}[{number}]") for number, test in enumerate(tests)]


def _checked(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SurefootError(f"{field}: is a {type(value).__name__}; a test must be a table")
    test = {name: x for name, x in value.items() if x is not None or name == "expected"}  # Parquet fills in null
    kinds = [kind for kind in (_CALL, _SCRIPT) if test.keys() - {"expected"} <= kind]
    if "stdin" in test and test.get("expected", 0) is None:
        del test["expected"]
    call, script = "call" in test and "expected" in test, "stdin" in test and "stdout" in test
    if call == script or not kinds or test.keys() - (_CALL if call else _SCRIPT):
        raise SurefootError(
            f"{field}: has {', '.join(map(str, test)) or 'nothing'}; a test needs call and expected, optionally args, kwargs "
            "and tolerance; or stdin and stdout"
        )
    types = {"call": str, "args": list, "kwargs": dict, "tolerance": (int, float), "stdin": str, "stdout": str}
    for name, x in test.items():
        if name in types and not isinstance(x, types[name]):  # type: ignore[arg-type]
            raise SurefootError(f"{field}.{name}={x!r}: is a {type(x).__name__}; correct the row")
    if "tolerance" in test:
        check_number(f"{field}.tolerance", test["tolerance"])
    if not test.get("call", "f").isidentifier():
        raise SurefootError(f"{field}.call={test['call']!r}: is not the name of a function; correct the row")
    try:
        json.dumps(test, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SurefootError(f"{field}: has a value that no JSON result equals ({error}); correct the row") from None
    return test


def _returns(line: bytes, test: Mapping[str, Any]) -> bool:
    """Whether a line of output contains the expected value. The line is untrusted and may be anything."""
    try:
        result = json.loads(line, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return False
    if not isinstance(result, dict) or result.keys() != {"value"}:
        return False
    return same(result["value"], test["expected"], test.get("tolerance", 0))


def same(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether two JSON values are equal. Booleans are not numbers; floats may differ by ``CLOSE`` or by the tolerance."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        if isinstance(value, int) and isinstance(expected, int):
            return abs(value - expected) <= tolerance
        try:
            return value == expected or math.isclose(value, expected, rel_tol=CLOSE, abs_tol=tolerance)
        except OverflowError:  # an integer too large for a float
            return False
    if isinstance(value, list) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(same(*pair, tolerance) for pair in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(same(value[key], expected[key], tolerance) for key in value)
    return type(value) is type(expected) and bool(value == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
