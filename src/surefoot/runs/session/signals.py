"""End a run after SIGTERM or Ctrl-C without losing work."""

import signal
import threading
from types import FrameType, TracebackType

from surefoot.errors import Interrupted

GRACE_SECONDS = 25
"""how long an iteration may take to finish after a first signal"""


class SignalHandler:
    """SIGTERM and Ctrl-C: a first signal sets ``stop_requested``; a second one raises Interrupted at once, and so
    does an iteration that takes over ``GRACE_SECONDS`` to finish.

    Work since the last checkpoint is repeated exactly on resume. Outside the main thread, where Python allows
    no handlers, this does nothing.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "SignalHandler":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        if self.stop_requested and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            raise Interrupted("stopped at once; the run resumes from its last checkpoint")
        self.stop_requested = True
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._on_timeout)
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def _on_timeout(self, number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"the iteration took over {GRACE_SECONDS} s to finish; the run resumes from its last checkpoint")
