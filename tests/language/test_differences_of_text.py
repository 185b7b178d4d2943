"""Planted differences between two runs of text: ``diff`` names the iteration, the stage and the cause of each."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import surefoot
from surefoot.core import fingerprints
from surefoot.diagnostics.differences import Difference, compare_runs
from surefoot.language.data.rows import write_rows

ROWS = [
    {"messages": [{"role": "user", "content": f"{i} says "}, {"role": "assistant", "content": "abc" * (i + 1)}]}
    for i in range(8)
]
REWARD = "def score(responses):\n    return [float(len(set(t))) for t in responses]\n"
SFT: dict[str, Any] = {
    "model": "model",
    "data": {"train": "rows.jsonl", "batch": 4},
    "steps": 8,
    "evaluation": {"every": 8},
    "display": False,
}
"""two iterations"""
PPO: dict[str, Any] = {
    "algorithm": "GRPO",
    "model": "model",
    "data": {"train": "prompts.jsonl"},
    "reward": {"terms": [{"function": "rewards.py:score"}], "gold": "gold.py:score"},
    "sampling": {"prompts": 2, "samples": 2, "max_tokens": 4, "engine": "packed"},
    "optimizer": {"learning_rate": 1e-3},
    "steps": 8,
    "evaluation": {"every": 8},
    "display": False,
}
RUNS = {"sft": SFT, "language": PPO, "adapters": {**SFT, "adapter": {"rank": 2}}}


@pytest.fixture(autouse=True)
def of_every_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "SHARE", 1e9)


@pytest.fixture(scope="module")
def first(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files and a run of each kind."""
    place = tmp_path_factory.mktemp("differences")
    shutil.copytree(folders["llama"], place / "model")
    write_rows(place / "rows.jsonl", ROWS)
    write_rows(place / "prompts.jsonl", [{"prompt": f"{i} says "} for i in range(8)])
    for name in ("rewards.py", "gold.py"):
        (place / name).write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "SHARE", 1e9)
        for kind in RUNS:
            train(place, kind)
    return place


def train(place: Path, kind: str, **changes: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        surefoot.train("language" if kind == "language" else "sft", run_dir=kind, **{**RUNS[kind], **changes})


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        text = (place / name).read_text()
        assert before in text
        (place / name).write_text(text.replace(before, after, 1))

    return change


def other_weight(place: Path) -> None:
    weights = load_file(place / "model/model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1e-3
    save_file(weights, place / "model/model.safetensors", metadata={"format": "pt"})


PLANTS: dict[str, tuple[str, Callable[[Path], None] | dict[str, Any], str | None, str]] = {
    "a word of a row": ("sft", edit("rows.jsonl", "3 says", "3 said"), "inputs", "data.train='rows.jsonl': "),
    "the order of rows": (
        "sft",
        lambda place: write_rows(place / "rows.jsonl", ROWS[::-1]),
        "inputs",
        "(the same rows in another order)",
    ),
    "a weight of the model": ("sft", other_weight, "weights", "weights of model='model'"),
    "a weight under adapters": ("adapters", other_weight, "gradient", "base model='model': "),
    "a token": ("sft", edit("model/tokenizer.json", '"a"', '"é"'), "inputs", "model: tokenizer.tokenizer.json: "),
    "the chat template": ("sft", edit("model/chat_template.jinja", "{% for", "!{% for"), "inputs", "chat_template.jinja: "),
    "precision": ("sft", {"precision": "bfloat16"}, "gradient", "precision: float32 -> bfloat16"),
    "longest row": ("sft", {"data": {"train": "rows.jsonl", "batch": 4, "max_length": 24}}, "inputs", "data.max_length: "),
    "code of the reward": ("language", edit("rewards.py", "len(set(t))", "2 * len(t)"), "rewards", "code: code.rewards.py: "),
    "code of the gold reward": ("language", edit("gold.py", "len(set(t))", "len(t)"), None, "code: code.gold.py: "),
    "temperature": ("language", {"sampling": {**PPO["sampling"], "temperature": 0.5}}, "actions", "temperature: 1.0 -> 0.5"),
    "engine": ("language", {"sampling": {**PPO["sampling"], "engine": "model"}}, None, "sampling.engine: packed -> model"),
    "KL penalty": ("language", {"reference": {"beta": 0.5}}, "rewards", "reference.beta: "),
}


def planted(first: Path, place: Path, kind: str, change: Callable[[Path], None] | dict[str, Any]) -> Difference:
    """The same run with a change, in a copy of the folder without the runs."""
    shutil.copytree(first, place, ignore=shutil.ignore_patterns(*RUNS))
    if not isinstance(change, dict):
        change(place)
    train(place, kind, **(change if isinstance(change, dict) else {}))
    return compare_runs(first / kind, place / kind)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_difference_of_text_is_located_and_its_cause_named(plant: str, first: Path, tmp_path: Path) -> None:
    kind, change, stage, cause = PLANTS[plant]
    found = planted(first, tmp_path / "b", kind, change)
    at = 2 if plant == "KL penalty" else 1  # the policy begins as the reference
    assert (found.first and (found.first.iteration, found.first.stage)) == (stage and (at, stage)), found.lines
    assert sum(cause in line for line in found.lines) == 1, found.lines
    consequences = [line for line in found.causes if line.endswith("(the same rows, other tokens)")]
    assert len(found.lines) == 2 + len(consequences), "nothing else is blamed"
