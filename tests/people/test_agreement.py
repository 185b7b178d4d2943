"""How well labels agree: shares, κ and exact tests against values that are computed by hand or known."""

import json
import random
from pathlib import Path

import pytest

from surefoot.people.agreement import bias, findings, kappa, lines, of_people, share, with_model
from surefoot.people.log import AGAIN, Label, Queue


def queue_of(count: int) -> Queue:
    pairs = ({"prompt": f"p{n}", "a": "long answer", "b": "short"} for n in range(count))
    return Queue(Path("queue.jsonl"), "".join(json.dumps(pair) + "\n" for pair in pairs).encode())


def label(queue: Queue, key: str, who: str, better: str) -> Label:
    left = queue.b_is_left(key, who)
    choice = better if better in ("equal", "skip") else "left" if (better == "b") == left else "right"
    return Label(key, who, choice, left, 1500)


def test_a_share_has_wilsons_interval_and_a_bias_the_exact_binomial_p() -> None:
    assert [round(share(8, 10)[name], 3) for name in ("low", "high")] == [0.490, 0.943]
    assert bias(2, 10)["p"] == pytest.approx(0.109375)
    assert bias(10, 10)["p"] == pytest.approx(2 / 1024)
    assert bias(5, 10)["p"] == 1
    assert share(0, 0)["share"] is None


def test_kappa_is_that_of_cohens_table() -> None:
    """20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: κ = 0.4, with the standard error of Fleiss, Cohen and Everitt."""
    both = 20 * [("a", "a")] + 5 * [("a", "b")] + 10 * [("b", "a")] + 15 * [("b", "b")]
    table = kappa(both)
    assert (table["pairs"], table["agreed"]) == (50, 35)
    assert table["kappa"] == pytest.approx(0.4)
    assert [table["low"], table["high"]] == pytest.approx([0.4 - 1.96 * 0.12709, 0.4 + 1.96 * 0.12709], abs=1e-3)
    assert kappa([("a", "a")] * 50)["kappa"] is None, "chance would agree as well"
    assert kappa([("a", "a"), ("b", "a"), ("b", "b")])["kappa"] is None, "too few pairs for an interval"
    draw = random.Random(1)
    assert abs(kappa([(draw.choice("ab"), draw.choice("ab")) for _ in range(4000)])["kappa"]) < 0.05


def test_who_always_picks_a_side_gets_a_finding_and_who_is_careful_gets_none() -> None:
    queue = queue_of(20)
    keys = queue.order("lefty")
    labels = [Label(key, "lefty", "left", queue.b_is_left(key, "lefty"), 300) for key in keys]
    labels += [label(queue, key, "ann", "a" if int(key.removesuffix(AGAIN)) % 2 else "b") for key in queue.order("ann")]
    report = of_people(queue, labels)
    assert report["people"]["lefty"]["left"]["count"] == 22
    assert [(each.name, "lefty" in each.what) for each in findings(report)] == [("labels_biased_left", True)]
    assert report["between"]["ann and lefty"]["pairs"] == 20
    assert report["people"]["ann"]["same_again"] is None, "shown from 20 repeats on"
    assert any(line.startswith("ann: 20 labels, 0 equal, 0 skipped, 1.5 s each") for line in lines(report))


def test_the_agreement_with_oneself_and_length_are_counted_over_what_was_decided() -> None:
    queue = queue_of(220)
    labels = [label(queue, key, "ann", "equal" if key in ("1", "1" + AGAIN) else "a") for key in queue.order("ann")]
    again = [each for each in labels if each.repeat]
    flipped = label(queue, again[0].key, "ann", "b")
    person = of_people(queue, [flipped if each is again[0] else each for each in labels])["people"]["ann"]
    assert (person["repeats"], person["same_again"]["count"]) == (22, 21)
    longer = person["longer"]
    assert (longer["count"], longer["of"]) == (219, 219), "each pair once"
    assert longer["p"] < 1e-9


def test_a_reward_model_is_compared_with_the_labels_that_decide() -> None:
    queue = queue_of(6)
    better = ["a", "b", "a", "equal", "skip", "b"]
    labels = [label(queue, str(n), "ann", each) for n, each in enumerate(better, 1)] + [label(queue, "1" + AGAIN, "ann", "b")]
    margins = {"1": 2.0, "2": 1.0, "3": 0.0, "4": 5.0, "5": -5.0, "6": -3.0}
    model = with_model(labels, margins)
    assert (model["count"], model["of"]) == (2.5, 4)
    assert [each["key"] for each in model["differ"]] == ["2"]
    two = [Label(each.key, who, each.choice, each.b_left, 1) for each in labels for who in ("ann", "bob")]
    assert with_model(two, margins)["of"] == 4, "a second opinion on a pair is no second pair"
    report = {"people": {}, "between": {}, "model": model}
    assert [(each.name, each.severity) for each in findings(report)] == [("reward_model_at_chance", "serious")]
    assert findings({**report, "model": share(90, 100)}) == []
