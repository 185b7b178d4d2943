"""Checkpoints: safetensors and JSON under a manifest. Never a pickle, never half-written.

A checkpoint is a folder of named parts (nested dicts and lists of tensors, arrays, numbers, strings). Each part becomes
``<name>.json`` with its tensors in ``<name>.safetensors``; ``manifest.json`` holds size and SHA-256 of every file. All is
written under a temporary name, flushed to the disk, and renamed; a folder whose manifest is missing or does not match is
not a checkpoint, so a kill at any moment leaves either the old ones or the old ones and the new.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from surefoot.errors import SurefootError, cause_of
from surefoot.files import check_link, made_from, open_file, read_json, steps_named
from surefoot.sharding import Shard
from surefoot.store.manifest import MANIFEST, REMEDY, atomic_folder, clear, fault_of, forget, listed_files, remove_folder
from surefoot.store.tensors import StoredTensor, host_copies, open_tensors, read_tensors, stored_tensors, write_tensors

CheckpointParts = Mapping[str, Any]


# ---- what each rank writes of a sharded checkpoint ----


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


# ---- checkpoints ----


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint as they were at one moment, in the memory of the CPU.

    skeletons  of each part: what its JSON file holds
    tensors    of each part
    shards     names of the files with sharded tensors, which the ranks write
    written    size and SHA-256 of each file of rows before it, by name; the manifest keeps them
    """

    skeletons: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    shards: list[str] = field(default_factory=list)
    written: dict[str, Any] = field(default_factory=dict)


