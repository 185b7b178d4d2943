"""How often responses are right: of a model before training, and of a run by pass@k and a majority vote."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.language.data import datasets as data
from surefoot.language.data.sources import open_rows
from surefoot.language.language_model import LanguageModel
from surefoot.language.metrics import pass_at_k
from surefoot.language.online.responses import Responses, with_signal
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.scores import Reward, Scores, mean_of
from surefoot.language.rewards.terms import check_special_texts
from surefoot.ranks.collectives import in_float64
from surefoot.verifiers.answers import following

RARE = 0.02
"""sampled accuracy below which almost no response has a learning signal"""


@dataclass(frozen=True)
class Accuracy:
    """A model's accuracy on some prompts, by a reward from 0 to 1. Responses without a score are left out. Truncated ones are
    wrong, as in training with a penalty for them, unless ``keep_cut``.
    """

    prompts: int
    samples: int
    """responses to each prompt"""
    greedy: float
    """mean reward of greedy responses"""
    sampled: float
    """mean reward of the samples: where training starts"""
    mixed: float
    """share of the prompts whose samples differ in reward, 0 if truncated: others have no signal for a group baseline"""
    cut: float
    """share of the samples that were truncated at ``max_tokens``"""
    max_tokens: int
    keep_cut: bool
    """whether these keep their reward"""

    def lines(self) -> list[str]:
        """Lines to print, with what it means for training."""
        lines = [
            f"greedy {self.greedy:.3f}, sampled {self.sampled:.3f} ({self.samples} samples to each of {self.prompts} prompts)",
            f"samples of one prompt differ in reward at {self.mixed:.0%} of the prompts",
        ]
        if self.cut:
            how = "scored like the others" if self.keep_cut else "wrong"
            lines.append(f"{self.cut:.0%} of the samples were truncated at {self.max_tokens} tokens: {how}")
        if self.sampled < RARE and self.cut > 1 - RARE and not self.keep_cut:
            lines.append("almost every sample is truncated: start with SFT on demonstrations, or allow more tokens")
        elif self.sampled < RARE:
            lines.append(
                "almost no sample is right, so there is no signal: start with SFT on demonstrations, or easier problems"
            )
        elif self.sampled > 1 - RARE:
            lines.append("almost every sample is right: use harder problems")
        return lines


@torch.no_grad()
def measure_accuracy(
    model: LanguageModel,
    path: str | Path,
    reward: Reward,
    *,
    prompts: int = 64,
    samples: int = 4,
    max_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 1,
    stop: Sequence[str] = (),
    keep_cut: bool = False,
    special_tokens: bool = False,
) -> Accuracy:
    """Score greedy and sampled responses to the first prompts of a file.

    keep_cut         a truncated response keeps its reward; else it is wrong
    special_tokens   keep special tokens in the text that the reward gets

    Raises SurefootError for rows that are no prompts, and for responses that the reward can't score.
    """
    rows = data.prompts(list(islice(open_rows(path), prompts)), model.tokens, data.NO_LIMIT)
    count = len(rows.prompts)
    if not special_tokens:
        check_special_texts(reward, model.tokens, "add --special-tokens")

    def responses(each: int, greedy: bool) -> tuple[Scores, Tensor, Tensor]:
        """Scores, rewards [N], and which responses ended [N]."""
        options: dict[str, Any] = {"stop": stop, "greedy": greedy, "special_tokens": special_tokens}
        texts, ends = model.generate_ended(
            rows.prompts, samples=each, max_tokens=max_tokens, temperature=temperature, seed=seed, **options
        )
        repeated, ended = data.repeat_prompts(rows, range(count), each), torch.tensor(ends)
        scores = reward(repeated.prompts, texts, repeated.columns)
        return scores, scores.total.where(ended | keep_cut, 0.0), ended

    sampled, rewards, ended = responses(samples, greedy=False)
    greedy, best, _ = responses(1, greedy=True)
    mixed = float(with_signal(rewards, sampled.valid, samples).float().mean())
    means = mean_of(best, greedy.valid) or 0.0, mean_of(rewards, sampled.valid) or 0.0
    return Accuracy(count, samples, *means, mixed, 1 - float(ended.float().mean()), max_tokens, keep_cut)


# ---- several attempts at every held-out problem -------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempts:
    """How a run is evaluated by several responses to each problem.

    samples    n, responses to each problem besides the greedy one
    ks         of pass@k; none: 1, 2, 4, … and n
    threshold  smallest reward of a right response; none: the reward must be 0 or 1, and 1 is right
    after      for the vote, a response's answer is the text after the last occurrence of this one; "": the whole response

    Raises SurefootError for values out of range.
    """

    samples: int
    ks: tuple[int, ...] = ()
    threshold: float | None = None
    after: str = ""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise SurefootError(f"samples={self.samples}: is too few; set at least 1")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise SurefootError(f"threshold={self.threshold}: is not finite; set a finite number")
        for k in self.ks:
            if not 1 <= k <= self.samples:
                raise SurefootError(f"k={k}: pass@k needs 1 <= k <= samples, which is {self.samples}; raise samples or lower k")

    @property
    def all_ks(self) -> list[int]:
        """``ks``, or else the powers of 2 up to n, and n; sorted, each once."""
        powers = [2**power for power in range(self.samples.bit_length())]
        return sorted({*(self.ks or (*powers, self.samples))})


def parse_ks(text: str) -> tuple[int, ...]:
    """``1,4,8`` as numbers; SurefootError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SurefootError(f"--k {text}: is not a list of whole numbers; separate them by commas, such as 1,4,8") from None


