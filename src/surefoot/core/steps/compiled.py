"""The steps of the learner as one compiled program.

Small networks spend most of an update outside the arithmetic. Policy, loss and Adam are pure functions of flat parameters and
of a batch of static shape, so a whole step (select rows, normalise, loss, gradient, clip, Adam) runs as one program.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from surefoot.core.algorithms import Objective
from surefoot.core.minibatches import global_count, micro_batches, normalised, random_order, select_rows
from surefoot.core.objective import Batch, loss, ratio_range
from surefoot.core.optimizer import BETAS, FlatOptimizer, adam
from surefoot.core.rollout import Policy, map_tensors, tensors_in
from surefoot.core.steps import LossSums, PendingStep, UpdateContext, by_name
from surefoot.core.steps.programs import Program, program_of, require_programs, structure

Names = tuple[list[str], list[str]]
"""of the loss's terms, and of its metrics"""


class CompiledMinibatch(NamedTuple):
    """A selection of rows, which the program itself gathers."""

    batch: Batch
    """the whole batch"""
    tensors: list[Tensor]
    """those of the batch that the loss reads"""
    rows: Tensor
    """[n]"""


@dataclass(kw_only=True)
class CompiledStep(PendingStep):
    """The parameters and moments after the step, as the program computed them."""

    optimizers: Mapping[str, FlatOptimizer]
    moved: list[Tensor]
    """for each optimizer, its parameters and both moments"""

    def take(self) -> bool:
        for index, optimizer in enumerate(self.optimizers.values()):
            optimizer.move(*self.moved[3 * index : 3 * index + 3])
        return True


class CompiledStepper:
    """The steps on batches of exactly ``rows`` single steps.

    optimizers  together they have all parameters of the policy
    rows        depends on the recipe alone, so that a resumed run uses the same engine

    Raises SurefootError if there is neither a compiler nor a compiled program in the cache.
    """

    def __init__(self, policy: Policy, objective: Objective, optimizers: Mapping[str, FlatOptimizer], rows: int) -> None:
        self.policy, self.objective, self.optimizers, self.rows = policy, objective, optimizers, rows
        self.program: Program | None = None
        self.names: Names = ([], [])
        require_programs()

    def minibatches(self, batch: Batch, count: int, context: UpdateContext) -> Iterator[CompiledMinibatch]:
        """The rows in a new random order, in ``count`` parts."""
        tensors = tensors_in(replace(batch, flat_index=None))
        for rows in random_order(self.rows, context.state.generators["shuffle"]).chunk(count):
            yield CompiledMinibatch(batch, tensors, rows)

    def prepare(self, minibatch: CompiledMinibatch, context: UpdateContext) -> CompiledStep:
        """Run the program, compiling it on the first call.

        Raises SurefootError if there is no C++ compiler, or the policy can't be traced.
        """
        state, numbers = [], [context.clip_scale, context.beta]
        for optimizer in self.optimizers.values():
            step, *moments = optimizer.moments()
            corrections = [1 - beta ** (float(step) + 1) for beta in BETAS]
            numbers += [optimizer.settings.learning_rate * context.rate_scale / corrections[0], math.sqrt(corrections[1])]
            state += [optimizer.values.detach(), *moments]
        arguments = [*state, torch.tensor(numbers), minibatch.rows, *minibatch.tensors]
        if self.program is None:
            with context.state.timer.detail("compiling"):
                self.program = self._program(replace(minibatch.batch, flat_index=None), arguments)
        with context.state.timer.detail("program"):
            *moved, row = self.program(arguments)
        values = iter(row.tolist())
        terms, metrics = by_name(values, *self.names)
        smallest, largest, *norms = values
        if context.recording is not None:
            self._record(minibatch, context)
        return CompiledStep(
            terms=terms,
            metrics=metrics,
            ratios=(smallest, largest),
            norms=dict(zip(self.optimizers, norms, strict=True)),
            optimizers=self.optimizers,
            moved=moved,
        )

    @torch.no_grad()
    def _record(self, minibatch: CompiledMinibatch, context: UpdateContext) -> None:
        """Evaluate the minibatch once more for a trace, because the program does not return what its loss reads."""
        assert context.recording is not None
        part: Batch = select_rows(minibatch.batch, minibatch.rows)
        if self.objective.normalise_advantages == "minibatch":
            part = context.normalised(part)
        context.recording.visit(part, self.policy(part.inputs, part.actions), context.state.updates)

    def _program(self, batch: Batch, arguments: list[Tensor]) -> Program:
        optimizers = list(self.optimizers.values())
        start = 3 * len(optimizers)  # the arguments before it are parameters and moments

        def update(*tensors: Tensor) -> tuple[Tensor, ...]:
            numbers, rows = tensors[start].unbind(), tensors[start + 1]
            selected = iter([x.index_select(0, rows) for x in tensors[start + 2 :]])
            minibatch: Batch = map_tensors(lambda _: next(selected), batch)
            if self.objective.normalise_advantages == "minibatch":
                minibatch = normalised(minibatch)
            denominator = global_count(minibatch, self.objective.aggregation)
            loss_of = loss_function(self.policy, self.objective, optimizers, minibatch, (denominator, numbers[0], numbers[1]))
            gradients, shown = grad(loss_of, has_aux=True)(list(tensors[:start:3]))
            norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
            moved: list[Tensor] = []
            for index, optimizer in enumerate(optimizers):
                values, first, second = tensors[3 * index : 3 * index + 3]
                step_size, correction = numbers[2 + 2 * index :][:2]
                settings = optimizer.settings
                moved += adam(values, first, second, gradients[index], norms[index], step_size, correction, settings)
            return (*moved, torch.stack([*shown, *norms]))

        self.names = names_of_terms(self.policy, self.objective, batch)
        return program_of("the update", update, arguments, decided_by(self.policy, self.objective, optimizers, batch))


