"""Laws are searched with the same examples every time, so that a red test is a changed function and not luck."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("laws", max_examples=50, deadline=None, derandomize=True, database=None)
settings.load_profile("laws")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a run does too, so that sums come out alike everywhere; and stray files (MuJoCo's log) land nowhere."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
