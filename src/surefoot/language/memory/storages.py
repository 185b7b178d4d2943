"""Count the bytes of live tensors."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors: each storage that an operation returns, until its last reference is gone.

    A CPU keeps no allocator statistics, and resident memory includes freed pages. Works for fake and real tensors. A kernel's
    temporary buffers are not seen. It counts while entered; storages freed later still reduce ``live``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """bytes"""
        self.peak = 0
        """the maximum of ``live`` since the last ``restart``"""
        self.peaks: list[int] = []
        """the peak of each segment so far"""
        self._storages: dict[int, Any] = {}

    def mark(self, *_: Any) -> None:
        """End a segment, and begin the next."""
        self.peaks.append(self.peak)
        self.restart()

    def finish(self) -> tuple[int, ...]:
        """End the last segment.

        Returns the peaks of all segments.
        """
        self.mark()
        return tuple(self.peaks)

    def restart(self) -> None:
        """Reset the peak to the live bytes."""
        self.peak = self.live

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the storages of these tensors."""
        for tensor in tensors:
            self._track(tensor, 0)

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors created elsewhere, such as weights mapped from a file."""
        for tensor in tensors:
            self._track(tensor, tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls are these, and a fake tensor takes long to answer
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._track(leaf, leaf.untyped_storage().nbytes())
        return returned

    def _track(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, partial(self._release, key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int, _: Any) -> None:
        if self._storages.pop(key, None) is not None:
            self.live -= size
