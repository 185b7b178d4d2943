"""Trunks: the function of each encoder, and the contract for custom networks."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

import surefoot
from surefoot import PPO_CLIP, SurefootError
from surefoot.control import networks
from surefoot.control.networks import CustomTrunk, NatureCNN, OneHot, Trunk, Vector
from surefoot.control.policy import ActorCritic
from surefoot.core.seeding import stream
from surefoot.recipes.control import Network

from .tiny import Sampled, small

TINY: dict[str, Any] = {"rollout": {"environments": 2, "steps": 8}, "evaluation": {"episodes": 0}, "objective": small(PPO_CLIP)}
PAIR = spaces.Dict({"where": spaces.Discrete(3, start=1), "x": spaces.Box(-1, 1, (2,))})


# ---- encoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "seen", "encoded"),
    [
        (spaces.Discrete(3), [0, 2], [[1, 0, 0], [0, 0, 1]]),
        (spaces.Discrete(3, start=-1), [-1, 0, 1], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (spaces.MultiDiscrete([2, 3]), [[1, 0]], [[0, 1, 1, 0, 0]]),
        (spaces.MultiDiscrete([2, 3], start=[5, -1]), [[5, 1]], [[1, 0, 0, 0, 1]]),
        (spaces.MultiDiscrete(np.array([[2], [2]])), [[[1], [0]]], [[0, 1, 1, 0]]),
    ],
)
def test_choices_are_encoded_one_hot(space: Any, seen: Any, encoded: Any) -> None:
    layer = OneHot(space)
    out = layer(torch.tensor(seen))
    assert out.tolist() == encoded
    assert out.shape[-1] == layer.width
    assert layer(torch.tensor([seen])).tolist() == [encoded]  # any leading shape
    assert not list(layer.state_dict())


def pixels(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def test_numbers_of_any_shape_are_flattened_and_concatenated() -> None:
    for shape in ((), (3,), (2, 3)):
        x = torch.rand(4, 5, *shape)
        assert torch.equal(Vector(shape)(x), x.reshape(4, 5, -1))
    assert Vector((2,))(torch.tensor([[1, 0]], dtype=torch.int8)).dtype == torch.float32


@pytest.mark.parametrize("shape", [(36, 40), (3, 36, 40), (2, 36, 40, 3)])
def test_the_image_network_is_that_of_the_nature_paper(shape: tuple[int, ...]) -> None:
    network = NatureCNN(pixels(shape), stream(1))
    seen = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, *shape), np.uint8))
    x = seen.reshape(6, *shape).double()
    if shape[-1] == 3:
        x = x.permute(0, *range(1, len(shape) - 2), len(shape), len(shape) - 2, len(shape) - 1)
    x = x.reshape(6, -1, 36, 40) / 255
    for index, stride in ((0, 4), (2, 2), (4, 1)):
        layer = network.convolutions[index]
        x = functional.relu(functional.conv2d(x, layer.weight.double(), layer.bias.double(), stride))
    x = functional.relu(functional.linear(x.flatten(1), network.layer.weight.double(), network.layer.bias.double()))
    assert network.width == 512
    torch.testing.assert_close(network(seen), x.reshape(2, 3, 512).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(36, 40), (36, 40, 2), (2, 36, 40)])
def test_the_bounds_of_an_image_become_0_and_1(shape: tuple[int, ...]) -> None:
    """A map of 0 and 1 is the picture of 0 and 255, channel by channel; an entry that can only be one number is 0."""
    reference, drawn = NatureCNN(pixels(shape), stream(1)), np.random.default_rng(0).integers(0, 2, (3, *shape), np.uint8)
    low, high = np.zeros(shape, np.uint8), np.full(shape, 1, np.uint8)
    channel = (..., 1) if shape[-1] == 2 else (1,)
    for lows, highs in ((0, 1), (0, 50), (7, 9), (7, 7)):
        low[channel], high[channel] = lows, highs
        network = NatureCNN(spaces.Box(low, high, dtype=np.uint8), stream(1))
        expected = 255 * drawn
        expected[(slice(None), *channel) if channel != (..., 1) else channel] *= highs > lows
        torch.testing.assert_close(network(torch.from_numpy(low + drawn * (high - low))), reference(torch.from_numpy(expected)))


def test_images_in_pieces_give_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    network, seen = NatureCNN(pixels((36, 36)), stream(1)), torch.randint(256, (7, 36, 36), dtype=torch.uint8)
    whole = network(seen)
    monkeypatch.setattr(networks, "PASS_AT_ONCE", 3)
    with torch.no_grad():
        torch.testing.assert_close(network(seen), whole)


@pytest.mark.parametrize("shape", [(36, 40, 1), (3, 36, 40, 1)])
def test_one_channel_is_read_alike_first_or_last_and_lies_in_memory_alike(shape: tuple[int, ...]) -> None:
    """A compiler takes other strides for channels that are last, and then its own program for wrong."""
    network = NatureCNN(pixels(shape), stream(1))
    first = NatureCNN(pixels((math.prod(shape[:-3]), 36, 40)), stream(1))
    seen, strides = torch.randint(256, (5, *shape), dtype=torch.uint8, generator=stream(2)), []
    for each in (network, first):
        each.convolutions[0].register_forward_pre_hook(lambda layer, inputs: strides.append(inputs[0].stride()))
    assert torch.equal(network(seen), first(seen.view(5, -1, 36, 40)))
    assert strides[0] == strides[1]


def test_features_of_leaves_are_concatenated_in_order() -> None:
    trunk = Trunk(PAIR, Network(hidden=()), stream(1))
    assert trunk.width == 5
    features = trunk({"x": torch.tensor([[0.5, -0.5]]), "where": torch.tensor([2]), "action_mask": torch.ones(1, 4)})
    assert features.tolist() == [[0, 1, 0, 0.5, -0.5]]


def test_weights_are_orthogonal_and_come_from_the_runs_stream_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (NatureCNN(pixels((36, 36)), stream(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in one.named_parameters():
        assert torch.equal(weight, dict(same.named_parameters())[name])
        if weight.dim() > 1:
            assert not torch.equal(weight, dict(other.named_parameters())[name])
            rows = weight.detach().flatten(1)
            rows = rows if rows.shape[0] <= rows.shape[1] else rows.T
            torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), rtol=0, atol=1e-4)


# ---- networks of the user's own ---------------------------------------------------------------------------------------


class Mine(nn.Module):
    """A good one: an embedding beside the numbers."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.layer = nn.Linear(6, 7)
        self.seen: list[Any] = []

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        self.seen.append({name: (tuple(x.shape), x.dtype) for name, x in inputs.items()})
        return torch.tanh(self.layer(torch.cat([self.table(inputs["where"]), inputs["x"]], -1)))


