"""Language: models that write. What is particular here is how responses are sampled and what they earn.

Optional packages are checked here before use, and the messages of ``transformers`` are silenced.
"""

import importlib.util
import logging as levels
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


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence logs and progress bars of ``transformers``: errors are reported in one line here. Restored after."""
    from transformers.utils import logging

    loggers = [levels.getLogger(name) for name in ("transformers", "huggingface_hub")]
    before, bars = [logger.level for logger in loggers], logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(levels.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        if bars:
            logging.enable_progress_bar()
