"""RMSprop, the optimizer of the original A2C: its formula, its resume, and what it can't be combined with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.core.optimizer import ALPHA, AdamSettings, FlatOptimizer, RMSpropSettings
from surefoot.errors import SurefootError
from surefoot.recipes.presets import find_recipe
from surefoot.runs.trackers.metrics_jsonl import read_metrics

SMALL: dict[str, Any] = {"rollout": {"environments": 2, "steps": 16}, "evaluation": {"episodes": 0}, "algorithm": "A2C"}


def moved(settings: AdamSettings, gradients: torch.Tensor) -> torch.Tensor:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    group = FlatOptimizer([parameter], settings)
    for gradient in gradients:
        group.gradients.copy_(gradient)
        group.step(float(gradient.norm()))
    return parameter.detach().double()


def test_a_step_is_the_gradient_over_the_root_of_its_running_square() -> None:
    gradients = torch.tensor([[0.3, -0.1], [0.2, 0.4], [-0.1, 0.1]])
    expected, square = torch.tensor([1.0, -2.0]).double(), torch.zeros(2).double()
    for gradient in gradients.double():
        square = ALPHA * square + (1 - ALPHA) * gradient**2
        expected = expected - 1e-2 * gradient / (square.sqrt() + 1e-5)
    torch.testing.assert_close(moved(RMSpropSettings(1e-2, max_grad_norm=None), gradients), expected, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(moved(AdamSettings(1e-2, max_grad_norm=None), gradients), expected, rtol=1e-2)


@pytest.mark.parametrize("kind", [AdamSettings, RMSpropSettings])
def test_steps_are_those_of_the_classes_of_torch_to_the_last_bit(kind: type[AdamSettings]) -> None:
    gradients, values = torch.randn(8, 37, generator=torch.Generator().manual_seed(1)), torch.ones(37)
    ours, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    group = FlatOptimizer([ours], kind(1e-2, max_grad_norm=None))
    if kind is RMSpropSettings:
        reference: torch.optim.Optimizer = torch.optim.RMSprop([theirs], lr=1e-2, alpha=ALPHA, eps=1e-5)
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


def test_wrong_kinds_are_one_line() -> None:
    with pytest.raises(SurefootError, match=r"^optimizer\.kind='sgd': "):
        find_recipe("CartPole-v1", {"optimizer": {"kind": "sgd"}})
    with pytest.raises(SurefootError, match=r"^engine='compiled': optimizer\.kind = 'rmsprop' has no compiled step"):
        find_recipe("CartPole-v1", {"optimizer": {"kind": "rmsprop"}, "engine": "compiled"})
