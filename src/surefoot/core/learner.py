"""Updates θ from one rollout: passes over minibatches with early stopping, and the metrics of the updates."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.algorithms import Objective
from surefoot.core.credit import preference_metrics
from surefoot.core.fingerprints import Fingerprints
from surefoot.core.minibatches import global_count, rows_of, with_penalised
from surefoot.core.objective import Batch, mean_old_kl
from surefoot.core.optimizer import AdamSettings, FlatParameters, Optimizer, Schedule, check_adaptive, scheduled
from surefoot.core.rollout import AuxiliaryLoss, Credit, LearnerState, Metrics, Policy, Rollout, map_tensors
from surefoot.core.steps import PendingStep, Stepper, UpdateContext
from surefoot.core.steps.eager import EagerPasses, EagerStepper
from surefoot.core.steps.trpo import NaturalStepper
from surefoot.core.traces import Recorder
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.functional import adapt_kl_penalty, adapt_learning_rate, masked_moments
from surefoot.functional.masking import keep_only
from surefoot.ranks.collectives import all_max, all_sum, merge_across_ranks, sum_count

BETA_RANGE = 2.0**20
"""bounds of an adapted β, as a factor of its first value. The paper has no bound; without one, β goes to infinity or 0 if it
can't control the KL (a learning rate that is far too high, or has decayed to nothing)"""

ADAPTED = "adapted_learning_rate_factor"
"""the name in ``LearnerState.coefficients`` of the scale that schedule = "adaptive" has reached"""
RATE_SCALE = "learning_rate_factor"
"""the name in ``LearnerState.coefficients`` of the scale that a callback has set"""

START_TOLERANCE = 1e-4
"""largest distance of the ratio from 1 before the first step, for a policy that computes in float32, unless rounding explains
more"""

ROUNDING = 8.0
"""two passes may differ by this many times the dtype's epsilon, relative to the largest term of a log-probability"""


def eager_stepper(passes: EagerPasses, optimizers: Mapping[str, Optimizer], natural: FlatParameters | None) -> Stepper:
    """Steps by autograd: those of Adam, or the natural step of the policy and then those of its critic."""
    if natural is None:
        return EagerStepper(passes, optimizers)
    if not optimizers:
        return NaturalStepper(passes, natural)
    (critic,) = optimizers.values()  # the policy and the critic move separately
    return NaturalStepper(passes, natural, EagerStepper(passes, optimizers, critic.parameters), natural.parameters)


@dataclass(frozen=True)
class LearnerSettings:
    """How a learner moves θ."""

    adam: AdamSettings
    """for all parameters, or for all but the critic's if ``critic_adam`` is given"""
    critic_adam: AdamSettings | None = None
    """learning rate and gradient clip of the critic. Under a KL constraint the policy has no learning rate, and the critic
    always has its own optimizer, with these settings or else those of ``adam``"""
    schedule: Schedule = "constant"
    """of the learning rate: "linear" and "cosine" fall to zero over the budget, "adaptive" follows the KL; or a function"""
    warmup: float = 0.0
    """fraction of the budget over which the learning rate rises linearly from zero, from step to step"""
    kl_target: float = 0.01
    """the KL that schedule = "adaptive" aims at"""
    clip_schedule: Schedule | None = None
    """of the clip's bounds, instead of the name in the objective; may be a function"""
    micro_batch: int | None = None
    """rows per backward pass, to bound memory; the gradient does not depend on it"""
    micro_batch_tokens: int | None = None
    """tokens per backward pass, padding included: rows of similar length together, as many as fit"""
    stepper: Callable[[EagerPasses, Mapping[str, Optimizer], FlatParameters | None], Stepper] = eager_stepper
    """makes what computes the steps: from its passes, the optimizers, and what a natural step moves"""


