"""Iterated RLHF: in each round, label pairs of the current policy, train the reward model again, and continue PPO.

PPO moves the policy away from the data that the reward model was trained on, where its scores mean less. Fresh pairs of the
policy's answers correct that. A person or a judge compares the two answers of each pair (``people.log``). Each stage is an
ordinary run, and each round is a folder: ``round-1/queue.jsonl``, ``labels/``, ``closed.json``, ``pairs.jsonl``, ``reward/``,
``ppo/``, ``round.json``. Every stage is a file, so a kill anywhere repeats at most one.

Of several ranks the first labels pairs and evaluates; all train. All must be able to read the folder.
"""

import inspect
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from surefoot.calls import DeadlineExceeded, with_deadline
from surefoot.core.seeding import as_found, derived_seed
from surefoot.errors import Interrupted, LabelsNeededError, SurefootError, cause_of
from surefoot.files import read_toml, writing
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import EpochSampler
from surefoot.language.data.chat import columns_of
from surefoot.language.data.rows import Row, rows_text
from surefoot.language.data.sources import Source, open_rows, read_rows
from surefoot.language.language_model import errors_for, load_language_model, model_folder
from surefoot.language.models.loading import context_length
from surefoot.language.pairs import prefers_first, sample_pairs
from surefoot.language.rewards.judge import Judge
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.scores import Reward
from surefoot.language.rewards.terms import FunctionReward, function_rewards, load_flag_reward
from surefoot.people import agreement
from surefoot.people.log import LABELS, QUEUE, Preference, Round, labelled, write_log
from surefoot.ranks.collectives import on_first
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.base import Recipe
from surefoot.recipes.callables import import_object
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.store.events import Listener
from surefoot.store.folder import CHANGE_NOTHING, RunFolder, folder_lock, match_settings, recipe_of
from surefoot.store.manifest import check_listed, read_listed_table, write_listed
from surefoot.store.reading import FINISHED
from surefoot.store.source import NAMED

PEOPLE = "people"
"""the judge that waits for labels of people; a folder of this name is ./people"""
POLL = 2.0
"""seconds between two looks at the labels, with ``wait``"""
PAIRS = "pairs.jsonl"
"""the file of a round with the rows that its reward model trains on"""
OTHER = "other"
"""the column of the other answer of a pair, for ``judge.against``"""
CHANGES = ("reward", "gold", "kl", "length")
"""what is measured before and after a round"""
DisplayFor = Callable[[Recipe, Path], Listener]
"""makes the display of a recipe's training in a folder"""


@dataclass(frozen=True)
class RoundsSettings:
    """The settings of every round.

    recipe     of PPO. Its one reward model is a run of kind "reward", whose recipe trains the later ones
    judge      labels pairs: "people", or a function or a reward model, named as in ``--reward`` of best-of-n. A function that
               takes ``first`` and ``second`` compares the two answers; any other scores each of them
    pairs      prompts per round, with two answers each
    noise      of the labels: an answer is chosen with probability σ(difference of the judge's scores / noise)
    new_only   train reward models only on the pairs of their own round
    stop_at_chance   raise an error before training if the previous reward model may predict the new labels by chance
    """

    recipe: LanguageRecipe
    judge: str
    pairs: int = 512
    noise: float = 0.0
    new_only: bool = False
    stop_at_chance: bool = False

    def __post_init__(self) -> None:
        if self.recipe.model == "pocket":
            raise SurefootError("model='pocket': rounds start from a trained model; name a run of kind 'sft'")
        if self.recipe.turns.conversations:
            raise SurefootError(
                f"turns.environment={self.recipe.turns.environment!r}: rounds compare single answers; train this recipe alone"
            )
        if self.judge == PEOPLE and self.noise:
            raise SurefootError(
                f"noise={self.noise:g}: is for the scores of a judge; people make their own errors, so leave it out"
            )
        models = [term.model for term in self.recipe.reward.terms if term.model is not None]
        if len(models) != 1:
            raise SurefootError(
                f"reward.terms: rounds retrain one reward model, and this recipe names {len(models)}; set one term whose "
                "model is a run of kind 'reward'"
            )
        # What follows would fail in the second round, whose base is the merged model of the first.
        adapter, start = self.recipe.adapter, self.recipe.critic.start
        if adapter is not None and not adapter.merge:
            raise SurefootError("adapter.merge=false: each round starts from the merged model of the previous one; set true")
        if adapter is not None and start is not None:
            raise SurefootError(
                f"critic.start={start!r}: with [adapter] it is an adapter of the same base, and every round has another base; "
                "unset it"
            )
        first = self.first_reward
        if (first / "adapter").is_dir() and not (first / "model").is_dir():
            raise SurefootError(
                f"reward.terms model={models[0]!r}: this run has only an adapter, and rounds need its whole model; "
                f"merge it: surefoot merge {models[0]} --out {first / 'model'}"
            )
        with errors_for("reward.terms model"):
            model_folder(models[0])
        config = first / "config.toml"
        if not config.is_file() or read_toml(config).get("kind") != "reward":
            raise SurefootError(
                f"reward.terms model={models[0]!r}: is not a run of kind 'reward', and rounds need its recipe and pairs; name "
                "such a run"
            )

    @property
    def first_reward(self) -> Path:
        """The run of the first reward model."""
        return Path(next(term.model for term in self.recipe.reward.terms if term.model is not None)).expanduser()

    def to_json(self) -> dict[str, Any]:
        """All settings."""
        settings = {name: getattr(self, name) for name in ("judge", "pairs", "noise", "new_only", "stop_at_chance")}
        return {**settings, "recipe": self.recipe.table}


