"""How well the labels of people agree: with themselves, with each other, with a reward model, and with no reason at all.

This module imports no torch.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import mean, median
from typing import Any

from surefoot.people.log import AGAIN, EQUAL, LEFT, RIGHT, SKIP, Label, Queue
from surefoot.store.finding import Finding

FEWEST_REPEATS = 20
"""pairs judged twice from which on the agreement with oneself, or κ of two people, is shown"""
FEWEST_LABELS = 100
"""from which on a bias is shown"""
MOST_DIFFERENT = 10
"""pairs that are listed because a reward model contradicts people"""
AGREEMENT = "agreement.json"
"""the file of a round with the report, written once training has read the labels"""
BIASED, CERTAIN = 0.01, 0.0001
"""p of an exact test below which there is a bias: with enough labels, and with any number of them"""


def of_people(queue: Queue, labels: Sequence[Label]) -> dict[str, Any]:
    """What the labels say of each person and of each two, as a table of plain values."""
    names = sorted({label.who for label in labels})
    mine = {name: [label for label in labels if label.who == name] for name in names}
    once = {name: {each.key: each.preference for each in mine[name] if not each.repeat and each.preference} for name in names}
    between = {
        f"{one} and {two}": kappa([(better, once[two][key]) for key, better in once[one].items() if key in once[two]])
        for one, two in combinations(names, 2)
    }
    return {
        "people": {name: of_person(queue, mine[name]) for name in names},
        "between": {names: table for names, table in between.items() if table["pairs"]},
    }


def of_person(queue: Queue, labels: Sequence[Label]) -> dict[str, Any]:
    """Counts, time, agreement with oneself, and the two biases of one person."""
    decided = [label for label in labels if label.choice in (LEFT, RIGHT)]
    left = sum(label.choice == LEFT for label in decided)
    once = [label for label in decided if not label.repeat]
    texts = [(queue[label.key], label.preference) for label in once if "a" in queue[label.key]]
    more = [(len(pair["a"]) - len(pair["b"]), better) for pair, better in texts]
    longer = [(ahead > 0) == (better == "a") for ahead, better in more if ahead]
    first = {label.key: label.preference for label in labels}
    again = [(first.get(label.key.removesuffix(AGAIN)), label.preference) for label in labels if label.repeat]
    again = [(before, now) for before, now in again if before is not None and now is not None]
    return {
        "labels": sum(not label.repeat for label in labels),
        "equal": sum(label.choice == EQUAL for label in labels),
        "skipped": sum(label.choice == SKIP for label in labels),
        "seconds": median(label.milliseconds / 1000 for label in labels) if labels else None,
        "repeats": len(again),
        "same_again": share(sum(before == now for before, now in again), len(again)) if len(again) >= FEWEST_REPEATS else None,
        "left": bias(left, len(decided)),
        "longer": bias(sum(longer), len(longer)),
    }


def share(count: float, of: int) -> dict[str, Any]:
    """A share with its 95 % interval (Wilson)."""
    if not of:
        return {"count": 0, "of": 0, "share": None, "low": None, "high": None}
    z, p = 1.96, count / of
    centre, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + (z / (2 * of)) ** 2)
    low, high = ((centre + side) / (1 + z * z / of) for side in (-half, half))
    return {"count": count, "of": of, "share": p, "low": low, "high": high}


def bias(count: int, of: int) -> dict[str, Any]:
    """A share that is one half without bias, with p of the exact two-sided test."""
    fewer = min(count, of - count)
    tail = sum(math.comb(of, k) for k in range(fewer + 1)) / 2**of
    return {**share(count, of), "p": min(1.0, 2 * tail)}


def kappa(both: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Cohen's κ of two people on the pairs that both judged, with a 95 % interval (Fleiss, Cohen and Everitt 1969)."""
    n = len(both)
    agreed = sum(one == two for one, two in both)
    table = {"pairs": n, "agreed": agreed, "kappa": None, "low": None, "high": None}
    cells, rows, columns = Counter(both), Counter(one for one, _ in both), Counter(two for _, two in both)
    chance = sum(rows[each] * columns[each] for each in rows) / n**2 if n else 1.0
    if chance == 1 or n < FEWEST_REPEATS:
        return table
    observed = agreed / n
    value = (observed - chance) / (1 - chance)
    p, q = {each: count / n for each, count in rows.items()}, {each: count / n for each, count in columns.items()}
    same = sum(cells[each, each] / n * (1 - (p[each] + q.get(each, 0)) * (1 - value)) ** 2 for each in p)
    other = (
        sum(count / n * (p.get(two, 0) + q.get(one, 0)) ** 2 for (one, two), count in cells.items() if one != two)
        * (1 - value) ** 2
    )
    variance = (same + other - (value - chance * (1 - value)) ** 2) / (n * (1 - chance) ** 2)
    width = 1.96 * math.sqrt(max(0.0, variance))
    return {**table, "kappa": value, "low": max(-1.0, value - width), "high": min(1.0, value + width)}


