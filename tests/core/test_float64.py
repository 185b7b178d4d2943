"""Apple's MPS has no float64: no tensor of the model's device may become one. Statistics in float64 are on the CPU there."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import surefoot
from surefoot.control.world import ControlWorld
from surefoot.core.rollout import LearnerState, tensors_in
from surefoot.ranks.collectives import exact_device, in_float64
from surefoot.recipes.presets import find_recipe

SOURCE = Path(surefoot.__file__).parent
ON_THE_CPU = {"control/normalise.py"}
"""statistics of observations and rewards as the environments return them, which are never on another device"""
NEW = {"zeros", "ones", "tensor", "arange", "rand", "empty"}


def is_float64(node: ast.expr) -> bool:
    return ast.unparse(node) in ("torch.float64", "torch.double")


def offences(text: str) -> list[str]:
    """Expressions that make float64 of a tensor, wherever it is; ``x.cpu().double()`` is none, nor is a new CPU tensor."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        to_double = name == "double" or (name in ("to", "type") and any(map(is_float64, node.args)))
        typed = any(keyword.arg == "dtype" and is_float64(keyword.value) for keyword in node.keywords)
        devices = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "device"]
        made = owner == "torch" and name in NEW and all(device.startswith("exact_device(") for device in devices)
        if (to_double and not owner.endswith((".cpu()", "exact_device(x.device))"))) or (
            typed and not made and name != "asarray"
        ):
            found.append(ast.unparse(node))
    return found


def test_no_module_makes_float64_on_the_device_of_the_model() -> None:
    allowed = {"language/metrics.py": ["torch.arange(k, dtype=torch.float64, device=wrong.device)"]}
    wrong = {}
    for part in ("core", "control", "language", "runs", "diagnostics"):
        for path in sorted((SOURCE / part).rglob("*.py")):
            name = path.relative_to(SOURCE).as_posix()
            here = [text for text in offences(path.read_text("utf-8")) if text not in allowed.get(name, [])]
            if here and name not in ON_THE_CPU:
                wrong[name] = here
    assert wrong == {}, "use in_float64(x), or x.cpu().double()"


def test_the_check_detects_float64_expressions() -> None:
    assert offences(
        "x.double(); y.to(torch.float64); z.cumsum(-1, dtype=torch.float64); torch.zeros(3, dtype=torch.double, device=d)"
    )
    assert len(offences("x.double(); y.to(torch.float64); z.cumsum(-1, dtype=torch.float64)")) == 3
    assert offences("x.cpu().double(); torch.zeros(3, dtype=torch.float64); x.to(torch.float32)") == []


def test_a_tensor_moves_to_the_cpu_only_where_its_device_has_no_float64() -> None:
    assert exact_device(torch.device("mps")) == torch.device("cpu")
    assert exact_device(torch.device("cuda:1")) == torch.device("cuda:1")
    moved: list[Any] = []
    fake: Any = SimpleNamespace(device=torch.device("mps"), to=lambda where: (moved.append(where), torch.ones(2))[1])
    assert in_float64(fake).dtype == torch.float64
    assert moved == [torch.device("cpu")]


def test_a_rollout_of_control_has_no_float64() -> None:
    recipe = find_recipe(
        "Pendulum-v1",
        {
            "rollout": {"environments": 2, "steps": 8},
            "objective": {"reuse": {"minibatches": 1}},
            "normalise": {"observations": True, "rewards": True},
        },
    )
    world = ControlWorld(recipe)
    try:
        for _ in range(2):
            rollout = world.collector.collect(LearnerState.seeded(1, 100))
            kinds = {
                x.dtype for x in tensors_in({n: v for n, v in vars(rollout).items() if n not in ("reward_parts", "metrics")})
            }
            assert kinds
            assert torch.float64 not in kinds
        assert not [name for name, p in world.policy.state_dict().items() if p.dtype == torch.float64]
    finally:
        world.close()