def run_rounds(
    settings: RoundsSettings,
    folder: Path,
    rounds: int,
    display_for: DisplayFor,
    log: Callable[[str], None] = print,
    wait: bool = False,
) -> list[dict[str, Any]]:
    """Run rounds until there are ``rounds``, or people must label pairs; return the reports of those that are finished.

    Finished rounds are kept, a stopped one goes on.

    log    called with a line before sampling, which has no display, and when people must label pairs
    wait   go on as soon as they have

    Raises SurefootError when the folder has rounds with other settings or is in use, and what training raises.
    """
    join_ranks()
    with ExitStack() as lock:
        on_first(lambda: _claim(settings, folder, lock))
        reports: list[dict[str, Any]] = []
        try:
            for number in range(1, rounds + 1):
                reports.append(_round(settings, folder, number, display_for, log, wait))
            return reports
        except LabelsNeededError as needed:
            text = str(needed)
            on_first(lambda: log(text))
            return reports
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
    table = to_table(recipe_of(settings.first_reward))
    before = sum(1 for _ in _rows_of(table))
    if isinstance(table.get("adapter"), dict):
        table["adapter"]["merge"] = True  # the next round starts from its whole model
    table["data"] |= {"train": str(here / PAIRS), "held_out": "none", "columns": {}}  # their columns are renamed already
    table["steps"] = max(1, round(table["steps"] * pairs / before))
    return make_recipe(table)


def policy_before(settings: RoundsSettings, folder: Path, number: int) -> str | Path:
    """The model that a round starts from."""
    return settings.recipe.model if number == 1 else folder / f"round-{number - 1}" / "ppo"


def _claim(settings: RoundsSettings, folder: Path, lock: ExitStack) -> None:
    """Lock the folder, and write the settings into it or compare them with those there."""
    file = folder / "rounds.json"
    if not file.exists() and settings.judge != PEOPLE and _comparing(settings) is None:
        _load_judge(settings)  # before the folder is made
    lock.enter_context(folder_lock(folder, file.name, remedy="choose another --name"))
    with writing(folder, "choose another --run-dir"):
        match_settings(file, settings.to_json(), "choose another --name", [f"recipe.{name}" for name in CHANGE_NOTHING])


