"""E13: three sentences that a formula and a run show to be true or false."""

from pathlib import Path
from typing import Any

import torch

from claims import LEDGER, RESULTS, Bound, Cell, Claim, Experiment, Result, Results, exact, single
from claims.training import recipe_of, trained

SEEDS = (1, 2, 3, 4, 5)
STEPS = 20_000
TARGET = 0.01
"""target KL of the early stop; epochs stop at 1.5 times this"""


def clip_run(seed: int) -> Cell:
    """PPO_CLIP on CartPole: the largest ratio of the run."""

    def work(folder: Path) -> Result:
        return trained(recipe_of("CartPole-v1", "PPO_CLIP", seed, {"steps": STEPS, "engine": "compiled"}), folder)

    return Cell(f"ratio-{seed}", work, LEDGER / "E13" / f"ratio-{seed}")


def formula(folder: Path) -> Result:
    """∂J/∂ρ of the clipped surrogate outside the band, for a bad action that became likelier."""
    from surefoot.functional import clipped_surrogate

    ratio = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    objective = clipped_surrogate(ratio, torch.tensor([-1.0], dtype=torch.float64), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(objective.sum(), ratio)
    return {"ratio": 1.5, "advantage": -1.0, "gradient": float(gradient)}


def stop_run(seed: int) -> Cell:
    """PPO_CLIP on CartPole with every step of every batch traced: both estimates after each epoch."""

    def work(folder: Path) -> Result:
        from surefoot import read_trace
        from surefoot.store.reading import traces_in

        # Traced rows are whole environments, so an epoch's mean is over the batch.
        rollout = {"environments": 8, "steps": 32}
        traces = {"rows": 8, "every": 1, "max_megabytes": 512.0}
        recipe = recipe_of("CartPole-v1", "PPO_CLIP", seed, {"steps": STEPS, "rollout": rollout, "traces": traces})
        result = trained(recipe, folder)
        right, turned = [], []
        for path in traces_in(folder / f"run-seed{seed}" / "traces"):
            ratios = [row.visits.ratio.double() for row in read_trace(path).rows]
            for epoch in zip(*ratios, strict=True):
                ratio = torch.cat(epoch)
                right.append(float((ratio - 1 - ratio.log()).mean()))
                turned.append(float(ratio.log().mean()))
        passed = [above > 1.5 * TARGET for above in right]
        fired = [above > 1.5 * TARGET for above in turned]
        both = sum(a and b for a, b in zip(passed, fired, strict=True))
        counts = {"epochs": len(passed), "kl_above": sum(passed), "turned_above": sum(fired), "both": both}
        return {**{name: result[name] for name in ("engine", "seed", "steps", "last_100_mean")}, **counts}

    return Cell(f"stop-{seed}", work, LEDGER / "E13" / f"stop-{seed}")


def memory_sums(folder: Path) -> Result:
    """Bytes of four roles of 7 billion parameters: weights alone, the usual sum, and with AdamW."""
    from surefoot.language.memory.planner import textbook

    sums = textbook(7_000_000_000)
    return {"weights": 4 * 2 * 7_000_000_000, **{way: sum(roles.values()) for way, roles in sums.items()}}


def ratio_bounds(results: Results) -> list[Bound]:
    largest = [results[f"ratio-{seed}"]["ratio_max"] for seed in SEEDS if f"ratio-{seed}" in results]
    slope = abs(results["formula"]["gradient"])
    return [
        single("largest ratio of a run", largest, 1.2, above=False),
        exact("size of ∂J/∂ρ at ρ = 1.5, Â = −1", slope, 1e-9, above=False),
    ]


def stop_bounds(results: Results) -> list[Bound]:
    runs = [results[f"stop-{seed}"] for seed in SEEDS if f"stop-{seed}" in results]
    shares = [run["both"] / run["kl_above"] for run in runs]
    return [single("share of the epochs with KL above 1.5 × target in which the rule fires", shares, 0.5)]


def memory_bounds(results: Results) -> list[Bound]:
    sums, run = results["sums"], results["run"]
    per_parameter = run["stays"] / run["parameters"]
    return [
        exact("weights of four 7B roles, GB", sums["weights"] / 1e9, 83.9),
        exact("bytes that stay per parameter of a role, in a run with four roles", per_parameter, 12.1, above=False),
    ]


def needing(*starts: str) -> Any:
    """Whether a cell's name starts with one of these."""
    return lambda name: name.startswith(starts)


CELLS = {
    **{f"ratio-{seed}": clip_run(seed) for seed in SEEDS},
    **{f"stop-{seed}": stop_run(seed) for seed in SEEDS},
    "formula": Cell("formula", formula, LEDGER / "E13" / "formula"),
    "sums": Cell("sums", memory_sums, LEDGER / "E13" / "sums"),
}

E13 = Experiment(
    key="E13",
    title="Three sentences, each with a formula and a run",
    protocol=(
        f"CartPole-v1, the `cartpole` preset (PPO_CLIP, ε = 0.2, 20 epochs) with {STEPS:,} steps, seeds 1 to 5, on which it "
        "was not tuned. Memory: the planner's sums, and the allocator's record of a run with four roles of 112 million "
        "parameters (benchmarks/memory.py, `large_own`)."
    ),
    cells=CELLS,
    core_hours=0.05,
    claims=(
        Claim(
            "E13.1",
            "Clipping at ε = 0.2 keeps every ratio within ±20 %.",
            "common reading of the PPO paper, section 3; the paper does not claim it",
            "the largest ratio of a run lies below 1.2, and the clipped surrogate has no gradient outside the band",
            ratio_bounds,
            {
                "refuted": "The clip removes only the incentive to go further: where a bad action became likelier the "
                "minimum takes "
                "the unclipped term, and a step for other samples moves ratios whose own gradient is zero.",
            },
            needing("ratio", "formula"),
        ),
        Claim(
            "E13.2",
            "Stopping the epochs when mean(log π_θ − log π_old) passes a target KL limits the KL.",
            "a slip of sign in code that stops early; the usual rule is mean(log π_old − log π_θ)",
            "of the epochs whose KL (estimated by k3 on the whole batch) is above 1.5 × 0.01, the rule fires in more than half",
            stop_bounds,
            {
                "refuted": "On samples of π_old the mean of log π_θ − log π_old estimates −KL(π_old‖π_θ), which is never "
                "positive, so "
                "only noise makes the rule fire.",
            },
            needing("stop"),
        ),
        Claim(
            "E13.3",
            "The 84 GB of RLHF with a 7B model are the weights of the four models.",
            "the usual sum 28 + 28 + 14 + 14 GB",
            "the weights of four roles have 84 GB, and in a run no more than 12 bytes stay per parameter of a role",
            memory_bounds,
            {
                "refuted": "In two bytes each the weights are 56 GB; 84 GB adds the gradients of policy and critic, and "
                "leaves out "
                "the optimizer, which is larger than both.",
            },
            needing("sums", "run"),
        ),
    ),
)
CELLS["run"] = Cell("run", lambda folder: measured_roles(), RESULTS / "memory" / "large_own")


def measured_roles() -> Result:
    """Measure the four roles again, in benchmarks/memory.py's way."""
    import tempfile

    from memory import configurations, measured

    with tempfile.TemporaryDirectory() as temporary:
        return measured("large_own", configurations(Path(temporary))["large_own"]())


EXPERIMENTS = (E13,)
