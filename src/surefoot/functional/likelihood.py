"""Log-probability and entropy of a choice among n, from logits. Temperature divides logits, everywhere alike."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log π(token) with π = softmax(logits / temperature).   [..., n], [...] integer -> [...]

    >>> token_log_probs(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([1])).exp()
    tensor([0.7500])
    """
    return _of_tokens((logits / temperature).log_softmax(-1), tokens)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """−Σ π log π in nats, with π = softmax(logits / temperature); a logit of −inf counts nothing.   [..., n] -> [...]"""
    return _entropy((logits / temperature).log_softmax(-1))


def chunked_likelihood(
    hidden: Tensor, tokens: Tensor, head: Callable[[Tensor], Tensor], temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """``token_log_probs`` and ``token_entropy`` of ``head(hidden)``, with the logits of ``chunk`` rows at a time.

    hidden  what the head reads   [N, width]
    tokens  [N] integer
    head    [rows, width] -> logits [rows, n], each row by itself; gradient reaches whatever it uses

    Returns two [N]. The logits of a chunk are computed again in the backward pass, so no pass holds more than one chunk.
    Half-precision logits are converted to float32 first.
    """

    def of(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        log_probs = (logits / temperature).log_softmax(-1)
        return _of_tokens(log_probs, tokens), _entropy(log_probs)

    if len(hidden) <= chunk:  # one chunk is what may be held: nothing to gain from computing it again
        return of(hidden, tokens)
    if type(head) is nn.Linear:
        inputs = hidden, head.weight, head.bias, tokens, temperature, chunk
        both: tuple[Tensor, Tensor] = LinearLikelihood.apply(*inputs)  # type: ignore[no-untyped-call]
        return both

    def stacked(hidden: Tensor, tokens: Tensor) -> Tensor:
        # One tensor, so that the backward pass uses and frees all that is computed again, even if one of both has no gradient.
        return torch.stack(of(hidden, tokens))

    parts = [
        checkpoint(stacked, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(torch.split(hidden, chunk), torch.split(tokens, chunk), strict=True)
    ]
    log_probs, entropy = torch.cat(parts, 1)
    return log_probs, entropy


class LinearLikelihood(torch.autograd.Function):
    """``chunked_likelihood`` of a linear head, differentiated by hand, with softmax p of the logits z / temperature:

    ∂ log p_a / ∂z = 1_a − p  and  ∂H / ∂z = −p (log p + H), both over temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Both [N]; see ``chunked_likelihood``."""
        device = hidden.device.type
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        cast, *head = _cast(ctx.dtype, hidden, weight, bias)
        log_probs, entropy = [], []
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden), chunk):
                each = _log_softmax(cast[start : start + chunk], *head, temperature=temperature)
                log_probs.append(_of_tokens(each, tokens[start : start + chunk]))
                entropy.append(_entropy(each))
        result = torch.cat(log_probs), torch.cat(entropy)
        ctx.save_for_backward(hidden, weight, bias, tokens, result[1])
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden [N, width], weight [n, width] and bias [n], where they are needed."""
        *inputs, tokens, entropy = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is differentiated again, as in natural steps: left to autograd
            return LinearLikelihood.differentiable(ctx, inputs, tokens, of_log_probs, of_entropy)
        hidden, weight, bias = _cast(ctx.dtype, *inputs)
        working = torch.promote_types(ctx.dtype, torch.float32)
        wanted = zip(inputs, ctx.needs_input_grad, strict=False)
        of: list[Any] = [torch.zeros_like(x, dtype=working) if need else None for x, need in wanted]
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                log_probs = _log_softmax(hidden[part], weight, bias, temperature=ctx.temperature)
                both = (None if x is None else x[part].unsqueeze(-1) for x in (of_log_probs, of_entropy))
                of_logits = _of_logits(log_probs, tokens[part], entropy[part].unsqueeze(-1), *both).div_(ctx.temperature)
                if of[2] is not None:
                    of[2] += of_logits.sum(0)
                of_logits = of_logits.to(ctx.dtype)
                if of[0] is not None:
                    of[0][part] = of_logits @ weight
                if of[1] is not None and working == ctx.dtype:
                    of[1].addmm_(of_logits.t(), hidden[part])
                elif of[1] is not None:
                    of[1] += of_logits.t() @ hidden[part]
        return (*(None if each is None else each.to(x.dtype) for each, x in zip(of, inputs, strict=True)), None, None, None)

    @staticmethod
    def differentiable(ctx: Any, inputs: list[Any], tokens: Tensor, *of_both: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients by autograd, which can be differentiated again, with all logits at once."""
        with torch.autocast(inputs[0].device.type, enabled=False):
            log_probs = _log_softmax(*_cast(ctx.dtype, *inputs), temperature=ctx.temperature)
        both = zip((_of_tokens(log_probs, tokens), _entropy(log_probs)), of_both, strict=True)
        outputs, of_outputs = zip(*((x, of) for x, of in both if of is not None), strict=True)
        wanted = [x for x, need in zip(inputs, ctx.needs_input_grad, strict=False) if need]
        gradients = iter(torch.autograd.grad(outputs, wanted, of_outputs, create_graph=True))
        return (*(next(gradients) if need else None for need in ctx.needs_input_grad[:3]), None, None, None)


def _cast(dtype: torch.dtype, *tensors: Any) -> list[Any]:
    return [None if x is None else x.to(dtype) for x in tensors]


def _of_logits(
    log_probs: Tensor, tokens: Tensor, entropy: Tensor, of_log_probs: Tensor | None, of_entropy: Tensor | None
) -> Tensor:
    """The gradient of logits, before temperature; changes ``log_probs``.   [rows, n], [rows], [rows, 1] -> [rows, n]"""
    gradient = log_probs.exp()
    if of_entropy is None:
        assert of_log_probs is not None, "backward is called with at least one gradient"
        gradient.mul_(of_log_probs).neg_()
    else:
        weights = log_probs.masked_fill_(log_probs == -torch.inf, 0).add_(entropy).mul_(of_entropy)
        gradient.mul_(weights if of_log_probs is None else weights.add_(of_log_probs)).neg_()
    if of_log_probs is not None:
        gradient.scatter_add_(-1, tokens.long().unsqueeze(-1), of_log_probs.to(gradient.dtype))
    return gradient


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float) -> Tensor:
    logits = nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits / temperature).log_softmax(-1)


def _of_tokens(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)


def _entropy(log_probs: Tensor) -> Tensor:
    possible = log_probs > -torch.inf
    return -(log_probs.exp() * torch.where(possible, log_probs, torch.zeros_like(log_probs))).sum(-1)
