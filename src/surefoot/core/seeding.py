"""What makes a run repeat itself: random generators from its one seed, hashes to compare with, deterministic algorithms
on GPUs, and PyTorch's modes, whatever those of the program are.

Streams differ by name, never by adding to the seed: seed 1's second stream must not be seed 2's first. Without deterministic
algorithms a GPU sums the gradient of attention, among others, in the order in which its threads finish.

Importing this needs no torch: a worker process needs seeds and no torch, which takes seconds and 200 MB.
"""

import gc
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    import numpy as np
    import torch

Call = TypeVar("Call", bound=Callable[..., Any])
MAX_SEED = 2**53
"""the largest seed of a recipe: a float64, and so any JSON, holds integers up to it exactly"""
NO_ALGORITHM = "does not have a deterministic implementation"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""the words of PyTorch's two errors: about an operation, and about the workspace of cuBLAS"""


def derived_seed(*words: int | str) -> int:
    """A 32-bit seed that depends on every word and on their order (numpy's SeedSequence; names enter as their CRC-32)."""
    return int(_sequence(words).generate_state(1)[0])


def stream(*words: int | str) -> "torch.Generator":
    """A CPU generator for the run's seed and the stream's name: ``stream(seed, "weights")``."""
    import torch

    return torch.Generator().manual_seed(int(_sequence(words).generate_state(1, "uint64")[0]) >> 1)


def rank_generator(generator: "torch.Generator") -> "torch.Generator":
    """A generator for this rank's share of the next batch; ``generator`` itself in a single process.

    Each rank draws one number from ``generator``, which then has the same state on all ranks, so one checkpoint is enough.
    """
    import torch

    from surefoot.ranks.collectives import rank, world_size

    if world_size() == 1:
        return generator
    drawn = int(torch.randint(2**62, (), generator=generator))
    return torch.Generator().manual_seed(derived_seed(drawn, "rank", rank()))


def _sequence(words: tuple[int | str, ...]) -> "np.random.SeedSequence":
    import numpy as np  # not above: a command line needs MAX_SEED and no numpy

    return np.random.SeedSequence([zlib.crc32(word.encode()) if isinstance(word, str) else word for word in words])


# ---- hashes -----------------------------------------------------------------------------------------------------------


def fingerprint(values: Any) -> str:
    """SHA-256 in hexadecimal digits of nested values; see ``RunningHash.add``."""
    whole = RunningHash()
    whole.add(values)
    return whole.digits()


