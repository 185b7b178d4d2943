"""Adam, AdamW or RMSprop on parameters that lie in one flat buffer; Adam's moments may be in 8 bits.

Parameters and gradients are views of two flat tensors. Zeroing, summing over ranks, the norm, clipping and the step are then
one call each, however many tensors a network has. Of parameters in bfloat16, the views are their master weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam as fused_adam
from torch.optim.rmsprop import rmsprop

from surefoot.core.algorithms import Objective
from surefoot.core.rollout import Policy
from surefoot.errors import SurefootError
from surefoot.ranks.collectives import MASTER, stored
from surefoot.sharding.master import add_gradients_to, round_master

BETAS = (0.9, 0.999)
"""Adam's decay rates β₁ and β₂"""
ALPHA = 0.99
"""RMSprop's decay rate, as in A3C (arXiv 1602.01783) and the A2C of Stable-Baselines3"""

BLOCK = 256
"""elements of a moment in 8 bits that share a scale"""
AT_ONCE = 2**22
"""elements that are moved at a time with moments in 8 bits: a CPU restores these in float32"""


@dataclass(frozen=True)
class AdamSettings:
    """Adam's settings for one group of parameters."""

    learning_rate: float
    epsilon: float = 1e-5
    max_grad_norm: float | None = 0.5
    """largest norm of the group's gradient; longer ones are scaled down to it"""
    weight_decay: float = 0.0
    """before each step every matrix becomes (1 − learning_rate · weight_decay) times itself (AdamW, arXiv 1711.05101)"""


@dataclass(frozen=True)
class RMSpropSettings(AdamSettings):
    """The same for RMSprop: θ ← θ − learning_rate · g / (√v + epsilon), with v ← α·v + (1 − α)·g² and α = ``ALPHA``."""


@dataclass(frozen=True)
class Adam8BitSettings(AdamSettings):
    """Adam with moments in 8 bits, in blocks of ``BLOCK`` that share a scale (Dettmers et al. 2022, arXiv 2110.02861)."""


def parameter_groups(policy: Policy, objective: Objective, critic_rate: bool) -> dict[str, list[nn.Parameter]]:
    """The parameters of each optimizer, by name.

    Parameters that only the value loss reaches form the group "critic" if they have their own learning rate (``critic_rate``)
    or the policy moves under a KL constraint. All others form the group "policy".
    """
    apart = critic_rate or (objective.constraint is not None and objective.baseline == "critic")
    critic = list(policy.critic_parameters()) if apart else []
    own = {id(p) for p in critic}
    rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in own]
    return {"policy": rest, "critic": critic} if apart else {"policy": rest}


