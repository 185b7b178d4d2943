"""An LSTM that is told where episodes begin, and forgets there.

Hochreiter & Schmidhuber 1997. A rollout of a policy with memory holds, beside the leaves of the observations, where episodes
start [B, T] and what was remembered before its first step [B, memories, 2, width].
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

STARTS = "lstm start"
REMEMBERED = "lstm state"


class Memory(nn.Module):
    """Features to features that also know what came before them in the episode.

    Weights are orthogonal (gain 1) and biases zero, drawn from ``generator``.
    """

    def __init__(self, inputs: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True, device="meta").to_empty(device="cpu")
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter, generator=generator)
            else:
                nn.init.zeros_(parameter)

    def forward(self, features: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[N, T, inputs], [N, T] bool, [N, 2, width] -> [N, T, width], and the state after the last step.

        ``state`` is hidden and cell before the first step; a row's is zero from each of its starts on.
        """
        hidden, cell = state[:, 0], state[:, 1]
        pieces = []
        # The library's loop over time is fast, but can't forget: so one call from each start of any row to the next.
        # (A single step is told apart by its shape alone, so that a graph can be traced through it.)
        later = starts.any(0).nonzero().flatten().tolist() if features.shape[1] > 1 else []
        cuts = [0, *(t for t in later if t), features.shape[1]]
        for begin, end in pairwise(cuts):
            forgotten = starts[:, begin, None]
            hidden, cell = hidden.masked_fill(forgotten, 0), cell.masked_fill(forgotten, 0)
            piece, (last_hidden, last_cell) = self.lstm(features[:, begin:end], (hidden[None], cell[None]))
            hidden, cell = last_hidden[0], last_cell[0]
            pieces.append(piece)
        return torch.cat(pieces, 1), torch.stack([hidden, cell], 1)
