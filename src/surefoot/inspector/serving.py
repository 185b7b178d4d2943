"""A model for other programs: JSON over HTTP on 127.0.0.1, for those that have the token.

Requests wait in a queue of limited length. They are answered in one thread, as many at once as wait and fit together.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from surefoot.errors import SurefootError, cause_of
from surefoot.inspector.access import equal_secrets
from surefoot.inspector.server import json_body

LARGEST = 16 * 2**20
"""bytes of a request"""
Job = tuple[dict[str, Any], Callable[[Any], object] | None, "asyncio.Future[Any]"]
"""a request; what gets the pieces of its answer, if it is streamed; its answer"""


def application(model: Any, token: str, most: int) -> ASGIApp:
    """The ASGI application of a model of ``language.served``; ``most`` requests may wait."""
    waiting, working = asyncio.Queue[Job](most), list[asyncio.Task[None]]()

    async def ask(request: Request) -> Response:
        if not equal_secrets(request.headers.get("authorization", ""), f"Bearer {token}"):
            return failure(401, "the header Authorization has not the token of this server")
        if not working:
            working.append(asyncio.create_task(work(model, waiting)))
        try:
            body = await json_body(request, LARGEST)
            if (name := body.get("model")) not in (None, model.name, model.version):
                return failure(404, f"model={name!r:.60}: this server has {model.version}; start it with that model")
            asked = await run_in_threadpool(model.read, request.url.path, body)
            future, later, pieces = asyncio.Future[Any](), asyncio.get_running_loop().call_soon_threadsafe, asyncio.Queue[Any]()
            write = (lambda piece: later(pieces.put_nowait, piece)) if asked.get("stream") else None
            waiting.put_nowait((asked, write, future))
            if write is None:
                return JSONResponse(await future)
            future.add_done_callback(lambda _: later(pieces.put_nowait, None))
            return StreamingResponse(events(pieces, future), media_type="text/event-stream")
        except asyncio.QueueFull:
            return failure(429, f"{most} requests wait; send fewer at a time", {"retry-after": "1"})
        except SurefootError as error:
            return failure(400, str(error))
        except Exception as error:
            return failure(500, cause_of(error))

    about = {"id": model.name, "object": "model", "owned_by": "surefoot", "version": model.version}
    return Starlette(
        routes=[
            *(Route(path, ask, methods=["POST"]) for path in model.paths),
            Route("/health", lambda _: JSONResponse({"model": model.version, "waiting": waiting.qsize(), "most": most})),
            Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [about]})),
        ]
    )


async def work(model: Any, waiting: "asyncio.Queue[Job]") -> None:
    """Answer requests; those that wait, and have the same key, together."""
    while True:
        groups: dict[Any, list[Job]] = {}
        for job in [await waiting.get(), *(waiting.get_nowait() for _ in range(waiting.qsize()))]:
            groups.setdefault(job[0]["key"] if job[1] is None else id(job), []).append(job)
        for group in groups.values():
            await answer(model, group)


async def answer(model: Any, jobs: Sequence[Job]) -> None:
    """Answer requests together; each alone if that fails, since one of them may be at fault."""
    request, write, future = jobs[0]
    try:
        if write is None:
            answers = await run_in_threadpool(model.answer, [job[0] for job in jobs])
        else:
            answers = [await run_in_threadpool(model.stream, request, write)]
        for (_, _, later), each in zip(jobs, answers, strict=True):
            if not later.cancelled():  # its client is still there
                later.set_result(each)
    except Exception as error:
        for job in jobs if len(jobs) > 1 else ():
            await answer(model, [job])
        if not future.done():
            future.set_exception(error)


async def events(pieces: "asyncio.Queue[Any]", future: "asyncio.Future[Any]") -> AsyncIterator[str]:
    """The pieces of an answer as server-sent events."""
    while (piece := await pieces.get()) is not None:
        yield f"data: {json.dumps(piece)}\n\n"
    if error := future.exception():
        yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
    yield "data: [DONE]\n\n"


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error of one line, in the form of OpenAI's API."""
    return JSONResponse({"error": {"message": message, "type": "error", "code": status}}, status, headers)
