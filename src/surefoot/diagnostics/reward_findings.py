"""Checks of rewards: no signal, no improvement, improvement lost, reward hacking, truncated responses, clipped inputs."""

import numpy as np
from numpy.typing import NDArray

from surefoot.diagnostics.curves import BLOCKS, Curve, RunCurves, seen
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.rewards import RewardSettings
from surefoot.store.finding import Evidence, Finding, Severity, in_words

Array = NDArray[np.bool_]
IN_A_ROW = 3
"""iterations after which a state that should never occur is not chance"""
CLEAR_CHANGE = 2.5
"""standard deviations of a block's mean that count as a change"""
LEAST_RISE = 0.05
"""share of the first return by which it must also rise"""


def no_reward_signal(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """All responses, or all responses of each group, have the same reward: all advantages are zero."""
    groups, spread = curves["groups_without_signal"], curves["score_std"]
    ended, constant = scores_of_ended(curves, recipe)
    alike = "earns one and the same score"
    cases = (
        ("every group of responses earn one and the same score", groups, groups.values >= 1 - 1e-9),
        (f"every response {alike}", spread, spread.values <= 1e-8),
        (f"every response that ends {alike}", ended, constant),  # the others differ by their penalty
    )
    found = ((who, curve, lasting_stretch(curves, curve, dead)) for who, curve, dead in cases)
    who, curve, stretch = next((each for each in found if each[2] is not None), ("", groups, None))
    if stretch is None:
        return few_groups_with_signal(curves)
    earned = ended if curve is ended else curves["reward"]
    level, before = earned.during(stretch), earned.until(stretch.steps[0] - 1)
    same = f"{who}, in {len(stretch)} iterations in a row"
    if len(level) and len(before) and level.mean >= before.values.max() and level.mean > before.values.min():
        return Finding(
            "no_reward_signal",
            "note",
            f"{same}, and none was higher before: nothing is left to learn here",
            "the policy has reached the highest reward, or it no longer varies its answers",
            (*seen(stretch, level), before.evidence("mean before that")),
            ("nothing, if that is the highest possible reward", "harder prompts, or fewer steps"),
        )
    nothing = "there is nothing to compare, so nothing is learned"
    return Finding(
        "no_reward_signal",
        "serious",
        f"{same}: {'only the penalty of truncated ones is learned' if curve is ended else nothing}",
        "the task is too hard or too easy for the model as it is, so that all answers are wrong, or all right; or the reward "
        "function gives a constant: it may read the wrong column, or a format that the model never writes",
        seen(stretch, level),
        (
            "read the responses and their rewards: the files in samples/, or: surefoot check RECIPE",
            "start with easier prompts, or with SFT on correct answers, so that some answers are right",
            "reward partly right answers in part, or take more samples per prompt (sampling.samples)",
        ),
    )


def scores_of_ended(curves: RunCurves, recipe: Recipe | None) -> tuple[Curve, Array]:
    """The mean score of the responses that end, and whether all of them have that score; both are empty without a penalty.

    Where few end, they may be equal by chance. Responses without a score, of several turns, or with a penalty for their length
    are not compared: the metrics don't tell what those that end have earned.
    """
    mean, spread, ended, missing = (curves[name] for name in ("reward", "score_std", "eos_rate", "without_score"))
    if (
        not isinstance(recipe, LanguageRecipe)
        or recipe.reward.missing_eos != "penalty"
        or recipe.reward.overlong is not None
        or recipe.turns.conversations
        or missing.values.any()
        or not len(mean) == len(spread) == len(ended)
    ):
        return mean.part(0, 0), np.empty(0, bool)
    value = recipe.reward.missing_eos_value
    share = np.maximum(ended.values, 0.5)
    of_ended = (mean.values - (1 - share) * value) / share
    variance = (spread.values**2 + mean.values**2 - (1 - share) * value**2) / share - of_ended**2
    constant = (ended.values >= 0.5) & (np.abs(variance) < 1e-5 * (of_ended - value) ** 2)
    return Curve(mean.metric, mean.steps, of_ended), constant


def few_groups_with_signal(curves: RunCurves) -> Finding | None:
    """Most groups have no signal for long."""
    worst = curves.worst(curves["groups_without_signal"], 0.1, 5)
    if worst is None or worst.mean < 0.8:
        return None
    return Finding(
        "few_groups_with_signal",
        "warning",
        f"in {worst.mean:.0%} of the groups all responses have the same reward: only the others give a gradient",
        "most prompts are too easy or too hard for the model as it is now",
        seen(worst),
        (
            "set sampling.rounds, which replaces such prompts",
            "use prompts of another difficulty, or more samples per prompt (sampling.samples)",
        ),
    )


def return_flat(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The return has not risen above its noise, or by less than a twentieth, since the start."""
    earned, still = earnings(curves), stays(curves, recipe)
    if len(earned) < 2 * curves.width(0.1, 10) or curves.steps < 0.2 * curves.planned:  # as in return_collapsed
        return None
    # The return is a mean over many episodes and drifts, so it must also rise by a share. A policy that has not moved has
    # not learned.
    first, best, risen = rise(earned, LEAST_RISE)
    if risen and not still:
        return None
    bonus = recipe is not None and recipe.objective.entropy_coefficient
    explore = f"explore more: {'a larger objective.entropy_coefficient' if bonus else 'objective.entropy_coefficient = 0.01'}"
    evidence = [curves["kl"], curves["entropy"]] if measures_kl(curves, recipe) else [curves["entropy"]]
    name, larger = "reward", "larger batches (sampling.prompts, or sampling.samples of each), so that advantages are less noise"
    if earned.metric == "episode_return":
        name, larger = "return", "larger batches, and normalise observations and rewards, so that advantages are less noise"
    how, more = f"has hardly risen: {in_words(first)} at first, {in_words(best)} at best", list[str]()
    if best < first:
        how = f"has not risen: {in_words(first)} at first, and since then {in_words(best)} at best"
    if np.ptp(earned.values) == 0:
        how = f"has been {in_words(first)} throughout"
        cause = "no reward so far differs from the others: the agent has never seen what it should do more often"
        tries = ["reward intermediate steps, or start episodes nearer to the reward", explore]
    else:
        cause = "the policy moves, but not towards higher rewards: the advantages are mostly noise, or it does not explore"
        tries = [larger, explore, "check the reward: surefoot check RECIPE"]
        if still:
            cause = "the policy hardly moves: each batch changes it by almost nothing"
            more = ["a higher optimizer.learning_rate, or more epochs (objective.reuse.epochs)"]
            if recipe is not None and drowned(curves, recipe):
                cause += ": optimizer.max_grad_norm cuts its gradient together with the far larger one of the value loss"
                evidence.append(curves["gradient_norm_policy"])
                scale = "scale rewards to order 1" + (", or set normalise.rewards = true" if name == "return" else "")
                more = [scale, "optimizer.critic_learning_rate, which gives the critic its own optimizer"]
    if (bounds := bounds_missed(curves, recipe)) is not None:
        cause, more = bounds[0], [bounds[1]]
        evidence.insert(0, curves["actions_clipped"])
        tries.remove(explore)
    return Finding(
        "return_flat",
        "warning",
        f"the {name} {how}, over {curves.steps:,} steps; if that is the highest possible, nothing is wrong",
        cause,
        seen(earned, *evidence),
        (*more, *tries),
    )


def bounds_missed(curves: RunCurves, recipe: Recipe | None) -> tuple[str, str] | None:
    """Cause and remedy if nearly all Box actions are outside their bounds, or all far inside them."""
    if not len(curves["actions_clipped"]):
        return None
    share = curves["actions_clipped"].mean
    stretched = not isinstance(recipe, ControlRecipe) or recipe.normalise.actions
    stretch = "set normalise.actions = true: −1 … 1 of the policy is then stretched over bounds that are finite"
    if share > 0.9:
        widened = ends(curves["entropy"])
        if recipe is not None and recipe.objective.entropy_coefficient and widened is not None and widened[1] > widened[0] + 1:
            bonus = f"a smaller objective.entropy_coefficient (it is {recipe.objective.entropy_coefficient:g})"
            return "the entropy bonus widens the policy without end, because noise beyond the bounds costs nothing", bonus
        cause = f"{share:.0%} of the sampled actions are outside the bounds, and are clipped to the same few values"
        here = "a smaller network.log_std; or, if a bound is infinite, an environment wrapper for actions of about ±1"
        return cause, here if stretched else stretch
    if share < 1e-4 and not stretched:
        return "no action comes near its bounds: the policy starts at about ±1, and the bounds may be far wider", stretch
    return None


def return_collapsed(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """More than half of the improvement is lost again, or of text the reward or the gold score falls far below its start."""
    earned = earnings(curves)
    # Two values in each tenth: the first values of a run are means over a few episodes, and one alone can be a peak.
    if len(earned) < 2 * curves.width(0.1, 10) or stays(curves, recipe):
        return None
    blocks, means = earned.blocks(), earned.means()
    top = max(range(len(means)), key=means.__getitem__)
    gained, kept = means[top] - means[0], means[-1] - means[0]
    # Less than return_flat takes for a rise is none: a few lucky episodes in a return that has no noise otherwise.
    if gained <= max(2 * CLEAR_CHANGE * earned.noise(), LEAST_RISE * abs(means[0])) or kept > 0.5 * gained:
        return next((found for curve in (curves["reward"], curves["gold"]) if (found := below_start(curve, recipe))), None)
    kl = curves["kl"].after(blocks[top].steps[0])
    spikes = (kl.evidence("largest", float(kl.values.max())),) if len(kl) else ()
    return Finding(
        "return_collapsed",
        "serious",
        f"the improvement is lost again: from {in_words(means[top])} around step {int(blocks[top].steps[-1]):,} down to "
        f"{in_words(means[-1])}",
        "an update moved the policy to where rewards are low, and the data collected there does not lead it back",
        (*seen(blocks[top], blocks[-1]), *spikes),
        (
            "use the best checkpoint: it is in best/",
            "a lower optimizer.learning_rate, or optimizer.schedule = 'linear'",
            "fewer objective.reuse.epochs, or objective.target_kl = 0.02",
        ),
    )


def below_start(curve: Curve, recipe: Recipe | None) -> Finding | None:
    """The finding for a curve that ends clearly below its start, and by a fifth of it."""
    if len(curve) < 2 * BLOCKS:
        return None
    (start, noise), now = curve.start(), curve.blocks()[-1]
    if start.mean - now.mean <= max(2 * CLEAR_CHANGE * noise, 0.2 * abs(start.mean)):
        return None
    name = "gold score" if curve.metric == "gold" else "reward"
    return Finding(
        "return_collapsed",
        "serious",
        f"the {name} is far below its start: from {in_words(start.mean)} at first down to {in_words(now.mean)}",
        "the updates are too large for their noise: the policy loses what it could do before training",
        seen(start, now),
        (
            f"a lower optimizer.learning_rate{rate_of(recipe)}, a tenth of it; begin again from the start",
            "fewer objective.reuse.epochs, or objective.target_kl = 0.02",
            "larger batches, so that advantages are less noise",
        ),
    )


def reward_hacked(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The training reward rises while the gold score, diversity or held-out likelihood falls, over the same steps.

    A loss of diversity alone is serious only if the reward is learned; a program may be right about answers that are alike.
    """
    proxy = curves["reward"]
    if len(proxy) < 2 * curves.width(0.05, 5):
        return None
    blocks = proxy.blocks()
    first, now, noise = blocks[0].mean, blocks[-1].mean, proxy.least_noise
    if now - first <= CLEAR_CHANGE * noise:
        return None
    lost = gold_lost(curves, recipe, now - first)
    alike = [] if lost or is_measured(curves, recipe) else diversity_lost(curves, recipe)
    likelihood = curves["held_out_log_likelihood"]
    if len(likelihood) > 1 and likelihood.values[0] - likelihood.values[-1] > 0.7:
        at = likelihood.part(0, 1), likelihood.last(1)
        if gain(proxy, *at) > CLEAR_CHANGE * noise:
            lost.append(("the language is being forgotten", tuple(curve.evidence("log π per token") for curve in at)))
    learned = isinstance(recipe, LanguageRecipe) and any(term.function is None for term in recipe.reward.terms)
    severity: Severity = "serious" if lost or learned else "warning"
    if not (lost := lost + alike):
        return None
    return Finding(
        "reward_hacked",
        severity,
        f"the reward rises, from {in_words(first)} to {in_words(now)}, while {' and '.join(what for what, _ in lost)}",
        "the policy has found answers that the reward overrates: a learned reward is accurate only near its training data",
        (
            *seen(blocks[0], blocks[-1]),
            *(each for _, evidence in lost for each in evidence),
            *seen(*curves["kl_reference_response"].blocks()[-1:]),
        ),
        (
            f"{raise_kl_penalty(recipe)}, so that moving away from the reference costs more",
            "stop earlier (evaluation.patience), or take an earlier checkpoint",
            "train the reward model again on pairs of what the policy writes now",
        ),
    )


Lost = list[tuple[str, tuple[Evidence, ...]]]
"""what is lost while the reward rises, each with its evidence"""
GOLD = {"held_out_gold": "held_out_reward", "gold": "reward"}
"""a gold score -> the reward of the same answers"""


def gold_lost(curves: RunCurves, recipe: Recipe | None, risen: float) -> Lost:
    """The fall of a gold score from its highest block to the last one, if the reward does not fall between the same blocks.

    risen   of the reward over the run; a fall of gold by less than a quarter of it, and by less than half, does not count
    """
    for name, same_answers in GOLD.items():
        gold = curves[name]
        proxy = curves[same_answers] if len(curves[same_answers]) else curves["reward"]
        if len(gold) < (2 * BLOCKS if name == "gold" else IN_A_ROW):  # the gold of one batch is noise
            continue
        now = gold.blocks()[-1]
        best = max(gold.blocks(), key=lambda block: block.mean)
        kept = gain(proxy, best, now) >= -proxy.least_noise
        large = min(0.25 * risen, 0.5 * abs(best.mean))  # a learned reward and gold may have other units
        if best.mean - now.mean > max(2 * CLEAR_CHANGE * gold.least_noise, large) and kept:
            return [("the gold score falls", seen(best, now)), *diversity_lost(curves, recipe)]
    return []


def diversity_lost(curves: RunCurves, recipe: Recipe | None) -> Lost:
    """More responses are equal, or their bigrams are fewer. Responses to one prompt may be equal; those to others differ."""
    repeated, distinct = curves["repeated"], curves["distinct_2"]
    if answers_alike(curves, recipe, more=0.4):
        return [("responses repeat each other", seen(repeated.blocks()[0], repeated.blocks()[-1]))]
    if (change := ends(distinct)) and change[1] <= 0.5 / samples_of(recipe) * change[0]:
        return [("diversity falls", seen(distinct.blocks()[0], distinct.blocks()[-1]))]
    return []


def answers_alike(curves: RunCurves, recipe: Recipe | None, more: float) -> bool:
    """Whether the share of responses that are equal to one to another prompt has risen by ``more``."""
    samples = samples_of(recipe)
    change = ends(curves["repeated"])
    return change is not None and change[1] - max(change[0], 1 - 1 / samples) >= more / samples


def is_success(curves: RunCurves, recipe: Recipe | None) -> bool:
    """Whether the scores are 0 or 1, so that their mean p is the share of right answers: then their variance is p(1 − p).

    Truncated responses may have another score, ``reward.missing_eos_value``.
    """
    mean, spread, ended = curves["reward"].values, curves["score_std"].values, curves["eos_rate"].values
    if isinstance(recipe, LanguageRecipe) and recipe.turns.environment is not None and not recipe.reward.terms:
        return True
    if not len(spread) or len(spread) != len(mean):
        return False
    settings = recipe.reward if isinstance(recipe, LanguageRecipe) else RewardSettings()
    penalised = (recipe is None or settings.missing_eos == "penalty") and len(ended) == len(mean)
    for truncated, value in ((1 - ended, settings.missing_eos_value) if penalised else (0.0, 0.0), (0.0, 0.0)):
        right = mean - truncated * value
        squares = right + truncated * value**2
        possible = right.min() >= -1e-6 and bool((right <= 1 - truncated + 1e-6).all())
        if possible and np.allclose(spread**2, squares - mean**2, rtol=0.05, atol=1e-6):
            return True
    return False


def is_measured(curves: RunCurves, recipe: Recipe | None) -> bool:
    """Whether a rise of the reward can be trusted: there is a gold score beside it, or the reward is success itself.

    Answers that are alike and truly better are no fault.
    """
    return any(len(curves[gold]) > 0 for gold in GOLD) or is_success(curves, recipe)


def special_tokens_dropped(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """Rewards get responses without the special tokens in them."""
    lost = curves["special_tokens"]
    stretch = lasting_stretch(curves, lost, lost.values >= 0.5)
    if stretch is None or starts_untrained(recipe):
        return None
    return Finding(
        "special_tokens_dropped",
        "warning",
        "most responses have special tokens in them, besides their end, which rewards do not get",
        "special tokens are left out of the text of responses",
        seen(stretch),
        ("set reward.special_tokens = true, if they are markers of the answer", "if not, train the model with SFT first"),
    )


def responses_cut(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """Responses are truncated at the length limit."""
    if isinstance(recipe, LanguageRecipe) and starts_untrained(recipe) and recipe.reward.missing_eos is None:
        return None  # its truncated responses are scored like any other
    ended, limit, treated = curves["eos_rate"], "", ""
    stretch = lasting_stretch(curves, ended, ended.values <= 0.02)
    if isinstance(recipe, LanguageRecipe):
        limit = f" (it is {recipe.sampling.max_tokens})"
        if recipe.reward.missing_eos == "penalty":
            treated = f"; all of them get the penalty, {recipe.reward.missing_eos_value:g}, whatever their text"
    advice = (
        f"raise sampling.max_tokens{limit}, if good answers are longer",
        "check that the model has learned to end: SFT rows end in EOS; the chat template may need another end (sampling.stop)",
        "check the effect of reward.missing_eos: surefoot check RECIPE",
    )
    if stretch is not None:
        return Finding(
            "responses_cut",
            "serious",
            f"all responses are truncated at the length limit, in {len(stretch)} iterations in a row{treated}",
            "the limit is shorter than the answers, or the model has not learned to end",
            seen(stretch),
            advice,
        )
    worst = curves.worst(ended, 0.1, 5, largest=False)
    if worst is None or worst.mean >= 0.5:
        return truncation_pays(curves, recipe)
    return Finding(
        "responses_cut",
        "warning",
        f"{1 - worst.mean:.0%} of the responses are truncated at the length limit",
        "the limit is short for these answers, or the policy has learned to write too much",
        seen(worst),
        advice,
    )


def truncation_pays(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The penalty of truncated responses is more than complete ones earn on average."""
    earned, _ = scores_of_ended(curves, recipe)
    ended = curves["eos_rate"].values
    some = (ended >= 0.5) & (ended <= 0.98) if len(earned) else np.empty(0, bool)
    worst = curves.worst(Curve("reward", earned.steps[some], earned.values[some]), 0.1, 5, largest=False)
    if worst is None or not isinstance(recipe, LanguageRecipe) or worst.mean >= recipe.reward.missing_eos_value:
        return None
    penalty = recipe.reward.missing_eos_value
    return Finding(
        "responses_cut",
        "warning",
        f"truncated responses earn {in_words(penalty)}, and complete ones less: {in_words(worst.mean)} on average",
        "reward.missing_eos_value is above the scores of the reward, so the policy learns not to end",
        seen(worst, curves["eos_rate"].during(worst)),
        ("set reward.missing_eos_value below the lowest of these scores, which surefoot check RECIPE prints",),
    )


def normaliser_saturated(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """Many normalised observations or rewards are at the clip of the normaliser."""
    for what in ("observations", "rewards"):
        curve = curves[f"{what}_clipped"]
        worst = curves.worst(curve.part(1, len(curve)), 0.05, 5)  # without the first iteration: it has no statistics yet
        if worst is None or worst.mean <= 0.05:
            continue
        clip = f" = {recipe.normalise.clip:g}" if isinstance(recipe, ControlRecipe) else ""
        return Finding(
            "normaliser_saturated",
            "warning",
            f"{worst.mean:.0%} of the normalised {what} are clipped at ±normalise.clip{clip}: larger values look the same",
            "a few values are very large, or the values have moved far from their running mean and variance",
            seen(worst),
            (
                "raise normalise.clip",
                f"scale {what} in the environment, by a logarithm if they span orders of magnitude",
                f"set normalise.{what} = false, if they are of order 1 already",
            ),
        )
    return None


def observation_constant(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """A part of the observation is the same in all steps."""
    curve = curves["observations_constant"]
    if len(curve) < curves.width(0.05, 5) or (count := int(curve.values.min())) == 0:
        return None
    which = "a part of the observation is" if count == 1 else f"{count} parts of the observation are"
    return Finding(
        "observation_constant",
        "warning",
        f"{which} the same in all steps of an iteration: the policy can't react to it",
        "the environment does not show what changes, or its changes are too small beside its size for float32",
        (curve.evidence("smallest", count),),
        (
            "surefoot check of the recipe, which names the part",
            "make its space float64 and normalise it (normalise.observations), or subtract the constant in the environment",
            "leave it out of the observation, if nothing is missing",
        ),
    )


def observation_outside(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """Observations have numbers outside the bounds of their space."""
    curve = curves["observations_outside"]
    if not len(curve) or (share := curve.mean) == 0:
        return None
    return Finding(
        "observation_outside",
        "warning" if share >= 0.01 else "note",
        f"{100 * share:.3g}% of the observations have a number outside the bounds of their space",
        "the bounds are those of another version, of an ideal robot, or of numbers before they were scaled",
        seen(curve),
        (
            "surefoot check of the recipe, which names the part and the numbers",
            "correct the bounds of the observation space, or the observations",
        ),
    )


REWARD_CHECKS = (
    no_reward_signal,
    return_flat,
    return_collapsed,
    reward_hacked,
    special_tokens_dropped,
    responses_cut,
    normaliser_saturated,
    observation_constant,
    observation_outside,
)


# ---- shared --------------------------------------------------------------------------------------------------


def earnings(curves: RunCurves) -> Curve:
    """The return of episodes, or the reward of responses; empty for supervised runs."""
    episodes = curves["episode_return"]
    return episodes if len(episodes) else curves["reward"]


def samples_of(recipe: Recipe | None) -> int:
    """Responses to each prompt."""
    return recipe.sampling.samples if isinstance(recipe, LanguageRecipe) else 1


def starts_untrained(recipe: Recipe | None) -> bool:
    """Whether the model has random weights on purpose: no language to keep."""
    return isinstance(recipe, LanguageRecipe) and recipe.model == "pocket"


def measures_kl(curves: RunCurves, recipe: Recipe | None) -> bool:
    """Whether the metric kl can differ from 0: the KL of a batch's first step is measured before that step."""
    if recipe is None:
        return bool((curves["kl"].values != 0).any())
    reuse = recipe.objective.reuse
    return (reuse is not None and reuse.epochs * reuse.minibatches > 1) or recipe.objective.constraint is not None


def stays(curves: RunCurves, recipe: Recipe | None) -> bool:
    """Whether the policy has not moved, as far as kl is measured: its reward changes by chance alone."""
    kl = curves["kl"]
    return len(kl) > 0 and measures_kl(curves, recipe) and kl.mean < 1e-6


def drowned(curves: RunCurves, recipe: Recipe) -> bool:
    """Whether clipping a joint gradient leaves next to nothing of the policy's: large rewards give large value losses."""
    norm, most = curves["gradient_norm_policy"], recipe.optimizer.max_grad_norm
    apart = recipe.optimizer.critic_learning_rate is not None or recipe.objective.constraint is not None
    joint = not apart and recipe.objective.value_coefficient and len(curves["value_loss"])
    return bool(joint and most and len(norm) and norm.mean > 1e3 * most)


def rate_of(recipe: Recipe | None) -> str:
    """The learning rate as part of an advice."""
    return "" if recipe is None else f" (it is {recipe.optimizer.learning_rate:g})"


def raise_kl_penalty(recipe: Recipe | None) -> str:
    """The remedy that raises the KL penalty. With an adaptive β, the recipe has only its first value."""
    if not isinstance(recipe, LanguageRecipe):
        return "raise reference.beta, or set reference.target"
    settings = recipe.reference
    if settings.target is not None:
        return (
            f"lower reference.target (it is {settings.target:g} nats per response), or reference.horizon ({settings.horizon:,})"
        )
    if (in_loss := recipe.objective.reference_coefficient) and not settings.beta:
        return f"raise objective.reference_coefficient (it is {in_loss:g}), or set reference.beta"
    return f"raise reference.beta (it is {settings.beta:g}), or set reference.target, the KL per response"


def rise(curve: Curve, least: float = 0.0) -> tuple[float, float, bool]:
    """The first values, the best mean of three neighbouring blocks after the first, and whether that is clearly higher than the
    first block or the first values.

    least   share of these by which it must also be higher
    """
    means, (start, noise) = curve.means(), curve.start()
    later = means[1:] or means
    best = max(sum(later[i : i + 3]) / len(later[i : i + 3]) for i in range(max(1, len(later) - 2)))
    begun = (means[0], curve.least_noise), (start.mean, noise)
    return start.mean, best, any(best - first > max(CLEAR_CHANGE * wide, least * abs(first)) for first, wide in begun)


def gain(curve: Curve, start: Curve, end: Curve) -> float:
    """How much higher a curve is during the steps of ``end`` than during those of ``start``, each a part of another curve."""
    return level_at(curve, end) - level_at(curve, start)


def level_at(curve: Curve, part: Curve) -> float:
    """The mean of a curve over the steps of a part of another one; of its nearest block if it has no value there."""
    here = curve.during(part)
    if not len(here) or (len(part) == 1 and part.metric.startswith("held_out") and not curve.metric.startswith("held_out")):
        middle = part.steps.mean()
        here = min(curve.blocks(), key=lambda block: abs(float(block.steps.mean()) - middle))
    return here.mean


def ends(curve: Curve) -> tuple[float, float] | None:
    """The means of the first and the last block; None for fewer than five values."""
    means = curve.means()
    return (means[0], means[-1]) if len(curve) >= 5 else None


def lasting_stretch(curves: RunCurves, curve: Curve, holds: object) -> Curve | None:
    """The longest run of neighbouring values for which ``holds`` is true, the last one if several are equal.

    A run that continues until now needs ``IN_A_ROW`` values, one that is over a tenth of the run; None if there is none.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], np.asarray(holds, bool), [False]]).astype(int)))
    starts, stops = edges[::2], edges[1::2]
    enough = stops - starts >= np.where(stops == len(curve), IN_A_ROW, curves.width(0.1, IN_A_ROW))
    if not enough.any():
        return None
    starts, stops = starts[enough], stops[enough]
    longest = int(len(stops) - 1 - np.argmax((stops - starts)[::-1]))
    return curve.part(int(starts[longest]), int(stops[longest]))
