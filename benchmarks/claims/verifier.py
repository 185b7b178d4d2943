"""Rewards that can be checked: E1 and the sorting half of E9, from one SFT start per seed; and E5.4 and E5.5, beside GRPO."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
from record import read

from claims import LEDGER, RESULTS, Bound, Cell, Claim, Experiment, Result, Results, single

SEEDS = (1, 2, 3, 4, 5)
LARGEST_ERROR = 0.05
"""of calibration: mean |predicted − observed| over tenths of [0, 1], weighted by their responses"""
CALIBRATED = (
    "V has a lower Brier score than the constant share of successes, before the first token and after half of them, and its "
    f"calibration error (ten bins) lies below {LARGEST_ERROR}"
)
LENGTHS, MIXED_STEPS = range(3, 10), 20_480
"""digits of the problems, and responses, of E1.2"""
MIXED = "mixed-{}"
"""its cells, by seed"""


def sorting_run(shared: Path, seed: int, gae_lambda: float) -> tuple[Path, Path]:
    """The run of the demo's PPO with a λ, and the demo's data; trained, or continued, unless it is finished."""
    import verifier

    shared.mkdir(parents=True, exist_ok=True)
    verifier.RUNS = shared
    with filelock.FileLock(shared / f".{seed}.lock"):
        folder = verifier.start("sorting", seed)
    data = folder / "data"
    changes: dict[str, Any] = {"seed": seed, "model": str(folder / "sft")}
    changes["data"] = {"train": str(data / "problems.jsonl"), "held_out": str(data / "validation.jsonl")}
    run = folder / f"ledger-lambda-{gae_lambda:g}"
    with filelock.FileLock(shared / f".{seed}-{gae_lambda:g}.lock"):
        verifier.finished(run, "sorting", {**changes, "objective": {"gae_lambda": gae_lambda}})
    return run, data


def sorting(seed: int, gae_lambda: float, file: Path) -> Cell:
    """PPO on sorting with a λ: accuracy and the critic's calibration on test problems."""

    def work(folder: Path) -> Result:
        from verifier import evaluated

        from surefoot.language.analysis.evaluate import evaluate_run

        run, data = sorting_run(folder.parents[1] / "sorting", seed, gae_lambda)
        test = data / "test.jsonl"
        calibration = evaluate_run(run, data=str(test), rows=512, seed=seed)["calibration"]
        scores = evaluated(run, test, seed)
        return {"seed": seed, "gae_lambda": gae_lambda, "engine": "eager", "trained": scores, "calibration": calibration}

    return Cell(file.name, work, file)


