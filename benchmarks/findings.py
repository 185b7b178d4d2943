"""How often findings are false, and how often they are there: healthy runs and runs with planted faults, one table.

    python benchmarks/findings.py          # train what results/findings.jsonl lacks, check every run, write the page's table
    python benchmarks/findings.py train    # or one of these steps alone; an interrupted one goes on where it was
    python benchmarks/findings.py judge
    python benchmarks/findings.py page

A cell is a case with a seed; add a case to ``CASES`` or seeds to it. Healthy runs are those of the cases without a fault, and
the returns or rewards in ``results/`` of all runs that a benchmark reports. A run is checked as during training, after each
twentieth of its budget, and at its end; an alarm at any time counts. Runs with even seeds are held out: thresholds may be
chosen by the others alone. The metrics that checks read are stored, so changed checks need no training.
"""

import argparse
import copy
import csv
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
from record import made_with, read

from surefoot.compare.statistics import markdown_table
from surefoot.diagnostics.curves import CHECKED_METRICS, RunCurves
from surefoot.diagnostics.findings import CHECKS_PER_RUN, check_curves
from surefoot.recipes.base import Recipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import merge_tables

HERE = Path(__file__).parent
RESULTS = HERE / "results"
OUT = RESULTS / "findings.jsonl"
DEMOS = {"control": "control", "sft": "sft", "reward_model": "reward", "ppo": "language", "ppo_2": "language"}
"""stored metrics of whole demos -> kind of run; thresholds were chosen with them, so none is held out"""
PAGE = HERE.parent / "docs" / "benchmarks" / "findings.md"
BEGIN, END = "<!-- the table of benchmarks/findings.py page -->", "<!-- end of the table -->"
RETURNS = ("episode_return", "reward")
READS = {
    "chosen_less_likely": ("held_out_chosen_moved",),
    "clip_idle": ("clip_active",),
    "clip_saturated": ("clip_active",),
    "critic_misleads": ("explained_variance",),
    "entropy_collapsed": ("entropy",),
    "few_groups_with_signal": ("groups_without_signal",),
    "kl_runaway": ("kl",),
    "left_reference": ("kl_reference",),
    "loss_flat": ("policy_loss",),
    "loss_rose": ("policy_loss", "held_out_loss"),
    "negative_kl": ("kl_reference",),
    "no_reward_signal": ("score_std",),
    "no_step_taken": ("step_taken",),
    "normaliser_saturated": ("observations_clipped", "rewards_clipped"),
    "observation_constant": ("observations_constant",),
    "observation_outside": ("observations_outside",),
    "passes_end_at_once": ("stopped_early",),
    "preferences_at_chance": ("held_out_accuracy",),
    "responses_cut": ("eos_rate",),
    "return_collapsed": RETURNS,
    "return_flat": RETURNS,
    "reward_hacked": ("gold", "held_out_gold", "distinct_2", "held_out_log_likelihood"),
    "sampler_differs": ("sampler_kl",),
    "special_tokens_dropped": ("special_tokens",),
    "unusable_start": ("entropy", "policy_loss"),
    "wrong_start": ("ratio_at_start",),
}
"""finding -> the metrics of which a run has one, if the finding can appear in it"""
KINDS = {
    "loss_flat": ("sft",),
    "loss_rose": ("sft", "reward", "dpo"),
    "unusable_start": ("sft", "language"),
}
"""the same for kinds of runs, where others have such a metric too"""
NOTES = ("clip_idle",)
"""findings that are never more than a note"""
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


class Degrees(gymnasium.ObservationWrapper):
    """Observations in other units than the bounds of their space."""

    def observation(self, observation: Any) -> Any:
        """In degrees."""
        return np.degrees(observation)


def cartpole(wrapper: Callable[..., Any], *arguments: Any, **settings: Any) -> Callable[[], Any]:
    """Makes a CartPole with a fault."""
    return lambda: wrapper(gymnasium.make("CartPole-v1", **settings), *arguments)


# ---- faults of the library's own parts ----------------------------------------------------------------------------------


def old_weights() -> AbstractContextManager[Any]:
    """The sampler never gets the trained weights."""
    from surefoot.language.online import world
    from surefoot.language.online.engine import InProcess

    class Old(InProcess):
        exact = False

    return patch.object(world, "make_engine", lambda recipe, model, tokens, longest: Old(copy.deepcopy(model)))


