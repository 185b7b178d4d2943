"""E3 to E6, on the reviews task, where the true score is known. All cells of a seed share its SFT and reward model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan, sqrt
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from claims import LEDGER, RESULTS, Bound, Cell, Claim, Experiment, Result, Results, bounds_text, single, verdict_of
from claims.training import within
from claims.tuning import Tried, cells_of, tuned
from claims.verifier import BESIDE_GRPO, BESIDE_GRPO_CELLS
from surefoot.compare.statistics import markdown_table
from surefoot.recipes.base import Recipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import merge_tables

SEEDS = (1, 2, 3, 4, 5)
TUNED_ON = 11
"""seed on which rates are chosen; it is in no result"""
Curve = Sequence[tuple[float, float]]
"""KL and gold of runs with several coefficients"""
MARGIN = 0.1
"""of gold, below which a difference counts as none. Gold of the SFT models is about 0.4, its maximum 2"""
COMMON = "The `reviews` task as in E3."


# ---- one cell ---------------------------------------------------------------------------------------------------------


def start(shared: Path, seed: int) -> Path:
    """The folder of a seed, with data, SFT model and reward model; made, or finished, by the first cell that needs them."""
    from verifier import finished

    from surefoot.demos import in_folder
    from surefoot.demos.language import REWARD, SFT, write_data, write_pairs

    folder = shared / "reviews" / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data"
    with filelock.FileLock(folder / ".start.lock"):
        if not (data / "held_out_products.jsonl").exists():
            import shutil

            shutil.rmtree(data, ignore_errors=True)
            write_data(data, seed)
        finished(folder / "sft", "reviews_sft", {"seed": seed, **in_folder(SFT, folder)})
        if not (data / "pairs.jsonl").exists():
            write_pairs(data, folder / "sft", seed)
        finished(folder / "reward", "reviews_reward", {"seed": seed, **in_folder(REWARD, folder)})
    return folder


def recipe_of(folder: Path, seed: int, preset: str, changes: Mapping[str, Any]) -> Recipe:
    """The recipe of a cell: the demo's third stage with changes, or DPO on the reward model's pairs."""
    from surefoot.demos import in_folder
    from surefoot.demos.language import PPO

    data = folder / "data"
    if preset == "dpo":
        own: dict[str, Any] = {"model": str(folder / "sft"), "data": {"train": str(data / "pairs.jsonl"), "max_length": 96}}
    else:
        own = in_folder(PPO, folder)
    if changes.get("algorithm") == "GRPO":
        own = {name: table for name, table in own.items() if name not in ("critic", "reference")}
    return find_recipe(preset, merge_tables({**own, "seed": seed}, changes))


def reviews(experiment: str, name: str, seed: int, changes: Mapping[str, Any], preset: str = "reviews") -> Cell:
    """Train from the start of a seed; scores of held-out answers, and their curve over the run."""

    def work(folder: Path) -> Result:
        from surefoot.runs import api
        from surefoot.runs.display import Lines
        from surefoot.store.metrics import read_metrics

        begun = start(folder.parents[1], seed)
        run = folder / "run"
        if not (run / "config.toml").exists():
            api.start(recipe_of(begun, seed, preset, changes), run, display=Lines(name))
        elif not (run / "finished.json").exists():
            api.resume(run)
        rows = read_metrics(run / "metrics.jsonl")
        names = ("held_out_reward", "held_out_gold", "held_out_kl")  # without a reference (β = 0) there is no KL
        curve = [[row["steps"], *(row.get(name) for name in names)] for row in rows if row.get("held_out_gold") is not None]
        return {"seed": seed, "engine": "eager", **measured(run, begun, seed), "curve": curve}

    return Cell(f"{name}-{seed}", work, LEDGER / experiment / f"{name}-{seed}")


def measured(run: Path, begun: Path, seed: int) -> Result:
    """Scores of the SFT and of the trained model on held-out prompts of known products."""
    return {"start": model_scores(begun / "sft", begun, seed), "trained": model_scores(run, begun, seed)}


def model_scores(model: Path, begun: Path, seed: int) -> Result:
    """A model's scores on held-out prompts, one sampled answer each. Every kind of training is measured in the same world."""
    from surefoot.language.metrics import repeated_share
    from surefoot.language.online.world import LanguageWorld

    table = {"model": str(model), "reference": {"model": str(begun / "sft")}, "check_memory": False}
    recipe = recipe_of(begun, seed, "reviews", {**table, "evaluation": {"seed": seed}})
    assert isinstance(recipe, LanguageRecipe)
    report = LanguageWorld(recipe).evaluate()
    assert report is not None
    names = ("reward", "gold", "kl", "length", "distinct_2", "log_likelihood")
    repeated = repeated_share([sample["response"] for sample in report.samples])
    sampled = {name: report.metrics[f"held_out_{name}"] for name in names}
    return {**sampled, "repeated": repeated, "greedy_gold": greedy_gold(model, begun, recipe.sampling.max_tokens)}