class RunningHash:
    """A running hash. SHA-256 is the fastest of Python's that has no known collisions, where processors compute it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, values: Any) -> None:
        """Add None, booleans, numbers, text, bytes, arrays, tensors (as arrays, from any device), and dicts, lists and tuples.

        The order of a dict's keys does not matter. Raises TypeError for anything else.
        """
        if hasattr(values, "dtype"):
            self._add_array(values)
        elif isinstance(values, Mapping):
            self._tag(f"dict {len(values)}")
            for key in sorted(values, key=str):
                self.add(key)
                self.add(values[key])
        elif isinstance(values, (list, tuple)):
            self._tag(f"list {len(values)}")
            for value in values:
                self.add(value)
        elif isinstance(values, float):
            self._tag("float")
            self._hash.update(struct.pack("<d", values))
        elif values is None or isinstance(values, (bool, int)):
            self._tag(f"{type(values).__name__} {values}")
        elif isinstance(values, (str, bytes)):
            content = values.encode("utf-8", "surrogatepass") if isinstance(values, str) else values
            self._tag(f"{type(values).__name__} {len(content)}")
            self._hash.update(content)
        else:
            raise TypeError(f"a {type(values).__name__} can't be hashed")

    def _add_array(self, array: Any) -> None:
        import numpy as np

        if hasattr(array, "detach"):
            import torch  # loaded already, as this is a tensor

            kind, shape = str(array.dtype).removeprefix("torch."), tuple(array.shape)
            array = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # numpy has no bfloat16
        else:
            kind, shape = array.dtype.newbyteorder("=").name, array.shape
            if array.dtype.hasobject:
                raise TypeError("an array of objects can't be hashed")
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        self._tag(f"{kind} {shape}")
        if array.size:  # bytes of nothing can't be viewed
            self._hash.update(memoryview(array.reshape(-1).view(np.uint8)))

    def _tag(self, text: str) -> None:
        self._hash.update(f"{text};".encode())

    def digits(self) -> str:
        """The hash of all that was added, in hexadecimal digits; more can be added."""
        return self._hash.hexdigest()


# ---- deterministic algorithms -----------------------------------------------------------------------------------------


def prepare_gpu(device: str, deterministic: bool = True) -> None:
    """Before a run on a GPU: free what runs before it left, and give cuBLAS a workspace with which sums have one order."""
    if device.startswith("cuda"):
        gc.collect()  # a run's session refers to itself, so its models stay until then
        if deterministic:
            os.environ.setdefault(WORKSPACE, ":4096:8")


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms; without ``on``, PyTorch's setting stays as it is.

    Raises SurefootError if an operation has none.
    """
    if not on:
        yield
        return
    try:
        with _algorithms(True):
            yield
    except Exception as error:
        for cause in _causes(error):  # a layer between may have given it other words
            if isinstance(cause, RuntimeError) and any(words in str(cause) for words in (NO_ALGORITHM, WORKSPACE)):
                raise SurefootError(_message(cause)) from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _message(error: RuntimeError) -> str:
    if NO_ALGORITHM in str(error):
        what = str(error).partition(",")[0]
        return f"deterministic=true: {what}; set deterministic = false (to resume a run, with --allow-changes)"
    now = os.environ.get(WORKSPACE, "not set")
    return f"deterministic=true: the environment variable {WORKSPACE} is {now}; set it to :4096:8, or deterministic = false"


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Use any algorithms in this block, which calls the code of others. Enter it in the thread that trains."""
    import torch

    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    with _algorithms(False):
        yield


@contextmanager
def _algorithms(only_deterministic: bool) -> Iterator[None]:
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(only_deterministic)
    memory.fill_uninitialized_memory = False  # it would write new tensors twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills


# ---- modes ------------------------------------------------------------------------------------------------------------


def as_found(call: Call) -> Call:
    """The call under default modes: with gradients, in float32, on the CPU, whatever modes the program has entered.

    Afterwards PyTorch's settings, its threads and the working folder are as before.
    """

    @wraps(call)
    def calling(*arguments: Any, **named: Any) -> Any:
        with _own_modes():
            return call(*arguments, **named)

    return cast(Call, calling)


@contextmanager
def _own_modes() -> Iterator[None]:
    import torch

    settings: tuple[tuple[Callable[[], Any], Callable[[Any], object], Any], ...] = (
        (torch.get_num_threads, torch.set_num_threads, None),
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (_precision, _set_precision, ("highest", ())),
        (lambda: os.environ.get(WORKSPACE), _set_workspace, None),
    )
    with ExitStack() as after:
        with suppress(OSError):  # the working folder was removed
            after.callback(os.chdir, os.getcwd())
        for get, put, own in settings:
            after.callback(put, get())
            if own is not None:
                put(own)
        if torch.get_default_device() != torch.device("cpu"):
            after.enter_context(torch.device("cpu"))  # not always: it makes every call of torch slower
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                after.enter_context(torch.autocast(kind, enabled=False))
        after.enter_context(torch.inference_mode(False))
        after.enter_context(torch.enable_grad())
        yield


def _precision() -> tuple[str, tuple[str, ...]]:
    """How float32 matrices are multiplied: the one setting of older versions of PyTorch, and those of each backend."""
    import torch

    return torch.get_float32_matmul_precision(), tuple(backend.fp32_precision for backend in _backends())


def _set_precision(value: tuple[str, tuple[str, ...]]) -> None:
    import torch

    everywhere, each = value
    torch.set_float32_matmul_precision(everywhere)
    for backend, precision in zip(_backends() if each else (), each, strict=True):
        backend.fp32_precision = precision  # "high" sets more backends than cuda.matmul.allow_tf32 = True has set


def _backends() -> list[Any]:
    import torch

    backends: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [backend for backend in backends if hasattr(backend, "fp32_precision")]  # since PyTorch 2.9


def _set_workspace(value: str | None) -> None:
    if value is None:
        os.environ.pop(WORKSPACE, None)
    else:
        os.environ[WORKSPACE] = value
