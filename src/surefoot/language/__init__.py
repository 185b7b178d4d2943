"""Language: models that write. What is particular here is how responses are sampled and what they earn.

The messages of ``transformers`` are silenced here.
"""

import logging as levels
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_lock, _users, _before = threading.Lock(), 0, ExitStack()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence logs and progress bars of ``transformers``: errors are reported in one line here. Restored after the last user,
    since threads sample and score while another trains.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _silence()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _before.close()


def _silence() -> None:
    """Silence them until ``_before`` is closed."""
    from transformers.utils import logging

    for name in ("transformers", "huggingface_hub"):
        logger = levels.getLogger(name)
        _before.callback(vars(logger).update, handlers=logger.handlers, propagate=logger.propagate)
        # Not its level: each change of one empties the caches of all loggers of the process.
        logger.handlers, logger.propagate = [levels.NullHandler()], False
    if logging.is_progress_bar_enabled():
        _before.callback(logging.enable_progress_bar)
        logging.disable_progress_bar()