def greedy_gold(model: Path, begun: Path, max_tokens: int) -> float:
    """Mean gold of the most likely answers to the held-out prompts."""
    from surefoot.language.data.sources import read_rows
    from surefoot.language.language_model import load_language_model
    from surefoot.language.tasks.reviews import gold

    prompts = [row.columns["prompt"] for row in read_rows(begun / "data" / "held_out_prompts.jsonl")]
    scores = gold(prompts, load_language_model(str(model)).generate(prompts, max_tokens=max_tokens, greedy=True))
    return sum(scores) / len(scores)


# ---- bounds -----------------------------------------------------------------------------------------------------------


def each(results: Results, name: str, key: str, when: str = "trained") -> dict[int, float]:
    """A number of all finished seeds of a cell's name."""
    found = {seed: results.get(f"{name}-{seed}") for seed in SEEDS}
    return {seed: result[when][key] for seed, result in found.items() if result is not None}


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Differences of the seeds that both have."""
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def against(results: Results, what: str, name: str, base: str, key: str, limit: float = 0.0, *, above: bool = True) -> Bound:
    """The interquartile mean of the paired differences of two cells' names; base "SFT" is the start of the first."""
    theirs = each(results, name, key, "start") if base == "SFT" else each(results, base, key)
    return single(what, paired(each(results, name, key), theirs), limit, above=above)


def gold_at(curve: Curve, kl: float) -> float:
    """Gold at a KL, linear in √KL between runs, or at the nearest run outside them."""
    points = sorted((sqrt(max(at, 0.0)), gold) for at, gold in curve)
    roots, golds = zip(*points, strict=True)
    return float(np.interp(sqrt(kl), roots, golds))


def common_kl(ours: Curve, theirs: Curve) -> float | None:
    """The middle, by √KL, of the KLs that both curves cover; None if they cover none together."""
    ranges = [[sqrt(max(at, 0.0)) for at, _ in curve] for curve in (ours, theirs)]
    low, high = max(map(min, ranges)), min(map(max, ranges))
    return ((low + high) / 2) ** 2 if low <= high else None


# ---- E3 ---------------------------------------------------------------------------------------------------------------

BETAS = (0.0, 0.03, 0.1, 0.3, 1.0)


def beta_name(beta: float) -> str:
    return f"beta_{beta:g}"


DEMO_BETA = 0.3
"""that of ``surefoot demo language``, whose five seeds with it and with β = 0 are cells of benchmarks/language.py"""


def demo_cell(seed: int) -> Cell:
    """The demo with β = 0.3, and its third stage with β = 0."""

    def work(folder: Path) -> Result:
        import language

        language.RUNS = folder
        return language.trained(seed)

    return Cell(f"demo-{seed}", work, RESULTS / "language" / str(seed))


def demo_scores(results: Results, beta: float, key: str) -> dict[int, float]:
    """A score of the demo's known products: at a β, or of the SFT model for NaN."""
    found = {seed: results.get(f"demo-{seed}") for seed in SEEDS}
    picked = {}
    for seed, result in found.items():
        if result is not None:
            of = result["without_anchor"] if beta == 0 else result
            picked[seed] = of["known_products"]["start" if isnan(beta) else "trained"][key]
    return picked