@as_found
def _round(
    settings: RoundsSettings, folder: Path, number: int, display_for: DisplayFor, log: Callable[[str], None], wait: bool
) -> dict[str, Any]:
    here = folder / f"round-{number}"
    done = on_first(lambda: _report(here / "round.json"))
    if done is not None:
        return done
    torch.set_num_threads(settings.recipe.threads)
    waiting = False
    while isinstance(found := on_first(lambda: _labelled(settings, folder, number, log)), str):
        if not wait:
            raise LabelsNeededError(f"{found}, then repeat this command")
        if not waiting:
            on_first(partial(log, f"{found}; this command goes on when all are"))
        waiting = True
        time.sleep(POLL)  # on every rank: one that waited in an exchange would give up after --rank-timeout
    pairs = found
    _train(lambda: reward_recipe(settings, here, pairs), here / "reward", display_for)
    _train(lambda: ppo_recipe(settings, folder, number), here / "ppo", display_for)

    def finish() -> dict[str, Any]:
        report = {"round": number, "folder": str(here), **_evaluate(folder, number, settings.recipe), "training_pairs": pairs}
        write_listed(here / "round.json", json.dumps(report, indent=1))
        return report

    return on_first(finish)


def _report(file: Path) -> dict[str, Any] | None:
    """The report of a finished round; None for another. Raises SurefootError if it lacks what the table shows."""
    if not file.is_file():
        return None
    remedy = "remove this file and repeat the command, which evaluates the round again"
    report = read_listed_table(file, remedy)
    wrong = [name for name in ("round", "labels", "predicted") if not isinstance(report.get(name), (int, float, dict))]
    wrong += [name for name in CHANGES if not isinstance(of := report.get(name), dict) or not {"start", "trained"} <= set(of)]
    if wrong:
        raise SurefootError(f"{file}: has no {wrong[0]} that can be used; {remedy}")
    return report


def _labelled(settings: RoundsSettings, folder: Path, number: int, log: Callable[[str], None]) -> int | str:
    """Sample, label and close the pairs of a round, as far as that is not done.

    Returns the number of pairs that its reward model trains on, or what people must do first.
    """
    here, at = folder / f"round-{number}", Round(folder / f"round-{number}")
    here.mkdir(exist_ok=True)
    if not (here / QUEUE).is_file():
        log(f"round {number}: two answers to each of {settings.pairs} prompts by {policy_before(settings, folder, number)}")
        rows = _sampled(settings, folder, number)
        equal = settings.pairs - len(rows)
        log(f"round {number}: {len(rows)} pairs for {settings.judge}{f'; {equal} had equal answers' if equal else ''}")
        write_listed(here / QUEUE, rows_text(rows))
    if not at.closed and settings.judge == PEOPLE:
        total, done = len(at.queue.pairs), len(labelled(at.labels))
        if done < total:
            return f"{here.name}: {done} of {total} pairs are labelled; label them with: surefoot label {folder}"
    elif not at.closed:
        write_log(here / LABELS / "judge.jsonl", at.queue, preferences(settings, at.queue.pairs, number))
    if not at.closed:
        at.close([Round(folder / f"round-{before}") for before in range(1, number)])
    if not (here / PAIRS).is_file():
        fresh, copies = at.rows(settings.new_only)
        first: Iterable[Row] = [] if settings.new_only else _rows_of(read_toml(settings.first_reward / "config.toml"))
        _predict(settings, folder, number, at, log)
        write_listed(here / PAIRS, rows_text([*(row.columns for row in first for _ in range(copies)), *fresh]))
    check_listed(here / PAIRS)
    return len(read_rows(here / PAIRS)) // at.rows(settings.new_only)[1]


def _predict(settings: RoundsSettings, folder: Path, number: int, at: Round, log: Callable[[str], None]) -> None:
    """Write how often the previous reward model predicted the new labels, which it has not seen.

    Raises SurefootError with ``stop_at_chance`` if that may be chance.
    """
    previous = settings.first_reward if number == 1 else folder / f"round-{number - 1}" / "reward"
    rewarding = ModelReward(previous, device=settings.recipe.device)
    pairs = at.queue.pairs
    first, second = (rewarding([pair["prompt"] for pair in pairs], [pair[side] for pair in pairs], {}).total for side in "ab")
    margins = {str(key): float(margin) for key, margin in enumerate((first - second).tolist(), 1)}
    [(queue, labels)] = at.read(only_own=True)
    report = {**agreement.of_people(queue, labels), "model": agreement.with_model(labels, margins)}
    write_listed(at.folder / agreement.AGREEMENT, json.dumps(report, indent=1))
    for finding in agreement.findings(report):
        log(f"round {number}: {finding.line}")
        if finding.name == "reward_model_at_chance" and settings.stop_at_chance:
            raise SurefootError(
                f"round {number}: {finding.what}; label more pairs under another --name, or go on without --stop-at-chance"
            )


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


