"""Adapters on disk: a ``peft`` folder with a record of its base; and what checkpoints store of adapters."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from surefoot.core.optimizer import round_master
from surefoot.errors import SurefootError, cause_of
from surefoot.files import read_table
from surefoot.language.data.rows import check_unchanged
from surefoot.language.models.adapter_targets import saved_config
from surefoot.language.models.adapters import POLICY, RoleTrunk, SharedBase, base_hash, has_adapters
from surefoot.language.models.loading import HEAD, is_folder, load_model, new_model_folder, read_tokenizer
from surefoot.language.models.mapped import map_weights
from surefoot.language.models.quantised import quantise
from surefoot.language.models.reward_model import RewardModel, new_head, read_head, write_head
from surefoot.recipes.models import AdapterSettings, ModelRecipe
from surefoot.recipes.reading import text_to_none
from surefoot.sharding import fill, local_part, shard_of
from surefoot.sharding.master import stored_weights
from surefoot.store.checkpoint import check_shapes, non_finite_numbers
from surefoot.store.manifest import check_folder
from surefoot.store.tensors import read_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "base.json"
"""records the base and its hash, in an adapter's folder"""
WEIGHTS = "adapter_model.safetensors"


def add_adapter(recipe: ModelRecipe, model: "PreTrainedModel", name: str) -> SharedBase | None:
    """The recipe's base, quantised by ``quantize``, with an adapter for the policy; None if the recipe trains all weights."""
    if recipe.adapter is None:
        return None
    print_of_base = base_hash(model, recipe.adapter.quantize)
    if recipe.adapter.quantize is not None:
        quantise(model, model.base_model, recipe.adapter, compute_dtype(recipe.precision))
    base = SharedBase(model, recipe.seed, print_of_base)
    base.source = str(Path(name).expanduser().absolute()) if is_folder(name) else name
    base.add(POLICY, recipe.adapter)
    return base


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of matrix products in a recipe's precision."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def base_record(base: SharedBase | None) -> dict[str, Any]:
    """A checkpoint's record of the base and its hash; empty without adapters."""
    return {} if base is None else {"base": {"model": base.source, "print": base.hash}}


# ---- checkpoints --------------------------------------------------------------------------------------------------------


def trained_weights(policy: nn.Module) -> dict[str, Any]:
    """The weights that a checkpoint stores of a policy: all, or with a frozen base only adapters and heads. Of sharded ones,
    this rank's part.
    """
    weights = own_weights(policy)
    return {name: shard_of(x) if hasattr(x, "to_local") else x for name, x in weights.items()}


def own_weights(policy: nn.Module) -> dict[str, Tensor]:
    """The tensors of ``trained_weights``, as they are in the policy."""
    if not has_adapters(policy):
        return stored_weights(policy)
    return {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}


def load_trained(policy: nn.Module, weights: Mapping[str, Any], where: Path) -> None:
    """Load the ``trained_weights`` of a checkpoint; of sharded ones, each rank reads its part.

    Raises SurefootError, naming the first tensor that does not fit.
    """
    load_stored(own_weights(policy), weights, where)
    round_master(policy.parameters())


def load_stored(own: Mapping[str, Tensor], weights: Mapping[str, Any], where: Path) -> None:
    """Set tensors from those of a checkpoint, which may stay in its files; of sharded ones, each rank reads its part.

    Raises SurefootError, naming the first tensor that does not fit.
    """
    check_shapes(own, weights, where)
    for name, tensor in own.items():
        fill(tensor, weights[name])
        if bad := non_finite_numbers(local_part(tensor)):
            raise SurefootError(f"{where}: {name} has numbers that are {bad}; take another checkpoint")


