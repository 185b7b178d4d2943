"""E11: the paper's ablation of the trust region."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from claims import Bound, Cell, Claim, Experiment, Results, arrays, difference
from claims.peers import mujoco_cell
from claims.sweeps import grid_cell
from claims.training import MUJOCO, SEVEN, random_cell, run_cell, scores_named
from surefoot.compare.across_tasks import iqm
from surefoot.compare.statistics import interval, markdown_table

PAPER = {
    "clip_0.2": 0.82,
    "clip_0.1": 0.76,
    "target_0.01": 0.74,
    "beta_3": 0.72,
    "beta_1": 0.71,
    "target_0.03": 0.71,
    "clip_0.3": 0.70,
    "beta_10": 0.69,
    "target_0.003": 0.68,
    "beta_0.3": 0.62,
    "none": -0.39,
}
"""the paper's scores (table 1), the best first"""
REGIONS: dict[str, tuple[str, dict[str, float]]] = {
    "none": ("PPO_UNCLIPPED", {}),
    **{f"clip_{clip:g}": ("PPO_CLIP", {"clip": clip}) for clip in (0.1, 0.2, 0.3)},
    **{f"target_{target:g}": ("PPO_PENALTY_ADAPTIVE", {"target": target}) for target in (0.003, 0.01, 0.03)},
    **{f"beta_{beta:g}": ("PPO_PENALTY", {"beta": beta}) for beta in (0.3, 1.0, 3.0, 10.0)},
}
ABLATION_SEEDS = (1, 2, 3)
PRESET_REGIONS = ("clip_0.2", "target_0.01", "beta_1")
"""those of the preset, whose runs are E10's and E14's"""
EPSILONS = {"clip_0.1": 0.1, "clip_0.3": 0.3}
"""those whose runs on HalfCheetah are E8's"""


def ablation_cell(task: str, region: str, seed: int) -> Cell:
    """A run of E8, E10 or E14 with the same settings, or one of its own."""
    algorithm, settings = REGIONS[region]
    if region in PRESET_REGIONS:
        shared = mujoco_cell("surefoot", task, algorithm, seed)
    elif task == "HalfCheetah-v5" and region in EPSILONS:
        shared = grid_cell("HalfCheetah", EPSILONS[region], 10, seed)
    else:
        changes: dict[str, Any] = {**MUJOCO, **({"objective": {"trust_region": settings}} if settings else {})}
        return run_cell("E11", f"{task}-{region}", task, algorithm, seed, changes, preset="mujoco")
    return replace(shared, name=f"{task}-{region}-{seed}")


def normalised(results: Results, region: str) -> list[list[float]]:
    """Scores of a region on each task; 0 is random and 1 the best mean of a region, as in the paper.

    Raises ValueError while a region has no run on a task.
    """
    tasks = []
    for task in SEVEN:
        low = results[f"{task}-random-1"]["last_100_mean"]
        returns = {other: arrays([scores_named(results, f"{task}-{other}", "last_100_mean")])[0] for other in REGIONS}
        high = max(each.mean() for each in returns.values())
        tasks.append([float((score - low) / (high - low)) for score in returns[region]])
    return tasks


def against_others(region: str, results: Results, *, above: bool) -> list[Bound]:
    """That a region scores above, or below, each of the others."""
    ours = normalised(results, region)
    others = [other for other in PAPER if other != region]
    return [difference(f"{region} minus {other}", ours, normalised(results, other), above=above) for other in others]


def paper_order(results: Results) -> list[Bound]:
    """Spearman's correlation of the scores with the paper's; each region's seeds vary on their own."""
    regions = [arrays(normalised(results, region)) for region in PAPER]
    paper = ranks(np.array([*PAPER.values()])[None])

    def with_paper(*each: Sequence[NDArray[Any]]) -> NDArray[Any]:
        scores = np.stack([np.atleast_1d(iqm(tasks)) for tasks in each], -1)
        return correlation(ranks(scores), paper).squeeze()

    low, high = interval(with_paper, *regions, within=(-1, 1))
    runs = min(len(task) for region in regions for task in region)
    return [Bound("rank correlation with the paper", float(with_paper(*regions)), low, high, runs=runs)]


def ranks(rows: NDArray[Any]) -> NDArray[Any]:
    """Ranks within each row, from 0; equal values share the mean of theirs.   [n, k] -> [n, k]"""
    below = (rows[:, None, :] < rows[:, :, None]).sum(-1)
    equal = (rows[:, None, :] == rows[:, :, None]).sum(-1)
    return np.asarray(below + (equal - 1) / 2)