class Learner:
    """A policy, which is trained in place, its objective and its optimizers.

    Raises SurefootError if the critic needs its own optimizer but shares all of its parameters with the policy.
    """

    def __init__(self, policy: Policy, objective: Objective, settings: LearnerSettings) -> None:
        objective.require_complete()
        self.policy, self.objective, self.settings = policy, objective, settings
        if settings.schedule == "adaptive":
            check_adaptive(objective, settings.warmup)
        groups = parameter_groups(policy, objective, settings.critic_adam is not None)
        if not groups.get("critic", True):
            constrained = objective.constraint is not None
            field = "objective.trust_region='constraint'" if constrained else "optimizer.critic_learning_rate"
            raise SurefootError(
                f"{field}: the critic has no parameters of its own to move separately; "
                "unset it, or set network.shared_trunk = false"
            )
        self.natural = None if objective.constraint is None else FlatParameters(groups.pop("policy"))
        """what a natural step moves"""
        adam = {"policy": settings.adam, "critic": settings.critic_adam or settings.adam}
        self.steppable = {name: policy.optimizer(parameters, adam[name]) for name, parameters in groups.items()}
        """the optimizers that have a learning rate"""
        self.optimizers: dict[str, FlatParameters | Optimizer] = {} if self.natural is None else {"policy": self.natural}
        self.optimizers |= self.steppable
        self.passes = EagerPasses(policy, objective, settings.micro_batch, settings.micro_batch_tokens)
        self.stepper = settings.stepper(self.passes, self.steppable, self.natural)
        self.recorder: Recorder | None = None
        """traces some of the updates, without changing them"""
        self.fingerprints: Fingerprints | None = None
        """takes those of updates, without changing them"""
        self.auxiliary_loss: AuxiliaryLoss | None = None
        """a loss whose gradient is added to every step of the policy's Adam"""

    def use_eager(self) -> None:
        """Go on with steps by autograd."""
        self.stepper = eager_stepper(self.passes, self.steppable, self.natural)

    def update(self, rollout: Rollout, credit: Credit, state: LearnerState) -> Metrics:
        """Update the policy on one rollout and return metrics of the update.

        Raises NotFiniteError, which names the term, if a loss or gradient is not finite; that step is not taken.
        """
        objective = self.objective
        # Otherwise backward() would reach the graph of the rollout.
        rollout, credit = map_tensors(Tensor.detach, (rollout, credit))
        due = self.fingerprints if self.fingerprints is not None and self.fingerprints.due(state) else None
        if due is not None:
            due.begin(self.optimizers.values(), rollout, credit)
        context = self._context(rollout, credit, state)
        batch = self.stepper.simplified(rows_of(rollout, credit, numbered=context.recording is not None))
        assert batch.old_log_probs is not None or not objective.reads_old_log_probs, "reusing a batch needs its old_log_probs"
        if objective.penalty is not None and objective.penalty.fraction < 1:
            batch = with_penalised(batch, objective.penalty.fraction)
        if objective.normalise_advantages == "batch":
            batch = context.normalised(batch)
        steps = self._take_steps(batch, context, rollout, due)
        if due is not None:
            due.end(self.optimizers.values())
        if objective.penalty is not None:
            steps.outcome = self._adapt_penalty(replace(batch, penalised=None), context)
        metrics = steps.summary()
        if (first := next(iter(self.steppable.values()), None)) is not None:  # the policy's if it has one
            metrics["learning_rate"] = first.learning_rate
        if objective.baseline == "pair":
            metrics |= preference_metrics(rollout, credit, objective)
        return metrics | credit_metrics(rollout, credit, critic=objective.baseline == "critic")

    def _take_steps(self, batch: Batch, context: UpdateContext, rollout: Rollout, due: Fingerprints | None) -> "UpdateMetrics":
        """Take one step after another, until the KL is too large."""
        taken, state, largest_kl = UpdateMetrics(), context.state, self.objective.largest_kl
        for step in self.stepper.steps(batch, context):
            if not taken.terms:
                taken.ratio_at_start = check_ratio_at_start(step.ratios, rollout, self.policy.exact)
                if due is not None:
                    due.first_step(step, context.orders)
            taken.stopped = largest_kl is not None and self._kl(step) > largest_kl
            if taken.stopped:
                taken.add(step)
                break
            self._check_finite(step, state)
            if self.settings.schedule == "adaptive":
                self._adapt_rate(step, state)
            with state.timer.detail("optimizer"):
                state.updates += step.take()
            taken.add(step)
            for name, norm in step.norms.items():
                taken.norms.setdefault(name, []).append(norm)
        return taken

    def _context(self, rollout: Rollout, credit: Credit, state: LearnerState) -> UpdateContext:
        penalty, clip_scale = self.objective.penalty, self._clip_scale(state.remaining)
        beta = 0.0 if penalty is None else penalty.beta
        if penalty is not None and penalty.target is not None:
            beta = state.coefficients.get("beta", penalty.beta)
        recording = None
        if self.recorder is not None:
            recording = self.recorder.begin(rollout, credit, self.objective, state, clip_scale, beta)
        rates = self._rates(rollout, state)
        return UpdateContext(state, rates, clip_scale, beta, recording, self.auxiliary_loss)

    def _rates(self, rollout: Rollout, state: LearnerState) -> Callable[[int], float]:
        """The factor of the learning rate at each step on a rollout: of the schedule, the same for all, and of the warm-up.

        Each step counts an equal part of the rollout's share of the budget; the warm-up uses what is used after the step.
        """
        remaining, factor = state.remaining, state.coefficients.get(RATE_SCALE, 1.0)
        if self.settings.schedule == "adaptive":
            factor *= state.coefficients.get(ADAPTED, 1.0)
        else:
            factor *= scheduled("optimizer.schedule", self.settings.schedule, min(1.0, remaining / (1 - self.settings.warmup)))
        done = 1 - remaining
        if done >= self.settings.warmup:
            return lambda step: factor
        share = sum_count(rollout.steps, rollout.rewards) / state.total_steps / math.prod(self.objective.passes)
        return lambda step: factor * min(1.0, (done + (step + 1) * share) / self.settings.warmup)

    def _clip_scale(self, remaining: float) -> float:
        """The factor of the clip's bounds; 1 without a clip."""
        if self.objective.clip is None:
            return 1.0
        schedule: Any = self.settings.clip_schedule or self.objective.clip.schedule
        return scheduled("objective.trust_region.schedule", schedule, remaining)

    def _adapt_penalty(self, batch: Batch, context: UpdateContext) -> Metrics:
        """Measure the KL from θ_old over the whole batch, and set the next β from it."""
        penalty, beta = self.objective.penalty, context.beta
        assert penalty is not None
        denominator = global_count(batch, self.objective.aggregation)
        total = torch.zeros((), dtype=denominator.dtype, device=denominator.device)
        with torch.no_grad(), self.policy.gathered():
            for part in self.passes.parts(batch):
                evaluation = self.policy(part.inputs, part.actions, part.mask)
                total += mean_old_kl(evaluation, part, self.objective, denominator)
        kl = float(all_sum(total))
        if penalty.target is not None:
            adapted = adapt_kl_penalty(beta, kl, penalty.target)
            context.state.coefficients["beta"] = min(max(adapted, penalty.beta / BETA_RANGE), penalty.beta * BETA_RANGE)
        return {"beta": beta, "kl_after": kl}

    def _adapt_rate(self, step: PendingStep, state: LearnerState) -> None:
        """Set the learning rate of this step, and of those after it, from the KL before it."""
        assert step.rate_scale is not None, "a recipe with another engine is rejected"
        base = next(iter(self.steppable.values())).settings.learning_rate
        factor = (
            adapt_learning_rate(base * state.coefficients.get(ADAPTED, 1.0), self._kl(step), self.settings.kl_target) / base
        )
        state.coefficients[ADAPTED] = factor
        step.rate_scale = factor * state.coefficients.get(RATE_SCALE, 1.0)

    def _check_finite(self, step: PendingStep, state: LearnerState) -> None:
        """Raise NotFiniteError if the loss, or the norm of a gradient, is not finite."""
        if not all(map(math.isfinite, (*step.norms.values(), *step.terms.values()))):
            broken = [name for name, x in (step.terms | step.metrics).items() if not math.isfinite(x)]
            what = f"{' and '.join(broken)} not finite" if broken else f"gradient norm {step.norms} with finite losses"
            raise NotFiniteError(f"update {state.updates + 1}: {what}; the step was not taken")

    def _kl(self, step: PendingStep) -> float:
        name = self.objective.kl_metric
        if name not in step.metrics:
            raise SurefootError("objective.kl_estimator='exact': this policy has no distribution to compare; set k3")
        return step.metrics[name]

    def resting(self) -> AbstractContextManager[None]:
        """Free memory of the device for a phase without updates."""
        return self.policy.resting(self.steppable.values())

    def state_dict(self) -> dict[str, Any]:
        """The moments of every optimizer; a policy under a KL constraint has none."""
        return {name: self.steppable[name].state_dict() if name in self.steppable else {} for name in self.optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name, optimizer in self.steppable.items():
            optimizer.load_state_dict(state[name])


def parameter_groups(policy: Policy, objective: Objective, critic_rate: bool) -> dict[str, list[nn.Parameter]]:
    """The parameters of each optimizer, by name.

    Parameters that only the value loss reaches form the group "critic" if they have their own learning rate (``critic_rate``)
    or the policy moves under a KL constraint. All others form the group "policy".
    """
    apart = critic_rate or (objective.constraint is not None and objective.baseline == "critic")
    critic = list(policy.critic_parameters()) if apart else []
    of_critic = {id(p) for p in critic}
    rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in of_critic]
    return {"policy": rest, "critic": critic} if apart else {"policy": rest}


