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

from dataclasses import dataclass, replace
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
from surefoot.language.memory.parameters import adapter_size, count_parameters
from surefoot.language.memory.passes import WORK
from surefoot.language.memory.roles import GRADIENT, ByRole, critic_in_updates, moment_bytes, on_device_and_host, permanent
from surefoot.language.memory.workload import PROMPT_BYTES, BatchShape, Workload, model_size
from surefoot.language.rewards.model import BATCH_TOKENS
from surefoot.language.sampling.rows import chunk_of, rows_that_fit

ROLLOUT_BYTES = {"language": 47, "sft": 35, "reward": 35, "dpo": 70}
"""per response token in a rollout and its credit: 8 for the action, 4 for each number, 1 for each flag"""
BATCH_BYTES = 29
"""per response token in the shuffled copy of an epoch"""
SAMPLE_BYTES = 28
"""per response token during sampling: its id twice, its random number (float64) and its log-probability"""


Parts = dict[str, int]
"""bytes of a phase, on top of the permanent memory"""


@dataclass(frozen=True)
class Estimate:
    """Bytes of a run: ``always`` (permanent) by role and part, ``phases`` by phase and part."""

    always: ByRole
    phases: dict[str, Parts]
    host: ByRole
    """of ``always``, what offloading keeps in the memory of the CPU instead; it is not part of ``permanent``"""

    @property
    def permanent(self) -> int:
        """Bytes allocated throughout the run."""
        return sum(sum(parts.values()) for parts in self.always.values())

    @property
    def worst(self) -> str:
        """The largest phase."""
        return max(self.phases, key=self.at)

    @property
    def peak(self) -> int:
        """The peak of the run."""
        return self.at(self.worst)

    def at(self, phase: str) -> int:
        """The peak in one phase."""
        return self.permanent + total(self.phases[phase])


