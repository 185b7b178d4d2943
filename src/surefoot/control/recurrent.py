"""LSTMs over whole rows as two loops of static shape, for compiled programs: forward in time, and backward for the gradient.

nn.LSTM can't reset its state within a row, and where it must be reset depends on the data. A step of a loop does only what
can't be done for all steps at once, for actor and critic together: with few rows, calls take longer than the arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from surefoot.accel.programs import scan

GATES = (1.0, 1.0, 2.0, 1.0)
"""tanh x = 2 σ(2x) − 1, so each of an LSTM's four gates is σ of something, scaled and shifted"""


def in_steps(lstms: Sequence[nn.LSTM], features: Sequence[Tensor], starts: Tensor, state: Tensor) -> list[Tensor]:
    """The outputs of LSTMs of one width, in a function for ``program_of``; gradients reach features and weights, not the state.

    [N, T, inputs] for each, [N, T] bool, [N, LSTMs, 2, width] -> [N, T, width] for each
    """
    weights = [lstm.all_weights[0] for lstm in lstms]
    scale = torch.tensor(GATES, dtype=state.dtype).repeat_interleave(state.shape[-1])
    of_inputs = [functional.linear(rows, w, a + b) for rows, (w, _, a, b) in zip(features, weights, strict=True)]
    x = (torch.stack(of_inputs) * scale).permute(2, 0, 1, 3).contiguous()
    weight = torch.stack([of_hidden.t() for _, of_hidden, *_ in weights]) * scale
    kept = (~starts).to(state.dtype).t()[:, None, :, None].contiguous()
    fresh = torch.contiguous_format  # a loop takes no views of the same tensor
    hidden, cell = (part.transpose(0, 1).clone(memory_format=fresh) for part in state.unbind(2))
    outputs: Tensor = _Steps.apply(x, kept, hidden, cell, weight, scale)[0]  # type: ignore[no-untyped-call]
    return list(outputs.permute(1, 2, 0, 3).unbind())


class _Steps(torch.autograd.Function):
    """x [T, k, N, 4 width], kept [T, 1, N, 1], hidden and cell [k, N, width], weight [k, width, 4 width], scale [4 width] ->
    hidden states [T, k, N, width], and what their gradient needs.
    """

    @staticmethod
    def forward(
        x: Tensor, kept: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates, before, squashed = scan(_step, (hidden, cell), (x, kept), (weight, scale))[2:]
        return gates.chunk(4, -1)[3] * squashed, gates, before, squashed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, kept, hidden, _, weight, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(kept, hidden, weight, *output)

    @staticmethod
    def backward(ctx: Any, of_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        kept, hidden, weight, output, gates, before, squashed = ctx.saved_tensors
        take, keep, new, show = gates.chunk(4, -1)
        of_gates = torch.cat([new, before, take, squashed], -1)
        of_gates = of_gates * torch.cat([take * (1 - take), keep * (1 - keep), (1 - new * new) / 2, show * (1 - show)], -1)
        derivatives = (of_gates, show * (1 - squashed * squashed), keep * kept)
        of_x = _StepsBack.apply(weight.transpose(1, 2), of_output, *derivatives, kept)  # type: ignore[no-untyped-call]
        hidden_before = torch.cat([hidden.unsqueeze(0), output[:-1]]) * kept
        return of_x, None, None, None, torch.einsum("tkni,tknj->kij", hidden_before, of_x), None


class _StepsBack(torch.autograd.Function):
    """The gradient of x from that of the hidden states; a function too, as a loop in a gradient is not traced."""

    @staticmethod
    def forward(weight: Tensor, *rows: Tensor) -> Tensor:
        zeros = torch.zeros_like(rows[0][0])
        return scan(_step_back, (zeros, zeros.clone()), [x.flip(0) for x in rows], (weight.contiguous(),))[2].flip(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep nothing: it has no gradient."""


def _step(hidden: Tensor, cell: Tensor, x: Tensor, kept: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Hidden state and cell after a step; its gates, the cell before it, and tanh of the cell after it."""
    gates = (x + _product(hidden * kept, weight)).sigmoid() * scale + (1 - scale)
    take, keep, new, show = gates.chunk(4, -1)
    before = cell * kept
    cell = keep * before + take * new
    squashed = cell.tanh()
    return show * squashed, cell, gates, before, squashed


def _step_back(
    of_hidden: Tensor,
    of_cell: Tensor,
    of_output: Tensor,
    of_gates: Tensor,
    shown: Tensor,
    keep: Tensor,
    kept: Tensor,
    weight: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of hidden state and cell before a step, and of x, from those after it and the derivatives of the step."""
    of_hidden = of_hidden + of_output
    of_cell = of_cell + of_hidden * shown
    of_x = torch.cat([of_cell, of_cell, of_cell, of_hidden], -1) * of_gates
    return _product(of_x, weight) * kept, of_cell * keep, of_x


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight without a call of a library, for few rows.   [k, N, i], [k, i, j] -> [k, N, j]"""
    return (x.unsqueeze(-1) * weight.unsqueeze(1)).sum(2)
