"""A reward that is asked for over HTTP: JSON there, numbers back, again where that may help, and one line where it does not.

A request holds what a function would get, under the same names, so the server's side is ``{"scores": function(**body)}``.
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
from surefoot.language.extras import require_package
from surefoot.language.rewards.deadline import Overdue

if TYPE_CHECKING:
    import httpx2

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""seconds before the first further try, which double from try to try; and at most, where the server asks for no more"""
TRY_AGAIN = (408, 425, 429)
"""answers of a server that is busy, besides 5xx"""
SHOWN = 80
"""characters of an answer that still make a line"""
RESUME, REPEAT = "then resume from the last checkpoint", "then repeat the command"
"""what remains to be done once a reward is mended: in a run, and in a command that has no checkpoint"""
SECRET = {"key", "apikey", "token", "secret", "password", "passwd", "pwd", "auth", "authorization", "credential", "credentials"}
SECRET |= {"sig", "signature", "sas", "jwt", "bearer", "accesskey", "accesstoken", "subscriptionkey"}
"""words that name a secret in the query of an address"""
HARMLESS = re.compile(r"\b(?:cache|column|foreign|group|index|order|partition|public|row|sort)[\W_]*key\b")
"""names of keys that open nothing"""
RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{20,}")
"""a value that nobody chose: so long a run of letters and digits, with both of them"""


