"""Language models of ``transformers``: a folder, a hub id or ``pocket`` in, a folder that ``transformers`` reads out."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from surefoot.language.optional import quiet, transformers_needed
from surefoot.language.pocket import pocket as pocket

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    name: str | Path, *, seed: int = 1, trust_remote_code: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A causal language model and its tokenizer, in float32, without dropout, in eval mode.

    name                a folder written by ``save_pretrained``, a hub id, or ``pocket``, which is made anew from the seed
    trust_remote_code   let a model's own code run; without it such a model is refused
    """
    transformers_needed(f"model={str(name)!r}")
    if str(name) == "pocket":
        return pocket(seed=seed)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with quiet():
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        no_dropout(config)
        model = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return model.eval(), tokenizer


def no_dropout(config: "PreTrainedConfig") -> None:
    """Set every probability of dropping something to 0, in nested configs too."""
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, key, 0.0)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            no_dropout(value)
