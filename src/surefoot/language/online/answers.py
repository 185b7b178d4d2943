"""Answers with their text, and what they are worth: what collecting, evaluating and judging have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.core.rollout import map_tensors
from surefoot.functional import overlong_penalty, place_scores
from surefoot.language.data.datasets import Prompts, repeat_prompts
from surefoot.language.data.tokens import Tokens, prompt_text
from surefoot.language.online.conversations import Conversation, last_turn, shown, with_earned
from surefoot.language.rewards.scores import scattered
from surefoot.language.rewards.steps import cut_to, pieces
from surefoot.language.rewards.terms import Reward, Scores, is_dense, scored
from surefoot.language.sampling.sampler import Samples, cut_at_stop
from surefoot.recipes.language import LanguageRecipe


class Answers:
    """Samples with their text and scores: what collecting and evaluating both need.

    talks   the conversations that the samples are, where they have several turns: what is scored then is the last turn, as a
            response to all before it, and what all turns earned is added
    stop    strings that end a response: they and what follows them are no part of its text, as wherever text is written
    """

    def __init__(
        self,
        samples: Samples,
        prompts: Prompts,
        tokens: Tokens,
        talks: Sequence[Conversation] | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.samples, self.prompts, self.tokens, self.talks = samples, prompts, tokens, talks
        if talks is None:
            self.scored = samples.responses()
            self.responses = [cut_at_stop(tokens.decode(ids), stop) for ids in self.scored]
        else:
            self.prompts = replace(prompts, prompts=[talk.history for talk in talks])
            self.scored = [[talk.ids[place] for place in talk.last] for talk in talks]
            self.responses = [talk.answer for talk in talks]

    def shown(self) -> list[tuple[str, str]]:
        """Prompt and response of each as a person reads them."""
        if self.talks is not None:
            return shown(self.talks)
        return [(prompt_text(prompt), said) for prompt, said in zip(self.prompts.prompts, self.responses, strict=True)]

    def scores(self, reward: Reward, earned: bool = True) -> Scores:
        """What they earn, whether they ended or not, on the device of the samples; ``earned`` adds what environments paid.
        A conversation whose environment failed is not scored: nobody knows what its end would have been.
        """
        tokens = None
        if is_dense(reward):
            both = zip(self.scored, self.responses, strict=True)
            tokens = [cut_to(len(said), pieces(self.tokens.decode, ids)) for ids, said in both]
        everyone = range(len(self.responses))
        fine = [row for row in everyone if self.talks is None or self.talks[row].failure is None]
        asked = fine or everyone  # what a reward is made of is known from its scores, whosever they are
        some, told = repeat_prompts(self.prompts, asked), None if tokens is None else [tokens[row] for row in asked]
        scores = scored(reward, some.prompts, [self.responses[row] for row in asked], some.columns, told)
        if len(fine) < len(everyone):
            scores = scattered(scores, fine, len(everyone)) if fine else map_tensors(torch.zeros_like, scores)
        if self.talks is not None and earned:
            scores = with_earned(scores, self.talks, self.samples.mask.shape)
        found: Scores = map_tensors(lambda x: x.to(self.samples.mask.device), scores)
        return found


def texts(answers: Answers, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Prompt and response of each answer, with what is known of it."""
    return [
        {"prompt": prompt, "response": response, **{name: column[row] for name, column in columns.items()}}
        for row, (prompt, response) in enumerate(answers.shown())
    ]


def settled(scores: Scores, drawn: Samples, recipe: LanguageRecipe) -> Tensor:
    """Scores after the treatment of responses that were cut, with the soft penalty on length. Earlier turns keep what they
    earned.   [N]
    """
    treatment, value = recipe.reward.missing_eos, recipe.reward.missing_eos_value
    total = scores.total
    if treatment == "penalty":
        total = torch.where(drawn.ended, total, earlier(scores, drawn.mask).sum(-1) + value)
    if treatment == "subtract":
        total = torch.where(drawn.ended, total, total - abs(value))
    return total if recipe.reward.overlong is None else total + length_penalty(drawn, recipe)


def earlier(scores: Scores, mask: Tensor) -> Tensor:
    """What turns before the last one earned, token by token; nothing in a response of one turn.   [N, T]"""
    return (
        mask.new_zeros(mask.shape, dtype=torch.float32)
        if scores.dense is None
        else scores.dense.masked_fill(last_turn(mask), 0.0)
    )


def placed(scores: Scores, total: Tensor, drawn: Samples, recipe: LanguageRecipe) -> Tensor:
    """What was settled, token by token: what a step, token or turn earned stays there, all else is on the last.   -> [N, T]

    total  [N] what was settled. A penalty for a missing EOS stands in place of all that the last turn earned.
    """
    if scores.dense is None:
        return place_scores(total, drawn.mask)
    replaced = ~drawn.ended & (recipe.reward.missing_eos == "penalty")
    before_last_turn = earlier(scores, drawn.mask)
    stays = torch.where(replaced.unsqueeze(-1), before_last_turn, scores.dense)
    return stays + place_scores(total - torch.where(replaced, before_last_turn.sum(-1), scores.total), drawn.mask)


def length_penalty(drawn: Samples, recipe: LanguageRecipe) -> Tensor:
    """What ``reward.overlong`` takes off: 0 for responses that are short enough, −1 at the limit.   [N]"""
    longest, share = recipe.max_response_tokens, recipe.reward.overlong or 0.0
    return overlong_penalty(drawn.lengths.to(drawn.log_probs.dtype), longest, share * longest)
