"""Passes by autograd, and the steps of Adam along their gradient."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.core.algorithms import Objective
from surefoot.core.minibatches import Minibatch, evened, micro_batches, shuffled, with_global_numbers
from surefoot.core.objective import Batch, further_sums, loss, mean_old_kl, ratio_range
from surefoot.core.optimizer import Optimizer
from surefoot.core.rollout import Policy
from surefoot.core.steps import LossSums, Passes, PendingStep, Stepper, UpdateContext
from surefoot.functional import fisher_vector_product
from surefoot.ranks.collectives import exchanging


class EagerPasses:
    """Passes over a minibatch, in sums over its micro-batches.

    micro_batch         rows per micro-batch
    micro_batch_tokens  tokens per micro-batch, padding included
    """

    def __init__(
        self, policy: Policy, objective: Objective, micro_batch: int | None = None, micro_batch_tokens: int | None = None
    ) -> None:
        self.policy, self.objective = policy, objective
        self.micro_batch, self.micro_batch_tokens = micro_batch, micro_batch_tokens

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """The micro-batches."""
        costs = shared = None
        if self.micro_batch_tokens is not None and batch.mask is not None:
            costs, shared = self.policy.costs(batch.inputs, batch.mask), self.policy.shared(batch.inputs, batch.mask)
        return micro_batches(batch, self.micro_batch, self.micro_batch_tokens, costs, shared)

    def add(
        self, rows: Batch, denominator: Tensor, context: UpdateContext, parameters: Sequence[nn.Parameter] | None
    ) -> LossSums:
        timer = context.state.timer
        sums: list[Tensor] = []
        extremes: list[Tensor] = []
        parts: Iterable[Batch] = self.parts(rows)
        if self.objective.router_coefficient:
            parts = list(parts)
            with self.policy.gathered():
                self.policy.prepare([(part.inputs, part.actions, part.mask) for part in parts])
        for part, counts in evened(parts, rows, self.policy.sharded):
            with exchanging():
                with timer.detail("forward"):
                    evaluation = self.policy(part.inputs, part.actions, part.mask)
                    scales = {"clip_scale": context.clip_scale, "beta": context.beta}
                    total, terms, metrics, ratio = loss(evaluation, part, self.objective, denominator=denominator, **scales)
                if context.recording is not None and counts:
                    context.recording.visit(part, evaluation, context.state.updates)
                with timer.detail("backward"):
                    (total if counts else 0 * total).backward(inputs=parameters)  # type: ignore[no-untyped-call]
            if counts:
                sums.append(torch.stack([*terms.values(), *metrics.values()]))
                extremes.append(torch.stack(ratio.aminmax()))
        total = torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]
        return LossSums(list(terms), list(metrics), total, ratio_range(extremes))

    @torch.no_grad()
    def evaluate(self, rows: Batch, denominator: Tensor) -> LossSums:
        sums: list[Tensor] = []
        extremes: list[Tensor] = []
        for part in self.parts(rows):
            evaluation = self.policy(part.inputs, part.actions, part.mask)
            _, terms, metrics, ratio = loss(evaluation, part, self.objective, denominator=denominator)
            metrics = metrics | further_sums(evaluation, part, self.objective, denominator)
            sums.append(torch.stack([*terms.values(), *metrics.values()]))
            extremes.append(torch.stack(ratio.aminmax()))
        return LossSums(list(terms), list(metrics), torch.stack(sums).sum(0), ratio_range(extremes))

    def curvature(self, rows: Batch, denominator: Tensor, parameters: Sequence[nn.Parameter]) -> Callable[[Tensor], Tensor]:
        """v -> H v. A batch in one part keeps the graph of the gradient. With several parts each product builds the graphs
        again, one at a time, to bound memory.
        """
        parts = list(self.parts(rows))

        def product(part: Batch) -> Callable[[Tensor], Tensor]:
            # Neither fused attention nor cuDNN's LSTM can be differentiated twice.
            with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
                evaluation = self.policy(part.inputs, part.actions, part.mask)
            return fisher_vector_product(mean_old_kl(evaluation, part, self.objective, denominator), parameters, damping=0.0)

        kept = product(parts[0]) if len(parts) == 1 else None

        def matvec(v: Tensor) -> Tensor:
            return kept(v) if kept else torch.stack([product(part)(v) for part in parts]).sum(0)

        return matvec


class EagerStepper(Stepper):
    """Steps of Adam along the gradient of each minibatch.

    optimizers   the optimizers to step
    parameters   the parameters that get a gradient; None: all
    """

    def __init__(
        self, passes: Passes, optimizers: Mapping[str, Optimizer], parameters: Sequence[nn.Parameter] | None = None
    ) -> None:
        self.passes, self.optimizers, self.parameters = passes, optimizers, parameters

    def steps(self, batch: Batch, context: UpdateContext) -> Iterator[PendingStep]:
        """In each epoch the rows in a new random order, one step per minibatch."""
        objective, number = self.passes.objective, 0
        epochs, count = objective.passes
        for epoch in range(epochs):
            parts = shuffled(batch, count, context.order(len(batch.advantages)))
            for minibatch in with_global_numbers(parts, objective):
                yield self._step(minibatch, context, epoch, context.rates(number))
                number += 1

    def _step(self, minibatch: Minibatch, context: UpdateContext, epoch: int, rate_scale: float) -> PendingStep:
        """Sum the gradients of the micro-batches and of the auxiliary loss."""
        rows = minibatch.rows if minibatch.moments is None else context.normalised(minibatch.rows, minibatch.moments)
        for optimizer in self.optimizers.values():
            optimizer.zero()
        sums = self.passes.add(rows, minibatch.denominator, context, self.parameters)
        extra = None
        if context.auxiliary_loss is not None and "policy" in self.optimizers:  # it does not train the critic
            with context.state.timer.detail("auxiliary loss"):
                extra = context.auxiliary_loss.add_gradient()
        with context.state.timer.detail("sums over ranks"):
            terms, metrics = sums.over_ranks(self.optimizers.values())
        with context.state.timer.detail("optimizer"):
            norms = {name: optimizer.gradient_norm() for name, optimizer in self.optimizers.items()}
        moving = [*self.optimizers.values()]
        return PendingStep(terms | (extra or {}), metrics, sums.ratios, norms, epoch, self._move, rate_scale, moving)

    def _move(self, step: PendingStep) -> bool:
        assert step.rate_scale is not None
        for name, optimizer in self.optimizers.items():
            optimizer.step(step.norms[name], step.rate_scale)
        return True
