"""Language runs with planted faults, really trained on a tiny model: the findings name the fault."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from language.tiny import write_folder

from surefoot.store.finding import Finding

from .conftest import trained

REWARDS = """
def nothing(responses):
    return [0.0] * len(responses)

def rarely(responses):
    return [float(text[:2] == "aa") for text in responses]

def letters(responses):
    return [text.count("e") for text in responses]

def variety(responses):
    return [float(len(set(text))) for text in responses]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, a few prompts, some demonstrations, and reward functions."""
    root = tmp_path_factory.mktemp("sick")
    write_folder(root / "model", "llama")
    rows = [{"prompt": f"{i}: ", "completion": "some words"} for i in range(8)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARDS)
    return root


def sick(files: Path, reward: str, gold: str | None = None, **fields: Any) -> dict[str, Finding]:
    terms: dict[str, Any] = {"terms": [{"function": f"{files / 'rewards.py'}:{reward}"}], "missing_eos": None}
    if gold is not None:
        terms["gold"] = f"{files / 'rewards.py'}:{gold}"
    table = {"model": str(files / "model"), "data": {"train": str(files / "rows.jsonl")}, "reward": terms}
    return trained("language", **{**table, "traces": {"rows": 0}, **fields})


@pytest.mark.parametrize(("algorithm", "samples"), [("PPO_CLIP", 1), ("GRPO", 4)])
def test_a_reward_that_never_differs_gives_no_signal(files: Path, algorithm: str, samples: int) -> None:
    sampling = {"prompts": 4, "samples": samples, "max_tokens": 4}
    findings = sick(files, "nothing", steps=16 * samples, algorithm=algorithm, sampling=sampling)
    assert findings["no_reward_signal"].severity == "serious"
    assert ("every group" if samples > 1 else "every response") in findings["no_reward_signal"].what
    assert "return_flat" not in findings, "that is said already"


def test_a_reward_that_hardly_ever_differs_leaves_few_groups_with_signal(files: Path) -> None:
    sampling = {"prompts": 4, "samples": 2, "max_tokens": 4}
    findings = sick(files, "rarely", steps=64, algorithm="GRPO", sampling=sampling, optimizer={"learning_rate": 1e-9})
    assert {"no_reward_signal", "few_groups_with_signal"} & set(findings)


def test_truncation_of_all_responses_is_reported(files: Path) -> None:
    sampling = {"prompts": 4, "max_tokens": 1}
    findings = sick(files, "letters", steps=32, sampling=sampling)
    assert findings["responses_cut"].severity == "serious"
    assert "sampling.max_tokens (it is 1)" in findings["responses_cut"].advice[0]


@pytest.mark.slow
def test_reward_hacking_without_a_kl_penalty_is_reported(files: Path) -> None:
    sampling, optimizer = {"prompts": 8, "max_tokens": 8}, {"learning_rate": 3e-3}
    reference = {"beta": 0.0, "measure": True}
    findings = sick(files, "letters", "variety", steps=240, sampling=sampling, optimizer=optimizer, reference=reference)
    hacked = findings["reward_hacked"]
    assert hacked.severity == "serious"
    assert "the gold score falls" in hacked.what
    assert "reference.beta (it is 0)" in hacked.advice[0]
    assert {"reward", "gold"} <= {evidence.metric for evidence in hacked.evidence}
    assert "left_reference" in findings


def test_bfloat16_explains_a_ratio_that_is_not_one(files: Path) -> None:
    sampling = {"prompts": 4, "max_tokens": 8, "old_log_probs": "sampler", "engine": "packed"}  # in float32
    findings = sick(files, "letters", steps=16, sampling=sampling, precision="bfloat16")
    assert findings["wrong_start"].severity == "note"
    assert "bfloat16" in findings["wrong_start"].cause
