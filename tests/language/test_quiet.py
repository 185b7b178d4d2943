"""``quiet_transformers`` silences messages and progress bars of ``transformers`` only while it is active."""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

pytest.importorskip("transformers")
from transformers.utils import logging as theirs

from surefoot.language import quiet_transformers


@pytest.mark.parametrize("name", ["transformers", "transformers.models.llama", "huggingface_hub.file_download"])
def test_messages_are_silenced_only_inside_the_context(name, caplog, monkeypatch):
    for library in ("transformers", "huggingface_hub"):
        monkeypatch.setattr(logging.getLogger(library), "propagate", True)  # so that caplog sees it
    with quiet_transformers(), quiet_transformers():
        logging.getLogger(name).error("inside")
    logging.getLogger(name).error("after")
    assert {record.message for record in caplog.records} == {"after"}


def test_last_of_overlapping_threads_restores_handlers_and_progress_bars():
    logger = logging.getLogger("transformers")
    before = (logger.handlers, logger.propagate, theirs.is_progress_bar_enabled())
    both, one = Barrier(2, timeout=30), Barrier(2, timeout=30)

    def first():
        with quiet_transformers():
            both.wait()
        one.wait()

    def second():
        with quiet_transformers():
            both.wait()
            one.wait()
            assert not theirs.is_progress_bar_enabled()
            assert logger.handlers is not before[0]

    with ThreadPoolExecutor(2) as pool:
        for waiting in [pool.submit(first), pool.submit(second)]:
            waiting.result()
    assert (logger.handlers, logger.propagate, theirs.is_progress_bar_enabled()) == before
