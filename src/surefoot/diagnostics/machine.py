"""Checks of this machine: Python, PyTorch, GPU, extras, rendering without a display, Atari, disk, compiler."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from surefoot.errors import to_install
from surefoot.files import available_cores
from surefoot.store.finding import Finding, Severity, check_result

EXTRAS: dict[str, tuple[str, ...]] = {
    "mujoco": ("mujoco",),
    "box2d": ("Box2D",),
    "atari": ("ale_py", "cv2"),
    "envpool": ("envpool",),
    "pettingzoo": ("pettingzoo",),
    "minari": ("minari", "h5py"),
    "video": ("imageio_ffmpeg", "pygame"),
    "export": ("onnx", "onnxscript"),
    "plots": ("matplotlib",),
    "notebook": ("ipykernel", "nbclient"),
    "language": ("transformers", "pyarrow"),
    "data": ("datasets", "zstandard"),
    "tools": ("transformers",),
    "hub": ("huggingface_hub",),
    "verifiers": ("math_verify", "jsonschema"),
    "reasoning-gym": ("reasoning_gym",),
    "mcp": ("fastmcp",),
    "openenv": ("openenv",),
    "verifiers-tasks": ("verifiers",),
    "adapters": ("peft",),
    "quantized": ("bitsandbytes",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "inspector": ("starlette", "uvicorn"),
    "tune": ("optuna",),
}
"""extra -> the modules that it installs"""
LEAST_DISK, LITTLE_DISK = 100e6, 2e9
"""bytes below which no checkpoint can be saved, and below which those of a long run may not fit"""
DRAW_SECONDS = 30.0
DRAW = "import mujoco; context = mujoco.GLContext(64, 64); context.make_current(); context.free()"


def check_machine(device: str = "cpu", engine: str = "eager") -> list[Finding]:
    """Check this machine.

    device   of the recipe
    engine   of the recipe: "compiled" needs a compiler; "auto", for one that would be compiled, is eager without one
    """
    return [
        check_python(),
        check_torch(),
        check_device(device),
        check_extras(),
        check_drawing(),
        check_atari(),
        check_disk(),
        check_compiler(engine),
    ]


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """The Python version."""
    if version < (3, 11):
        text = ".".join(map(str, version))
        return check_result(
            "Python", "serious", f"{text}, which is too old", "install Python 3.11 or newer, and make a new environment"
        )
    return check_result("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_torch() -> Finding:
    """The PyTorch version, and the cores."""
    import torch

    threads = f"{available_cores()} cores; a recipe's threads = 1 is fastest for small networks"
    return check_result("PyTorch", "ok", f"{torch.__version__}; {threads}")


def check_device(device: str = "cpu") -> Finding:
    """The device of the recipe, and the accelerators of this machine."""
    import torch

    from surefoot.errors import SurefootError
    from surefoot.ranks.collectives import check_device as usable

    try:
        usable(device)
    except SurefootError as error:
        return check_result(
            "device", "serious", str(error).partition(";")[0], "set device = 'cpu', or install a build of PyTorch for it"
        )
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    if not devices:
        return check_result("device", "ok", "cpu; no GPU found")
    return check_result("device", "ok", f"{device}; available: {', '.join(devices)}")


def check_extras(extras: dict[str, tuple[str, ...]] = EXTRAS) -> Finding:
    """The installed extras."""
    there = [name for name, modules in extras.items() if all(importlib.util.find_spec(module) for module in modules)]
    lacking = [name for name in extras if name not in there]
    what = f"{', '.join(there) or 'none'}"
    if not lacking:
        return check_result("extras", "ok", what)
    return check_result("extras", "absent", f"{what}; not installed: {', '.join(lacking)}", to_install(",".join(lacking)))


def check_drawing() -> Finding:
    """Whether MuJoCo can render without a display, tried in its own process because a driver may crash it."""
    if importlib.util.find_spec("mujoco") is None:
        return check_result(
            "drawing", "absent", "MuJoCo is not installed; other environments need no display", to_install("mujoco")
        )
    backend = os.environ.get("MUJOCO_GL") or "egl"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", DRAW],
            env={**os.environ, "MUJOCO_GL": backend},
            capture_output=True,
            timeout=DRAW_SECONDS,
            check=False,
        )
        works = done.returncode == 0
    except subprocess.TimeoutExpired:
        works = False
    if works:
        return check_result("drawing", "ok", f"MuJoCo renders without a display (MUJOCO_GL={backend})")
    fix = "install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri (Debian's names)"
    fix = fix if backend == "egl" else "unset MUJOCO_GL, or set MUJOCO_GL=egl"
    return check_result(
        "drawing", "warning", f"MuJoCo can't render with MUJOCO_GL={backend}; training works, surefoot watch does not", fix
    )


def check_atari() -> Finding:
    """Whether the Atari games are installed."""
    if not all(map(importlib.util.find_spec, EXTRAS["atari"])):
        return check_result("Atari", "absent", "not installed", to_install("atari"))
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    count = sum(name.startswith("ALE/") for name in gymnasium.registry)
    return check_result("Atari", "ok", f"{count} ids, such as ALE/Breakout-v5")


def check_disk(folder: Path = Path(), free: float | None = None) -> Finding:
    """Free space for checkpoints; ``free`` in bytes, default: of the disk."""
    free = shutil.disk_usage(folder).free if free is None else free
    what = f"{free / 1e9:,.1f} GB free in {folder.resolve()}"
    if free < LEAST_DISK:
        return check_result("disk", "serious", what, "free space, or write elsewhere with --run-dir")
    if free < LITTLE_DISK:
        return check_result(
            "disk", "warning", what, "free space; checkpoints hold weights and moments, checkpoint.keep = 1 keeps fewer"
        )
    return check_result("disk", "ok", what)


def check_compiler(engine: str = "eager") -> Finding:
    """Whether there is a C++ compiler that works, for the compiled engine."""
    from surefoot.accel.programs import compiler, no_compiler

    obstacle = no_compiler()
    if obstacle is None:
        return check_result("compiler", "ok", f"{compiler()}, for the compiled engine")
    verdict: Severity = "absent"
    what, fix = f"{obstacle}; long runs are eager, and slower", "install g++ or clang++"
    if engine == "compiled":
        verdict, what, fix = "serious", f"{obstacle}, and engine = 'compiled' needs one", f"{fix}, or set engine = 'eager'"
    elif engine == "auto":
        verdict, what = "warning", f"{obstacle}; this run would be compiled with one, and is eager, and slower"
    return check_result("compiler", verdict, what, fix)
