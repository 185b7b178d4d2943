"""Sampling responses on the policy's own weights: every token with its log-probability, from one pass.

A response depends on its prompt, its seed and the weights. Its company, its place in the batch and the padding change logits by
rounding (about 1e-6), which changes a token only where its random number falls that close to a border between two tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from surefoot.core.seeding import derived_seed
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.language.data.tokens import left_padded
from surefoot.language.extras import quiet_transformers
from surefoot.language.sampling.fast_decode import fast_decoder
from surefoot.language.sampling.kv_cache import (
    CachedDecoder,
    Decoder,
    Prompts,
    RecomputingDecoder,
    cache_is_exact,
    read_prompts,
)

if TYPE_CHECKING:
    from surefoot.language.data.tokens import Tokens

DecodingPath = Literal["fast", "cached", "recomputed"]
"""how tokens are decoded: with packed weights, by the model's own pass with its cache, or without one"""


@dataclass(frozen=True)
class Samples:
    """Responses, prompt-major: all samples of prompt 0 first. N responses, T the longest of them."""

    prompt: Tensor
    """[N, P] padded on the left"""
    prompt_mask: Tensor
    """[N, P] True at real tokens"""
    actions: Tensor
    """[N, T] padded on the right"""
    mask: Tensor
    """[N, T] True at what was sampled, EOS included"""
    log_probs: Tensor
    """[N, T] of what was sampled, at the temperature it was sampled at; 0 outside the mask"""
    ended: Tensor
    """[N] by EOS or a stop string, rather than cut at the limit"""
    path: DecodingPath
    real: Tensor | None = None
    """[N, T] where a response has several turns: True at what was sampled and at what others said between and behind"""

    @property
    def lengths(self) -> Tensor:
        """Sampled tokens of each response.   [N]"""
        return self.mask.sum(-1)

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
    path: DecodingPath | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Samples:
    """Draw ``samples`` responses to each prompt from softmax(logits / temperature), the whole of it: no top-k, no top-p.

    A response ends with one of ``eos_ids``, with the token that completes one of the ``stop`` strings in its decoded text, or
    at ``max_tokens``. ``seeds`` has one number per response, in the order of the result: response i draws one uniform number
    per token from a generator of its own and takes the token where the cumulative distribution passes it. ``greedy`` takes the
    likeliest token instead, needs no seeds and reports the same log-probabilities.

    The prompt is read once for all its samples; finished responses leave the batch. The model is in eval mode meanwhile, and
    without gradient. ``path`` is chosen by what the model allows (``Samples.path`` says which); asking for one is for tests.
    ``on_token`` is called with each token as it is drawn; it follows one response alone.

    Raises SurefootError for prompts, seeds, limits or a path that can't be, NotFiniteError for logits that are not finite.
    """
    check_prompts(model, prompts, max_tokens, eos_ids)
    check_options(len(prompts), samples, temperature, seeds, stop, decode, greedy, path)
    device = model.get_input_embeddings().weight.device
    ids, mask = left_padded(prompts, pad_id)
    batch = Prompts(ids.to(device), mask.to(device))
    rows = samples * len(prompts)
    assert on_token is None or rows == 1, "one response can be followed, not several"
    uniforms = None if greedy else uniform_draws(seeds, max_tokens).to(device)
    actions = torch.full((max_tokens, rows), pad_id, dtype=torch.long, device=device)
    lengths = torch.full((rows,), max_tokens, dtype=torch.long, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    with torch.no_grad(), eval_mode(model):
        logits, past = read_prompts(model, batch)
        ending = EndDetector(eos_ids, stop, decode, logits.shape[-1], device)
        decoder, used = decoder_for(model, batch, past, samples, max_tokens, path)
        logits = logits.repeat_interleave(samples, 0)
        log_probs = torch.zeros(max_tokens, rows, dtype=working_dtype(logits), device=device)
        slots = torch.arange(rows, device=device)  # which response each slot of the decoder holds
        for now in range(max_tokens):
            known = log_softmax(logits, temperature)
            tokens = known.argmax(-1) if uniforms is None else inverse_cdf(known, uniforms[now].index_select(0, slots))
            actions[now].index_copy_(0, slots, tokens)
            if on_token is not None:
                on_token(int(tokens[0]))
            log_probs[now].index_copy_(0, slots, known.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
            done = ending.reached(tokens, actions[: now + 1], slots)
            if done is not None:
                ended[slots[done]] = True
                lengths[slots[done]] = now + 1
                count = int((~done).sum())
                if count == 0:
                    break
                holes, movers = done[:count].nonzero().squeeze(-1), (~done[count:]).nonzero().squeeze(-1) + count
                decoder.shrink(count, holes, movers)
                for slot_wise in (slots, tokens):
                    slot_wise[holes] = slot_wise[movers]
                slots, tokens = slots[:count], tokens[:count]
            if now + 1 < max_tokens:
                logits = decoder.step(tokens)
    longest = int(lengths.max())
    mask = torch.arange(longest, device=device) < lengths.unsqueeze(-1)
    log_probs = log_probs[:longest].T.contiguous()
    if not log_probs.isfinite().all():
        raise NotFiniteError(
            "the model's logits are NaN or infinite: its weights have diverged; go back to an earlier checkpoint"
        )
    return Samples(
        prompt=batch.ids.repeat_interleave(samples, 0),
        prompt_mask=batch.mask.repeat_interleave(samples, 0),
        actions=actions[:longest].T.contiguous(),
        mask=mask,
        log_probs=log_probs,
        ended=ended,
        path=used,
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
) -> tuple[list[str], list[bool]]:
    """Answers as text to prompts of text or messages, prompt-major; a stop string and what follows it are cut off. And whether
    each ended by itself, not by ``max_tokens``.

    An answer depends on the prompt, the seed and its place in the list. Raises what ``sample`` and ``tokens`` raise.
    """
    with quiet_transformers():  # a tokenizer warns of text longer than the context, which is refused here
        asked = [tokens.encode_prompt(prompt) for prompt in prompts]
    drawn = sample(
        model,
        asked,
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        eos_ids=tokens.eos_ids,
        pad_id=tokens.pad_id,
        seeds=[derived_seed(seed, "generate", index) for index in range(samples * len(prompts))],
        stop=stop,
        decode=tokens.decode,
        greedy=greedy,
    )
    return [cut_at_stop(tokens.decode(ids), stop) for ids in drawn.responses()], drawn.ended.tolist()


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=None)]


