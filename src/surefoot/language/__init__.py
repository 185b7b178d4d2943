"""Language: models that write. What is particular here is how responses are sampled and what they earn.

Optional packages are checked here before use, and the messages of ``transformers`` are silenced.
"""

import importlib.util
import logging as levels
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.errors import missing_extra


def require_transformers(purpose: str) -> None:
    """Raise SurefootError, naming the extra, if ``transformers`` is not installed."""
    require_package("transformers", purpose)


def require_package(package: str, purpose: str, extra: str = "language") -> None:
    """Raise SurefootError, naming the extra, if the package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise missing_extra(package, extra, purpose)


class _Quiet:
    """The loggers of ``transformers`` while they are silenced, by how many users."""

    def __init__(self) -> None:
        self.users, self.lock = 0, threading.Lock()
        self.before: list[tuple[levels.Logger, list[levels.Handler], bool]] = []
        self.bars = False

    def begin(self) -> None:
        from transformers.utils import logging

        with self.lock:
            self.users += 1
            if self.users > 1:
                return
            loggers = [levels.getLogger(name) for name in ("transformers", "huggingface_hub")]
            self.before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
            for logger in loggers:  # not their levels: each change of one empties the caches of all loggers of the process
                logger.handlers, logger.propagate = [levels.NullHandler()], False
            self.bars = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()

    def end(self) -> None:
        from transformers.utils import logging

        with self.lock:
            self.users -= 1
            if self.users:
                return
            for logger, handlers, propagate in self.before:
                logger.handlers, logger.propagate = handlers, propagate
            if self.bars:
                logging.enable_progress_bar()


_quiet = _Quiet()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence logs and progress bars of ``transformers``: errors are reported in one line here. Restored after the last user,
    since threads sample and score while another trains.
    """
    _quiet.begin()
    try:
        yield
    finally:
        _quiet.end()
