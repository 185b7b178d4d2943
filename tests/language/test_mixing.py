"""Demonstrations mixed into PPO updates: gradients add up, and resuming continues their order."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.core.traces import Recorder, Trace
from surefoot.diagnostics.metrics import TIMING
from surefoot.errors import SurefootError
from surefoot.language.online.world import LanguageWorld
from surefoot.runs.factory import make_learner

from . import tiny

ONCE = {"epochs": 1, "minibatches": 1}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Prompts, demonstrations of unequal length, and a reward."""
    tiny.write_texts(tmp_path, 7)
    return tmp_path


def fields(files: Path, model: Path, coefficient: float, **changes: Any) -> dict[str, Any]:
    rows = str(files / "rows.jsonl")
    table: dict[str, Any] = {
        "sampling": {"prompts": 16, "max_tokens": 8, "temperature": 0.7},
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": "none"},
        "mixing": {"sft_coefficient": coefficient, "demonstrations": rows, "batch": 5},
    }
    return tiny.fields_of(model, rows, f"{files / 'rewards.py'}:score", **{**table, **changes})


def world(files: Path, model: Path, coefficient: float, **changes: Any) -> LanguageWorld:
    return tiny.world_of(fields(files, model, coefficient, **changes))


def update_once(made: LanguageWorld, recorder: Recorder | None = None) -> tuple[dict[str, float | None], Trace | None]:
    """Run one update; return its metrics and trace."""
    learner, state = make_learner(made.recipe, made.policy), LearnerState.seeded(1, 64)
    learner.auxiliary_loss, learner.recorder = made.auxiliary_loss, recorder
    rollout = made.collector.collect(state)
    metrics = learner.update(rollout, assign_credit(rollout, made.recipe.objective), state)
    return metrics, None if recorder is None else recorder.take(state)


def gradients(made: LanguageWorld) -> dict[str, torch.Tensor]:
    """Gradients of the last step."""
    return {name: p.grad.clone() for name, p in made.policy.model.named_parameters() if p.grad is not None}


def test_gradient_is_the_ppo_gradient_plus_coefficient_times_cross_entropy(files: Path, folder: Path) -> None:
    """Cross-entropy uses the logits at temperature 1, row by row without padding. Micro-batches do not change the result."""
    objective = {"reuse": ONCE}
    alone = world(files, folder, 0.0, objective=objective)
    made = world(files, folder, 0.3, objective=objective)
    rows = [json.loads(line) for line in (files / "rows.jsonl").read_text().splitlines()]
    first = type(made.auxiliary_loss.sampler)(len(rows), made.auxiliary_loss.sampler.seed).next(5)
    model, total, count = made.policy.model, torch.zeros(()), 0
    for row in first:
        prompt = made.tokens.encode_prompt(rows[row]["prompt"])
        answer = made.tokens.encode_completion(rows[row]["completion"])
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total = total + cross_entropy(logits, torch.tensor(answer), reduction="sum")
        count += len(answer)
    loss = total / count
    named = dict(model.named_parameters())
    sft_gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))
    metrics, _ = update_once(made)
    update_once(alone)
    assert metrics["sft_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    base = gradients(alone)
    for name, gradient in gradients(made).items():
        sft_gradient = torch.zeros_like(gradient) if sft_gradients[name] is None else sft_gradients[name]
        torch.testing.assert_close(gradient, base[name] + 0.3 * sft_gradient, rtol=1e-4, atol=2e-6)
        assert not torch.equal(gradient, base[name]) or sft_gradients[name] is None
    for optimizer in ({"micro_batch": 3}, {"micro_batch_tokens": 40}):
        settings = {"learning_rate": 1e-3, "max_grad_norm": "none", **optimizer}
        split = world(files, folder, 0.3, objective=objective, optimizer=settings)
        update_once(split)
        for name, gradient in gradients(split).items():
            torch.testing.assert_close(gradient, base[name] + (gradients(made)[name] - base[name]), rtol=1e-4, atol=2e-6)


def test_coefficient_zero_reads_no_file_and_changes_no_bit(files: Path, folders: dict[str, Path]) -> None:
    histories: list[list[dict[str, Any]]] = [[], []]
    weights = []
    for index, mixing in enumerate(({}, {"sft_coefficient": 0.0, "demonstrations": "nowhere.jsonl"})):
        history = histories[index]
        settings = fields(files, folders["llama"], 0.0, steps=32, mixing=mixing)
        made = surefoot.train("language", **settings, callback=lambda metrics, history=history: bool(history.append(metrics)))
        weights.append(made.model.state_dict())
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    kept = [[{k: v for k, v in row.items() if k not in TIMING} for row in rows] for rows in histories]
    assert kept[0] == kept[1]
    assert "sft_loss" not in kept[0][0]


def test_changed_demonstrations_are_rejected_on_resume(files: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    (files / "shown.jsonl").write_text((files / "rows.jsonl").read_text())
    mixing = {"sft_coefficient": 0.1, "demonstrations": str(files / "shown.jsonl")}
    settings = fields(files, folders["llama"], 0.1, steps=32, mixing=mixing, objective={"reuse": ONCE})
    surefoot.train("language", run_dir=tmp_path / "run", callback=lambda metrics: True, **settings)
    (files / "shown.jsonl").write_text((files / "rows.jsonl").read_text().replace("says", "cried"))
    with pytest.raises(SurefootError, match=r"mixing\.demonstrations=.*its content has changed since the checkpoint"):
        surefoot.resume(tmp_path / "run")


def test_mixing_does_not_add_demonstrations_to_traces(files: Path, folders: dict[str, Path]) -> None:
    """Before the first step, traces are equal to the last bit. After it θ differs, and each ratio still matches its log π."""
    objective = {"reuse": {"epochs": 2, "minibatches": 1}}
    results = []
    for coefficient in (0.0, 0.5):
        made = world(files, folders["llama"], coefficient, objective=objective)
        _, trace = update_once(made, Recorder(every=1, rows=2, row_details=made.row_details))
        results.append(trace)
    for without, mixed in zip(results[0].rows, results[1].rows, strict=True):
        for name in ("actions", "rewards", "advantages", "returns", "old_log_probs"):
            assert torch.equal(getattr(without, name), getattr(mixed, name)), name
        assert torch.equal(without.visits.log_probs[0], mixed.visits.log_probs[0])
        assert torch.equal(without.visits.updates, mixed.visits.updates)
        assert not torch.equal(without.visits.log_probs[1], mixed.visits.log_probs[1])
        ratio = (mixed.visits.log_probs - mixed.old_log_probs).exp()
        torch.testing.assert_close(mixed.visits.ratio[:, mixed.mask], ratio[:, mixed.mask])


def test_a_non_finite_sft_loss_raises_before_any_step(files: Path, folders: dict[str, Path]) -> None:
    made = world(files, folders["llama"], float(torch.finfo(torch.float32).max))
    before = {name: weights.clone() for name, weights in made.policy.state_dict().items()}
    with pytest.raises(surefoot.NotFiniteError, match="gradient norm"):
        update_once(made)
    assert all(torch.equal(weights, before[name]) for name, weights in made.policy.state_dict().items())


def test_default_mixing_batch_equals_the_responses_per_minibatch(files: Path, folders: dict[str, Path]) -> None:
    made = world(files, folders["llama"], 0.1, mixing={"sft_coefficient": 0.1, "demonstrations": str(files / "rows.jsonl")})
    assert made.recipe.mixed_batch == 16 // 4
    assert "mixed in: 4 of 7 demonstrations per update" in made.arithmetic()
    assert world(files, folders["llama"], 0.1).recipe.mixed_batch == 5
