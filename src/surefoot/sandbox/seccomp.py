"""Which system calls a sandboxed program may not make, as a filter for the kernel (seccomp, classic BPF).

Namespaces and limits bound what a program reaches; the filter closes what they leave open: memory that no limit counts
(memfd, System V segments and queues), looking into other processes, new namespaces and mounts, sockets of every family, and
parts of the kernel that a test has no use for. A refused call fails with EPERM, as it does for any unprivileged program.
"""

import errno
import platform
import struct

from surefoot.errors import SurefootError

REFUSED = {  # name: number on x86-64, on 64-bit ARM
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
"""machine -> column of REFUSED, audit architecture, numbers of clone and prctl"""
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080
"""the flags of clone that make namespaces"""
_DIES_WITH_PARENT = 1
"""what prctl would undo, so that a program could outlive us"""
_X32 = 0x40000000
"""numbers from here on are x86-64's other ABI, which would be a way around every number above"""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def program(machine: str | None = None) -> bytes:
    """The filter for this machine or a named one, as ``bwrap --seccomp`` reads it.

    Raises SurefootError for a machine whose system calls are not known here.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SurefootError(f"the sandbox knows the system calls of {', '.join(_MACHINES)}, and this machine is {name!r}")
    column, architecture, clone, prctl = _MACHINES[name]
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *_when(_AT_LEAST, _X32, errno.ENOSYS),
        *_when(_EQUAL, _CLONE3, errno.ENOSYS),  # its flags lie in memory, where no filter sees them; the C library takes clone
    ]
    for numbers in REFUSED.values():
        lines += _when(_EQUAL, numbers[column], errno.EPERM)
    for number, test, value in ((clone, _ANY_BIT, _NEW_NAMESPACES), (prctl, _EQUAL, _DIES_WITH_PARENT)):
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), *_when(test, value, errno.EPERM)]
        lines += [(_RETURN, 0, 0, _ALLOW)]
    lines += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _when(test: int, value: int, error: int) -> list[tuple[int, int, int, int]]:
    """Fail with ``error`` where the loaded word passes the test."""
    return [(test, 0, 1, value), (_RETURN, 0, 0, _FAIL | error)]
