"""The load-balancing loss of a mixture of experts, as ``transformers`` has it: over all layers, and all real tokens, together.

How many tokens go to each expert is counted over the whole minibatch, on all ranks, before the first of its parts is read with
gradient: then the losses of the parts add up to that of the whole, however it is split. Where there is one part, the pass that
has the gradient counts as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surefoot.core.distributed import all_sum
from surefoot.errors import SurefootError
from surefoot.functional import expert_load, load_balance
from surefoot.language.optional import quiet


class Routers:
    """The routers of a causal language model.

    Raises SurefootError where it has none, or its family's loss is another.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.chosen = int(getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0)
        self.counted: tuple[Tensor, Tensor] | None = None
        """tokens of the whole minibatch by expert, and how many there are, each counted in every layer; None: those at hand"""
        if not self.chosen or not self._as_transformers():
            raise SurefootError(
                f"objective.router_coefficient: {type(model).__name__} has no routers whose load can be balanced; set 0"
            )

    @contextmanager
    def listening(self) -> Iterator[list[Tensor]]:
        """Within, whatever the trunk is asked to read adds its routers' logits to a list, layer by layer.   each [B·L, E]"""
        heard: list[Tensor] = []

        def ask(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**named, "output_router_logits": True}

        def hear(_: Any, __: Any, output: Any) -> None:
            heard.extend(logits.flatten(0, -2) for logits in getattr(output, "router_logits", None) or ())

        trunk = self.model.base_model
        hooks = trunk.register_forward_pre_hook(ask, with_kwargs=True), trunk.register_forward_hook(hear)
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()

    def load(self, heard: Sequence[Tensor], real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the real tokens, in all layers together: counts and probabilities by expert, and how many.   real [B, L]"""
        parts = [expert_load(logits.float(), self.chosen, real.flatten()) for logits in heard]
        counts, probabilities = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        return counts, probabilities, real.sum().float() * len(heard)

    def loss(self, heard: Sequence[Tensor], real: Tensor) -> Tensor:
        """What these tokens add to the loss.   []"""
        counts, probabilities, tokens = self.load(heard, real)
        counts, tokens = (counts, tokens) if self.counted is None else self.counted
        return load_balance(counts, probabilities, tokens)

    def count(self, loads: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Add up the parts of a minibatch, over all ranks."""
        parts = torch.stack([torch.cat([counts, tokens.unsqueeze(0)]) for counts, _, tokens in loads])
        summed = all_sum(parts.sum(0))
        self.counted = summed[:-1], summed[-1]

    @torch.no_grad()
    def _as_transformers(self) -> bool:
        """Whether the loss is the one that the model's own class computes: tried, not believed."""
        device = self.model.get_input_embeddings().weight.device
        ids = (torch.arange(16, device=device) * 7 % int(self.model.get_input_embeddings().weight.shape[0])).view(2, 8)
        real = torch.arange(8, device=device) < torch.tensor([[8], [5]], device=device)
        try:
            with quiet(), self.listening() as heard:
                output = self.model(input_ids=ids, attention_mask=real.long(), use_cache=False, output_router_logits=True)
            theirs = output.aux_loss
            return bool(heard) and bool(torch.isclose(self.loss(heard, real), theirs, rtol=1e-4))
        except (AttributeError, TypeError, RuntimeError):  # another signature, another output, other shapes
            return False
