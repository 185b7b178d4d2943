"""Estimate how much memory a run needs, part by part and phase by phase.

**Permanent memory** is arithmetic. Weights are float32, 4 bytes per parameter (autocast affects only the passes). A trained
parameter also has a gradient (4) and Adam's two moments (8): 16 bytes, against 4 for a frozen one. With weights in bfloat16 it
is 18 bytes (2, and 4 for the float32 copy) against 2. With adapters there is one frozen copy of the weights for all roles, and
only adapters and heads are trained, in float32.

**Memory of the phases** is arithmetic on the layers of a model (``passes``). Phases come one after another, so the peak is the
permanent memory plus the largest:

- *sampling*: the larger of reading all prompts at once, and the last token of all responses;
- *scoring*: the largest of the passes of policy, reference and reward models, without gradient;
- *learning*: a micro-batch forward and backward: activations kept for the backward pass, plus the largest temporary memory, a
  chunk of logits or the gradients of one layer;
- *saving*: a checkpoint is written from copies of trained weights and Adam's moments, in the host's memory.

Of several ranks, the estimate is that of one: its share of the rows and, with sharding, its part of every model plus what is
gathered in each phase (``layout``).

Not counted: Python and its libraries, temporary buffers of kernels, memory held by an allocator, and a GPU's context.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from surefoot.language.memory import passes
from surefoot.language.memory.layout import (
    LOW_WEIGHT,
    WEIGHT,
    ModelSize,
    held_after_forward,
    held_at_the_end,
    held_in_layers,
    whole_bytes,
)
from surefoot.language.memory.parameters import adapter_size, count_parameters, linear_sizes
from surefoot.language.memory.passes import BatchShape, PassOptions
from surefoot.language.memory.roles import (
    GRADIENT,
    critic_in_updates,
    moment_bytes,
    on_device_and_host,
    permanent,
)
from surefoot.language.memory.workload import PROMPT_BYTES, Workload, model_size
from surefoot.language.rewards.model import BATCH_TOKENS
from surefoot.language.sampling.rows import chunk_of, rows_that_fit

ROLLOUT_BYTES = {"language": 47, "sft": 35, "reward": 35, "dpo": 70}
"""per response token in a rollout and its credit: 8 for the action, 4 for each number, 1 for each flag"""
BATCH_BYTES = 29
"""per response token in the shuffled copy of an epoch"""
SAMPLE_BYTES = 28
"""per response token during sampling: its id twice, its random number (float64) and its log-probability"""


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


def estimate(workload: Workload) -> Estimate:
    """Estimate a run's memory."""
    return _Estimator(workload).estimate()


