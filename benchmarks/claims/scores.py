"""The scores of an experiment's runs: tables with one row for the seeds of a setting, sampled and greedy."""

from collections.abc import Iterator, Mapping

from claims import Experiment, Result, Results, single
from surefoot.compare.statistics import interval_text, markdown_table, number

Scores = Mapping[str, float | None]
"""column -> score of one run"""


def scores_of(result: Result) -> Iterator[tuple[str, Scores]]:
    """Each policy that a result evaluates, as its name within the run ("" if there is only one) and its scores."""
    if "last_100_mean" in result and "seed" in result:
        yield "", control_scores(result)
    if "trained" in result:
        yield "", review_scores(result["trained"]) if "gold" in result["trained"] else sorting_scores(result["trained"])
    if "known_products" in result:
        products = result["known_products"], result["without_anchor"]["known_products"]
        named = {"SFT": products[0]["start"], "PPO": products[0]["trained"], "PPO without a KL penalty": products[1]["trained"]}
        yield from ((name, review_scores(each)) for name, each in named.items())
    if "SFT" in result:
        names = {"sampled": "sampled_accuracy", "greedy": "greedy_accuracy"}
        for name in ("SFT", "PPO", "GRPO"):
            yield name, {f"{how} accuracy": result[name][key] for how, key in names.items()}
    if "digits" in result:
        yield "", {"accuracy by steps, sampled": result["curve"][-1][1], "whole answers, sampled": result["curve"][-1][2]}


def control_scores(result: Result) -> Scores:
    return {
        "last 100 episodes, sampled": result["last_100_mean"],
        "whole run, sampled": result.get("average_return"),
        "greedy": result.get("greedy_mean"),
    }


def review_scores(trained: Result) -> Scores:
    shown = {"gold, sampled": "gold", "gold, greedy": "greedy_gold", "proxy": "reward", "KL": "kl", "repeated": "repeated"}
    return {column: trained.get(key) for column, key in shown.items()}


def sorting_scores(trained: Result) -> Scores:
    shown = {"sampled accuracy": "sampled", "greedy accuracy": "greedy", "pass@8": "pass_at_8"}
    return {column: trained.get(key) for column, key in shown.items()}


def score_tables(experiment: Experiment, results: Results) -> Iterator[str]:
    """One table for each kind of score among the finished runs; columns without a score are left out."""
    groups: dict[tuple[str, ...], dict[str, list[Scores]]] = {}
    costs: dict[str, list[float]] = {}
    for cell, result in results.items():
        setting = cell.rpartition("-")[0]
        for policy, scores in scores_of(result):
            name = ": ".join(part for part in (setting, policy) if part) or "all"
            groups.setdefault(tuple(scores), {}).setdefault(name, []).append(scores)
            if "cpu_seconds" in result and not policy:
                costs.setdefault(name, []).append(result["cpu_seconds"])
    for columns, rows in groups.items():
        kept = [column for column in columns if any(run[column] is not None for runs in rows.values() for run in runs)]
        header = [experiment.setting, "seeds", *kept, "CPU seconds"]
        yield markdown_table(
            header,
            [
                [name, str(len(runs)), *(spread(runs, column) for column in kept), cost(costs.get(name, []))]
                for name, runs in rows.items()
            ],
        )


def spread(runs: list[Scores], column: str) -> str:
    """The interquartile mean over seeds, with its interval; how many seeds, if some have no such score."""
    values = [value for run in runs if (value := run[column]) is not None]
    if not values:
        return "–"
    bound = single(column, values)
    interval = [interval_text(bound.low, bound.high)] if len(values) > 1 else []
    seeds = [f"{len(values)} seeds"] if len(values) < len(runs) else []
    return number(bound.value) + (f" ({', '.join([*interval, *seeds])})" if interval or seeds else "")


def cost(seconds: list[float]) -> str:
    """The mean, a dash if none was measured."""
    return number(sum(seconds) / len(seconds)) if seconds else "–"
