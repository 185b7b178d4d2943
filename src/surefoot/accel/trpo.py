"""The passes of TRPO's step as compiled programs: the gradient, the evaluation of the surrogate, and the curvature of the KL.

Conjugate gradient and line search are those of the eager engine; they work on flat vectors, and call these programs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp

from surefoot.accel.programs import Program, program_of
from surefoot.accel.steps import FAST, CompiledGradients, decided_by, evaluated, names_of_terms, values_of
from surefoot.core.algorithms import Objective
from surefoot.core.minibatches import select_rows
from surefoot.core.objective import Batch, loss, mean_old_kl, ratio_range
from surefoot.core.optimizer import FlatParameters
from surefoot.core.rollout import Evaluation, Policy, map_tensors, tensors_in
from surefoot.core.steps import LossSums
from surefoot.core.steps.trpo import further_sums


class CompiledPasses(CompiledGradients):
    """``EagerPasses`` with a compiled program for each kind of pass over ``rows`` single steps.

    own     the parameters that the natural step moves
    fixed   all others of the policy

    Raises SurefootError if there is neither a compiler nor a compiled program in the cache.
    """

    def __init__(
        self, policy: Policy, objective: Objective, own: FlatParameters, rows: int, fixed: Sequence[FlatParameters]
    ) -> None:
        super().__init__(policy, objective, [own], rows, fixed)
        self.of_evaluation: Program | None = None
        self.of_curvature: Program | None = None
        self.further: list[str] = []
        """names of ``further_sums``"""

    def evaluate(self, rows: Batch, denominator: Tensor) -> LossSums:
        """The loss at the present θ."""
        values, shown = values_of([*self.groups, *self.fixed]), []
        for part in self._parts(rows):
            arguments = [*values, denominator, *part]
            if self.of_evaluation is None:
                self.of_evaluation = self._evaluation(_read(rows), arguments)
            shown += self.of_evaluation(arguments)
        numbers = torch.stack(shown)
        terms, metrics = self.names
        return LossSums(terms, [*metrics, *self.further], numbers[:, :-2].sum(0), ratio_range(list(numbers[:, -2:].unbind())))

    def curvature(self, rows: Batch, denominator: Tensor) -> Callable[[Tensor], Tensor]:
        """v -> H v."""
        values = values_of([*self.groups, *self.fixed])
        parts = [[denominator, *part] for part in self._parts(rows)]

        def matvec(v: Tensor) -> Tensor:
            products = []
            for part in parts:
                arguments = [v, *values, *part]
                if self.of_curvature is None:
                    self.of_curvature = self._curvature(_read(rows), arguments)
                products += self.of_curvature(arguments)
            return products[0] if len(products) == 1 else torch.stack(products).sum(0)

        return matvec

    def _parts(self, rows: Batch) -> list[tuple[Tensor, ...]]:
        return list(zip(*(torch.split(x, self.rows) for x in tensors_in(_read(rows))), strict=True))

    def _evaluation(self, batch: Batch, arguments: list[Tensor]) -> Program:
        groups = [*self.groups, *self.fixed]
        count = len(groups)

        def evaluation(*tensors: Tensor) -> tuple[Tensor, ...]:
            denominator, part = tensors[count], _with_tensors(batch, tensors[count + 1 :])
            outcome = evaluated(self.policy, groups, tensors[:count], part)
            _, terms, metrics, ratio = loss(outcome, part, self.objective, denominator=denominator)
            further = further_sums(outcome, part, self.objective, denominator)
            return (torch.stack([*terms.values(), *metrics.values(), *further.values(), *ratio.aminmax()]),)

        self.names = names_of_terms(self.policy, self.objective, batch)
        with torch.no_grad():
            few: Batch = select_rows(batch, torch.arange(1))
            here = self.policy(few.inputs, few.actions)
            self.further = list(further_sums(here, few, self.objective, torch.ones(())))
        known = decided_by(self.policy, self.objective, self.groups, batch, self.fixed)
        return program_of("the evaluation of a natural step", evaluation, arguments, known, FAST)

    def _curvature(self, batch: Batch, arguments: list[Tensor]) -> Program:
        groups = [*self.groups, *self.fixed]
        count = len(groups)

        def curvature(v: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            values, denominator, part = tensors[0], tensors[count], _with_tensors(batch, tensors[count + 1 :])

            def outputs(own: Tensor) -> Evaluation:
                return _read_by_kl(evaluated(self.policy, groups, [own, *tensors[1:count]], part), part)

            form = outputs(values)

            def kl(of_policy: Sequence[Tensor]) -> Tensor:
                outcome: Evaluation = _with_tensors(form, of_policy)
                return mean_old_kl(outcome, part, self.objective, denominator)

            # The gradient of the KL in the distribution's parameters is 0 at θ_old, so its Hessian in θ is JᵀMJ: J that of the
            # network, M the small Hessian in the distribution's parameters. Jv is the gradient of Jᵀu in u.
            here, pull = vjp(lambda own: tensors_in(outputs(own)), values)  # type: ignore[misc]
            _, push = vjp(lambda u: pull(u)[0], [torch.zeros_like(x) for x in here])  # type: ignore[misc]
            moved = push(v)[0]
            weighted = grad(lambda x: sum((a * b).sum() for a, b in zip(grad(kl)(x), moved, strict=True)))(here)
            product: tuple[Tensor, ...] = pull(weighted)
            return product

        known = decided_by(self.policy, self.objective, self.groups, batch, self.fixed)
        return program_of("the curvature of a natural step", curvature, arguments, known, FAST)


def _read(rows: Batch) -> Batch:
    """What the loss reads."""
    return replace(rows, flat_index=None)


def _read_by_kl(evaluation: Evaluation, batch: Batch) -> Evaluation:
    """What the KL to θ_old reads: the distribution if both are known, else log-probabilities."""
    if evaluation.distribution is None or batch.old_distribution is None:
        return Evaluation(evaluation.log_probs, None)  # type: ignore[arg-type]
    return Evaluation(None, None, distribution=evaluation.distribution)  # type: ignore[arg-type]


def _with_tensors(form: Any, columns: Iterable[Tensor]) -> Any:
    """A tree of this form with other tensors."""
    rest = iter(columns)
    return map_tensors(lambda _: next(rest), form)
