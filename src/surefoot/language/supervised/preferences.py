"""A reward model as a policy over two answers, so that it is trained like every other policy.

Bradley and Terry (1952) say that the chosen answer is preferred with probability σ(r_chosen − r_rejected). That is the softmax
of the two scores: a policy with two actions. Its policy gradient with weight 1 on "the first", the chosen one, is the gradient
of −log σ(r_chosen − r_rejected).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.core.rollout import Evaluation, Policy
from surefoot.language.models.policy import checkpoint_layers, computing
from surefoot.language.models.reward_model import RewardModel

CHOSEN, REJECTED = "chosen", "rejected"


class PairPolicy(Policy):
    """Which of two answers is better, by a reward model's raw scores.

    ``inputs`` are {"chosen" [B, L], "chosen_mask" [B, L], "rejected" [B, M], "rejected_mask" [B, M]}, padded on the right.
    """

    def __init__(self, model: RewardModel, bf16: bool = False, checkpointing: bool = False) -> None:
        super().__init__()
        self.model, self.bf16, self.exact, self.checkpointing = model, bf16, not bf16, checkpointing
        if checkpointing:
            checkpoint_layers(model)
        self.eval()

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probability of taking answer 0 (the chosen) or 1, and the entropy of the choice.   [B, 1] -> all [B, 1]"""
        both = self.scores(inputs).log_softmax(-1)
        entropy = -(both.exp() * both).sum(-1, keepdim=True)
        return Evaluation(both.gather(-1, actions), entropy)

    def scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Raw scores of the chosen and the rejected answer.   -> [B, 2]"""
        with computing(self, self.checkpointing, self.bf16):
            found = [self.model.raw(*_trimmed(inputs[side], inputs[f"{side}_mask"])) for side in (CHOSEN, REJECTED)]
        return torch.stack(found, -1).float()

    def costs(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Tokens of both answers.   [B]"""
        return inputs["chosen_mask"].sum(-1) + inputs["rejected_mask"].sum(-1)

    def train(self, mode: bool = True) -> "PairPolicy":
        """Stay in evaluation mode: no dropout."""
        return super().train(False)


def _trimmed(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Without the columns on the right in which no row has a token."""
    width = int(mask.sum(-1).max())
    return ids[:, :width], mask[:, :width]
