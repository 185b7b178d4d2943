"""The command that starts a sandboxed Python: what of the file system it sees, and as whom it runs."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError

NOBODY = 65534
WORK = "/tmp"  # inside the sandbox: the one place to write, in memory
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def command(python: str, disk: int, filter_fd: int, info_fd: int) -> list[str]:
    """bwrap's arguments, up to and with the interpreter's own.

    Every namespace is new. The root is empty but for the interpreter, its libraries and four devices, all read-only, and
    ``WORK``, a memory file system of ``disk`` bytes; there is no /proc, no /etc, no home, no shell. Python is the first
    process of its namespace, so that all others end with it, and so that bwrap, its parent, sees it end and no zombie stays.

    Raises SurefootError, which names the package, where there is no bubblewrap.
    """
    return [
        _bwrap(),
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--cap-drop", "ALL"),
        *("--as-pid-1", "--die-with-parent", "--new-session"),
        *_mounts(python),
        *("--size", str(disk), "--tmpfs", WORK, "--remount-ro", "/", "--chdir", WORK),
        *("--seccomp", str(filter_fd), "--info-fd", str(info_fd)),
        *("--", python, "-I", "-S", "-B", "-X", "utf8", "-c"),
    ]


def environment() -> dict[str, str]:
    """All that the sandbox has of an environment."""
    return {"HOME": WORK, "PATH": "", "LANG": "C.UTF-8"}


def identity() -> dict[str, Any]:
    """As whom to start bwrap: for root, as nobody, because limits on processes do not bind root; else as we are."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def interpreters() -> Iterator[str]:
    """Pythons that the sandbox may run, the best first: ours, unless another uid can't reach it, or the system's."""
    ours = getattr(sys, "_base_executable", sys.executable)
    found = (os.path.realpath(path) for path in (ours, "/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path))
    yield from dict.fromkeys(found)


def _bwrap() -> str:
    if platform.system() != "Linux":
        raise SurefootError(f"what a model wrote runs in a sandbox alone, and that needs Linux; this is {platform.system()}")
    found = shutil.which("bwrap")
    if found is None:
        raise SurefootError(
            "what a model wrote runs in a sandbox alone, and there is no bwrap here; install the package bubblewrap, "
            "for example: apt-get install bubblewrap"
        )
    return found


def _mounts(python: str) -> Iterator[str]:
    """The system's libraries, the interpreter with its standard library, the cache of the dynamic linker, devices."""
    prefix = Path(python).parent.parent
    standard = prefix / "lib"
    if prefix == Path("/usr") and (standard / Path(python).name).is_dir():  # /usr/lib holds much else
        standard /= Path(python).name
    shared = f"/usr/lib/{platform.machine()}-linux-gnu"  # where Debian and its kin have them
    libraries = shared if os.path.isdir(shared) else "/usr/lib"
    for path in dict.fromkeys((libraries, "/usr/lib64", "/lib", "/lib64", str(standard))):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in (python, "/etc/ld.so.cache"):
        if os.path.isfile(path):
            yield from ("--ro-bind", path, path)
    for device in DEVICES:
        yield from ("--dev-bind", device, device)
