"""Losses on pairs of a chosen and a rejected answer, and on single labelled answers. Per pair or answer; the caller reduces."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """−log σ(r_chosen − r_rejected), for a reward model.   [...]   Bradley and Terry (1952).

    >>> bradley_terry_loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    tensor([0.6931, 0.1269])
    """
    return -logsigmoid(chosen - rejected)


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """−log σ(β((log π_c − log π_r) − (log ref_c − log ref_r))) on summed log-probabilities of whole answers.   [...]

    ``label_smoothing`` is the assumed rate of swapped labels (conservative DPO).
    Rafailov et al. 2023 (arXiv 2305.18290), equation 7.

    >>> dpo_loss(torch.tensor([-4.0]), torch.tensor([-9.0]), torch.tensor([-5.0]), torch.tensor([-8.0]), beta=0.5)
    tensor([0.3133])
    """
    logits = beta * ((chosen - rejected) - (ref_chosen - ref_rejected))
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """(h − 1/(2β))² with h = (log π_c − log π_r) − (log ref_c − log ref_r), of whole answers.   [...]

    ``label_smoothing`` is the assumed rate of swapped labels, of which each draws h to −1/(2β).
    Azar et al. 2023 (arXiv 2310.12036), equation 17, where β is τ.
    """
    margin, wanted = (chosen - rejected) - (ref_chosen - ref_rejected), 1 / (2 * beta)
    return (1 - label_smoothing) * (margin - wanted) ** 2 + label_smoothing * (margin + wanted) ** 2


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float, margin: float) -> Tensor:
    """−log σ(β(log π_c/|c| − log π_r/|r|) − γ) on mean log-probabilities per token of whole answers; γ is ``margin``.   [...]

    Meng et al. 2024 (SimPO, arXiv 2405.14734), equation 6.

    >>> simpo_loss(torch.tensor([-1.0]), torch.tensor([-1.5]), beta=2.0, margin=1.0)
    tensor([0.6931])
    """
    return -logsigmoid(beta * (chosen - rejected) - margin)


def orpo_loss(chosen: Tensor, rejected: Tensor, weight: float) -> Tensor:
    """−log π_c/|c| − λ log σ(log odds_c − log odds_r) on mean log-probabilities per token of whole answers.   [...]

    The odds of an answer are p/(1 − p) with p = exp(log π/|y|). λ is ``weight``.
    Hong et al. 2024 (ORPO, arXiv 2403.07691), equations 4 to 7.

    >>> orpo_loss(torch.tensor([0.5]).log(), torch.tensor([0.2]).log(), weight=0.1)
    tensor([0.7155])
    """

    def log_odds(mean: Tensor) -> Tensor:
        return mean - torch.log(-torch.expm1(mean.clamp(max=-1e-6)))  # the odds of an answer that is certain are infinite

    return -chosen - weight * logsigmoid(log_odds(chosen) - log_odds(rejected))


def kto_loss(log_probs: Tensor, ref_log_probs: Tensor, good: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """1 − σ(β(h − z₀)) of good answers and 1 − σ(β(z₀ − h)) of bad ones, with h = log π − log ref of whole answers.   [...]

    ``good`` is true for good answers. ``baseline`` is z₀, an estimate of KL(π‖ref), without gradient. The caller weights both
    labels. Ethayarajh et al. 2024 (arXiv 2402.01306), section 4, with λ_y = 1.

    >>> kto_loss(torch.tensor([-4.0, -4.0]), torch.tensor([-5.0, -5.0]), torch.tensor([1, 0]), torch.tensor(0.0), beta=0.5)
    tensor([0.3775, 0.6225])
    """
    gain = beta * ((log_probs - ref_log_probs) - baseline)
    return torch.sigmoid(torch.where(good.bool(), -gain, gain))


def labelled_clip_loss(first: Tensor, second: Tensor, preference: Tensor, wrong: float) -> Tensor:
    """−y log p − (1 − y) log(1 − p) with p = (1 − w) σ(R₁ − R₂) + w/2, for rewards summed over two clips.   [...]

    ``preference`` is y: 1 if the first is better, 0 if the second is, ½ for equal ones. ``wrong`` is w, the assumed share of
    labels that are random. Christiano et al. 2017 (arXiv 1706.03741), section 2.2.3 and appendix A.

    >>> labelled_clip_loss(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([1.0]), wrong=0.1)
    tensor([0.1711])
    """
    p = (1 - wrong) * torch.sigmoid(first - second) + wrong / 2
    return -(preference * p.clamp_min(1e-7).log() + (1 - preference) * (1 - p).clamp_min(1e-7).log())