def flatten_parameters(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move parameters into one tensor of values and one of gradients, of which they become views.   -> [n], [n]

    The parameters must share dtype and device. Of one with master weights, these become the view, and its gradients are added
    to the other tensor.
    """
    values = torch.cat([stored(p).detach().reshape(-1) for p in parameters])
    gradients = torch.zeros_like(values)
    sums, start = {}, 0
    for parameter in parameters:
        end = start + parameter.numel()
        value, gradient = (flat[start:end].view_as(parameter) for flat in (values, gradients))
        if stored(parameter) is parameter:
            parameter.data, parameter.grad = value, gradient
        else:
            setattr(parameter, MASTER, value)
            sums[parameter] = gradient
        start = end
    add_gradients_to(sums)
    return values, gradients


class FlatParameters:
    """One group of parameters and their gradients, each in one flat tensor."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters: Sequence[nn.Parameter] = list(parameters)
        self.values, self.gradients = flatten_parameters(self.parameters)

    def zero(self) -> None:
        """Set the gradients to zero; backward then adds into the flat tensor."""
        self.gradients.zero_()

    def own_gradients(self) -> list[Tensor]:
        """The gradients of this rank's rows, which are to be summed over ranks in place before the norm is taken."""
        return [self.gradients]

    def gradient_norm(self) -> float:
        """The norm of the gradients, which may be NaN or infinite."""
        return float(torch.linalg.vector_norm(self.gradients))


class FlatOptimizer(FlatParameters):
    """One group of parameters with its optimizer: Adam, or RMSprop for ``RMSpropSettings``.

    The steps are those of ``torch.optim.Adam(fused=True)``, or ``AdamW`` with ``weight_decay``, and ``torch.optim.RMSprop``,
    through the functions below these classes. The classes import PyTorch's compiler, which takes more than a second at the
    start of every run.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: AdamSettings) -> None:
        super().__init__(parameters)
        self.settings = settings
        self.learning_rate = settings.learning_rate
        """of the last step"""
        self.state: dict[str, Tensor] = {}
        """step count and moments; empty before the first step"""
        self.rounded = [p for p in self.parameters if stored(p) is not p]
        """parameters with master weights"""

    @torch.no_grad()
    def step(self, norm: float, scale: float = 1.0) -> None:
        """Clip the gradient, whose norm is ``norm``, and take one step at ``scale`` times the learning rate."""
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            self.gradients.mul_(limit / (norm + 1e-6))
        self.learning_rate = self.settings.learning_rate * scale
        if self.settings.weight_decay:
            matrices: list[Tensor] = [stored(p) for p in self.parameters if p.dim() > 1]  # norms and biases are vectors
            torch._foreach_mul_(matrices, 1 - self.learning_rate * self.settings.weight_decay)
        options: dict[str, Any] = {"lr": self.learning_rate, "eps": self.settings.epsilon}
        options |= {"weight_decay": 0.0, "maximize": False}
        if isinstance(self.settings, RMSpropSettings):
            if not self.state:
                self.state = {"step": torch.zeros(()), "square_avg": torch.zeros_like(self.values)}
            square, steps = [self.state["square_avg"]], [self.state["step"]]
            options |= {"alpha": ALPHA, "momentum": 0.0, "centered": False}
            rmsprop([self.values], [self.gradients], square, [], [], steps, **options)
        elif isinstance(self.settings, Adam8BitSettings):
            self._step_in_8_bits()
        else:
            step, *moments = self.moments()
            first, second = ([moment] for moment in moments)
            options |= {"beta1": BETAS[0], "beta2": BETAS[1], "amsgrad": False, "fused": True}
            fused_adam([self.values], [self.gradients], first, second, [], [step], **options)
        if self.rounded:
            round_master(self.rounded)

    def _step_in_8_bits(self) -> None:
        """Adam's step by ``bitsandbytes``, which rounds both moments again."""
        import bitsandbytes.functional as bnb

        if not self.state:
            scales = -(-len(self.values) // BLOCK)
            self.state = {"step": torch.zeros(())}
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[name] = torch.zeros_like(self.values, dtype=torch.uint8)
                self.state[f"{name}{SCALE}"] = self.values.new_zeros(scales)
        self.state["step"] += 1
        codes = {name: _codes(name, str(self.values.device)) for name in ("exp_avg", "exp_avg_sq")}
        for start in range(0, len(self.values), AT_ONCE):
            part, blocks = slice(start, start + AT_ONCE), slice(start // BLOCK, (start + AT_ONCE) // BLOCK)
            bnb.optimizer_update_8bit_blockwise(
                "adam",
                self.gradients[part],
                self.values[part],
                self.state["exp_avg"][part],
                self.state["exp_avg_sq"][part],
                *BETAS,
                0.0,
                0.0,
                self.settings.epsilon,
                int(self.state["step"]),
                self.learning_rate,
                codes["exp_avg"],
                codes["exp_avg_sq"],
                self.state[f"exp_avg{SCALE}"][blocks],
                self.state[f"exp_avg_sq{SCALE}"][blocks],
            )

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Adam's number of steps [], and running means of gradient and squared gradient [n]; zeros before the first step."""
        if not self.state:
            step = torch.zeros((), dtype=torch.float32, device=self.values.device)
            self.state = {"step": step, **{name: torch.zeros_like(self.values) for name in ("exp_avg", "exp_avg_sq")}}
        return self.state["step"], self.state["exp_avg"], self.state["exp_avg_sq"]

    def move(self, values: Tensor, first: Tensor, second: Tensor, steps: int) -> None:
        """Take steps that a compiled program computed: the parameters and both moments after them.   all [n]"""
        step, own_first, own_second = self.moments()
        self.values.copy_(values)
        own_first.copy_(first)
        own_second.copy_(second)
        step += steps

    def state_dict(self) -> dict[str, Tensor]:
        """The optimizer's moments and step count; empty before the first step."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises SurefootError for the state of the other kind of optimizer."""
        check_moments(state, self.settings)
        if state:
            device = self.values.device
            self.state = {name: tensor.to(device, copy=True) for name, tensor in state.items()}


SCALE = "_scale"
"""what the names of the scales of moments in 8 bits end with"""


@cache
def _codes(name: str, device: str) -> Tensor:
    """The 256 values that a moment in 8 bits may have, in units of its block's scale: dynamic exponents, as in the paper."""
    import bitsandbytes.functional as bnb

    codes: Tensor = bnb.create_dynamic_map(signed=name == "exp_avg").to(device, torch.float32)
    return codes


def check_moments(state: Mapping[str, Any], settings: AdamSettings) -> None:
    """Raise SurefootError if a saved state is that of the other kind of optimizer."""
    kinds = {"square_avg": RMSpropSettings, f"exp_avg{SCALE}": Adam8BitSettings}
    if state and any((name in state) != isinstance(settings, kind) for name, kind in kinds.items()):
        raise SurefootError("optimizer.kind: has changed since the checkpoint, which has other moments; undo the change")


def adam(
    values: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    norm: Tensor,
    step_size: Tensor,
    correction: Tensor,
    settings: AdamSettings,
) -> list[Tensor]:
    """The step of ``FlatOptimizer`` as a pure function: the values and both moments after it.   all [n]

    step_size   the learning rate over 1 − β₁^t
    correction  √(1 − β₂^t)
    """
    # FlatOptimizer keeps PyTorch's fused kernel: it works in place, can't be traced, and rounds differently in the last bits.
    limit = settings.max_grad_norm
    if limit is not None:
        gradient = gradient * torch.where(norm > limit, limit / (norm + 1e-6), 1.0)
    first = first + (1 - BETAS[0]) * (gradient - first)
    second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
    return [values - step_size * first / (second.sqrt() / correction + settings.epsilon), first, second]
