"""Count the memory of a run's passes: the same functions as in a run, on fake tensors, with every storage counted.

Nothing is computed or allocated, but autograd keeps the same tensors for the backward pass. So the counts are not a formula for
one family's layers but hold for the model in the installed version of ``transformers``. A Llama in float32 has about 10 numbers
per token, layer and unit of width, and 4 per unit of the feed-forward; bfloat16 halves most of them and adds a copy of every
weight.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from surefoot.core.algorithms import Objective
from surefoot.core.objective import Batch, loss
from surefoot.core.rollout import Evaluation
from surefoot.functional import chunked_likelihood
from surefoot.language import quiet_transformers
from surefoot.language.data.tokens import positions
from surefoot.language.memory.counts import counted_once
from surefoot.language.memory.parameters import (
    causal_model,
    count_parameters,
    layer_count,
    layer_stack,
    sample_depths,
    trunk_model,
    with_layers,
)
from surefoot.language.memory.storages import StorageTracker
from surefoot.language.models.adapters import POLICY, VALUE, RoleTrunk, SharedBase
from surefoot.language.models.padding_free import Reading
from surefoot.language.models.policy.critic import Critic, ValueHead
from surefoot.language.models.policy.passes import checkpoint_layers, computing
from surefoot.language.models.policy.readout import Readout
from surefoot.language.sampling.fast_decode import PACKED_LIMIT, FastDecoder, PackedModel, pack_model
from surefoot.language.sampling.kv_cache import CachedDecoder, Decoder, RecomputingDecoder, read_prompts
from surefoot.language.sampling.sampler import inverse_cdf, log_softmax

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.models import AdapterSettings

MAX_CHUNKS = 32
"""chunks of logits that are counted one by one; more are extrapolated"""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Create fake tensors: they have shapes, dtypes and storages but no data, and operations compute nothing."""
    with quiet_transformers(), FakeTensorMode():
        yield


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch."""

    rows: int
    width: int
    """tokens of each row, prompt and response"""
    decisions: int
    """tokens of each row whose log-probability is computed"""


@dataclass(frozen=True)
class PassOptions:
    """Options that change the memory of a pass through the policy."""

    critic: "PreTrainedConfig | None" = None
    """of a separate value model"""
    head: bool = False
    """whether there is a value head on the policy's trunk"""
    bf16: bool = False
    checkpointing: bool = False
    chunk: int | None = None
    """tokens whose logits are held at once; None: all"""
    temperature: float = 1.0
    adapter: "AdapterSettings | None" = None
    """the trained adapter, if the weights are frozen"""
    value_role: bool = False
    """whether the critic is an adapter of the same base"""
    low: bool = False
    """whether the weights themselves are in bfloat16"""
    rounded: bool = False
    """whether their gradients are added to float32 ones, and dropped, as soon as they are complete"""
    sharded: bool = False
    """whether weights are in parts, so that the head's is no plain matrix"""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of one pass."""

    peaks: tuple[int, ...]
    """of each segment, in order"""
    kept: dict[str, int] = field(default_factory=dict)
    """of the peak, bytes kept for the backward pass, by role"""

    @property
    def peak(self) -> int:
        """The largest of all segments."""
        return max(self.peaks)


cached_pass = counted_once(lambda stored: PassMemory(tuple(stored["peaks"]), stored["kept"]))
"""counts a pass once: plans that differ in one option share most passes"""


@cached_pass
def learning(config: "PreTrainedConfig", objective: Objective, switches: PassOptions, shape: BatchShape) -> PassMemory:
    """Forward and backward pass of one micro-batch."""
    return _over_rows(
        lambda some: _over_layers(
            lambda few, critic: _policy_pass(few, critic, objective, switches, some), config, switches.critic
        ),
        shape,
        switches.chunk,
    )


@cached_pass
def scoring(config: "PreTrainedConfig", switches: PassOptions, shape: BatchShape) -> PassMemory:
    """The same rows without gradient: log-probabilities of policy or reference, and values with a critic."""
    return _over_rows(
        lambda some: _over_layers(lambda few, critic: _policy_pass(few, critic, None, switches, some), config, switches.critic),
        shape,
        switches.chunk,
    )


@cached_pass
def pair_learning(
    config: "PreTrainedConfig", objective: Objective, switches: PassOptions, shape: BatchShape, sides: int
) -> PassMemory:
    """Forward and backward pass of a reward model on the one or two answers of each row of a micro-batch."""
    return _over_layers(lambda few, _: _pair_pass(few, objective, switches, shape, sides), config)


@cached_pass
def reward_scoring(
    config: "PreTrainedConfig",
    shape: BatchShape,
    adapter: "AdapterSettings | None" = None,
    low: bool = False,
    bf16: bool = False,
) -> PassMemory:
    """A reward model's scores of texts, without gradient."""

    def once(few: "PreTrainedConfig", _: Any) -> PassMemory:
        with fake_tensors():
            model = trunk_model(few, low)
            _add_adapters(model, adapter)
            model.requires_grad_(False)  # autocast keeps the casts of trained weights alone
            with torch.no_grad(), _tracker(model) as tracker, computing(model, False, bf16):
                _read_masked(model, shape)
            return PassMemory(tracker.finish())

    return _over_layers(once, config)


