"""Tensors in safetensors files: written from copies on the CPU, read whole, or any range of one.

Only plain files are read, with errors of one line.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors import numpy as by_numpy
from safetensors import torch as by_torch
from torch import Tensor

from surefoot.errors import SurefootError, cause_of
from surefoot.files import check_plain, made_from


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


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the memory of the CPU that share nothing; from a GPU all at once, into pinned memory."""
    copies = {}
    for name, tensor in tensors.items():
        tensor, pinned = tensor.detach(), tensor.is_cuda
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor, non_blocking=pinned)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """``host_copies`` as the bytes of a safetensors file."""
    arrays = _arrays(tensors)
    return by_torch.save(dict(tensors), metadata) if arrays is None else by_numpy.save(arrays, metadata)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write ``host_copies`` into a safetensors file."""
    arrays = _arrays(tensors)
    if arrays is None:
        by_torch.save_file(dict(tensors), path)
    else:
        by_numpy.save_file(arrays, path)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """The tensors as arrays that share their memory; None if NumPy lacks one of the types.

    ``safetensors.torch`` makes a type for each size of a tensor and keeps it, about 6 kB. Lengths of episodes differ, so a long
    run would grow.
    """
    if any(tensor.dtype not in NUMPY_TYPES for tensor in tensors.values()):
        return None
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the files of a checkpoint, of which any range can be read.

    pieces   file, its key there, and for each range in it: first element, number of elements
    """

    folder: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, table: Any, path: Path, names: Collection[str]) -> "StoredTensor":
        """From the JSON file of a checkpoint with these files.

        Raises SurefootError unless the pieces are in the files and make up the tensor.
        """
        with made_from(path):
            shape, dtype = tuple(int(n) for n in table["shape"]), getattr(torch, str(table["dtype"]))
            pieces = tuple((str(f), str(key), tuple((int(a), int(n)) for a, n in ranges)) for f, key, ranges in table["pieces"])
        end = 0
        for start, count in sorted(span for _, _, ranges in pieces for span in ranges):
            if start != end or count < 1:
                break
            end += count
        if end != math.prod(shape) or not isinstance(dtype, torch.dtype):
            raise SurefootError(f"{path}: the shards of a tensor do not make it up; use another checkpoint")
        for file, _, _ in pieces:
            if file not in names:
                raise SurefootError(f"{path}: names a shard that its manifest does not list ({file[:80]!r})")
        return cls(path.parent, shape, dtype, pieces)

    def read(self, start: int, stop: int) -> Tensor:
        """Elements start … stop − 1 of the flattened tensor. Raises SurefootError if a file is missing or damaged."""
        result = torch.empty(stop - start, dtype=self.dtype)
        for file, key, ranges in self.pieces:
            place = 0  # of the range in the file
            for first, count in ranges:
                low, high = max(start, first), min(stop, first + count)
                if low < high:
                    with made_from(self.folder / file), open_tensors(self.folder / file) as opened:
                        flat = _flat_range(opened.get_slice(key), place + low - first, place + high - first)
                        result[low - start : high - start] = flat
                place += count
        return result

    def whole(self) -> Tensor:
        """The whole tensor."""
        return self.read(0, math.prod(self.shape)).view(self.shape)


def _flat_range(stored: Any, start: int, stop: int) -> Tensor:
    """Elements start … stop − 1 of a flattened tensor in a file, of which only the rows with them are read."""
    shape = stored.get_shape()
    if len(shape) == 0:
        return torch.as_tensor(stored[...]).reshape(-1)[start:stop]
    row = math.prod(shape[1:])
    first = start // row
    rows: Tensor = stored[first : -(-stop // row)].reshape(-1)
    return rows[start - first * row : stop - first * row]


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, unread. Raises SurefootError if it is missing or damaged."""
    stored = {}
    with made_from(file), open_tensors(file) as opened:
        for key in opened.keys():  # noqa: SIM118 - it is no mapping
            shape = tuple(opened.get_slice(key).get_shape())
            dtype = DTYPES[opened.get_slice(key).get_dtype()]
            stored[key] = StoredTensor(file.parent, shape, dtype, ((file.name, key, ((0, math.prod(shape)),)),))
    return stored


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
DTYPES |= {"I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
"""by their names in safetensors"""
NUMPY_TYPES = set(DTYPES.values()) - {torch.bfloat16}
