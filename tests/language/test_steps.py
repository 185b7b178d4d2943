"""Process reward models: trained on step labels, saved as token classifiers, and loaded as step rewards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.language.analysis.evaluate import evaluate_run
from surefoot.language.data.datasets import stepped
from surefoot.language.data.sources import read_rows
from surefoot.language.models.reward_model import RewardModel, load_reward_model
from surefoot.language.rewards.model import ModelReward
from surefoot.language.supervised.steps import StepPolicy
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner
from surefoot.store.metrics import read_metrics

from .test_data import TOKENS
from .test_supervised import write

GOOD_STEPS, BAD_STEPS = ("add one", "so two", "we have ten"), ("zzz", "then qq")


def answers(path: Path, count: int = 24) -> str:
    """Write labelled answers of one to three steps."""
    rows = []
    for i in range(count):
        labels = [(i + step) % 3 != 0 for step in range(1 + i % 3)]
        steps = [(GOOD_STEPS[(i + k) % 3] if good else BAD_STEPS[(i + k) % 2]) for k, good in enumerate(labels)]
        rows.append({"prompt": f"{i % 5}: ", "completions": steps, "labels": labels})
    return write(path, rows)


def recipe(folder: Path, rows: str, **fields: Any) -> Any:
    settings = {"train": rows, "max_length": 64, "batch": 8, **fields.pop("data", {})}
    preference = {"loss": "steps", **fields.pop("preference", {})}
    return make_recipe(
        {"kind": "reward", "model": str(folder), "steps": 96, "data": settings, "preference": preference, **fields}
    )


def test_loss_is_the_binary_cross_entropy_of_steps_for_any_micro_batch_size(folders: dict[str, Path], tmp_path: Path) -> None:
    data, results = answers(tmp_path / "a.jsonl"), []
    for settings in ({}, {"micro_batch": 3}, {"micro_batch_tokens": 60}):
        world = SupervisedWorld(recipe(folders["llama"], data, optimizer=settings))
        assert isinstance(world.policy, StepPolicy)
        state = LearnerState.seeded(1, 96)
        rollout = world.collector.collect(state)
        losses = []
        with torch.no_grad():
            for row in range(8):
                for step in range(int(rollout.mask[row].sum())):  # only the text up to the end of the step
                    ids = rollout.inputs["answer"][row : row + 1, : int(rollout.inputs["ends"][row, step]) + 1]
                    score = world.policy.model.raw(ids, torch.ones_like(ids))
                    label = (rollout.actions[row, step] == 0).float().view(1)
                    losses.append(float(torch.nn.functional.binary_cross_entropy_with_logits(score, label)))
        metrics = make_learner(world.recipe, world.policy).update(
            rollout, assign_credit(rollout, world.recipe.objective), state
        )
        assert metrics["policy_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        results.append((metrics["policy_loss"], metrics["gradient_norm_policy"]))
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-5)


def test_step_ends_at_its_last_token_including_the_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "p: ", "completions": ["ab", "c"], "labels": [True, False]}])
    made = stepped(read_rows(path), TOKENS, 64)
    texts = [TOKENS.decode(made.ids[0][: end + 1]) for end in made.ends[0]]
    assert [text.rpartition("p: ")[2] for text in texts] == ["ab\n", "ab\nc"]
    assert made.good[0] == [True, False]
    characters = write(tmp_path / "b.jsonl", [{"prompt": "p: ", "completions": ["a", "b"], "labels": ["1", 0]}])
    made = stepped(read_rows(characters), TOKENS, 64, separator="")
    assert [TOKENS.decode(made.ids[0][: end + 1])[-1] for end in made.ends[0]] == ["a", "b"]
    assert made.good[0] == [True, False]


def test_training_learns_steps_and_all_readers_get_the_same_scores(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    data = answers(tmp_path / "a.jsonl")
    fields: dict[str, Any] = {"data": {"train": data, "held_out": data, "max_length": 64, "batch": 8}, "steps": 480}
    fields |= {"optimizer": {"learning_rate": 3e-3}, "preference": {"loss": "steps"}}
    model = surefoot.train("reward", run_dir=tmp_path / "run", model=str(folders["llama"]), **fields)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["held_out_accuracy"] > 0.95
    assert evaluate_run(tmp_path / "run", rows=24)["held_out_accuracy"] > 0.95

    folder = tmp_path / "run" / "model"
    theirs = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert theirs.config.id2label == {0: "bad", 1: "good"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    steps = ["add one", "zzz"]
    ids = tokenizer("1: " + "\n".join(steps) + tokenizer.eos_token, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits, ours = theirs(input_ids=ids).logits[0], model.prefix_scores(ids, torch.ones_like(ids))[0]
        last = model.logits(ids, torch.ones_like(ids))[0]
    torch.testing.assert_close(logits[:, 1] - logits[:, 0], ours, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, ours[-1])

    for where in (tmp_path / "run", folder, sorted((tmp_path / "run" / "best").iterdir())[-1]):
        again = surefoot.load(where)
        assert isinstance(again, RewardModel)
        assert again.of_steps
        assert torch.equal(again.head.weight, model.head.weight)
        assert (float(again.mean), float(again.std)) == (float(model.mean), float(model.std))

    reward = ModelReward(tmp_path / "run", per="step", separator="\n")
    read = reward.model
    scores = reward(["1: "], ["\n".join(steps)], {}, tokens=[["add one\n", "zzz", ""]])
    first, second = scores.dense[0, 0].item(), scores.dense[0, 1].item()
    assert first > 0 > second
    place = len(tokenizer("1: add one\n")["input_ids"]) - 1
    assert first == pytest.approx(float((ours[place] - read.mean) / read.std), rel=1e-3, abs=1e-3)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    texts = [(row["prompt"], "\n".join(row["completions"])) for row in rows]
    marks = [reward._marks([reward._ids(prompt, answer)], [answer])[0] for prompt, answer in texts]
    every = torch.tensor([score for row in marks for _, score in row])
    assert len(every) == sum(len(row["labels"]) for row in rows)
    assert float(every.mean()) == pytest.approx(0, abs=1e-3)
    assert float(every.std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_invalid_step_rows_raise_a_one_line_error_with_the_line_number(tmp_path: Path) -> None:
    for row, message in [
        ({"completions": ["a"], "labels": [True, False]}, "column 'labels' has 2 labels for 1 completions"),
        ({"completions": [], "labels": []}, "column 'completions' is an empty list"),
        ({"completions": ["a", " "], "labels": [True, True]}, "column 'completions', step 2 is ' '"),
        ({"completions": ["a"], "labels": ["maybe"]}, "column 'labels', step 1 is 'maybe'; it must be true or false"),
        ({"completions": ["a\nb"], "labels": [True]}, "has steps that contain '\\\\n'"),
        ({"completions": ["a"]}, "an answer in steps has prompt, completions and labels"),
    ]:
        path = write(tmp_path / "a.jsonl", [{"prompt": "p", **row}])
        with pytest.raises(SurefootError, match=message) as error:
            stepped(read_rows(path), TOKENS, 64)
        assert "line 1" in str(error.value)


def test_single_label_data_is_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", [{"prompt": "p", "completions": ["a", "b"], "labels": [True, True]}])
    with pytest.raises(SurefootError, match="all 2 steps are good; a reward model needs good and bad ones"):
        SupervisedWorld(recipe(folders["llama"], rows))


def test_public_process_reward_model_loads_only_with_two_labels(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    for labels in (2, 3):
        model = AutoModelForTokenClassification.from_pretrained(folders["qwen2"], num_labels=labels).eval()
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
        model.save_pretrained(tmp_path / str(labels))
        AutoTokenizer.from_pretrained(folders["qwen2"]).save_pretrained(tmp_path / str(labels))
        if labels == 3:
            with pytest.raises(SurefootError, match=r"has 3 labels .*; a process reward model has two"):
                load_reward_model(tmp_path / "3")
            continue
        read, ids = load_reward_model(tmp_path / "2"), torch.tensor([[3, 7, 9, 4]])
        assert isinstance(read, RewardModel)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
            ours = read.prefix_scores(ids, torch.ones_like(ids))[0]
        torch.testing.assert_close(ours, logits[:, 1] - logits[:, 0], atol=1e-5, rtol=1e-5)
