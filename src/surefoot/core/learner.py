"""Updates θ from one rollout: passes over minibatches with early stopping, and the metrics of the updates."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.accel.steps import CompiledGradients, CompiledStepper
from surefoot.accel.trpo import CompiledPasses
from surefoot.core.algorithms import Objective
from surefoot.core.credit import preference_metrics
from surefoot.core.minibatches import global_count, rows_of, with_penalised
from surefoot.core.objective import Batch, mean_old_kl
from surefoot.core.optimizer import AdamSettings, FlatOptimizer, FlatParameters, parameter_groups
from surefoot.core.rollout import AuxiliaryLoss, Credit, LearnerState, Metrics, Policy, Rollout, map_tensors
from surefoot.core.steps import EagerStep, EagerStepper, GradientSum, PendingStep, Stepper, UpdateContext
from surefoot.core.steps.trpo import EagerPasses, NaturalStepper
from surefoot.core.traces import Recorder
from surefoot.errors import NotFiniteError, SurefootError, cause_of
from surefoot.functional import adapt_kl_penalty, adapt_learning_rate, masked_moments
from surefoot.functional.masking import keep_only
from surefoot.ranks.collectives import all_max, all_sum, merge_across_ranks, sum_count, world_size
from surefoot.sharding import gathered, is_sharded
from surefoot.sharding.idle import leaving
from surefoot.sharding.optimizer import ShardedOptimizer

ScheduleFunction = Callable[[float], float]
"""from the remaining share of the budget, 1 at the start, to a factor"""
Schedule = Literal["constant", "linear", "cosine", "adaptive"] | ScheduleFunction

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
"""by how many units in the last place of all that makes a log-probability two passes may differ"""


class Learner:
    """A policy, its objective and its optimizers.

    policy              trained in place
    objective           what to optimise
    adam                for all parameters, or for all but the critic's if ``critic_adam`` is given
    critic_adam         learning rate and gradient clip of the critic. Under a KL constraint the policy has no learning rate,
                        and the critic always has its own optimizer, with these settings or else those of ``adam``
    schedule            of the learning rate: "linear" and "cosine" fall to zero over the budget, "adaptive" follows the KL; or
                        a function
    micro_batch         rows per backward pass, to bound memory; the gradient does not depend on it
    compiled_rows       compile the steps on batches of exactly this many rows (single steps, sequences) of all ranks
    warmup              fraction of the budget over which the learning rate rises linearly from zero, from step to step
    micro_batch_tokens  tokens per backward pass, padding included: rows of similar length together, as many as fit
    clip_schedule       of the clip's bounds, instead of the name in the objective; may be a function
    kl_target           the KL that schedule = "adaptive" aims at

    Raises SurefootError if the critic needs its own optimizer but shares all of its parameters with the policy.
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
        clip_schedule: Schedule | None = None,
        kl_target: float = 0.01,
    ) -> None:
        objective.require_complete()
        self.policy, self.objective = policy, objective
        self.schedule, self.warmup, self.clip_schedule, self.kl_target = schedule, warmup, clip_schedule, kl_target
        constraint = objective.constraint
        if schedule == "adaptive":
            check_adaptive(objective, warmup)
        groups = parameter_groups(policy, objective, critic_adam is not None)
        if not groups.get("critic", True):
            field = "optimizer.critic_learning_rate" if constraint is None else "objective.trust_region='constraint'"
            raise SurefootError(
                f"{field}: the critic has no parameters of its own to move separately; "
                "unset it, or set network.shared_trunk = false"
            )
        optimizer_of = ShardedOptimizer if is_sharded(policy) else FlatOptimizer
        self.optimizers: dict[str, FlatParameters | ShardedOptimizer] = {
            "policy": optimizer_of(groups["policy"], adam) if constraint is None else FlatParameters(groups["policy"])
        }
        if "critic" in groups:
            self.optimizers["critic"] = optimizer_of(groups["critic"], critic_adam or adam)
        self.steppable: dict[str, FlatOptimizer | ShardedOptimizer] = {
            name: optimizer
            for name, optimizer in self.optimizers.items()
            if isinstance(optimizer, FlatOptimizer | ShardedOptimizer)
        }
        self.gradients = GradientSum(policy, objective, micro_batch, micro_batch_tokens)
        self.natural: NaturalStepper | None = None
        if constraint is None:
            self.eager = EagerStepper(self.gradients, self.steppable)
        else:  # the policy and the critic move separately
            self.eager = EagerStepper(self.gradients, self.steppable, groups.get("critic"))
            only = groups["policy"] if "critic" in groups else None
            flat = self.optimizers["policy"]
            assert isinstance(flat, FlatParameters), "natural steps are for control, which is never sharded"
            self.natural = NaturalStepper(policy, EagerPasses(self.gradients, flat), flat, constraint, only)
        self.compiled_rows = None if compiled_rows is None else compiled_rows // world_size()
        self.compiled = None if self.compiled_rows is None else self._compiled_stepper(self.compiled_rows, micro_batch)
        self.compiled_natural = None if self.compiled_rows is None else self._compiled_natural(self.compiled_rows, micro_batch)
        self.recorder: Recorder | None = None
        """traces some of the updates, without changing them"""
        self.auxiliary_loss: AuxiliaryLoss | None = None
        """a loss whose gradient is added to every step of the policy's Adam"""

    def _compiled_stepper(self, rows: int, micro_batch: int | None) -> Stepper | None:
        """Compiled steps; or compiled gradients with eager steps, for micro-batches and for ranks, which sum gradients between
        the two. None if the minibatches or their parts differ in size.
        """
        flats = {name: each for name, each in self.steppable.items() if isinstance(each, FlatOptimizer)}
        fixed = [each for name, each in self.optimizers.items() if name not in flats and isinstance(each, FlatParameters)]
        size, rest = divmod(rows, self.objective.reuse.minibatches if self.objective.reuse else 1)
        if not flats or rest or size % (micro_batch or size):
            return None
        if micro_batch is None and world_size() == 1:
            return CompiledStepper(self.policy, self.objective, flats, rows, fixed)
        moving = list(flats.values())
        return EagerStepper(CompiledGradients(self.policy, self.objective, moving, micro_batch or size, fixed), flats)

    def _compiled_natural(self, rows: int, micro_batch: int | None) -> NaturalStepper | None:
        """Natural steps with compiled passes; None without a constraint, or if the micro-batches differ in size."""
        if self.natural is None or rows % (micro_batch or rows):
            return None
        own, *fixed = [each for each in self.optimizers.values() if isinstance(each, FlatParameters)]
        passes = CompiledPasses(self.policy, self.objective, own, micro_batch or rows, fixed)
        return NaturalStepper(self.policy, passes, own, self.natural.constraint)

    def use_eager(self) -> None:
        """Go on without compiled programs."""
        self.compiled_rows = self.compiled = self.compiled_natural = None

    def update(self, rollout: Rollout, credit: Credit, state: LearnerState) -> Metrics:
        """Update the policy on one rollout and return metrics of the update.

        Raises NotFiniteError, which names the term, if a loss or gradient is not finite; that step is not taken.
        """
        objective = self.objective
        # Otherwise backward() would reach the graph of the rollout.
        rollout, credit = map_tensors(Tensor.detach, (rollout, credit))
        context = self._context(rollout, credit, state)
        batch = rows_of(rollout, credit, numbered=context.recording is not None)
        assert batch.old_log_probs is not None or not objective.reads_old_log_probs, "reusing a batch needs its old_log_probs"
        if self.compiled_rows is not None and batch.mask is not None and batch.mask.all():
            batch = replace(batch, mask=None)
        if objective.penalty is not None and objective.penalty.fraction < 1:
            batch = with_penalised(batch, objective.penalty.fraction)
        if objective.normalise_advantages == "batch":
            batch = context.normalised(batch)
        steps = UpdateMetrics()
        epochs, stopped = 0, False
        if self.natural is not None:
            natural = self.natural if self.compiled_natural is None or not self._fits(batch) else self.compiled_natural
            self._passes(natural, batch, (1, 1), context, steps, rollout)
        if self.steppable:
            stepper = self.eager if self.compiled is None or not self._fits(batch) else self.compiled
            context, passes = replace(context, first=state.updates), objective.passes
            epochs, stopped = self._passes(stepper, batch, passes, context, steps, rollout)
        if objective.penalty is not None:
            steps.outcome = self._adapt_penalty(replace(batch, penalised=None), context)
        metrics: Metrics = steps.summary() | {"epochs": float(epochs), "stopped_early": float(stopped)}
        if self.steppable:
            first = next(iter(self.steppable.values()))  # the policy's if it has one
            metrics["learning_rate"] = first.settings.learning_rate * context.rate_scale(-1)
            if self.schedule == "adaptive":
                metrics["learning_rate"] = first.learning_rate
        if objective.baseline == "pair":
            metrics |= preference_metrics(rollout, credit, objective)
        return metrics | credit_metrics(rollout, credit, critic=objective.baseline == "critic")

    def _fits(self, batch: Batch) -> bool:
        """Whether compiled programs can run this batch: shapes are static."""
        return batch.mask is None and len(batch.advantages) == self.compiled_rows

    def _context(self, rollout: Rollout, credit: Credit, state: LearnerState) -> UpdateContext:
        penalty, clip_scale = self.objective.penalty, self._clip_scale(state.remaining)
        beta = 0.0 if penalty is None else penalty.beta
        if penalty is not None and penalty.target is not None:
            beta = state.coefficients.get("beta", penalty.beta)
        recording = None
        if self.recorder is not None:
            recording = self.recorder.begin(rollout, credit, self.objective, state, clip_scale, beta)
        rates = self._rates(rollout, state)
        return UpdateContext(state, rates, clip_scale, beta, recording, self.auxiliary_loss, state.updates)

    def _rates(self, rollout: Rollout, state: LearnerState) -> Callable[[int], float]:
        """The factor of the learning rate at each step on a rollout: of the schedule, the same for all, and of the warm-up.

        The warm-up rises with the share of the budget that is used after the step, the rollout's shared out among its steps.
        """
        remaining, own = state.remaining, state.coefficients.get(RATE_SCALE, 1.0)
        if self.schedule == "adaptive":
            own *= state.coefficients.get(ADAPTED, 1.0)
        else:
            own *= scheduled("optimizer.schedule", self.schedule, min(1.0, remaining / (1 - self.warmup)))
        done = 1 - remaining
        if done >= self.warmup:
            return lambda step: own
        share = sum_count(rollout.steps, rollout.rewards) / state.total_steps / math.prod(self.objective.passes)
        return lambda step: own * min(1.0, (done + (step + 1) * share) / self.warmup)

    def _clip_scale(self, remaining: float) -> float:
        """The factor of the clip's bounds; 1 without a clip."""
        if self.objective.clip is None:
            return 1.0
        schedule: Any = self.clip_schedule or self.objective.clip.schedule
        return scheduled("objective.trust_region.schedule", schedule, remaining)

    def _passes(
        self,
        stepper: Stepper,
        batch: Batch,
        passes: tuple[int, int],
        context: UpdateContext,
        steps: "UpdateMetrics",
        rollout: Rollout,
    ) -> tuple[int, bool]:
        """Take one step per minibatch. Returns how many epochs were finished, and whether the KL stopped them.

        passes   epochs, minibatches
        """
        epochs, count = passes
        largest_kl, timer = self.objective.largest_kl, context.state.timer
        for epoch in range(epochs):
            for minibatch in stepper.minibatches(batch, count, context):
                step = stepper.prepare(minibatch, context)
                if not steps.terms:
                    steps.ratio_at_start = check_ratio_at_start(step.ratios, rollout, self.policy.exact)
                if largest_kl is not None and self._kl(step) > largest_kl:
                    steps.add(step)
                    return epoch, True
                self._check_finite(step, context.state)
                if self.schedule == "adaptive":
                    self._adapt_rate(step, context.state)
                with timer.detail("optimizer"):
                    context.state.updates += step.take()
                steps.add(step)
                steps.add_norms(step.norms)
        return epochs, False

    def _adapt_penalty(self, batch: Batch, context: UpdateContext) -> Metrics:
        """Measure the KL from θ_old over the whole batch, and set the next β from it."""
        penalty, beta = self.objective.penalty, context.beta
        assert penalty is not None
        denominator = global_count(batch, self.objective.aggregation)
        total = torch.zeros((), dtype=denominator.dtype, device=denominator.device)
        with torch.no_grad(), gathered(self.policy):
            for part in self.gradients.parts(batch):
                evaluation = self.policy(part.inputs, part.actions, part.mask)
                total += mean_old_kl(evaluation, part, self.objective, denominator)
        kl = float(all_sum(total))
        if penalty.target is not None:
            adapted = adapt_kl_penalty(beta, kl, penalty.target)
            context.state.coefficients["beta"] = min(max(adapted, penalty.beta / BETA_RANGE), penalty.beta * BETA_RANGE)
        return {"beta": beta, "kl_after": kl}

    def _adapt_rate(self, step: PendingStep, state: LearnerState) -> None:
        """Set the learning rate of this step, and of those after it, from the KL before it."""
        assert isinstance(step, EagerStep), "a recipe with another engine is rejected"
        own = next(iter(self.steppable.values())).settings.learning_rate
        factor = adapt_learning_rate(own * state.coefficients.get(ADAPTED, 1.0), self._kl(step), self.kl_target) / own
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

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Keep the policy's ``idle_part``, with gradients and moments, on the CPU: for phases without updates."""
        part = self.policy.idle_part()
        flats = [optimizer for optimizer in self.steppable.values() if isinstance(optimizer, FlatOptimizer)]
        with nullcontext() if part is None else leaving(part, flats):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The moments of every optimizer; a policy under a KL constraint has none."""
        return {name: self.steppable[name].state_dict() if name in self.steppable else {} for name in self.optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name, optimizer in self.steppable.items():
            optimizer.load_state_dict(state[name])


def check_adaptive(objective: Objective, warmup: float) -> None:
    """Raise SurefootError if the learning rate can't follow the KL."""
    if objective.reuse is None or objective.constraint is not None:
        raise SurefootError(
            "optimizer.schedule='adaptive': follows the KL of reused batches, which this objective does not have; set "
            "constant, linear or cosine"
        )
    if warmup:
        raise SurefootError(
            f"optimizer.warmup={warmup:g}: schedule = 'adaptive' sets the learning rate of every step; set warmup = 0"
        )


