"""Chooses the sampling engine of a recipe; the engines "packed" and "model", which need no other package, are here."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch

from surefoot.errors import SurefootError
from surefoot.language.data.tokens import Tokens
from surefoot.language.language_model import model_folder
from surefoot.language.memory.available import total_memory
from surefoot.language.sampling.continuous import Continuous
from surefoot.language.sampling.engines import Engine, EngineName, Request, Samples
from surefoot.language.sampling.fast_decode import why_not_packed
from surefoot.language.sampling.rows import rows_that_fit
from surefoot.language.sampling.sampler import sample
from surefoot.language.sampling.vllm import VllmServer
from surefoot.recipes.language import LanguageRecipe


class InProcess(Engine):
    """The engines "packed" and "model": decode with the trainer's own weights in this process.

    name   None: packed weights if they are exact
    rows   most responses at a time; None: as many as fit into ``CACHE_SHARE`` of the device's memory
    bf16   multiply in bfloat16 (autocast), unless ``name`` is "packed"
    """

    exact = True

    def __init__(
        self, model: Any, name: Literal["packed", "model"] | None = None, rows: int | None = None, bf16: bool = False
    ) -> None:
        self.model, self.requested, self.rows, self.bf16 = model, name, rows, bf16 and name != "packed"
        self.memory = total_memory(str(model.device))
        with self._computing():
            why_not = why_not_packed(model)
        if name == "packed" and why_not is not None:
            raise SurefootError(f"sampling.engine='packed': {why_not}; set engine = 'auto' or 'model'")
        self.name: EngineName = name or ("packed" if why_not is None else "model")
        self.reason = (
            "set by sampling.engine"
            if name
            else why_not or f"small {model.config.model_type} in {model.dtype}".replace("torch.", "")
        )

    def sample(self, request: Request) -> Samples:
        path: Any = "model" if self.requested == "model" else None
        with self._computing():
            drawn = sample(self.model, request, path=path, rows=self.rows_for(request))
        if self.requested == "packed" and drawn.path != "packed" and request.max_tokens > 1:  # the prompts give the first token
            raise SurefootError(
                "sampling.engine='packed': packed weights give other log-probabilities than the model's forward pass, or its "
                "cache is of another kind; set engine = 'auto'"
            )
        return replace(drawn, version=self.version)

    def rows_for(self, request: Request) -> int | None:
        """Responses that are drawn at a time."""
        longest = max(map(len, request.prompts), default=0) + request.max_tokens
        width = torch.bfloat16.itemsize if self.bf16 else self.model.dtype.itemsize
        return self.rows or rows_that_fit(self.model.config, longest, width, self.memory)

    def _computing(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16)


def make_engine(recipe: LanguageRecipe, model: Any, tokens: Tokens, longest: int) -> Engine:
    """The engine of ``sampling.engine``, for a model on its device.

    longest   tokens of the longest prompt with its response

    "auto" takes the server if there is one, else "packed" if the model can be packed, else "model".

    Raises SurefootError if the engine can't be used.
    """
    name = recipe.sampling.engine
    if recipe.samples_on_server:
        return VllmServer(recipe, model, tokens, model_folder(recipe.model), longest)
    if name == "continuous":
        return Continuous(model, recipe.sampling.rows)
    assert name in ("auto", "packed", "model")
    return InProcess(model, None if name == "auto" else name, recipe.sampling.rows, recipe.autocast)
