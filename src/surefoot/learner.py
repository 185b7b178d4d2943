"""One batch of experience into updates of θ: epochs × minibatches × micro-batches and the early stop, or a natural step."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.algorithms import Objective
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.functional import adapt_kl_penalty, masked_moments, whiten
from surefoot.natural_step import NaturalStep
from surefoot.objective import Batch, loss, mean_old_kl
from surefoot.optimizer import AdamSettings, FlatAdam, finite
from surefoot.rollout import Credit, LearnerState, Metrics, Policy, Rollout, map_tensors
from surefoot.run.distributed import all_max, all_sum, merge_across_ranks, world_size

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
    schedule       of the learning rate: "linear" falls to zero over the budget
    micro_batch    rows per backward pass, to bound memory; the gradient does not depend on it
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        adam: AdamSettings,
        critic_adam: AdamSettings | None = None,
        schedule: Literal["constant", "linear"] = "constant",
        micro_batch: int | None = None,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.schedule = schedule
        self.micro_batch = micro_batch
        constraint = objective.constraint
        everything = [p for p in policy.parameters() if p.requires_grad]
        if constraint is not None and objective.baseline == "critic":
            critic_adam = critic_adam or adam
        critic = [] if critic_adam is None else list(policy.critic_parameters())
        if critic_adam is not None and not critic:
            raise SurefootError(
                "objective.trust_region='constraint': the critic is fitted apart from the policy, and this one has no "
                "parameters of its own; give it some (network.shared_trunk = false)"
                if constraint is not None
                else "optimizer.critic_learning_rate: the critic has no parameters of its own to move separately; "
                "unset it, or set network.shared_trunk = false"
            )
        own = {id(p) for p in critic}
        rest = [p for p in everything if id(p) not in own]
        self.optimizers: dict[str, FlatAdam | NaturalStep] = {
            "policy": FlatAdam(rest, adam) if constraint is None else NaturalStep(rest, constraint)
        }
        if critic_adam is not None:
            self.optimizers["critic"] = FlatAdam(critic, critic_adam)

    def update(self, rollout: Rollout, credit: Credit, state: LearnerState) -> Metrics:
        """Improve the policy by one rollout and say what happened.

        Raises NotFiniteError, naming the term, when a loss or gradient is not finite: that step is not taken.
        """
        objective = self.objective
        # A collector that kept its graph, or views of parameters, would let gradient flow into the past.
        rollout, credit = map_tensors(Tensor.detach, (rollout, credit))
        batch = rows_of(rollout, credit)
        if objective.normalise_advantages == "batch":
            batch = normalised(batch)
        trail = _Trail()
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
        self, batch: Batch, moving: Optimizers, trail: "_Trail", rollout: Rollout, state: LearnerState
    ) -> tuple[int, bool]:
        """Passes over the batch, a step of ``moving`` per minibatch: how many were finished, and whether the KL ended them."""
        objective = self.objective
        epochs, minibatches = (objective.reuse.epochs, objective.reuse.minibatches) if objective.reuse else (1, 1)
        for epoch in range(epochs):
            for minibatch in shuffled(batch, minibatches, state.generators["shuffle"]):
                if objective.normalise_advantages == "minibatch":
                    minibatch = normalised(minibatch)
                terms, ratio = self._gradient(minibatch, moving, state)
                if not trail.seen:
                    trail.ratio_at_start = _check_ratio_at_start(ratio, rollout)
                trail.add(terms, ratio)
                if objective.target_kl is not None and self._kl(terms) > 1.5 * objective.target_kl:
                    return epoch, True
                self._step(terms, moving, trail, state)
        return epochs, False

    def _natural_step(self, batch: Batch, trail: "_Trail", rollout: Rollout, state: LearnerState) -> None:
        """Move the policy by one step on the whole batch, and leave the critic alone."""
        optimizer = self.optimizers["policy"]
        assert isinstance(optimizer, NaturalStep)
        if self.objective.normalise_advantages == "minibatch":
            batch = normalised(batch)  # the only minibatch there is
        moving: Optimizers = {"policy": optimizer}
        terms, ratio = self._gradient(batch, moving, state)
        trail.ratio_at_start = _check_ratio_at_start(ratio, rollout)
        trail.norms["policy"] = list(self._norms(terms, moving, state).values())
        parts, denominator = list(slices(batch, self.micro_batch)), global_count(batch, self.objective.aggregation)
        trail.outcome, end = optimizer.step(self.policy, parts, self.objective, denominator)
        trail.add(end.terms, end.ratio)
        state.updates += int(trail.outcome["step_taken"] or 0)

    def _adapt_penalty(self, batch: Batch, trail: "_Trail", state: LearnerState) -> None:
        """Once per batch: how far θ has gone from θ_old over the whole of it, and what β is next."""
        penalty = self.objective.penalty
        assert penalty is not None
        denominator = global_count(batch, self.objective.aggregation)
        total = torch.zeros((), dtype=denominator.dtype, device=denominator.device)
        with torch.no_grad():
            for part in slices(batch, self.micro_batch):
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

    def _gradient(self, minibatch: Batch, moving: Optimizers, state: LearnerState) -> tuple[dict[str, Tensor], Tensor]:
        """Sum the gradients of the micro-batches; give the loss's terms over all ranks, and this rank's ratios."""
        for optimizer in moving.values():
            optimizer.zero()
        everything = len(moving) == len(self.optimizers)
        wanted = None if everything else [p for optimizer in moving.values() for p in optimizer.parameters]
        denominator = global_count(minibatch, self.objective.aggregation)
        clip = self.objective.clip
        clip_scale = state.remaining if clip is not None and clip.schedule == "linear" else 1.0
        beta = self._beta(state)
        totals: dict[str, Tensor] = {}
        ratios = []
        for part in slices(minibatch, self.micro_batch):
            evaluation = self.policy(part.inputs, part.actions, part.mask)
            total, terms, ratio = loss(
                evaluation, part, self.objective, denominator=denominator, clip_scale=clip_scale, beta=beta
            )
            total.backward(inputs=wanted)  # type: ignore[no-untyped-call]
            totals = {name: totals[name] + term if totals else term for name, term in terms.items()}
            ratios.append(ratio)
        summed = all_sum(torch.stack(list(totals.values())))
        return dict(zip(totals, summed.unbind(), strict=True)), torch.cat(ratios)

    def _norms(self, terms: dict[str, Tensor], moving: Optimizers, state: LearnerState) -> dict[str, float]:
        """The norms of the gradients over all ranks. Raises NotFiniteError where one, or the loss, is not finite."""
        norms = {name: optimizer.gradient_norm() for name, optimizer in moving.items()}
        if not finite([*norms.values(), self._loss(terms)]):
            broken = [name for name, term in terms.items() if not term.isfinite()]
            what = f"{' and '.join(broken)} not finite" if broken else f"gradient norm {norms} with finite losses"
            raise NotFiniteError(f"update {state.updates + 1}: {what}; the step was not taken")
        return norms

    def _step(self, terms: dict[str, Tensor], moving: Optimizers, trail: "_Trail", state: LearnerState) -> None:
        norms = self._norms(terms, moving, state)
        for name, optimizer in moving.items():
            assert isinstance(optimizer, FlatAdam)
            optimizer.step(norms[name], self._rate_scale(state))
            trail.norms.setdefault(name, []).append(norms[name])
        state.updates += 1

    def _rate_scale(self, state: LearnerState) -> float:
        return state.remaining if self.schedule == "linear" else 1.0

    def _loss(self, terms: dict[str, Tensor]) -> float:
        """Finite where every term of the loss is; a metric beside them may be anything."""
        entropy = ("entropy",) if self.objective.entropy_coefficient else ()
        names = ("policy_loss", "penalty_kl", "value_loss", "reference_loss", *entropy)
        return float(sum(terms[name] for name in names if name in terms))

    def _kl(self, terms: dict[str, Tensor]) -> float:
        name = "kl_exact" if self.objective.kl_estimator == "exact" else "kl"
        if name not in terms:
            raise SurefootError("objective.kl_estimator='exact': this policy has no distribution to compare; set k3")
        return float(terms[name])

    def _metrics(
        self, trail: "_Trail", epochs: int, stopped: bool, rollout: Rollout, credit: Credit, state: LearnerState
    ) -> Metrics:
        metrics = trail.summary() | trail.outcome
        metrics["epochs"] = float(epochs)
        metrics["stopped_early"] = float(stopped)
        for adam in self.optimizers.values():
            if isinstance(adam, FlatAdam):  # the policy's where it has one
                metrics["learning_rate"] = adam.settings.learning_rate * self._rate_scale(state)
                break
        if self.objective.baseline == "critic":
            metrics["explained_variance"] = _explained_variance(rollout, credit)
        moments = merge_across_ranks(masked_moments(credit.advantages, rollout.mask))
        metrics["advantage_mean"] = number(moments.mean)
        metrics["advantage_std"] = number(moments.var.sqrt())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The moments of every optimizer."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


class _Trail:
    """What the updates on one rollout did, kept as tensors until the end: reading a number is a synchronisation."""

    def __init__(self) -> None:
        self.terms: list[dict[str, Tensor]] = []
        self.extremes: list[Tensor] = []
        self.norms: dict[str, list[float]] = {}
        self.ratio_at_start = 1.0
        self.outcome: Metrics = {}

    @property
    def seen(self) -> bool:
        return bool(self.terms)

    def add(self, terms: dict[str, Tensor], ratio: Tensor) -> None:
        self.terms.append(terms)
        self.extremes.append(torch.stack([ratio.amax(), -ratio.amin()]))

    def summary(self) -> Metrics:
        metrics: Metrics = {name: number(torch.stack([t[name] for t in self.terms]).mean()) for name in self.terms[0]}
        highest, lowest = all_max(torch.stack(self.extremes).amax(0)).tolist()
        metrics["ratio_max"], metrics["ratio_min"] = highest, -lowest
        metrics["ratio_at_start"] = self.ratio_at_start
        for name, norms in self.norms.items():
            metrics[f"gradient_norm_{name}"] = sum(norms) / len(norms)
        return metrics


def number(tensor: Tensor) -> float | None:
    """A metric's value; None (null) where it is not defined, such as the explained variance of constant returns."""
    value = float(tensor)
    return value if math.isfinite(value) else None


