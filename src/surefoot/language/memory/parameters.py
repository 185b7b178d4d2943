"""Count the parameters of a model from its configuration, without allocating it."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from surefoot.language import quiet_transformers
from surefoot.language.models.adapters import POLICY, SharedBase

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.models import AdapterSettings

Count = TypeVar("Count", bound=Callable[..., Any])
_known: dict[tuple[str, ...], Any] = {}


def counted_once(count: Count) -> Count:
    """Count the same configuration once in a process, on the meta device."""

    @wraps(count)
    def counted(config: "PreTrainedConfig", *args: Any) -> Any:
        key = (count.__name__, type(config).__name__, config.to_json_string(), repr(args))
        if key not in _known:
            with quiet_transformers(), torch.device("meta"):
                _known[key] = count(config, *args)
        return _known[key]

    return cast(Count, counted)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model."""

    total: int
    trunk: int
    """without the head for logits; a critic or reward model of this family has as many, plus its own head"""
    layers: int
    """in all layers together"""
    depth: int
    """the number of layers"""
    width: int
    vocabulary: int
    linear: dict[int, int]
    """the number of the trunk's linear layers of each size, which a base in 4 or 8 bits quantises"""
    linear_rows: int
    """outputs of these together"""

    @property
    def linear_weights(self) -> int:
        """Weights of these together."""
        return sum(size * count for size, count in self.linear.items())


@counted_once
def count_parameters(config: "PreTrainedConfig") -> ParameterCounts:
    """Exact parameter counts, from a model built on the meta device."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)  # which writes into it
    stack = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=_size, default=None)
    linear = [part for part in model.base_model.modules() if isinstance(part, nn.Linear)]
    return ParameterCounts(
        total=_size(model),
        trunk=_size(model.base_model),
        layers=0 if stack is None else _size(stack),
        depth=int(config.get_text_config().num_hidden_layers),
        width=int(config.get_text_config().hidden_size),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        linear=dict(sorted(Counter(layer.weight.numel() for layer in linear).items())),
        linear_rows=sum(layer.out_features for layer in linear),
    )


@counted_once
def adapter_size(config: "PreTrainedConfig", settings: "AdapterSettings") -> int:
    """Parameters of one adapter of a model's trunk.

    Raises SurefootError if the trunk lacks the target layers.
    """
    from transformers import AutoModel

    base = SharedBase(AutoModel.from_config(copy.deepcopy(config), trust_remote_code=False), base_hash="")
    base.inject(POLICY, settings)
    return sum(parameter.numel() for _, parameter in base.parameters(POLICY))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
