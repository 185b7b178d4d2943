"""Several attempts at every held-out problem: greedy and sampled accuracy, pass@k, and a vote."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.language.analysis.metrics import pass_at_k
from surefoot.language.data.datasets import repeat_prompts
from surefoot.language.online.answers import Answers
from surefoot.language.online.world import LanguageWorld
from surefoot.verifiers.answers import following


@dataclass(frozen=True)
class Attempts:
    """How a run is to be judged by several responses to each problem.

    samples    n, responses to each problem besides the greedy one
    ks         of pass@k; none: 1, 2, 4, … and n
    threshold  reward from which on a response is right; none: the reward must be 0 or 1, and 1 is right
    after      a response's answer is what follows the last of this text; "": all of it. The vote alone reads it

    Raises SurefootError for numbers that can't be.
    """

    samples: int
    ks: tuple[int, ...] = ()
    threshold: float | None = None
    after: str = ""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise SurefootError(f"samples={self.samples}: must be at least 1")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise SurefootError(f"threshold={self.threshold}: must be a finite number")
        for k in self.ks:
            if not 1 <= k <= self.samples:
                raise SurefootError(f"k={k}: pass@k needs 1 <= k <= samples, which is {self.samples}; raise samples or lower k")

    @property
    def all_ks(self) -> list[int]:
        """Those that were asked for, else the powers of 2 up to n, and n; in order, each once."""
        powers = [2**power for power in range(self.samples.bit_length())]
        return sorted({*(self.ks or (*powers, self.samples))})


def ks_from_text(text: str) -> tuple[int, ...]:
    """``1,4,8`` as numbers; SurefootError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SurefootError(f"--k {text}: must be whole numbers with commas between them, such as 1,4,8") from None


@torch.no_grad()
def attempted(world: LanguageWorld, attempts: Attempts) -> dict[str, Any]:
    """How often the policy, as it is now, solves the held-out problems: means over problems.

    ``greedy_accuracy`` of the likeliest responses; ``sampled_accuracy`` of all samples; ``pass_at`` {k: pass@k};
    ``majority_accuracy``, how often the answer is right that most samples give; ``without_score``, the share of responses that
    the reward gave no number for, which are wrong. A response that was cut by the length limit is wrong, and has no vote,
    where the recipe says ``reward.missing_eos = "penalty"``.

    The same prompts and random numbers each time, so two policies can be compared.
    Raises SurefootError for a reward that is not 0 or 1, where no threshold was given.
    """
    assert world.held_out is not None
    n, recipe = attempts.samples, world.recipe
    count = min(len(world.held_out.ids), recipe.evaluation.rows)
    greedy, right, silent, votes = [], [], 0, 0.0
    size = max(1, recipe.responses // n)  # as many responses at a time as training samples
    for start in range(0, count, size):
        rows = range(start, min(start + size, count))
        own = [
            derived_seed(recipe.evaluation.seed, "greedy", row) for row in rows
        ]  # of the row, however many are read at a time
        first = world.collector.answer(repeat_prompts(world.held_out, rows), own, greedy=True)
        seeds = [derived_seed(recipe.evaluation.seed, "attempt", row * n + sample) for row in rows for sample in range(n)]
        drawn = world.collector.answer(repeat_prompts(world.held_out, rows, n), seeds, n)
        solved, missing = _right(world, first, attempts)
        greedy.append(solved)
        solved, more = _right(world, drawn, attempts)
        right.append(solved.view(-1, n))
        silent += missing + more
        counted = _counted(world, drawn).tolist()
        answers = [
            following(text, attempts.after) if kept else None for text, kept in zip(drawn.responses, counted, strict=True)
        ]
        for row, solutions in enumerate(right[-1].tolist()):
            chosen = majority(answers[row * n : (row + 1) * n])
            votes += chosen is not None and solutions[chosen]
    solutions_of = torch.cat(right).sum(-1)
    return {
        "greedy_accuracy": float(torch.cat(greedy).double().mean()),
        "sampled_accuracy": float(torch.cat(right).double().mean()),
        "pass_at": {str(k): float(pass_at_k(solutions_of, n, k).mean()) for k in attempts.all_ks},
        "majority_accuracy": votes / count,
        "without_score": silent / (count * (n + 1)),
    }


def majority(answers: Sequence[str | None]) -> int | None:
    """Index of the answer that most give, at its first place; None where there is no answer.

    Answers are one where their texts are, white space aside. Of answers with as many votes the one that came first wins.
    """
    texts = [None if answer is None else " ".join(answer.split()) for answer in answers]
    votes = Counter(text for text in texts if text is not None)  # in the order in which they came, which most_common keeps
    return texts.index(votes.most_common(1)[0][0]) if votes else None


def lines(start: dict[str, Any], trained: dict[str, Any], samples: int) -> list[str]:
    """For a person: the start beside the trained model."""
    both = [(name.replace("_", " "), start[name], trained[name]) for name in ("greedy_accuracy", "sampled_accuracy")]
    both += [(f"pass@{k}", start["pass_at"][k], trained["pass_at"][k]) for k in start["pass_at"]]
    both.append((f"majority of {samples}", start["majority_accuracy"], trained["majority_accuracy"]))
    if start["without_score"] or trained["without_score"]:
        both.append(("without score", start["without_score"], trained["without_score"]))
    return [f"{name:24}{before:>12.3f}{after:>12.3f}" for name, before, after in both]


def _right(world: LanguageWorld, answers: Answers, attempts: Attempts) -> tuple[Tensor, int]:
    """Which responses are right, and how many have no score.   -> [N] bool"""
    scores = answers.scores(world.reward)
    total, least = scores.total, attempts.threshold
    if least is None:
        other = total[scores.valid & (total != 0) & (total != 1)]
        if len(other):
            raise SurefootError(
                f"--samples {attempts.samples}: the reward gave {float(other[0]):g}, and a verifier gives 0 or 1; say with "
                "--threshold T from which reward on a response is right"
            )
        least = 1.0
    right = (total >= least) & scores.valid & _counted(world, answers)
    return right.cpu(), int((~scores.valid).sum())


def _counted(world: LanguageWorld, answers: Answers) -> Tensor:
    """False for what was cut, where the recipe pays a penalty for that in place of the score.   -> [N] bool"""
    ended = answers.samples.ended
    return ended if world.recipe.reward.missing_eos == "penalty" else torch.ones_like(ended)