@cached_pass
def prompt_reading(
    config: "PreTrainedConfig",
    prompts: int,
    length: int,
    adapter: "AdapterSettings | None" = None,
    low: bool = False,
    bf16: bool = False,
) -> PassMemory:
    """Read all prompts of a batch at once, and keep their keys and values."""

    def once(few: "PreTrainedConfig", _: Any) -> PassMemory:
        with fake_tensors():
            model = causal_model(few, low)
            _add_adapters(model, adapter)
            with torch.no_grad(), _tracker(model) as tracker, computing(model, False, bf16):
                _read(model, prompts, length)
            return PassMemory(tracker.finish())

    return _over_layers(once, config)


@cached_pass
def decoding(
    config: "PreTrainedConfig",
    prompts: int,
    samples: int,
    length: int,
    more: int,
    temperature: float,
    adapter: "AdapterSettings | None" = None,
    low: bool = False,
    bf16: bool = False,
) -> PassMemory:
    """The last token of all responses, if none has ended: caches, packed weights, and sampling from logits.

    prompts, samples  number of prompts, and responses to each
    length, more      tokens of the longest prompt and of a response
    """
    fast, vocabulary = count_parameters(config).layers <= PACKED_LIMIT, count_parameters(config).vocabulary

    def once(few: "PreTrainedConfig", _: Any) -> PassMemory:
        with fake_tensors():
            model = causal_model(few, low)
            _add_adapters(model, adapter)
            with torch.no_grad(), _tracker(model) as tracker, computing(model, False, bf16):
                weights = pack_model(model) if fast else None
                kept = {"packed weights": tracker.live}
                read, past = _read(model, prompts, length)
                tracker.peaks.clear()
                tracker.restart()
                decoder = _decoder(model, weights, read, past, samples, more)
                tracker.mark()
                kept["cache"] = tracker.live - kept["packed weights"]
                tokens = read.ids.new_zeros(prompts * samples)
                if more > 1:
                    _fast_forward(decoder, length + more - 2)
                    logits = decoder.step(tokens)
                else:
                    logits = torch.zeros(prompts * samples, vocabulary)
                log_probs = log_softmax(logits, temperature)
                inverse_cdf(log_probs, torch.zeros(prompts * samples, dtype=torch.float64))
            return PassMemory(tracker.finish(), kept)

    return _over_layers(once, config)


# ---- the passes ---------------------------------------------------------------------------------------------------------


def _policy_pass(
    config: "PreTrainedConfig",
    critic_config: "PreTrainedConfig | None",
    objective: Objective | None,
    s: PassOptions,
    shape: BatchShape,
) -> PassMemory:
    """``LanguagePolicy.forward`` without packing, which reads tensor data, and the learner's loss and backward pass."""
    with fake_tensors():
        model = causal_model(config, s.low)
        base = _add_adapters(model, s.adapter, POLICY, *([VALUE] if s.value_role else []))
        readout, exact = Readout(model, tested=False), torch.zeros(1)
        value_head = ValueHead(int(config.get_text_config().hidden_size), exact) if s.head else None
        trunk = RoleTrunk(base, VALUE) if base is not None and s.value_role else None
        if critic_config is not None:
            trunk = trunk_model(critic_config, s.low)
        width = int((critic_config or config).get_text_config().hidden_size)
        critic = None if trunk is None else Critic(trunk, ValueHead(width, exact))
        held = nn.ModuleList([part for part in (model, critic, value_head) if part is not None])
        if s.checkpointing:
            for part in (model, critic):
                checkpoint_layers(part)
        count = shape.rows * shape.decisions
        with (
            torch.set_grad_enabled(objective is not None),
            _tracker(held, objective is not None, [model] if critic_config is None else [*held], s.rounded) as tracker,
        ):
            batch = _batch(shape)
            rows, columns, steps = (torch.zeros(count, dtype=torch.long) for _ in range(3))
            ids = torch.zeros(shape.rows, shape.width, dtype=torch.long)
            live, kept = tracker.live, {}
            with computing(held, s.checkpointing, s.bf16):
                hidden, states = readout.states(Reading(ids, real=ids), rows, columns)  # which are real is not read
                kept["policy"] = tracker.live - live
                head, chosen = readout.head if s.sharded else readout.linear or readout.head, batch.actions.flatten()[:count]
                likelihood = chunked_likelihood(states, chosen, head, s.temperature, s.chunk or max(1, count))
                tracker.mark()
                if states.requires_grad:
                    states.register_hook(tracker.mark)  # type: ignore[no-untyped-call]
                logits = tracker.live
                values = None if value_head is None else value_head(hidden)
                if critic is not None:
                    values = critic(ids)[rows, columns]
                    kept["value"] = tracker.live - logits

            def spread(values: Tensor) -> Tensor:
                return values.new_zeros(shape.rows, shape.decisions).index_put((rows, steps), values)

            tracker.mark()
            if objective is None:
                return PassMemory(tracker.finish())
            log_probs, entropy = map(spread, likelihood)
            evaluation = Evaluation(log_probs, entropy, None if values is None else spread(values))
            objective = replace(objective, router_coefficient=0.0)
            del hidden, states, likelihood, values, log_probs, entropy
            total = loss(evaluation, batch, objective, denominator=batch.returns.sum(), beta=0.0).total
            tracker.mark()
            total.backward()  # type: ignore[no-untyped-call]
        return PassMemory(tracker.finish(), kept)


