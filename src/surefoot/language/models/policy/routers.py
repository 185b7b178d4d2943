"""The load-balancing loss of a mixture of experts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.functional import expert_load, load_balance
from surefoot.language import quiet_transformers
from surefoot.ranks.collectives import all_sum


class Routers:
    """Load-balancing loss of a mixture of experts, as in ``transformers``: over all layers and all real tokens together.

    Tokens per expert are counted over the whole minibatch, on all ranks, before the first part is read with gradient, so the
    losses of the parts add up to that of the minibatch. With a single part, the pass with gradient counts them.

    Raises SurefootError if the model has no routers, or if its family computes another loss.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.chosen = int(getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0)
        self.counted: tuple[Tensor, Tensor] | None = None
        """tokens of the minibatch by expert, and their number, each counted in every layer; None: those of the current part"""
        if not self.chosen or not self._as_transformers():
            raise SurefootError(
                f"objective.router_coefficient: {type(model).__name__} has no routers whose load can be balanced; set 0"
            )

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the routers' logits of every forward pass, layer by layer.   each [B·L, E]"""
        recorded: list[Tensor] = []

        def request(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**named, "output_router_logits": True}

        def record(_: Any, __: Any, output: Any) -> None:
            recorded.extend(logits.flatten(0, -2) for logits in getattr(output, "router_logits", None) or ())

        trunk = self.model.base_model
        hooks = trunk.register_forward_pre_hook(request, with_kwargs=True), trunk.register_forward_hook(record)
        try:
            yield recorded
        finally:
            for hook in hooks:
                hook.remove()

    def load(self, router_logits: Sequence[Tensor], real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Counts and probabilities by expert, and the number of real tokens, summed over layers.   router_logits [B·L, E], real
        [B, L]
        """
        parts = [expert_load(logits.float(), self.chosen, real.flatten()) for logits in router_logits]
        counts, probabilities = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        return counts, probabilities, real.sum().float() * len(router_logits)

    def loss(self, router_logits: Sequence[Tensor], real: Tensor) -> Tensor:
        """The contribution of these tokens to the loss.   []"""
        counts, probabilities, tokens = self.load(router_logits, real)
        counts, tokens = (counts, tokens) if self.counted is None else self.counted
        return load_balance(counts, probabilities, tokens)

    def count(self, loads: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Sum the counts of a minibatch's parts over all ranks."""
        parts = torch.stack([torch.cat([counts, tokens.unsqueeze(0)]) for counts, _, tokens in loads])
        summed = all_sum(parts.sum(0))
        self.counted = summed[:-1], summed[-1]

    @torch.no_grad()
    def _as_transformers(self) -> bool:
        """Whether the model's own class computes the same loss, by a test."""
        device = self.model.get_input_embeddings().weight.device
        ids = (torch.arange(16, device=device) * 7 % int(self.model.get_input_embeddings().weight.shape[0])).view(2, 8)
        real = torch.arange(8, device=device) < torch.tensor([[8], [5]], device=device)
        try:
            with quiet_transformers(), self.recording() as router_logits:
                output = self.model(input_ids=ids, attention_mask=real.long(), use_cache=False, output_router_logits=True)
            theirs = output.aux_loss
            return bool(router_logits) and bool(torch.isclose(self.loss(router_logits, real), theirs, rtol=1e-4))
        except (AttributeError, TypeError, RuntimeError):  # another signature, output or shape
            return False