def working_dtype(logits: Tensor) -> torch.dtype:
    """float32, or float64 for a model in float64."""
    return torch.promote_types(logits.dtype, torch.float32)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), in float32 at least.   [n, vocabulary] -> [n, vocabulary]"""
    logits = logits.to(working_dtype(logits))
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative distribution passes u ∈ [0, 1).   [n, vocabulary], [n] -> [n]

    Sums in float64 and scales u by what they reach, so that no token is reached whose probability is 0.
    """
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    passed = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    return passed.clamp_(max=log_probs.shape[-1] - 1)  # beyond the end is where NaN leads, which is told later


def uniform_draws(seeds: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1) for every token of every response, each column from its own generator.   -> [count, N] float64"""
    columns, generator = [], torch.Generator()
    for seed in seeds:
        columns.append(torch.rand(count, generator=generator.manual_seed(seed), dtype=torch.float64))
    return torch.stack(columns, 1)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for the moment: no dropout, and no checkpointing, which switches caches off."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def decoder_for(
    model: nn.Module, prompts: Prompts, past: Any, samples: int, max_tokens: int, path: DecodingPath | None
) -> tuple[Decoder, DecodingPath]:
    """The fastest way that is right for this model, or the one asked for."""
    more = max_tokens - 1  # nothing is read after the last token
    if path in (None, "fast"):
        found = fast_decoder(model, prompts, past, samples, more)
        if found is not None:
            return found, "fast"
    if past is not None and (path == "cached" or (path is None and cache_is_exact(model, prompts, more))):
        return CachedDecoder(model, prompts, past, samples, more), "cached"
    if path in (None, "recomputed"):
        return RecomputingDecoder(model, prompts, samples, more), "recomputed"
    raise SurefootError(f"path={path!r}: not possible for {type(model).__name__}; leave it out")


def check_prompts(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, eos_ids: Sequence[int]) -> None:
    """Refuse in one line prompts that this model can't answer."""
    if not prompts:
        raise SurefootError("prompts: none given; give at least one")
    if max_tokens < 1:
        raise SurefootError(f"max_tokens={max_tokens}: must be at least 1")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, ids in [("eos_ids", eos_ids), *((f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts))]:
        unknown = [i for i in (min(ids, default=0), max(ids, default=0)) if not 0 <= i < vocabulary]
        if unknown:
            raise SurefootError(f"{name}: no token {unknown[0]} among the model's {vocabulary}; use the model's own tokenizer")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise SurefootError(f"prompts[{index}]: has no tokens; a response needs at least one to follow, such as BOS")
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
    path: DecodingPath | None,
) -> None:
    """Refuse in one line a way of drawing that can't be."""
    if samples < 1:
        raise SurefootError(f"samples={samples}: must be at least 1")
    if not 0 < temperature < float("inf"):
        raise SurefootError(f"temperature={temperature}: must be a positive number; greedy takes the likeliest token instead")
    if not greedy and len(seeds) != samples * prompts:
        raise SurefootError(f"seeds: {len(seeds)} given for {prompts} prompts x samples={samples}; give one per response")
    if stop and (isinstance(stop, str) or decode is None or not all(stop)):
        raise SurefootError(f"stop={stop!r}: needs a list of strings, none empty, and decode=, which turns tokens into text")
    if path is not None and path not in get_args(DecodingPath):
        raise SurefootError(f"path={path!r}: choose one of {', '.join(get_args(DecodingPath))}")