class CompiledGradients:
    """``GradientSum`` with a compiled program for micro-batches of exactly ``rows`` single steps; Adam is not part of it.

    A micro-batch whose activations stay in a core's cache takes about half the time per row of a large minibatch.

    optimizers   together they have all parameters of the policy
    """

    def __init__(self, policy: Policy, objective: Objective, optimizers: Mapping[str, FlatOptimizer], rows: int) -> None:
        self.policy, self.objective, self.optimizers, self.rows = policy, objective, list(optimizers.values()), rows
        self.program: Program | None = None
        self.names: Names = ([], [])
        require_programs()

    def add(
        self, rows: Batch, denominator: Tensor, context: UpdateContext, parameters: Sequence[nn.Parameter] | None
    ) -> LossSums:
        """Add the gradient to that of each optimizer."""
        numbers = torch.stack([denominator, denominator.new_tensor(context.clip_scale), denominator.new_tensor(context.beta)])
        values, shown = [optimizer.values.detach() for optimizer in self.optimizers], []
        read = replace(rows, flat_index=None)
        for part in zip(*(torch.split(x, self.rows) for x in tensors_in(read)), strict=True):
            arguments = [*values, numbers, *part]
            if self.program is None:
                with context.state.timer.detail("compiling"):
                    self.program = self._program(read, arguments)
            with context.state.timer.detail("program"):
                *gradients, row = self.program(arguments)
            for optimizer, gradient in zip(self.optimizers, gradients, strict=True):
                optimizer.gradients += gradient
            shown.append(row)
        if context.recording is not None:
            self._record(rows, context)
        numbers = torch.stack(shown)
        return LossSums(*self.names, numbers[:, :-2].sum(0), ratio_range(list(numbers[:, -2:].unbind())))

    @torch.no_grad()
    def _record(self, minibatch: Batch, context: UpdateContext) -> None:
        """Evaluate the minibatch once more for a trace, because the program does not return what its loss reads."""
        assert context.recording is not None
        for part in micro_batches(minibatch, self.rows):
            context.recording.visit(part, self.policy(part.inputs, part.actions), context.state.updates)

    def _program(self, batch: Batch, arguments: list[Tensor]) -> Program:
        count = len(self.optimizers)

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors[count + 1 :])
            part: Batch = map_tensors(lambda _: next(rest), batch)
            denominator, clip_scale, beta = tensors[count].unbind()
            numbers = denominator, clip_scale, beta
            loss_of = loss_function(self.policy, self.objective, self.optimizers, part, numbers)
            by_parameter, shown = grad(loss_of, has_aux=True)(list(tensors[:count]))
            return (*by_parameter, torch.stack(shown))

        self.names = names_of_terms(self.policy, self.objective, batch)
        return program_of(
            "the gradient of a micro-batch",
            gradients,
            arguments,
            decided_by(self.policy, self.objective, self.optimizers, batch),
            FAST,
        )


