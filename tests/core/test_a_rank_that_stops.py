"""The program of docs/how-to/several-machines.md: what it prints, and what becomes of a rank whose companion dies or stops."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "several-machines.md"
Start = Callable[..., list["subprocess.Popen[str]"]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Two ranks of the documented program, as ``torchrun`` starts them."""
    text = PAGE.read_text("utf-8")
    block = re.search(r"```python\n(# ranks\.py\n.*?)```", text, re.S)
    assert block is not None
    started: list[subprocess.Popen[str]] = []

    def go(ranks: int = 2, changes: tuple[tuple[str, str], ...] = ()) -> list["subprocess.Popen[str]"]:
        program = block[1]
        for old, new in changes:
            assert old in program
            program = program.replace(old, new)
        (tmp_path / "ranks.py").write_text(program)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        for rank in range(ranks):
            started.append(
                subprocess.Popen(
                    [sys.executable, tmp_path / "ranks.py"],
                    env={**os.environ, **meeting, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    yield go
    for process in started:
        process.kill()
        process.communicate()


LINE = r"ranks.py: rank 1 of 2: another rank has died, or did not answer in time \(.*\); see what it printed last, then .*"
SAID = ("return Rollout(", "if state.iteration == 3:\n            print('at work', flush=True)\n        return Rollout(")


def test_the_documented_program_prints_what_the_page_shows(start: Start) -> None:
    first, second = start()
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert out.strip() in PAGE.read_text("utf-8")
    assert second.communicate(timeout=120)[0] == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_whose_companion_dies_or_stops_ends_in_one_line(start: Start, number: signal.Signals) -> None:
    first, second = start(changes=(("timeout=60", "timeout=5"), ("total_steps=20_000", "total_steps=10**12"), SAID))
    assert first.stdout is not None
    assert first.stdout.readline() == "at work\n"
    first.send_signal(number)
    _, err = second.communicate(timeout=60)
    assert re.fullmatch(LINE, err.strip()), "one line, and nothing else"
    assert second.returncode == 1


def test_a_rank_that_nobody_joins_ends_in_one_line(start: Start) -> None:
    (first,) = start(1, (("timeout=60", "timeout=3"),))
    _, err = first.communicate(timeout=60)
    assert err.splitlines()[-1].startswith("ranks.py: ranks: the others did not join within 3 s (")
    assert "Traceback" not in err
