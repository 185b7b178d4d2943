"""Sample responses from the policy's own weights, with the log-probability of every token.

``sample`` does the work of the engines "packed" and "model"; ``online/engine.py`` chooses the engine. A response depends on
its prompt, its seed and the weights. The rest of the batch and the padding change logits by rounding only (about 1e-6). That
changes a token only if its random number falls that close to the boundary between two tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from surefoot.core.minibatches import select_rows
from surefoot.core.seeding import derived_seed
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.files import check_flags, check_whole
from surefoot.language import quiet_transformers
from surefoot.language.data.batches import left_padded
from surefoot.language.models.policy.lengths import switch_of
from surefoot.language.sampling.ends import EndDetector, Ends
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

if TYPE_CHECKING:
    from surefoot.language.data.tokens import Tokens

DecodingPath = Literal["packed", "cached", "recomputed"]
"""how tokens are decoded: with packed weights, or by the model's forward pass with or without its cache"""
Decoding = DecodingPath | Literal["model"]
"""a path, or the better of the two by the model's forward pass"""
DecodedBy = DecodingPath | Literal["continuous", "vllm"]
"""the path that decoded, or the engine that has no such paths"""
FinishReason = Literal["stop", "length", "error"]
LOOK_EVERY = 8
"""tokens between two looks for finished responses on a GPU: a look waits until the GPU has computed everything before it"""


