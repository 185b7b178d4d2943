"""Sampled responses with their text and scores, and groups of responses to one prompt.

A group has a learning signal if its scores differ; DAPO's dynamic sampling fills a batch with such groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.core.rollout import map_tensors
from surefoot.functional import overlong_penalty, place_scores
from surefoot.language.data.datasets import Prompts, repeat_prompts
from surefoot.language.data.steps import token_texts
from surefoot.language.data.tokens import prompt_text
from surefoot.language.online.turns import Conversation, add_turn_rewards, last_turn
from surefoot.language.rewards.scores import Reward, Scores, scatter_scores, truncate_texts
from surefoot.language.rewards.terms import is_dense
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import Samples
from surefoot.ranks.collectives import all_sum
from surefoot.recipes.language import LanguageRecipe


class Responses:
    """Samples with their text, one for each prompt.

    conversations  the conversations that the samples are, with several turns: rewards then score the last turn, as a response
                   to everything before it, and the rewards of all turns are added
    ends           what ends a response, which its text does not contain
    special        whether the text contains special tokens

    ``ids`` and ``texts`` are what rewards score: the response, or the last turn.
    """

    def __init__(
        self,
        samples: Samples,
        prompts: Prompts,
        ends: Ends,
        conversations: Sequence[Conversation] | None = None,
        special: bool = False,
    ) -> None:
        self.samples, self.prompts, self.ends, self.conversations = samples, prompts, ends, conversations
        self.special = special
        if conversations is None:
            self.ids = samples.responses()
        else:
            self.prompts = replace(prompts, prompts=[one.history for one in conversations])
            self.ids = [[one.ids[place] for place in one.last] for one in conversations]
        self.texts = [ends.text(ids, special) for ids in self.ids]

    def rows(self, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """Prompt and response of each for display, with further columns."""
        if self.conversations is not None:
            both = [(prompt_text(one.start), one.transcript) for one in self.conversations]
        else:
            both = [(prompt_text(prompt), text) for prompt, text in zip(self.prompts.prompts, self.texts, strict=True)]
        return [
            {"prompt": prompt, "response": response, **{name: column[row] for name, column in columns.items()}}
            for row, (prompt, response) in enumerate(both)
        ]

    def score_with(self, reward: Reward, turn_rewards: bool = True) -> Scores:
        """Call the reward and return its scores, truncated or not, on the device of the samples.

        reward         of a Python function: ``FunctionReward`` in ``rewards/terms.py``
        turn_rewards   add the rewards of environments

        A conversation whose environment failed is not scored, because its end is unknown; nor is a missing response.
        """
        tokens = None
        if is_dense(reward):
            both = zip(self.ids, self.texts, strict=True)
            decode = partial(self.ends.tokens.decode, special=self.special)
            tokens = [truncate_texts(len(text), token_texts(decode, ids)) for ids, text in both]
        everyone = range(len(self.texts))
        if self.conversations is None:
            valid = [row for row, reason in enumerate(self.samples.finish_reasons) if reason != "error"]
        else:
            valid = [row for row in everyone if self.conversations[row].failure is None]
        rows = valid or everyone  # the parts of a reward are known from any scores
        some, tokens = repeat_prompts(self.prompts, rows), None if tokens is None else [tokens[row] for row in rows]
        scores = reward(some.prompts, [self.texts[row] for row in rows], some.columns, tokens)
        if len(valid) < len(everyone):
            scores = scatter_scores(scores, valid, len(everyone)) if valid else map_tensors(torch.zeros_like, scores)
        if self.conversations is not None and turn_rewards:
            scores = add_turn_rewards(scores, self.conversations, self.samples.mask.shape)
        on_device: Scores = map_tensors(lambda x: x.to(self.samples.mask.device), scores)
        return on_device


@dataclass(frozen=True)
class ScoredResponses:
    """What an evaluation reports of N responses.   tensors [N], on the CPU"""

    total: Tensor
    """final rewards"""
    valid: Tensor
    """False without a score"""
    kl: Tensor | None
    """None without a reference"""
    lengths: Tensor
    ended: Tensor
    gold: tuple[Tensor, Tensor] | None
    """scores of gold, and which are valid"""
    ids: list[list[int]]
    turns: list[int] | None
    """the model's turns in each conversation; None for single responses"""
    rows: list[dict[str, Any]]
    """of ``Responses.rows``"""


def concat_scored(parts: Sequence[ScoredResponses]) -> ScoredResponses:
    """The responses of several ranks."""

    def joined(values: Sequence[Any]) -> Any:
        if values[0] is None:
            return None
        if isinstance(values[0], tuple):
            return tuple(map(joined, zip(*values, strict=True)))
        return torch.cat(list(values)) if isinstance(values[0], Tensor) else [one for value in values for one in value]

    return ScoredResponses(**{each.name: joined([getattr(part, each.name) for part in parts]) for each in fields(parts[0])})


