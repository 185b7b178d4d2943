"""The steps of the learner as compiled programs.

Small networks spend most of an update outside the arithmetic. Policy, loss and Adam are pure functions of flat parameters and
of a batch of static shape, so a whole pass over a batch runs as one program: a loop over steps (select rows, normalise, loss,
gradient, clip, Adam) that ends where the learner would stop.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from surefoot.accel.programs import Program, loop, program_of, require_programs, structure
from surefoot.core.algorithms import Objective
from surefoot.core.minibatches import global_count, micro_batches, normalised, random_order, select_rows
from surefoot.core.objective import Batch, loss, ratio_range
from surefoot.core.optimizer import BETAS, FlatOptimizer, FlatParameters, adam
from surefoot.core.rollout import Evaluation, Policy, map_tensors, tensors_in
from surefoot.core.steps import LossSums, PendingStep, UpdateContext, by_name
from surefoot.ranks.collectives import in_float64

Names = tuple[list[str], list[str]]
"""of the loss's terms, and of its metrics"""


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
    taken: int = 0
    """minibatches after which θ has moved"""
    moved: list[Tensor] = field(default_factory=list)
    """after those, for each optimizer, its parameters and both moments"""
    shown: list[list[float]] = field(default_factory=list)
    """for each minibatch: terms, metrics, smallest and largest ρ, norm of each gradient"""


class CompiledMinibatch(NamedTuple):
    """A minibatch of a pass."""

    whole: CompiledPass
    number: int


@dataclass(kw_only=True)
class CompiledStep(PendingStep):
    """A step that the program computed, with others of the pass."""

    optimizers: Mapping[str, FlatOptimizer]
    moved: list[Tensor] | None
    """after the last of the steps that were computed together: for each optimizer, its parameters and both moments"""
    steps: int
    """how many these were"""

    def take(self) -> bool:
        """Move θ, once for all steps that were computed together."""
        if self.moved is not None:
            for index, optimizer in enumerate(self.optimizers.values()):
                values, first, second = self.moved[3 * index : 3 * index + 3]
                optimizer.move(values, first, second, self.steps)
        return True


