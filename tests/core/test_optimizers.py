"""RMSprop, weight decay, weights in bfloat16 with float32 copies: formulas, resume, and rejected combinations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import on_ranks
from torch import Tensor, nn

import surefoot
from surefoot.core.optimizer import AdamSettings, FlatOptimizer, RMSpropSettings
from surefoot.errors import SurefootError
from surefoot.ranks.collectives import broadcast_weights, check_same_weights, stored
from surefoot.ranks.launching import join_ranks
from surefoot.sharding.master import stored_weights, to_bfloat16
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


LOW = torch.bfloat16


class Net(nn.Module):
    """A trained layer, a frozen one, a head that stays exact, and a buffer."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.trained, self.frozen, self.head = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)
        self.register_buffer("frequencies", torch.tensor([1 / 3]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(self.trained(x)).float())
        return out


def lowered(seed: int = 1) -> Net:
    net = Net(seed)
    to_bfloat16(net, exact=[net.head])
    return net


def test_trained_and_frozen_weights_are_rounded_and_exact_parts_and_buffers_are_not() -> None:
    net, before = lowered(), Net()
    for name, p in net.named_parameters():
        assert p.dtype == (torch.float32 if name.startswith("head") else LOW), name
    assert net.frequencies.dtype == torch.float32
    assert torch.equal(stored(net.trained.weight), before.trained.weight), "nothing is lost before the first step"
    assert torch.equal(net.trained.weight, before.trained.weight.to(LOW))
    assert stored(net.frozen.weight) is net.frozen.weight, "what is not trained has no copy"
    to_bfloat16(net, exact=[net.head])
    assert torch.equal(stored(net.trained.weight), before.trained.weight), "a second call changes nothing"


@pytest.mark.parametrize("settings", [AdamSettings(1e-2, weight_decay=0.1), RMSpropSettings(1e-2)], ids=["adamw", "rmsprop"])
def test_master_weights_take_the_steps_of_float32_weights_with_the_same_gradients(settings: AdamSettings) -> None:
    low, exact = lowered(), Net()
    mine, theirs = ([net.trained.weight, net.head.weight] for net in (low, exact))
    ours, reference = FlatOptimizer(mine, settings), FlatOptimizer(theirs, settings)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        ours.zero()
        reference.zero()
        gradients = [torch.randn(p.shape, generator=generator).to(LOW) for p in mine]
        torch.stack([(p * g).sum().float() for p, g in zip(mine, gradients, strict=True)]).sum().backward()
        reference.gradients.copy_(torch.cat([g.float().flatten() for g in gradients]))
        assert torch.equal(ours.gradients, reference.gradients)
        for group in (ours, reference):
            group.step(group.gradient_norm(), 0.5)
        assert torch.equal(ours.values, reference.values)
        assert torch.equal(stored(mine[0]), theirs[0])
        assert torch.equal(mine[0], theirs[0].to(LOW)), "passes read the rounded weights"
        assert torch.equal(mine[1], theirs[1]), "a float32 parameter of the same optimizer is as before"
    assert ours.state_dict().keys() == reference.state_dict().keys()
    assert all(torch.equal(x, reference.state_dict()[name]) for name, x in ours.state_dict().items())


def test_steps_that_are_smaller_than_a_rounding_add_up() -> None:
    """The neighbours of 1 in bfloat16 are 1/128 above and 1/256 below; 400 steps of 1e-4 go further than that."""
    parameter = nn.Parameter(torch.ones(4))
    holder = nn.ParameterList([parameter])
    to_bfloat16(holder)
    group = FlatOptimizer([parameter], AdamSettings(1e-4, max_grad_norm=None))
    seen = []
    for _ in range(400):
        group.zero()
        parameter.float().sum().backward()
        group.step(1.0)
        seen.append(float(parameter.detach()[0]))
    assert seen[0] == 1.0, "one step is lost in the rounding"
    assert seen[-1] < 0.97, "all of them are not"
    assert torch.allclose(stored(parameter), torch.full((4,), 1 - 400e-4), atol=1e-3)


def test_gradients_of_many_passes_are_added_in_float32() -> None:
    """In bfloat16 256 + 1 is 256, so a sum of ones would end there."""
    parameter = nn.Parameter(torch.zeros(3))
    to_bfloat16(nn.ParameterList([parameter]))
    group = FlatOptimizer([parameter], AdamSettings(1e-4))
    group.zero()
    for _ in range(300):
        parameter.sum().backward()
        assert parameter.grad is None, "a gradient is dropped when it is added"
    assert group.gradients.tolist() == [300.0] * 3


def test_saved_weights_have_the_names_of_the_module_and_trained_ones_are_float32() -> None:
    net = lowered()
    state = stored_weights(net)
    assert state.keys() == net.state_dict().keys()
    assert {name for name, x in state.items() if x.dtype == LOW} == {"frozen.weight", "frozen.bias"}
    FlatOptimizer([net.trained.weight, net.trained.bias], AdamSettings(1e-2))
    assert torch.equal(stored_weights(net)["trained.weight"], Net().trained.weight), "an optimizer moves it, and keeps it"


def test_ranks_compare_and_share_master_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two ranks whose rounded weights are equal and whose master weights are not."""

    def body(rank: int) -> tuple[str, bool]:
        join_ranks()
        net = lowered()
        stored(net.trained.weight).mul_(1 + 1e-6 * rank)
        assert torch.equal(net.trained.weight, lowered().trained.weight)
        try:
            check_same_weights(net)
            said = ""
        except SurefootError as error:
            said = str(error)
        broadcast_weights(net)
        check_same_weights(net)
        return said, torch.equal(stored(net.trained.weight), Net().trained.weight)

    for said, same in on_ranks(2, body, tmp_path_factory.mktemp("masters")):
        assert said.startswith("ranks: the weights of rank 1 differ from those of rank 0")
        assert same
