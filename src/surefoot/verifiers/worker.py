"""Check one answer at a time in a process that may be killed.

It receives ``[kind, seconds, response, answer]`` as JSON, and answers ``{"value": 1.0}``, or ``{"error": …}`` if the answer is
invalid. It never runs anything from a response.
"""

import contextlib
import importlib
import json
import logging
import math as numbers
import re
import resource
import signal
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from surefoot.errors import SurefootError
from surefoot.processes import let_in
from surefoot.signals import STOPPING
from surefoot.verifiers.answers import fenced, reject_constant
from surefoot.verifiers.numbers import MINUS

MEMORY = 4 * 2**30
"""bytes of address space; a response whose check needs more is wrong"""


def serve(connection: "Connection[Any, Any]") -> None:
    """Answer until the pipe closes."""
    let_in(*STOPPING)
    _limit_memory()
    logging.disable()
    while True:
        try:
            kind, seconds, response, answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        with contextlib.suppress(ImportError):  # the check reports it; imports don't count against the time limit
            importlib.import_module(PACKAGES[kind])
        signal.alarm(numbers.ceil(seconds) + 1)  # ends this process if the parent no longer can
        try:
            reply: dict[str, Any] = {"value": float(CHECKS[kind](response, answer))}
        except SurefootError as error:
            reply = {"error": str(error)}
        except Exception:
            reply = {"value": 0.0}
        signal.alarm(0)
        connection.send_bytes(json.dumps(reply).encode())


def equal(response: str, answer: str) -> bool:
    """Whether the final formula or number of a response equals the answer, as mathematics."""
    from math_verify import parse, verify

    expected = parse(_final(answer if "$" in answer or "\\boxed" in answer else f"${answer}$"), parsing_timeout=None)
    if not expected:
        raise SurefootError(f"answer={answer!r}: is not a formula or number; correct the row")
    actual = parse(_final(response), parsing_timeout=None)
    digits = _digits([*expected, *actual])
    return bool(verify(expected, actual, float_rounding=digits, numeric_precision=digits + 9, timeout_seconds=None))


_SIGN = re.compile(rf"(?<![\w.)\]}}])[{MINUS}](?=[.\d\\$])")


def _final(text: str) -> str:
    """The last box of a text, or all of it without one, with a hyphen for every dash that is a sign."""
    start, depth = text.rfind("\\boxed"), 0
    if start >= 0:
        text = text[start:]
        for place, character in enumerate(text):
            depth += (character == "{") - (character == "}")
            if character == "}" and depth <= 0:
                text, depth = text[: place + 1], 0
                break
        if depth > 0:  # truncated within the box
            return ""
    return _SIGN.sub("-", text)


def _digits(formulas: Iterable[Any]) -> int:
    """Digits after the point to which numbers are rounded: 6, or more for tiny ones, so that four digits of them count."""
    smallest = 1.0
    for formula in (one for one in formulas if not isinstance(one, str)):
        from sympy import preorder_traversal  # type: ignore[import-untyped]

        for part in preorder_traversal(formula):
            if getattr(part, "is_number", False) and getattr(part, "is_comparable", False):
                size = abs(part.evalf(5))
                if size:
                    smallest = min(smallest, max(float(size), 1e-300))
    return max(6, 4 + numbers.floor(-numbers.log10(smallest)))


def fits(response: str, schema: Any) -> bool:
    """Whether a response is valid JSON for a schema."""
    import jsonschema
    import referencing

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise SurefootError(f"schema: is not a valid JSON schema ({error.message}); correct the row") from None
    try:
        value = json.loads(fenced(response), parse_constant=reject_constant)
        return bool(kind(schema, registry=referencing.Registry()).is_valid(value))  # an empty registry fetches nothing
    except (ValueError, RecursionError):
        return False
    except referencing.exceptions.Unresolvable as error:
        raise SurefootError(f"schema: refers to {error.ref!r}, which is not in it; correct the row") from None


PACKAGES = {"math": "math_verify", "json": "jsonschema"}
CHECKS: dict[str, Callable[[str, Any], bool]] = {"math": equal, "json": fits}


def _limit_memory() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
