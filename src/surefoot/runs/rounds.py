"""Iterated RLHF: in each round, label pairs of the current policy, train the reward model again, and continue PPO.

PPO moves the policy away from the data that the reward model was trained on, where its scores mean less. Fresh pairs of the
policy's answers correct that. Each stage is an ordinary run, and each round is a folder: ``round-1/pairs.jsonl``, ``reward/``,
``ppo/``, ``round.json``.

Of several ranks the first labels pairs and evaluates; all train. All must be able to read the folder.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from surefoot.core.seeding import as_found, derived_seed
from surefoot.errors import Interrupted, SurefootError
from surefoot.files import read_toml, writing
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import EpochSampler
from surefoot.language.data.rows import rows_text
from surefoot.language.data.sources import Source, open_rows, read_rows
from surefoot.language.language_model import errors_for, load_language_model, model_folder
from surefoot.language.metrics import win_rate
from surefoot.language.models.loading import context_length
from surefoot.language.pairs import answer_text, pair_row, prefers_first, sample_pairs
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.scores import Reward
from surefoot.language.rewards.terms import function_rewards, load_flag_reward
from surefoot.ranks.collectives import on_first
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.base import Recipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.runs.display import Display
from surefoot.store.folder import CHANGE_NOTHING, RunFolder, folder_lock, match_settings
from surefoot.store.manifest import check_listed, read_listed_table, write_listed
from surefoot.store.reading import FINISHED

HELD_OUT = 5
"""one fresh pair in so many is held out in its round to evaluate the reward models; later rounds train on it"""
CHANGES = ("reward", "gold", "kl", "length")
"""what is measured before and after a round"""
DisplayFor = Callable[[Recipe, Path], Display]
"""makes the display of a recipe's training in a folder"""


@dataclass(frozen=True)
class RoundsSettings:
    """The settings of every round.

    recipe     of PPO. Its one reward model is a run of kind "reward", whose recipe trains the later ones
    judge      labels pairs: a function or a reward model, named as in ``--reward`` of best-of-n
    pairs      prompts per round, with two answers each
    noise      of the labels: an answer is chosen with probability σ(difference of the judge's scores / noise)
    new_only   train reward models only on the pairs of their own round
    """

    recipe: LanguageRecipe
    judge: str
    pairs: int = 512
    noise: float = 0.0
    new_only: bool = False

    def __post_init__(self) -> None:
        if self.recipe.model == "pocket":
            raise SurefootError("model='pocket': rounds start from a trained model; name a run of kind 'sft'")
        if self.recipe.turns.environment is not None:
            raise SurefootError(
                f"turns.environment={self.recipe.turns.environment!r}: rounds compare single answers; train this recipe alone"
            )
        if self.pairs < 2 * HELD_OUT:
            raise SurefootError(
                f"pairs={self.pairs}: is too few, since one in {HELD_OUT} is held out; set at least {2 * HELD_OUT}"
            )
        models = [term.model for term in self.recipe.reward.terms if term.model is not None]
        if len(models) != 1:
            raise SurefootError(
                f"reward.terms: rounds retrain one reward model, and this recipe names {len(models)}; set one term whose "
                "model is a run of kind 'reward'"
            )
        self._check_adapter()
        first = Path(models[0]).expanduser()
        if (first / "adapter").is_dir() and not (first / "model").is_dir():
            raise SurefootError(
                f"reward.terms model={models[0]!r}: this run has only an adapter, and rounds need its whole model; "
                f"merge it: surefoot merge {models[0]} --out {first / 'model'}"
            )
        with errors_for("reward.terms model"):
            model_folder(models[0])
        config = Path(models[0]).expanduser() / "config.toml"
        if not config.is_file() or read_toml(config).get("kind") != "reward":
            raise SurefootError(
                f"reward.terms model={models[0]!r}: is not a run of kind 'reward', and rounds need its recipe and pairs; name "
                "such a run"
            )

    def _check_adapter(self) -> None:
        """Raise SurefootError for what would fail in the second round, whose base is the merged model of the first."""
        adapter, start = self.recipe.adapter, self.recipe.critic.start
        if adapter is not None and not adapter.merge:
            raise SurefootError("adapter.merge=false: each round starts from the merged model of the previous one; set true")
        if adapter is not None and start is not None:
            raise SurefootError(
                f"critic.start={start!r}: with [adapter] it is an adapter of the same base, and every round has another base; "
                "unset it"
            )

    @property
    def first_reward(self) -> Path:
        """The run of the first reward model."""
        return Path(next(term.model for term in self.recipe.reward.terms if term.model is not None)).expanduser()

    def to_json(self) -> dict[str, Any]:
        """All settings."""
        settings = {name: getattr(self, name) for name in ("judge", "pairs", "noise", "new_only")}
        return {**settings, "recipe": self.recipe.table}


