"""How often findings are false, and how often they are there: healthy runs and runs with planted faults, one table.

    python benchmarks/findings.py train               # what is missing in results/findings; repeat it until all is there
    python benchmarks/findings.py judge               # check every run; writes results/findings/judged.json
    python benchmarks/findings.py page                # writes the table into docs/benchmarks/findings.md

A cell is a case with a seed; add a case to ``CASES`` or seeds to it. Healthy runs are those of the cases without a fault, and
the returns in ``results/`` of every preset's runs on single tasks, all of them. A run is checked as during training, after each
twentieth of its budget, and at its end; an alarm at any time counts. Runs with even seeds are held out: thresholds may be
chosen by the others alone. The rows that checks read are stored, so changed checks need no training.
"""

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from record import made_with, read

from surefoot.compare.statistics import markdown_table
from surefoot.diagnostics.curves import CHECKED_METRICS, Curve, RunCurves
from surefoot.diagnostics.findings import CHECKS_PER_RUN, RUN_CHECKS, check_curves
from surefoot.recipes.base import Recipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import merge_tables

HERE = Path(__file__).parent
RESULTS = HERE / "results"
OUT = RESULTS / "findings"
JUDGED = OUT / "judged.json"
PAGE = HERE.parent / "docs" / "benchmarks" / "findings.md"
BEGIN, END = "<!-- the table of benchmarks/findings.py page -->", "<!-- end of the table -->"
KINDS = {
    "preferences_at_chance": ("reward", "dpo"),
    "chosen_less_likely": ("dpo",),
    "loss_flat": ("sft",),
    "loss_rose": ("sft", "reward", "dpo"),
    "unusable_start": ("sft", "language"),
}
"""kinds of runs that a check is about, where it also reads metrics of others"""
Row = dict[str, Any]
Table = dict[str, Any]
SERIOUS = ("serious", "warning")

# ---- environments with a fault ----------------------------------------------------------------------------------------


class Blind(gymnasium.ObservationWrapper):
    """Every observation is zero."""

    def observation(self, observation: Any) -> Any:
        """Nothing."""
        return np.zeros_like(observation)


class Endless(gymnasium.Wrapper):
    """Termination is lost: episodes end only at a limit, so all of them return the same."""

    def step(self, action: Any) -> Any:
        """A step that never terminates."""
        observation, reward, _, truncated, info = self.env.step(action)
        return np.clip(observation, -4, 4), reward, False, truncated, info


class Turning(gymnasium.Wrapper):
    """After some steps, left and right are swapped."""

    def __init__(self, env: Any, after: int) -> None:
        super().__init__(env)
        self.after, self.taken = after, 0

    def step(self, action: Any) -> Any:
        """A step with the action, or the other one."""
        self.taken += 1
        return self.env.step(action if self.taken < self.after else 1 - action)


class Silent(gymnasium.RewardWrapper):
    """No reward at all."""

    def reward(self, reward: Any) -> float:
        """Nothing."""
        return 0.0


class Coin(gymnasium.Env[Any, Any]):
    """Episodes of one step, whose reward is a coin, whatever the action."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Nothing to see."""
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        """Heads or tails."""
        return np.zeros(1, np.float32), float(self.np_random.random() < 0.5), True, False, {}


def cartpole(wrapper: Callable[..., Any], *arguments: Any, **settings: Any) -> Callable[[], Any]:
    """Makes a CartPole with a fault."""
    return lambda: wrapper(gymnasium.make("CartPole-v1", **settings), *arguments)


# ---- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A recipe that is trained with several seeds.

    faults   the finding that must appear, and others that show the same fault; none: the run is healthy
    text     takes the folder of a start (SFT model and files) for its recipe
    """

    recipe: str
    changes: Table = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    task: Callable[[], Any] | None = None
    text: Callable[[Path], Table] | None = None
    seeds: tuple[int, ...] = (1, 2, 3, 4)

    def table(self, seed: int, start: Path) -> Table:
        """What the recipe changes."""
        own = {} if self.text is None else self.text(start)
        evaluation = {} if self.text is not None else {"evaluation": {"episodes": 0}}
        return merge_tables(merge_tables({"seed": seed, **evaluation}, own), self.changes)

    def made(self, seed: int, start: Path) -> Recipe:
        """The recipe of a seed."""
        return find_recipe(self.recipe, self.table(seed, start))


SMALL = {"rollout": {"environments": 4, "steps": 32}}
FEW = {"reuse": {"epochs": 4, "minibatches": 1}}
CART = {**SMALL, "steps": 3_840}
REWARDS = """
def letters(responses):
    return [text.count("e") / 10 for text in responses]