@dataclass(frozen=True)
class Samples:
    """N responses, prompt-major: all samples of prompt 0 first. T is the length of the longest."""

    prompt: Tensor
    """[N, P] padded on the left"""
    prompt_mask: Tensor
    """[N, P] True at real tokens"""
    actions: Tensor
    """[N, T] padded on the right"""
    mask: Tensor
    """[N, T] True at sampled tokens, EOS included"""
    log_probs: Tensor
    """[N, T] of the sampled tokens, at the sampling temperature; 0 outside the mask"""
    ended: Tensor
    """[N] True if EOS or a stop string ended it; False if it was truncated at the limit"""
    path: DecodedBy
    real: Tensor | None = None
    """[N, T] with several turns: True at sampled tokens and at the tokens of the environment between and after them; else None
    """
    missing: Tensor | None = None
    """[N] True where the engine returned no response, which is then empty; None if all are there"""
    version: int | None = None
    """the optimizer steps that the sampled weights had taken; None if the caller did not count them"""

    @property
    def lengths(self) -> Tensor:
        """Sampled tokens of each response.   [N]"""
        return self.mask.sum(-1)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Why each response ended: "stop" by EOS or a stop string, "length" at the limit, "error" if there is none."""
        missing = [False] * len(self.ended) if self.missing is None else self.missing.tolist()
        reasons = zip(self.ended.tolist(), missing, strict=True)
        return ["error" if lost else "stop" if ended else "length" for ended, lost in reasons]

    def responses(self) -> list[list[int]]:
        """The sampled tokens of each response, without padding."""
        sampled = self.actions[self.mask].tolist()
        ends = self.lengths.cumsum(0).tolist()
        return [sampled[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int = 1,
    max_tokens: int,
    temperature: float = 1.0,
    eos_ids: Sequence[int],
    pad_id: int,
    seeds: Sequence[int] = (),
    stop: Sequence[str] = (),
    decode: Callable[[Sequence[int]], str] | None = None,
    greedy: bool = False,
    path: Decoding | None = None,
    rows: int | None = None,
    look_every: int | None = None,
    on_token: Callable[[int], None] | None = None,
    on_finished: Callable[[int, Sequence[int]], None] | None = None,
) -> Samples:
    """Draw ``samples`` responses to each prompt from softmax(logits / temperature), without top-k or top-p.

    A response ends with one of ``eos_ids``, with the token that completes one of the ``stop`` strings in its decoded text, or
    at ``max_tokens``. ``seeds`` has one number per response, in the order of the result. Each response draws one uniform number
    per token from its own generator and inverts the cumulative distribution. ``greedy`` takes the most likely token instead,
    needs no seeds and reports the same log-probabilities.

    The prompt is read once for all its samples. The model is in eval mode and without gradient while it samples. ``path`` names
    the path; by default the fastest one that is exact for the model is used, and ``Samples.path`` reports it. At most ``rows``
    responses are drawn at a time. Finished responses are looked for after every ``look_every`` tokens; None: one on a CPU,
    ``LOOK_EVERY`` elsewhere. ``on_token`` is called with each token as it is drawn, for a single response;
    ``on_finished`` with the number and the tokens of each response that ends before ``max_tokens``.

    Raises SurefootError for invalid prompts, seeds, limits or path, and NotFiniteError for logits that are not finite.
    """
    check_prompts(model, prompts, max_tokens, eos_ids)
    check_options(len(prompts), samples, temperature, seeds, stop, decode, greedy, path)
    assert on_token is None or samples * len(prompts) == 1, "on_token follows a single response"
    if len(groups := prompt_groups(list(map(len, prompts)), max_tokens, switch_of(model))) > 1:
        options: dict[str, Any] = {"samples": samples, "max_tokens": max_tokens, "temperature": temperature, "stop": stop}
        options |= {"eos_ids": eos_ids, "pad_id": pad_id, "decode": decode, "greedy": greedy, "path": path, "rows": rows}
        draw = partial(sample, model, **options, look_every=look_every)
        return _by_group(groups, draw, prompts, samples, seeds, pad_id, on_finished)
    device = model.get_input_embeddings().weight.device
    every = look_every or (1 if device.type == "cpu" or on_token is not None else LOOK_EVERY)
    parts = []
    with torch.no_grad(), eval_mode(model):
        for at, of_prompt in row_chunks(len(prompts), samples, rows):
            ids, mask = left_padded(prompts[at.start : at.stop], pad_id)
            batch = Prompts(ids.to(device), mask.to(device))
            uniforms, numbers = None, [prompt * samples + number for prompt in at for number in of_prompt]
            if not greedy:
                uniforms = uniform_draws([seeds[number] for number in numbers], max_tokens).to(exact_device(device))
            logits, past = read_prompts(model, batch)
            ends = EndDetector(eos_ids, stop, decode, logits.shape[-1], device)
            decoder, used, logits = decoder_for(model, batch, logits, past, len(of_prompt), max_tokens, path)
            responses = _Responses(logits, max_tokens, pad_id, numbers, on_finished)
            responses.draw(decoder, ends, uniforms, temperature, every, on_token)
            parts.append(responses.as_samples(batch, len(of_prompt), used))
    return concat_samples(parts, pad_id)


def prompt_groups(lengths: Sequence[int], max_tokens: int, switch: int | None) -> list[list[int]]:
    """Prompts whose responses can be read together by a model with other frequencies past ``switch`` tokens: those that stay
    below it, those that are past it, and those that pass it with their response.
    """
    if switch is None:
        return [list(range(len(lengths)))]
    kinds = [1 if length > switch else 2 if length + max_tokens - 1 > switch else 0 for length in lengths]
    return [group for kind in range(3) if (group := [place for place, of_place in enumerate(kinds) if of_place == kind])]


def _by_group(
    groups: Sequence[Sequence[int]],
    draw: Callable[..., Samples],
    prompts: Sequence[Sequence[int]],
    samples: int,
    seeds: Sequence[int],
    pad_id: int,
    on_finished: Callable[[int, Sequence[int]], None] | None,
) -> Samples:
    """The responses to groups of prompts, drawn one group after another, in the order of the prompts."""
    parts, everyone = [], []
    for group in groups:
        numbers = [place * samples + number for place in group for number in range(samples)]

        def finished(number: int, ids: Sequence[int], numbers: Sequence[int] = numbers) -> None:
            assert on_finished is not None
            on_finished(numbers[number], ids)

        of_group = [seeds[number] for number in numbers] if len(seeds) else ()
        report = None if on_finished is None else finished
        parts.append(draw([prompts[place] for place in group], seeds=of_group, on_finished=report))
        everyone += numbers
    drawn: Samples = select_rows(concat_samples(parts, pad_id), torch.tensor(everyone).argsort())
    return drawn


def row_chunks(prompts: int, samples: int, rows: int | None) -> Iterator[tuple[range, range]]:
    """The prompts and samples that are drawn at a time, at most ``rows`` responses: whole prompts, or parts of one."""
    whole, part = chunk_of(prompts, samples, rows)
    for prompt in range(0, prompts, whole):
        for start in range(0, samples, part):
            yield range(prompt, min(prompt + whole, prompts)), range(start, min(start + part, samples))


class _Responses:
    """The tokens drawn so far. Each slot of the decoder holds an unfinished response; finished responses leave the batch.

    logits       of the first token   [N, vocabulary]
    numbers      of the responses, for ``on_finished``
    on_finished  of ``sample``
    """

    def __init__(
        self,
        logits: Tensor,
        max_tokens: int,
        pad_id: int,
        numbers: Sequence[int],
        on_finished: Callable[[int, Sequence[int]], None] | None,
    ) -> None:
        count, device = len(logits), logits.device
        self.numbers, self.on_finished = numbers, on_finished
        self.logits, self.max_tokens, self.pad_id = logits, max_tokens, pad_id
        self.actions = torch.full((max_tokens, count), pad_id, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(max_tokens, count, dtype=working_dtype(logits), device=device)
        self.lengths = torch.full((count,), max_tokens, dtype=torch.long, device=device)
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)
        self.slots = torch.arange(count, device=device)
        """[n] the response in each slot"""

    def draw(
        self,
        decoder: Decoder,
        ends: "EndDetector",
        uniforms: Tensor | None,
        temperature: float,
        every: int,
        on_token: Callable[[int], None] | None,
    ) -> None:
        """Draw all tokens.   uniforms [max_tokens, N], None for the most likely tokens"""
        logits, seen = self.logits, 0
        for step in range(self.max_tokens):
            log_probs = log_softmax(logits, temperature)
            if uniforms is None:
                tokens = log_probs.argmax(-1)
            else:
                tokens = inverse_cdf(log_probs, uniforms[step].index_select(0, self.slots.to(uniforms.device)))
            self._append(step, tokens, log_probs)
            if on_token is not None:
                on_token(int(tokens[0]))
            if (step + 1) % every == 0 or step + 1 == self.max_tokens:
                lengths = ends.reached(self.actions[: step + 1], self.slots, step + 1 - seen)
                seen = step + 1
                if lengths is not None:
                    tokens = self._finish(lengths, tokens, decoder)
                if not len(tokens):
                    return
            if step + 1 < self.max_tokens:
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
        if self.on_finished is not None:
            for slot, length in zip(self.slots[done].tolist(), lengths[done].tolist(), strict=True):
                self.on_finished(self.numbers[slot], self.actions[:length, slot].tolist())
        count = int((~done).sum())
        if count:
            holes, movers = done[:count].nonzero().squeeze(-1), (~done[count:]).nonzero().squeeze(-1) + count
            decoder.shrink(count, holes, movers)
            for slot_wise in (self.slots, tokens):
                slot_wise[holes] = slot_wise[movers]
        self.slots = self.slots[:count]
        return tokens[:count]

    def as_samples(self, prompts: Prompts, samples: int, path: DecodingPath) -> "Samples":
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
            actions=self.actions[:longest].T.contiguous().masked_fill_(~mask, self.pad_id),  # drawn before the next look
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


def generate(
    model: Any,
    tokens: "Tokens",
    prompts: Sequence[Any],
    *,
    samples: int = 1,
    max_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 1,
    stop: Sequence[str] = (),
    greedy: bool = False,
    special_tokens: bool = False,
) -> tuple[list[str], list[bool]]:
    """Text responses to prompts (text or messages), prompt-major, without the stop string and what follows it; and whether each
    one ended before ``max_tokens``.

    special_tokens   keep special tokens in the text

    A response depends on the prompt, the seed and its index in the list. Raises the errors of ``sample`` and ``tokens``.
    """
    ends = Ends(tokens, tuple(stop))
    with quiet_transformers():  # the tokenizer warns of long text, which sample rejects
        ids = [tokens.encode_prompt(prompt) for prompt in prompts]
    drawn = sample(
        model,
        ids,
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        seeds=[derived_seed(seed, "generate", index) for index in range(samples * len(prompts))],
        greedy=greedy,
        **ends.options,
    )
    return [ends.text(ids, special_tokens) for ids in drawn.responses()], drawn.ended.tolist()


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


def check_prompts(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, eos_ids: Sequence[int]) -> None:
    """Raise SurefootError for prompts that this model can't answer."""
    if not prompts:
        raise SurefootError("prompts: the list is empty; give at least one prompt")
    check_whole(1, max_tokens=max_tokens)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, ids in [("eos_ids", eos_ids), *((f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts))]:
        unknown = [i for i in (min(ids, default=0), max(ids, default=0)) if not 0 <= i < vocabulary]
        if unknown:
            raise SurefootError(
                f"{name}: token {unknown[0]} is outside the model's vocabulary of {vocabulary}; use the model's own tokenizer"
            )
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise SurefootError(f"prompts[{index}]: has no tokens; begin it with at least one, such as BOS")
        if context and len(prompt) + max_tokens > context:
            raise SurefootError(
                f"prompts[{index}]: {len(prompt)} tokens and max_tokens={max_tokens} don't fit into the model's context of "
                f"{context}; shorten one of them"
            )


def check_options(
    prompts: int,
    samples: int,
    temperature: float,
    seeds: Sequence[int],
    stop: Sequence[str],
    decode: object,
    greedy: bool,
    path: Decoding | None,
) -> None:
    """Raise SurefootError for invalid sampling options."""
    check_whole(1, samples=samples)
    check_flags(greedy=greedy)
    if not 0 < temperature < float("inf"):
        raise SurefootError(f"temperature={temperature}: must be a positive number; for the most likely token, set greedy")
    if not greedy and len(seeds) != samples * prompts:
        raise SurefootError(f"seeds: {len(seeds)} given for {prompts} prompts x samples={samples}; give one per response")
    if stop and (isinstance(stop, str) or decode is None or not all(stop)):
        raise SurefootError(f"stop={stop!r}: needs a list of non-empty strings, and decode=, which turns tokens into text")
    if path not in (None, "model", *get_args(DecodingPath)):
        raise SurefootError(f"path={path!r}: choose one of {', '.join(get_args(DecodingPath))}")
