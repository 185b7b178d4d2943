"""KTO and reward models trained on labelled answers, or on labels of their steps, in the same loop as pairs."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.language.analysis.evaluate import evaluate_run
from surefoot.language.data.datasets import labelled, stepped
from surefoot.language.data.rows import Row
from surefoot.language.data.shapes import paired, shape_of
from surefoot.language.data.sources import read_rows
from surefoot.language.models.loading import load_model
from surefoot.language.models.reward_model import RewardModel, load_reward_model
from surefoot.language.rewards.model import ModelReward
from surefoot.language.supervised.labels import KtoPolicy, StepPolicy, next_with_another, share_above
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner
from surefoot.store.metrics import read_metrics

from .test_data import TOKENS
from .test_dpo import gradient
from .test_supervised import SENTENCES, write
from .tiny import write_folder


def answers(path: Path, count: int = 24) -> str:
    """Write labelled answers: sentences are good, reversed ones bad; no prompt has both."""
    rows = (
        {"prompt": f"{i}: ", "completion": SENTENCES[i % 4] if i % 3 else SENTENCES[i % 4][::-1], "label": bool(i % 3)}
        for i in range(count)
    )
    return write(path, rows)


def recipe(folder: Path, rows: str, kind: str = "dpo", **fields: Any) -> Any:
    settings = {"train": rows, "max_length": 64, "batch": 8, **fields.pop("data", {})}
    preference = {"loss": "kto" if kind == "dpo" else "binary", **fields.pop("preference", {})}
    return make_recipe({"kind": kind, "model": str(folder), "steps": 96, "data": settings, "preference": preference, **fields})


def lower_reference(world: SupervisedWorld, nats: float) -> None:
    """Lower the reference's log-probabilities, so that z₀ is above 0."""
    world.reference.values = world.reference.values - nats


def log_prob(model: Any, prompt: Tensor, answer: Tensor) -> Tensor:
    logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    total: Tensor = logits.log_softmax(-1).gather(-1, answer[:, None]).sum()
    return total


