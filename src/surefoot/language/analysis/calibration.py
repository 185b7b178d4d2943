"""How well the critic foretells what answers earn: as a probability of success, or as a number."""

import math
from typing import Any

import torch
from torch import Tensor

from surefoot.functional import discounted_returns, explained_variance, kl_shaped_rewards, place_scores
from surefoot.language.models.policy import in_micro_batches
from surefoot.language.online.answers import Answers, placed, settled
from surefoot.language.online.world import LanguageWorld
from surefoot.recipes.language import LanguageRecipe

BINS = 10
MOMENTS = ("first", "middle")
"""when the critic is asked: before the first token of a response, and when half of its tokens are there"""


@torch.no_grad()
def calibration(world: LanguageWorld, answers: Answers) -> dict[str, Any] | None:
    """The values of answers beside what became of them, at the ``MOMENTS``; None for a policy without a critic.

    Where whole responses earn 0 or 1 and nothing else, also those that the length limit cut (``reward.missing_eos_value`` is 0,
    or ``missing_eos`` is none), and nothing is taken off for length or discounted, V is read as the probability of 1, clipped
    to [0, 1] (``success``). Elsewhere V is held against the return that it is trained for, what the KL costs included
    (``returns``). Responses without a score are left out, and of the latter those that are bootstrapped.
    """
    recipe, drawn = world.recipe, answers.samples
    inputs, mask = {"prompt": drawn.prompt, "prompt_mask": drawn.prompt_mask}, drawn.mask
    found = in_micro_batches(world.policy, inputs, drawn.actions, mask, *world.collector.budget)
    if found.values is None:
        return None
    scores = answers.scores(world.reward)
    places = {"first": place_of(mask, torch.zeros_like(drawn.lengths)), "middle": place_of(mask, drawn.lengths // 2)}
    values = {name: found.values.gather(-1, at.unsqueeze(-1)).squeeze(-1) for name, at in places.items()}
    paid = settled(scores, drawn, recipe)
    earns = paid[scores.valid]
    at_end = scores.dense is None or bool((scores.dense == place_scores(scores.total, mask)).all())
    binary = earns_no_more(recipe) and at_end and bool(((earns == 0) | (earns == 1)).all())
    if binary and recipe.objective.gamma == 1:
        return {name: success(values[name][scores.valid], earns == 1) for name in MOMENTS}
    ref_log_probs = in_micro_batches(world.reference.log_probs, inputs, drawn.actions, mask, *world.collector.budget)
    rewards = kl_shaped_rewards(placed(scores, paid, drawn, recipe), found.log_probs, ref_log_probs, mask, world.collector.beta)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    gamma, none = recipe.objective.gamma, torch.zeros_like(mask)
    earned = discounted_returns(rewards, torch.zeros_like(rewards), terminated=last, truncated=none, gamma=gamma, mask=mask)
    kept = scores.valid & (drawn.ended | (recipe.reward.missing_eos != "bootstrap"))
    return {
        name: returns(values[name][kept], earned.gather(-1, at.unsqueeze(-1)).squeeze(-1)[kept]) for name, at in places.items()
    }


def earns_no_more(recipe: LanguageRecipe) -> bool:
    """Whether a response that was cut or is long earns what a reward of 0 and 1 may give, or 0; of the recipe, so that it does
    not depend on which responses were drawn.
    """
    treatment, value = recipe.reward.missing_eos, recipe.reward.missing_eos_value
    return recipe.reward.overlong is None and (treatment is None or (treatment != "bootstrap" and value == 0))


def place_of(mask: Tensor, number: Tensor) -> Tensor:
    """Where in each row its sampled token of a number is, counted from 0.   [N, T], [N] -> [N]"""
    return (mask & (mask.cumsum(-1) == number.unsqueeze(-1) + 1)).int().argmax(-1)


def success(predicted: Tensor, right: Tensor, bins: int = BINS) -> dict[str, Any]:
    """How probabilities of success fit what happened.   [N], [N] bool

    ``brier`` is mean (p − right)²; ``brier_baseline`` that of a forecast that always says the share of successes (Brier 1950);
    ``bins`` the reliability table: per tenth of [0, 1] the count, the mean prediction and the share of successes there.
    """
    p, right = predicted.double().clamp(0, 1), right.double()
    share = right.mean()
    which = (p * bins).long().clamp(max=bins - 1)
    table = []
    for index in range(bins):
        here = which == index
        count = int(here.sum())
        table.append(
            {
                "from": index / bins,
                "to": (index + 1) / bins,
                "count": count,
                "predicted": float(p[here].mean()) if count else None,
                "observed": float(right[here].mean()) if count else None,
            }
        )
    known = len(p) > 0
    return {
        "kind": "success",
        "count": len(p),
        "predicted": float(p.mean()) if known else None,
        "observed": float(share) if known else None,
        "brier": float(((p - right) ** 2).mean()) if known else None,
        "brier_baseline": float(share * (1 - share)) if known else None,
        "bins": table,
    }


def returns(predicted: Tensor, earned: Tensor) -> dict[str, Any]:
    """How values fit returns: root mean squared error, beside that of the mean return, and explained variance.   [N], [N]"""
    v, r = predicted.double(), earned.double()
    if not len(v):
        return {"kind": "returns", "count": 0, "rmse": None, "rmse_baseline": None, "explained_variance": None}
    spread = float(r.std(correction=0))
    return {
        "kind": "returns",
        "count": len(v),
        "predicted": float(v.mean()),
        "observed": float(r.mean()),
        "rmse": math.sqrt(float(((v - r) ** 2).mean())),
        "rmse_baseline": spread,
        "explained_variance": float(explained_variance(v, r)) if spread > 0 else None,
    }


def lines(told: dict[str, Any]) -> list[str]:
    """For a person: both moments side by side, and the reliability table of the first."""
    both = [told[name] for name in MOMENTS]
    names = {
        "predicted": "mean V",
        "observed": "share of successes" if both[0]["kind"] == "success" else "mean return",
        "brier": "Brier score",
        "brier_baseline": "  of the share alone",
        "rmse": "RMSE of V",
        "rmse_baseline": "  of the mean return",
        "explained_variance": "explained variance",
    }
    title = "critic as P(success)" if both[0]["kind"] == "success" else "critic"
    found = [f"{title:24}{'first token':>12}{'middle':>12}   on {both[0]['count']} responses with a score"]
    for name, label in names.items():
        if name in both[0]:
            found.append(f"{label:24}" + "".join(f"{_shown(one[name]):>12}" for one in both))
    if both[0]["kind"] == "success":
        found.append(f"{'V at the first token':24}{'mean V':>12}{'successes':>12}{'responses':>12}")
        for row in both[0]["bins"]:
            if row["count"]:
                span = f"  {row['from']:.1f} to {row['to']:.1f}"
                found.append(f"{span:24}{_shown(row['predicted']):>12}{_shown(row['observed']):>12}{row['count']:>12}")
    return found


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
