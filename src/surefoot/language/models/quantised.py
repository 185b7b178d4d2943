"""Frozen linear layers in 4 or 8 bits, under adapters (QLoRA, Dettmers et al. 2023, arXiv 2305.14314), by ``bitsandbytes``.

*nf4*: blocks of 64 weights share a scale, and each weight is one of 16 quantiles of a normal distribution; the scales are in 8
bits themselves. A pass restores one layer's weights at a time and multiplies in the dtype of the run.
*int8*: each row of weights and each token's activations are rounded to 8 bits before they are multiplied (LLM.int8(), Dettmers
et al. 2022, arXiv 2208.07339), without its columns of outliers: they are chosen by the whole batch, so a token's result would
depend on other rows, and on later tokens.

Embeddings, norms and the head for logits keep the dtype of the run.
"""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.errors import SurefootError, require_package

if TYPE_CHECKING:
    from surefoot.recipes.models import AdapterSettings

QUANTISED = ("Linear4bit", "Linear8bitLt")
"""the classes of ``bitsandbytes``"""


def require_bitsandbytes(purpose: str) -> None:
    """Raise SurefootError, naming the extra, if ``bitsandbytes`` is not installed; import it."""
    require_package("bitsandbytes", "quantized", purpose)
    prepare_bitsandbytes()


def prepare_bitsandbytes() -> None:
    """Import ``bitsandbytes`` if it is installed; ``peft`` would import it, and it logs each cast of its inputs.

    On some CPUs its import would download a kernel from the hub if the package ``kernels`` is installed. Nothing here uses it.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if "bitsandbytes" in sys.modules or importlib.util.find_spec("bitsandbytes") is None:
        return
    hidden = "kernels" not in sys.modules
    if hidden:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("bitsandbytes")
    finally:
        if hidden:
            del sys.modules["kernels"]


@torch.no_grad()
def quantise(model: nn.Module, trunk: nn.Module, settings: "AdapterSettings", dtype: torch.dtype) -> None:
    """Replace the linear layers of a model's trunk by frozen ones in 4 or 8 bits; the rest gets float32 weights.

    dtype   of the passes, in which weights in 4 bits are restored

    Raises SurefootError if ``bitsandbytes`` is not installed, or if a layer is of another kind.
    """
    kind = settings.quantize
    assert kind is not None
    require_bitsandbytes(f"adapter.quantize={kind!r}")
    names = [name for name, module in trunk.named_modules() if isinstance(module, nn.Linear)]
    if not names or any(type(module).__name__ == "Conv1D" for module in trunk.modules()):
        raise SurefootError(
            f"adapter.quantize={kind!r}: {type(trunk).__name__} has layers that are not nn.Linear, which bitsandbytes would "
            "leave as they are; unset it"
        )
    for name in names:
        parent, _, own = name.rpartition(".")
        setattr(trunk.get_submodule(parent), own, _quantised(trunk.get_submodule(name), kind, dtype))
    biases = {module.bias for module in trunk.modules() if is_quantised(module)}
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in biases:
            parameter.data = parameter.data.float()


def _quantised(layer: Any, kind: str, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes.nn as bnb

    shape = (layer.in_features, layer.out_features, layer.bias is not None)
    weight = layer.weight.data.to("cpu", dtype if kind == "nf4" else torch.float32, copy=True)
    made: Any
    if kind == "nf4":
        made = bnb.Linear4bit(*shape, compute_dtype=dtype, quant_type="nf4", device="meta")
        made.weight = bnb.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made).to("cpu")
        made.support_avx512bf16_for_cpu = False  # another arithmetic without gradient, which loses the gradient afterwards
    else:
        made = bnb.Linear8bitLt(*shape, has_fp16_weights=False, threshold=0.0, device="meta")
        made.weight = bnb.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
    if layer.bias is not None:  # a pass of a layer in 4 bits would leave it in its dtype
        made.bias = nn.Parameter(layer.bias.data.to(dtype if kind == "nf4" else torch.float32))
    frozen: nn.Module = made.requires_grad_(False).train(layer.training)
    return frozen


def move_with_weights(module: nn.Module) -> None:
    """Move the int8 layers' scales, and their other name for the weights, to where ``module.to`` has moved the weights."""
    for part in module.modules():
        if is_quantised(part) and type(part).__name__ == "Linear8bitLt":
            layer: Any = part
            for held in (layer.weight, layer.state):  # a pass moves both from one to the other
                if held.CB is not None:
                    held.CB, held.SCB = layer.weight.data, held.SCB.to(layer.weight.device)


def is_quantised(module: nn.Module) -> bool:
    """Whether this is a layer whose weights are in 4 or 8 bits."""
    return type(module).__name__ in QUANTISED and type(module).__module__.startswith("bitsandbytes.")


def has_quantised(module: nn.Module) -> bool:
    """Whether any layer has weights in 4 or 8 bits."""
    return any(is_quantised(part) for part in module.modules())


def parameter_count(module: nn.Module) -> int:
    """The parameters of a module; ``numel`` of those in 4 bits counts bytes, with two in each."""
    states = {id(p): getattr(p, "quant_state", None) for p in module.parameters()}
    return sum(p.numel() if (state := states[id(p)]) is None else state.shape.numel() for p in module.parameters())


def restored(layer: Any) -> Tensor:
    """The weights that a quantised layer multiplies with, on the CPU.   [out, in]"""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    weight, state = layer.weight, getattr(layer.weight, "quant_state", None)
    if state is not None:
        whole: Tensor = dequantize_4bit(weight.data, state)
    else:
        held = weight if weight.CB is not None else layer.state  # a pass moves them to its state
        whole = int8_vectorwise_dequant(held.CB, held.SCB)
    return whole.cpu()


def restored_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict with plain weights in place of quantised ones."""
    state, dtype = dict(model.state_dict()), _dtype_of(model)
    for name, layer in model.named_modules():
        if is_quantised(layer):
            for key in [key for key in state if key.startswith((f"{name}.weight", f"{name}.SCB"))]:
                del state[key]
            state[f"{name}.weight"] = restored(layer).to(dtype)
            if layer.bias is not None:
                state[f"{name}.bias"] = layer.bias.detach().to(dtype)
    return state


@torch.no_grad()
def restore(module: nn.Module) -> None:
    """Replace quantised layers by linear ones with the weights that they multiply with."""
    dtype = _dtype_of(module)
    for name, layer in list(module.named_modules()):
        if is_quantised(layer):
            plain: Any = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            plain.weight = nn.Parameter(restored(layer).to(dtype), requires_grad=False)
            if layer.bias is not None:
                plain.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, plain.train(layer.training))


def _dtype_of(module: nn.Module) -> torch.dtype:
    """Of the embeddings, and of all weights that are not quantised."""
    return next(p.dtype for p in module.parameters() if p.is_floating_point() and p.dim() > 1)


@contextmanager
def shown_to_peft(model: nn.Module) -> Iterator[None]:
    """Set the attributes by which ``peft`` recognises a model with quantised layers."""
    names = ("is_loaded_in_4bit", "is_loaded_in_8bit") if has_quantised(model) else ()
    for name in names:
        setattr(model, name, True)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)
