"""Sample responses from the policy's own weights, with the log-probability of every token.

``sample`` does the work of the engines "packed" and "model"; ``online/engine.py`` chooses the engine. A response depends on
its prompt, its seed and the weights. The rest of the batch and the padding change logits by rounding only (about 1e-6). That
changes a token only if its random number falls that close to the boundary between two tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from surefoot.core.minibatches import select_rows
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.language.data.batches import left_padded
from surefoot.language.models.policy.lengths import switch_of
from surefoot.language.sampling.ends import EndDetector
from surefoot.language.sampling.engines import DecodingPath, Request, Samples, check_request
from surefoot.language.sampling.fast_decode import fast_decoder
from surefoot.language.sampling.kv_cache import (
    CachedDecoder,
    Decoder,
    Prompts,
    RecomputingDecoder,
    cache_is_exact,
    read_prompts,
)
from surefoot.language.sampling.rows import chunk_of
from surefoot.ranks.collectives import exact_device, in_float64

Decoding = DecodingPath | Literal["model"]
"""a path, or the better of the two by the model's forward pass"""
LOOK_EVERY = 8
"""tokens between two looks for finished responses on a GPU: a look waits until the GPU has computed everything before it"""


def sample(
    model: Any,
    request: Request,
    *,
    path: Decoding | None = None,
    rows: int | None = None,
    look_every: int | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Samples:
    """Draw responses from softmax(logits / temperature), without top-k or top-p.

    A response ends with one of ``eos_ids``, with the token that completes one of the ``stop`` strings in its decoded text, or
    at ``max_tokens``. Each response draws one uniform number per token from its own generator and inverts the cumulative
    distribution. ``greedy`` takes the most likely token instead and reports the same log-probabilities.

    The prompt is read once for all its samples. The model is in eval mode and without gradient while it samples. ``path`` names
    the path; by default the fastest one that is exact for the model is used, and ``Samples.path`` reports it. At most ``rows``
    responses are drawn at a time. Finished responses are looked for after every ``look_every`` tokens; None: one on a CPU,
    ``LOOK_EVERY`` elsewhere. ``on_token`` is called with each token as it is drawn, for a single response.

    Raises SurefootError for an invalid request or path, and NotFiniteError for logits that are not finite.
    """
    check_request(model, request)
    if path not in (None, "model", *get_args(DecodingPath)):
        raise SurefootError(f"path={path!r}: choose one of {', '.join(get_args(DecodingPath))}")
    prompts, samples, max_tokens = request.prompts, request.samples, request.max_tokens
    assert on_token is None or samples * len(prompts) == 1, "on_token follows a single response"
    if len(groups := prompt_groups(list(map(len, prompts)), max_tokens, switch_of(model))) > 1:
        return _by_group(groups, partial(sample, model, path=path, rows=rows, look_every=look_every), request)
    device = model.get_input_embeddings().weight.device
    every = look_every or (1 if device.type == "cpu" or on_token is not None else LOOK_EVERY)
    parts = []
    with torch.no_grad(), eval_mode(model):
        for at, of_prompt in row_chunks(len(prompts), samples, rows):
            ids, mask = left_padded(prompts[at.start : at.stop], request.pad_id)
            batch = Prompts(ids.to(device), mask.to(device))
            uniforms, numbers = None, [prompt * samples + number for prompt in at for number in of_prompt]
            if not request.greedy:
                uniforms = uniform_draws([request.seeds[number] for number in numbers], max_tokens).to(exact_device(device))
            logits, past = read_prompts(model, batch)
            ends = EndDetector(request.eos_ids, request.stop, request.decode, logits.shape[-1], device)
            decoder, used, logits = decoder_for(model, batch, logits, past, len(of_prompt), max_tokens, path)
            responses = _Responses(logits, request, numbers)
            responses.draw(decoder, ends, uniforms, every, on_token)
            parts.append(responses.as_samples(batch, len(of_prompt), used))
    return concat_samples(parts, request.pad_id)


def prompt_groups(lengths: Sequence[int], max_tokens: int, switch: int | None) -> list[list[int]]:
    """Prompts whose responses can be read together by a model with other frequencies past ``switch`` tokens: those that stay
    below it, those that are past it, and those that pass it with their response.
    """
    if switch is None:
        return [list(range(len(lengths)))]
    kinds = [1 if length > switch else 2 if length + max_tokens - 1 > switch else 0 for length in lengths]
    return [group for kind in range(3) if (group := [place for place, of_place in enumerate(kinds) if of_place == kind])]


def _by_group(groups: Sequence[Sequence[int]], draw: Callable[[Request], Samples], request: Request) -> Samples:
    """The responses to groups of prompts, drawn one group after another, in the order of the prompts."""
    parts, everyone, report = [], [], request.on_finished
    for group in groups:
        numbers = [place * request.samples + number for place in group for number in range(request.samples)]

        def finished(number: int, ids: Sequence[int], numbers: Sequence[int] = numbers) -> None:
            assert report is not None
            report(numbers[number], ids)

        of_group = replace(
            request,
            prompts=[request.prompts[place] for place in group],
            seeds=[request.seeds[number] for number in numbers] if len(request.seeds) else (),
            on_finished=None if report is None else finished,
        )
        parts.append(draw(of_group))
        everyone += numbers
    drawn: Samples = select_rows(concat_samples(parts, request.pad_id), torch.tensor(everyone).argsort())
    return drawn


def row_chunks(prompts: int, samples: int, rows: int | None) -> Iterator[tuple[range, range]]:
    """The prompts and samples that are drawn at a time, at most ``rows`` responses: whole prompts, or parts of one."""
    whole, part = chunk_of(prompts, samples, rows)
    for prompt in range(0, prompts, whole):
        for start in range(0, samples, part):
            yield range(prompt, min(prompt + whole, prompts)), range(start, min(start + part, samples))


class _Responses:
    """The tokens drawn so far. Each slot of the decoder holds an unfinished response; finished responses leave the batch.

    logits    of the first token   [N, vocabulary]
    numbers   of the responses, for ``on_finished``
    """

    def __init__(self, logits: Tensor, request: Request, numbers: Sequence[int]) -> None:
        count, device, max_tokens = len(logits), logits.device, request.max_tokens
        self.logits, self.request, self.numbers = logits, request, numbers
        self.actions = torch.full((max_tokens, count), request.pad_id, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(max_tokens, count, dtype=working_dtype(logits), device=device)
        self.lengths = torch.full((count,), max_tokens, dtype=torch.long, device=device)
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)
        self.slots = torch.arange(count, device=device)
        """[n] the response in each slot"""

    def draw(
        self, decoder: Decoder, ends: EndDetector, uniforms: Tensor | None, every: int, on_token: Callable[[int], None] | None
    ) -> None:
        """Draw all tokens.   uniforms [max_tokens, N], None for the most likely tokens"""
        logits, seen, limit = self.logits, 0, self.request.max_tokens
        for step in range(limit):
            log_probs = log_softmax(logits, self.request.temperature)
            if uniforms is None:
                tokens = log_probs.argmax(-1)
            else:
                tokens = inverse_cdf(log_probs, uniforms[step].index_select(0, self.slots.to(uniforms.device)))
            self._append(step, tokens, log_probs)
            if on_token is not None:
                on_token(int(tokens[0]))
            if (step + 1) % every == 0 or step + 1 == limit:
                lengths = ends.reached(self.actions[: step + 1], self.slots, step + 1 - seen)
                seen = step + 1
                if lengths is not None:
                    tokens = self._finish(lengths, tokens, decoder)
                if not len(tokens):
                    return
            if step + 1 < limit:
                logits = decoder.step(tokens)

    def _append(self, step: int, tokens: Tensor, log_probs: Tensor) -> None:
        """Store one token of every unfinished response.   tokens [n], log_probs [n, vocabulary]"""
        self.actions[step].index_copy_(0, self.slots, tokens)
        self.log_probs[step].index_copy_(0, self.slots, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))

    def _finish(self, lengths: Tensor, tokens: Tensor, decoder: Decoder) -> Tensor:
        """Drop the finished responses from the decoder. Return the last tokens of the others, in their new slots.

        lengths  of the finished responses, 0 for the others   [n]; tokens [n] -> [n - finished]
        """
        done = lengths > 0
        self.ended[self.slots[done]] = True
        self.lengths[self.slots[done]] = lengths[done]
        if self.request.on_finished is not None:
            for slot, length in zip(self.slots[done].tolist(), lengths[done].tolist(), strict=True):
                self.request.on_finished(self.numbers[slot], self.actions[:length, slot].tolist())
        count = int((~done).sum())
        if count:
            holes, movers = done[:count].nonzero().squeeze(-1), (~done[count:]).nonzero().squeeze(-1) + count
            decoder.shrink(count, holes, movers)
            for slot_wise in (self.slots, tokens):
                slot_wise[holes] = slot_wise[movers]
        self.slots = self.slots[:count]
        return tokens[:count]

    def as_samples(self, prompts: Prompts, samples: int, path: DecodingPath) -> Samples:
        """The responses as a batch, as long as the longest one. Raises NotFiniteError for log-probabilities that are not
        finite.
        """
        longest = int(self.lengths.max())
        mask = torch.arange(longest, device=self.actions.device) < self.lengths.unsqueeze(-1)
        log_probs = self.log_probs[:longest].T.contiguous().masked_fill_(~mask, 0)
        if not log_probs.isfinite().all():
            raise NotFiniteError("the model's logits are NaN or infinite: its weights have diverged; use an earlier checkpoint")
        return Samples(
            prompt=prompts.ids.repeat_interleave(samples, 0),
            prompt_mask=prompts.mask.repeat_interleave(samples, 0),
            actions=self.actions[:longest]
            .T.contiguous()
            .masked_fill_(~mask, self.request.pad_id),  # drawn before the next look
            mask=mask,
            log_probs=log_probs,
            ended=self.ended,
            path=path,
        )


