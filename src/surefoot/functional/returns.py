"""Advantages and returns: TD residual, n-step advantage, GAE, discounted returns, and the successor values they need.

Time is the last axis. After a terminated step the value is 0. After a truncated step it is V of the true final
observation. ``next_values`` may hold anything where terminated.
"""

import torch
from torch import Tensor

from surefoot.functional.masking import keep_only, last_kept


def _next_kept(values: Tensor, mask: Tensor, beyond: Tensor) -> Tensor:
    """For every t the value at the first kept step after t, or ``beyond`` [...] where none is left.   [..., T]"""
    time = values.shape[-1]
    positions = torch.arange(time, device=values.device).expand(mask.shape)
    positions = torch.where(mask.bool(), positions, torch.full_like(positions, time))
    end = torch.full_like(positions[..., :1], time)
    following = torch.cat([positions[..., 1:], end], -1).flip(-1).cummin(-1).values.flip(-1)
    padded = torch.cat([values, beyond.unsqueeze(-1).expand_as(values[..., :1])], -1)
    return padded.gather(-1, following.expand_as(values))


def successor_values(
    values: Tensor,
    last_values: Tensor,
    *,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """V of the true successor of every step: the ``next_values`` that everything else here takes.   [..., T]

    values [..., T]       V of the state before each action
    last_values [...]     V of the observation to come after the batch
    truncated [..., T]    True where the trace was cut while the episode could have gone on
    final_values [..., T] V of the final observation, read where truncated; default: the next row, as in Gymnasium's NEXT_STEP
                          autoreset, where that row is masked
    mask [..., T]         True where the policy decided. Elsewhere (tool tokens between a model's own) the successor is the
                          next *kept* step's value

    >>> successor_values(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0))
    tensor([2., 3., 4.])
    """
    following = torch.cat([values[..., 1:], last_values.unsqueeze(-1)], -1)
    result = following if mask is None else _next_kept(values, mask, last_values)
    if truncated is not None:
        result = torch.where(truncated.bool(), following if final_values is None else final_values, result)
    return result


def td_residual(rewards: Tensor, values: Tensor, next_values: Tensor, *, terminated: Tensor, gamma: float) -> Tensor:
    """δ_t = r_t + γ V(s_{t+1}) − V(s_t), with V(s_{t+1}) = 0 where terminated.   All [..., T].

    Sutton and Barto (2018), equation 6.5.

    >>> rewards, values, next_values = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 9.0])
    >>> td_residual(rewards, values, next_values, terminated=torch.tensor([False, True]), gamma=0.5)
    tensor([1., 1.])
    """
    return rewards + gamma * next_values.masked_fill(terminated.bool(), 0) - values


def n_step_advantages(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    n: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Â^{(n)}_t = Σ_{k<n} γ^k δ_{t+k}, shortened where the episode, the trace or the batch ends first.   All [..., T].

    Counts kept steps only and is 0 at the others. Schulman et al. 2016 (arXiv 1506.02438), equation 14.

    Raises ValueError for n < 1.

    >>> ends = {"terminated": torch.tensor([False, False, True]), "truncated": torch.tensor([False, False, False])}
    >>> n_step_advantages(torch.ones(3), torch.zeros(3), torch.zeros(3), **ends, gamma=0.5, n=2)
    tensor([1.5000, 1.5000, 1.0000])
    """
    if n < 1:
        raise ValueError(f"n={n}: an n-step advantage needs at least one step; set n >= 1")
    keep = torch.ones_like(terminated, dtype=torch.bool) if mask is None else mask.bool()
    delta = keep_only(td_residual(rewards, values, next_values, terminated=terminated, gamma=gamma), mask)
    ended = terminated.bool() | truncated.bool()
    advantages = delta
    nothing = torch.zeros_like(delta[..., 0])
    for _ in range(n - 1):
        rest = _next_kept(advantages, keep, nothing).masked_fill(ended, 0)
        advantages = keep_only(delta + gamma * rest, mask)
    return advantages


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation: Â_t = δ_t + γλ Â_{t+1}, restarted after each end of an episode.   All [..., T].

    The λ-weighted mean of the n-step advantages, written as the recursion it collapses to. Jumps from kept step to kept
    step (γλ once per kept step) and is 0 at the others. Schulman et al. 2016 (arXiv 1506.02438), equation 16.

    >>> rewards, values, next_values = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 9.0])
    >>> ends = {"terminated": torch.tensor([False, True]), "truncated": torch.tensor([False, False])}
    >>> gae(rewards, values, next_values, **ends, gamma=0.5, lam=0.5)
    tensor([1.2500, 1.0000])
    """
    delta = td_residual(rewards, values, next_values, terminated=terminated, gamma=gamma)
    ended = (terminated.bool() | truncated.bool()).expand_as(delta)
    left_out = torch.zeros_like(ended) if mask is None else ~mask.bool().expand_as(delta)
    advantage = torch.zeros_like(delta[..., 0])
    result = []
    columns = zip(delta.unbind(-1), true_columns(ended), true_columns(left_out), strict=True)
    for t, (delta_t, some_ended, some_left_out) in reversed(list(enumerate(columns))):
        here = torch.add(delta_t, advantage, alpha=gamma * lam)
        # Selected, not multiplied by zero: what lies beyond an end may be NaN and must not come through.
        if some_ended:
            here = torch.where(ended[..., t], delta_t, here)
        advantage = torch.where(left_out[..., t], advantage, here) if some_left_out else here
        result.append(advantage)
    advantages = torch.stack(result[::-1], -1)
    return advantages if mask is None else keep_only(advantages, mask)


def true_columns(flags: Tensor) -> list[bool]:
    """Whether any row of a column is true, so that a loop over columns can skip work; True where that can't be known at once:
    on a GPU, while a function is traced, and under ``vmap``.

    [..., T] bool -> T values

    >>> true_columns(torch.tensor([[False, True], [False, False]]))
    [False, True]
    """
    time = flags.shape[-1]
    if flags.device.type == "cpu" and not torch.compiler.is_compiling():
        try:
            return [bool(some) for some in flags.reshape(-1, time).any(0).tolist()]
        except RuntimeError:  # tensors without values
            pass
    return [True] * time


def discounted_returns(
    rewards: Tensor, next_values: Tensor, *, terminated: Tensor, truncated: Tensor, gamma: float, mask: Tensor | None = None
) -> Tensor:
    """G_t = r_t + γ G_{t+1}: rewards to go. Where the trace or the batch is cut, γ V(successor) stands for the rest.   [..., T]

    Pass ``next_values = 0`` for plain Monte-Carlo returns. Counts kept steps only and is 0 at the others.
    Sutton and Barto (2018), equation 3.9.

    >>> ends = {"terminated": torch.tensor([False, False, True]), "truncated": torch.tensor([False, False, False])}
    >>> discounted_returns(torch.ones(3), torch.zeros(3), **ends, gamma=0.5)
    tensor([1.7500, 1.5000, 1.0000])
    """
    keep = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool().expand_as(rewards)
    # GAE at λ = 1 of a critic that is zero everywhere, with a value to come only where the trace stops.
    to_come = torch.where(truncated.bool() | last_kept(keep), next_values, torch.zeros_like(rewards))
    zero = torch.zeros_like(rewards)
    return gae(rewards, zero, to_come, terminated=terminated, truncated=truncated, gamma=gamma, lam=1.0, mask=mask)
