"""Requests to an HTTP server: JSON in, JSON out, retried while the server is down or busy; addresses and tokens are checked."""

import contextlib
import functools
import ipaddress
import os
import random
import re
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from surefoot.calls import DeadlineExceeded
from surefoot.errors import SurefootError, cause_of, require_package
from surefoot.store.public import RANDOM_VALUE, is_harmless

if TYPE_CHECKING:
    import ssl

    import httpx2

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""seconds before the first retry, doubled for each further one; and at most, unless the server requests more"""
RETRY_STATUS = (408, 425, 429)
"""statuses of a busy server, besides 5xx"""
EXCERPT = 80
"""characters of a response that a message quotes"""
RESUME, REPEAT = "then resume from the last checkpoint", "then repeat the command"
RESUME_CHANGED = "then resume with --allow-changes"
"""what to do once a reward is fixed: in a run, and in a command without checkpoints"""


@functools.cache
def _certificates(from_environment: bool) -> "ssl.SSLContext":
    """The certificates that are trusted, read once in a process: that takes longer than a request to this machine."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=from_environment)


class HttpClient:
    """Sends requests to one server.

    url         http or https
    token_from  environment variable with the token of the Authorization header: sent as ``Bearer`` and its value, or as the
                value alone when it names a scheme itself. Only the name is ever written
    retries     further attempts of a request that fails to connect, or gets status 408, 425, 429 or 5xx
    limit       the setting that limits the time of a request, such as ``reward.deadline=60 s``, for messages
    then        the end of every remedy: how to continue once the problem is fixed

    A server on this machine is never reached through a proxy from the environment. Redirects are not followed.
    """

    remedy = "fix the server"

    def __init__(
        self, url: str, *, token_from: str | None = None, retries: int = 5, limit: str = "the limit", then: str = RESUME
    ) -> None:
        self.url, self.token_from, self.retries, self.limit, self.then = url, token_from, retries, limit, then
        self.headers: dict[str, str] = {}
        self.secrets: tuple[str, ...] = ()

    def ready(self, purpose: str) -> None:
        """Raise SurefootError when the package is missing, or the URL or the token is missing or invalid."""
        require_package("httpx2", "language", purpose)
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

    def open(self, connections: int = 1) -> "httpx2.Client":
        """A client whose connections several threads may share; close it."""
        import httpx2

        remote = not is_local(self.url)
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        return httpx2.Client(headers=self.headers, verify=_certificates(remote), trust_env=remote, limits=limits)

    def request(
        self, client: "httpx2.Client", ends: float, body: bytes | None = None, *, url: str | None = None, method: str = "POST"
    ) -> "httpx2.Response":
        """The server's response to a request, retried until it succeeds, the retries are used up or the deadline is near.

        ends   the time by ``time.monotonic`` until which the response must be there

        Raises SurefootError when the server can't be reached or rejects the request; DeadlineExceeded when it is too slow.
        """
        import httpx2

        attempts, headers = 0, {} if body is None else {"Content-Type": "application/json"}
        while True:
            attempts, requested_wait = attempts + 1, 0.0
            left = ends - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded
            try:
                response = client.request(method, url or self.url, content=body, headers=headers, timeout=left)
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
                    raise SurefootError(f"{problem}{self.excerpt(response)}; {remedy}, {self.then}")
                requested_wait = retry_after(response.headers.get("Retry-After"))
            if attempts > self.retries:
                raise SurefootError(f"{problem}, {attempts} times; check that the server runs, {self.then}")
            pause = max(requested_wait, backoff(attempts))
            if time.monotonic() + pause >= ends:
                raise SurefootError(
                    f"{problem}, and waiting {pause:.3g} s for a retry would exceed {self.limit}; check the server, {self.then}"
                )
            time.sleep(pause)

    def excerpt(self, response: "httpx2.Response") -> str:
        """The beginning of a response, for messages; of an error in the form of OpenAI's API, its message."""
        with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
            return f" ({self._redacted(' '.join(str(response.json()['error']['message']).split()))[: 3 * EXCERPT]})"
        return f" ({self.shown(response.text)})" if response.text.strip() else ""

    def shown(self, text: str) -> str:
        """The beginning of a text that the server sent, for messages."""
        text = self._redacted(" ".join(text.split()))
        return f"{text[:EXCERPT]!r}{' …' if len(text) > EXCERPT else ''}"

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
            f"its query contains {name!r}, which may be a secret, and every run would store it; use token_from with an "
            "environment variable, and arguments for what is not secret"
        )
    if parts.fragment:
        return "has a fragment after '#', which is never sent; remove it"
    return ""


def secret_in(query: str) -> str | None:
    """The first name in a query that is not known to be harmless, or whose value looks generated; None without any."""
    for name, value in parse_qsl(query, keep_blank_values=True):
        if RANDOM_VALUE.search(name):  # a query that is nothing but the secret
            return "…"
        if not is_harmless(name) or RANDOM_VALUE.search(value):
            return name
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
    with contextlib.suppress(TypeError, ValueError):
        due = parsedate_to_datetime(text)
        return max(0.0, (due - datetime.now(due.tzinfo or UTC)).total_seconds())
    return 0.0
