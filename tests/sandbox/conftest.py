"""Every test here runs programs in a sandbox."""

import pytest


@pytest.fixture(autouse=True)
def _needs_a_sandbox(sandboxed: None) -> None:
    """What is skipped without one, and when it may be, is said where all tests read it."""