def scheduled(field: str, schedule: Schedule, left: float) -> float:
    """The factor of a schedule when ``left`` of the budget remains. Raises SurefootError for a function that returns none."""
    if not callable(schedule):
        factors = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
        if schedule not in factors:
            raise SurefootError(f"{field}={schedule!r}: is the name of a function; pass the function itself")
        return factors[schedule]
    try:
        factor = float(schedule(left))
    except Exception as error:
        raise SurefootError(f"{field}: the function raised {cause_of(error)} for {left:g}; fix it") from error
    if not 0 <= factor < math.inf:
        raise SurefootError(f"{field}: the function returned {factor:g} for {left:g}; return a finite factor of at least 0")
    return factor


class UpdateMetrics:
    """Metrics of the steps on one rollout: terms and metrics of the loss, ratios and gradient norms."""

    def __init__(self) -> None:
        self.terms: list[dict[str, float]] = []
        self.ratios: list[tuple[float, float]] = []
        self.norms: dict[str, list[float]] = {}
        self.ratio_at_start = 1.0
        self.outcome: Metrics = {}

    def add(self, step: PendingStep) -> None:
        """Add a step, whether taken or not."""
        self.terms.append(step.terms | step.metrics)
        self.ratios.append(step.ratios)
        self.outcome |= step.outcome

    def add_norms(self, norms: dict[str, float]) -> None:
        """Add the gradient norms of a step that was taken."""
        for name, norm in norms.items():
            self.norms.setdefault(name, []).append(norm)

    def summary(self) -> Metrics:
        """Means over the steps, and the smallest and largest ratio over all ranks."""
        metrics: Metrics = {name: finite_or_none(sum(t[name] for t in self.terms) / len(self.terms)) for name in self.terms[0]}
        smallest, largest = zip(*self.ratios, strict=True)
        metrics["ratio_min"], metrics["ratio_max"] = range_over_ranks(min(smallest), max(largest))
        metrics["ratio_at_start"] = self.ratio_at_start
        for name, norms in self.norms.items():
            metrics[f"gradient_norm_{name}"] = sum(norms) / len(norms)
        return metrics | self.outcome


