"""One torch thread everywhere: the suite shares two cores, and results are exact for a given number of threads."""

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("MUJOCO_GL", "disable")
sys.path.insert(0, str(Path(__file__).parent / "run"))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
