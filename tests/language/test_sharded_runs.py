"""Sharded runs: checkpoints resume on any number of ranks, models load in transformers, and failures stop all ranks."""

import json
import os
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from killing import assert_same
from ranked import on_ranks, two_of_which_one_fails

import surefoot
from surefoot.errors import SurefootError
from surefoot.language.models import loading
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.models.reward_model import RewardModel, new_reward_model
from surefoot.language.online import collect as collecting
from surefoot.language.online import engine
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_world
from surefoot.runs.session import Session, saving
from surefoot.sharding import Shard, local_part, read_range, start_of
from surefoot.store.checkpoint import latest_checkpoint, load_checkpoint
from surefoot.store.metrics import read_metrics
from surefoot.store.tensors import StoredTensor

from .test_sharded import watched_memory
from .tiny import model, tokenizer, write_folder, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded_runs")
    write_folder(folder / "model", "llama", tie_word_embeddings=True)
    write_texts(folder)
    return folder


def fields(folder: Path, kind: str) -> dict[str, Any]:
    """Keyword arguments of a run with two checkpoints, after 18 and 36 rows."""
    rows = {"train": str(folder / "rows.jsonl"), "held_out": str(folder / "rows.jsonl"), "max_length": 64}
    table: dict[str, Any] = {
        "model": str(folder / "model"),
        "sharding": "full",
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    table |= {"evaluation": {"rows": 4, "every": 18}, "checkpoint": {"every": 18, "keep": 3}}
    if kind == "language":
        table |= {"data": rows, "sampling": {"prompts": 9, "max_tokens": 4}, "reward": f"{folder}/rewards.py:score"}
        table["reward"] = {"terms": [table["reward"]], "missing_eos": "none"}
        return table | {"objective": {"reuse": {"epochs": 1, "minibatches": 3}}, "optimizer": {"learning_rate": 1e-3}}
    if kind == "reward":
        rows |= {"train": str(folder / "pairs.jsonl"), "held_out": str(folder / "pairs.jsonl")}
    if kind.startswith("steps"):
        rows |= {"train": str(folder / "steps.jsonl"), "held_out": str(folder / "steps.jsonl")}
        table |= {"preference": {"loss": "steps"}}
    if kind == "steps of an adapter":
        table |= {"adapter": {"rank": 2, "dropout": 0.2}}
    return table | {"data": {**rows, "batch": 9}}


def train(folder: Path, kind: str, run_dir: Path, steps: int, **changes: Any) -> None:
    options = {"kind": kind} if kind == "language" else {}
    surefoot.train(
        "reward" if kind.startswith("steps") else kind,
        steps=steps,
        run_dir=run_dir,
        seed=1,
        **{**fields(folder, kind), **changes},
        **options,
    )


def whole(run_dir: Path) -> dict[str, Any]:
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    return load_checkpoint(checkpoint)


def mismatches(run_dir: Path) -> list[str]:
    """Names of this rank's parameters and moments that differ from the last checkpoint after restoring it."""
    saved = whole(run_dir)
    recipe = make_recipe(saved["recipe"])
    session = Session(recipe.model_copy(update={"steps": 1_000}), make_world(recipe), None)
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    session.restore(checkpoint, allow_changes=True)
    wrong = []
    for name, parameter in session.world.policy.state_dict().items():
        local, start = local_part(parameter).reshape(-1), start_of(parameter)
        if not torch.equal(local, read_range(saved["agent"][name], start, start + local.numel())):
            wrong.append(name)
    optimizer, moments = session.learner.steppable["policy"], saved["learner"]["policy"]
    state = optimizer.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        part = state[name] if isinstance(state[name], Shard) else Shard(moments[name].shape, torch.float32, [0], [state[name]])
        for start, values in zip(part.starts, part.values, strict=True):
            if not torch.equal(values, moments[name][start : start + len(values)]):
                wrong.append(name)
    return [*wrong, *([] if torch.equal(state["step"], moments["step"]) else ["step"])]


def test_checkpoints_restore_bit_for_bit_on_any_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    """Written by three ranks or one process; read by one, two and three ranks."""
    on_ranks(3, lambda rank: train(folder, "sft", tmp_path / "of three", 36), tmp_path / "a")
    train(folder, "sft", tmp_path / "of one", 36)
    shards = sorted(path.name for path in (tmp_path / "of three" / "checkpoints" / "36").glob("*.*.safetensors"))
    assert shards == [f"{part}.{rank:05d}.safetensors" for part in ("agent", "learner") for rank in range(3)]
    torch.testing.assert_close(whole(tmp_path / "of three")["agent"], whole(tmp_path / "of one")["agent"], rtol=1e-4, atol=1e-5)

    def body(rank: int) -> dict[str, list[str]]:
        join_ranks()
        return {run: mismatches(tmp_path / run) for run in ("of three", "of one")}

    right: dict[str, list[str]] = {"of three": [], "of one": []}
    assert on_ranks(2, body, tmp_path / "b") == [right] * 2
    assert on_ranks(3, body, tmp_path / "c") == [right] * 3
    assert {run: mismatches(tmp_path / run) for run in right} == right


@pytest.mark.parametrize(
    "kind", ["sft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("language", "reward", "steps of an adapter"))]
)
def test_sharded_run_repeats_and_resumes_bit_for_bit_and_saves_a_model(kind: str, folder: Path, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        train(folder, kind, tmp_path / "whole", 36)
        train(folder, kind, tmp_path / "again", 36)
        train(folder, kind, tmp_path / "cut", 18)
        surefoot.resume(tmp_path / "cut", steps=36)

    assert on_ranks(2, body, tmp_path / "results") == [None] * 2
    parts = whole(tmp_path / "whole")
    assert parts["learner"]["policy"]["step"] > 1
    for other in ("again", "cut"):
        for part in ("agent", "learner", "collector"):
            assert_same(parts[part], whole(tmp_path / other)[part], f"{other} {part}")
    result = surefoot.load(tmp_path / "whole")
    saved = surefoot.load(tmp_path / "whole" / "model")
    if kind == "reward" or kind.startswith("steps"):
        assert float(saved.std) != 1
        assert result.of_steps == saved.of_steps == kind.startswith("steps")
        assert (float(result.mean), float(result.std)) == (float(saved.mean), float(saved.std))
        assert torch.equal(result.backbone.get_input_embeddings().weight, saved.backbone.get_input_embeddings().weight)
    else:
        assert result.generate(["1 says "], seed=1, max_tokens=4) == saved.generate(["1 says "], seed=1, max_tokens=4)
    surefoot.resume(tmp_path / "cut", steps=54)  # by one process
    assert read_metrics(tmp_path / "cut" / "metrics.jsonl")[-1]["steps"] == 54


def test_missing_and_foreign_shards_are_rejected(folder: Path, tmp_path: Path) -> None:
    on_ranks(2, lambda rank: train(folder, "sft", tmp_path / "run", 18), tmp_path / "results")
    checkpoint = tmp_path / "run" / "checkpoints" / "18"
    shutil.copytree(checkpoint, tmp_path / "copy")
    (checkpoint / "agent.00001.safetensors").unlink()
    with pytest.raises(SurefootError, match=r"agent\.00001\.safetensors is missing"):
        surefoot.resume(tmp_path / "run", steps=36)
    for line in on_ranks(2, lambda rank: surefoot.resume(tmp_path / "run", steps=36), tmp_path / "resumed"):
        assert "agent.00001.safetensors is missing" in line
    table = json.loads((tmp_path / "copy" / "agent.json").read_text())
    name = next(iter(table))
    for pieces, message in (([], "do not make it up"), ([["../x", name, [[0, 10**9]]]], "do not make it up")):
        broken = {**table[name]["$shards"], "pieces": pieces}
        with pytest.raises(SurefootError, match=message):
            StoredTensor.of(broken, tmp_path / "copy" / "agent.json", [])
    foreign = {"shape": [4], "dtype": "float32", "pieces": [["../x", name, [[0, 4]]]]}
    with pytest.raises(SurefootError, match="names a shard that its manifest does not list"):
        StoredTensor.of(foreign, tmp_path / "copy" / "agent.json", ["agent.json"])


MODELS: dict[str, dict[str, Any]] = {"tied": {}, "untied": {"model": "untied"}, "mixture": {"model": "mixture"}}
if find_spec("peft") is not None:
    MODELS |= {"adapter": {"adapter": {"rank": 2}}, "tied adapter": {"adapter": {"rank": 2, "targets": ["q_proj"]}}}


@pytest.mark.parametrize("name", [n if n in ("tied", "adapter") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_transformers_loads_the_model_of_a_sharded_run(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has several files with an index, merged adapters, and the logits of the checkpoint."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(loading, "LARGEST_FILE", "20KB")
    write_folder(tmp_path / "untied", "llama")
    write_folder(tmp_path / "mixture", "mixtral")
    changes = {**MODELS[name], **({"model": str(tmp_path / MODELS[name]["model"])} if "model" in MODELS[name] else {})}
    results = on_ranks(2, lambda rank: train(folder, "sft", tmp_path / "run", 18, **changes), tmp_path / "results")
    assert results == [None, None]
    place = tmp_path / "run" / "model"
    index = json.loads((place / "model.safetensors.index.json").read_text())
    count = len(set(index["weight_map"].values()))
    assert count > 1
    assert sorted(path.name for path in place.glob("*.safetensors")) == [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    assert ("lm_head.weight" in index["weight_map"]) == (name in ("untied", "mixture"))
    ids = torch.arange(1, 13).view(2, 6)
    whole_model = surefoot.load(tmp_path / "run").model
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained(place)(input_ids=ids).logits
        assert torch.equal(written, whole_model(input_ids=ids).logits)
    assert not list((tmp_path / "run").glob("**/.*.tmp"))
    if "adapter" in name:
        assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()
        agent = whole(tmp_path / "run")["agent"]
        assert all("lora" in name for name in agent)
        assert any(bool(x.abs().sum() > 0) for name, x in agent.items() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_first_rank_never_holds_the_whole_model_while_saving(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LARGEST_FILE", "10MB")
    big = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    write_folder(tmp_path / "big", "llama", **big)
    size = (tmp_path / "big" / "model.safetensors").stat().st_size
    assert size > 100e6
    before, peaks = SupervisedWorld.finish, []

    def watched(world: SupervisedWorld, place: Path) -> list[str]:
        with watched_memory() as seen:
            notes = before(world, place)
        peaks.extend(seen)
        return notes

    monkeypatch.setattr(SupervisedWorld, "finish", watched)

    def body(rank: int) -> int:
        train(folder, "sft", tmp_path / "run", 18, model=str(tmp_path / "big"), evaluation={"rows": 0})
        return max(peaks, default=0)

    first, _ = on_ranks(2, body, tmp_path / "results", timeout=80)
    assert isinstance(first, int), first
    assert first < size / 2, f"{first / 1e6:.0f} MB of {size / 1e6:.0f}"


@pytest.mark.parametrize("number", [0, 1])
def test_failed_shard_write_stops_all_ranks_and_keeps_the_last_checkpoint(
    number: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer threads agree: if the shards of one rank are missing, nothing is committed."""
    before = saving.write_shards

    def full(place: Path, shards: Any, of: int) -> None:
        if of == number and "54" in place.name and place.parent.name == "checkpoints":
            raise SurefootError(f"{place}: rank {of} can't write its shards (no space)")
        before(place, shards, of)

    monkeypatch.setattr(saving, "write_shards", full)
    results = on_ranks(2, lambda rank: train(folder, "sft", tmp_path / "run", 54), tmp_path / "results")
    assert all(f"rank {number} can't write its shards (no space)" in result for result in results), results
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "36"
    monkeypatch.undo()
    surefoot.resume(tmp_path / "run", steps=54)
    assert not list((tmp_path / "run").glob("**/.*.tmp"))


def test_failed_commit_of_the_best_checkpoint_stops_all_ranks_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other rank would wait for the shards of the next checkpoint until the timeout."""
    before = saving.write_snapshot

    def full(place: Path, snapshot: Any) -> None:
        if place.parent.name == "best":
            raise SurefootError(f"{place}: a checkpoint is not saved (no space)")
        before(place, snapshot)

    monkeypatch.setattr(saving, "write_snapshot", full)
    started = time.monotonic()
    results = on_ranks(2, lambda rank: train(folder, "sft", tmp_path / "run", 36), tmp_path / "results", timeout=240)
    assert all("a checkpoint is not saved (no space)" in result for result in results), results
    assert time.monotonic() - started < 200, "before the timeout of 240 s"


PLACES = {"learning": (LanguagePolicy, "forward"), "sampling": (engine, "sample"), "gathering": (collecting, "gathered")}


FAILURES = [("learning", "raises"), ("sampling", "raises"), ("sampling", "dies"), ("gathering", "raises")]
FAILURES += [
    pytest.param(place, what, marks=pytest.mark.slow if (place, what) == ("learning", "hangs") else pytest.mark.release)
    for place in PLACES
    for what in ("dies", "hangs")
    if (place, what) not in FAILURES
]


@pytest.mark.parametrize(("place", "what"), FAILURES)
def test_rank_failure_in_a_sharded_pass_stops_the_other_rank(
    place: str, what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded passes use other collectives than metrics, and they must not wait for a lost rank either."""
    where, name = PLACES[place]
    before, calls = getattr(where, name), []

    def failing(*arguments: Any, **named: Any) -> Any:
        if place != "learning" or torch.is_grad_enabled():
            calls.append(name)
        if dist.get_rank() == 1 and len(calls) == 5:
            if what == "raises":
                raise ValueError("out of luck")
            os.kill(os.getpid(), signal.SIGKILL if what == "dies" else signal.SIGSTOP)
        return before(*arguments, **named)

    monkeypatch.setattr(where, name, failing)
    steps, run = 90, tmp_path / "run"
    hangs = 1 if what == "hangs" else None
    results = two_of_which_one_fails(lambda rank: train(folder, "language", run, steps), tmp_path / "results", hangs)
    assert results[0].startswith("RankLostError: rank 0 of 2: another rank ") or (
        what == "raises" and results[0].startswith("SurefootError: ") and "out of luck" in results[0]
    )
    assert results[1] is None if what != "raises" else "out of luck" in results[1]
    latest_checkpoint(run / "checkpoints")  # raises if the checkpoint is damaged


def test_large_models_are_saved_in_several_files_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LARGEST_FILE", "40KB")
    from transformers import AutoModelForCausalLM

    made = model("llama", tie_word_embeddings=True)
    loading.save_model(made, tokenizer(), tmp_path / "language")
    new_reward_model(model("llama"), 1, tokenizer()).save(tmp_path / "reward")
    for name in ("language", "reward"):
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "language")
    assert all(torch.equal(x, read.state_dict()[key]) for key, x in made.state_dict().items())
    RewardModel.load(tmp_path / "reward")
    next((tmp_path / "language").glob("model-00002-*")).unlink()
    with pytest.raises(SurefootError, match=r"model-00002-of-00003\.safetensors is missing; copy the folder again"):
        loading.load_model(tmp_path / "language")