class Bare(nn.Module):
    """For an observation that is one leaf: it gets the tensor itself."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(observation_space.shape[0], 3)

    def forward(self, observations: Tensor) -> Tensor:
        return self.layer(observations)


SHARED = nn.Linear(2, 2)


class Passing(nn.Module):
    """Gives whatever a function makes of x."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(2, 4)

    def forward(self, inputs: Any) -> Any:
        return self.function(self.layer(inputs["x"]))


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module ``mine`` that can be imported by name, as a user's file can."""
    module = ModuleType("mine")
    module.Mine, module.Bare = Mine, Bare  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def trained(space: Any = PAIR, path: str = "mine:Mine", **network: Any) -> surefoot.Agent:
    fields = {**TINY, "network": {"custom": path, **network}}
    return surefoot.train(lambda: Sampled(space, spaces.Discrete(2)), PPO_CLIP, steps=32, seed=1, **fields)


@pytest.mark.parametrize("shared", [False, True])
def test_a_custom_network_is_trained_saved_and_loaded(shared: bool, tmp_path: Path) -> None:
    agent = trained(shared_trunk=shared)
    policy = agent.policy
    assert policy.actor_head.weight.shape == (2, 7)
    assert (policy.critic_trunk is None) == shared
    first = ActorCritic(PAIR, spaces.Discrete(2), agent.recipe.network, True, stream(1, "weights"))
    for name, weight in first.named_parameters():
        assert not torch.equal(weight, dict(policy.named_parameters())[name]), name
    agent.save(tmp_path / "agent")
    observation = PAIR.sample()
    again = surefoot.load(tmp_path / "agent")
    assert isinstance(again.policy.actor_trunk.module, Mine)
    assert again.value(observation) == agent.value(observation)


def test_a_custom_network_gets_rows_of_leaves() -> None:
    agent = trained()
    shapes = agent.policy.actor_trunk.module.seen
    assert all(set(row) == {"where", "x"} for row in shapes)
    for row in shapes:
        count = row["x"][0][0]
        assert row == {"where": ((count,), torch.int64), "x": ((count, 2), torch.float32)}
    assert {row["x"][0][0] for row in shapes} == {1, 2, 16}


def test_a_custom_network_gets_a_single_leaf_as_a_tensor() -> None:
    agent = trained(spaces.Box(-1, 1, (4,)), "mine:Bare")
    assert agent.policy.actor_head.weight.shape == (2, 3)


