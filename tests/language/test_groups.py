"""GRPO and related algorithms in language recipes: defaults, rejections, dynamic sampling, length penalty, learning."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import assert_same

import surefoot
from surefoot import DR_GRPO, GRPO, SurefootError
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.diagnostics.metrics import TIMING
from surefoot.language.data.batches import EpochSampler
from surefoot.language.data.rows import write_rows
from surefoot.language.online import collect
from surefoot.language.online.responses import choose_groups, rows_of_batch, with_signal
from surefoot.language.online.world import LanguageWorld
from surefoot.language.sampling.engines import Samples
from surefoot.language.sampling.sampler import concat_samples
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.runs.factory import make_learner
from surefoot.store.metrics import read_metrics

from . import tiny

REWARDS = """
def vowels(responses):
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]

def some(responses, worth):
    return [w * len(set(text)) for text, w in zip(responses, worth)]

def nothing(responses):
    return [0.0] * len(responses)

def half(responses):
    return [None if i % 2 else float(i) for i in range(len(responses))]
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Prompts, two thirds of them with ``worth`` 0, and reward functions."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{'x' * (i % 5)}{i % 7} says ", "worth": float(i % 3 == 0)} for i in range(40)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    return {"prompts": str(tmp_path / "prompts.jsonl"), "rewards": str(tmp_path / "rewards.py")}


def fields(files: dict[str, str], model: Path, function: str = "vowels", **changes: Any) -> dict[str, Any]:
    drawing = {"prompts": 6, "samples": 4, "max_tokens": 8}
    table = {"steps": 96, "sampling": drawing, "optimizer": {"learning_rate": 2e-3}} | changes
    return tiny.fields_of(model, files["prompts"], f"{files['rewards']}:{function}", **table)


def recipe(algorithm: str = "GRPO", **changes: Any) -> LanguageRecipe:
    table = {"kind": "language", "algorithm": algorithm, "model": "nowhere", "data": {"train": "x"}}
    return make_recipe({**table, "reward": {"terms": [{"function": "x:y"}]}, **changes})


def world(files: dict[str, str], model: Path, function: str, algorithm: str = "GRPO", **changes: Any) -> LanguageWorld:
    return tiny.world_of({"algorithm": algorithm, **fields(files, model, function, **changes)})


# ---- recipe defaults and rejections -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "samples", "beta"),
    [
        *((name, 8, 0.0) for name in ("GRPO", "DR_GRPO", "DAPO", "GSPO", "CISPO", "KL_COV")),
        ("RLOO", 8, 0.05),
        ("PPO_CLIP", 1, 0.05),
        ("REINFORCE_PLUS_PLUS", 1, 0.05),
    ],
)
def test_algorithms_have_their_objective_samples_and_beta_unless_the_recipe_sets_others(
    name: str, samples: int, beta: float
) -> None:
    made = recipe(name)
    assert (made.sampling.samples, made.reference.beta) == (samples, beta)
    if name not in ("DR_GRPO", "PPO_CLIP"):
        assert made.objective == surefoot.ALGORITHMS[name]
    assert make_recipe(to_table(made)) == made
    own = recipe(name, sampling={"samples": 3, "prompts": 4}, reference={"beta": 0.1})
    assert (own.sampling.samples, own.reference.beta) == (3, 0.1)


def test_online_dpo_has_two_responses_a_reference_and_trainer_log_probs() -> None:
    made = recipe("ONLINE_DPO")
    assert (made.sampling.samples, made.reference.beta, made.has_reference) == (2, 0, True)
    assert made.sampling.old_log_probs == "trainer"
    with pytest.raises(SurefootError, match=r"sampling.old_log_probs='update': .* objective.baseline='pair' compares"):
        recipe("ONLINE_DPO", sampling={"old_log_probs": "update"})