def nothing(responses):
    return [0.0 for text in responses]

def shame(prompts, responses):
    from surefoot.language.tasks.reviews import gold
    return [-score for score in gold(prompts, responses)]
"""
GOLD = "surefoot.language.tasks.reviews:gold"


def online(reward: str, gold: bool = True) -> Callable[[Path], Table]:
    """PPO from the SFT model of a start, on one of its functions, or on gold itself."""

    def table(start: Path) -> Table:
        function = GOLD if reward == "gold" else f"{start / 'rewards.py'}:{reward}"
        terms = {
            "terms": [{"function": function}],
            "missing_eos": "penalty",
            "missing_eos_value": -1.0,
            **({"gold": GOLD} if gold else {}),
        }
        data = {"train": str(start / "prompts.jsonl"), "held_out": str(start / "held_out_prompts.jsonl")}
        critic = {"own_model": False, "start": None}
        return {"model": str(start / "sft"), "data": data, "reward": terms, "critic": critic, "traces": {"rows": 0}}

    return table


def rows(kind: str, model: str = "sft") -> Callable[[Path], Table]:
    """Training on one of the files of a start."""

    def table(start: Path) -> Table:
        held_out = "pairs" if kind.startswith("wrong") else kind
        data = {"train": str(start / f"{kind}.jsonl"), "held_out": str(start / f"held_out_{held_out}.jsonl")}
        if kind == "random_pairs":
            data["held_out"] = str(start / "random_pairs.jsonl")
        return {"model": model if model == "pocket" else str(start / model), "data": {**data, "max_length": 96, "batch": 16}}

    return table


PPO_TEXT = {"steps": 640, "sampling": {"prompts": 32, "max_tokens": 56}, "evaluation": {"every": 160, "rows": 32}}
GRPO_TEXT = {**PPO_TEXT, "algorithm": "GRPO", "sampling": {"prompts": 8, "samples": 4, "max_tokens": 56}}
EVERY = {"evaluation": {"every": 160, "rows": 128}}
PAIRED = {"steps": 960, **EVERY}
FAST = {"learning_rate": 0.1, "schedule": "constant", "max_grad_norm": None}
CASES: dict[str, Case] = {
    # healthy
    "cartpole": Case("cartpole", {"steps": 12_800}, seeds=(1, 2, 3, 4, 5, 6, 7, 8)),
    "cartpole_trpo": Case("CartPole-v1", {"algorithm": "TRPO", "steps": 12_800, **SMALL}),
    "cartpole_penalty": Case("cartpole", {"algorithm": "PPO_PENALTY_ADAPTIVE", "steps": 12_800}),
    "cartpole_normalised": Case("cartpole", {"steps": 12_800, "normalise": {"observations": True, "rewards": True}}),
    "ppo_gold": Case("reviews", {**PPO_TEXT, "reference": {"beta": 0.1}}, text=online("gold"), seeds=(1, 2, 3, 4, 5, 6)),
    "grpo_gold": Case("language", GRPO_TEXT | {"optimizer": {"learning_rate": 2e-4}}, text=online("gold", gold=False)),
    "sft": Case("reviews_sft", {"steps": 1_600, **EVERY}, text=rows("demonstrations", "pocket")),
    "reward": Case("reviews_reward", {"steps": 3_200, **EVERY}, text=rows("pairs")),
    "dpo": Case("dpo", {**PAIRED, "optimizer": {"learning_rate": 2e-5}}, text=rows("pairs")),
    # control with a fault
    "still": Case("CartPole-v1", {**CART, "optimizer": {"learning_rate": 1e-9}}, ("return_flat",)),
    "no_updates_clip": Case("CartPole-v1", {**CART, "optimizer": {"learning_rate": 1e-9}}, ("clip_idle",), seeds=(5, 6)),
    "fast": Case(
        "CartPole-v1", {**CART, "optimizer": FAST, "objective": {"reuse": {"epochs": 20, "minibatches": 2}}}, ("kl_runaway",)
    ),
    "blind": Case(
        "CartPole-v1", {**CART, "steps": 6_400}, ("observation_constant", "return_flat", "return_collapsed"), cartpole(Blind)
    ),
    "endless": Case("CartPole-v1", CART, ("return_flat",), cartpole(Endless, max_episode_steps=40)),
    "silent": Case("CartPole-v1", CART, ("return_flat",), cartpole(Silent)),
    "turning": Case("cartpole", {"steps": 25_600}, ("return_collapsed",), cartpole(Turning, 1_800)),
    "tiny_clip": Case(
        "CartPole-v1",
        {
            **CART,
            "optimizer": {"learning_rate": 3e-3},
            "objective": {"reuse": {"epochs": 40, "minibatches": 1}, "trust_region": {"clip": 0.005, "schedule": "constant"}},
        },
        ("clip_saturated",),
    ),
    "wild_critic": Case(
        "CartPole-v1",
        {
            **CART,
            "optimizer": {"critic_learning_rate": 3.0, "critic_max_grad_norm": None},
            "objective": {"gae_lambda": 1.0, **FEW},
        },
        ("critic_misleads",),
    ),
    "narrow_normaliser": Case(
        "CartPole-v1", {**CART, "normalise": {"observations": True, "clip": 0.05}}, ("normaliser_saturated",)
    ),
    "low_target_kl": Case(
        "CartPole-v1",
        {**CART, "objective": {"target_kl": 1e-9, "reuse": {"epochs": 4, "minibatches": 2}}},
        ("passes_end_at_once",),
    ),
    "no_room": Case(
        "CartPole-v1",
        {**CART, "algorithm": "TRPO", "objective": {"trust_region": {"delta": 50.0, "tries": 1, "damping": 0.0}}},
        ("no_step_taken",),
    ),
    "coin": Case(
        "benchmarks.findings:Coin",
        {**SMALL, "steps": 5_120, "optimizer": {"learning_rate": 0.05}},
        ("entropy_collapsed",),
        Coin,
    ),
    # text with a fault
    "hackable": Case(
        "reviews",
        {**PPO_TEXT, "reference": {"beta": 0.0, "measure": True}, "optimizer": {"learning_rate": 1e-3}},
        ("reward_hacked",),
        text=online("letters"),
    ),
    "negated": Case(
        "reviews",
        {**PPO_TEXT, "reference": {"beta": 0.0, "measure": True}, "optimizer": {"learning_rate": 1e-3}},
        ("reward_hacked",),
        text=online("shame"),
    ),
    "no_anchor": Case(
        "reviews",
        {**PPO_TEXT, "reference": {"beta": 0.0, "measure": True}, "optimizer": {"learning_rate": 2e-3}},
        ("left_reference",),
        text=online("letters", gold=False),
    ),
    "no_reward": Case("reviews", {**PPO_TEXT, "steps": 320}, ("no_reward_signal",), text=online("nothing", gold=False)),
    "short_limit": Case(
        "reviews",
        {**PPO_TEXT, "steps": 320, "sampling": {"prompts": 32, "max_tokens": 8}},
        ("responses_cut",),
        text=online("gold"),
    ),
    "untrained_start": Case(
        "reviews",
        {**PPO_TEXT, "steps": 320},
        ("unusable_start",),
        text=lambda s: online("gold")(s) | {"model": str(s / "untrained")},
    ),
    "random_labels": Case("reviews_reward", {"steps": 1_600, **EVERY}, ("preferences_at_chance",), text=rows("random_pairs")),
    "wrong_labels": Case("reviews_reward", {"steps": 1_600, **EVERY}, ("preferences_at_chance",), text=rows("wrong_pairs")),
    "still_reward": Case(
        "reviews_reward",
        {"steps": 1_600, **EVERY, "optimizer": {"learning_rate": 1e-9}},
        ("preferences_at_chance",),
        text=rows("pairs"),
    ),
    "fast_dpo": Case("dpo", {**PAIRED, "optimizer": {"learning_rate": 1e-3}}, ("chosen_less_likely",), text=rows("pairs")),
    "fast_sft": Case(
        "reviews_sft",
        {"steps": 1_600, **EVERY, "optimizer": {"learning_rate": 0.2}},
        ("loss_rose", "loss_flat", "unusable_start"),
        text=rows("demonstrations", "pocket"),
    ),
    "still_sft": Case(
        "reviews_sft",
        {"steps": 1_600, **EVERY, "optimizer": {"learning_rate": 1e-8}},
        ("loss_flat", "unusable_start"),
        text=rows("demonstrations", "pocket"),
    ),
    "few_rows": Case("reviews_sft", {"steps": 3_200, **EVERY}, ("loss_rose",), text=rows("few", "pocket")),
}
"""name -> case"""


# ---- training ---------------------------------------------------------------------------------------------------------


def make_start(folder: Path, seed: int) -> Path:
    """The files and the SFT models that text cases of a seed begin with, made once."""
    from surefoot.language.data.rows import write_rows
    from surefoot.language.tasks import reviews
    from surefoot.runs import api

    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shown = reviews.demonstrations(4_000, seed)
    write_rows(folder / "demonstrations.jsonl", shown)
    write_rows(folder / "few.jsonl", shown[:32])
    for name in ("held_out_demonstrations", "held_out_few"):
        write_rows(folder / f"{name}.jsonl", reviews.demonstrations(128, seed + 100))
    for name, count, of in (("prompts", 1_000, seed), ("held_out_prompts", 64, seed + 100)):
        write_rows(folder / f"{name}.jsonl", [{"prompt": prompt} for prompt in reviews.prompts(count, of)])
    pairs = reviews.label(paired(shown), noise=0.25, seed=seed)
    draw = random.Random(seed)
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs]
    write_rows(folder / "held_out_pairs.jsonl", pairs[:128])
    write_rows(folder / "pairs.jsonl", pairs[128:])
    write_rows(folder / "wrong_pairs.jsonl", swapped[128:])
    write_rows(folder / "random_pairs.jsonl", [draw.choice(both) for both in zip(pairs, swapped, strict=True)])
    (folder / "rewards.py").write_text(REWARDS)
    for name, changes in (("sft", {"steps": 3_200}), ("untrained", {"steps": 16, "optimizer": {"learning_rate": 1e-9}})):
        data = {"train": str(folder / "demonstrations.jsonl")}
        recipe = find_recipe("reviews_sft", {"seed": seed, "data": data, "evaluation": {"rows": 0}, **changes})
        api.start(recipe, folder / name)
    (folder / "done").touch()
    return folder


def paired(shown: list[Row]) -> list[tuple[str, str, str]]:
    """Two reviews of the same prompt at a time."""
    waiting: dict[str, str] = {}
    pairs = []
    for row in shown:
        first = waiting.pop(row["prompt"], None)
        if first is None:
            waiting[row["prompt"]] = row["completion"]
        else:
            pairs.append((row["prompt"], first, row["completion"]))
    return pairs


def train(name: str, seed: int, starts: Path, steps: int | None = None) -> Row:
    """Train a cell; the metrics that checks read, by name."""
    from surefoot.runs import api

    case, found = CASES[name], list[Row]()
    start = starts if case.text is None else make_start(starts / f"{2 - seed % 2}", 2 - seed % 2)
    table = case.table(seed, start) | ({} if steps is None else {"steps": steps})
    api.start(find_recipe(case.recipe, table), None, case.task, callback=lambda row: found.append(dict(row)))
    present = [key for key in CHECKED_METRICS if any(row.get(key) is not None for row in found)]
    columns = {key: [short(row.get(key)) for row in found] for key in ("steps", *present)}
    return {"case": name, "seed": seed, "columns": columns, "made_with": made_with()}


def short(value: float | None) -> float | None:
    """A number in five digits."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def cell_file(name: str, seed: int) -> Path:
    """Where a cell's rows are."""
    return OUT / f"{name}-{seed}.json"


