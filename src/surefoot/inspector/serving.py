"""A model for other programs: JSON over HTTP on 127.0.0.1, for those that have the token.

Requests wait in a queue of limited length. One thread answers them, as many at once as wait and fit together.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
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
TOGETHER = 256
"""requests that are answered at once"""
Job = tuple[dict[str, Any], Callable[[Any], object] | None, "Future[Any]"]
"""a request; what gets the pieces of its answer, if it is streamed; its answer"""


class Waiting:
    """The requests that wait for a model of ``language.served``, and the thread that answers them."""

    def __init__(self, model: Any) -> None:
        self.model, self.changed = model, threading.Condition()
        self.jobs: deque[Job] = deque()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, job: Job) -> None:
        """Let a request wait for its answer."""
        with self.changed:
            self.jobs.append(job)
            self.changed.notify()

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.jobs)
                first = self.jobs.popleft()
                others = [job for job in self.jobs if first[1] is None is job[1] and job[0]["key"] == first[0]["key"]]
                taken = [first, *others[: TOGETHER - 1]]
                self.jobs = deque(job for job in self.jobs if all(job is not other for other in taken))
            if alive := [job for job in taken if job[2].set_running_or_notify_cancel()]:
                self._answer(alive)

    def _answer(self, jobs: Sequence[Job]) -> None:
        request, write, future = jobs[0]
        try:
            answers = self.model.answer([job[0] for job in jobs]) if write is None else [self.model.stream(request, write)]
            for job, answer in zip(jobs, answers, strict=True):
                job[2].set_result(answer)
        except Exception as error:
            if len(jobs) == 1:
                return future.set_exception(error)
            for job in jobs:  # one of them is at fault
                self._answer([job])


def application(model: Any, token: str, most: int) -> ASGIApp:
    """The ASGI application of a model; ``most`` requests may wait."""
    waiting = Waiting(model)

    async def ask(request: Request) -> Response:
        if not equal_secrets(request.headers.get("authorization", ""), f"Bearer {token}"):
            return failure(401, "the header Authorization has not the token of this server")
        try:
            body = await json_body(request, LARGEST)
            if (name := body.get("model")) not in (None, model.name, model.version):
                return failure(404, f"model={name!r:.60}: this server has {model.version}; start it with that model")
            asked, future = await run_in_threadpool(model.read, request.url.path, body), Future[Any]()
            if len(waiting.jobs) >= most:
                return failure(429, f"{most} requests wait; send fewer at a time", {"retry-after": "1"})
            if not asked.get("stream"):
                waiting.add((asked, None, future))
                return JSONResponse(await asyncio.wrap_future(future))
            return StreamingResponse(events(waiting, asked, future), media_type="text/event-stream")
        except SurefootError as error:
            return failure(400, str(error))
        except Exception as error:
            return failure(500, cause_of(error))

    about = {"id": model.name, "object": "model", "owned_by": "surefoot", "version": model.version}
    return Starlette(
        routes=[
            *(Route(path, ask, methods=["POST"]) for path in model.paths),
            Route("/health", lambda _: JSONResponse({"model": model.version, "waiting": len(waiting.jobs), "most": most})),
            Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [about]})),
        ]
    )


async def events(waiting: Waiting, request: dict[str, Any], future: "Future[Any]") -> AsyncIterator[str]:
    """The pieces of an answer as server-sent events."""
    pieces, later = asyncio.Queue[Any](), asyncio.get_running_loop().call_soon_threadsafe
    future.add_done_callback(lambda _: later(pieces.put_nowait, None))
    waiting.add((request, lambda piece: later(pieces.put_nowait, piece), future))
    while (piece := await pieces.get()) is not None:
        yield f"data: {json.dumps(piece)}\n\n"
    if error := future.exception():
        yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
    yield "data: [DONE]\n\n"


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error of one line, in the form of OpenAI's API."""
    return JSONResponse({"error": {"message": message, "type": "error", "code": status}}, status, headers)
