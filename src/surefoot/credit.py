"""Rewards to advantages and returns: which baseline, which λ."""

import torch
from torch import Tensor

from surefoot.algorithms import Objective
from surefoot.functional import discounted_returns, gae, masked_moments
from surefoot.functional.masking import keep_only
from surefoot.rollout import Credit, Rollout
from surefoot.run.distributed import merge_across_ranks


def assign_credit(rollout: Rollout, objective: Objective) -> Credit:
    """What each action of a rollout is worth, and what the critic should have said.

    ``baseline``: None -> the return; "mean" -> the return minus the batch's mean return (over all ranks); "critic" -> GAE.
    The critic's target is Â + V with Â before any normalisation, at ``value_lambda`` where that is set.
    """
    gamma, mask = objective.gamma, rollout.mask
    terminated, truncated = rollout.terminated, rollout.truncated
    if objective.baseline == "critic":

        def advantages_at(lam: float) -> Tensor:
            steps = (rollout.rewards, rollout.values, rollout.next_values)
            return gae(*steps, terminated=terminated, truncated=truncated, gamma=gamma, lam=lam, mask=mask)

        advantages = advantages_at(objective.gae_lambda)
        value_lambda = objective.gae_lambda if objective.value_lambda is None else objective.value_lambda
        targets = advantages if value_lambda == objective.gae_lambda else advantages_at(value_lambda)
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
    expected = merge_across_ranks(masked_moments(returns, mask)).mean
    return Credit(keep_only(returns - expected, mask), returns)
