"""DPO and IPO are a policy over two answers whose scores are what the model has moved from its reference.
SimPO and ORPO have no reference.

On a bandit, Bradley-Terry pairs take the policy to π_ref·exp(r/β)/Z, where PPO with the KL in its reward goes too.
"""

import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from core.test_bandit import BAR, BETAS, REFERENCE, REWARDS, Arms, distance, optimum
from torch import Tensor

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.loop import run_loop
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.functional import dpo_loss, ipo_loss, orpo_loss, simpo_loss
from surefoot.language.analysis.evaluate import evaluate_run
from surefoot.language.supervised.demonstrations import Rows
from surefoot.language.supervised.preferences import DpoPolicy, answer_log_probs
from surefoot.language.supervised.reference import Reference
from surefoot.language.supervised.world import RowCollector, SupervisedWorld
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner
from surefoot.store.metrics import read_metrics

from .test_supervised import check_same_logits, pairs, write
from .tiny import write_folder

LOSSES = {"dpo": dpo_loss, "ipo": ipo_loss}
WITHOUT_REFERENCE = {"simpo": lambda c, r: simpo_loss(c, r, 2.0, 1.0), "orpo": lambda c, r: orpo_loss(c, r, 0.1)}


def recipe(folder: Path, data: str, **fields: Any) -> Any:
    settings = {"train": data, "max_length": 64, "batch": 8}
    return make_recipe({"kind": "dpo", "model": str(folder), "steps": 96, "data": settings, **fields})


def uneven(path: Path, count: int = 24) -> str:
    """Answers of different lengths, so that rows are padded."""
    rows = ({"prompt": "a" * (1 + i % 3), "chosen": "yes" * (1 + i % 4), "rejected": "n" * (1 + i % 5)} for i in range(count))
    return write(path, rows)


def gradient(world: SupervisedWorld, rollout: Any) -> tuple[Tensor, float]:
    """That of the learner's own loss, as one vector, and the loss."""
    learner = make_learner(world.recipe, world.policy)
    seen: list[Tensor] = []
    parameters = [p for p in world.policy.parameters() if p.requires_grad]
    step = learner.optimizers["policy"].step

    def look(*arguments: Any, **named: Any) -> Any:
        seen.append(torch.cat([p.grad.flatten() for p in parameters]))
        return step(*arguments, **named)

    learner.optimizers["policy"].step = look
    metrics = learner.update(rollout, assign_credit(rollout, world.recipe.objective), LearnerState.seeded(1, 96))
    return seen[0], float(metrics["policy_loss"] or 0.0)


# ---- the loss -----------------------------------------------------------------------------------------------------------


def by_the_book(world: SupervisedWorld, rollout: Any, mean: bool = False) -> Tensor:
    """Σ log π of both answers, or its mean per token, from ``transformers`` row by row, unpadded.   [8, 2]"""
    results = []
    for row in range(8):
        for side in ("chosen", "rejected"):
            prompt = rollout.inputs[f"{side}_prompt"][row][rollout.inputs[f"{side}_prompt_mask"][row]]
            answer = rollout.inputs[side][row][rollout.inputs[f"{side}_mask"][row]]
            logits = world.result.model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(-1, answer[:, None])
            results.append(log_probs.mean() if mean else log_probs.sum())
    return torch.stack(results).view(8, 2)


