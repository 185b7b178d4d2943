"""Hashes of the user's code that a run rests on: of its source, and of what it keeps from one call to the next.

Imports are read from the text of each file. Nothing is imported or run, so a changed file is noticed before it runs. Of
installed packages, the version counts. What code keeps, and no checkpoint holds, are attributes of objects and classes,
globals, and the defaults and closures of functions, where they are numbers, texts, arrays, or collections of these. The hash of
this package's source is in ``files``.
"""

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from surefoot.core.seeding import RunningHash
from surefoot.files import PACKAGE, read_bytes

NAMED = re.compile(r"(?:pettingzoo/)?(?:(?P<file>[^:\n]*\.py)(?::[\w./-]+)?|(?P<module>[A-Za-z_][\w.]*):[\w./-]+)")
"""``file.py``, ``file.py:name``, ``module:name`` or ``module:Id-v0``"""
IMPORTING = {"import_module", "__import__", "run_module", "run_path", "spec_from_file_location"}
"""functions whose argument is a module or a file to import"""
MAYBE = re.compile(r"\.?[A-Za-z_][\w.]*|\.")
"""a text that may be the name of a module, or begin it"""
PLAIN = (bool, int, float, str, bytes, type(None))
INSIDE = ("func", "args", "keywords", "__func__", "__self__", "fget")
_distributions = cache(packages_distributions)
LARGEST = 10_000
"""entries of a collection that is still hashed, with those of the collections in it"""
LOST = (
    "did not come back: no checkpoint holds attributes and globals of your code; if rewards or episodes depend on them, this "
    "resume is not exact"
)
COLLECTIONS = (list, tuple, dict, deque)
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
    for field, thing in {**_entry_points(table.get("task")), **(objects or {})}.items():
        own, modules = source_of_object(field, thing)
        code, roots = code | own, roots | modules
        if own and (main := getattr(sys.modules["__main__"], "__file__", None)):
            roots |= set(imports_of(Path(main)))
    here, search = Path.cwd(), [Path(entry).resolve() for entry in sys.path if entry]
    search = [folder for folder in dict.fromkeys(search) if folder.is_dir() and not _installed(folder)]
    folders = [each.relative_to(here).as_posix() if each.is_relative_to(here) else str(each) for each in search]
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

    A text such as ``file.py`` or ``module:name``, as in the ``entry_point`` of an id, counts as an import; in a file that
    imports by a call, as by ``importlib.import_module(name)``, every text that may be the name of a module, or begin it.

    package  of the file, for relative imports
    """
    names: set[str] = set()
    with suppress(OSError, ValueError, SyntaxError, RecursionError):
        nodes = list(ast.walk(ast.parse(read_bytes(file))))
        calls = any(getattr(node, part, None) in IMPORTING for node in nodes for part in ("id", "attr", "name"))
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(text := node.value, str):
                names |= set(named_in(text))
                if calls and MAYBE.fullmatch(text):
                    name = f"{package}{text}".lstrip(".") if text.startswith(".") else text
                    names.add(f"{name}*" if name.endswith(".") else name)
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                origin = ".".join(part for part in [*above, node.module or ""] if part)
                names |= {name for name in (origin, *(f"{origin}.{alias.name}".strip(".") for alias in node.names)) if name}
    return sorted(names - {""})


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
        if part == "*":  # any module of a package
            return files | {f"{next(reversed(files))}.{file.stem}": file for file in sorted(place.glob("*.py"))}
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
def _installed(path: Path) -> bool:
    """Whether a path belongs to Python or to an installed package."""
    places = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")]
    inside = any(path == place or place in path.parents for place in places) or path == PACKAGE.parent
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or path.suffix == ".zip"


def _entry_points(task: Any) -> dict[str, Any]:
    """What Gymnasium's registry makes a task from, if it is an id: names or objects."""
    spec = getattr(sys.modules.get("gymnasium"), "registry", {}).get(str(task).rpartition(":")[2])
    places = (spec, *(spec.additional_wrappers if spec is not None else ()))
    return {f"task[{index}]": place.entry_point for index, place in enumerate(places) if place is not None}


def source_of_object(field: str, thing: Any) -> tuple[dict[str, str], set[str]]:
    """The hash of an object of a script or notebook and of the values it uses, if any; and the modules of all else it uses."""
    texts, modules = list[str](), set(named_in(thing))
    waiting, seen = [thing], dict[int, Any]()
    while waiting:
        if id(each := waiting.pop()) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, PLAIN):
            texts.append("" if each is thing else repr(each))
        elif isinstance(each, ModuleType):
            modules.add(each.__name__)
        elif isinstance(each, (list, tuple, set, frozenset, dict)):
            parts = list(each.items() if isinstance(each, dict) else each)
            parts = sorted(parts, key=repr) if isinstance(each, (set, frozenset)) else parts
            texts.append(repr([part for part in parts if isinstance(part, PLAIN)]))
            waiting += parts
        elif not isinstance(each, (FunctionType, type)):  # such as a functools.partial, a method or a property
            waiting += [type(each), *(getattr(each, name) for name in INSIDE if hasattr(each, name))]
        elif each.__module__ != "__main__":
            modules.add(each.__module__)
        else:
            with suppress(OSError, TypeError):
                texts.append(inspect.getsource(each.__code__ if isinstance(each, FunctionType) else each))
            if isinstance(each, FunctionType):
                used, captured = _variables(each)
                known = (captured | used).items()  # a collection may change, unless its name is a constant's
                waiting += [value for name, value in known if name.isupper() or not isinstance(value, (list, set, dict))]
            else:
                methods = (FunctionType, staticmethod, classmethod, property)
                waiting += [*each.__bases__, *(part for part in vars(each).values() if isinstance(part, methods))]
    return {field: hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()} if any(texts) else {}, modules


