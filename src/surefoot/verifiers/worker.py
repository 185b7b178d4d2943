"""A process that judges one answer at a time, and that may be killed at any moment: ``python -m surefoot.verifiers.worker``.

A line of JSON comes in, ``[kind, seconds, response, wanted]``; one goes out, ``{"value": 1.0}``, or ``{"error": …}`` where the
row is wrong, and not the response. What a response holds is data here, and nothing of it is run.
"""

import contextlib
import importlib
import json
import logging
import math as numbers
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from surefoot.errors import SurefootError
from surefoot.verifiers.extract import fenced

MEMORY = 4 * 2**30
"""bytes of address space; a computation that wants more fails, and its response is wrong"""


def main() -> None:
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    _bound_memory()
    logging.disable()
    for line in sys.stdin:
        kind, seconds, response, wanted = json.loads(line)
        with contextlib.suppress(ImportError):  # which the judge will say; importing is none of a response's seconds
            importlib.import_module(PACKAGES[kind])
        if hasattr(signal, "alarm"):  # of its own accord, if whoever would kill it is gone
            signal.alarm(numbers.ceil(seconds) + 1)
        try:
            reply: dict[str, Any] = {"value": float(JUDGES[kind](response, wanted))}
        except SurefootError as error:
            reply = {"error": str(error)}
        except Exception:
            reply = {"value": 0.0}
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        os.write(replies, json.dumps(reply).encode() + b"\n")


def equal(response: str, answer: str) -> bool:
    """Whether the final formula or number of a response is the answer's, as mathematics."""
    from math_verify import parse, verify

    wanted = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
    if not wanted:
        raise SurefootError(f"answer={answer!r}: is no formula or number")
    given = parse(response, parsing_timeout=None)
    return bool(verify(wanted, given, timeout_seconds=None))


def fits(response: str, schema: Any) -> bool:
    """Whether a response is JSON that fits a schema."""
    import jsonschema
    import referencing

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise SurefootError(f"schema: is none ({error.message})") from None
    try:
        value = json.loads(fenced(response), parse_constant=_refused)
        return bool(kind(schema, registry=referencing.Registry()).is_valid(value))  # an empty registry fetches nothing
    except (ValueError, RecursionError):
        return False
    except referencing.exceptions.Unresolvable as error:
        raise SurefootError(f"schema: refers to {error.ref!r}, which is not in it") from None


PACKAGES = {"math": "math_verify", "json": "jsonschema"}
JUDGES: dict[str, Callable[[str, Any], bool]] = {"math": equal, "json": fits}


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


if __name__ == "__main__":
    main()
