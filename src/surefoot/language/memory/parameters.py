"""Count the parameters of a model from its configuration, without allocating it."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.language import quiet_transformers
from surefoot.language.memory.counts import counted_once
from surefoot.language.models.adapters import POLICY, SharedBase

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.models import AdapterSettings

SHALLOW = 2
"""fewest layers at which a deeper model is counted. Each segment of a pass (before, in and after the layers, forward and
backward) has a peak that is linear in the number of layers, so two depths give all of them"""
LONGEST_PERIOD = 8
"""layers after which the kinds of layers may repeat, such as sliding and full attention"""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model."""

    total: int
    trunk: int
    """without the head for logits; a critic or reward model of this family has as many, plus its own head"""
    layers: int
    """in all layers together"""
    width: int
    vocabulary: int


@dataclass(frozen=True)
class LinearSizes:
    """The weights of a trunk's linear layers, which a base in 4 or 8 bits quantises."""

    weights: int
    rows: int
    """outputs of all layers together"""
    layers: dict[str, int]
    """the number of layers of each size"""


def causal_model(config: "PreTrainedConfig", low: bool = False) -> Any:
    """A causal language model from its configuration, in float32, as from ``load_model``; ``low``: in bfloat16."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)  # from_config writes the dtype into it, and a count is stored under its content
    dtype = torch.bfloat16 if low else torch.float32
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()


def trunk_model(config: "PreTrainedConfig", low: bool = False) -> Any:
    """The same without its head."""
    from transformers import AutoModel

    dtype = torch.bfloat16 if low else torch.float32
    return AutoModel.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False).eval()


def layer_count(config: "PreTrainedConfig") -> int:
    """The number of layers of a model."""
    return int(config.get_text_config().num_hidden_layers)


def with_layers(config: "PreTrainedConfig", layers: int) -> "PreTrainedConfig":
    """The configuration with only the first layers; lists with an entry per layer are cut too."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    before = layer_count(config)
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    return short


def sample_depths(config: "PreTrainedConfig") -> Sequence[int]:
    """The numbers of layers at which to count: two, a period of the kinds of layers apart, or the model's own if its layers do
    not repeat.
    """
    layers, kinds = layer_count(config), _layer_kinds(config)
    for period in range(1, LONGEST_PERIOD + 1):
        first = SHALLOW + (layers - SHALLOW) % period
        while set(kinds[:first]) < set(kinds) and first < layers:
            first += period
        if first + period < layers and _repeats(config, kinds, first, period):
            return first, first + period
    return (layers,)


def _layer_kinds(config: "PreTrainedConfig") -> list[Any]:
    """What the lists of a configuration that have an entry per layer hold for each."""
    values = vars(config.get_text_config()).values()
    return list(zip(*(each for each in values if isinstance(each, list) and len(each) == layer_count(config)), strict=True))


def _repeats(config: "PreTrainedConfig", kinds: list[Any], first: int, period: int) -> bool:
    """Whether the layers from about ``first`` on repeat, in their kinds and their sizes."""
    if any(kinds[at] != kinds[at + period] for at in range(max(0, first - period), len(kinds) - period)):
        return False
    low, high = (count_parameters(with_layers(config, depth)).total for depth in (first, first + period))
    return (count_parameters(config).total - low) * period == (high - low) * (layer_count(config) - first)


@counted_once(lambda stored: ParameterCounts(**stored))
def count_parameters(config: "PreTrainedConfig") -> ParameterCounts:
    """Exact parameter counts, from a model built on the meta device."""
    with quiet_transformers(), torch.device("meta"):
        model = causal_model(config)
    stack = layer_stack(model)
    return ParameterCounts(
        total=_size(model),
        trunk=_size(model.base_model),
        layers=0 if stack is None else _size(stack),
        width=int(config.get_text_config().hidden_size),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
    )


@counted_once(lambda stored: LinearSizes(**stored))
def linear_sizes(config: "PreTrainedConfig") -> LinearSizes:
    """Sizes of the linear layers of a model's trunk."""
    with quiet_transformers(), torch.device("meta"):
        layers = [part for part in trunk_model(config).modules() if isinstance(part, nn.Linear)]
    sizes = Counter(layer.weight.numel() for layer in layers)
    return LinearSizes(
        weights=sum(size * count for size, count in sizes.items()),
        rows=sum(layer.out_features for layer in layers),
        layers={str(size): sizes[size] for size in sorted(sizes)},
    )


@counted_once(int)
def adapter_size(config: "PreTrainedConfig", settings: "AdapterSettings") -> int:
    """Parameters of one adapter of a model's trunk.

    Raises SurefootError if the trunk lacks the target layers.
    """
    with quiet_transformers(), torch.device("meta"):
        base = SharedBase(trunk_model(config), base_hash="")
        base.inject(POLICY, settings)
    return sum(parameter.numel() for _, parameter in base.parameters(POLICY))


def layer_stack(model: nn.Module) -> nn.ModuleList | None:
    """The layers of a model: its largest list of modules."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=_size, default=None)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
