"""Train the six algorithms from REINFORCE to PPO on one task, each one switch above the one before: ``surefoot ladder``.

All rungs share network, optimizer, normalisation, γ, budget and seeds. They differ in one more thing than the switches: rungs 0
and 1 learn from whole episodes, because nothing estimates the rest of a truncated one. They run episodes one after another
until they have as many steps as the other rungs have in a batch.

The noise of the rungs' gradients is measured with many independent batches under one frozen θ. Every estimator gets the same
batches (common random numbers), policy, critic and normalisers, and the sum over a batch is divided by the same number. Batches
are whole episodes, which the estimators without a critic need, and use the collector, credit assignment and loss of training.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.compare.algorithms import check_switches_used
from surefoot.compare.cells import (
    Cell,
    check_counts,
    default_folder,
    locked_folder,
    recipe_tables,
    run_cells,
    seeds_of,
)
from surefoot.compare.plots import draw_ladder
from surefoot.compare.processes import OverallProgress
from surefoot.compare.report import Report, interval_note, rendered, seeds_text, shared_settings, write_report
from surefoot.compare.statistics import (
    COUNT,
    Results,
    average,
    finite,
    markdown_table,
    noise_of,
    number,
    numbers,
    present,
    with_interval,
)
from surefoot.control.agent import Agent
from surefoot.control.collect import ControlCollector
from surefoot.control.environments import make_environments
from surefoot.control.environments.looped import MakeEnvironment
from surefoot.control.environments.tensor import TensorEnvironments
from surefoot.core.algorithms import ALGORITHMS, LADDER, REINFORCE, Objective, check_count, switches_that_are_on
from surefoot.core.credit import assign_credit
from surefoot.core.minibatches import rows_of
from surefoot.core.objective import loss
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import recipe_table
from surefoot.recipes.reading import control_recipe, merge_tables, without_critic, without_tuned_for
from surefoot.runs import api
from surefoot.store.checkpoint import latest_checkpoint
from surefoot.store.manifest import read_listed_table, write_listed

NAMES = tuple(next(name for name, value in ALGORITHMS.items() if value == rung) for rung in LADDER)
MEASURED = 4
"""rungs whose gradients are compared at one θ: the first four, which make one update per batch"""
FROZEN = 0.1
"""the share of the budget after which the top rung's θ is frozen for the gradients"""

FIXED = {
    "baseline": "differs between rungs 0, 1 and 2",
    "normalise_advantages": "is off on all rungs, because subtracting the mean would make the first two the same",
}
"""switches that can't be changed for all rungs, and why"""


def run_ladder(
    task: str,
    changes: Mapping[str, Any],
    seeds: int,
    folder: Path | None = None,
    rungs: Sequence[int] = (),
    batches: int = 100,
    episodes: int = 20,
    jobs: int = 1,
    stderr: bool = False,
) -> Report:
    """Train the rungs on every seed, measure the noise of their gradients, and report both. The same call again continues.

    changes  recipe fields to change for all rungs; a switch changes from the rung on that turns it on
    rungs    numbers of the rungs to train; default: all six
    batches  number of batches under the frozen θ, for the variance of gradients

    The other arguments are those of ``compare_algorithms``.
    Raises SurefootError for a count out of bounds or a recipe that can't be trained, before writing anything, and Interrupted
    after a signal.
    """
    check_counts(seeds, episodes, jobs)
    check_count("batches", batches, least=2)
    recipes, top = _rung_recipes(task, changes, rungs), rung_recipe(task, len(LADDER) - 1, changes)
    cells = [Cell(name, recipe) for name in recipes for recipe in seeds_of(recipes[name], seeds)]
    measured = {name: recipes[name].objective for name in NAMES[:MEASURED] if name in recipes}
    frozen = Cell("frozen", top, until=max(1, round(FROZEN * top.steps)))
    # Gradients are measured on whole episodes, so the task must be able to run those for any choice of rungs.
    extra = {"frozen": top, "gradients": rung_recipe(task, 0, changes)} if measured else {}
    request = {"command": "ladder", "seeds": seeds, "episodes": episodes, "recipes": recipe_tables(recipes)}
    gradient_steps = 0
    if measured:
        request["frozen"] = {"batches": batches, "until": frozen.until, **recipe_tables({"recipe": top})}
        cells, gradient_steps = [frozen, *cells], batches * top.batch_size
    folder = folder or default_folder("ladder", top)
    with locked_folder(folder, request, {**recipes, **extra}):
        with OverallProgress(sum(cell.steps for cell in cells) + gradient_steps, stderr) as progress:
            done = run_cells(folder, cells, episodes, jobs, progress)
            gradients = _measured_noise(folder, frozen, measured, batches, progress) if measured else None
        clip = top.objective.clip
        results = {
            **request,
            "rungs": {name: NAMES.index(name) for name in recipes},
            "clip": None if clip is None else clip.clip if clip.clip_high is None else clip.clip_high,
            "results": {name: done[name] for name in recipes},
            "gradients": gradients,
        }
        return write_report(folder, results, report_text(results, recipes, top), draw_ladder)


