"""Best of n: choose the best of n responses to each prompt, as rows to train on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.language.data import datasets as data
from surefoot.language.data.chat import columns_of
from surefoot.language.data.sources import read_rows
from surefoot.language.language_model import LanguageModel
from surefoot.language.metrics import best_of_n_kl
from surefoot.language.models.loading import context_length
from surefoot.language.pairs import format_answer, pair_row
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.scores import Prompt, Reward, Scores
from surefoot.language.rewards.terms import FunctionReward, check_special_texts, parts_of
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import Request, Samples
from surefoot.language.sampling.sampler import sample
from surefoot.ranks.collectives import in_float64


@dataclass(frozen=True)
class BestOfSettings:
    """How responses are sampled, and which of them may be chosen.

    samples      n, responses to each prompt
    batch        responses at a time, whole prompts: limits memory, and changes samples by rounding only
    at_least     smallest reward of a chosen response; none: any
    keep_cut     a truncated response may be chosen too: a model trained on it learns to stop there
    special_tokens   keep special tokens in the text, for the reward and in the rows
    """

    samples: int
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 1
    stop: tuple[str, ...] = ()
    batch: int = 256
    at_least: float | None = None
    keep_cut: bool = False
    special_tokens: bool = False


@dataclass(frozen=True)
class BestOfResult:
    """The chosen rows and their rewards."""

    rows: list[dict[str, Any]]
    prompts: int
    samples: int
    mean_reward: float | None
    """of all responses with a score"""
    best_reward: float | None
    """mean over the rows"""
    cut: float
    """share of truncated responses"""
    without_score: float
    """share of responses without a score"""

    def to_json(self) -> dict[str, Any]:
        """All but the rows."""
        numbers = {name: value for name, value in vars(self).items() if name != "rows"}
        return {**numbers, "rows": len(self.rows), "kl_best_of_n": best_of_n_kl(self.samples)}

    def lines(self) -> list[str]:
        """Lines to print."""
        mean, best = ("–" if value is None else f"{value:.4f}" for value in (self.mean_reward, self.best_reward))
        # Rows for only some prompts are those of a policy that samples until a response passes, whose KL no n bounds.
        further = "; leaving rows out adds more" if len(self.rows) < self.prompts else ""
        lines = [
            f"{len(self.rows)} rows from {self.prompts} prompts x {self.samples} samples",
            f"mean reward: {mean} of all, {best} of the best",
            f"KL of the best of {self.samples} to the model: at most {best_of_n_kl(self.samples):.3f} nats{further}",
        ]
        if self.cut:
            lines.append(f"truncated: {self.cut:.1%} of the responses")
        if self.without_score:
            lines.append(f"without a score: {self.without_score:.1%} of the responses")
        return lines


@torch.no_grad()
def best_of_n(
    model: LanguageModel, path: str | Path, reward: Reward, settings: BestOfSettings, *, worst: bool = False
) -> BestOfResult:
    """Draw n responses to each prompt of a file and choose the one with the highest reward, the first of equal ones.

    worst   rows are pairs of the best and the worst response, for ``kind = "reward"``; a prompt whose responses all have the
            same reward has none. Otherwise rows are demonstrations, for ``kind = "sft"``

    Raises SurefootError for rows that are no prompts or don't fit into the model's context, and when no row is left.
    """
    prompts = prompts_that_fit(path, model, settings.max_tokens)
    if not settings.special_tokens:
        check_special_texts(reward, model.tokens, "add --special-tokens")
    for part in parts_of(reward):
        if isinstance(part, FunctionReward):
            part.check_rows(prompts.columns)
        elif isinstance(part, ModelReward):
            part.check_prompts(prompts.prompts)
    n, count = settings.samples, len(prompts.ids)
    rows: list[dict[str, Any]] = []
    rewards = []
    ended = unscored = 0
    for batch, texts, samples, scores in _scored_batches(model, prompts, reward, settings):
        whole = samples.ended.cpu()
        eligible = scores.valid & (whole | settings.keep_cut)
        ended, unscored = ended + int(whole.sum()), unscored + int((~scores.valid).sum())
        rewards.append(scores.total[scores.valid])
        for at, row in enumerate(batch):
            group = slice(at * n, (at + 1) * n)
            of_group = texts[group], scores.total[group].tolist(), eligible[group].tolist()
            made = chosen_row(prompts.prompts[row], *of_group, settings.at_least, worst)
            rows += [] if made is None else [made]
    everything = in_float64(torch.cat(rewards))
    result = BestOfResult(
        rows,
        count,
        n,
        mean_reward=float(everything.mean()) if len(everything) else None,
        best_reward=sum(row["reward"] for row in rows) / len(rows) if rows else None,
        cut=1 - ended / (count * n),
        without_score=unscored / (count * n),
    )
    if not rows:
        raise SurefootError(f"{path}: no prompt has a response to choose ({'; '.join(_reasons(result, settings, worst))})")
    return result


def _scored_batches(
    model: LanguageModel, prompts: data.Prompts, reward: Reward, settings: BestOfSettings
) -> Iterator[tuple[range, list[str], Samples, Scores]]:
    """Some prompts at a time: their rows, and the texts, samples and scores of n responses to each."""
    n, count = settings.samples, len(prompts.ids)
    size, ends = max(1, settings.batch // n), Ends(model.tokens, settings.stop)
    for start in range(0, count, size):
        batch = range(start, min(start + size, count))
        repeated = data.repeat_prompts(prompts, batch, n)
        seeds = [derived_seed(settings.seed, "best-of-n", row * n + number) for row in batch for number in range(n)]
        options = {"samples": n, "temperature": settings.temperature, **ends.options}
        samples = sample(model.model, Request(repeated.ids[::n], seeds, settings.max_tokens, **options))
        texts = [ends.text(ids, settings.special_tokens) for ids in samples.responses()]
        yield batch, texts, samples, reward(repeated.prompts, texts, repeated.columns)


def chosen_row(
    prompt: Prompt,
    responses: Sequence[str],
    rewards: Sequence[float],
    eligible: Sequence[bool],
    least: float | None,
    worst: bool,
) -> dict[str, Any] | None:
    """The row of a prompt's n responses; None if there is nothing to choose. Of equal ones the first is chosen."""
    places = [place for place, may in enumerate(eligible) if may]
    if not places:
        return None
    best, last = max(places, key=rewards.__getitem__), min(places, key=rewards.__getitem__)
    if (least is not None and rewards[best] < least) or (worst and rewards[best] == rewards[last]):
        return None

    if not worst:
        row = {"prompt": prompt, "completion": format_answer(prompt, responses[best]), "reward": rewards[best]}
        return row | columns_of(prompt)
    return pair_row(prompt, responses[best], responses[last]) | {"reward": rewards[best], "reward_rejected": rewards[last]}


