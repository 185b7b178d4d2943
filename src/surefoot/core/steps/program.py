"""Functions of tensors as shared libraries: traced once, then run without Python in between.

A function of tensors of static shape is traced (``make_fx``), exported and compiled (AOTInductor). The library is kept in the
user's cache: the first run of a shape compiles it for some seconds, later ones load it at once.
"""

import hashlib
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot.errors import SurefootError

Program = Callable[[list[Tensor]], list[Tensor]]
"""takes the list that it is given apart, and gives tensors of its own"""


def program_of(function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Tensor]) -> Program:
    """What a function does with tensors of these shapes, as a program.

    Raises SurefootError when there is no C++ compiler, or the function can't be traced, as where it looks at numbers.
    """
    try:
        with torch.no_grad():
            traced = make_fx(function)(*arguments)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise SurefootError(
            f"engine='compiled': the policy can't be traced ({type(error).__name__}: {reason}); set engine = 'eager'"
        ) from error
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return _compiled(traced, arguments)


def _compiled(traced: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> Program:
    """A shared library of the traced program, from the cache or newly compiled."""
    package = cache_folder() / f"{_fingerprint(traced, arguments)}.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own use of what it has deprecated
        if not package.exists():
            require_compiler()
            exported = torch.export.export(traced, tuple(arguments), strict=False)
            package.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=package.parent) as folder:
                new = Path(folder) / package.name
                try:
                    with torch._inductor.config.patch({"cpp.cxx": (compiler(),)}):  # by itself it knows $CXX and g++ alone
                        torch._inductor.aoti_compile_and_package(exported, package_path=str(new))
                except Exception as error:
                    raise SurefootError(
                        f"engine='compiled': {compiler()} could not compile the program ({type(error).__name__}); set engine = "
                        "'eager', or another compiler by $CXX"
                    ) from error
                os.replace(new, package)
        library = torch._inductor.aoti_load_package(str(package))
    run: Program = library.loader.boxed_run  # without the wrapper's walk over argument trees
    return run


def _fingerprint(traced: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> str:
    """What decides the library: the program, its constants, shapes, this PyTorch and this processor."""
    parts: list[Any] = [traced.code, [(tuple(x.shape), x.stride(), str(x.dtype)) for x in arguments]]
    held = [*traced.named_parameters(), *traced.named_buffers()]  # what is frozen, and what was made while tracing
    parts += [(name, x.tolist()) for name, x in sorted(held)]
    parts += [(name, x.tolist()) for name, x in sorted(vars(traced).items()) if isinstance(x, Tensor)]
    parts += [torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where compiled programs are kept: $XDG_CACHE_HOME/surefoot/engine, by default below ~/.cache. Safe to delete."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surefoot" / "engine"


def compiler() -> str | None:
    """The C++ compiler, where there is one."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def require_programs() -> None:
    """Raise SurefootError where no program can come from anywhere: there is no compiler, and none were kept from before."""
    if not any(cache_folder().glob("*.pt2")):
        require_compiler()


def require_compiler() -> None:
    """Raise SurefootError unless there is a C++ compiler."""
    if compiler() is None:
        raise SurefootError("engine='compiled': needs a C++ compiler (g++ or clang++); install one, or set engine = 'eager'")