class EndDetector:
    """Whether responses are at their end: EOS by a table over the vocabulary, stop strings by decoding."""

    def __init__(
        self,
        eos_ids: Sequence[int],
        stop: Sequence[str],
        decode: Callable[[Sequence[int]], str] | None,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self.is_eos = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.is_eos[list(eos_ids)] = True
        self.stop, self.decode = stop, decode
        self.may_end: dict[int, bool] = {}

    def reached(self, tokens: Tensor, actions: Tensor, slots: Tensor) -> Tensor | None:
        """[n] True where the response in a slot ends with this token, or None where none does.   tokens [n], actions [t, N]"""
        done = self.is_eos[tokens]
        if self.stop:
            done |= torch.tensor(self.stopped(tokens.tolist(), actions, slots.tolist()), device=done.device)
        return done if bool(done.any()) else None

    def stopped(self, tokens: list[int], actions: Tensor, slots: list[int]) -> list[bool]:
        """Whether the decoded text of each slot's response holds a stop string."""
        assert self.decode is not None
        found = []
        for token, slot in zip(tokens, slots, strict=True):
            text = self.decode(actions[:, slot].tolist()) if self.may_complete(token) else ""
            found.append(any(word in text for word in self.stop))
        return found

    def may_complete(self, token: int) -> bool:
        """False only where the token's own text shows that no stop string ends in it, which saves decoding the response.

        Part of a character decodes to U+FFFD, and a decoder may strip spaces at the edge: such tokens are always looked into.
        """
        if token not in self.may_end:
            assert self.decode is not None
            text = self.decode([token])
            ends = any(word[-1].isspace() or word[-1] in text for word in self.stop)
            self.may_end[token] = ends or not text.strip() or "\ufffd" in text
        return self.may_end[token]