class CompiledStepper:
    """The steps on batches of exactly ``rows`` single steps, in minibatches of equal size.

    The first step of a pass runs the program for all of them. It ends after a step that the learner does not take: its KL is
    too large, or a number is not finite. A trace reads θ before each step, so then the program runs once for each; that is the
    same loop, so the bits are the same.

    optimizers  the parameters that move
    rows        depends on the recipe alone, so that a resumed run uses the same engine
    fixed       the parameters that don't move; with those that do they are all of the policy's

    Raises SurefootError if there is neither a compiler nor a compiled program in the cache.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        optimizers: Mapping[str, FlatOptimizer],
        rows: int,
        fixed: Sequence[FlatParameters] = (),
    ) -> None:
        self.policy, self.objective, self.optimizers, self.rows, self.fixed = policy, objective, optimizers, rows, fixed
        self.program: Program | None = None
        self.names: Names = ([], [])
        require_programs()

    def minibatches(self, batch: Batch, count: int, context: UpdateContext) -> list[CompiledMinibatch]:
        """The rows in a new random order, in ``count`` parts."""
        order = random_order(self.rows, context.state.generators["shuffle"]).view(count, -1)
        columns: list[list[float]] = [[context.clip_scale] * count, [context.beta] * count]
        for optimizer in self.optimizers.values():
            rate, start = optimizer.settings.learning_rate, float(optimizer.moments()[0]) + 1
            columns.append([rate * context.rate_scale(i) / (1 - BETAS[0] ** (start + i)) for i in range(count)])
            columns.append([math.sqrt(1 - BETAS[1] ** (start + index)) for index in range(count)])
        whole = CompiledPass(batch, tensors_in(replace(batch, flat_index=None)), order, torch.tensor(columns).T.contiguous())
        return [CompiledMinibatch(whole, index) for index in range(count)]

    def prepare(self, minibatch: CompiledMinibatch, context: UpdateContext) -> CompiledStep:
        """Run the program at the first minibatch, compiling it on the first call.

        Raises SurefootError if there is no C++ compiler, or the policy can't be traced.
        """
        whole, index = minibatch
        first = 0
        if context.recording is not None:
            self._record(minibatch, context)
            self._run(whole, first := index, index + 1, context)
        elif index == 0:
            self._run(whole, 0, len(whole.order), context)
        values = iter(whole.shown[index])
        terms, metrics = by_name(values, *self.names)
        smallest, largest, *norms = values
        return CompiledStep(
            terms=terms,
            metrics=metrics,
            ratios=(smallest, largest),
            norms=dict(zip(self.optimizers, norms, strict=True)),
            optimizers=self.optimizers,
            moved=whole.moved if index == whole.taken - 1 else None,
            steps=whole.taken - first,
        )

    def _run(self, whole: CompiledPass, begin: int, end: int, context: UpdateContext) -> None:
        """Compute the steps of minibatches begin … end − 1 from the present θ."""
        arguments: list[Tensor] = []
        for optimizer in self.optimizers.values():
            arguments += [optimizer.values.detach(), *optimizer.moments()[1:]]
        arguments += [torch.tensor([begin]), torch.tensor([end]), whole.numbers, whole.order]
        arguments += [*values_of(self.fixed), *whole.tensors]
        if self.program is None:
            with context.state.timer.detail("compiling"):
                self.program = self._program(replace(whole.batch, flat_index=None), arguments)
        with context.state.timer.detail("program"):
            taken, shown, *whole.moved = self.program(arguments)
        whole.taken, whole.shown = int(taken), shown.tolist()

    @torch.no_grad()
    def _record(self, minibatch: CompiledMinibatch, context: UpdateContext) -> None:
        """Evaluate the minibatch once more for a trace, because the program does not return what its loss reads."""
        assert context.recording is not None
        whole, index = minibatch
        part: Batch = select_rows(whole.batch, whole.order[index])
        if self.objective.normalise_advantages == "minibatch":
            part = context.normalised(part)
        context.recording.visit(part, self.policy(part.inputs, part.actions), context.state.updates)

    def _program(self, batch: Batch, arguments: list[Tensor]) -> Program:
        optimizers, still = list(self.optimizers.values()), len(self.fixed)
        groups = [*optimizers, *self.fixed]
        count = 3 * len(optimizers)  # of tensors of parameters and moments

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            state, (begin, end, numbers, order), columns = tensors[:count], tensors[count : count + 4], tensors[count + 4 :]
            shown = numbers.new_zeros(len(order), sum(map(len, self.names)) + 2 + len(optimizers))
            taken, _, *rest = loop(unfinished, step, (begin, end, shown, *state), (numbers, order, *columns))
            return (taken, *rest)

        def unfinished(taken: Tensor, end: Tensor, *others: Tensor) -> Tensor:
            return (taken < end).view(())

        def step(taken: Tensor, end: Tensor, shown: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            state, (numbers, order), columns = others[:count], others[count : count + 2], others[count + 2 + still :]
            fixed = others[count + 2 : count + 2 + still]
            clip_scale, beta, *of_adam = numbers.index_select(0, taken).view(-1).unbind()
            rows = order.index_select(0, taken).view(-1)
            selected = iter([x.index_select(0, rows) for x in columns])
            minibatch: Batch = map_tensors(lambda _: next(selected), batch)
            if self.objective.normalise_advantages == "minibatch":
                minibatch = normalised(minibatch)
            denominator = global_count(minibatch, self.objective.aggregation)
            loss_of = loss_function(self.policy, self.objective, groups, minibatch, (denominator, clip_scale, beta))
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

        self.names = names_of_terms(self.policy, self.objective, batch)
        known = decided_by(self.policy, self.objective, optimizers, batch, self.fixed)
        return program_of("the update", run, arguments, known, FAST)

    def _accepted(self, values: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
        """Whether the learner takes a step: its terms and norms are finite, and its KL is not too large.   [1]"""
        terms, metrics = self.names
        accepted = torch.stack([*values[: len(terms)], *norms]).isfinite().all()
        limit, kl = self.objective.largest_kl, self.objective.kl_metric
        if limit is not None and kl in metrics:
            accepted = accepted & ~(in_float64(values[len(terms) + metrics.index(kl)]) > limit)
        return accepted.unsqueeze(0)


class CompiledGradients:
    """``GradientSum`` with a compiled program for micro-batches of exactly ``rows`` single steps; Adam is not part of it.

    A micro-batch whose activations stay in a core's cache takes about half the time per row of a large minibatch.

    groups   the parameters that get a gradient
    fixed    those that get none; together they are all of the policy's
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        groups: Sequence[FlatParameters],
        rows: int,
        fixed: Sequence[FlatParameters] = (),
    ) -> None:
        self.policy, self.objective, self.rows = policy, objective, rows
        self.groups, self.fixed = groups, fixed
        self.program: Program | None = None
        self.names: Names = ([], [])
        require_programs()

    def add(
        self, rows: Batch, denominator: Tensor, context: UpdateContext, parameters: Sequence[nn.Parameter] | None
    ) -> LossSums:
        """Add the gradient to that of each group."""
        numbers = torch.stack([denominator, denominator.new_tensor(context.clip_scale), denominator.new_tensor(context.beta)])
        values, shown = values_of([*self.groups, *self.fixed]), []
        read = replace(rows, flat_index=None)
        for part in zip(*(torch.split(x, self.rows) for x in tensors_in(read)), strict=True):
            arguments = [*values, numbers, *part]
            if self.program is None:
                with context.state.timer.detail("compiling"):
                    self.program = self._program(read, arguments)
            with context.state.timer.detail("program"):
                *gradients, row = self.program(arguments)
            for group, gradient in zip(self.groups, gradients, strict=True):
                group.gradients += gradient
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
        groups = [*self.groups, *self.fixed]
        moving, count = len(self.groups), len(groups)

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors[count + 1 :])
            part: Batch = map_tensors(lambda _: next(rest), batch)
            denominator, clip_scale, beta = tensors[count].unbind()
            loss_of = loss_function(self.policy, self.objective, groups, part, (denominator, clip_scale, beta))
            by_parameter, shown = grad(loss_of, has_aux=True)(list(tensors[:moving]), tensors[moving:count])
            return (*by_parameter, torch.stack(shown))

        self.names = names_of_terms(self.policy, self.objective, batch)
        known = decided_by(self.policy, self.objective, self.groups, batch, self.fixed)
        return program_of("the gradient of a micro-batch", gradients, arguments, known, FAST)


