"""Values of prefixes: a linear head on hidden states, and a separate value model."""

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from surefoot.errors import SurefootError
from surefoot.language.models.policy.readout import Readout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueHead(nn.Linear):
    """A linear layer from hidden states to values, in the dtype of its own weights.   [..., width] -> [...]"""

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__(width, 1, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values, unbounded; 0 before training."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype)).squeeze(-1)


class Critic(nn.Module):
    """A separate value model: a trunk that reads tokens and a linear head.

    trunk  a ``transformers`` model without a head, whose output has ``last_hidden_state``
    """

    def __init__(self, trunk: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    @classmethod
    def from_policy(cls, model: "PreTrainedModel", *, copied: bool = True) -> "Critic":
        """A copy of a policy's trunk, and a head that starts at 0; ``copied`` off takes the trunk itself.

        Raises SurefootError if the model has no trunk apart from its head.
        """
        trunk: nn.Module = model.base_model
        if trunk is model:
            raise SurefootError(f"critic: {type(model).__name__} has no separate trunk to copy; set critic.own_model = false")
        trunk = (copy.deepcopy(trunk) if copied else trunk).requires_grad_(True).eval()
        return cls(trunk, ValueHead(Readout(model).width, next(trunk.parameters())))

    @classmethod
    def from_reward_model(
        cls, trunk: nn.Module, head: nn.Linear, mean: float = 0.0, std: float = 1.0, *, copied: bool = True
    ) -> "Critic":
        """A copy of a reward model: V of a prefix starts as (score of the prefix − mean) / std; ``copied`` off takes the trunk
        itself.
        """
        trunk = copy.deepcopy(trunk).requires_grad_(True).eval() if copied else trunk
        own = ValueHead(head.in_features, head.weight)
        with torch.no_grad():
            own.weight.copy_(head.weight / std)
            own.bias.copy_(((0.0 if head.bias is None else head.bias) - mean) / std)
        return cls(trunk, own)

    def forward(self, ids: Tensor, **options: Tensor) -> Tensor:
        """V after every token; ``options`` are further inputs of the trunk.   [B, L] -> [B, L]"""
        values: Tensor = self.head(self.trunk(input_ids=ids, use_cache=False, **options).last_hidden_state)
        return values
