"""Verify mathematics and JSON with packages of the extra ``verifiers``, in separate processes with a time limit."""

import json as encoding
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.errors import SurefootError
from surefoot.verifiers.answers import following, texts
from surefoot.verifiers.processes import bounded, check_in_processes, check_package, requires


def _check_math() -> None:
    check_package("math_verify", "math-verify", "math")


def _check_json() -> None:
    check_package("jsonschema", "jsonschema", "json")


@requires(_check_math)
@bounded()
def math(
    responses: Sequence[str], answer: Sequence[Any], *, after: str = "", seconds: float = 5.0, workers: int = 0
) -> list[float]:
    """1 for each response whose final formula or number equals the answer as mathematics, by ``math-verify``.

    answer      LaTeX or plain, such as ``\\sqrt{2}/2``, ``(1, 2)``, or a whole solution with its answer boxed
    after       search only after the last occurrence of this marker; "": everywhere
    seconds     time limit for each response; one that takes longer, such as 9**9**9**9, is wrong
    workers     number of processes; 0: one for each core
    """
    _check_math()
    actual = [following(response, after) or "" for response in responses]
    return check_in_processes("math", list(zip(actual, texts(answer, "answer"), strict=True)), seconds, workers)


@requires(_check_json)
@bounded()
def json(responses: Sequence[str], schema: Sequence[Any], *, seconds: float = 5.0, workers: int = 0) -> list[float]:
    """1 for each response that is valid JSON for its schema (``jsonschema``): its last fenced block, or the whole response.

    schema      a JSON schema, as a table or as text; draft 2020-12 unless it names another. References must stay inside it
    seconds     time limit for each response; a schema's pattern may take forever on some texts
    workers     number of processes; 0: one for each core
    """
    _check_json()
    rows = [(text, _schema(value, row)) for row, (text, value) in enumerate(zip(responses, schema, strict=True))]
    return check_in_processes("json", rows, seconds, workers)


def _schema(value: Any, row: int) -> Any:
    if isinstance(value, str):
        try:
            value = encoding.loads(value)
        except ValueError as error:
            raise SurefootError(f"schema (of response {row + 1}): is not JSON ({error}); correct the row") from None
    if not isinstance(value, (bool, Mapping)):
        raise SurefootError(
            f"schema (of response {row + 1}): is a {type(value).__name__}; it must be a table, or a table as JSON text"
        )
    return value