def rows_of(rollout: Rollout, credit: Credit) -> Batch:
    """The rows that are shuffled: kept single steps [N], or whole rows [N, T] with their mask."""
    batch = Batch(
        inputs=rollout.inputs,
        actions=rollout.actions,
        mask=rollout.mask,
        old_log_probs=rollout.old_log_probs,
        advantages=credit.advantages,
        returns=credit.returns,
        old_values=rollout.values,
        old_distribution=rollout.old_distribution,
        ref_log_probs=rollout.ref_log_probs,
    )
    if rollout.unit == "row":
        return batch
    kept = rollout.mask.reshape(-1).nonzero().squeeze(-1)
    steps: Batch = map_tensors(lambda x: x.flatten(0, 1).index_select(0, kept), batch)
    return Batch(**{**vars(steps), "mask": None})


def shuffled(batch: Batch, parts: int, generator: torch.Generator) -> Iterator[Batch]:
    """The rows in a new random order, in ``parts`` nearly equal parts. The order is drawn on the CPU from ``generator``."""
    order = torch.randperm(len(batch.advantages), generator=generator).to(batch.advantages.device)
    if len(order) < parts and world_size() > 1:  # a rank that skips a minibatch would leave the others waiting
        raise SurefootError(f"objective.reuse.minibatches={parts}: this rank has only {len(order)} rows; use fewer")
    # One gather for the whole pass; the parts are views of it.
    whole = map_tensors(lambda x: x.index_select(0, order), batch) if parts > 1 else batch
    size, larger = divmod(len(order), parts)
    start = 0
    for part in range(parts):
        end = start + size + (part < larger)
        if end > start:
            yield rows(whole, start, end)
        start = end