def _comparing(settings: RoundsSettings) -> Callable[..., Any] | None:
    """The judge as a function that compares two answers; None for another judge."""
    if settings.judge == PEOPLE or not NAMED.fullmatch(settings.judge):
        return None
    function: Callable[..., Any] = import_object("--judge", settings.judge)
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return function if {"first", "second"} <= set(names) else None


def _compared(
    settings: RoundsSettings, compare: Callable[..., Any], columns: Mapping[str, Any], pairs: list[dict[str, Any]]
) -> list[Preference | None]:
    """What a function prefers: ``function(first=…, second=…, prompts=…, **columns)`` returns for each pair "first", "second",
    "equal", or None to skip it.
    """
    parameters = inspect.signature(compare).parameters.values()
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    given = {**columns, "first": [pair["a"] for pair in pairs], "second": [pair["b"] for pair in pairs]}
    used = given if every else {each.name: given[each.name] for each in parameters if each.name in given}
    wrong, deadline = f"--judge={settings.judge!r}: ", settings.recipe.reward.deadline
    try:
        returned = with_deadline(deadline, lambda: compare(**used), settings.judge)
    except DeadlineExceeded:
        raise SurefootError(
            f"{wrong}took longer than reward.deadline={deadline:g} s for {len(pairs)} pairs; make it faster, or raise "
            "reward.deadline, then repeat the command"
        ) from None
    except Exception as error:
        raise SurefootError(f"{wrong}raised {cause_of(error)}; fix the function, then repeat the command") from error
    meanings: dict[Any, Preference | None] = {"first": "a", "second": "b", "equal": "equal", None: None}
    if not isinstance(returned, list) or len(returned) != len(pairs) or any(each not in meanings for each in returned):
        raise SurefootError(
            f'{wrong}must return a list of {len(pairs)} entries, each "first", "second", "equal" or None; fix the function, '
            "then repeat the command"
        )
    return [meanings[each] for each in returned]


def _load_judge(settings: RoundsSettings) -> Reward:
    """The judge, with the deadline and tolerance of the recipe's rewards."""
    reward = settings.recipe.reward
    return load_flag_reward(
        [settings.judge], settings.recipe.device, flag="--judge", deadline=reward.deadline, tolerated=reward.tolerated
    )


def _sampled(settings: RoundsSettings, folder: Path, number: int) -> list[dict[str, Any]]:
    """Pairs of answers of the policy before the round, on prompts that no earlier round had, while there are such.

    Raises SurefootError if the policy always gives the same answer twice.
    """
    recipe = settings.recipe
    model = load_language_model(str(policy_before(settings, folder, number)), recipe.trust_remote_code)
    model.model.to(recipe.device)  # type: ignore[arg-type]
    sampling = recipe.sampling
    limits = data.token_limit(recipe.data.max_length, context_length(model.model), sampling.max_tokens)
    prompts = data.prompts(open_rows(recipe.data.train, recipe.data.columns), model.tokens, *limits)
    order = EpochSampler(len(prompts.ids), derived_seed(recipe.seed, "pairs"))
    for _ in range(number):
        chosen = order.next(settings.pairs)
    repeated = data.repeat_prompts(prompts, chosen)
    both = sample_pairs(
        model,
        repeated.prompts,
        max_tokens=sampling.max_tokens,
        seed=derived_seed(recipe.seed, f"pairs of round {number}"),
        temperature=sampling.temperature,
        stop=sampling.stop,
        special_tokens=recipe.reward.special_tokens,
    )
    columns = [{name: values[row] for name, values in repeated.columns.items()} for row in range(len(both))]
    rows = [
        {**others, "prompt": prompt, "a": first, "b": second, **columns_of(prompt)}
        for (prompt, first, second), others in zip(both, columns, strict=True)
        if first != second
    ]
    if not rows:
        raise SurefootError(
            f"round {number}: the policy gives the same answer twice to each of {settings.pairs} prompts; begin under another "
            "--name with more --pairs, or with a higher sampling.temperature"
        )
    return rows


