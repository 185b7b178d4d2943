"""A call in a bigger program: it computes in the modes that it needs, and leaves the process as it found it."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from surefoot.core.seeding import WORKSPACE

Call = TypeVar("Call", bound=Callable[..., Any])


def as_found(call: Call) -> Call:
    """The call in modes of its own. Afterwards, PyTorch's settings and the working folder are those from before."""

    @wraps(call)
    def calling(*arguments: Any, **named: Any) -> Any:
        with _own_modes():
            return call(*arguments, **named)

    return cast(Call, calling)


@contextmanager
def _own_modes() -> Iterator[None]:
    """Compute with gradients in float32 on the CPU, whatever modes of PyTorch the program has entered; then restore all."""
    with ExitStack() as after:
        with suppress(OSError):  # the working folder was removed
            after.callback(os.chdir, os.getcwd())
        after.callback(_restore_variable, WORKSPACE, os.environ.get(WORKSPACE))
        for get, set_back, own in (
            (torch.get_num_threads, torch.set_num_threads, None),
            (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
            (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        ):
            after.callback(cast(Any, set_back), cast(Any, get)())
            if own is not None:
                cast(Any, set_back)(own)
        if torch.get_default_device() != torch.device("cpu"):
            after.enter_context(torch.device("cpu"))  # not always: it makes every call of torch slower
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                after.enter_context(torch.autocast(kind, enabled=False))
        after.enter_context(torch.inference_mode(False))
        after.enter_context(torch.enable_grad())
        yield


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
