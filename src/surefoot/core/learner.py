"""One batch of experience into updates of θ: epochs × minibatches × micro-batches and the early stop, or a natural step."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.core.algorithms import Objective
from surefoot.core.distributed import all_sum
from surefoot.core.minibatches import chosen, global_count, moments_of, normalised, rows_of, shuffled, slices
from surefoot.core.objective import Batch, loss, mean_old_kl, outermost
from surefoot.core.optimizer import AdamSettings, FlatAdam, finite, grouped
from surefoot.core.rollout import AuxiliaryLoss, Credit, LearnerState, Metrics, Policy, Rollout, map_tensors
from surefoot.core.steps.compiled import CompiledStep, PendingStep
from surefoot.core.steps.trpo import NaturalStep
from surefoot.core.traces import Recorder, Recording
from surefoot.core.update_metrics import UpdateMetrics, check_ratio_at_start, of_credit
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.functional import adapt_kl_penalty

Schedule = Literal["constant", "linear", "cosine"]
Optimizers = Mapping[str, FlatAdam | NaturalStep]

BETA_RANGE = 2.0**20
"""how far from its start an adapted β may go, as a factor both ways. The paper has no bound; without one, a KL that β does
not govern (a learning rate far too high, or one that has decayed to nothing) takes it to infinity or to 0, where it stays"""


class Learner:
    """A policy, its objective and its optimizers.

    policy         trained in place
    objective      the switches
    adam           for all parameters, or for all but the critic's where ``critic_adam`` is given
    critic_adam    a learning rate and gradient clip of the critic's own. Under a KL constraint the policy has no learning
                   rate, and the critic always an optimizer of its own: this one, or else ``adam``
    schedule       of the learning rate: "linear" and "cosine" fall to zero over the budget
    micro_batch    rows per backward pass, to bound memory; the gradient does not depend on it
    compiled_rows  run the updates of batches of exactly so many single steps as a compiled program
    warmup         share of the budget over which the learning rate first rises linearly from zero
    micro_batch_tokens  tokens per backward pass, padding included: rows of like length together, as many as fit
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        adam: AdamSettings,
        critic_adam: AdamSettings | None = None,
        schedule: Schedule = "constant",
        micro_batch: int | None = None,
        compiled_rows: int | None = None,
        warmup: float = 0.0,
        micro_batch_tokens: int | None = None,
    ) -> None:
        objective.require_complete()
        self.policy = policy
        self.objective = objective
        self.schedule = schedule
        self.warmup = warmup
        self.micro_batch, self.micro_batch_tokens = micro_batch, micro_batch_tokens
        constraint = objective.constraint
        groups = grouped(policy, objective, critic_adam is not None)
        if not groups.get("critic", True):
            field = "optimizer.critic_learning_rate" if constraint is None else "objective.trust_region='constraint'"
            raise SurefootError(
                f"{field}: the critic has no parameters of its own to move separately; "
                "unset it, or set network.shared_trunk = false"
            )
        moved = groups["policy"]
        self.optimizers: dict[str, FlatAdam | NaturalStep] = {
            "policy": FlatAdam(moved, adam) if constraint is None else NaturalStep(moved, constraint)
        }
        if "critic" in groups:
            self.optimizers["critic"] = FlatAdam(groups["critic"], critic_adam or adam)
        self.recorder: Recorder | None = None
        """who traces some of the updates; it changes none of them"""
        self.recording: Recording | None = None
        self.auxiliary_loss: AuxiliaryLoss | None = None
        """whose gradient is added to that of every minibatch that moves the policy, where there is one"""
        self.compiled = None
        if compiled_rows is not None:
            adams = {name: optimizer for name, optimizer in self.optimizers.items() if isinstance(optimizer, FlatAdam)}
            self.compiled = CompiledStep(policy, objective, adams, compiled_rows)

    def update(self, rollout: Rollout, credit: Credit, state: LearnerState) -> Metrics:
        """Improve the policy by one rollout and say what happened.

        Raises NotFiniteError, naming the term, when a loss or gradient is not finite: that step is not taken.
        """
        objective = self.objective
        # A collector that kept its graph, or views of parameters, would let gradient flow into the past.
        rollout, credit = map_tensors(Tensor.detach, (rollout, credit))
        if self.recorder is not None:
            self.recording = self.recorder.begin(rollout, credit, objective, state, self._clip_scale(state), self._beta(state))
        batch = rows_of(rollout, credit, numbered=self.recording is not None)
        assert batch.old_log_probs is not None or objective.reuse is None, "reusing a batch needs its old_log_probs"
        if objective.normalise_advantages == "batch":
            batch = self._normalised(batch)
        trail = UpdateMetrics()
        if objective.constraint is None:
            epochs, stopped = self._epochs(batch, self.optimizers, trail, rollout, state)
        else:
            self._natural_step(batch, trail, rollout, state)
            critic = {name: optimizer for name, optimizer in self.optimizers.items() if name == "critic"}
            epochs, stopped = self._epochs(batch, critic, trail, rollout, state) if critic else (0, False)
        if objective.penalty is not None:
            self._adapt_penalty(batch, trail, state)
        return self._metrics(trail, epochs, stopped, rollout, credit, state)

    def _epochs(
        self, batch: Batch, moving: Optimizers, trail: UpdateMetrics, rollout: Rollout, state: LearnerState
    ) -> tuple[int, bool]:
        """Passes over the batch, a step of ``moving`` per minibatch: how many were finished, and whether the KL ended them."""
        objective = self.objective
        epochs, minibatches = (objective.reuse.epochs, objective.reuse.minibatches) if objective.reuse else (1, 1)
        for epoch in range(epochs):
            for attempt in self._attempts(batch, minibatches, moving, state):
                if not trail.seen:
                    trail.ratio_at_start = check_ratio_at_start(attempt.ratios, rollout, self.policy.exact)
                trail.add(attempt.terms, attempt.ratios)
                if objective.target_kl is not None and self._kl(attempt.terms) > 1.5 * objective.target_kl:
                    return epoch, True
                self._check_finite(attempt.terms, attempt.norms, state)
                attempt.take()
                trail.took(attempt.norms)
                state.updates += 1
        return epochs, False

    def _attempts(self, batch: Batch, minibatches: int, moving: Optimizers, state: LearnerState) -> Iterator["PendingStep"]:
        """One pass: for each minibatch in a new order, the step that is due. The next is made when this one was taken."""
        if self.compiled is not None and self.compiled.fits(batch):
            scales = (self._rate_scale(state), self._clip_scale(state), self._beta(state))
            unnumbered = replace(batch, flat_index=None)
            for attempt in self.compiled.attempts(unnumbered, minibatches, scales, state.generators["shuffle"]):
                if self.recording is not None:
                    assert attempt.rows is not None
                    self._look_again(chosen(batch, attempt.rows), self.recording, state)
                yield attempt
            return
        for minibatch in shuffled(batch, minibatches, state.generators["shuffle"]):
            if self.objective.normalise_advantages == "minibatch":
                minibatch = self._normalised(minibatch)
            terms, ratios = self._gradient(minibatch, moving, state)
            if self.auxiliary_loss is not None and "policy" in moving:  # what the critic alone learns from has no part in it
                terms |= self.auxiliary_loss.add_gradient()
            norms = {name: optimizer.gradient_norm() for name, optimizer in moving.items()}

            def take(norms: dict[str, float] = norms) -> None:
                for name, optimizer in moving.items():
                    assert isinstance(optimizer, FlatAdam)
                    optimizer.step(norms[name], self._rate_scale(state))

            yield PendingStep(terms, ratios, norms, take)

    def _normalised(self, batch: Batch) -> Batch:
        """Advantages of mean 0 and variance 1."""
        moments = moments_of(batch)
        if self.recording is not None:
            self.recording.normalised_by(moments)
        return normalised(batch, moments)

    @torch.no_grad()
    def _look_again(self, minibatch: Batch, recording: Recording, state: LearnerState) -> None:
        """A compiled step keeps what it reads to itself: for a trace, the same minibatch at the same θ by the policy itself."""
        if self.objective.normalise_advantages == "minibatch":
            minibatch = self._normalised(minibatch)
        recording.visit(minibatch, self.policy(minibatch.inputs, minibatch.actions), state.updates)

    def _natural_step(self, batch: Batch, trail: UpdateMetrics, rollout: Rollout, state: LearnerState) -> None:
        """Move the policy by one step on the whole batch, and leave the critic alone."""
        optimizer = self.optimizers["policy"]
        assert isinstance(optimizer, NaturalStep)
        if self.objective.normalise_advantages == "minibatch":
            batch = self._normalised(batch)  # the only minibatch there is
        moving: Optimizers = {"policy": optimizer}
        terms, ratios = self._gradient(batch, moving, state)
        trail.ratio_at_start = check_ratio_at_start(ratios, rollout, self.policy.exact)
        norms = {"policy": optimizer.gradient_norm()}
        self._check_finite(terms, norms, state)
        trail.took(norms)
        parts, denominator = list(self._parts(batch)), global_count(batch, self.objective.aggregation)
        trail.outcome, end = optimizer.step(self.policy, parts, self.objective, denominator)
        trail.add(end.terms, end.ratios)
        state.updates += int(trail.outcome["step_taken"] or 0)

    def _adapt_penalty(self, batch: Batch, trail: UpdateMetrics, state: LearnerState) -> None:
        """Once per batch: how far θ has gone from θ_old over the whole of it, and what β is next."""
        penalty = self.objective.penalty
        assert penalty is not None
        denominator = global_count(batch, self.objective.aggregation)
        total = torch.zeros((), dtype=denominator.dtype, device=denominator.device)
        with torch.no_grad():
            for part in self._parts(batch):
                evaluation = self.policy(part.inputs, part.actions, part.mask)
                total += mean_old_kl(evaluation, part, self.objective, denominator)
        kl, beta = float(all_sum(total)), self._beta(state)
        trail.outcome = {"beta": beta, "kl_after": kl}
        if penalty.target is not None:
            adapted = adapt_kl_penalty(beta, kl, penalty.target)
            state.coefficients["beta"] = min(max(adapted, penalty.beta / BETA_RANGE), penalty.beta * BETA_RANGE)

    def _beta(self, state: LearnerState) -> float:
        """The weight of the KL penalty as it stands; 0 without one."""
        penalty = self.objective.penalty
        if penalty is None:
            return 0.0
        return penalty.beta if penalty.target is None else state.coefficients.get("beta", penalty.beta)

    def _gradient(
        self, minibatch: Batch, moving: Optimizers, state: LearnerState
    ) -> tuple[dict[str, float], tuple[float, float]]:
        """Sum the gradients of the micro-batches; the loss's terms over all ranks, this rank's smallest and largest ratio."""
        for optimizer in moving.values():
            optimizer.zero()
        everything = len(moving) == len(self.optimizers)
        wanted = None if everything else [p for optimizer in moving.values() for p in optimizer.parameters]
        denominator = global_count(minibatch, self.objective.aggregation)
        clip_scale, beta = self._clip_scale(state), self._beta(state)
        sums: list[Tensor] = []
        extremes: list[Tensor] = []
        parts: Iterable[Batch] = self._parts(minibatch)
        if self.objective.router_coefficient:
            parts = list(parts)
            self.policy.prepare([(part.inputs, part.actions, part.mask) for part in parts])
        for part in parts:
            evaluation = self.policy(part.inputs, part.actions, part.mask)
            total, terms, ratio = loss(
                evaluation, part, self.objective, denominator=denominator, clip_scale=clip_scale, beta=beta
            )
            if self.recording is not None:
                self.recording.visit(part, evaluation, state.updates)
            total.backward(inputs=wanted)  # type: ignore[no-untyped-call]
            sums.append(torch.stack(list(terms.values())))
            extremes.append(torch.stack(ratio.aminmax()))
        summed = all_sum(torch.stack(sums).sum(0) if len(sums) > 1 else sums[0])
        return dict(zip(terms, summed.tolist(), strict=True)), outermost(extremes)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """The micro-batches."""
        costs = None
        if self.micro_batch_tokens is not None and batch.mask is not None:
            costs = self.policy.costs(batch.inputs, batch.mask)
        return slices(batch, self.micro_batch, self.micro_batch_tokens, costs)

    def _check_finite(self, terms: dict[str, float], norms: dict[str, float], state: LearnerState) -> None:
        """Raise NotFiniteError where the loss, or the norm of a gradient, is not finite."""
        if not finite([*norms.values(), self._loss(terms)]):
            broken = [name for name, term in terms.items() if not math.isfinite(term)]
            what = f"{' and '.join(broken)} not finite" if broken else f"gradient norm {norms} with finite losses"
            raise NotFiniteError(f"update {state.updates + 1}: {what}; the step was not taken")

    def _clip_scale(self, state: LearnerState) -> float:
        clip = self.objective.clip
        return state.remaining if clip is not None and clip.schedule == "linear" else 1.0

    def _rate_scale(self, state: LearnerState) -> float:
        return rate_scale(state, self.schedule, self.warmup)

    def _loss(self, terms: dict[str, float]) -> float:
        """Finite where every term of the loss is; a metric beside them may be anything."""
        entropy = ("entropy",) if self.objective.entropy_coefficient else ()
        names = ("policy_loss", "penalty_kl", "value_loss", "reference_loss", "sft_loss", "router_loss", *entropy)
        return sum(terms[name] for name in names if name in terms)

    def _kl(self, terms: dict[str, float]) -> float:
        name = "kl_exact" if self.objective.kl_estimator == "exact" else "kl"
        if name not in terms:
            raise SurefootError("objective.kl_estimator='exact': this policy has no distribution to compare; set k3")
        return terms[name]

    def _metrics(
        self, trail: UpdateMetrics, epochs: int, stopped: bool, rollout: Rollout, credit: Credit, state: LearnerState
    ) -> Metrics:
        metrics = trail.summary() | trail.outcome
        metrics["epochs"] = float(epochs)
        metrics["stopped_early"] = float(stopped)
        for adam in self.optimizers.values():
            if isinstance(adam, FlatAdam):  # the policy's where it has one
                metrics["learning_rate"] = adam.settings.learning_rate * self._rate_scale(state)
                break
        return metrics | of_credit(rollout, credit, critic=self.objective.baseline == "critic")

    def state_dict(self) -> dict[str, Any]:
        """The moments of every optimizer."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


def rate_scale(state: LearnerState, schedule: Schedule, warmup: float) -> float:
    """What the learning rate is multiplied by now; 0 on the first batch of a warm-up."""
    if (done := 1 - state.remaining) < warmup:
        return done / warmup
    left = state.remaining / (1 - warmup)
    return {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[schedule]