def preferences(settings: RoundsSettings, pairs: list[dict[str, Any]], number: int) -> list[Preference | None]:
    """What a judge prefers in each pair: by comparing both answers, or by the scores of each."""
    prompts = [pair["prompt"] for pair in pairs]
    columns = {name: [pair.get(name) for pair in pairs] for name in pairs[0] if name not in ("prompt", "a", "b")}
    if (compare := _comparing(settings)) is not None:
        return _compared(settings, compare, {**columns, "prompts": prompts}, pairs)
    judge = _load_judge(settings)
    asked = judge.function if isinstance(judge, FunctionReward) else None
    compares = isinstance(asked, Judge) and asked.settings.against == OTHER
    if compares:
        columns[OTHER] = [pair["b"] for pair in pairs]
    for function in function_rewards(judge):
        function.check_rows(columns)
    first = judge(prompts, [pair["a"] for pair in pairs], columns)
    # a comparison's score is the share of both orders that the first answer wins
    second = replace(first, total=1 - first.total) if compares else judge(prompts, [pair["b"] for pair in pairs], columns)
    draw = random.Random(derived_seed(settings.recipe.seed, f"labels of round {number}"))
    found: list[Preference | None] = []
    scored = (first.valid & second.valid).tolist()
    for ours, theirs, valid in zip(first.total.tolist(), second.total.tolist(), scored, strict=True):
        prefers = prefers_first(ours, theirs, settings.noise, draw)
        found.append(None if not valid else "equal" if prefers is None else "a" if prefers else "b")
    if not {"a", "b"} & set(found):
        raise SurefootError(
            f"round {number}: the judge prefers an answer in none of {len(pairs)} pairs; begin under another --name with more "
            "--pairs, with --noise, or with a higher sampling.temperature"
        )
    return found


def _rows_of(table: Mapping[str, Any]) -> Source:
    """The training rows of a recipe's table."""
    return open_rows(table["data"]["train"], table["data"].get("columns"))


def _evaluate(folder: Path, number: int, recipe: LanguageRecipe) -> dict[str, Any]:
    """The report of a round: the labels, and the policy before and after on held-out prompts."""
    from surefoot.language.analysis.evaluate import evaluate_run

    here = folder / f"round-{number}"
    report = evaluate_run(here / "ppo", data=recipe.data.held_out or recipe.data.train)
    kept = {name: {when: report[when].get(name) for when in ("start", "trained")} for name in CHANGES}
    judged = read_listed_table(here / agreement.AGREEMENT)
    count = sum(person["labels"] for person in judged["people"].values())
    predicted = {name: judged["model"][name] for name in ("share", "low", "high", "of")}
    return {"labels": count, "predicted": predicted, **kept, "win_rate_gold": report.get("win_rate_gold")}


def rounds_table(reports: list[dict[str, Any]]) -> str:
    """The rounds as a table, to print."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("round", lambda one: str(one["round"])),
        ("labels", lambda one: f"{one['labels']}"),
        ("predicted", lambda one: agreement.share_text(one["predicted"])),
        ("proxy", lambda one: _change(one["reward"])),
        ("gold", lambda one: _change(one["gold"])),
        ("KL to the start", lambda one: _change(one["kl"])),
        ("length", lambda one: _change(one["length"])),
    ]
    rows = [[name for name, _ in columns], *([shown(one) for _, shown in columns] for one in reports)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = (
        "predicted: how often the reward model before the round preferred the chosen answer, of labels that it had not seen,",
        "with its 95 % interval. proxy: mean score by the round's reward model; scales differ between rounds",
    )
    return "\n".join([*lines, *notes])


def _change(of: Mapping[str, float | None]) -> str:
    before, after = ("–" if of[when] is None else f"{of[when]:.2f}" for when in ("start", "trained"))
    return "–" if before == after == "–" else f"{before} → {after}"