def slices(batch: Batch, size: int | None) -> Iterator[Batch]:
    """Consecutive micro-batches of at most ``size`` rows."""
    total = len(batch.advantages)
    step = size or total
    for start in range(0, total, step):
        yield rows(batch, start, min(start + step, total)) if step < total else batch


def rows(batch: Batch, start: int, end: int) -> Batch:
    """Rows start … end − 1, as views."""
    part: Batch = map_tensors(lambda x: x[start:end], batch)
    return part


def normalised(batch: Batch) -> Batch:
    """The batch with advantages of mean 0 and variance 1 over its kept entries on all ranks."""
    moments = merge_across_ranks(masked_moments(batch.advantages, batch.mask))
    return Batch(**{**vars(batch), "advantages": whiten(batch.advantages, batch.mask, moments=moments)})


def global_count(batch: Batch, aggregation: str) -> Tensor:
    """What ``aggregate`` divides by: kept entries, or sequences with one, over all ranks."""
    kept = torch.ones_like(batch.advantages) if batch.mask is None else batch.mask.to(batch.advantages.dtype)
    mine = kept.sum() if aggregation == "token-mean" else (kept.sum(-1) > 0).sum().to(kept.dtype)
    return all_sum(mine).clamp(min=1)


def _explained_variance(rollout: Rollout, credit: Credit) -> float | None:
    """That of the critic at the rollout, over all ranks."""
    residual = merge_across_ranks(masked_moments(credit.returns - rollout.values, rollout.mask))
    spread = merge_across_ranks(masked_moments(credit.returns, rollout.mask))
    return number(1 - residual.var / spread.var) if spread.var > 0 else None


def _check_ratio_at_start(ratio: Tensor, rollout: Rollout) -> float:
    """The ratio furthest from 1 before anything moved. It is 1 unless something is wrong, so it is checked on every batch."""
    highest, lowest = all_max(torch.stack([ratio.amax(), -ratio.amin()])).tolist()
    furthest: float = highest if highest - 1 > 1 + lowest else -lowest
    exact = ratio.dtype in (torch.float32, torch.float64) and rollout.behaviour_log_probs is None
    if exact and abs(furthest - 1) > 1e-4:
        raise SurefootError(
            f"ratio_at_start={furthest:.6f}: before the first step π_θ must equal π_old (ratio 1 ± 1e-4); the policy scores "
            "actions differently in training than in the rollout (dropout, batch-dependent layers, or a changed normaliser)"
        )
    return furthest
