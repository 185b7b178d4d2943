"""Models without contents: their parameters counted exactly, and fewer of their layers where that will do."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from surefoot.language.optional import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.language import AdapterSettings

FEW = (20, 40)
"""layers with which a deeper model is counted: all layers of a stack take the same, so two depths give the line. Fewer would
not do: where few layers are read, the peak can lie elsewhere than where many are, such as at the gradient of the embeddings"""


@dataclass(frozen=True)
class Counted:
    """Parameters of a model."""

    total: int
    trunk: int
    """without the head that makes logits; what a critic or a reward model of this family has, their own head aside"""
    layers: int
    """in all layers together"""
    width: int
    vocabulary: int


@contextmanager
def without_contents() -> Iterator[None]:
    """Tensors made within have shapes, dtypes and storages, and no bytes behind them; operations on them compute nothing."""
    with quiet(), FakeTensorMode():
        yield


def causal(config: "PreTrainedConfig") -> Any:
    """A causal language model by its configuration, in float32, as ``load_model`` gives it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()


def trunk(config: "PreTrainedConfig") -> Any:
    """The same without a head."""
    from transformers import AutoModel

    return AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()


def depth(config: "PreTrainedConfig") -> int:
    """How many layers a model has."""
    return int(config.get_text_config().num_hidden_layers)


def shortened(config: "PreTrainedConfig", layers: int) -> "PreTrainedConfig":
    """The same with only its first layers; a list with an entry for each of them is cut too."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    before = depth(config)
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    return short


def depths(config: "PreTrainedConfig") -> Sequence[int]:
    """The depths at which to count: a few, or the model's own where that is no more."""
    return FEW if depth(config) > FEW[-1] else (depth(config),)


def counted(config: "PreTrainedConfig") -> Counted:
    """Parameters by their exact number: the model is built, of tensors without contents."""
    key = f"{type(config).__name__} {config.to_json_string()}"
    if key not in _COUNTED:
        with quiet(), torch.device("meta"):
            model = causal(config)
        stack = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=_size, default=None)
        _COUNTED[key] = Counted(
            total=_size(model),
            trunk=_size(model.base_model),
            layers=0 if stack is None else _size(stack),
            width=int(config.get_text_config().hidden_size),
            vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        )
    return _COUNTED[key]


_COUNTED: dict[str, Counted] = {}


def adapter_size(config: "PreTrainedConfig", settings: "AdapterSettings") -> int:
    """Parameters of one adapter beside a model's trunk.

    Raises SurefootError where the trunk has not the layers that are to get one.
    """
    from surefoot.language.adapters.layers import POLICY, SharedBase

    key = f"{type(config).__name__} {config.to_json_string()} {settings!r}"
    if key not in _ADAPTERS:
        with quiet(), torch.device("meta"):
            base = SharedBase(trunk(config), printed="")
            base.inject(POLICY, settings)
        _ADAPTERS[key] = sum(parameter.numel() for _, parameter in base.parameters(POLICY))
    return _ADAPTERS[key]


_ADAPTERS: dict[str, int] = {}


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
