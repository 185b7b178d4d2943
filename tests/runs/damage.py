"""Damage to the files of runs, and what the commands that read them make of it."""

import io
import json
import random
import shutil
import signal
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.cli import main as cli

LONGEST = 60
"""seconds, after which a command is taken to hang"""
UNSIGNED = ("config.toml", "environment.json", "finished.json")
"""files of a run that no hash covers: a person may write them"""


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
        """What may be damaged."""
        kept = [path for name in ("checkpoints", "best") for path in (self.run / name).rglob("*") if path.is_file()]
        return sorted(kept) + [self.run / name for name in UNSIGNED if (self.run / name).is_file()]

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
        reported = ("config.toml has changed", "config_changed", "metrics.jsonl")
        noticed = any(words in out + error for words in reported) or where.startswith(UNSIGNED[1:])
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
        try:
            with redirect_stdout(out), redirect_stderr(error):
                cli.main()
        except SystemExit as leaving:
            return int(leaving.code or 0), self._timeless(out.getvalue()).replace(str(folder), "RUN"), error.getvalue()
        finally:
            signal.alarm(0)
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