class _Estimator:
    """Estimates the phases of one workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload.of_one_rank()
        self.each = LOW_WEIGHT if workload.low else WEIGHT
        """bytes of a gathered weight"""

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
            whole = {"weights of a layer": width * max(linear_sizes(s.policy).layers)}
            phases = {name: with_parts(phase, whole) for name, phase in phases.items()}
        copies = PhaseMemory({"copies": WEIGHT * trained + moment_bytes(trained, s.low_moments)})
        phases["saving"] = with_parts(copies, critic_in_updates(s))
        return Estimate(always, phases, host)

    @cached_property
    def rollout(self) -> int:
        """Bytes of one iteration's rows, which are kept until the next ones are complete."""
        s = self.workload
        if s.kind == "dpo":
            return s.responses * (PROMPT_BYTES * s.width * s.sides + ROLLOUT_BYTES[s.kind])
        return s.responses * (PROMPT_BYTES * s.prompt * s.sides + ROLLOUT_BYTES[s.kind] * max(1, s.response))

    def learning(self) -> PhaseMemory:
        s = self.workload
        read = s.micro(s.rows)
        if s.kind == "reward":
            needed = passes.pair_learning(s.policy, s.pass_options(), read, s.sides)
        else:
            needed = passes.learning(s.policy, s.pass_options(), read, s.sides)
        if s.mixed is not None:
            mixed = passes.learning(s.policy, self._plain, s.at_once(s.mixed))
            needed = max(needed, mixed, key=lambda passing: passing.peak)
        parts = {f"{role} activations": size for role, size in needed.kept.items()}
        copies = 0
        if s.rows < s.responses:
            copies = s.responses * (PROMPT_BYTES * s.prompt + BATCH_BYTES * s.response)
        if s.layout.sharded:
            return self.sharded_learning(parts, needed.work, copies)
        return PhaseMemory({**parts, "logits and work": needed.work, "batch": copies})

    def sharded_learning(self, kept: dict[str, int], work: int, batch: int) -> PhaseMemory:
        """The largest of three moments: after the forward pass, in the backward pass of the last layer, and at its end.

        kept, work   bytes of activations by role, and the most that a pass needs besides
        """
        s, models, reshard = self.workload, self.trained_models, self.workload.layout.reshard
        after_forward = {**held_after_forward(models, self.each, reshard), **kept, "logits and work": work}
        # What a layer needs is known only together with the logits. It is about what it keeps, if it is not computed again.
        of_layer = work if s.checkpointing else min(work, sum(kept.values()) // max(1, models[0].count))
        in_layers = {**held_in_layers(models, self.each, reshard), **kept, "work": of_layer}
        if s.micro(s.rows).rows >= s.rows:  # a single pass: the step's gradients come only now
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
        models = [model_size(s.policy, head=s.kind != "reward", trained=share)]
        if s.value == "own" and s.adapter is None:
            models.append(model_size(s.critic or s.policy, head=False))
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
        needed = passes.scoring(other, s.pass_options(value=False), read)
        copied = s.adapter is None or s.reference is not None
        parts = {"reference": s.layout.part(self.each * count_parameters(other).total) if copied else 0}
        return PhaseMemory({**parts, **self.layer_by_layer([model_size(other)]), "passes": needed.peak})

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
        options = replace(s.pass_options(), critic=None, value_role=False)
        read = passes.prompt_reading(s.policy, options, some, s.prompt)
        last = passes.decoding(s.policy, options, some, part, s.prompt, s.max_tokens)
        batch = prompts * samples * (PROMPT_BYTES * s.prompt + SAMPLE_BYTES * s.max_tokens)
        if read.peak > last.peak:
            return PhaseMemory({"reading prompts": read.peak, "batch": batch})
        return PhaseMemory({**last.kept, "logits and work": last.work, "batch": batch})

    def scoring(self) -> PhaseMemory:
        s = self.workload
        read = s.micro(max(s.responses, s.evaluated))
        held = {"batch": self.rollout, **({"earlier rounds": s.held} if s.held else {})}
        needs: list[tuple[list[ModelSize], int]] = []
        own = passes.scoring(s.policy, s.pass_options(), read).peak
        needs += [(self.trained_models, own + self.brought("value"))]
        if s.reference is not None and s.reference is not s.policy:
            peak = passes.scoring(s.reference, s.pass_options(value=False), read).peak
            needs.append(([model_size(s.reference)], peak + self.brought("reference")))
        texts = BatchShape(min(max(s.responses, s.evaluated), max(1, BATCH_TOKENS // s.width)), s.width, 0)
        rewards = [model_size(config, head=False) for config in s.rewards]  # gathered all together
        for config in s.rewards:
            needs.append((rewards, passes.reward_scoring(config, s.pass_options(), texts).peak + self.brought("reward")))
        for _ in s.reward_adapters:
            peak = passes.reward_scoring(s.policy, s.pass_options(), texts).peak + self.brought("reward")
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
        count = passes.reward_scoring if s.kind == "reward" else passes.scoring
        needed = count(s.policy, s.pass_options(), read)
        return PhaseMemory({**self.layer_by_layer(self.trained_models), "passes": needed.peak})

    def demonstration_scoring(self) -> PhaseMemory:
        """The likelihood of demonstrations, as in SFT, without a critic."""
        s = self.workload
        read = s.at_once(s.demonstrated, s.rows)
        needed = passes.scoring(s.policy, self._plain, read)
        return PhaseMemory({**self.whole(*self.trained_models), "passes": needed.peak})

    @property
    def _plain(self) -> PassOptions:
        """Options of the policy in SFT."""
        return replace(self.workload.pass_options(), critic=None, value_role=False)