def prompts_that_fit(path: str | Path, model: LanguageModel, max_tokens: int) -> data.Prompts:
    """The prompts of a file. Raises SurefootError if one doesn't fit into the model's context with its response."""
    rows = read_rows(path)
    prompts, context = data.prompts(rows, model.tokens, data.NO_LIMIT), context_length(model.model)
    for row, ids in zip(rows, prompts.ids, strict=True):
        if context is not None and len(ids) + max_tokens > context:
            raise SurefootError(
                f"{row.where}: its prompt has {len(ids)} tokens, which with --max-tokens {max_tokens} is more than the model's "
                f"context of {context}; shorten one of them"
            )
    return prompts


def _reasons(result: BestOfResult, settings: BestOfSettings, worst: bool) -> list[str]:
    """Why there may be no row, with remedies."""
    reasons = []
    if result.cut and not settings.keep_cut:
        reasons.append(f"{result.cut:.0%} of the responses were truncated: raise --max-tokens, or add --keep-cut")
    if settings.at_least is not None:
        reasons.append(f"no reward reaches --at-least {settings.at_least:g}: lower it, or draw more --samples")
    if worst:
        reasons.append("a pair needs two responses whose rewards differ: draw more --samples")
    if result.without_score:
        reasons.append(f"{result.without_score:.0%} of the responses have no score: fix the reward")
    return reasons
