"""What packages of the extra ``verifiers`` judge, in processes that may be killed: mathematics, and JSON against a schema."""

import json as encoding
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.errors import SurefootError
from surefoot.verifiers.answers import texts
from surefoot.verifiers.extract import following
from surefoot.verifiers.killable import check_package, judged
from surefoot.verifiers.ready import bounded, ready


def _math_ready() -> None:
    check_package("math_verify", "math-verify", "math")


def _json_ready() -> None:
    check_package("jsonschema", "jsonschema", "json")


@ready(_math_ready)
@bounded()
def math(
    responses: Sequence[str], answer: Sequence[Any], *, after: str = "", seconds: float = 5.0, workers: int = 0
) -> list[float]:
    """1 for each response whose final formula or number equals the answer as mathematics, by ``math-verify``.

    answer      LaTeX or plain, such as ``\\sqrt{2}/2``, ``(1, 2)``, or a whole solution with its answer boxed
    after       look only behind the last of this text; "": anywhere
    seconds     for each response; one that takes longer, such as 9**9**9**9, is wrong
    workers     processes at a time; 0: one for each core
    """
    _math_ready()
    found = [following(response, after) or "" for response in responses]
    return judged("math", list(zip(found, texts(answer, "answer"), strict=True)), seconds, workers)


@ready(_json_ready)
@bounded()
def json(responses: Sequence[str], schema: Sequence[Any], *, seconds: float = 5.0, workers: int = 0) -> list[float]:
    """1 for each response that is JSON and fits its schema (``jsonschema``): its last fenced block, else all of it.

    schema      a JSON schema, as a table or as text; draft 2020-12 unless it names another. References lead to its own parts
    seconds     for each response; patterns of a schema may take forever on some texts
    workers     processes at a time; 0: one for each core
    """
    _json_ready()
    rows = [(text, _schema(given, row)) for row, (text, given) in enumerate(zip(responses, schema, strict=True))]
    return judged("json", rows, seconds, workers)


def _schema(given: Any, row: int) -> Any:
    if isinstance(given, str):
        try:
            given = encoding.loads(given)
        except ValueError as error:
            raise SurefootError(f"schema (of response {row + 1}): is not JSON ({error})") from None
    if not isinstance(given, (bool, Mapping)):
        raise SurefootError(
            f"schema (of response {row + 1}): is a {type(given).__name__}; it must be a table, or JSON text of one"
        )
    return given