def credit_metrics(rollout: Rollout, credit: Credit, critic: bool) -> Metrics:
    """Mean and standard deviation of the advantages, and the explained variance of the critic, over all ranks."""
    metrics: Metrics = {"explained_variance": _explained_variance(rollout, credit)} if critic else {}
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
    """How far from 1 rounding may take a ratio before the first step, on any rank: sharp policies and those with hundreds of
    actions at a time have log-probabilities of large terms.
    """
    assert rollout.old_log_probs is not None
    magnitude = getattr(rollout.old_distribution, "magnitude", None)
    terms = rollout.old_log_probs.abs() if magnitude is None else magnitude(rollout.actions)
    largest = float(all_max(keep_only(terms, rollout.mask).amax()))
    return ROUNDING * torch.finfo(rollout.old_log_probs.dtype).eps * largest


def _explained_variance(rollout: Rollout, credit: Credit) -> float | None:
    """1 − Var(R̂ − V) / Var(R̂) of the rollout's values, over all ranks."""
    residual = merge_across_ranks(masked_moments(credit.returns - rollout.values, rollout.mask))
    spread = merge_across_ranks(masked_moments(credit.returns, rollout.mask))
    return finite_or_none(1 - residual.var / spread.var) if spread.var > 0 else None


def range_over_ranks(smallest: float, largest: float) -> tuple[float, float]:
    """The smallest and the largest number over all ranks."""
    lowest, highest = all_max(torch.tensor([-smallest, largest])).tolist()
    return -lowest, highest


def finite_or_none(tensor: Tensor | float) -> float | None:
    """A metric's value; None (null in JSON) if it is not finite."""
    value = float(tensor)
    return value if math.isfinite(value) else None
