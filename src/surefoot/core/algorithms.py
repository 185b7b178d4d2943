"""The options of an objective, and each algorithm as a set of them.

PPO is REINFORCE plus five changes: each algorithm in ``LADDER`` changes one option of the one before. PPO_PENALTY and TRPO use
other trust regions; GRPO and related algorithms compare the responses to one prompt. This file imports no torch, so that
recipes and ``--help`` load fast. ``objective.py`` applies the options to the loss, ``credit.py`` to advantages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from surefoot.errors import SurefootError

MAX_COUNT = 1_000_000
"""largest count of epochs, environments, prompts and the like"""
MAX_LENGTH = 1_000_000_000
"""largest number of steps, rows or tokens in a batch or a conversation"""


def _require(condition: bool, field: str, value: object, need: str) -> None:
    if not condition:
        raise SurefootError(f"{field}={value!r}: {need}")


def check_count(field: str, value: object, least: int = 1, usual: int | None = None) -> None:
    """Raise SurefootError unless a count is a whole number from ``least`` to ``MAX_COUNT``."""
    whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_COUNT
    _require(whole, field, value, f"must lie between {least} and {MAX_COUNT:,}" + (f"; {usual} is usual" if usual else ""))


class Strict:
    """What dataclasses are of which pydantic accepts no unknown field, and no number that is not finite."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class Reuse(Strict):
    """Use each batch for several passes, in minibatches; every sample is weighted by the importance ratio ρ."""

    epochs: int = 10
    """passes over each batch, at most a million"""
    minibatches: int = 32
    """parts of each pass, at most a million; one optimizer step each"""

    def __post_init__(self) -> None:
        check_count("objective.reuse.epochs", self.epochs, usual=10)
        check_count("objective.reuse.minibatches", self.minibatches, usual=32)


@dataclass(frozen=True)
class Clip(Strict):
    """Trust region by the pessimistic minimum with the clipped ratio (PPO-Clip, arXiv 1707.06347)."""

    clip: float = 0.2
    """how far below 1 (and above, unless clip_high is set) a ratio may go before its gain is clipped"""
    clip_high: float | None = None
    """a different bound above 1 (clip-higher)"""
    dual_clip: float | None = None
    """c > 1: bound the penalty of a bad action at c times its advantage"""
    schedule: Literal["constant", "linear"] | str = "constant"
    """linear lets both bounds fall to zero over the run; a function, as in optimizer.schedule, returns their factor"""

    def __post_init__(self) -> None:
        field = "objective.trust_region"
        _require(0 < self.clip <= 1, f"{field}.clip", self.clip, "must be above 0 and at most 1; 0.2 is usual")
        if self.clip_high is not None:
            _require(self.clip_high > 0, f"{field}.clip_high", self.clip_high, "must be positive")
        if self.dual_clip is not None:
            _require(self.dual_clip > 1, f"{field}.dual_clip", self.dual_clip, "must be above 1; 3 is usual")
        known = self.schedule in ("constant", "linear") or (isinstance(self.schedule, str) and ":" in self.schedule)
        _require(known, f"{field}.schedule", self.schedule, "must be constant, linear or file.py:function")


@dataclass(frozen=True)
class Penalty(Strict):
    """Trust region by a penalty on the KL: J = ρÂ − β·KL(π_old‖π_θ), with β fixed or adapted (arXiv 1707.06347, section 4)."""

    beta: float = 1.0
    """β, or its first value if it is adapted"""
    target: float | None = None
    """the KL per batch that β adapts to, by halving or doubling after each batch; 0.01 is usual"""
    fraction: float = 1.0
    """share of a batch's samples that the penalty applies to: those in which log π_old and Â are most correlated (KL-Cov, arXiv
    2505.22617)"""

    def __post_init__(self) -> None:
        field = "objective.trust_region"
        _require(self.beta >= 0, f"{field}.beta", self.beta, "must not be negative; 1 is usual")
        if self.target is not None:
            _require(self.target > 0, f"{field}.target", self.target, 'must be positive; 0.01 is usual, "none" fixes β')
            _require(self.beta > 0, f"{field}.beta", self.beta, "0 stays 0 when halved or doubled; start from 1")
        _require(0 <= self.fraction <= 1, f"{field}.fraction", self.fraction, "must lie in [0, 1]; 0.002 is usual, 1 is all")


