"""Live bytes of tensors, counted exactly: every storage that an operation returns, from its birth to its death.

A CPU keeps no statistics of its allocator, and the process's resident memory counts pages that were freed and not given back.
So storages are counted themselves: on when an operation first returns a tensor on one, and off when the last reference to it
goes, wherever that was held (a variable, the graph of autograd, an optimizer). It works for tensors without contents as for
real ones. What a kernel takes for itself and frees before it returns is not seen.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; storages that die afterwards still leave ``live``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """bytes"""
        self.peak = 0
        """the most that ``live`` has been since the last ``restart``"""
        self._known: dict[int, Any] = {}

    def restart(self) -> None:
        """Let the peak begin at what is live now."""
        self.peak = self.live

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these out: they were there before."""
        for tensor in tensors:
            self._watch(tensor, 0)

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made elsewhere, such as weights mapped from a file."""
        for tensor in tensors:
            self._watch(tensor, tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._watch(leaf, leaf.untyped_storage().nbytes())
        return returned

    def _watch(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage, partial(self._gone, key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int, _: Any) -> None:
        if self._known.pop(key, None) is not None:
            self.live -= size
