"""Compiled programs of traceable functions of tensors, kept in the user's cache.

A function is traced (``make_fx``), exported and compiled (AOTInductor); it may contain a ``loop``. The first run of a function
compiles it for some seconds. Later runs load the library at once, and don't trace the function either if they know all that
decides its graph.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx

from surefoot.errors import NotCompiledError, announce, cause_of
from surefoot.files import cache_folder, package_source, write_text

Program = Callable[[list[Tensor]], list[Tensor]]
"""takes a list of tensors, which it empties, and returns new tensors"""
VIEWS = {torch.ops.aten.split_copy.Tensor: torch.ops.aten.split.Tensor}
"""the copies that ``functionalize`` makes instead of views, and that are slow in a loop"""
LONGEST_WAIT = 300.0
"""seconds to wait for another process that compiles the same program, before this one compiles it too"""
OLDEST_TORCH = (2, 10)  # its loader of programs takes the arguments that are used here
TRACED_CODE = ("accel", "core", "functional", "control")
"""the parts of the package that are traced"""


def _fast_tanh(x: Tensor) -> Tensor:
    """tanh by one exponential, to 1.2e-7; the vectorised library's takes three times as long."""
    return 2 * torch.sigmoid(2 * x) - 1


FAST: Mapping[Any, Callable[..., Any]] = {torch.ops.aten.tanh.default: _fast_tanh}
"""what programs on many rows compute in place of some operations"""


def program_of(
    name: str,
    function: Callable[..., tuple[Tensor, ...]],
    arguments: Sequence[Tensor],
    decided_by: Sequence[Any] | None = None,
    replaced: Mapping[Any, Callable[..., Any]] | None = None,
) -> Program:
    """Compile a function for tensors of these shapes, or load its library from the cache.

    name         what the function does, for the lines that are announced
    decided_by   all that decides the function's graph, besides the package's code and the shapes of the arguments: objects
                 with a ``repr`` of their values, and tensors. None: unknown, so the function is traced each time
    replaced     functions of this package to compute in place of operations, by the operation

    Raises NotCompiledError if there is no C++ compiler, or the function can't be traced, such as one that branches on values.
    """
    operations = [str(operation) for operation in replaced or {}]
    known = None
    if decided_by is not None:
        parts = (package_source(TRACED_CODE), function.__qualname__, operations, decided_by, _shapes(arguments))
        known = cache_folder("engine") / f"{_hash(*parts)}.key"
    if known is not None and known.is_file():
        library = cache_folder("engine") / known.read_text()
        if library.is_file():
            return _load(library)
    try:
        with torch.no_grad():
            traced = _traced(function, arguments, replaced)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise NotCompiledError(
            f"engine='compiled': the policy can't be traced ({type(error).__name__}: {reason}); set engine = 'eager'"
        ) from error
    traced.graph.eliminate_dead_code()
    traced.recompile()
    library = cache_folder("engine") / f"{_fingerprint(traced, arguments)}.pt2"
    if not library.exists():
        start = time.perf_counter()
        announce(f"engine: compiling {name}, once for this shape; this may take a minute …")
        _compile(traced, arguments, library)
        announce(f"engine: compiled {name} in {time.perf_counter() - start:.0f} s; later runs load it from the cache")
    if known is not None:
        write_text(known, library.name)
    return _load(library)