@dataclass(frozen=True)
class Constraint(Strict):
    """Trust region by a bound on the KL: one natural-gradient step per batch, mean KL(π_old‖π_θ) ≤ δ (TRPO, arXiv 1502.05477).

    The critic is fitted separately, by its own optimizer, with the passes and minibatches of ``Objective.reuse``.
    """

    delta: float = 0.01
    """δ, the largest mean KL of a step"""
    damping: float = 0.1
    """added to the diagonal of the Fisher matrix"""
    cg_iterations: int = 10
    """iterations of conjugate gradient, one Fisher-vector product each"""
    shrink: float = 0.8
    """each try of the line search is this much shorter than the one before"""
    tries: int = 10
    """lengths that the line search tries before it skips the step"""

    def __post_init__(self) -> None:
        field = "objective.trust_region"
        _require(self.delta > 0, f"{field}.delta", self.delta, "must be positive; 0.01 is usual")
        _require(self.damping >= 0, f"{field}.damping", self.damping, "must not be negative; 0.1 is usual")
        check_count(f"{field}.cg_iterations", self.cg_iterations, usual=10)
        _require(0 < self.shrink < 1, f"{field}.shrink", self.shrink, "must lie between 0 and 1; 0.8 is usual")
        check_count(f"{field}.tries", self.tries, usual=10)


@dataclass(frozen=True)
class ClippedWeight(Strict):
    """Trust region by a bounded importance weight: J = min(ρ, max_weight) Â log π, where the weight has no gradient.

    No sample loses its gradient, as samples outside the band of ``Clip`` do (CISPO, arXiv 2506.13585).
    """

    max_weight: float = 5.0
    """the largest weight of a sample, 1 + ε_high in the paper"""

    def __post_init__(self) -> None:
        need = "must be at least 1, the weight of a sample of the present policy; 5 is usual"
        _require(self.max_weight >= 1, "objective.trust_region.max_weight", self.max_weight, need)


TrustRegion = Clip | Penalty | Constraint | ClippedWeight
TRUST_REGIONS: tuple[type[TrustRegion], ...] = (Clip, Penalty, Constraint, ClippedWeight)
"""the types of ``Objective.trust_region``. No two share the name of a field, so the keys of a table identify the type"""


