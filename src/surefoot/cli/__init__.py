"""The ``surefoot`` command."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.terminal import phase


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import PyTorch and what needs it, which stay until the process ends.

    Python's garbage collector would look at their half a million objects again and again: while they are imported, while a run
    goes on, and when the process ends. That is half a second or more of CPU time.
    """
    if "torch" in sys.modules:  # a program calls the command; its objects may not last
        yield
        return
    gc.disable()
    try:
        with phase("importing PyTorch"):
            yield
    finally:
        gc.freeze()
        gc.enable()
