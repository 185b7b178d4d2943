"""Attacks on the sandbox: each scores 0, ends in time, and leaves no process and no file."""

import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from surefoot.sandbox import Limits
from surefoot.verifiers import programs

from .attacks import FORGERS, READERS, SABOTEURS

ATTACKS = {**READERS, **FORGERS, **SABOTEURS}
LIMITS = Limits(seconds=0.3)
SLACK = 20.0
"""seconds that starting and ending may take on a machine with much else to do"""
PLACES = ("/", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/usr/lib", "/run", "/home", "/root", ".")


@dataclass(frozen=True)
class Treasure:
    """A secret that lies about, outside."""

    secret: str
    words: dict[str, str]
    """what is put into an attack"""
    folder: Path

    def filled(self, attack: str) -> str:
        return re.sub(rf"\b({'|'.join(self.words)})\b", lambda word: self.words[word[0]], attack)

    def files(self) -> list[str]:
        """What an attack may have left, anywhere."""
        name = self.words["NAME"]
        places = [place for place in (*PLACES, str(self.folder)) if os.path.isdir(place)]
        return [os.path.join(place, file) for place in places for file in os.listdir(place) if file.startswith(name)]


@pytest.fixture(scope="module")
def treasure() -> Iterator[Treasure]:
    """Where every user of the machine can reach it, so that nothing but the sandbox is in the way."""
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "answer").write_text(secret)
        patch.setenv("SUREFOOT_SECRET", secret)
        tcp, abstract, name = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), secrets.token_hex(8)
        abstract.bind(f"\0{name}")
        abstract.listen()
        for server in (tcp, abstract):
            threading.Thread(target=serve, args=(server, secret), daemon=True).start()
        holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", secret])
        words = {
            "FILE": str(folder / "answer"),
            "PORT": str(tcp.getsockname()[1]),
            "SOCKET": name,
            "PID": str(holder.pid),
            "NAME": f"attack-{name}",
            "SOURCE": programs.__file__,
        }
        yield Treasure(secret, words, folder)
        assert holder.poll() is None, "an attack has killed a process of ours"
        assert (folder / "answer").read_text() == secret, "an attack has written outside"
        holder.kill()
        holder.wait()
        for server in (tcp, abstract):
            server.close()


def serve(server: socket.socket, secret: str) -> None:
    """Tell everyone."""
    while True:
        try:
            connection = server.accept()[0]
        except OSError:
            return
        with connection:
            connection.sendall(secret.encode())


def cases_of(treasure: Treasure) -> list[dict[str, object]]:
    return [{"call": "solve", "expected": treasure.secret}]


def living(namespace: int, until: float) -> list[int]:
    """The processes of a process namespace that began by a time: later ones may have the number of one that is gone."""
    results = []
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            if os.stat(f"/proc/{pid}/ns/pid").st_ino == namespace and psutil.Process(int(pid)).create_time() <= until:
                results.append(int(pid))
        except (OSError, psutil.Error):
            continue
    return results


def parent_of(pid: int) -> int | None:
    """None where the process has ended meanwhile."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_there_are_many_attacks() -> None:
    assert len(ATTACKS) == len(READERS) + len(FORGERS) + len(SABOTEURS) >= 30


def test_a_correct_answer_passes(treasure: Treasure) -> None:
    """Without this, every attack might fail for a reason of no merit."""
    answer = f"def solve(): return {treasure.secret!r}"
    assert programs.run_tests(answer, cases_of(treasure), Limits(seconds=30)).passed == [True]


@pytest.mark.parametrize("name", READERS)
def test_without_a_sandbox_the_secret_is_read(name: str, treasure: Treasure) -> None:
    source = f"{treasure.filled(READERS[name])}\nprint(solve())"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == treasure.secret, done.stderr


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_scores_zero_ends_in_time_and_leaves_nothing(name: str, treasure: Treasure) -> None:
    started = time.monotonic()
    result = programs.run_tests(treasure.filled(ATTACKS[name]), cases_of(treasure), LIMITS)
    assert time.monotonic() - started < LIMITS.seconds + SLACK
    ended = time.time()
    assert result.passed == [False]
    (outcome,) = result.outcomes
    assert outcome.namespace > 0
    left = living(outcome.namespace, ended)
    assert not [pid for pid in left if parent_of(pid) == 1], "not even a zombie that is left to init"
    while living(outcome.namespace, ended) and time.time() < ended + 60:
        time.sleep(0.05)
    assert living(outcome.namespace, ended) == []
    assert treasure.files() == []
