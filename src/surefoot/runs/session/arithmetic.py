"""How PyTorch computes while a run trains. Afterwards its settings are restored."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from surefoot.core.seeding import deterministic
from surefoot.recipes.base import Recipe


@contextmanager
def arithmetic(recipe: Recipe) -> Iterator[None]:
    """Compute as a recipe sets; both settings concern NVIDIA GPUs.

    Raises SurefootError if an operation has no deterministic algorithm.
    """
    with _multiplying(recipe.tf32), deterministic(recipe.deterministic and recipe.device.startswith("cuda")):
        yield


@contextmanager
def _multiplying(tf32: bool) -> Iterator[None]:
    """Multiply float32 matrices in TF32, if ``tf32``; otherwise PyTorch's setting stays as it is."""
    if not tf32:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