# ---- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run to judge: its rows, and which findings it must have (none: it is healthy)."""

    name: str
    seed: int
    rows: list[Row]
    recipe: Recipe | None
    faults: tuple[str, ...] = ()

    @property
    def held_out(self) -> bool:
        """Whether thresholds may not be chosen by it."""
        return self.seed % 2 == 0


def trained_runs() -> Iterator[Run]:
    """The finished cells of ``CASES``."""
    for name, case in CASES.items():
        for seed in case.seeds:
            if cell_file(name, seed).exists():
                yield stored(name, seed, json.loads(cell_file(name, seed).read_text())["columns"])


def stored(name: str, seed: int, columns: Mapping[str, list[Any]]) -> Run:
    """A cell as a run."""
    lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Run(name, seed, lines, CASES[name].made(seed, Path("start")), CASES[name].faults)


def stored_runs() -> Iterator[Run]:
    """The returns of this library's runs in ``results/``, one folder for each task and preset."""
    found = (
        (file.stem, result) for file in sorted(RESULTS.glob("*-*.jsonl")) for result in read(file.with_suffix("")).values()
    )
    for name, result in found:
        if result["library"] != "surefoot" or "curve" not in result:
            continue
        lines = [{"steps": steps, "episode_return": earned} for steps, earned in result["curve"]]
        yield Run(f"results/{name}", result["seed"], lines, None)