def other_temperature() -> AbstractContextManager[Any]:
    """Passes with a gradient have another temperature than those without."""
    import torch

    from surefoot.language.models.policy import LanguagePolicy

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        with patch.object(self, "temperature", 2.0 if torch.is_grad_enabled() else self.temperature):
            return usual(self, *arguments, **options)

    usual = LanguagePolicy.forward
    return patch.object(LanguagePolicy, "forward", forward)


# ---- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A recipe that is trained with several seeds.

    faults   the finding that must appear, and others that show the same fault; none: the run is healthy
    text     takes the folder of a start (SFT model and files) for its recipe
    plant    is entered while it trains
    """

    recipe: str
    changes: Table = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    task: Callable[[], Any] | None = None
    text: Callable[[Path], Table] | None = None
    seeds: tuple[int, ...] = (1, 2)
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext

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
FOUR = (1, 2, 3, 4)
REWARDS = """
import zlib

def letters(responses):
    return [text.count("e") / 10 for text in responses]

def nothing(responses):
    return [0.0 for text in responses]

def lottery(responses):
    return [float(zlib.crc32(text.encode()) % 30 == 0) for text in responses]

def shame(prompts, responses):
    from surefoot.language.tasks.reviews import gold
    return [-score for score in gold(prompts, responses)]