def test_aggregation_length_defaults_to_max_tokens() -> None:
    assert recipe("DR_GRPO").objective == replace(DR_GRPO, aggregation_length=64)
    assert recipe("DR_GRPO", sampling={"max_tokens": 12}).objective.aggregation_length == 12
    assert recipe("DR_GRPO", objective={"aggregation_length": 5}).objective.aggregation_length == 5
    assert recipe("DR_GRPO", objective={"aggregation": "token-mean"}).objective.aggregation_length is None
    assert recipe("PPO_CLIP", objective={"aggregation": "constant"}).objective.aggregation_length == 64


def test_dapo_sets_recipe_fields_outside_the_objective() -> None:
    dapo = recipe("DAPO")
    assert (dapo.sampling.rounds, dapo.reward.overlong, dapo.reward.missing_eos) == (10, 0.2, None)
    own = recipe("DAPO", sampling={"rounds": 2}, reward={"terms": [{"function": "x:y"}], "overlong": "none"})
    assert (own.sampling.rounds, own.reward.overlong) == (2, None)


def test_custom_objective_is_kept_and_gets_an_aggregation_length(files: dict[str, str]) -> None:
    own = replace(DR_GRPO, entropy_coefficient=0.01)
    recipe = find_recipe("language", fields(files, Path("nowhere")), own)
    assert recipe.objective == replace(own, aggregation_length=8)


# ---- dynamic sampling ---------------------------------------------------------------------------------------------------


