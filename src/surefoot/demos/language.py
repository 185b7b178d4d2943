"""``surefoot demo language``: SFT, a reward model and PPO with its four roles, on reviews with a known true score.

Every stage is an ordinary run from files that stay in the folder, so you can repeat each by hand.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from surefoot.demos import Demo, Stage, command_here
from surefoot.errors import require_package
from surefoot.language.data.rows import write_rows
from surefoot.language.language_model import load_language_model
from surefoot.language.pairs import sample_pairs
from surefoot.language.tasks import reviews
from surefoot.terminal import visible

PAIRS, HELD_OUT_PAIRS = 6_000, 400
NOISE = 0.25
"""of the labels: the better of two reviews is chosen in 92 %"""
GOLD = "surefoot.language.tasks.reviews:gold"
SFT = {"data": {"train": "./data/demonstrations.jsonl", "held_out": "./data/held_out_demonstrations.jsonl"}}
REWARD = {
    "model": "./sft",
    "data": {"train": "./data/pairs.jsonl", "held_out": "./data/held_out_pairs.jsonl"},
    "demonstrations": "./data/held_out_demonstrations.jsonl",  # a few hundred are enough for mean and spread of the scores
}
PPO = {
    "model": "./sft",
    "data": {"train": "./data/prompts.jsonl", "held_out": "./data/held_out_prompts.jsonl"},
    "evaluation": {"demonstrations": "./data/held_out_demonstrations.jsonl", "rows": 128},
    "reward": {"terms": [{"model": "./reward"}], "gold": GOLD},
    "critic": {"start": "./reward"},
}
UNANCHORED = {"reference": {"beta": 0.0, "measure": True}}
STAGES = (
    Stage(
        "reviews_sft",
        "sft",
        "1/3 SFT: a small model learns to write reviews from demonstrations, good and bad ones.",
        lambda folder, seed: write_data(folder / "data", seed),
        SFT,
    ),
    Stage(
        "reviews_reward",
        "reward",
        "2/3 Reward model: the SFT model writes pairs of reviews, then it learns which one people prefer.",
        lambda folder, seed: write_pairs(folder / "data", folder / "sft", seed),
        REWARD,
    ),
    Stage(
        "reviews",
        "ppo",
        "3/3 PPO: the model maximises the learned reward; a KL penalty keeps it near the SFT model.",
        changes=PPO,
    ),
)


def demo(anchored: bool = True) -> Demo:
    """SFT, a reward model and PPO; ``anchored``: with a KL penalty. Raises SurefootError without ``transformers``."""
    require_package("transformers", "language", "demo language")  # before anything is written
    *before, ppo = STAGES
    ppo = ppo if anchored else replace(ppo, changes={**PPO, **UNANCHORED})
    return Demo(f"demo-language{'' if anchored else '-no-anchor'}", (*before, ppo), partial(report, anchored=anchored))


def write_data(folder: Path, seed: int) -> None:
    """Write demonstrations and prompts, and held-out ones of both, also for products that PPO never sees."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "demonstrations.jsonl", reviews.demonstrations(8_000, seed))
    write_rows(folder / "held_out_demonstrations.jsonl", reviews.demonstrations(512, seed + 1))
    write_rows(folder / "prompts.jsonl", ({"prompt": prompt} for prompt in reviews.prompts(2_000, seed)))
    write_rows(folder / "held_out_prompts.jsonl", ({"prompt": prompt} for prompt in reviews.prompts(128, seed + 1)))
    others = reviews.prompts(128, seed + 1, held_out=True)
    write_rows(folder / "held_out_products.jsonl", ({"prompt": prompt} for prompt in others))