def _rung_recipes(task: str, changes: Mapping[str, Any], rungs: Sequence[int]) -> dict[str, ControlRecipe]:
    """By name. Raises SurefootError for an unknown rung, and for one that a change makes equal to the one below."""
    for rung in rungs:
        if not 0 <= rung < len(LADDER):
            raise SurefootError(f"rung={rung}: the ladder has rungs 0 to {len(LADDER) - 1}")
    check_switches_used(changes.get("objective", {}), dict(zip(NAMES, LADDER, strict=True)))
    chosen = sorted(set(rungs)) or list(range(len(LADDER)))
    recipes = {NAMES[rung]: rung_recipe(task, rung, changes) for rung in chosen}
    for rung in chosen:
        if rung and rung_recipe(task, rung - 1, changes).objective == recipes[NAMES[rung]].objective:
            raise SurefootError(
                f"rung={rung}: a change turns off what {NAMES[rung]} adds to {NAMES[rung - 1]}; leave the change out"
            )
    return recipes


def rung_recipe(task: str, rung: int, changes: Mapping[str, Any]) -> ControlRecipe:
    """The recipe of one rung: the rung's objective with γ and reuse of the task's recipe, and its other settings.

    Raises SurefootError for a change to a switch that distinguishes the rungs.
    """
    switches = dict(changes.get("objective", {}))
    for name, why in FIXED.items():
        if switches.get(name, "none") != "none":
            raise SurefootError(f"objective.{name}={switches[name]!r}: {why}; leave the flag out")
    base, table = LADDER[rung], without_tuned_for(recipe_table(task))
    tuned = dict(table.pop("objective", {}))
    own = {name: tuned[name] for name in ("gamma", "reuse") if tuned.get(name, "none") != "none"}
    objective = switches_that_are_on(base, merge_tables(own, {k: v for k, v in switches.items() if k not in FIXED}))
    table = merge_tables(table, {k: v for k, v in changes.items() if k != "objective"})
    table = without_critic(base, {**table, "algorithm": NAMES[rung]})
    recipe = control_recipe({**table, "objective": objective})
    if not recipe.objective.needs_whole_episodes:
        return recipe
    rollout = recipe.rollout
    alone = {"environments": 1, "at_least": rollout.at_least or recipe.batch_size, "workers": rollout.workers and 1}
    return control_recipe(merge_tables(recipe.table, {"rollout": alone}))


# ---- gradients --------------------------------------------------------------------------------------------------------


def _measured_noise(
    folder: Path, frozen: Cell, measured: Mapping[str, Objective], batches: int, progress: OverallProgress
) -> dict[str, Any]:
    """The gradient noise of the measured rungs under the frozen agent, from gradients.json if that exists."""
    file = folder / "gradients.json"
    if file.exists():
        return read_listed_table(file)
    checkpoint = latest_checkpoint(folder / frozen.name / "checkpoints")
    assert checkpoint is not None, "a finished cell has a checkpoint"
    agent, size = api.load(checkpoint), frozen.recipe.batch_size

    def on_batch(done: int) -> None:
        progress.step("gradients", done * size)

    samples = sample_gradients(agent, list(measured.values()), batches, size, frozen.recipe.seed, on_batch=on_batch)
    steps_per_batch = sum(samples.steps) / len(samples.steps)
    table: dict[str, Any] = finite(
        {
            "frozen_at": int(checkpoint.name),
            "frozen_seed": agent.recipe.seed,
            "batches": samples.gradients.shape[1],
            "steps_per_batch": steps_per_batch,
            "episodes": samples.episodes,
            "cut": samples.truncated,
            "noise": dict(zip(measured, map(asdict, noise_of(samples.gradients)), strict=True)),
        }
    )
    write_listed(file, json.dumps(table))
    progress.print(f"gradients of {len(measured)} rungs measured on {batches} batches of {steps_per_batch:,.0f} steps")
    return table