def test_groups_have_signal_if_two_valid_scores_differ_and_a_batch_fills_up_with_others() -> None:
    total = torch.tensor([0, 0, 1, 1, 0, 1, 2, 3, 0, 5, 2, 1], dtype=torch.float32)
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0]).bool()
    assert with_signal(total, valid, 2).tolist() == [False, False, True, False, False, False]
    assert choose_groups([True, False, True, True, False, True], 3) == [0, 2, 3]
    assert choose_groups([False, False, True, False], 3) == [0, 1, 2]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_choose_the_groups_of_one_process(ranks: int) -> None:
    signal = [False, True, False, False, True, True, False, True, True]
    chosen = []
    for rank in range(ranks):
        places = list(range(rank, 9, ranks))
        share = len(range(rank, 4, ranks))
        rows, taught = rows_of_batch(signal, places, 4, share, 2)
        assert len(rows) >= 2 * share
        chosen += [(places[int(row) // 2], int(row) % 2) for row in rows[taught]]
    assert sorted(chosen) == [(place, sample) for place in (1, 4, 5, 7) for sample in (0, 1)]


def collected(made: LanguageWorld, state: LearnerState | None = None) -> Rollout:
    return made.collector.collect(state or LearnerState.seeded(1, 1000))


def test_groups_that_a_rank_keeps_beyond_its_share_are_not_trained_on(
    files: dict[str, str], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a rank to which four of the six groups belong."""

    def fewer(signal: Any, places: Any, wanted: int, *others: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rows_of_batch(signal, places, wanted - 2, *others)

    monkeypatch.setattr(collect, "rows_of_batch", fewer)
    trained = collected(world(files, folders["llama"], "vowels")).mask.any(-1).view(6, 4)
    assert trained.sum(-1).sort().values.tolist() == [0, 0, 4, 4, 4, 4]


def test_groups_without_signal_are_replaced_by_further_prompts(files: dict[str, str], folders: dict[str, Path]) -> None:
    sampling = {"prompts": 6, "samples": 4, "max_tokens": 8}
    plain = collected(world(files, folders["llama"], "some", sampling=sampling))
    made = world(files, folders["llama"], "some", sampling={**sampling, "rounds": 9})
    filled = collected(made)
    scores = [r.reward_parts["score"].sum(-1).view(-1, 4) for r in (plain, filled)]
    assert (scores[0].amax(-1) > scores[0].amin(-1)).sum() < 6
    assert (scores[1].amax(-1) > scores[1].amin(-1)).all()
    assert scores[1].shape == (6, 4)
    assert 1 < filled.metrics["sampling_rounds"] <= 9
    assert filled.steps > plain.steps == 24
    sampled = filled.steps // 4
    worth = [row % 3 == 0 for row in EpochSampler(40, made.recipe.seed).next(sampled)]
    assert filled.metrics["groups_without_signal"] == pytest.approx(worth.count(False) / sampled)
    assert filled.group.tolist() == [row // 4 for row in range(24)]
    assert (filled.inputs["prompt"][::4] == filled.inputs["prompt"][3::4]).all()
    assert made.collector.sampler.epochs * 40 == pytest.approx(sampled)


def test_policy_and_sampler_agree_on_log_probs_of_several_rounds(files: dict[str, str], folders: dict[str, Path]) -> None:
    """Rows from several rounds share a batch, with other padding than they were sampled with."""
    sampling = {"prompts": 6, "samples": 2, "max_tokens": 8, "rounds": 9, "old_log_probs": "sampler"}
    made = world(files, folders["gpt2"], "some", sampling=sampling)
    r = collected(made)
    assert r.metrics["sampling_rounds"] > 1
    with torch.no_grad():
        trainer = made.policy(r.inputs, r.actions, r.mask).log_probs
    assert (trainer - r.old_log_probs)[r.mask].abs().max() < 1e-4


def test_groups_without_signal_fill_the_last_round_and_change_no_weight(
    files: dict[str, str], folders: dict[str, Path]
) -> None:
    sampling = {"prompts": 4, "samples": 2, "max_tokens": 4, "rounds": 3}
    made = world(files, folders["llama"], "nothing", "DR_GRPO", sampling=sampling)
    before = {name: weights.clone() for name, weights in made.policy.state_dict().items()}
    state = LearnerState.seeded(1, 1000)
    r = collected(made, state)
    assert r.metrics["groups_without_signal"] == 1
    assert r.metrics["sampling_rounds"] == 3
    assert (len(r.mask), r.steps) == (8, 24)
    make_learner(made.recipe, made.policy).update(r, assign_credit(r, made.recipe.objective), state)
    assert_same(made.policy.state_dict(), before)


def test_unscored_responses_are_left_out_of_their_group(files: dict[str, str], folders: dict[str, Path]) -> None:
    settings = {"terms": [{"function": f"{files['rewards']}:half"}], "missing_eos": "none", "tolerated": 0.5}
    made = world(files, folders["llama"], "half", reward=settings)
    r = collected(made)
    assert not r.mask[1::2].any()
    credit = assign_credit(r, made.recipe.objective).advantages
    for row in range(0, 24, 4):  # the group compares scores i and i + 2, which lie √2 standard deviations apart
        both = credit[[row, row + 2]].abs().amax(-1)
        torch.testing.assert_close(both, torch.full((2,), 0.5**0.5), rtol=1e-3, atol=0)
    assert credit[1::2].eq(0).all()
    assert [sample["kl"] is None for sample in made.collector.last_samples] == [False, True] * 12  # unknown, not 0


def test_concatenated_rounds_keep_prompts_responses_and_log_probs() -> None:
    def drawn(prompt: int, response: int) -> Samples:
        generator = torch.Generator().manual_seed(prompt)
        rows = 2
        lengths = torch.randint(1, response + 1, (rows, 1), generator=generator)
        mask = torch.arange(response) < lengths
        ids = torch.randint(2, 9, (rows, prompt + response), generator=generator)
        real = torch.arange(prompt).flip(0) < prompt - torch.arange(rows).unsqueeze(-1)
        log_probs = torch.where(mask, -torch.rand(rows, response, generator=generator), 0.0)
        ended = torch.tensor([True, False])
        return Samples(ids[:, :prompt], real, torch.where(mask, ids[:, prompt:], 0), mask, log_probs, ended, "packed")

    parts = [drawn(3, 5), drawn(5, 2), drawn(4, 4)]
    whole = concat_samples(parts, pad_id=0)
    assert whole.responses() == [row for part in parts for row in part.responses()]
    prompts = [ids[real].tolist() for part in parts for ids, real in zip(part.prompt, part.prompt_mask, strict=True)]
    assert [ids[real].tolist() for ids, real in zip(whole.prompt, whole.prompt_mask, strict=True)] == prompts
    assert whole.prompt_mask[:, -1].all()
    assert torch.equal(whole.log_probs[whole.mask], torch.cat([part.log_probs[part.mask] for part in parts]))
    assert whole.ended.tolist() == [True, False] * 3


# ---- length penalty -----------------------------------------------------------------------------------------------------


def test_overlong_penalty_rises_linearly_to_one_at_the_limit(files: dict[str, str], folders: dict[str, Path]) -> None:
    terms = [{"function": f"{files['rewards']}:nothing"}]
    made = world(files, folders["llama"], "nothing", reward={"terms": terms, "missing_eos": "none", "overlong": 0.5})
    r = collected(made)
    lengths = r.mask.sum(-1)
    assert lengths.max() == 8
    torch.testing.assert_close(r.reward_parts["score"].sum(-1), -((lengths - 4) / 4).clamp(0, 1))
    assert r.metrics["overlong_penalty"] == pytest.approx(float(r.reward_parts["score"].sum(-1).mean()))
    assert r.metrics["reward"] == pytest.approx(r.metrics["overlong_penalty"])


# ---- learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "learning_rate"),
    [
        ("GRPO", 2e-3),
        *(pytest.param(name, 2e-3, marks=pytest.mark.release) for name in ("DR_GRPO", "DAPO", "GSPO", "CISPO")),
        *(pytest.param(name, 5e-3, marks=pytest.mark.release) for name in ("RLOO", "ONLINE_DPO", "REINFORCE_PLUS_PLUS")),
    ],
)
def test_each_algorithm_raises_the_reward(
    algorithm: str, learning_rate: float, files: dict[str, str], folders: dict[str, Path]
) -> None:
    """The reward is the share of vowels in a response; the model starts with random weights."""
    rows: list[Any] = []
    settings = fields(files, folders["llama"], steps=64 * 16, sampling={"prompts": 8, "max_tokens": 8})
    settings["reward"] |= {"overlong": "none"}  # the bounds below are for the share alone
    settings["optimizer"] = {"learning_rate": learning_rate}
    surefoot.train("language", algorithm, **settings, callback=lambda metrics: bool(rows.append(metrics)))
    first, last = (sum(row["reward"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert first < 0.2
    assert last > 0.4
    shares = [row.get("groups_without_signal", 0) for row in rows]
    assert min(shares) < 1
    assert algorithm == "ONLINE_DPO" or max(shares) < 1, "with two responses per prompt, all eight pairs may tie"


@pytest.mark.parametrize("algorithm", ["DAPO", "ONLINE_DPO"])
def test_an_interrupted_run_resumes_bit_for_bit(
    algorithm: str, files: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = fields(files, folders["llama"], "some")
    whole = surefoot.train("language", algorithm, run_dir=tmp_path / "whole", **settings)
    stop = lambda metrics: metrics["iteration"] >= 1  # noqa: E731
    surefoot.train("language", algorithm, run_dir=tmp_path / "cut", callback=stop, **settings)
    assert_same(surefoot.resume(tmp_path / "cut").model.state_dict(), whole.model.state_dict())
    timeless = [
        [{k: v for k, v in row.items() if k not in TIMING} for row in read_metrics(tmp_path / run / "metrics.jsonl")]
        for run in ("whole", "cut")
    ]
    assert timeless[0] == timeless[1]
    assert len(timeless[0]) > 1
    assert algorithm != "DAPO" or any(row["sampling_rounds"] > 1 for row in timeless[0])


def test_kl_may_be_in_loss_and_reward_at_once(files: dict[str, str], folders: dict[str, Path]) -> None:
    rows: list[Any] = []
    settings = fields(files, folders["llama"], reference={"beta": 0.3})
    surefoot.train("language", GRPO, **settings, callback=lambda metrics: bool(rows.append(metrics)))
    assert rows[-1]["reference_beta"] == 0.3
    assert rows[-1]["reference_loss"] > 0
    assert asdict(find_recipe("language", {"algorithm": "GRPO", **settings}).objective)["reference_coefficient"] == 0.04
