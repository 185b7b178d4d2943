"""RMSprop and weight decay: formulas, resume, and rejected combinations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.core.optimizer import AdamSettings, FlatOptimizer, RMSpropSettings
from surefoot.errors import SurefootError
from surefoot.store.metrics import read_metrics

SMALL: dict[str, Any] = {"rollout": {"environments": 2, "steps": 16}, "evaluation": {"episodes": 0}, "algorithm": "A2C"}


@pytest.mark.parametrize("kind", [AdamSettings, RMSpropSettings])
def test_steps_are_those_of_the_classes_of_torch_to_the_last_bit(kind: type[AdamSettings]) -> None:
    gradients, values = torch.randn(8, 37, generator=torch.Generator().manual_seed(1)), torch.ones(37)
    ours, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    group = FlatOptimizer([ours], kind(1e-2, max_grad_norm=None))
    if kind is RMSpropSettings:
        reference: torch.optim.Optimizer = torch.optim.RMSprop([theirs], lr=1e-2, alpha=0.99, eps=1e-5)
    else:
        reference = torch.optim.Adam([theirs], lr=1e-2, eps=1e-5, fused=True)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        group.gradients.copy_(gradient)
        group.step(float(gradient.norm()))
        reference.step()
        assert torch.equal(ours, theirs)
    wanted = reference.state[theirs]
    assert group.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in group.state_dict().items())


def test_weight_decay_is_that_of_adamw_and_leaves_norms_and_biases_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    layers = [nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours, theirs = (list(module.parameters()) for module in layers)
    group = FlatOptimizer(ours, AdamSettings(1e-2, max_grad_norm=None, weight_decay=0.3))
    decays = [{"params": [p for p in theirs if p.dim() > 1], "weight_decay": 0.3}]
    decays += [{"params": [p for p in theirs if p.dim() < 2], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(decays, lr=1e-2, eps=1e-5)
    for scale in (1.0, 0.5, 0.0, 0.25):
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(other.shape, generator=generator)
            assert mine.grad is not None
            mine.grad.copy_(other.grad)
        for part in reference.param_groups:
            part["lr"] = 1e-2 * scale
        group.step(1.0, scale)
        reference.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("algorithm", "shrinks"), [("PPO_CLIP", True), ("TRPO", False)])
def test_weight_decay_applies_to_the_policy_unless_it_has_a_constraint(algorithm: str, shrinks: bool) -> None:
    """At a learning rate that moves nothing by itself, the critic's matrices shrink, the policy's too, no bias does."""
    settings = {"steps": 64, "seed": 1, "evaluation": {"episodes": 0}, "rollout": {"environments": 2, "steps": 32}}
    settings["objective"] = {"reuse": {"epochs": 2, "minibatches": 2}}
    if algorithm == "TRPO":
        settings["objective"] = {**settings["objective"], "trust_region": {"delta": 1e-12}}
    sizes = []
    for decay in (0.0, 0.9):
        optimizer = {"learning_rate": 1e-3, "weight_decay": decay, "schedule": "constant"}
        agent = surefoot.train("CartPole-v1", algorithm, optimizer=optimizer, **settings)
        sizes.append({name: float(p.detach().norm()) for name, p in agent.policy.named_parameters()})
    for name, plain in sizes[0].items():
        of_critic, matrix = "critic" in name or "value" in name, "weight" in name
        if matrix and (shrinks or of_critic):
            assert sizes[1][name] < plain * 0.999, name
        elif not of_critic and not shrinks:
            assert sizes[1][name] == pytest.approx(plain, rel=1e-5), name


def test_a_run_with_rmsprop_resumes_exactly(tmp_path: Path) -> None:
    fields = {**SMALL, "optimizer": {"kind": "rmsprop", "schedule": "constant"}}
    surefoot.train("CartPole-v1", steps=256, run_dir=tmp_path / "whole", **fields)
    surefoot.train("CartPole-v1", steps=128, run_dir=tmp_path / "half", **fields)
    surefoot.resume(tmp_path / "half", steps=256)
    whole, half = (read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("whole", "half"))
    assert whole["policy_loss"] == half["policy_loss"]
    assert whole["value_loss"] == half["value_loss"]


def test_the_moments_of_the_other_optimizer_are_rejected(tmp_path: Path) -> None:
    surefoot.train("CartPole-v1", steps=64, run_dir=tmp_path / "run", **SMALL)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('kind = "adam"', 'kind = "rmsprop"'))
    with pytest.raises(SurefootError, match=r"optimizer\.kind"):
        surefoot.resume(tmp_path / "run", steps=128)
    with pytest.raises(SurefootError, match=r"^optimizer\.kind: has changed since the checkpoint"):
        surefoot.resume(tmp_path / "run", steps=128, allow_changes=True)