class Endpoint:
    """A function whose numbers come from a server, for ``FunctionReward``.

    url         http or https
    batch       responses per request; requests follow each other
    token_from  environment variable with the token of the Authorization header: ``Bearer`` and its value, or its value alone
                where that names a scheme itself. Nothing but the name is ever written
    retries     further tries of a request that does not get through, or is answered with 408, 425, 429 or 5xx
    deadline    seconds that all requests of a call may take, waiting included
    arguments   sent with every request
    then        what messages say is to be done once all is mended

    A server on this machine is never asked through a proxy that the environment names. Redirections are not followed.
    """

    mend = "mend what answers there"

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
    def mended(self) -> str:
        """What is to be done where an answer is wrong."""
        return f"{self.mend}, {self.then}"

    @property
    def name(self) -> str:
        """For a part of the reward: the last word of the address."""
        words: list[str] = re.findall(r"[A-Za-z]\w*", self.__qualname__.partition("//")[2].partition("/")[2])
        return words[-1] if words else "url"

    def ready(self) -> None:
        """Raise SurefootError where nothing can be asked: the package, the address or the token is missing."""
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
                raise SurefootError(f"token_from={self.token_from!r}: its value can't be sent: it must be printable ASCII")
            if not (self.url.startswith("https:") or is_local(self.url)):
                raise SurefootError(
                    f"token_from={self.token_from!r}: would send the token unencrypted to another machine; give an https:// url"
                )
            self.secrets = (token, token.rpartition(" ")[2])
            self.headers = {"Authorization": token if " " in token else f"Bearer {token}"}

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]) -> list[Any]:
        """What the server gives for each response, whatever that is.

        Raises SurefootError when it can't be reached, refuses, answers no list or one of another length; Overdue when it is
        slow.
        """
        import httpx2

        ends = time.monotonic() + self.deadline
        given = {"prompts": prompts, "responses": responses, **columns}
        if doubled := [name for name in self.arguments if name in given]:
            raise SurefootError(f"argument {doubled[0]!r} is a column of the rows too; take it from one of them")
        bodies = [self._body(given, slice(start, start + self.batch)) for start in range(0, len(responses), self.batch)]
        found: list[Any] = []
        with httpx2.Client(headers=self.headers, trust_env=not is_local(self.url)) as client:
            for body in bodies:
                count = min(self.batch, len(responses) - len(found))
                found += self._read(self._asked(client, body, ends), count)
        return found

    def _body(self, given: Mapping[str, Sequence[Any]], rows: slice) -> bytes:
        body = {name: list(column[rows]) for name, column in given.items()} | self.arguments
        for name, values in body.items():
            try:
                json.dumps(values, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise SurefootError(f"{name!r} can't be sent as JSON ({cause_of(error)}); leave that column out") from None
        return json.dumps(body).encode()

    def _asked(self, client: "httpx2.Client", body: bytes, ends: float) -> "httpx2.Response":
        """The answer to a request, at last."""
        import httpx2

        tried = 0
        while True:
            tried, asked = tried + 1, 0.0
            left = ends - time.monotonic()
            if left <= 0:
                raise Overdue
            try:
                answer = client.post(self.url, content=body, headers={"Content-Type": "application/json"}, timeout=left)
            except httpx2.TimeoutException:
                raise Overdue from None
            except httpx2.TransportError as error:
                trouble = f"can't be reached ({self._hidden(cause_of(error))})"
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise SurefootError(
                    f"gave no answer that can be read ({self._hidden(cause_of(error))}); {self.mended}"
                ) from None
            else:
                if answer.is_success:
                    return answer
                trouble = self._hidden(f"answered {answer.status_code} {answer.reason_phrase}".rstrip())
                if answer.status_code < 500 and answer.status_code not in TRY_AGAIN:
                    raise SurefootError(f"{trouble}{self._said(answer)}; {self._remedy(answer.status_code)}, {self.then}")
                asked = seconds_asked(answer.headers.get("Retry-After"))
            if tried > self.retries:
                raise SurefootError(f"{trouble}, {tried} times; see whether the server runs, {self.then}")
            pause = max(asked, waiting(tried))
            if time.monotonic() + pause >= ends:
                raise SurefootError(
                    f"{trouble}, and waiting {pause:.3g} s to try again would pass reward.deadline={self.deadline:g} s; "
                    f"see to the server, {self.then}"
                )
            time.sleep(pause)

    def _read(self, answer: "httpx2.Response", count: int) -> list[Any]:
        """The scores in an answer."""
        form = f'a list of {count} scores, or {{"scores": [...]}}'
        try:
            found = answer.json()
        except (ValueError, RecursionError):
            raise SurefootError(f"answered what is no JSON{self._said(answer)}; it must answer {form}; {self.mended}") from None
        scores = found.get("scores") if isinstance(found, dict) else found
        if not isinstance(scores, list):
            raise SurefootError(f"answered no scores{self._said(answer)}; it must answer {form}; {self.mended}")
        if len(scores) != count:
            raise SurefootError(f"answered {len(scores)} scores for {count} responses, and not one for each; {self.mended}")
        return scores

    def _said(self, answer: "httpx2.Response") -> str:
        text = self._hidden(" ".join(answer.text.split()))
        return f" ({text[:SHOWN]!r}{' …' if len(text) > SHOWN else ''})" if text else ""

    def _remedy(self, status: int) -> str:
        if status in (401, 403):
            return (
                "name the environment variable with its token by token_from" if self.token_from is None else "renew its token"
            )
        if 300 <= status < 400:
            return "give the address that it redirects to"
        return "mend the address, or what answers there"

    def _hidden(self, text: str) -> str:
        """Without the token, should a server or an error repeat it."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def url_complaint(url: str) -> str:
    """What is wrong with an address, without repeating a password; "" where nothing is."""
    try:
        parts = urlsplit(url)
        host, secret, _ = parts.hostname, parts.username or parts.password, parts.port
    except ValueError as error:
        return f"is no address ({error}); give one such as http://localhost:8000/score"
    if secret:
        return "holds a user or a password, which would be written into every run; name an environment variable by token_from"
    if parts.scheme not in ("http", "https") or not host:
        return "is no address of a server; give one such as http://localhost:8000/score"
    if (name := secret_in(parts.query)) is not None:
        return (
            f"its query holds {name!r}, which looks like a secret and would be written into every run; name an environment "
            "variable by token_from, and what is no secret in arguments"
        )
    if parts.fragment:
        return "has a part behind '#', which no server gets; leave it out"
    return ""


def secret_in(query: str) -> str | None:
    """The first name in a query that is a word for a secret, or whose value looks like one; None where there is none."""
    for name, value in parse_qsl(query, keep_blank_values=True):
        words = HARMLESS.sub("", re.sub(r"([a-z\d])([A-Z])", r"\1 \2", name).lower())
        named = SECRET & {*re.findall(r"[a-z]+", words), re.sub(r"[^a-z]", "", words)}
        if named or RANDOM.search(value):
            return name if not RANDOM.search(name) else "…"
        if not value and RANDOM.search(name):  # a query that is nothing but the secret
            return "…"
    return None


def is_local(url: str) -> bool:
    """Whether an address means this machine."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def waiting(tried: int) -> float:
    """Seconds before another try: twice as many each time, and at random between half of that and all of it.

    Ranks that failed together don't come back together. Nothing that is learned depends on this number.
    """
    return float(min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(tried - 1, 30))) * random.SystemRandom().uniform(0.5, 1.0)


def seconds_asked(header: str | None) -> float:
    """What ``Retry-After`` asks for, in seconds or as a date (RFC 9110, 10.2.3); 0 where it says nothing that can be read."""
    text = (header or "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        due = parsedate_to_datetime(text)
        return max(0.0, (due - datetime.now(due.tzinfo or UTC)).total_seconds())
    except (TypeError, ValueError):
        return 0.0