def loop(
    unfinished: Callable[..., Tensor],
    step: Callable[..., tuple[Tensor, ...]],
    carried: Sequence[Tensor],
    others: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Replace the carried tensors by those of ``step`` while they are ``unfinished``, in a function for ``program_of``.

    Both take ``*carried, *others``. ``unfinished`` returns a bool []; ``step`` returns new tensors of the same shapes. Other
    tensors that they read are constants of the program.
    """
    from torch._higher_order_ops.while_loop import while_loop_op

    with disable_proxy_modes_tracing():
        body = _traced(step, [*carried, *others])  # custom gradients first, as functionalize takes none
        body = _traced(functionalize(body), [*carried, *others], VIEWS)
    for node in body.graph.find_nodes(op="call_function", target=torch.ops.aten.lift_fresh_copy.default):
        node.replace_all_uses_with(node.args[0])  # a copy of a constant, which nothing changes any more
    body.graph.eliminate_dead_code()
    # The compiler rejects constants in the body of a loop, so they become arguments of it.
    constants: list[Tensor] = []
    placeholders: dict[int, torch.fx.Node] = {}  # one for each constant, as arguments of a loop must not share memory
    last = body.graph.find_nodes(op="placeholder")[-1]
    for node in body.graph.find_nodes(op="get_attr"):
        constant = getattr(body, str(node.target))
        if not isinstance(constant, Tensor):
            continue  # the step of a scan
        if id(constant) not in placeholders:
            with body.graph.inserting_after(last):
                last = placeholders[id(constant)] = body.graph.placeholder(f"constant_{len(constants)}")
            constants.append(constant)
        node.replace_all_uses_with(placeholders[id(constant)])
        body.graph.erase_node(node)
    body.recompile()
    count = len(carried) + len(others)
    result: tuple[Tensor, ...] = while_loop_op(
        lambda *tensors: unfinished(*tensors[:count]),
        body,
        tuple(carried),  # type: ignore[arg-type]
        (*others, *constants),
    )
    return result


def scan(
    step: Callable[..., tuple[Tensor, ...]], carried: Sequence[Tensor], rows: Sequence[Tensor], others: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The carried tensors after ``step`` for each of ``rows`` [T, …], then what else it returned [T, …], in a function for
    ``program_of``. It takes ``*carried``, a row of each of ``rows`` and ``*others``, and returns new tensors.
    """
    from torch._higher_order_ops.scan import scan_op

    result: tuple[Tensor, ...] = tuple(scan_op(step, list(carried), list(rows), tuple(others)))
    return result


def is_traced() -> bool:
    """Whether the caller is traced by ``program_of``."""
    return get_proxy_mode() is not None


def _traced(
    function: Callable[..., tuple[Tensor, ...]],
    arguments: Sequence[Tensor],
    replaced: Mapping[Any, Callable[..., Any]] | None = None,
) -> torch.fx.GraphModule:
    tracing = make_fx(function, dict(replaced or {}), tracing_mode="fake", _allow_non_fake_inputs=True)
    traced: torch.fx.GraphModule = tracing(*arguments)
    return traced


def structure(module: nn.Module, constants: bool) -> list[Any] | None:
    """All that decides the graph of a module's computation, for ``program_of``; None if it has code of others.

    constants   whether buffers and frozen parameters are constants in the graph, so that their values count too; otherwise all
                tensors are arguments
    """
    parts: list[Any] = []
    for name, part in module.named_modules():
        kind = type(part)
        if kind.__module__.split(".")[0] not in ("surefoot", "torch"):
            return None
        held = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        own = [key for key in vars(part) if key == "training" or key not in vars(nn.Module())]
        settings = {key: vars(part)[key] for key in own if not key.startswith("_flat_weight")}  # parameters of nn.LSTM again
        if any(isinstance(value, Tensor) for value in settings.values()):
            return None  # the repr of a tensor has rounded values
        parts += [name, kind.__qualname__, settings, [(key, tuple(x.shape), x.dtype, x.requires_grad) for key, x in held]]
        parts += [x.detach() for _, x in held if constants and not x.requires_grad]
    return parts


def _load(library: Path) -> Program:
    # torch._inductor.aoti_load_package does the same, but imports the whole compiler first.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(library), "model", False, 1, -1)
    run: Program = loader.boxed_run  # skips the wrapper's flattening of argument trees
    return run


def _compile(traced: torch.fx.GraphModule, arguments: Sequence[Tensor], library: Path) -> None:
    """Compile the traced function into a shared library, or wait for another process that does.

    Raises NotCompiledError if that fails.
    """
    require_compiler()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with suppress(NotImplementedError, OSError):  # no locks here, another user's, held too long
                stack.enter_context(filelock.FileLock(library.with_suffix(".lock"), timeout=LONGEST_WAIT))
            if library.is_file():  # another rank, or another run, was faster
                return
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=library.parent))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the exporter uses functions that PyTorch has deprecated
            exported = torch.export.export(traced, tuple(arguments), strict=False)
            new = Path(folder) / library.name
            with torch._inductor.config.patch({"cpp.cxx": (compiler(),)}):  # its default search knows only $CXX and g++
                _package(exported, new)
            os.replace(new, library)
    except OSError as error:
        raise NotCompiledError(
            f"engine='compiled': {library.parent} can't be written ({cause_of(error)}); set engine = 'eager', or "
            "another folder by $SUREFOOT_CACHE"
        ) from error
    except Exception as error:
        raise NotCompiledError(
            f"engine='compiled': {compiler()} could not compile the program ({type(error).__name__}); set engine = 'eager', or "
            "another compiler by $CXX"
        ) from error


