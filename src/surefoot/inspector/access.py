"""Control access to the inspector: a token that works once, a cookie, checks of every request, and time limits.

The arguments of a program are visible to every user of a machine, and the inspector's address contains a token. So the browser
opens a file instead, which only its owner can read. It leads to the address and is deleted once a browser has used it, as in
Jupyter.
"""

import asyncio
import contextlib
import hmac
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from surefoot.errors import SurefootError

REQUEST_SECONDS = 10.0
"""seconds from the start of a connection or a later request until that request is complete"""
KEPT_OPEN = 5
"""seconds that an idle connection stays open"""
INVITATION = 600
"""seconds for which the address for another browser works"""
MOST_TOKENS = 20
"""unused addresses at a time"""
PAGE = """<!doctype html>
<meta charset="utf-8"><meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0;url={address}">
<title>Surefoot</title><a href="{address}">Open the inspector</a>
"""
FORWARD = '<!doctype html><link rel="icon" href="/icon.svg"><meta http-equiv="refresh" content="0;url=/">'
"""a page without an icon makes a slow browser request /favicon.ico"""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class LoginTokens:
    """Tokens that work once each, in exchange for the cookie. The first one works until the server ends."""

    def __init__(self, first: str) -> None:
        self.valid_until = {first: float("inf")}

    def issue(self) -> str:
        """A new token, which works for ``INVITATION`` seconds. Raises SurefootError if too many wait for their browser."""
        now = time.monotonic()
        self.valid_until = {token: until for token, until in self.valid_until.items() if until > now}
        if len(self.valid_until) >= MOST_TOKENS:
            raise SurefootError(f"there are {MOST_TOKENS} unused addresses; use one, or wait {INVITATION // 60} minutes")
        token = secrets.token_urlsafe(24)
        self.valid_until[token] = now + INVITATION
        return token

    def redeem(self, token: str) -> bool:
        """Whether a token is valid; it is not from now on."""
        known = next((each for each in self.valid_until if equal_secrets(token, each)), "")
        return self.valid_until.pop(known, 0.0) > time.monotonic()


class Guard:
    """Pass on only requests that come from a page of this server and have the cookie, and that read or are known to write.

    port      the port of the server
    tokens    each works once, in exchange for the cookie
    entered   called when a token has been used
    writes    the paths that take POST
    """

    def __init__(
        self, app: ASGIApp, port: int, tokens: LoginTokens, entered: Callable[[], None], writes: Collection[str] = ()
    ) -> None:
        self.app, self.port, self.on_entered, self.writes = app, port, entered, writes
        self.tokens = tokens
        self.secret = secrets.token_urlsafe(32)
        self.cookie = f"surefoot_{port}"
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [(name, value) for name, value in message["headers"] if name.decode("latin-1").lower() not in HEADERS]
                message["headers"] = [*others, *((name.encode(), value.encode()) for name, value in HEADERS.items())]
            await send(message)

        await (self.rejection(scope) or self.app)(scope, receive, with_headers)

    def rejection(self, scope: Scope) -> Response | None:
        """The response to a rejected request; None if the request may pass."""
        headers, request = Headers(scope=scope), Request(scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return PlainTextResponse(f"wrong host: this page is 127.0.0.1:{self.port}, also at the near end of a tunnel\n", 403)
        if any(origin not in {f"http://{host}" for host in self.hosts} for origin in origins):
            return PlainTextResponse("wrong origin\n", 403)
        elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")  # same-site: another port
        if elsewhere and scope["path"] != "/enter":  # a file may link to /enter, which checks the token
            return PlainTextResponse("wrong origin\n", 403)
        if scope["method"] == "POST" and scope["path"] in self.writes:
            if origins != [f"http://{hosts[0]}"] or headers.get("content-type") != "application/json":
                return PlainTextResponse("wrong origin\n", 403)
        elif scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this can't be changed here\n", 405, {"allow": "GET, HEAD"})
        logged_in = equal_secrets(request.cookies.get(self.cookie, ""), self.secret)
        if scope["path"] == "/enter":
            return self.enter(request.query_params.get("token", ""), logged_in, elsewhere)
        return None if logged_in else self._closed("this browser has no access: use the address that the command printed")

    def enter(self, token: str, logged_in: bool, elsewhere: bool) -> Response:
        """Set the cookie in exchange for the token, once."""
        # Browsers send no strict cookie after a redirect that began elsewhere, such as in a file, but do after a page of ours.
        inside = HTMLResponse(FORWARD) if elsewhere else None
        answer: Response = inside or RedirectResponse("/", 303)
        if logged_in:
            return answer
        if not self.tokens.redeem(token):
            return self._closed("this address is wrong, too old or was already used: start the command again")
        answer.set_cookie(self.cookie, self.secret, httponly=True, samesite="strict", path="/")
        self.on_entered()
        return answer

    def _closed(self, what: str) -> Response:
        invite = ", or use the button Invite in the browser that used it" if "/api/invite" in self.writes else ""
        return PlainTextResponse(f"{what}{invite}\n", 403)


def equal_secrets(actual: str, expected: str) -> bool:
    """Whether two secrets are equal, compared in constant time."""
    return hmac.compare_digest(actual.encode("utf-8", "replace"), expected.encode())


class Connection(H11Protocol):
    """HTTP/1.1 that closes a connection if a request doesn't become complete in time; uvicorn limits only idle time."""

    patience = REQUEST_SECONDS
    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif self.deadline is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.deadline = self.loop.call_later(self.patience, self.transport.close)

    def _stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _unsupported_upgrade_warning(self) -> None:
        """Print nothing: a request for a WebSocket gets plain HTTP, and no package is missing."""


class LoginFile:
    """An HTML file that redirects to an address, until it is deleted.

    folder   folder of the file; default: the home folder, because sandboxed browsers can't read other temporary folders
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.path: Path | None = None

    def write(self, address: str) -> str | None:
        """Write the file and return its URI; None if no file can be written."""
        for folder in [self.folder] if self.folder else [os.path.expanduser("~"), None]:
            with contextlib.suppress(OSError):
                handle, name = tempfile.mkstemp(".html", "surefoot-", folder)  # readable only by its owner
                self.path = Path(name).absolute()
                try:
                    with os.fdopen(handle, "w", encoding="utf-8") as file:
                        file.write(PAGE.format(address=address))
                except OSError:  # the disk is full
                    self.delete()
                    raise
                return self.path.as_uri()
        return None

    def delete_on_signal(self) -> None:
        """Also delete the file when a signal ends the program. Call this from the main thread."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is ignored
                signal.signal(number, self._killed)

    def _killed(self, number: int, frame: FrameType | None) -> None:
        self.delete()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def delete(self) -> None:
        """Delete the file, if it exists."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
