"""Models that are sharded over ranks, by PyTorch's FSDP2 (``fully_shard``; FSDP: arXiv 2304.11277).

Each rank keeps a part of every parameter, its gradient and its moments. Passes with gradient gather the parameters of one block
at a time; they are exchanges, so all ranks make the same number of them. Phases without gradient, such as sampling, gather the
parameters once (``gathered``) and then need no exchange, so each rank can make as many passes as it likes.
"""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.errors import SurefootError
from surefoot.ranks.collectives import check_same_weights, exchanging, rank, world_size
from surefoot.sharding.idle import idle_weights


@dataclass(frozen=True)
class Sharding:
    """How models are sharded.

    kind      "full": over all ranks; "hybrid": over the ranks of a machine, with a copy of every shard on each machine
    device    of the computation
    bf16      gather and compute in bfloat16; shards and sums of gradients stay in float32
    reshard   drop a block's gathered parameters after its forward pass and gather them again for the backward pass
    offload   keep shards and moments in the memory of the CPU

    Raises SurefootError if PyTorch is too old.
    """

    kind: Literal["full", "hybrid"]
    device: str = "cpu"
    bf16: bool = False
    reshard: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise SurefootError(
                f"sharding={self.kind!r}: needs PyTorch 2.13, and this is {torch.__version__}; install torch==2.13.0, or unset "
                "sharding"
            )


def is_sharded(module: nn.Module) -> bool:
    """Whether any part of a module is sharded."""
    return bool(_sharded_parts(module))


def _sharded_parts(module: nn.Module) -> list[Any]:
    if "torch.distributed.fsdp" not in sys.modules:  # importing it takes time that other runs need not spend
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def shard(
    module: nn.Module, blocks: Iterable[nn.Module], settings: Sharding, exact: Iterable[nn.Module] = (), frozen: bool = False
) -> None:
    """Shard a module in place; all ranks have the same whole weights. Shards are float32, whatever the weights were.

    blocks   parts that are gathered one at a time, such as the layers of a transformer
    exact    parts that compute in float32 in any case, such as a value head
    frozen   nothing is trained: shards are bfloat16 if the computation is, and keep the dtype of weights that all have one

    From now on the module is called as a whole (``module(...)``), or within ``gathered``.

    Raises SurefootError, on every rank, if the weights differ.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Nothing is changed in place in what a policy returns, which may be views.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    check_same_weights(module)  # a broadcast would need memory for all weights
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    kept = dtypes.pop() if frozen and len(dtypes) == 1 else torch.float32
    low = torch.bfloat16 if settings.bf16 else None if kept == torch.float32 else torch.float32
    # Inputs are not cast: a batch holds numbers, such as log-probabilities of a reference, that need float32.
    policy = MixedPrecisionPolicy(low, torch.float32 if settings.bf16 else None, cast_forward_inputs=False)
    pinned = torch.device(settings.device).type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if settings.offload else OffloadPolicy()
    common: dict[str, Any] = {"mesh": _mesh(settings), "offload_policy": offload}
    for part in exact:
        fully_shard(part, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=settings.reshard, **common)
    for part in blocks:
        fully_shard(part, mp_policy=policy, reshard_after_forward=settings.reshard, **common)
    done = {p for p in module.parameters() if hasattr(p, "device_mesh")}  # a role of a shared base holds some of them twice
    fully_shard(module, mp_policy=policy, reshard_after_forward=False, ignored_params=done, **common)
    _convert(module, torch.bfloat16 if frozen and settings.bf16 else kept)
    for part in _sharded_parts(module):
        part.set_gradient_divide_factor(1.0)  # losses are divided by global counts, so gradients are summed
        part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        part.set_reduce_scatter_unused_params(True)  # every rank reduces the same parameters
    # The module is the root, even if a part of it runs first.
    module._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype of the shards alone: buffers, such as the frequencies of positions, would be wrong if rounded."""
    module._apply(  # type: ignore[no-untyped-call]
        lambda x: x.to(dtype) if hasattr(x, "to_local") and x.is_floating_point() else x
    )


_meshes: dict[tuple[Any, ...], Any] = {}
"""made so far; each has process groups"""


def _mesh(settings: Sharding) -> Any:
    """The device mesh: one dimension for "full", replicas × shards for "hybrid"."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (world_size(),) if settings.kind == "full" else (world_size() // ranks_per_machine(), ranks_per_machine())
    key = (torch.device(settings.device).type, sizes, id(dist.group.WORLD))
    if key not in _meshes:
        names = ("shard",) if settings.kind == "full" else ("replicate", "shard")
        _meshes[key] = init_device_mesh(key[0], sizes, mesh_dim_names=names)
    return _meshes[key]


def ranks_per_machine() -> int:
    """Ranks on this machine, by the launcher's LOCAL_WORLD_SIZE; all of them without it.

    Raises SurefootError if the machines have different numbers.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or str(world_size())
    count = int(text) if text.isdecimal() else 0
    if not count or world_size() % count:
        raise SurefootError(
            f"sharding='hybrid': {world_size()} ranks are not machines with LOCAL_WORLD_SIZE={text} ranks each; start the same "
            "number on every machine, or set sharding = 'full'"
        )
    return count


