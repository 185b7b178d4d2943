"""Rewards to advantages and returns: which baseline, which λ."""

import torch

from surefoot.algorithms import Objective
from surefoot.functional import discounted_returns, gae, masked_moments
from surefoot.rollout import Credit, Rollout
from surefoot.run.distributed import merge_across_ranks


def assign_credit(rollout: Rollout, objective: Objective) -> Credit:
    """What each action of a rollout is worth, and what the critic should have said.

    ``baseline``: None -> the return; "mean" -> the return minus the batch's mean return (over all ranks); "critic" -> GAE.
    The critic's target is Â + V with Â before any normalisation, at ``value_lambda`` where that is set.
    """
    ends = {"terminated": rollout.terminated, "truncated": rollout.truncated, "gamma": objective.gamma}
    if objective.baseline == "critic":
        steps = (rollout.rewards, rollout.values, rollout.next_values)
        advantages = gae(*steps, **ends, lam=objective.gae_lambda, mask=rollout.mask)
        targets = advantages
        if objective.value_lambda not in (None, objective.gae_lambda):
            targets = gae(*steps, **ends, lam=objective.value_lambda, mask=rollout.mask)
        returns = torch.where(rollout.mask, targets + rollout.values, torch.zeros_like(targets))
        return Credit(advantages, returns)
    nothing_to_come = torch.zeros_like(rollout.rewards)
    returns = discounted_returns(rollout.rewards, nothing_to_come, **ends, mask=rollout.mask)
    if objective.baseline is None:
        return Credit(returns, returns)
    expected = merge_across_ranks(masked_moments(returns, rollout.mask)).mean
    return Credit(torch.where(rollout.mask, returns - expected, torch.zeros_like(returns)), returns)
