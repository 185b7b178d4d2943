"""Advantages and returns from rewards: the baseline and λ of an objective."""

import torch
from torch import Tensor

from surefoot.core.algorithms import Objective
from surefoot.core.distributed import merge_across_ranks
from surefoot.core.rollout import Credit, Rollout
from surefoot.errors import SurefootError
from surefoot.functional import discounted_returns, gae, group_advantages, leave_one_out_advantages, masked_moments
from surefoot.functional.masking import keep_only


def assign_credit(rollout: Rollout, objective: Objective) -> Credit:
    """The advantages of a rollout, and the returns that the critic is fitted to.

    ``baseline``: None -> the return; "mean" -> the return minus the batch's mean return (over all ranks); "critic" -> GAE;
    "group" and "leave_one_out" -> for every token of a response, the response's return less that of the others to its prompt.
    The critic's target is Â + V with Â before any normalisation, at ``value_lambda`` where that is set.

    All rows of a group must be on the same rank. Rows with nothing kept are left out.

    Raises SurefootError if the baseline needs groups and the rollout has none.
    """
    gamma, mask = objective.gamma, rollout.mask
    terminated, truncated = rollout.terminated, rollout.truncated
    if objective.baseline == "critic":

        def advantages_at(lam: float) -> Tensor:
            steps = (rollout.rewards, rollout.values, rollout.next_values)
            return gae(*steps, terminated=terminated, truncated=truncated, gamma=gamma, lam=lam, mask=mask)

        advantages = advantages_at(objective.gae_lambda)
        same = objective.target_lambda == objective.gae_lambda
        targets = advantages if same else advantages_at(objective.target_lambda)
        return Credit(advantages, keep_only(targets + rollout.values, mask))
    returns = discounted_returns(
        rollout.rewards,
        torch.zeros_like(rollout.rewards),
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        mask=mask,
    )
    if objective.baseline is None:
        return Credit(returns, returns)
    if objective.compares_in_groups:
        return Credit(keep_only(_group_advantages(rollout, returns, objective).unsqueeze(-1).expand_as(mask), mask), returns)
    expected = merge_across_ranks(masked_moments(returns, mask)).mean
    return Credit(keep_only(returns - expected, mask), returns)


def _group_advantages(rollout: Rollout, returns: Tensor, objective: Objective) -> Tensor:
    """The advantage of each row within its group: of its return from the first kept step.   [B]"""
    if rollout.group is None:
        raise SurefootError(
            f"objective.baseline={objective.baseline!r}: this rollout has no groups; set Rollout.group in its collector "
            "to the number of the prompt that each row answers"
        )
    row_returns = returns.gather(-1, rollout.mask.int().argmax(-1, keepdim=True)).squeeze(-1)
    _, index, sizes = rollout.group.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    order = index.argsort(stable=True)
    place = torch.empty_like(index)
    place[order] = torch.arange(len(index), device=index.device) - (sizes.cumsum(0) - sizes)[index[order]]
    table = row_returns.new_zeros(len(sizes), int(sizes.max()))
    counts = torch.zeros_like(table, dtype=torch.bool)
    table[index, place], counts[index, place] = row_returns, rollout.mask.any(-1)
    if objective.baseline == "leave_one_out":
        return leave_one_out_advantages(table, counts)[index, place]
    return group_advantages(table, counts, scale=objective.scale_by_group)[index, place]