@contextmanager
def gathered(root: nn.Module, part: nn.Module | None = None) -> Iterator[None]:
    """Hold whole weights on every rank, in the dtype of the computation; passes without gradient then need no exchange.

    root    a module that was passed to ``shard``, or is on the CPU, or a part of it is; any other is left as it is
    part    gather only this part of it, with what the root itself holds, such as embeddings

    Entering is an exchange: all ranks do it together.
    """
    idle = [weights for module in (root if part is None else part).modules() if (weights := idle_weights(module)) is not None]
    if idle:
        with ExitStack() as stack:
            for weights in idle:
                stack.enter_context(weights.present())
            yield
        return
    parts = _sharded_parts(root)
    if not parts:
        yield
        return
    # Parameters of the parts stay gathered between forward passes; afterwards each is as before.
    wanted = {root, *(root if part is None else part).modules()}
    chosen = [each for each in parts if each in wanted]
    before = [group.post_forward_mesh_info for each in chosen for group in each._get_fsdp_state()._fsdp_param_groups]
    try:
        with exchanging():
            for each in chosen:
                each.set_reshard_after_forward(False, recurse=False)
                each.unshard()
        yield
    finally:
        saved = iter(before)
        for each in chosen:
            for group in each._get_fsdp_state()._fsdp_param_groups:
                group.post_forward_mesh_info = next(saved)
        root.reset_iter_state()  # type: ignore[operator]  # drops the whole weights, and the order of the passes made from them


@contextmanager
def block_by_block(root: nn.Module) -> Iterator[None]:
    """Hold only what the root itself holds, such as embeddings; passes without gradient gather one block at a time.

    Each pass is then an exchange, also one that does not begin at the root: all ranks make the same number of them.
    """
    with gathered(root, nn.Module()):
        yield


PIECE = 2**24
"""numbers that are read at once"""


# ---- shards as ranges of whole tensors ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """This rank's part of a whole tensor: ranges of the flattened one.

    shape    of the whole tensor
    starts   of the ranges in the flattened tensor
    values   of each range   [n] each; empty lists on a rank that holds only a copy of another's part
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    starts: list[int]
    values: list[Tensor]


def local_part(parameter: Tensor) -> Tensor:
    """This rank's rows of a sharded parameter, which share its memory; any other tensor itself."""
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def start_of(parameter: Tensor) -> int:
    """Where this rank's rows begin in the flattened parameter."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 0
    rows = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))  # FSDP2 shards rows, in parts as large as the first
    first = min(int(mesh.get_local_rank(mesh.ndim - 1)) * rows, parameter.shape[0])
    return int(first * (parameter.numel() // parameter.shape[0]))


def copies_of(parameter: Tensor) -> int:
    """Ranks that hold the same shard of a parameter; 1 unless sharding is hybrid."""
    mesh = getattr(parameter, "device_mesh", None)
    return 1 if mesh is None or mesh.ndim == 1 else int(mesh.size(0))


def is_writer(parameter: Tensor) -> bool:
    """Whether this rank writes its shard of a parameter: of several copies, the first."""
    mesh = getattr(parameter, "device_mesh", None)
    return rank() == 0 if mesh is None else bool(mesh.ndim == 1 or mesh.get_local_rank(0) == 0)


def shard_of(parameter: Tensor) -> Shard:
    """A sharded parameter as ranges of the whole one."""
    shape = tuple(parameter.shape)
    local = local_part(parameter).reshape(-1)
    if not is_writer(parameter) or not local.numel():
        return Shard(shape, parameter.dtype, [], [])
    return Shard(shape, parameter.dtype, [start_of(parameter)], [local])


def read_range(whole: Any, start: int, stop: int) -> Tensor:
    """Elements start … stop − 1 of a flattened tensor, or of one in a file, which has the method ``read``."""
    part: Tensor = whole.reshape(-1)[start:stop] if isinstance(whole, Tensor) else whole.read(start, stop)
    return part


@torch.no_grad()
def fill(parameter: Tensor, whole: Any) -> None:
    """Set a parameter from a whole tensor, or one in a file, of which each rank reads its own rows, some at a time."""
    local, first = local_part(parameter), start_of(parameter)
    flat = local.view(-1)
    for start in range(0, flat.numel(), PIECE):
        stop = min(start + PIECE, flat.numel())
        flat[start:stop].copy_(read_range(whole, first + start, first + stop))
