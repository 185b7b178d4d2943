"""A reward before it is trained on: what it gives for a few answers of the model as it is."""

import time

import torch

from surefoot.core.seeding import derived_seed
from surefoot.diagnostics.check import Check
from surefoot.errors import SurefootError
from surefoot.language.data.datasets import repeat_prompts
from surefoot.language.online.answers import settled
from surefoot.language.online.world import LanguageWorld
from surefoot.recipes.language import LanguageRecipe

PROMPTS = 8


@torch.no_grad()
def check_reward(world: LanguageWorld) -> list[Check]:
    """Sample some prompts' answers and score them: how many numbers, of what spread, and how long it takes."""
    recipe, everything = world.recipe, world.collector.prompts
    samples = max(2, recipe.sampling.samples) if recipe.objective.compares_in_groups else 2
    prompts = repeat_prompts(everything, range(min(PROMPTS, len(everything.ids))), samples)
    seeds = [derived_seed(recipe.seed, "check", row) for row in range(len(prompts.ids))]
    begun = time.perf_counter()
    try:
        answers = world.collector.answer(prompts, seeds, samples)
    except SurefootError as error:  # an environment that answers turns, for one
        return [_failed("answers", error)]
    sampled = time.perf_counter() - begun
    count = len(answers.responses)
    ended = float(answers.samples.ended.double().mean())
    lengths = answers.samples.lengths.double()
    found = [_answers(count, ended, float(lengths.mean()), sampled, recipe)]
    begun = time.perf_counter()
    try:
        scores = answers.scores(world.reward)
    except SurefootError as error:
        return [*found, _failed("reward", error)]
    seconds = time.perf_counter() - begun
    known = scores.total[scores.valid]
    told = f"{len(known)} numbers for {count} answers in {seconds:.2g} s"
    if not len(known):
        return [*found, Check("reward", "failed", f"{told}: none is finite", "mend the function")]
    mean, spread = float(known.mean()), float(known.std(correction=0))
    told += f": {mean:.3g} ± {spread:.3g}, {float(known.min()):.3g} to {float(known.max()):.3g}"
    iteration = seconds / count * recipe.responses
    if iteration > recipe.reward.deadline:
        found.append(
            Check(
                "reward",
                "warning",
                f"{told}; an iteration's {recipe.responses} would take about {iteration:.0f} s, longer than reward.deadline",
                f"make it faster, or set reward.deadline = {2 * iteration:.0f}",
            )
        )
    elif spread == 0:
        found.append(
            Check(
                "reward",
                "warning",
                f"{told}: it never differs, so there is nothing to learn from these",
                "look at what is answered (surefoot generate); begin with easier prompts, SFT, or a reward that pays in part",
            )
        )
    elif len(known) < count:
        found.append(Check("reward", "warning", f"{told}; the others are masked", "see for which responses it gives no number"))
    else:
        found.append(Check("reward", "ok", told))
    return [*found, *_treated(world, settled(scores, answers.samples, recipe), scores.valid, ended)]


def _failed(name: str, error: SurefootError) -> Check:
    wrong, _, fix = str(error).rpartition("; ")
    return Check(name, "failed", wrong or fix, fix if wrong else "")


def _answers(count: int, ended: float, length: float, seconds: float, recipe: LanguageRecipe) -> Check:
    told = f"{count} in {seconds:.2g} s, {length:.1f} tokens each, {ended:.0%} ended by themselves"
    if ended < 0.5 and recipe.reward.missing_eos is not None:  # else a cut answer is scored like any other
        fix = f"raise sampling.max_tokens = {recipe.sampling.max_tokens}, or teach the model to end (SFT on rows that end)"
        return Check("answers", "warning", told, fix)
    return Check("answers", "ok", told)


def _treated(world: LanguageWorld, total: torch.Tensor, valid: torch.Tensor, ended: float) -> list[Check]:
    """What is left of the reward once missing ends are treated."""
    settings, known = world.recipe.reward, total[valid]
    if settings.missing_eos is None or ended == 1 or not len(known):
        return []
    spread = float(known.std(correction=0))
    told = f"with reward.missing_eos = {settings.missing_eos!r} they earn {float(known.mean()):.3g} ± {spread:.3g}"
    if spread == 0:
        return [Check("cut answers", "warning", f"{told}: nothing differs any more", "raise sampling.max_tokens")]
    return [Check("cut answers", "ok", told)]