def demo_difference(results: Results, key: str, ours: float, theirs: float, *, above: bool = True) -> Bound:
    """The interquartile mean of the differences within seeds between two β of the demo."""
    label = {"reward": "proxy", "gold": "gold", "kl": "KL"}[key]
    what = f"{label} at β = {ours:g} minus " + ("SFT's" if isnan(theirs) else f"that at β = {theirs:g}")
    return single(what, paired(demo_scores(results, ours, key), demo_scores(results, theirs, key)), above=above)


SFT = float("nan")
"""in place of a β: the model before PPO"""
E3_CELLS = [
    *(demo_cell(seed) for seed in SEEDS),
    *(
        reviews("E3", beta_name(beta), seed, {"reference": {"beta": beta}})
        for seed in SEEDS
        for beta in (0.0, 0.3, 0.03, 1.0, 0.1)
    ),
]


def hacked(results: Results) -> list[Bound]:
    return [demo_difference(results, "reward", 0.0, SFT), demo_difference(results, "gold", 0.0, SFT, above=False)]


def frontier(results: Results) -> list[Bound]:
    return [
        demo_difference(results, "gold", DEMO_BETA, SFT),
        demo_difference(results, "gold", 0.0, DEMO_BETA, above=False),
        demo_difference(results, "kl", 0.0, DEMO_BETA),
    ]


E3 = Experiment(
    key="E3",
    setting="β",
    title="The β frontier: reward hacking",
    protocol="The `reviews` task of `surefoot demo language`, seeds 1 to 5: all runs of a seed share SFT and reward model and "
    "see 3,200 responses. Gold, proxy and KL are means over 128 held-out prompts of known products, at the checkpoint with the "
    f"highest proxy; differences are within seeds. PPO with β = {', '.join(f'{beta:g}' for beta in BETAS)}; 0.3 was chosen on "
    "seeds 2 and 3. E3.1 and E3.2 use the demo's own, older runs (benchmarks/language.py).",
    cells={cell.name: cell for cell in E3_CELLS},
    core_hours=1.2,
    claims=(
        Claim(
            "E3.1",
            "Without a KL penalty the policy exploits errors of the reward model: the proxy rises and the true reward falls.",
            "Stiennon et al. 2020 (arXiv 2009.01325), section 4.3; Gao et al. 2022 (arXiv 2210.10760)",
            "at β = 0 the proxy ends above and gold below that of the SFT model",
            hacked,
            {
                "refuted": "On this task the reward model stays right on the answers that the policy moves to.",
            },
            within("demo"),
        ),
        Claim(
            "E3.2",
            "Gold over √KL rises and then falls.",
            "Gao et al. 2022 (arXiv 2210.10760), section 3",
            "gold at β = 0.3 is above SFT's, and gold at β = 0 below that at β = 0.3, at a larger KL",
            frontier,
            {
                "confirmed": "Near the start the proxy orders answers as gold does; far from it the policy finds answers "
                "that only the "
                "proxy likes.",
            },
            within("demo"),
        ),
        Claim(
            "E3.3",
            "A β that is too small is hacked, and one that is too large learns less.",
            "folklore; Ziegler et al. 2019 (arXiv 1909.08593)",
            "gold at β = 0.03 and at β = 1 is below that at β = 0.3",
            lambda results: [
                against(
                    results, f"gold at β = {beta:g} minus that at β = 0.3", beta_name(beta), beta_name(0.3), "gold", above=False
                )
                for beta in (0.03, 1.0)
            ],
            {
                "refuted": "The best β on this task is not the demo's 0.3.",
            },
            within(beta_name(0.03), beta_name(0.3), beta_name(1.0)),
        ),
        Claim(
            "E3.4",
            "Without a KL penalty modes collapse: different prompts get the same answer.",
            "folklore; Kirk et al. 2023 (arXiv 2310.06452)",
            "the share of held-out answers that repeat an earlier one is larger at β = 0 than for the SFT model",
            lambda results: [
                against(results, "share of repeated answers at β = 0 minus SFT's", beta_name(0.0), "SFT", "repeated"),
            ],
            {
                "refuted": "Nothing in the reward makes answers to different prompts equal, and sampling keeps them apart.",
                "undecided": "Some seeds collapse and some don't.",
            },
            within(beta_name(0.0)),
        ),
    ),
)

