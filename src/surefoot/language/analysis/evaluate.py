"""Evaluates a finished language run on held-out rows: against the model it started from, and the critic's calibration."""

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.files import read_table
from surefoot.functional import discounted_returns, explained_variance, kl_shaped_rewards, place_scores
from surefoot.functional.masking import last_kept
from surefoot.language.analysis.accuracy import Attempts, attempt_lines, measure_attempts
from surefoot.language.data import datasets as data_rows
from surefoot.language.data.rows import check_unchanged
from surefoot.language.data.sources import open_rows
from surefoot.language.data.tokens import prompt_text
from surefoot.language.language_model import LanguageModel, load_saved
from surefoot.language.metrics import distinct_n, win_rate
from surefoot.language.models.adapter_files import load_trained
from surefoot.language.models.adapters import has_adapters
from surefoot.language.models.loading import context_length
from surefoot.language.models.policy.passes import in_micro_batches
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.online.responses import Responses, final_rewards, token_rewards
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.scores import Reward, mean_of
from surefoot.language.rewards.terms import load_flag_reward, parse_term
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.ranks.collectives import in_float64
from surefoot.recipes.base import Recipe
from surefoot.recipes.callables import Functions
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.recipes.supervised import RewardRecipe, SupervisedRecipe
from surefoot.store.checkpoint import load_checkpoint, require
from surefoot.store.folder import chosen_checkpoint, is_model, recipe_differences, recipe_of
from surefoot.store.manifest import LISTING
from surefoot.store.reading import check_is_run

LABELS = {"kl": "KL to reference, nats", "log_likelihood": "log π of demonstrations"}
"""labels of metrics whose name is no good label"""
BINS = 10
PROMPTS, MAX_TOKENS, SHOWN = 64, 64, 3
"""of SFT and DPO: prompts that are answered, if no number is given; the longest answer in tokens; answers that are printed"""
MOMENTS = ("first", "middle")
"""when V is read: before the first token of a response, and after half of its tokens"""


