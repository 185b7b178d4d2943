"""How much memory a run takes, part by part, and when it takes most.

**What always stays** is arithmetic. Weights are float32, 4 bytes per parameter (bfloat16 is a matter of the passes). What is
trained has a gradient (4) and Adam's two moments (8) beside them: 16 bytes per parameter, 4 per frozen one. With adapters the
weights are there once, frozen, for all roles, and adapters and heads alone are trained.

**What passes through** is counted by ``passes``. The three phases of an iteration come after each other, so the peak is what
stays and the largest of them:

- *sampling*: the larger of reading all prompts at once, and of the last token of all responses;
- *scoring*: the larger of the passes of policy, reference and reward models, which come after each other, without gradient;
- *learning*: a micro-batch forward and backward. Activations kept for the backward pass, and on top the most that is worked on
  at a time: a chunk of logits, or the gradients of one layer.

And *saving*: a checkpoint is a copy of one tree at a time, the largest of which are Adam's moments.

Left out are Python and its libraries, what a kernel takes for a moment, what an allocator holds back, and on a GPU its context.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from surefoot.core.algorithms import REINFORCE, Objective
from surefoot.language.memory import passes
from surefoot.language.memory.passes import BatchShape, ParameterCounts, PassMemory, PassOptions, adapter_size, count_parameters
from surefoot.language.models.policy import CHUNK
from surefoot.language.rewards.terms import BATCH_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.language import AdapterSettings

Kind = Literal["sft", "reward", "dpo", "language"]
Value = Literal["none", "head", "own"]

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
"""bytes per parameter"""
PROMPT_BYTES = 9
"""of a prompt's token in a batch: its id, int64, and its mask"""
ROLLOUT_BYTES = {"language": 47, "sft": 35, "reward": 35, "dpo": 70}
"""of a response's token in a rollout and its credit: 8 for the action, 4 for each number, 1 for each flag"""
BATCH_BYTES = 29
"""of a response's token in the shuffled copy that an epoch is cut from"""
HELD_BYTES = 13
"""of a response's token once it is drawn: its id, its log-probability, and its mask"""
SAMPLE_BYTES = 28
"""of a response's token while it is drawn: two of its id, its random number (float64), its log-probability"""