# ---- the loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nats", [3.0, -3.0])
def test_kto_baseline_loss_and_gradient_match_a_direct_computation(
    nats: float, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Row by row in float64, unpadded, away from the reference: weighted 1 − σ(±β(h − z₀)), no gradient through z₀ ≥ 0."""
    other = write_folder(tmp_path / "other", "gpt2", seed=2)
    preference = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    fields = {"preference": preference, "reference": {"model": str(other), "beta": 0.02}, "optimizer": {"max_grad_norm": None}}
    made = recipe(folders["gpt2"], answers(tmp_path / "a.jsonl"), **fields)
    world = SupervisedWorld(made)
    world.policy.double()
    lower_reference(world, nats)
    rows = [row.columns for row in read_rows(made.data.train)]
    order = world.collector.sampler._order[:8]
    rollout = world.collector.collect(LearnerState.seeded(1, 96))
    model, frozen = world.result.model, load_model(other)[0].double()
    matched, mismatched = [], []
    for row in order:
        for partner, into in ((row, matched), ((row + 1) % len(rows), mismatched)):
            prompt = torch.tensor(world.tokens.encode_prompt(rows[row]["prompt"]))
            answer = torch.tensor(world.tokens.encode_completion(rows[partner]["completion"]))
            into.append(log_prob(model, prompt, answer) - log_prob(frozen, prompt, answer).detach() + nats)
    baseline = torch.stack(mismatched).detach().mean()
    assert float(baseline) > 1 or nats < 0
    assert float(baseline) < -1 or nats > 0
    baseline = baseline.clamp(min=0)
    gains = 0.02 * (torch.stack(matched) - baseline)
    losses = [
        1.5 * (1 - g.sigmoid()) if rows[row]["label"] else 0.5 * (1 - (-g).sigmoid())
        for row, g in zip(order, gains, strict=True)
    ]
    wanted = torch.stack(losses).mean()
    parameters = [p for p in world.policy.parameters() if p.requires_grad]
    direct = torch.cat([g.flatten() for g in torch.autograd.grad(wanted, parameters)])
    actual, value = gradient(world, rollout)
    assert rollout.metrics["kto_baseline"] == pytest.approx(float(baseline), rel=1e-5)
    assert value == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert direct.norm() > 1e-3
    assert float((actual - direct).norm() / direct.norm()) < 1e-5


def test_micro_batches_change_neither_baseline_loss_nor_gradient(folders: dict[str, Path], tmp_path: Path) -> None:
    other, data, results = write_folder(tmp_path / "other", "qwen2", seed=2), answers(tmp_path / "a.jsonl"), []
    for settings in ({}, {"micro_batch": 3}, {"micro_batch_tokens": 40}):
        world = SupervisedWorld(recipe(folders["qwen2"], data, optimizer=settings, reference={"model": str(other)}))
        lower_reference(world, 3.0)
        rollout = world.collector.collect(LearnerState.seeded(1, 96))
        of_batch, loss = gradient(world, rollout)
        results.append((rollout.metrics["kto_baseline"], loss, of_batch))
    whole, *parts = results
    assert whole[0] > 1
    for baseline, loss, of_batch in parts:
        assert (baseline, loss) == pytest.approx(whole[:2], rel=1e-5)
        assert float((of_batch - whole[2]).norm() / whole[2].norm()) < 1e-4


def test_kto_loss_at_the_reference_is_half_the_weight_of_each_answer(folders: dict[str, Path], tmp_path: Path) -> None:
    world = SupervisedWorld(recipe(folders["llama"], answers(tmp_path / "a.jsonl"), preference={"desirable_weight": 0.4}))
    rollout = world.collector.collect(LearnerState.seeded(1, 96))
    with torch.no_grad():
        half = world.policy(rollout.inputs, rollout.actions, rollout.mask).log_probs
    torch.testing.assert_close(half, torch.full_like(half, -0.5), atol=1e-4, rtol=0)
    expected = torch.where(rollout.actions == 0, 0.4, 1.0)
    torch.testing.assert_close(rollout.rewards, expected)


@pytest.mark.parametrize("head", ["last", "pooled"])
def test_reward_model_loss_on_labels_is_that_of_logistic_regression(
    head: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    made = recipe(folders["llama"], answers(tmp_path / "a.jsonl"), "reward", head=head)
    world = SupervisedWorld(made)
    rollout = world.collector.collect(LearnerState.seeded(1, 96))
    with torch.no_grad():
        scores = world.policy.model.raw(*(rollout.inputs[f"answer{part}"] for part in ("", "_mask", "_trained")))
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(scores, (rollout.actions[:, 0] == 0).float())
    assert gradient(world, rollout)[1] == pytest.approx(float(wanted), rel=1e-5)


# ---- mismatched answers, accuracy ---------------------------------------------------------------------------------------


def test_mismatched_answer_comes_from_the_next_row_with_another_prompt() -> None:
    assert next_with_another([(1,), (1,), (2,), (3,), (1,)], "a") == [2, 2, 3, 4, 2]
    assert next_with_another([(1,), (2,)], "a") == [1, 0]
    with pytest.raises(SurefootError, match=r"a: all 3 answers have the same prompt"):
        next_with_another([(1,)] * 3, "a")


def test_mismatched_answers_are_truncated_to_max_length(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 10, "completion": "b", "label": True}, {"prompt": "c", "completion": "d" * 10, "label": False}]
    data = {"max_length": 14, "batch": 2}
    world = SupervisedWorld(recipe(folders["llama"], write(tmp_path / "a.jsonl", rows), data=data))
    inputs, actions, _ = world.collector.rows.tensors([0, 1])
    lengths = inputs["mismatched_prompt_mask"].sum(-1) + inputs["mismatched_mask"].sum(-1)
    assert int(lengths[0]) == 14 == max(world.collector.rows.lengths)
    assert inputs["mismatched"].shape == inputs["mismatched_mask"].shape
    assert actions.tolist() == [[0], [1]]


def test_accuracy_is_the_share_of_correctly_ordered_pairs_with_ties_as_half() -> None:
    good, bad = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([2.0, 0.0])
    assert share_above(good, bad) == pytest.approx((0 + 0.5 + 0.5 + 1 + 1 + 1) / 6)


# ---- rows ---------------------------------------------------------------------------------------------------------------


def test_pairs_become_two_labelled_answers_and_labels_may_be_text_or_numbers(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "x", "rejected": "y"},
        {"prompt": "b", "completion": "z", "label": "False"},
        {"prompt": "c", "completion": "w", "label": 1},
    ]
    made = labelled(read_rows(write(tmp_path / "a.jsonl", rows)), TOKENS, 100)
    assert [TOKENS.tokenizer.decode(ids, skip_special_tokens=True) for ids in made.ids] == ["ax", "ay", "bz", "cw"]
    assert list(made.good) == [True, False, False, True]
    assert made.unused == ()


def test_answers_labelled_1_and_0_become_pairs_and_other_numbers_stay() -> None:
    rows = [{"prompt": "a", "completion": text, "label": label} for text, label in (("x", 1), ("y", 0), ("z", 2))]
    left: list[int] = []
    made = list(paired([Row(row, "line 1", "rows.jsonl") for row in rows], left))
    assert [row.columns for row in made] == [{"prompt": "a", "chosen": "x", "rejected": "y"}, rows[2]]
    assert left == [0]
    assert shape_of(rows[0]) == "", "a demonstration with a class"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "missing column 'label'; a labelled answer has prompt, completion and label"),
        ({"label": 3}, "column 'label' is 3; it must be true or false"),
        ({"label": None}, "column 'label' is None; it must be true or false"),
    ],
)
def test_unusable_rows_are_errors_with_file_and_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    answer = {"prompt": "a", "completion": "b"}
    path = write(tmp_path / "a.jsonl", [{**answer, "label": True}, {**answer, **row}])
    with pytest.raises(SurefootError, match=re.escape(f"{path}, line 2: {message}")):
        labelled(read_rows(path), TOKENS, 100)


def test_notes_count_both_labels_and_suggest_a_balancing_weight(folders: dict[str, Path], tmp_path: Path) -> None:
    world = SupervisedWorld(recipe(folders["llama"], answers(tmp_path / "a.jsonl")))
    (note,) = [line for line in world.warnings if "good and" in line]
    assert note.endswith("16 good and 8 bad answers, weighing 2 : 1; for 1 : 1 set preference.undesirable_weight=2")
    balanced = SupervisedWorld(recipe(folders["llama"], answers(tmp_path / "a.jsonl"), preference={"undesirable_weight": 2.0}))
    assert [line for line in balanced.warnings if line.endswith("16 good and 8 bad answers")]


# ---- runs ---------------------------------------------------------------------------------------------------------------


def test_kto_learns_from_unpaired_labels_and_its_run_can_be_evaluated(folders: dict[str, Path], tmp_path: Path) -> None:
    data = answers(tmp_path / "a.jsonl")
    fields: dict[str, Any] = {"data": {"train": data, "held_out": data, "max_length": 64, "batch": 8}, "steps": 240}
    fields |= {"optimizer": {"learning_rate": 1e-3}, "preference": {"loss": "kto"}}
    surefoot.train("dpo", run_dir=tmp_path / "run", model=str(folders["llama"]), **fields)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rows = [row for row in metrics if "held_out_loss" in row]
    assert rows[-1]["held_out_accuracy"] > 0.95
    assert rows[-1]["held_out_margin"] > 0
    assert rows[-1]["held_out_loss"] < 0.48
    assert rows[-1]["held_out_chosen_log_prob"] > rows[-1]["held_out_rejected_log_prob"]
    assert metrics[-1]["tokens"] > 8
    for checkpoint in (None, "last", "240"):
        again = evaluate_run(tmp_path / "run", rows=24, checkpoint=checkpoint)
        then = next(row for row in rows if row["steps"] == again["steps"])
        scores = {name: value for name, value in then.items() if name.startswith("held_out_")}
        assert {name: again[name] for name in scores} == pytest.approx(scores, rel=1e-5)
        assert checkpoint is None or again["steps"] == 240
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_reward_model_learns_from_labels_and_is_standardised_on_good_answers(folders: dict[str, Path], tmp_path: Path) -> None:
    data = answers(tmp_path / "a.jsonl")
    fields: dict[str, Any] = {"data": {"train": data, "held_out": data, "max_length": 64, "batch": 8}, "steps": 480}
    fields |= {"optimizer": {"learning_rate": 3e-3}, "preference": {"loss": "binary"}}
    model = surefoot.train("reward", run_dir=tmp_path / "run", model=str(folders["llama"]), **fields)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["held_out_accuracy"] > 0.95
    world = SupervisedWorld(recipe(folders["llama"], data, "reward"))
    texts = [torch.tensor([ids]) for ids in world.standardised_on[0]]
    with torch.no_grad():
        scores = torch.cat([model(ids, torch.ones_like(ids, dtype=torch.bool)) for ids in texts])
    assert len(scores) == 16
    assert float(scores.mean()) == pytest.approx(0, abs=1e-4)
    assert float(scores.std(correction=0)) == pytest.approx(1, abs=1e-4)


# ---- rejections ----------------------------------------------------------------------------------------------------------


def test_reward_models_and_kto_need_both_labels(folders: dict[str, Path], tmp_path: Path) -> None:
    for kind, learner in [("reward", "a reward model"), ("dpo", "KTO")]:
        rows = [{"prompt": f"{i}", "completion": "b", "label": 1.0} for i in range(3)]
        with pytest.raises(SurefootError, match=f"all 3 answers are good; {learner} needs good and bad ones"):
            SupervisedWorld(recipe(folders["llama"], write(tmp_path / "a.jsonl", rows), kind))


def test_kto_evaluates_rows_of_one_label_without_comparison_metrics(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [{"prompt": f"{i}", "completion": "b", "label": True} for i in range(8)]
    rows, both = write(tmp_path / "a.jsonl", good), write(tmp_path / "b.jsonl", [*good, {**good[0], "label": 0.0}])
    world = SupervisedWorld(recipe(folders["llama"], both, data={"held_out": rows, "batch": 4}))
    report = world.evaluate()
    assert set(report.metrics) == {"held_out_loss", "held_out_chosen_log_prob", "held_out_chosen_moved"}
    assert math.isclose(float(report.metrics["held_out_loss"] or 0), 0.5, abs_tol=1e-4)
    assert json.dumps(dict(report.metrics))
    monkeypatch.setattr(KtoPolicy, "log_ratios", lambda self, inputs, *_: torch.full((4,), -3.0))
    below = world.evaluate()
    wanted = 1 / (1 + math.exp(-3 * world.recipe.reference.beta))  # z₀ is 0, not −3
    assert below.metrics["held_out_loss"] == pytest.approx(wanted)


# ---- steps ---------------------------------------------------------------------------------------------------------------

GOOD_STEPS, BAD_STEPS = ("add one", "so two", "we have ten"), ("zzz", "then qq")


def in_steps(path: Path, count: int = 24) -> str:
    """Write labelled answers of one to three steps."""
    rows = []
    for i in range(count):
        labels = [(i + step) % 3 != 0 for step in range(1 + i % 3)]
        steps = [(GOOD_STEPS[(i + k) % 3] if good else BAD_STEPS[(i + k) % 2]) for k, good in enumerate(labels)]
        rows.append({"prompt": f"{i % 5}: ", "completions": steps, "labels": labels})
    return write(path, rows)


def of_steps(folder: Path, rows: str, **fields: Any) -> Any:
    return recipe(folder, rows, "reward", **{**fields, "preference": {"loss": "steps", **fields.get("preference", {})}})


def test_loss_is_the_binary_cross_entropy_of_steps_for_any_micro_batch_size(folders: dict[str, Path], tmp_path: Path) -> None:
    data, results = in_steps(tmp_path / "a.jsonl"), []
    for settings in ({}, {"micro_batch": 3}, {"micro_batch_tokens": 60}):
        world = SupervisedWorld(of_steps(folders["llama"], data, optimizer=settings))
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

    data = in_steps(tmp_path / "a.jsonl")
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
        SupervisedWorld(of_steps(folders["llama"], rows))


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