class UpdateMetrics:
    """Metrics of the steps on one rollout: terms and metrics of the loss, ratios and gradient norms."""

    def __init__(self) -> None:
        self.terms: list[dict[str, float]] = []
        self.ratios: list[tuple[float, float]] = []
        self.norms: dict[str, list[float]] = {}
        """of the steps that were taken"""
        self.ratio_at_start = 1.0
        self.outcome: Metrics = {}
        self.epochs, self.stopped = 0, False
        """finished passes over the batch; whether the KL ended them"""

    def add(self, step: PendingStep) -> None:
        """Add a step, whether taken or not."""
        self.terms.append(step.terms | step.metrics)
        self.ratios.append(step.ratios)
        self.outcome |= step.outcome
        self.epochs = step.epoch if self.stopped else step.epoch + 1  # a natural step is epoch −1

    def summary(self) -> Metrics:
        """Means over the steps, and the smallest and largest ratio over all ranks."""
        metrics: Metrics = {name: finite_or_none(sum(t[name] for t in self.terms) / len(self.terms)) for name in self.terms[0]}
        smallest, largest = zip(*self.ratios, strict=True)
        metrics["ratio_min"], metrics["ratio_max"] = range_over_ranks(min(smallest), max(largest))
        metrics["ratio_at_start"] = self.ratio_at_start
        for name, norms in self.norms.items():
            metrics[f"gradient_norm_{name}"] = sum(norms) / len(norms)
        return metrics | self.outcome | {"epochs": float(self.epochs), "stopped_early": float(self.stopped)}