def final_rewards(scores: Scores, samples: Samples, recipe: LanguageRecipe) -> Tensor:
    """Scores after ``reward.missing_eos`` for truncated responses and the length penalty. Earlier turns keep their rewards.
    [N]
    """
    treatment, value = recipe.reward.missing_eos, recipe.reward.missing_eos_value
    total = scores.total
    if treatment == "penalty":
        total = torch.where(samples.ended, total, earlier_turns(scores, samples.mask).sum(-1) + value)
    if treatment == "subtract":
        total = torch.where(samples.ended, total, total - abs(value))
    return total if recipe.reward.overlong is None else total + length_penalty(samples, recipe)


def earlier_turns(scores: Scores, mask: Tensor) -> Tensor:
    """The rewards of turns before the last one, token by token; 0 in a response of one turn.   [N, T]"""
    if scores.dense is None:
        return mask.new_zeros(mask.shape, dtype=torch.float32)
    return scores.dense.masked_fill(last_turn(mask), 0.0)


def token_rewards(scores: Scores, total: Tensor, samples: Samples, recipe: LanguageRecipe) -> Tensor:
    """Final rewards token by token: those of steps, tokens and turns stay in place, the rest is on the last token.   -> [N, T]

    total  [N] of ``final_rewards``. A penalty for a missing EOS replaces all rewards of the last turn.
    """
    if scores.dense is None:
        return place_scores(total, samples.mask)
    replaced = ~samples.ended & (recipe.reward.missing_eos == "penalty")
    earlier = earlier_turns(scores, samples.mask)
    stays = torch.where(replaced.unsqueeze(-1), earlier, scores.dense)
    return stays + place_scores(total - torch.where(replaced, earlier.sum(-1), scores.total), samples.mask)


def length_penalty(samples: Samples, recipe: LanguageRecipe) -> Tensor:
    """The penalty of ``reward.overlong``: 0 for responses that are short enough, −1 at the limit.   [N]"""
    longest, share = recipe.max_response_tokens, recipe.reward.overlong or 0.0
    return overlong_penalty(samples.lengths.to(samples.log_probs.dtype), longest, share * longest)


def with_signal(total: Tensor, valid: Tensor, samples: int) -> Tensor:
    """True for a prompt with at least two responses whose scores differ.   [N], [N] -> [N / samples]"""
    total, valid = total.view(-1, samples), valid.view(-1, samples)
    lowest = total.masked_fill(~valid, torch.inf).amin(-1)
    return total.masked_fill(~valid, -torch.inf).amax(-1) > lowest


def gather_signal(mine: Tensor, places: Sequence[int], count: int) -> list[bool]:
    """The signal of a round's prompts on all ranks, by their places in it.   [prompts of this rank]"""
    signal = torch.zeros(count, device=mine.device)
    signal[list(places)] = mine.to(signal.dtype)
    return [bool(one) for one in all_sum(signal).tolist()]


def choose_groups(signal: Sequence[bool], wanted: int) -> list[int]:
    """The sampled groups that make the batch, in order: the first ``wanted`` with signal, filled up with some without."""
    first = sorted(range(len(signal)), key=lambda place: (not signal[place], place))
    return sorted(first[:wanted])


def rows_of_batch(
    signal: Sequence[bool], places: Sequence[int], wanted: int, share: int, samples: int
) -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch among all that it sampled, and which of them are trained on.   [rows], [rows] bool

    signal   of every sampled group, over all ranks
    places   of the groups of this rank among them
    wanted   groups of the batch, over all ranks: the same ones as in one process
    share    a rank with fewer of these keeps others, untrained, so that it has rows for every minibatch
    samples  rows of a group
    """
    chosen = set(choose_groups(signal, wanted))
    mine = [number for number, place in enumerate(places) if place in chosen]
    others = [number for number, place in enumerate(places) if place not in chosen]
    groups = sorted(mine + others[: max(0, share - len(mine))])
    rows = torch.tensor(groups).unsqueeze(-1) * samples + torch.arange(samples)
    return rows.flatten(), torch.tensor([places[number] in chosen for number in groups]).repeat_interleave(samples)


def concat_prompts(parts: Sequence[Prompts]) -> Prompts:
    """The prompts of several rounds."""
    columns = {name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns}
    prompts = [prompt for part in parts for prompt in part.prompts]
    return replace(parts[0], prompts=prompts, ids=[ids for part in parts for ids in part.ids], columns=columns)
