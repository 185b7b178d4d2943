"""A causal language model as a policy: log-probabilities and entropy of sampled tokens, and values of prefixes."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from surefoot.core.optimizer import Optimizer
from surefoot.core.rollout import Evaluation, Shared
from surefoot.errors import SurefootError
from surefoot.functional import chunked_likelihood, expert_load, load_balance
from surefoot.language import quiet_transformers
from surefoot.language.data.batches import PackedBatch, around_switch, pack_batch, row_lengths
from surefoot.language.models.adapters import SharedBase
from surefoot.language.models.padding_free import (
    COPIED,
    Reading,
    end_to_end,
    prompts_once,
    reads_prompts_once,
    reason_for_padding,
    same_beginnings,
)
from surefoot.language.models.policy.critic import Critic, ValueHead
from surefoot.language.models.policy.lengths import switch_of
from surefoot.language.models.policy.passes import Inputs, TextPolicy, checkpoint_layers, computing
from surefoot.language.models.policy.readout import Readout
from surefoot.ranks.collectives import all_sum, world_size
from surefoot.sharding.idle import leaving

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 2**26
"""bytes of the logits that are held at once by default, 64 MiB, and a few times that while they are computed. glibc keeps freed
blocks of up to 32 MiB and fragments them, so smaller chunks can take more memory"""


def positions_at_once(vocabulary: int, size: int = 4) -> int:
    """The positions of a chunk, whose logits take ``size`` bytes each; float32 at least."""
    return max(1, CHUNK // (max(4, size) * vocabulary))


class LanguagePolicy(TextPolicy):
    """A language model and an optional critic.

    model          an AutoModelForCausalLM, trained in place
    critic         None; "head", a linear one on the model's own hidden states, which starts at 0; or a ``Critic``, or any other
                   module from token ids [B, L] to values [B, L]
    pad_id         the padding token; no result depends on it
    temperature    divides the logits, as in sampling
    chunk          tokens whose logits are held at once; None for as many as make 64 MiB
    checkpointing  recompute every layer in the backward pass instead of keeping its activations
    bf16           multiply in bfloat16 (autocast); weights, log-probabilities and values stay as they are
    balanced       compute the load-balancing loss of a mixture's routers when gradients are on
    padding_free   read rows end to end instead of padded, and a prompt once for all rows that begin with it, unless the
                   model can't; ``padding_reason`` is then why
    idle_critic    the critic, a ``Critic``, is on the CPU while it is not used

    Dropout is always off, also in training. ``inputs`` are {"prompt" [B, P], "prompt_mask" [B, P]}.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        critic: Literal["head"] | nn.Module | None,
        pad_id: int,
        temperature: float = 1.0,
        chunk: int | None = None,
        checkpointing: bool = False,
        bf16: bool = False,
        balanced: bool = False,
        padding_free: bool = False,
        idle_critic: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.readout = Readout(model)
        self.routers = Routers(model) if balanced else None
        self.critic = critic if isinstance(critic, nn.Module) else None
        self.value_head = None
        if critic == "head":
            self.value_head = ValueHead(self.readout.width, next(model.parameters()))
        self.pad_id, self.temperature, self.bf16, self.exact = pad_id, temperature, bf16, not bf16
        self.chunk = chunk or positions_at_once(self.readout.vocabulary, next(model.parameters()).element_size())
        self.checkpointing, self.idle_critic = checkpointing, idle_critic
        self.switch = next((switch for trunk in self._trunks() if (switch := switch_of(trunk)) is not None), None)
        reasons = map(reason_for_padding, self._trunks() if padding_free else ())
        self.padding_reason = next((reason for reason in reasons if reason is not None), None)
        self.padding_free = padding_free and self.padding_reason is None
        self.prompts_once = self.padding_free and all(map(reads_prompts_once, self._trunks()))
        """whether rows that begin with the same prompt read it once in a pass"""
        self.valued = True
        """whether passes compute values"""
        self.frozen = False
        """whether its passes never have a gradient, though a model that it shares may be trained"""
        if checkpointing:
            for part in (self.model, self.critic):
                checkpoint_layers(part)
        self.eval()

    def forward(self, inputs: Inputs, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probabilities, entropy and values, zeros outside the mask.   [B, P] each, [B, T], [B, T] -> all [B, T]

        ``values[t]`` is V of the prompt and ``response[:t]``. Raises SurefootError if a prompt has no token.
        """
        self.make_ready()
        mask = torch.ones_like(actions, dtype=torch.bool) if mask is None else mask
        batch = pack_batch(inputs, actions, mask, self.pad_id)
        head, router_loss, valued, parts = self.readout.linear or self.readout.head, None, False, []
        for places, rows, part in around_switch(batch, batch.rows, batch.before, self.switch):
            read, taken = self._reading(part, inputs, rows), actions[batch.rows[places], batch.steps[places]]
            with computing(self, self.checkpointing, self.bf16), read.laid_out():
                with self._recording() as router_logits:
                    hidden, states = self.readout.states(read, part.rows, part.before)
                likelihood = chunked_likelihood(states, taken, head, self.temperature, self.chunk)
                values = self._values(part, read, hidden) if self.valued else None
            parts.append((places, (*likelihood, likelihood[0] if values is None else values)))
            valued = values is not None
            router_loss = self.routers.loss(router_logits, read.real) if self.routers is not None and router_logits else None
        log_probs, entropy, values = (
            mask.new_zeros(mask.shape, dtype=x.dtype).index_put((batch.rows, batch.steps), x) for x in _joined(parts)
        )
        return Evaluation(log_probs, entropy, values if valued else None, router_loss=router_loss)

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Passes of the model alone, for which a critic of its own need not be gathered."""
        before, self.valued = self.valued, False
        try:
            yield
        finally:
            self.valued = before

    @contextmanager
    def as_in_sft(self) -> Iterator[None]:
        """Passes at temperature 1, without values and routers' loss: those of SFT. Sharded weights are gathered only for passes
        of the policy itself.
        """
        before = self.temperature, self.routers
        self.temperature, self.routers = 1.0, None
        try:
            with self.without_values():
                yield
        finally:
            self.temperature, self.routers = before

    def prepare(self, parts: Sequence[tuple[Inputs, Tensor, Tensor | None]]) -> None:
        """Count the tokens of each expert, in a pass without gradient if the minibatch has several parts."""
        if self.routers is None:
            return
        self.routers.counted = None
        if len(parts) == 1 and world_size() == 1:
            return
        loads = []
        with torch.no_grad(), computing(self, self.checkpointing, self.bf16):
            for inputs, actions, mask in parts:
                batch = pack_batch(
                    inputs, actions, torch.ones_like(actions, dtype=torch.bool) if mask is None else mask, self.pad_id
                )
                read = self._reading(batch, inputs, torch.arange(len(batch.ids), device=batch.ids.device))
                with self.routers.recording() as router_logits, read.laid_out():
                    self.model.base_model(input_ids=read.ids, use_cache=False, **read.options)
                loads.append(self.routers.load(router_logits, read.real))
        self.routers.count(loads)

    def _recording(self) -> AbstractContextManager[list[Tensor]]:
        """Record the routers' logits if their loss is needed and gradients are on."""
        return nullcontext([]) if self.routers is None or not torch.is_grad_enabled() else self.routers.recording()

    def values_after(self, inputs: Inputs, actions: Tensor, mask: Tensor) -> Tensor:
        """V after the last token of each row: the expected return of a truncated response; zeros without a critic.   [B]"""
        batch = pack_batch(inputs, actions, mask, self.pad_id)
        parts = []
        for places, rows, part in around_switch(
            batch, torch.arange(len(actions), device=actions.device), batch.last, self.switch
        ):
            read = self._reading(part, inputs, rows)
            with computing(self, self.checkpointing, self.bf16), read.laid_out():
                hidden = None if self.value_head is None else self.readout.states(read, part.rows, part.before)[0]
                values = self._values(part, read, hidden)
            parts.append((places, (torch.zeros(len(places), device=actions.device) if values is None else values,)))
        return _joined(parts)[0]

    def costs(self, inputs: Inputs, mask: Tensor) -> Tensor:
        """Real tokens of each row, prompt and response.   [B]"""
        return row_lengths(inputs, mask)

    def shared(self, inputs: Inputs, mask: Tensor) -> Shared | None:
        """The prompts that several rows begin with."""
        if not self.prompts_once or self.routers is not None:
            return None
        prompts = pack_batch(inputs, inputs["prompt"][:, :0], mask[:, :0], self.pad_id)
        lengths = prompts.real.sum(-1)
        group, saved = same_beginnings(prompts.ids, lengths), lengths - lengths // COPIED
        return None if int(group.max()) + 1 == len(group) else Shared(group, saved)

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of the critic: its own trunk and head, or the head on the policy's trunk."""
        critic = self.value_head if self.critic is None else self.critic
        return () if critic is None else [p for p in critic.parameters() if p.requires_grad]

    def resting(self, optimizers: Iterable[Optimizer]) -> AbstractContextManager[None]:
        """Keep the critic, with gradients and moments, on the CPU, except for its own passes."""
        return leaving(self.critic, optimizers) if self.idle_critic and self.critic is not None else nullcontext()

    def _trunks(self) -> list[nn.Module]:
        return [self.model.base_model, *([self.critic.trunk] if isinstance(self.critic, Critic) else [])]

    def _reading(self, batch: PackedBatch, inputs: Inputs, rows: Tensor) -> Reading:
        if self.prompts_once and self.routers is None:  # whose loss is a mean over all tokens, as often as they are read
            return prompts_once(batch.ids, batch.real, inputs["prompt_mask"].bool().sum(-1)[rows])
        return (end_to_end if self.padding_free else Reading)(batch.ids, batch.real)

    def _values(self, batch: PackedBatch, read: Reading, hidden: Tensor | None) -> Tensor | None:
        """V after the tokens at the batch's places; None without a critic.   [K]"""
        rows, columns = batch.rows, batch.before
        if isinstance(self.critic, Critic):
            values: Tensor = self.critic(read.ids, **read.options)[read.at(rows, columns)]
            return values
        if self.critic is not None:  # of the user: it reads ids alone
            with Reading(batch.ids, batch.real).laid_out():
                of_all: Tensor = self.critic(batch.ids)
            return of_all[rows, columns]
        return None if self.value_head is None or hidden is None else self.value_head(hidden)


class ReferencePolicy(nn.Module):
    """A frozen copy of a policy, the reference of the KL. It has no critic and gets no gradient.

    base   of a policy that is an adapter; then nothing is copied, and the reference is the base with adapters off
    model  a model of its own with the same weights, which is not copied
    """

    def __init__(self, policy: LanguagePolicy, base: SharedBase | None = None, model: "PreTrainedModel | None" = None) -> None:
        super().__init__()
        self.base = base
        if base is not None:
            model = policy.model
        elif model is not None:
            model.requires_grad_(False)
        else:
            model = copy.deepcopy(policy.model).requires_grad_(False)
            model.zero_grad(set_to_none=True)  # an optimizer may keep gradients, which are copied too
        options = {"bf16": policy.bf16, "padding_free": policy.padding_free}
        self.policy = LanguagePolicy(model, None, policy.pad_id, policy.temperature, policy.chunk, **options)
        self.policy.frozen = True

    @torch.no_grad()
    def log_probs(self, inputs: Inputs, actions: Tensor, mask: Tensor) -> Tensor:
        """log π_ref of the tokens, zeros outside the mask.   [B, T]"""
        with nullcontext() if self.base is None else self.base.using(None):
            log_probs: Tensor = self.policy(inputs, actions, mask).log_probs
        return log_probs


def _joined(parts: Sequence[tuple[Tensor, tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
    """Values at all places from those of the parts of ``around_switch``."""
    if len(parts) == 1:
        return parts[0][1]
    back = torch.cat([places for places, _ in parts]).argsort()
    return tuple(torch.cat(pieces)[back] for pieces in zip(*(values for _, values in parts), strict=True))


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
        summed = all_sum(torch.stack([torch.cat([counts, tokens.unsqueeze(0)]) for counts, _, tokens in loads]).sum(0))
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
