"""A pooled head: the sum over the answer alone, whatever the batch, the padding, and the format of texts and files."""

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
from surefoot.language.data.rows import write_rows
from surefoot.language.data.sources import open_rows
from surefoot.language.models.loading import load_model
from surefoot.language.models.reward_model import RewardModel, new_reward_model
from surefoot.language.rewards.model import ModelReward
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.runs.factory import make_learner

from .test_model_reward import PROMPTS, RESPONSES
from .test_supervised import demonstrations, pairs, recipe

ROWS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15]]
STARTS = [2, 1, 3]


def pooled(model: Any, tokenizer: Any = None) -> RewardModel:
    made = new_reward_model(model, 3, tokenizer)
    made.pooled = True
    with torch.no_grad():
        made.head.bias.fill_(0.7)
    made.standardise(torch.tensor([-1.0, 0.5, 3.5]))
    return made


def by_hand(model: RewardModel, before: list[int], after: list[int]) -> Tensor:
    """The standardised sum of the head over the answer, for one text without padding."""
    with torch.no_grad():
        hidden = model.backbone(input_ids=torch.tensor([[*before, *after]])).last_hidden_state[0, len(before) :]
        return ((hidden @ model.head.weight[0] + model.head.bias[0]).sum() - model.mean) / model.std


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_score_is_the_sum_over_the_answer_for_any_padding_and_batch(kind: str, folders: dict[str, Path]) -> None:
    model = pooled(load_model(folders[kind])[0])
    wanted = torch.stack([by_hand(model, row[:start], row[start:]) for row, start in zip(ROWS, STARTS, strict=True)])
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
        wanted = by_hand(again, encode(prompt), [*encode(answer), tokenizer.eos_token_id])
        torch.testing.assert_close(whole[index], wanted, atol=1e-4, rtol=1e-4)
    alone = ModelReward(tmp_path / "reward", batch_tokens=1)(PROMPTS[:4], RESPONSES[:4], {}).total
    torch.testing.assert_close(alone, whole, atol=1e-4, rtol=1e-4)
    with pytest.raises(SurefootError, match="has a pooled head, which scores whole answers"):
        ModelReward(tmp_path / "reward", per="step", separator="\n")


def test_messages_are_scored_at_the_tokens_that_training_scores(tmp_path: Path) -> None:
    model, tokenizer = load_model("pocket")
    pooled(model, tokenizer).save(tmp_path / "reward")
    reward, prompt = ModelReward(tmp_path / "reward"), [{"role": "user", "content": "Hello?"}]
    assert reward.tokens is not None
    write_rows(tmp_path / "d.jsonl", [{"prompt": prompt, "completion": [{"role": "assistant", "content": "Hi."}]}])
    rows = data.demonstrations(open_rows(str(tmp_path / "d.jsonl")), reward.tokens, 64)
    ids, start = rows.ids[0], rows.trained[0].index(True)
    wanted = by_hand(reward.model, ids[:start], ids[start:])  # type: ignore[arg-type]
    torch.testing.assert_close(reward([prompt], ["Hi."], {}).total[0], wanted, atol=1e-5, rtol=1e-4)


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
        results.append((loss, world.policy.model.head.weight.detach().clone()))  # type: ignore[union-attr]
    for loss, weight in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        torch.testing.assert_close(weight, results[0][1], atol=1e-6, rtol=1e-5)