@dataclass(frozen=True)
class Objective(Strict):
    """The options of a policy-gradient objective. The defaults are REINFORCE."""

    baseline: Literal["mean", "group", "leave_one_out", "pair", "critic"] | None = None
    """what is subtracted from the return: nothing, the batch's mean return, that of the responses to the same prompt (with the
    response itself, or without it), or a learned V(s). pair: the best and the worst response to a prompt get the weights of
    DPO's gradient"""
    pair_beta: float = 0.1
    """β of baseline = "pair": the implicit reward of a response is β·(log π_θ − log π_ref)"""
    scale_by_group: bool = False
    """divide by the standard deviation of the group's returns; with baseline = "group" alone"""
    gae_lambda: float = 1.0
    """λ of the advantages: 1 is Monte-Carlo return minus value, 0 the TD residual; needs a critic"""
    reuse: Reuse | None = None
    """none: one update per batch, log π weighted by Â. Else epochs and minibatches, weighted by ρ; under TRPO the critic's"""
    trust_region: Clip | Penalty | Constraint | ClippedWeight | None = None
    """what keeps θ near θ_old: a clip of the ratio, a penalty on the KL, a bound on it, or a bounded weight. Its keys set
    which"""
    ratio: Literal["token", "sequence"] = "token"
    """ρ of each token, or of whole responses: the geometric mean over their tokens"""
    drop_above_kl: float | None = None
    """leave out responses with a negative advantage whose mean log π_old − log π_θ per token is above this (DeepSeek-V3.2's
    off-policy sequence masking)"""

    importance_cap: float | None = None
    """multiply the surrogate by π_old / π_b, at most this, where the sampler's policy π_b is not π_old (truncated importance
    sampling); 2 to 5 is usual"""
    importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """the weight of each token, or of the whole response: the product over its tokens. truncate: at most importance_cap; mask:
    0 above it"""

    gamma: float = 0.99
    """discount γ per step"""
    value_lambda: float | None = None
    """λ of the critic's targets where it is not gae_lambda"""
    normalise_advantages: Literal["minibatch", "batch"] | None = None
    """shift and scale advantages to mean 0 and variance 1"""
    value_coefficient: float = 0.5
    """c_v, the weight of mean (V − R̂)²"""
    value_clip: float | None = None
    """clip the change of V since the rollout at ±this"""
    entropy_coefficient: float = 0.0
    """c_e, the weight of the entropy bonus"""
    target_kl: float | None = None
    """stop the epochs on a batch when KL(π_old‖π_θ) passes 1.5 times this"""
    kl_estimator: Literal["k3", "exact"] = "k3"
    """how that KL is measured: from samples, or from the distributions' parameters (control only)"""
    reference_coefficient: float = 0.0
    """β_ref, the weight of KL(π_θ‖π_ref) in the loss; needs a reference policy"""
    reference_estimator: Literal["k1", "k2", "k3", "ratio_k3"] = "k2"
    """how that KL is estimated; each has another gradient (docs/math.md)"""
    router_coefficient: float = 0.0
    """weight of the load-balancing loss of a mixture of experts; needs a language model with routers"""
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum", "constant"] = "token-mean"
    """how elementwise losses become one number"""
    aggregation_length: int | None = None
    """the length that "constant" divides every sequence's sum by; none: the longest response allowed, where that is known"""

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda", "value_lambda"):
            value = getattr(self, name)
            if value is not None:
                _require(0 <= value <= 1, f"objective.{name}", value, "must lie in [0, 1]")
        for name in ("value_coefficient", "entropy_coefficient", "reference_coefficient", "router_coefficient"):
            value = getattr(self, name)
            _require(value >= 0, f"objective.{name}", value, "must not be negative")
        for name in ("value_clip", "target_kl", "drop_above_kl"):
            value = getattr(self, name)
            if value is not None:
                _require(value > 0, f"objective.{name}", value, 'must be positive; "none" switches it off')
        if self.aggregation == "constant":
            in_range = self.aggregation_length is None or 1 <= self.aggregation_length <= MAX_LENGTH
            bounds = f"must lie between 1 and {MAX_LENGTH:,}"
            _require(in_range, "objective.aggregation_length", self.aggregation_length, bounds)
        else:
            unused = 'is read with aggregation = "constant" alone; unset it'
            _require(self.aggregation_length is None, "objective.aggregation_length", self.aggregation_length, unused)
        if self.baseline != "critic":
            why = f"needs a critic; set objective.baseline = 'critic' (it is {self.baseline or 'none'!r})"
            _require(self.gae_lambda == 1, "objective.gae_lambda", self.gae_lambda, why)
            for name in ("value_lambda", "value_clip"):
                _require(getattr(self, name) is None, f"objective.{name}", getattr(self, name), why)
        if self.constraint is not None:
            alone = "is the critic's passes under a KL constraint, and there is no critic; unset it"
            _require(self.baseline == "critic" or self.reuse is None, "objective.reuse", self.reuse, alone)
            bounded = 'every step is bounded by objective.trust_region.delta already; set "none"'
            _require(self.target_kl is None, "objective.target_kl", self.target_kl, bounded)
        elif self.trust_region is not None:
            why = "a trust region acts on the ratio of a reused batch; set objective.reuse too"
            name = type(self.trust_region).__name__.lower()
            _require(self.reuse is not None, "objective.trust_region", name, why)
        if self.target_kl is not None:
            _require(self.reuse is not None, "objective.target_kl", self.target_kl, "needs objective.reuse")
        self._check_pairs()
        if self.scale_by_group:
            _require(self.baseline == "group", "objective.scale_by_group", True, 'needs objective.baseline = "group"')
        if self.importance_cap is not None:
            need = "must be at least 1, the weight of a sample of the trained policy; 2 to 5 is usual"
            _require(self.importance_cap >= 1, "objective.importance_cap", self.importance_cap, need)
        elif self.importance_mode != "token_truncate":
            _require(
                False, "objective.importance_mode", self.importance_mode, "needs objective.importance_cap; set it, such as 3"
            )
        for name, unset in (("ratio", "token"), ("drop_above_kl", None)):
            value, need = getattr(self, name), "needs a reused batch; set objective.reuse too"
            _require(self.reuse is not None or value == unset, f"objective.{name}", value, need)
        if self.drop_above_kl is not None:
            alone = "needs the same advantage at all tokens of a response; set objective.baseline to group or leave_one_out"
            _require(self.compares_in_groups, "objective.drop_above_kl", self.drop_above_kl, alone)

    def _check_pairs(self) -> None:
        """DPO's weight of a pair is that of the present policy, and belongs to nothing else."""
        need = "must be positive; 0.1 is usual"
        _require(self.pair_beta > 0, "objective.pair_beta", self.pair_beta, need)
        if self.baseline != "pair":
            default = type(self).pair_beta
            _require(self.pair_beta == default, "objective.pair_beta", self.pair_beta, 'needs objective.baseline = "pair"')
            return
        once = 'is for other baselines: with "pair" each batch has one update; unset it'
        name = self.reuse and f"{self.reuse.epochs} epochs"
        _require(self.reuse is None, "objective.reuse", name, once)
        scaled = "would change the weights of DPO's gradient; unset it"
        _require(self.normalise_advantages is None, "objective.normalise_advantages", self.normalise_advantages, scaled)

    def require_complete(self) -> None:
        """Raise SurefootError if ``aggregation_length`` is needed and not set."""
        length_set = self.aggregation != "constant" or self.aggregation_length is not None
        need = 'aggregation = "constant" needs a length of at least 1; set the longest response allowed'
        _require(length_set, "objective.aggregation_length", self.aggregation_length, need)

    @property
    def needs_whole_episodes(self) -> bool:
        """Whether rollouts must end with episodes: without a critic nothing estimates the rest of a truncated one."""
        return self.baseline != "critic"

    @property
    def passes(self) -> tuple[int, int]:
        """Epochs, and minibatches of each: the steps of an optimizer on a batch, unless the KL stops them."""
        return (self.reuse.epochs, self.reuse.minibatches) if self.reuse else (1, 1)

    @property
    def largest_kl(self) -> float | None:
        """The KL above which the rest of a batch is skipped; None without a target."""
        return None if self.target_kl is None else 1.5 * self.target_kl

    @property
    def kl_metric(self) -> str:
        """The metric that ``largest_kl`` bounds."""
        return "kl_exact" if self.kl_estimator == "exact" else "kl"

    @property
    def target_lambda(self) -> float:
        """λ of the critic's targets."""
        return self.gae_lambda if self.value_lambda is None else self.value_lambda

    @property
    def compares_in_groups(self) -> bool:
        """Whether advantages come from a comparison of the responses to the same prompt."""
        return self.baseline in ("group", "leave_one_out", "pair")

    @property
    def compares_with_reference(self) -> bool:
        """Whether the loss or the advantages need the reference's log-probabilities."""
        return bool(self.reference_coefficient) or self.baseline == "pair"

    @property
    def clip(self) -> Clip | None:
        """The trust region if it is a clip."""
        return self.trust_region if isinstance(self.trust_region, Clip) else None

    @property
    def penalty(self) -> Penalty | None:
        """The trust region if it is a penalty on the KL."""
        return self.trust_region if isinstance(self.trust_region, Penalty) else None

    @property
    def constraint(self) -> Constraint | None:
        """The trust region if it is a bound on the KL."""
        return self.trust_region if isinstance(self.trust_region, Constraint) else None

    @property
    def max_weight(self) -> float | None:
        """The largest weight of a sample if the trust region is a clipped weight."""
        return self.trust_region.max_weight if isinstance(self.trust_region, ClippedWeight) else None

    @property
    def reads_old_log_probs(self) -> bool:
        """Whether a rollout must have log π_old; with a single update it equals the log π of the first pass."""
        one_update = self.passes == (1, 1)
        corrected = self.importance_cap is not None
        of_terms = self.penalty is not None or self.constraint is not None or self.baseline == "pair"
        return not one_update or corrected or of_terms

    @property
    def leaves_old_policy(self) -> bool:
        """Whether θ moves away from θ_old while a batch is in use, so that J needs the ratio."""
        return self.reuse is not None or self.constraint is not None


