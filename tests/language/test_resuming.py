"""An interrupted run of every kind resumes to the last bit: weights, moments, places in the data, metrics and traces."""

import json
from pathlib import Path
from typing import Any

import pytest
from killing import assert_same

from surefoot.diagnostics.metrics import TIMING
from surefoot.files import read_toml
from surefoot.store.metrics import read_metrics
from surefoot.store.reading import traces_in

from .tiny import fields_of, whole_and_resumed, write_folder, write_texts

TALK = """
class Talk:
    def reset(self, row):
        self.turns = 0
        return [{"role": "user", "content": str(row["seed"])}]
    def step(self, response):
        self.turns += 1
        return [{"role": "user", "content": "and?"}], float(len(set(response))), self.turns > 1
"""
ADAPTER = {"adapter": {"rank": 2}}
OWN = {"critic": {"own_model": True}, "optimizer": {"learning_rate": 1e-3, "critic_learning_rate": 3e-3}}
LOW = {"precision": "bfloat16-weights"}
ONCE = {"objective": {"reuse": {"epochs": 1, "minibatches": 1}}}
MIXED = {"mixing": {"sft_coefficient": 1.0, "demonstrations": "rows.jsonl", "batch": 5}, "traces": {"every": 1, "rows": 3}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo with all that has a place or a state": (
        "language",
        {**MIXED, "padding_free": True, "reference": {"beta": 0.1, "target": 1.0}, "held_out": True},
    ),
    "log π_old of the sampler": ("language", {"sampling": {"prompts": 16, "max_tokens": 8, "old_log_probs": "sampler"}, **OWN}),
    "no log π_old": ("language", {"algorithm": "DR_GRPO", "sampling": {"prompts": 4, "samples": 4, "max_tokens": 8}, **ONCE}),
    "conversations": (
        "language",
        {"turns": {"environment": "talk.py:Talk", "max_turns": 3}, "reward": {"missing_eos": "none"}},
    ),
    "ppo in bfloat16": ("language", {"precision": "bfloat16", **OWN}),
    "adapters of one base in bfloat16": (
        "language",
        {"precision": "bfloat16-weights", "critic": {"own_model": True}, **ADAPTER},
    ),
    "sft": ("sft", {}),
    "sft in bfloat16": ("sft", LOW),
    "sft of adapters with dropout": ("sft", {"adapter": {"rank": 2, "dropout": 0.1}}),
    "reward": ("reward", {}),
    "steps": ("reward", {"preference": {"loss": "steps"}}),
    "kto": ("dpo", {"preference": {"loss": "kto"}}),
}
ROWS = {"language": "rows", "sft": "rows", "reward": "pairs", "steps": "steps", "kto": "labels"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows of every kind, a reward function and an environment."""
    folder = tmp_path_factory.mktemp("resuming")
    write_folder(folder / "model", "qwen2")
    write_texts(folder)
    (folder / "talk.py").write_text(TALK)
    return folder


def fields(files: Path, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Two iterations of 16 rows; an epoch of 13 rows ends inside a batch."""
    changes = json.loads(
        json.dumps(changes).replace("rows.jsonl", f"{files}/rows.jsonl").replace("talk.py", f"{files}/talk.py")
    )
    rows = str(files / f"{ROWS[changes.get('preference', {}).get('loss', kind)]}.jsonl")
    data = {"train": rows, "max_length": 64} | ({"held_out": rows} if changes.pop("held_out", kind != "language") else {})
    if kind == "language":
        shared = {"data": data, "objective": {"reuse": {"epochs": 2, "minibatches": 2}}, "steps": 32}
        return fields_of(files / "model", rows, f"{files}/rewards.py:score", **{**shared, **changes})
    rate = {"learning_rate": 1e-3, "schedule": "cosine", "warmup": 0.2}
    return {"model": str(files / "model"), "data": {**data, "batch": 16}, "optimizer": rate, **changes}


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_resumes_bit_for_bit(name: str, files: Path, tmp_path: Path) -> None:
    kind, changes = RUNS[name]
    if "adapter" in changes:
        pytest.importorskip("peft")
    whole, cut = whole_and_resumed(kind, tmp_path, **fields(files, kind, changes))
    for part in ("agent", "learner", "collector", "state"):
        assert_same(whole[part], cut[part], part)
    rows = [read_metrics(tmp_path / run / "metrics.jsonl") for run in ("whole", "cut")]
    timeless = [[{k: v for k, v in row.items() if k not in TIMING} for row in run] for run in rows]
    assert timeless[0] == timeless[1]
    assert len(timeless[0]) == 2
    traces = [{file.name: file.read_bytes() for file in traces_in(tmp_path / run / "traces")} for run in ("whole", "cut")]
    assert traces[0] == traces[1]
    assert len(traces[0]) == 2 or "traces" not in changes
    if name == "no log π_old":
        assert read_toml(tmp_path / "cut" / "config.toml")["sampling"]["old_log_probs"] == "update"
