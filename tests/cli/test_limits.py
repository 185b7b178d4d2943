"""Limits of the machine, and ranks that hang, end a command with one line."""

import errno
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import surefoot
from surefoot import SurefootError
from surefoot.cli import ranks
from surefoot.errors import limit_reached
from surefoot.recipes.reading import make_recipe
from surefoot.runs.session import budget_lines
from surefoot.store.events import Message


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("can't start new thread"), "no more threads or memory for them (RuntimeError: can't start new thread)"),
        (MemoryError(), "out of memory (MemoryError"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"), "out of memory ("),
        (ImportError("libtorch.so: failed to map segment from shared object"), "out of memory ("),
        (OSError(errno.EMFILE, "Too many open files"), "raise ulimit -n, then repeat the command, or resume the run"),
    ],
)
def test_a_limit_of_the_machine_is_one_line(command, monkeypatch, error, line) -> None:
    monkeypatch.setattr("surefoot.runs.api.start", Mock(side_effect=error))
    code, _, err = command("train", "CartPole-v1", "--steps", "64")
    assert (code, err.count("\n"), line in err) == (2, 1, True), err
    if not isinstance(error, ImportError):
        with pytest.raises(SurefootError) as ended:
            surefoot.train("CartPole-v1", steps=64)
        assert line in str(ended.value)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), torch.OutOfMemoryError("CUDA out of memory")])
def test_other_errors_of_a_python_call_keep_their_type(monkeypatch, error: Exception) -> None:
    monkeypatch.setattr("surefoot.runs.api.start", Mock(side_effect=error))
    with pytest.raises(type(error), match=str(error)):
        surefoot.train("CartPole-v1", steps=64)


def test_other_errors_are_no_limits() -> None:
    assert limit_reached(RuntimeError("shape mismatch")) is None
    assert limit_reached(ImportError("No module named 'x'")) is None


@pytest.mark.parametrize("printed", [False, True], ids=["silent", "printed"])
def test_the_command_prints_the_last_line_of_a_rank_if_no_rank_did(tmp_path: Path, monkeypatch, printed: bool) -> None:
    """As when the first rank, which prints for all, is the one that does not answer."""
    monkeypatch.setenv(ranks.AGENT, str(tmp_path))
    ranks.leave_line("rank 1 of 2: another rank did not answer in time", printed)
    error = SimpleNamespace(get_first_failure=lambda: (1, SimpleNamespace(exitcode=2)))
    with pytest.raises(SystemExit if printed else SurefootError) as ended:
        ranks._report(error, tmp_path)
    assert printed or "another rank did not answer in time" in str(ended.value)


def messages_of(*what: str, **fields: Any) -> list[str]:
    """The messages of a run."""
    lines: list[str] = []
    surefoot.train(*what, display=lambda event: lines.append(event.text) if isinstance(event, Message) else None, **fields)
    return lines


@pytest.mark.parametrize(
    ("steps", "line"), [(96, "steps=96: becomes 128, since only whole iterations train (2 iterations"), (128, None)]
)
def test_a_run_says_what_its_budget_becomes(steps: int, line: str | None) -> None:
    fields = {"rollout": {"environments": 4, "steps": 16}, "objective": {"reuse": {"epochs": 1, "minibatches": 1}}}
    lines = messages_of("CartPole-v1", steps=steps, evaluation={"episodes": 0}, **fields)
    assert [text for text in lines if text.startswith("steps=")] == [text for text in lines if line and text.startswith(line)]
    assert bool(line) == any(text.startswith("steps=") for text in lines)


ONCE = {"reuse": {"minibatches": 1}}
SCORED = {"data": {"train": "rows.jsonl"}, "reward": {"terms": [{"function": "score.py:score"}]}}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"kind": "sft", "data": {"train": "rows.jsonl", "batch": 8}}, "becomes 24, "),
        ({"kind": "dpo", "data": {"train": "rows.jsonl", "batch": 10}}, None),
        ({"kind": "language", "sampling": {"prompts": 4, "samples": 2}, "objective": ONCE, **SCORED}, "becomes 24, "),
    ],
)
def test_a_text_run_says_so_too(fields: dict[str, Any], line: str | None) -> None:
    recipe = make_recipe({"model": "pocket", "steps": 20, **fields})
    lines = budget_lines(recipe, 0)
    assert (bool(lines), all(line in text for text in lines if line)) == (line is not None, True)


def test_a_resumed_run_counts_the_iterations_that_are_left() -> None:
    recipe = make_recipe({"kind": "sft", "model": "pocket", "steps": 20, "data": {"train": "rows.jsonl", "batch": 8}})
    assert "(2 more iterations of 8 steps)" in budget_lines(recipe, 8)[0]


def test_a_run_of_whole_episodes_says_it_at_its_end() -> None:
    fields = {"rollout": {"environments": 2, "steps": 16}, "evaluation": {"episodes": 0}}
    lines = messages_of("CartPole-v1", "REINFORCE", steps=3, **fields)
    assert re.fullmatch(r"steps=3: became \d+, since only whole iterations train", lines[-1])
