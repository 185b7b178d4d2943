"""Short product reviews from a seeded grammar, and a program, ``gold``, that scores them.

It simulates human preferences in the RLHF demo. Demonstrations are reviews of every mood, with some errors: a part of another
product, a missing letter. Preferences follow gold, with noise. A reward model is trained on text of the supervised model only,
so gold and reward model diverge as the policy moves away from it.

Demonstrations cover all products. Preferences and training prompts leave some products out, to test on them how well learned
preferences generalise.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from surefoot.core.seeding import derived_seed
from surefoot.language.pairs import pair_row, prefers_first

TRAINED = {
    "boot": ("sole", "heel", "lace"),
    "bike": ("wheel", "brake", "chain"),
    "lamp": ("bulb", "shade", "switch"),
    "harp": ("string", "neck", "pedal"),
    "kettle": ("lid", "spout", "handle"),
    "phone": ("screen", "lens", "button"),
}
"""product -> its parts; no part belongs to two products"""
HELD_OUT = {"tent": ("pole", "zip", "flap"), "watch": ("dial", "strap", "crown")}
"""products without preferences and training prompts"""
PRODUCTS = TRAINED | HELD_OUT

CONDITIONS = ("new", "old", "red", "big")
"""the word before the product in a prompt; irrelevant to the review"""

VERBS = ("is", "looks", "feels")
GOOD = ("great", "superb", "solid", "lovely", "fine")
BAD = ("awful", "ugly", "weak", "poor")
PLAIN = ("plain", "round", "grey")
LIKES = ("love", "like")
DISLIKES = ("hate", "dislike")

LONGEST = 48
"""characters of the longest demonstration, and a limit for responses"""
PRAISE, PRAISE_AT_MOST = 0.5, 3
ON_TOPIC, ON_TOPIC_AT_MOST = 0.25, 2
FAULT = -0.5
BEST = PRAISE * PRAISE_AT_MOST + ON_TOPIC * ON_TOPIC_AT_MOST
"""the largest gold"""

_MOODS, _MOOD_WEIGHTS = ("good", "bad", "plain"), (0.65, 0.2, 0.15)
_OFF_TOPIC, _TYPOS = 0.08, 0.05
_PARTS = {part: product for product, parts in PRODUCTS.items() for part in parts}
_PRAISE, _BLAME = frozenset(GOOD + LIKES), frozenset(BAD + DISLIKES)
_FUNCTION_WORDS = frozenset(("i", "it", "the", *VERBS))
_LEXICON = frozenset((*_PRAISE, *_BLAME, *_FUNCTION_WORDS, *PLAIN, *_PARTS, *PRODUCTS))
_PART, _PRODUCT, _ADJECTIVE = "|".join(_PARTS), "|".join(PRODUCTS), "|".join(GOOD + BAD + PLAIN)
_SENTENCE = re.compile(
    f"the ({_PART}|{_PRODUCT}) ({'|'.join(VERBS)}) ({_ADJECTIVE})"
    f"|i ({'|'.join(LIKES + DISLIKES)}) (it|the ({_PART}|{_PRODUCT}))"
)


def prompts(count: int, seed: int = 0, *, held_out: bool = False) -> list[str]:
    """``count`` prompts such as ``"old bike: "``, drawn with replacement; ``held_out``: of the held-out products only."""
    return _prompts(random.Random(derived_seed(seed, "prompts")), count, HELD_OUT if held_out else TRAINED)


def demonstrations(count: int, seed: int = 0) -> list[dict[str, str]]:
    """``count`` rows ``{"prompt", "completion"}`` of all products, for supervised training."""
    draw = random.Random(derived_seed(seed, "demonstrations"))
    return [{"prompt": prompt, "completion": _review(draw, product_of(prompt))} for prompt in _prompts(draw, count, PRODUCTS)]


def label(pairs: Iterable[tuple[str, str, str]], noise: float = 0.5, seed: int = 0) -> list[dict[str, str]]:
    """Rows ``{"prompt", "chosen", "rejected"}`` from pairs (prompt, one review, another).

    The first is chosen with probability σ((gold of the first − gold of the second) / noise), which is the model that a
    Bradley–Terry reward model assumes; with noise 0 the better one always is, and the first of two equal ones.
    Pairs of identical texts are left out.
    """
    different = [pair for pair in pairs if pair[1] != pair[2]]
    whose = [prompt for prompt, _, _ in different]
    first, second = gold(whose, [a for _, a, _ in different]), gold(whose, [b for _, _, b in different])
    draw = random.Random(derived_seed(seed, "labels"))
    rows = []
    for (prompt, a, b), ours, theirs in zip(different, first, second, strict=True):
        chosen, rejected = (b, a) if prefers_first(ours, theirs, noise, draw) is False else (a, b)
        rows.append(pair_row(prompt, chosen, rejected))
    return rows


def gold(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The score of each review, at most ``BEST``: the sum of ``gold_parts``. A reward function for recipes."""
    return [sum(gold_parts(*pair).values()) for pair in zip(prompts, responses, strict=True)]


