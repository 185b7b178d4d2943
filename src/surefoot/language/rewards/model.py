"""Scores of a reward model: one for the whole text, or one for every step."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.language import quiet_transformers
from surefoot.language.data.batches import right_padded
from surefoot.language.data.chat import Dialogue, options_of
from surefoot.language.data.steps import split_steps, step_tokens
from surefoot.language.data.tokens import Tokens
from surefoot.language.language_model import errors_for, model_folder
from surefoot.language.models.classifier import TextClassifier
from surefoot.language.models.loading import context_length
from surefoot.language.models.policy.passes import computing
from surefoot.language.models.reward_model import RewardModel, load_reward_model
from surefoot.language.rewards.scores import Columns, Mark, Per, Prompt, Scores, TokenTexts, dense_scores

BATCH_TOKENS = 16_384
"""tokens, padding included, that go through a reward model at once"""


class ModelReward:
    """A reward model's score of prompt and response, as whole texts with EOS, by the model's own tokenizer or chat template.

    Or a process reward: its scores after every step, from one pass, at the last token of each.

    folder         a folder or hub id of AutoModelForSequenceClassification, a folder that training with ``kind = "reward"``
                   wrote, or the run
    weight         of the scores in the sum: those of models trained here are standardised, mean 0 and std 1 on demonstrations;
                   those of others are the logits
    label          the label whose logit is the score, if there are several
    per            "response" or "step"
    separator      what steps end with
    batch_tokens   tokens, padding included, that go through the model at once; bounds memory, changes no score
    name           of the part
    device         where the model runs
    field          of the recipe that names it, for messages
    read           returns a model that need not be loaded separately, and None for any other
    as_stored      keep weights that are stored in bfloat16 or float16 so
    bf16           multiply in bfloat16 (autocast), but for the head

    A decoder reads the ids of the prompt, of the response and EOS. Any other classifier reads prompt and response as one text
    with its tokenizer's own special tokens.

    Raises SurefootError when the folder contains no reward model; and from a call, when a text is longer than the model's
    context or a score is not finite.
    """

    def __init__(
        self,
        folder: str | Path,
        weight: float = 1.0,
        *,
        per: Per = "response",
        separator: str | None = None,
        label: str | None = None,
        batch_tokens: int = BATCH_TOKENS,
        name: str = "reward_model",
        device: str = "cpu",
        field: str = "reward.model",
        read: Callable[[str], RewardModel | None] | None = None,
        as_stored: bool = False,
        bf16: bool = False,
    ) -> None:
        assert per == "response" or (per == "step" and separator is not None), "terms are checked before"
        self.per: Per = per
        self.separator = separator
        self.weight, self.batch_tokens, self.name, self.field, self.bf16 = weight, batch_tokens, name, field, bf16
        with errors_for(field):
            self.path = str(folder)
            model: RewardModel | TextClassifier | None = None if read is None else read(self.path)
            if model is None:
                self.path = model_folder(self.path)
                load: Any = load_reward_model if per == "response" else RewardModel.load
                model = load(self.path, label, as_stored=as_stored)
            assert model.tokenizer is not None, "a reward model's folder contains its tokenizer"
        try:
            self.tokens = None if isinstance(model, TextClassifier) else Tokens(model.tokenizer)
        except SurefootError as error:  # no EOS
            raise self._error(str(error)) from None
        self.model: RewardModel | TextClassifier = model.requires_grad_(False).to(device)
        self.context = longest_text(self.model)
        if per == "step" and isinstance(self.model, RewardModel) and self.model.pooled:
            raise self._error("has a pooled head, which scores whole answers; use a process reward model, or per = 'response'")

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise SurefootError for messages, if the model has no chat template to render them, and for prompts of another kind
        than those that it was trained on.
        """
        assert self.model.tokenizer is not None
        prompts = list(prompts)
        plain = getattr(self.model, "plain", None)
        if plain is not None and any(isinstance(prompt, str) is not plain for prompt in prompts):
            own, given = ("text", "messages") if plain else ("messages", "text")
            raise self._error(f"was trained on {own}, so its scores of {given} mean nothing; give {own}, or train another")
        if not self.model.tokenizer.chat_template and any(not isinstance(prompt, str) for prompt in prompts):
            raise self._error("its tokenizer has no chat template, and the prompts are messages; use another model, or text")

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: TokenTexts | None = None
    ) -> Scores:
        with quiet_transformers():  # a tokenizer warns of text longer than the context, which is an error here
            rows = [self._ids(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        longest = max((len(before) + len(after) for before, after in rows), default=0)
        if self.context is not None and longest > self.context:
            raise self._error(
                f"prompt and response have {longest} tokens, more than its context of {self.context}; "
                "shorten them, in a run by data.max_length or sampling.max_tokens"
            )
        raw, dense = torch.zeros(len(rows)), None
        if self.per == "response":
            for chosen, ids, mask in self._batches(rows):
                starts = torch.tensor([len(rows[index][0]) for index in chosen], device=mask.device)
                answer = mask & (torch.arange(mask.shape[1], device=mask.device) >= starts.unsqueeze(-1))
                inputs = (ids, mask, answer) if isinstance(self.model, RewardModel) else (ids, mask)
                with computing(self.model, False, self.bf16):
                    raw[chosen] = self.model(*inputs).float().cpu()
        else:
            marks = self._marks(rows, responses)
            raw = torch.tensor([sum(score for _, score in of_row) for of_row in marks], dtype=torch.float32)
            dense = None if tokens is None else self.weight * dense_scores(marks, tokens, "step")
        if not torch.isfinite(raw).all():
            raise self._error("returned a score that is not finite; train it again with a lower learning rate")
        return Scores(self.weight * raw, {self.name: raw}, torch.ones(len(rows), dtype=torch.bool), dense)

    def _batches(self, rows: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Row indices, their ids and their mask."""
        device = next(self.model.parameters()).device
        pad_id = self.model.pad_id if self.tokens is None else self.tokens.pad_id
        assert pad_id is not None
        for chosen in _packed([len(before) + len(after) for before, after in rows], self.batch_tokens):
            ids, mask = right_padded([[*rows[index][0], *rows[index][1]] for index in chosen], pad_id)
            yield chosen, ids.to(device), mask.to(device)

    def _marks(self, rows: Sequence[tuple[list[int], list[int]]], responses: Sequence[str]) -> list[list[Mark]]:
        """Where each step of each response ends, and the score there."""
        assert self.separator is not None
        assert self.tokens is not None
        assert isinstance(self.model, RewardModel)
        marks: list[list[Mark]] = [[] for _ in rows]
        for chosen, ids, mask in self._batches(rows):
            with computing(self.model, False, self.bf16):
                raw = self.model.prefix_scores(ids, mask)
            everywhere = (raw - self.model.mean) / self.model.std
            for at, row in zip(everywhere.float().cpu(), chosen, strict=True):
                before, after = rows[row]
                ends = [step.end for step in split_steps(responses[row], self.separator)]
                places = step_tokens(self.tokens.decode, after, ends)
                marks[row] = [(end, float(at[len(before) + place])) for end, place in zip(ends, places, strict=True)]
        return marks

    def _ids(self, prompt: Prompt, response: str) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of the response with EOS; of messages read at the last token, all ids in the second list."""
        if self.tokens is None:
            assert isinstance(self.model, TextClassifier)
            return [], self.model.encode(prompt, response)
        if isinstance(prompt, str) or self.per == "step":
            return self.tokens.encode_prompt(prompt), self.tokens.encode_completion(response)
        whole = Dialogue([*prompt, {"role": "assistant", "content": response}], options_of(prompt))
        if isinstance(self.model, RewardModel) and self.model.pooled:  # as in training
            ids, trained = self.tokens.conversation(whole, after=len(prompt))
            return ids[: trained.index(True)], ids[trained.index(True) :]
        return [], self.tokens.render(whole)

    def _error(self, what: str) -> SurefootError:
        return SurefootError(f"{self.field}={self.path!r}: {what}")


def longest_text(model: RewardModel | TextClassifier) -> int | None:
    """The most tokens that a model reads: of an encoder also by its tokenizer, since some positions may be reserved."""
    limit = context_length(model.backbone)
    if isinstance(model, TextClassifier):
        return min(limit or sys.maxsize, int(model.tokenizer.model_max_length))
    return limit


def _packed(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices in batches of rows of similar length, with rows × longest ≤ tokens; a longer row is a batch alone."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