@dataclass(frozen=True)
class GradientSamples:
    """Gradients of the policy loss under one θ."""

    gradients: NDArray[np.float32]
    """[estimators, batches, parameters], for the actor's parameters only"""
    steps: list[int]
    """steps in each batch"""
    episodes: int
    """number of episodes in all batches"""
    truncated: int
    """number of those that a time limit ended: a critic replaces the rest of their return"""


def sample_gradients(
    agent: Agent,
    objectives: Sequence[Objective],
    batches: int,
    at_least: int,
    seed: int,
    task: str | MakeEnvironment | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
) -> GradientSamples:
    """The policy gradient of every objective on each of ``batches`` independent batches of whole episodes.

    The sum over each batch's steps is divided by the mean length of all batches. Training divides each batch by its own length;
    if the length of an episode depends on the actions, that adds a bias which differs between estimators.

    at_least   minimum number of steps in a batch; a batch ends with the end of an episode
    seed       seed of episodes and actions, independent of those of training with the same seed
    on_batch   called after each batch with the number of batches so far

    The agent stays unchanged. Raises SurefootError if an objective needs a critic that the agent doesn't have.
    """
    if agent.policy.critic_head is None and any(objective.baseline == "critic" for objective in objectives):
        raise SurefootError(f"agent: {agent.recipe.algorithm} has no critic; use an agent that was trained with one")
    recipe, own = agent.recipe, derived_seed(seed, "gradient variance")
    environments = make_environments(task or recipe.task, recipe.environment, 1, own)
    if isinstance(environments, TensorEnvironments):
        environments.close()
        raise SurefootError(
            f"task={recipe.task!r}: gradients are estimated on whole episodes of single environments, not tensors"
        )
    collector = ControlCollector(environments, agent, None, at_least=at_least)
    state = LearnerState.seeded(own, at_least * batches)
    frozen = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    gradients = np.empty((len(objectives), batches, 0), np.float32)
    steps, episodes, truncated = [], 0, 0
    try:
        for batch in range(batches):
            rollout = collector.collect(state)
            agent.load_state_dict(frozen)  # the collector updated the normalisers, which are frozen with θ here
            estimates = [_gradient(agent, rollout, objective, at_least) for objective in objectives]
            if batch == 0:
                gradients = np.empty((len(objectives), batches, len(estimates[0])), np.float32)
            gradients[:, batch] = torch.stack(estimates).cpu().numpy()
            ended = rollout.terminated | rollout.truncated
            steps.append(rollout.steps)
            episodes += int(ended.sum())
            truncated += int((rollout.truncated & ~rollout.terminated).sum())
            on_batch(batch + 1)
    finally:
        agent.load_state_dict(frozen)
        environments.close()
    gradients *= at_least / float(np.mean(steps))
    return GradientSamples(gradients, steps, episodes, truncated)


def _gradient(agent: Agent, rollout: Rollout, objective: Objective, count: int) -> Tensor:
    """The gradient of the policy term with respect to the parameters that it depends on.   -> [parameters]

    At θ_old the ratio is 1 and every surrogate has REINFORCE's gradient, that of log π·Â. So only the credit assignment of the
    objective matters.
    """
    batch = rows_of(rollout, assign_credit(rollout, objective))
    total = loss(agent.policy(batch.inputs, batch.actions, batch.mask), batch, REINFORCE, denominator=count).total
    learned = [parameter for parameter in agent.policy.parameters() if parameter.requires_grad]
    parts = torch.autograd.grad(total, learned, allow_unused=True)
    return torch.cat([part.reshape(-1) for part in parts if part is not None])