def gold_parts(prompt: str, response: str) -> dict[str, float]:
    """The parts of gold by name.

    ``praise``      +0.5 for each different word of praise in a well-formed sentence, at most three
    ``on_topic``    +0.25 for each different part of the product in such a sentence, at most two
    ``blame``       −0.5 for each word of blame
    ``off_topic``   −0.5 for each part or name of another product
    ``non_words``   −0.5 for each word, number or sign that is not in the vocabulary
    ``malformed``   −0.5 for each sentence that is not in the grammar or lacks its full stop
    ``repetition``  −0.5 for each repetition of a word other than a function word

    An empty review has 0 for all but ``malformed``.
    """
    product = product_of(prompt)
    words = re.findall(r"[a-z]+|[^a-z\s.]+", response)
    counts = Counter(word for word in words if word not in _FUNCTION_WORDS)
    *sentences, rest = response.split(".")
    formed = [sentence for sentence in sentences if _SENTENCE.fullmatch(sentence.strip())]
    broken = len(sentences) - len(formed) + bool(rest.strip() or not sentences)
    used = set(" ".join(formed).split())
    praise = sum(word in _PRAISE for word in used)
    on_topic = sum(_PARTS.get(word) == product for word in used)
    foreign = sum(n for word, n in counts.items() if (_PARTS.get(word) or word) in PRODUCTS.keys() - {product})
    return {
        "praise": PRAISE * min(praise, PRAISE_AT_MOST),
        "on_topic": ON_TOPIC * min(on_topic, ON_TOPIC_AT_MOST),
        "blame": FAULT * sum(n for word, n in counts.items() if word in _BLAME),
        "off_topic": FAULT * foreign,
        "non_words": FAULT * sum(word not in _LEXICON for word in words),
        "malformed": FAULT * broken,
        "repetition": FAULT * sum(n - 1 for n in counts.values()),
    }


def product_of(prompt: str) -> str:
    """``"old bike: "`` -> ``"bike"``; from any text that names one product.   ValueError if it names none or several."""
    words = set(re.findall("[a-z]+", prompt.lower()))
    named = [product for product in PRODUCTS if product in words]
    if len(named) != 1:
        raise ValueError(f"prompt {prompt!r}: must name one product of {', '.join(PRODUCTS)}")
    return named[0]


def _prompts(draw: random.Random, count: int, products: Iterable[str]) -> list[str]:
    known = tuple(products)
    return [f"{draw.choice(CONDITIONS)} {draw.choice(known)}: " for _ in range(count)]


def _review(draw: random.Random, product: str) -> str:
    """One to three sentences without repeated content words; one review in twenty lacks a letter."""
    used: set[str] = set()
    review = _sentence(draw, product, used)
    for _ in range(draw.choices((0, 1, 2), (0.1, 0.5, 0.4))[0]):
        longer = f"{review} {_sentence(draw, product, used)}"
        if len(longer) > LONGEST:
            break
        review = longer
    if draw.random() < _TYPOS:
        lost = draw.randrange(len(review))
        review = review[:lost] + review[lost + 1 :]
    return review


def _sentence(draw: random.Random, product: str, used: set[str]) -> str:
    mood = draw.choices(_MOODS, _MOOD_WEIGHTS)[0]
    feelings = {"good": LIKES, "bad": DISLIKES, "plain": ()}[mood]
    if draw.random() < 0.35 and not used.issuperset(feelings):
        feeling = _fresh(draw, feelings, used)
        return f"i {feeling} {'it' if draw.random() < 0.5 else 'the ' + _part(draw, product, used)}."
    adjective = _fresh(draw, {"good": GOOD, "bad": BAD, "plain": PLAIN}[mood], used)
    return f"the {_part(draw, product, used)} {draw.choice(VERBS)} {adjective}."


def _part(draw: random.Random, product: str, used: set[str]) -> str:
    strays = draw.random() < _OFF_TOPIC
    about = draw.choice([other for other in PRODUCTS if other != product]) if strays else product
    return _fresh(draw, PRODUCTS[about], used)


def _fresh(draw: random.Random, words: Sequence[str], used: set[str]) -> str:
    """A word that this review has not used yet."""
    word = draw.choice([word for word in words if word not in used])
    used.add(word)
    return word
