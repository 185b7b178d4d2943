"""What passes through memory: the passes of a run, made on tensors without contents, with every storage counted.

Nothing is computed and nothing is allocated, but the same functions are called in the same order as in a run, and autograd
keeps the same tensors for the backward pass. So what is counted is not a formula of one family's layers but what this model
does in this version of ``transformers``: in a Llama in float32 about 10 numbers per token, layer and unit of width, and 4 per
unit of the feed-forward; in bfloat16 half of most of them, and a copy of every weight.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor, nn

from surefoot.core.algorithms import Objective
from surefoot.core.objective import Batch, loss
from surefoot.core.rollout import Evaluation
from surefoot.functional import chunked_likelihood
from surefoot.language.adapters.layers import POLICY, VALUE, RoleTrunk, SharedBase
from surefoot.language.data.tokens import positions
from surefoot.language.memory.shapes import causal, counted, depth, depths, shortened, trunk, without_contents
from surefoot.language.memory.tracker import Tracker
from surefoot.language.models.policy import Critic, ValueHead, checkpoint_layers, computing
from surefoot.language.models.readout import Readout
from surefoot.language.sampling.fast_decode import FastDecoder
from surefoot.language.sampling.kv_cache import CachedDecoder, Decoder, RecomputingDecoder, read_prompts
from surefoot.language.sampling.packed_model import PACKED_LIMIT, PackedModel, packed
from surefoot.language.sampling.sampler import inverse_cdf, log_softmax

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.language import AdapterSettings

P = ParamSpec("P")

MANY = 32
"""chunks of logits that are gone through one by one; more would take time and tell nothing new"""


@dataclass(frozen=True)
class Parts:
    """What is read at once."""

    rows: int
    width: int
    """tokens of each row, prompt and response"""
    decisions: int
    """tokens of each row whose log-probability is asked for"""


@dataclass(frozen=True)
class Switches:
    """What changes what a pass through the policy keeps."""

    critic: "PreTrainedConfig | None" = None
    """of the value model, where it is one of its own"""
    head: bool = False
    """whether there is a value head on the policy's trunk"""
    bf16: bool = False
    checkpointing: bool = False
    chunk: int | None = None
    """decisions whose logits are held at once; none: all"""
    temperature: float = 1.0
    adapter: "AdapterSettings | None" = None
    """what is trained beside frozen weights, if not they"""
    value_role: bool = False
    """whether the critic is an adapter of the same base"""


@dataclass(frozen=True)
class Passing:
    """Bytes of one pass."""

    peak: int
    kept: dict[str, int] = field(default_factory=dict)
    """of the peak, what is held for the backward pass, by role"""


def remembered(count: Callable[P, Passing]) -> Callable[P, Passing]:
    """Every pass is counted once: plans that differ in one switch share most of them."""
    known: dict[str, Passing] = {}

    @wraps(count)
    def recalled(*args: P.args, **kwargs: P.kwargs) -> Passing:
        key = repr((args, kwargs))
        if key not in known:
            known[key] = count(*args, **kwargs)
        return known[key]

    return recalled


@remembered
def learning(config: "PreTrainedConfig", objective: Objective, switches: Switches, parts: Parts) -> Passing:
    """Forward and backward pass of one micro-batch."""
    return _widened(
        lambda some: _deepened(
            lambda few, critic: _policy_pass(few, critic, objective, switches, some), config, switches.critic
        ),
        parts,
        switches.chunk,
    )


@remembered
def scoring(config: "PreTrainedConfig", switches: Switches, parts: Parts) -> Passing:
    """The same rows without gradient: log-probabilities of policy or reference, and values if there is a critic."""
    return _widened(
        lambda some: _deepened(lambda few, critic: _policy_pass(few, critic, None, switches, some), config, switches.critic),
        parts,
        switches.chunk,
    )


@remembered
def choosing(config: "PreTrainedConfig", objective: Objective, switches: Switches, parts: Parts) -> Passing:
    """A reward model learns: forward and backward pass of both answers of so many pairs."""
    return _deepened(lambda few, _: _pair_pass(few, objective, switches, parts), config)


@remembered
def judging(config: "PreTrainedConfig", parts: Parts, adapter: "AdapterSettings | None" = None) -> Passing:
    """A reward model's scores of texts, without gradient."""

    def once(few: "PreTrainedConfig", _: Any) -> Passing:
        with without_contents():
            model = trunk(few)
            _fitted(model, adapter)
            with torch.no_grad(), _over(model) as tracker:
                _read_masked(model, parts)
            return Passing(tracker.peak)

    return _deepened(once, config)


@remembered
def reading(config: "PreTrainedConfig", prompts: int, length: int, adapter: "AdapterSettings | None" = None) -> Passing:
    """The prompts of a batch are read, all at once, and their keys and values kept."""

    def once(few: "PreTrainedConfig", _: Any) -> Passing:
        with without_contents():
            model = causal(few)
            _fitted(model, adapter)
            with torch.no_grad(), _over(model) as tracker:
                _read(model, prompts, length)
            return Passing(tracker.peak)

    return _deepened(once, config)


