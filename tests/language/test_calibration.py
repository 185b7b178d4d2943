"""Calibration of a critic, against numbers computed by hand and on real responses."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.core.rollout import LearnerState
from surefoot.language.analysis.evaluate import calibration, calibration_lines, returns, success
from surefoot.language.data import datasets as data
from surefoot.language.data.rows import write_rows
from surefoot.language.online.world import LanguageWorld

from .tiny import fields_of, world_of


class Counting(nn.Module):
    """A critic that says a hundredth of the tokens read so far."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.arange(1, ids.shape[1] + 1).expand(ids.shape) / 100


def world(tmp_path: Path, model: Path, function: str, **changes: Any) -> LanguageWorld:
    (tmp_path / "rewards.py").write_text(
        "def brief(responses):\n    return [float(len(t) < 6) for t in responses]\n"
        "def half(responses):\n    return [[(1, 1.0)] if len(t) < 6 else [(0, 0.0)] for t in responses]\nhalf.per = 'step'\n"
        "def length(responses):\n    return [None if i == 0 else float(len(t)) for i, t in enumerate(responses)]\n"
    )
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [{"prompt": "ab" * (i % 5 + 1)} for i in range(24)])
    reward = {"terms": [f"{tmp_path / 'rewards.py'}:{function}"], "missing_eos": "penalty", "missing_eos_value": 0.0}
    table = {"data": {"train": str(rows), "held_out": str(rows)}, "sampling": {"prompts": 16, "max_tokens": 9}}
    made = world_of(fields_of(model, rows, "", **{**table, "reward": reward, "critic": {"own_model": True}, **changes}))
    if made.policy.critic is not None:
        made.policy.critic = Counting()
    return made


def test_reliability_and_brier_score_are_those_computed_by_hand() -> None:
    scores = success(torch.tensor([0.05, 0.15, 0.15, 0.95, 1.2, -0.3]), torch.tensor([0, 0, 1, 1, 1, 0]).bool())
    assert scores["count"] == 6
    assert scores["brier"] == pytest.approx((0.0025 + 0.0225 + 0.7225 + 0.0025 + 0 + 0) / 6)
    assert scores["brier_baseline"] == pytest.approx(0.25)
    assert scores["predicted"] == pytest.approx((0.05 + 0.15 + 0.15 + 0.95 + 1) / 6), "clipped to [0, 1]"
    assert scores["observed"] == 0.5
    rows = {row["from"]: row for row in scores["bins"]}
    assert len(rows) == 10
    assert [row["count"] for row in scores["bins"]] == [2, 2, 0, 0, 0, 0, 0, 0, 0, 2]
    assert (rows[0.0]["predicted"], rows[0.0]["observed"]) == (pytest.approx(0.025), 0)
    assert (rows[0.1]["predicted"], rows[0.1]["observed"]) == (pytest.approx(0.15), 0.5)
    assert (rows[0.9]["predicted"], rows[0.9]["observed"], rows[0.9]["to"]) == (pytest.approx(0.975), 1, 1)
    assert rows[0.5]["predicted"] is None


