"""Which layers an adapter adapts: targets by the ends of names, and the names that ``peft`` reads in a saved folder.

``peft`` renames the targets of some mixtures of experts from the layout of ``transformers`` 4, where each expert had its own
layers: ``gate_proj`` and ``up_proj`` become ``gate_up_proj``, with twice the rank, and ``down_proj`` that of the experts. In a
model that also has dense layers, or shared experts, of these names, those would get no adapter. So injection disables the
renaming, and a saved folder names such layers as parameters (``gate_proj.weight``), which ``peft`` leaves as they are.
"""

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from surefoot.errors import SurefootError, did_you_mean

if TYPE_CHECKING:
    from surefoot.recipes.models import AdapterSettings

WEIGHT = ".weight"


def linear_layers(trunk: nn.Module) -> list[str]:
    """Names of a trunk's linear layers, including ``Conv1D`` of ``transformers``, which stores weights transposed."""
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in trunk.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def bare_matrices(trunk: nn.Module) -> dict[str, int]:
    """Names and numbers of dimensions of a trunk's matrices that are not layers: 3 for all experts in one, 2 for a router."""
    layers = {f"{name}.weight" for name in linear_layers(trunk)}
    layers |= {f"{name}.weight" for name, module in trunk.named_modules() if isinstance(module, nn.Embedding)}
    named = ((name, p) for name, p in trunk.named_parameters() if name not in layers and not name.endswith("bias"))
    return {name: p.dim() for name, p in named if p.dim() in (2, 3)}


def name_endings(names: Iterable[str]) -> list[str]:
    """The last parts of names, as in ``targets``; a number or ``weight`` keeps its parent."""
    endings = set()
    for name in names:
        parent, _, last = name.rpartition(".")
        endings.add(name if last.isdigit() else f"{parent.rpartition('.')[2]}.weight" if last == "weight" else last)
    return sorted(endings)


def matrix_endings(names: Iterable[str]) -> list[str]:
    """The last two parts of the names of bare matrices, such as ``experts.down_proj``: a layer may have the same last part."""
    return sorted({".".join(part for part in name.split(".")[-2:] if not part.isdigit()) for name in names})


def resolve_targets(
    targets: str | tuple[str, ...], linear: list[str], matrices: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Endings of names for ``peft``: those of linear layers, and those of bare matrices that are not also linear layers.

    Raises SurefootError for a target that matches neither.
    """
    if isinstance(targets, str):
        return name_endings(linear), []
    layers, others = [], []
    for target in targets:
        layer = target.removesuffix(WEIGHT)
        if any(f".{name}".endswith(f".{layer}") for name in linear):
            layers.append(layer)
        elif any(f".{name}".endswith(f".{target}") for name in matrices):
            others.append(target)
        else:
            ends = [*name_endings(linear), *matrix_endings(matrices)]
            hint = did_you_mean(target, [*ends, *name_endings(matrices)]) or f"; it has: {', '.join(ends)}"
            raise SurefootError(f"adapter.targets={target!r}: the model's trunk has no linear layer of that name{hint}")
    return layers, others


def lora_config(settings: "AdapterSettings", layers: list[str], matrices: list[str]) -> Any:
    """The settings as a ``peft`` configuration."""
    from peft import LoraConfig

    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    fused = {"target_parameters": matrices} if matrices else {}
    options: dict[str, Any] = {"lora_dropout": 0.0, "bias": "none", **fused}
    return LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=layers, **options)  # type: ignore[arg-type]


# ---- names that peft replaces -------------------------------------------------------------------------------------------


def renamed_by_peft(config: Any, trunk: nn.Module) -> list[str]:
    """The layers of a configuration that ``peft`` would replace by experts in this model."""
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # older versions of peft rename nothing
        return []
    renamed = []
    for target in sorted(config.target_modules or ()):
        alone = LoraConfig(target_modules=[target])
        try:
            convert_peft_config_for_transformers(alone, trunk, None)
        except ValueError:  # one of two layers that would become one
            renamed.append(target)
            continue
        if target not in (alone.target_modules or ()):
            renamed.append(target)
    return renamed


def saved_config(config: Any, trunk: nn.Module) -> Any:
    """A copy of a configuration in which ``peft`` renames nothing: it names such layers as parameters."""
    saved = copy.deepcopy(config)
    if renamed := renamed_by_peft(config, trunk):
        saved.target_modules = set(config.target_modules or ()) - set(renamed)
        saved.target_parameters = sorted({*(config.target_parameters or ()), *(f"{name}{WEIGHT}" for name in renamed)})
    return saved


def loaded_config(config: Any, linear: list[str]) -> Any:
    """The configuration of a saved folder, with layers that ``saved_config`` named as parameters named as layers."""
    parameters = set(config.target_parameters or ())
    weights = {name for name in parameters if any(f".{layer}{WEIGHT}".endswith(f".{name}") for layer in linear)}
    config.target_modules = {*(config.target_modules or ()), *(name.removesuffix(WEIGHT) for name in weights)}
    config.target_parameters = sorted(parameters - weights) or None
    return config