# ---- report -----------------------------------------------------------------------------------------------------------


def report_text(results: Mapping[str, Any], recipes: Mapping[str, ControlRecipe], top: ControlRecipe) -> str:
    """The Markdown report: up to three tables, and notes."""
    by_name: Mapping[str, Results] = results["results"]
    rungs: Mapping[str, int] = results["rungs"]
    gradients = results["gradients"]
    return rendered(
        "ladder.md",
        top=top,
        seeds=seeds_text(top.seed, results["seeds"]),
        episodes=results["episodes"],
        learning=_learning_table(by_name, rungs, recipes),
        noise=gradients,
        noise_table=None if gradients is None else _noise_table(gradients, rungs),
        reuse=_reuse_table(by_name, rungs) if any(rung >= 4 for rung in rungs.values()) else None,
        shared=shared_settings(top),
        intervals=interval_note(results["seeds"]),
        critic=any(rung >= 2 for rung in rungs.values()),
    ).rstrip()


def _learning_table(by_name: Mapping[str, Results], rungs: Mapping[str, int], recipes: Mapping[str, ControlRecipe]) -> str:
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
        "critic explains",
    ]
    rows = []
    for name, cells in by_name.items():
        size = sum(c["steps"] for c in cells) / sum(c["rollouts"] for c in cells)
        rows.append(
            [
                f"{rungs[name]} {name}",
                _addition(rungs[name], recipes[name].objective),
                *with_interval(present(cells, "last_100_mean")),
                numbers(present(cells, "last_100_mean")),
                average(cells, "greedy_mean"),
                average(cells, "average_return"),
                average(cells, "updates", COUNT),
                COUNT.format(size),
                average(cells, "explained_variance", "{:+.2f}"),
            ]
        )
    return markdown_table(header, rows)


def _addition(rung: int, objective: Objective) -> str:
    """The switch that a rung adds to the one below."""
    reuse, clip = objective.reuse, objective.clip
    return (
        "log π × return",
        "− mean return",
        "− critic V(s)",
        f"GAE, λ = {objective.gae_lambda:g}",
        f"{reuse.epochs} epochs × {reuse.minibatches} minibatch{'es' if reuse.minibatches > 1 else ''}" if reuse else "",
        f"clip, ε = {clip.clip:g}" if clip else "",
    )[rung]


def _noise_table(gradients: Mapping[str, Any], rungs: Mapping[str, int]) -> str:
    first = next(iter(gradients["noise"]))
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
    for name, noise in gradients["noise"].items():
        cells = [f"{rungs[name]} {name}"]
        for key in ("variance", "relative", "signal"):
            value, interval = noise[key], noise[f"{key}_interval"]
            spread = "–" if value is None or None in finite(interval) else f"{interval[0]:.3g} to {interval[1]:.3g}"
            cells += ["–" if value is None else f"{value:.3g}", spread]
        rows.append([*cells, "–" if noise["noise_to_signal"] is None else f"{noise['noise_to_signal']:.3g}"])
    return markdown_table(header, rows)


def _reuse_table(by_name: Mapping[str, Results], rungs: Mapping[str, int]) -> str:
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
        outside = present(cells, "ratio_outside")
        rows.append(
            [
                f"{rungs[name]} {name}",
                average(cells, "rollouts", COUNT),
                COUNT.format(sum(c["updates"] for c in cells) / sum(c["rollouts"] for c in cells)),
                *(number(_return_after(cells, share)) for share in (0.25, 0.5, 1.0)),
                numbers(present(cells, "ratio_max")),
                f"{sum(outside) / len(outside):.1%}" if outside else "–",
            ]
        )
    return markdown_table(header, rows)


def _return_after(cells: Results, share: float) -> float | None:
    """The mean return over seeds after a share of each run's batches."""
    returns = []
    for cell in cells:
        points = zip(cell["curves"]["rollouts"], cell["curves"]["return"], strict=True)
        reached = [value for count, value in points if count <= share * cell["rollouts"] and value is not None]
        returns += reached[-1:]
    return sum(returns) / len(returns) if returns else None
