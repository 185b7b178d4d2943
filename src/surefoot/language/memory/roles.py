"""The memory that a role keeps all the time: weights, gradients, and the optimizer's moments."""

from typing import TYPE_CHECKING

from surefoot.core.optimizer import BLOCK
from surefoot.language.memory.layout import LOW_WEIGHT, WEIGHT
from surefoot.language.memory.parameters import adapter_size, count_parameters, linear_sizes
from surefoot.language.memory.workload import Workload, reward_size

if TYPE_CHECKING:
    from surefoot.recipes.models import AdapterSettings

GRADIENT, MOMENTS = 4, 8
"""bytes per parameter"""
NF4_BLOCK, SCALE_BLOCK = 64, 256
"""weights that share a scale in 4 bits, and scales that share one themselves"""


def trained_bytes(parameters: int, rounded: int = 0, low_moments: bool = False) -> dict[str, int]:
    """Bytes of trained parameters, by part.

    rounded       parameters in bfloat16, besides the others; the optimizer has their float32 weights
    low_moments   Adam's moments are in 8 bits
    """
    return {
        "weights": WEIGHT * parameters + LOW_WEIGHT * rounded,
        "gradients": GRADIENT * (parameters + rounded),
        "optimizer": moment_bytes(parameters + rounded, low_moments) + WEIGHT * rounded,
    }


def moment_bytes(parameters: int, low: bool) -> int:
    """Bytes of Adam's two moments; ``low``: in 8 bits, with a scale for each block."""
    return MOMENTS * parameters if not low else 2 * (parameters + WEIGHT * -(-parameters // BLOCK))


def frozen_bytes(parameters: int, each: int = WEIGHT) -> dict[str, int]:
    """Bytes of frozen parameters, by part."""
    return {"weights": each * parameters}


def permanent(workload: Workload) -> dict[str, dict[str, int]]:
    """Permanent bytes of a rank by role and part, from parameter counts alone."""
    layout, whole = workload.layout, _permanent_of_whole_models(workload)
    return {role: {name: layout.part(size) for name, size in parts.items()} for role, parts in whole.items()}


def _permanent_of_whole_models(workload: Workload) -> dict[str, dict[str, int]]:
    own = count_parameters(workload.policy)
    if workload.adapter is not None:
        return _permanent_with_adapters(workload, workload.adapter)

    low = workload.low_moments

    def trained(model: int, head: int = 0) -> dict[str, int]:
        return trained_bytes(head, model, low) if workload.rounded else trained_bytes(model + head, low_moments=low)

    if workload.kind == "reward":
        return {"reward": trained(own.trunk, own.width + 1)}
    sizes = {"policy": trained(own.total)}
    if workload.value == "head":
        sizes["value"] = trained_bytes(own.width + 1, low_moments=low)
    elif workload.value == "own":
        critic = count_parameters(workload.critic or workload.policy)
        sizes["value"] = trained(critic.trunk, critic.width + 1)
    return sizes | frozen_roles(workload)


def frozen_roles(workload: Workload) -> dict[str, dict[str, int]]:
    """Bytes of the reference and of reward models, as far as they are models of their own; in the passes' dtype."""
    each, sizes = LOW_WEIGHT if workload.low else WEIGHT, {}
    if workload.reference is not None and workload.kind != "dpo":
        sizes["reference"] = frozen_bytes(count_parameters(workload.reference).total, each)
    if workload.rewards:
        sizes["reward"] = frozen_bytes(sum(reward_size(count_parameters(config)) for config in workload.rewards), each)
    return sizes


def _permanent_with_adapters(workload: Workload, adapter: "AdapterSettings") -> dict[str, dict[str, int]]:
    """The same if all roles are adapters of one frozen base."""
    own, size = count_parameters(workload.policy), adapter_size(workload.policy, adapter)
    low = workload.low_moments
    head, each = own.width + 1, LOW_WEIGHT if workload.rounded else WEIGHT
    if workload.kind == "reward":
        return {"base": _base_bytes(workload, own.trunk, each), "reward": trained_bytes(size + head, low_moments=low)}
    sizes = {"base": _base_bytes(workload, own.total, each), "policy": trained_bytes(size, low_moments=low)}
    if workload.value != "none":
        sizes["value"] = trained_bytes(head + (size if workload.value == "own" else 0), low_moments=low)
    sizes |= frozen_roles(workload)
    adapters = sum(adapter_size(workload.policy, other) + head for other in workload.reward_adapters)
    if adapters:
        others = sizes.get("reward", frozen_bytes(0))["weights"]
        sizes["reward"] = {"weights": frozen_bytes(adapters)["weights"] + others}
    return sizes


def _base_bytes(workload: Workload, parameters: int, each: int) -> dict[str, int]:
    """Bytes of the base of adapters, whose linear layers may be in 4 or 8 bits."""
    if workload.quantize is None:
        return frozen_bytes(parameters, each)
    linear = linear_sizes(workload.policy)
    if workload.quantize == "int8":
        low = linear.weights + WEIGHT * linear.rows
    else:
        low = sum(count * _nf4_bytes(size) for size, count in linear.layers.items())
    return {"weights": each * (parameters - linear.weights) + low}


def _nf4_bytes(weights: int) -> int:
    """Bytes of a layer in 4 bits: two weights in each; a scale of 1 for every 64, and one of 4 for every 256 of these; the 16
    and 256 values that codes stand for, and the mean of the scales.
    """
    scales = -(-weights // NF4_BLOCK)
    return -(-weights // 2) + scales + WEIGHT * (-(-scales // SCALE_BLOCK) + 16 + 256 + 1)


def on_device_and_host(workload: Workload) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """The permanent bytes of a rank on the device, and those in the memory of the CPU instead."""
    always = permanent(workload)
    if workload.layout.offloaded:
        return {}, always
    host = {}
    if can_leave(workload) and "critic" in workload.idle:
        critic = always.pop("value")
        host["value"] = {name: size for name, size in critic.items() if name != "gradients"}
    for role in workload.idle if workload.layout.gpu else ():
        if parts := frozen_roles(workload).get(role):
            host[role] = {name: workload.layout.part(size) for name, size in parts.items()}
            rest = {name: size - host[role].get(name, 0) for name, size in always[role].items()}
            always[role] = rest  # heads, and adapters of a base that stays
    return {role: parts for role, parts in always.items() if any(parts.values())}, host


def can_leave(workload: Workload) -> bool:
    """Whether the critic is a model that can leave the device between updates."""
    layout = workload.layout
    return workload.value == "own" and workload.adapter is None and layout.gpu and not layout.sharded


def critic_in_updates(workload: Workload) -> dict[str, int]:
    """The bytes of a critic that is on the device in updates alone, besides its passes."""
    away = can_leave(workload) and "critic" in workload.idle
    return {"critic": sum(permanent(workload)["value"].values())} if away else {}


def permanent_bytes(workload: Workload) -> int:
    """The sum of the permanent bytes on the device."""
    return host_bytes(on_device_and_host(workload)[0])


def host_bytes(parts_of: dict[str, dict[str, int]]) -> int:
    """The sum of bytes by role and part."""
    return sum(sum(parts.values()) for parts in parts_of.values())
