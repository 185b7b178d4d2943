"""Measure one micro-batch of the longest rows before the first rollout, without changing anything.

Memory allocated is read from the GPU's allocator, or from glibc's heap every millisecond; elsewhere nothing is measured.
"""

import ctypes
import math
import threading
import time
from typing import Any

import torch
from torch import Tensor

from surefoot.core.learner import Learner
from surefoot.core.objective import Batch, loss
from surefoot.language.models.adapters import Dropout
from surefoot.ranks.collectives import exchange, exchanging


class _HeapUse(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


class HeapTracker:
    """The bytes that are allocated by ``malloc``, above those at the beginning; counted every millisecond. Linux with glibc.

    What is imported in the meantime counts too. Raises OSError or AttributeError elsewhere.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libc.so.6")
        self._library.mallinfo2.restype = _HeapUse
        self._before = 0
        self._before = self.live
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self.peak = 0

    @property
    def live(self) -> int:
        """Bytes."""
        use = self._library.mallinfo2()
        return int(use.uordblks + use.hblkhd) - self._before

    def restart(self) -> None:
        """Reset the peak to the live bytes."""
        with self._lock:
            self.peak = self.live

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._over.is_set():
            with self._lock:
                self.peak = max(self.peak, self.live)
            time.sleep(0.001)


def measured_work(learner: Learner, inputs: Any, actions: Tensor, mask: Tensor, device: str) -> float | None:
    """Bytes that forward and backward pass of a micro-batch need on top of what is allocated: the most over all ranks, which
    all call this; infinity if a GPU has no room. None where they can't be measured, or if the first pass compiles the policy.

    No step is taken: weights stay, gradients are zero again, and no generator of the run moves. Raises
    torch.OutOfMemoryError if the policy is sharded and has no room: the other ranks are in an exchange of the pass.
    """
    policy, tracker = learner.policy, _tracker(device)
    if getattr(policy, "before_first_pass", None) is not None or None in exchange(tracker and device):
        return None
    assert tracker is not None
    noise = next((part.noise for part in policy.modules() if isinstance(part, Dropout)), None)
    generator = None if noise is None else noise.replace_generator(None)
    fields = ("old_log_probs", "advantages", "returns", "old_values", "ref_log_probs")
    batch = Batch(inputs, actions, mask, **{name: torch.zeros(mask.shape, device=mask.device) for name in fields})
    try:
        with tracker:
            with exchanging():
                evaluation = policy(inputs, actions, mask)
                loss(evaluation, batch, learner.objective, denominator=mask.sum(), beta=0.0).total.backward()  # type: ignore[no-untyped-call]
            del evaluation
        peak: float = tracker.peak
    except torch.OutOfMemoryError:
        if policy.sharded:
            raise
        peak = math.inf
    finally:
        for optimizer in learner.optimizers.values():
            optimizer.zero()
        if noise is not None:
            noise.replace_generator(generator)
    return max(exchange(peak))


class GpuTracker:
    """The largest number of bytes that PyTorch's allocator has given on a GPU, above those at the beginning."""

    def __init__(self, device: str) -> None:
        self.device, self.peak = torch.device(device), 0

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)

    def __exit__(self, *error: object) -> None:
        self.peak = torch.cuda.max_memory_allocated(self.device) - self._before


def _tracker(device: str) -> "GpuTracker | HeapTracker | None":
    if device.startswith("cuda"):
        return GpuTracker(device)
    try:
        return HeapTracker() if device.startswith("cpu") else None
    except (OSError, AttributeError):  # no glibc, or one before mallinfo2
        return None