def with_model(labels: Sequence[Label], margins: Mapping[str, float]) -> dict[str, Any]:
    """In how many pairs a reward model prefers the answer that people do; a tie of its scores counts half, and where people
    differ, the share of them.

    margins   score of a minus score of b, by key

    ``differ`` has the pairs in which it contradicts people most: the score of their answer minus that of the other.
    """
    judged = [label for label in labels if label.preference in ("a", "b") and not label.repeat and label.key in margins]
    ahead = [(margins[label.key] * (1 if label.preference == "a" else -1), label) for label in judged]
    right: dict[str, list[float]] = {}
    wrong: dict[tuple[float, str, str | None], list[str]] = {}
    for margin, label in ahead:
        right.setdefault(label.key, []).append(0.5 if margin == 0 else margin > 0)
        if margin < 0:
            wrong.setdefault((margin, label.key, label.preference), []).append(label.who)
    differ = [
        {"margin": margin, "key": key, "preferred": side, "who": ", ".join(wrong[margin, key, side])}
        for margin, key, side in sorted(wrong)[:MOST_DIFFERENT]
    ]
    return {**share(math.fsum(map(mean, right.values())), len(right)), "differ": differ}


def findings(report: Mapping[str, Any]) -> list[Finding]:
    """What is wrong with labels: a person who always picks a side or the longer answer, or a reward model at chance."""
    found = []
    for name, person in report["people"].items():
        for which, what in (("left", "the left answer"), ("longer", "the longer answer")):
            of = person[which]
            if of["p"] < (BIASED if of["of"] >= FEWEST_LABELS else CERTAIN):
                often = "in" if of["share"] > 0.5 else "only in"
                found.append(
                    Finding(
                        f"labels_biased_{which}",
                        "warning",
                        f"{name} chose {what} {often} {of['count']} of {of['of']} pairs",
                        "sides are random" if which == "left" else "length may stand in for quality",
                        advice=(f"look at the pairs with {name}, or train without these labels: move {name}.jsonl away",),
                    )
                )
        same = person["same_again"]
        if same and same["low"] < 0.5:
            found.append(
                Finding(
                    "labels_inconsistent",
                    "warning",
                    f"{name} gave the same answer again in {same['count']} of {same['of']} repeated pairs",
                    "the pairs are too alike, or the question is not clear",
                    advice=("say in one sentence what better means",),
                )
            )
    model = report.get("model")
    if model and model["of"] and model["low"] <= 0.5 <= model["high"]:
        found.append(
            Finding(
                "reward_model_at_chance",
                "serious",
                f"the reward model predicted {model['share']:.0%} of {model['of']} newly labelled pairs ({model['low']:.0%} to "
                f"{model['high']:.0%}): it doesn't know these people yet",
                "too few labels, or labels that contradict each other",
                advice=("label more pairs", "keep a larger KL penalty"),
            )
        )
    return found


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report as lines for a terminal."""
    out = []
    for name, person in report["people"].items():
        seconds = "" if person["seconds"] is None else f", {person['seconds']:.1f} s each (median)"
        out.append(f"{name}: {person['labels']} labels, {person['equal']} equal, {person['skipped']} skipped{seconds}")
        if person["same_again"]:
            out.append(f"  the same again: {share_text(person['same_again'], count=True)}")
        for which, what in (("left", "the left one"), ("longer", "the longer one")):
            if person[which]["of"] >= FEWEST_LABELS:
                out.append(
                    f"  chose {what}: {share_text(person[which], count=True)}, p = {person[which]['p']:.2g} without bias"
                )
    for names, both in report["between"].items():
        value = "" if both["kappa"] is None else f", κ {both['kappa']:.2f} ({both['low']:.2f} to {both['high']:.2f})"
        out.append(f"{names}: agree on {both['agreed']} of {both['pairs']} pairs{value}")
    if report.get("model"):
        out.append(f"the previous reward model predicted {share_text(report['model'], count=True)} labelled pairs")
    return [*out, *(finding.line for finding in findings(report))]


def share_text(of: Mapping[str, Any], count: bool = False) -> str:
    """A share with its interval, to print."""
    whole = f" of {of['of']}" if count else ""
    return "–" if of["share"] is None else f"{of['share']:.0%}{whole} ({of['low']:.0%} to {of['high']:.0%})"