@dataclass(frozen=True)
class Workload:
    """All that decides how much memory a run takes."""

    kind: Kind
    policy: "PreTrainedConfig"
    objective: Objective
    value: Value = "none"
    """no critic, a head on the policy's trunk, or a model of its own"""
    critic: "PreTrainedConfig | None" = None
    """of the critic's own model, if it is not the policy's"""
    reference: "PreTrainedConfig | None" = None
    rewards: "tuple[PreTrainedConfig, ...]" = ()
    bf16: bool = False
    checkpointing: bool = False
    chunked: bool = True
    """whether logits are made chunk by chunk, as they are; False says what that saves"""
    temperature: float = 1.0
    rows: int = 16
    """of a minibatch: what one update learns from"""
    responses: int = 64
    """rows per iteration"""
    samples: int = 1
    """responses to each prompt"""
    prompt: int = 512
    """tokens of the longest"""
    response: int = 64
    """tokens that are learned from in a row"""
    max_tokens: int = 64
    """tokens of a response at most: room for them is taken before the first is drawn"""
    evaluated: int = 0
    """held-out rows"""
    demonstrated: BatchShape | None = None
    """demonstrations whose likelihood is watched, all of them"""
    mixed: BatchShape | None = None
    """demonstrations that every update learns from"""
    rounds: int = 1
    """of sampling, at most, in an iteration"""
    micro_batch: int | None = None
    micro_batch_tokens: int | None = None
    adapter: "AdapterSettings | None" = None
    """what is trained beside frozen weights, which all roles then share: ``reference`` is one that does not"""
    reward_adapters: "tuple[AdapterSettings, ...]" = ()
    """of reward models that are further adapters of the same base"""

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.response

    @property
    def sides(self) -> int:
        """Answers in a row."""
        return 2 if self.kind in ("reward", "dpo") else 1

    def at_once(self, rows_of: BatchShape | None, batch: int | None = None) -> BatchShape:
        """What is read at once of demonstrations, of which ``batch`` are padded together."""
        found = rows_of or BatchShape(0, 1, 0)
        rows = min(found.rows, self.micro_batch or batch or found.rows)
        if self.micro_batch_tokens is not None:
            rows = min(rows, max(1, self.micro_batch_tokens // max(1, found.width)))
        return replace(found, rows=rows)

    @property
    def held(self) -> int:
        """Bytes of what further rounds have sampled, beside one batch: kept until groups enough have a signal."""
        return (self.rounds - 1) * self.responses * (PROMPT_BYTES * self.prompt + HELD_BYTES * self.max_tokens)

    def micro(self, rows: int) -> BatchShape:
        """What is read at once of so many rows of full length."""
        read = self.width * self.sides
        if self.micro_batch_tokens is not None:
            rows = min(rows, max(1, self.micro_batch_tokens // max(1, read)))
        rows = min(rows, self.micro_batch or rows) * (2 if self.kind == "dpo" else 1)
        return BatchShape(rows, self.width, 0 if self.kind == "reward" else self.response)

    def switches(self, value: bool = True) -> PassOptions:
        """Of the policy's passes; without ``value`` those of the reference."""
        vocabulary = max(1, count_parameters(self.policy).vocabulary)
        apart = self.value == "own" and value and self.adapter is None
        own = (self.critic or self.policy) if apart else None
        role = self.value == "own" and value and self.adapter is not None
        chunk = max(1, CHUNK // vocabulary) if self.chunked else None
        return PassOptions(
            own,
            self.value == "head" and value,
            self.bf16,
            self.checkpointing and value,
            chunk,
            self.temperature,
            self.adapter if value else None,
            role,
        )


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on top of what stays."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """Bytes of a run. ``always`` is by role and part, ``phases`` by phase and part."""

    always: dict[str, dict[str, int]]
    phases: dict[str, PhaseMemory]
    uncounted: tuple[str, ...] = field(default=())
    """phases whose passes can't be made without contents; they stand with 0"""

    @property
    def stays(self) -> int:
        """What is there from the first update to the last."""
        return sum(sum(parts.values()) for parts in self.always.values())

    @property
    def worst(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> int:
        """The most at any time."""
        return self.stays + self.phases[self.worst].total

    def at(self, phase: str) -> int:
        """The most in one phase."""
        return self.stays + self.phases[phase].total


def trained_bytes(parameters: int) -> dict[str, int]:
    """Bytes of parameters that are trained, by part."""
    return {"weights": WEIGHT * parameters, "gradients": GRADIENT * parameters, "optimizer": MOMENTS * parameters}


def frozen_bytes(parameters: int) -> dict[str, int]:
    """Bytes of parameters that are only used, by part."""
    return {"weights": WEIGHT * parameters}


def permanent(setup: Workload) -> dict[str, dict[str, int]]:
    """What always stays, by role and part: from parameter counts alone, so that it takes no time to know."""
    own = count_parameters(setup.policy)
    if setup.adapter is not None:
        return _permanent_with_adapters(setup, setup.adapter)
    if setup.kind == "reward":
        return {"reward": trained_bytes(own.trunk + own.width + 1)}
    found = {"policy": trained_bytes(own.total)}
    if setup.value == "head":
        found["value"] = trained_bytes(own.width + 1)
    elif setup.value == "own":
        critic = count_parameters(setup.critic or setup.policy)
        found["value"] = trained_bytes(critic.trunk + critic.width + 1)
    if setup.reference is not None and setup.kind != "dpo":
        found["reference"] = frozen_bytes(count_parameters(setup.reference).total)
    if setup.rewards:
        found["reward"] = frozen_bytes(sum(_reward_size(count_parameters(config)) for config in setup.rewards))
    return found


def _permanent_with_adapters(setup: Workload, adapter: "AdapterSettings") -> dict[str, dict[str, int]]:
    """The same where the weights are frozen and all roles are adapters beside them."""
    own, size = count_parameters(setup.policy), adapter_size(setup.policy, adapter)
    head = own.width + 1
    if setup.kind == "reward":
        return {"base": frozen_bytes(own.trunk), "reward": trained_bytes(size + head)}
    found = {"base": frozen_bytes(own.total), "policy": trained_bytes(size)}
    if setup.value != "none":
        found["value"] = trained_bytes(head + (size if setup.value == "own" else 0))
    if setup.reference is not None and setup.kind != "dpo":
        found["reference"] = frozen_bytes(count_parameters(setup.reference).total)
    rewards = sum(_reward_size(count_parameters(config)) for config in setup.rewards)
    rewards += sum(adapter_size(setup.policy, other) + head for other in setup.reward_adapters)
    return found | ({"reward": frozen_bytes(rewards)} if rewards else {})


def permanent_bytes(setup: Workload) -> int:
    """The sum of what always stays."""
    return sum(sum(parts.values()) for parts in permanent(setup).values())


def estimate(setup: Workload) -> Estimate:
    """All of it. Takes a second or so for each of the phases."""
    return _Estimator(setup).whole()


class _Estimator:
    """The phases of one setup."""

    def __init__(self, setup: Workload) -> None:
        self.setup = setup
        self.failed: list[str] = []

    def whole(self) -> Estimate:
        s = self.setup
        always = permanent(s)
        always["data"] = {"rollout": self.rollout}
        found = {"learning": self.learning()}
        if s.kind == "language":
            found |= {"sampling": self.sampling(), "scoring": self.scoring()}
            if s.demonstrated is not None:
                found["evaluating"] = self.watching()
        elif s.evaluated:
            found["evaluating"] = self.evaluating()
        if s.kind == "dpo":
            found["asking the reference"] = self.asking()
        moments = sum(parts.get("optimizer", 0) for parts in always.values())
        found["saving"] = PhaseMemory({"copies": moments})
        return Estimate(always, found, tuple(self.failed))

    @cached_property
    def rollout(self) -> int:
        """Bytes of one iteration's rows; they are held until the next ones are complete."""
        s = self.setup
        if s.kind == "dpo":
            return s.responses * (PROMPT_BYTES * s.width * s.sides + ROLLOUT_BYTES[s.kind])
        return s.responses * (PROMPT_BYTES * s.prompt * s.sides + ROLLOUT_BYTES[s.kind] * max(1, s.response))

    def learning(self) -> PhaseMemory:
        s = self.setup
        if s.kind == "reward":
            found = self.tried("learning", lambda: passes.pair_learning(s.policy, s.objective, s.switches(), s.micro(s.rows)))
        else:
            found = self.tried("learning", lambda: passes.learning(s.policy, s.objective, s.switches(), s.micro(s.rows)))
        if s.mixed is not None:
            read = s.at_once(s.mixed)
            beside = self.tried("learning", lambda: passes.learning(s.policy, REINFORCE, self._plain, read))
            found = max(found, beside, key=lambda passing: passing.peak)
        parts = {f"{role} activations": size for role, size in found.kept.items()}
        copies = 0
        if s.rows < s.responses:
            copies = s.responses * (PROMPT_BYTES * s.prompt + BATCH_BYTES * s.response)
        return PhaseMemory({**parts, "logits and work": found.peak - sum(found.kept.values()), "batch": copies})

    def asking(self) -> PhaseMemory:
        """What a reference says of answers: its weights are there for that time alone."""
        s = self.setup
        other, read = s.reference or s.policy, s.micro(s.rows)
        found = self.tried("asking the reference", lambda: passes.scoring(other, s.switches(value=False), read))
        copied = s.adapter is None or s.reference is not None
        return PhaseMemory({"reference": WEIGHT * count_parameters(other).total if copied else 0, "passes": found.peak})

    def sampling(self) -> PhaseMemory:
        s = self.setup
        phases = [self._drawing(s.responses // s.samples, s.samples)]
        if s.evaluated > s.responses // s.samples:  # else it takes no more than sampling for training
            phases.append(self._drawing(s.evaluated, 1))
        found = max(phases, key=lambda phase: phase.total)
        return PhaseMemory({**found.parts, "earlier rounds": s.held}) if s.held else found

    def _drawing(self, prompts: int, samples: int) -> PhaseMemory:
        s = self.setup
        read = self.tried("sampling", lambda: passes.prompt_reading(s.policy, prompts, s.prompt, s.adapter))
        last = self.tried(
            "sampling", lambda: passes.decoding(s.policy, prompts, samples, s.prompt, s.max_tokens, s.temperature, s.adapter)
        )
        rows = prompts * samples * (PROMPT_BYTES * s.prompt + SAMPLE_BYTES * s.max_tokens)
        if read.peak > last.peak:
            return PhaseMemory({"reading prompts": read.peak, "batch": rows})
        return PhaseMemory({**last.kept, "logits and work": last.peak - sum(last.kept.values()), "batch": rows})

    def scoring(self) -> PhaseMemory:
        s = self.setup
        read = s.micro(max(s.responses, s.evaluated))
        found = [self.tried("scoring", lambda: passes.scoring(s.policy, s.switches(), read)).peak]
        if s.reference is not None and s.reference is not s.policy:
            other = s.reference
            found.append(self.tried("scoring", lambda: passes.scoring(other, s.switches(value=False), read)).peak)
        texts = BatchShape(min(max(s.responses, s.evaluated), max(1, BATCH_TOKENS // s.width)), s.width, 0)
        for config in s.rewards:
            found.append(self.tried("scoring", lambda config=config: passes.reward_scoring(config, texts)).peak)
        for adapter in s.reward_adapters:
            count = partial(passes.reward_scoring, s.policy, texts, adapter)
            found.append(self.tried("scoring", count).peak)
        return PhaseMemory({"passes": max(found), "batch": self.rollout, **({"earlier rounds": s.held} if s.held else {})})

    def evaluating(self) -> PhaseMemory:
        s = self.setup
        read = s.micro(min(s.rows, s.evaluated))
        if s.kind == "reward":
            found = self.tried("evaluating", lambda: passes.reward_scoring(s.policy, read, s.adapter))
        else:
            found = self.tried("evaluating", lambda: passes.scoring(s.policy, s.switches(), read))
        return PhaseMemory({"passes": found.peak})

    def watching(self) -> PhaseMemory:
        """How likely demonstrations are: as in SFT, without a critic."""
        s = self.setup
        read = s.at_once(s.demonstrated, s.rows)
        return PhaseMemory({"passes": self.tried("evaluating", lambda: passes.scoring(s.policy, self._plain, read)).peak})

    @property
    def _plain(self) -> PassOptions:
        """Of the policy as SFT has it."""
        return replace(self.setup.switches(), critic=None, head=False, value_role=False, temperature=1.0)

    def tried(self, phase: str, count: Any) -> PassMemory:
        """A pass, or 0 for a family whose layers ask for contents: then that is said, and nothing is invented."""
        try:
            found: PassMemory = count()
        except Exception:
            if phase not in self.failed:
                self.failed.append(phase)
            return PassMemory(0)
        return found


def alternatives(setup: Workload) -> Iterator[tuple[str, Workload]]:
    """Other ways to run the same, each with what to set, those first that change nothing but time."""
    if not setup.checkpointing:
        yield "gradient_checkpointing = true", replace(setup, checkpointing=True)
    learned = setup.micro(setup.rows)
    if learned.rows > (2 if setup.kind == "dpo" else 1):
        tokens = setup.width * setup.sides
        yield f"optimizer.micro_batch_tokens = {tokens}", replace(setup, micro_batch_tokens=tokens)
    if not setup.bf16:
        yield 'precision = "bfloat16"', replace(setup, bf16=True)
    if setup.value == "own":
        started = "" if setup.critic is None else ' and critic.start = "none"'
        yield f"critic.own_model = false{started}", replace(setup, value="head", critic=None)


def with_adapters(setup: Workload, adapter: "AdapterSettings") -> Workload:
    """The same with every role as an adapter of the policy's model, which is the reference with them off."""
    alone = None if setup.kind == "language" else setup.reference
    rewards = (adapter,) * len(setup.rewards)
    return replace(setup, adapter=adapter, critic=None, reference=alone, rewards=(), reward_adapters=rewards)


def with_prompts(setup: Workload, prompts: int) -> Workload:
    """The same with so many prompts an iteration, and no more held-out rows than that."""
    rows = max(1, setup.rows * prompts * setup.samples // setup.responses)
    return replace(setup, responses=prompts * setup.samples, rows=rows, evaluated=min(setup.evaluated, prompts))


def _reward_size(model: ParameterCounts) -> int:
    return model.trunk + model.width + 1
