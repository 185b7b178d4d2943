"""The memory that a role keeps all the time: weights, gradients, and the optimizer's moments."""

from surefoot.core.optimizer import BLOCK
from surefoot.language.memory.layout import LOW_WEIGHT, WEIGHT
from surefoot.language.memory.parameters import adapter_size, count_parameters
from surefoot.language.memory.workload import Workload

GRADIENT, MOMENTS = 4, 8
"""bytes per parameter"""
NF4_BLOCK, SCALE_BLOCK = 64, 256
"""weights that share a scale in 4 bits, and scales that share one themselves"""
ByRole = dict[str, dict[str, int]]
"""bytes by role and part"""


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


def permanent(workload: Workload) -> ByRole:
    """Permanent bytes of a rank by role and part, from parameter counts alone."""
    layout, own = workload.layout, count_parameters(workload.policy)
    if workload.adapter is not None:
        whole = _of_adapters(workload)
    elif workload.kind == "reward":
        whole = {"reward": _trained(workload, own.trunk, own.width + 1)}
    else:
        whole = {"policy": _trained(workload, own.total)}
        if workload.value == "head":
            whole["value"] = trained_bytes(own.width + 1, low_moments=workload.low_moments)
        elif workload.value == "own":
            critic = count_parameters(workload.critic or workload.policy)
            whole["value"] = _trained(workload, critic.trunk, critic.width + 1)
        whole |= frozen_roles(workload)
    return {role: {name: layout.part(size) for name, size in parts.items()} for role, parts in whole.items()}


def _trained(workload: Workload, model: int, head: int = 0) -> dict[str, int]:
    """Bytes of a trained model and of its head, which stays in float32."""
    if workload.rounded:
        return trained_bytes(head, model, workload.low_moments)
    return trained_bytes(model + head, low_moments=workload.low_moments)


def frozen_roles(workload: Workload) -> ByRole:
    """Bytes of the reference and of reward models, as far as they are models of their own; in the passes' dtype."""
    each, sizes = LOW_WEIGHT if workload.low else WEIGHT, {}
    if workload.reference is not None and workload.kind != "dpo":
        sizes["reference"] = {"weights": each * count_parameters(workload.reference).total}
    if workload.rewards:
        counts = [count_parameters(config) for config in workload.rewards]
        sizes["reward"] = {"weights": each * sum(count.trunk + count.width + 1 for count in counts)}
    return sizes


def _of_adapters(workload: Workload) -> ByRole:
    """The bytes of whole models if all roles are adapters of one frozen base."""
    assert workload.adapter is not None
    own, size, low = count_parameters(workload.policy), adapter_size(workload.policy, workload.adapter), workload.low_moments
    head = own.width + 1
    if workload.kind == "reward":
        return {"base": _base_bytes(workload, own.trunk), "reward": trained_bytes(size + head, low_moments=low)}
    sizes = {"base": _base_bytes(workload, own.total), "policy": trained_bytes(size, low_moments=low)}
    if workload.value != "none":
        sizes["value"] = trained_bytes(head + (size if workload.value == "own" else 0), low_moments=low)
    sizes |= frozen_roles(workload)
    if workload.reward_adapters:
        adapters = sum(adapter_size(workload.policy, other) + head for other in workload.reward_adapters)
        sizes["reward"] = {"weights": WEIGHT * adapters + sizes.get("reward", {}).get("weights", 0)}
    return sizes


def _base_bytes(workload: Workload, parameters: int) -> dict[str, int]:
    """Bytes of the base of adapters, whose linear layers may be in 4 or 8 bits."""
    each, counts = LOW_WEIGHT if workload.rounded else WEIGHT, count_parameters(workload.policy)
    if workload.quantize is None:
        return {"weights": each * parameters}
    if workload.quantize == "int8":
        low = counts.linear_weights + WEIGHT * counts.linear_rows
    else:
        low = sum(count * _nf4_bytes(size) for size, count in counts.linear.items())
    return {"weights": each * (parameters - counts.linear_weights) + low}


def _nf4_bytes(weights: int) -> int:
    """Bytes of a layer in 4 bits: two weights in each; a scale of 1 for every 64, and one of 4 for every 256 of these; the 16
    and 256 values that codes stand for, and the mean of the scales.
    """
    scales = -(-weights // NF4_BLOCK)
    return -(-weights // 2) + scales + WEIGHT * (-(-scales // SCALE_BLOCK) + 16 + 256 + 1)


def on_device_and_host(workload: Workload) -> tuple[ByRole, ByRole]:
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


def host_bytes(parts_of: ByRole) -> int:
    """The sum of bytes by role and part."""
    return sum(sum(parts.values()) for parts in parts_of.values())
