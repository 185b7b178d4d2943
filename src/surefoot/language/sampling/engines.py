"""What every sampling engine answers: one request, with tokens, log-probabilities and finish reasons.

The engines are "packed" and "model" (``online/engine.py``), "continuous" (``continuous.py``) and "vllm" (``vllm.py``). The
trainer computes log-probabilities again; those of an engine that is not exact are kept beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from surefoot.errors import NotFiniteError, SurefootError
from surefoot.language.data.batches import left_padded, right_padded
from surefoot.language.sampling.ends import EndDetector
from surefoot.language.sampling.sampler import Samples

EngineName = Literal["packed", "model", "continuous", "vllm"]
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


class Engine(Protocol):
    """Draws responses from softmax(logits / temperature), without top-k or top-p, with the policy's present weights."""

    name: EngineName
    reason: str
    """why this engine was chosen, in a few words"""
    exact: bool
    """whether a response depends only on its prompt, its seed and the weights, and its log-probabilities are the trainer's in
    float32, up to rounding"""

    def use(self, version: int | None) -> None:
        """Sample from the present weights from now on.

        version   the optimizer steps that they have taken, so that weights that are in use already need no transfer; None
                  transfers them anyway

        Raises SurefootError when the engine can't take them.
        """
        ...

    def sample(self, request: Request) -> Samples:
        """One response to each prompt and sample. Raises SurefootError for an invalid request, or when the engine fails."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


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
    log_probs = right_padded_numbers([numbers for _, numbers in kept], max(1, *lengths))
    if not log_probs.isfinite().all():
        raise NotFiniteError(f"sampling.engine={name!r} returned log-probabilities that are NaN or infinite; check its weights")
    prompts = [prompt for prompt in request.prompts for _ in range(request.samples)]
    prompt, prompt_mask = left_padded(prompts, request.pad_id)
    actions, mask = right_padded([ids or [request.pad_id] for ids, _ in kept], request.pad_id)
    mask &= torch.tensor([length > 0 for length in lengths]).unsqueeze(-1)
    missing = torch.tensor([answer is None for answer in answers])
    return Samples(
        prompt=prompt.to(device),
        prompt_mask=prompt_mask.to(device),
        actions=actions.to(device),
        mask=mask.to(device),
        log_probs=log_probs.to(device),
        ended=torch.tensor(ended).to(device),
        path=name,
        missing=missing.to(device) if missing.any() else None,
        version=version,
    )


def right_padded_numbers(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    """Rows of numbers in one tensor, with zeros on the right.   -> [N, width]"""
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])
