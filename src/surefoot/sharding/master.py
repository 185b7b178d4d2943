"""Whole models that compute in bfloat16: trained parameters keep float32 values beside them, their master weights.

Passes read the parameters, which are rounded copies. The optimizer (``core.optimizer``) adds their gradients up in float32,
moves the master weights, and rounds them again. So a step that is smaller than a rounding is not lost (Micikevicius et al.
2018, arXiv 1710.03740, section 3.1). Checkpoints contain the master weights.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from surefoot.ranks.collectives import MASTER, stored


@torch.no_grad()
def to_bfloat16(module: nn.Module, device: str = "cpu", exact: Iterable[nn.Module] = ()) -> None:
    """Move a module to a device, with its parameters in bfloat16; those that are trained get master weights there.

    exact   parts whose parameters are float32, such as a value head

    Buffers keep their dtype: the frequencies of positions would be wrong if rounded. Call it before the optimizer is made.
    """
    kept = {parameter for part in exact for parameter in part.parameters()}
    for parameter in module.parameters():
        if not parameter.is_floating_point() or stored(parameter) is not parameter:
            continue
        if parameter in kept:
            parameter.data = parameter.data.to(device, torch.float32)
        elif parameter.requires_grad:
            master = parameter.data.to(device, torch.float32)
            parameter.data = master.to(torch.bfloat16)
            setattr(parameter, MASTER, master)
        else:
            parameter.data = parameter.data.to(torch.bfloat16).to(device)
    module.to(device)


def stored_weights(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of a module with master weights in place of rounded ones."""
    masters = {
        name: stored(parameter).detach()
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if stored(parameter) is not parameter
    }
    return {**module.state_dict(), **masters}
