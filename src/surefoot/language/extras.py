"""The packages of the extra ``language``: asked for by name where they are used, and quiet there."""

import importlib.util
import logging as levels
from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.errors import missing_extra


def require_transformers(purpose: str) -> None:
    """Raise the one line that names the extra, unless ``transformers`` is there."""
    require_package("transformers", purpose)


def require_package(package: str, purpose: str, extra: str = "language") -> None:
    """Raise the one line that names the extra, unless the package is there."""
    if importlib.util.find_spec(package) is None:
        raise missing_extra(package, extra, purpose)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Neither bars nor reports of ``transformers`` within: what is wrong is said in one line by us. Restored after."""
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
