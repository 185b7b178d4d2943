"""Estimate how much memory a run needs, part by part and phase by phase.

**Permanent memory** is arithmetic. Weights are float32, 4 bytes per parameter (autocast affects only the passes). A trained
parameter also has a gradient (4) and Adam's two moments (8): 16 bytes, against 4 for a frozen one. With weights in bfloat16 it
is 18 bytes (2, and 4 for the float32 copy) against 2. With adapters there is one frozen copy of the weights for all roles, and
only adapters and heads are trained, in float32.

**Memory of the phases** is counted by ``passes``. Phases come one after another, so the peak is the permanent memory plus the
largest:

- *sampling*: the larger of reading all prompts at once, and the last token of all responses;
- *scoring*: the largest of the passes of policy, reference and reward models, without gradient;
- *learning*: a micro-batch forward and backward: activations kept for the backward pass, plus the largest temporary memory, a
chunk
  of logits or the gradients of one layer;
- *saving*: a checkpoint is written from copies of trained weights and Adam's moments, in the host's memory.

Of several ranks, the estimate is that of one: its share of the rows and, with sharding, its part of every model plus what is
gathered in each phase (``layout``).

Not counted: Python and its libraries, temporary buffers of kernels, memory held by an allocator, and a GPU's context.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from surefoot.core.algorithms import REINFORCE, Objective
from surefoot.core.optimizer import BLOCK
from surefoot.language.memory import passes
from surefoot.language.memory.layout import (
    LOW_WEIGHT,
    SINGLE,
    WEIGHT,
    Layout,
    ModelSize,
    held_after_forward,
    held_at_the_end,
    held_in_layers,
    whole_bytes,
)
from surefoot.language.memory.passes import (
    BatchShape,
    ParameterCounts,
    PassMemory,
    PassOptions,
    adapter_size,
    count_parameters,
    layer_count,
    linear_sizes,
)
from surefoot.language.models.policy import CHUNK
from surefoot.language.rewards.model import BATCH_TOKENS
from surefoot.language.sampling.rows import chunk_of, rows_that_fit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.models import AdapterSettings

Kind = Literal["sft", "reward", "dpo", "language"]
Value = Literal["none", "head", "own"]

GRADIENT, MOMENTS = 4, 8
"""bytes per parameter"""
NF4_BLOCK, SCALE_BLOCK = 64, 256
"""weights that share a scale in 4 bits, and scales that share one themselves"""
PROMPT_BYTES = 9
"""per prompt token in a batch: its id (int64) and its mask"""
ROLLOUT_BYTES = {"language": 47, "sft": 35, "reward": 35, "dpo": 70}
"""per response token in a rollout and its credit: 8 for the action, 4 for each number, 1 for each flag"""
BATCH_BYTES = 29
"""per response token in the shuffled copy of an epoch"""
HELD_BYTES = 13
"""per sampled response token: its id, log-probability and mask"""
SAMPLE_BYTES = 28
"""per response token during sampling: its id twice, its random number (float64) and its log-probability"""


@dataclass(frozen=True)
class Workload:
    """Everything that determines how much memory a run needs."""

    kind: Kind
    policy: "PreTrainedConfig"
    objective: Objective
    value: Value = "none"
    """no critic, a head on the policy's trunk, or a separate model"""
    critic: "PreTrainedConfig | None" = None
    """of the critic's own model, if it is not the policy's"""
    reference: "PreTrainedConfig | None" = None
    rewards: "tuple[PreTrainedConfig, ...]" = ()
    labelled: bool = False
    """a row is one labelled answer instead of two answers"""
    compared: bool = True
    """in DPO, whether a reference scores the rows before training"""
    bf16: bool = False
    """matrix products in autocast"""
    low_weights: bool = False
    """weights in bfloat16, and float32 copies of those that are trained"""
    low_moments: bool = False
    """Adam's moments in 8 bits"""
    checkpointing: bool = False
    temperature: float = 1.0
    rows: int = 16
    """rows of a minibatch"""
    responses: int = 64
    """rows per iteration"""
    samples: int = 1
    """responses to each prompt"""
    prompt: int = 512
    """tokens of the longest prompt"""
    response: int = 64
    """trained tokens of a row"""
    max_tokens: int = 64
    """limit of a response's tokens, allocated before the first is sampled"""
    evaluated: int = 0
    """held-out rows"""
    demonstrated: BatchShape | None = None
    """all demonstrations whose likelihood is evaluated"""
    mixed: BatchShape | None = None
    """demonstrations in every update"""
    rounds: int = 1
    """limit of sampling rounds in an iteration"""
    sampled: int | None = None
    """responses that are sampled at a time; 0: elsewhere; None: as many as fit into ``memory``"""
    memory: int | None = None
    """of the device, in bytes; None: unknown, so all responses are sampled together"""
    micro_batch: int | None = None
    micro_batch_tokens: int | None = None
    adapter: "AdapterSettings | None" = None
    """the adapter trained on frozen weights that all roles share, except a separate ``reference``"""
    quantize: Literal["int8", "nf4"] | None = None
    """of the base of adapters; ``adapter`` is without it, since passes are counted alike"""
    reward_adapters: "tuple[AdapterSettings, ...]" = ()
    """reward models that are adapters of the same base"""
    idle: tuple[str, ...] = ()
    """roles that are in the memory of the CPU while they are not used; "critic" is its own model, trained parts included"""
    layout: Layout = SINGLE
    """the ranks; rows, responses and prompts are those of all of them"""

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.response

    @property
    def sides(self) -> int:
        """Answers in a row."""
        return 2 if self.kind in ("reward", "dpo") and not self.labelled else 1

    @property
    def low(self) -> bool:
        """Whether passes use weights in bfloat16; autocast gathers those of sharded models so."""
        return self.low_weights or (self.bf16 and self.layout.sharded)

    @property
    def rounded(self) -> bool:
        """Whether weights in bfloat16 are held besides float32 ones; of sharded models the shards are float32."""
        return self.low_weights and not self.layout.sharded

    def of_one_rank(self) -> "Workload":
        """The workload with the rows of the rank that has most of them."""
        share = self.layout.share
        split = self.kind == "language" and self.evaluated >= self.layout.ranks  # otherwise each rank evaluates all
        return replace(
            self,
            rows=share(self.rows),
            responses=share(self.responses // self.samples) * self.samples,
            evaluated=share(self.evaluated) if split else self.evaluated,
            mixed=None if self.mixed is None else replace(self.mixed, rows=share(self.mixed.rows)),
        )

    @property
    def least_rows(self) -> int:
        """Rows of the smallest micro-batch: the answers of one row, if a pass has them below each other."""
        return self.sides if self.kind == "dpo" else 1

    def at_once(self, rows_of: BatchShape | None, batch: int | None = None) -> BatchShape:
        """The micro-batch of demonstrations, of which ``batch`` are padded together."""
        whole = rows_of or BatchShape(0, 1, 0)
        rows = min(whole.rows, self.micro_batch or batch or whole.rows)
        if self.micro_batch_tokens is not None:
            rows = min(rows, max(1, self.micro_batch_tokens // max(1, whole.width)))
        return replace(whole, rows=rows)

    @property
    def held(self) -> int:
        """Bytes of earlier sampling rounds, kept until enough groups have a signal."""
        return (self.rounds - 1) * self.responses * (PROMPT_BYTES * self.prompt + HELD_BYTES * self.max_tokens)

    def micro(self, rows: int) -> BatchShape:
        """The micro-batch for this many rows of full length."""
        read = self.width * self.sides
        if self.micro_batch_tokens is not None:
            rows = min(rows, max(1, self.micro_batch_tokens // max(1, read)))
        rows = min(rows, self.micro_batch or rows) * self.least_rows
        return BatchShape(rows, self.width, 0 if self.kind == "reward" else self.response)

    def pass_options(self, value: bool = True) -> PassOptions:
        """Options of the policy's passes; without ``value``, those of the reference."""
        vocabulary = max(1, count_parameters(self.policy).vocabulary)
        apart = self.value == "own" and value and self.adapter is None
        own = (self.critic or self.policy) if apart else None
        role = self.value == "own" and value and self.adapter is not None
        chunk = max(1, CHUNK // vocabulary)
        return PassOptions(
            own,
            self.value == "head" and value,
            self.bf16,
            self.checkpointing and value,
            chunk,
            self.temperature,
            self.adapter if value else None,
            role,
            self.low,
            self.rounded,
        )


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of a phase, on top of the permanent memory."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self.parts.values())


def with_parts(phase: PhaseMemory, more: dict[str, int]) -> PhaseMemory:
    """The same phase with further parts."""
    return PhaseMemory({**phase.parts, **more})


@dataclass(frozen=True)
class Estimate:
    """Bytes of a run: ``always`` (permanent) by role and part, ``phases`` by phase and part."""

    always: dict[str, dict[str, int]]
    phases: dict[str, PhaseMemory]
    uncounted: tuple[str, ...] = field(default=())
    """phases whose passes can't run on fake tensors; they count as 0"""
    host: dict[str, dict[str, int]] = field(default_factory=dict)
    """of ``always``, what offloading keeps in the memory of the CPU instead; it is not part of ``permanent``"""

    @property
    def permanent(self) -> int:
        """Bytes allocated throughout the run."""
        return sum(sum(parts.values()) for parts in self.always.values())

    @property
    def worst(self) -> str:
        """The largest phase."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> int:
        """The peak of the run."""
        return self.permanent + self.phases[self.worst].total

    def at(self, phase: str) -> int:
        """The peak in one phase."""
        return self.permanent + self.phases[phase].total


def trained_bytes(parameters: int, rounded: int = 0, low_moments: bool = False) -> dict[str, int]:
    """Bytes of trained parameters, by part.

    rounded       parameters in bfloat16, besides the others; the optimizer has their float32 weights
    low_moments   Adam's moments are in 8 bits
    """
    return {
        "weights": WEIGHT * parameters + LOW_WEIGHT * rounded,
        "gradients": GRADIENT * (parameters + rounded),
        "optimizer": moment_bytes(parameters + rounded, low_moments) + WEIGHT * rounded,
    }


def moment_bytes(parameters: int, low: bool) -> int:
    """Bytes of Adam's two moments; ``low``: in 8 bits, with a scale for each block."""
    return MOMENTS * parameters if not low else 2 * (parameters + WEIGHT * -(-parameters // BLOCK))


def frozen_bytes(parameters: int, each: int = WEIGHT) -> dict[str, int]:
    """Bytes of frozen parameters, by part."""
    return {"weights": each * parameters}


def permanent(workload: Workload) -> dict[str, dict[str, int]]:
    """Permanent bytes of a rank by role and part, from parameter counts alone."""
    layout, whole = workload.layout, _permanent_of_whole_models(workload)
    return {role: {name: layout.part(size) for name, size in parts.items()} for role, parts in whole.items()}


def _permanent_of_whole_models(workload: Workload) -> dict[str, dict[str, int]]:
    own = count_parameters(workload.policy)
    if workload.adapter is not None:
        return _permanent_with_adapters(workload, workload.adapter)

    low = workload.low_moments

    def trained(model: int, head: int = 0) -> dict[str, int]:
        return trained_bytes(head, model, low) if workload.rounded else trained_bytes(model + head, low_moments=low)

    if workload.kind == "reward":
        return {"reward": trained(own.trunk, own.width + 1)}
    sizes = {"policy": trained(own.total)}
    if workload.value == "head":
        sizes["value"] = trained_bytes(own.width + 1, low_moments=low)
    elif workload.value == "own":
        critic = count_parameters(workload.critic or workload.policy)
        sizes["value"] = trained(critic.trunk, critic.width + 1)
    return sizes | _frozen_roles(workload)


def _frozen_roles(workload: Workload) -> dict[str, dict[str, int]]:
    """Bytes of the reference and of reward models, as far as they are models of their own; in the passes' dtype."""
    each, sizes = LOW_WEIGHT if workload.low else WEIGHT, {}
    if workload.reference is not None and workload.kind != "dpo":
        sizes["reference"] = frozen_bytes(count_parameters(workload.reference).total, each)
    if workload.rewards:
        sizes["reward"] = frozen_bytes(sum(_reward_size(count_parameters(config)) for config in workload.rewards), each)
    return sizes


def _permanent_with_adapters(workload: Workload, adapter: "AdapterSettings") -> dict[str, dict[str, int]]:
    """The same if all roles are adapters of one frozen base."""
    own, size = count_parameters(workload.policy), adapter_size(workload.policy, adapter)
    low = workload.low_moments
    head, each = own.width + 1, LOW_WEIGHT if workload.rounded else WEIGHT
    if workload.kind == "reward":
        return {"base": _base_bytes(workload, own.trunk, each), "reward": trained_bytes(size + head, low_moments=low)}
    sizes = {"base": _base_bytes(workload, own.total, each), "policy": trained_bytes(size, low_moments=low)}
    if workload.value != "none":
        sizes["value"] = trained_bytes(head + (size if workload.value == "own" else 0), low_moments=low)
    sizes |= _frozen_roles(workload)
    adapters = sum(adapter_size(workload.policy, other) + head for other in workload.reward_adapters)
    if adapters:
        others = sizes.get("reward", frozen_bytes(0))["weights"]
        sizes["reward"] = {"weights": frozen_bytes(adapters)["weights"] + others}
    return sizes


def _base_bytes(workload: Workload, parameters: int, each: int) -> dict[str, int]:
    """Bytes of the base of adapters, whose linear layers may be in 4 or 8 bits."""
    if workload.quantize is None:
        return frozen_bytes(parameters, each)
    linear = linear_sizes(workload.policy)
    if workload.quantize == "int8":
        low = linear.weights + WEIGHT * linear.rows
    else:
        low = sum(count * _nf4_bytes(int(size)) for size, count in linear.layers.items())
    return {"weights": each * (parameters - linear.weights) + low}


def _nf4_bytes(weights: int) -> int:
    """Bytes of a layer in 4 bits: two weights in each; a scale of 1 for every 64, and one of 4 for every 256 of these; the 16
    and 256 values that codes stand for, and the mean of the scales.
    """
    scales = -(-weights // NF4_BLOCK)
    return -(-weights // 2) + scales + WEIGHT * (-(-scales // SCALE_BLOCK) + 16 + 256 + 1)


def on_device_and_host(workload: Workload) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """The permanent bytes of a rank on the device, and those in the memory of the CPU instead."""
    always = permanent(workload)
    if workload.layout.offloaded:
        return {}, always
    host = {}
    if can_leave(workload) and "critic" in workload.idle:
        critic = always.pop("value")
        host["value"] = {name: size for name, size in critic.items() if name != "gradients"}
    for role in workload.idle if workload.layout.gpu else ():
        if parts := _frozen_roles(workload).get(role):
            host[role] = {name: workload.layout.part(size) for name, size in parts.items()}
            rest = {name: size - host[role].get(name, 0) for name, size in always[role].items()}
            always[role] = rest  # heads, and adapters of a base that stays
    return {role: parts for role, parts in always.items() if any(parts.values())}, host


def can_leave(workload: Workload) -> bool:
    """Whether the critic is a model that can leave the device between updates."""
    layout = workload.layout
    return workload.value == "own" and workload.adapter is None and layout.gpu and not layout.sharded


def critic_in_updates(workload: Workload) -> dict[str, int]:
    """The bytes of a critic that is on the device in updates alone, besides its passes."""
    away = can_leave(workload) and "critic" in workload.idle
    return {"critic": sum(permanent(workload)["value"].values())} if away else {}


def permanent_bytes(workload: Workload) -> int:
    """The sum of the permanent bytes on the device."""
    return host_bytes(on_device_and_host(workload)[0])


def host_bytes(parts_of: dict[str, dict[str, int]]) -> int:
    """The sum of bytes by role and part."""
    return sum(sum(parts.values()) for parts in parts_of.values())


def estimate(workload: Workload) -> Estimate:
    """Estimate a run's memory. Takes about a second per phase."""
    return _Estimator(workload).estimate()


def quick_peak(workload: Workload) -> int:
    """A lower bound of a run's peak: that of the phase which is quick to count, and for which few settings matter."""
    more = _Estimator(workload).sampling().total if workload.kind == "language" else 0
    return permanent_bytes(workload) + more


class _Estimator:
    """Estimates the phases of one workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload.of_one_rank()
        self.each = LOW_WEIGHT if workload.low else WEIGHT
        """bytes of a gathered weight"""
        switches = {"low": workload.low, "bf16": workload.bf16}
        self.low: dict[str, Any] = {name: True for name, is_on in switches.items() if is_on}
        self.failed: list[str] = []

    def estimate(self) -> Estimate:
        s = self.workload
        always, host = on_device_and_host(s)
        always["data"] = {"rollout": self.rollout}
        phases = {"learning": with_parts(self.learning(), critic_in_updates(s))}
        if s.kind == "language":
            phases |= {"sampling": self.sampling(), "scoring": self.scoring()}
            if s.demonstrated is not None:
                phases["evaluating"] = self.demonstration_scoring()
        elif s.evaluated:
            phases["evaluating"] = self.evaluating()
        if s.kind == "dpo" and s.compared:
            phases["scoring by the reference"] = self.reference_scoring()
        trained = sum(parts.get("gradients", 0) for parts in permanent(s).values()) // GRADIENT
        if s.quantize is not None:
            width = LOW_WEIGHT if s.bf16 or s.low_weights else WEIGHT
            whole = {"weights of a layer": width * max(map(int, linear_sizes(s.policy).layers))}
            phases = {name: with_parts(phase, whole) for name, phase in phases.items()}
        copies = PhaseMemory({"copies": WEIGHT * trained + moment_bytes(trained, s.low_moments)})
        phases["saving"] = with_parts(copies, critic_in_updates(s))
        return Estimate(always, phases, tuple(self.failed), host)

    @cached_property
    def rollout(self) -> int:
        """Bytes of one iteration's rows, which are kept until the next ones are complete."""
        s = self.workload
        if s.kind == "dpo":
            return s.responses * (PROMPT_BYTES * s.width * s.sides + ROLLOUT_BYTES[s.kind])
        return s.responses * (PROMPT_BYTES * s.prompt * s.sides + ROLLOUT_BYTES[s.kind] * max(1, s.response))

    def learning(self) -> PhaseMemory:
        s = self.workload
        if s.kind == "reward":
            needed = self.counted(
                "learning", lambda: passes.pair_learning(s.policy, s.objective, s.pass_options(), s.micro(s.rows), s.sides)
            )
        else:
            needed = self.counted("learning", lambda: passes.learning(s.policy, s.objective, s.pass_options(), s.micro(s.rows)))
        if s.mixed is not None:
            read = s.at_once(s.mixed)
            mixed = self.counted("learning", lambda: passes.learning(s.policy, REINFORCE, self._plain, read))
            needed = max(needed, mixed, key=lambda passing: passing.peak)
        parts = {f"{role} activations": size for role, size in needed.kept.items()}
        copies = 0
        if s.rows < s.responses:
            copies = s.responses * (PROMPT_BYTES * s.prompt + BATCH_BYTES * s.response)
        work = needed.peak - sum(needed.kept.values())
        if s.layout.sharded:
            return self.sharded_learning(parts, work, copies)
        return PhaseMemory({**parts, "logits and work": work, "batch": copies})

    def sharded_learning(self, kept: dict[str, int], work: int, batch: int) -> PhaseMemory:
        """The largest of three moments: after the forward pass, in the backward pass of the last layer, and at its end.

        kept, work   bytes of activations by role, and the most that a pass needs besides
        """
        s, models, reshard = self.workload, self.trained_models, self.workload.layout.reshard
        after_forward = {**held_after_forward(models, self.each, reshard), **kept, "logits and work": work}
        # What a layer needs is known only together with the logits. It is about what it keeps, if it is not computed again.
        of_layer = work if s.checkpointing else min(work, sum(kept.values()) // max(1, models[0].count))
        in_layers = {**held_in_layers(models, self.each, reshard), **kept, "work": of_layer}
        if s.micro(s.rows).rows >= s.rows * s.least_rows:  # a single pass: the step's gradients come only now
            absent = {"gradients not yet made": 0 if s.layout.offloaded else -self.gradients}
            after_forward, in_layers = after_forward | absent, in_layers | absent
        moments = (after_forward, in_layers, held_at_the_end(models, self.each))
        return max((PhaseMemory({**parts, "batch": batch}) for parts in moments), key=lambda phase: phase.total)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients that a rank keeps."""
        return sum(parts.get("gradients", 0) for parts in permanent(self.workload).values())

    @cached_property
    def trained_models(self) -> list[ModelSize]:
        """The models that are trained, and gathered together."""
        s = self.workload
        share = 1.0 if s.adapter is None else adapter_size(s.policy, s.adapter) / count_parameters(s.policy).trunk
        models = [_model_size(s.policy, head=s.kind != "reward", trained=share)]
        if s.value == "own" and s.adapter is None:
            models.append(_model_size(s.critic or s.policy, head=False))
        return models

    def layer_by_layer(self, models: list[ModelSize]) -> dict[str, int]:
        """The bytes of whole weights in a pass without gradient that gathers layers as training does."""
        return held_after_forward(models, self.each, True) if self.workload.layout.sharded else {}

    def whole(self, *models: ModelSize) -> dict[str, int]:
        """The bytes of whole weights in a phase without gradient; nothing without sharding."""
        return {"gathered weights": whole_bytes(models, self.each)} if self.workload.layout.sharded else {}

    def reference_scoring(self) -> PhaseMemory:
        """The reference scores answers; its weights are in memory only for that."""
        s = self.workload
        other, read = s.reference or s.policy, s.micro(s.rows)
        needed = self.counted("scoring by the reference", lambda: passes.scoring(other, s.pass_options(value=False), read))
        copied = s.adapter is None or s.reference is not None
        parts = {"reference": s.layout.part(self.each * count_parameters(other).total) if copied else 0}
        return PhaseMemory({**parts, **self.layer_by_layer([_model_size(other)]), "passes": needed.peak})

    def sampling(self) -> PhaseMemory:
        s = self.workload
        if s.sampled == 0:
            return PhaseMemory({"batch": s.responses * (PROMPT_BYTES * s.prompt + SAMPLE_BYTES * s.max_tokens) + s.held})
        phases = [self._drawing(s.responses // s.samples, s.samples)]
        if s.evaluated > s.responses // s.samples:  # otherwise no more than sampling for training
            phases.append(self._drawing(s.evaluated, 1))
        largest = max(phases, key=lambda phase: phase.total)
        parts = {**self.whole(*self.sampled_models), **largest.parts}
        return PhaseMemory({**parts, "earlier rounds": s.held} if s.held else parts)

    @cached_property
    def sampled_models(self) -> list[ModelSize]:
        """The policy; and of a separate critic what is gathered with it, as it is in no layer."""
        policy, *critics = self.trained_models
        return [policy, *(replace(critic, layers=0) for critic in critics)]

    def _drawing(self, prompts: int, samples: int) -> PhaseMemory:
        s = self.workload
        width = LOW_WEIGHT if s.bf16 or s.rounded else WEIGHT
        rows = s.sampled or rows_that_fit(s.policy, s.prompt + s.max_tokens, width, s.memory)
        some, part = chunk_of(prompts, samples, rows)
        read = self.counted("sampling", lambda: passes.prompt_reading(s.policy, some, s.prompt, s.adapter, **self.low))
        shape = (some, part, s.prompt, s.max_tokens)
        last = self.counted("sampling", lambda: passes.decoding(s.policy, *shape, s.temperature, s.adapter, **self.low))
        batch = prompts * samples * (PROMPT_BYTES * s.prompt + SAMPLE_BYTES * s.max_tokens)
        if read.peak > last.peak:
            return PhaseMemory({"reading prompts": read.peak, "batch": batch})
        return PhaseMemory({**last.kept, "logits and work": last.peak - sum(last.kept.values()), "batch": batch})

    def scoring(self) -> PhaseMemory:
        s = self.workload
        read = s.micro(max(s.responses, s.evaluated))
        held = {"batch": self.rollout, **({"earlier rounds": s.held} if s.held else {})}
        needs: list[tuple[list[ModelSize], int]] = []
        own = self.counted("scoring", lambda: passes.scoring(s.policy, s.pass_options(), read)).peak
        needs += [(self.trained_models, own + self.brought("value"))]
        if s.reference is not None and s.reference is not s.policy:
            other = s.reference
            peak = self.counted("scoring", lambda: passes.scoring(other, s.pass_options(value=False), read)).peak
            needs.append(([_model_size(other)], peak + self.brought("reference")))
        texts = BatchShape(min(max(s.responses, s.evaluated), max(1, BATCH_TOKENS // s.width)), s.width, 0)
        rewards = [_model_size(config, head=False) for config in s.rewards]  # gathered all together
        for config in s.rewards:
            count = partial(passes.reward_scoring, config, texts, **self.low)
            needs.append((rewards, self.counted("scoring", count).peak + self.brought("reward")))
        for adapter in s.reward_adapters:
            count = partial(passes.reward_scoring, s.policy, texts, adapter, **self.low)
            peak = self.counted("scoring", count).peak + self.brought("reward")
            needs.append(([*rewards, *self.trained_models[:1]], peak))
        phases = [PhaseMemory({**self.whole(*models), "passes": peak, **held}) for models, peak in needs]
        return max(phases, key=lambda phase: phase.total)

    def brought(self, role: str) -> int:
        """Bytes of a role's weights that are on the device only in its own passes; sharded ones are gathered in any case."""
        s = self.workload
        resting = {} if s.layout.sharded else on_device_and_host(s)[1]
        return resting.get(role, {}).get("weights", 0)

    def evaluating(self) -> PhaseMemory:
        s = self.workload
        read = s.micro(min(s.rows, s.evaluated))
        if s.kind == "reward":
            needed = self.counted("evaluating", lambda: passes.reward_scoring(s.policy, read, s.adapter, **self.low))
        else:
            needed = self.counted("evaluating", lambda: passes.scoring(s.policy, s.pass_options(), read))
        return PhaseMemory({**self.layer_by_layer(self.trained_models), "passes": needed.peak})

    def demonstration_scoring(self) -> PhaseMemory:
        """The likelihood of demonstrations, as in SFT, without a critic."""
        s = self.workload
        read = s.at_once(s.demonstrated, s.rows)
        needed = self.counted("evaluating", lambda: passes.scoring(s.policy, self._plain, read))
        return PhaseMemory({**self.whole(*self.trained_models), "passes": needed.peak})

    @property
    def _plain(self) -> PassOptions:
        """Options of the policy in SFT."""
        return replace(self.workload.pass_options(), critic=None, head=False, value_role=False, temperature=1.0)

    def counted(self, phase: str, count: Any) -> PassMemory:
        """A pass; 0, with the phase marked as uncounted, for a family whose layers read tensor data."""
        try:
            memory: PassMemory = count()
        except Exception:
            if phase not in self.failed:
                self.failed.append(phase)
            return PassMemory((0,))
        return memory


def alternatives(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Other settings for the same run, the ones that cost only time first."""
    layout = workload.layout
    if layout.ranks > 1 and not layout.sharded and not is_whole(workload):
        yield 'sharding = "full"', replace(workload, layout=replace(layout, sharding="full"))
    if not workload.checkpointing:
        yield "gradient_checkpointing = true", replace(workload, checkpointing=True)
    learned = workload.micro(workload.rows)
    if learned.rows > workload.least_rows:
        tokens = workload.width * workload.sides
        yield f"optimizer.micro_batch_tokens = {tokens}", replace(workload, micro_batch_tokens=tokens)
    lower = replace(workload, bf16=False, low_weights=True)
    if not workload.low_weights and permanent_bytes(lower) < permanent_bytes(workload):
        yield 'precision = "bfloat16-weights"', lower
    elif not workload.low_weights and not workload.bf16:
        yield 'precision = "bfloat16"', replace(workload, bf16=True)
    if can_quantise(workload) and workload.quantize is None:
        yield 'adapter.quantize = "nf4"', replace(workload, quantize="nf4")
    if not workload.low_moments and not layout.sharded:
        yield 'optimizer.kind = "adam-8bit"', replace(workload, low_moments=True)
    resting = (
        *(role for role in ("reference", "reward") if role in _frozen_roles(workload)),
        *(["critic"] * can_leave(workload)),
    )
    if resting and not workload.idle and layout.gpu and not layout.sharded:
        yield f"offload = {json.dumps(resting)}", replace(workload, idle=resting)
    if workload.value == "own":
        started = "" if workload.critic is None else ' and critic.start = "none"'
        yield f"critic.own_model = false{started}", replace(workload, value="head", critic=None)
    if layout.sharded and not layout.reshard:
        yield "reshard_after_forward = true", replace(workload, layout=replace(layout, reshard=True))
    if layout.sharded and layout.gpu and not layout.offload:
        yield "offload = true", replace(workload, layout=replace(layout, offload=True))
    if layout.sharded and layout.shards < layout.ranks:
        yield 'sharding = "full"', replace(workload, layout=replace(layout, sharding="full"))


def is_whole(workload: Workload) -> bool:
    """Whether the workload has something that can't be sharded: a base in 4 or 8 bits, or moments in 8 bits."""
    return workload.quantize is not None or workload.low_moments


def can_quantise(workload: Workload) -> bool:
    """Whether the workload has a base that is whole, with linear layers."""
    return workload.adapter is not None and not workload.layout.sharded and linear_sizes(workload.policy).weights > 0


def with_adapters(workload: Workload, adapter: "AdapterSettings") -> Workload:
    """The same workload with every role an adapter of the policy's model; the reference is the model without adapters."""
    alone = None if workload.kind == "language" else workload.reference
    plain = unquantised(adapter)
    rewards = (plain,) * len(workload.rewards)
    return replace(
        workload,
        adapter=plain,
        quantize=adapter.quantize,
        critic=None,
        reference=alone,
        rewards=(),
        reward_adapters=rewards,
    )


def unquantised(adapter: "AdapterSettings") -> "AdapterSettings":
    """The same adapter on weights in the precision of the run."""
    return adapter.model_copy(update={"quantize": None})


def with_prompts(workload: Workload, prompts: int) -> Workload:
    """The same workload with this many prompts per iteration, and at most as many held-out rows."""
    rows = max(1, workload.rows * prompts * workload.samples // workload.responses)
    return replace(workload, responses=prompts * workload.samples, rows=rows, evaluated=min(workload.evaluated, prompts))


def with_ranks(workload: Workload, ranks: int) -> Workload:
    """The same workload on this many ranks that share the models."""
    return replace(workload, layout=replace(workload.layout, ranks=ranks, sharding=workload.layout.sharding or "full"))


def _reward_size(model: ParameterCounts) -> int:
    return model.trunk + model.width + 1


def _model_size(config: "PreTrainedConfig", head: bool = True, trained: float = 1.0) -> ModelSize:
    """The size of a model with or without its head for logits."""
    counts = count_parameters(config)
    whole = counts.total if head else counts.trunk
    return ModelSize(counts.layers, layer_count(config), whole - counts.layers, trained)
