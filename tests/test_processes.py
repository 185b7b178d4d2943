"""Child processes: what they get, how they end, and what is left of them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import left_of

from surefoot.processes import Child, ChildEnded, ChildLate, end, exit_cause, let_in, parent_gone

PLACES = [str(Path(__file__).parent), str(Path(__file__).parent / "runs")]


def answer(connection: Any, *arguments: Any) -> None:
    """Send back what came, then do what is asked."""
    let_in()
    connection.send((arguments, sys.argv, sys.path))
    while (asked := connection.recv()) != "exit":
        connection.send(time.sleep(60) if asked == "sleep" else asked)
    os._exit(7)


def outlive(connection: Any, file: Path) -> None:
    """Leave a file when the parent is gone."""
    let_in()
    connection.send("ready")
    parent_gone.wait(60)
    file.touch()


def test_a_child_gets_its_arguments_and_the_path_answers_and_its_exit_is_one_word() -> None:
    child = Child(f"{__name__}:answer", {"a": [1]}, silent=True)
    try:
        arguments, argv, path = child.receive(60)
        assert (arguments, argv) == (({"a": [1]},), sys.argv)
        assert path == [os.path.abspath(entry) for entry in sys.path]
        child.connection.send("again")
        assert child.receive(60) == "again"
        child.connection.send("exit")
        with pytest.raises(ChildEnded):
            child.receive(60)
        assert child.exit_cause() == "exit code 7"
    finally:
        end([child])
    assert exit_cause(-signal.SIGKILL) == "SIGKILL, perhaps out of memory"


def test_a_late_child_has_its_time_from_its_last_progress_and_is_killed_at_the_end() -> None:
    child, moves = Child(f"{__name__}:answer", silent=True), iter(range(3))
    child.receive(60)
    child.connection.send("sleep")
    started = time.monotonic()
    with pytest.raises(ChildLate):
        child.receive(0.2, progress=lambda: next(moves, 3))
    assert 0.6 < time.monotonic() - started < 30
    end([child], grace=0.1)
    assert child.process.returncode == -signal.SIGKILL


def from_a_daemon(answers: Any) -> None:
    child = Child(f"{__name__}:answer", silent=True)
    answers.send(child.receive(60)[0])
    end([child])


def test_a_daemon_may_have_children() -> None:
    """Such as a process of a pool, in which a reward calls a verifier."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=from_a_daemon, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == ()
    process.join()


@pytest.mark.parametrize("survives", [True, False])
def test_when_the_parent_is_killed_a_child_ends_or_is_told(survives: bool, tmp_path: Path) -> None:
    text = (
        f"import os, pathlib, signal, sys, threading; sys.path[:0] = {PLACES!r}\n"
        "from surefoot.processes import Child\n"
        "def begin():\n"
        f"    child = Child('test_processes:outlive', pathlib.Path({str(tmp_path / 'left')!r}), survives={survives})\n"
        "    print(child.receive(60), child.process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=begin).start()\n"  # no signal comes from the kernel then
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert left_of([int(done.stdout.split()[1])]) == []
    assert (tmp_path / "left").exists() == survives
