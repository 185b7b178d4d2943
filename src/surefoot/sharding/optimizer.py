"""AdamW, or RMSprop, on sharded parameters: each rank moves its own rows."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.optimizer import AdamSettings, Parts, check_moments, moments_of, take_step
from surefoot.ranks.collectives import all_sum
from surefoot.sharding import Shard, copies_of, is_writer, local_part, read_range, start_of


class ShardedOptimizer:
    """One group of sharded parameters with its optimizer; the interface and the steps of ``FlatOptimizer``.

    The gradients are summed over ranks by the backward pass itself. State is that of ``FlatOptimizer``, as ranges of its flat
    tensors, so a run can continue with another number of ranks, or with one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: AdamSettings) -> None:
        self.parameters, self.settings = list(parameters), settings
        self.learning_rate = settings.learning_rate
        """of the last step"""
        sizes = [p.numel() for p in self.parameters]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.size = sum(sizes)
        """elements of all parameters"""
        mine = [(p, o) for p, o in zip(self.parameters, offsets, strict=True) if local_part(p).numel()]
        self.mine = [p for p, _ in mine]
        """parameters of which this rank has rows"""
        self.values = [local_part(p) for p in self.mine]
        self.starts = [offset + start_of(p) for p, offset in mine]
        """of the rows in the flat tensor of all parameters"""
        self.names = moments_of(settings)
        self.state: dict[str, list[Tensor]] = {}
        """step counts and moments of each parameter's rows; empty before the first step"""
        self.steps = 0

    def zero(self) -> None:
        """Drop the gradients; backward then adds into new ones."""
        for parameter in self.parameters:
            parameter.grad = None

    def own_gradients(self) -> list[Tensor]:
        """None: the backward pass of a sharded model has summed its gradients."""
        return []

    def parts(self, gradients: bool = False) -> Parts:
        """This rank's rows of the parameters, or of their gradients; of several copies the first."""
        chosen = [(p, x, start) for p, x, start in zip(self.mine, self.values, self.starts, strict=True) if is_writer(p)]
        if gradients:
            return [(local_part(p.grad), start) for p, _, start in chosen if p.grad is not None]
        return [(x, start) for _, x, start in chosen]

    def gradient_norm(self) -> float:
        """The norm of the gradient over all ranks, which may be NaN or infinite."""
        moved = [p for p in self.mine if p.grad is not None]
        total = torch.zeros((), dtype=torch.float64)
        if moved:
            norms = torch.stack(torch._foreach_norm([local_part(p.grad) for p in moved if p.grad is not None])).cpu().double()
            total = (norms**2 / torch.tensor([copies_of(p) for p in moved])).sum()
        return math.sqrt(x) if (x := float(all_sum(total))) >= 0 else x

    @torch.no_grad()
    def step(self, norm: float, scale: float = 1.0) -> None:
        """Clip the gradient, whose norm is ``norm``, and take one step at ``scale`` times the learning rate."""
        gradients = [
            torch.zeros_like(x) if p.grad is None else local_part(p.grad) for p, x in zip(self.mine, self.values, strict=True)
        ]
        matrices = [x for p, x in zip(self.mine, self.values, strict=True) if p.dim() > 1]
        self._start()
        self.steps += 1
        self.learning_rate = self.settings.learning_rate * scale
        take_step(self.values, gradients, matrices, self.state, self.settings, norm, self.learning_rate)

    def _start(self) -> None:
        if not self.state:
            self.state = {name: [torch.zeros_like(x) for x in self.values] for name in self.names}
            self.state["step"] = [torch.full((), float(self.steps), device=x.device) for x in self.values]

    def state_dict(self) -> dict[str, Any]:
        """The step count, and the moments as ranges of the flat ones; empty before the first step."""
        if not self.steps:
            return {}
        wrote = [i for i, p in enumerate(self.mine) if is_writer(p)]
        starts = [self.starts[i] for i in wrote]
        moments = {
            name: Shard((self.size,), torch.float32, starts, [self.state[name][i].reshape(-1) for i in wrote])
            for name in self.names
        }
        return {"step": torch.tensor(float(self.steps)), **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises SurefootError for the state of the other kind of optimizer."""
        check_moments(state, self.settings)
        if not state:
            return
        self.steps = int(read_range(state["step"], 0, 1))
        self.state = {}
        self._start()
        for name in self.names:
            for moment, start in zip(self.state[name], self.starts, strict=True):
                moment.copy_(read_range(state[name], start, start + moment.numel()).view(moment.shape))
