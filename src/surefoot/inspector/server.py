"""The inspector's server: read-only, for one person on one machine.

It listens on 127.0.0.1. The address that the command prints holds a token that works once, for a cookie. Every request must
come with that cookie, name this host and, where it names an origin, this origin; so neither another user nor another page in
the same browser gets anything. Nothing that is sent loads anything from elsewhere.
"""

import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surefoot.errors import SurefootError
from surefoot.files import made_from
from surefoot.inspector.connections import IDLE, Connection
from surefoot.inspector.store import NotThere, Store, described

KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
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


class Guard:
    """Lets through what reads, from this machine's browser, with the cookie; the first visit brings the token for it.

    port      that the server listens on
    entered   is called when the token was used
    """

    def __init__(self, app: ASGIApp, port: int, token: str, entered: Callable[[], None]) -> None:
        self.app, self.port, self.tell_entered = app, port, entered
        self.token: str | None = token
        self.secret = secrets.token_urlsafe(32)
        self.cookie = f"surefoot_{port}"
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = [(name, value) for name, value in message["headers"] if name.decode("latin-1").lower() not in HEADERS]
                message["headers"] = [*known, *((name.encode(), value.encode()) for name, value in HEADERS.items())]
            await send(message)

        await (self.refusal(scope) or self.app)(scope, receive, with_headers)

    def refusal(self, scope: Scope) -> Response | None:
        """What is answered instead; None where the request may pass."""
        headers, request = Headers(scope=scope), Request(scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return PlainTextResponse("wrong host\n", 403)
        if any(origin not in {f"http://{host}" for host in self.hosts} for origin in origins):
            return PlainTextResponse("wrong origin\n", 403)
        elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")  # the latter: another port
        if elsewhere and scope["path"] != "/enter":  # there a file may lead to, and the token is what counts
            return PlainTextResponse("wrong origin\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this only shows\n", 405, {"allow": "GET, HEAD"})
        known = same(request.cookies.get(self.cookie, ""), self.secret)
        if scope["path"] == "/enter":
            return self.entered(request.query_params.get("token", ""), known, elsewhere)
        return None if known else PlainTextResponse("use the address that surefoot inspect printed, once\n", 403)

    def entered(self, token: str, known: bool, elsewhere: bool) -> Response:
        """A token for a cookie, once."""
        # A strict cookie does not go along a redirect that began elsewhere, in a file for one, but to where our own page leads.
        inside = HTMLResponse('<!doctype html><meta http-equiv="refresh" content="0;url=/">') if elsewhere else None
        answer: Response = inside or RedirectResponse("/", 303)
        if known:
            return answer
        if self.token is None or not same(token, self.token):
            return PlainTextResponse("this address was used already or is wrong; start surefoot inspect again\n", 403)
        self.token = None
        answer.set_cookie(self.cookie, self.secret, httponly=True, samesite="strict", path="/")
        self.tell_entered()
        return answer


def same(given: str, wanted: str) -> bool:
    """Whether two secrets are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def application(store: Store, port: int, token: str, entered: Callable[[], None] = lambda: None) -> ASGIApp:
    """The whole of it; ``entered`` is called when the token was used."""

    def number(request: Request, name: str) -> int:
        return int(request.path_params[name])

    def runs(request: Request) -> Any:
        found = store.runs()
        names = list(dict.fromkeys(name for run in found for name in run["metrics"]))
        return {"runs": found, "metrics": described(names)}

    def curves(request: Request) -> Any:
        query = request.query_params
        try:
            chosen = [int(run) for run in query["runs"].split(",")]
            return store.curves(
                chosen,
                [name for name in query["metrics"].split(",") if name][:60],
                float(query.get("from", "-inf")),
                float(query.get("to", "inf")),
                int(query.get("points", "800")),
                min(1.0, max(0.0, float(query.get("smoothing", "0")))),
            )
        except (KeyError, ValueError, OverflowError) as error:
            if isinstance(error, SurefootError):
                raise
            raise NotThere(
                "curves: runs=0,1 and metrics=kl,entropy are needed; from, to, points and smoothing are numbers"
            ) from None

    def rows(request: Request) -> Any:
        return store.traces.rows(number(request, "run"), number(request, "steps"))

    def row(request: Request) -> Any:
        start = request.query_params.get("from", "0")
        return store.traces.row(
            number(request, "run"), number(request, "steps"), number(request, "row"), int(start) if start.isdecimal() else 0
        )

    def clip(request: Request) -> Any:
        return store.traces.clip_samples(number(request, "run"), number(request, "steps"), number(request, "number") - 1)

    def find(request: Request) -> Any:
        return store.traces.find(number(request, "run"), request.path_params["what"])

    def samples(request: Request) -> Any:
        return store.samples(number(request, "run"), number(request, "steps"))

    def video(request: Request) -> Path:
        return store.video(number(request, "run"), number(request, "number"))

    def film(request: Request) -> Path:
        return store.traces.film(number(request, "run"), number(request, "steps"), number(request, "row"))

    told: dict[str, Callable[[Request], Any]] = {
        "/api/runs": runs,
        "/api/curves": curves,
        "/api/runs/{run:int}/traces/{steps:int}": rows,
        "/api/runs/{run:int}/traces/{steps:int}/rows/{row:int}": row,
        "/api/runs/{run:int}/traces/{steps:int}/passes/{number:int}": clip,
        "/api/runs/{run:int}/find/{what}": find,
        "/api/runs/{run:int}/samples/{steps:int}": samples,
    }
    routes = [Route(path, as_json(tell)) for path, tell in told.items()]
    routes += [
        Route("/api/runs/{run:int}/videos/{number:int}", as_film(video)),
        Route("/api/runs/{run:int}/traces/{steps:int}/rows/{row:int}/film", as_film(film)),
    ]
    routes += [Route(f"/{'' if name == 'index.html' else name}", as_file(file)) for name, file in front_end().items()]
    return Guard(Starlette(routes=routes), port, token, entered)


def front_end() -> dict[str, Path]:
    """Every file that is sent, by its name; there are no others."""
    folder = Path(str(resources.files("surefoot.inspector"))) / "static"
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.suffix in KINDS}


def as_json(tell: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """An answer in JSON; what is not there is a 404 with one line."""

    async def answer(request: Request) -> Response:
        try:
            with made_from(Path(request.url.path), "the run's files are damaged or of another version"):
                return JSONResponse(await run_in_threadpool(tell, request))
        except (SurefootError, FileNotFoundError) as error:
            said = str(error) if isinstance(error, SurefootError) else "it is not there any more"
            return JSONResponse({"error": said}, 404)

    return answer


def as_film(find: Callable[[Request], Path]) -> Callable[[Request], Any]:
    """An MP4, of which a browser may ask for parts."""

    async def answer(request: Request) -> Response:
        try:
            return FileResponse(await run_in_threadpool(find, request), media_type="video/mp4")
        except (SurefootError, FileNotFoundError) as error:
            said = str(error) if isinstance(error, SurefootError) else "it is not there any more"
            return JSONResponse({"error": said}, 404)

    return answer


def as_file(file: Path) -> Callable[[Request], Any]:
    """A file of the front end."""

    async def answer(request: Request) -> Response:
        return Response(file.read_bytes(), media_type=KINDS[file.suffix])

    return answer


def serve(runs: list[Path], port: int, ready: Callable[[str], None], entered: Callable[[], None] = lambda: None) -> None:
    """Show some runs until Ctrl-C.

    port      0 for any that is free
    ready     is told the address, when it can be visited
    entered   is called when a browser has used it

    Raises SurefootError when a path is no run, or the port is taken.
    """
    store = Store(runs)
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise SurefootError(f"--port {port}: can't be listened on ({error.strerror}); choose another, or 0 for any") from None
    port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    config = uvicorn.Config(
        application(store, port, token, entered),
        log_level="warning",
        access_log=False,
        lifespan="off",
        http=Connection,
        ws="none",
        timeout_keep_alive=IDLE,
        server_header=False,
    )
    threading.Thread(target=store.read_ahead, daemon=True).start()
    ready(f"http://127.0.0.1:{port}/enter?token={token}")
    with listening:
        uvicorn.Server(config).run(sockets=[listening])
