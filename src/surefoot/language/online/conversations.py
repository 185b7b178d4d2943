"""Conversations: what was said by whom, and as rows of a rollout, in which the model's own tokens are those under the mask."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surefoot.language.data.tokens import Messages, Tokens, left_padded, prompt_text, right_padded
from surefoot.language.rewards.terms import Prompt, Scores
from surefoot.language.sampling.sampler import DecodingPath, Samples, cut_at_stop

PART = "environment"
"""what the rewards of turns are called among the parts of a reward"""


@dataclass
class Conversation:
    """One conversation as it grows."""

    row: Mapping[str, Any]
    seed: int
    environment: Any = None
    start: Prompt = ""
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """all tokens after the prompt"""
    own: list[bool] = field(default_factory=list)
    """which of them the model wrote"""
    log_probs: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    """what the model wrote"""
    answers: list[str] = field(default_factory=list)
    """the same without the stop string that ended it"""
    replies: list[str | Messages] = field(default_factory=list)
    """what was answered to each turn"""
    rewards: list[float] = field(default_factory=list)
    """what each turn earned"""
    ends: list[int] = field(default_factory=list)
    """where in ``ids`` the last token of each turn is"""
    ended: bool = False
    """by the environment, after a turn that ended by itself"""
    failure: str | None = None
    """what went wrong with the environment, in a few words"""
    path: DecodingPath = "cached"
    """how it was sampled"""

    @property
    def answer(self) -> str:
        """The last turn as it is judged."""
        return self.answers[-1] if self.answers else ""

    @property
    def last(self) -> range:
        """Where in ``ids`` the last turn is."""
        if not self.ends:
            return range(0)
        start = self.ends[-1]
        while start > 0 and self.own[start - 1]:
            start -= 1
        return range(start, self.ends[-1] + 1)

    @property
    def history(self) -> Prompt:
        """All before the last turn: what that is an answer to. Text as it stands; of messages without stop strings."""
        if isinstance(self.start, str):
            pairs = zip(self.turns[:-1], self.replies, strict=False)
            return self.start + "".join(turn + str(reply) for turn, reply in pairs)
        messages = list(self.start)
        for answer, reply in zip(self.answers[:-1], self.replies, strict=False):
            messages += [{"role": "assistant", "content": answer}, *_listed(reply)]
        return messages

    @property
    def transcript(self) -> str:
        """All after the prompt as a person reads it: text as it stands, of messages a line each, the first the model's."""
        if isinstance(self.start, str):
            return "".join(turn + str(reply) for turn, reply in self._pairs(self.turns))
        lines: list[str] = []
        for answer, reply in self._pairs(self.answers):
            lines.append(f"assistant: {answer}" if lines else answer)
            lines += [f"{message['role']}: {message['content']}" for message in _listed(reply)]
        return "\n".join(lines)

    def _pairs(self, turns: Sequence[str]) -> Iterable[tuple[str, str | Messages]]:
        nothing = "" if isinstance(self.start, str) else ()
        return zip(turns, [*self.replies, *[nothing] * (len(turns) - len(self.replies))], strict=True)

    def write(
        self, ids: list[int], log_probs: list[float], tokens: Tokens, path: DecodingPath, stop: Sequence[str] = ()
    ) -> None:
        """Add a turn of the model's, which one of the stop strings may have ended."""
        self.path = path
        self.ids += ids
        self.own += [True] * len(ids)
        self.log_probs += log_probs
        self.turns.append(tokens.decode(ids))
        self.answers.append(cut_at_stop(self.turns[-1], stop))
        self.ends.append(len(self.ids) - 1)

    def hear(self, ids: list[int]) -> None:
        """Add tokens of others."""
        self.ids += ids
        self.own += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)


def as_samples(talks: Sequence[Conversation], tokens: Tokens, like: torch.device) -> Samples:
    """Conversations as rows, the model's own tokens under the mask; one that never began is a row of nothing."""
    prompt, prompt_mask = left_padded([talk.prompt or [tokens.eos_id] for talk in talks], tokens.pad_id)
    actions, said = right_padded([talk.ids or [tokens.pad_id] for talk in talks], tokens.pad_id)
    said &= torch.tensor([bool(talk.ids) for talk in talks]).unsqueeze(-1)
    mask, log_probs = torch.zeros_like(said), torch.zeros(said.shape)
    for row, talk in enumerate(talks):
        mask[row, : len(talk.ids)] = torch.tensor(talk.own, dtype=torch.bool)
        log_probs[row, : len(talk.ids)] = torch.tensor(talk.log_probs)
    return Samples(
        prompt=prompt.to(like),
        prompt_mask=prompt_mask.to(like),
        actions=actions.to(like),
        mask=mask.to(like),
        log_probs=log_probs.to(like),
        ended=torch.tensor([talk.ended for talk in talks], device=like),
        path=talks[0].path,
        real=said.to(like),
    )


def last_turn(mask: Tensor) -> Tensor:
    """The model's tokens after which nobody else's comes before one of its own: its last turn.   [N, T] -> [N, T]"""
    mask = mask.bool()
    after = mask.flip(-1).cumsum(-1).flip(-1)  # own tokens from here on
    others = (~mask & (after > 0)).flip(-1).cumsum(-1).flip(-1)  # of others from here on, as far as one of its own follows
    return mask & (others == 0)


def with_earned(scores: Scores, talks: Sequence[Conversation], shape: Sequence[int]) -> Scores:
    """Scores of the last turns and what all turns earned, each on the last token of its turn, as one sum; valid where no
    environment failed.

    shape  of the samples: N, T
    """
    fine = torch.tensor([talk.failure is None for talk in talks])
    earned = torch.tensor([sum(talk.rewards) for talk in talks]).where(fine, 0.0)
    valid, dense = scores.valid & fine, torch.zeros(tuple(shape))
    for row, talk in enumerate(talks):
        if talk.failure is not None:  # nobody scored it, so ``scores.dense`` may be too narrow for its last turn
            continue
        for place, reward in zip(talk.ends, talk.rewards, strict=False):
            dense[row, place] += reward
        if (last := talk.last) and scores.dense is None:
            dense[row, last[-1]] += scores.total[row]
        elif last and scores.dense is not None:
            dense[row, last.start : last.stop] += scores.dense[row, : len(last)]
    return Scores(
        (scores.total + earned).where(valid, 0.0), {PART: earned, **scores.parts}, valid, dense.where(valid.unsqueeze(-1), 0.0)
    )


def shown(talks: Sequence[Conversation]) -> list[tuple[str, str]]:
    """First prompt and all that followed, as a person reads them."""
    return [(prompt_text(talk.start), talk.transcript) for talk in talks]


def mean_turns(talks: Sequence[Conversation]) -> float:
    """Turns of the model in a conversation."""
    return sum(len(talk.turns) for talk in talks) / len(talks)


def _listed(reply: str | Messages) -> Messages:
    return [] if isinstance(reply, str) else reply
