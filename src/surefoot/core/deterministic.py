"""The same bits each time on NVIDIA GPUs: PyTorch's deterministic algorithms, while a run trains.

Without them the gradient of attention, among others, is summed in the order in which the GPU's threads finish.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from surefoot.errors import SurefootError

NO_ALGORITHM = "does not have a deterministic implementation"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""the words of PyTorch's two errors: about an operation, and about the workspace of cuBLAS"""


def prepare_gpu(device: str, deterministic: bool = True) -> None:
    """Before a run on a GPU: free what runs before it left, and give cuBLAS a workspace with which sums have one order."""
    if device.startswith("cuda"):
        gc.collect()  # a run's session refers to itself, so its models stay until then
        if deterministic:
            os.environ.setdefault(WORKSPACE, ":4096:8")


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
    except Exception as error:
        for cause in _causes(error):  # a layer between may have given it other words
            if isinstance(cause, RuntimeError) and any(words in str(cause) for words in (NO_ALGORITHM, WORKSPACE)):
                raise SurefootError(_message(cause)) from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _message(error: RuntimeError) -> str:
    if NO_ALGORITHM in str(error):
        what = str(error).partition(",")[0]
        return f"deterministic=true: {what}; set deterministic = false (to resume a run, with --allow-changes)"
    now = os.environ.get(WORKSPACE, "not set")
    return f"deterministic=true: the environment variable {WORKSPACE} is {now}; set it to :4096:8, or deterministic = false"


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Use any algorithms in this block, which calls the code of others. Enter it in the thread that trains."""
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