# ---- E4 ---------------------------------------------------------------------------------------------------------------

COEFFICIENTS = (0.1, 0.3, 1.0)
PLANNED_KL = 1.5
"""nats per response"""
PLACES = ("reward", "k2", "k3")


def kl_changes(place: str, coefficient: float) -> dict[str, Any]:
    """β in the reward, or β_ref in the loss with an estimator."""
    if place == "reward":
        return {"reference": {"beta": coefficient}}
    return {"reference": {"beta": 0.0}, "objective": {"reference_coefficient": coefficient, "reference_estimator": place}}


def kl_cell(place: str, coefficient: float, seed: int) -> Cell:
    """A place and a coefficient; with the KL in the reward, the cell of E3 with the same β."""
    if place == "reward":
        shared = reviews("E3", beta_name(coefficient), seed, kl_changes(place, coefficient))
        return replace(shared, name=f"{place}_{coefficient:g}-{seed}")
    return reviews("E4", f"{place}_{coefficient:g}", seed, kl_changes(place, coefficient))


E4_CELLS = [kl_cell(place, coefficient, seed) for seed in SEEDS for place in PLACES for coefficient in COEFFICIENTS]


def curve_of(results: Results, place: str, seed: int) -> list[tuple[float, float]] | None:
    """KL and gold with each coefficient; None unless all are finished."""
    runs = [results.get(f"{place}_{coefficient:g}-{seed}") for coefficient in COEFFICIENTS]
    if any(run is None for run in runs):
        return None
    return [(run["trained"]["kl"], run["trained"]["gold"]) for run in runs if run]


@dataclass(frozen=True)
class Compared:
    """One seed: gold at a KL that both curves cover, with the KL in the loss and in the reward."""

    seed: int
    kl: float
    ours: float
    theirs: float
    planned: float
    """the difference at ``PLANNED_KL``"""


def compared(results: Results, estimator: str) -> list[Compared]:
    """The seeds with all coefficients at both places; without those whose curves cover no KL together."""
    seeds = []
    for seed in SEEDS:
        ours, theirs = (curve_of(results, place, seed) for place in (estimator, "reward"))
        kl = common_kl(ours, theirs) if ours and theirs else None
        if ours and theirs and kl is not None:
            planned = gold_at(ours, PLANNED_KL) - gold_at(theirs, PLANNED_KL)
            seeds.append(Compared(seed, kl, gold_at(ours, kl), gold_at(theirs, kl), planned))
    return seeds


def at_equal_kl(results: Results, estimator: str) -> list[Bound]:
    """The paired differences of gold; nothing without a seed that can be compared."""
    differences = [seed.ours - seed.theirs for seed in compared(results, estimator)]
    what = f"gold with {estimator} in the loss minus gold with KL in the reward, {len(differences)} seeds"
    return [single(what, differences, -MARGIN)] if differences else []


def kl_tables(results: Results) -> list[str]:
    """Seed by seed, what is compared; and the difference at the KL that was planned."""
    header = ["estimator", "seed", "KL of the comparison", "gold, loss", "gold, reward", "difference", f"at {PLANNED_KL} nats"]
    rows = [
        [estimator, str(at.seed), *(f"{x:.2f}" for x in (at.kl, at.ours, at.theirs, at.ours - at.theirs, at.planned))]
        for estimator in PLACES[1:]
        for at in compared(results, estimator)
    ]
    if not rows:
        return []
    planned = [
        single(f"{estimator} minus reward", [at.planned for at in compared(results, estimator)], -MARGIN)
        for estimator in PLACES[1:]
        if compared(results, estimator)
    ]
    verdicts = "; ".join(f"{bounds_text([bound])} ({verdict_of([bound])})" for bound in planned)
    return [markdown_table(header, rows), f"By the planned rule, at {PLANNED_KL} nats: {verdicts}."]


