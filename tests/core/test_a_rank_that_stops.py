"""A program of its own collector on two ranks: its output, and the end of a rank whose peer dies or stops."""

import json
import re
import runpy
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from forked import Forked

PROGRAM = (Path(__file__).parent / "pulls_on_ranks.py").read_text("utf-8")
Start = Callable[..., list[Forked]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Two ranks of the program, with the variables that ``torchrun`` sets."""
    started: list[Forked] = []

    def go(ranks: int = 2, changes: tuple[tuple[str, str], ...] = ()) -> list[Forked]:
        program = PROGRAM
        for old, new in changes:
            assert old in program
            program = program.replace(old, new)
        (tmp_path / "ranks.py").write_text(program)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        body = partial(runpy.run_path, str(tmp_path / "ranks.py"), run_name="__main__")
        started.extend(Forked(body, tmp_path / str(rank), {**meeting, "RANK": str(rank)}) for rank in range(ranks))
        return started

    yield go
    for process in started:
        process.kill()


LINES = {
    signal.SIGKILL: r"has died, or did not answer in time \(RuntimeError: [^/]*\); see what it printed last, then .*",
    signal.SIGSTOP: r"did not answer in time \(RuntimeError: Timed out [^/]*\); if it is slow, and not stopped, raise .*",
}
SAID = ("return Rollout(", "if state.iteration == 3:\n            print('at work', flush=True)\n        return Rollout(")


@pytest.mark.slow
def test_two_ranks_learn_from_the_arms_that_both_pull(start: Start) -> None:
    first, second = start()
    code, out, err = first.finish()
    assert code == 0, err
    steps, chances = out.strip().split(" ", 1)
    assert int(steps) >= 20_000
    assert json.loads(chances)[2] > 0.9, "the last arm pays most"
    assert second.finish()[:2] == (0, "")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_whose_peer_dies_or_stops_ends_with_one_line(start: Start, number: signal.Signals) -> None:
    limit = "timeout=8" if number == signal.SIGSTOP else "timeout=60"  # a death is noticed at once
    first, second = start(changes=(("timeout=60", limit), ("total_steps=20_000", "total_steps=10**12"), SAID))
    assert first.wait_for_output() == "at work\n"
    first.send_signal(number)
    code, _, err = second.finish()
    assert re.fullmatch("ranks.py: rank 1 of 2: another rank " + LINES[number], err.strip()), "one line, and nothing else"
    assert code == 1
