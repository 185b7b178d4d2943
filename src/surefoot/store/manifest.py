"""Manifests: the size and SHA-256 of every file that a run leaves or rests on.

``manifest.json`` lists the files in its folder: those of a checkpoint, a saved agent, a model or an adapter when the folder is
finished, and single files (traces, samples, results) when each is written. ``surefoot.json`` is the same for a repository on
the hub. A folder is written under a temporary name, flushed to the disk and renamed, so a kill at any moment leaves the old one
or the new one. A single file is listed before it is written; while it replaces another, both are listed.

This module imports no torch.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from surefoot.errors import SurefootError, cause_of, limit_reached
from surefoot.files import check_plain_folder, open_file, parsed, read_bytes, read_table, write_bytes, write_text

FORMAT = 1
MANIFEST, LISTING = "manifest.json", "surefoot.json"
"""names of a manifest: beside the files, and in a repository of the hub"""
REMEDY = "; "
"""begins the remedy in a message"""
AGAIN = "copy it again, or remove it"
"""remedy for a file that is not what was written"""
AT_ONCE = 16
"""threads for file operations"""
OTHERS = ("config.toml", "config.json", "adapter_config.json")
"""files of folders with a manifest that are no checkpoints: a run, a model, an adapter"""
LOADED = {".json", ".jinja", ".safetensors", ".model", ".txt", ".bin", ".pt", ".pth", ".pkl", ".py"}
"""endings of files that ``transformers`` may read from a folder, listed or not"""
Listed = dict[str, dict[str, Any]]
_writing = threading.Lock()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint or a saved agent, sound or not."""
    return (folder / MANIFEST).is_file() and not any((folder / name).exists() for name in OTHERS)


# ---- fingerprints -------------------------------------------------------------------------------------------------------


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file. Raises SurefootError for what is not a plain file, OSError if it can't be read."""
    with open_file(path) as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _known_fingerprint(path: Path) -> dict[str, Any]:
    """``fingerprint`` of a file, read once in a process unless the file is written to."""
    state = path.stat()
    return _fingerprint_at(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))


@lru_cache(4096)
def _fingerprint_at(path: Path, state: tuple[int, ...]) -> dict[str, Any]:
    return fingerprint(path)


def fault_of_file(path: Path, expected: Mapping[str, Any], read: Callable[[Path], dict[str, Any]] = fingerprint) -> str | None:
    """What is wrong with a file, compared with its size and SHA-256; None for a sound one. Pickles are never sound."""
    if not path.is_file():  # a pipe or a device is not plain either
        return "is not a regular file" if path.exists() else "is missing"
    if _is_pickle(path):
        return "is a pickle, which is never read"
    if (size := path.stat().st_size) not in _allowed(expected, "size"):
        return f"has {size} bytes instead of {str(expected.get('size'))[:20]} (truncated?)"
    return None if read(path)["sha256"] in _allowed(expected, "sha256") else "does not match its SHA-256 (changed or damaged)"


def _allowed(expected: Mapping[str, Any], key: str) -> list[Any]:
    """What a file may have: its own value, or while it is being replaced that of the older file."""
    before = expected.get("before")
    return [expected.get(key), *([before.get(key)] if isinstance(before, dict) else [])]