WHY_LESS = {
    "k2": "In the loss each token is charged for its own KL alone; in the reward also for that of the tokens after it.",
    "k3": "The gradient of k3 is that of KL(π_ref‖π_θ), the other direction, and each token is charged for its own KL alone.",
}


def kl_claim(key: str, estimator: str, source: str) -> Claim:
    """That the KL may as well be in the loss, with an estimator."""
    return Claim(
        key,
        f"KL in the loss ({estimator}) gives as much true reward at equal KL as KL in the reward.",
        source,
        f"gold at equal KL, interpolated over three coefficients, is at most {MARGIN} lower than with KL in the reward; where "
        "the KL is equal was chosen after seed 1",
        partial(at_equal_kl, estimator=estimator),
        why={"refuted": WHY_LESS[estimator]},
        needs=within(*(f"{place}_{coefficient:g}" for place in ("reward", estimator) for coefficient in COEFFICIENTS)),
    )


E4 = Experiment(
    key="E4",
    setting="place of the KL, coefficient",
    title="KL in the reward or in the loss",
    protocol=COMMON + " PPO with KL in the reward (k1; E3's runs), or in the loss by k2 or k3, with coefficients "
    f"{', '.join(f'{c:g}' for c in COEFFICIENTS)}. A planned comparison at {PLANNED_KL} nats was not possible: all runs of "
    "seed 1 with the KL in the loss ended above. After these runs the rule became the middle of what both cover, in each seed; "
    "`show E4` has both.",
    tables=kl_tables,
    cells={cell.name: cell for cell in E4_CELLS},
    core_hours=1.9,
    claims=(
        kl_claim(
            "E4.1",
            "k2",
            "Shao et al. 2024 (arXiv 2402.03300), section 4.1.1; in the reward: Ouyang et al. 2022 (arXiv 2203.02155)",
        ),
        kl_claim("E4.2", "k3", "as E4.1"),
    ),
)

# ---- E5 ---------------------------------------------------------------------------------------------------------------

GROUP = {"prompts": 8, "samples": 8}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("reviews", {}),
    "GRPO": ("reviews", {"algorithm": "GRPO", "sampling": GROUP, "objective": {"reference_coefficient": 0.3}}),
    "DPO": ("dpo", {"steps": 6_000, "reference": {"beta": 0.3}}),
}
RATES = {"PPO": (2e-4, 4e-4), "GRPO": (2e-4, 4e-4), "DPO": (1e-4, 3e-4)}


def method_with(rate: float, method: str, seed: int, name: str) -> Cell:
    """A method with a learning rate."""
    preset, changes = METHODS[method]
    return reviews("E5", name, seed, merge_tables(changes, {"optimizer": {"learning_rate": rate}}), preset)


def tried_rates(method: str) -> Tried:
    """A method with each of its rates on the seed ``TUNED_ON``."""
    return {rate: [method_with(rate, method, TUNED_ON, f"{method}_{rate:g}")] for rate in RATES[method]}


def proxy(result: Result) -> float:
    """The reward model's mean score of the trained policy."""
    return float(result["trained"]["reward"])


def method_cell(method: str, seed: int) -> Cell:
    """A method with the rate that has more proxy reward."""
    return tuned(lambda rate: method_with(rate, method, seed, method), tried_rates(method), proxy)


E5_CELLS = [
    *(cell for method in METHODS for cell in cells_of(tried_rates(method))),
    *(method_cell(method, seed) for seed in SEEDS for method in METHODS),
]


def method_claim(key: str, sentence: str, source: str, ours: str, theirs: str) -> Claim:
    """That a method has as much gold as another."""
    return Claim(
        key,
        sentence,
        source,
        f"gold of {ours} is at most {MARGIN} below that of {theirs}",
        lambda results: [against(results, f"gold of {ours} minus that of {theirs}", ours, theirs, "gold", -MARGIN)],
        needs=within(ours, theirs),
    )


