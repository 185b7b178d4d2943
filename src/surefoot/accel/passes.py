"""Passes over a minibatch as compiled programs: the gradient, the loss, and the curvature of the KL.

Conjugate gradient and line search are those of the eager engine; they work on flat vectors, and call these programs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp

from surefoot.accel.programs import FAST, Program, program_of, require_programs, structure
from surefoot.core.algorithms import Objective
from surefoot.core.minibatches import micro_batches, select_rows
from surefoot.core.objective import Batch, further_sums, loss, mean_old_kl, ratio_range
from surefoot.core.optimizer import FlatOptimizer, FlatParameters
from surefoot.core.rollout import Evaluation, Policy, map_tensors, tensors_in
from surefoot.core.steps import LossSums, UpdateContext
from surefoot.core.timer import Timer

Function = Callable[..., tuple[Tensor, ...]]
UNMEASURED = Timer()


class Flat:
    """A policy and its loss as functions of flat parameters.

    moving   the parameters that move
    fixed    those that don't; together they are all of the policy's
    rows     of a batch

    Raises SurefootError if there is neither a compiler nor a compiled program in the cache.
    """

    def __init__(
        self, policy: Policy, objective: Objective, moving: Sequence[FlatParameters], fixed: Sequence[FlatParameters], rows: int
    ) -> None:
        self.policy, self.objective, self.moving, self.fixed, self.rows = policy, objective, moving, fixed, rows
        self.groups = [*moving, *fixed]
        self.terms: list[str] = []
        """names of the loss's terms, in their order"""
        self.metrics: list[str] = []
        """names of its metrics, and of ``further_sums``"""
        self.further: list[str] = []
        self.programs: dict[str, Program] = {}
        """by what they compute"""
        require_programs()

    def values(self) -> list[Tensor]:
        """The flat values of each group."""
        return [group.values.detach() for group in self.groups]

    def evaluated(self, values: Sequence[Tensor], batch: Batch) -> Evaluation:
        """The policy's evaluation of a batch of single steps with these flat values as its parameters."""
        names = {id(p): name for name, p in self.policy.named_parameters()}
        named: dict[str, Tensor] = {}
        for group, flat in zip(self.groups, values, strict=True):
            parts = torch.split(flat, [p.numel() for p in group.parameters])
            named |= {names[id(p)]: part.view(p.shape) for p, part in zip(group.parameters, parts, strict=True)}
        evaluation: Evaluation = functional_call(self.policy, named, (batch.inputs, batch.actions, None))
        return evaluation

    def loss_of(self, batch: Batch, denominator: Tensor, clip_scale: Tensor, beta: Tensor) -> Callable[..., Any]:
        """The loss of a batch as a function of each group's flat parameters, first those that move, then the others: the total;
        and its terms, its metrics, and the smallest and largest ratio.
        """

        def loss_of(moving: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
            scales: Any = {"clip_scale": clip_scale, "beta": beta}
            evaluation = self.evaluated([*moving, *fixed], batch)
            total, terms, metrics, ratio = loss(evaluation, batch, self.objective, denominator=denominator, **scales)
            return total, [*terms.values(), *metrics.values(), *ratio.aminmax()]

        return loss_of

    def run(
        self,
        kind: str,
        function_of: Callable[[Batch], Function],
        rows: Batch,
        arguments: list[Tensor],
        timer: Timer = UNMEASURED,
    ) -> list[Tensor]:
        """What a function of the arguments, for batches of this form, returns. Its program is compiled on the first call.

        Raises SurefootError if there is no C++ compiler, or the policy can't be traced.
        """
        if kind not in self.programs:
            form = read_by_loss(rows)
            with timer.detail("compiling"):
                self._set_names(form)
                self.programs[kind] = program_of(f"the {kind}", function_of(form), arguments, self._decided_by(form), FAST)
        with timer.detail("program"):
            return self.programs[kind](arguments)

    def _decided_by(self, form: Batch) -> list[Any] | None:
        """All that decides the graph of a step on a batch, for ``program_of``; None if the policy has code of others."""
        parts = structure(self.policy, constants=True)
        if parts is None:
            return None
        names = {id(p): name for name, p in self.policy.named_parameters()}
        rules = [replace(x.settings, learning_rate=0.0) if isinstance(x, FlatOptimizer) else None for x in self.moving]
        of_groups = [[names[id(p)] for p in each.parameters] for each in self.groups]
        return [self.objective, rules, of_groups, map_tensors(lambda x: (tuple(x.shape), x.dtype), form), *parts]

    @torch.no_grad()
    def _set_names(self, batch: Batch) -> None:
        """Set the names of terms and metrics, from a batch of one row."""
        few: Batch = select_rows(batch, torch.arange(1))
        evaluation = self.policy(few.inputs, few.actions)
        _, terms, metrics, _ = loss(evaluation, few, self.objective, denominator=1.0)
        self.terms, self.metrics = list(terms), list(metrics)
        if self.objective.constraint is not None:
            self.further = list(further_sums(evaluation, few, self.objective, torch.ones(())))


class CompiledPasses(Flat):
    """``EagerPasses`` with a compiled program for each kind of pass over micro-batches of exactly ``rows`` single steps.

    A micro-batch whose activations stay in a core's cache takes about half the time per row of a large minibatch.
    """

    def add(
        self, rows: Batch, denominator: Tensor, context: UpdateContext, parameters: Sequence[nn.Parameter] | None
    ) -> LossSums:
        numbers = torch.stack([denominator, denominator.new_tensor(context.clip_scale), denominator.new_tensor(context.beta)])
        values, shown = self.values(), []
        for part in self._parts(rows):
            *gradients, row = self.run(
                "gradient of a micro-batch", self._gradient, rows, [*values, numbers, *part], context.state.timer
            )
            for group, gradient in zip(self.moving, gradients, strict=True):
                group.gradients += gradient
            shown.append(row)
        if context.recording is not None:
            for traced in micro_batches(rows, self.rows):
                record(self.policy, traced, context)
        return self._sums(shown, self.metrics)

    def evaluate(self, rows: Batch, denominator: Tensor) -> LossSums:
        values, shown = self.values(), []
        for part in self._parts(rows):
            shown += self.run("evaluation of a natural step", self._evaluation, rows, [*values, denominator, *part])
        return self._sums(shown, [*self.metrics, *self.further])

    def curvature(self, rows: Batch, denominator: Tensor, parameters: Sequence[nn.Parameter]) -> Callable[[Tensor], Tensor]:
        values, parts = self.values(), self._parts(rows)

        def matvec(v: Tensor) -> Tensor:
            products: list[Tensor] = []
            for part in parts:
                products += self.run("curvature of a natural step", self._curvature, rows, [v, *values, denominator, *part])
            return products[0] if len(products) == 1 else torch.stack(products).sum(0)

        return matvec

    def _parts(self, rows: Batch) -> list[tuple[Tensor, ...]]:
        return list(zip(*(torch.split(x, self.rows) for x in tensors_in(read_by_loss(rows))), strict=True))

    def _sums(self, shown: list[Tensor], metrics: list[str]) -> LossSums:
        numbers = torch.stack(shown)
        return LossSums(self.terms, metrics, numbers[:, :-2].sum(0), ratio_range(list(numbers[:, -2:].unbind())))

    def _gradient(self, form: Batch) -> Function:
        moving, count = len(self.moving), len(self.groups)

        def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
            part = with_tensors(form, tensors[count + 1 :])
            loss_of = self.loss_of(part, *tensors[count].unbind())
            by_group, shown = grad(loss_of, has_aux=True)(list(tensors[:moving]), tensors[moving:count])
            return (*by_group, torch.stack(shown))

        return gradient

    def _evaluation(self, form: Batch) -> Function:
        count = len(self.groups)

        def evaluation(*tensors: Tensor) -> tuple[Tensor, ...]:
            denominator, part = tensors[count], with_tensors(form, tensors[count + 1 :])
            outcome = self.evaluated(tensors[:count], part)
            _, terms, metrics, ratio = loss(outcome, part, self.objective, denominator=denominator)
            further = further_sums(outcome, part, self.objective, denominator)
            return (torch.stack([*terms.values(), *metrics.values(), *further.values(), *ratio.aminmax()]),)

        return evaluation

    def _curvature(self, form: Batch) -> Function:
        count = len(self.groups)

        def curvature(v: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            values, denominator, part = tensors[0], tensors[count], with_tensors(form, tensors[count + 1 :])

            def outputs(own: Tensor) -> Evaluation:
                return _read_by_kl(self.evaluated([own, *tensors[1:count]], part), part)

            tree = outputs(values)

            def kl(of_policy: Sequence[Tensor]) -> Tensor:
                outcome: Evaluation = with_tensors(tree, of_policy)
                return mean_old_kl(outcome, part, self.objective, denominator)

            # The gradient of the KL in the distribution's parameters is 0 at θ_old, so its Hessian in θ is JᵀMJ: J that of the
            # network, M the small Hessian in the distribution's parameters. Jv is the gradient of Jᵀu in u.
            here, pull = vjp(lambda own: tensors_in(outputs(own)), values)  # type: ignore[misc]
            _, push = vjp(lambda u: pull(u)[0], [torch.zeros_like(x) for x in here])  # type: ignore[misc]
            moved = push(v)[0]
            weighted = grad(lambda x: sum((a * b).sum() for a, b in zip(grad(kl)(x), moved, strict=True)))(here)
            product: tuple[Tensor, ...] = pull(weighted)
            return product

        return curvature


@torch.no_grad()
def record(policy: Policy, part: Batch, context: UpdateContext) -> None:
    """Evaluate rows once more for a trace, because a program does not return what its loss reads."""
    assert context.recording is not None
    context.recording.visit(part, policy(part.inputs, part.actions), context.state.updates)


def read_by_loss(rows: Batch) -> Batch:
    """What the loss reads."""
    return replace(rows, flat_index=None)


def _read_by_kl(evaluation: Evaluation, batch: Batch) -> Evaluation:
    """What the KL to θ_old reads: the distribution if both are known, else log-probabilities."""
    if evaluation.distribution is None or batch.old_distribution is None:
        return Evaluation(evaluation.log_probs, None)  # type: ignore[arg-type]
    return Evaluation(None, None, distribution=evaluation.distribution)  # type: ignore[arg-type]


def with_tensors(form: Any, tensors: Iterable[Tensor]) -> Any:
    """A tree of this form with other tensors."""
    rest = iter(tensors)
    return map_tensors(lambda _: next(rest), form)
