"""Iterated rounds: pairs of the policy as it is, labelled by a judge; the reward model anew; PPO on from where it stood.

A reward model knows what it was shown. PPO leaves that, and the reward it earns there is worth less and less; fresh pairs of
the policy's own answers teach the reward model about where the policy is now. Each stage is an ordinary run, and each round a
folder: ``round-1/pairs.jsonl``, ``reward/``, ``ppo/``, ``round.json``.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.core.distributed import check_single_process
from surefoot.core.seeding import derived_seed
from surefoot.errors import Interrupted, SurefootError
from surefoot.files import read_table, read_toml, write_text
from surefoot.language.analysis.best_of import reward_from
from surefoot.language.analysis.metrics import win_rate
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import EpochSampler
from surefoot.language.data.pairs import answer_text, pair_row, prefers_first, sample_pairs
from surefoot.language.data.rows import read_rows, write_rows
from surefoot.language.models.language_model import errors_for, load_language_model, model_folder
from surefoot.language.models.loading import context_length
from surefoot.language.rewards.terms import FunctionReward, ModelReward, Reward, parts_of
from surefoot.recipes.base import Recipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.runs.display import Display
from surefoot.runs.folder import FREE, RunFolder, differences
from surefoot.runs.paths import FINISHED

HELD_OUT = 5
"""one fresh pair in so many is not trained on in its round, but judges the reward models; later rounds train on it"""
ROWS = dict[str, Any]
Shows = Callable[[Recipe, Path], Display]


@dataclass(frozen=True)
class Plan:
    """What every round does.

    recipe     of PPO. Its one reward model is a run of kind "reward", whose recipe trains the refreshed ones
    judge      who labels pairs: a function or a reward model, as ``--reward`` of best-of-n names it
    pairs      prompts per round that are answered twice
    noise      of the labels: an answer is chosen with probability σ(difference of the judge's scores / noise)
    new_only   train reward models on the pairs of their own round alone
    """

    recipe: LanguageRecipe
    judge: str
    pairs: int = 512
    noise: float = 0.0
    new_only: bool = False

    def __post_init__(self) -> None:
        if self.recipe.model == "pocket":
            raise SurefootError("model='pocket': rounds begin with a model that can write; name a run of kind 'sft'")
        if self.recipe.turns.environment is not None:
            raise SurefootError(
                f"turns.environment={self.recipe.turns.environment!r}: rounds compare single answers; train this recipe alone"
            )
        if self.pairs < 2 * HELD_OUT:
            raise SurefootError(f"pairs={self.pairs}: too few, one in {HELD_OUT} is held out; take at least {2 * HELD_OUT}")
        models = [term.model for term in self.recipe.reward.terms if term.model is not None]
        if len(models) != 1:
            raise SurefootError(
                f"reward.terms: rounds refresh one reward model, and this recipe names {len(models)}; give one term whose "
                "model is a run of kind 'reward'"
            )
        self._check_adapter()
        first = Path(models[0]).expanduser()
        if (first / "adapter").is_dir() and not (first / "model").is_dir():
            raise SurefootError(
                f"reward.terms model={models[0]!r}: this run left an adapter alone, and rounds go on from its whole model; "
                f"merge it there: surefoot merge {models[0]} --out {first / 'model'}"
            )
        with errors_for("reward.terms model"):
            model_folder(models[0])
        config = Path(models[0]).expanduser() / "config.toml"
        if not config.is_file() or read_toml(config).get("kind") != "reward":
            raise SurefootError(
                f"reward.terms model={models[0]!r}: is no run of kind 'reward', whose recipe and pairs a refreshed one is made "
                "of; name such a run"
            )

    def _check_adapter(self) -> None:
        """Refuse what the second round would: its base is the first one's result, merged."""
        adapter, start = self.recipe.adapter, self.recipe.critic.start
        if adapter is not None and not adapter.merge:
            raise SurefootError("adapter.merge=false: each round begins with the merged model of the last; set true")
        if adapter is not None and start is not None:
            raise SurefootError(
                f"critic.start={start!r}: with [adapter] it is an adapter of the same base, and every round has a base of its "
                "own; unset it"
            )

    @property
    def first_reward(self) -> Path:
        """The run of the reward model that the rounds begin with."""
        return Path(next(term.model for term in self.recipe.reward.terms if term.model is not None)).expanduser()

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        told = {name: getattr(self, name) for name in ("judge", "pairs", "noise", "new_only")}
        return {**told, "recipe": to_table(self.recipe)}


def go_rounds(
    plan: Plan, folder: Path, rounds: int, display_for: Shows, say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """So many rounds in all; what each came to. Those that are there already are not made again, and one that stopped goes on.

    display_for   who shows the training of a recipe in a folder
    say           is told of what else takes time

    Raises SurefootError when the folder holds rounds of another plan, where there are several ranks, and what training raises.
    """
    check_single_process(folder)
    if not (folder / "rounds.json").is_file():
        _judge(plan)  # one that can't be loaded claims no folder
    _claim(plan, folder)
    try:
        return [_round(plan, folder, number, display_for, say) for number in range(1, rounds + 1)]
    except Interrupted as stop:
        raise Interrupted(f"{str(stop).partition(';')[0]}; repeat the command to go on") from None


def ppo_recipe(plan: Plan, folder: Path, number: int) -> LanguageRecipe:
    """The recipe of a round's PPO: from the last policy, against the refreshed reward model, anchored to the start of all."""
    table, new = to_table(plan.recipe), str(folder / f"round-{number}" / "reward")
    table["seed"] = plan.recipe.seed + number - 1  # other prompts and responses than in the rounds before
    table["model"] = str(policy_before(plan, folder, number))
    if table["reference"].get("model", "none") == "none":
        table["reference"]["model"] = plan.recipe.model
    table["reward"]["terms"] = [
        {**term, "model": new} if term.get("model", "none") != "none" else term for term in table["reward"]["terms"]
    ]
    start = table["critic"].get("start", "none")
    if start != "none" and _same_model(start, plan.first_reward):
        table["critic"]["start"] = new
    made = make_recipe(table)
    assert isinstance(made, LanguageRecipe)
    return made


def _same_model(name: str, run: Path) -> bool:
    """Whether a name means the model of a run, however it is spelled: by another path, or as the folder that the run left."""
    place, run = Path(name).expanduser().resolve(), run.resolve()
    return place == run or (place.parent == run and place.name in ("model", "adapter"))


def reward_recipe(plan: Plan, here: Path, pairs: int) -> Recipe:
    """The recipe of a round's reward model: the first one's, on as many passes over the pairs that there are now."""
    table = to_table(make_recipe(read_toml(plan.first_reward / "config.toml")))
    before = len(read_rows(table["data"]["train"]))
    if isinstance(table.get("adapter"), dict):
        table["adapter"]["merge"] = True  # the next round goes on from its whole model
    table["data"] |= {"train": str(here / "all_pairs.jsonl"), "held_out": str(here / "held_out_pairs.jsonl")}
    table["steps"] = max(1, round(table["steps"] * pairs / before))
    return make_recipe(table)


def policy_before(plan: Plan, folder: Path, number: int) -> str | Path:
    """The model that a round begins with."""
    return plan.recipe.model if number == 1 else folder / f"round-{number - 1}" / "ppo"


def reward_before(plan: Plan, folder: Path, number: int) -> Path:
    """The reward model that a round refreshes."""
    return plan.first_reward if number == 1 else folder / f"round-{number - 1}" / "reward"


def _claim(plan: Plan, folder: Path) -> None:
    """Write what the rounds are, or compare with what is written."""
    path, told = folder / "rounds.json", plan.to_json()
    try:
        if path.is_file():
            before = read_table(path)
            found = differences(before, json.loads(json.dumps(told)))
            if changed := [line for line in found if not line.startswith(tuple(f"recipe.{name}: " for name in FREE))]:
                raise SurefootError(f"{folder}: holds other rounds ({'; '.join(changed)}); undo that, or choose another --name")
            return
        if folder.exists() and any(folder.iterdir()):
            raise SurefootError(f"{folder}: holds other files; choose another --name")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(told, indent=1))
    except (OSError, ValueError) as error:
        if isinstance(error, SurefootError):
            raise
        raise SurefootError(f"{path}: can't be read or written ({error}); choose another --run-dir") from None


def _round(plan: Plan, folder: Path, number: int, display_for: Shows, say: Callable[[str], None]) -> dict[str, Any]:
    here = folder / f"round-{number}"
    if (here / "round.json").is_file():
        return read_table(here / "round.json")
    here.mkdir(exist_ok=True)
    torch.set_num_threads(plan.recipe.threads)
    if not (here / "pairs.jsonl").is_file():  # written last of the three
        say(f"round {number}: {plan.pairs} pairs by {policy_before(plan, folder, number)}, labelled by {plan.judge}")
        fresh = _fresh_pairs(plan, folder, number)
        held_out, new = fresh[::HELD_OUT], [row for index, row in enumerate(fresh) if index % HELD_OUT]
        write_rows(here / "held_out_pairs.jsonl", held_out)
        write_rows(here / "all_pairs.jsonl", [*([] if plan.new_only else _old_pairs(plan, folder, number)), *new])
        write_rows(here / "pairs.jsonl", new)
    pairs = len(read_rows(here / "all_pairs.jsonl"))
    _trained(lambda: reward_recipe(plan, here, pairs), here / "reward", display_for)
    _trained(lambda: ppo_recipe(plan, folder, number), here / "ppo", display_for)
    found = {"round": number, "folder": str(here), **_judged(plan, folder, number), "training_pairs": pairs}
    write_text(here / "round.json", json.dumps(found, indent=1))
    return found


def _trained(recipe: Callable[[], Recipe], run: Path, display_for: Shows) -> None:
    """A run from its beginning, or from where it stopped; nothing where it is finished."""
    from surefoot.runs import api

    if (run / FINISHED).is_file():
        return
    made = recipe()
    if (run / "config.toml").is_file():
        with closing(RunFolder.open(run)) as folder:  # refused where another process is at it
            begun = to_table(folder.recipe())
            if isinstance(made, LanguageRecipe):
                begun["reward"]["deadline"] = made.reward.deadline  # raised, perhaps, because it was too short
                folder.write_recipe(make_recipe(begun))
        api.resume(run, display=display_for(make_recipe(begun), run))
        return
    api.start(made, run, display=display_for(made, run))


def _judge(plan: Plan) -> Reward:
    """Who labels pairs, within the bounds of the recipe's rewards."""
    settings = plan.recipe.reward
    return reward_from(
        [plan.judge], plan.recipe.device, flag="--judge", deadline=settings.deadline, tolerated=settings.tolerated
    )


def _fresh_pairs(plan: Plan, folder: Path, number: int) -> list[ROWS]:
    """Labelled pairs of the policy before the round; prompts that no earlier round had, as far as they go."""
    recipe, model = plan.recipe, load_language_model(str(policy_before(plan, folder, number)), plan.recipe.trust_remote_code)
    model.model.to(recipe.device)  # type: ignore[arg-type]
    settings = recipe.sampling
    room = data.token_limit(recipe.data.max_length, context_length(model.model), settings.max_tokens)
    prompts = data.prompts(read_rows(recipe.data.train), model.tokens, *room)
    walk = EpochSampler(len(prompts.ids), derived_seed(recipe.seed, "pairs"))
    for _ in range(number):
        chosen = walk.next(plan.pairs)
    asked = data.repeat_prompts(prompts, chosen)
    judge = _judge(plan)
    for part in parts_of(judge):
        if isinstance(part, FunctionReward):
            part.check_columns(asked.columns)
    both = sample_pairs(
        model,
        asked.prompts,
        max_tokens=settings.max_tokens,
        seed=derived_seed(recipe.seed, f"pairs of round {number}"),
        temperature=settings.temperature,
        stop=settings.stop,
    )
    first, second = (judge(asked.prompts, [pair[side] for pair in both], asked.columns) for side in (1, 2))
    draw = random.Random(derived_seed(recipe.seed, f"labels of round {number}"))
    rows = []
    known = (first.valid & second.valid).tolist()
    for pair, ours, theirs, valid in zip(both, first.total.tolist(), second.total.tolist(), known, strict=True):
        prefers = prefers_first(ours, theirs, plan.noise, draw)
        if valid and prefers is not None and pair[1] != pair[2]:
            rows.append(pair_row(*(pair if prefers else (pair[0], pair[2], pair[1]))))
    if len(rows) < 2 * HELD_OUT:
        raise SurefootError(
            f"round {number}: the judge tells only {len(rows)} of {plan.pairs} pairs apart; take more --pairs, add --noise, or "
            "raise sampling.temperature"
        )
    return rows


def _old_pairs(plan: Plan, folder: Path, number: int) -> list[ROWS]:
    """All that earlier reward models were trained on, and the pairs that judged them."""
    if number == 1:
        table = read_toml(plan.first_reward / "config.toml")
        return [row.columns for row in read_rows(table["data"]["train"])]
    before = folder / f"round-{number - 1}"
    return [row.columns for name in ("all_pairs", "held_out_pairs") for row in read_rows(before / f"{name}.jsonl")]


def _judged(plan: Plan, folder: Path, number: int) -> dict[str, Any]:
    """What a round came to: both reward models on fresh pairs, and the policy before and after on held-out prompts."""
    from surefoot.language.analysis.evaluate import evaluate_run

    here, recipe = folder / f"round-{number}", plan.recipe
    held_out = [row.columns for row in read_rows(here / "held_out_pairs.jsonl")]
    models = {"accuracy_before": reward_before(plan, folder, number), "accuracy": here / "reward"}
    accuracies = {name: accuracy(ModelReward(path, device=recipe.device), held_out) for name, path in models.items()}
    told = evaluate_run(here / "ppo", data=recipe.data.held_out or recipe.data.train)
    kept = {name: {when: told[when].get(name) for when in ("start", "trained")} for name in ("reward", "gold", "kl", "length")}
    fresh = len(read_rows(here / "pairs.jsonl")) + len(held_out)
    return {"fresh_pairs": fresh, **accuracies, **kept, "win_rate_gold": told.get("win_rate_gold")}


def accuracy(reward: Reward, pairs: Iterable[Mapping[str, Any]]) -> float:
    """Share of pairs whose chosen answer has the higher score, a draw counting half."""
    rows = list(pairs)
    prompts = [row["prompt"] for row in rows]
    ours, theirs = (reward(prompts, [answer_text(row[side]) for row in rows], {}).total for side in ("chosen", "rejected"))
    return win_rate(ours, theirs)


def table(told: list[dict[str, Any]]) -> str:
    """The rounds, for a person."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("round", lambda one: str(one["round"])),
        ("pairs", lambda one: f"{one['fresh_pairs']}"),
        ("last RM", lambda one: f"{one['accuracy_before']:.1%}"),
        ("new RM", lambda one: f"{one['accuracy']:.1%}"),
        ("proxy", lambda one: _change(one["reward"])),
        ("gold", lambda one: _change(one["gold"])),
        ("KL to the start", lambda one: _change(one["kl"])),
        ("length", lambda one: _change(one["length"])),
    ]
    rows = [[name for name, _ in columns], *([shown(one) for _, shown in columns] for one in told)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = (
        "pairs: fresh ones. last RM, new RM: how often the reward model, before and after it was refreshed, orders held-out",
        "fresh pairs as the judge does. proxy: mean score by the round's own reward model, on a scale of its own",
    )
    return "\n".join([*lines, *notes])


def _change(of: Mapping[str, float | None]) -> str:
    before, after = ("–" if of[when] is None else f"{of[when]:.2f}" for when in ("start", "trained"))
    return "–" if before == after == "–" else f"{before} → {after}"
