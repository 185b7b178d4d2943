"""The review task of the demo: gold scores, demonstrations, prompts, and preference labels."""

import math

import pytest

from surefoot.language.tasks.reviews import (
    HELD_OUT,
    LONGEST,
    PRODUCTS,
    TRAINED,
    demonstrations,
    gold,
    gold_parts,
    label,
    product_of,
    prompts,
)

BIKE = "old bike: "


def parts(response):
    """The non-zero parts of the gold score."""
    return {name: value for name, value in gold_parts(BIKE, response).items() if value}


# ---- gold -------------------------------------------------------------------------------------------------------------


def test_gold_scores_each_part():
    for response, expected in [
        ("the wheel is great.", {"praise": 0.5, "on_topic": 0.25}),
        ("i hate the wheel.", {"on_topic": 0.25, "blame": -0.5}),
        ("i love it. the wheel is great. the chain feels fine.", {"praise": 1.5, "on_topic": 0.5}),
        ("i love it. i like it. the wheel is great. the chain is fine. the brake is solid.", {"praise": 1.5, "on_topic": 0.5}),
        ("the sole is great.", {"praise": 0.5, "off_topic": -0.5}),
        ("i love the lamp.", {"praise": 0.5, "off_topic": -0.5}),
        ("i love the bike.", {"praise": 0.5}),
        ("the whel is great.", {"non_words": -0.5, "malformed": -0.5}),
        ("the wheel is great", {"malformed": -0.5}),
        ("the wheel great is.", {"malformed": -0.5}),
        ("i like it. i like it.", {"praise": 0.5, "repetition": -0.5}),
        ("I love it!", {"non_words": -1.0, "malformed": -0.5}),
        ("", {"malformed": -0.5}),
        ("great great great great", {"repetition": -1.5, "malformed": -0.5}),
    ]:
        assert parts(response) == expected
        assert gold([BIKE], [response]) == [sum(expected.values())]


def test_gold_depends_on_the_product_in_the_prompt():
    assert gold(["old bike: ", "red boot: "], ["i love the sole."] * 2) == [0.0, 0.75]
    assert product_of("A review of my KETTLE, please") == "kettle"


def test_prompt_must_name_exactly_one_product():
    for prompt in ["", "a bikes: ", "bike or boot: "]:
        with pytest.raises(ValueError, match="must name one product of boot, bike"):
            gold([prompt], ["i love it."])


def test_gold_does_not_rise_with_repeated_text():
    """Repetition must not be a way to raise the score."""
    for unit in ("great ", "wheel ", "love ", "i love it. ", "the wheel is great. ", "x", "! ", "."):
        values = gold([BIKE] * 3, [unit * count for count in (3, 6, 12)])
        assert values[0] >= values[1] >= values[2], unit
        assert values[2] < 0, unit


# ---- demonstrations and prompts ---------------------------------------------------------------------------------------


def test_training_and_held_out_prompts_use_different_products():
    assert {product_of(prompt) for prompt in prompts(400, 1)} == set(TRAINED)
    assert {product_of(prompt) for prompt in prompts(400, 1, held_out=True)} == set(HELD_OUT)
    assert not set(TRAINED) & set(HELD_OUT)


def test_demonstrations_cover_all_products_and_are_short():
    rows = demonstrations(2000, 1)
    assert {product_of(row["prompt"]) for row in rows} == set(PRODUCTS)
    assert max(len(row["completion"]) for row in rows) <= LONGEST


def test_seed_determines_the_rows():
    assert demonstrations(50, 1) == demonstrations(50, 1) != demonstrations(50, 2)
    assert prompts(50, 1) == prompts(50, 1) != prompts(50, 2)


def test_demonstrations_are_well_formed_except_for_dropped_characters():
    """About one in twenty loses a character; there is no other format error and no repetition."""
    actual = [gold_parts(row["prompt"], row["completion"]) for row in demonstrations(4000, 3)]
    broken = [row for row in actual if row["malformed"] or row["non_words"]]
    assert 0.03 < len(broken) / len(actual) < 0.06
    assert all(row["repetition"] == 0 for row in actual)


# ---- labels -----------------------------------------------------------------------------------------------------------


def gap(row):
    chosen, rejected = gold([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
    return chosen - rejected


def random_pairs(count):
    """Pairs of demonstrations for the same prompt."""
    waiting, results = {}, []
    for row in demonstrations(4 * count, 5):
        first = waiting.pop(row["prompt"], None)
        if first is None:
            waiting[row["prompt"]] = row["completion"]
        else:
            results.append((row["prompt"], first, row["completion"]))
    return results[:count]


def test_better_review_is_chosen_without_noise():
    rows = label(random_pairs(300), noise=0)
    assert all(gap(row) >= 0 for row in rows)
    same = (BIKE, "i love it.", "i love it.")
    assert label([same, (BIKE, "i hate it.", "i love it.")], noise=0) == [
        {"prompt": BIKE, "chosen": "i love it.", "rejected": "i hate it."}
    ]


def test_label_noise_is_logistic_in_the_gold_gap():
    """With a gap of 1 and noise 0.5, σ(2) = 0.88 of 4,000 labels prefer the better one, within four standard errors."""
    rows = label([(BIKE, "i hate it.", "i love it.")] * 4000, noise=0.5, seed=7)
    share = sum(row["chosen"] == "i love it." for row in rows) / len(rows)
    truth = 1 / (1 + math.exp(-2.0))
    assert abs(share - truth) < 4 * math.sqrt(truth * (1 - truth) / 4000)
