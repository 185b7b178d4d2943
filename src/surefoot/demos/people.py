"""``surefoot demo people``: a person compares 60 pairs of reviews, and a reward model and PPO follow, in two rounds.

In the last third the answers are those from before and after training, and the person doesn't know which is which. A program
can play the person. Every stage is a file: after labelling, or after a kill, the same command goes on.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.demos import Demo, DisplayFor, Stage, command_here, in_folder
from surefoot.demos.language import GOLD, NOISE, PPO, REWARD, STAGES, write_pairs
from surefoot.errors import require_package
from surefoot.files import write_text
from surefoot.language.data.rows import rows_text
from surefoot.language.language_model import load_language_model
from surefoot.language.tasks import reviews
from surefoot.people.agreement import share, share_text
from surefoot.people.log import LABELS, QUEUE, Round, labelled, write_log
from surefoot.ranks.collectives import on_first
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import to_toml
from surefoot.runs.rounds import PEOPLE, RoundsSettings, preferences, run_rounds
from surefoot.store.manifest import read_listed_table, write_listed
from surefoot.terminal import visible

ROUNDS, PAIRS = 2, 20
"""rounds, and pairs of each of them and of the comparison at the end"""
OTHERS = 60
"""pairs that other people labelled before: the first reward model"""


def demo(judge: str = PEOPLE) -> Demo:
    """The stages; ``judge`` is "people", or "gold" for a program. Raises SurefootError without ``transformers``."""
    require_package("transformers", "language", "demo people")  # before anything is written

    def rounds(folder: Path, seed: int, display_for: DisplayFor) -> bool:
        return len(run_rounds(settings_of(judge, folder, seed), folder / "rounds", ROUNDS, display_for)) == ROUNDS

    stages = (
        replace(STAGES[0], line="1/4 SFT: a small model learns to write reviews from demonstrations, good and bad ones."),
        Stage(
            "reviews_people",
            "others",
            f"2/4 Reward model: it learns from {OTHERS} pairs what other people like.",
            lambda folder, seed: write_pairs(folder / "data", folder / "sft", seed, OTHERS),
            {**REWARD, "steps": 5 * OTHERS},
        ),
        Stage(line=f"3/4 {ROUNDS} rounds: you compare reviews, and reward model and PPO follow.", work=rounds),
        Stage(line="4/4 You compare reviews from before and after the rounds.", work=partial(_compare, judge)),
    )
    return Demo(f"demo-people{'' if judge == PEOPLE else '-gold'}", stages, partial(report, judge))


def settings_of(judge: str, folder: Path, seed: int) -> RoundsSettings:
    """The settings of the rounds."""
    of_person = {"reward": {"terms": [{"model": "./others"}]}, "critic": {"start": "./others"}}
    recipe = find_recipe("reviews", {"seed": seed, **in_folder({**PPO, **of_person, "steps": 1_280}, folder)})
    assert isinstance(recipe, LanguageRecipe)
    return RoundsSettings(recipe, PEOPLE, PAIRS) if judge == PEOPLE else RoundsSettings(recipe, GOLD, PAIRS, NOISE)


def _compare(judge: str, folder: Path, seed: int, display_for: DisplayFor) -> bool:
    """Sample pairs, of which a is the SFT model's and b the last policy's; whether all have a label."""

    def labelled_all() -> bool:
        at = Round(folder / "compared")
        if not (at.folder / QUEUE).is_file():
            prompts = reviews.prompts(2 * PAIRS, seed + 3)
            runs = folder / "sft", folder / "rounds" / f"round-{ROUNDS}" / "ppo"
            both = (load_language_model(str(run)).generate(prompts, max_tokens=56, seed=seed) for run in runs)
            rows = [{"prompt": prompt, "a": a, "b": b} for prompt, a, b in zip(prompts, *both, strict=True) if a != b]
            at.folder.mkdir(exist_ok=True)
            write_listed(at.folder / QUEUE, rows_text(rows[:PAIRS]))
        if judge != PEOPLE:
            chosen = preferences(settings_of(judge, folder, seed), at.queue.pairs, 0)
            write_log(at.folder / LABELS / "judge.jsonl", at.queue, chosen)
        done, total = len(labelled(at.labels)), len(at.queue.pairs)
        if done < total:
            print(
                f"{done} of {total} pairs are labelled; label them with: surefoot label {at.folder}, then repeat this command"
            )
        return done == total

    return on_first(labelled_all)


def report(judge: str, folder: Path, seed: int, started: float) -> dict[str, Any]:
    """Print how well reward model and policy know this person, before and after, and what to try next."""
    rounds = [read_listed_table(folder / "rounds" / f"round-{number}" / "round.json") for number in (1, ROUNDS)]
    predicted = [of["predicted"] for of in rounds]
    better = [label.preference for label in Round(folder / "compared").labels if not label.repeat]
    preferred = share(better.count("b"), better.count("a") + better.count("b"))
    print(f"\n{'What was learned of you':48}{'before':>22}{'after':>22}")
    print(f"{'your labels predicted by the reward model':48}{share_text(predicted[0]):>22}{share_text(predicted[1]):>22}")
    print(f"{'your choice between the SFT model and the trained':48}{'50% of each':>22}{share_text(preferred):>22}")
    if preferred["share"] is None or preferred["low"] <= 0.5 <= preferred["high"]:
        print(f"Not enough labels yet: 50% is in the 95 % interval (in brackets) of {preferred['of']} comparisons.")
    else:
        print(f"You prefer the {'trained' if preferred['share'] > 0.5 else 'SFT'} model's answers, by more than chance.")
    write_text(folder / "ppo.toml", to_toml(settings_of(judge, folder, seed).recipe))
    here, shown = command_here(), visible(str(folder))
    judged = PEOPLE if judge == PEOPLE else f"{GOLD} --noise {NOISE}"
    print("\nTry next:")
    print(f"  {here} rounds {shown}/ppo.toml --run-dir {shown}/rounds --pairs {PAIRS} --judge {judged} --rounds {ROUNDS + 1}")
    print(f"  {here} label {shown}/rounds --report       # your pace, and whether you agree with yourself")
    print(f"  {here} inspect {shown}/rounds/round-{ROUNDS}/ppo       # every token and its arithmetic, in a browser")
    return {"seconds": time.monotonic() - started, "predicted": predicted, "preferred": preferred}