"""
GOLD = "surefoot.language.tasks.reviews:gold"


def online(reward: str, gold: bool = True, model: str = "sft") -> Callable[[Path], Table]:
    """PPO from a model of a start, on one of its functions, on gold itself, or on its reward model."""

    def table(start: Path) -> Table:
        term = {"function": GOLD if reward == "gold" else f"{start / 'rewards.py'}:{reward}"}
        terms = {
            "terms": [{"model": str(start / "reward")} if reward == "model" else term],
            **({} if reward == "lottery" else {"missing_eos": "penalty", "missing_eos_value": -1.0}),
            **({"gold": GOLD} if gold else {}),
        }
        data = {"train": str(start / "prompts.jsonl"), "held_out": str(start / "held_out_prompts.jsonl")}
        critic = {"own_model": False, "start": None}
        return {"model": str(start / model), "data": data, "reward": terms, "critic": critic, "traces": {"rows": 0}}

    return table


def rows(kind: str, model: str = "sft") -> Callable[[Path], Table]:
    """Training on one of the files of a start."""

    def table(start: Path) -> Table:
        held_out = "pairs" if kind.startswith("wrong") else kind
        data = {"train": str(start / f"{kind}.jsonl"), "held_out": str(start / f"held_out_{held_out}.jsonl")}
        if kind == "random_pairs":
            data["held_out"] = str(start / "random_pairs.jsonl")
        return {"model": str(start / model), "data": {**data, "max_length": 64, "batch": 16}}

    return table


PPO_TEXT = {"steps": 640, "sampling": {"prompts": 32, "max_tokens": 24}, "evaluation": {"every": 160, "rows": 32}}
SHORT = {**PPO_TEXT, "steps": 320}
GRPO_TEXT = {**PPO_TEXT, "algorithm": "GRPO", "sampling": {"prompts": 8, "samples": 4, "max_tokens": 24}}
LOOSE = {"reference": {"beta": 0.0, "measure": True}, "optimizer": {"learning_rate": 1e-3}}
UNSEEN = {"evaluation": {"rows": 0}}
EVERY = {"evaluation": {"every": 320, "rows": 128}}
PAIRED = {"steps": 960, **EVERY}
FAST = {"learning_rate": 0.1, "schedule": "constant", "max_grad_norm": None}
CASES: dict[str, Case] = {
    # healthy
    "cartpole": Case("cartpole", {"steps": 12_800}, seeds=FOUR),
    "cartpole_trpo": Case("CartPole-v1", {"algorithm": "TRPO", "steps": 12_800, **SMALL}, seeds=FOUR),
    "cartpole_penalty": Case("cartpole", {"algorithm": "PPO_PENALTY_ADAPTIVE", "steps": 12_800}, seeds=FOUR),
    "cartpole_normalised": Case(
        "cartpole", {"steps": 12_800, "normalise": {"observations": True, "rewards": True}}, seeds=FOUR
    ),
    "sft": Case("reviews_sft", {"steps": 1_600, **EVERY}, text=rows("demonstrations", "small"), seeds=FOUR),
    "reward": Case("reviews_reward", {"steps": 1_600, **EVERY}, text=rows("pairs"), seeds=FOUR),
    "dpo": Case("dpo", {**PAIRED, "optimizer": {"learning_rate": 2e-5}}, text=rows("pairs"), seeds=FOUR),
    "ppo_gold": Case("reviews", {**PPO_TEXT, "reference": {"beta": 0.1}}, text=online("gold"), seeds=FOUR),
    "ppo_learned": Case("reviews", PPO_TEXT, text=online("model"), seeds=FOUR),
    "ppo_bfloat16": Case("reviews", {**SHORT, "precision": "bfloat16"}, text=online("gold")),
    "grpo_gold": Case(  # seed 1 did not learn in 20 iterations at 2e-4, and left its reference at 5e-4
        "language",
        {**GRPO_TEXT, "steps": 1_280, "optimizer": {"learning_rate": 3e-4}},
        text=online("gold", gold=False),
    ),
    # control with a fault
    "still": Case("CartPole-v1", {**CART, "optimizer": {"learning_rate": 1e-9}}, ("return_flat",), seeds=(1, 2, 3)),
    "no_updates_clip": Case("CartPole-v1", {**CART, "optimizer": {"learning_rate": 1e-9}}, ("clip_idle",), seeds=(5, 6)),
    "fast": Case(
        "CartPole-v1",
        {**CART, "optimizer": FAST, "objective": {"reuse": {"epochs": 20, "minibatches": 2}}},
        ("kl_runaway",),
        seeds=(1, 2, 3),
    ),
    "blind": Case(
        "CartPole-v1",
        {**CART, "steps": 6_400},
        ("observation_constant", "return_flat", "return_collapsed"),
        cartpole(Blind),
    ),
    "degrees": Case("CartPole-v1", CART, ("observation_outside",), cartpole(Degrees), seeds=FOUR),
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
    "hackable": Case("reviews", {**PPO_TEXT, **LOOSE}, ("reward_hacked",), text=online("letters")),
    "negated": Case("reviews", {**PPO_TEXT, **LOOSE}, ("reward_hacked",), text=online("shame")),
    "no_anchor": Case(
        "reviews",
        {**PPO_TEXT, **LOOSE, "optimizer": {"learning_rate": 2e-3}},
        ("left_reference",),
        text=online("letters", gold=False),
    ),
    "no_reward": Case("reviews", SHORT, ("no_reward_signal",), text=online("nothing", gold=False)),
    "rare_reward": Case(
        "language",
        {**GRPO_TEXT, "sampling": {"prompts": 16, "samples": 4, "max_tokens": 24}, "optimizer": {"learning_rate": 1e-5}},
        ("few_groups_with_signal", "no_reward_signal"),
        text=online("lottery", gold=False),
    ),
    "short_limit": Case(
        "reviews", {**SHORT, "sampling": {"prompts": 32, "max_tokens": 8}}, ("responses_cut",), text=online("gold")
    ),
    "untrained_start": Case("reviews", SHORT, ("unusable_start",), text=online("gold", model="untrained")),
    "special_stops": Case("reviews", SHORT, ("special_tokens_dropped",), text=online("letters", False, model="dotted")),
    "old_sampler": Case("reviews", {**SHORT, **LOOSE}, ("sampler_differs",), text=online("gold"), plant=old_weights),
    "old_sampler_kl": Case("reviews", {**SHORT, **LOOSE}, ("negative_kl",), text=online("shame"), plant=old_weights),
    "other_temperature": Case(
        "reviews",
        {**SHORT, "steps": 160, "precision": "bfloat16"},
        ("wrong_start",),
        text=online("gold"),
        plant=other_temperature,
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
        text=rows("demonstrations", "small"),
    ),
    "still_sft": Case(
        "reviews_sft",
        {"steps": 1_600, **EVERY, "optimizer": {"learning_rate": 1e-8}},
        ("loss_flat", "unusable_start"),
        text=rows("demonstrations", "small"),
    ),
    "few_rows": Case("reviews_sft", {"steps": 3_200, **EVERY}, ("loss_rose",), text=rows("few", "small")),
}
"""name -> case"""


# ---- training ---------------------------------------------------------------------------------------------------------


def make_start(folder: Path, seed: int) -> Path:
    """The files and the models that text cases of a seed begin with, made once."""
    from surefoot.language.data.rows import write_rows
    from surefoot.language.tasks import reviews
    from surefoot.runs import api

    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shown = first_sentences(reviews.demonstrations(4_000, seed))
    write_rows(folder / "demonstrations.jsonl", shown)
    write_rows(folder / "few.jsonl", shown[:32])
    for name in ("held_out_demonstrations", "held_out_few"):
        write_rows(folder / f"{name}.jsonl", first_sentences(reviews.demonstrations(128, seed + 100)))
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
    still = {"optimizer": {"learning_rate": 1e-9}}
    small_model(folder / "small", seed)
    started: list[tuple[str, str, str, str, Table]] = [
        ("sft", "reviews_sft", "small", "demonstrations", {"steps": 4_800}),
        ("untrained", "reviews_sft", "small", "demonstrations", {"steps": 16, **still}),
        ("reward", "reviews_reward", "sft", "pairs", {"steps": 1_600}),
    ]
    for name, recipe, model, data, changes in started:
        own = {"seed": seed, "model": str(folder / model), "data": {"train": str(folder / f"{data}.jsonl")}, **UNSEEN}
        api.start(find_recipe(recipe, {**own, **changes}), folder / name)
    with_special_stops(folder / "sft", folder / "dotted")
    (folder / "done").touch()
    return folder


def small_model(folder: Path, seed: int) -> None:
    """A quarter of the pocket model, with random weights."""
    import torch
    from transformers import LlamaForCausalLM

    from surefoot.language.models.pocket import character_tokenizer, pocket_config

    config = pocket_config(tokenizer := character_tokenizer())
    config.update({"hidden_size": 96, "intermediate_size": 264, "num_hidden_layers": 2})
    config.head_dim = 96 // config.num_attention_heads
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def with_special_stops(model: Path, folder: Path) -> None:
    """A model whose tokenizer takes the full stop, which ends every sentence, for a special token."""
    from surefoot.language.language_model import load_language_model

    shutil.copytree(model / "model", folder, ignore=shutil.ignore_patterns("manifest.json"))
    tokenizer = load_language_model(str(model)).tokens.tokenizer
    tokenizer.add_tokens(["."], special_tokens=True)
    tokenizer.save_pretrained(folder)


def first_sentences(shown: list[Row]) -> list[Row]:
    """Reviews of one sentence each, which take half the time."""
    return [{**row, "completion": row["completion"].partition(".")[0] + "."} for row in shown]


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
    with case.plant():
        api.start(find_recipe(case.recipe, table), None, case.task, callback=lambda row: found.append(dict(row)))
    present = [key for key in CHECKED_METRICS if any(row.get(key) is not None for row in found)]
    columns = {key: [short(row.get(key)) for row in found] for key in ("steps", *present)}
    return {"cell": f"{name}-{seed}", "name": name, "seed": seed, "columns": columns, "made_with": made_with()}


def short(value: float | None) -> float | None:
    """A number in five digits."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def read_results() -> list[Row]:
    """The lines of the results."""
    return [json.loads(line) for line in OUT.read_text("utf-8").splitlines()] if OUT.exists() else []