def run_rounds(
    settings: RoundsSettings, folder: Path, rounds: int, display_for: DisplayFor, log: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Run rounds until there are ``rounds``; return the report of each. Finished rounds are kept, a stopped one goes on.

    log   called with a line before sampling, which has no display

    Raises SurefootError when the folder has rounds with other settings or is in use, and what training raises.
    """
    join_ranks()
    with ExitStack() as lock:
        on_first(lambda: _claim(settings, folder, lock))
        try:
            return [_round(settings, folder, number, display_for, log) for number in range(1, rounds + 1)]
        except Interrupted as stop:
            raise Interrupted(f"{str(stop).partition(';')[0]}; repeat the command to continue") from None


def ppo_recipe(settings: RoundsSettings, folder: Path, number: int) -> LanguageRecipe:
    """The recipe of a round's PPO: from the last policy, with the new reward model. The first policy is the reference."""
    table, new = to_table(settings.recipe), str(folder / f"round-{number}" / "reward")
    table["seed"] = settings.recipe.seed + number - 1  # other prompts and responses than in the rounds before
    table["model"] = str(policy_before(settings, folder, number))
    if table["reference"].get("model", "none") == "none":
        table["reference"]["model"] = settings.recipe.model
    table["reward"]["terms"] = [
        {**term, "model": new} if term.get("model", "none") != "none" else term for term in table["reward"]["terms"]
    ]
    start = table["critic"].get("start", "none")
    if start != "none" and _same_model(start, settings.first_reward):
        table["critic"]["start"] = new
    made = make_recipe(table)
    assert isinstance(made, LanguageRecipe)
    return made


def _same_model(name: str, run: Path) -> bool:
    """Whether a name means the model of a run: by any path, or by the folder that the run wrote."""
    place, run = Path(name).expanduser().resolve(), run.resolve()
    return place == run or (place.parent == run and place.name in ("model", "adapter"))


def reward_recipe(settings: RoundsSettings, here: Path, pairs: int) -> Recipe:
    """The recipe of a round's reward model: the first one's, with as many epochs over the present pairs."""
    table = to_table(make_recipe(read_toml(settings.first_reward / "config.toml")))
    before = sum(1 for _ in _rows_of(table))
    if isinstance(table.get("adapter"), dict):
        table["adapter"]["merge"] = True  # the next round starts from its whole model
    pairs_of = {"train": str(here / "all_pairs.jsonl"), "held_out": str(here / "held_out_pairs.jsonl")}
    table["data"] |= {**pairs_of, "columns": {}}  # their columns are renamed already
    table["steps"] = max(1, round(table["steps"] * pairs / before))
    return make_recipe(table)


def policy_before(settings: RoundsSettings, folder: Path, number: int) -> str | Path:
    """The model that a round starts from."""
    return settings.recipe.model if number == 1 else folder / f"round-{number - 1}" / "ppo"


def reward_before(settings: RoundsSettings, folder: Path, number: int) -> Path:
    """The reward model before a round."""
    return settings.first_reward if number == 1 else folder / f"round-{number - 1}" / "reward"


def _claim(settings: RoundsSettings, folder: Path, lock: ExitStack) -> None:
    """Lock the folder, and write the settings into it or compare them with those there."""
    file = folder / "rounds.json"
    if not file.exists():
        _load_judge(settings)  # before the folder is made
    lock.enter_context(folder_lock(folder, file.name, remedy="choose another --name"))
    with writing(folder, "choose another --run-dir"):
        match_settings(file, settings.to_json(), "choose another --name", [f"recipe.{name}" for name in CHANGE_NOTHING])


@as_found
def _round(
    settings: RoundsSettings, folder: Path, number: int, display_for: DisplayFor, log: Callable[[str], None]
) -> dict[str, Any]:
    here = folder / f"round-{number}"
    done = on_first(lambda: _report(here / "round.json"))
    if done is not None:
        return done
    torch.set_num_threads(settings.recipe.threads)
    pairs = on_first(lambda: _label(settings, folder, number, log))
    _train(lambda: reward_recipe(settings, here, pairs), here / "reward", display_for)
    _train(lambda: ppo_recipe(settings, folder, number), here / "ppo", display_for)

    def finish() -> dict[str, Any]:
        report = {"round": number, "folder": str(here), **_evaluate(settings, folder, number), "training_pairs": pairs}
        write_listed(here / "round.json", json.dumps(report, indent=1))
        return report

    return on_first(finish)


def _report(file: Path) -> dict[str, Any] | None:
    """The report of a finished round; None for another. Raises SurefootError if it lacks what the table shows."""
    if not file.is_file():
        return None
    remedy = "remove this file and repeat the command, which evaluates the round again"
    report = read_listed_table(file, remedy)
    counts = ("round", "fresh_pairs", "accuracy_before", "accuracy")
    wrong = [name for name in counts if not isinstance(report.get(name), (int, float))]
    for name in CHANGES:
        of = report.get(name)
        if not isinstance(of, dict) or not all(
            isinstance(of.get(when), (int, float, NoneType)) for when in ("start", "trained")
        ):
            wrong.append(name)
    if wrong:
        raise SurefootError(f"{file}: has no {wrong[0]} that can be used; {remedy}")
    return report


def _label(settings: RoundsSettings, folder: Path, number: int, log: Callable[[str], None]) -> int:
    """Write the pairs of a round, unless they are there; the number of all that its reward model trains on."""
    here = folder / f"round-{number}"
    here.mkdir(exist_ok=True)
    if not (here / "pairs.jsonl").is_file():  # written last of the three
        log(
            f"round {number}: {settings.pairs} pairs by {policy_before(settings, folder, number)}, labelled by {settings.judge}"
        )
        fresh = _fresh_pairs(settings, folder, number, log)
        held_out, new = fresh[::HELD_OUT], [row for index, row in enumerate(fresh) if index % HELD_OUT]
        write_listed(here / "held_out_pairs.jsonl", rows_text(held_out))
        everything = [*([] if settings.new_only else _old_pairs(settings, folder, number)), *new]
        write_listed(here / "all_pairs.jsonl", rows_text(everything))
        write_listed(here / "pairs.jsonl", rows_text(new))
    for name in ("held_out_pairs.jsonl", "all_pairs.jsonl", "pairs.jsonl"):
        check_listed(here / name)
    return len(read_rows(here / "all_pairs.jsonl"))


def _train(recipe: Callable[[], Recipe], run: Path, display_for: DisplayFor) -> None:
    """Start a run, or resume it; do nothing if it is finished."""
    from surefoot.runs import api

    made, begun = on_first(lambda: _to_train(recipe, run))
    if made is not None:
        act = api.resume if begun else partial(api.start, made)
        act(run, display=display_for(made, run))


def _to_train(recipe: Callable[[], Recipe], run: Path) -> tuple[Recipe | None, bool]:
    """The recipe of a run, None if it is finished; and whether it has begun."""
    if (run / FINISHED).is_file():
        return None, True
    made = recipe()
    if not (run / "config.toml").is_file():
        return made, False
    with closing(RunFolder.open(run)) as folder:  # an error if another process writes to it
        table = to_table(folder.recipe())
        if isinstance(made, LanguageRecipe):
            table["reward"]["deadline"] = made.reward.deadline  # the user may have raised it
            folder.write_recipe(make_recipe(table))
    return make_recipe(table), True


def _load_judge(settings: RoundsSettings) -> Reward:
    """The judge, with the deadline and tolerance of the recipe's rewards."""
    reward = settings.recipe.reward
    return load_flag_reward(
        [settings.judge], settings.recipe.device, flag="--judge", deadline=reward.deadline, tolerated=reward.tolerated
    )


def _fresh_pairs(settings: RoundsSettings, folder: Path, number: int, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Labelled pairs of the policy before the round, on prompts that no earlier round had, while there are such."""
    recipe, model = (
        settings.recipe,
        load_language_model(str(policy_before(settings, folder, number)), settings.recipe.trust_remote_code),
    )
    model.model.to(recipe.device)  # type: ignore[arg-type]
    sampling = recipe.sampling
    limits = data.token_limit(recipe.data.max_length, context_length(model.model), sampling.max_tokens)
    prompts = data.prompts(open_rows(recipe.data.train, recipe.data.columns), model.tokens, *limits)
    order = EpochSampler(len(prompts.ids), derived_seed(recipe.seed, "pairs"))
    for _ in range(number):
        chosen = order.next(settings.pairs)
    repeated = data.repeat_prompts(prompts, chosen)
    judge = _load_judge(settings)
    for function in function_rewards(judge):
        function.check_rows(repeated.columns)
    both = sample_pairs(
        model,
        repeated.prompts,
        max_tokens=sampling.max_tokens,
        seed=derived_seed(recipe.seed, f"pairs of round {number}"),
        temperature=sampling.temperature,
        stop=sampling.stop,
        special_tokens=recipe.reward.special_tokens,
    )
    first, second = (judge(repeated.prompts, [pair[side] for pair in both], repeated.columns) for side in (1, 2))
    draw = random.Random(derived_seed(recipe.seed, f"labels of round {number}"))
    rows: list[dict[str, Any]] = []
    scored = (first.valid & second.valid).tolist()
    for pair, ours, theirs, valid in zip(both, first.total.tolist(), second.total.tolist(), scored, strict=True):
        prefers = prefers_first(ours, theirs, settings.noise, draw)
        if valid and prefers is not None and pair[1] != pair[2]:
            rows.append(pair_row(*(pair if prefers else (pair[0], pair[2], pair[1]))))
    if left_out := settings.pairs - len(rows):
        log(f"round {number}: pairs left out: {left_out} (equal answers, equal scores, or an answer without a score)")
    if len(rows) < 2 * HELD_OUT:
        raise SurefootError(
            f"round {number}: the judge prefers an answer in only {len(rows)} of {settings.pairs} pairs; begin under another "
            "--name with more --pairs, with --noise, or with a higher sampling.temperature"
        )
    return rows


def _rows_of(table: Mapping[str, Any]) -> Source:
    """The training rows of a recipe's table."""
    return open_rows(table["data"]["train"], table["data"].get("columns"))


def _old_pairs(settings: RoundsSettings, folder: Path, number: int) -> list[dict[str, Any]]:
    """The pairs that earlier reward models were trained and evaluated on."""
    if number == 1:
        table = read_toml(settings.first_reward / "config.toml")
        return [row.columns for row in _rows_of(table)]
    before = folder / f"round-{number - 1}"
    return [row.columns for name in ("all_pairs", "held_out_pairs") for row in read_rows(before / f"{name}.jsonl")]


def _evaluate(settings: RoundsSettings, folder: Path, number: int) -> dict[str, Any]:
    """The report of a round: both reward models on fresh pairs, and the policy before and after on held-out prompts."""
    from surefoot.language.analysis.evaluate import evaluate_run

    here, recipe = folder / f"round-{number}", settings.recipe
    held_out = [row.columns for row in read_rows(here / "held_out_pairs.jsonl")]
    models = {"accuracy_before": reward_before(settings, folder, number), "accuracy": here / "reward"}
    accuracies = {name: accuracy(ModelReward(path, device=recipe.device), held_out) for name, path in models.items()}
    report = evaluate_run(here / "ppo", data=recipe.data.held_out or recipe.data.train)
    kept = {name: {when: report[when].get(name) for when in ("start", "trained")} for name in CHANGES}
    fresh = len(read_rows(here / "pairs.jsonl")) + len(held_out)
    return {"fresh_pairs": fresh, **accuracies, **kept, "win_rate_gold": report.get("win_rate_gold")}


def accuracy(reward: Reward, pairs: Iterable[Mapping[str, Any]]) -> float:
    """Share of pairs whose chosen answer has the higher score; a tie counts half."""
    rows = list(pairs)
    prompts = [row["prompt"] for row in rows]
    ours, theirs = (reward(prompts, [answer_text(row[side]) for row in rows], {}).total for side in ("chosen", "rejected"))
    return win_rate(ours, theirs)


def rounds_table(reports: list[dict[str, Any]]) -> str:
    """The rounds as a table, to print."""
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
    rows = [[name for name, _ in columns], *([shown(one) for _, shown in columns] for one in reports)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = (
        "pairs: new ones. last RM, new RM: how often the old and the new reward model order held-out new pairs as the judge",
        "does. proxy: mean score by the round's reward model; scales differ between rounds",
    )
    return "\n".join([*lines, *notes])


def _change(of: Mapping[str, float | None]) -> str:
    before, after = ("–" if of[when] is None else f"{of[when]:.2f}" for when in ("start", "trained"))
    return "–" if before == after == "–" else f"{before} → {after}"
