"""Models kept on the CPU while idle: they are on the device only for their own passes, and no result changes."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import assert_same
from torch import Tensor, nn

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.diagnostics.metrics import TIMING
from surefoot.errors import SurefootError
from surefoot.language.memory import check, estimate, total
from surefoot.language.memory.check import MemoryCheck, running_peak
from surefoot.language.memory.layout import Layout
from surefoot.language.memory.planner import model_config
from surefoot.language.memory.roles import host_bytes, permanent_bytes
from surefoot.language.memory.savings import alternatives
from surefoot.language.memory.workload import Workload
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner, make_world
from surefoot.sharding import gathered
from surefoot.sharding.idle import idle_weights, rest_on_cpu
from surefoot.store.checkpoint import load_checkpoint

from .test_precision import files as files
from .test_precision import table
from .test_sharded import trained

ROLES = ["reference", "reward"]
NEEDS_BITSANDBYTES = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


class Device:
    """A fake device that records the copies of tensors."""

    def __init__(self) -> None:
        self.copies: list[int] = []
        """the bytes of each copied tensor"""

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        self.copies.append(tensor.nbytes)
        return tensor.clone()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("surefoot.sharding.idle.on_device", made.copy)
    monkeypatch.setattr("surefoot.sharding.idle.has_own_memory", lambda device: True)
    return made


def idle_recipe(files: Path, start: Path, **changes: Any) -> Any:
    fields = {**table("language", files, start, "float32", offload=ROLES), **changes}
    return make_recipe({"kind": "language", **fields})


@pytest.mark.parametrize(
    ("roles", "precision", "optimizer"),
    [
        (ROLES, "float32", {}),
        (["critic"], "float32", {"critic_learning_rate": 1e-2, "weight_decay": 0.1}),
        (["critic", *ROLES], "bfloat16-weights", {"critic_learning_rate": 1e-2}),
        pytest.param(["critic"], "float32", {"kind": "adam-8bit"}, marks=NEEDS_BITSANDBYTES),
        (["critic"], "bfloat16-weights", {"kind": "rmsprop"}),
    ],
)
def test_idle_models_on_the_cpu_change_no_metric_or_weight(
    roles: list[str], precision: str, optimizer: dict[str, Any], files: Path, folders: dict[str, Path], device: Device
) -> None:
    steps = {"learning_rate": 1e-3, "micro_batch": 4, **optimizer}
    resting = idle_recipe(files, folders["llama"], precision=precision, offload=roles, optimizer=steps)
    moved, stayed = trained(resting), trained(resting.model_copy(update={"offload": False}))
    assert device.copies, "no model was moved"
    ours, theirs = ([{k: v for k, v in row.items() if k not in TIMING} for row in run["metrics"]] for run in (moved, stayed))
    assert ours == theirs
    torch.testing.assert_close(moved["weights"], stayed["weights"], rtol=0, atol=0)


def test_frozen_roles_are_copied_once_and_only_for_their_own_passes(
    files: Path, folders: dict[str, Path], device: Device
) -> None:
    world: Any = make_world(idle_recipe(files, folders["llama"], critic={"own_model": False}))
    reference, reward = world.reference.policy, world.reward.rewards[0].model
    roles = {"reference": reference, "reward": reward}
    bytes_of = {name: sum(x.nbytes for x in (*m.parameters(), *m.buffers())) for name, m in roles.items()}
    seen: list[tuple[str, list[str]]] = []

    def watch(name: str, module: nn.Module) -> None:
        def record(*_: Any) -> None:
            present = [role for role, other in roles.items() if (idle := idle_weights(other)) is not None and idle.uses]
            if not seen or seen[-1] != (name, present):
                seen.append((name, present))

        module.register_forward_pre_hook(record)

    for name, module in {"policy": world.policy.model.base_model, "reference": reference, "reward": reward}.items():
        watch(name, module)
    device.copies.clear()
    world.collector.collect(LearnerState.seeded(1, 100))
    assert seen == [("policy", []), ("reward", ["reward"]), ("policy", []), ("reference", ["reference"])]
    assert sum(device.copies) == sum(bytes_of.values()), "each role is copied once"
    for module in roles.values():
        idle = idle_weights(module)
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(idle.tensors, idle.host, strict=True)), "copies are dropped"


def test_critic_is_on_the_device_only_for_its_values_and_updates(files: Path, folders: dict[str, Path], device: Device) -> None:
    rows, score = f"{files}/rows.jsonl", f"{files}/rewards.py:score"
    fields = {"data": {"train": rows, "held_out": rows, "max_length": 64}, "reward": {"terms": [{"function": score}]}}
    recipe = idle_recipe(files, folders["llama"], offload=["critic"], **fields)
    world: Any = make_world(recipe)
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 100)
    policy, critic, optimizer = world.policy, world.policy.critic, learner.optimizers["policy"]
    own = sum(parameter.numel() for parameter in critic.parameters())
    others = len(optimizer.values) - own
    seen: list[tuple[str, int, set[int]]] = []

    def elements() -> set[int]:
        """How many weights, gradients and moments have memory on the device."""
        flats = (optimizer.values, optimizer.gradients, *(x for x in optimizer.state.values() if x.dim()))
        return {flat.untyped_storage().nbytes() // 4 for flat in flats}

    def watch(name: str, module: nn.Module) -> None:
        def record(*_: Any) -> None:
            uses = idle.uses if (idle := idle_weights(critic)) is not None else -1
            if not seen or seen[-1] != (name, uses, elements()):
                seen.append((name, uses, elements()))

        module.register_forward_pre_hook(record)

    for name, module in {"policy": policy.model.base_model, "critic": critic, "reference": world.reference.policy}.items():
        watch(name, module)

    def iterate() -> None:
        with learner.resting():
            rollout = world.collector.collect(state)
        learner.update(rollout, assign_credit(rollout, recipe.objective), state)

    iterate()  # creates the moments
    seen.clear()
    device.copies.clear()
    iterate()
    away, whole = {others}, {others + own}
    begin = next(index for index, (_, uses, _) in enumerate(seen) if uses == -1)
    assert list(dict.fromkeys((name, uses) for name, uses, _ in seen[:begin])) == [
        ("policy", 0),
        ("policy", 1),
        ("critic", 1),
        ("reference", 0),
    ]
    assert all(there == away for *_, there in seen[:begin]), "collecting"
    assert all(uses == -1 and there == whole for _, uses, there in seen[begin:]), "updates"
    assert sum(device.copies) == 4 * own, "the weights are copied once, not counting their return for the update"
    seen.clear()
    device.copies.clear()
    with learner.resting():
        world.evaluate_responses(world.sample_held_out())
    assert not device.copies, "evaluation needs no values"
    assert {name for name, *_ in seen} == {"policy", "reference"}


def test_failed_collection_returns_the_critic_to_the_device(files: Path, folders: dict[str, Path], device: Device) -> None:
    recipe = idle_recipe(files, folders["llama"], offload=["critic"])
    world: Any = make_world(recipe)
    learner = make_learner(recipe, world.policy)
    before = {name: x.clone() for name, x in world.policy.state_dict().items()}

    def fail() -> None:
        with learner.resting():
            assert idle_weights(world.policy.critic) is not None
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert idle_weights(world.policy.critic) is None
    optimizer = learner.optimizers["policy"]
    start, end = optimizer.values.data_ptr(), optimizer.values.data_ptr() + optimizer.values.nbytes
    assert all(start <= parameter.data_ptr() < end for parameter in world.policy.parameters())
    assert all(parameter.grad is not None for parameter in world.policy.parameters())
    assert all(torch.equal(x, before[name]) for name, x in world.policy.state_dict().items())


def test_nested_uses_share_copies_and_an_error_drops_them(device: Device) -> None:
    layer = nn.Linear(3, 2).requires_grad_(False)
    rest_on_cpu(layer, "cpu")
    host = layer.weight.data_ptr()

    def use() -> None:
        with gathered(layer):
            there = layer.weight.data_ptr()
            with gathered(layer):
                assert layer.weight.data_ptr() == there != host
            assert layer.weight.data_ptr() == there
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        use()
    assert layer.weight.data_ptr() == host
    assert len(device.copies) == 2


@pytest.mark.parametrize(("roles", "precision"), [(ROLES, "bfloat16-weights"), (["critic"], "float32")])
def test_resumed_run_with_idle_models_has_the_same_weights_and_moments(
    roles: list[str], precision: str, files: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one in which they stayed on the device before it was resumed."""
    monkeypatch.setattr("surefoot.sharding.idle.has_own_memory", lambda device: True)
    fields = table("language", files, folders["llama"], precision)
    surefoot.train("language", run_dir=tmp_path / "stays", **fields)
    stop = {"callback": lambda metrics: metrics["steps"] >= 16}
    surefoot.train("language", run_dir=tmp_path / "changes", **stop, **fields)
    surefoot.train("language", run_dir=tmp_path / "rests", **stop, **{**fields, "offload": roles})
    config = tmp_path / "changes" / "config.toml"
    config.write_text(config.read_text().replace("offload = false", f"offload = {json.dumps(roles)}"))
    stays = load_checkpoint(tmp_path / "stays" / "checkpoints" / "32")
    for run in ("rests", "changes"):
        surefoot.resume(tmp_path / run, allow_changes=run == "changes")
        rests = load_checkpoint(tmp_path / run / "checkpoints" / "32")
        assert rests["recipe"]["offload"] == roles
        assert stays["sources"] == rests["sources"], "hashes of frozen models"
        for part in ("agent", "learner"):
            assert_same(stays[part], rests[part])