def train_missing(cases: list[str], starts: Path) -> None:
    """Train the cells that the results lack, the first seed of every case first, and add a line for each."""
    done = {(line["name"], line["seed"]) for line in read_results()}
    cells = [(case, seed) for case in cases for seed in CASES[case].seeds]
    for name, seed in sorted(cells, key=lambda cell: cell[1]):
        if (name, seed) not in done:
            print(f"{name} {seed}", flush=True)
            line = json.dumps(train(name, seed, starts)) + "\n"
            with OUT.open("ab", buffering=0) as file:
                file.write(line.encode())


# ---- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredRun:
    """A run to judge."""

    name: str
    seed: int
    kind: str
    rows: list[Row]
    recipe: Recipe | None = None


def trained_run(line: Row) -> StoredRun:
    """A trained cell."""
    columns = line["columns"]
    lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    recipe = CASES[line["name"]].made(line["seed"], Path("start"))
    return StoredRun(line["name"], line["seed"], recipe.kind, lines, recipe)


def stored_runs() -> Iterator[StoredRun]:
    """The demos, and this library's runs in ``results/`` with their returns or rewards: of presets, tensor tasks, verifiers."""
    for name, kind in DEMOS.items():
        with (HERE.parent / "tests" / "diagnostics" / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
            lines = [{key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)]
        yield StoredRun(f"demo/{name}", 1, kind, lines)
    for file in sorted((*RESULTS.glob("*-*.jsonl"), *RESULTS.glob("tensor/*.jsonl"))):
        for result in read(file.with_suffix("")).values():
            lines = [{"steps": steps, "episode_return": earned} for steps, earned, *_ in result.get("curve", ())]
            if result.get("library") == "surefoot" and lines:
                yield StoredRun(f"results/{file.relative_to(RESULTS).with_suffix('')}", result["seed"], "control", lines)
    for file in sorted(RESULTS.glob("verifier/*.jsonl")):
        for result in read(file.with_suffix("")).values():
            lines = [{"steps": steps, "reward": earned} for steps, earned, *_ in result.get("curve", ())]
            if lines and result["seed"] < 10:  # the others chose a learning rate
                yield StoredRun(f"results/verifier/{result['task']}/{result['algorithm']}", result["seed"], "language", lines)


def judge(run: StoredRun) -> dict[str, str]:
    """The worst severity of each finding at any check during the run or at its end."""
    budget = int(run.rows[-1]["steps"])
    curves = RunCurves(budget=budget)
    alarms: dict[str, str] = {}
    done = 0
    for row in run.rows:
        curves.add(row)
        due = CHECKS_PER_RUN * curves.steps // budget
        if due > done:
            done = due
            for finding in check_curves(curves, run.recipe):
                if alarms.get(finding.name) not in SERIOUS:
                    alarms[finding.name] = finding.severity
                elif finding.severity == "serious":
                    alarms[finding.name] = "serious"
    return alarms


def judge_all() -> None:
    """Write what checks find in every run into the results."""
    order = list(CASES)
    lines = [line for line in read_results() if line["name"] in CASES]
    lines.sort(key=lambda line: (order.index(line["name"]), line["seed"]))
    judged = [{**line, "alarms": judge(trained_run(line))} for line in lines]
    for run in stored_runs():
        metrics = sorted({key for row in run.rows for key, value in row.items() if value is not None})
        own = {"cell": f"{run.name}-{run.seed}", "name": run.name, "seed": run.seed, "kind": run.kind}
        judged.append({**own, "metrics": metrics, "alarms": judge(run)})
    text = "".join(json.dumps(line) + "\n" for line in judged)
    (partial := OUT.with_suffix(".partial")).write_text(text, "utf-8")
    partial.rename(OUT)


# ---- the table --------------------------------------------------------------------------------------------------------


def faults(line: Row) -> tuple[str, ...]:
    """The findings of which a run must have one; none if it is healthy."""
    return CASES[line["name"]].faults if line["name"] in CASES else ()


def held_out(line: Row) -> bool:
    """Whether thresholds may not be chosen by a run."""
    return bool(line["seed"] % 2 == 0)


def can_appear(name: str, line: Row) -> bool:
    """Whether a run has the metrics that a finding needs, and is of its kind."""
    kind = line.get("kind") or CASES[line["name"]].made(1, Path("start")).kind
    present = line.get("metrics") or list(line["columns"])
    return any(metric in present for metric in READS[name]) and kind in KINDS.get(name, (kind,))


def alarmed(name: str, line: Row) -> bool:
    """Whether a run has a finding that counts as an alarm."""
    return line["alarms"].get(name) in SERIOUS or (name in NOTES and name in line["alarms"])


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
    return f"{count}/{of} ({low:.0%}–{high:.0%})"


def tables(judged: list[Row]) -> str:
    """False alarms in healthy runs and planted faults caught, for each finding, and the healthy runs with a serious one."""
    halves = [[line for line in judged if not faults(line) and held_out(line) == half] for half in (False, True)]
    lines = []
    for name in READS:
        of = [[line for line in half if can_appear(name, line)] for half in halves]
        planted = [line for line in judged if faults(line)[:1] == (name,)]
        caught = sum(any(alarmed(fault, line) for fault in faults(line)) for line in planted)
        false = (share(sum(alarmed(name, line) for line in half), len(half)) for half in of)
        lines.append([f"`{name}`", *false, share(caught, len(planted))])
    serious = [share(sum("serious" in line["alarms"].values() for line in half), len(half)) for half in halves]
    lines.append(["**any serious finding**", *serious, ""])
    return markdown_table(["finding", "false alarms, tuned on", "false alarms, held out", "planted, caught"], lines)


def with_table(page: str, table: str) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def main(words: list[str] | None = None) -> None:
    """Train, judge, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "judge", "page"), nargs="?", help="default: all three")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--starts", type=Path, default=Path(tempfile.gettempdir()) / "surefoot-findings")
    args = parser.parse_args(words)
    if args.what in ("train", None):
        train_missing(args.cases, args.starts)
    if args.what in ("judge", None):
        judge_all()
    if args.what in ("page", None):
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), table := tables(read_results())), "utf-8")
        print(table)


if __name__ == "__main__":
    main()
