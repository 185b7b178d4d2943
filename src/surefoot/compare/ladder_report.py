"""The ladder in words: three tables, and what they are made of."""

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.compare.report import COUNT, average, each, how_sure, known, mean_and_interval, number, seeds_in_words, setting_of
from surefoot.compare.statistics import markdown_table
from surefoot.core.algorithms import Objective
from surefoot.recipes.control import ControlRecipe

Table = tuple[list[str], list[list[str]]]
Cells = Mapping[str, Sequence[Mapping[str, Any]]]


def report_text(results: Mapping[str, Any], recipes: Mapping[str, ControlRecipe], top: ControlRecipe) -> str:
    """The tables, and what they are made of."""
    by_name: Cells = results["results"]
    rungs: Mapping[str, int] = results["rungs"]
    parts = [
        f"# The ladder on {top.task}",
        f"{top.steps:,} environment steps for each of {seeds_in_words(top.seed, results['seeds'])}.",
        "Learning. Return is the mean of the last 100 training episodes, actions sampled; greedy is the final agent's"
        + (f" over {results['episodes']} episodes." if results["episodes"] else "; it was not asked for."),
        markdown_table(*_learning(by_name, rungs, recipes)),
    ]
    if results["gradients"] is not None:
        found = results["gradients"]
        parts += [
            f"Gradient noise at one frozen θ: every rung's policy gradient on the same {found['batches']} independent batches.",
            markdown_table(*_noise(found, rungs)),
        ]
    if any(rung >= 4 for rung in rungs.values()):
        parts += [
            "Data reuse: return after a part of the batches, and how far ratios went.",
            markdown_table(*_reuse(by_name, rungs)),
        ]
    parts.append("\n".join(f"- {line}." for line in _notes(results, recipes, top)))
    return "\n\n".join(parts)


def _learning(by_name: Cells, rungs: Mapping[str, int], recipes: Mapping[str, ControlRecipe]) -> Table:
    header = [
        "rung",
        "adds",
        "return",
        "95 % interval",
        "each seed",
        "greedy",
        "average over the run",
        "updates",
        "steps per batch",
    ]
    header.append("critic explains")
    rows = []
    for name, cells in by_name.items():
        size = sum(c["steps"] for c in cells) / sum(c["rollouts"] for c in cells)
        rows.append(
            [
                f"{rungs[name]} {name}",
                _adds(rungs[name], recipes[name].objective),
                *mean_and_interval(known(cells, "last_100_mean")),
                each(known(cells, "last_100_mean")),
                average(cells, "greedy_mean"),
                average(cells, "average_return"),
                average(cells, "updates", COUNT),
                COUNT.format(size),
                average(cells, "explained_variance", "{:+.2f}"),
            ]
        )
    return header, rows


def _adds(rung: int, objective: Objective) -> str:
    """What a rung has that the one below has not."""
    reuse, clip = objective.reuse, objective.clip
    return (
        "log π × return",
        "− mean return",
        "− critic V(s)",
        f"GAE, λ = {objective.gae_lambda:g}",
        f"{reuse.epochs} epochs × {reuse.minibatches} minibatch{'es' if reuse.minibatches > 1 else ''}" if reuse else "",
        f"clip, ε = {clip.clip:g}" if clip else "",
    )[rung]


def _noise(found: Mapping[str, Any], rungs: Mapping[str, int]) -> Table:
    first = next(iter(found["noise"]))
    header = [
        "rung",
        "variance",
        "95 % interval",
        f"share of {first}'s",
        "95 % interval",
        "signal",
        "95 % interval",
        "noise/signal",
    ]
    rows = []
    for name, noise in found["noise"].items():
        cells = [f"{rungs[name]} {name}"]
        for key in ("variance", "relative", "signal"):
            value, interval = noise[key], noise[f"{key}_interval"]
            cells += ["–", "–"] if value is None else [f"{value:.3g}", f"{interval[0]:.3g} to {interval[1]:.3g}"]
        rows.append([*cells, "–" if noise["noise_to_signal"] is None else f"{noise['noise_to_signal']:.3g}"])
    return header, rows


def _reuse(by_name: Cells, rungs: Mapping[str, int]) -> Table:
    header = [
        "rung",
        "batches",
        "updates per batch",
        "return after ¼",
        "after ½",
        "at the end",
        "largest ratio, each seed",
        "ratios outside ε",
    ]
    rows = []
    for name, cells in by_name.items():
        if rungs[name] < 3:
            continue
        outside = known(cells, "ratio_outside")
        rows.append(
            [
                f"{rungs[name]} {name}",
                average(cells, "rollouts", COUNT),
                COUNT.format(sum(c["updates"] for c in cells) / sum(c["rollouts"] for c in cells)),
                *(number(_after(cells, share)) for share in (0.25, 0.5, 1.0)),
                each(known(cells, "ratio_max")),
                f"{sum(outside) / len(outside):.1%}" if outside else "–",
            ]
        )
    return header, rows


def _after(cells: Sequence[Mapping[str, Any]], share: float) -> float | None:
    """The mean return over seeds after a share of each training's batches."""
    found = []
    for cell in cells:
        curves = cell["curves"]
        reached = [
            r
            for n, r in zip(curves["rollouts"], curves["return"], strict=True)
            if n <= share * cell["rollouts"] and r is not None
        ]
        found += reached[-1:]
    return sum(found) / len(found) if found else None


def _notes(results: Mapping[str, Any], recipes: Mapping[str, ControlRecipe], top: ControlRecipe) -> list[str]:
    """What was used, exactly, and what the numbers are."""
    rollout, objective = top.rollout, top.objective
    lines = [
        f"Shared by all rungs: {setting_of(top)}; critic's weight c_v = {objective.value_coefficient:g}, entropy bonus "
        f"c_e = {objective.entropy_coefficient:g}; advantages not normalised",
        f"A batch is {rollout.environments} environments × {rollout.steps} steps = {top.batch_size:,} steps; on rungs 0 and 1, "
        f"whole episodes one after the other until {top.batch_size:,} steps are there. Rungs 0 to 3 make one update per batch",
        "The budget counts environment steps; a training ends with the batch that reaches it",
        how_sure(results["seeds"]),
    ]
    if any(rung >= 2 for rung in results["rungs"].values()):
        lines.append(
            "Critic explains: the median explained variance in the last quarter of a training; 1 is all of it, 0 is what a "
            "constant explains, and where returns hardly differ any more it says nothing"
        )
    return lines if results["gradients"] is None else [*lines, *_gradient_notes(results["gradients"], top)]


def _gradient_notes(found: Mapping[str, Any], top: ControlRecipe) -> list[str]:
    return [
        f"θ was frozen at step {found['frozen_at']:,} of {top.algorithm}, seed {found['frozen_seed']} (the run in "
        f"frozen-seed{found['frozen_seed']}/): policy, critic and normalisers. Each batch is whole episodes, "
        f"{found['steps_per_batch']:,.0f} steps on average, the same for every rung",
        "Variance: the trace of the covariance of one batch's gradient in the policy's parameters. Signal: the squared norm of "
        "the expected gradient, estimated without bias, so that it may come out negative where noise hides it. Noise/signal: "
        "how many batches to average until both are equal. Intervals: 95 % bootstrap over batches; both parts of a share come "
        "from the same batches",
        f"Of the {found['episodes']:,} episodes {found['cut']:,} were cut by a time limit. There rungs 2 and 3 let the critic "
        "stand for the rest and rungs 0 and 1 do not, so that their expected gradients may differ. That of rung 3 does anyway: "
        "λ < 1 trades bias for variance",
    ]
