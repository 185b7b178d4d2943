"""The steps of the learner as compiled programs.

Small networks spend most of an update outside the arithmetic. Policy, loss and Adam are pure functions of flat parameters and
of a batch of static shape, so a whole pass over a batch runs as one program: a loop over steps (select rows, normalise, loss,
gradient, clip, Adam) that ends where the learner would stop.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from surefoot.accel.passes import CompiledPasses, Flat, Function, read_by_loss, record, with_tensors
from surefoot.accel.programs import loop
from surefoot.core.learner import eager_stepper
from surefoot.core.minibatches import global_count, normalised, select_rows
from surefoot.core.objective import Batch
from surefoot.core.optimizer import BETAS, FlatOptimizer, FlatParameters, Optimizer, adam
from surefoot.core.rollout import tensors_in
from surefoot.core.steps import Passes, PendingStep, Stepper, UpdateContext, by_name
from surefoot.core.steps.eager import EagerPasses, EagerStepper
from surefoot.core.steps.trpo import NaturalStepper
from surefoot.ranks.collectives import in_float64, world_size


def compiled_stepper(
    passes: EagerPasses, optimizers: Mapping[str, Optimizer], natural: FlatParameters | None, *, rows: int
) -> Stepper:
    """Steps by compiled programs, for ``LearnerSettings.stepper``.

    rows   of the batches of all ranks together: single steps, or sequences. Batches with another number have eager steps. It
           depends on the recipe alone, so that a resumed run uses the same engine

    Raises SurefootError if there is neither a compiler nor a compiled program in the cache.
    """
    rows, micro_batch, eager = rows // world_size(), passes.micro_batch, eager_stepper(passes, optimizers, natural)
    moving = {name: each for name, each in optimizers.items() if isinstance(each, FlatOptimizer)}
    still = [] if natural is None else [natural]
    by_adam: Stepper | None = None
    size, rest = divmod(rows, passes.objective.passes[1])
    if moving and not rest and size % (micro_batch or size) == 0:
        if micro_batch is None and world_size() == 1:
            by_adam = CompiledStepper(passes, moving, still, rows)
        else:  # micro-batches, and ranks, which sum gradients between the program and Adam
            compiled = CompiledPasses(passes.policy, passes.objective, [*moving.values()], still, micro_batch or size)
            by_adam = EagerStepper(compiled, moving)
    if natural is None:
        return FittingStepper(by_adam or eager, eager, rows)
    of_natural: Passes = passes
    if rows % (micro_batch or rows) == 0:
        of_natural = CompiledPasses(passes.policy, passes.objective, [natural], [*moving.values()], micro_batch or rows)
    assert isinstance(eager, NaturalStepper)
    parameters = eager.parameters if of_natural is passes else None
    return FittingStepper(NaturalStepper(of_natural, natural, by_adam or eager.critic, parameters), eager, rows)


class FittingStepper(Stepper):
    """Compiled steps on batches of exactly ``rows`` rows without a mask, as shapes are static; eager steps on any other."""

    def __init__(self, compiled: Stepper, eager: Stepper, rows: int) -> None:
        self.compiled, self.eager, self.rows = compiled, eager, rows

    def simplified(self, batch: Batch) -> Batch:
        """The batch without a mask that keeps every entry."""
        return replace(batch, mask=None) if batch.mask is not None and batch.mask.all() else batch

    def steps(self, batch: Batch, context: UpdateContext) -> Iterator[PendingStep]:
        """The steps of the one that fits."""
        fits = batch.mask is None and len(batch.advantages) == self.rows
        return (self.compiled if fits else self.eager).steps(batch, context)


@dataclass
class CompiledPass:
    """One pass over a batch, and what the program returned for it."""

    batch: Batch
    """the whole batch"""
    tensors: list[Tensor]
    """those of the batch that the loss reads"""
    order: Tensor
    """the rows of each minibatch, which the program gathers   [minibatches, rows]"""
    numbers: Tensor
    """scale of the clip, β, and for each optimizer step size and correction of Adam   [minibatches, 2 + 2 · optimizers]"""
    rates: list[float]
    """the factor of the learning rate at each minibatch"""
    taken: int = 0
    """minibatches after which θ has moved"""
    moved: list[Tensor] = field(default_factory=list)
    """after those, for each optimizer, its parameters and both moments"""
    shown: list[list[float]] = field(default_factory=list)
    """for each minibatch: terms, metrics, smallest and largest ρ, norm of each gradient"""


class CompiledStepper(Flat, Stepper):
    """The steps of Adam on batches of exactly ``rows`` rows, in minibatches of equal size.

    The first step of a pass runs the program for all of them. It ends after a step that the learner does not take: its KL is
    too large, or a number is not finite. A trace reads θ before each step, so then the program runs once for each; that is the
    same loop, so the bits are the same.

    optimizers  the parameters that move
    """

    def __init__(
        self, passes: Passes, optimizers: Mapping[str, FlatOptimizer], fixed: Sequence[FlatParameters], rows: int
    ) -> None:
        super().__init__(passes.policy, passes.objective, [*optimizers.values()], fixed, rows)
        self.optimizers = optimizers

    def steps(self, batch: Batch, context: UpdateContext) -> Iterator[PendingStep]:
        """In each epoch the rows in a new random order."""
        epochs, count = self.objective.passes
        for epoch in range(epochs):
            whole = self._pass(batch, [context.rates(epoch * count + index) for index in range(count)], context)
            for index in range(count):
                first = 0
                if context.recording is not None:
                    self._record(whole, index, context)
                    self._run(whole, first := index, index + 1, context)
                elif index == 0:
                    self._run(whole, 0, count, context)
                values = iter(whole.shown[index])
                terms, metrics = by_name(values, self.terms, self.metrics)
                smallest, largest, *norms = values
                move = partial(self._move, whole, index, whole.taken - first)
                yield PendingStep(
                    terms, metrics, (smallest, largest), dict(zip(self.optimizers, norms, strict=True)), epoch, move
                )

    def _move(self, whole: CompiledPass, index: int, steps: int, step: PendingStep) -> bool:
        """Move θ, once for all steps that were computed together, after the last of them."""
        if index == whole.taken - 1:
            for number, optimizer in enumerate(self.optimizers.values()):
                rate = optimizer.settings.learning_rate * whole.rates[index]
                values, first, second = whole.moved[3 * number : 3 * number + 3]
                optimizer.move(values, first, second, steps, rate)
        return True

    def _pass(self, batch: Batch, rates: list[float], context: UpdateContext) -> CompiledPass:
        """The rows in a new random order, with the numbers of each step."""
        count = len(rates)
        order = context.order(self.rows).view(count, -1)
        columns: list[list[float]] = [[context.clip_scale] * count, [context.beta] * count]
        for optimizer in self.optimizers.values():
            rate, start = optimizer.settings.learning_rate, float(optimizer.moments()[0]) + 1
            columns.append([rate * rates[i] / (1 - BETAS[0] ** (start + i)) for i in range(count)])
            columns.append([math.sqrt(1 - BETAS[1] ** (start + i)) for i in range(count)])
        return CompiledPass(batch, tensors_in(read_by_loss(batch)), order, torch.tensor(columns).T.contiguous(), rates)

    def _run(self, whole: CompiledPass, begin: int, end: int, context: UpdateContext) -> None:
        """Compute the steps of minibatches begin … end − 1 from the present θ."""
        arguments: list[Tensor] = []
        for optimizer in self.optimizers.values():
            arguments += [optimizer.values.detach(), *optimizer.moments()[1:]]
        arguments += [torch.tensor([begin]), torch.tensor([end]), whole.numbers, whole.order]
        arguments += [*self.values()[len(self.moving) :], *whole.tensors]
        taken, shown, *whole.moved = self.run("update", self._function, whole.batch, arguments, context.state.timer)
        whole.taken, whole.shown = int(taken), shown.tolist()

    def _record(self, whole: CompiledPass, index: int, context: UpdateContext) -> None:
        part: Batch = select_rows(whole.batch, whole.order[index])
        if self.objective.normalise_advantages == "minibatch":
            with torch.no_grad():
                part = context.normalised(part)
        record(self.policy, part, context)

    def _function(self, form: Batch) -> Function:
        optimizers, still = list(self.optimizers.values()), len(self.fixed)
        count = 3 * len(optimizers)  # of tensors of parameters and moments

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            state, (begin, end, numbers, order), columns = tensors[:count], tensors[count : count + 4], tensors[count + 4 :]
            shown = numbers.new_zeros(len(order), len(self.terms) + len(self.metrics) + 2 + len(optimizers))
            taken, _, *rest = loop(unfinished, step, (begin, end, shown, *state), (numbers, order, *columns))
            return (taken, *rest)

        def unfinished(taken: Tensor, end: Tensor, *others: Tensor) -> Tensor:
            return (taken < end).view(())

        def step(taken: Tensor, end: Tensor, shown: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            state, (numbers, order), columns = others[:count], others[count : count + 2], others[count + 2 + still :]
            fixed = others[count + 2 : count + 2 + still]
            clip_scale, beta, *of_adam = numbers.index_select(0, taken).view(-1).unbind()
            rows = order.index_select(0, taken).view(-1)
            minibatch: Batch = with_tensors(form, [x.index_select(0, rows) for x in columns])
            if self.objective.normalise_advantages == "minibatch":
                minibatch = normalised(minibatch)
            denominator = global_count(minibatch, self.objective.aggregation)
            loss_of = self.loss_of(minibatch, denominator, clip_scale, beta)
            gradients, shown_now = grad(loss_of, has_aux=True)(list(state[::3]), fixed)
            norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
            accepted, moved = self._accepted(shown_now, norms), []
            for index, optimizer in enumerate(optimizers):
                values, first, second = before = state[3 * index : 3 * index + 3]
                rate, correction = of_adam[2 * index : 2 * index + 2]
                after = adam(values, first, second, gradients[index], norms[index], rate, correction, optimizer.settings)
                moved += [torch.where(accepted, new, old) for new, old in zip(after, before, strict=True)]
            shown = shown.index_copy(0, taken, torch.stack([*shown_now, *norms]).unsqueeze(0))
            return (taken + accepted, torch.where(accepted, end, taken), shown, *moved)

        return run

    def _accepted(self, values: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
        """Whether the learner takes a step: its terms and norms are finite, and its KL is not too large.   [1]"""
        accepted = torch.stack([*values[: len(self.terms)], *norms]).isfinite().all()
        limit, kl = self.objective.largest_kl, self.objective.kl_metric
        if limit is not None and kl in self.metrics:
            accepted = accepted & ~(in_float64(values[len(self.terms) + self.metrics.index(kl)]) > limit)
        return accepted.unsqueeze(0)