def test_weights_of_a_custom_network_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> list[Tensor]:
        policy = ActorCritic(PAIR, spaces.Discrete(2), Network(custom="mine:Mine"), True, stream(seed, "weights"))
        return list(policy.parameters())

    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = weights(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert all(torch.equal(a, b) for a, b in zip(one, weights(1), strict=True))
    assert not torch.equal(one[0], weights(2)[0])
    actor, critic = one[0], one[5]
    assert actor.shape == critic.shape == (5, 4)
    assert not torch.equal(actor, critic)


def boom(x: Any) -> Any:
    raise RuntimeError("the wheels\ncame off")


BAD = {
    "not there": (None, r"can't be imported \(AttributeError"),
    "raises": (lambda space: boom(space), r"called with the observation space, it raised RuntimeError: the wheels came off"),
    "no module": (lambda space: {}, r"returned a dict; it must return a torch\.nn\.Module"),
    "wrong input": (lambda space: nn.Linear(2, 2), r"forward raised TypeError: .*\(for where \[2\] torch\.int64, x \[2, 2\]"),
    "wrong width": (lambda space: Passing(nn.Linear(3, 2)), r"forward raised RuntimeError: .*shapes cannot be multiplied"),
    "no tensor": (lambda space: Passing(lambda x: [x]), r"forward returned a list; it must return a tensor of features"),
    "one number": (lambda space: Passing(lambda x: x.sum(-1)), r"shape \[2\] for 2 observations, not \[2, k\]"),
    "a sum over rows": (lambda space: Passing(lambda x: x.sum(0, True)), r"shape \[1, 4\] for 2 observations, not \[2, k\]"),
    "nothing": (lambda space: Passing(lambda x: x[:, :0]), r"shape \[2, 0\] for 2 observations"),
    "another width later": (
        lambda space: Passing(lambda x: x[:, : 3 if len(x) > 2 else 4]),
        r"\[16, 3\] for 16 .* not \[16, 4\]",
    ),
    "fewer axes for one alone": (
        lambda space: Passing(lambda x: x.sum(-1, True).expand(-1, 3).squeeze()),
        r"returned features of shape \[3\] for 1 observations, not \[1, 3\]",
    ),
    "rows that know of each other": (
        lambda space: Passing(lambda x: (y := nn.functional.layer_norm(x, x.shape[1:])) - y.mean(0)),
        "returned different features for an observation alone and in a batch; rows must be independent",
    ),
    "doubles": (lambda space: Passing(lambda x: x.double()), r"features of torch\.float64; they must be float32"),
    "double weights": (
        lambda space: Passing(nn.Sequential(nn.Identity(), nn.Linear(4, 4), _Extra())),
        r"parameters of torch\.float64; they must be float32",
    ),
    "the same twice": (
        lambda space: Passing(nn.Sequential(nn.Linear(4, 2), SHARED)),
        "the same parameters for actor and critic",
    ),
}


class _Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("name", BAD)
def test_a_network_that_does_not_fit_is_rejected_in_one_line(name: str, mine: ModuleType) -> None:
    factory, message = BAD[name]
    if factory is not None:
        mine.bad = factory  # type: ignore[attr-defined]
    with pytest.raises(SurefootError, match=rf"^network\.custom='mine:bad': .*{message}"):
        trained(path="mine:bad")


def test_a_frozen_part_stays_in_eval_mode(mine: ModuleType) -> None:
    mine.partly = lambda space: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())  # type: ignore[attr-defined]
    trunk = CustomTrunk("mine:partly", spaces.Box(-1, 1, (4,), np.float32), stream(1, "weights"))
    assert [module.training for module in trunk.module] == [True, False]  # type: ignore[union-attr]
    assert torch.equal(trunk.module[1].running_mean, torch.zeros(4))  # type: ignore[index, union-attr]


def test_loading_an_agent_whose_network_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained().save(tmp_path / "agent")
    monkeypatch.delitem(sys.modules, "mine")
    with pytest.raises(SurefootError, match=r"network\.custom='mine:Mine': can't be imported \(ModuleNotFoundError"):
        surefoot.load(tmp_path / "agent")


def test_frozen_parameters_do_not_change(mine: ModuleType) -> None:
    def frozen(space: Any) -> nn.Module:
        module = Mine(space)
        module.table.requires_grad_(False)
        return module

    mine.frozen = frozen  # type: ignore[attr-defined]
    fields = {**TINY, "network": {"custom": "mine:frozen"}, "optimizer": {"critic_learning_rate": 1e-2}}
    agent = surefoot.train(lambda: Sampled(PAIR, spaces.Discrete(2)), PPO_CLIP, steps=32, seed=1, **fields)
    first = ActorCritic(PAIR, spaces.Discrete(2), agent.recipe.network, True, stream(1, "weights"))
    for before, after in ((first.actor_trunk, agent.policy.actor_trunk), (first.critic_trunk, agent.policy.critic_trunk)):
        assert torch.equal(before.module.table.weight, after.module.table.weight)
        assert not torch.equal(before.module.layer.weight, after.module.layer.weight)


@pytest.mark.parametrize("network", [{}, {"lstm": 4}])
def test_weights_are_float32_whatever_default_an_environment_has_set(network: dict[str, Any]) -> None:
    def make() -> gymnasium.Env[Any, Any]:
        torch.set_default_dtype(torch.float64)
        return gymnasium.make("Pendulum-v1")

    small = {"rollout": {"environments": 2, "steps": 8}, "objective": {"reuse": {"epochs": 1, "minibatches": 1}}}
    try:
        agent = surefoot.train(make, steps=32, preset="none", evaluation={"episodes": 0}, network=network, **small)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in agent.policy.parameters()} == {torch.float32}
