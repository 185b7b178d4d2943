"""E8 and E9: sweeps over ε, the number of epochs, and λ."""

from dataclasses import replace
from functools import partial
from typing import Any

from claims import LEDGER, Bound, Cell, Claim, Experiment, Results, difference, single
from claims.peers import mujoco_cell
from claims.training import MUJOCO, run_cell, scores_named, within
from claims.verifier import sorting

# ---- E8 ---------------------------------------------------------------------------------------------------------------

CLIPS = {"CartPole": (0.05, 0.1, 0.2, 0.3, 1.0), "HalfCheetah": (0.1, 0.2, 0.3)}
EPOCHS = (1, 3, 10, 30)
GRID_SEEDS = {"CartPole": (1, 2, 3, 4, 5), "HalfCheetah": (1, 2, 3)}
GRID_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "CartPole": ("CartPole-v1", {"engine": "compiled"}),
    "HalfCheetah": ("HalfCheetah-v5", MUJOCO),
}


def grid_name(short: str, clip: float, epochs: int) -> str:
    return f"{short}-{clip:g}-{epochs}"


def grid_cell(short: str, clip: float, epochs: int, seed: int) -> Cell:
    """One ε and number of epochs."""
    if (short, clip, epochs) == ("HalfCheetah", 0.2, 10):  # the preset's own settings, as in E10 and E14
        shared = mujoco_cell("surefoot", "HalfCheetah-v5", "PPO_CLIP", seed)
        return replace(shared, name=f"{grid_name(short, clip, epochs)}-{seed}")
    task, fixed = GRID_TASKS[short]
    objective = {"trust_region": {"clip": clip}, "reuse": {"epochs": epochs}}
    return run_cell("E8", grid_name(short, clip, epochs), task, "PPO_CLIP", seed, {**fixed, "objective": objective})


TOO_CLOSE = {
    "HalfCheetah": {"undecided": "Runs with ε = 0.2, and with 0.3, differ among themselves by factors of 2.6 and 2.1."},
}


def best_clip(short: str, results: Results) -> list[Bound]:
    ours = scores_named(results, grid_name(short, 0.2, 10))
    return [
        difference(f"{short}, ε = 0.2 minus ε = {clip:g}", [ours], [scores_named(results, grid_name(short, clip, 10))])
        for clip in (0.1, 0.3)
    ]


def few_epochs(short: str, results: Results) -> list[Bound]:
    ours = scores_named(results, grid_name(short, 0.2, 10))
    return [
        difference(f"{short}, 10 epochs minus {epochs}", [ours], [scores_named(results, grid_name(short, 0.2, epochs))])
        for epochs in (1, 30)
    ]


def clip_needed(results: Results) -> list[Bound]:
    ours, theirs = (scores_named(results, grid_name("CartPole", clip, 30)) for clip in (0.2, 1.0))
    return [difference("CartPole, 30 epochs, ε = 0.2 minus ε = 1", [ours], [theirs])]


E8_CELLS = [
    grid_cell(short, clip, epochs, seed)
    for short in CLIPS
    for seed in GRID_SEEDS[short]
    for epochs in EPOCHS
    for clip in CLIPS[short]
]
E8 = Experiment(
    key="E8",
    setting="task-ε-epochs",
    title="ε and the number of epochs",
    protocol=(
        "PPO_CLIP with the task's preset. CartPole-v1, 100,000 steps, seeds 1 to 5: ε = 0.05, 0.1, 0.2, 0.3, 1 (the start; the "
        "preset lets it fall to 0) × 1, 3, 10, 30 epochs. HalfCheetah-v5, 1,000,000 steps, seeds 1 to 3: ε = 0.1, 0.2, 0.3 × "
        "the same epochs. The score is the average return over the run. E8.5 is younger than seed 1's runs."
    ),
    cells={cell.name: cell for cell in E8_CELLS},
    core_hours=4.0,
    claims=(
        *(
            Claim(
                f"E8.{index}",
                f"ε = 0.2 is better than 0.1 and 0.3 ({short}).",
                "PPO paper, table 1",
                "with 10 epochs the average return with ε = 0.2 is above that with 0.1 and with 0.3",
                partial(best_clip, short),
                TOO_CLOSE.get(short, {}),
                within(*(grid_name(short, clip, 10) for clip in (0.1, 0.2, 0.3))),
            )
            for index, short in enumerate(CLIPS, start=1)
        ),
        Claim(
            "E8.3",
            "Ten epochs are right: one wastes data, and thirty overfit the batch (CartPole).",
            "PPO paper, table 3; folklore",
            "with ε = 0.2 the average return with 10 epochs is above that with 1 and with 30",
            partial(few_epochs, "CartPole"),
            needs=within(*(grid_name("CartPole", 0.2, epochs) for epochs in (1, 10, 30))),
        ),
        Claim(
            "E8.4",
            "With many epochs the clip is needed (CartPole).",
            "PPO paper, section 3",
            "with 30 epochs the average return with ε = 0.2 is above that with ε = 1 (which is no bound from below)",
            clip_needed,
            {"confirmed": "With ε = 1 a batch moves the policy too far: some runs lose most of what they learned, for a time."},
            needs=within(*(grid_name("CartPole", clip, 30) for clip in (0.2, 1.0))),
        ),
        Claim(
            "E8.5",
            "Ten epochs are right: one wastes data, and thirty overfit the batch (HalfCheetah).",
            "PPO paper, table 3; folklore",
            "with ε = 0.2 the average return with 10 epochs is above that with 1 and with 30",
            partial(few_epochs, "HalfCheetah"),
            needs=within(*(grid_name("HalfCheetah", 0.2, epochs) for epochs in (1, 10, 30))),
        ),
    ),
)