@remembered
def decoding(
    config: "PreTrainedConfig",
    prompts: int,
    samples: int,
    length: int,
    more: int,
    temperature: float,
    adapter: "AdapterSettings | None" = None,
) -> Passing:
    """The last token of all responses, when none has ended: caches, packed weights, and what drawing from logits takes.

    prompts, samples  how many, and responses to each
    length, more      tokens of the longest prompt and of a response
    """
    fast, vocabulary = counted(config).layers <= PACKED_LIMIT, counted(config).vocabulary

    def once(few: "PreTrainedConfig", _: Any) -> Passing:
        with without_contents():
            model = causal(few)
            _fitted(model, adapter)
            with torch.no_grad(), _over(model) as tracker:
                weights = packed(model) if fast else None
                kept = {"packed weights": tracker.live}
                read, past = _read(model, prompts, length)
                tracker.restart()
                decoder = _decoder(model, weights, read, past, samples, more)
                kept["cache"] = tracker.live - kept["packed weights"]
                tokens = read.ids.new_zeros(prompts * samples)
                if more > 1:
                    _skip(decoder, length + more - 2)
                    logits = decoder.step(tokens)
                else:
                    logits = torch.zeros(prompts * samples, vocabulary)
                known = log_softmax(logits, temperature)
                inverse_cdf(known, torch.zeros(prompts * samples, dtype=torch.float64))
            return Passing(tracker.peak, kept)

    return _deepened(once, config)


# ---- the passes ---------------------------------------------------------------------------------------------------------


def _policy_pass(
    config: "PreTrainedConfig", critic_config: "PreTrainedConfig | None", objective: Objective | None, s: Switches, parts: Parts
) -> Passing:
    """What ``LanguagePolicy.forward`` does after packing, which reads contents, and what ``Learner`` does with it."""
    with without_contents():
        model = causal(config)
        base = _fitted(model, s.adapter, POLICY, *([VALUE] if s.value_role else []))
        readout = Readout(model, tried=False)
        like = next(model.parameters())
        held = nn.ModuleList([model])
        critic = value_head = None
        if critic_config is not None:
            critic = Critic(trunk(critic_config), ValueHead(int(critic_config.get_text_config().hidden_size), like))
            held.append(critic)
        elif base is not None and s.value_role:
            critic = Critic(RoleTrunk(base, VALUE), ValueHead(int(config.get_text_config().hidden_size), like))
            held.append(critic)
        elif s.head:
            value_head = ValueHead(int(config.get_text_config().hidden_size), like)
            held.append(value_head)
        if s.checkpointing:
            for part in (model, critic):
                checkpoint_layers(part)
        count = parts.rows * parts.decisions
        with torch.set_grad_enabled(objective is not None), _over(held, objective is not None) as tracker:
            batch = _batch(parts)
            rows, columns, steps = (torch.zeros(count, dtype=torch.long) for _ in range(3))
            ids = torch.zeros(parts.rows, parts.width, dtype=torch.long)
            begun, kept = tracker.live, {}
            with computing(held, s.checkpointing, s.bf16):
                hidden, states = readout.states(ids, rows, columns)
                kept["policy"] = tracker.live - begun
                likelihood = chunked_likelihood(
                    states, batch.actions.flatten()[:count], readout.head, s.temperature, s.chunk or max(1, count)
                )
                logits = tracker.live
                values = None if value_head is None else value_head(hidden)
                if critic is not None:
                    values = critic(ids)[rows, columns]
                    kept["value"] = tracker.live - logits

            def spread(found: Tensor) -> Tensor:
                return found.new_zeros(parts.rows, parts.decisions).index_put((rows, steps), found)

            if objective is None:
                return Passing(tracker.peak)
            log_probs, entropy = map(spread, likelihood)
            evaluation = Evaluation(log_probs, entropy, None if values is None else spread(values))
            objective = replace(objective, router_coefficient=0.0)
            del hidden, states, likelihood, values, log_probs, entropy
            total, _, _ = loss(evaluation, batch, objective, denominator=batch.returns.sum(), beta=0.0)
            total.backward()  # type: ignore[no-untyped-call]
        return Passing(tracker.peak, kept)


def _pair_pass(config: "PreTrainedConfig", objective: Objective, s: Switches, parts: Parts) -> Passing:
    """What ``PairPolicy.forward`` does, and the learner with it."""
    with without_contents():
        model = trunk(config)
        _fitted(model, s.adapter)
        head = nn.Linear(int(config.get_text_config().hidden_size), 1)
        held = nn.ModuleList([model, head])
        if s.checkpointing:
            checkpoint_layers(model)
        with _over(held, True) as tracker:
            batch, begun = _batch(parts), tracker.live
            with computing(held, s.checkpointing, s.bf16):
                found = [head(_read_masked(model, parts)[:, -1]).squeeze(-1) for _ in range(2)]
            both = torch.stack(found, -1).float().log_softmax(-1)
            kept = {"policy": tracker.live - begun}
            entropy = -(both.exp() * both).sum(-1, keepdim=True)
            evaluation = Evaluation(both.gather(-1, batch.actions), entropy)
            total, _, _ = loss(evaluation, batch, objective, denominator=batch.returns.sum(), beta=0.0)
            total.backward()  # type: ignore[no-untyped-call]
        return Passing(tracker.peak, kept)


