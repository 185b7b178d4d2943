"""What all tests share: folders in memory, one torch thread, and the command line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot import cli, sandbox
from surefoot.errors import SurefootError

os.environ.setdefault("MUJOCO_GL", "disable")
sys.path.insert(0, str(Path(__file__).parent / "run"))


def _folders_in_memory(memory: str = "/dev/shm", room: float = 4e9) -> None:
    """Put temporary folders into memory where there is enough: a run waits for the disk at each of its checkpoints."""
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or not os.access(memory, os.W_OK | os.X_OK):
        return
    found = os.statvfs(memory)
    if found.f_bavail * found.f_frsize >= room and not found.f_flag & os.ST_NOEXEC:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = memory


_folders_in_memory()


@pytest.fixture(autouse=True)
def _one_thread():
    """The suite shares two cores, and results are exact for a given number of threads."""
    torch.set_num_threads(1)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process, in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["surefoot", *words])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        said = capsys.readouterr()
        return int(leaving.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def sandboxed() -> None:
    """For tests that run programs in a sandbox: skipped where a machine has no namespaces for it, and never where it has."""
    try:
        sandbox.check()
    except SurefootError as error:
        empty = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
        if shutil.which("bwrap") and subprocess.run(empty, capture_output=True, timeout=60).returncode == 0:
            pytest.fail(f"bubblewrap works here, and the sandbox does not: {error}")
        pytest.skip(str(error))
