"""The inspector's server, for one person on one machine.

It listens on 127.0.0.1. The address that the command prints contains a token, which works once, in exchange for a cookie. Every
request must have that cookie, this host and, if it has an origin, this origin. So other users and other pages in the same
browser get nothing. The pages load nothing from elsewhere.

Requests read, except for a few, which must have this origin: an address for another browser; with a table of runs also their
tags and their trash.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from surefoot.errors import SurefootError
from surefoot.files import made_from, parsed, read_bytes
from surefoot.inspector.access import INVITATION, KEPT_OPEN, Connection, Guard, LoginTokens
from surefoot.inspector.catalog import Catalog, is_run
from surefoot.inspector.folders import RunFolders, metric_descriptions

if TYPE_CHECKING:
    from surefoot.inspector.traces import Traces

MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
LARGEST_BODY = 65_536
"""bytes of a request"""
LazyTraces = Callable[[], "Traces"]
"""imports torch and returns the traces; the same object every time"""


def lazy_traces(folders: RunFolders) -> LazyTraces:
    """The traces of the runs, whose module is imported at the first call."""

    @cache
    def traces() -> "Traces":
        from surefoot.inspector.traces import Traces

        return Traces(folders)

    return traces


def application(
    folders: RunFolders,
    port: int,
    token: str,
    entered: Callable[[], None] = lambda: None,
    traces: LazyTraces | None = None,
    catalog: Catalog | None = None,
) -> ASGIApp:
    """The ASGI application; ``entered`` is called when a token has been used."""
    tokens = LoginTokens(token)

    def invite(request: Request, content: dict[str, Any]) -> Any:
        return {"address": f"http://{request.headers['host']}/enter?token={tokens.issue()}", "minutes": INVITATION // 60}

    routes = [Route("/api/invite", write_route(invite), methods=["POST"])]
    routes += [*_run_routes(folders, catalog), *_trace_routes(traces or lazy_traces(folders))]
    routes += _catalog_routes(catalog) if catalog is not None else []
    writes = {route.path for route in routes if route.methods and "POST" in route.methods}
    routes += [Route(f"/{'' if name == 'index.html' else name}", static_route(file)) for name, file in front_end().items()]
    return Guard(starlette(routes), port, tokens, entered, writes)


def _run_routes(folders: RunFolders, catalog: Catalog | None) -> list[Route]:
    def runs(request: Request) -> Any:
        numbers = None
        if catalog is not None:
            places = [catalog.place(name) for name in dict.fromkeys(request.query_params.getlist("run"))]
            numbers = [folders.open(place.path, place.name) for place in places]
        tables = folders.runs(numbers)
        names = list(dict.fromkeys(name for run in tables for name in run["metrics"]))
        return {"runs": tables, "metrics": metric_descriptions(names), "catalog": catalog is not None}

    def curves(request: Request) -> Any:
        query = request.query_params
        try:
            numbers = [int(run) for run in query["runs"].split(",")]
            names = [name for name in query["metrics"].split(",") if name][:60]
            start, end = float(query.get("from", "-inf")), float(query.get("to", "inf"))
            points, smoothing = int(query.get("points", "800")), min(1.0, max(0.0, float(query.get("smoothing", "0"))))
            return folders.curves(numbers, names, start, end, points, smoothing)
        except (KeyError, ValueError, OverflowError) as error:
            if isinstance(error, SurefootError):
                raise
            raise SurefootError(
                "curves: needs runs=0,1 and metrics=kl,entropy; from, to, points and smoothing must be numbers"
            ) from None

    return [
        Route("/api/runs", json_route(runs)),
        Route("/api/curves", json_route(curves)),
        Route("/api/runs/{run:int}/findings", json_route(by_path(folders.findings))),
        Route("/api/runs/{run:int}/recipe", json_route(by_path(folders.recipe))),
        Route("/api/runs/{run:int}/labels", json_route(by_path(folders.labels))),
        Route("/api/runs/{run:int}/profile", json_route(by_path(folders.profile))),
        Route("/api/runs/{run:int}/samples/{steps:int}", json_route(by_path(folders.samples))),
        Route("/api/runs/{run:int}/videos/{number:int}", video_route(by_path(folders.video))),
    ]


def _trace_routes(traces: LazyTraces) -> list[Route]:
    """Traces: their rows, clip samples, outlying steps and videos."""

    def row(request: Request) -> Any:
        start = request.query_params.get("from", "0")
        return traces().row(**request.path_params, start=int(start) if start.isdecimal() else 0)

    trace, one = "/api/runs/{run:int}/traces/{steps:int}", "/rows/{index:int}"
    return [
        Route(trace, json_route(by_path(lambda **path: traces().rows(**path)))),
        Route(f"{trace}{one}", json_route(row)),
        Route(f"{trace}/passes/{{number:int}}", json_route(by_path(lambda **path: traces().clip_samples(**path)))),
        Route("/api/runs/{run:int}/clipped", json_route(by_path(lambda **path: traces().most_clipped(**path)))),
        Route("/api/runs/{run:int}/find/{what}", json_route(by_path(lambda **path: traces().find(**path)))),
        Route(f"{trace}{one}/video", video_route(by_path(lambda **path: traces().video(**path)))),
    ]


def _catalog_routes(catalog: Catalog) -> list[Route]:
    """The table of runs, their tags and their trash."""

    def diff(request: Request) -> Any:
        from surefoot.diagnostics.differences import compare_runs  # imports PyTorch

        a, b = (catalog.place(request.query_params.get(name, "")).path for name in "ab")
        return compare_runs(a, b).to_json()

    writes: dict[str, Callable[[str, dict[str, Any]], Any]] = {
        "tags": lambda run, sent: {"tags": catalog.set_tags(run, sent.get("tags"))},
        "delete": lambda run, sent: {"id": catalog.delete(run)},
        "restore": lambda run, sent: {"path": catalog.restore(run)},
    }

    def write(act: Callable[[str, dict[str, Any]], Any]) -> Callable[[Request], Any]:
        return write_route(lambda request, sent: act(str(sent.get("run")), sent))

    return [
        Route("/api/table", json_route(lambda request: catalog.table())),
        Route("/api/diff", json_route(diff)),
        *(Route(f"/api/{name}", write(act), methods=["POST"]) for name, act in writes.items()),
    ]


def front_end() -> dict[str, Path]:
    """The files of the front end, by name; the server sends no other files."""
    folder = Path(str(resources.files("surefoot.inspector"))) / "static"
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.suffix in MEDIA_TYPES}


def by_path(get: Callable[..., Any]) -> Callable[[Request], Any]:
    """Call a function with the parts of a request's path, by their names."""
    return lambda request: get(**request.path_params)


