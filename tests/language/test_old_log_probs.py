"""``sampling.old_log_probs`` sets which log π_old the ratio uses: the trainer's or the sampler's.

In float32 both train alike, and a difference is reported. With one update per batch no pass computes log π_old: ρ is 1, with
the gradient of π_θ.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.online.world import LanguageWorld
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.runs.display import Display
from surefoot.store.metrics import read_metrics

from . import tiny


class RecordingDisplay(Display):
    """Record all messages except that of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def message(self, line: str) -> None:
        if not line.startswith("sampling: "):  # every run prints its engine
            self.said.append(line)


def fields(files: Path, model: Path, whose: str, **changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "sampling": {"prompts": 16, "max_tokens": 8, "temperature": 0.8, "old_log_probs": whose},
        "optimizer": {"learning_rate": 1e-4},
        "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
    }
    return tiny.fields_of(model, files / "rows.jsonl", f"{files}/rewards.py:score", **{**table, **changes})


def world(files: Path, model: Path, whose: str) -> LanguageWorld:
    return tiny.world_of(fields(files, model, whose))


def test_rollouts_have_the_old_log_probs_of_the_trainer_or_the_sampler(files: Path, folder: Path) -> None:
    by_trainer, by_sampler = (
        world(files, folder, whose).collector.collect(LearnerState.seeded(1, 64)) for whose in ("trainer", "sampler")
    )
    ours, theirs = by_trainer.old_log_probs, by_sampler.old_log_probs
    assert torch.equal(by_trainer.actions, by_sampler.actions)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert not torch.equal(ours, theirs), "two different passes compute them"
    assert float((ours - theirs)[by_trainer.mask].abs().max()) == pytest.approx(by_trainer.metrics["sampler_gap"], abs=1e-9)


def test_a_sampler_that_disagrees_with_training_is_rejected_in_float32(files: Path, folders: dict[str, Path]) -> None:
    made = world(files, folders["llama"], "sampler")
    made.policy.temperature *= 1.005  # changes the temperature in training but not in the sampler
    with pytest.raises(
        SurefootError, match=r"sampling\.old_log_probs='sampler': .*\(at most 0\.0001 in float32\); set 'trainer'"
    ):
        made.collector.collect(LearnerState.seeded(1, 64))


def test_an_initial_ratio_other_than_one_is_reported_once_in_bfloat16(files: Path, folders: dict[str, Path]) -> None:
    display, rows = RecordingDisplay(), []
    settings = fields(files, folders["llama"], "sampler", precision="bfloat16")
    settings["sampling"]["engine"] = "packed"  # samples in float32
    surefoot.train("language", display=display, callback=lambda metrics: bool(rows.append(metrics)), **settings)
    assert [abs(row["ratio_at_start"] - 1) > 1e-4 for row in rows] == [True] * 4
    assert sum("note: before any step was taken a ratio" in line for line in display.said) == 1
    exact = RecordingDisplay()
    surefoot.train("language", display=exact, **fields(files, folders["llama"], "sampler"))
    assert not any("before any step was taken" in line for line in exact.said)


def test_behaviour_log_probs_are_kept_in_bfloat16_but_not_in_float32(files: Path, folders: dict[str, Path]) -> None:
    exact, rough = (
        tiny.world_of(fields(files, folders["llama"], "trainer", precision=precision)) for precision in ("float32", "bfloat16")
    )
    rollout = exact.collector.collect(LearnerState.seeded(1, 64))
    assert rollout.behaviour_log_probs is None
    assert "sampler_kl" not in rollout.metrics
    rollout = rough.collector.collect(LearnerState.seeded(1, 64))
    gap = (rollout.old_log_probs - rollout.behaviour_log_probs)[rollout.mask]
    assert float(gap.abs().max()) == pytest.approx(rollout.metrics["sampler_gap"])
    assert float((gap.double().expm1() - gap).mean()) == pytest.approx(rollout.metrics["sampler_kl"], rel=0.1, abs=1e-7)


def test_importance_weights_are_reported_and_change_the_loss(files: Path, folders: dict[str, Path]) -> None:
    rows: dict[float | None, list[Any]] = {}
    for cap in (None, 1.0, 3.0):
        objective = {"reuse": {"epochs": 2, "minibatches": 2}, "importance_cap": cap}
        settings = fields(files, folders["llama"], "trainer", precision="bfloat16", objective=objective, steps=16)
        settings["sampling"]["engine"] = "packed"  # samples in float32
        surefoot.train("language", run_dir=files / str(cap), **settings)
        rows[cap] = read_metrics(files / str(cap) / "metrics.jsonl")
    assert "importance_weight" not in rows[None][0]
    assert rows[3.0][0]["importance_weight"] == pytest.approx(1, abs=0.02)
    assert rows[1.0][0]["importance_capped"] > 0.1
    assert rows[None][0]["policy_loss"] != rows[3.0][0]["policy_loss"]


