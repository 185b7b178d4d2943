"""How a pass through a model runs: what all policies on text share, autocast, gradient checkpointing, micro-batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from surefoot.core.minibatches import groups_by_length, select_rows
from surefoot.core.optimizer import AdamSettings, FlatOptimizer, Optimizer
from surefoot.core.rollout import Policy, Shared, concatenated
from surefoot.errors import SurefootError
from surefoot.language import quiet_transformers
from surefoot.language.data.batches import row_lengths
from surefoot.language.models.adapters import CHECKPOINT_CONTEXTS
from surefoot.sharding import gathered, is_sharded
from surefoot.sharding.optimizer import ShardedOptimizer

Inputs = Mapping[str, Tensor]


class TextPolicy(Policy):
    """A policy on text. Its weights may be sharded over ranks, and it stays in evaluation mode: dropout would make π_θ differ
    from π_old before the first step.
    """

    before_first_pass: Callable[[Any], None] | None = None
    """is called once, with the policy in its place"""

    def make_ready(self) -> None:
        """Call ``before_first_pass`` before the first pass."""
        if self.before_first_pass is not None:
            ready, self.before_first_pass = self.before_first_pass, None
            ready(self)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)

    @property
    def sharded(self) -> bool:
        return is_sharded(self)

    def optimizer(self, parameters: Iterable[nn.Parameter], settings: AdamSettings) -> Optimizer:
        return (ShardedOptimizer if self.sharded else FlatOptimizer)(parameters, settings)

    def gathered(self) -> AbstractContextManager[None]:
        return gathered(self)


@contextmanager
def computing(module: nn.Module, checkpointing: bool, bf16: bool) -> Iterator[None]:
    """Autocast and gradient checkpointing for a forward pass.

    ``transformers`` checkpoints layers in training mode. Only the layers themselves enter it, not their submodules, so dropout
    stays off; and only with gradients on, because checkpointed layers can't use a cache.
    """
    layers = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)] if checkpointing else []
    device = next(module.parameters()).device.type
    try:
        for layer in layers:
            layer.training = torch.is_grad_enabled()
        with (
            quiet_transformers(),
            torch.autocast(device, torch.bfloat16, enabled=bf16),
        ):  # some models warn of padding, which has no effect here
            yield
    finally:
        for layer in layers:
            layer.training = False


@torch.no_grad()
def in_micro_batches(
    function: Callable[[Inputs, Tensor, Tensor], Any],
    inputs: Inputs,
    actions: Tensor,
    mask: Tensor,
    tokens: int | None,
    size: int | None = None,
    costs: Tensor | None = None,
    shared: Shared | None = None,
) -> Any:
    """``function(inputs, actions, mask)`` without gradient, in micro-batches of at most ``tokens`` tokens and ``size`` rows.

    costs   tokens read for each row; by default those of prompt and response   [B]
    shared  beginnings that a pass reads once

    The function returns a tensor [B, ...] or a tree of them: a policy's Evaluation, its ``values_after``, a reference's
    ``log_probs``. Rows keep their order.
    """
    if tokens is None and size is None:
        return function(inputs, actions, mask)
    costs = row_lengths(inputs, mask) if costs is None else costs
    groups = groups_by_length(costs, tokens, size, shared)
    back = torch.cat(groups).argsort()
    parts = [function(*select_rows((inputs, actions, mask), group)) for group in groups]
    return select_rows(concatenated(parts), back)


def checkpoint_layers(part: nn.Module | None) -> None:
    """Enable gradient checkpointing of the outermost ``transformers`` model in a module. Layers of a shared base are recomputed
    with the adapter of the forward pass.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    for module in () if part is None else part.modules():
        if contexts := getattr(module, CHECKPOINT_CONTEXTS, None):
            options["context_fn"] = contexts
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the second before transformers 5.20
    for module in () if part is None else part.modules():
        if switch := next((getattr(module, name) for name in names if hasattr(module, name)), None):
            try:
                switch(options)
            except ValueError as error:
                raise SurefootError(f"checkpointing=true: {type(module).__name__} does not support it; set false") from error
            return
