"""Forgetting during PPO: the log-likelihood of held-out demonstrations at every evaluation."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.errors import SurefootError
from surefoot.language.analysis.evaluate import evaluate_run, report_table
from surefoot.language.data.rows import write_rows
from surefoot.language.online.world import LanguageWorld
from surefoot.store.metrics import read_metrics

from . import tiny

LIKELIHOOD = "held_out_log_likelihood"
COMPLETIONS = ("hello there.", "why not?", "a b c", "it is what it is, and that is that.", "no")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Demonstrations of several lengths, their prompts, and a reward for the letter z, which no demonstration has."""
    rows = [{"prompt": f"{i % 5}: ", "completion": COMPLETIONS[i % 5]} for i in range(23)]
    write_rows(tmp_path / "rows.jsonl", rows)
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
    (tmp_path / "rewards.py").write_text(
        "def zs(responses):\n    return [text.count('z') / max(1, len(text)) for text in responses]\n"
    )
    return tmp_path


def fields(files: Path, model: Path, **changes: Any) -> dict[str, Any]:
    prompts = str(files / "prompts.jsonl")
    table: dict[str, Any] = {"steps": 32, "data": {"train": prompts, "held_out": prompts, "max_length": 16}}
    table["evaluation"] = {"demonstrations": str(files / "rows.jsonl"), "every": 16}
    return tiny.fields_of(model, prompts, f"{files}/rewards.py:zs", **{**table, **changes})


def world(files: Path, model: Path, **changes: Any) -> LanguageWorld:
    return tiny.world_of(fields(files, model, **changes))


def log_likelihood(made: LanguageWorld) -> float:
    return made.evaluate().metrics[LIKELIHOOD]


def test_log_likelihood_averages_tokens_of_the_first_rows_for_any_micro_batch(files: Path, folder: Path) -> None:
    """Batches stay within ``micro_batch`` and ``micro_batch_tokens``; the temperature of samples does not matter."""
    chosen = {"demonstrations": str(files / "rows.jsonl"), "rows": 7}
    made = world(files, folder, evaluation=chosen, sampling={"prompts": 16, "max_tokens": 8, "temperature": 0.5})
    total, count = 0.0, 0
    for row in [json.loads(line) for line in (files / "rows.jsonl").read_text().splitlines()][:7]:
        prompt = made.tokens.encode_prompt(row["prompt"])
        ids = torch.tensor([[*prompt, *made.tokens.encode_prompt(row["completion"]), made.tokens.eos_id]])
        with torch.no_grad():
            log_probs = made.policy.model(ids).logits[0, :-1].log_softmax(-1)
        actual = log_probs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :]
        total, count = total + float(actual.sum()), count + len(actual)
    assert log_likelihood(made) == pytest.approx(total / count, rel=1e-4)
    data = {"train": str(files / "prompts.jsonl"), "max_length": 16}  # no held-out prompts, so nothing is sampled
    for bound, limit in (({"micro_batch": 2}, 2), ({"micro_batch_tokens": 64}, 64)):
        shapes: list[torch.Size] = []
        small = world(files, folder, evaluation=chosen, optimizer=bound, data=data)
        embeddings = small.policy.model.get_input_embeddings()
        embeddings.register_forward_hook(lambda _, arguments, __, shapes=shapes: shapes.append(arguments[0].shape))
        assert log_likelihood(small) == pytest.approx(total / count, rel=1e-4)
        assert 0 < max(shape[0] if "micro_batch" in bound else shape.numel() for shape in shapes) <= limit


def test_log_likelihood_is_in_the_metrics_and_the_evaluation_report(files: Path, folders: dict[str, Path]) -> None:
    settings = fields(files, folders["llama"], steps=256, reference={"beta": 0.0}, optimizer={"learning_rate": 3e-3})
    settings["evaluation"]["every"] = 64
    surefoot.train("language", run_dir=files / "run", **settings)
    rows = [row for row in read_metrics(files / "run" / "metrics.jsonl") if LIKELIHOOD in row]
    assert [row["steps"] for row in rows] == [64, 128, 192, 256]
    report = evaluate_run(files / "run")
    assert report["start"]["log_likelihood"] == pytest.approx(log_likelihood(world(files, folders["llama"])), rel=1e-6)
    at_best = next(row for row in rows if row["steps"] == report["steps"])
    assert report["trained"]["log_likelihood"] == pytest.approx(at_best[LIKELIHOOD], rel=1e-6)
    assert rows[-1][LIKELIHOOD] < report["start"]["log_likelihood"] - 0.1, "without a KL penalty the likelihood must drop"
    assert "log π of demonstrations" in report_table(report)


def test_log_likelihood_alone_triggers_neither_patience_nor_a_best_checkpoint(files: Path, folders: dict[str, Path]) -> None:
    """It is measured even without held-out prompts."""
    data = {"train": str(files / "prompts.jsonl"), "max_length": 16}
    settings = fields(files, folders["llama"], data=data, steps=64)
    settings["evaluation"] |= {"patience": 1}
    surefoot.train("language", run_dir=files / "run", **settings)
    rows = read_metrics(files / "run" / "metrics.jsonl")
    assert rows[-1]["steps"] == 64
    assert all(LIKELIHOOD in row and "held_out_reward" not in row for row in rows)
    assert any(later[LIKELIHOOD] <= earlier[LIKELIHOOD] for earlier, later in pairwise(rows[:-1]))
    assert not (files / "run" / "best").exists()


def test_unusable_demonstrations_are_rejected_before_the_run_starts(files: Path, folders: dict[str, Path]) -> None:
    """A single row that is too long is dropped and reported."""
    (files / "half.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    too_long = {"prompt": "a", "completion": "b" * 200}
    write_rows(files / "long.jsonl", [too_long])
    for evaluation, message in (
        ({"demonstrations": str(files / "row.jsonl")}, r"row\.jsonl: no such file; did you mean .*rows\.jsonl"),
        ({"demonstrations": str(files / "half.jsonl")}, r"half\.jsonl, line 2: missing column 'completion'"),
        ({"demonstrations": str(files / "long.jsonl")}, r"long\.jsonl: all 1 rows are dropped"),
        ({"demonstrations": "x.jsonl", "rows": 0}, r"evaluation\.demonstrations='x\.jsonl': evaluation\.rows=0"),
    ):
        with pytest.raises(SurefootError, match=message):
            surefoot.train("language", run_dir=files / "run", **fields(files, folders["llama"], evaluation=evaluation))
        assert not (files / "run").exists()
    with (files / "rows.jsonl").open("a") as file:
        file.write(json.dumps(too_long) + "\n")
    lines = world(files, folders["llama"]).arithmetic()
    assert any("rows.jsonl: dropped, because longer than 128 tokens: 1 rows" in line for line in lines)