def evaluate_run(
    run: Path,
    *,
    data: str | None = None,
    rows: int | None = None,
    seed: int | None = None,
    attempts: Attempts | None = None,
    reward: Sequence[str] = (),
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Evaluate a run on held-out rows.

    data         other rows than the recipe's held-out ones
    rows         how many of them; default: as in the recipe
    seed         of the samples
    attempts     also sample several responses to each prompt, for accuracy, pass@k and a majority vote: online runs only
    reward       terms, as in ``reward.terms``, that score the sampled responses; default: the recipe's, of an online run
    checkpoint   "best", "last" or a number of steps; default: the best, else the last

    Every model is shown beside its start. Of SFT, DPO and reward models: held-out loss and accuracy; of the first two answers
    to held-out prompts too, if there are any. Of an online run: reward, gold, KL, length and diversity of both the
    trained model and its start, on the same prompts with the same random numbers, and how often the trained one wins; with
    ``evaluation.demonstrations``, the mean log π of a demonstrated token; with a critic, how well it predicts rewards
    (``calibration``).
    Raises SurefootError when the folder is no language run, there are no rows to evaluate on, or attempts have a reward that
    does not decide whether a response is right.
    """
    if is_model(run):
        return _evaluate_saved(run, data, rows, seed, attempts, reward)
    check_is_run(run)
    source = chosen_checkpoint(run, checkpoint)
    written = recipe_of(run)
    recipe = with_evaluation_rows(written, data, rows, seed, reward)
    if attempts is not None and recipe.kind != "language":
        raise SurefootError(
            f"--samples {attempts.samples}: needs a reward, and a run of kind = {recipe.kind!r} has none; use surefoot data "
            "accuracy, or evaluate an online run"
        )
    world = _world_of(recipe)
    parts = load_checkpoint(source)
    require(parts, ("agent", "recipe"), source)
    report: dict[str, Any] = {"kind": recipe.kind, "checkpoint": str(source), "steps": int(source.name)}
    if differences := recipe_differences(parts["recipe"], written):
        report["config_changed"] = differences
    check_unchanged(parts.get("sources", {}), world.frozen)
    if isinstance(world, LanguageWorld):
        return report | _against_start(world, parts, source, attempts)
    scoring = load_flag_reward(reward, recipe.device) if reward else None
    before, start = _supervised_metrics(world, scoring, rows, seed)
    load_trained(world.policy, parts["agent"], source)
    after, trained = _supervised_metrics(world, scoring, rows, seed)
    report |= {**after, "start": before}
    if trained:
        samples = [{**row, "start": old["response"]} for row, old in zip(trained, start, strict=True)]
        report |= {"samples": samples, **_win_rates(trained, start)}
    return report


def _supervised_metrics(
    world: SupervisedWorld, reward: Reward | None, rows: int | None, seed: int | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Metrics of the model as it is now, and its answers to held-out prompts, if it writes any."""
    evaluation = world.evaluate()
    assert evaluation is not None
    if not isinstance(world.result, LanguageModel):
        return dict(evaluation.metrics), []
    count = rows or min(PROMPTS, world.recipe.evaluation.rows)
    metrics, samples = _answers(world.result, world.recipe, reward, count, seed or 0)
    return dict(evaluation.metrics) | metrics, samples


def _answers(
    model: LanguageModel, recipe: SupervisedRecipe, reward: Reward | None, count: int, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One answer to each of the first held-out prompts, and what can be measured of them; nothing for rows without prompts."""
    assert recipe.data.held_out is not None
    found = list(islice(open_rows(recipe.data.held_out, recipe.data.columns), count))
    if not all("prompt" in row.columns for row in found):
        if reward is not None:
            raise SurefootError(f"{found[0].where}: has no prompt to answer, so there is nothing to score; add a column prompt")
        return {}, []
    prompts = data_rows.prompts(found, model.tokens, data_rows.NO_LIMIT)
    room = (context_length(model.model) or data_rows.NO_LIMIT) - max(map(len, prompts.ids))
    texts, ended = model.generate_ended(prompts.prompts, max_tokens=max(1, min(MAX_TOKENS, room)), seed=seed)
    ids = list(map(model.tokens.encode_completion, texts))
    metrics: dict[str, Any] = {
        "held_out_length": sum(map(len, ids)) / len(ids),
        "held_out_eos_rate": sum(ended) / len(ended),
        "held_out_distinct_2": distinct_n(ids, 2),
    }
    samples: list[dict[str, Any]] = [
        {"prompt": prompt, "response": text} for prompt, text in zip(prompts.prompts, texts, strict=True)
    ]
    if reward is not None:
        scores = reward(prompts.prompts, texts, prompts.columns)
        metrics = {"held_out_reward": mean_of(scores.total, scores.valid)} | metrics
        samples = [{**row, "reward": score} for row, score in zip(samples, scores.column(scores.total), strict=True)]
    return metrics, samples


def _win_rates(trained: list[dict[str, Any]], start: list[dict[str, Any]]) -> dict[str, float | None]:
    """How often the trained model's answer to a prompt scores higher than that of its start, for each score that there is."""
    rates = {}
    for name in ("reward", "gold"):
        if name in trained[0]:
            both = [(new[name], old[name]) for new, old in zip(trained, start, strict=True)]
            scored = [pair for pair in both if None not in pair]
            ours, theirs = torch.tensor(scored).reshape(-1, 2).unbind(-1)
            rates[f"win_rate_{name}"] = win_rate(ours, theirs) if scored else None
    return rates


def _evaluate_saved(
    folder: Path, data: str | None, rows: int | None, seed: int | None, attempts: Attempts | None, reward: Sequence[str]
) -> dict[str, Any]:
    """Evaluate a model without a run, such as one from the hub, as its training did."""
    model = load_saved(folder)
    if attempts is not None or model.recipe is None:
        raise SurefootError(f"{folder}: is a model without its run; use surefoot data accuracy, or evaluate the run")
    metrics = evaluate_model(model, data=data, rows=rows, seed=seed, reward=reward)
    steps = read_table(folder / LISTING).get("steps") if (folder / LISTING).is_file() else None
    trained = steps if isinstance(steps, int) else model.recipe.steps
    return {"kind": model.recipe.kind, "checkpoint": str(folder), "steps": trained} | metrics


def evaluate_model(
    model: LanguageModel | RewardModel,
    *,
    data: str | None = None,
    rows: int | None = None,
    seed: int | None = None,
    reward: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate a trained model on held-out rows, as its training did: the metrics ``held_out_…`` of its kind of recipe.

    The arguments are those of ``evaluate_run``.

    Raises SurefootError when the model has no recipe, or there are no rows to evaluate on.
    """
    if model.recipe is None:
        raise SurefootError("model: has no recipe to evaluate it by; give the run's folder, or train or load it")
    weights = model.model if isinstance(model, LanguageModel) else model
    recipe = with_evaluation_rows(model.recipe, data, rows, seed, reward)
    if not has_adapters(weights):  # they were merged into the model when it was loaded
        recipe = make_recipe({**recipe.table, "adapter": "none"})
    world = _world_of(recipe, model.functions if isinstance(model, LanguageModel) else None)
    own = world.result.model if isinstance(world.result, LanguageModel) else world.result
    own.load_state_dict(weights.state_dict())
    if reward and isinstance(world, SupervisedWorld):
        return _supervised_metrics(world, load_flag_reward(reward, recipe.device), rows, seed)[0]
    evaluation = world.evaluate()
    assert evaluation is not None
    return dict(evaluation.metrics)


def _world_of(recipe: Recipe, functions: Functions | None = None) -> LanguageWorld | SupervisedWorld:
    if isinstance(recipe, LanguageRecipe):
        return LanguageWorld(recipe, functions)
    assert isinstance(recipe, SupervisedRecipe)
    return SupervisedWorld(recipe)


def _against_start(world: LanguageWorld, parts: dict[str, Any], checkpoint: Path, attempts: Attempts | None) -> dict[str, Any]:
    """The model that training started from, which the world has loaded, and then the trained one."""
    # Attempts of the start come first: they reject a reward that is no verifier.
    solved = {} if attempts is None else {"samples": attempts.samples, "start": measure_attempts(world, attempts)}
    before, start = _metrics_and_samples(world, world.sample_held_out())
    load_trained(world.policy, parts["agent"], checkpoint)
    world.collector.beta = parts.get("beta", world.collector.beta)  # the β that the critic was trained with
    responses = world.sample_held_out()
    after, trained = _metrics_and_samples(world, responses)
    calibrated = calibration(world, responses)
    report: dict[str, Any] = {}
    if attempts is not None:
        report["attempts"] = {**solved, "trained": measure_attempts(world, attempts)}
    samples = [{**row, "start": old["response"]} for row, old in zip(trained, start, strict=True)]
    report |= {"rows": len(samples), "start": before, "trained": after}
    report |= _win_rates(trained, start)
    if calibrated is not None:
        report["calibration"] = calibrated
    return report | {"samples": samples}


def _metrics_and_samples(world: LanguageWorld, responses: Responses) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    evaluation = world.evaluate(responses)
    assert evaluation is not None
    return {name.removeprefix("held_out_"): value for name, value in evaluation.metrics.items()}, evaluation.samples


def with_evaluation_rows(
    recipe: Recipe, data: str | None, rows: int | None, seed: int | None, reward: Sequence[str] = ()
) -> Recipe:
    """A run's recipe with other rows to evaluate on, and an online run's with other terms of its reward."""
    if reward and isinstance(recipe, RewardRecipe):
        raise SurefootError(f"--reward {reward[0]}: scores responses, and a reward model writes none; leave it out")
    if rows == 0:  # in a recipe, 0 turns evaluation off; make_recipe rejects all else that is no count
        raise SurefootError("rows=0: must be at least 1")
    table = to_table(recipe)
    held_out = data or table.get("data", {}).get("held_out", "none")
    if held_out == "none":
        raise SurefootError("data.held_out='none': this run has no held-out rows; name others: --data FILE, data= in Python")
    table["data"]["held_out"] = held_out
    table["evaluation"] |= {name: value for name, value in (("rows", rows), ("seed", seed)) if value is not None}
    table["evaluation"]["rows"] = table["evaluation"]["rows"] or 256
    if reward and recipe.kind == "language":
        table["reward"]["terms"] = [parse_term(text).model_dump(exclude_unset=True) for text in reward]
    table["check_memory"] = False  # it would check the memory of training
    return make_recipe(table)


def report_table(report: dict[str, Any]) -> str:
    """The report of ``evaluate_run``, to print."""
    lines = [f"{report['kind']} run after {report['steps']:,} steps; checkpoint {report['checkpoint']}"]
    if "config_changed" in report:
        lines.append(f"changed since the checkpoint: {'; '.join(report['config_changed'])}")
    if "trained" not in report:
        metrics = {name: value for name, value in report.items() if name.startswith("held_out_")}
        both = {name: (*([report["start"].get(name)] if "start" in report else []), metrics[name]) for name in metrics}
        lines += [f"{'':28}{'start':>12}{'trained':>12}"] if "start" in report else []
        for name, values in both.items():
            lines.append(f"{name.replace('_', ' '):28}" + "".join(f"{_number(value):>12}" for value in values))
        if report.get("win_rate_reward") is not None:
            lines.append(f"{'wins by reward':28}{'':>12}{report['win_rate_reward']:>12.1%}")
        for row in report.get("samples", ())[:SHOWN]:
            lines += [f"  {prompt_text(row['prompt'])}", f"    start:   {row['start']}", f"    trained: {row['response']}"]
        return "\n".join(lines)
    lines.append(f"{'':24}{'start':>12}{'trained':>12}   on {report['rows']} held-out prompts")
    for name, before in report["start"].items():
        label = LABELS.get(name, name.replace("_", " "))
        lines.append(f"{label:24}{_number(before):>12}{_number(report['trained'][name]):>12}")
    if "attempts" in report:
        lines += attempt_lines(report["attempts"]["start"], report["attempts"]["trained"], report["attempts"]["samples"])
    for name in (name for name in report if name.startswith("win_rate_")):
        share = "–" if report[name] is None else f"{report[name]:.1%}"
        lines.append(f"{'wins by ' + name.removeprefix('win_rate_'):24}{'':>12}{share:>12}")
    if "calibration" in report:
        lines += calibration_lines(report["calibration"])
    return "\n".join(lines)


# ---- the critic ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def calibration(world: LanguageWorld, responses: Responses) -> dict[str, Any] | None:
    """V of responses against their outcome, at the ``MOMENTS``; None for a policy without a critic.

    V is read as the probability of success, clipped to [0, 1], if all responses earn 0 or 1 as a whole (``success``): truncated
    ones too (``reward.missing_eos_value`` is 0, or ``missing_eos`` is none), without length penalty or discount. Otherwise V is
    compared with the return that it is trained on, KL included (``returns``). Responses without a score are left out; for
    returns, bootstrapped ones too.
    """
    recipe, samples = world.recipe, responses.samples
    inputs, mask = {"prompt": samples.prompt, "prompt_mask": samples.prompt_mask}, samples.mask
    evaluation = in_micro_batches(world.policy, inputs, samples.actions, mask, *world.collector.budget)
    if evaluation.values is None:
        return None
    scores = responses.score_with(world.reward)
    places = {
        "first": index_of_token(mask, torch.zeros_like(samples.lengths)),
        "middle": index_of_token(mask, samples.lengths // 2),
    }
    values = {name: evaluation.values.gather(-1, at.unsqueeze(-1)).squeeze(-1) for name, at in places.items()}
    total = final_rewards(scores, samples, recipe)
    valid = total[scores.valid]
    at_end = scores.dense is None or bool((scores.dense == place_scores(scores.total, mask)).all())
    settings = recipe.reward  # a reward of 0 or 1 stays so for truncated and long responses, whatever the samples are
    kept = settings.missing_eos is None or (settings.missing_eos != "bootstrap" and settings.missing_eos_value == 0)
    binary = settings.overlong is None and kept and at_end and bool(((valid == 0) | (valid == 1)).all())
    if binary and recipe.objective.gamma == 1:
        return {name: success(values[name][scores.valid], valid == 1) for name in MOMENTS}
    rewards = token_rewards(scores, total, samples, recipe)
    ref_log_probs = world.collector.reference_log_probs(inputs, samples.actions, mask)
    if ref_log_probs is not None:
        rewards = kl_shaped_rewards(rewards, evaluation.log_probs, ref_log_probs, mask, world.collector.beta)
    last = last_kept(mask)
    gamma, none = recipe.objective.gamma, torch.zeros_like(mask)
    earned = discounted_returns(rewards, torch.zeros_like(rewards), terminated=last, truncated=none, gamma=gamma, mask=mask)
    counted = scores.valid & (samples.ended | (settings.missing_eos != "bootstrap"))
    return {
        name: returns(values[name][counted], earned.gather(-1, at.unsqueeze(-1)).squeeze(-1)[counted])
        for name, at in places.items()
    }


def index_of_token(mask: Tensor, number: Tensor) -> Tensor:
    """The index in each row of its sampled token with a number, counted from 0.   [N, T], [N] -> [N]"""
    return (mask & (mask.cumsum(-1) == number.unsqueeze(-1) + 1)).int().argmax(-1)


def success(predicted: Tensor, right: Tensor) -> dict[str, Any]:
    """How well predicted probabilities of success fit the outcomes.   [N], [N] bool

    ``brier`` is mean (p − right)²; ``brier_baseline`` that of always predicting the share of successes (Brier 1950);
    ``bins`` the reliability table: per tenth of [0, 1] the count, the mean prediction and the share of successes there.
    """
    p, right = in_float64(predicted).clamp(0, 1), in_float64(right)
    share = right.mean()
    which = (p * BINS).long().clamp(max=BINS - 1)

    def fit(here: Tensor) -> dict[str, Any]:
        count, means = int(here.sum()), (p[here].mean(), right[here].mean())
        predicted, observed = map(float, means) if count else (None, None)
        return {"count": count, "predicted": predicted, "observed": observed}

    table = [{"from": index / BINS, "to": (index + 1) / BINS, **fit(which == index)} for index in range(BINS)]
    brier, baseline = (float(((p - right) ** 2).mean()), float(share * (1 - share))) if len(p) else (None, None)
    return {"kind": "success", **fit(which >= 0), "brier": brier, "brier_baseline": baseline, "bins": table}


def returns(predicted: Tensor, earned: Tensor) -> dict[str, Any]:
    """How values fit returns: root mean squared error, beside that of the mean return, and explained variance.   [N], [N]"""
    v, r = in_float64(predicted), in_float64(earned)
    if not len(v):
        return {"kind": "returns", "count": 0, "rmse": None, "rmse_baseline": None, "explained_variance": None}
    spread = float(r.std(correction=0))
    return {
        "kind": "returns",
        "count": len(v),
        "predicted": float(v.mean()),
        "observed": float(r.mean()),
        "rmse": math.sqrt(float(((v - r) ** 2).mean())),
        "rmse_baseline": spread,
        "explained_variance": float(explained_variance(v, r)) if spread > 0 else None,
    }


def calibration_lines(report: dict[str, Any]) -> list[str]:
    """Lines to print: both moments side by side, and the reliability table of the first."""
    both = [report[name] for name in MOMENTS]
    names = {
        "predicted": "mean V",
        "observed": "share of successes" if both[0]["kind"] == "success" else "mean return",
        "brier": "Brier score",
        "brier_baseline": "  of the share alone",
        "rmse": "RMSE of V",
        "rmse_baseline": "  of the mean return",
        "explained_variance": "explained variance",
    }
    title = "critic as P(success)" if both[0]["kind"] == "success" else "critic"
    lines = [f"{title:24}{'first token':>12}{'middle':>12}   on {both[0]['count']} responses with a score"]
    for name, label in names.items():
        if name in both[0]:
            lines.append(f"{label:24}" + "".join(f"{_number(one[name]):>12}" for one in both))
    if both[0]["kind"] == "success":
        lines.append(f"{'V at the first token':24}{'mean V':>12}{'successes':>12}{'responses':>12}")
        for row in both[0]["bins"]:
            if row["count"]:
                span = f"  {row['from']:.1f} to {row['to']:.1f}"
                lines.append(f"{span:24}{_number(row['predicted']):>12}{_number(row['observed']):>12}{row['count']:>12}")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
