"""Damage to the files of runs, and what the commands that read them make of it."""

import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.cli import main as cli
from surefoot.errors import SurefootError
from surefoot.inspector.catalog import Catalog
from surefoot.inspector.folders import RunFolders
from surefoot.inspector.traces import Traces

LONGEST = 60
"""seconds, after which a command is taken to hang"""
UNSIGNED = ("config.toml", "metrics.jsonl")
"""files of a run that a person may edit, or of which another finding shows the damage"""
MEMORY = 4 << 30
"""bytes that a command may take beyond those of this process: a device has no end"""
PLACED = ("pipe", "device", "socket", "folder")
"""what may stand where a file was"""


@dataclass
class Outcome:
    """What came of one command on one damaged run."""

    where: str
    words: list[str]
    kind: str
    text: str = ""


@dataclass
class Campaign:
    """Commands on runs, sound and damaged."""

    run: Path
    commands: list[list[str]]
    """RUN stands for the run"""
    sound: dict[str, tuple[int, str]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def files(self) -> list[Path]:
        """What may be damaged: all that a run leaves, but not its lock and what trackers wrote."""
        return sorted(
            path for path in self.run.rglob("*") if path.is_file() and path.name != ".lock" and "events" not in path.name
        )

    def replace_each(
        self, scratch: Path, kinds: Sequence[str], commands: Sequence[list[str]], below: str = "", sparse: bool = False
    ) -> list[Outcome]:
        """Put something else in the place of each file ``below`` a folder, and give every command each run.

        sparse   only the last of the files that differ in a number, and of each only one kind for a command, in turn
        """
        copy, outcomes = self._copy(scratch), []
        for words in commands:
            self.sound[" ".join(words)] = self._called(words, copy)[:2]
        files = [path for path in self.files() if path.is_relative_to(self.run / below)]
        if sparse:
            files = list({re.sub(r"\d+", "N", str(path.relative_to(self.run))): path for path in files}.values())
        for number, path in enumerate(files):
            for which, kind in enumerate(kinds):
                place = copy / path.relative_to(self.run)
                place.unlink()
                with placed(kind, place):
                    where = f"{kind} for {path.relative_to(self.run)}"
                    asked = [each for at, each in enumerate(commands) if not sparse or (number + at) % len(kinds) == which]
                    outcomes += [self._judged(where, words, copy) for words in asked]
                shutil.copy2(path, place)
        return outcomes

    def go(self, cases: int, flips: bool, seed: int, scratch: Path) -> Counter[str]:
        """Damage so many files, one at a time, and give every command each of them."""
        draw = random.Random(seed)
        for words in [words for words in self.commands if " ".join(words) not in self.sound]:
            code, out, _ = self._called(words, self._copy(scratch))
            self.sound[" ".join(words)] = code, out
        for _ in range(cases):
            path = draw.choice(self.files())
            copy = self._copy(scratch)
            where = damaged(copy / path.relative_to(self.run), flips, draw)
            for words in self.commands:
                fresh = self._copy(scratch, copy) if words[0] == "resume" else copy
                self.outcomes.append(self._judged(f"{path.relative_to(self.run)} {where}", words, fresh))
        return Counter(outcome.kind for outcome in self.outcomes)

    def _judged(self, where: str, words: list[str], folder: Path) -> Outcome:
        try:
            code, out, error = self._called(words, folder)
        except TimeoutError:
            return Outcome(where, words, "hang")
        except Exception as error:
            return Outcome(where, words, "traceback", repr(error)[:300])
        if code == 2:
            return Outcome(where, words, "rejected" if error.count("\n") == 1 else "not one line", error[:300])
        if (code, out) == self.sound[" ".join(words)]:
            return Outcome(where, words, "the same")
        reported = ("changed since the checkpoint", "config_changed", "metrics.jsonl", "files are not what the run wrote")
        noticed = any(words in out + error for words in reported)
        return Outcome(where, words, "noticed" if noticed else "another answer", out[:300])

    def _copy(self, scratch: Path, source: Path | None = None) -> Path:
        to = scratch / ("again" if source else "run")
        shutil.rmtree(to, ignore_errors=True)
        return shutil.copytree(source or self.run, to)

    def _called(self, words: list[str], folder: Path) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command in this process. Raises what it lets through, and TimeoutError."""
        out, error, before = io.StringIO(), io.StringIO(), sys.argv

        def ring(*_: object) -> None:
            raise TimeoutError

        sys.argv = ["surefoot", *(word.replace("RUN", str(folder)) for word in words)]
        old = signal.signal(signal.SIGALRM, ring)
        signal.alarm(LONGEST)
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_size() + MEMORY, limits[1]))
        try:
            with redirect_stdout(out), redirect_stderr(error):
                if words[0] == "inspector":
                    return 0, inspected(folder), ""
                cli.main()
        except SystemExit as leaving:
            return int(leaving.code or 0), self._timeless(out.getvalue()).replace(str(folder), "RUN"), error.getvalue()
        finally:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            signal.signal(signal.SIGALRM, old)
            sys.argv = before
        raise AssertionError("a command exits")

    @staticmethod
    def _timeless(out: str) -> str:
        """Without what differs between two calls that say the same."""
        if not out.startswith("{"):
            return out
        table = json.loads(out)
        table.pop("seconds", None)
        return json.dumps(table)


def inspected(run: Path) -> str:
    """All that the inspector sends of a run, and its errors."""
    answers: list[str] = []
    try:
        folders = RunFolders([run])
        traces, steps = Traces(folders), folders.runs()[0]["steps"]
    except SurefootError as error:
        return f"inspected: {error}"
    asked: list[Callable[[], Any]] = [
        lambda: folders.curves([0], ["steps"], 0, 1e9, 10, 0),
        lambda: folders.findings(0),
        lambda: folders.recipe(0),
        lambda: folders.profile(0),
        lambda: folders.samples(0, steps),
        lambda: traces.rows(0, steps),
        lambda: traces.most_clipped(0),
        lambda: traces.find(0, "best"),
        lambda: Catalog([run.parent]).table(),
    ]
    for ask in asked:
        try:
            answers.append(str(ask()))
        except SurefootError as error:
            answers.append(str(error))
    assert not any("\n" in answer for answer in answers)
    return "inspected"


def _size() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def placed(kind: str, path: Path) -> Iterator[None]:
    """Something at a path that is no regular file, and removed at the end."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as made, chdir(path.parent):  # the whole path may be too long for a socket
            made.bind(path.name)
    try:
        yield
    finally:
        path.rmdir() if kind == "folder" else path.unlink()


def damaged(path: Path, flip: bool, draw: random.Random) -> str:
    """Flip a bit of a file, or cut it off, anywhere; where."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    if flip:
        bit = draw.randrange(8)
        content[place] ^= 1 << bit
        path.write_bytes(bytes(content))
        return f"bit {bit} of byte {place}"
    path.write_bytes(bytes(content[:place]))
    return f"cut at byte {place}"
