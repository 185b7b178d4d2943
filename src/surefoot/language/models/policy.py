"""A causal language model as a policy: log-probabilities and entropy of sampled tokens, and values of prefixes.

``Readout`` splits a model of ``transformers`` into a trunk that reads tokens and a head that makes logits, so that logits can
be computed at chosen positions and in chunks. ``Routers`` computes the load-balancing loss of a mixture of experts.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from surefoot.core.distributed import all_sum, world_size
from surefoot.core.minibatches import groups_by_length, select_rows
from surefoot.core.rollout import Evaluation, Policy, Shared, map_tensors, tensors_in
from surefoot.core.sharding import is_sharded
from surefoot.errors import SurefootError
from surefoot.functional import chunked_likelihood, expert_load, load_balance
from surefoot.language import quiet_transformers
from surefoot.language.data.batches import PackedBatch, pack_batch, row_lengths
from surefoot.language.models.adapters import CHECKPOINT_CONTEXTS, SharedBase
from surefoot.language.models.loading import NOT_CAUSAL, logits_close, looks_ahead
from surefoot.language.models.padding_free import (
    COPIED,
    Reading,
    end_to_end,
    padded,
    prompts_once,
    reads_prompts_once,
    reason_for_padding,
    same_beginnings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = Mapping[str, Tensor]

CHUNK = 2**26
"""bytes of the logits that are held at once by default, 64 MiB, and a few times that while they are computed. glibc keeps freed
blocks of up to 32 MiB and fragments them, so smaller chunks can take more memory"""


class ValueHead(nn.Linear):
    """A linear layer from hidden states to values, in the dtype of its own weights.   [..., width] -> [...]"""

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__(width, 1, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values, unbounded; 0 before training."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype)).squeeze(-1)


class Critic(nn.Module):
    """A separate value model: a trunk that reads tokens and a linear head.

    trunk  a ``transformers`` model without a head, whose output has ``last_hidden_state``
    """

    def __init__(self, trunk: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    @classmethod
    def from_policy(cls, model: "PreTrainedModel", *, copied: bool = True) -> "Critic":
        """A copy of a policy's trunk, and a head that starts at 0; ``copied`` off takes the trunk itself.

        Raises SurefootError if the model has no trunk apart from its head.
        """
        trunk: nn.Module = model.base_model
        if trunk is model:
            raise SurefootError(f"critic: {type(model).__name__} has no separate trunk to copy; set critic.own_model = false")
        trunk = (copy.deepcopy(trunk) if copied else trunk).requires_grad_(True).eval()
        return cls(trunk, ValueHead(Readout(model).width, next(trunk.parameters())))

    @classmethod
    def from_reward_model(cls, trunk: nn.Module, head: nn.Linear, mean: float = 0.0, std: float = 1.0) -> "Critic":
        """A copy of a reward model: V of a prefix starts as (score of the prefix − mean) / std."""
        return cls.from_reward_trunk(copy.deepcopy(trunk).requires_grad_(True).eval(), head, mean, std)

    @classmethod
    def from_reward_trunk(cls, trunk: nn.Module, head: nn.Linear, mean: float = 0.0, std: float = 1.0) -> "Critic":
        """The same without copying the trunk; the head is always a copy."""
        own = ValueHead(head.in_features, head.weight)
        with torch.no_grad():
            own.weight.copy_(head.weight / std)
            own.bias.copy_(((0.0 if head.bias is None else head.bias) - mean) / std)
        return cls(trunk, own)

    def forward(self, ids: Tensor, **options: Tensor) -> Tensor:
        """V after every token; ``options`` are further inputs of the trunk.   [B, L] -> [B, L]"""
        values: Tensor = self.head(self.trunk(input_ids=ids, use_cache=False, **options).last_hidden_state)
        return values


class LanguagePolicy(Policy):
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
        width = max(4, next(model.parameters()).element_size())  # of logits, which are float32 at least
        self.chunk = chunk or max(1, CHUNK // (width * self.readout.vocabulary))
        self.checkpointing, self.idle_critic = checkpointing, idle_critic
        self.padding_reason = self._reason_for_padding() if padding_free else None
        self.padding_free = padding_free and self.padding_reason is None
        self.prompts_once = self.padding_free and all(map(reads_prompts_once, self._trunks()))
        """whether rows that begin with the same prompt read it once in a pass"""
        self.valued = True
        """whether passes compute values"""
        self.frozen = False
        """whether its passes never have a gradient, though a model that it shares may be trained"""
        self.before_first_pass: Callable[[LanguagePolicy], None] | None = None
        """is called once, with the policy in its place"""
        if checkpointing:
            for part in (self.model, self.critic):
                checkpoint_layers(part)
        self.eval()

    def forward(self, inputs: Inputs, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probabilities, entropy and values, zeros outside the mask.   [B, P] each, [B, T], [B, T] -> all [B, T]

        ``values[t]`` is V of the prompt and ``response[:t]``. Raises SurefootError if a prompt has no token.
        """
        if self.before_first_pass is not None:
            ready, self.before_first_pass = self.before_first_pass, None
            ready(self)
        mask = torch.ones_like(actions, dtype=torch.bool) if mask is None else mask
        batch = pack_batch(inputs, actions, mask, self.pad_id)
        read = self._reading(batch, inputs)
        with computing(self, self.checkpointing, self.bf16), read.laid_out():
            with self._recording() as router_logits:
                hidden, states = self.readout.states(read, batch.rows, batch.before)
            head = self.readout.linear or self.readout.head
            likelihood = chunked_likelihood(states, actions[batch.rows, batch.steps], head, self.temperature, self.chunk)
            values = self._values(batch, read, hidden, batch.rows, batch.before) if self.valued else None
        log_probs, entropy = (_scatter(x, batch, mask) for x in likelihood)
        router_loss = self.routers.loss(router_logits, read.real) if self.routers is not None and router_logits else None
        return Evaluation(
            log_probs, entropy, None if values is None else _scatter(values, batch, mask), router_loss=router_loss
        )

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
                read = self._reading(batch, inputs)
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
        rows, read = torch.arange(len(actions), device=actions.device), self._reading(batch, inputs)
        with computing(self, self.checkpointing, self.bf16), read.laid_out():
            hidden = None if self.value_head is None else self.readout.states(read, rows, batch.last)[0]
            values = self._values(batch, read, hidden, rows, batch.last)
        return torch.zeros(len(actions), device=actions.device) if values is None else values

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

    def idle_part(self) -> nn.Module | None:
        """The critic, if it is on the CPU while it is not used."""
        return self.critic if self.idle_critic else None

    def train(self, mode: bool = True) -> "LanguagePolicy":
        """Stay in evaluation mode: dropout would make π_θ differ from π_old before the first step."""
        return super().train(False)

    def _reason_for_padding(self) -> str | None:
        """Why the rows can't be read end to end by the policy's trunk or by that of its critic."""
        return next((reason for reason in map(reason_for_padding, self._trunks()) if reason is not None), None)

    def _trunks(self) -> list[nn.Module]:
        return [self.model.base_model, *([self.critic.trunk] if isinstance(self.critic, Critic) else [])]

    def _reading(self, batch: PackedBatch, inputs: Inputs) -> Reading:
        if self.prompts_once and self.routers is None:  # whose loss is a mean over all tokens, as often as they are read
            return prompts_once(batch.ids, batch.real, inputs["prompt_mask"].bool().sum(-1))
        return (end_to_end if self.padding_free else padded)(batch.ids, batch.real)

    def _values(self, batch: PackedBatch, read: Reading, hidden: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor | None:
        """V after the tokens at (row, column); None without a critic.   [K]"""
        if isinstance(self.critic, Critic):
            values: Tensor = self.critic(read.ids, **read.options)[read.at(rows, columns)]
            return values
        if self.critic is not None:  # of the user: it reads ids alone
            with padded(batch.ids, batch.real).laid_out():
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
    groups = groups_by_length(costs, sys.maxsize if tokens is None else tokens, size, shared)
    back = torch.cat(groups).argsort()
    parts = [function(*select_rows((inputs, actions, mask), group)) for group in groups]
    joined = iter([torch.cat(pieces) for pieces in zip(*map(tensors_in, parts), strict=True)])
    return map_tensors(lambda _: next(joined)[back.to(actions.device)], parts[0])


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


def _scatter(values: Tensor, batch: PackedBatch, mask: Tensor) -> Tensor:
    """Values of the K decisions at their places in the responses, and zeros elsewhere.   [K] -> [B, T]"""
    return values.new_zeros(mask.shape).index_put((batch.rows, batch.steps), values)


PROBE_LOGIT = 100.0
"""the largest logit of the test: a soft cap (30 in Gemma 2) shows at this size, but not at that of a fresh model's logits"""


class Readout:
    """Hidden states and logits of a model; it has no parameters of its own.

    model  an AutoModelForCausalLM
    tested  False for a model without data: it is assumed to be plain, and width and vocabulary stay 0

    Whether head and trunk reproduce the model's own logits is tested at construction. If not, the model's logits are used, for
    all positions at once.

    Raises SurefootError if the model's logits depend on later tokens.
    """

    def __init__(self, model: "PreTrainedModel", tested: bool = True) -> None:
        self.model: Any = model
        self.width = self.vocabulary = 0
        self.plain = True
        """whether ``head`` of ``hidden`` is the model's own logits"""
        if tested:
            with quiet_transformers():  # the test may use the pad token, of which some models warn
                self._test()

    def states(self, read: Reading, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """After the tokens at (row, column): hidden states [K, width], and the input of ``head`` [K, …].

        Padding follows the real tokens, so no attention mask is needed.
        """
        places = read.at(rows, columns)
        if self.plain:
            hidden = self._trunk(read.ids, **read.options)[places]
            return hidden, hidden
        outputs = self.model(input_ids=read.ids, use_cache=False, output_hidden_states=True, **read.options)
        return outputs.hidden_states[-1][places], outputs.logits[places]

    @property
    def linear(self) -> nn.Linear | None:
        """The head if it is a linear layer and nothing else, whose weights are whole."""
        head, config = self.model.get_output_embeddings(), self.model.config
        scaled = any(getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"))
        return head if self.plain and type(head) is nn.Linear and not scaled and not is_sharded(self.model) else None

    def head(self, states: Tensor) -> Tensor:
        """Logits of the next token.   [K, …] -> [K, vocabulary]"""
        return self._logits(states) if self.plain else states

    def _trunk(self, ids: Tensor, **options: Tensor) -> Tensor:
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """The output embedding, then the scale and soft cap in some families' configurations."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if scale := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def _test(self) -> None:
        """Set ``width``, ``vocabulary`` and ``plain``, and check that the model is causal."""
        device = self.model.get_input_embeddings().weight.device
        size = int(self.model.get_input_embeddings().weight.shape[0])
        ids = (torch.arange(16, device=device) * 7 % size).view(2, 8)
        training = self.model.training
        self.model.eval()
        if looks_ahead(self.model):
            raise SurefootError(f"model={type(self.model).__name__}: {NOT_CAUSAL}; use a causal language model")
        logits = self.model(input_ids=ids, use_cache=False).logits
        self.vocabulary, self.plain = logits.shape[-1], self._is_plain(ids, logits)
        if self.plain:  # hidden states of every layer are recorded by hooks, which stay
            self.width = self._trunk(ids).shape[-1]
        else:
            self.width = self.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1].shape[-1]
        self.model.train(training)

    def _is_plain(self, ids: Tensor, logits: Tensor) -> bool:
        trunk = self.model.base_model
        if trunk is self.model or not isinstance(self.model.get_output_embeddings(), nn.Module):
            return False
        factor = PROBE_LOGIT / max(float(logits.abs().max()), 1e-6)

        def scale_up(_: nn.Module, __: Any, outputs: Any) -> Any:
            outputs.last_hidden_state = outputs.last_hidden_state * factor
            return outputs

        hook = trunk.register_forward_hook(scale_up)
        try:
            return logits_close(self._logits(self._trunk(ids)), self.model(input_ids=ids, use_cache=False).logits)
        except (AttributeError, TypeError, RuntimeError):  # another signature, output or shape
            return False
        finally:
            hook.remove()


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
