"""The data types that collecting passes to learning, and the protocols that control and language implement.

B is environments or responses, T is steps or response tokens. Time is the last axis. Masks are True where kept.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from surefoot.core.optimizer import AdamSettings, FlatOptimizer, Optimizer
from surefoot.core.seeding import stream
from surefoot.core.timer import Timer

Metrics = dict[str, float | None]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """A tree of dataclasses, dicts, tuples and lists with ``function`` applied to every tensor in it."""
    if isinstance(tree, Tensor):
        return function(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{f.name: map_tensors(function, getattr(tree, f.name)) for f in fields(tree)})
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of ``map_tensors``."""
    tensors: list[Tensor] = []

    def append(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    map_tensors(append, tree)
    return tensors


def concatenated(parts: Sequence[Any]) -> Any:
    """Trees of the same form as one, their tensors joined along the first axis."""
    joined = iter([torch.cat(column) for column in zip(*map(tensors_in, parts), strict=True)])
    return map_tensors(lambda _: next(joined), parts[0])


@dataclass(frozen=True)
class Evaluation:
    """What a policy returns for a batch, with gradient. All tensors have the same shape."""

    log_probs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    """None without a critic"""
    distribution: Any = None
    """its parameters, in a frozen dataclass with the exact ``kl(other)``, one number per state; None on text"""
    router_loss: Tensor | None = None
    """[] these rows' part of the load-balancing loss of a mixture of experts; None if the objective doesn't use it"""


class Policy(nn.Module, ABC):
    """A trained policy. ``forward`` scores the actions, so that the hooks of DDP and FSDP run in training."""

    exact: bool = True
    """whether it computes in float32 or better, so that scoring an action twice gives the same log-probability"""

    @abstractmethod
    def forward(self, inputs: Any, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probabilities, entropy and values of the actions at the inputs."""

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that only the value loss reaches; none if the critic shares all of its parameters with the policy."""
        return ()

    @property
    def sharded(self) -> bool:
        """Whether a pass with gradient communicates, so that all ranks must make equally many."""
        return False

    def optimizer(self, parameters: Iterable[nn.Parameter], settings: AdamSettings) -> Optimizer:
        """What moves some of its parameters."""
        return FlatOptimizer(parameters, settings)

    def gathered(self) -> AbstractContextManager[None]:
        """Hold whole weights on every rank, so that passes without gradient need no exchange."""
        return nullcontext()

    def resting(self, optimizers: Iterable[Optimizer]) -> AbstractContextManager[None]:
        """Free memory of the device for a phase without updates."""
        return nullcontext()

    def prepare(self, parts: Sequence[tuple[Any, Tensor, Tensor | None]]) -> None:
        """Read a whole minibatch (inputs, actions and mask of each micro-batch) before scoring the first part with gradient.

        The learner calls it only if the objective has a loss that is not a sum over rows (``router_coefficient``).
        """

    def costs(self, inputs: Any, mask: Tensor) -> Tensor:
        """Tokens (or steps) that each row takes in a forward pass, for micro-batches by token budget.   [B, T] -> [B]"""
        return mask.sum(-1)

    def shared(self, inputs: Any, mask: Tensor) -> "Shared | None":
        """Prefixes that several rows share, which a pass computes once; None if there are none."""
        return None


@dataclass(frozen=True)
class Shared:
    """Prefixes that rows share and a forward pass computes once."""

    group: Tensor
    """[B] equal for rows with the same prefix"""
    saved: Tensor
    """[B] tokens (or steps) that a pass saves by each further row"""


@dataclass(frozen=True)
class Rollout:
    """Experience collected with one policy θ_old. Tensors are [B, T] unless said otherwise."""

    inputs: Any
    """what the policy reads, a tensor or a tree of tensors: observations [B, T, ...] or tokens [B, ...]"""
    actions: Tensor
    """[B, T] or [B, T, action]"""
    mask: Tensor
    """True where the policy decided"""
    old_log_probs: Tensor | None
    """log-probabilities under θ_old; None if they were not computed, which allows one update (ρ = 1)"""
    values: Tensor
    """V of the state before the action; zeros without a critic"""
    next_values: Tensor
    """V of the true successor; not read where terminated"""
    rewards: Tensor
    """the rewards to optimise, after shaping"""
    terminated: Tensor
    truncated: Tensor
    unit: Literal["step", "row"] = "step"
    """what is shuffled: single steps, or whole rows (text, recurrent policies)"""
    old_distribution: Any = None
    """the ``distribution`` under θ_old, in control; None on text"""
    ref_log_probs: Tensor | None = None
    """under the frozen reference"""
    behaviour_log_probs: Tensor | None = None
    """under whatever sampled, when that was not θ_old up to rounding: an engine with its own arithmetic; else None"""
    group: Tensor | None = None
    """[B] number of the prompt that each row answers; None in control"""
    reward_parts: dict[str, Tensor] = field(default_factory=dict)
    """the parts of the rewards, for metrics and traces"""
    steps: int = 0
    """steps of the budget that this rollout used: kept environment steps, or responses"""
    metrics: Metrics = field(default_factory=dict)
    """metrics of the collector"""


@dataclass(frozen=True)
class Credit:
    """Advantages and returns of a rollout.   [B, T]"""

    advantages: Tensor
    """before any normalisation"""
    returns: Tensor
    """the critic's targets R̂"""


class AuxiliaryLoss(Protocol):
    """A loss on other data whose gradient is added to that of the objective."""

    def add_gradient(self) -> dict[str, float]:
        """Add its gradient to ``.grad`` of the parameters. Return its terms over all ranks, by name."""


class Collector(Protocol):
    """Collects experience. Only collectors know environments, or prompts and rewards."""

    def collect(self, state: "LearnerState") -> Rollout:
        """Sample with the current policy. Running statistics change only after the last sample."""

    def state_dict(self) -> dict[str, Any]:
        """The state from which collecting continues exactly."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


@dataclass
class LearnerState:
    """Training state other than parameters and optimizer moments; saved in every checkpoint."""

    total_steps: int
    """the budget; schedules end there"""
    steps: int = 0
    """environment steps, or responses, that the run has used of the budget"""
    iteration: int = 0
    updates: int = 0
    """optimizer steps taken"""
    faults: int = 0
    """consecutive iterations whose update was skipped because a number was not finite"""
    coefficients: dict[str, float] = field(default_factory=dict)
    """coefficients that change during a run, by name: ``beta`` of the KL penalty, ``reference_beta``, ``learning_rate_factor``
    of a callback, and ``adapted_learning_rate_factor``"""
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    """named random generators; the global generator is never used"""
    timer: Timer = field(default_factory=Timer, repr=False, compare=False)
    """of this process; not saved"""

    @classmethod
    def seeded(cls, seed: int, total_steps: int, names: Iterable[str] = ("sample", "shuffle")) -> "LearnerState":
        """A new state with one independent CPU generator per name."""
        state = cls(total_steps=total_steps)
        state.generators = {name: stream(seed, name) for name in names}
        return state

    @property
    def remaining(self) -> float:
        """The remaining fraction of the budget, 1 at the start; linear schedules multiply by it."""
        return max(0.0, 1 - self.steps / self.total_steps)

    def state_dict(self) -> dict[str, Any]:
        """Counts, coefficients and the state of every generator."""
        counts = {name: getattr(self, name) for name in ("total_steps", "steps", "iteration", "updates", "faults")}
        generators = {name: g.get_state() for name, g in self.generators.items()}
        return {**counts, "coefficients": dict(self.coefficients), "generators": generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. ``total_steps`` is kept, so that a run can be extended."""
        for name in ("steps", "iteration", "updates", "faults"):
            setattr(self, name, operator.index(state[name]))
        self.coefficients = {name: float(weight) for name, weight in state["coefficients"].items()}
        for name, saved in state["generators"].items():
            self.generators[name].set_state(saved)


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation during training."""

    score: float | None
    """the best checkpoint has the highest score; None without a score to choose by"""
    metrics: Metrics
    samples: list[dict[str, Any]] = field(default_factory=list)
    """the responses, one row each; empty in control"""


class World(Protocol):
    """What a run trains and where its data comes from: one implementation per kind of task."""

    @property
    def policy(self) -> Policy:
        """The policy to train."""

    @property
    def collector(self) -> Collector:
        """The source of rollouts."""

    @property
    def auxiliary_loss(self) -> AuxiliaryLoss | None:
        """A loss on other data, added to every update of the policy; None without one."""

    @property
    def result(self) -> Any:
        """What ``train`` returns."""

    @property
    def exports_model(self) -> bool:
        """Whether ``finish`` writes a model, without which the run is not finished."""

    @property
    def model_summary(self) -> Sequence[str]:
        """Lines about the model that a run prints first, if only a part of it is trained."""

    @property
    def warnings(self) -> Sequence[str]:
        """Lines to print before training: dropped rows, memory that may not suffice."""

    def arithmetic(self) -> list[str]:
        """Parameter counts and the batch arithmetic, for a dry run."""

    def try_longest(self, learner: Any) -> Sequence[str]:
        """Train on the longest micro-batch before the first rollout, without a step, if memory may be short.

        Returns lines to print. Raises SurefootError if the memory does not suffice.
        """

    def checkpoint_parts(self) -> dict[str, Any]:
        """The contents of a checkpoint that load without the run: weights, and what is needed to use them."""

    def load(self, parts: dict[str, Any], where: Path, allow_changes: bool) -> list[str]:
        """Continue from a checkpoint's parts; return one line for each thing that could not be restored exactly."""

    def evaluate(self) -> EvaluationReport | None:
        """Evaluate the policy; None without data to evaluate on."""

    def samples(self) -> list[dict[str, Any]]:
        """Responses of the policy with their scores, one row each; empty if it writes no text or has not yet."""

    def row_details(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """Plain values that describe some steps of a row in a trace: the prompt and tokens, or the episode and seed."""

    def finish(self, folder: Path) -> list[str]:
        """Write the final files into the folder of a finished run; return lines to print."""

    def close(self) -> None:
        """Close processes and windows."""
