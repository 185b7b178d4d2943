"""Traces of language runs: tokens, rewards and KL are consistent, and a resumed run writes the same traces."""

import json
from pathlib import Path
from typing import Any

import pytest
from chain import check_chain

import surefoot
from surefoot import read_trace
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.loading import load_model
from surefoot.store.reading import traces_in

REWARD = """
def vowels(responses):
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]

def half(responses):
    return [None if i % 2 else 1.0 for i in range(len(responses))]
"""


@pytest.fixture
def settings(tmp_path: Path, folders: dict[str, Path]) -> dict[str, Any]:
    """Settings of a small PPO run with traces in every iteration."""
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{i % 7} says "} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(folders["llama"]),
        "steps": 64,
        "data": {"train": str(tmp_path / "prompts.jsonl"), "max_length": 32},
        "sampling": {"prompts": 8, "samples": 2, "max_tokens": 8},
        "reward": {"terms": [{"function": f"{tmp_path / 'rewards.py'}:vowels"}], "missing_eos": "none"},
        "reference": {"beta": 0.3},
        "optimizer": {"learning_rate": 1e-2, "micro_batch_tokens": 64},
        "traces": {"every": 1, "rows": 3},
    }


def test_traced_tokens_rewards_and_kl_are_consistent(settings: dict[str, Any], tmp_path: Path) -> None:
    surefoot.train("language", run_dir=tmp_path / "run", **settings)
    model, tokenizer = load_model(settings["model"])
    tokens = Tokens(tokenizer, model)
    files = traces_in(tmp_path / "run" / "traces")
    assert [file.stem for file in files] == ["16", "32", "48", "64"]
    met, spent = set(), 0.0
    for file in files:
        trace = read_trace(file)
        assert (trace.gamma, trace.gae_lambda, trace.clip, trace.clip_high) == (1.0, 0.95, 0.2, 0.2)
        met |= check_chain(trace, "batch")
        assert len({row.row for row in trace.rows}) == 3
        for row in trace.rows:
            assert row.start == 0
            assert row.mask.all()
            assert (row.terminated | row.truncated)[-1]
            assert row.about["prompt"].endswith(" says ")
            assert len(row.about["tokens"]) == len(row.mask)
            assert row.about["tokens"] == [tokenizer.decode([i]) for i in row.actions.tolist()]
            plain = [i not in tokenizer.all_special_ids for i in row.actions.tolist()]
            text = "".join(token for token, keep in zip(row.about["tokens"], plain, strict=True) if keep)
            assert text == tokens.decode(row.actions)
            assert row.reward_parts["score"].sum() == pytest.approx(
                sum(c in "aeiou" for c in text) / max(1, len(text)), abs=1e-6
            )
            for t in range(len(row.mask)):
                kl = float(row.old_log_probs[t] - row.ref_log_probs[t])  # type: ignore[index]
                assert row.reward_parts["kl"][t] == pytest.approx(kl, abs=1e-6)
                score = float(row.reward_parts["score"][t])
                assert row.rewards[t] == pytest.approx(score - row.about["reference_beta"] * kl, abs=1e-5)
                spent += abs(kl)
    assert met == {"unclipped", "clipped"}
    assert spent > 0.1


def test_traces_change_no_weight(settings: dict[str, Any], tmp_path: Path) -> None:
    traced = surefoot.train("language", run_dir=tmp_path / "run", **settings)
    alone = surefoot.train("language", **settings)
    assert traces_in(tmp_path / "run" / "traces")
    for name, weights in traced.model.state_dict().items():
        assert weights.equal(alone.model.state_dict()[name]), name


def test_responses_without_a_score_are_not_traced(settings: dict[str, Any], tmp_path: Path) -> None:
    reward = {"terms": [{"function": f"{tmp_path / 'rewards.py'}:half"}], "tolerated": 0.5}
    surefoot.train("language", run_dir=tmp_path / "run", **settings | {"steps": 16, "reward": reward})
    (file,) = traces_in(tmp_path / "run" / "traces")
    trace = read_trace(file)
    assert len(trace.rows) == 3
    assert all(row.row % 2 == 0 for row in trace.rows)


def test_demonstrations_are_traced_only_if_enabled(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = [{"prompt": f"{i} ", "completion": "yes" * (1 + i % 3)} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {
        "model": str(folders["llama"]),
        "steps": 16,
        "data": {"train": str(tmp_path / "rows.jsonl"), "batch": 8},
    }
    surefoot.train("sft", run_dir=tmp_path / "plain", **fields)
    assert not (tmp_path / "plain" / "traces").exists()
    surefoot.train("sft", run_dir=tmp_path / "run", **fields, traces={"rows": 2})
    files = traces_in(tmp_path / "run" / "traces")
    assert len(files) == 2
    for file in files:
        trace = read_trace(file)
        assert check_chain(trace, None, ratios=False) == {"log_prob"}
        for row in trace.rows:
            assert "".join(row.about["tokens"]).startswith("yes")
            assert (row.visits.log_probs < 0).all()
            assert row.rewards.tolist() == [1.0] * len(row.mask)
