"""Gets rewards from an HTTP server: sends JSON, reads numbers, and retries when the server is busy.

A request has a reward function's arguments under the same names, so a server returns ``{"scores": function(**body)}``.
"""

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from surefoot.calls import DeadlineExceeded, Threads, in_threads
from surefoot.errors import SurefootError, cause_of
from surefoot.language.http_client import RESUME, HttpClient

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
        self.threads, self.lock, self.model = Threads(at_once), threading.Lock(), None
        self.early: dict[bytes, Future[httpx2.Response]] = {}
        """the replies to requests that were sent while others were sampled, until a call takes them"""
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
        bodies = self._bodies({"prompts": prompts, "responses": responses, **columns}, len(responses))
        replies = self._replies(bodies, ends)
        counts = [min(self.batch, len(responses) - start) for start in range(0, len(responses), self.batch)]
        return [score for reply, count in zip(replies, counts, strict=True) for score in self._scores_in(reply, count)]

    def begin(self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]) -> None:
        """Request the score of a response that is finished while others are sampled; a call with the same row uses it.

        Only where each response is a request of its own: a server may compare those of one request.
        """
        if self.batch == 1:
            for body in self._bodies({"prompts": prompts, "responses": responses, **columns}, len(responses)):
                self.begin_request(body)

    def begin_request(self, body: bytes) -> None:
        """Send a request, unless that is done."""

        def request() -> "httpx2.Response":
            with self.client.open() as connection:
                return self.client.request(connection, time.monotonic() + self.deadline, body)

        with self.lock:
            if body not in self.early:
                self.early[body] = self.threads.begin(request)

    def _taken(self, body: bytes, ends: float) -> "httpx2.Response | None":
        """The reply to a request that was sent before, which is forgotten then; None if it was not sent or failed."""
        with self.lock:
            future = self.early.pop(body, None)
        if future is None:
            return None
        wait([future], max(0.0, ends - time.monotonic()))
        if not future.done():
            raise DeadlineExceeded
        return None if future.exception() else future.result()

    def _replies(self, bodies: Sequence[bytes], ends: float) -> "list[httpx2.Response]":
        """The response to each request, which may have been sent before; what failed then is sent again."""
        replies = {body: self._taken(body, ends) for body in dict.fromkeys(bodies)}
        if missing := [body for body in bodies if replies[body] is None]:
            with self.client.open(self.at_once) as connection:
                sent = in_threads(lambda body: self.client.request(connection, ends, body), missing, self.at_once)
            later = iter(sent)
            return [next(later) if replies[body] is None else replies[body] for body in bodies]  # type: ignore[misc]
        return [reply for body in bodies if (reply := replies[body]) is not None]

    def _bodies(self, arguments: Mapping[str, Sequence[Any]], count: int) -> list[bytes]:
        if doubled := [name for name in self.arguments if name in arguments]:
            raise SurefootError(f"argument {doubled[0]!r} is also a column of the rows; remove one of them")
        return [self._body(arguments, slice(start, start + self.batch)) for start in range(0, count, self.batch)]

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
        model = content.get("model") if isinstance(content, dict) else None
        self.model = self.model or model
        if model != self.model:
            raise SurefootError(
                f"has the model {model!r} now, and had {self.model!r} before; start the server with that one, {self.then}"
            )
        if not isinstance(scores, list):
            raise SurefootError(f"returned no scores{self.client.excerpt(response)}; {expected}")
        if len(scores) != count:
            raise SurefootError(f"returned {len(scores)} scores for {count} responses; {expected}")
        return scores
