"""Build the bubblewrap command of the sandbox: its file system, user and filter of system calls.

Namespaces and limits bound what a program can reach. The filter (seccomp, classic BPF) closes what they leave open: memory that
no limit counts (memfd, System V segments and queues), access to other processes, new namespaces and mounts, sockets, and parts
of the kernel that tests don't need. A rejected call fails with EPERM, as for any unprivileged program.
"""

import errno
import os
import platform
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError

NOBODY = 65534
WORK = "/tmp"  # the only writable folder in the sandbox; it is in memory
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

REJECTED_CALLS = {  # name: number on x86-64, on 64-bit ARM
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "socket": (41, 198),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
}
_MACHINES = {"x86_64": (0, 0xC000003E, 56, 157), "aarch64": (1, 0xC00000B7, 220, 167)}
"""machine -> column of REJECTED_CALLS, audit architecture, numbers of clone and prctl"""
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080
"""the flags of clone that create namespaces"""
_DIES_WITH_PARENT = 1
"""the option of prctl that would let a program outlive its parent"""
_X32 = 0x40000000
"""numbers from here on belong to x86-64's other ABI, which would bypass the numbers above"""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def command(python: str, disk: int, filter_fd: int, info_fd: int) -> list[str]:
    """The arguments of bwrap, including those of the interpreter but not its program.

    Every namespace is new. The root contains only the interpreter, its libraries and four devices, all read-only, and ``WORK``,
    a memory file system of ``disk`` bytes; there is no /proc, /etc, home or shell. Python is the first process of its
    namespace, so all others end with it, and bwrap, its parent, reaps it.

    Raises SurefootError, which names the package, if bubblewrap is not installed.
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
    """The environment variables inside the sandbox."""
    return {"HOME": WORK, "PATH": "", "LANG": "C.UTF-8"}


def identity() -> dict[str, Any]:
    """User arguments for starting bwrap: nobody if this process is root, because process limits don't bind root."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def interpreters() -> Iterator[str]:
    """Candidates for the sandbox's Python, the best first: this one, which another user may not reach, then the system's."""
    ours = getattr(sys, "_base_executable", sys.executable)
    paths = (os.path.realpath(path) for path in (ours, "/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path))
    yield from dict.fromkeys(paths)


def _bwrap() -> str:
    if platform.system() != "Linux":
        raise SurefootError(f"sandbox: needs Linux, and this is {platform.system()}; run code that a model wrote on Linux")
    path = shutil.which("bwrap")
    if path is None:
        raise SurefootError(
            "sandbox: needs bwrap, which is not installed; install the package bubblewrap, for example: "
            "apt-get install bubblewrap"
        )
    return path


def _mounts(python: str) -> Iterator[str]:
    """Mount options for libraries, the interpreter, its standard library, the dynamic linker's cache and devices."""
    prefix = Path(python).parent.parent
    standard = prefix / "lib"
    if prefix == Path("/usr") and (standard / Path(python).name).is_dir():  # /usr/lib contains much else
        standard /= Path(python).name
    shared = f"/usr/lib/{platform.machine()}-linux-gnu"  # on Debian and its derivatives
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


def syscall_filter(machine: str | None = None) -> bytes:
    """The filter of system calls for this machine or a named one, in the format of ``bwrap --seccomp``.

    Raises SurefootError for an unsupported machine.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SurefootError(f"sandbox: supports {', '.join(_MACHINES)}, and this machine is {name!r}; use a supported one")
    column, architecture, clone, prctl = _MACHINES[name]
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *_when(_AT_LEAST, _X32, errno.ENOSYS),
        *_when(_EQUAL, _CLONE3, errno.ENOSYS),  # a filter can't see its flags in memory; the C library falls back to clone
    ]
    for numbers in REJECTED_CALLS.values():
        lines += _when(_EQUAL, numbers[column], errno.EPERM)
    for number, test, value in ((clone, _ANY_BIT, _NEW_NAMESPACES), (prctl, _EQUAL, _DIES_WITH_PARENT)):
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), *_when(test, value, errno.EPERM)]
        lines += [(_RETURN, 0, 0, _ALLOW)]
    lines += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _when(test: int, value: int, error: int) -> list[tuple[int, int, int, int]]:
    """Fail with ``error`` if the loaded word passes the test."""
    return [(test, 0, 1, value), (_RETURN, 0, 0, _FAIL | error)]
