"""What an update says of itself: metrics of its minibatches and of its credit, and the check of the ratio at the start."""

import math

import torch
from torch import Tensor

from surefoot.core.distributed import all_max, merge_across_ranks
from surefoot.core.rollout import Credit, Metrics, Rollout
from surefoot.errors import SurefootError
from surefoot.functional import masked_moments

START_TOLERANCE = 1e-4
"""how far the ratio may be from 1 before anything moved, where the policy computes in float32"""


class UpdateMetrics:
    """What the updates on one rollout did, minibatch by minibatch: the loss's terms, ratios and norms of gradients."""

    def __init__(self) -> None:
        self.terms: list[dict[str, float]] = []
        self.ratios: list[tuple[float, float]] = []
        self.norms: dict[str, list[float]] = {}
        self.ratio_at_start = 1.0
        self.outcome: Metrics = {}

    @property
    def seen(self) -> bool:
        return bool(self.terms)

    def add(self, terms: dict[str, float], ratios: tuple[float, float]) -> None:
        self.terms.append(terms)
        self.ratios.append(ratios)

    def took(self, norms: dict[str, float]) -> None:
        for name, norm in norms.items():
            self.norms.setdefault(name, []).append(norm)

    def summary(self) -> Metrics:
        metrics: Metrics = {name: number(sum(t[name] for t in self.terms) / len(self.terms)) for name in self.terms[0]}
        smallest, largest = zip(*self.ratios, strict=True)
        metrics["ratio_min"], metrics["ratio_max"] = over_ranks(min(smallest), max(largest))
        metrics["ratio_at_start"] = self.ratio_at_start
        for name, norms in self.norms.items():
            metrics[f"gradient_norm_{name}"] = sum(norms) / len(norms)
        return metrics


def of_credit(rollout: Rollout, credit: Credit, critic: bool) -> Metrics:
    """Moments of the advantages over all ranks, and what part of the returns' variance the critic explained."""
    metrics: Metrics = {"explained_variance": _explained_variance(rollout, credit)} if critic else {}
    moments = merge_across_ranks(masked_moments(credit.advantages, rollout.mask))
    return metrics | {"advantage_mean": number(moments.mean), "advantage_std": number(moments.var.sqrt())}


def check_ratio_at_start(ratios: tuple[float, float], rollout: Rollout, exact: bool) -> float:
    """The ratio furthest from 1 before anything moved. It is 1 unless something is wrong, so it is checked on every batch.

    ``exact``: whether the policy computes in float32 or better.
    """
    smallest, largest = over_ranks(*ratios)
    furthest = largest if largest - 1 > 1 - smallest else smallest
    if rollout.old_log_probs is None:
        return 1.0
    exact = exact and rollout.old_log_probs.dtype in (torch.float32, torch.float64)
    if exact and abs(furthest - 1) > START_TOLERANCE:
        raise SurefootError(
            f"ratio_at_start={furthest:.6f}: before the first step π_θ must equal π_old (ratio 1 ± 1e-4); the policy scores "
            "actions differently in training than in the rollout (dropout, batch-dependent layers, or a changed normaliser)"
        )
    return furthest


def _explained_variance(rollout: Rollout, credit: Credit) -> float | None:
    """That of the critic at the rollout, over all ranks."""
    residual = merge_across_ranks(masked_moments(credit.returns - rollout.values, rollout.mask))
    spread = merge_across_ranks(masked_moments(credit.returns, rollout.mask))
    return number(1 - residual.var / spread.var) if spread.var > 0 else None


def over_ranks(smallest: float, largest: float) -> tuple[float, float]:
    """The smallest and the largest over all ranks."""
    lowest, highest = all_max(torch.tensor([-smallest, largest])).tolist()
    return -lowest, highest


def number(tensor: Tensor | float) -> float | None:
    """A metric's value; None (null) where it is not defined, such as the explained variance of constant returns."""
    value = float(tensor)
    return value if math.isfinite(value) else None