class Noting(RunCurves):
    """Curves that remember which of them a check has read and found values in."""

    read = False

    def __getitem__(self, metric: str) -> Curve:
        curve = super().__getitem__(metric)
        self.read |= len(curve) > 0
        return curve


def judge(run: Run) -> Row:
    """The worst severity of each finding at any check during the run or at its end, and which checks had something to read."""
    budget = int(run.rows[-1]["steps"])
    curves = Noting(budget=budget)
    alarms: dict[str, str] = {}
    done = 0
    for row in run.rows:
        curves.add(row)
        due = CHECKS_PER_RUN * curves.steps // budget
        if due > done:
            done = due
            for finding in check_curves(curves, run.recipe):
                if alarms.get(finding.name) != "serious":
                    alarms[finding.name] = finding.severity
    tested = []
    for check in RUN_CHECKS:
        curves.read = False
        check(curves, run.recipe)
        kind = "control" if run.recipe is None else run.recipe.kind
        tested += [check.__name__] if curves.read and kind in KINDS.get(check.__name__, (kind,)) else []
    return {
        "name": run.name,
        "seed": run.seed,
        "held_out": run.held_out,
        "faults": list(run.faults),
        "alarms": alarms,
        "tested": tested,
    }


def exact_interval(count: int, of: int) -> tuple[float, float]:
    """95 % for a share, by Clopper and Pearson (1934)."""

    def above(p: float, k: int) -> float:
        return sum(math.comb(of, i) * p**i * (1 - p) ** (of - i) for i in range(k, of + 1))

    def solve(reached: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        return low

    low = 0.0 if count == 0 else solve(lambda p: above(p, count) >= 0.025)
    high = 1.0 if count == of else solve(lambda p: 1 - above(p, count + 1) <= 0.025)
    return low, high


def share(count: int, of: int) -> str:
    """A count with its interval."""
    if of == 0:
        return "–"
    low, high = exact_interval(count, of)
    return f"{count} of {of} ({low:.0%} to {high:.0%})"


def tables(judged: list[Row]) -> str:
    """False alarms of held-out healthy runs and planted faults caught, for each finding, and the runs with a serious one."""
    healthy = [run for run in judged if not run["faults"]]
    names = sorted({check.__name__ for check in RUN_CHECKS} | {"few_groups_with_signal"})
    lines = []
    for name in names:
        check = "no_reward_signal" if name == "few_groups_with_signal" else name
        tested = [run for run in healthy if check in run["tested"]]
        cells = [name]
        for held_out in (False, True):
            of = [run for run in tested if run["held_out"] == held_out]
            cells.append(share(sum(run["alarms"].get(name) in SERIOUS for run in of), len(of)))
        planted = [run for run in judged if name in run["faults"][:1]]
        cells.append(share(sum(any(fault in run["alarms"] for fault in run["faults"]) for run in planted), len(planted)))
        lines.append(cells)
    halves = [[run for run in healthy if run["held_out"] == held_out] for held_out in (False, True)]
    serious = [share(sum("serious" in run["alarms"].values() for run in of), len(of)) for of in halves]
    lines.append(["**any serious finding**", *serious, ""])
    return markdown_table(["finding", "false alarms, tuned on", "false alarms, held out", "planted, caught"], lines)


def with_table(page: str, table: str) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def main(words: list[str] | None = None) -> None:
    """Train, judge, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "judge", "page"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--seeds", nargs="+", type=int, help="only these of each case")
    parser.add_argument("--starts", type=Path, default=Path(tempfile.gettempdir()) / "surefoot-findings")
    args = parser.parse_args(words)
    if args.what == "train":
        for seed in args.seeds or sorted({seed for name in args.cases for seed in CASES[name].seeds}):
            for name in args.cases:
                if seed in CASES[name].seeds and not cell_file(name, seed).exists():
                    print(f"{name} {seed}", flush=True)
                    cell_file(name, seed).write_text(json.dumps(train(name, seed, args.starts)) + "\n", "utf-8")
    elif args.what == "judge":
        judged = [judge(run) for run in (*trained_runs(), *stored_runs())]
        JUDGED.write_text(json.dumps({"runs": judged}) + "\n", "utf-8")
    else:
        table = tables(json.loads(JUDGED.read_text())["runs"])
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), table), "utf-8")
        print(table)


if __name__ == "__main__":
    sys.exit(main())