def correlation(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Pearson's correlation of each row.   [n, k], [n or 1, k] -> [n]"""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    return np.asarray((x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1)))


def beside_paper(results: Results) -> list[str]:
    """The paper's table 1 beside the means and IQMs here, and what chance gives; empty while cells are missing."""
    if len(results) < len(E11.cells):
        return []
    scores = {region: arrays(normalised(results, region)) for region in PAPER}
    means = {region: float(np.mean([task.mean() for task in scores[region]])) for region in PAPER}
    iqms = {region: float(iqm(scores[region])) for region in PAPER}
    places = sorted(iqms, key=lambda region: -iqms[region])
    rows = [
        [region, f"{PAPER[region]:.2f}", f"{means[region]:.2f}", f"{iqms[region]:.2f}", str(places.index(region) + 1)]
        for region in PAPER
    ]
    header = ["trust region", "paper's mean", "mean here", "IQM here", "place by IQM"]
    return [markdown_table(header, rows), beside_chance(iqms)]


def beside_chance(iqms: Mapping[str, float]) -> str:
    """The rank correlation that a random order exceeds once in twenty, and that without the region that is last in both."""
    ours, paper = (ranks(np.array([[scores[region] for region in PAPER]])) for scores in (iqms, PAPER))
    random = np.random.default_rng(0).permuted(np.repeat(ours, 100_000, 0), axis=1)
    chance = float(np.quantile(correlation(random, paper), 0.95))
    bounded = [region for region in PAPER if region != "none"]
    without = (ranks(np.array([[scores[region] for region in bounded]])) for scores in (iqms, PAPER))
    return (
        f"Orders at random have a rank correlation with the paper's above {chance:.2f} once in twenty times. Without "
        f"`none` the correlation is {float(correlation(*without)[0]):.2f}."
    )


E11 = Experiment(
    key="E11",
    setting="task-trust region",
    title="The paper's ablation of the trust region",
    protocol=(
        "Table 1 of the PPO paper: no trust region; clip 0.1, 0.2, 0.3; adaptive penalty with target 0.003, 0.01, "
        "0.03; fixed penalty 0.3, 1, 3, 10; its seven MuJoCo tasks (version 5), 1,000,000 steps, seeds 1 to 3, "
        "`mujoco` preset. Scores: mean return of the last 100 training episodes, per task from 0 (random) to 1 (the best of "
        "the eleven means, taken as exact; the paper defines none, so only the order is comparable). Intervals are not "
        "corrected for ten comparisons: if all regions but `none` were equal, about one in seven such experiments would refute "
        "E11.1 (`benchmarks/equal_regions.py`). The chance level is younger than the rules. Clip 0.2, target 0.01 "
        "and penalty 1 are runs of E10 and E14; clip 0.1 and 0.3 on HalfCheetah are E8's. Some are older than these rules."
    ),
    cells={
        cell.name: cell
        for cell in [
            *(random_cell("E14", task) for task in SEVEN),
            *(ablation_cell(task, region, seed) for seed in ABLATION_SEEDS for task in SEVEN for region in REGIONS),
        ]
    },
    core_hours=18.0,
    claims=(
        Claim(
            "E11.1",
            "Clipping at 0.2 scores higher than every other trust region.",
            "PPO paper, table 1",
            "the IQM of its normalised score is above that of each of the ten others",
            partial(against_others, "clip_0.2", above=True),
            {
                "refuted": "At least one other region scores higher; among ten comparisons of three seeds, chance alone may do "
                "that.",
            },
        ),
        Claim(
            "E11.2",
            "Without a trust region the score is the lowest.",
            "PPO paper, table 1: below that of random actions",
            "the IQM of its normalised score is below that of each of the ten others",
            partial(against_others, "none", above=False),
            {"confirmed": "Nothing stops the ten epochs on a batch: in every run some ratios reach thousands."},
        ),
        Claim(
            "E11.3",
            "The ranking of the trust regions correlates with the paper's.",
            "PPO paper, table 1",
            "Spearman's rank correlation of the eleven IQMs with the paper's scores is above 0",
            paper_order,
            {
                "confirmed": "`none` is last in both; `show E11` says how much that and chance contribute.",
            },
        ),
    ),
    tables=beside_paper,
)
EXPERIMENTS = (E11,)
