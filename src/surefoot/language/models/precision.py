"""The dtype of a recipe's weights, and the device that they are moved to."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from surefoot.core.rollout import Policy
from surefoot.core.sharding.idle import rest_on_cpu
from surefoot.core.sharding.master import to_bfloat16
from surefoot.language.models.adapters import RoleTrunk
from surefoot.language.models.policy import ValueHead
from surefoot.language.models.reward_model import RewardModel
from surefoot.recipes.language import ModelRecipe


def place(module: nn.Module, recipe: ModelRecipe, idle: bool = False) -> None:
    """Move a whole policy, reference or reward model to the recipe's device, with weights in the recipe's precision.

    idle   it is frozen, and rests on the CPU while it is not used
    """
    device = "cpu" if idle else recipe.device
    if recipe.low_weights:
        to_bfloat16(module, device, exact_parts(module))
        for part in module.modules():
            if isinstance(part, Policy):
                part.exact = False
    else:
        module.to(device)
    if idle:
        rest_on_cpu(module, recipe.device)


def exact_parts(module: nn.Module) -> Iterator[Any]:
    """The parts with weights in float32 in any precision: heads of critics and reward models, and adapters."""
    for part in module.modules():
        if isinstance(part, ValueHead):
            yield part
        elif isinstance(part, RewardModel):
            yield part.head
        elif isinstance(part, RoleTrunk):
            yield part.parts
        elif hasattr(part, "lora_A"):
            yield from (part.lora_A, part.lora_B)
