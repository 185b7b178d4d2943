"""Sample responses from the policy's own weights, with the log-probability of every token.

A response depends on its prompt, its seed and the weights. The rest of the batch and the padding change logits by rounding
only (about 1e-6). That changes a token only if its random number falls that close to the boundary between two tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from surefoot.core.distributed import exact_device, in_float64
from surefoot.core.seeding import derived_seed
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.language import quiet_transformers
from surefoot.language.data.tokens import left_padded
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
"""how tokens are decoded: with packed weights, or by the model's forward pass with or without its cache"""


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
    path: DecodingPath
    real: Tensor | None = None
    """[N, T] with several turns: True at sampled tokens and at the tokens of the environment between and after them; else None
    """

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
    """Draw ``samples`` responses to each prompt from softmax(logits / temperature), without top-k or top-p.

    A response ends with one of ``eos_ids``, with the token that completes one of the ``stop`` strings in its decoded text, or
    at ``max_tokens``. ``seeds`` has one number per response, in the order of the result. Each response draws one uniform number
    per token from its own generator and inverts the cumulative distribution. ``greedy`` takes the most likely token instead,
    needs no seeds and reports the same log-probabilities.

    The prompt is read once for all its samples. The model is in eval mode and without gradient while it samples. ``path`` is
    for tests: by default the fastest path that is exact for the model is used, and ``Samples.path`` reports it. ``on_token`` is
    called with each token as it is drawn, for a single response.

    Raises SurefootError for invalid prompts, seeds, limits or path, and NotFiniteError for logits that are not finite.
    """
    check_prompts(model, prompts, max_tokens, eos_ids)
    check_options(len(prompts), samples, temperature, seeds, stop, decode, greedy, path)
    assert on_token is None or samples * len(prompts) == 1, "on_token follows a single response"
    device = model.get_input_embeddings().weight.device
    ids, mask = left_padded(prompts, pad_id)
    batch = Prompts(ids.to(device), mask.to(device))
    uniforms = None if greedy else uniform_draws(seeds, max_tokens).to(exact_device(device))
    with torch.no_grad(), eval_mode(model):
        logits, past = read_prompts(model, batch)
        ends = EndDetector(eos_ids, stop, decode, logits.shape[-1], device)
        decoder, used = decoder_for(model, batch, past, samples, max_tokens, path)
        logits = logits.repeat_interleave(samples, 0)
        responses = _Responses(logits, max_tokens, pad_id)
        for step in range(max_tokens):
            log_probs = log_softmax(logits, temperature)
            if uniforms is None:
                tokens = log_probs.argmax(-1)
            else:
                tokens = inverse_cdf(log_probs, uniforms[step].index_select(0, responses.slots.to(uniforms.device)))
            responses.append(step, tokens, log_probs)
            if on_token is not None:
                on_token(int(tokens[0]))
            done = ends.reached(tokens, responses.actions[: step + 1], responses.slots)
            if done is not None:
                tokens = responses.finish(step, done, tokens, decoder)
            if not len(tokens):
                break
            if step + 1 < max_tokens:
                logits = decoder.step(tokens)
    return responses.as_samples(batch, samples, used)


