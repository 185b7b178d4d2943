"""Gets rewards from an HTTP server: sends JSON, reads numbers, and retries when the server is busy.

A request has a reward function's arguments under the same names, so a server returns ``{"scores": function(**body)}``.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.errors import SurefootError, cause_of
from surefoot.language.http_client import RESUME, HttpClient
from surefoot.language.threads import in_threads

if TYPE_CHECKING:
    import httpx2


class Endpoint:
    """A function whose scores come from a server, for ``FunctionReward``.

    url, token_from, retries, then   of ``HttpClient``
    batch       responses per request
    at_once     requests at the same time
    deadline    seconds for all requests of a call, waits included
    arguments   sent with every request
    """

    remedy = HttpClient.remedy

    def __init__(
        self,
        url: str,
        *,
        batch: int = 64,
        at_once: int = 8,
        token_from: str | None = None,
        retries: int = 5,
        deadline: float = 60.0,
        arguments: Mapping[str, Any] | None = None,
        then: str = RESUME,
    ) -> None:
        limit = f"reward.deadline={deadline:g} s"
        self.client = HttpClient(url, token_from=token_from, retries=retries, limit=limit, then=then)
        self.batch, self.at_once, self.deadline = batch, at_once, deadline
        self.arguments, self.then = dict(arguments or {}), then
        self.__qualname__ = re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", url)[0])  # for messages

    @property
    def name(self) -> str:
        """The name of the reward's part: the last word of the URL's path."""
        words: list[str] = re.findall(r"[A-Za-z]\w*", self.__qualname__.partition("//")[2].partition("/")[2])
        return words[-1] if words else "url"

    def ready(self) -> None:
        """Raise SurefootError when the package is missing, or the URL or the token is missing or invalid."""
        self.client.ready("a reward from a url")

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]) -> list[Any]:
        """What the server returns for each response, unchecked.

        Raises SurefootError when the server can't be reached, rejects the request, or returns no list of the right length;
        DeadlineExceeded when it is too slow.
        """
        ends = time.monotonic() + self.deadline
        arguments = {"prompts": prompts, "responses": responses, **columns}
        if doubled := [name for name in self.arguments if name in arguments]:
            raise SurefootError(f"argument {doubled[0]!r} is also a column of the rows; remove one of them")
        bodies = [self._body(arguments, slice(start, start + self.batch)) for start in range(0, len(responses), self.batch)]
        with self.client.open(self.at_once) as connection:
            replies = in_threads(lambda body: self.client.request(connection, ends, body), bodies, self.at_once)
        counts = [min(self.batch, len(responses) - start) for start in range(0, len(responses), self.batch)]
        return [score for reply, count in zip(replies, counts, strict=True) for score in self._scores_in(reply, count)]

    def _body(self, arguments: Mapping[str, Sequence[Any]], rows: slice) -> bytes:
        body = {name: list(column[rows]) for name, column in arguments.items()} | self.arguments
        for name, values in body.items():
            try:
                json.dumps(values, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise SurefootError(f"{name!r} can't be sent as JSON ({cause_of(error)}); remove that column") from None
        return json.dumps(body).encode()

    def _scores_in(self, response: "httpx2.Response", count: int) -> list[Any]:
        expected = f'return a list of {count} scores, or {{"scores": [...]}}, {self.then}'
        try:
            content = response.json()
        except (ValueError, RecursionError):
            raise SurefootError(f"returned no JSON{self.client.excerpt(response)}; {expected}") from None
        scores = content.get("scores") if isinstance(content, dict) else content
        if not isinstance(scores, list):
            raise SurefootError(f"returned no scores{self.client.excerpt(response)}; {expected}")
        if len(scores) != count:
            raise SurefootError(f"returned {len(scores)} scores for {count} responses; {expected}")
        return scores
