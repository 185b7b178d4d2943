"""Where the weights of a role are, and in which dtype: whole on a device, resting on the CPU, or in shards of several ranks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from surefoot.core.rollout import Policy
from surefoot.language.models.adapters import RoleTrunk
from surefoot.language.models.policy.critic import ValueHead
from surefoot.language.models.quantised import move_with_weights
from surefoot.language.models.reward_model import RewardModel
from surefoot.ranks.collectives import world_size
from surefoot.recipes.models import ModelRecipe
from surefoot.sharding import Sharding, gathered, shard
from surefoot.sharding.idle import rest_on_cpu
from surefoot.sharding.master import to_bfloat16


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
    move_with_weights(module)
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


# ---- shards -------------------------------------------------------------------------------------------------------------


def sharding_of(recipe: ModelRecipe) -> Sharding | None:
    """How a recipe's models are sharded; None for whole models, and in a single process, which has nothing to share."""
    if recipe.sharding is None or world_size() == 1:
        return None
    return Sharding(
        recipe.sharding,
        recipe.device,
        bf16=recipe.precision != "float32",
        reshard=recipe.reshard_after_forward,
        offload=recipe.offload is True,
    )


def keeps_stored(recipe: ModelRecipe) -> bool:
    """Whether weights are read in the dtype of their files, and converted part by part later."""
    return recipe.low_weights or sharding_of(recipe) is not None


def shard_role(module: nn.Module, settings: Sharding, frozen: bool = False) -> None:
    """Shard a policy, a reference or a reward model in place; it moves to the device part by part.

    frozen   it is not trained, so bfloat16 shards suffice where the computation is in bfloat16
    """
    for policy in (part for part in module.modules() if isinstance(part, Policy) and settings.bf16):
        policy.exact = False
    heads = [part for part in module.modules() if isinstance(part, ValueHead)]
    shard(module, layers_of(module), settings, heads, frozen)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of every ``transformers`` model in a module, which it names as those that stay on one device."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    layers: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for part in module.modules():
        if type(part).__name__ in names and part not in inner:
            layers.append(part)
            inner |= set(part.modules())
    return layers


def shares_base(model: nn.Module) -> bool:
    """Whether a model is an adapter on the base of another, with which it is sharded."""
    return any(isinstance(part, RoleTrunk) for part in model.modules())


@contextmanager
def whole(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Hold whole weights of several models, each gathered once, as ``gathered`` does for one."""
    with ExitStack() as stack:
        for root in dict.fromkeys(roots):
            stack.enter_context(gathered(root))
        yield
