"""Signals that end a program: they stop a run without losing work, and every handler is afterwards the one from before.

This module imports no torch.
"""

import _thread
import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from surefoot.errors import Interrupted

GRACE_SECONDS = 25
"""how long an iteration may take to finish after a first signal"""
SOON = 0.3
"""seconds after which Ctrl-C is acknowledged, unless the run has ended"""
INSISTING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})
"""a second one of these means: at once. The others come in series: SIGHUP twice from a closed terminal, SIGXCPU every second"""
STOPPING = INSISTING | {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
"""signals whose default ends a program, and which are sent to stop it; not faults and alarms"""
_libc = ctypes.CDLL(None)


class SignalHandler:
    """Of the signals ``STOPPING``, a first one sets ``stop_requested``. A second one raises Interrupted at once if both insist,
    and so does an iteration that takes over ``GRACE_SECONDS`` to finish.

    SIGINT and SIGTERM are handled unless they are ignored, the others where their handler is the default one. A handler of the
    program is called when the run has ended. Outside the main thread, where Python allows no handlers, this does nothing.
    """

    def __init__(self, acknowledge: Callable[[], None] = lambda: None) -> None:
        self.acknowledge = acknowledge
        """called from another thread when Ctrl-C has not ended the run soon"""
        self.stop_requested = False
        self._first = 0
        """the signal that came first"""
        self._insistent = 0
        self._late = False
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._give_back: dict[int, Callable[[], object]] = {}

    def __enter__(self) -> "SignalHandler":
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if self._is_free(number):
                    self._give_back[number] = take(number, self._on_signal)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with self._ending:
            self._over.set()
        before = {number: give_back() for number, give_back in self._give_back.items()}.get(self._first)
        if callable(before) and before is not signal.default_int_handler:
            signal.raise_signal(self._first)

    def _is_free(self, number: int) -> bool:
        before = signal.getsignal(number)
        if is_foreign(number) or before is signal.SIG_IGN:
            return False
        own = isinstance(getattr(before, "__self__", None), SignalHandler)  # of a run around this one
        return own or number in (signal.SIGINT, signal.SIGTERM) or before is signal.SIG_DFL

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._insistent += number in INSISTING
        if self._late:
            raise Interrupted(f"the iteration or evaluation took over {GRACE_SECONDS} s to finish")
        if self._insistent > 1:
            raise Interrupted("stopped at once")
        if not self.stop_requested:
            self.stop_requested, self._first = True, number
            _thread.start_new_thread(self._end_late, (number,))  # threading.Thread needs a lock that may be held here

    def _end_late(self, number: int) -> None:
        """Acknowledge the signal, and send it again after ``GRACE_SECONDS``; an alarm would need the program's one timer."""
        if not self._over.wait(SOON) and number == signal.SIGINT:
            self.acknowledge()
        self._over.wait(GRACE_SECONDS)
        with self._ending:
            if not self._over.is_set():
                self._late = True
                signal.pthread_kill(threading.main_thread().ident or 0, number)


def take(number: int, handler: Callable[[int, FrameType | None], None]) -> Callable[[], Any]:
    """Handle a signal; the function that is returned gives it back, and returns the handler from before.

    Also the one of C code behind Python's. A handler that only C code knows can't be given back: see ``is_foreign``.
    """
    action = _action(number)
    before: Any = signal.signal(number, handler)

    def give_back() -> Any:
        signal.signal(number, before)
        _libc.sigaction(number, action, None)
        return before

    return give_back


def is_foreign(number: int) -> bool:
    """Whether a signal has a handler that Python does not know, as in a program that embeds Python, or by ``faulthandler``."""
    known = signal.getsignal(number)
    if callable(known) and not isinstance(known, signal.Handlers):
        return False
    address = int.from_bytes(_action(number).raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)
    return known is None or address not in (signal.SIG_DFL, signal.SIG_IGN)


def _action(number: int) -> "ctypes.Array[ctypes.c_char]":
    """How the kernel handles a signal: C's ``struct sigaction``, which begins with the address of the handler."""
    action = ctypes.create_string_buffer(1024)
    _libc.sigaction(number, None, action)
    return action
