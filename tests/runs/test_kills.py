"""Kills at random moments and at random file system calls, of control and language runs and their resumes.

SUREFOOT_KILLS=200,60 asks for so many of control and of language; ``-s`` shows how many hit what.
"""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import FILES, RECIPES, assert_same, begin_or_continue, die_at, in_child, outcome

from surefoot.store.folder import RunFolder

CONTROL, LANGUAGE = map(int, os.environ.get("SUREFOOT_KILLS", "24,12").split(","))
SCORE = "def score(responses):\n    return [float(len(set(text))) for text in responses]\n"


class Whole:
    """A run from start to end: how it comes out, and what of it a kill can hit."""

    def __init__(self, folder: Path, task: str, fields: dict[str, Any]) -> None:
        self.folder, self.task, self.fields = folder, task, fields
        begin_or_continue(folder / "whole", task, fields)  # in this process: a child need not import it all again
        self.outcome = outcome(folder / "whole")
        self.calls = self._calls()
        started = time.monotonic()
        assert in_child(folder / "timed", task, fields=fields) == 0
        self.seconds = time.monotonic() - started

    def _calls(self) -> int:
        """How often a run changes what is on the disk."""
        log = self.folder / "calls"

        def count() -> None:
            for name in FILES:
                setattr(os, name, self._counted(getattr(os, name), log))

        assert in_child(self.folder / "counted", self.task, before=count, fields=self.fields) == 0
        return log.stat().st_size

    @staticmethod
    def _counted(real: Callable[..., Any], log: Path) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            with log.open("ab") as file:
                file.write(b".")
            return real(*args, **kwargs)

        return function

    def hit(self, path: Path, draw: random.Random, writing: bool, left: float) -> bool:
        """Go on with a run and kill it; whether the kill came in time.

        writing   kill it at a call that changes the disk, not at any moment
        left      the share of the run that is left to do
        """
        if writing:
            call = 1 + int(draw.random() * left * self.calls)
            before = die_at(os, FILES, call, after=draw.random() < 0.5)
            return in_child(path, self.task, before=before, fields=self.fields) == -signal.SIGKILL
        delay = draw.uniform(0.02, 0.9) * left * self.seconds
        return in_child(path, self.task, delay=delay, fields=self.fields) == -signal.SIGKILL


def left_of(path: Path, steps: int) -> float:
    """The share of a run that is left to do."""
    done = [int(folder.name) for folder in path.glob("checkpoints/[0-9]*")]
    return 1 - max(done, default=0) / steps


def campaign(whole: Whole, kills: int, seed: int) -> Counter[str]:
    """Kill each of many runs once from its start and once when it is resumed, then let it finish and compare: what was hit."""
    hits: Counter[str] = Counter()
    draw = random.Random(seed)
    steps = whole.fields["steps"]
    for number in range(10 * kills):
        if hits["kills"] >= kills:
            break
        path = whole.folder / str(number)
        for resumed in (False, True):
            writing = number % 4 == 2 * resumed
            left = left_of(path, steps)
            if left > 0 and whole.hit(path, draw, writing, left):
                hits.update(
                    ["kills", *(["of a resume"] if resumed else []), *(["while it changed the disk"] if writing else [])]
                )
            elif not resumed:
                break
        if left_of(path, steps) > 0:
            assert in_child(path, whole.task, fields=whole.fields) == 0, f"seed {seed}, run {number} does not resume"
        else:  # killed after its last checkpoint: what that left is removed when the run is opened
            RunFolder.open(path).close()
        assert_same(whole.outcome, outcome(path), f"seed {seed}, run {number}: ")
        assert not list(path.glob("**/.*.tmp")), f"seed {seed}, run {number}"
        hits.update(["runs, all equal"])
        shutil.rmtree(path)
    assert hits["kills"] >= kills
    print(f"{whole.task}: {dict(hits)}")
    return hits


@pytest.mark.release
@pytest.mark.parametrize("task", RECIPES)
def test_runs_of_control_survive_kills_at_any_moment(task: str, tmp_path: Path) -> None:
    fields = {**RECIPES[task], "checkpoint": {**RECIPES[task]["checkpoint"], "keep": 1}}
    hits = campaign(Whole(tmp_path, task, fields), CONTROL // len(RECIPES), seed=1)
    assert hits["of a resume"] > 0.3 * hits["kills"]


@pytest.mark.release
def test_runs_of_language_survive_kills_at_any_moment(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from language.tiny import write_folder

    write_folder(tmp_path / "model", "llama")
    (tmp_path / "rewards.py").write_text(SCORE)
    rows = "".join(json.dumps({"prompt": f"{i % 5}: "}) + "\n" for i in range(24))
    (tmp_path / "prompts.jsonl").write_text(rows)
    fields = {
        "model": str(tmp_path / "model"),
        "steps": 64,
        "data": {"train": str(tmp_path / "prompts.jsonl"), "held_out": str(tmp_path / "prompts.jsonl"), "max_length": 32},
        "sampling": {"prompts": 8, "max_tokens": 6},
        "reward": {"terms": [{"function": f"{tmp_path}/rewards.py:score"}], "missing_eos": "none"},
        "optimizer": {"learning_rate": 3e-3},
        "checkpoint": {"every": 16, "keep": 1},
        "evaluation": {"every": 16, "rows": 16},
    }
    hits = campaign(Whole(tmp_path, "language", fields), LANGUAGE, seed=1)
    assert hits["of a resume"] > 0.3 * hits["kills"]
