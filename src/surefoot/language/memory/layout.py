"""How a run is spread over ranks, and what a rank holds of sharded models besides its part of them.

FSDP2 gathers whole weights in the dtype of the computation. In a pass with gradient a rank holds those of the embeddings and
the head until the end of the backward pass, and those of the layers one after another. Phases without gradient gather a model
once and hold it whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WEIGHT, LOW_WEIGHT = 4, 2
"""bytes per parameter in float32 and bfloat16"""
GATHERED_LAYERS = 3
"""layers whose weights are whole at a time in the backward pass: the current one, and the buffers of the next one and of the
last one of the forward pass"""
REDUCED_LAYERS = 2
"""layers whose gradients are being summed over ranks at a time, in float32"""


@dataclass(frozen=True)
class Layout:
    """The ranks of a run and how they share its models."""

    ranks: int = 1
    sharding: Literal["full", "hybrid"] | None = None
    per_machine: int = 8
    """ranks of a machine"""
    reshard: bool = True
    """drop a layer's weights after its forward pass"""
    offload: bool = False
    """keep parts, gradients and moments in the memory of the CPU"""
    gpu: bool = True
    """whether the device has memory of its own"""

    @property
    def shards(self) -> int:
        """The ranks that hold one copy of a model together."""
        if self.sharding is None:
            return 1
        return self.ranks if self.sharding == "full" else min(self.ranks, self.per_machine)

    @property
    def sharded(self) -> bool:
        """Whether a rank holds parts of models."""
        return self.shards > 1

    @property
    def offloaded(self) -> bool:
        """Whether the parts are in another memory than the passes."""
        return self.sharded and self.offload and self.gpu

    def share(self, count: int) -> int:
        """The most of ``count`` things that a rank gets."""
        return -(-count // self.ranks)

    def part(self, count: int) -> int:
        """The largest part of a sharded tensor of ``count`` elements."""
        return -(-count // self.shards)


SINGLE = Layout()


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model that is gathered.

    layers   in all layers together
    count    number of layers
    rest     in everything else: embeddings and heads
    trained  the share of the parameters with a gradient
    """

    layers: int
    count: int
    rest: int
    trained: float = 1.0

    @property
    def total(self) -> int:
        """All parameters."""
        return self.layers + self.rest

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return -(-self.layers // max(1, self.count))


def whole_bytes(models: Sequence[ModelSize], each: int) -> int:
    """Bytes of several models gathered at a time, at ``each`` bytes per parameter."""
    return sum(model.total for model in models) * each


def held_after_forward(models: Sequence[ModelSize], each: int, reshard: bool) -> dict[str, int]:
    """Bytes of whole weights between the forward and the backward pass, when activations and logits are largest."""
    rest = sum(model.rest for model in models)
    layers = _largest(models).layer if reshard else sum(model.layers for model in models)
    return {"gathered weights": (rest + layers) * each}


def held_in_layers(models: Sequence[ModelSize], each: int, reshard: bool) -> dict[str, int]:
    """Bytes of whole weights and gradients during the backward pass of a layer.

    The head's gradient is kept until the backward pass ends. A layer's gradient is whole in the dtype of the computation and
    then in float32, to be summed over ranks.
    """
    layer = _largest(models)
    rest = sum(model.rest for model in models)
    layers = GATHERED_LAYERS * layer.layer if reshard else sum(model.layers for model in models) + layer.layer
    head = max(model.rest * model.trained for model in models) / 2
    gradients = int(layer.trained * layer.layer * (each + REDUCED_LAYERS * WEIGHT) + head * each)
    return {"gathered weights": (rest + layers) * each, "whole gradients": gradients}


def held_at_the_end(models: Sequence[ModelSize], each: int) -> dict[str, int]:
    """Bytes of whole weights and gradients when the backward pass ends.

    There are no activations, and the gradients of embeddings and heads are summed.
    """
    rest = sum(model.rest for model in models)
    summed = int(sum(model.rest * model.trained for model in models))
    return {"gathered weights": rest * each, "whole gradients": summed * (each + WEIGHT)}


def _largest(models: Sequence[ModelSize]) -> ModelSize:
    return max(models, key=lambda model: model.layer)