def _pair_pass(config: "PreTrainedConfig", objective: Objective, s: PassOptions, shape: BatchShape, sides: int) -> PassMemory:
    """``PairPolicy.forward``, and the learner's loss and backward pass."""
    with fake_tensors():
        model = trunk_model(config, s.low)
        _add_adapters(model, s.adapter)
        head = nn.Linear(int(config.get_text_config().hidden_size), 1)
        held = nn.ModuleList([model, head])
        if s.checkpointing:
            checkpoint_layers(model)
        with _tracker(held, True, rounded=s.rounded) as tracker:
            batch, live = _batch(shape), tracker.live
            with computing(held, s.checkpointing, s.bf16):
                hidden = [_read_masked(model, shape)[:, -1] for _ in range(sides)]
                with torch.autocast("cpu", enabled=False):
                    scores = [head(each.to(head.weight.dtype)).squeeze(-1) for each in hidden]
            scores += [torch.zeros_like(scores[0])] * (2 - sides)
            both = torch.stack(scores, -1).float().log_softmax(-1)
            kept = {"policy": tracker.live - live}
            entropy = -(both.exp() * both).sum(-1, keepdim=True)
            evaluation = Evaluation(both.gather(-1, batch.actions), entropy)
            total = loss(evaluation, batch, objective, denominator=batch.returns.sum(), beta=0.0).total
            total.backward()  # type: ignore[no-untyped-call]
        return PassMemory(tracker.finish(), kept)


def _add_adapters(model: Any, adapter: "AdapterSettings | None", *roles: str) -> SharedBase | None:
    """Add adapters for these roles, by default the policy's; None without adapters."""
    if adapter is None:
        return None
    base = SharedBase(model, base_hash="")
    for role in roles or (POLICY,):
        base.inject(role, adapter)
        for _, parameter in base.parameters(role):
            parameter.requires_grad_(True)
    return base


def _batch(shape: BatchShape) -> Batch:
    """A micro-batch as the loss reads it."""
    size = (shape.rows, max(1, shape.decisions))
    numbers = [torch.zeros(size) for _ in range(5)]
    return Batch(
        inputs=torch.zeros(shape.rows, shape.width - shape.decisions, dtype=torch.long),
        actions=torch.zeros(size, dtype=torch.long),
        mask=torch.ones(size, dtype=torch.bool),
        old_log_probs=numbers[0],
        advantages=numbers[1],
        returns=numbers[2],
        old_values=numbers[3],
        ref_log_probs=numbers[4],
    )


def _read_masked(model: Any, shape: BatchShape) -> Tensor:
    """Hidden states of padded rows."""
    mask = torch.ones(shape.rows, shape.width, dtype=torch.bool)
    ids = torch.zeros(shape.rows, shape.width, dtype=torch.long)
    places = {"position_ids": positions(mask)}
    hidden: Tensor = model(input_ids=ids, attention_mask=mask.long(), use_cache=False, **places).last_hidden_state
    return hidden


def _read(model: Any, prompts: int, length: int) -> tuple[Any, Any]:
    """Prompts of different lengths, and their cache."""
    ids = torch.zeros(prompts, length, dtype=torch.long)
    mask = torch.ones(prompts, length, dtype=torch.bool)
    read: Any = SimpleNamespace(ids=ids, mask=mask, lengths=mask.sum(-1), padded=True)
    return read, read_prompts(model, read)[1]


