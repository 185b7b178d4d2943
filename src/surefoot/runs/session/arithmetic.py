"""How PyTorch computes while a run trains. Afterwards its settings are restored."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from surefoot.core.seeding import deterministic
from surefoot.recipes.base import Recipe


@contextmanager
def arithmetic(recipe: Recipe) -> Iterator[None]:
    """Compute as a recipe sets; both settings concern NVIDIA GPUs.

    Raises SurefootError if an operation has no deterministic algorithm.
    """
    with ExitStack() as restored:
        if recipe.tf32:
            matmul = torch.backends.cuda.matmul
            restored.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
            matmul.allow_tf32 = True
        restored.enter_context(deterministic(recipe.deterministic and recipe.device.startswith("cuda")))
        yield