# ---- one update per batch -----------------------------------------------------------------------------------------------

ONCE = {"reuse": {"epochs": 1, "minibatches": 1}}
"""one update per batch"""
MINIMAL = {"kind": "language", "model": "pocket", "reward": {"terms": ["r.py:score"]}, "data": {"train": "x.jsonl"}}


def one_update(files: Path, model: Path, whose: str, algorithm: str, **objective: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Metrics and gradient of the update on one batch of 4 groups."""
    sampling = {"prompts": 4, "samples": 4, "max_tokens": 8, "temperature": 0.8, "old_log_probs": whose}
    changes = {"algorithm": algorithm, "sampling": sampling, "objective": objective, "reference": {"beta": 0.0}}
    made = tiny.world_of(fields(files, model, whose, **changes))
    state = LearnerState.seeded(1, 64)
    rollout = made.collector.collect(state)
    assert (rollout.old_log_probs is None) == (whose == "update")
    learner = Learner(made.policy, made.recipe.objective, LearnerSettings(AdamSettings(1e-6, max_grad_norm=None)))
    metrics = learner.update(rollout, assign_credit(rollout, made.recipe.objective), state)
    return rollout.metrics | metrics, learner.steppable["policy"].gradients.clone()


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("GRPO", ONCE),
        ("DAPO", {**ONCE, "drop_above_kl": 0.1}),
        ("GSPO", ONCE),
        ("GRPO", {**ONCE, "reference_estimator": "ratio_k3"}),
        ("REINFORCE_PLUS_PLUS", {**ONCE, "target_kl": 0.1, "entropy_coefficient": 0.01}),
        ("RLOO", {}),
    ],
)
def test_skipping_the_old_log_probs_pass_keeps_gradient_and_metrics(
    algorithm: str, changes: dict[str, Any], files: Path, folders: dict[str, Path]
) -> None:
    (before, expected), (now, gradient) = (
        one_update(files, folders["llama"], whose, algorithm, **changes) for whose in ("trainer", "update")
    )
    assert float(expected.norm()) > 1e-3
    torch.testing.assert_close(gradient, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert before.keys() - now.keys() <= {"sampler_gap", "kl", "ratio_outside"}
    assert now.keys() <= before.keys()
    for name in now.keys() - {"seconds_sampling", "seconds_scoring", "tokens_per_second"}:
        assert now[name] == pytest.approx(before[name], abs=2e-5), name


def test_one_update_per_batch_skips_the_old_log_probs_pass(
    files: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    forward = LanguagePolicy.forward
    monkeypatch.setattr(LanguagePolicy, "forward", lambda *args: (passes.append(1), forward(*args))[1])
    # No reference pass, since beta is 0; the first one is the comparison with single rows.
    for whose, expected in (("trainer", 3), ("update", 2)):
        passes.clear()
        one_update(files, folders["llama"], whose, "DR_GRPO", **ONCE)
        assert len(passes) == expected


@pytest.mark.parametrize(
    ("table", "resolved"),
    [
        ({"algorithm": "DR_GRPO", "objective": ONCE}, "update"),
        ({"algorithm": "DR_GRPO", "objective": ONCE, "server": "none"}, "update"),
        ({"algorithm": "RLOO", "reference": {"beta": 0.0}}, "update"),
        ({"algorithm": "RLOO"}, "trainer"),
        ({"algorithm": "GRPO"}, "trainer"),
        ({"algorithm": "A2C", "reference": {"beta": 0.0}}, "trainer"),
        ({"algorithm": "REINFORCE_PLUS_PLUS", "objective": {**ONCE, "trust_region": {"beta": 0.1}}}, "trainer"),
    ],
)
def test_auto_is_resolved_from_the_recipe_and_recorded(table: dict[str, Any], resolved: str) -> None:
    recipe = make_recipe({**MINIMAL, "sampling": {"max_tokens": 8}, **table})
    assert to_table(recipe)["sampling"]["old_log_probs"] == resolved
    assert make_recipe(to_table(recipe)) == recipe
