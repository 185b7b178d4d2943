"""Hashes of source, of the user's files of Python that a run rests on; that of this package is in ``files``.

Imports are read from the text of each file. Nothing is imported or run, so a changed file is noticed before it runs. Of
installed packages, the version counts.
"""

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from surefoot.files import PACKAGE, read_bytes

NAMED = re.compile(r"(?:(?P<file>[^:]*\.py)|(?P<module>[A-Za-z_][\w.]*)):[\w./-]+")
"""``file.py:name``, ``module:name`` or ``module:Id-v0``"""
IMPORTING = ("import_module", "__import__", "run_module", "run_path", "spec_from_file_location")
"""functions whose argument is a module or a file to import"""
MAYBE = re.compile(r"\.?[A-Za-z_][\w.]*|[^:]+\.py")
"""a text that may be the name of a module or file"""
INSTALLED = ("site-packages", "dist-packages")
SHOWN = 8
"""characters of a hash in a message"""
Sources = dict[str, Any]
"""``roots``: the files and modules that a recipe names; ``search``: folders of the user's modules; ``code``: the hash of each
file, and of each object of a script or notebook; ``packages``: versions"""


# ---- the user's code ------------------------------------------------------------------------------------------------------


def named_in(value: Any) -> list[str]:
    """The files and modules that the texts of a recipe's tables name."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sorted({name for part in value for name in named_in(part)})
    match = NAMED.fullmatch(value) if isinstance(value, str) else None
    return [match["file"] or match["module"]] if match else []


def sources_of(table: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> Sources:
    """The code that a run rests on.

    table    its recipe
    objects  functions and classes that were passed as objects, by field
    """
    roots, code = set(named_in(table)), dict[str, str]()
    for field, thing in (objects or {}).items():
        thing = thing if hasattr(thing, "__module__") and hasattr(thing, "__qualname__") else type(thing)
        if thing.__module__ == "__main__":
            code |= source_of_object(field, thing)
            main = getattr(sys.modules["__main__"], "__file__", None)
            roots |= set(imports_of(Path(main))) if main else set()
        else:
            roots.add(thing.__module__)
    here, search = Path.cwd(), [Path(entry).resolve() for entry in sys.path if entry]
    folders = [_from(here, folder) for folder in dict.fromkeys(search) if folder.is_dir() and not _installed(folder)]
    files: list[Path] = []
    found = follow(sorted(roots), folders, here, files)
    used = [folder for folder in folders if any((here / folder) in file.parents for file in files)]
    return {"roots": sorted(roots), "search": used, "code": found["code"] | code, "packages": found["packages"]}


def follow(
    roots: Iterable[str], search: Sequence[str], here: Path, read: list[Path] | None = None
) -> dict[str, dict[str, str]]:
    """The hash of every file that roots name or import, and the versions of the packages that these import.

    roots   ``file.py`` or ``module``
    search  folders of modules; relative ones are from ``here``
    read    gets the files
    """
    code, packages = dict[str, str](), dict[str, str]()
    waiting: list[tuple[str, Path]] = [(root, here) for root in roots]
    seen: set[str] = set()
    while waiting:
        name, folder = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.endswith(".py"):  # named in a recipe, or in a call: often next to the module that calls
            path = Path(os.path.expanduser(name))
            files = {name: next((file for file in (here / path, folder / path) if file.is_file()), here / path)}
        else:
            files = _files_of(name, [folder, here, *(here / place for place in search)], packages)
        for key, file in files.items():
            with suppress(OSError, ValueError):
                code[key] = hashlib.sha256(read_bytes(file)).hexdigest()
                if read is not None:
                    read.append(file)
                package = key if file.name == "__init__.py" else key.rpartition(".")[0]
                waiting += [(imported, file.parent) for imported in imports_of(file, "" if key.endswith(".py") else package)]
    return {"code": dict(sorted(code.items())), "packages": dict(sorted(packages.items()))}


def imports_of(file: Path, package: str = "") -> list[str]:
    """The modules and files that a file may import, anywhere in it; ``from a import b`` may import a and a.b.

    What is imported by a call, as by ``importlib.import_module(name)``, is every text in the call that may be a name, and in
    the value of each variable in it.

    package  of the file, for relative imports
    """
    names: set[str] = set()
    with suppress(OSError, ValueError, SyntaxError, RecursionError):
        tree = ast.parse(read_bytes(file))
        values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        values.setdefault(target.id, []).append(node.value)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in IMPORTING:
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                parts = [part for argument in given for part in ast.walk(argument)]
                named = [value for each in parts if isinstance(each, ast.Name) for value in values.get(each.id, ())]
                parts += [part for value in named for part in ast.walk(value)]
                texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                names |= {text if not text.startswith(".") else f"{package}{text}" for text in texts if MAYBE.fullmatch(text)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                origin = ".".join(part for part in [*above, node.module or ""] if part)
                names |= {name for name in (origin, *(f"{origin}.{alias.name}".strip(".") for alias in node.names)) if name}
    return sorted(names)


def _files_of(name: str, search: Sequence[Path], packages: dict[str, str]) -> dict[str, Path]:
    """The user's files that importing a module runs, by module. The version of an installed package goes to ``packages``."""
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names:
        return {}
    place = _own(top, search)
    if place is None:
        for distribution in _distributions().get(top, (top,)):
            with suppress(PackageNotFoundError):
                packages[distribution] = version(distribution)
        return {}
    files = {top: place / "__init__.py" if place.is_dir() else place}
    for part in rest:
        name, place = f"{next(reversed(files))}.{part}", place / part
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        files[name] = file
    return {name: file for name, file in files.items() if file.is_file()}


