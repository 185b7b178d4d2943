"""Models that read a text with other frequencies if it is long.

Phi-3 with a context of 128k, Phi-3.5 and Phi-4-mini ("longrope") have two sets of rotary frequencies: one for texts of up to
``original_max_position_embeddings`` tokens, and one for longer ones. ``transformers`` chooses by the longest row of a batch,
which is the text so far when it generates. Here, every token is read as ``transformers`` generates it alone: with the
frequencies of the text before it. So a row that grows past the switch is read twice, up to the switch and as a whole.
"""

from typing import Any

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.models import ModelRecipe


def switch_of(model: Any) -> int | None:
    """The most tokens of a text that a model reads with its frequencies of short texts; None if it has one set.

    Raises SurefootError if layers or parts have different ones.
    """
    found = {length for module in model.modules() for kind, length in _lengths(module) if kind == "longrope"}
    if len(found) > 1:
        raise SurefootError(
            f"model={type(model).__name__}: its layers change their rotary frequencies at different lengths "
            f"({', '.join(map(str, sorted(found)))}); use another model"
        )
    return next(iter(found), None)


def check_length(recipe: ModelRecipe, model: Any, longest: int) -> None:
    """Raise SurefootError if texts of this many tokens can't be read as single rows are.

    longest   tokens of the longest text of a run
    """
    field, switch = f"model={recipe.model!r}", switch_of(model)
    if switch is not None and longest > switch:
        reasons = {
            f"sharding={recipe.sharding!r}: ranks would make different numbers of passes": recipe.sharding is not None,
            "objective.router_coefficient is one loss of whole batches": getattr(recipe.objective, "router_coefficient", 0) > 0,
            "a server, or continuous batching, reads texts of all lengths with one set": isinstance(recipe, LanguageRecipe)
            and (recipe.samples_on_server or recipe.sampling.engine == "continuous"),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            raise SurefootError(
                f"{field}: has other rotary frequencies past {switch} tokens (longrope), texts have up to {longest}, and "
                f"{reason}; lower data.max_length and sampling.max_tokens, or unset it"
            )
    for module in model.modules():
        for kind, _ in _lengths(module):
            limit = getattr(module, "original_max_seq_len", longest)
            if "dynamic" in kind and longest > limit:
                raise SurefootError(
                    f"{field}: {type(model).__name__} has rope_type={kind!r}, whose frequencies depend on the longest row past "
                    f"{limit} tokens, and texts have up to {longest}; lower data.max_length or sampling.max_tokens"
                )


def _lengths(module: Any) -> list[tuple[str, int]]:
    """The kinds of rotary positions in a module, each with the original length; none for other modules."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if kinds is None or not isinstance(parameters, dict):
        return []
    pairs = [(kind, parameters[layer]) for layer, kind in kinds.items()] if isinstance(kinds, dict) else [(kinds, parameters)]
    return [(str(kind), int(table.get("original_max_position_embeddings") or 0)) for kind, table in pairs if table]


def by_length(mask: Tensor, switch: int | None) -> list[Tensor]:
    """Indices of the rows of at most ``switch`` tokens, and of the longer ones.   [B, L] -> [b] each"""
    rows = torch.arange(len(mask), device=mask.device)
    if switch is None or mask.shape[1] <= switch:
        return [rows]
    short = mask.bool().sum(-1) <= switch
    return [part for part in (rows[short], rows[~short]) if len(part)]
