"""Models whose weights lie in a file that is mapped into memory: none of them need be in a process's own memory at once.

A run of sharded models writes ``model/`` from one: the system reads and drops its pages as needed. Such a model is on the CPU,
and can be used like any other.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.errors import SurefootError
from surefoot.sharding import fill


def map_weights(
    model: nn.Module, folder: Path, buffers: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Move the parameters of a model into a mapped file; those on the meta device are undefined afterwards.

    folder   of the file, whose name is removed at once
    buffers  by name, for a model whose buffers are on the meta device
    dtype    of the parameters, float32 or bfloat16

    Raises SurefootError if the disk has no room for the file.
    """
    places = {
        id(p): p for module in model.modules() for p in module._parameters.values() if p is not None
    }  # tied ones have one place
    path = folder / f".model.{os.getpid()}.mapped.tmp"
    size = dtype.itemsize * sum(p.numel() for p in places.values())
    try:
        with path.open("w+b") as file:
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(file.fileno(), 0, size)  # a mapped page without a place on the disk would end the process
            mapped, offset = {}, 0
            for key, parameter in places.items():
                mapped[key] = _mapped(file, offset, parameter, dtype)
                offset += dtype.itemsize * parameter.numel()
    except OSError as error:
        raise SurefootError(f"{path}: the whole model is put together here ({error.strerror}); free {size:,} bytes") from None
    finally:
        path.unlink(missing_ok=True)
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[own] = mapped[id(parameter)]
        for own, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                full = f"{name}.{own}" if name else own
                module._buffers[own] = (buffers or {})[full].detach().cpu().clone()


@torch.no_grad()
def _mapped(file: Any, offset: int, parameter: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """A parameter at a place in a file, with the values of another one."""
    if not parameter.numel():
        return nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad)
    kind = np.float32 if dtype == torch.float32 else np.int16  # NumPy has no bfloat16
    flat = torch.from_numpy(np.memmap(file, kind, "r+", offset, (parameter.numel(),))).view(dtype)
    if not parameter.is_meta:
        fill(flat, parameter)
    return nn.Parameter(flat.view(parameter.shape), requires_grad=parameter.requires_grad)
