"""Gets rewards from an HTTP server: sends JSON, reads numbers, and retries when the server is busy.

A request has a reward function's arguments under the same names, so a server returns ``{"scores": function(**body)}``.
"""

import ipaddress
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from surefoot.errors import SurefootError, cause_of
from surefoot.language import require_package
from surefoot.language.deadline import DeadlineExceeded

if TYPE_CHECKING:
    import httpx2

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""seconds before the first retry, doubled for each further one; and at most, unless the server requests more"""
RETRY_STATUS = (408, 425, 429)
"""statuses of a busy server, besides 5xx"""
EXCERPT = 80
"""characters of a response that a message quotes"""
RESUME, REPEAT = "then resume from the last checkpoint", "then repeat the command"
"""what to do once a reward is fixed: in a run, and in a command without checkpoints"""
SECRET = {"key", "apikey", "token", "secret", "password", "passwd", "pwd", "auth", "authorization", "credential", "credentials"}
SECRET |= {"sig", "signature", "sas", "jwt", "bearer", "accesskey", "accesstoken", "subscriptionkey"}
"""words that name a secret in the query of a URL"""
HARMLESS = re.compile(r"\b(?:cache|column|foreign|group|index|order|partition|public|row|sort)[\W_]*key\b")
"""names of keys that are no secret"""
RANDOM_VALUE = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{20,}")
"""a generated value: a run of 20 or more letters and digits, with at least one of each"""


class Endpoint:
    """A function whose scores come from a server, for ``FunctionReward``.

    url         http or https
    batch       responses per request; requests are sent one after another
    token_from  environment variable with the token of the Authorization header: sent as ``Bearer`` and its value, or as the
                value alone when it names a scheme itself. Only the name is ever written
    retries     further attempts of a request that fails to connect, or gets status 408, 425, 429 or 5xx
    deadline    seconds for all requests of a call, waits included
    arguments   sent with every request
    then        the end of every remedy: how to continue once the problem is fixed

    A server on this machine is never reached through a proxy from the environment. Redirects are not followed.
    """

    remedy = "fix the server"

    def __init__(
        self,
        url: str,
        *,
        batch: int = 64,
        token_from: str | None = None,
        retries: int = 5,
        deadline: float = 60.0,
        arguments: Mapping[str, Any] | None = None,
        then: str = RESUME,
    ) -> None:
        self.url, self.batch, self.token_from, self.retries, self.deadline = url, batch, token_from, retries, deadline
        self.arguments, self.then = dict(arguments or {}), then
        self.headers: dict[str, str] = {}
        self.secrets: tuple[str, ...] = ()
        self.__qualname__ = re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", url)[0])  # for messages

    @property
    def name(self) -> str:
        """The name of the reward's part: the last word of the URL's path."""
        words: list[str] = re.findall(r"[A-Za-z]\w*", self.__qualname__.partition("//")[2].partition("/")[2])
        return words[-1] if words else "url"

    def ready(self) -> None:
        """Raise SurefootError when the package is missing, or the URL or the token is missing or invalid."""
        require_package("httpx2", "a reward from a url")
        if complaint := url_complaint(self.url):
            raise SurefootError(complaint)
        if self.token_from is not None:
            token = os.environ.get(self.token_from, "").strip()
            if not token:
                raise SurefootError(
                    f"token_from={self.token_from!r}: this environment variable is not set; set it to the token"
                )
            if not (token.isascii() and token.isprintable()):
                raise SurefootError(
                    f"token_from={self.token_from!r}: its value can't be sent; use printable ASCII characters only"
                )
            if not (self.url.startswith("https:") or is_local(self.url)):
                raise SurefootError(
                    f"token_from={self.token_from!r}: would send the token unencrypted to another machine; use an https:// url"
                )
            self.secrets = (token, token.rpartition(" ")[2])
            self.headers = {"Authorization": token if " " in token else f"Bearer {token}"}

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]) -> list[Any]:
        """What the server returns for each response, unchecked.

        Raises SurefootError when the server can't be reached, rejects the request, or returns no list of the right length;
        DeadlineExceeded when it is too slow.
        """
        import httpx2

        ends = time.monotonic() + self.deadline
        arguments = {"prompts": prompts, "responses": responses, **columns}
        if doubled := [name for name in self.arguments if name in arguments]:
            raise SurefootError(f"argument {doubled[0]!r} is also a column of the rows; remove one of them")
        bodies = [self._body(arguments, slice(start, start + self.batch)) for start in range(0, len(responses), self.batch)]
        scores: list[Any] = []
        with httpx2.Client(headers=self.headers, trust_env=not is_local(self.url)) as client:
            for body in bodies:
                count = min(self.batch, len(responses) - len(scores))
                scores += self._scores_in(self._post(client, body, ends), count)
        return scores

    def _body(self, arguments: Mapping[str, Sequence[Any]], rows: slice) -> bytes:
        body = {name: list(column[rows]) for name, column in arguments.items()} | self.arguments
        for name, values in body.items():
            try:
                json.dumps(values, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise SurefootError(f"{name!r} can't be sent as JSON ({cause_of(error)}); remove that column") from None
        return json.dumps(body).encode()

    def _post(self, client: "httpx2.Client", body: bytes, ends: float) -> "httpx2.Response":
        """The server's response to a request, retried until it succeeds, the retries are used up or the deadline is near."""
        import httpx2

        attempts = 0
        while True:
            attempts, requested_wait = attempts + 1, 0.0
            left = ends - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded
            try:
                response = client.post(self.url, content=body, headers={"Content-Type": "application/json"}, timeout=left)
            except httpx2.TimeoutException:
                raise DeadlineExceeded from None
            except httpx2.TransportError as error:
                problem = f"can't be reached ({self._redacted(cause_of(error))})"
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise SurefootError(
                    f"returned an unreadable response ({self._redacted(cause_of(error))}); {self.remedy}, {self.then}"
                ) from None
            else:
                if response.is_success:
                    return response
                problem = self._redacted(f"returned {response.status_code} {response.reason_phrase}".rstrip())
                if response.status_code < 500 and response.status_code not in RETRY_STATUS:
                    remedy = self._status_remedy(response.status_code)
                    raise SurefootError(f"{problem}{self._excerpt(response)}; {remedy}, {self.then}")
                requested_wait = retry_after(response.headers.get("Retry-After"))
            if attempts > self.retries:
                raise SurefootError(f"{problem}, {attempts} times; check that the server runs, {self.then}")
            pause = max(requested_wait, backoff(attempts))
            if time.monotonic() + pause >= ends:
                raise SurefootError(
                    f"{problem}, and waiting {pause:.3g} s for a retry would exceed reward.deadline={self.deadline:g} s; "
                    f"check the server, {self.then}"
                )
            time.sleep(pause)

    def _scores_in(self, response: "httpx2.Response", count: int) -> list[Any]:
        expected = f'return a list of {count} scores, or {{"scores": [...]}}, {self.then}'
        try:
            content = response.json()
        except (ValueError, RecursionError):
            raise SurefootError(f"returned no JSON{self._excerpt(response)}; {expected}") from None
        scores = content.get("scores") if isinstance(content, dict) else content
        if not isinstance(scores, list):
            raise SurefootError(f"returned no scores{self._excerpt(response)}; {expected}")
        if len(scores) != count:
            raise SurefootError(f"returned {len(scores)} scores for {count} responses; {expected}")
        return scores

    def _excerpt(self, response: "httpx2.Response") -> str:
        text = self._redacted(" ".join(response.text.split()))
        return f" ({text[:EXCERPT]!r}{' …' if len(text) > EXCERPT else ''})" if text else ""

    def _status_remedy(self, status: int) -> str:
        if status in (401, 403):
            return "set token_from to the environment variable with its token" if self.token_from is None else "renew its token"
        if 300 <= status < 400:
            return "use the url that it redirects to"
        return "correct the url, or fix the server"

    def _redacted(self, text: str) -> str:
        """The text without the token, in case a server or an error repeats it."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def url_complaint(url: str) -> str:
    """What is wrong with a URL, without repeating a password; "" if nothing is."""
    try:
        parts = urlsplit(url)
        host, secret, _ = parts.hostname, parts.username or parts.password, parts.port
    except ValueError as error:
        return f"is no valid address ({error}); use one such as http://localhost:8000/score"
    if secret:
        return "contains a user or a password, which every run would store; use token_from with an environment variable"
    if parts.scheme not in ("http", "https") or not host:
        return "is no address of a server; use one such as http://localhost:8000/score"
    if (name := secret_in(parts.query)) is not None:
        return (
            f"its query contains {name!r}, which looks like a secret that every run would store; use token_from with an "
            "environment variable, and arguments for what is not secret"
        )
    if parts.fragment:
        return "has a fragment after '#', which is never sent; remove it"
    return ""


def secret_in(query: str) -> str | None:
    """The first name in a query that is a word for a secret, or whose value looks like one; None without any."""
    for name, value in parse_qsl(query, keep_blank_values=True):
        words = HARMLESS.sub("", re.sub(r"([a-z\d])([A-Z])", r"\1 \2", name).lower())
        named = SECRET & {*re.findall(r"[a-z]+", words), re.sub(r"[^a-z]", "", words)}
        if named or RANDOM_VALUE.search(value):
            return name if not RANDOM_VALUE.search(name) else "…"
        if not value and RANDOM_VALUE.search(name):  # a query that is nothing but the secret
            return "…"
    return None


def is_local(url: str) -> bool:
    """Whether a URL means this machine."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def backoff(attempts: int) -> float:
    """Seconds before a retry: doubled for each attempt, times a random factor from 0.5 to 1.

    Ranks that failed together don't retry together. No number of the training depends on the wait.
    """
    return float(min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(attempts - 1, 30))) * random.SystemRandom().uniform(0.5, 1.0)


def retry_after(header: str | None) -> float:
    """The wait that ``Retry-After`` requests, in seconds or as a date (RFC 9110, 10.2.3); 0 if it can't be read."""
    text = (header or "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        due = parsedate_to_datetime(text)
        return max(0.0, (due - datetime.now(due.tzinfo or UTC)).total_seconds())
    except (TypeError, ValueError):
        return 0.0
