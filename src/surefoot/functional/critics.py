"""Critics: how a value function is fitted, and how well it fits."""

import torch
from torch import Tensor

from surefoot.functional.masking import keep_only, masked_var


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float | None = None) -> Tensor:
    """(V − R̂)², or with ``clip`` the larger of it and (V_old + clip(V − V_old, ±ε) − R̂)².   [...]

    There is no factor ½; set it in the coefficient of the value loss. Value clipping as in OpenAI Baselines' ppo2.

    Raises ValueError when ``clip`` is given without ``old_values``.

    >>> value_loss(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 3.0]))
    tensor([1., 0.])
    >>> value_loss(torch.tensor([1.0]), torch.tensor([2.0]), old_values=torch.tensor([0.0]), clip=0.5)
    tensor([2.2500])
    """
    error = (values - returns).square()
    if clip is None:
        return error
    if old_values is None:
        raise ValueError(f"clip={clip}: value clipping needs old_values; pass them or leave clip=None")
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(error, (clipped - returns).square())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 − Var(R̂ − V) / Var(R̂) over the kept entries; NaN where the returns are constant.   [...] -> []

    1 is a perfect critic, 0 is no better than a constant, negative is worse. A constant error does not change it.

    >>> explained_variance(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 3.0, 4.0]))
    tensor(1.)
    """
    residual = keep_only(returns, mask) - keep_only(values, mask)
    spread = masked_var(returns, mask)
    explained = 1 - masked_var(residual, mask) / spread
    return torch.where(spread > 0, explained, torch.full_like(explained, torch.nan))
