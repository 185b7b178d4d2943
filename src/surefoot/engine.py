"""One update of a batch as one compiled program: the same functions as ever, traced once, run without Python in between.

A network of a dozen small tensors spends its time on the way to the arithmetic. Policy, loss and optimizer are pure functions
of flat parameters and a batch of static shape, so a whole update (choose the rows, normalise, loss, gradient, clip, Adam) can
be traced (``make_fx``), exported and compiled to a shared library (AOTInductor). The library is kept in the user's cache: the
first run of a shape compiles it for some seconds, later ones load it at once.
"""

import hashlib
import math
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot.algorithms import Objective
from surefoot.batches import global_count, normalised, order_of
from surefoot.errors import SurefootError
from surefoot.objective import Batch, loss
from surefoot.optimizer import BETAS, FlatAdam
from surefoot.rollout import Policy, leaves, map_tensors
from surefoot.run.distributed import world_size


@dataclass(frozen=True)
class Attempt:
    """A step that is due: what the loss and its gradient are at this θ, before it is taken."""

    terms: dict[str, float]
    """of the loss, over all ranks"""
    ratios: tuple[float, float]
    """the smallest and the largest ρ of this rank's samples"""
    norms: dict[str, float]
    """of the gradient of each optimizer's parameters, over all ranks"""
    take: Callable[[], None]
    """move θ"""
    rows: Tensor | None = None
    """which rows of the batch the step reads, where it doesn't show them itself   [N]"""