@torch.no_grad()
def names_of_terms(policy: Policy, objective: Objective, batch: Batch) -> Names:
    """The names of the loss's terms and of its metrics, in their order."""
    few: Batch = select_rows(batch, torch.arange(1))
    _, terms, metrics, _ = loss(policy(few.inputs, few.actions), few, objective, denominator=1.0)
    return list(terms), list(metrics)


def decided_by(policy: Policy, objective: Objective, optimizers: Sequence[FlatOptimizer], batch: Batch) -> list[Any] | None:
    """All that decides the graph of a step on a batch, for ``program_of``; None if the policy has code of others."""
    parts = structure(policy, constants=True)
    if parts is None:
        return None
    names = {id(p): name for name, p in policy.named_parameters()}
    groups = [(replace(each.settings, learning_rate=0.0), [names[id(p)] for p in each.parameters]) for each in optimizers]
    return [objective, groups, map_tensors(_kind, batch), *parts]


def _kind(x: Tensor) -> Any:
    return tuple(x.shape), x.dtype


def loss_function(
    policy: Policy,
    objective: Objective,
    optimizers: Sequence[FlatOptimizer],
    batch: Batch,
    numbers: tuple[Tensor, Tensor, Tensor],
) -> Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]:
    """The loss of a batch as a function of each optimizer's flat parameters: the total; and its terms, its metrics, and the
    smallest and largest ratio.

    numbers   denominator, scale of the clip, weight of the KL penalty   [] each
    """
    parameters = {id(p): name for name, p in policy.named_parameters()}

    def loss_of(values: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        named: dict[str, Tensor] = {}
        for optimizer, part in zip(optimizers, values, strict=True):
            named |= split(part, optimizer.parameters, parameters)
        evaluation = functional_call(policy, named, (batch.inputs, batch.actions, None))
        denominator, clip_scale, beta = numbers
        total, terms, metrics, ratio = loss(
            evaluation,
            batch,
            objective,
            denominator=denominator,
            clip_scale=clip_scale,  # type: ignore[arg-type]
            beta=beta,  # type: ignore[arg-type]
        )
        return total, [*terms.values(), *metrics.values(), *ratio.aminmax()]

    return loss_of


def _fast_tanh(x: Tensor) -> Tensor:
    """tanh by one exponential, to 1.2e-7; the vectorised library's takes three times as long."""
    return 2 * torch.sigmoid(2 * x) - 1


FAST: Mapping[Any, Callable[..., Any]] = {torch.ops.aten.tanh.default: _fast_tanh}
"""what programs on many rows compute in place of some operations"""


def split(values: Tensor, parameters: Sequence[nn.Parameter], names: dict[int, str]) -> dict[str, Tensor]:
    """Parameters by name as views of their group's flat values; ``names`` by the parameter's ``id``."""
    parts = torch.split(values, [p.numel() for p in parameters])
    return {names[id(p)]: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