def test_calibration_of_returns_equals_numbers_computed_by_hand() -> None:
    scores = returns(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 5.0]))
    assert scores["rmse"] == pytest.approx(math.sqrt(4 / 3))
    assert scores["rmse_baseline"] == pytest.approx(math.sqrt(78 / 27))
    assert scores["explained_variance"] == pytest.approx(1 - 24 / 78)
    constant = returns(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    assert (constant["rmse_baseline"], constant["explained_variance"]) == (0, None)
    nothing = torch.zeros(0)
    assert returns(nothing, nothing)["rmse"] is None
    assert success(nothing, nothing.bool())["brier"] is None


def test_a_critic_that_is_trained_for_another_return_is_not_read_as_a_probability(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Where cut responses earn -1 a perfect critic's value is no probability, nor is a discounted one; and what it is does not
    hang on the answers that were drawn, here one that was not cut and is short.
    """

    def kind() -> str:
        curve = calibration(made, short)
        return str(curve["first"]["kind"])

    made = world(tmp_path, folders["llama"], "brief")
    prompt = data.repeat_prompts(made.collector.prompts, [0])
    drawn = (made.collector.respond(prompt, [seed]) for seed in range(1000))
    short = next(one for one in drawn if bool(one.samples.ended.all()) and len(one.texts[0]) < 3)
    assert kind() == "success"
    recipe = made.recipe
    for changes in ({"missing_eos_value": -1.0}, {"missing_eos": "bootstrap"}, {"overlong": 0.5}):
        made.recipe = recipe.model_copy(update={"reward": recipe.reward.model_copy(update=changes)})
        assert kind() == "returns", changes
    made.recipe = recipe.model_copy(update={"objective": replace(recipe.objective, gamma=0.9)})
    assert kind() == "returns"


@pytest.mark.parametrize("function", ["brief", "half"])
def test_scores_of_steps_are_no_success_unless_they_all_come_at_the_end(
    function: str, tmp_path: Path, folders: dict[str, Path]
) -> None:
    made = world(tmp_path, folders["llama"], function)
    answers = made.sample_held_out()
    assert set(answers.score_with(made.reward).total.tolist()) == {0.0, 1.0}
    assert (curve := calibration(made, answers)) is not None
    assert curve["first"]["kind"] == ("success" if function == "brief" else "returns")


def test_a_critic_is_evaluated_at_the_kl_coefficient_that_it_was_trained_for(tmp_path: Path, folders: dict[str, Path]) -> None:
    """An adapted one, which the best checkpoint holds beside the weights."""
    made = world(tmp_path, folders["llama"], "length", reference={"beta": 0.5, "target": 1e-3, "horizon": 16})
    with torch.no_grad():
        made.reference.policy.model.get_output_embeddings().weight.mul_(0.5)
    state = LearnerState.seeded(1, 64)
    for _ in range(2):
        made.collector.collect(state)
    assert made.checkpoint_parts()["beta"] == pytest.approx(0.5 * 1.2), (
        "what the second rollout paid, and not what the third will"
    )
    answers = made.sample_held_out()
    evaluation, curve = made.evaluate_responses(answers), calibration(made, answers)
    wanted = [row["reward"] - 0.6 * row["kl"] for row in evaluation.samples[1:]]
    assert (curve["first"]["kind"], curve["first"]["count"]) == ("returns", 23), "the first has no score"
    mean = pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
    assert curve["first"]["observed"] == mean != curve["middle"]["observed"], "the KL of the first half is spent"


def test_a_verifiers_critic_is_evaluated_before_the_first_token_and_in_the_middle(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    made = world(tmp_path, folders["llama"], "brief")
    answers = made.sample_held_out()
    curve = calibration(made, answers)
    prompts, tokens = answers.samples.prompt_mask.sum(-1), answers.samples.lengths
    assert curve["first"]["predicted"] == pytest.approx(float((prompts.double() / 100).mean()))
    assert curve["middle"]["predicted"] == pytest.approx(float(((prompts + tokens // 2).double() / 100).mean()))
    right = [len(text) < 6 and ended for text, ended in zip(answers.texts, answers.samples.ended.tolist(), strict=True)]
    assert 0 < sum(right) < len(right), "some of each"
    assert any(len(text) < 6 for text, ended in zip(answers.texts, answers.samples.ended.tolist(), strict=True) if ended)
    for moment in ("first", "middle"):
        assert curve[moment]["observed"] == pytest.approx(sum(right) / len(right))
        assert sum(row["count"] for row in curve[moment]["bins"]) == 24
    lines = calibration_lines(curve)
    assert lines[0].startswith("critic as P(success)")
    assert any(line.startswith("Brier score") for line in lines)


def test_without_a_critic_there_is_no_calibration(tmp_path: Path, folders: dict[str, Path]) -> None:
    made = world(tmp_path, folders["llama"], "brief", algorithm="REINFORCE", critic={})
    assert calibration(made, made.sample_held_out()) is None
