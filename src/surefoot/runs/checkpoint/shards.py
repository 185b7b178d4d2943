"""What each rank writes of the sharded tensors of a checkpoint."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from surefoot.errors import SurefootError, cause_of
from surefoot.files import open_file
from surefoot.sharding import Shard
from surefoot.store.tensors import host_copies, write_tensors


@dataclass(frozen=True)
class RankShards:
    """A rank's shards of the tensors in a checkpoint, in the memory of the CPU.

    files    by name of a file: the tensors in it
    pieces   by part and path of a tensor: the file, its key there, and the ranges of the flattened tensor in it
    """

    files: dict[str, dict[str, Tensor]]
    pieces: dict[tuple[str, str], Any]


def shards_of_rank(parts: Mapping[str, Any], number: int) -> RankShards:
    """Copies of this rank's shards of the tensors in a checkpoint's parts.

    number   of the rank
    """
    copied = RankShards({}, {})
    for part, tree in parts.items():
        file = f"{part}.{number:05d}.safetensors"
        ranges = {}
        for path, shard in _shards_in(tree, ""):
            if shard.starts:
                flat = shard.values[0] if len(shard.values) == 1 else torch.cat(shard.values)
                ranges[path] = flat.reshape(-1)
                spans = [[start, len(x)] for start, x in zip(shard.starts, shard.values, strict=True)]
                copied.pieces[part, path] = [file, path, spans]
        if ranges:
            copied.files[file] = host_copies(ranges)
    return copied


def write_shards(place: Path, shards: RankShards, number: int) -> None:
    """Write this rank's shards to a folder, flushed to the disk.

    number   of the rank

    Raises SurefootError if writing fails, as it does if the ranks have no common disk.
    """
    try:
        for file, tensors in shards.files.items():
            write_tensors(tensors, place / file)
            with open_file(place / file) as opened:
                os.fsync(opened.fileno())
    except (OSError, SafetensorError) as error:
        raise SurefootError(
            f"{place}: rank {number} can't write its shards ({cause_of(error)}); with sharding, all ranks need the run's "
            "folder on a common disk with room"
        ) from None


def _shards_in(tree: Any, path: str) -> Iterator[tuple[str, Shard]]:
    """The sharded tensors in a tree, with the paths that ``pack`` gives them."""
    if isinstance(tree, Shard):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _shards_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _shards_in(value, f"{path}.{index}")