def _own(top: str, search: Sequence[Path]) -> Path | None:
    """The file or folder of the user's module of this name; None for what is installed, or not there."""
    if top == "surefoot":
        return None
    for folder in search:
        if (folder / top / "__init__.py").is_file():
            return folder / top
        if (folder / f"{top}.py").is_file():
            return folder / f"{top}.py"
    with suppress(ImportError, ValueError, AttributeError):
        if (found := importlib.util.find_spec(top)) is not None:
            places = [Path(place) for place in (*(found.submodule_search_locations or ()), found.origin or "") if place]
            own = [place for place in places if place.exists() and not _installed(place)]
            return own[0] if own and len(own) == len(places) else None
    return next((folder / top for folder in search if (folder / top).is_dir()), None)


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def _installed(path: Path) -> bool:
    """Whether a path belongs to Python or to an installed package."""
    places = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")]
    inside = any(path == place or place in path.parents for place in places)
    return inside or any(part in INSTALLED for part in path.parts) or path.suffix == ".zip" or path == PACKAGE.parent


def _from(here: Path, path: Path) -> str:
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)


def source_of_object(field: str, thing: Any) -> dict[str, str]:
    """The hash of a function or class of a script or notebook, and of what it uses there; empty if it has no source."""
    texts: list[str] = []
    waiting, seen = [thing], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (FunctionType, type)) and each.__module__ == "__main__":
            with suppress(OSError, TypeError):
                texts.append(inspect.getsource(each))
            functions = [each] if isinstance(each, FunctionType) else [f for f in vars(each).values() if hasattr(f, "__code__")]
            waiting += [part for function in functions for part in _used_by(function)]
        elif isinstance(each, (bool, int, float, str, bytes, type(None))):
            texts.append(repr(each))
    return {field: hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()} if texts else {}


def _used_by(function: Any) -> list[Any]:
    """The globals and the captured values that a function uses."""
    captured = [cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)()]
    return [*captured, *(function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def source_differences(
    before: Sources, here: Sequence[Path], objects: Mapping[str, Callable[..., Any]] | None = None
) -> list[str]:
    """How code differs from that of a checkpoint, as ``source of env.py: 3fa41c92 -> 9b1c77e0``. What is not there now is left
    to whoever imports it.

    here     folders that relative paths may be from: the first that has any of the code counts
    objects  those that were passed again
    """
    found = (follow(before["roots"], before["search"], folder) for folder in here)
    nothing: dict[str, dict[str, str]] = {"code": {}, "packages": {}}
    now = next((each for each in found if each["code"]), nothing)
    for field, thing in (objects or {}).items():
        now["code"] |= source_of_object(field, thing)
    lines = []
    for kind, word in (("code", "source of "), ("packages", "version of ")):
        for name, old in before[kind].items():
            new = now[kind].get(name, old)
            if new != old:
                lines.append(f"{word}{name}: {old[:SHOWN]} -> {new[:SHOWN]}")
    return lines