def write_pairs(folder: Path, sft: Path, seed: int, pairs: int = PAIRS) -> None:
    """Write pairs of reviews by the SFT model, labelled by the gold score with noise; held-out pairs go to their own file."""
    model = load_language_model(str(sft))
    prompts = reviews.prompts(pairs + HELD_OUT_PAIRS, seed + 2)
    rows = reviews.label(sample_pairs(model, prompts, max_tokens=56, seed=seed), noise=NOISE, seed=seed)
    write_rows(folder / "held_out_pairs.jsonl", rows[:HELD_OUT_PAIRS])
    write_rows(folder / "pairs.jsonl", rows[HELD_OUT_PAIRS:])


def evaluate_stages(ppo: Path, data: Path) -> dict[str, dict[str, Any]]:
    """Evaluate a PPO run and its SFT start on held-out prompts, of products in the training data and of others."""
    from surefoot.language.analysis.evaluate import evaluate_run

    others = evaluate_run(ppo, rows=128, data=str(data / "held_out_products.jsonl"))
    return {"known_products": evaluate_run(ppo, rows=128), "other_products": others}


def curve_of(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of blocks from its least to its largest value, with its first, its largest and its last value."""
    count = min(width, len(values))
    means = [fmean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    low, span = min(means), max(means) - min(means) or 1.0
    blocks = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / span))] for value in means)
    return f"{blocks}  {means[0]:.2f}, at most {max(means):.2f}, at the end {means[-1]:.2f}"


def report(folder: Path, seed: int, started: float, anchored: bool = True) -> dict[str, Any]:
    """Print SFT and PPO on the held-out prompts, some answers, and what to try next."""
    from surefoot.store.metrics import read_metrics

    ppo = folder / "ppo"
    reports = evaluate_stages(ppo, folder / "data")
    known, others = reports["known_products"], reports["other_products"]
    accuracy = read_metrics(folder / "reward" / "metrics.jsonl")[-1]["held_out_accuracy"]
    print(f"\n{'Answers to held-out prompts':28}{'of known products':>20}{'of other products *':>24}")
    print(f"{'':28}" + f"{'SFT':>10}{'PPO':>10}{'':4}" * 2)
    for name, label in (
        ("reward", "proxy reward (learned)"),
        ("gold", "gold reward (the truth)"),
        ("kl", "KL to SFT, nats/response"),
        ("log_likelihood", "log π of demonstrations"),
        ("distinct_2", "distinct bigrams"),
        ("length", "length, tokens"),
    ):
        cells = (f"{report['start'][name]:>10.2f}{report['trained'][name]:>10.2f}{'':4}" for report in (known, others))
        print(f"{label:28}{''.join(cells)}")
    won = (f"{report['win_rate_gold']:>20.0%}{'':4}" for report in (known, others))
    print(f"{'better than SFT by gold':28}{''.join(won)}")
    print("* in no preference pair and no training prompt")
    seconds, shown = time.monotonic() - started, visible(str(folder))
    print(f"The reward model ranks {accuracy:.0%} of held-out pairs as labelled.")
    print(f"{seconds:.0f} s in total; the runs are in {shown}/")
    print()
    for row in known["samples"][:4] + others["samples"][:2]:
        print(f"  {row['prompt'].strip():12} SFT: {row['start']}\n{'':15}PPO: {row['response']}")
    print("\nDuring PPO, on training prompts:")
    history = read_metrics(ppo / "metrics.jsonl")
    for name, label in (("reward", "proxy reward (learned)"), ("gold", "gold reward (the truth)")):
        print(f"{label:28}{curve_of([row[name] for row in history if row.get(name) is not None])}")
    print("\nTry next:")
    here, run = command_here(), visible(str(ppo))
    print(f"  {here} inspect {run}       # every token and its arithmetic, in a browser")
    other = (
        "--no-anchor       # β = 0: watch the reward being hacked" if anchored else "--run-dir anchored  # with the KL penalty"
    )
    print(f"  {here} demo language {other}")
    print(f"  {here} generate {run} --prompt 'new tent: ' --samples 5")
    print(f"  {here} evaluate {run} --json")
    kept = {of: {name: value for name, value in report.items() if name != "samples"} for of, report in reports.items()}
    return {"seconds": seconds, "reward_accuracy": accuracy, **kept}
