"""A reward model folder as a reward: its own tokenizer, scores that do not depend on batching, and errors."""

import pytest
import torch

from surefoot.errors import SurefootError
from surefoot.language.data.chat import Dialogue
from surefoot.language.data.rows import write_rows
from surefoot.language.models.loading import load_model
from surefoot.language.models.reward_model import RewardModel, new_reward_model
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.model import ModelReward
from surefoot.recipes.reading import make_recipe

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
