"""E2: what the critic costs in time and memory."""

import time
from pathlib import Path
from typing import Any

from claims import LEDGER, Bound, Cell, Claim, Experiment, Result, Results, exact, single

CRITICS: dict[str, dict[str, Any]] = {
    "none": {"algorithm": "REINFORCE_PLUS_PLUS", "objective": {"reuse": {"epochs": 1, "minibatches": 2}}},
    "shared": {},
    "own": {"critic": {"own_model": True}},
}
"""the same passes over the same batches; advantages without a critic are returns, normalised over the batch"""
ROUNDS = (1, 2, 3, 4, 5)
PARAMETERS_7B = 7_000_000_000


def time_cell(number: int) -> Cell:
    """One round: each kind of critic in turn, in another order each time; CPU seconds of collecting and of learning."""

    def work(folder: Path) -> Result:
        from memory import ANSWER, PROMPT, built, online, rows_in

        from surefoot.recipes.reading import make_recipe

        folder.mkdir(parents=True, exist_ok=True)
        files = rows_in(folder, prompt=PROMPT, answer=ANSWER)
        model = built(folder / "model", "llama", width=256, layers=4, vocabulary=2048)
        names = [*CRITICS][number % 3 :] + [*CRITICS][: number % 3]
        seconds = {name: timed(make_recipe(online(model, files, **CRITICS[name]))) for name in names}
        return {"round": number, "order": names, "engine": "eager", "seconds": seconds}

    return Cell(f"time-{number}", work, LEDGER / "E2" / f"time-{number}")


def timed(recipe: Any, iterations: int = 4) -> dict[str, float]:
    """CPU seconds of this process for collecting and learning; the first iteration, which allocates, is not counted."""
    from surefoot.core.credit import assign_credit
    from surefoot.core.rollout import LearnerState
    from surefoot.runs.factory import make_learner, make_world

    world = make_world(recipe)
    learner = make_learner(recipe, world.policy)
    state = LearnerState.seeded(recipe.seed, recipe.steps)
    spent = {"collecting": 0.0, "learning": 0.0}
    for iteration in range(iterations + 1):
        begun = time.process_time()
        rollout = world.collector.collect(state)
        middle = time.process_time()
        learner.update(rollout, assign_credit(rollout, learner.objective), state)
        state.steps += rollout.steps
        if iteration:
            spent["collecting"] += middle - begun
            spent["learning"] += time.process_time() - middle
    return spent


def memory_cell(critic: str) -> Cell:
    """Peak of PyTorch's CPU allocator in two iterations, and what the planner estimated."""

    def work(folder: Path) -> Result:
        from memory import ANSWER, PROMPT, Watched, built, online, rows_in

        from surefoot.language.memory import estimate
        from surefoot.language.memory.check import workload_of
        from surefoot.recipes.language import LanguageRecipe
        from surefoot.recipes.reading import make_recipe

        folder.mkdir(parents=True, exist_ok=True)
        files = rows_in(folder, prompt=PROMPT, answer=ANSWER)
        model = built(folder / "model", "llama", width=512, layers=6, vocabulary=8192)
        recipe = make_recipe(online(model, files, **CRITICS[critic]))
        assert isinstance(recipe, LanguageRecipe)
        estimated = estimate(workload_of(recipe, prompt=PROMPT, response=ANSWER))
        watched = Watched(recipe)
        watched.run()
        peaks = {"peak": max(watched.peaks.values()), "estimated_peak": estimated.peak, "stays": estimated.permanent}
        return {"critic": critic, "engine": "eager", **peaks}

    return Cell(f"memory-{critic}", work, LEDGER / "E2" / f"memory-{critic}")


def plan_cell(folder: Path) -> Result:
    """Bytes per role at 7 billion parameters, in the three ways of the planner."""
    from surefoot.language.memory.planner import textbook

    return {"ways": textbook(PARAMETERS_7B)}


def times(results: Results, critic: str, part: str) -> list[float]:
    """CPU time with a critic as a multiple of that without one, round by round."""
    found = [results[f"time-{number}"]["seconds"] for number in ROUNDS if f"time-{number}" in results]

    def total(of: dict[str, float]) -> float:
        return of[part] if part != "all" else sum(of.values())

    return [total(of[critic]) / total(of["none"]) for of in found]