@torch.no_grad()
def measure_attempts(world: LanguageWorld, attempts: Attempts) -> dict[str, Any]:
    """How often the current policy solves the held-out problems: means over problems.

    ``greedy_accuracy`` of greedy responses; ``sampled_accuracy`` of all samples; ``pass_at`` {k: pass@k};
    ``majority_accuracy``, how often the most frequent answer is right; ``without_score``, the share of responses without a
    score, which are wrong. With ``reward.missing_eos = "penalty"`` a truncated response is wrong and has no vote.

    Prompts and random numbers are the same each time, so that policies can be compared.
    Raises SurefootError for a reward that is not 0 or 1, without a threshold.
    """
    assert world.held_out is not None
    n, recipe = attempts.samples, world.recipe
    special = recipe.reward.special_tokens or world.tokens.special_in(attempts.after) is not None
    count = min(len(world.held_out.ids), recipe.evaluation.rows)
    greedy, right, unscored, votes = [], [], 0, 0.0
    size = max(1, recipe.responses // n)  # as many responses at a time as training samples
    for start in range(0, count, size):
        rows = range(start, min(start + size, count))
        greedy_seeds = [derived_seed(recipe.evaluation.seed, "greedy", row) for row in rows]  # of the row, for any size
        first = world.collector.respond(data.repeat_prompts(world.held_out, rows), greedy_seeds, greedy=True)
        seeds = [derived_seed(recipe.evaluation.seed, "attempt", row * n + sample) for row in rows for sample in range(n)]
        drawn = world.collector.respond(data.repeat_prompts(world.held_out, rows, n), seeds, n)
        solved, missing = _right(world, first, attempts)
        greedy.append(solved)
        solved, more = _right(world, drawn, attempts)
        right.append(solved.view(-1, n))
        unscored += missing + more
        texts = [drawn.ends.text(ids, special) for ids in drawn.ids]
        votable = zip(texts, _may_be_right(world, drawn).tolist(), strict=True)
        answers = [following(text, attempts.after) if may else None for text, may in votable]
        for row, solutions in enumerate(right[-1].tolist()):
            chosen = majority(answers[row * n : (row + 1) * n])
            votes += chosen is not None and solutions[chosen]
    solutions_of = torch.cat(right).sum(-1)
    return {
        "greedy_accuracy": float(in_float64(torch.cat(greedy)).mean()),
        "sampled_accuracy": float(in_float64(torch.cat(right)).mean()),
        "pass_at": {str(k): float(pass_at_k(solutions_of, n, k).mean()) for k in attempts.all_ks},
        "majority_accuracy": votes / count,
        "without_score": unscored / (count * (n + 1)),
    }


def majority(answers: Sequence[str | None]) -> int | None:
    """Index of the first occurrence of the most frequent answer; None without any answer.

    Answers are equal if their texts are, apart from white space. In a tie the first answer wins.
    """
    texts = [None if answer is None else " ".join(answer.split()) for answer in answers]
    votes = Counter(text for text in texts if text is not None)  # in order of appearance, which most_common keeps
    return texts.index(votes.most_common(1)[0][0]) if votes else None


def attempt_lines(start: dict[str, Any], trained: dict[str, Any], samples: int) -> list[str]:
    """Lines to print: the start beside the trained model."""
    both = [(name.replace("_", " "), start[name], trained[name]) for name in ("greedy_accuracy", "sampled_accuracy")]
    both += [(f"pass@{k}", start["pass_at"][k], trained["pass_at"][k]) for k in start["pass_at"]]
    both.append((f"majority of {samples}", start["majority_accuracy"], trained["majority_accuracy"]))
    if start["without_score"] or trained["without_score"]:
        both.append(("without score", start["without_score"], trained["without_score"]))
    return [f"{name:24}{before:>12.3f}{after:>12.3f}" for name, before, after in both]


def _right(world: LanguageWorld, responses: Responses, attempts: Attempts) -> tuple[Tensor, int]:
    """Which responses are right, and how many have no score.   -> [N] bool"""
    scores = responses.score_with(world.reward)
    total, least = scores.total, attempts.threshold
    if least is None:
        other = total[scores.valid & (total != 0) & (total != 1)]
        if len(other):
            raise SurefootError(
                f"--samples {attempts.samples}: the reward of a response is {float(other[0]):g}, neither 0 nor 1; set "
                "--threshold T, the smallest reward of a right response"
            )
        least = 1.0
    right = (total >= least) & scores.valid & _may_be_right(world, responses)
    return right.cpu(), int((~scores.valid).sum())


def _may_be_right(world: LanguageWorld, responses: Responses) -> Tensor:
    """False for truncated responses if the recipe replaces their score by a penalty.   -> [N] bool"""
    ended = responses.samples.ended
    return ended if world.recipe.reward.missing_eos == "penalty" else torch.ones_like(ended)
