"""The same bits each time on NVIDIA GPUs: PyTorch's deterministic algorithms, while a run trains.

Without them the gradient of attention, among others, is summed in the order in which the GPU's threads finish.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from surefoot.errors import SurefootError, cause_of


def prepare_gpu(device: str) -> None:
    """Before a run on a GPU: free what runs before it left, and set what cuBLAS reads at its first product."""
    if device.startswith("cuda"):
        gc.collect()  # a run's session refers to itself, so its models stay until then
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with this workspace a product has one order of sums


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms; without ``on``, PyTorch's setting stays as it is.

    Raises SurefootError if an operation has none.
    """
    if not on:
        yield
        return
    try:
        with _algorithms(True):
            yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise SurefootError(f"deterministic=true: PyTorch raised {cause_of(error)}; set deterministic = false") from error


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Use any algorithms in this block: for the code of others, and for operations that PyTorch only calls nondeterministic."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    with _algorithms(False):
        yield


@contextmanager
def _algorithms(only_deterministic: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(only_deterministic)
    memory.fill_uninitialized_memory = False  # it would write new tensors twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills
