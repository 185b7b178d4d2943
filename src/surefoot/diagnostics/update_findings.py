"""Checks of updates: steps that are too large or too small, a wrong start, collapsed entropy, and a poor critic."""

from surefoot.core.learner import START_TOLERANCE
from surefoot.diagnostics.curves import RunCurves, seen
from surefoot.diagnostics.reward_findings import (
    answers_alike,
    earnings,
    ends,
    is_measured,
    lasting_stretch,
    raise_kl_penalty,
    rate_of,
    rise,
    starts_untrained,
)
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.store.finding import Finding, in_words

NORMAL = 1.4189
"""nats of entropy of a normal density of standard deviation 1"""


def critic_misleads(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """Explained variance is negative for long, although returns differ enough to be predicted."""
    loss = curves["value_loss"]
    worst = curves.worst(curves["explained_variance"].after(0.1 * curves.planned), 0.1, 10, largest=False)
    if worst is None or len(loss) < len(worst) or worst.mean >= -0.1 or (worst.values < 0).mean() < 0.8:
        return None
    if recipe is not None and not recipe.objective.value_coefficient:  # its critic is not trained
        return None
    # Var(R̂ − V) is about the value loss, so this is about Var(R̂): if it is almost 0, there is nothing to explain.
    there = loss.during(worst)
    if not len(there) or there.mean / (1 - worst.mean) < 0.01 * loss.values.max():
        return None
    scale = "normalise rewards (normalise.rewards) or scale them to order 1"
    return Finding(
        "critic_misleads",
        "warning",
        f"the critic is worse than a constant for a long time: explained variance {in_words(worst.mean)}, so its baseline adds "
        "noise to the advantages instead of removing it",
        "the critic does not keep up with the policy, or its learning rate is too low for the scale of the returns",
        seen(worst, there),
        (
            "scale the reward to order 1 (the weight of reward.terms)" if isinstance(recipe, LanguageRecipe) else scale,
            "a higher optimizer.critic_learning_rate, or objective.value_coefficient, or more epochs",
            "larger batches; objective.gae_lambda nearer to 1 uses the critic less",
        ),
    )


def entropy_collapsed(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The policy has settled on few answers or actions without a higher reward."""
    entropy, earned = curves["entropy"], earnings(curves)
    change = ends(entropy)
    if change is None or len(entropy) < curves.width(0.1, 5) or not len(earned):  # a supervised run aims at low entropy
        return None
    first, last = change
    if not (settled_density(first, last, recipe) if min(change) < 0 else last < 0.1 * first):
        return None
    repeated = curves["repeated"]
    same_answers = answers_alike(curves, recipe, more=0.25) and repeated.means()[-1] >= 0.5
    if rise(earned)[2] and (not same_answers or is_measured(curves, recipe)):
        return None  # low entropy with a higher reward is success
    blocks = entropy.blocks()
    bonus = 0.0 if recipe is None else recipe.objective.entropy_coefficient
    who = "answers" if same_answers else "actions"
    return Finding(
        "entropy_collapsed",
        "serious",
        f"the policy has settled on few {who}: entropy fell from {in_words(first)} to {in_words(last)} nats"
        + ("" if same_answers else " and the reward is no higher than before"),
        "updates reinforced the first samples; now little else is sampled, so nothing better can be found",
        seen(blocks[0], blocks[-1], *(repeated.blocks()[-1:] if same_answers else ()), earned),
        (
            f"objective.entropy_coefficient = {0.01 if bonus < 0.01 else 2 * bonus:g} (it is {bonus:g})",
            "a lower optimizer.learning_rate, or fewer objective.reuse.epochs",
            *(("raise reference.beta",) if isinstance(recipe, LanguageRecipe) else ()),
        ),
    )


def settled_density(first: float, last: float, recipe: Recipe | None) -> bool:
    """Whether the standard deviations of Box actions have shrunk to a twentieth: 3 nats for each number of the action."""
    if not isinstance(recipe, ControlRecipe) or first <= 0:
        return False
    each = NORMAL + recipe.network.log_std
    return each > 0 and first - last > 3 * max(1, round(first / each))


def kl_runaway(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """Each batch moves the policy far from π_old."""
    worst = curves.worst(curves["kl"], 0.05, 5)
    if worst is None or worst.mean <= 0.1:
        return None
    return Finding(
        "kl_runaway",
        "serious" if worst.mean > 0.5 else "warning",
        f"each batch moves the policy far from the policy that sampled it: KL(π_old‖π_θ) {in_words(worst.mean)}, "
        "where 0.01 to 0.05 is usual",
        "the steps are too large or too many for one batch; the clip removes the gradient of samples with a far ratio, but "
        "nothing pulls them back",
        seen(worst, curves["ratio_outside"].during(worst)),
        (
            f"a lower optimizer.learning_rate{rate_of(recipe)}",
            "objective.target_kl = 0.02, which ends the epochs over a batch earlier",
            "fewer objective.reuse.epochs",
        ),
    )


def left_reference(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The policy is far from its reference."""
    token, response = (curves.worst(curves[name], 0.05, 3) for name in ("kl_reference", "kl_reference_response"))
    if token is None or response is None or starts_untrained(recipe) or (token.mean <= 0.5 and response.mean <= 50):
        return None
    return Finding(
        "left_reference",
        "warning",
        f"the policy is far from the reference: {in_words(token.mean)} nats per token, {in_words(response.mean)} per response",
        "the reward outweighs the KL penalty; far from the reference the reward is unreliable, and the language may degrade",
        seen(token, response),
        (raise_kl_penalty(recipe), "a lower optimizer.learning_rate, or fewer updates per batch (objective.reuse)"),
    )


def negative_kl(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The estimate of a KL is below zero, which a KL can't be."""
    kl = curves["kl_reference"]
    below = kl.values < -1e-3
    if not below.any():
        return None
    least = int(kl.values.argmin())
    here = kl.part(least, least + 1).evidence("least")
    if (worst := curves.worst(kl, 0.1, 10, largest=False)) is not None and worst.mean < -0.005:
        return Finding(
            "negative_kl",
            "warning",
            f"the KL to the reference is estimated below zero for a long time ({in_words(worst.mean)} nats per "
            "token), which is impossible for a KL: the samples are not drawn from the policy that is scored",
            "mean log π − log π_ref is the KL only for samples of π itself, not for a sampler that cuts the tail, has another "
            "temperature or old weights, nor if responses are left out of the mean",
            (worst.evidence(), here),
            (
                "check sampler_gap, the difference between the probabilities of sampler and trainer",
                "set sampling.old_log_probs = 'trainer' and precision = 'float32', and check whether it disappears",
            ),
        )
    return Finding(
        "negative_kl",
        "note",
        f"the KL to the reference was estimated below zero in {int(below.sum())} of {len(kl)} iterations; this is chance, "
        "not an error",
        "a KL is never negative, but its estimate from samples, mean log π − log π_ref, has noise: while the policy is "
        "close to the reference, a batch can have either sign",
        (here, kl.evidence()),
        ("nothing; more responses per iteration reduce the noise",),
    )


def sampler_differs(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The sampler's policy is not the trained one; in float32 that is an error at the start."""
    apart = curves["sampler_kl"]
    if (stretch := lasting_stretch(curves, apart, apart.values >= 0.05)) is None:
        return None
    return Finding(
        "sampler_differs",
        "warning",
        "the policy that samples is not the one that is trained: the KL between them is "
        f"{in_words(stretch.mean)} nats per token",
        "the sampler rounds more than the trainer, has older weights, or reads rows differently beside others",
        seen(stretch),
        (
            "set precision = 'float32' for a few iterations: a model that reads rows differently is then an error",
            "set objective.importance_cap = 2, which corrects for the difference",
        ),
    )


def clip_idle(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The clip has almost never been active."""
    if recipe is not None and (recipe.objective.clip is None or recipe.objective.reuse is None):
        return None
    active, outside = curves["clip_active"], curves["ratio_outside"]
    middle = active.part(len(active) // 10, len(active) - len(active) // 5)
    if len(active) < curves.width(0.2, 20) or middle.mean > 1e-4 or not len(outside) or outside.mean > 1e-3:
        return None
    return Finding(
        "clip_idle",
        "note",
        f"the clip is almost never active ({in_words(middle.mean)} of samples): the updates are so small that "
        "no ratio leaves the clip band",
        "a small learning rate, or one epoch per batch; the algorithm is then an actor-critic without a trust region",
        seen(middle, curves["kl"]),
        (
            "if learning is slow: a higher optimizer.learning_rate, or more objective.reuse.epochs",
            "if it is fast enough: nothing",
        ),
    )


def clip_saturated(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The clip zeroes the gradient of much of the batch."""
    active, clip = curves["clip_active"], None if recipe is None else recipe.objective.clip
    if clip is not None and clip.schedule != "constant":  # in the last fifth the schedule shrinks the clip band
        active = active.until(0.8 * curves.planned)
    worst = curves.worst(active, 0.1, 5)
    if worst is None or worst.mean <= 0.3:  # more than half is rare: samples that moved the wrong way are never clipped
        return None
    epochs = "" if recipe is None or recipe.objective.reuse is None else f" (it is {recipe.objective.reuse.epochs})"
    return Finding(
        "clip_saturated",
        "warning",
        f"the clip zeroes the gradient of {worst.mean:.0%} of the samples: the later epochs over a batch do little",
        "the policy reaches the edge of the clip band long before the last epoch over the batch",
        seen(worst, curves["kl"].during(worst)),
        (
            f"fewer objective.reuse.epochs{epochs}",
            "a lower optimizer.learning_rate",
            "objective.target_kl = 0.02, which ends the epochs once they change little",
        ),
    )


ELSEWHERE = (
    "something in the policy depends on more than the sample: dropout, a normaliser that has moved, batch statistics, another "
    "temperature, or log-probabilities from other software",
    "switch off dropout and batch normalisation in a custom network",
    "sampling.old_log_probs = 'trainer', if the sampler computes differently",
)
BFLOAT16 = (
    "bfloat16 rounds numbers to three digits; ratios, clip fractions and KL have that much noise",
    "precision = 'float32', which has no such noise",
)
FLOAT32 = (
    "log-probabilities are sums of large terms, whose rounding shows: a narrow policy (small σ), or hundreds of actions at a "
    "time; it does no harm as long as it stays far below the clip",
)
"""a cause of ratios that are not 1 before the first step, and what helps"""


def wrong_start(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The ratio was not 1 before the first step of a batch."""
    ratio = curves["ratio_at_start"]
    off = abs(ratio.values - 1)
    if not len(ratio) or off.max() <= START_TOLERANCE:
        return None
    furthest = int(off.argmax())
    if getattr(recipe, "precision", "float32") == "float32":
        cause, *advice = FLOAT32 if off.max() <= 1e-2 else ELSEWHERE  # the learner rejects what rounding does not explain
    else:
        cause, *advice = BFLOAT16 if off.max() < 0.1 else ELSEWHERE
    serious = cause == ELSEWHERE[0]
    reason = "training scores actions differently from the rollout" if serious else "the two passes round differently"
    return Finding(
        "wrong_start",
        "serious" if serious else "note",
        f"before any step was taken a ratio was already {ratio.values[furthest]:.6g}: {reason}",
        cause,
        (ratio.part(furthest, furthest + 1).evidence("furthest from 1"),),
        tuple(advice),
    )


def passes_end_at_once(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """target_kl ends the first epoch of almost every batch."""
    stopped, epochs = curves["stopped_early"], curves["epochs"]
    worst = curves.worst(epochs, 0.1, 10, largest=False)
    if worst is None or len(epochs) != len(stopped) or worst.mean > 0.1:
        return None
    meanwhile = stopped.during(worst)
    if not len(meanwhile) or meanwhile.mean < 0.9:
        return None
    target = f" = {recipe.objective.target_kl:g}" if recipe is not None and recipe.objective.target_kl else ""
    return Finding(
        "passes_end_at_once",
        "warning",
        f"objective.target_kl{target} ends the first epoch of almost every batch: most of the data is never used",
        "a single epoch moves the policy further than that",
        seen(worst),
        ("a lower optimizer.learning_rate", "a higher objective.target_kl, or larger minibatches"),
    )


def no_step_taken(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """TRPO's line search rejects most steps."""
    worst = curves.worst(curves["step_taken"], 0.1, 10, largest=False)
    if worst is None or worst.mean >= 0.5:
        return None
    return Finding(
        "no_step_taken",
        "warning",
        f"only {worst.mean:.0%} of the natural steps are taken; for the others, no step length improves the surrogate",
        "the gradient is mostly noise, or the quadratic approximation of the KL fails for such long steps",
        seen(worst),
        ("larger batches", "more objective.trust_region.damping, or more tries", "normalise observations"),
    )


UPDATE_CHECKS = (
    critic_misleads,
    kl_runaway,  # before what it causes
    entropy_collapsed,
    left_reference,
    negative_kl,
    sampler_differs,
    clip_idle,
    clip_saturated,
    wrong_start,
    passes_end_at_once,
    no_step_taken,
)
