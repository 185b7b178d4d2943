"""Adam, AdamW or RMSprop on parameters that lie in one flat buffer, and the schedules of the learning rate and of the clip.

Parameters and gradients are views of two flat tensors. Zeroing, summing over ranks, the norm, clipping and the step are then
one call each, however many tensors a network has. Of parameters in bfloat16, the views are their master weights.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adam import adam as fused_adam
from torch.optim.rmsprop import rmsprop

from surefoot.core.algorithms import Objective
from surefoot.errors import SurefootError, cause_of
from surefoot.ranks.collectives import MASTER, rank, stored

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
    """RMSprop's settings for a group of parameters.

    θ ← θ − learning_rate · g / (√v + epsilon), with v ← α·v + (1 − α)·g² and α = ``ALPHA``.
    """


@dataclass(frozen=True)
class Adam8BitSettings(AdamSettings):
    """Adam with moments in 8 bits, in blocks of ``BLOCK`` that share a scale (Dettmers et al. 2022, arXiv 2110.02861)."""


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


def add_gradients_to(sums: Mapping[nn.Parameter, Tensor]) -> None:
    """Add the gradients of these parameters to tensors in float32, as soon as a backward pass has one; it is then dropped."""

    def adder(total: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None, "called when it is complete"
            total.add_(parameter.grad)
            parameter.grad = None

        return add

    for parameter, total in sums.items():
        parameter.register_post_accumulate_grad_hook(adder(total))  # type: ignore[no-untyped-call]


@torch.no_grad()
def round_master(parameters: Iterable[nn.Parameter]) -> None:
    """Set parameters to their rounded master weights; those without stay."""
    rounded = [parameter for parameter in parameters if stored(parameter) is not parameter]
    if rounded:
        torch._foreach_copy_([parameter.detach() for parameter in rounded], [stored(parameter) for parameter in rounded])


Parts = list[tuple[Tensor, int]]
"""consecutive elements of a flat tensor, each with the index of the first; no two ranks have the same"""


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

    def parts(self, gradients: bool = False) -> Parts:
        """The values, or the gradients; the first rank has them."""
        return [(self.gradients if gradients else self.values, 0)] if rank() == 0 else []

    def gradient_norm(self) -> float:
        """The norm of the gradients, which may be NaN or infinite."""
        return float(torch.linalg.vector_norm(self.gradients))


class Optimizer(Protocol):
    """What moves one group of parameters along its gradient: ``FlatOptimizer``, or that of a sharded policy."""

    settings: AdamSettings
    learning_rate: float
    """of the last step"""

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...
    def zero(self) -> None: ...
    def own_gradients(self) -> list[Tensor]: ...
    def parts(self, gradients: bool = False) -> Parts: ...
    def gradient_norm(self) -> float: ...
    def step(self, norm: float, scale: float = 1.0) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FlatOptimizer(FlatParameters):
    """One group of parameters with its optimizer, whose steps are those of ``take_step``; Adam's moments may be in 8 bits."""

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
        self.begin()
        self.learning_rate = self.settings.learning_rate * scale
        matrices: list[Tensor] = [stored(p) for p in self.parameters if p.dim() > 1]  # norms and biases are vectors
        state = {name: [x] for name, x in self.state.items()}
        take_step([self.values], [self.gradients], matrices, state, self.settings, norm, self.learning_rate)
        round_master(self.rounded)

    def begin(self) -> None:
        """Start from a step count and moments of 0, unless a step has been taken."""
        if self.state:
            return
        plain = type(self.settings) is AdamSettings
        self.state = {"step": torch.zeros((), device=self.values.device if plain else "cpu")}
        for name in moments_of(self.settings):
            if isinstance(self.settings, Adam8BitSettings):
                self.state[name] = torch.zeros_like(self.values, dtype=torch.uint8)
                self.state[f"{name}{SCALE}"] = self.values.new_zeros(-(-len(self.values) // BLOCK))
            else:
                self.state[name] = torch.zeros_like(self.values)

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Adam's number of steps [], and running means of gradient and squared gradient [n]; zeros before the first step."""
        self.begin()
        return self.state["step"], self.state["exp_avg"], self.state["exp_avg_sq"]

    def move(self, values: Tensor, first: Tensor, second: Tensor, steps: int, learning_rate: float) -> None:
        """Take steps that a compiled program computed: the parameters and both moments after them, all [n], and the last
        learning rate.
        """
        step, own_first, own_second = self.moments()
        self.values.copy_(values)
        own_first.copy_(first)
        own_second.copy_(second)
        step += steps
        self.learning_rate = learning_rate

    def state_dict(self) -> dict[str, Tensor]:
        """The optimizer's moments and step count; empty before the first step."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises SurefootError for the state of the other kind of optimizer."""
        check_moments(state, self.settings)
        if state:
            device = self.values.device
            self.state = {name: tensor.to(device, copy=True) for name, tensor in state.items()}


# ---- the steps ------------------------------------------------------------------------------------------------------------


def moments_of(settings: AdamSettings) -> tuple[str, ...]:
    """The names of the running means of an optimizer."""
    return ("square_avg",) if isinstance(settings, RMSpropSettings) else ("exp_avg", "exp_avg_sq")


def take_step(
    values: list[Tensor],
    gradients: list[Tensor],
    matrices: list[Tensor],
    state: Mapping[str, list[Tensor]],
    settings: AdamSettings,
    norm: float,
    learning_rate: float,
) -> None:
    """Clip gradients whose norm is ``norm``, let the matrices decay, and take one step of Adam or RMSprop, all in place.

    The steps are those of ``torch.optim.Adam(fused=True)``, or ``AdamW`` with ``weight_decay``, and ``torch.optim.RMSprop``,
    by their functional forms, because importing the classes loads PyTorch's compiler, more than a second in every run.
    """
    if not values:  # of a rank without rows
        return
    limit = settings.max_grad_norm
    if limit is not None and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    if settings.weight_decay and matrices:
        torch._foreach_mul_(matrices, 1 - learning_rate * settings.weight_decay)
    options: dict[str, Any] = {"lr": learning_rate, "eps": settings.epsilon, "weight_decay": 0.0, "maximize": False}
    if isinstance(settings, RMSpropSettings):
        options |= {"alpha": ALPHA, "momentum": 0.0, "centered": False}
        rmsprop(values, gradients, state["square_avg"], [], [], state["step"], **options)
    elif isinstance(settings, Adam8BitSettings):
        _step_in_8_bits(values[0], gradients[0], {name: x[0] for name, x in state.items()}, settings, learning_rate)
    else:
        options |= {"beta1": BETAS[0], "beta2": BETAS[1], "amsgrad": False, "fused": True}
        fused_adam(values, gradients, state["exp_avg"], state["exp_avg_sq"], [], state["step"], **options)


def _step_in_8_bits(
    values: Tensor, gradients: Tensor, state: Mapping[str, Tensor], settings: AdamSettings, learning_rate: float
) -> None:
    """Adam's step by ``bitsandbytes``, which rounds both moments again."""
    import bitsandbytes.functional as bnb

    state["step"].add_(1)
    moments = moments_of(settings)
    codes = [_codes(name, str(values.device)) for name in moments]
    for start in range(0, len(values), AT_ONCE):
        part, blocks = slice(start, start + AT_ONCE), slice(start // BLOCK, (start + AT_ONCE) // BLOCK)
        bnb.optimizer_update_8bit_blockwise(
            "adam",
            gradients[part],
            values[part],
            *(state[name][part] for name in moments),
            *BETAS,
            0.0,
            0.0,
            settings.epsilon,
            int(state["step"]),
            learning_rate,
            *codes,
            *(state[f"{name}{SCALE}"][blocks] for name in moments),
        )


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
    """The step of ``take_step`` as a pure function: the values and both moments after it.   all [n]

    step_size   the learning rate over 1 − β₁^t
    correction  √(1 − β₂^t)
    """
    # Eager steps keep PyTorch's fused kernel: it works in place, can't be traced, and rounds differently in the last bits.
    limit = settings.max_grad_norm
    if limit is not None:
        gradient = gradient * torch.where(norm > limit, limit / (norm + 1e-6), 1.0)
    first = first + (1 - BETAS[0]) * (gradient - first)
    second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
    return [values - step_size * first / (second.sqrt() / correction + settings.epsilon), first, second]


# ---- schedules: factors that depend on the remaining share of the budget -------------------------------------------------

ScheduleFunction = Callable[[float], float]
"""from the remaining share of the budget, 1 at the start, to a factor"""
Schedule = Literal["constant", "linear", "cosine", "adaptive"] | ScheduleFunction


def check_adaptive(objective: Objective, warmup: float) -> None:
    """Raise SurefootError if the learning rate can't follow the KL."""
    if objective.reuse is None or objective.constraint is not None:
        raise SurefootError(
            "optimizer.schedule='adaptive': follows the KL of reused batches, which this objective does not have; set "
            "constant, linear or cosine"
        )
    if warmup:
        raise SurefootError(
            f"optimizer.warmup={warmup:g}: schedule = 'adaptive' sets the learning rate of every step; set warmup = 0"
        )


def scheduled(field: str, schedule: Schedule, left: float) -> float:
    """The factor of a schedule when ``left`` of the budget remains. Raises SurefootError for a function that fails."""
    if not callable(schedule):
        factors = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
        if schedule not in factors:
            raise SurefootError(f"{field}={schedule!r}: is the name of a function; pass the function itself")
        return factors[schedule]
    try:
        factor = float(schedule(left))
    except (Exception, SystemExit) as error:
        raise SurefootError(f"{field}: the function raised {cause_of(error)} for {left:g}; fix it") from error
    if not 0 <= factor < math.inf:
        raise SurefootError(f"{field}: the function returned {factor:g} for {left:g}; return a finite factor of at least 0")
    return factor