# ---- E9 ---------------------------------------------------------------------------------------------------------------

LAMBDAS = (0.0, 0.5, 0.9, 0.95, 1.0)
LAMBDA_SEEDS = (1, 2, 3, 4, 5)


def lambda_name(task: str, gae_lambda: float) -> str:
    return f"{task}-{gae_lambda:g}"


E9_CELLS = [
    *(
        sorting(seed, gae_lambda, LEDGER / "E9" / f"{lambda_name('sorting', gae_lambda)}-{seed}")
        for seed in LAMBDA_SEEDS
        for gae_lambda in (1.0, 0.5, 0.95, 0.0, 0.9)
    ),
    *(
        run_cell(
            "E9",
            lambda_name("Hopper", gae_lambda),
            "Hopper-v5",
            "PPO_CLIP",
            seed,
            {**MUJOCO, "objective": {"gae_lambda": gae_lambda}},
        )
        for seed in LAMBDA_SEEDS
        for gae_lambda in LAMBDAS
    ),
]


def best_lambda(results: Results) -> list[Bound]:
    ours = scores_named(results, lambda_name("Hopper", 0.95))
    return [
        difference(f"λ = 0.95 minus λ = {other:g}", [ours], [scores_named(results, lambda_name("Hopper", other))])
        for other in (0.0, 0.5, 1.0)
    ]


def accuracies(results: Results, gae_lambda: float) -> dict[int, float]:
    """Sampled accuracy on sorting of each finished seed."""
    found = {seed: results.get(f"{lambda_name('sorting', gae_lambda)}-{seed}") for seed in LAMBDA_SEEDS}
    return {seed: result["trained"]["sampled"] for seed, result in found.items() if result is not None}


def sparse(results: Results) -> list[Bound]:
    ours = accuracies(results, 1.0)
    bounds = []
    for other in (0.0, 0.5, 0.9):
        theirs = accuracies(results, other)
        differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        bounds.append(single(f"sampled accuracy, λ = 1 minus λ = {other:g}", differences))
    return bounds


E9 = Experiment(
    key="E9",
    setting="task-λ",
    title="λ of GAE",
    protocol=(
        "PPO_CLIP with λ = 0, 0.5, 0.9, 0.95, 1, seeds 1 to 5. Hopper-v5, 1,000,000 steps, `mujoco` preset: average "
        "return over the run. Sorting with a verifier, whose only reward comes after the last token (E1's start and test "
        "problems; λ = 1 is E1's run): sampled accuracy, differences within seeds."
    ),
    cells={cell.name: cell for cell in E9_CELLS},
    core_hours=2.5,
    claims=(
        Claim(
            "E9.1",
            "λ = 0.95 is best (Hopper).",
            "Schulman et al. 2016 (arXiv 1506.02438), section 6; the default of most libraries",
            "the average return with λ = 0.95 is above that with 0, 0.5 and 1",
            best_lambda,
            needs=within(*(lambda_name("Hopper", gae_lambda) for gae_lambda in (0.0, 0.5, 0.95, 1.0))),
        ),
        Claim(
            "E9.2",
            "Where reward comes only at the end, a higher λ is better (sorting).",
            "folklore of training on text; Yuan et al. 2025 (VC-PPO, arXiv 2503.01491)",
            "the sampled accuracy with λ = 1 is above that with 0, 0.5 and 0.9",
            sparse,
            {
                "confirmed": "With λ < 1 the reward reaches early tokens through a critic that has yet to learn it.",
                "refuted": "Five tokens are so few that the critic bridges them.",
            },
            within(*(lambda_name("sorting", gae_lambda) for gae_lambda in (0.0, 0.5, 0.9, 1.0))),
        ),
    ),
)

EXPERIMENTS = (E8, E9)