# ---- memory -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def workload(folders: dict[str, Path]) -> Workload:
    """PPO with a value head, a reference and a reward model, on a device with its own memory."""
    config = model_config(str(folders["llama"]))[0]
    made = Workload("language", config, "head", reference=config, rewards=(config,), prompt=24, response=16)
    return replace(made, micro_batch_tokens=40, sampled=0)


def test_idle_models_need_cpu_memory_and_device_memory_for_their_passes(workload: Workload) -> None:
    there, away = estimate(workload), estimate(replace(workload, idle=tuple(ROLES)))
    assert away.host == {role: there.always[role] for role in ROLES}
    assert permanent_bytes(replace(workload, idle=tuple(ROLES))) == permanent_bytes(workload) - host_bytes(away.host)
    assert away.phases["learning"] == there.phases["learning"]
    assert away.phases["sampling"] == there.phases["sampling"]
    largest = max(sum(parts.values()) for parts in away.host.values())
    assert total(there.phases["scoring"]) < total(away.phases["scoring"]) <= total(there.phases["scoring"]) + largest
    assert running_peak(away) < running_peak(there)


def test_idle_critic_needs_device_memory_for_updates_and_its_passes(workload: Workload) -> None:
    own = replace(workload, value="own", reference=None, rewards=())
    there, away = estimate(own), estimate(replace(own, idle=("critic",)))
    critic = there.always["value"]
    assert away.host == {"value": {"weights": critic["weights"], "optimizer": critic["optimizer"]}}
    assert there.permanent - away.permanent == sum(critic.values())
    all_of_it = sum(critic.values())
    fewer = {"learning": 0, "saving": 0, "sampling": all_of_it, "scoring": all_of_it - critic["weights"]}
    assert {name: there.at(name) - away.at(name) for name in there.phases} == fewer
    assert permanent_bytes(replace(own, idle=("critic",))) == permanent_bytes(own) - sum(critic.values())
    long = replace(own, max_tokens=4_000)
    assert running_peak(estimate(replace(long, idle=("critic",)))) < running_peak(estimate(long)), "if sampling is the peak"
    assert 'offload = ["reference", "reward", "critic"]' in dict(alternatives(replace(workload, value="own")))


def test_idle_models_change_no_estimate_on_a_cpu_device(workload: Workload) -> None:
    here = replace(workload, layout=Layout(gpu=False))
    assert estimate(replace(here, idle=tuple(ROLES))) == estimate(here)
    assert not any(name.startswith("offload") for name, _ in alternatives(here))
    assert 'offload = ["reference", "reward"]' in dict(alternatives(workload))


def test_idle_models_must_fit_into_cpu_memory(files: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = idle_recipe(files, folders["llama"], check_memory=True).model_copy(update={"device": "cuda"})
    monkeypatch.setattr(check, "total_memory", lambda device: 10**12)
    monkeypatch.setattr(check, "available_memory", lambda device: 10**12 if device == "cuda" else 10**3)
    line = r'offload=\["reference", "reward"\]: keeps .* in the memory of the CPU, which has 0\.0 MB for each; set offload'
    with pytest.raises(SurefootError, match=line):
        MemoryCheck(recipe)
