"""The contract between the two worlds: what collecting hands to learning.

Control and language fill these types differently; credit, objective and learner read them and know nothing else.
B is environments or responses, T steps or response tokens. Time is the last axis and masks are True where kept.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from surefoot.core.seeding import stream

Metrics = dict[str, float | None]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same structure (dataclass, dict, tuple, list) with ``function`` applied to every tensor in it."""
    if isinstance(tree, Tensor):
        return function(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{f.name: map_tensors(function, getattr(tree, f.name)) for f in fields(tree)})
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a structure, in the order of ``map_tensors``."""
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(keep, tree)
    return found


class Distribution(Protocol):
    """The policy's distribution over actions at a batch of states, as a frozen dataclass of its parameters."""

    def kl(self, other: Any) -> Tensor:
        """Exact KL(self‖other), one number per state."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """What a policy returns for a batch, with gradient.   All [...] alike."""

    log_probs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    """None where the policy has no critic"""
    distribution: Any = None
    """a Distribution, for exact KL; None on text"""
    router_loss: Tensor | None = None
    """[] the part of these rows in the load-balancing loss of a mixture of experts; None where nobody asks for it"""


class Policy(nn.Module, ABC):
    """A trained policy: ``forward`` scores given actions, so that the hooks of DDP and FSDP fire on the training pass."""

    exact: bool = True
    """whether it computes in float32 or better, so that the same action scored twice must give the same log-probability"""

    @abstractmethod
    def forward(self, inputs: Any, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probabilities, entropy and values of the actions at the inputs."""

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that only the value loss reaches; none where the critic shares everything with the policy."""
        return ()

    def prepare(self, parts: Sequence[tuple[Any, Tensor, Tensor | None]]) -> None:
        """See a whole minibatch (inputs, actions and mask of each part) before its first part is scored with gradient. It is
        asked for where the objective has a loss that is no sum over rows.
        """

    def costs(self, inputs: Any, mask: Tensor) -> Tensor:
        """How many tokens (or steps) each row is read with, for micro-batches by token budget.   [B, T] -> [B]"""
        return mask.sum(-1)


@dataclass(frozen=True)
class Rollout:
    """Experience under one θ_old. Tensors are [B, T] unless said otherwise."""

    inputs: Any
    """what the policy reads, a tensor or a tree of them: leaves of observations [B, T, ...], or tokens [B, ...]"""
    actions: Tensor
    """[B, T] or [B, T, action]"""
    mask: Tensor
    """True at a real decision of the policy"""
    old_log_probs: Tensor | None
    """under θ_old, the policy being improved; None where nobody has asked, which allows one update (ρ = 1)"""
    values: Tensor
    """V of the state before the action; zeros without a critic"""
    next_values: Tensor
    """V of the true successor; anything where terminated"""
    rewards: Tensor
    """what is optimised, after shaping"""
    terminated: Tensor
    truncated: Tensor
    unit: Literal["step", "row"] = "step"
    """what is shuffled: single steps, or whole rows (text, recurrent policies)"""
    old_distribution: Any = None
    """the Distribution under θ_old, in control; None on text"""
    ref_log_probs: Tensor | None = None
    """under the frozen reference"""
    group: Tensor | None = None
    """[B] which prompt a row answers; None in control"""
    reward_parts: dict[str, Tensor] = field(default_factory=dict)
    """what the rewards were made of, for metrics and traces"""
    steps: int = 0
    """how far this rollout moved the budget: kept environment steps, or responses"""
    metrics: Metrics = field(default_factory=dict)
    """what the collector has to tell about it"""


@dataclass(frozen=True)
class Credit:
    """What each action is worth.   [B, T]"""

    advantages: Tensor
    """before any normalisation"""
    returns: Tensor
    """the critic's targets R̂"""


class AuxiliaryLoss(Protocol):
    """A loss of its own beside the objective's, on data of its own."""

    def add_gradient(self) -> dict[str, float]:
        """Add its gradient to ``.grad`` of the parameters, before a step is taken; its terms over all ranks, by name."""
        ...


