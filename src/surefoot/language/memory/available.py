"""How much memory a device has, and how much of it can still be allocated."""

import resource
from collections.abc import Iterator
from pathlib import Path

import torch

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""the limit of a control group, its use, and the pages of files that can be dropped: versions 2 and 1"""


def available_memory(device: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that the device can still allocate; None if unknown.

    On a CPU: the least of the machine's free memory (with swap: slow, but the run fits), the limits of the process's control
    groups, and its address space (``ulimit -v``). On a GPU: the driver's figure.
    """
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    if device.startswith("mps"):
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    machine, limits = _fields(proc / "meminfo"), [most - used for most, used in _group_limits(proc, cgroups)]
    if "MemAvailable" in machine:
        limits.append(machine["MemAvailable"] + machine.get("SwapFree", 0))
    if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(space - _fields(proc / "self" / "status").get("VmSize", 0))
    return max(0, min(limits)) if limits else None


def total_memory(device: str) -> int | None:
    """Bytes of the device, free or not; None if unknown. On a CPU the least of the machine's and the control groups' limits."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[1])
    if device.startswith("mps"):
        return int(torch.mps.recommended_max_memory())
    limits = [_fields(PROC / "meminfo").get("MemTotal"), *(most for most, _ in _group_limits(PROC, CGROUPS))]
    return min((size for size in limits if size is not None), default=None)


def _group_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """What this process's control groups allow, and what they use, with droppable file pages as free."""
    for group in _control_groups(proc, cgroups):
        for limit, used, dropped in GROUP_FILES:
            try:
                most, now = int((group / limit).read_text()), int((group / used).read_text())
            except (OSError, ValueError):  # missing, or "max"
                continue
            yield most, now - _fields(group / "memory.stat", 1).get(dropped, 0)
            break


def _control_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The folders of this process's control groups, version 1 and 2, from its own up to the root.

    In a container the path may be the host's; then the visible root is the container's own group.
    """
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = cgroups / "memory" if controllers else cgroups
            here = root / path.strip("/")
            yield from (folder for folder in (here, *here.parents) if folder == root or root in folder.parents)


def _fields(path: Path, unit: int = 1024) -> dict[str, int]:
    """Lines such as ``MemAvailable:   1234 kB`` as bytes."""
    rows = (line.replace(":", " ").split() for line in _lines(path))
    return {words[0]: int(words[1]) * unit for words in rows if len(words) > 1 and words[1].isdigit()}


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if it can't be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
