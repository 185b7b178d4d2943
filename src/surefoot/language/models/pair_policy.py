"""The policy over two answers whose scores are those of a reward model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.core.rollout import Evaluation
from surefoot.language.models.padding_free import reason_for_padding
from surefoot.language.models.policy.passes import TextPolicy, checkpoint_layers, computing
from surefoot.language.models.reward_model import RewardModel

CHOSEN, REJECTED = "chosen", "rejected"
ANSWER, MISMATCHED = "answer", "mismatched"
"""sides of the inputs with a labelled answer in place of the two, and with the answer to another prompt"""


class PairPolicy(TextPolicy):
    """Chooses the better of two answers by a reward model's raw scores, or labels one answer as good (0) or bad (1).

    ``inputs`` are {"chosen" [B, L], "chosen_mask" [B, L], "rejected" [B, M], "rejected_mask" [B, M]}, padded on the right; or
    {"answer" [B, L], "answer_mask" [B, L]}. For a pooled head "chosen_trained" and so on are True at the answer's tokens.
    """

    def __init__(self, model: RewardModel, bf16: bool = False, checkpointing: bool = False, padding_free: bool = False) -> None:
        super().__init__()
        self.padding_reason = reason_for_padding(model.backbone) if padding_free else None
        model.padding_free = padding_free and self.padding_reason is None
        self.model, self.bf16, self.exact, self.checkpointing = model, bf16, not bf16, checkpointing
        if checkpointing:
            checkpoint_layers(model)
        self.eval()

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probability of choosing answer 0 (the chosen) or 1, and the entropy of the choice.   [B, 1] -> all [B, 1]"""
        self.make_ready()
        both = self.scores(inputs).log_softmax(-1)
        entropy = -(both.exp() * both).sum(-1, keepdim=True)
        return Evaluation(both.gather(-1, actions), entropy)

    def scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Raw scores of the chosen and the rejected answer; of a single answer, and 0.   -> [B, 2]"""
        with computing(self, self.checkpointing, self.bf16):
            scores = [self.model.raw(*trimmed(*_parts(inputs, side))) for side in _sides_in(inputs)]
        return torch.stack(scores if len(scores) > 1 else [*scores, torch.zeros_like(scores[0])], -1).float()

    def costs(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Tokens of both answers, or of the only one.   [B]"""
        return sum(inputs[f"{side}_mask"].sum(-1) for side in _sides_in(inputs))  # type: ignore[return-value]


def _sides_in(inputs: Mapping[str, Tensor]) -> list[str]:
    return [ANSWER] if ANSWER in inputs else [CHOSEN, REJECTED]


def _parts(inputs: Mapping[str, Tensor], side: str) -> list[Tensor]:
    """The arguments of ``RewardModel.raw``."""
    return [inputs[name] for name in (side, f"{side}_mask", f"{side}_trained") if name in inputs]


def trimmed(ids: Tensor, mask: Tensor, *others: Tensor) -> list[Tensor]:
    """Without the columns on the right that are padding in every row."""
    width = int(mask.sum(-1).max())
    return [x[:, :width] for x in (ids, mask, *others)]