class CompiledStep:
    """The updates of batches of exactly ``rows`` single steps.

    policy, objective, optimizers   as the learner has them; every parameter is in one of the optimizers
    rows                            follows from the recipe alone, so that a resumed run takes the same path
    """

    def __init__(self, policy: Policy, objective: Objective, optimizers: Mapping[str, FlatAdam], rows: int) -> None:
        self.policy, self.objective, self.optimizers, self.rows = policy, objective, optimizers, rows
        self.program: Callable[[list[Tensor]], list[Tensor]] | None = None
        self.names: list[str] = []

    def fits(self, batch: Batch) -> bool:
        """Whether the program can run this batch: shapes are static, and it adds nothing up over ranks."""
        return batch.mask is None and len(batch.advantages) == self.rows and world_size() == 1

    def attempts(
        self, batch: Batch, minibatches: int, scales: tuple[float, float, float], generator: torch.Generator
    ) -> Iterator[Attempt]:
        """One pass over a batch in minibatches of a new order.

        scales   of the learning rate and of the clip, and β

        Raises SurefootError when there is no C++ compiler, or the policy can't be traced.
        """
        rate, clip_scale, beta = scales
        tensors = leaves(batch)
        for rows in order_of(self.rows, generator).chunk(minibatches):
            state, numbers = [], [clip_scale, beta]
            for optimizer in self.optimizers.values():
                step, *moments = optimizer.moments()
                corrections = [1 - beta ** (float(step) + 1) for beta in BETAS]
                numbers += [optimizer.settings.learning_rate * rate / corrections[0], math.sqrt(corrections[1])]
                state += [optimizer.values.detach(), *moments]
            arguments = [*state, torch.tensor(numbers), rows, *tensors]
            if self.program is None:
                self.program = self._compiled(batch, arguments)
            *moved, row = self.program(arguments)
            found = row.tolist()
            terms = dict(zip(self.names, found, strict=False))
            smallest, largest, *norms = found[len(self.names) :]

            def take(moved: list[Tensor] = moved) -> None:
                for index, optimizer in enumerate(self.optimizers.values()):
                    optimizer.move(*moved[3 * index : 3 * index + 3])

            yield Attempt(terms, (smallest, largest), dict(zip(self.optimizers, norms, strict=True)), take, rows)

    def _compiled(self, batch: Batch, arguments: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        names = {id(p): name for name, p in self.policy.named_parameters()}
        optimizers = list(self.optimizers.values())
        places = 3 * len(optimizers)

        def update(*tensors: Tensor) -> tuple[Tensor, ...]:
            numbers, rows = tensors[places].unbind(), tensors[places + 1]
            chosen = [leaf.index_select(0, rows) for leaf in tensors[places + 2 :]]
            minibatch = refilled(batch, chosen)
            if self.objective.normalise_advantages == "minibatch":
                minibatch = normalised(minibatch)

            def minimised(values: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
                named: dict[str, Tensor] = {}
                for optimizer, part in zip(optimizers, values, strict=True):
                    named |= split(part, optimizer.parameters, names)
                evaluation = functional_call(self.policy, named, (minibatch.inputs, minibatch.actions, None))
                total, terms, ratio = loss(
                    evaluation,
                    minibatch,
                    self.objective,
                    denominator=global_count(minibatch, self.objective.aggregation),
                    clip_scale=numbers[0],  # type: ignore[arg-type]
                    beta=numbers[1],  # type: ignore[arg-type]
                )
                self.names = list(terms)
                return total, [*terms.values(), *ratio.aminmax()]

            gradients, shown = grad(minimised, has_aux=True)(list(tensors[:places:3]))
            norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
            moved: list[Tensor] = []
            for index, optimizer in enumerate(optimizers):
                values, first, second = tensors[3 * index : 3 * index + 3]
                moved += adam(values, first, second, gradients[index], norms[index], optimizer, *numbers[2 + 2 * index :][:2])
            return (*moved, torch.stack([*shown, *norms]))

        try:
            with torch.no_grad():
                traced = make_fx(update)(*arguments)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise SurefootError(
                f"engine='compiled': the policy can't be traced ({type(error).__name__}: {reason}); set engine = 'eager'"
            ) from error
        traced.graph.eliminate_dead_code()
        traced.recompile()
        return compiled(traced, arguments)


def adam(
    values: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    norm: Tensor,
    optimizer: FlatAdam,
    step_size: Tensor,
    correction: Tensor,
) -> list[Tensor]:
    """One step of ``FlatAdam`` as a function: the values and both moments after it.   all [n]

    step_size   the learning rate over 1 − β₁^t
    correction  √(1 − β₂^t)
    """
    limit = optimizer.settings.max_grad_norm
    if limit is not None:
        gradient = gradient * torch.where(norm > limit, limit / (norm + 1e-6), 1.0)
    first = first + (1 - BETAS[0]) * (gradient - first)
    second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
    return [values - step_size * first / (second.sqrt() / correction + optimizer.settings.epsilon), first, second]


def refilled(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    """The batch with other tensors in the places of its own."""
    rest = iter(tensors)
    other: Batch = map_tensors(lambda _: next(rest), batch)
    return other


def split(values: Tensor, parameters: Sequence[nn.Parameter], places: dict[int, str]) -> dict[str, Tensor]:
    """Parameters by name as views of their group's flat values."""
    parts = torch.split(values, [p.numel() for p in parameters])
    return {places[id(p)]: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}


def compiled(traced: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A shared library of the traced program, from the cache or newly compiled."""
    package = cache_folder() / f"{fingerprint(traced, arguments)}.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own use of what it has deprecated
        if not package.exists():
            require_compiler()
            exported = torch.export.export(traced, tuple(arguments), strict=False)
            package.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=package.parent) as folder:
                new = Path(folder) / package.name
                torch._inductor.aoti_compile_and_package(exported, package_path=str(new))
                os.replace(new, package)
        library = torch._inductor.aoti_load_package(str(package))
    run: Callable[[list[Tensor]], list[Tensor]] = library.loader.boxed_run  # without the wrapper's walk over argument trees
    return run


def fingerprint(traced: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> str:
    """What decides the library: the program, its constants, shapes, this PyTorch and this processor."""
    parts: list[Any] = [traced.code, [(tuple(x.shape), x.stride(), str(x.dtype)) for x in arguments]]
    parts += [(name, x.tolist()) for name, x in sorted(traced.named_buffers())]
    parts += [(name, x.tolist()) for name, x in sorted(vars(traced).items()) if isinstance(x, Tensor)]
    parts += [torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where compiled programs are kept: $XDG_CACHE_HOME/surefoot/engine, by default below ~/.cache. Safe to delete."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surefoot" / "engine"


def require_compiler() -> None:
    """Raise SurefootError unless there is a C++ compiler."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name):
        raise SurefootError("engine='compiled': needs a C++ compiler (g++ or clang++); install one, or set engine = 'eager'")
