"""SIGTERM and Ctrl-C: finish the iteration, save, stop; at most 25 seconds later in any case."""

import signal
import threading
from types import FrameType, TracebackType

from surefoot.errors import Interrupted

PATIENCE = 25


class StopOnSignal:
    """Within ``with``, a first signal sets ``requested``; a second, or 25 seconds, raises Interrupted at once.

    Interrupted loses nothing either: the run resumes exactly from its last checkpoint. Outside the main thread, where
    Python allows no handlers, this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave back
        if self.requested and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise Interrupted("stopped at once; the run resumes from its last checkpoint")
        self.requested = True
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._too_long)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def _too_long(self, number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"the iteration took over {PATIENCE} s to finish; the run resumes from its last checkpoint")
