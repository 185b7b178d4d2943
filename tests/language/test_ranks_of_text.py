"""Language runs on two ranks: one run folder, the results of one process, exact resume, and reward errors."""

import pytest
import torch
from killing import assert_same
from ranked import on_ranks

import surefoot
from surefoot.diagnostics.metrics import TIMING
from surefoot.store.checkpoint import latest_checkpoint, load_checkpoint
from surefoot.store.metrics import read_metrics

from .tiny import write_folder, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    write_folder(path / "model", "llama")
    write_texts(path)
    return path


def arguments(folder, kind, **fields):
    table = {"model": str(folder / "model"), "checkpoint": {"every": 8}, "seed": 3, **fields}
    rows = {"train": str(folder / "rows.jsonl"), "held_out": str(folder / "rows.jsonl")}
    if kind == "sft":
        data = {**rows, "max_length": 64, "batch": 4}
        return {"steps": 24, "data": data, "evaluation": {"every": 8, "rows": 4}, **table}
    return {
        "steps": 24,
        "algorithm": "A2C",
        "data": {**rows, "max_length": 32},
        "evaluation": {"every": 8, "rows": 3},
        "sampling": {"prompts": 4, "samples": 2, "max_tokens": 6},
        "reward": {"terms": [{"function": f"{folder}/rewards.py:score"}], "missing_eos": "none"},
        "reference": {"beta": 0.1, "target": 0.5, "horizon": 20},
        **table,
    }


def trained(folder, run, kind, ranks=2, **fields):
    def body(_):
        result = surefoot.train(kind, run_dir=run, **arguments(folder, kind, **fields))
        return {name: p.detach().clone() for name, p in result.model.named_parameters()}

    return on_ranks(ranks, body, run.with_name(f"{run.name} results"))


def rows_of(run):
    skipped = {*TIMING, "tokens_per_second", "seconds_sampling", "seconds_scoring"}
    return [{name: value for name, value in row.items() if name not in skipped} for row in read_metrics(run / "metrics.jsonl")]


def resumed_after_8_steps(folder, run, kind, **fields):
    """The weights of a run that is interrupted and resumed, on each rank."""
    trained(folder, run, kind, callback=lambda metrics: metrics["steps"] >= 8, **fields)
    assert latest_checkpoint(run / "checkpoints").name == "8"

    def body(_):
        return {name: p.detach().clone() for name, p in surefoot.resume(run).model.named_parameters()}

    return on_ranks(2, body, run.with_name("resumed results"))


@pytest.mark.parametrize("kind", ["language", "sft"])
def test_two_rank_run_repeats_resumes_and_matches_one_process(folder, tmp_path, kind):
    first, second = trained(folder, tmp_path / "two", kind)
    assert_same(first, second)
    trained(folder, tmp_path / "again", kind)
    assert rows_of(tmp_path / "again") == rows_of(tmp_path / "two")
    for weights in resumed_after_8_steps(folder, tmp_path / "resumed", kind):
        assert_same(weights, first)
    assert rows_of(tmp_path / "resumed") == rows_of(tmp_path / "two")

    surefoot.train(kind, run_dir=tmp_path / "one", **arguments(folder, kind))
    alone, both = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    assert alone[0].keys() == both[0].keys()
    numbers = [name for name, value in alone[0].items() if isinstance(value, float)]
    different = {
        name: (alone[0][name], both[0][name])
        for name in numbers
        if both[0][name] != pytest.approx(alone[0][name], rel=1e-3, abs=1e-5)
    }
    assert not different, "every metric of the first update matches one process"
    saved = [load_checkpoint(latest_checkpoint(tmp_path / run / "checkpoints")) for run in ("one", "two")]
    for name, weights in saved[0]["agent"].items():
        torch.testing.assert_close(weights, saved[1]["agent"][name], rtol=1e-3, atol=1e-5)
    assert (tmp_path / "two" / "model" / "model.safetensors").exists()


DRAWN = {
    "dropout of adapters": ("sft", {"adapter": {"rank": 2, "dropout": 0.3}}),
    "minibatches": ("language", {"algorithm": "PPO_CLIP", "objective": {"reuse": {"epochs": 2, "minibatches": 2}}}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_each_rank_draws_itself_is_drawn_again_on_resume(folder, tmp_path, name):
    """Dropout of its rows, and their order: every rank resumes from the checkpoint of rank 0."""
    kind, fields = DRAWN[name]
    if "adapter" in fields:
        pytest.importorskip("peft")
    first, second = trained(folder, tmp_path / "two", kind, **fields)
    assert_same(first, second)
    for weights in resumed_after_8_steps(folder, tmp_path / "resumed", kind, **fields):
        assert_same(weights, first)
    assert rows_of(tmp_path / "resumed") == rows_of(tmp_path / "two")


def test_reward_error_on_one_rank_stops_both_with_its_message(folder, tmp_path):
    (tmp_path / "fragile.py").write_text(
        "import os\n\ndef score(prompts, responses):\n"
        "    if os.environ.get('RANK') == '1':\n        raise ValueError('no licence')\n    return [0.0] * len(responses)\n"
    )
    reward = {"terms": [{"function": f"{tmp_path}/fragile.py:score"}], "missing_eos": "none"}
    first, second = trained(folder, tmp_path / "run", "language", reward=reward)
    assert "no licence" in second
    assert first.startswith("SurefootError: rank 1: ")
    assert "no licence" in first
