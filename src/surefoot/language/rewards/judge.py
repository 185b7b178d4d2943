"""A generative judge: asks an OpenAI-compatible server about each response, and reads a score in what it writes.

With ``against``, the judge compares the response with another answer. It is asked twice, in both orders, because judges prefer
a place; the score is the share of the two that the response wins, a tie counting half (Zheng et al. 2023, arXiv 2306.05685).
"""

import inspect
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.errors import SurefootError
from surefoot.language.data.rows import message_text
from surefoot.language.rewards.endpoint import Endpoint
from surefoot.recipes.rewards import JUDGE_FIELDS, JudgeSettings, placeholders
from surefoot.verifiers.numbers import NUMERAL, plain_number

if TYPE_CHECKING:
    import httpx2

REMEMBERED = 100_000
"""answers that are kept, so that the same question is asked once"""
SCALE = r"(?:/|out of)[\s*_]*[0-9]+(?:\.[0-9]+)?|on a scale (?:of|from) [0-9]+(?:\s*(?:to|[-–])\s*[0-9]+)?"
"""what may follow a score and is no part of it: /10, out of 10, on a scale from 0 to 10"""
NUMBER = rf"(?<![\w.,/])({NUMERAL})(?!,?[0-9])(?:[\s*_(,]*(?:{SCALE}))?"
"""the default pattern of a score"""
PLACE = r"\b(?:1|2|tie)\b"
"""the default pattern of a comparison"""
WINS = {"1": 1.0, "first": 1.0, "a": 1.0, "2": 0.0, "second": 0.0, "b": 0.0, "tie": 0.5}
"""what a comparison's verdict is worth for the answer in the first place"""


class Judge(Endpoint):
    """A function for ``FunctionReward`` whose scores a language model writes.

    url        of the server's chat completions
    settings   the question, the model, and where the score stands in its answer
    tolerated  share of the responses of a call whose answers may have no score; those count as missing
    options    as of ``Endpoint``; ``arguments`` are sent with every request, such as {"temperature": 0}

    The same question is asked once. Requests run concurrently.
    """

    name = "judge"
    remedy = "fix the server"

    def __init__(self, url: str, settings: JudgeSettings, *, tolerated: float = 0.1, **options: Any) -> None:
        super().__init__(url, at_once=settings.in_flight, **options)
        self.settings, self.tolerated = settings, tolerated
        default = NUMBER if settings.against is None else PLACE
        self.pattern = re.compile(settings.pattern or default, re.IGNORECASE)
        self.answers: dict[bytes, str] = {}
        """answers by the body of the request"""
        own = [name for name in placeholders(settings.prompt) if name not in JUDGE_FIELDS]
        columns = sorted({*own, *([] if settings.against is None else [settings.against])})
        needed = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("prompts", "responses", *columns)]
        self.__signature__ = inspect.Signature([*needed, inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD)])

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """A score for each response; None if the judge's answer has none.

        Raises SurefootError when the server fails, or more than the tolerated share of the answers has no score;
        DeadlineExceeded when it is too slow.
        """
        questions = [
            self._questions(prompt, response, {name: column[row] for name, column in columns.items()})
            for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        bodies = [[self._request(question) for question in of_row] for of_row in questions]
        if new := list(dict.fromkeys(body for of_row in bodies for body in of_row if body not in self.answers)):
            replies = self._replies(new, time.monotonic() + self.deadline)
            self.answers |= dict(zip(new, map(self._answer, replies), strict=True))
        scores = [self._score([self.answers[body] for body in of_row]) for of_row in bodies]
        unread = [row for row, score in enumerate(scores) if score is None]
        if len(unread) > self.tolerated * len(scores) + 1e-9:
            first = next(self.answers[body] for body in bodies[unread[0]] if self._verdict(self.answers[body]) is None)
            count = f"{len(unread)} of {len(scores)} responses"
            raise SurefootError(
                f"the judge's answers have no score ({self._place_of_score()}) for {count}, the first: "
                f"{self.client.shown(first)}; make judge.prompt ask for the score alone, or change judge.pattern, {self.then}"
            )
        for body in list(self.answers)[: max(0, len(self.answers) - REMEMBERED)]:  # the oldest
            del self.answers[body]
        return scores

    def begin(self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]) -> None:
        """Ask about a response that is finished while others are sampled; a call with the same row uses the answer."""
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            for question in self._questions(prompt, response, {name: column[row] for name, column in columns.items()}):
                if (body := self._request(question)) not in self.answers:
                    self.begin_request(body)

    def _questions(self, prompt: Any, response: str, row: Mapping[str, Any]) -> list[str]:
        """The prompt of the judge about one response; of a comparison, both orders."""
        asked = prompt if isinstance(prompt, str) else "\n".join(f"{each['role']}: {message_text(each)}" for each in prompt)
        fields = {**row, "prompt": asked, "response": response}
        if self.settings.against is None:
            return [filled(self.settings.prompt, fields)]
        other = str(row[self.settings.against])
        return [
            filled(self.settings.prompt, {**fields, "first": first, "second": second})
            for first, second in ((response, other), (other, response))
        ]

    def _request(self, question: str) -> bytes:
        body = {"model": self.settings.model, "messages": [{"role": "user", "content": question}], **self.arguments}
        return json.dumps(body, sort_keys=True).encode()

    def _answer(self, response: "httpx2.Response") -> str:
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, RecursionError, LookupError, TypeError):
            raise SurefootError(
                f"returned no chat completion{self.client.excerpt(response)}; use the address of /v1/chat/completions, "
                f"{self.then}"
            ) from None
        return content if isinstance(content, str) else ""

    def _score(self, answers: Sequence[str]) -> float | None:
        """The score in the answer about a response; of a comparison, the mean of both orders."""
        verdicts = [self._verdict(answer) for answer in answers]
        if any(verdict is None for verdict in verdicts):
            return None
        if self.settings.against is None:
            return as_number(str(verdicts[0]))
        first, second = (WINS[str(verdict).lower()] for verdict in verdicts)
        return (first + 1 - second) / 2

    def _place_of_score(self) -> str:
        """Where the score stands in an answer, in words."""
        settings = self.settings
        if settings.key or settings.pattern:
            return f"key {settings.key!r}" if settings.key else f"match of {settings.pattern!r}"
        return "a number" if settings.against is None else "1, 2 or tie"

    def _verdict(self, answer: str) -> str | None:
        """The last match of the pattern, or the value of the key; None if there is none that can be read."""
        if self.settings.key is not None:
            verdict = json_value(answer, self.settings.key)
        else:
            matches = list(self.pattern.finditer(answer))  # reasoning comes first
            verdict = (matches[-1][1] if matches[-1].groups() else matches[-1][0]) if matches else None
            if verdict is not None and not self.settings.pattern:
                verdict = plain_number(verdict)
        if verdict is None:
            return None
        known = as_number(verdict) is not None if self.settings.against is None else verdict.lower() in WINS
        return verdict if known else None


def filled(template: str, fields: Mapping[str, Any]) -> str:
    """The template with its {names} replaced, in one pass: braces in a response stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: str(fields[match[1]]) if match[1] in fields else match[0], template)


def json_value(answer: str, key: str) -> str | None:
    """The value of a key in the JSON object that an answer contains; None without one."""
    start, end = answer.find("{"), answer.rfind("}")
    try:
        value = json.loads(answer[start : end + 1])[key]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return None if isinstance(value, bool | dict | list) or value is None else str(value)


def as_number(text: str) -> float | None:
    """The number that a text is; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None
