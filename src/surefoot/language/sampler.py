"""Sampling responses on the policy's own weights: every token with its log-probability, from one pass.

A response depends on its prompt, its seed and the weights. Its company, its place in the batch and the padding change logits by
rounding (about 1e-6), which changes a token only where its random number falls that close to a border between two tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from surefoot.errors import NotFiniteError, SurefootError
from surefoot.language.fast_decode import fast_decoder
from surefoot.language.kv_cache import CachedDecoder, Decoder, Prompts, RecomputingDecoder, read_prompts
from surefoot.seeding import derived_seed

if TYPE_CHECKING:
    from surefoot.language.tokens import Tokens

Path = Literal["fast", "cached", "recomputed"]
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
    path: Path

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response.   [N]"""
        return self.mask.sum(-1)

    def responses(self) -> list[list[int]]:
        """The tokens of each response, without padding."""
        return [row[:length] for row, length in zip(self.actions.tolist(), self.lengths.tolist(), strict=True)]


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
    path: Path | None = None,
) -> Samples:
    """Draw ``samples`` responses to each prompt from softmax(logits / temperature), the whole of it: no top-k, no top-p.

    A response ends with one of ``eos_ids``, with the token that completes one of the ``stop`` strings in its decoded text, or
    at ``max_tokens``. ``seeds`` has one number per response, in the order of the result: response i draws one uniform number
    per token from a generator of its own and takes the token where the cumulative distribution passes it. ``greedy`` takes the
    likeliest token instead, needs no seeds and reports the same log-probabilities.

    The prompt is read once for all its samples; finished responses leave the batch. The model is in eval mode meanwhile, and
    without gradient. ``path`` is chosen by what the model allows (``Samples.path`` says which); asking for one is for tests.
    Raises SurefootError for prompts, seeds, limits or a path that cannot be, NotFiniteError where the model's logits are not finite.
    """
    check(model, prompts, samples, max_tokens, temperature, seeds, stop, decode, greedy, path)
    device = model.get_input_embeddings().weight.device
    batch = left_padded(prompts, pad_id, device)
    rows = samples * len(prompts)
    uniforms = None if greedy else uniforms_of(seeds, max_tokens).to(device)
    ending = Ending(eos_ids, stop, decode, model.get_input_embeddings().weight.shape[0], device)
    actions = torch.full((max_tokens, rows), pad_id, dtype=torch.long, device=device)
    lengths = torch.full((rows,), max_tokens, dtype=torch.long, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    log_probs: Tensor | None = None
    with torch.no_grad(), evaluating(model):
        logits, past = read_prompts(model, batch)
        decoder, used = decoder_for(model, batch, past, samples, max_tokens, path)
        logits = logits.repeat_interleave(samples, 0)
        slots = torch.arange(rows, device=device)  # which response each slot of the decoder holds
        for now in range(max_tokens):
            known = log_softmax(logits, temperature)
            if log_probs is None:
                log_probs = known.new_zeros(max_tokens, rows)
            tokens = known.argmax(-1) if uniforms is None else inverse_cdf(known, uniforms[now].index_select(0, slots))
            actions[now].index_copy_(0, slots, tokens)
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
    assert log_probs is not None
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
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 1,
    stop: Sequence[str] = (),
    greedy: bool = False,
) -> list[str]:
    """Answers as text, ``samples`` to each prompt (text or messages), prompt-major; a stop string and what follows is cut off."""
    drawn = sample(
        model,
        [tokens.encode_prompt(prompt) for prompt in prompts],
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
    return [before(tokens.decode(ids), stop) for ids in drawn.responses()]


def before(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=None)]


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), in float32 at least.   [n, vocabulary] -> [n, vocabulary]"""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative distribution passes u ∈ [0, 1).   [n, vocabulary], [n] -> [n]

    Sums in float64 and scales u by what they reach, so that no token is reached whose probability is 0.
    """
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    passed = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    return passed.clamp_(max=log_probs.shape[-1] - 1)  # beyond the end is where NaN leads, which is told later


def uniforms_of(seeds: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1) for every token of every response, each column from its own generator.   -> [count, N] float64"""
    columns, generator = [], torch.Generator()
    for seed in seeds:
        columns.append(torch.rand(count, generator=generator.manual_seed(seed), dtype=torch.float64))
    return torch.stack(columns, 1)


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Prompts:
    """The prompts in one tensor, ending together.   -> ids and mask [G, P]"""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return Prompts(ids, torch.arange(longest, device=device) >= longest - lengths.unsqueeze(-1))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
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
    model: nn.Module, prompts: Prompts, past: Any, samples: int, max_tokens: int, path: Path | None
) -> tuple[Decoder, Path]:
    """The fastest way that is right for this model, or the one asked for."""
    more = max_tokens - 1  # nothing is read after the last token
    if path in (None, "fast"):
        found = fast_decoder(model, prompts, past, samples, more)
        if found is not None:
            return found, "fast"
    if path in (None, "cached") and past is not None:
        return CachedDecoder(model, prompts, past, samples, more), "cached"
    if path in (None, "recomputed"):
        return RecomputingDecoder(model, prompts, samples, more), "recomputed"
    raise SurefootError(f"path={path!r}: not possible for {type(model).__name__}; leave it out")


class Ending:
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


def check(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samples: int,
    max_tokens: int,
    temperature: float,
    seeds: Sequence[int],
    stop: Sequence[str],
    decode: object,
    greedy: bool,
    path: Path | None,
) -> None:
    """Refuse in one line what can't be sampled."""
    if not prompts:
        raise SurefootError("prompts: none given; give at least one")
    for name, number in (("samples", samples), ("max_tokens", max_tokens)):
        if number < 1:
            raise SurefootError(f"{name}={number}: must be at least 1")
    if not 0 < temperature < float("inf"):
        raise SurefootError(f"temperature={temperature}: must be a positive number; greedy takes the likeliest token instead")
    if not greedy and len(seeds) != samples * len(prompts):
        raise SurefootError(f"seeds: {len(seeds)} given for {len(prompts)} prompts x samples={samples}; give one per response")
    if stop and (decode is None or not all(stop)):
        raise SurefootError(f"stop={list(stop)!r}: needs strings that are not empty, and decode=, which turns tokens into text")
    if path is not None and path not in get_args(Path):
        raise SurefootError(f"path={path!r}: choose one of {', '.join(get_args(Path))}")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise SurefootError(f"prompts[{index}]: has no tokens; a response needs at least one to follow, such as BOS")
        if max(prompt) >= vocabulary or min(prompt) < 0:
            raise SurefootError(
                f"prompts[{index}]: token {max(prompt)} is not among the model's {vocabulary}; use the tokenizer made for the model"
            )
        if context and len(prompt) + max_tokens > context:
            raise SurefootError(
                f"prompts[{index}]: {len(prompt)} tokens and max_tokens={max_tokens} don't fit into the model's context of {context}; "
                "shorten one of them"
            )