def json_route(get: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """An endpoint that returns JSON."""

    def endpoint(request: Request) -> Response:
        with made_from(Path(request.url.path), "the run's files are damaged or of another version"):
            return JSONResponse(get(request))

    return endpoint


def write_route(act: Callable[[Request, dict[str, Any]], Any]) -> Callable[[Request], Any]:
    """An endpoint that takes a JSON object and returns another, or 400 with an error of one line."""

    async def endpoint(request: Request) -> Response:
        try:
            return JSONResponse(await run_in_threadpool(act, request, await json_body(request)))
        except SurefootError as error:
            return JSONResponse({"error": str(error)}, 400)

    return endpoint


async def json_body(request: Request, largest: int = LARGEST_BODY) -> dict[str, Any]:
    """The JSON object of a request. Raises SurefootError if it has none, or is larger than so many bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest:
            raise SurefootError(f"the request is larger than {largest:,} bytes; send less at a time")
    try:
        content = parsed(body.decode())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise SurefootError("the request has no JSON object")
    return content


def video_route(get: Callable[[Request], Path]) -> Callable[[Request], Any]:
    """An endpoint that returns an MP4; a browser may request parts of it."""
    return lambda request: FileResponse(get(request), media_type="video/mp4")


def starlette(routes: list[Route]) -> Starlette:
    """An application whose errors are 404, with one line."""

    def not_found(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error) if isinstance(error, SurefootError) else "the file no longer exists"}, 404)

    return Starlette(routes=routes, exception_handlers={SurefootError: not_found, FileNotFoundError: not_found})


def static_route(file: Path) -> Callable[[Request], Any]:
    """An endpoint that returns a file of the front end."""
    return lambda _: Response(read_bytes(file), media_type=MEDIA_TYPES[file.suffix])


def serve(paths: list[Path], port: int, ready: Callable[[str], None], entered: Callable[[], None] = lambda: None) -> None:
    """Serve the inspector until Ctrl-C.

    paths     runs, which are shown together; with a folder of runs among them, a table of all
    port      0 for any free port
    ready     called with the address when it can be opened
    entered   called when a browser has used the address

    Raises SurefootError if a path is neither, or the port is in use.
    """
    catalog = Catalog(paths) if any(path.is_dir() and not is_run(path) and any(path.iterdir()) for path in paths) else None
    folders = RunFolders([] if catalog else paths)
    traces = lazy_traces(folders)
    threading.Thread(target=_prepare, args=(folders, catalog, traces), daemon=True).start()
    listen(lambda at, token: application(folders, at, token, entered, traces, catalog), port, ready)


def listen(
    make: Callable[[int, str], ASGIApp], port: int, ready: Callable[[str], None], path: str = "enter?token={token}"
) -> None:
    """Serve an application on 127.0.0.1 until Ctrl-C.

    make    makes it from the port and the first token
    ready   called with the address when it can be opened
    path    of that address

    Raises SurefootError if the port is in use.
    """
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise SurefootError(f"--port {port}: can't be opened ({error.strerror}); choose another, or 0 for any") from None
    port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    config = uvicorn.Config(
        make(port, token),
        log_level="warning",
        access_log=False,
        lifespan="off",
        http=Connection,
        ws="none",
        timeout_keep_alive=KEPT_OPEN,
        server_header=False,
    )
    ready(f"http://127.0.0.1:{port}/{path.format(token=token)}")
    with listening:
        uvicorn.Server(config).run(sockets=[listening])


def _prepare(folders: RunFolders, catalog: Catalog | None, traces: LazyTraces) -> None:
    """Read all metrics in advance; once the browser has curves, import what traces need."""
    for columns in folders.columns:
        columns.read_all()
    while catalog is not None and catalog.reads_on():
        time.sleep(0)
    folders.curves_sent.wait()
    time.sleep(1)  # drawing the curves needs the processor, too
    traces()
