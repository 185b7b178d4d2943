"""Frozen models that rest on the CPU: they are on the device in their own passes alone, and no number changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.core.rollout import LearnerState
from surefoot.core.sharding import gathered
from surefoot.core.sharding.idle import idle_weights, rest_on_cpu
from surefoot.errors import SurefootError
from surefoot.language.memory import Workload, alternatives, check, estimate, host_bytes, permanent_bytes
from surefoot.language.memory.check import MemoryCheck, running_peak
from surefoot.language.memory.layout import Layout
from surefoot.language.memory.planner import model_config
from surefoot.recipes.reading import make_recipe
from surefoot.runs.api import make_world
from surefoot.runs.checkpoint import load_checkpoint
from surefoot.runs.metrics import TIMING

from .test_precision import files, table  # noqa: F401
from .test_sharded import trained

ROLES = ["reference", "reward"]


class Device:
    """A device whose copies of tensors are counted."""

    def __init__(self) -> None:
        self.copies: list[int] = []
        """one number for each copied tensor: its bytes"""

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        self.copies.append(tensor.nbytes)
        return tensor.clone()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("surefoot.core.sharding.idle.on_device", made.copy)
    return made


def idle_recipe(files: Path, start: Path, **changes: Any) -> Any:  # noqa: F811
    fields = {**table("language", files, start, "float32", offload=ROLES), **changes}
    return make_recipe({"kind": "language", **fields})


@pytest.mark.parametrize("precision", ["float32", "bfloat16-weights"])
def test_models_that_rest_change_no_number(
    precision: str,
    files: Path,  # noqa: F811
    folders: dict[str, Path],
    device: Device,
) -> None:
    resting = idle_recipe(files, folders["llama"], precision=precision)
    moved, stayed = trained(resting), trained(resting.model_copy(update={"offload": False}))
    assert device.copies, "else nothing was tried"
    ours, theirs = ([{k: v for k, v in row.items() if k not in TIMING} for row in run["metrics"]] for run in (moved, stayed))
    assert ours == theirs
    assert all(torch.equal(x, stayed["weights"][name]) for name, x in moved["weights"].items())


def test_a_role_is_on_the_device_once_for_each_batch_in_its_own_passes_alone(
    files: Path,  # noqa: F811
    folders: dict[str, Path],
    device: Device,
) -> None:
    world: Any = make_world(idle_recipe(files, folders["llama"], critic={"own_model": False}))
    reference, reward = world.reference.policy, world.reward.rewards[0].model
    roles = {"reference": reference, "reward": reward}
    bytes_of = {name: sum(x.nbytes for x in (*m.parameters(), *m.buffers())) for name, m in roles.items()}
    seen: list[tuple[str, list[str]]] = []

    def watch(name: str, module: nn.Module) -> None:
        def note(*_: Any) -> None:
            present = [role for role, other in roles.items() if (idle := idle_weights(other)) is not None and idle.uses]
            if not seen or seen[-1] != (name, present):
                seen.append((name, present))

        module.register_forward_pre_hook(note)

    for name, module in {"policy": world.policy.model.base_model, "reference": reference, "reward": reward}.items():
        watch(name, module)
    device.copies.clear()
    world.collector.collect(LearnerState.seeded(1, 100))
    assert seen == [("policy", []), ("reward", ["reward"]), ("policy", []), ("reference", ["reference"])]
    assert sum(device.copies) == sum(bytes_of.values()), "each role is copied once"
    for module in roles.values():
        idle = idle_weights(module)
        assert idle is not None
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(idle.tensors, idle.host, strict=True)), "copies are dropped"


def test_uses_within_each_other_share_copies_and_an_error_drops_them(device: Device) -> None:
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


@pytest.mark.parametrize("precision", ["float32", "bfloat16-weights"])
def test_a_run_whose_models_rest_resumes_and_ends_as_one_whose_models_stay(
    precision: str,
    files: Path,  # noqa: F811
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    fields = table("language", files, folders["llama"], precision)
    surefoot.train("language", run_dir=tmp_path / "stays", **fields)
    fields["offload"] = ROLES
    surefoot.train("language", run_dir=tmp_path / "rests", callback=lambda metrics: metrics["steps"] >= 16, **fields)
    surefoot.resume(tmp_path / "rests")
    stays, rests = (load_checkpoint(tmp_path / run / "checkpoints" / "32") for run in ("stays", "rests"))
    assert stays["sources"] == rests["sources"], "hashes of frozen models"
    assert all(torch.equal(x, rests["agent"][name]) for name, x in stays["agent"].items())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"offload": True}, r"offload=true: is for sharded models; set sharding = 'full', or name frozen models"),
        ({"offload": ["critic"]}, r"offload=\['critic'\]: 'critic' is no frozen model; name 'reference', 'reward' or both"),
        (
            {"offload": "critic"},
            r"offload='critic': must be true, false or a list, such as \[",
        ),
        ({"reference": {"beta": 0.0}}, r"offload: names the reference, and nothing reads one; leave it out"),
        ({"adapter": {"rank": 2}}, r"offload: names the reference, which is the base of the adapters, and that is always in"),
        ({"reward": {"terms": ["file.py:function"]}}, r"offload: names the reward, and no term of reward.terms is a model"),
    ],
)
def test_what_can_not_rest_is_one_line(changes: dict[str, Any], line: str, files: Path, folders: dict[str, Path]) -> None:  # noqa: F811
    with pytest.raises(SurefootError, match=f"^{line}") as error:
        idle_recipe(files, folders["llama"], **changes)
    assert "\n" not in str(error.value)


def test_kinds_without_frozen_models_have_nothing_that_rests(files: Path, folders: dict[str, Path]) -> None:  # noqa: F811
    fields = table("sft", files, folders["llama"], "float32", offload=["reference"])
    with pytest.raises(SurefootError, match=r"^offload=\['reference'\]: names frozen models of online runs, and kind = 'sft'"):
        make_recipe({"kind": "sft", **fields})


# ---- memory -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def workload(folders: dict[str, Path]) -> Workload:
    """PPO with four models, on a device with its own memory."""
    config = model_config(str(folders["llama"]))[0]
    made = Workload("language", config, surefoot.PPO_CLIP, "head", reference=config, rewards=(config,), prompt=24, response=16)
    return replace(made, micro_batch_tokens=40, sampled=0)


def test_what_rests_is_in_the_memory_of_the_cpu_and_in_that_of_the_device_in_its_own_passes(workload: Workload) -> None:
    there, away = estimate(workload), estimate(replace(workload, idle=tuple(ROLES)))
    assert away.host == {role: there.always[role] for role in ROLES}
    assert permanent_bytes(replace(workload, idle=tuple(ROLES))) == permanent_bytes(workload) - host_bytes(away.host)
    assert away.phases["learning"] == there.phases["learning"]
    assert away.phases["sampling"] == there.phases["sampling"]
    largest = max(sum(parts.values()) for parts in away.host.values())
    assert there.phases["scoring"].total < away.phases["scoring"].total <= there.phases["scoring"].total + largest
    assert running_peak(away) < running_peak(there)


def test_nothing_rests_where_the_cpu_is_the_device(workload: Workload) -> None:
    here = replace(workload, layout=Layout(gpu=False))
    assert estimate(replace(here, idle=tuple(ROLES))) == estimate(here)
    assert not any(name.startswith("offload") for name, _ in alternatives(here))
    assert any(name == 'offload = ["reference", "reward"]' for name, _ in alternatives(workload))


def test_what_rests_must_fit_the_memory_of_the_cpu(
    files: Path,  # noqa: F811
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = idle_recipe(files, folders["llama"], check_memory=True).model_copy(update={"device": "cuda"})
    monkeypatch.setattr(check, "total_memory", lambda device: 10**12)
    monkeypatch.setattr(check, "available_memory", lambda device: 10**12 if device == "cuda" else 10**3)
    line = r'offload=\["reference", "reward"\]: keeps .* in the memory of the CPU, which has 0\.0 MB for each; set offload'
    with pytest.raises(SurefootError, match=line):
        MemoryCheck(recipe)