def _is_pickle(path: Path) -> bool:
    """Whether a file is a pickle or a zip of one, by its first bytes."""
    with open_file(path) as file:
        head = file.read(9)
    if head[8:] == b"{":  # a safetensors file: the length of its header may begin with any byte, its header with this
        return False
    return (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or head[:2] == b"PK"


# ---- folders ------------------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, extra: Mapping[str, Any]) -> None:
    """List every file in a folder. ``extra`` has further entries of the manifest."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: fingerprint(folder / name) for name in names if name != MANIFEST}
    write_text(folder / MANIFEST, json.dumps({"format": FORMAT, "files": files, **extra}, indent=1))


def listed_files(manifest: Path, where: str | None = None) -> Listed:
    """The files of a manifest, all in its folder or below it, with size and SHA-256.

    Raises SurefootError, beginning with ``where``, for anything but a manifest of this format.
    """
    where, table = where or str(manifest), read_table(manifest)
    version, files = table.get("format"), table.get("files")
    if version != FORMAT:
        how = f"is not {FORMAT}, the one this version reads{REMEDY}use the version that wrote it"
        raise SurefootError(f"{where}: format {str(version)[:20]} {how}")
    if not isinstance(files, dict) or not all(isinstance(expected, dict) for expected in files.values()):
        raise SurefootError(f"{where}: can't be read (its files are not a table of tables)")
    for name in files:
        inside = not name.startswith("/") and all(part not in ("", ".", "..") for part in name.split("/"))
        if not inside or name == manifest.name or "\\" in name or not name.isprintable():
            raise SurefootError(f"{where}: lists {name[:80]!r}, which is not the name of a file beside it")
    return files


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, and the remedy if it has one of its own; None for a sound folder."""
    if not (folder / MANIFEST).exists():
        return f"no {MANIFEST}: it was removed, or lost in a copy"
    return _fault_in(folder, MANIFEST, lambda path: True, fingerprint)


def check_folder(folder: Path, where: str, required: bool = False) -> None:
    """Raise SurefootError if a model, an adapter or a copy of a repository is not as its manifest has it. A folder without
    manifest, which others wrote, must have nothing but plain files.

    required   a manifest has to be there, since a run wrote the folder
    """
    manifest = next((name for name in (LISTING, MANIFEST) if (folder / name).exists()), None)
    if manifest is None:
        if required:
            raise SurefootError(f"{where}: {folder} has no {MANIFEST}; copy the whole folder, or resume the run")
        check_plain_folder(folder)
        return
    fault = _fault_in(folder, manifest, lambda path: path.suffix in LOADED, _known_fingerprint)
    if fault is not None:
        own = "" if REMEDY in fault else f"; copy the folder again, or remove {folder / manifest} if the change is yours"
        raise SurefootError(f"{where}: {fault}{own}")


def _fault_in(folder: Path, name: str, counts: Callable[[Path], bool], read: Callable[[Path], dict[str, Any]]) -> str | None:
    """What is wrong in a folder; ``counts`` chooses the files that may not be there unless the manifest lists them."""
    manifest = folder / name
    try:
        files = listed_files(manifest)
        for path in sorted(folder.iterdir()):
            if path.is_dir() and name == LISTING:
                continue
            if path.name not in (name, *files) and counts(path) and not any(f.startswith(f"{path.name}/") for f in files):
                kind = "a pickle" if path.is_file() and _is_pickle(path) else "a file"
                return (
                    f"contains {kind} that its manifest does not list ({path.name}), which is never read{REMEDY}remove {path}"
                )
        for file, expected in files.items():
            if problem := fault_of_file(folder / file, expected, read):
                return f"{file} {problem}"
    except SurefootError as error:
        return f"{name} {str(error).removeprefix(f'{manifest}: ')}"
    except OSError as error:
        return f"can't be read ({cause_of(error)})"
    return None


# ---- single files -------------------------------------------------------------------------------------------------------


def write_listed(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and list it in the manifest of its folder. A kill at any moment leaves a file that is
    listed.
    """
    content = content.encode() if isinstance(content, str) else content
    manifest = path.parent / MANIFEST
    with _writing:
        files = _kept(manifest)
        entry: dict[str, Any] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        if path.name in files:
            before = {key: files[path.name].get(key) for key in entry}
            _rewrite(manifest, {**files, path.name: {**entry, "before": before}})
        else:
            _rewrite(manifest, {**files, path.name: entry})
        write_bytes(path, content)
        if path.name in files:
            _rewrite(manifest, {**files, path.name: entry})


def _kept(manifest: Path) -> Listed:
    """The files of a manifest that still exist; none of a damaged one, whose files are then reported as not listed."""
    if not manifest.exists():
        return {}
    with contextlib.suppress(SurefootError):
        return {name: entry for name, entry in listed_files(manifest).items() if (manifest.parent / name).exists()}
    return {}


def _rewrite(manifest: Path, files: Listed) -> None:
    """Replace the files of a manifest; the same files are the same bytes."""
    others: dict[str, Any] = {}
    with contextlib.suppress(SurefootError):
        others = read_table(manifest) if manifest.exists() else {}
    write_text(manifest, json.dumps({**others, "format": FORMAT, "files": dict(sorted(files.items()))}, indent=1))


def check_listed(path: Path) -> None:
    """Raise SurefootError unless a file is what the manifest of its folder has, or that of the repository it is in."""
    if problem := fault_of_file(path, _entry(path)):
        raise SurefootError(f"{path}: {problem}; {AGAIN}")


def read_listed(path: Path, remedy: str = AGAIN) -> bytes:
    """The content of a file, compared with the manifest of its folder. Raises SurefootError if it differs."""
    content, expected = read_bytes(path), _entry(path, remedy)
    if hashlib.sha256(content).hexdigest() not in _allowed(expected, "sha256"):
        raise SurefootError(f"{path}: does not match its SHA-256 (changed or damaged); {remedy}")
    return content


def read_listed_table(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """The table in a JSON file, compared with the manifest of its folder. Raises SurefootError if it differs, or is none."""
    try:
        value = parsed(read_listed(path, remedy).decode("utf-8"))
    except ValueError as error:
        if isinstance(error, SurefootError):
            raise
        raise SurefootError(f"{path}: can't be read ({cause_of(error)}); {remedy}") from None
    if not isinstance(value, dict):
        raise SurefootError(f"{path}: can't be read (it has a {type(value).__name__} instead of a table); {remedy}")
    return value


def _entry(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """What a manifest has of a file. Raises SurefootError if none lists it."""
    folder, name = path.parent, path.name
    places = [(folder / MANIFEST, name), (folder / LISTING, name), (folder.parent / LISTING, f"{folder.name}/{name}")]
    for manifest, listed in places:
        if manifest.exists() and (entry := listed_files(manifest).get(listed)) is not None:
            return entry
    raise SurefootError(f"{path}: is not in {folder / MANIFEST}, so no run wrote it; {remedy}")


# ---- writing folders ----------------------------------------------------------------------------------------------------


@contextmanager
def atomic_folder(
    folder: Path,
    marker: str,
    kind: str,
    remedy: str = "choose another folder",
    extra: Mapping[str, Any] | None = None,
    parts: Collection[str] = (),
) -> Iterator[Path]:
    """A temporary folder that replaces ``folder`` at the end, flushed to the disk; after an error, nothing has changed.

    marker  a file that marks an older folder of this kind, which may be replaced if there is nothing else in it
    extra   further entries of the manifest, which is written unless the folder has the listing of a repository
    parts   names of its files up to the first dot, if these make the kind

    Raises SurefootError if the folder contains something else, or if writing fails.
    """
    folder = Path(os.path.expanduser(folder)).absolute()
    if other := _other_in(folder, marker, parts):
        raise SurefootError(f"{folder}: contains something that is not {kind} ({other}); choose an empty folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if marker != LISTING:
            write_manifest(temporary, extra or {})
        at_once(flush, [*temporary.rglob("*"), temporary])
        replace_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SurefootError(limit_reached(error) or f"{folder}: {kind} is not saved ({reason}); {remedy}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _other_in(folder: Path, marker: str, parts: Collection[str]) -> str | None:
    """A file for which a folder may not be replaced, since no manifest lists it and ``transformers`` wrote none like it; None
    if there is none.
    """
    if not folder.is_dir():
        return folder.name if os.path.lexists(folder) else None
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    if marker == LISTING:
        return None if (folder / marker).is_file() else next(paths, None)
    own = set[str]()
    with contextlib.suppress(SurefootError, OSError):
        own |= {MANIFEST, *listed_files(folder / MANIFEST)} if (folder / marker).is_file() else own
    with contextlib.suppress(SurefootError, OSError):  # a damaged manifest is no reason to keep a model
        if read_table(folder / marker).keys() & {"model_type", "peft_type"}:
            own |= {path.name for path in folder.iterdir() if path.suffix in LOADED}
    return next((path for path in paths if path not in own or (parts and path.split(".")[0] not in (*parts, "manifest"))), None)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Put a finished folder in its place: in one step where the system can, else the older one is back after an error."""
    old = temporary
    if not (folder.exists() and _exchanged(temporary, folder)):
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old.tmp")
        if folder.exists():
            erase(old)
            os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise
    flush(folder.parent)
    erase(old)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether two folders have exchanged their names, in one step; Linux can do that on most disks."""
    with contextlib.suppress(AttributeError):
        return bool(ctypes.CDLL(None).renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0)
    return False


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Make the next read of a file that is on the disk come from there, where the system can do that."""
    with contextlib.suppress(OSError, AttributeError), open_file(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def clear(folder: Path) -> None:
    """Remove what a kill left half-written or half-removed."""
    for path in folder.glob(".*.tmp"):
        erase(path)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a kill on the way leaves no partial one."""
    gone = folder.with_name(f".{folder.name}.{os.getpid()}.gone.tmp")
    erase(gone)
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
        erase(gone)


def erase(path: Path) -> None:
    """Remove a file or a folder, as far as possible; do nothing if there is none."""
    if not os.path.lexists(path):
        return
    with contextlib.suppress(OSError):
        at_once(os.unlink, path.iterdir() if path.is_dir() and not path.is_symlink() else [path])
    shutil.rmtree(path, ignore_errors=True)


def at_once(work: Callable[[Path], None], paths: Iterable[Path]) -> None:
    """Run a file operation on many paths at once, so that all together take about as long as one."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(work, paths):
            pass