@torch.no_grad()
def names_of_terms(policy: Policy, objective: Objective, batch: Batch) -> Names:
    """The names of the loss's terms and of its metrics, in their order."""
    few: Batch = select_rows(batch, torch.arange(1))
    _, terms, metrics, _ = loss(policy(few.inputs, few.actions), few, objective, denominator=1.0)
    return list(terms), list(metrics)


def decided_by(
    policy: Policy, objective: Objective, groups: Sequence[FlatParameters], batch: Batch, fixed: Sequence[FlatParameters] = ()
) -> list[Any] | None:
    """All that decides the graph of a step on a batch, for ``program_of``; None if the policy has code of others."""
    parts = structure(policy, constants=True)
    if parts is None:
        return None
    names = {id(p): name for name, p in policy.named_parameters()}
    rules = [replace(each.settings, learning_rate=0.0) if isinstance(each, FlatOptimizer) else None for each in groups]
    of_groups = [[names[id(p)] for p in each.parameters] for each in (*groups, *fixed)]
    return [objective, rules, of_groups, map_tensors(_kind, batch), *parts]


def _kind(x: Tensor) -> Any:
    return tuple(x.shape), x.dtype


def values_of(groups: Sequence[FlatParameters]) -> list[Tensor]:
    """The flat values of each group."""
    return [group.values.detach() for group in groups]


def evaluated(policy: Policy, groups: Sequence[FlatParameters], values: Sequence[Tensor], batch: Batch) -> Evaluation:
    """The policy's evaluation of a batch of single steps with these flat values as its parameters."""
    parameters = {id(p): name for name, p in policy.named_parameters()}
    named: dict[str, Tensor] = {}
    for group, part in zip(groups, values, strict=True):
        named |= split(part, group.parameters, parameters)
    evaluation: Evaluation = functional_call(policy, named, (batch.inputs, batch.actions, None))
    return evaluation


def loss_function(
    policy: Policy,
    objective: Objective,
    groups: Sequence[FlatParameters],
    batch: Batch,
    numbers: tuple[Tensor, Tensor, Tensor],
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, list[Tensor]]]:
    """The loss of a batch as a function of each group's flat parameters, first those that move, then the others: the total;
    and its terms, its metrics, and the smallest and largest ratio.

    numbers   denominator, scale of the clip, weight of the KL penalty   [] each
    """

    def loss_of(moving: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        denominator, clip_scale, beta = numbers
        total, terms, metrics, ratio = loss(
            evaluated(policy, groups, [*moving, *fixed], batch),
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