def doubled(results: Results) -> list[Bound]:
    what, each = "CPU time of an update with a critic of its own / without", times(results, "own", "learning")
    return [single(what, each, 1.75), single(what, each, 2.25, above=False)]


def cheap(results: Results) -> list[Bound]:
    return [
        single(
            "CPU time of an iteration with a shared trunk / without a critic", times(results, "shared", "all"), 1.1, above=False
        )
    ]


def saved(share_low: float, share_high: float) -> Any:
    """That leaving the critic out saves a share of the memory: in a run, and of what stays at 7B."""

    def bounds(results: Results) -> list[Bound]:
        peaks = {critic: results[f"memory-{critic}"] for critic in ("none", "own")}
        roles = results["plan"]["ways"]["with AdamW, mixed precision"]
        measured = 1 - peaks["none"]["peak"] / peaks["own"]["peak"]
        staying = roles["value"] / sum(roles.values())
        found = [("of the peak in a run", measured), ("of what stays at 7B with AdamW", staying)]
        return [
            exact(f"share saved {what}", share, limit, above=above)
            for what, share in found
            for limit, above in ((share_low, True), (share_high, False))
        ]

    return bounds


E2 = Experiment(
    key="E2",
    title="What the critic costs",
    protocol=(
        "One PPO iteration without a critic, with a value head on the policy's trunk, and with a value model as large as the "
        "policy; reference and reward function are the same. Random Llama weights, 16 prompts of at most 64 tokens, 32 sampled "
        "tokens. Time: 3.8 M parameters, CPU time beside other work, the three in turn in five rounds, four iterations each. "
        "Memory: 28 M parameters, peak of PyTorch's allocator in two iterations, and the planner's sums at 7B."
    ),
    cells={
        cell.name: cell
        for cell in [
            Cell("plan", plan_cell, LEDGER / "E2" / "plan"),
            *(time_cell(number) for number in ROUNDS),
            *(memory_cell(critic) for critic in CRITICS),
        ]
    },
    core_hours=0.2,
    claims=(
        Claim(
            "E2.1",
            "The value network doubles the compute of an update.",
            "Shao et al. 2024 (arXiv 2402.03300), section 4.1.1",
            "an update with a value model as large as the policy takes 1.75 to 2.25 times the CPU time of one without",
            doubled,
            {
                "confirmed": "Both models make the same forward and backward passes.",
                "refuted": "The factor is not two: the value model has no head over the vocabulary, and passes that both "
                "need stay.",
            },
            lambda name: name.startswith("time"),
        ),
        Claim(
            "E2.2",
            "A value head on the policy's trunk costs almost nothing.",
            "folklore of shared trunks",
            "an iteration takes less than 1.1 times the CPU time of one without a critic",
            cheap,
            {
                "confirmed": "The head reads features that the policy computes anyway.",
                "refuted": "The head itself is small, but the value's passes and targets are not free.",
            },
            lambda name: name.startswith("time"),
        ),
        Claim(
            "E2.3",
            "GRPO saves 25 % of the memory: one of four models.",
            "blog posts about GRPO",
            "without a critic 20 to 30 % less is needed at a run's peak (it has no reward model), and stays at 7B with AdamW",
            saved(0.2, 0.3),
            {
                "refuted": "A trained model holds gradients and two moments besides its weights, so the critic is more than "
                "a quarter."
            },
            lambda name: not name.startswith("time") and name != "memory-shared",
        ),
        Claim(
            "E2.4",
            "GRPO saves a third of the memory: 28 of 84 GB.",
            "blog posts about GRPO, with the usual sum 28 + 28 + 14 + 14 GB",
            "without a critic 28 to 38 % less is needed at a run's peak (it has no reward model), and stays at 7B with AdamW",
            saved(0.28, 0.38),
            {"refuted": "The sum leaves out the optimizer, whose moments make the critic a larger share of what stays."},
            lambda name: not name.startswith("time") and name != "memory-shared",
        ),
    ),
)
EXPERIMENTS = (E2,)
