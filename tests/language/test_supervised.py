"""SFT and reward models train by REINFORCE with a reward of 1 for every row, which gives their standard losses."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState, tensors_in
from surefoot.language.data import datasets as data
from surefoot.language.data.sources import read_rows
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.supervised.world import RowCollector, SupervisedWorld
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner
from surefoot.store.metrics import read_metrics

SENTENCES = ("the cat sat", "a dog ran", "birds sing", "the sun is up")
QUICK = {"optimizer": {"learning_rate": 1e-3}}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def demonstrations(path: Path, count: int = 24) -> str:
    return write(path, ({"prompt": f"{i % 5}: ", "completion": SENTENCES[i % 4]} for i in range(count)))


def pairs(path: Path, count: int = 24) -> str:
    rows = ({"prompt": f"{i % 5}: ", "chosen": SENTENCES[i % 4], "rejected": SENTENCES[i % 4][::-1]} for i in range(count))
    return write(path, rows)


def recipe(kind: str, folder: Path, data: str, **fields: Any) -> Any:
    settings = {"train": data, "max_length": 64, "batch": 8}
    return make_recipe({"kind": kind, "model": str(folder), "steps": 96, "data": settings, **fields})


def test_sft_loss_is_the_cross_entropy_of_the_completion(folder: Path, tmp_path: Path) -> None:
    world = SupervisedWorld(recipe("sft", folder, demonstrations(tmp_path / "d.jsonl")))
    rollout = world.collector.collect(LearnerState.seeded(1, 96))
    credit = assign_credit(rollout, world.recipe.objective)
    assert credit.advantages[rollout.mask].eq(1).all()
    learner = make_learner(world.recipe, world.policy)
    model, total, count = world.policy.model, 0.0, 0
    for prompt, mask, actions, kept in zip(
        rollout.inputs["prompt"], rollout.inputs["prompt_mask"], rollout.actions, rollout.mask, strict=True
    ):
        question, sampled = prompt[mask], actions[kept]
        with torch.no_grad():
            logits = model(torch.cat([question, sampled]).unsqueeze(0)).logits[0, len(question) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, sampled, reduction="sum"))
        count += len(sampled)
    metrics = learner.update(rollout, credit, LearnerState.seeded(1, 96))
    assert metrics["policy_loss"] == pytest.approx(total / count, rel=1e-5)


def test_collector_puts_rows_on_its_device(folders: dict[str, Path], tmp_path: Path) -> None:
    for kind in ["sft", "reward"]:
        rows = (demonstrations if kind == "sft" else pairs)(tmp_path / "rows.jsonl")
        made = SupervisedWorld(recipe(kind, folders["llama"], rows))
        rollout = RowCollector(made.collector.rows, 8, 1, "meta").collect(LearnerState.seeded(1, 96))
        assert {x.device.type for x in tensors_in(rollout)} == {"meta"}


def check_same_logits(run: Path, trained: Any) -> None:
    """transformers and ``load`` read the trained model from the run's folder."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(12).unsqueeze(0) + 20
    with torch.no_grad():
        for there in (AutoModelForCausalLM.from_pretrained(run / "model").eval(), surefoot.load(run).model):
            torch.testing.assert_close(there(ids).logits, trained.model(ids).logits, rtol=0, atol=0)


