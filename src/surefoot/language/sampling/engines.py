"""What every sampling engine answers: one request, with tokens, log-probabilities and finish reasons.

The engines are "packed" and "model" (``online/engine.py``), "continuous" (``continuous.py``) and "vllm" (``vllm.py``). The
trainer computes log-probabilities again; those of an engine that is not exact are kept beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from surefoot.core.rollout import map_tensors
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.files import check_flags, check_whole
from surefoot.language.data.batches import left_padded, right_padded
from surefoot.language.sampling.ends import EndDetector

EngineName = Literal["packed", "model", "continuous", "vllm"]
DecodingPath = Literal["packed", "cached", "recomputed"]
"""how tokens are decoded: with packed weights, or by the model's forward pass with or without its cache"""
DecodedBy = DecodingPath | Literal["continuous", "vllm"]
"""the path that decoded, or the engine that has no such paths"""
FinishReason = Literal["stop", "length", "error"]
OnFinished = Callable[[int, Sequence[int]], None]
"""called with the number and the tokens of a response"""


@dataclass(frozen=True)
class Request:
    """Prompts to answer. Responses are prompt-major: all samples of prompt 0 first."""

    prompts: Sequence[Sequence[int]]
    """token ids"""
    seeds: Sequence[int]
    """one per response; unused if greedy"""
    max_tokens: int
    eos_ids: Sequence[int]
    pad_id: int
    samples: int = 1
    """responses to each prompt"""
    temperature: float = 1.0
    stop: Sequence[str] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    """from tokens to text, if there are stop strings"""
    greedy: bool = False
    """the most likely tokens"""
    on_finished: OnFinished | None = None
    """called for a response that ends before others do, where the engine knows; in any thread"""


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


class Engine(Protocol):
    """Draws responses from softmax(logits / temperature), without top-k or top-p, with the policy's present weights."""

    name: EngineName
    reason: str
    """why this engine was chosen, in a few words"""
    exact: bool
    """whether a response depends only on its prompt, its seed and the weights, and its log-probabilities are the trainer's in
    float32, up to rounding"""
    version: int | None = None
    """of the weights in use"""

    def use(self, version: int | None) -> None:
        """Sample from the present weights from now on.

        version   the optimizer steps that they have taken, so that weights that are in use already need no transfer; None
                  transfers them anyway

        Raises SurefootError when the engine can't take them.
        """
        self.version = version

    def sample(self, request: Request) -> Samples:
        """One response to each prompt and sample. Raises SurefootError for an invalid request, or when the engine fails."""

    def close(self) -> None:
        """Release what the engine holds; by default nothing."""
        return


def check_request(model: Any, request: Request) -> None:
    """Raise SurefootError for a request that is invalid, or that this model can't answer."""
    r = request
    if not r.prompts:
        raise SurefootError("prompts: the list is empty; give at least one prompt")
    check_whole(1, max_tokens=r.max_tokens, samples=r.samples)
    check_flags(greedy=r.greedy)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, ids in [("eos_ids", r.eos_ids), *((f"prompts[{index}]", prompt) for index, prompt in enumerate(r.prompts))]:
        unknown = [i for i in (min(ids, default=0), max(ids, default=0)) if not 0 <= i < vocabulary]
        if unknown:
            raise SurefootError(
                f"{name}: token {unknown[0]} is outside the model's vocabulary of {vocabulary}; use the model's own tokenizer"
            )
    for index, prompt in enumerate(r.prompts):
        if not len(prompt):
            raise SurefootError(f"prompts[{index}]: has no tokens; begin it with at least one, such as BOS")
        if context and len(prompt) + r.max_tokens > context:
            raise SurefootError(
                f"prompts[{index}]: {len(prompt)} tokens and max_tokens={r.max_tokens} don't fit into the model's context of "
                f"{context}; shorten one of them"
            )
    count = len(r.prompts)
    if not 0 < r.temperature < float("inf"):
        raise SurefootError(f"temperature={r.temperature}: must be a positive number; for the most likely token, set greedy")
    if not r.greedy and len(r.seeds) != r.samples * count:
        raise SurefootError(f"seeds: {len(r.seeds)} given for {count} prompts x samples={r.samples}; give one per response")
    if r.stop and (isinstance(r.stop, str) or r.decode is None or not all(r.stop)):
        raise SurefootError(f"stop={r.stop!r}: needs a list of non-empty strings, and decode=, which turns tokens into text")


Answer = tuple[list[int], list[float], bool] | None
"""the tokens of a response, their log-probabilities, and whether the engine saw it end; None if there is none"""


def detector_for(request: Request, device: torch.device) -> EndDetector:
    """Finds the ends of responses to a request."""
    return EndDetector(request.eos_ids, request.stop, request.decode, 1 + max(request.eos_ids, default=0), device)


def samples_of(
    request: Request, answers: Sequence[Answer], device: torch.device, name: Literal["continuous", "vllm"], version: int | None
) -> Samples:
    """The answers of an engine as a batch; each is cut at its first EOS or stop string, since an engine may know neither.

    Raises NotFiniteError for log-probabilities that are not finite, and SurefootError for a response without an end.
    """
    detector = detector_for(request, device)
    lengths, ended = [], []
    for answer in answers:
        ids, _, stopped = answer or ([], [], False)
        length = detector.length(ids[: request.max_tokens])
        ended.append(length > 0 or (stopped and len(ids) <= request.max_tokens))  # it may decode a stop string otherwise
        lengths.append(length or min(len(ids), request.max_tokens))
        if answer is not None and not ended[-1] and len(ids) < request.max_tokens:
            raise SurefootError(
                f"sampling.engine={name!r}: a response has {len(ids)} tokens, without EOS or stop string, and "
                f"max_tokens={request.max_tokens}; give the engine room for the longest prompt and response"
            )
    kept = [([], []) if a is None else (a[0][:n], a[1][:n]) for a, n in zip(answers, lengths, strict=True)]
    prompts = [prompt for prompt in request.prompts for _ in range(request.samples)]
    drawn = padded_samples(prompts, kept, ended, [answer is None for answer in answers], name, request.pad_id, device)
    if not drawn.log_probs.isfinite().all():
        raise NotFiniteError(f"sampling.engine={name!r} returned log-probabilities that are NaN or infinite; check its weights")
    return replace(drawn, version=version)


def padded_samples(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[tuple[list[int], list[float]]],
    ended: list[bool],
    missing: list[bool],
    path: DecodedBy,
    pad_id: int,
    device: torch.device,
) -> Samples:
    """Responses, each with its log-probabilities, as a batch; the mask has no token of an empty one."""
    prompt, prompt_mask = left_padded(prompts, pad_id)
    actions, mask = right_padded([ids or [pad_id] for ids, _ in responses], pad_id)
    mask &= torch.tensor([bool(ids) for ids, _ in responses]).unsqueeze(-1)
    log_probs = torch.zeros(mask.shape)
    for row, (_, numbers) in enumerate(responses):
        log_probs[row, : len(numbers)] = torch.tensor(numbers)
    lost = torch.tensor(missing) if any(missing) else None
    made = Samples(prompt, prompt_mask, actions, mask, log_probs, torch.tensor(ended), path, missing=lost)
    on_device: Samples = map_tensors(lambda x: x.to(device), made)
    return on_device