def _fitted(model: Any, adapter: "AdapterSettings | None", *roles: str) -> SharedBase | None:
    """A model with adapters of these roles, that of the policy if none is named; None without adapters."""
    if adapter is None:
        return None
    base = SharedBase(model, printed="")
    for role in roles or (POLICY,):
        base.inject(role, adapter)
        for _, parameter in base.parameters(role):
            parameter.requires_grad_(True)
    return base


def _batch(parts: Parts) -> Batch:
    """What the loss reads of one micro-batch."""
    shape = (parts.rows, max(1, parts.decisions))
    numbers = [torch.zeros(shape) for _ in range(5)]
    return Batch(
        inputs=torch.zeros(parts.rows, parts.width - parts.decisions, dtype=torch.long),
        actions=torch.zeros(shape, dtype=torch.long),
        mask=torch.ones(shape, dtype=torch.bool),
        old_log_probs=numbers[0],
        advantages=numbers[1],
        returns=numbers[2],
        old_values=numbers[3],
        ref_log_probs=numbers[4],
    )


def _read_masked(model: Any, parts: Parts) -> Tensor:
    """Hidden states of rows that are padded."""
    mask = torch.ones(parts.rows, parts.width, dtype=torch.bool)
    ids = torch.zeros(parts.rows, parts.width, dtype=torch.long)
    places = {"position_ids": positions(mask)}
    hidden: Tensor = model(input_ids=ids, attention_mask=mask.long(), use_cache=False, **places).last_hidden_state
    return hidden


def _read(model: Any, prompts: int, length: int) -> tuple[Any, Any]:
    """Prompts of different lengths, and the cache that reading them leaves."""
    ids = torch.zeros(prompts, length, dtype=torch.long)
    mask = torch.ones(prompts, length, dtype=torch.bool)
    read: Any = SimpleNamespace(ids=ids, mask=mask, lengths=mask.sum(-1), padded=True)
    return read, read_prompts(model, read)[1]


def _decoder(model: Any, weights: PackedModel | None, read: Any, past: Any, samples: int, more: int) -> Decoder:
    if weights is not None:
        return FastDecoder(weights, read, [(layer.keys, layer.values) for layer in past.layers], samples, more - 1)
    if past is None:
        return RecomputingDecoder(model, read, samples, more - 1)
    return CachedDecoder(model, read, past, samples, more - 1)


def _skip(decoder: Any, length: int) -> None:
    """As if so many tokens had been read already."""
    decoder.length = length
    for layer in getattr(getattr(decoder, "past", None), "layers", []):
        if hasattr(layer, "buffers"):
            layer.length = length
            layer.look()


# ---- counting -----------------------------------------------------------------------------------------------------------


def _over(module: nn.Module, gradients: bool = False) -> Tracker:
    """A tracker that leaves out parameters, buffers and gradients: they are counted by arithmetic."""
    tracker = Tracker()
    tracker.know([*module.parameters(), *module.buffers()])
    if gradients:
        for parameter in (p for p in module.parameters() if p.requires_grad):
            parameter.grad = torch.empty_like(parameter)
            tracker.know([parameter.grad])
    return tracker


def _deepened(count: Callable[..., Passing], config: "PreTrainedConfig", critic: "PreTrainedConfig | None" = None) -> Passing:
    """A pass through all layers, from passes through few: bytes are a line in the number of layers."""
    here = [depths(config), (0,) if critic is None else depths(critic)]
    few = [c if c is None else shortened(c, at[0]) for c, at in zip((config, critic), here, strict=True)]
    found = base = count(*few)
    for index, (whole, at) in enumerate(zip((config, critic), here, strict=True)):
        if len(at) == 1 or whole is None:
            continue
        more = list(few)
        more[index] = shortened(whole, at[1])
        found = _along(found, base, count(*more), (depth(whole) - at[0]) / (at[1] - at[0]))
    return found


def _widened(count: Callable[[Parts], Passing], parts: Parts, chunk: int | None) -> Passing:
    """A pass over many rows: where their logits come in more than ``MANY`` chunks, bytes are a line in the number of rows."""
    most = parts.rows if chunk is None else MANY * chunk // max(1, parts.decisions)
    if parts.rows <= most or most < 2:
        return count(parts)
    low, high = (count(replace(parts, rows=rows)) for rows in (most // 2, most))
    return _along(high, low, high, (parts.rows - most) / (most - most // 2))


def _along(found: Passing, low: Passing, high: Passing, times: float) -> Passing:
    kept = {name: size + int(times * (high.kept[name] - low.kept[name])) for name, size in found.kept.items()}
    return Passing(found.peak + int(times * (high.peak - low.peak)), kept)
