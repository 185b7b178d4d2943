"""Checks of SFT, reward models and DPO, and of the model that PPO starts from."""

import math

from surefoot.diagnostics.curves import Curve, RunCurves, seen
from surefoot.diagnostics.reward_findings import CLEAR_CHANGE, rate_of, starts_untrained
from surefoot.language.metrics import loses_chosen
from surefoot.recipes.base import Recipe
from surefoot.recipes.supervised import DpoRecipe, RewardRecipe, SftRecipe
from surefoot.store.finding import Finding, in_words

CHANCE = 0.55
"""accuracy of pairs up to which a model is taken to guess"""
GUESS = math.log(2)
"""loss of a half for each of two answers"""
RANDOM = 4.0
"""nats per token: a choice between more than fifty tokens, which no trained model leaves open on average"""
ENOUGH = 0.25
"""share of the budget before which a model need not have learned anything"""


def preferences_at_chance(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """Held-out pairs, or without them a reward model's trained ones, are ranked as by guessing."""
    accuracy, loss, trained = curves["held_out_accuracy"], curves["held_out_loss"], curves["policy_loss"]
    measured = accuracy if len(accuracy) else trained
    if not len(measured) or measured.steps[-1] < 0.5 * curves.planned:  # the first half may pass at chance
        return None
    if len(accuracy):
        last = accuracy.last(3)
        if not guesses(last.mean, loss, curves["held_out_margin"]):
            return None
        how = f"{last.mean:.0%} of the held-out pairs are ranked as labelled"
    else:
        last = trained.blocks()[-1]
        if not isinstance(recipe, RewardRecipe) or len(trained) < 10 or last.mean < 0.98 * GUESS:
            return None
        how = f"the loss of the trained pairs is {in_words(last.mean)}, and that of guessing 0.693"
    return Finding(
        "preferences_at_chance",
        "serious",
        f"the preferences are not learned: {how}",
        "the labels are random or reversed, the held-out rows have other labels than the trained ones, or the steps are too "
        "small, too large or too few",
        (last.evidence(), *((loss.evidence("lowest", float(loss.values.min())),) if len(loss) else ())),
        (
            "read some pairs with their labels: surefoot data preview FILE --model MODEL",
            f"another optimizer.learning_rate{rate_of(recipe)}, or more steps",
            "don't train PPO on this reward model" if isinstance(recipe, RewardRecipe) else "don't use this model",
        ),
    )


def guesses(accuracy: float, loss: Curve, margin: Curve) -> bool:
    """Whether accuracy, and the margin of DPO or the loss of a reward model, are those of guessing.

    An accuracy alone has the noise of a hundred pairs.
    """
    if len(margin):
        return accuracy <= CHANCE and float(margin.values[-1]) < 2e-3
    lowest = float(loss.values.min()) if len(loss) else GUESS
    return lowest >= GUESS or (accuracy <= CHANCE and lowest > 0.97 * GUESS)


def chosen_less_likely(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """DPO: the chosen answers lose more likelihood than the margin gains."""
    moved, margin = curves["held_out_chosen_moved"], curves["held_out_margin"]
    if not len(moved) or len(moved) != len(margin) or curves.steps < ENOUGH * curves.planned:
        return None
    beta = recipe.reference.beta if isinstance(recipe, DpoRecipe) else 0.1
    lost, gained = -float(moved.values[-1]), float(margin.values[-1]) / beta
    if not loses_chosen(-lost, gained):
        return None
    return Finding(
        "chosen_less_likely",
        "serious",
        f"the chosen answers lose likelihood faster than the margin grows: {in_words(lost)} nats of log π, for a margin of "
        f"{in_words(gained)}",
        "the steps are too large, and push down what both answers have in common; the model moves to answers that are in no "
        "pair, which the held-out loss and accuracy don't show",
        (moved.evidence("last", -lost), margin.evidence("last", float(margin.values[-1]))),
        (
            f"a lower optimizer.learning_rate{rate_of(recipe)}, a tenth of it",
            f"raise reference.beta (it is {beta:g})",
            "read what it writes before you use it, also the best checkpoint: surefoot evaluate RUN",
        ),
    )


def loss_flat(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """SFT: the training loss has not fallen."""
    loss = curves["policy_loss"]
    if not is_sft(curves, recipe) or len(loss) < 20 or curves.steps < 0.5 * curves.planned:
        return None
    blocks, (first, *later) = loss.blocks(), loss.means()
    last = min(later)
    if first - last > max(CLEAR_CHANGE * loss.least_noise, 0.02 * first):
        return None
    return Finding(
        "loss_flat",
        "warning",
        f"the loss has hardly fallen: {in_words(first)} at first, {in_words(last)} at best, nats per token",
        "the learning rate is far too low or too high; or the model wrote such answers before",
        seen(blocks[0], blocks[-1]),
        (
            f"another optimizer.learning_rate{rate_of(recipe)}",
            "check what is trained: surefoot data preview FILE --model MODEL",
        ),
    )


def loss_rose(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The loss on held-out rows, or without them SFT's on the trained ones, rises far above its lowest value."""
    held_out, trained = curves["held_out_loss"], curves["policy_loss"]
    if not len(held_out) and not is_sft(curves, recipe):
        return None
    loss = held_out if len(held_out) else trained
    if len(loss) < (3 if loss is held_out else 20):
        return None
    blocks = loss.blocks()
    of_trained = trained.means()
    lowest = min(blocks, key=lambda block: block.mean)
    low, now = lowest.mean, blocks[-1].mean
    if isinstance(recipe, SftRecipe) and len(trained) >= 20 and max(of_trained) > 1.25 * trained.values[0] > 0:
        lowest, low, now, loss = trained.part(0, 1), float(trained.values[0]), max(of_trained), trained
    elif now - low <= max(0.25 * abs(low), 2 * CLEAR_CHANGE * loss.noise() if loss is trained else 0):
        return None
    diverged = len(of_trained) > 1 and of_trained[-1] > 1.1 * of_trained[0] > 0
    return Finding(
        "loss_rose",
        "serious" if diverged else "warning",
        f"the {'held-out ' if loss is held_out else ''}loss rises: {in_words(low)} at step {int(lowest.steps[-1]):,}, then "
        f"{in_words(now)}" + ("; the trained rows' loss is higher than at first" if diverged else ""),
        "the steps are too large" if diverged else "the model learns the trained rows by heart, or its steps are too large",
        (lowest.evidence("lowest"), blocks[-1].evidence()),
        (
            *(("use the best checkpoint: it is in best/",) if loss is held_out and not diverged else ()),
            f"a lower optimizer.learning_rate{rate_of(recipe)}",
            "fewer steps, or evaluation.patience, which ends the run; more rows",
        ),
    )


def unusable_start(curves: RunCurves, recipe: Recipe | None) -> Finding | None:
    """The model that PPO starts from, or that SFT leaves, chooses tokens almost at random."""
    if len(curves["reward"]) and not starts_untrained(recipe):
        spread, where = curves["entropy"].part(0, 3), "the model that training starts from"
    elif is_sft(curves, recipe) and curves.steps >= curves.planned:
        held_out, where = curves["held_out_loss"], "the trained model"
        spread = (held_out if len(held_out) else curves["policy_loss"]).last(3)
    else:
        return None
    if not len(spread) or (nats := spread.mean) <= RANDOM:
        return None
    return Finding(
        "unusable_start",
        "serious",
        f"{where} chooses tokens almost at random: {in_words(nats)} nats per token, as among "
        f"{in_words(math.exp(nats))} equally likely ones; PPO can't learn from its answers",
        "it was not trained, it was trained with a wrong learning rate, or its tokenizer belongs to another model",
        seen(spread),
        ("SFT on demonstrations, until its answers make sense", "read what it writes: surefoot generate MODEL --prompt TEXT"),
    )


def is_sft(curves: RunCurves, recipe: Recipe | None) -> bool:
    """Whether the run is SFT; without a recipe, by its metrics."""
    if recipe is not None:
        return isinstance(recipe, SftRecipe)
    others = ("episode_return", "reward", "held_out_accuracy")
    return not any(len(curves[name]) for name in others)


SUPERVISED_CHECKS = (preferences_at_chance, chosen_less_likely, loss_flat, loss_rose, unusable_start)
