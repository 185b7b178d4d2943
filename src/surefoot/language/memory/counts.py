"""Counts of passes and parameters on disk: a model is counted once for a version of the libraries and of this package.

Counting the passes of a large model takes some ten seconds. The counts of ``SIZES`` are files of the package, made by
``benchmarks/memory_counts.py`` and compared with new ones by tests. All others are written to the user's cache.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache, wraps
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from surefoot.files import cache_folder, package_source, read_json
from surefoot.language.data.cache import remove_unused

P = ParamSpec("P")
T = TypeVar("T")

SHIPPED = Path(__file__).with_name("counts.json")
SIZES = ("0.5B", "1B", "3B", "7B", "13B", "70B")
"""whose counts with the default options of ``surefoot memory`` are in the package"""
LIBRARIES = ("torch", "transformers", "peft")
"""what counts depend on besides this package"""

_known: dict[str, Any] = {}
"""counts of this process, by key"""
_on_disk = True


def counted_once(read: Callable[[Any], T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Count the same arguments once: in a process, in the package's files, and in the user's cache.

    read   makes a count from its JSON
    """

    def decorate(count: Callable[P, T]) -> Callable[P, T]:
        @wraps(count)
        def counted(*args: P.args, **kwargs: P.kwargs) -> T:
            key = sha256(json.dumps([count.__name__, _plain(args), _plain(kwargs)]).encode()).hexdigest()[:24]
            if key not in _known:
                stored = _stored(key) if _on_disk else None
                if stored is None:
                    _known[key] = _as_json(count(*args, **kwargs))
                    _store(key, _known[key])
                else:
                    _known[key] = stored
            return read(_known[key])

        return counted

    return decorate


@contextmanager
def counted_again() -> Iterator[dict[str, Any]]:
    """Count everything again, without any file; yields the new counts as JSON, by key."""
    global _known, _on_disk
    before = _known, _on_disk
    _known, _on_disk = {}, False
    try:
        yield _known
    finally:
        _known, _on_disk = before


def library_versions() -> dict[str, str]:
    """Versions of the libraries, without the name of a build: passes are counted on CPU tensors in all of them."""
    return {name: _version(name).partition("+")[0] for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@cache
def shipped_counts() -> dict[str, dict[str, Any]]:
    """The counts in the package by size and key; none if they were made with other versions of the libraries."""
    stored = json.loads(SHIPPED.read_text("utf-8"))
    return stored["sizes"] if stored["libraries"] == library_versions() else {}


def _stored(key: str) -> Any:
    for counts in shipped_counts().values():
        if key in counts:
            return counts[key]
    with suppress(OSError, ValueError):
        stored = read_json(_folder() / f"{key}.json")
        os.utime(_folder())  # its last use
        return stored
    return None


def _store(key: str, count: Any) -> None:
    """Keep a count in the user's cache. Without room for it, it is counted again the next time."""
    if not _on_disk:
        return
    folder = _folder()
    temporary = folder / f".{key}.{os.getpid()}.tmp"  # several ranks may count the same
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(count), "utf-8")
        os.replace(temporary, folder / f"{key}.json")
        remove_unused(folder.parent)


@cache
def _environment() -> str:
    """A hash of everything that counts depend on besides their arguments: libraries, and the code that passes run."""
    code = package_source(("core", "functional", "language", "recipes"))
    return sha256(json.dumps([library_versions(), code]).encode()).hexdigest()[:24]


def _folder() -> Path:
    return cache_folder("memory") / _environment()


def _as_json(count: Any) -> Any:
    return json.loads(json.dumps(asdict(count) if is_dataclass(count) and not isinstance(count, type) else count))


def _plain(value: Any) -> Any:
    """An argument as JSON: of settings only what differs from the defaults, so a new one keeps the keys of before."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if hasattr(value, "to_json_string"):  # the configuration of a model
        return [type(value).__name__, value.to_json_string()]
    if hasattr(value, "model_dump"):  # a section of a recipe
        return [type(value).__name__, value.model_dump(mode="json", exclude_defaults=True)]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        changed = {field.name for field in fields(value) if parts[field.name] != _default(field)}
        return [type(value).__name__, {name: _plain(part) for name, part in parts.items() if name in changed}]
    return value if value is None or isinstance(value, (str, int, float, bool)) else repr(value)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