def load_adapted(
    parts: dict[str, Any],
    where: Path,
    trust_remote_code: bool = False,
    scratch: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> "tuple[PreTrainedModel, SharedBase, RewardModel | None]":
    """A checkpoint's base with its adapter, not merged: the model, the base, and the reward model if it is one.
    ``trust_remote_code`` comes from the caller, because a checkpoint may come from anyone.

    scratch   put the base's weights into a mapped file in this folder
    dtype     of these weights

    Raises SurefootError if the base is missing or has changed.
    """
    record, recipe = parts["base"], parts["recipe"]
    try:
        model, _ = load_model(record["model"], trust_remote_code=trust_remote_code, as_stored=scratch is not None)
    except SurefootError as error:
        raise SurefootError(f"{where}: contains an adapter whose base can't be loaded: {error}") from None
    field = f"{where}: base model={record['model']!r}"
    settings = AdapterSettings.model_validate({**text_to_none(recipe["adapter"]), "dropout": 0.0})
    check_unchanged({field: record["print"]}, {field: base_hash(model, settings.quantize)})
    if settings.quantize is not None:
        quantise(model, model.base_model, settings, compute_dtype(recipe.get("precision", "float32")))
    if scratch is not None:
        map_weights(model, scratch, dtype=dtype)
    base = SharedBase(model, base_hash=record["print"])
    base.source = record["model"]
    base.add(POLICY, settings)
    reward = recipe["kind"] == "reward"
    holder: nn.Module = RewardModel(base.trunk, new_head(base.trunk)) if reward else model
    names = {name for name, p in holder.named_parameters() if p.requires_grad}
    weights = model_weights(parts)
    if isinstance(holder, RewardModel):
        set_reading(holder, recipe)
    load_trained(holder, {name: x for name, x in weights.items() if name in names or f".{POLICY}." in name}, where)
    return model, base, holder if isinstance(holder, RewardModel) else None


def model_weights(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The weights in a checkpoint that are its model's, by their names in it."""
    prefix = "writer.model." if parts["recipe"]["kind"] == "dpo" else "model."
    return {name.removeprefix(prefix): x for name, x in parts["agent"].items() if name.startswith(prefix)}


def set_reading(model: RewardModel, recipe: Mapping[str, Any]) -> None:
    """Which tokens a reward model scores, by its saved recipe."""
    model.of_steps = recipe.get("preference", {}).get("loss") == "steps"
    model.pooled = recipe.get("head") == "pooled"


# ---- folders ------------------------------------------------------------------------------------------------------------


def save_adapter(base: SharedBase, result: Any, folder: Path) -> None:
    """Write a trained adapter atomically, in the format of ``peft.PeftModel``.

    result  the LanguageModel, or the RewardModel, whose head is also saved

    Raises SurefootError if the folder contains something else, or if writing fails.
    """
    reward = isinstance(result, RewardModel)
    tokenizer = result.tokenizer if reward else result.tokens.tokenizer
    config = saved_config(base.configs[POLICY], base.trunk)
    config.base_model_name_or_path = base.source
    config.task_type = "FEATURE_EXTRACTION" if reward else "CAUSAL_LM"
    config.inference_mode = True
    trunk = "" if reward or result.model is base.trunk else f"{result.model.base_model_prefix}."
    tensors = {f"base_model.model.{trunk}{name}": x for name, x in base.tensors(POLICY).items()}
    with new_model_folder(folder, marker="adapter_config.json") as temporary:
        config.save_pretrained(temporary)
        save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, temporary / WEIGHTS, {"format": "pt"})
        (temporary / BASE).write_text(json.dumps({"model": base.source, "print": base.hash}, indent=1) + "\n", "utf-8")
        tokenizer.save_pretrained(temporary)
        if isinstance(result, RewardModel):
            write_head(result, temporary)


def adapter_folder(name: str) -> Path | None:
    """The adapter folder of a run, or of its folder ``model`` or ``adapter``; None without one."""
    path = Path(name).expanduser()
    folders = [path / "adapter", path, *([path.parent / "adapter"] if path.name == "model" else [])]
    return next((folder for folder in folders if (folder / BASE).is_file()), None)


def reward_role(base: SharedBase, name: str, role: str | None = None) -> RewardModel | None:
    """Load a reward model that is an adapter of this base as a further role; None for any other reward model.

    name  as for ``adapter_folder``
    role  None: a new reward role

    Raises SurefootError if its files can't be read.
    """
    folder = adapter_folder(name)
    if folder is None:
        return None
    check_folder(folder, f"model={name!r}", required=True)
    try:
        if read_table(folder / BASE)["print"] != base.hash or not (folder / HEAD).is_file():
            return None
        from peft import LoraConfig

        prefix = "base_model.model."
        tensors = {key.removeprefix(prefix): x for key, x in read_tensors(folder / WEIGHTS).items()}
        config = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SurefootError(f"model={name!r}: its adapter can't be read ({cause_of(error)}); copy the whole folder") from None
    role = role or f"reward{sum(other.startswith('reward') for other in base.configs)}"
    config.inference_mode = False
    base.load(role, config, tensors)
    model = RewardModel(RoleTrunk(base, role), new_head(base.trunk), read_tokenizer(str(folder)))  # type: ignore[arg-type]
    read_head(model, folder)
    return model.eval()