class Collector(Protocol):
    """Where experience comes from: the only part that knows environments, or prompts and rewards."""

    def collect(self, state: "LearnerState") -> Rollout:
        """Sample with the current policy. Statistics are frozen meanwhile and updated before returning."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All it needs to continue exactly."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        ...


@dataclass
class LearnerState:
    """What moves besides θ and the optimizer's moments; saved with every checkpoint."""

    total_steps: int
    """the budget, in the recipe's steps; schedules end there"""
    steps: int = 0
    iteration: int = 0
    updates: int = 0
    """optimizer steps taken"""
    faults: int = 0
    """iterations in a row whose update was not taken because something was not finite"""
    coefficients: dict[str, float] = field(default_factory=dict)
    """weights that adapt as the run goes, by name: ``beta`` of the KL penalty"""
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    """named streams of randomness; the global generator is never used"""

    @classmethod
    def seeded(cls, seed: int, total_steps: int, names: Iterable[str] = ("sample", "shuffle")) -> "LearnerState":
        """A fresh state with one independent CPU stream per name."""
        state = cls(total_steps=total_steps)
        state.generators = {name: stream(seed, name) for name in names}
        return state

    @property
    def remaining(self) -> float:
        """The share of the budget still to come, 1 at the start; what linear schedules multiply by."""
        return max(0.0, 1 - self.steps / self.total_steps)

    def state_dict(self) -> dict[str, Any]:
        """Counts, coefficients and the state of every stream."""
        counts = {name: getattr(self, name) for name in ("total_steps", "steps", "iteration", "updates", "faults")}
        streams = {name: g.get_state() for name, g in self.generators.items()}
        return {**counts, "coefficients": dict(self.coefficients), "generators": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there; the budget stays this state's own, so that a run can be extended."""
        for name in ("steps", "iteration", "updates", "faults"):
            setattr(self, name, operator.index(state[name]))
        self.coefficients = {name: float(weight) for name, weight in state["coefficients"].items()}
        for name, saved in state["generators"].items():
            self.generators[name].set_state(saved)


@dataclass(frozen=True)
class EvaluationReport:
    """How good something is now."""

    score: float | None
    """what the best checkpoint is chosen by, more is better; None where nothing tells"""
    metrics: Metrics
    """what to tell of it"""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """what it said, a row each, where it says something"""


class World(Protocol):
    """One kind of task, as a run sees it."""

    @property
    def leaves(self) -> bool:
        """Whether ``finish`` leaves something, without which a run is not finished."""
        ...

    @property
    def facts(self) -> Sequence[str]:
        """What is trained, where that is not all of it: a line each, which a run begins with."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What to know before training begins, a line each: rows that were left out, memory that may not suffice."""
        ...

    @property
    def policy(self) -> Policy:
        """What is trained."""
        ...

    @property
    def collector(self) -> Collector:
        """Where experience comes from."""
        ...

    @property
    def beside(self) -> AuxiliaryLoss | None:
        """A loss on other data, whose gradient is added to every update; None without one."""
        ...

    @property
    def result(self) -> Any:
        """What training gives back."""
        ...

    def arithmetic(self) -> list[str]:
        """Parameter counts and what the recipe comes to, for a dry run."""
        ...

    def trees(self) -> dict[str, Any]:
        """What a checkpoint holds of the trained thing itself; enough to load it without the run."""
        ...

    def load(self, trees: dict[str, Any], where: Path) -> list[str]:
        """Continue from a checkpoint's trees; one line for everything that could not be restored exactly."""
        ...

    def evaluate(self) -> EvaluationReport | None:
        """How good it is now; None where there is nothing to judge on."""
        ...

    def describe(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """What a person wants to know of some steps of a row, beside its numbers; plain values, for traces."""
        ...

    def finish(self, folder: Path) -> list[str]:
        """Leave in a finished run's folder what others read, and say what."""
        ...

    def close(self) -> None:
        """Give back processes and windows."""
        ...
