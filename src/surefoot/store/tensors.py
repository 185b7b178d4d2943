"""Read safetensors files: plain ones alone, with errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surefoot.errors import SurefootError, cause_of
from surefoot.files import check_plain


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """The ``safe_open`` of a safetensors file.

    Raises SurefootError for what is not a plain file or not safetensors, also in the block; OSError if there is none.
    """
    check_plain(path)
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise SurefootError(f"{path}: can't be read ({cause_of(error)}); copy it again") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, by name. Raises as ``open_tensors`` does."""
    with open_tensors(path) as file:
        tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return tensors
