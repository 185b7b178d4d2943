"""The result of a study: results.json, best.toml, and lines for a terminal."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surefoot.compare.report import interval_note
from surefoot.compare.statistics import interval_text, mean, mean_interval, number, numbers, with_interval
from surefoot.compare.tune.study import Study
from surefoot.recipes.reading import to_toml
from surefoot.runs.display import joined
from surefoot.terminal import wrapped

if TYPE_CHECKING:
    import optuna


ENOUGH = 4
"""trials from which the importance of fields is estimated"""


def results_of(study: Study, best: "optuna.trial.FrozenTrial", confirmed: Mapping[str, list[float]] | None) -> dict[str, Any]:
    """The contents of results.json."""
    trials = [
        {
            "number": trial.number,
            "state": state_of(trial),
            "value": trial.value if trial.state.name == "COMPLETE" else None,
            "scores": trial.user_attrs.get("scores", []),
            "values": study.values(trial),
            "error": trial.user_attrs.get("error") or trial.user_attrs.get("rejected"),
        }
        for trial in study.trials
    ]
    more = {"best": best.number, "importance": importance(study), "confirmed": confirmed}
    return {**study.plan.to_json(), "trials": trials, **more}


def state_of(trial: "optuna.trial.FrozenTrial") -> str:
    """``complete``, ``pruned``, ``rejected`` (its values don't fit each other), ``failed`` or ``running``."""
    if "rejected" in trial.user_attrs:
        return "rejected"
    return {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())


def importance(study: Study) -> dict[str, float]:
    """How much of the difference between good and other trials each field explains (PED-ANOVA, arXiv 2304.10255).

    Empty for fewer than ``ENOUGH`` complete trials.
    """
    import optuna

    if sum(1 for trial in study.trials if trial.state.name == "COMPLETE") < ENOUGH:
        return {}
    shares = optuna.importance.get_param_importances(study.optuna, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    return {field: float(share) for field, share in shares.items()}


def best_toml(study: Study, best: "optuna.trial.FrozenTrial") -> str:
    """The recipe of the best trial, with a comment that says where it comes from."""
    plan = study.plan
    searched = "".join(f"#   {field} = {json.dumps(value)}\n" for field, value in study.values(best).items())
    return (
        f"# The best of {len(study.trials)} trials of surefoot tune: trial {best.number}, {number(best.value)} on "
        f"{plan.seeds} {'seed' if plan.seeds == 1 else 'seeds'}. It differs from the initial recipe in these fields only:\n"
        f"{searched}\n{to_toml(plan.seeded(0, study.values(best)))}"
    )


def result_text(study: Study, best: "optuna.trial.FrozenTrial", confirmed: Mapping[str, list[float]] | None) -> str:
    """The result in lines for a terminal."""
    trials, plan = study.trials, study.plan
    counts: dict[str, int] = {}
    for trial in trials:
        counts[state_of(trial)] = counts.get(state_of(trial), 0) + 1
    lines = joined([f"{len(trials)} trials:", *(f"{count} {state}" for state, count in counts.items())])
    lines += ["", f"best: trial {best.number}, {_trial_score(best)}"]
    lines += [f"    {field} = {json.dumps(value)}" for field, value in study.values(best).items()]
    initial = next((trial for trial in trials if study.values(trial) == plan.own_values), None)
    if initial is not None and initial.number != best.number:
        score = _trial_score(initial) if initial.state.name == "COMPLETE" else state_of(initial)
        lines.append(f"initial recipe: trial {initial.number}, {score}")
    shares = importance(study)
    if shares:
        lines += joined(["importance (PED-ANOVA):", *(f"{field} {share:.0%}" for field, share in shares.items())])
    lines += ["", *_confirmed_lines(study, confirmed)]
    lines.append(f"train the best recipe with: surefoot train {study.folder / 'best.toml'}")
    if running := len(trials) - study.ended:
        lines.append(f"trials that still run in other processes: {running}; repeat the command when they have ended")
    return "\n".join(map(wrapped, lines))


def _trial_score(trial: "optuna.trial.FrozenTrial") -> str:
    scores = trial.user_attrs.get("scores", [])
    if len(scores) < 2:
        return number(trial.value)
    spread = math.sqrt(float(mean([(score - float(mean(scores))) ** 2 for score in scores])) * len(scores) / (len(scores) - 1))
    return f"{number(trial.value)} ± {number(spread)} (seeds: {numbers(scores)})"


def _confirmed_lines(study: Study, confirmed: Mapping[str, list[float]] | None) -> list[str]:
    """The scores on new seeds, or a warning that the best of several scores is too high."""
    if confirmed is None:
        return [
            "The best of several noisy scores is too high: expect less on other seeds. To measure how much:",
            f"    surefoot tune {study.folder} --resume --confirm 5",
        ]
    first = study.plan.recipe.seed + study.plan.seeds
    lines = [f"on new seeds ({first} to {first + len(next(iter(confirmed.values()))) - 1}):"]
    for name, scores in confirmed.items():
        value, interval = with_interval(scores)
        lines.append(f"    {name}: {value} (95 % interval {interval}; seeds: {numbers(scores)})")
    if len(confirmed) == 2:
        tuned, initial = confirmed.values()
        low, high = mean_interval(tuned, initial)
        judged = "better" if low > 0 else "worse" if high < 0 else "these seeds don't separate them"
        lines.append(f"    difference: {number(float(mean(tuned) - mean(initial)))} ({interval_text(low, high)}): {judged}")
    return [*lines, f"    {interval_note(len(next(iter(confirmed.values()))))}."]