def concat_samples(parts: Sequence[Samples], pad_id: int) -> Samples:
    """The responses of several batches, padded to one length."""
    if len(parts) == 1:
        return parts[0]
    before = max(part.prompt.shape[1] for part in parts)
    after = max(part.actions.shape[1] for part in parts)

    def left(x: Tensor, value: int = 0) -> Tensor:
        return pad(x, (before - x.shape[1], 0), value=value)

    def right(x: Tensor, value: int = 0) -> Tensor:
        return pad(x, (0, after - x.shape[1]), value=value)

    read = [part.real for part in parts if part.real is not None]
    missing = [torch.zeros_like(part.ended) if part.missing is None else part.missing for part in parts]
    return replace(
        parts[0],
        prompt=torch.cat([left(part.prompt, pad_id) for part in parts]),
        prompt_mask=torch.cat([left(part.prompt_mask) for part in parts]),
        actions=torch.cat([right(part.actions, pad_id) for part in parts]),
        mask=torch.cat([right(part.mask) for part in parts]),
        log_probs=torch.cat([right(part.log_probs) for part in parts]),
        ended=torch.cat([part.ended for part in parts]),
        real=torch.cat([right(mask) for mask in read]) if read else None,
        missing=torch.cat(missing) if any(part.missing is not None for part in parts) else None,
    )


