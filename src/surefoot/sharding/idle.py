"""Models that are in the memory of the CPU while they are not used.

``gathered`` holds copies of their weights on the device for as long as a phase needs them, as it holds the whole weights of
sharded models. The copies are dropped afterwards: between two updates no weight changes. Of a frozen model nothing else is ever
on the device. A trained part of a policy, such as its critic, leaves the device with its gradients and moments for a phase
(``leaving``), and comes back with the same bits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from surefoot.core.optimizer import FlatOptimizer, Optimizer
from surefoot.ranks.collectives import MASTER, stored

IDLE = "idle_weights"
"""the attribute of a module with its ``IdleWeights``"""


class IdleWeights:
    """Tensors of a module that are on the CPU except within ``present``.

    tensors   of the module
    host      their values on the CPU
    """

    def __init__(self, tensors: Sequence[Tensor], host: Sequence[Tensor], device: torch.device) -> None:
        self.device, self.tensors, self.host = device, tensors, host
        self.uses = 0
        self._set(host)

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

    def _set(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.data = value


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on another device; the tensor itself if it is there."""
    return tensor.to(device, non_blocking=True)


def rest_on_cpu(module: nn.Module, device: str) -> None:
    """Keep a frozen module on the CPU while it is not used; ``gathered`` then copies it to the device."""
    tensors, place = [*module.parameters(), *module.buffers()], torch.device(device)
    assert not any(tensor.requires_grad for tensor in tensors), "a step would be lost"
    module.to("cpu")
    pinned = place.type == "cuda"  # copies are faster then
    host = [tensor.data.pin_memory() if pinned else tensor.data for tensor in tensors]
    setattr(module, IDLE, IdleWeights(tensors, host, place))


def idle_weights(module: nn.Module) -> IdleWeights | None:
    """The weights of a module that is on the CPU now; None for any other."""
    idle: IdleWeights | None = getattr(module, IDLE, None)
    return idle


# ---- trained parts --------------------------------------------------------------------------------------------------------


def has_own_memory(device: torch.device) -> bool:
    """Whether leaving a device makes room on it."""
    return device.type != "cpu"


@contextmanager
def leaving(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Keep the trained parameters of a module, their gradients and moments on the CPU; ``gathered`` copies the parameters back
    for a pass without gradient.

    optimizers   those of the policy; the module's parameters are the last ones in each that has some

    No effect if the device is the CPU. Gradients are zero afterwards.
    """
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    device = next(iter(trained)).device
    if not has_own_memory(device):
        yield
        return
    with ExitStack() as stack:
        host: dict[nn.Parameter, Tensor] = {}
        for optimizer in optimizers:
            assert isinstance(optimizer, FlatOptimizer), "a sharded policy has no part that rests"
            if own := [parameter for parameter in optimizer.parameters if parameter in trained]:
                host |= stack.enter_context(_without(optimizer, own))
        weights = IdleWeights(list(host), list(host.values()), device)
        setattr(module, IDLE, weights)
        try:
            yield
        finally:
            delattr(module, IDLE)


@contextmanager
def _without(optimizer: FlatOptimizer, own: Sequence[nn.Parameter]) -> Iterator[Mapping[nn.Parameter, Tensor]]:
    """Move the last parameters of an optimizer to the CPU, and give their values there."""
    first = sum(parameter.numel() for parameter in optimizer.parameters) - sum(parameter.numel() for parameter in own)
    assert list(optimizer.parameters[-len(own) :]) == list(own), "flat tensors can only end earlier"
    moments = [tensor for tensor in optimizer.state.values() if tensor.shape == optimizer.values.shape]
    before = [(parameter, parameter.data, parameter.grad, stored(parameter)) for parameter in own]
    with ExitStack() as stack:
        # The gradients are away while other tensors are copied, so that these need no more memory than an update.
        stack.enter_context(_zeros(optimizer.gradients, 0, then=optimizer.gradients.numel()))
        values, *_ = [stack.enter_context(_shortened(flat, first)) for flat in (optimizer.values, *moments)]
        stack.enter_context(_zeros(optimizer.gradients, first, then=0))
        parts = dict(zip(own, torch.split(values, [parameter.numel() for parameter in own]), strict=True))
        host = {parameter: part.view_as(parameter) for parameter, part in parts.items()}
        try:
            for parameter, data, _, master in before:
                parameter.grad = None
                if master is not parameter:
                    setattr(parameter, MASTER, host[parameter])
                    host[parameter] = stack.enter_context(_shortened(data, 0)).view_as(parameter)
            yield host
        finally:
            for parameter, data, gradient, master in before:
                parameter.data, parameter.grad = data, gradient
                if master is not parameter:
                    setattr(parameter, MASTER, master)


@contextmanager
def _shortened(tensor: Tensor, first: int) -> Iterator[Tensor]:
    """Move the elements from ``first`` on to the CPU, and give them there; views of the others stay views of it.   -> [n]"""
    tail = tensor.view(-1)[first:]
    host = torch.empty(tail.shape, dtype=tail.dtype, pin_memory=tail.device.type == "cuda")
    host.copy_(tail)
    _resize(tensor, first)
    try:
        yield host
    finally:
        _resize(tensor, tensor.numel())
        tail.copy_(host)


@contextmanager
def _zeros(gradients: Tensor, elements: int, then: int) -> Iterator[None]:
    """Keep memory for the first elements alone, and ``then`` for others, which are zero."""
    try:
        _resize(gradients, elements)
        gradients[:elements].zero_()
        yield
    finally:
        _resize(gradients, then)
        gradients[:then].zero_()


def _resize(tensor: Tensor, elements: int) -> None:
    """Change how many elements of a tensor have memory, keeping the first ones."""
    assert tensor.storage_offset() == 0, "it is the only tensor in its memory"
    tensor.untyped_storage().resize_(elements * tensor.element_size())
