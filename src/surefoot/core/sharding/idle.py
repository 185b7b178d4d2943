"""Frozen models whose weights are in the memory of the CPU while they are not used.

``gathered`` holds copies of them on the device for as long as a phase needs them, as it holds the whole weights of sharded
models. They are dropped afterwards: what is frozen need not be copied back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

IDLE = "idle_weights"
"""the attribute of a module with its ``IdleWeights``"""


class IdleWeights:
    """The weights and buffers of a frozen module, on the CPU except within ``present``."""

    def __init__(self, module: nn.Module, device: str) -> None:
        self.device = torch.device(device)
        self.tensors = [*module.parameters(), *module.buffers()]
        assert not any(tensor.requires_grad for tensor in self.tensors), "a step would be lost"
        module.to("cpu")
        pinned = self.device.type == "cuda"  # copies are faster then
        self.host = [tensor.data.pin_memory() if pinned else tensor.data for tensor in self.tensors]
        self.uses = 0
        self._set(self.host)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Hold copies of the weights on the device; uses within each other share them."""
        self.uses += 1
        try:
            if self.uses == 1:
                self._set([on_device(tensor, self.device) for tensor in self.host])
            yield
        finally:
            self.uses -= 1
            if not self.uses:
                self._set(self.host)

    def _set(self, values: list[Tensor]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.data = value


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on another device; the tensor itself if it is there."""
    return tensor.to(device, non_blocking=True)


def rest_on_cpu(module: nn.Module, device: str) -> None:
    """Keep a frozen module on the CPU while it is not used; ``gathered`` then copies it to the device."""
    setattr(module, IDLE, IdleWeights(module, device))


def idle_weights(module: nn.Module) -> IdleWeights | None:
    """The weights of a module that rests on the CPU; None for any other."""
    idle: IdleWeights | None = getattr(module, IDLE, None)
    return idle
