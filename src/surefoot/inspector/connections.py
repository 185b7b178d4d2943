"""Connections of the inspector's server: each is given up where a request does not become whole in time."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0
"""seconds from when a connection opens, or a later request on it begins, until that request is whole"""
IDLE = 5
"""seconds that an answered connection stays open for a next request"""


class Connection(H11Protocol):
    """HTTP/1.1. Between requests uvicorn has a limit of its own, ``IDLE``; for one that never becomes whole it has none."""

    patience = PATIENCE
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
        """Nothing: a page that asks for a WebSocket gets plain HTTP, and no package is missing."""