def working_dtype(logits: Tensor) -> torch.dtype:
    """float32; float64 for a model in float64."""
    return torch.promote_types(logits.dtype, torch.float32)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), at least in float32.   [n, vocabulary] -> [n, vocabulary]"""
    logits = logits.to(working_dtype(logits))
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u ∈ [0, 1).   [n, vocabulary], [n] -> [n]

    Sums in float64 and scales u by their total, so a token of probability 0 is never drawn.
    """
    cumulative = in_float64(log_probs.exp()).cumsum(-1)
    drawn = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    passed = torch.searchsorted(cumulative, drawn, right=True).squeeze(-1).to(log_probs.device)
    return passed.clamp_(max=log_probs.shape[-1] - 1)  # NaN leads past the end; as_samples reports it


def uniform_draws(seeds: Sequence[int], count: int) -> Tensor:
    """Uniform numbers in [0, 1), one per token; each column has its own generator.   -> [count, N] float64"""
    columns, generator = [], torch.Generator()
    for seed in seeds:
        columns.append(torch.rand(count, generator=generator.manual_seed(seed), dtype=torch.float64))
    return torch.stack(columns, 1)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch every module to eval mode: no dropout, and no gradient checkpointing, which disables caches. Restored after."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def decoder_for(
    model: nn.Module, prompts: Prompts, logits: Tensor, past: Any, samples: int, max_tokens: int, path: Decoding | None
) -> tuple[Decoder, DecodingPath, Tensor]:
    """The fastest decoder that is exact for this model, or the one named by ``path``; and the logits of the first tokens.

    logits   after each prompt, with padding   [G, vocabulary] -> [G · samples, vocabulary]
    """
    more, switch, lengths = max_tokens - 1, switch_of(model), prompts.lengths  # nothing is read after the last token
    long = switch is not None and bool(lengths.min() > switch)
    crossing = switch is not None and not long and bool(lengths.max() + more > switch)
    first = logits.repeat_interleave(samples, 0)
    if path in (None, "packed") and not crossing:
        decoder = fast_decoder(model, prompts, logits, past, samples, more)
        if decoder is not None:
            return decoder, "packed", first
    usable = past is not None and not crossing
    if usable and (path == "cached" or (path in (None, "model") and cache_is_exact(model, prompts, more, long))):
        return CachedDecoder(model, prompts, past, samples, more), "cached", first
    if path in (None, "model", "recomputed"):
        recomputing = RecomputingDecoder(model, prompts, samples, more, int(lengths.max() - lengths.min()), switch)
        return recomputing, "recomputed", recomputing.logits()
    raise SurefootError(f"path={path!r}: not available for {type(model).__name__}; leave it out")
