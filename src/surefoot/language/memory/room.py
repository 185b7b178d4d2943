"""How much memory there is on the device of a run, as far as it can be known."""

import resource
from pathlib import Path

import torch

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available(device: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that can still be taken; None where nothing says.

    On a CPU the least of what the machine has left (swap included: it is slow, but the run would fit), what the control groups
    of the process allow, and what is left of its limit of address space (``ulimit -v``). On a GPU what its driver says.
    """
    kind, _, _ = device.partition(":")
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    if kind == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    known = [machine(proc), address_space(proc), *(left_in(folder) for folder in control_groups(proc, cgroups))]
    return min((size for size in known if size is not None), default=None)


def machine(proc: Path = PROC) -> int | None:
    """What the machine has left, by the kernel's own estimate, and its swap."""
    fields = _fields(proc / "meminfo")
    if "MemAvailable" not in fields:
        return None
    return fields["MemAvailable"] + fields.get("SwapFree", 0)


def address_space(proc: Path = PROC) -> int | None:
    """What is left of the process's limit of address space; None without one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - _fields(proc / "self" / "status").get("VmSize", 0))


def control_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """The folders of the groups whose limits hold for this process, of version 1 and 2, from its own up to the root.

    In a container the path may be the host's; then the root that is seen is the container's own group.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        here = root / path.strip("/")
        found += [folder for folder in (here, *here.parents) if folder == root or root in folder.parents]
    return found


def left_in(group: Path) -> int | None:
    """What a control group still allows, files in memory that can be dropped counted as free; None without a limit."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, now = int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        return max(0, most - now + _fields(group / "memory.stat", 1).get(dropped, 0))
    return None


def _fields(path: Path, unit: int = 1024) -> dict[str, int]:
    """Lines such as ``MemAvailable:   1234 kB`` as bytes."""
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            found[words[0]] = int(words[1]) * unit
    return found
