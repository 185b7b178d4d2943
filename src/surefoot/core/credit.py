"""Advantages and returns from rewards: the baseline and λ of an objective."""

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.core.algorithms import Objective
from surefoot.core.rollout import Credit, Metrics, Rollout
from surefoot.errors import SurefootError
from surefoot.functional import (
    discounted_returns,
    gae,
    group_advantages,
    leave_one_out_advantages,
    masked_moments,
    pair_advantages,
)
from surefoot.functional.masking import keep_only
from surefoot.ranks.collectives import all_sum, in_float64, merge_across_ranks


def assign_credit(rollout: Rollout, objective: Objective) -> Credit:
    """The advantages of a rollout, and the returns that the critic is fitted to.

    ``baseline``: None -> the return; "mean" -> the return minus the batch's mean return (over all ranks); "critic" -> GAE;
    "group" and "leave_one_out" -> for every token of a response, the response's return less that of the others to its prompt;
    "pair" -> for every token of the best and of the worst response to a prompt, plus and minus the weight of DPO's gradient.
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
        rollout.rewards, torch.zeros_like(rollout.rewards), terminated=terminated, truncated=truncated, gamma=gamma, mask=mask
    )
    if objective.baseline is None:
        return Credit(returns, returns)
    if objective.compares_in_groups:
        return Credit(keep_only(_group_advantages(rollout, returns, objective).unsqueeze(-1).expand_as(mask), mask), returns)
    expected = merge_across_ranks(masked_moments(returns, mask)).mean
    return Credit(keep_only(returns - expected, mask), returns)


def preference_metrics(rollout: Rollout, credit: Credit, objective: Objective) -> Metrics:
    """Mean DPO loss of the pairs of "pair" before the update, and how often the implicit rewards rank them right."""
    groups = _Groups.of(rollout, objective)
    advantages, counts = groups.table(_first(credit.advantages, rollout.mask)), groups.table(rollout.mask.any(-1))
    sizes = counts.sum(-1, keepdim=True).clamp(min=1).to(advantages.dtype)
    wrong = advantages / (objective.pair_beta * sizes)  # σ(−margin)
    wrong = wrong[advantages > 0]
    right = (wrong < 0.5).sum() + 0.5 * (wrong == 0.5).sum()
    sums = torch.stack([-torch.log1p(-wrong).sum(), right, wrong.new_tensor(wrong.numel())])
    loss, right_ones, pairs = all_sum(in_float64(sums)).tolist()
    shares = (loss / pairs, right_ones / pairs) if pairs else (None, None)
    return dict(zip(("preference_loss", "preference_accuracy"), shares, strict=True))


def _first(x: Tensor, mask: Tensor) -> Tensor:
    """The first kept entry of each row.   [B, T] -> [B]"""
    return x.gather(-1, mask.int().argmax(-1, keepdim=True)).squeeze(-1)


@dataclass(frozen=True)
class _Groups:
    """Where the rows of a rollout stand in tables [prompts, samples]."""

    index: Tensor
    place: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, rollout: Rollout, objective: Objective) -> "_Groups":
        if rollout.group is None:
            raise SurefootError(
                f"objective.baseline={objective.baseline!r}: this rollout has no groups; set Rollout.group in its collector "
                "to the number of the prompt that each row answers"
            )
        _, index, sizes = rollout.group.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
        order = index.argsort(stable=True)
        place = torch.empty_like(index)
        place[order] = torch.arange(len(index), device=index.device) - (sizes.cumsum(0) - sizes)[index[order]]
        return cls(index, place, (len(sizes), int(sizes.max())))

    def table(self, rows: Tensor) -> Tensor:
        """The rows in their places, zeros elsewhere.   [B] -> [prompts, samples]"""
        table = rows.new_zeros(self.shape)
        table[self.index, self.place] = rows
        return table

    def rows(self, table: Tensor) -> Tensor:
        """The entries of a table as rows again.   [prompts, samples] -> [B]"""
        return table[self.index, self.place]


def _group_advantages(rollout: Rollout, returns: Tensor, objective: Objective) -> Tensor:
    """The advantage of each row within its group: of its return from the first kept step.   [B]"""
    groups, mask = _Groups.of(rollout, objective), rollout.mask
    table = groups.table(_first(returns, mask))
    counts = groups.table(mask.any(-1))
    if objective.baseline == "leave_one_out":
        return groups.rows(leave_one_out_advantages(table, counts))
    if objective.baseline == "pair":
        assert rollout.old_log_probs is not None, 'baseline = "pair" needs a rollout with old_log_probs'
        if rollout.ref_log_probs is None:
            raise SurefootError("objective.baseline='pair': compares with a reference, and this rollout has no ref_log_probs")
        log_ratios = keep_only(rollout.old_log_probs, mask) - keep_only(rollout.ref_log_probs, mask)
        return groups.rows(pair_advantages(table, groups.table(log_ratios.sum(-1)), objective.pair_beta, counts))
    return groups.rows(group_advantages(table, counts, scale=objective.scale_by_group))
