"""The best of n responses to each prompt, as rows to learn from: rejection sampling, and one part of iterated rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, did_you_mean
from surefoot.files import parse_value
from surefoot.language.analysis.metrics import best_of_n_kl
from surefoot.language.data import datasets as data
from surefoot.language.data.pairs import format_answer, pair_row
from surefoot.language.data.rows import Row, read_rows
from surefoot.language.data.tokens import columns_of
from surefoot.language.models.language_model import LanguageModel
from surefoot.language.models.loading import context_length
from surefoot.language.rewards.terms import FunctionReward, Prompt, Reward, WeightedSum, parts_of, reward_of
from surefoot.language.sampling.sampler import cut_at_stop, sample
from surefoot.recipes.language import RewardTerm, term_error

NEVER = 2**53
"""more tokens than any prompt has"""


@dataclass(frozen=True)
class Drawing:
    """How responses are drawn, and which of them may be chosen.

    samples      n, responses to each prompt
    batch        responses at a time, whole prompts: bounds memory, and changes what is drawn by rounding alone
    at_least     the best of a prompt is taken only if it earns so much; none: always
    keep_cut     a response that the length limit cut may be chosen too: what learns from it learns to stop there
    """

    samples: int
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 1
    stop: tuple[str, ...] = ()
    batch: int = 256
    at_least: float | None = None
    keep_cut: bool = False


@dataclass(frozen=True)
class Best:
    """What was chosen, and what that is worth."""

    rows: list[dict[str, Any]]
    prompts: int
    samples: int
    mean_reward: float | None
    """of all responses that have a score"""
    best_reward: float | None
    """mean over the rows"""
    cut: float
    """share of the responses that the length limit cut"""
    without_score: float
    """share of the responses that the reward gave no number for"""

    def to_json(self) -> dict[str, Any]:
        """All but the rows."""
        told = {name: value for name, value in vars(self).items() if name != "rows"}
        return {**told, "rows": len(self.rows), "kl_best_of_n": best_of_n_kl(self.samples)}

    def lines(self) -> list[str]:
        """For a person."""
        mean, best = ("–" if value is None else f"{value:.4f}" for value in (self.mean_reward, self.best_reward))
        # Rows for some prompts only are those of a policy that draws until a response passes, which no n bounds.
        further = "; rows left out go further" if len(self.rows) < self.prompts else ""
        told = [
            f"{len(self.rows)} rows from {self.prompts} prompts x {self.samples} samples",
            f"mean reward: {mean} of all, {best} of the best",
            f"KL of the best of {self.samples} to the model: at most {best_of_n_kl(self.samples):.3f} nats{further}",
        ]
        if self.cut:
            told.append(f"cut by the length limit: {self.cut:.1%} of the responses")
        if self.without_score:
            told.append(f"without a score: {self.without_score:.1%} of the responses")
        return told


def reward_from(
    texts: Sequence[str], device: str = "cpu", *, flag: str = "--reward", deadline: float = 60.0, tolerated: float = 0.1
) -> Reward:
    """What ``--reward``, or another ``flag``, names: a term of a recipe's ``reward.terms``, or several, whose sum it is.

    texts   each a folder or run of a reward model, ``module:function``, ``file.py:function``, an address, or a term as a
            recipe has it: ``{ function = "surefoot.verifiers:numeric", arguments = { after = "####" }, weight = 2.0 }``

    Raises SurefootError for what is no such term, or can't be loaded.
    """
    given: dict[str, Any] = {"deadline": deadline, "tolerated": tolerated, "device": device}
    rewards = [reward_of(term_from(text, flag), flag, named=False, **given) for text in texts]
    return rewards[0] if len(rewards) == 1 else WeightedSum(rewards)


def term_from(text: str, flag: str = "--reward") -> RewardTerm:
    """One ``--reward`` as a term: a table as it stands, else a function where there is a colon and no such folder."""
    given = parse_value(text)
    if not isinstance(given, dict):
        if text.startswith(("http://", "https://")):
            return RewardTerm(url=text)
        return RewardTerm(function=text) if ":" in text and not Path(text).expanduser().exists() else RewardTerm(model=text)
    known = RewardTerm.model_fields
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are: {', '.join(known)}"
            raise SurefootError(f"{flag} {text}: a term has no {name!r}{hint}")
    try:
        term = RewardTerm(**given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise SurefootError(f"{flag} {text}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if complaint := term_error(term):
        raise SurefootError(f"{flag} {text}{complaint}")
    return term


@torch.no_grad()
def best_of_n(model: LanguageModel, path: str | Path, reward: Reward, drawing: Drawing, *, worst: bool = False) -> Best:
    """Draw n responses to each prompt of a file and choose the one that earns most; of equal ones the first.

    worst   rows are pairs, the best beside the one that earns least, as ``kind = "reward"`` reads them; a prompt whose
            responses all earn the same gives none. Otherwise they are demonstrations, as ``kind = "sft"`` reads them

    Raises SurefootError for rows that are no prompts or don't fit into the model's context, and when nothing is left to choose.
    """
    prompts = _fitting(read_rows(path), model, drawing.max_tokens)
    for part in parts_of(reward):
        if isinstance(part, FunctionReward):
            part.check_columns(prompts.columns)
    n, count = drawing.samples, len(prompts.ids)
    rows: list[dict[str, Any]] = []
    scored: list[Tensor] = []
    ends = silent = 0
    size = max(1, drawing.batch // n)
    for start in range(0, count, size):
        these = range(start, min(start + size, count))
        asked = data.repeat_prompts(prompts, these, n)
        seeds = [derived_seed(drawing.seed, "best-of-n", row * n + number) for row in these for number in range(n)]
        drawn = sample(
            model.model,
            asked.ids[::n],
            samples=n,
            max_tokens=drawing.max_tokens,
            temperature=drawing.temperature,
            eos_ids=model.tokens.eos_ids,
            pad_id=model.tokens.pad_id,
            seeds=seeds,
            stop=drawing.stop,
            decode=model.tokens.decode,
        )
        written = [cut_at_stop(model.tokens.decode(ids), drawing.stop) for ids in drawn.responses()]
        scores = reward(asked.prompts, written, asked.columns)
        ended = drawn.ended.cpu()
        eligible = scores.valid & (ended | drawing.keep_cut)
        ends, silent = ends + int(ended.sum()), silent + int((~scores.valid).sum())
        scored.append(scores.total[scores.valid])
        for at, row in enumerate(these):
            group = slice(at * n, (at + 1) * n)
            row_made = chosen_row(
                prompts.prompts[row],
                written[group],
                scores.total[group].tolist(),
                eligible[group].tolist(),
                drawing.at_least,
                worst,
            )
            rows += [] if row_made is None else [row_made]
    everything = torch.cat(scored).double()
    found = Best(
        rows,
        count,
        n,
        mean_reward=float(everything.mean()) if len(everything) else None,
        best_reward=sum(row["reward"] for row in rows) / len(rows) if rows else None,
        cut=1 - ends / (count * n),
        without_score=silent / (count * n),
    )
    if not rows:
        raise SurefootError(f"{path}: no prompt has a response to choose ({'; '.join(_why(found, drawing, worst))})")
    return found


def chosen_row(
    prompt: Prompt,
    responses: Sequence[str],
    rewards: Sequence[float],
    eligible: Sequence[bool],
    least: float | None,
    worst: bool,
) -> dict[str, Any] | None:
    """The row that a prompt's n responses make; None where there is nothing to choose. The first of equal ones is taken."""
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


def _fitting(rows: Sequence[Row], model: LanguageModel, max_tokens: int) -> data.Prompts:
    """The prompts of a file, each of which leaves room for a response."""
    prompts, context = data.prompts(rows, model.tokens, NEVER), context_length(model.model)
    for row, ids in zip(rows, prompts.ids, strict=True):
        if context is not None and len(ids) + max_tokens > context:
            raise SurefootError(
                f"{row.where}: its prompt has {len(ids)} tokens, and with --max-tokens {max_tokens} they don't fit into the "
                f"model's context of {context}; shorten one of them"
            )
    return prompts


def _why(found: Best, drawing: Drawing, worst: bool) -> list[str]:
    """What may be the cause where no row was made, with the remedy."""
    reasons = []
    if found.cut and not drawing.keep_cut:
        reasons.append(f"{found.cut:.0%} of the responses were cut: raise --max-tokens, or add --keep-cut")
    if drawing.at_least is not None:
        reasons.append(f"none may earn less than --at-least {drawing.at_least:g}: lower it, or take more --samples")
    if worst:
        reasons.append("a pair needs two responses whose rewards differ: take more --samples")
    if found.without_score:
        reasons.append(f"the reward gave no number for {found.without_score:.0%}: mend it")
    return reasons