REINFORCE = Objective()
REINFORCE_BASELINE = replace(REINFORCE, baseline="mean")
ACTOR_CRITIC = replace(REINFORCE_BASELINE, baseline="critic")
A2C = replace(ACTOR_CRITIC, gae_lambda=0.95)
PPO_UNCLIPPED = replace(A2C, reuse=Reuse(epochs=10, minibatches=32))
PPO_CLIP = replace(PPO_UNCLIPPED, trust_region=Clip(0.2))

PPO_PENALTY = replace(PPO_UNCLIPPED, trust_region=Penalty(beta=1.0))
PPO_PENALTY_ADAPTIVE = replace(PPO_UNCLIPPED, trust_region=Penalty(beta=1.0, target=0.01))
TRPO = replace(PPO_UNCLIPPED, trust_region=Constraint(delta=0.01))

GRPO = replace(
    PPO_CLIP,
    baseline="group",
    scale_by_group=True,
    gae_lambda=1.0,
    gamma=1.0,
    reuse=Reuse(epochs=1, minibatches=4),
    aggregation="sequence-mean",
    reference_coefficient=0.04,
    reference_estimator="k3",
)
DR_GRPO = replace(GRPO, scale_by_group=False, aggregation="constant", reference_coefficient=0.0)
DAPO = replace(GRPO, trust_region=Clip(0.2, clip_high=0.28), aggregation="token-mean", reference_coefficient=0.0)
GSPO = replace(GRPO, ratio="sequence", trust_region=Clip(3e-4, clip_high=4e-4), reference_coefficient=0.0)
CISPO = replace(GRPO, trust_region=ClippedWeight(5.0), aggregation="token-mean", reference_coefficient=0.0)
KL_COV = replace(GRPO, trust_region=Penalty(beta=1.0, fraction=0.002), aggregation="token-mean", reference_coefficient=0.0)
RLOO = replace(REINFORCE, baseline="leave_one_out", gamma=1.0, aggregation="sequence-sum")
ONLINE_DPO = replace(REINFORCE, baseline="pair", gamma=1.0, aggregation="sequence-sum")
REINFORCE_PLUS_PLUS = replace(
    PPO_CLIP, baseline=None, gae_lambda=1.0, gamma=1.0, reuse=Reuse(epochs=1, minibatches=4), normalise_advantages="batch"
)