def _package(exported: torch.export.ExportedProgram, library: Path) -> None:
    from torch._inductor.exc import InductorError

    try:
        torch._inductor.aoti_compile_and_package(exported, package_path=str(library))
    except InductorError as error:
        if not isinstance(error.inner_exception, ValueError):
            raise
        # PyTorch 2.11 can't plan the memory of some loops; without buffers that are used again there is nothing to plan.
        with torch._inductor.config.patch({"allow_buffer_reuse": False}):
            torch._inductor.aoti_compile_and_package(exported, package_path=str(library))


def _fingerprint(traced: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> str:
    """A hash of all that the library depends on: program, constants, shapes, and the machine."""
    parts: list[Any] = []
    for name, graph in traced.named_modules():  # the bodies of loops are modules inside
        held = [*graph.named_parameters(recurse=False), *graph.named_buffers(recurse=False)]  # constants: what is frozen,
        held += [(key, x) for key, x in vars(graph).items() if isinstance(x, Tensor)]  # or was made while tracing
        parts += [name, getattr(graph, "code", ""), *(part for constant in sorted(held) for part in constant)]
    return _hash(parts, _shapes(arguments))


def _shapes(arguments: Sequence[Tensor]) -> list[Any]:
    return [(tuple(x.shape), x.stride(), str(x.dtype)) for x in arguments]


def _hash(*parts: Any) -> str:
    """A hash of values, tensors among them, and of what each library depends on: PyTorch, CPU and threads."""
    machine = [torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    digest = hashlib.sha256()
    for part in (machine, *parts):
        for each in part if isinstance(part, list | tuple) else [part]:
            content = f"{each.dtype} {tuple(each.shape)} {each.tolist()}" if isinstance(each, Tensor) else repr(each)
            digest.update(content.encode() + b"\0")
    return digest.hexdigest()[:32]


def compiler() -> str | None:
    """The path of the C++ compiler; None if there is none."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


TRIAL = "#include <cmath>\n#include <vector>\ndouble half(double x) { return std::vector<double>(1, std::fabs(x))[0] / 2; }\n"
"""a small program that needs the standard library"""


def no_compiler() -> str | None:
    """Why programs can't be compiled here; None if the compiler makes a library of a small one, in about 0.3 s."""
    if _is_old():
        return f"PyTorch {torch.__version__} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
    path = compiler()
    if path is None:
        return "no C++ compiler (g++ or clang++) is installed"
    with tempfile.TemporaryDirectory() as folder:
        words = [path, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(Path(folder) / "trial.so")]
        try:
            done = subprocess.run(words, input=TRIAL.encode(), capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{path} does not run ({cause_of(error)})"
    return f"{path} can't compile a small program" if done.returncode else None


def _is_old() -> bool:
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH


def require_programs() -> None:
    """Raise NotCompiledError if there is neither a compiler nor a compiled program in the cache."""
    if _is_old() or not any(cache_folder("engine").glob("*.pt2")):
        require_compiler()


def require_compiler() -> None:
    """Raise NotCompiledError unless there are a C++ compiler and a PyTorch that is new enough."""
    if _is_old():
        raise NotCompiledError(
            f"engine='compiled': PyTorch {torch.__version__} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}; install a "
            "newer one, or set engine = 'eager'"
        )
    if compiler() is None:
        raise NotCompiledError("engine='compiled': needs a C++ compiler (g++ or clang++); install one, or set engine = 'eager'")
