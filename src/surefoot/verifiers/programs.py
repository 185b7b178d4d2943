"""Code against tests. The code runs in a sandbox; the tests' answers stay here, and the comparison too."""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from surefoot.errors import SurefootError
from surefoot.sandbox import Call, Limits, Outcome, check, run
from surefoot.verifiers.extract import fenced
from surefoot.verifiers.killable import cores
from surefoot.verifiers.ready import bounded, ready

CLOSE = 1e-9
"""by what share two floats of one test may differ"""
_CALL, _SCRIPT = {"call", "args", "kwargs", "expected", "tolerance"}, {"stdin", "stdout"}


@dataclass(frozen=True)
class Verdict:
    """What became of one response."""

    passed: list[bool]
    """test by test"""
    outcomes: list[Outcome]
    """of the sandboxes that it took: one for all calls, one for each script"""


def _times(arguments: Mapping[str, Any], columns: Mapping[str, Sequence[Any]]) -> int:
    """How many sandboxes that hang a response may take: one, or where all count, those of the most demanding tests."""
    if not arguments["partial"]:
        return 1
    rows = [parsed(tests, f"tests (of row {row})") for row, tests in enumerate(columns.get("tests", ()), 1)]
    return max((any("call" in test for test in tests) + sum("stdin" in test for test in tests) for tests in rows), default=1)


@ready(check)
@bounded(_times)
def code(
    responses: Sequence[str],
    tests: Sequence[Any],
    *,
    partial: bool = False,
    seconds: float = 5.0,
    megabytes: int = 1024,
    workers: int = 0,
) -> list[float]:
    """1 for each response whose code passes all of its tests. The code is its last fenced block, else all of it.

    tests       of each response a list, or a list as JSON text, of calls ``{"call": "add", "args": [1, 2], "expected": 3}``
                (with ``kwargs`` and an absolute ``tolerance`` where wanted), and of scripts
                ``{"stdin": "1 2", "stdout": "3"}``, compared line by line without blanks at the ends
    partial     the share of tests that pass, instead of all or nothing
    seconds     that all calls of a response may take together, and each script. After the first script that fails no other
                runs, unless ``partial`` counts them
    megabytes   of memory
    workers     sandboxes at a time; 0: one for each core

    What a function returns must be JSON: a tuple counts as a list, and a set or an object of its own passes no test.
    Raises SurefootError for tests of another shape, and where there is no sandbox; nothing ever runs without one.
    """
    limits = Limits(seconds=seconds, memory=megabytes * 2**20)
    wanted = [parsed(column, f"tests (of response {row + 1})") for row, column in enumerate(tests)]
    over = threading.Event()
    with ThreadPoolExecutor(workers or cores()) as threads:
        try:
            verdicts = list(
                threads.map(lambda response, its: judge(response, its, limits, every=partial, over=over), responses, wanted)
            )
        finally:
            over.set()
            threads.shutdown(wait=False, cancel_futures=True)
    return [sum(v.passed) / len(v.passed) if partial else float(all(v.passed)) for v in verdicts]


def judge(
    response: str,
    tests: Sequence[Mapping[str, Any]],
    limits: Limits | None = None,
    *,
    every: bool = True,
    over: threading.Event | None = None,
) -> Verdict:
    """Run a response's code on tests as ``parsed`` gives them, and compare.

    every   False: what comes after a script that failed has not passed either, and does not run
    over    once set, nobody waits for the verdict, and no further script runs
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
        if "stdin" in test and ((over is not None and over.is_set()) or not (every or all(passed.values()))):
            passed[row] = False
        elif "stdin" in test:
            outcome = run(source, stdin=test["stdin"], limits=limits)
            outcomes.append(outcome)
            passed[row] = outcome.ended == "done" and _lines(outcome.output.decode(errors="replace")) == _lines(test["stdout"])
    return Verdict([passed[row] for row in range(len(tests))], outcomes)


def parsed(tests: Any, field: str) -> list[dict[str, Any]]:
    """Tests as a list of checked tables. Raises SurefootError, which names the field, for anything else."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise SurefootError(f"{field}: is not JSON ({error})") from None
    if not isinstance(tests, list) or not tests:
        raise SurefootError(f"{field}: must be a list with at least one test")
    return [_checked(test, f"{field}[{number}]") for number, test in enumerate(tests)]


def _checked(given: Any, field: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SurefootError(f"{field}: is a {type(given).__name__}; a test is a table")
    test = {name: value for name, value in given.items() if value is not None or name == "expected"}  # Parquet fills with null
    kinds = [kind for kind in (_CALL, _SCRIPT) if test.keys() - {"expected"} <= kind]
    if "stdin" in test and test.get("expected", 0) is None:
        del test["expected"]
    call, script = "call" in test and "expected" in test, "stdin" in test and "stdout" in test
    if call == script or not kinds or test.keys() - (_CALL if call else _SCRIPT):
        raise SurefootError(
            f"{field}: has {', '.join(map(str, test)) or 'nothing'}; a test has call, expected, and perhaps args, kwargs and "
            "tolerance, or it has stdin and stdout"
        )
    types = {"call": str, "args": list, "kwargs": dict, "tolerance": (int, float), "stdin": str, "stdout": str}
    for name, value in test.items():
        if name in types and not isinstance(value, types[name]):  # type: ignore[arg-type]
            raise SurefootError(f"{field}.{name}={value!r}: is a {type(value).__name__}")
    return test


def _returns(line: bytes, test: Mapping[str, Any]) -> bool:
    """Whether what came out of the sandbox says the expected value. It may be anything at all."""
    try:
        told = json.loads(line, parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(told, dict) and told.keys() == {"value"} and same(told["value"], test["expected"], test.get("tolerance", 0))
    )


def same(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Equal as JSON: a boolean is no number, whole numbers are exact, floats may differ by ``CLOSE`` or the tolerance."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        if isinstance(value, int) and isinstance(expected, int):
            return abs(value - expected) <= tolerance
        try:
            return value == expected or math.isclose(value, expected, rel_tol=CLOSE, abs_tol=tolerance)
        except OverflowError:  # a whole number beyond every float
            return False
    if isinstance(value, list) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(same(*pair, tolerance) for pair in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(same(value[key], expected[key], tolerance) for key in value)
    return type(value) is type(expected) and bool(value == expected)


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
