"""A reward model folder as a reward: its own tokenizer, scores that do not depend on batching, and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import left_padded, right_padded
from surefoot.language.data.chat import Dialogue
from surefoot.language.data.rows import write_rows
from surefoot.language.data.sources import open_rows
from surefoot.language.models.loading import load_model
from surefoot.language.models.reward_model import RewardModel, new_reward_model, read_head, write_head
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.model import ModelReward
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner

from .test_supervised import demonstrations, pairs, recipe, write

PROMPTS = ["one: ", "two: ", "a longer prompt: ", "four: ", ""]
RESPONSES = ["yes", "a much longer response than that", "", "no.", "why"]


@pytest.fixture
def reward_folder(loaded, tmp_path):
    """A standardised reward model of each family."""
    model, tokenizer = loaded
    scorer = new_reward_model(model, seed=3, tokenizer=tokenizer)
    scorer.standardise(torch.tensor([-1.0, 0.5, 3.5]))
    scorer.save(tmp_path / "reward")
    return tmp_path / "reward"


def by_hand(folder, prompt, response):
    """The standardised head at EOS, for one text without padding."""
    scorer = RewardModel.load(folder)
    tokenizer = scorer.tokenizer
    ids = torch.tensor([[*tokenizer(prompt)["input_ids"], *tokenizer(response)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        hidden = scorer.backbone(input_ids=ids).last_hidden_state[0, -1]
        return float((hidden @ scorer.head.weight[0] + scorer.head.bias[0] - scorer.mean) / scorer.std)


def test_scores_equal_the_standardised_head_at_eos(reward_folder):
    scores = ModelReward(reward_folder, weight=2.0)(PROMPTS[:4], RESPONSES[:4], {})
    expected = torch.tensor([by_hand(reward_folder, *pair) for pair in zip(PROMPTS[:4], RESPONSES[:4], strict=True)])
    torch.testing.assert_close(scores.parts["reward_model"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.total, 2 * scores.parts["reward_model"])
    assert expected.std() > 0.01, "scores differ, so that a mistake would show"
    assert scores.valid.all()
    assert not scores.total.requires_grad


def test_scores_do_not_depend_on_batching_or_order(reward_folder):
    whole = ModelReward(reward_folder)(PROMPTS, RESPONSES, {}).total
    alone = ModelReward(reward_folder, batch_tokens=1)(PROMPTS, RESPONSES, {}).total
    in_reverse = ModelReward(reward_folder, batch_tokens=70)(PROMPTS[::-1], RESPONSES[::-1], {}).total.flip(0)
    torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_reverse, whole, rtol=1e-4, atol=1e-4)


def test_batches_of_several_rows_stay_within_batch_tokens(folders, tmp_path):
    model, tokenizer = load_model(folders["llama"])
    new_reward_model(model, 1, tokenizer).save(tmp_path / "reward")
    reward, shapes = ModelReward(tmp_path / "reward", batch_tokens=60), []
    assert reward([], [], {}).total.shape == (0,)
    reward.model.register_forward_pre_hook(lambda module, inputs: shapes.append(inputs[0].shape))
    reward(PROMPTS, RESPONSES, {})
    assert len(shapes) > 1
    assert sum(rows for rows, _ in shapes) == len(PROMPTS)
    assert all(rows * width <= 60 or rows == 1 for rows, width in shapes)


@pytest.mark.parametrize("options", [{}, {"tools": [{"name": "add"}]}])
def test_conversations_use_the_reward_model_chat_template_with_their_tools(tmp_path, options):
    model, tokenizer = load_model("pocket")
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}" + tokenizer.chat_template
    scorer = new_reward_model(model, 1, tokenizer)
    scorer.save(tmp_path / "reward")
    messages = [{"role": "user", "content": "Hello?"}]
    conversation = [*messages, {"role": "assistant", "content": "Hello."}]
    ids = torch.tensor([tokenizer.apply_chat_template(conversation, return_dict=False, **options)])
    with torch.no_grad():
        expected = scorer(ids, torch.ones_like(ids, dtype=torch.bool))
    prompts = [Dialogue(messages, options)]
    torch.testing.assert_close(ModelReward(tmp_path / "reward")(prompts, ["Hello."], {}).total, expected)


def test_texts_longer_than_the_context_are_rejected(folders, tmp_path):
    model, tokenizer = load_model(folders["llama"])
    new_reward_model(model, 1, tokenizer).save(tmp_path / "reward")
    reward = ModelReward(tmp_path / "reward")
    assert reward(["x"], ["y" * (reward.context - 2)], {}).valid.all()
    with pytest.raises(SurefootError, match=rf"have {reward.context + 1} tokens, more than its context of {reward.context};"):
        reward(["x"], ["y" * (reward.context - 1)], {})


@pytest.mark.parametrize(
    ("name", "number", "what"),
    [
        ("head.weight", float("nan"), "not finite"),
        ("backbone.norm.weight", float("inf"), "not finite"),
        ("head.bias", float("inf"), r"offset=-inf: is not finite; copy the whole folder$"),
    ],
)
def test_a_reward_model_with_weights_that_are_not_finite_is_rejected(name, number, what, folders, tmp_path):
    model, tokenizer = load_model(folders["llama"])
    scorer = new_reward_model(model, 1, tokenizer)
    scorer.get_parameter(name).data.view(-1)[-1] = number
    scorer.save(tmp_path / "reward")
    with pytest.raises(SurefootError, match=what):
        ModelReward(tmp_path / "reward")(["x"], ["y"], {})


def test_unused_prompt_columns_are_reported_unless_a_function_can_read_them(folders, tmp_path):
    model, tokenizer = load_model(folders["llama"])
    new_reward_model(model, 1, tokenizer).save(tmp_path / "reward")
    (tmp_path / "mine.py").write_text("def short(responses):\n    return [-len(r) for r in responses]\n")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b", "source": "web"}])
    for terms, notes in (
        ([{"model": str(tmp_path / "reward")}], [f"{tmp_path / 'rows.jsonl'}: not used: 'answer', 'source'"]),
        ([{"model": str(tmp_path / "reward")}, {"function": f"{tmp_path / 'mine.py'}:short"}], []),
    ):
        recipe = {
            "kind": "language",
            "model": str(folders["llama"]),
            "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 8},
            "sampling": {"prompts": 2, "max_tokens": 4},
            "reward": {"terms": terms},
            "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
        }
        assert [note for note in LanguageWorld(make_recipe(recipe)).warnings if "not used" in note] == notes


# ---- a pooled head: the sum over the answer alone --------------------------------------------------------------------


ROWS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15]]
STARTS = [2, 1, 3]


def pooled(model: Any, tokenizer: Any = None) -> RewardModel:
    made = new_reward_model(model, 3, tokenizer)
    made.pooled = True
    with torch.no_grad():
        made.head.bias.fill_(0.7)
    made.standardise(torch.tensor([-1.0, 0.5, 3.5]))
    return made


def summed_by_hand(model: RewardModel, before: list[int], after: list[int]) -> Tensor:
    """The standardised sum of the head over the answer, for one text without padding."""
    with torch.no_grad():
        hidden = model.backbone(input_ids=torch.tensor([[*before, *after]])).last_hidden_state[0, len(before) :]
        return ((hidden @ model.head.weight[0] + model.head.bias[0]).sum() - model.mean) / model.std


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_score_is_the_sum_over_the_answer_for_any_padding_and_batch(kind: str, folders: dict[str, Path]) -> None:
    model = pooled(load_model(folders[kind])[0])
    wanted = torch.stack([summed_by_hand(model, row[:start], row[start:]) for row, start in zip(ROWS, STARTS, strict=True)])
    marks = [[False] * start + [True] * (len(row) - start) for row, start in zip(ROWS, STARTS, strict=True)]
    for padded in (left_padded, right_padded):
        for padding_free in (False, kind == "llama"):
            model.padding_free = padding_free
            with torch.no_grad():
                scores = model(*padded(ROWS, 0), padded(marks, 0)[0].bool())
            torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(SurefootError, match=r"^answer=None: a pooled head needs the mask"):
        model(*right_padded(ROWS, 0))


def test_a_folder_of_it_scores_by_its_own_tokenizer_in_any_batch(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = loaded
    pooled(model, tokenizer).save(tmp_path / "reward")
    again, encode = RewardModel.load(tmp_path / "reward"), lambda text: tokenizer(text)["input_ids"]
    assert (again.pooled, again.of_steps) == (True, False)
    whole = ModelReward(tmp_path / "reward")(PROMPTS[:4], RESPONSES[:4], {}).total
    for index, (prompt, answer) in enumerate(zip(PROMPTS[:4], RESPONSES[:4], strict=True)):
        wanted = summed_by_hand(again, encode(prompt), [*encode(answer), tokenizer.eos_token_id])
        torch.testing.assert_close(whole[index], wanted, atol=1e-4, rtol=1e-4)
    alone = ModelReward(tmp_path / "reward", batch_tokens=1)(PROMPTS[:4], RESPONSES[:4], {}).total
    torch.testing.assert_close(alone, whole, atol=1e-4, rtol=1e-4)
    with pytest.raises(SurefootError, match="has a pooled head, which scores whole answers"):
        ModelReward(tmp_path / "reward", per="step", separator="\n")


def test_messages_are_scored_at_the_tokens_that_training_scores(tmp_path: Path) -> None:
    model, tokenizer = load_model("pocket")
    pooled(model, tokenizer).save(tmp_path / "reward")
    reward, prompt = ModelReward(tmp_path / "reward"), [{"role": "user", "content": "Hello?"}]
    write_rows(tmp_path / "d.jsonl", [{"prompt": prompt, "completion": [{"role": "assistant", "content": "Hi."}]}])
    rows = data.demonstrations(open_rows(str(tmp_path / "d.jsonl")), reward.tokens, 64)
    ids, start = rows.ids[0], rows.trained[0].index(True)
    wanted = summed_by_hand(reward.model, ids[:start], ids[start:])
    torch.testing.assert_close(reward([prompt], ["Hi."], {}).total[0], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("trained", ["text", "messages"])
def test_prompts_of_another_kind_than_the_trained_rows_are_an_error(trained: str, tmp_path: Path) -> None:
    parts = {"prompt": ("user", "one: "), "chosen": ("assistant", "yes"), "rejected": ("assistant", "no")}
    rows: dict[str, Any] = {"text": {name: text for name, (_, text) in parts.items()}}
    rows["messages"] = {name: [{"role": role, "content": text}] for name, (role, text) in parts.items()}
    SupervisedWorld(recipe("reward", "pocket", write(tmp_path / "p.jsonl", [rows[trained]]))).result.save(tmp_path / "reward")
    reward = ModelReward(tmp_path / "reward")
    reward.check_prompts([rows.pop(trained)["prompt"]])
    write_head(reward.model, tmp_path)  # as adapters do
    reward.model.plain = None
    read_head(reward.model, tmp_path)
    ((other, row),) = rows.items()
    with pytest.raises(SurefootError, match=f"was trained on {trained}, so its scores of {other} mean nothing; give {trained}"):
        reward.check_prompts([row["prompt"]])


@pytest.mark.parametrize("adapter", [None, {"rank": 2, "alpha": 4}])
def test_a_run_resumes_bit_for_bit_and_scores_as_its_checkpoint_and_its_folder(
    adapter: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    rows = {"train": pairs(tmp_path / "p.jsonl", 20), "max_length": 64, "batch": 8}
    fields: dict[str, Any] = {"model": str(folders["llama"]), "data": rows, "steps": 48, "head": "pooled", "adapter": adapter}
    fields |= {"optimizer": {"learning_rate": 1e-2}, "demonstrations": demonstrations(tmp_path / "d.jsonl")}
    surefoot.train("reward", run_dir=tmp_path / "whole", **fields)
    surefoot.train("reward", run_dir=tmp_path / "cut", callback=lambda metrics: metrics["steps"] >= 24, **fields)
    surefoot.resume(tmp_path / "cut")
    whole, resumed = (surefoot.load(tmp_path / name) for name in ("whole", "cut"))
    written = RewardModel.load(tmp_path / "whole" / "model")
    inputs = *right_padded(ROWS, 0), right_padded([[0, 0, 1, 1, 1], [0, 1], [0, 0, 0, 1]], 0)[0].bool()
    with torch.no_grad():
        wanted = whole(*inputs)
        assert torch.equal(resumed(*inputs), wanted)
        torch.testing.assert_close(written(*inputs), wanted, atol=1e-5, rtol=1e-5)
    shown = [row.columns for row in open_rows(str(tmp_path / "d.jsonl"))]
    of_demonstrations = ModelReward(tmp_path / "whole")(
        *([row[name] for row in shown] for name in ("prompt", "completion")), {}
    )
    assert float(of_demonstrations.total.mean()) == pytest.approx(0, abs=1e-4)
    assert float(of_demonstrations.total.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_micro_batches_change_neither_its_loss_nor_its_gradient(folders: dict[str, Path], tmp_path: Path) -> None:
    results, rows = [], pairs(tmp_path / "p.jsonl")
    for settings in ({}, {"micro_batch": 3}, {"micro_batch_tokens": 40}):
        world = SupervisedWorld(recipe("reward", folders["llama"], rows, optimizer=settings, head="pooled"))
        rollout = world.collector.collect(LearnerState.seeded(1, 96))
        learner = make_learner(world.recipe, world.policy)
        loss = learner.update(rollout, assign_credit(rollout, world.recipe.objective), LearnerState.seeded(1, 96))[
            "policy_loss"
        ]
        results.append((loss, world.policy.model.head.weight.detach().clone()))
    for loss, weight in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        torch.testing.assert_close(weight, results[0][1], atol=1e-6, rtol=1e-5)