class _Responses:
    """The tokens drawn so far. Each slot of the decoder holds an unfinished response; finished responses leave the batch.

    logits  of the first token   [N, vocabulary]
    """

    def __init__(self, logits: Tensor, max_tokens: int, pad_id: int) -> None:
        count, device = len(logits), logits.device
        self.actions = torch.full((max_tokens, count), pad_id, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(max_tokens, count, dtype=working_dtype(logits), device=device)
        self.lengths = torch.full((count,), max_tokens, dtype=torch.long, device=device)
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)
        self.slots = torch.arange(count, device=device)
        """[n] the response in each slot"""

    def append(self, step: int, tokens: Tensor, log_probs: Tensor) -> None:
        """Store one token of every unfinished response.   tokens [n], log_probs [n, vocabulary]"""
        self.actions[step].index_copy_(0, self.slots, tokens)
        self.log_probs[step].index_copy_(0, self.slots, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))

    def finish(self, step: int, done: Tensor, tokens: Tensor, decoder: Decoder) -> Tensor:
        """Drop the finished responses from the decoder. Return the last tokens of the others, in their new slots.

        done, tokens [n] -> [n - finished]
        """
        self.ended[self.slots[done]] = True
        self.lengths[self.slots[done]] = step + 1
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
        log_probs = self.log_probs[:longest].T.contiguous()
        if not log_probs.isfinite().all():
            raise NotFiniteError("the model's logits are NaN or infinite: its weights have diverged; use an earlier checkpoint")
        return Samples(
            prompt=prompts.ids.repeat_interleave(samples, 0),
            prompt_mask=prompts.mask.repeat_interleave(samples, 0),
            actions=self.actions[:longest].T.contiguous(),
            mask=torch.arange(longest, device=log_probs.device) < self.lengths.unsqueeze(-1),
            log_probs=log_probs,
            ended=self.ended,
            path=path,
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
    """Text responses to prompts (text or messages), prompt-major, without the stop string and what follows it; and whether each
    one ended before ``max_tokens``.

    A response depends on the prompt, the seed and its index in the list. Raises the errors of ``sample`` and ``tokens``.
    """
    with quiet_transformers():  # the tokenizer warns of long text, which sample rejects
        ids = [tokens.encode_prompt(prompt) for prompt in prompts]
    drawn = sample(
        model,
        ids,
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
    model: nn.Module, prompts: Prompts, past: Any, samples: int, max_tokens: int, path: DecodingPath | None
) -> tuple[Decoder, DecodingPath]:
    """The fastest decoder that is exact for this model, or the one named by ``path``."""
    more = max_tokens - 1  # nothing is read after the last token
    if path in (None, "fast"):
        decoder = fast_decoder(model, prompts, past, samples, more)
        if decoder is not None:
            return decoder, "fast"
    if past is not None and (path == "cached" or (path is None and cache_is_exact(model, prompts, more))):
        return CachedDecoder(model, prompts, past, samples, more), "cached"
    if path in (None, "recomputed"):
        return RecomputingDecoder(model, prompts, samples, more), "recomputed"
    raise SurefootError(f"path={path!r}: not available for {type(model).__name__}; leave it out")


def check_prompts(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, eos_ids: Sequence[int]) -> None:
    """Raise SurefootError for prompts that this model can't answer."""
    if not prompts:
        raise SurefootError("prompts: the list is empty; give at least one prompt")
    if max_tokens < 1:
        raise SurefootError(f"max_tokens={max_tokens}: must be at least 1")
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
    path: DecodingPath | None,
) -> None:
    """Raise SurefootError for invalid sampling options."""
    if samples < 1:
        raise SurefootError(f"samples={samples}: must be at least 1")
    if not 0 < temperature < float("inf"):
        raise SurefootError(f"temperature={temperature}: must be a positive number; for the most likely token, set greedy")
    if not greedy and len(seeds) != samples * prompts:
        raise SurefootError(f"seeds: {len(seeds)} given for {prompts} prompts x samples={samples}; give one per response")
    if stop and (isinstance(stop, str) or decode is None or not all(stop)):
        raise SurefootError(f"stop={stop!r}: needs a list of non-empty strings, and decode=, which turns tokens into text")
    if path is not None and path not in get_args(DecodingPath):
        raise SurefootError(f"path={path!r}: choose one of {', '.join(get_args(DecodingPath))}")


class EndDetector:
    """Detects the end of responses: EOS by a table over the vocabulary, stop strings by decoding."""

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
        """[n] True where this token ends the slot's response; None if it ends none.   tokens [n], actions [t, N]"""
        done = self.is_eos[tokens]
        if self.stop:
            done |= torch.tensor(self.stopped(tokens.tolist(), actions, slots.tolist()), device=done.device)
        return done if bool(done.any()) else None

    def stopped(self, tokens: list[int], actions: Tensor, slots: list[int]) -> list[bool]:
        """Whether the decoded text of each slot's response contains a stop string."""
        assert self.decode is not None
        stopped = []
        for token, slot in zip(tokens, slots, strict=True):
            text = self.decode(actions[:, slot].tolist()) if self.may_complete(token) else ""
            stopped.append(any(word in text for word in self.stop))
        return stopped

    def may_complete(self, token: int) -> bool:
        """False if the token's own text rules out that a stop string ends in it; this saves decoding the response.

        Part of a character decodes to U+FFFD, and a decoder may strip spaces at the edges; such tokens always return True.
        """
        if token not in self.may_end:
            assert self.decode is not None
            text = self.decode([token])
            ends = any(word[-1].isspace() or word[-1] in text for word in self.stop)
            self.may_end[token] = ends or not text.strip() or "\ufffd" in text
        return self.may_end[token]