def _variables(function: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """The globals that a function uses, and the variables that it captured."""
    used = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    captured = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # empty
            captured[name] = cell.cell_contents
    return used, captured


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
    now: dict[str, dict[str, str]] = next((each for each in found if each["code"]), {"code": {}, "packages": {}})
    for field, thing in (objects or {}).items():
        now["code"] |= source_of_object(field, thing)[0]
    lines = []
    for kind, word in (("code", "source of "), ("packages", "version of ")):
        for name, old in before[kind].items():
            new = now[kind].get(name, old)
            if new != old:
                lines.append(f"{word}{name}: {old[:SHOWN]} -> {new[:SHOWN]}")
    return lines


# ---- what it keeps --------------------------------------------------------------------------------------------------------


class Kept:
    """What code of the user keeps, compared with what it kept when this was made."""

    def __init__(self, things: Callable[[], Iterable[Any]]) -> None:
        self.things, self.before = things, attributes(things())

    def changed(self) -> dict[str, str]:
        """The hashes that are new or other ones, for a checkpoint."""
        return {name: digest for name, digest in attributes(self.things()).items() if self.before.get(name) != digest}

    def unlike(self, saved: Mapping[str, str]) -> str:
        """The names of those that have another hash now than in a checkpoint, in words; empty if none."""
        now = attributes(self.things())
        return ", ".join(sorted(name for name, digest in saved.items() if now.get(name) != digest))

    def lost(self, saved: Mapping[str, str]) -> list[str]:
        """The line of a resume about them, if there is one."""
        return [f"{names} {LOST}" for names in filter(None, [self.unlike(saved)])]


def kept_by(world: Any, objects: Mapping[str, Any] | None) -> Kept:
    """What the code of a run keeps.

    objects  functions and classes that were passed as objects, by field
    """
    return Kept(lambda: [*(objects or {}).values(), *getattr(world, "user_code", ())])


def attributes(things: Iterable[Any]) -> dict[str, str]:
    """Hashes by owner and name, as in ``Curriculum.level``, of objects, classes and functions, and of those of the user's that
    they use. Objects of Gymnasium are left out: what they keep, clocks and counts of episodes, changes no episode.
    """
    found: defaultdict[str, RunningHash] = defaultdict(RunningHash)
    waiting, seen = list(things), set[int]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or (isinstance(thing, FunctionType) and not _is_own(thing)):
            continue
        seen.add(id(thing))
        if isinstance(thing, FunctionType):
            used, captured = _variables(thing)
            held = {**vars(thing), "defaults": thing.__defaults__, **captured}
            _add(found, thing.__qualname__, held)
            _add(found, thing.__module__.removeprefix("_surefoot_"), used)
            waiting += _own_in([*used.values(), *held.values()])
        elif isinstance(thing, (MethodType, partial)):
            waiting += [thing.func, *thing.args] if isinstance(thing, partial) else [thing.__self__, thing.__func__]
        elif isinstance(thing, type):
            for kind in filter(_is_own, thing.__mro__):
                _add(found, kind.__name__, vars(kind))
                waiting += _own_in(vars(kind).values())
        elif type(thing).__module__.partition(".")[0] not in ("gymnasium", "surefoot"):
            held = getattr(thing, "__dict__", {})
            _add(found, type(thing).__name__, held)
            waiting += [type(thing), *_own_in(held.values())]
    return {name: each.digits() for name, each in found.items()}


def _add(found: defaultdict[str, RunningHash], owner: str, values: Mapping[str, Any]) -> None:
    for name, value in list(values.items()):
        if isinstance(value, COLLECTIONS):
            inner = value.values() if isinstance(value, dict) else value
            hashed = len(value) + sum(len(each) for each in inner if isinstance(each, COLLECTIONS)) <= LARGEST
        else:
            hashed = isinstance(value, PLAIN) or hasattr(type(value), "dtype")  # arrays and tensors
        if hashed and not name.startswith("__"):
            with suppress(Exception):  # from the first entry on that is something else
                found[f"{owner}.{name}"].add(list(value) if isinstance(value, deque) else value)


def _own_in(values: Iterable[Any]) -> list[Any]:
    """Objects, classes and functions of the user among values, or in collections among them."""
    found = []
    for value in values:
        each = (
            list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else [value]
        )
        found += [one for one in each if _is_own(one)] if len(each) <= LARGEST else []
    return found


def _is_own(thing: Any) -> bool:
    """Whether an object, class or function is of a module of the user: neither Surefoot's nor installed."""
    kind = thing if isinstance(thing, (type, FunctionType)) else type(thing)
    name = kind.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (isinstance(file, str) and name.partition(".")[0] != "surefoot" and not _installed(Path(file)))