def test_sft_learns_and_transformers_loads_it_with_the_same_logits(folders: dict[str, Path], tmp_path: Path) -> None:
    data = demonstrations(tmp_path / "d.jsonl")
    held_out = {"train": data, "held_out": data, "max_length": 64, "batch": 8}
    fields = {"model": str(folders["llama"]), "data": held_out, "steps": 640, "optimizer": {"learning_rate": 5e-3}}
    trained = surefoot.train("sft", run_dir=tmp_path / "run", **fields)
    losses = [row["held_out_loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "held_out_loss" in row]
    assert losses[-1] < losses[0] / 2
    check_same_logits(tmp_path / "run", trained)


def test_reward_model_learns_and_has_mean_0_and_std_1_on_demonstrations(folders: dict[str, Path], tmp_path: Path) -> None:
    chosen, shown = pairs(tmp_path / "p.jsonl"), demonstrations(tmp_path / "d.jsonl")
    fields = {
        "data": {"train": chosen, "held_out": chosen, "max_length": 64, "batch": 8},
        "steps": 480,
        "demonstrations": shown,
    }
    surefoot.train("reward", run_dir=tmp_path / "run", model=str(folders["llama"]), optimizer={"learning_rate": 3e-3}, **fields)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["held_out_accuracy"] > 0.95
    model = RewardModel.load(tmp_path / "run" / "model")
    world = SupervisedWorld(recipe("sft", folders["llama"], shown))
    rows = data.demonstrations(read_rows(shown), world.tokens, 64)
    ids = [torch.tensor([row]) for row in rows.ids]
    with torch.no_grad():
        scores = torch.cat([model(row, torch.ones_like(row, dtype=torch.bool)) for row in ids])
    assert float(scores.mean()) == pytest.approx(0, abs=1e-4)
    assert float(scores.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_rows_longer_than_the_models_context_are_dropped_and_counted(folders: dict[str, Path], tmp_path: Path) -> None:
    """Even if data.max_length allows them: a model with learned positions has no embeddings for them."""
    for kind in ["sft", "reward"]:
        key, rows = ("completion", demonstrations) if kind == "sft" else ("chosen", pairs)
        path = Path(rows(tmp_path / "rows.jsonl"))
        long = json.loads(path.read_text().splitlines()[0]) | {key: "x" * 200}
        with path.open("a") as file:
            file.write(json.dumps(long) + "\n")
        settings = {"train": str(path), "max_length": 1024, "batch": 8}
        made = SupervisedWorld(make_recipe({"kind": kind, "model": str(folders["gpt2"]), "data": settings, **QUICK}))
        assert made.collector.rows.count == 24
        assert made.warnings == [f"{path}: dropped, because longer than 128 tokens: 1 rows"]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_dropped_rows_and_unused_columns_are_reported_before_training(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    key, rows = ("completion", demonstrations) if kind == "sft" else ("chosen", pairs)
    path = Path(rows(tmp_path / "rows.jsonl"))
    first = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        file.writelines(json.dumps(first | {"rejected": first[key], "source": "web", "tools": []}) + "\n" for _ in range(2))
    settings = {"train": str(path), "max_length": 64, "batch": 8}
    made = SupervisedWorld(make_recipe({"kind": kind, "model": str(folders["llama"]), "data": settings, **QUICK}))
    equal = f"{path}: dropped, because both answers are the same: 2 rows"
    assert made.collector.rows.count == (26 if kind == "sft" else 24)
    unused = "'rejected', 'source'" if kind == "sft" else "'source'"
    assert made.warnings == [*([] if kind == "sft" else [equal]), f"{path}: not used: {unused}"]
    assert made.arithmetic()[: len(made.warnings)] == made.warnings


def test_training_stops_early_without_held_out_improvement(folders: dict[str, Path], tmp_path: Path) -> None:
    """The held-out rows differ so much from the training rows that their loss rises."""
    data = {"train": demonstrations(tmp_path / "d.jsonl"), "max_length": 64, "batch": 8}
    data["held_out"] = write(tmp_path / "h.jsonl", ({"prompt": "0: ", "completion": "QXZ" * 4} for _ in range(8)))
    rows: list[Any] = []
    surefoot.train(
        "sft",
        model=str(folders["llama"]),
        data=data,
        steps=8_000,
        optimizer={"learning_rate": 1e-2},
        evaluation={"every": 16, "patience": 3},
        callback=lambda metrics: bool(rows.append(metrics)),
    )
    assert rows[-1]["steps"] < 4_000


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_gradient_checkpointing_recomputes_layers_and_keeps_gradient_norm(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    rows = (demonstrations if kind == "sft" else pairs)(tmp_path / "rows.jsonl")
    results = []
    for checkpointing in (False, True):
        made = SupervisedWorld(recipe(kind, folders["llama"], rows, gradient_checkpointing=checkpointing))
        passes = []
        trunk = made.policy.model.base_model if kind == "sft" else made.policy.model.backbone
        trunk.layers[0].mlp.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        state = LearnerState.seeded(1, 96)
        rollout = made.collector.collect(state)
        metrics = make_learner(made.recipe, made.policy).update(rollout, assign_credit(rollout, made.recipe.objective), state)
        results.append((len(passes), metrics["gradient_norm_policy"]))
    (once, plain), (again, checkpointed) = results
    assert again == 2 * once
    assert checkpointed == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_evaluation_obeys_micro_batch_tokens_and_keeps_the_loss(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    file = (demonstrations if kind == "sft" else pairs)(tmp_path / "rows.jsonl")
    losses = []
    for most in (None, 40):
        settings = {"train": file, "held_out": file, "max_length": 64, "batch": 8}
        table = {"kind": kind, "model": str(folders["llama"]), "steps": 96, "data": settings}
        world = SupervisedWorld(make_recipe({**table, "optimizer": {"micro_batch_tokens": most or "none"}}))
        read: list[int] = []
        whole = world.policy.forward if kind != "dpo" else world.policy.scores

        def watched(inputs: Any, *others: Any, whole: Any = whole, read: list[int] = read, world: Any = world) -> Any:
            costs = world.policy.costs(inputs, *(others[1:] or [torch.ones(len(next(iter(inputs.values()))), 1)]))
            read.append(len(costs) * int(costs.max()) if len(costs) > 1 else 0)  # a single row may be longer
            return whole(inputs, *others)

        setattr(world.policy, "forward" if kind != "dpo" else "scores", watched)
        losses.append(world.evaluate().metrics["held_out_loss"])
        assert read
        assert (max(read) > 40) is (most is None)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_low_learning_rate_of_a_small_model_is_noted() -> None:
    for parameters, rate, noted in [(800_000, 2e-6, True), (800_000, 1e-4, False), (135_000_000, 2e-6, False)]:
        table = {"kind": "sft", "model": "pocket", "data": {"train": "rows.jsonl"}, "optimizer": {"learning_rate": rate}}
        recipe: Any = make_recipe(table)
        assert ["learn slowly at this rate" in note for note in recipe.notes(parameters)] == [True] * noted
