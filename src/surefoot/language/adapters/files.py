"""Adapters on the disk: ``peft``'s own folder, with a note of the base it belongs to; and what checkpoints hold of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surefoot.errors import SurefootError, cause_of
from surefoot.files import read_table
from surefoot.language.adapters.layers import POLICY, RoleTrunk, SharedBase, has_adapters, merge, weights_hash
from surefoot.language.data.rows import check_unchanged
from surefoot.language.models.loading import HEAD, atomic_folder, is_folder, load_model, read_tokenizer
from surefoot.language.models.reward_model import RewardModel, new_head, read_head, write_head
from surefoot.recipes.language import ModelRecipe
from surefoot.runs.checkpoint import check_fits, load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "base.json"
"""where the base is and its print, beside an adapter"""
WEIGHTS = "adapter_model.safetensors"


def add_adapter(recipe: ModelRecipe, model: "PreTrainedModel", name: str) -> SharedBase | None:
    """The base of a recipe, loaded from a name, with an adapter for what is trained; None where all weights are."""
    if recipe.adapter is None:
        return None
    base = SharedBase(model, recipe.seed)
    base.source = str(Path(name).expanduser().absolute()) if is_folder(name) else name
    base.add(POLICY, recipe.adapter)
    return base


def base_record(base: SharedBase | None) -> dict[str, Any]:
    """The tree of a checkpoint that holds adapters alone: where the base is, and how it is known again. Empty without one."""
    return {} if base is None else {"base": {"model": base.source, "print": base.hash}}


# ---- checkpoints --------------------------------------------------------------------------------------------------------


def trained_weights(policy: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a policy: everything, or where the base is frozen adapters and heads alone."""
    if not has_adapters(policy):
        return dict(policy.state_dict())
    return {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}


def load_trained(policy: nn.Module, weights: Mapping[str, Tensor], where: Path) -> None:
    """Take from a checkpoint what ``trained_weights`` gave it.

    Raises SurefootError, naming the first tensor, where it does not fit.
    """
    if not has_adapters(policy):
        load_weights(policy, dict(weights), where)
        return
    own = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    check_fits(own, weights, where)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def load_merged(
    trees: dict[str, Any], where: Path, trust_remote_code: bool = False
) -> "tuple[PreTrainedModel, nn.Linear | None]":
    """The base that a checkpoint names with its adapter merged into it, and the head of a reward model. Whether the base's own
    code may run is said by whoever loads: a checkpoint may be somebody else's.

    Raises SurefootError where the base is gone, or is not what it was.
    """
    record, recipe = trees["base"], trees["recipe"]
    try:
        model, _ = load_model(record["model"], trust_remote_code=trust_remote_code)
    except SurefootError as error:
        raise SurefootError(f"{where}: holds an adapter, whose base can't be loaded: {error}") from None
    field = f"{where}: base model={record['model']!r}"
    check_unchanged({field: record["print"]}, {field: weights_hash(model)})
    base = SharedBase(model, base_hash=record["print"])
    base.add(POLICY, _settings(recipe))
    reward = recipe["kind"] == "reward"
    holder: nn.Module = RewardModel(base.trunk, new_head(base.trunk)) if reward else model
    prefix = "writer.model." if recipe["kind"] == "dpo" else "model."
    names = {name for name, p in holder.named_parameters() if p.requires_grad}
    found = {name.removeprefix(prefix): x for name, x in trees["agent"].items() if name.startswith(prefix)}
    load_trained(holder, {name: x for name, x in found.items() if name in names or f".{POLICY}." in name}, where)
    merge(base.trunk)
    return model, holder.head if isinstance(holder, RewardModel) else None


def _settings(recipe: Mapping[str, Any]) -> Any:
    from surefoot.recipes.language import AdapterSettings

    return AdapterSettings.model_validate({**recipe["adapter"], "dropout": 0.0})


# ---- folders ------------------------------------------------------------------------------------------------------------


def save_adapter(base: SharedBase, result: Any, folder: Path) -> None:
    """Write what was trained as ``peft.PeftModel`` loads it over the base, whole or not at all.

    result  the LanguageModel, or the RewardModel, whose head goes beside its adapter

    Raises SurefootError when the folder holds something else, or the disk refuses.
    """
    reward = isinstance(result, RewardModel)
    tokenizer = result.tokenizer if reward else result.tokens.tokenizer
    config = base.configs[POLICY]
    config.base_model_name_or_path = base.source
    config.task_type = "FEATURE_EXTRACTION" if reward else "CAUSAL_LM"
    config.inference_mode = True
    trunk = "" if reward or result.model is base.trunk else f"{result.model.base_model_prefix}."
    tensors = {f"base_model.model.{trunk}{name}": x for name, x in base.tensors(POLICY).items()}
    with atomic_folder(folder, known_by="adapter_config.json") as temporary:
        config.save_pretrained(temporary)
        save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, temporary / WEIGHTS, {"format": "pt"})
        (temporary / BASE).write_text(json.dumps({"model": base.source, "print": base.hash}, indent=1) + "\n", "utf-8")
        tokenizer.save_pretrained(temporary)
        if isinstance(result, RewardModel):
            write_head(result, temporary)


def adapter_folder(name: str) -> Path | None:
    """Where a run, or its folder ``model`` or ``adapter``, has an adapter of ours; None without one."""
    path = Path(name).expanduser()
    places = [path / "adapter", path, *([path.parent / "adapter"] if path.name == "model" else [])]
    return next((place for place in places if (place / BASE).is_file()), None)


def reward_role(base: SharedBase, name: str, role: str | None = None) -> RewardModel | None:
    """A reward model that was trained as an adapter of this very base, as a further role on it; None for any other.

    name  as of ``adapter_folder``
    role  None: a new one among the rewards

    Raises SurefootError where its files can't be read.
    """
    folder = adapter_folder(name)
    if folder is None:
        return None
    try:
        if read_table(folder / BASE)["print"] != base.hash or not (folder / HEAD).is_file():
            return None
        from peft import LoraConfig

        prefix = "base_model.model."
        tensors = {key.removeprefix(prefix): x for key, x in load_file(folder / WEIGHTS).items()}
        config = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SurefootError(f"model={name!r}: its adapter can't be read ({cause_of(error)}); copy the whole folder") from None
    role = role or f"reward{sum(known.startswith('reward') for known in base.configs)}"
    config.inference_mode = False
    base.load(role, config, tensors)
    model = RewardModel(RoleTrunk(base, role), new_head(base.trunk), read_tokenizer(str(folder)))  # type: ignore[arg-type]
    read_head(model, folder)
    return model.eval()