LADDER = (REINFORCE, REINFORCE_BASELINE, ACTOR_CRITIC, A2C, PPO_UNCLIPPED, PPO_CLIP)

ALGORITHMS = {name: value for name, value in dict(globals()).items() if isinstance(value, Objective)}
"""all of the above by name, in their order"""


def algorithm_named(name: str) -> str:
    """The name in ``ALGORITHMS`` that a user's spelling stands for, such as ``ppo_clip``, ``ppo-clip`` or ``PPO``; other names
    are returned as they are.
    """
    spelled = name.upper().replace("-", "_").replace("++", "_PLUS_PLUS")
    spelled = "PPO_CLIP" if spelled == "PPO" else spelled
    return spelled if spelled in ALGORITHMS else name


def algorithm_name(objective: Objective) -> str | None:
    """The name of an objective in ``ALGORITHMS``; None if it isn't there."""
    return next((name for name, value in ALGORITHMS.items() if value == objective), None)


def switches_between(a: Objective, b: Objective) -> dict[str, tuple[Any, Any]]:
    """The options in which two objectives differ: name -> (value in a, value in b)."""
    return {f.name: (getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)}


def switches_that_are_on(base: Objective, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The changes to an objective that keep it the same algorithm: an option that is off stays off."""
    critic, reuse, region = base.baseline == "critic", base.reuse is not None, base.trust_region
    on = {
        "gae_lambda": base.gae_lambda != 1,
        "pair_beta": base.baseline == "pair",
        "value_lambda": critic,
        "value_clip": critic,
        "reuse": reuse,
        "target_kl": reuse and base.constraint is None,
        "drop_above_kl": reuse and base.compares_in_groups,
        "trust_region": region is not None,
        "normalise_advantages": base.baseline in ("mean", "critic"),  # subtracting the mean would itself be a baseline
    }
    kept = {name: value for name, value in wanted.items() if on.get(name, True)}
    if isinstance(kept.get("trust_region"), Mapping):  # keys of another kind of trust region are for other algorithms
        theirs = {key for key in kept["trust_region"] if hasattr(region, key)}
        theirs -= {"target"} if getattr(region, "target", None) is None else set()  # a fixed β stays fixed
        theirs -= {"fraction"} if getattr(region, "fraction", 1) == 1 else set()  # so does a penalty on all samples
        kept["trust_region"] = {key: value for key, value in kept["trust_region"].items() if key in theirs}
    return kept