def take_snapshot(
    parts: CheckpointParts, shards: Sequence[RankShards] = (), written: Mapping[str, Any] = MappingProxyType({})
) -> Snapshot:
    """Copy the parts of a checkpoint, so that training can go on while they are written.

    shards    of every rank: the names of its files, and its pieces of the sharded tensors
    written   size and SHA-256 of each file of rows before it, by name
    """
    pieces: dict[str, dict[str, list[Any]]] = {}
    for of_rank in shards:
        for (part, path), piece in of_rank.pieces.items():
            pieces.setdefault(part, {}).setdefault(path, []).append(piece)
    skeletons, tensors = {}, {}
    for name, tree in parts.items():
        originals: dict[str, Tensor] = {}
        skeletons[name] = pack(tree, "", originals, pieces.get(name, {}))
        tensors[name] = host_copies(originals)
    files = [file for of_rank in shards for file in of_rank.files]
    return Snapshot(skeletons, tensors, files, dict(written))


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint to ``folder``, replacing an older one there; its shards are in ``shards_folder`` already.

    Raises SurefootError if writing fails; the older checkpoint then stays.
    """
    remedy = "earlier ones are intact; free space and resume"
    with atomic_folder(folder, MANIFEST, "a checkpoint", remedy, snapshot.written, snapshot.skeletons) as temporary:
        for name, skeleton in snapshot.skeletons.items():
            (temporary / f"{name}.json").write_bytes(json.dumps(skeleton, indent=1).encode())
            if snapshot.tensors[name]:
                write_tensors(snapshot.tensors[name], temporary / f"{name}.safetensors")
        for file in snapshot.shards:
            os.rename(shards_folder(folder) / file, temporary / file)


def check_written(folder: Path, snapshot: Snapshot) -> None:
    """Read a checkpoint back from the disk, past the memory that the kernel keeps of it, and compare it with what was saved.

    Raises SurefootError if a byte differs.
    """
    for path in folder.iterdir():
        forget(path)
    fault = fault_of(folder)
    for name, skeleton in () if fault else snapshot.skeletons.items():
        if read_json(folder / f"{name}.json") != json.loads(json.dumps(skeleton)):
            fault = f"{name}.json is not what was saved"
        if not (saved := snapshot.tensors[name]):
            continue
        with open_tensors(folder / f"{name}.safetensors") as file:
            for key, tensor in saved.items():
                back = file.get_tensor(key)
                same = (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
                if not same or not torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
                    fault = f"{name}.safetensors: {key} is not what was saved"
    if fault:
        raise SurefootError(
            f"{folder}: can't be read back as it was saved ({fault}); check the disk, or choose another --run-dir"
        )


def save_checkpoint(folder: Path, parts: CheckpointParts) -> None:
    """Write parts to ``folder``, replacing an older checkpoint there.

    Raises SurefootError if writing fails; the older checkpoint then stays.
    """
    write_snapshot(folder, take_snapshot(parts))


def shards_folder(folder: Path) -> Path:
    """Where the ranks write their shards of a checkpoint, before the first one moves them into it."""
    return folder.with_name(f".{folder.name}.shards.tmp")


def load_checkpoint(folder: Path, in_files: Sequence[str] = ()) -> dict[str, Any]:
    """The parts of a checkpoint, every file checked against the manifest.

    in_files   parts whose tensors stay in their files, as ``StoredTensor``

    Raises SurefootError when a file is missing, truncated, or differs from the manifest.
    """
    problem = fault_of(folder)
    if problem:
        raise SurefootError(f"{folder}: {problem}")
    names = listed_files(folder / MANIFEST)
    parts = {}
    for name in (n.removesuffix(".json") for n in names if n.endswith(".json")):
        tensors: dict[str, Any] = {}
        path, file = folder / f"{name}.json", folder / f"{name}.safetensors"
        with made_from(path):
            if file.name in names:
                tensors = stored_tensors(file) if name in in_files else read_tensors(file)
            parts[name] = unpack(read_json(path), tensors, path, whole=name not in in_files)
    return parts


def checkpoints_in(folder: Path) -> list[Path]:
    """Folders named by their step, oldest first: checkpoints, sound or not."""
    if not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if steps_named(path.name) is not None and path.is_dir())
    return sorted(paths, key=lambda path: int(path.name))


def _replaceable(folder: Path) -> list[Path]:
    """Checkpoints that newer ones may replace, oldest first. What has lost its manifest stays: a person decides about it."""
    return [path for path in checkpoints_in(folder) if (path / MANIFEST).exists()]


def check_numbered(folder: Path) -> None:
    """Raise SurefootError if something other than a folder has the name of a checkpoint, or of their folder itself, such as a
    link to a disk that is not mounted.
    """
    check_link(folder)
    if folder.exists() and not folder.is_dir():
        raise SurefootError(f"{folder}: is not a folder; move it away")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        check_link(path)
        if steps_named(path.name) is not None and not path.is_dir():
            raise SurefootError(f"{path}: is not a folder, but has the name of a checkpoint; move it away")


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of them; None where there is none. What a kill left half-written has another name.

    Raises SurefootError when the newest is damaged, and says which older one is sound: going back is the user's decision.
    The same if something else has the name of a checkpoint.
    """
    check_numbered(folder)
    candidates = checkpoints_in(folder)
    if not candidates:
        return None
    problem = fault_of(candidates[-1])
    if problem is None:
        return candidates[-1]
    if REMEDY in problem:
        raise SurefootError(f"{candidates[-1]}: {problem}")
    sound = next((path for path in reversed(candidates[:-1]) if fault_of(path) is None), None)
    remedy = f"to go back to {sound}, remove {candidates[-1]}" if sound else "copy it again from where it is whole"
    if not sound and folder.name == "best":
        remedy = "remove it to do without best/"
    raise SurefootError(f"{candidates[-1]}: {problem}; {remedy}")


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the last ``keep`` checkpoints, which are returned, and what a kill left."""
    checkpoints = _replaceable(folder)
    removed = checkpoints[: max(0, len(checkpoints) - keep)]
    for path in removed:
        remove_folder(path)
    clear(folder)
    return removed


def keep_only_this(checkpoint: Path) -> None:
    """Remove every other checkpoint in the folder, even later ones, since a resumed run may differ from before; and what a kill
    left.
    """
    for path in _replaceable(checkpoint.parent):
        if path != checkpoint:
            remove_folder(path)
    clear(checkpoint.parent)


def require(parts: CheckpointParts, names: tuple[str, ...], where: Path) -> None:
    """Raise SurefootError unless a checkpoint holds all these parts, and each is a table."""
    missing = [name for name in names if not isinstance(parts.get(name), Mapping)]
    if missing:
        raise SurefootError(f"{where}: has no {', '.join(missing)}; it is not a checkpoint of that kind")


def pack(tree: Any, path: str, tensors: dict[str, Tensor], pieces: Mapping[str, list[Any]] = MappingProxyType({})) -> Any:
    """The tree as JSON can hold it; its tensors go into ``tensors``, under their paths, and are not copied.

    pieces   what was written of the sharded tensor at each path
    """
    if isinstance(tree, np.ndarray):
        tree = torch.from_numpy(np.ascontiguousarray(tree))
    if isinstance(tree, Shard):
        dtype = str(tree.dtype).removeprefix("torch.")
        return {"$shards": {"shape": list(tree.shape), "dtype": dtype, "pieces": pieces.get(path, [])}}
    if isinstance(tree, Tensor):
        tensors[path or "value"] = tree
        return {"$tensor": path or "value"}
    if isinstance(tree, Mapping):
        return {str(key): pack(value, f"{path}.{key}" if path else str(key), tensors, pieces) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [pack(value, f"{path}.{index}", tensors, pieces) for index, value in enumerate(tree)]
    if isinstance(tree, np.generic):
        return tree.item()
    assert tree is None or isinstance(tree, (bool, int, float, str)), f"{path}: {type(tree)} can't be saved"
    return tree


def unpack(tree: Any, tensors: Mapping[str, Any], path: Path, whole: bool = True) -> Any:
    """The reverse of ``pack``, for the tree in a file; sharded tensors are read, or with ``whole`` off stay in their files.

    Raises SurefootError when a tensor is missing.
    """
    if isinstance(tree, dict):
        if "$shards" in tree:
            stored = StoredTensor.of(tree["$shards"], path, listed_files(path.parent / MANIFEST))
            return stored.whole() if whole else stored
        if "$tensor" in tree:
            name = tree["$tensor"]
            if not isinstance(name, str) or name not in tensors:
                raise SurefootError(f"{path}: names a tensor that was not saved with it ({str(name)[:80]!r})")
            return tensors[name]
        return {key: unpack(value, tensors, path, whole) for key, value in tree.items()}
    return [unpack(value, tensors, path, whole) for value in tree] if isinstance(tree, list) else tree


def load_weights(module: nn.Module, weights: dict[str, Tensor], where: Path) -> None:
    """Load a state dict into a module of the same architecture; one line naming the first tensor that doesn't fit, or has
    numbers that are not finite.
    """
    check_shapes(own := module.state_dict(), weights, where)
    for name, tensor in weights.items():
        if (bad := non_finite_numbers(tensor)) and own[name].isfinite().all():
            raise SurefootError(f"{where}: {name} has numbers that are {bad}; take another checkpoint")
    module.load_state_dict(weights)


def check_shapes(own: Mapping[str, Tensor], weights: Mapping[str, Any], where: Path) -> None:
    """Raise SurefootError, naming the first tensor, unless names and shapes are the same."""
    for name in sorted(set(own) | set(weights)):
        mine, theirs = (
            tuple(tensor.shape) if isinstance(tensor := those.get(name), Tensor | StoredTensor) else "no such tensor"
            for those in (own, weights)
        )
        if mine != theirs:
            raise SurefootError(f"{where}: another architecture: {name} is {theirs} in the checkpoint and {mine} in the recipe")


def non_finite_numbers(tensor: Tensor) -> str:
    """How many numbers of a tensor are not finite, in words; empty if all are."""
    bad = int(tensor.numel() - tensor.isfinite().sum())
    return f"not finite ({bad:,} of {tensor.numel():,})" if bad else ""