def _decoder(model: Any, weights: PackedModel | None, read: Any, past: Any, samples: int, more: int) -> Decoder:
    if weights is not None:
        return FastDecoder(weights, read, [(layer.keys, layer.values) for layer in past.layers], samples, more - 1)
    if past is None:
        return RecomputingDecoder(model, read, samples, more - 1, spread=0)
    return CachedDecoder(model, read, past, samples, more - 1)


def _fast_forward(decoder: Any, length: int) -> None:
    """Set the decoder's length as if this many tokens had been read."""
    decoder.length = length
    for layer in getattr(getattr(decoder, "past", None), "layers", []):
        if hasattr(layer, "buffers"):
            layer.length = length
            layer.update_views()


# ---- counting -----------------------------------------------------------------------------------------------------------


def _tracker(
    module: nn.Module, gradients: bool = False, trunks: Sequence[nn.Module] | None = None, rounded: bool = False
) -> StorageTracker:
    """A tracker that excludes parameters, buffers and gradients, which are counted by arithmetic.

    trunks   models whose layers are segments of their own; default: the module
    rounded  gradients in bfloat16 are not kept, and so counted
    """
    tracker = StorageTracker()
    tracker.exclude([*module.parameters(), *module.buffers()])
    if gradients:
        for parameter in (p for p in module.parameters() if p.requires_grad):
            if rounded and parameter.dtype == torch.bfloat16:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
                continue
            parameter.grad = torch.empty_like(parameter)
            tracker.exclude([parameter.grad])
    for trunk in (module,) if trunks is None else trunks:
        _mark_layers(trunk, tracker)
    return tracker


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _mark_layers(model: nn.Module, tracker: StorageTracker) -> None:
    """Begin a segment before the first layer of a trunk and after the last, forward and backward."""
    stack = layer_stack(model)
    if stack is None:
        return

    def first(_: nn.Module, args: Any, kwargs: Any) -> None:
        tracker.mark()
        on_gradient([*args, *kwargs.values()])

    def last(_: nn.Module, args: Any, returned: Any) -> None:
        tracker.mark()
        on_gradient(tree_leaves(returned))

    def on_gradient(values: list[Any]) -> None:
        hidden = next((x for x in values if isinstance(x, Tensor) and x.requires_grad), None)
        if hidden is not None:
            hidden.register_hook(tracker.mark)  # type: ignore[no-untyped-call]

    stack[0].register_forward_pre_hook(first, with_kwargs=True)
    stack[-1].register_forward_hook(last)


def _over_layers(
    count: Callable[..., PassMemory], config: "PreTrainedConfig", critic: "PreTrainedConfig | None" = None
) -> PassMemory:
    """A pass through all layers, extrapolated from few layers: bytes are linear in the number of layers."""
    if critic is not None and (critic is config or critic.to_json_string() == config.to_json_string()):
        return _over_layers(lambda few, _: count(few, few), config)
    here = [sample_depths(config), (0,) if critic is None else sample_depths(critic)]
    few = [c if c is None else with_layers(c, at[0]) for c, at in zip((config, critic), here, strict=True)]
    result = base = count(*few)
    for index, (whole, at) in enumerate(zip((config, critic), here, strict=True)):
        if len(at) == 1 or whole is None:
            continue
        more = list(few)
        more[index] = with_layers(whole, at[1])
        result = _extrapolate(result, base, count(*more), (layer_count(whole) - at[0]) / (at[1] - at[0]))
    return result


def _over_rows(count: Callable[[BatchShape], PassMemory], shape: BatchShape, chunk: int | None) -> PassMemory:
    """A pass over many rows: where their logits come in more than ``MANY`` chunks, bytes are a line in the number of rows."""
    most = shape.rows if chunk is None else MAX_CHUNKS * chunk // max(1, shape.decisions)
    if shape.rows <= most or most < 2:
        return count(shape)
    low, high = (count(replace(shape, rows=rows)) for rows in (most // 2, most))
    return _extrapolate(high, low, high, (shape.rows - most) / (most - most // 2))


def _extrapolate(measured: PassMemory, low: PassMemory, high: PassMemory, times: float) -> PassMemory:
    kept = {name: size + int(times * (high.kept[name] - low.kept[name])) for name, size in measured.kept.items()}
    lines = zip(measured.peaks, low.peaks, high.peaks, strict=True)
    peaks = tuple(peak + int(times * (more - less)) for peak, less, more in lines)
    return PassMemory(peaks, kept)