def total(parts: Parts) -> int:
    """The sum of a phase's bytes."""
    return sum(parts.values())


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
        phases = {"learning": self.learning() | critic_in_updates(s)}
        if s.kind == "language":
            phases |= {"sampling": self.sampling(), "scoring": self.scoring()}
            if s.demonstrated is not None:
                phases["evaluating"] = self.demonstration_scoring(s.demonstrated)
        elif s.evaluated:
            phases["evaluating"] = self.evaluating()
        if s.kind == "dpo" and s.compared:
            phases["scoring by the reference"] = self.reference_scoring()
        if s.quantize is not None:
            width = LOW_WEIGHT if s.bf16 or s.low_weights else WEIGHT
            whole = {"weights of a layer": width * max(count_parameters(s.policy).linear)}
            phases = {name: phase | whole for name, phase in phases.items()}
        trained = self.gradients // GRADIENT
        phases["saving"] = {"copies": WEIGHT * trained + moment_bytes(trained, s.low_moments)} | critic_in_updates(s)
        return Estimate(always, phases, host)

    @cached_property
    def rollout(self) -> int:
        """Bytes of one iteration's rows, which are kept until the next ones are complete."""
        s = self.workload
        if s.kind == "dpo":
            return s.responses * (PROMPT_BYTES * s.width * s.sides + ROLLOUT_BYTES[s.kind])
        return s.responses * (PROMPT_BYTES * s.prompt * s.sides + ROLLOUT_BYTES[s.kind] * max(1, s.response))

    def learning(self) -> Parts:
        s = self.workload
        read = s.micro(s.rows)
        needed = passes.pair_learning(s, read) if s.kind == "reward" else passes.learning(s, read, s.sides)
        if s.mixed is not None:
            needed = max(needed, passes.learning(s, s.at_once(s.mixed), critic=False), key=total)
        copies = 0
        if s.rows < s.responses:
            copies = s.responses * (PROMPT_BYTES * s.prompt + BATCH_BYTES * s.response)
        if s.layout.sharded:
            needed = self.sharded_learning(needed)
        return {**needed, "batch": copies}

    def sharded_learning(self, needed: Parts) -> Parts:
        """The largest of three moments: after the forward pass, in the backward pass of the last layer, and at its end.

        needed   activations by role, and the most that a pass needs besides
        """
        s, models, reshard = self.workload, self.trained_models, self.workload.layout.reshard
        kept = {name: size for name, size in needed.items() if name != WORK}
        after_forward = {**held_after_forward(models, self.each, reshard), **needed}
        # What a layer needs is known only together with the logits. It is about what it keeps, if it is not computed again.
        of_layer = needed[WORK] if s.checkpointing else min(needed[WORK], total(kept) // max(1, models[0].count))
        in_layers = {**held_in_layers(models, self.each, reshard), **kept, "work": of_layer}
        if s.micro(s.rows).rows >= s.rows:  # a single pass: the step's gradients come only now
            absent = {"gradients not yet made": 0 if s.layout.offloaded else -self.gradients}
            after_forward, in_layers = after_forward | absent, in_layers | absent
        return max((after_forward, in_layers, held_at_the_end(models, self.each)), key=total)

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

    def layer_by_layer(self, models: list[ModelSize]) -> Parts:
        """The bytes of whole weights in a pass without gradient that gathers layers as training does."""
        return held_after_forward(models, self.each, True) if self.workload.layout.sharded else {}

    def whole(self, models: list[ModelSize]) -> Parts:
        """The bytes of whole weights in a phase without gradient; nothing without sharding."""
        return {"gathered weights": whole_bytes(models, self.each)} if self.workload.layout.sharded else {}

    def reference_scoring(self) -> Parts:
        """The reference scores answers; its weights are in memory only for that."""
        s = self.workload
        other = s.reference or s.policy
        copied = s.adapter is None or s.reference is not None
        weights = s.layout.part(self.each * count_parameters(other).total) if copied else 0
        needed = passes.scoring(other, s, s.micro(s.rows))
        return {"reference": weights, **self.layer_by_layer([model_size(other)]), "passes": needed}

    def sampling(self) -> Parts:
        s = self.workload
        if s.sampled == 0:
            return {"batch": s.responses * (PROMPT_BYTES * s.prompt + SAMPLE_BYTES * s.max_tokens) + s.held}
        phases = [self._drawing(s.responses // s.samples, s.samples)]
        if s.evaluated > s.responses // s.samples:  # otherwise no more than sampling for training
            phases.append(self._drawing(s.evaluated, 1))
        policy, *critics = self.trained_models  # what is gathered with the policy of a separate critic is in no layer
        gathered = self.whole([policy, *(replace(critic, layers=0) for critic in critics)])
        return gathered | max(phases, key=total) | self.earlier_rounds

    @property
    def earlier_rounds(self) -> Parts:
        """What earlier sampling rounds keep."""
        return {"earlier rounds": self.workload.held} if self.workload.held else {}

    def _drawing(self, prompts: int, samples: int) -> Parts:
        s = self.workload
        width = LOW_WEIGHT if s.bf16 or s.rounded else WEIGHT
        rows = s.sampled or rows_that_fit(s.policy, s.prompt + s.max_tokens, width, s.memory)
        some, part = chunk_of(prompts, samples, rows)
        first, last = {"reading prompts": passes.prompt_reading(s, some)}, passes.decoding(s, some, part)
        batch = prompts * samples * (PROMPT_BYTES * s.prompt + SAMPLE_BYTES * s.max_tokens)
        return max(last, first, key=total) | {"batch": batch}

    def scoring(self) -> Parts:
        s = self.workload
        rows = max(s.responses, s.evaluated)
        read, texts = s.micro(rows), BatchShape(min(rows, max(1, BATCH_TOKENS // s.width)), s.width, 0)
        needs = [(self.trained_models, passes.scoring(s.policy, s, read) + self.brought("value"))]
        if s.reference is not None and s.reference is not s.policy:
            peak = passes.scoring(s.reference, s, read)
            needs.append(([model_size(s.reference)], peak + self.brought("reference")))
        rewards = [model_size(config, head=False) for config in s.rewards]  # gathered all together
        gathered = [(config, rewards) for config in s.rewards]
        gathered += [(s.policy, [*rewards, *self.trained_models[:1]]) for _ in s.reward_adapters[:1]]
        needs += [(models, passes.reward_scoring(config, s, texts) + self.brought("reward")) for config, models in gathered]
        phases: list[Parts] = [{**self.whole(models), "passes": peak} for models, peak in needs]
        return max(phases, key=total) | {"batch": self.rollout} | self.earlier_rounds

    def brought(self, role: str) -> int:
        """Bytes of a role's weights that are on the device only in its own passes; sharded ones are gathered in any case."""
        s = self.workload
        resting = {} if s.layout.sharded else on_device_and_host(s)[1]
        return resting.get(role, {}).get("weights", 0)

    def evaluating(self) -> Parts:
        s = self.workload
        count = passes.reward_scoring if s.kind == "reward" else passes.scoring
        needed = count(s.policy, s, s.micro(min(s.rows, s.evaluated)))
        return {**self.layer_by_layer(self.trained_models), "passes": needed}

    def demonstration_scoring(self, demonstrated: BatchShape) -> Parts:
        """The likelihood of demonstrations, as in SFT, without a critic; as many are padded together as in a minibatch."""
        s = self.workload
        together = replace(demonstrated, rows=min(demonstrated.rows, s.micro_batch or s.rows))
        return {**self.whole(self.trained_models), "passes": passes.scoring(s.policy, s, s.at_once(together))}