def credit_metrics(rollout: Rollout, credit: Credit, critic: bool) -> Metrics:
    """Mean and standard deviation of the advantages, and the explained variance of the critic, over all ranks."""
    metrics: Metrics = {}
    if critic:  # 1 − Var(R̂ − V) / Var(R̂)
        residual = merge_across_ranks(masked_moments(credit.returns - rollout.values, rollout.mask))
        spread = merge_across_ranks(masked_moments(credit.returns, rollout.mask))
        metrics["explained_variance"] = finite_or_none(1 - residual.var / spread.var) if spread.var > 0 else None
    moments = merge_across_ranks(masked_moments(credit.advantages, rollout.mask))
    return metrics | {"advantage_mean": finite_or_none(moments.mean), "advantage_std": finite_or_none(moments.var.sqrt())}


def check_ratio_at_start(ratios: tuple[float, float], rollout: Rollout, exact: bool) -> float:
    """The ratio furthest from 1 before the first step on a batch, which must be 1.

    exact   whether the policy computes in float32 or better

    Raises SurefootError if an exact ratio is not 1 up to rounding.
    """
    smallest, largest = range_over_ranks(*ratios)
    furthest = largest if largest - 1 > 1 - smallest else smallest
    if rollout.old_log_probs is None:
        return 1.0
    exact = exact and rollout.old_log_probs.dtype in (torch.float32, torch.float64)
    off = abs(furthest - 1)
    if exact and off > START_TOLERANCE and off > (tolerance := max(START_TOLERANCE, rounding(rollout))):
        raise SurefootError(
            f"ratio_at_start={furthest:.6f}: before the first step π_θ must equal π_old (ratio 1 ± {tolerance:g}); the policy "
            "scores actions differently in training than in the rollout (dropout, batch-dependent layers, a changed normaliser)"
        )
    return furthest


def rounding(rollout: Rollout) -> float:
    """How far from 1 rounding may take a ratio before the first step, on any rank.

    It grows with the terms of a log-probability, which are large for sharp policies and for hundreds of actions at a time.
    """
    assert rollout.old_log_probs is not None
    magnitude = getattr(rollout.old_distribution, "magnitude", None)
    terms = rollout.old_log_probs.abs() if magnitude is None else magnitude(rollout.actions)
    largest = float(all_max(keep_only(terms, rollout.mask).amax()))
    return ROUNDING * torch.finfo(rollout.old_log_probs.dtype).eps * largest


def range_over_ranks(smallest: float, largest: float) -> tuple[float, float]:
    """The smallest and the largest number over all ranks."""
    lowest, highest = all_max(torch.tensor([-smallest, largest])).tolist()
    return -lowest, highest


def finite_or_none(tensor: Tensor | float) -> float | None:
    """A metric's value; None (null in JSON) if it is not finite."""
    value = float(tensor)
    return value if math.isfinite(value) else None
