"""Every test here runs programs in a sandbox, and is skipped where there is none."""

import pytest

from surefoot import sandbox
from surefoot.errors import SurefootError


@pytest.fixture(autouse=True)
def _needs_a_sandbox() -> None:
    try:
        sandbox.run("")
    except SurefootError as error:
        pytest.skip(str(error))
