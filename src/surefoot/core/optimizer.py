"""Adam on parameters that live in one flat buffer.

A network of a dozen small tensors spends most of an update walking over them. Here parameters and gradients are views of
two flat tensors, so zeroing, summing over ranks, the norm, clipping and Adam are one call each, whatever the network.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.algorithms import Objective
from surefoot.core.distributed import all_sum
from surefoot.core.rollout import Policy

BETAS = (0.9, 0.999)
"""how much of its two moments Adam keeps per step"""


@dataclass(frozen=True)
class AdamSettings:
    """How one group of parameters moves."""

    learning_rate: float
    epsilon: float = 1e-5
    max_grad_norm: float | None = 0.5
    """the gradient of the whole group is scaled down to this norm"""


def grouped(policy: Policy, objective: Objective, critic_rate: bool) -> dict[str, list[nn.Parameter]]:
    """The parameters of each optimizer, by its name: "policy", and "critic" for what only the value loss reaches, where that
    has a learning rate of its own (``critic_rate``) or a KL constraint leaves the policy none.
    """
    apart = critic_rate or (objective.constraint is not None and objective.baseline == "critic")
    critic = list(policy.critic_parameters()) if apart else []
    own = {id(p) for p in critic}
    rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in own]
    return {"policy": rest, "critic": critic} if apart else {"policy": rest}


def flattened(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """One tensor of all their values and one of all their gradients; the parameters become views of the two.   [n], [n]

    They keep working as before: only their storage moves. They must share dtype and device.
    """
    values = torch.cat([p.detach().reshape(-1) for p in parameters])
    gradients = torch.zeros_like(values)
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        parameter.data = values[start:end].view_as(parameter)
        parameter.grad = gradients[start:end].view_as(parameter)
        start = end
    return values, gradients


class FlatAdam:
    """One group of parameters, its gradients and its optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: AdamSettings) -> None:
        self.parameters: Sequence[nn.Parameter] = list(parameters)
        self.settings = settings
        values, self.gradients = flattened(self.parameters)
        self.values = nn.Parameter(values)
        self.values.grad = self.gradients
        self.adam = torch.optim.Adam([self.values], lr=settings.learning_rate, betas=BETAS, eps=settings.epsilon, fused=True)

    def zero(self) -> None:
        """Forget the gradients; backward then adds into the flat buffer."""
        self.gradients.zero_()

    def gradient_norm(self) -> float:
        """The norm of the gradient summed over all ranks; may be NaN or infinite, and then no step must be taken."""
        return float(torch.linalg.vector_norm(all_sum(self.gradients)))

    def step(self, norm: float, scale: float = 1.0) -> None:
        """One step of Adam, with the gradient clipped to ``max_grad_norm`` and the learning rate times ``scale``."""
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            self.gradients.mul_(limit / (norm + 1e-6))
        self.adam.param_groups[0]["lr"] = self.settings.learning_rate * scale
        self.adam.step()

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Steps taken [] and the running means of gradient and squared gradient [n], zeros before the first step."""
        state = self.adam.state[self.values]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self.values.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(self.gradients), torch.zeros_like(self.gradients)
        return state["step"], state["exp_avg"], state["exp_avg_sq"]

    def move(self, values: Tensor, first: Tensor, second: Tensor) -> None:
        """Take a step that was computed elsewhere: the parameters and both moments after it.   all [n]"""
        step, own_first, own_second = self.moments()
        self.values.data.copy_(values)
        own_first.copy_(first)
        own_second.copy_(second)
        step += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Adam's moments and step count; empty before the first step."""
        return dict(self.adam.state.get(self.values, {}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        if state:
            self.adam.state[self.values] = {name: tensor.to(self.values.device, copy=True) for name, tensor in state.items()}


def finite(norms: Iterable[float]) -> bool:
    """Whether every norm is a number a step may be taken with."""
    return all(math.isfinite(norm) for norm in norms)
