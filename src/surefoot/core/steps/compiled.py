"""One update of a batch as one compiled program: the same functions as ever, traced once, run without Python in between.

A network of a dozen small tensors spends its time on the way to the arithmetic. Policy, loss and optimizer are pure functions
of flat parameters and a batch of static shape, so a whole update (choose the rows, normalise, loss, gradient, clip, Adam) can
be one program.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from surefoot.core.algorithms import Objective
from surefoot.core.distributed import world_size
from surefoot.core.minibatches import global_count, normalised, order_of
from surefoot.core.objective import Batch, loss
from surefoot.core.optimizer import BETAS, FlatAdam
from surefoot.core.rollout import Policy, map_tensors, tensors_in
from surefoot.core.steps.program import Program, program_of, require_programs


@dataclass(frozen=True)
class PendingStep:
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

    Raises SurefootError where no program can be had, for want of a compiler.
    """

    def __init__(self, policy: Policy, objective: Objective, optimizers: Mapping[str, FlatAdam], rows: int) -> None:
        self.policy, self.objective, self.optimizers, self.rows = policy, objective, optimizers, rows
        self.program: Program | None = None
        self.names: list[str] = []
        if world_size() == 1:  # several ranks add up between the parts of a step, and compile nothing
            require_programs()

    def fits(self, batch: Batch) -> bool:
        """Whether the program can run this batch: shapes are static, and it adds nothing up over ranks."""
        return batch.mask is None and len(batch.advantages) == self.rows and world_size() == 1

    def attempts(
        self, batch: Batch, minibatches: int, scales: tuple[float, float, float], generator: torch.Generator
    ) -> Iterator[PendingStep]:
        """One pass over a batch in minibatches of a new order.

        scales   of the learning rate and of the clip, and β

        Raises SurefootError when there is no C++ compiler, or the policy can't be traced.
        """
        rate, clip_scale, beta = scales
        tensors = tensors_in(batch)
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

            yield PendingStep(terms, (smallest, largest), dict(zip(self.optimizers, norms, strict=True)), take, rows)

    def _compiled(self, batch: Batch, arguments: list[Tensor]) -> Program:
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

        return program_of(update, arguments)


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