@pytest.mark.parametrize(("loss", "wrong"), [("dpo", 0.1), ("ipo", 0.1), ("dpo", 0.0), ("simpo", 0.0), ("orpo", 0.0)])
def test_the_gradient_is_that_of_the_published_loss(
    loss: str, wrong: float, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 (GPT-2 has no step in float32), away from the reference, beside ``transformers`` row by row, unpadded."""
    fields: dict[str, Any] = {"preference": {"loss": loss}, "optimizer": {"max_grad_norm": None}}
    if loss in LOSSES:
        other = write_folder(tmp_path / "other", "gpt2", seed=2)
        fields["preference"] |= {"label_smoothing": wrong}
        fields["reference"] = {"model": str(other), "beta": 0.02}
    else:
        monkeypatch.setattr("surefoot.language.supervised.world.Reference", lambda *_: pytest.fail("a reference was made"))
    world = SupervisedWorld(recipe(folders["gpt2"], uneven(tmp_path / "p.jsonl"), **fields))
    rollout = world.collector.collect(LearnerState.seeded(1, 96))
    world.policy.double()
    if loss in LOSSES:
        reference = rollout.inputs["reference"].double()
        sums = by_the_book(world, rollout)
        wanted = LOSSES[loss](sums[:, 0], sums[:, 1], reference[:, 0], reference[:, 1], 0.02, wrong).mean()
    else:
        wanted = WITHOUT_REFERENCE[loss](*by_the_book(world, rollout, mean=True).unbind(-1)).mean()
    parameters = [p for p in world.policy.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(wanted, parameters)])
    actual, value = gradient(world, rollout)
    assert expected.norm() > 1e-3
    assert value == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert float((actual - expected).norm() / expected.norm()) < 1e-6


def test_micro_batches_change_no_gradient(folders: dict[str, Path], tmp_path: Path) -> None:
    messages, results = uneven(tmp_path / "p.jsonl"), []
    for settings in ({}, {"micro_batch": 3}, {"micro_batch_tokens": 40}):
        world = SupervisedWorld(recipe(folders["qwen2"], messages, optimizer=settings, preference={"label_smoothing": 0.2}))
        rollout = world.collector.collect(LearnerState.seeded(1, 96))
        state = LearnerState.seeded(1, 96)
        learner = make_learner(world.recipe, world.policy)
        metrics = learner.update(rollout, assign_credit(rollout, world.recipe.objective), state)
        results.append((metrics["policy_loss"], metrics["gradient_norm_policy"]))
    assert results == [pytest.approx(results[0], rel=1e-5)] * 3


def test_before_the_first_step_the_model_is_its_own_reference_and_a_draw_is_half_right(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SupervisedWorld(recipe(folder, uneven(tmp_path / "p.jsonl")))
    rollout = world.collector.collect(LearnerState.seeded(1, 96))
    with torch.no_grad():
        assert float(world.policy.scores(rollout.inputs).abs().max()) < 1e-4
        assert float(answer_log_probs(world.policy.writer, rollout.inputs).max()) < -0.1
    monkeypatch.setattr(world.policy, "scores", lambda inputs: torch.zeros(len(inputs["reference"]), 2))
    assert world.policy.evaluate(world.collector.rows, 8, world.recipe)["held_out_accuracy"] == 0.5


def test_a_model_whose_chosen_answers_lose_more_than_the_margin_gains_is_never_the_best(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pairs(tmp_path / "p.jsonl")
    data = {"train": rows, "held_out": rows, "max_length": 64}
    world = SupervisedWorld(make_recipe({"kind": "dpo", "model": str(folders["llama"]), "data": data, "steps": 16}))
    for moved, margin, score in ((-5.0, 0.4, None), (-5.0, 0.6, -0.5), (0.1, 0.01, -0.5)):
        metrics = {"held_out_loss": 0.5, "held_out_chosen_moved": moved, "held_out_margin": margin}
        monkeypatch.setattr(world.policy, "evaluate", lambda *_, metrics=metrics: metrics)
        report = world.evaluate()
        assert report.score == score


def test_only_the_assistants_messages_of_an_answer_count(folders: dict[str, Path], tmp_path: Path) -> None:
    """As in SFT: a second question inside an answer is read, and neither rewarded nor punished."""
    question = [{"role": "user", "content": "one?"}]

    def talk(first: str, last: str) -> list[dict[str, str]]:
        turns = [("assistant", first), ("user", "and two?"), ("assistant", last)]
        return [{"role": role, "content": content} for role, content in turns]

    rows = [{"prompt": question, "chosen": talk("1", "22"), "rejected": talk("no", "x")}] * 8
    world = SupervisedWorld(recipe(folders["llama"], write(tmp_path / "p.jsonl", rows)))
    inputs = world.collector.collect(LearnerState.seeded(1, 96)).inputs
    for side, texts in (("chosen", ("1", "22")), ("rejected", ("no", "x"))):
        kept = world.tokens.tokenizer.decode(inputs[side][0][inputs[f"{side}_mask"][0]], skip_special_tokens=True)
        assert all(text in kept for text in texts)
        assert "and two?" not in kept
        assert "and two?" in world.tokens.tokenizer.decode(inputs[side][0], skip_special_tokens=True)


# ---- the bandit law -----------------------------------------------------------------------------------------------------


def learned(counts: Tensor, beta: float, worth: tuple[float, float] = (1.0, 0.0), loss: str = "dpo") -> Tensor:
    """log π of the arms, after learning from ``counts[a, b]`` pairs in which a was chosen and b rejected."""
    both = [(a, b) for a, b in permutations(range(len(REWARDS)), 2) for _ in range(int(counts[a, b]))]
    arms = torch.tensor(both)

    def tensors(rows: Any) -> Any:
        inputs: dict[str, Tensor] = {"reference": REFERENCE.log()[arms[rows]]}
        for place, side in enumerate(("chosen", "rejected")):
            inputs[side] = arms[rows][:, place : place + 1]
            inputs |= {f"{side}_prompt": inputs[side], f"{side}_prompt_mask": inputs[side].bool()}
            inputs[f"{side}_mask"] = torch.ones_like(inputs[side], dtype=torch.bool)
        return inputs, torch.tensor([[0, 1]]).repeat(len(rows), 1), torch.ones(len(rows), 2, dtype=torch.bool)

    policy = DpoPolicy(Arms(), beta, loss)
    objective = recipe(Path("m"), "p.jsonl").objective
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(0.1, max_grad_norm=None), schedule="cosine"))
    collector = RowCollector(Rows(tensors, "", [1] * len(both), [1] * len(both)), len(both), 1, label_weights=worth)
    run_loop(collector, learner, LearnerState.seeded(1, 300 * len(both)), lambda state, metrics: False)
    return policy.writer.logits.detach().log_softmax(-1)


@pytest.mark.parametrize("beta", [BETAS[0], pytest.param(BETAS[1], marks=pytest.mark.slow)])
def test_dpo_on_bradley_terry_pairs_converges_to_the_tilted_reference(beta: float) -> None:
    counts = (200 * (REWARDS[:, None] - REWARDS[None]).sigmoid()).round()
    policy = learned(counts, beta).exp()
    assert distance(policy, optimum(beta)) <= BAR
    wrong = [optimum(beta * 2), optimum(beta / 2), optimum(-beta), REFERENCE, (REWARDS / beta).softmax(-1)]
    assert min(distance(policy, other) for other in wrong) > 3 * BAR


@pytest.mark.parametrize(
    ("loss", "wrong", "margin"),
    [("dpo", 0.2, math.log(0.8 / 0.2) / 0.5), pytest.param("ipo", 0.0, 1.0, marks=pytest.mark.slow), ("ipo", 0.2, 0.6)],
)
def test_labels_that_never_contradict_each_other_end_at_a_finite_margin(loss: str, wrong: float, margin: float) -> None:
    """Of two arms: in DPO h = log((1 − ε)/ε)/β, with labels as often swapped as assumed; in IPO (1 − 2ε)/2β."""
    counts = torch.zeros(5, 5)
    counts[2, 3] = 8
    moved = learned(counts, 0.5, (1 - wrong, wrong), loss) - REFERENCE.log()
    assert float(moved[2] - moved[3]) == pytest.approx(margin, abs=1e-2)


# ---- runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["dpo", "orpo", *(pytest.param(loss, marks=pytest.mark.slow) for loss in ("ipo", "simpo"))])
def test_a_run_learns_to_prefer_and_leaves_a_model_that_transformers_loads(
    loss: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    data = pairs(tmp_path / "p.jsonl")
    fields: dict[str, Any] = {"data": {"train": data, "held_out": data, "max_length": 64, "batch": 8}, "steps": 240}
    fields |= {"optimizer": {"learning_rate": 1e-3}, "preference": {"loss": loss}}
    trained = surefoot.train("dpo", run_dir=tmp_path / "run", model=str(folders["llama"]), **fields)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "held_out_loss" in row]
    assert rows[-1]["held_out_accuracy"] > 0.95
    assert rows[-1]["held_out_margin"] > 0
    assert rows[-1]["held_out_chosen_log_prob"] - rows[-1]["held_out_rejected_log_prob"] > 0
    told_again = evaluate_run(tmp_path / "run", rows=16)
    assert told_again["held_out_accuracy"] > 0.95
    check_same_logits(tmp_path / "run", trained)


def test_an_interrupted_run_resumes_bit_for_bit_and_never_runs_the_reference_again(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = uneven(tmp_path / "rows.jsonl", 20)  # epochs end inside batches
    fields = {"model": str(folders["qwen2"]), "data": {"train": rows, "max_length": 64, "batch": 8}, "steps": 64}
    fields |= {"optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup": 0.2}}
    whole = surefoot.train("dpo", run_dir=tmp_path / "whole", **fields)
    surefoot.train("dpo", run_dir=tmp_path / "cut", callback=lambda metrics: metrics["steps"] >= 24, **fields)
    monkeypatch.setattr(Reference, "log_probs", lambda *_: pytest.fail("asked again"))
    resumed = surefoot.resume(tmp_path / "cut")
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, resumed.model.state_dict()[name]), name


@pytest.mark.parametrize("named", [False, True])
def test_the_reference_of_a_run_may_not_change(named: bool, tmp_path: Path) -> None:
    """Rows that it has not read, those of evaluations among them, would be compared with another model."""
    folder, data = write_folder(tmp_path / "model", "qwen2"), uneven(tmp_path / "rows.jsonl")
    fields: dict[str, Any] = {"model": str(folder), "data": {"train": data, "max_length": 64, "batch": 8}, "steps": 64}
    fields |= {"reference": {"model": str(write_folder(tmp_path / "frozen", "qwen2", seed=3))}} if named else {}
    surefoot.train("dpo", run_dir=tmp_path / "run", callback=lambda metrics: True, **fields)
    write_folder(tmp_path / ("frozen" if named else "model"), "qwen2", seed=2)
    with pytest.raises(SurefootError, match=rf"reference{'.model' if named else ' of model'}='.*': its content has changed"):
        surefoot.resume(tmp_path / "run")


def test_the_reference_reads_each_row_of_a_run_once_and_no_other_also_when_the_run_is_extended(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    plain = Reference.log_probs

    def counting(self: Reference, tensors: Any, count: int) -> Tensor:
        counted.append(count)
        return plain(self, tensors, count)

    monkeypatch.setattr(Reference, "log_probs", counting)
    rows = uneven(tmp_path / "rows.jsonl", 40)
    fields = {"model": str(folders["llama"]), "data": {"train": rows, "max_length": 64, "batch": 8}}
    fields |= {"optimizer": {"learning_rate": 1e-3, "schedule": "constant", "warmup": 0.0}}
    surefoot.train("dpo", run_dir=tmp_path / "short", steps=12, **fields)  # the second batch is whole
    extended = surefoot.resume(tmp_path / "short", steps=64)
    assert counted == [16, 24]
    whole = surefoot.train("dpo", steps=64, **fields)
    assert counted == [16, 24, 40]
    for name, weights in whole.model.state_dict().items():
        torch.testing.assert_close(weights, extended.model.state_dict()[name], rtol=0, atol=1e-5)


def test_simpo_has_a_beta_of_its_own_unless_the_recipe_sets_one() -> None:
    for loss, beta in (("dpo", 0.1), ("orpo", 0.1), ("simpo", 2.0)):
        assert recipe(Path("m"), "p.jsonl", preference={"loss": loss}).reference.beta == beta
    assert recipe(Path("m"), "p.jsonl", preference={"loss": "simpo"}, reference={"beta": 2.5}).reference.beta == 2.5