def mixed(seed: int, file: Path) -> Cell:
    """PPO on problems of ``LENGTHS`` digits with a critic of its own: the critic's calibration on test problems."""

    def work(folder: Path) -> Result:
        import verifier

        from surefoot.language import tasks
        from surefoot.language.analysis.evaluate import evaluate_run
        from surefoot.language.data.rows import write_rows

        def write(name: str, parts: Sequence[list[dict[str, Any]]], count: int) -> str:
            rows = [row for part in parts for row in part]
            random.Random(seed).shuffle(rows)
            write_rows(folder / name, rows[:count])
            return str(folder / name)

        def problems(each: int, first: int = 0) -> list[list[dict[str, Any]]]:
            return [tasks.rows("sorting", first + each, seed, digits, test=True)[first:] for digits in LENGTHS]

        folder.mkdir(parents=True, exist_ok=True)
        each = -(-MIXED_STEPS // len(LENGTHS))
        demonstrations = [tasks.demonstrations("sorting", 4_000, seed, digits) for digits in LENGTHS]
        data = {"train": write("demonstrations.jsonl", demonstrations, 24_000), "max_length": 32}
        verifier.finished(folder / "sft", "task_sft", {"seed": seed, "data": data})
        training = [tasks.rows("sorting", each, seed + 1, digits) for digits in LENGTHS]
        changes = {
            "data": {
                "train": write("problems.jsonl", training, MIXED_STEPS),
                "held_out": write("validation.jsonl", problems(37), 256),
            },
            "sampling": {"max_tokens": LENGTHS[-1] + 2},
            "critic": {"own_model": True},
            "optimizer": {"critic_learning_rate": 1e-3},
        }
        changes |= {"seed": seed, "steps": MIXED_STEPS, "model": str(folder / "sft")}
        verifier.finished(folder / "ppo", "sorting", changes)
        test = write("test.jsonl", problems(74, 37), 512)
        calibration = evaluate_run(folder / "ppo", data=test, rows=512, seed=seed)["calibration"]
        return {"seed": seed, "engine": "eager", "calibration": calibration}

    return Cell(file.name, work, file)


def calibration_error(report: Mapping[str, Any]) -> float:
    """Mean |predicted − observed| over the bins, weighted by their counts."""
    bins = [row for row in report["bins"] if row["count"]]
    return float(sum(row["count"] * abs(row["predicted"] - row["observed"]) for row in bins) / report["count"])


def calibrated(results: Results, cells: str = "{}") -> list[Bound]:
    reports = [results[name]["calibration"] for seed in SEEDS if (name := cells.format(seed)) in results]
    skill = {when: [1 - of[when]["brier"] / of[when]["brier_baseline"] for of in reports] for when in ("first", "middle")}
    errors = [calibration_error(of["first"]) for of in reports]
    return [
        single("1 − Brier / Brier of the constant, before the first token", skill["first"]),
        single("the same after half of the tokens", skill["middle"]),
        single("calibration error before the first token", errors, LARGEST_ERROR, above=False),
    ]


E1 = Experiment(
    key="E1",
    title="V as a probability of success",
    protocol=(
        "`surefoot demo verifier`'s SFT and PPO (sorting five digits, reward 1 or 0, γ = 1, λ = 1), seeds 1 to 5; tuned on "
        "seeds 11 to 13. V of the best checkpoint, clipped to [0, 1], against the outcome of one sampled answer to each of "
        "512 unseen test problems. E1.2: three to nine digits in equal shares in every file, 20,480 responses, "
        "`critic.own_model = true`, `optimizer.critic_learning_rate = 1e-3`."
    ),
    cells={f"{seed}": sorting(seed, 1.0, LEDGER / "E1" / str(seed)) for seed in SEEDS}
    | {MIXED.format(seed): mixed(seed, LEDGER / "E1" / MIXED.format(seed)) for seed in SEEDS},
    core_hours=0.4,
    claims=(
        Claim(
            "E1.1",
            "With a reward of 0 or 1 and γ = 1, V(s) is the probability of success.",
            "textbook identity; used as such by token-level verifiers (Cobbe et al. 2021, arXiv 2110.14168, section 4)",
            CALIBRATED,
            calibrated,
            {
                "confirmed": "The critic is fitted to returns that are 0 or 1, whose mean is the probability.",
                "refuted": "The identity holds for the exact V; this learned one lags behind the policy, and gives 0.42 to "
                "0.58 where 0.88 to 0.93 of the answers are right.",
                "undecided": "The identity holds for the exact V; whether the learned V beats a constant is not separated "
                "here.",
            },
            needs=str.isdigit,
        ),
        Claim(
            "E1.2",
            "With a model for the critic alone and problems of different difficulty, V(s) is close to this probability.",
            "this ledger, after E1.1",
            CALIBRATED,
            lambda results: calibrated(results, MIXED),
            {
                "undecided": "V is calibrated, but whether it tells problems apart better than a constant is not separated.",
                "refuted": "V still lags behind the policy.",
            },
            needs=lambda name: not name.isdigit(),
        ),
    ),
)
EXPERIMENTS = (E1,)

# ---- PPO beside GRPO with a verifier, and with rewards of steps: claims of E5 -----------------------------------------

ACCURACY_MARGIN = 0.01
DENSE_SEEDS, DENSE_DIGITS, DENSE_RATE = (1, 2, 3), (8, 20), 1e-3
DENSE_METHODS = ("PPO_CLIP, γ = 0", "GRPO")


def demo_cell(seed: int) -> Cell:
    """``surefoot demo verifier``, a cell of benchmarks/verifier.py."""

    def work(folder: Path) -> Result:
        import verifier

        verifier.RUNS, verifier.RESULTS = folder / "runs", folder / "results"
        verifier.demo(seed)
        return read(folder / "results" / "demo")[str(seed)]

    return Cell(f"demo-{seed}", work, RESULTS / "verifier" / "demo" / str(seed))


def dense_cell(digits: int, method: str, seed: int) -> Cell:
    """A cell of benchmarks/dense.py."""
    import dense

    def work(folder: Path) -> Result:
        begun = folder.parents[1] / "dense" / f"{digits}-{seed}"
        begun.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(begun / ".lock"):
            sft = begun / "sft" if (begun / "sft" / "finished.json").exists() else dense.start(begun, seed, digits)
            return dense.cell(begun, sft, method, seed, DENSE_RATE, digits) | {"start": dense.before(begun, sft, digits)}

    name = f"{dense.named(method, DENSE_RATE)}-{seed}"
    return Cell(f"dense-{digits}-{name}", work, RESULTS / "dense" / str(digits) / name)


def demo_gap(results: Results) -> list[Bound]:
    runs = [results[f"demo-{seed}"] for seed in SEEDS if f"demo-{seed}" in results]
    differences = [run["GRPO"]["sampled_accuracy"] - run["PPO"]["sampled_accuracy"] for run in runs]
    return [single("sampled accuracy of GRPO minus that of PPO", differences, -ACCURACY_MARGIN)]


def dense_gap(results: Results) -> list[Bound]:
    def end(digits: int, method: str, seed: int) -> float:
        return float(results[DENSE[digits, method, seed].name]["curve"][-1][1])

    return [
        single(
            f"accuracy by steps of PPO minus that of GRPO, {digits} digits",
            [end(digits, DENSE_METHODS[0], seed) - end(digits, DENSE_METHODS[1], seed) for seed in DENSE_SEEDS],
        )
        for digits in DENSE_DIGITS
    ]


DENSE = {
    (digits, method, seed): dense_cell(digits, method, seed)
    for digits in DENSE_DIGITS
    for method in DENSE_METHODS
    for seed in DENSE_SEEDS
}
BESIDE_GRPO_CELLS = {cell.name: cell for cell in [*(demo_cell(seed) for seed in SEEDS), *DENSE.values()]}
BESIDE_GRPO = (
    Claim(
        "E5.4",
        "GRPO matches PPO with a verifier (sorting).",
        "Shao et al. 2024 (arXiv 2402.03300), section 4",
        f"the sampled accuracy of GRPO is at most {ACCURACY_MARGIN} below that of PPO from the same start; this rule "
        "is younger than the runs",
        demo_gap,
        {
            "refuted": "Both solve the task greedily; with as many answers in all, eight to a problem leave GRPO an eighth "
            "of the "
            "problems."
        },
        lambda name: name.startswith("demo"),
    ),
    Claim(
        "E5.5",
        "With a reward for every step PPO learns more than GRPO from their sum (successors of digits).",
        "argument for critics and process rewards; Lightman et al. 2023 (arXiv 2305.20050) compare the rewards",
        "the accuracy by steps of PPO with γ = 0 is above that of GRPO, with 8 and with 20 digits; this rule is "
        "younger than the runs",
        dense_gap,
        {"confirmed": "GRPO gives every token the advantage of the whole answer, and PPO that of its own step."},
        lambda name: name.startswith("dense"),
    ),
)
