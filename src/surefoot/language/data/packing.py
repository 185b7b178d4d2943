"""Prompts and responses as a causal model reads them in training: each row's real tokens side by side from column 0.

Prompts come padded on the left and responses on the right. Reading them so would cost the longest prompt plus the longest
response; packed, a batch costs its longest row. What is left of padding is behind the real tokens, where a causal model can't
see it, so that neither its amount nor its side nor its content matters, and positions count from 0 without being told.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.errors import SurefootError


@dataclass(frozen=True)
class Packed:
    """B rows of L tokens with K kept decisions among them."""

    ids: Tensor
    """[B, L]; behind a row's real tokens stands the pad token"""
    real: Tensor
    """[B, L] True at real tokens"""
    last: Tensor
    """[B] where each row's last real token is"""
    rows: Tensor
    """[K] the row of each decision"""
    steps: Tensor
    """[K] its place in the response, 0 … T − 1"""
    before: Tensor
    """[K] where in ``ids`` the token before it is: what the model says there is about this decision"""


def read(mask: Tensor) -> Tensor:
    """What is read of each response: all up to its last kept token, tokens between kept ones included.   [B, T] -> [B, T]"""
    return mask.bool().flip(-1).cumsum(-1).flip(-1) > 0


def lengths(inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """How many real tokens each row has, prompt and response.   [B]"""
    return inputs["prompt_mask"].bool().sum(-1) + read(mask).sum(-1)


def packed(inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor, pad_id: int) -> Packed:
    """Side by side what is real.

    inputs   "prompt" [B, P] and "prompt_mask" [B, P], padding anywhere
    actions  [B, T]
    mask     [B, T] True at the policy's own tokens. Other tokens before the last of them (a tool's, a user's) are read too,
             but not scored; what comes after it is padding

    Raises SurefootError where a prompt has no token: nothing would say how likely the first of its response is.
    """
    prompted, kept = inputs["prompt_mask"].bool(), mask.bool()
    real = torch.cat([prompted, read(mask)], -1)
    tokens = torch.cat([inputs["prompt"], actions], -1)
    if not bool(prompted.any(-1).all()):
        row = int((~prompted.any(-1)).nonzero()[0])
        raise SurefootError(f"prompt: row {row} of the batch has no token; begin empty prompts with one, such as the EOS token")
    place = real.cumsum(-1) - 1
    last = place[:, -1]
    width = int(last.max()) + 1
    ids = torch.full((len(tokens), width), pad_id, dtype=torch.long, device=tokens.device)
    where = real.nonzero(as_tuple=True)
    ids[where[0], place[where]] = tokens[where].long()
    rows, steps = kept.nonzero(as_tuple=True)
    return Packed(
        ids=ids,
        real=torch.arange(width, device=last.device) <= last.unsqueeze(-1),
        last=last,
        rows=rows,
        steps=steps,
        before=place[rows, prompted.shape[-1] + steps] - 1,
    )