E5 = Experiment(
    key="E5",
    setting="method",
    title="PPO, GRPO and DPO",
    protocol=COMMON
    + f" Learning rates: the better of two by proxy on seed {TUNED_ON}. PPO: β = 0.3 in the reward. GRPO: 8 prompts × 8 "
    "answers, k3 in the loss with 0.3. DPO: the 6,000 pairs of the reward model, once, β = 0.3. E5.4: `surefoot demo "
    "verifier`, 10,240 answers each, seeds 1 to 5. E5.5: benchmarks/dense.py, 5,120 answers, seeds 1 to 3.",
    cells={**{cell.name: cell for cell in E5_CELLS}, **BESIDE_GRPO_CELLS},
    core_hours=1.0,
    claims=(
        method_claim("E5.1", "DPO matches PPO.", "Rafailov et al. 2023 (arXiv 2305.18290), section 6", "DPO", "PPO"),
        method_claim("E5.2", "GRPO matches PPO.", "Shao et al. 2024 (arXiv 2402.03300), section 4", "GRPO", "PPO"),
        method_claim("E5.3", "PPO matches DPO.", "Xu et al. 2024 (arXiv 2404.10719)", "PPO", "DPO"),
        *BESIDE_GRPO,
    ),
)

# ---- E6 ---------------------------------------------------------------------------------------------------------------

ROUNDS, RESPONSES, PAIRS = 3, 3_264, 1_200


def rounds_cell(rounds: int, beta: float, seed: int) -> Cell:
    """Rounds with equal responses and equal fresh pairs in all; gold is that of the last."""
    name = f"rounds_{rounds}_{beta:g}-{seed}"

    def work(folder: Path) -> Result:
        from surefoot.demos.language import GOLD
        from surefoot.runs.display import Lines
        from surefoot.runs.rounds import RoundsSettings, run_rounds

        begun = start(folder.parents[1], seed)
        recipe = recipe_of(begun, seed, "reviews", {"steps": RESPONSES // rounds, "reference": {"beta": beta}})
        assert isinstance(recipe, LanguageRecipe)
        settings = RoundsSettings(recipe, GOLD, pairs=PAIRS // rounds, noise=0.25)
        run_rounds(settings, folder / "rounds", rounds, lambda made, run: Lines(name))
        run = folder / "rounds" / f"round-{rounds}" / "ppo"
        return {"seed": seed, "engine": "eager", **measured(run, begun, seed)}

    return Cell(name, work, LEDGER / "E6" / name)


E6_BETAS = (0.3, 0.05)
E6_CELLS = [rounds_cell(rounds, beta, seed) for seed in SEEDS for beta in E6_BETAS for rounds in (1, ROUNDS)]


def rounds_claim(key: str, beta: float, source: str) -> Claim:
    """That rounds help at a β."""
    many, one = (f"rounds_{rounds}_{beta:g}" for rounds in (ROUNDS, 1))
    return Claim(
        key,
        f"Iterated rounds with fresh pairs beat one round of as many responses and pairs (β = {beta:g}).",
        source,
        f"gold after {ROUNDS} rounds is above gold after one",
        lambda results: [against(results, f"gold after {ROUNDS} rounds minus gold after one", many, one, "gold")],
        needs=within(many, one),
    )


E6 = Experiment(
    key="E6",
    setting="rounds, β",
    title="Iterated rounds",
    protocol=COMMON
    + f" {RESPONSES:,} responses and {PAIRS:,} prompts for fresh pairs in all, in {ROUNDS} rounds or in one; labels by gold "
    "with noise 0.25.",
    cells={cell.name: cell for cell in E6_CELLS},
    core_hours=2.0,
    claims=(
        rounds_claim(
            "E6.1",
            E6_BETAS[0],
            "Stiennon et al. 2020 (arXiv 2009.01325), section 3.1; Touvron et al. 2023 (arXiv 2307.09288), section 3.2.3",
        ),
        rounds_claim("E6.2", E6_BETAS[1], "as E6.1"),
    ),
)

EXPERIMENTS = (E3, E4, E5, E6)
