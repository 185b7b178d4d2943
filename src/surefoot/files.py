"""Read and write files of any origin: what can't be read is an error of one line that names the file.

This module imports no torch.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from io import BufferedReader
from numbers import Integral
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError, cause_of, limit_reached

RUNS = Path("runs")
"""the folder of runs that are only named"""
FULL = "free space and resume"
"""remedy for a run that can't write"""
DEEPEST = 64
"""levels of nested tables"""
PACKAGE = Path(__file__).parent
"""the files of Surefoot itself"""
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""of a container: microseconds of CPU time per period, or ``max`` (cgroup v2)"""


def open_file(path: Path) -> BufferedReader:
    """A plain file, or a link to one, open for reading as bytes. Every read of what a run or a person left begins here.

    Raises SurefootError for a folder, a pipe, a socket or a device, which could block; OSError as ``open`` does.
    """
    check_plain(path)
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # replaced in the meantime
        file.close()
        raise SurefootError(f"{path}: is not a regular file")
    return file


def check_plain(path: Path) -> None:
    """Raise SurefootError for what is not a regular file, FileNotFoundError if there is nothing."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise SurefootError(f"{path}: is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file; move it away")


def check_link(path: Path) -> None:
    """Raise SurefootError for a link to what is not there, such as a disk that is not mounted."""
    if path.is_symlink() and not path.exists():
        raise SurefootError(f"{path}: is a link to {os.readlink(path)}, which is not there; mount it, or bring it back")


def check_plain_folder(folder: Path) -> None:
    """Raise SurefootError if a folder that another library reads has anything but files and folders."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_dir():
            check_plain(path)


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises SurefootError if it can't be read."""
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise SurefootError(limit_reached(error) or f"{path}: can't be read ({error.strerror}); check the path") from None


@cache
def package_source(parts: tuple[str, ...] = (".",)) -> str:
    """A hash of the files of Python in parts of this package."""
    digest = hashlib.sha256()
    for path in sorted({path for part in parts for path in (PACKAGE / part).rglob("*.py")}):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode() + read_bytes(path))
    return digest.hexdigest()[:24]


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a file. Raises SurefootError if it can't be read, or with ``strict`` is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8", errors).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise SurefootError(f"{path}: can't be read ({error})") from None


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of a file. Raises SurefootError if it is not plain, OSError if it can't be read or written."""
    with open_file(source) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of some keys and values of JSON. Raises ValueError for a key that is there twice: one value would be lost."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeats the key {max(names, key=names.count)!r}")
    return table


from_json = partial(json.loads, object_pairs_hook=unique)


def parsed(text: str, parse: Callable[[str], Any] = from_json) -> Any:
    """The value of a text of JSON, or of another format.

    Raises ValueError, as ``parse`` does, also for deeper nesting than Surefoot writes, so that recursive functions are safe.
    """
    value, too_deep = None, True
    with suppress(RecursionError):
        value = parse(text)
        too_deep = _deeper_than(DEEPEST, value)
    if too_deep:
        raise ValueError(f"nested more than {DEEPEST} deep")
    return value


def _deeper_than(levels: int, value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper_than(levels - 1, part) for part in parts)


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises SurefootError when it is not JSON, or nested too deep."""
    text = read_text(path)
    try:
        return parsed(text)
    except ValueError as error:
        raise SurefootError(f"{path}: can't be read ({cause_of(error)})") from None


def read_table(path: Path) -> dict[str, Any]:
    """The table in a JSON file. Raises SurefootError when it is anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise SurefootError(f"{path}: can't be read (it has a {type(value).__name__} instead of a table)")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises SurefootError when it is missing, a folder, or not TOML (with the line).
    """
    text = read_text(path)
    try:
        tables: dict[str, Any] = parsed(text, tomllib.loads)
    except ValueError as error:
        raise SurefootError(f"{path}: not TOML ({error})") from None
    return tables


def as_path(value: object, field: str) -> Path:
    """A path that was passed as an argument. Raises SurefootError for anything else."""
    if not isinstance(value, (str, os.PathLike)):
        raise SurefootError(f"{field}={value!r}: must be the path of a folder")
    return Path(value)


def check_flags(**arguments: object) -> None:
    """Raise SurefootError for an argument that is not True or False, such as the text "False", which counts as true."""
    for name, value in arguments.items():
        if type(value).__name__ not in ("bool", "bool_"):  # of Python and NumPy
            raise SurefootError(f"{name}={value!r}: must be True or False")


def check_whole(least: int, **arguments: object) -> None:
    """Raise SurefootError for an argument that is not a whole number of at least ``least``."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise SurefootError(f"{name}={value!r}: must be a whole number of at least {least}")


BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")
"""texts that are a boolean"""


def check_name(field: str, name: str) -> None:
    """Raise SurefootError unless a name is that of one folder, in printable characters."""
    check_shown(field, name)
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise SurefootError(f"{field}={name!r}: is not a folder name; use letters, digits, - and _, and --run-dir for a path")


def check_shown(field: str, name: str) -> None:
    """Raise SurefootError for a name with an unprintable character, such as a line break."""
    if not name.isprintable():
        raise SurefootError(f"{field}={name!r}: is not a folder name, since it can't be shown; use letters, digits, - and _")


def steps_named(name: str) -> int | None:
    """The steps in a name such as ``5120``; None for any other name."""
    return int(name) if re.fullmatch("[0-9]{1,18}", name) else None


@contextmanager
def made_from(where: Path, remedy: str = "take another checkpoint") -> Iterator[None]:
    """Turn any error in using the content of a file, whose hash may be right, into one line that names the file; except that
    the machine has no more memory.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SurefootError) or limit_reached(error) is not None:
            raise
        raise SurefootError(f"{where}: has content that can't be used ({cause_of(error)}); {remedy}") from None


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Turn a failure to write into one line that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise SurefootError(limit_reached(error) or f"{path}: can't be written ({error.strerror}); {remedy}") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    write_bytes(path, text.encode())


def is_temporary(path: Path) -> bool:
    """Whether a path is what a killed write leaves."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, also while others write it: the last one remains."""
    with written_whole(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary file that becomes ``path`` at the end; after an error, which has its name, nothing has changed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


# ---- the machine, as the kernel's files show it -------------------------------------------------------------------------


def available_cores(limit: Path = CPU_LIMIT) -> int:
    """CPU cores that the affinity of this process and the CPU limit of its container allow, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = map(int, limit.read_text().split())
    except (OSError, ValueError):  # no limit
        return cores
    return max(1, min(cores, -(-time // period)))


def cache_folder(kind: str) -> Path:
    """Where what can be made again is kept: below $SUREFOOT_CACHE, or below ``surefoot`` in the user's cache folder."""
    if own := os.environ.get("SUREFOOT_CACHE"):
        return Path(own).expanduser() / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surefoot" / kind
