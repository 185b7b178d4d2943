"""What the memory of a run depends on: models, batches, lengths, ranks."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from surefoot.language.memory.layout import SINGLE, Layout, ModelSize
from surefoot.language.memory.parameters import count_parameters
from surefoot.language.models.policy import positions_at_once

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.models import AdapterSettings

Kind = Literal["sft", "reward", "dpo", "language"]
Value = Literal["none", "head", "own"]
PROMPT_BYTES = 9
"""per prompt token in a batch: its id (int64) and its mask"""
HELD_BYTES = 13
"""per sampled response token: its id, log-probability and mask"""


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch."""

    rows: int
    width: int
    """tokens of each row, prompt and response"""
    decisions: int
    """tokens of each row whose log-probability is computed"""

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.width


@dataclass(frozen=True)
class Workload:
    """Everything that determines how much memory a run needs."""

    kind: Kind
    policy: "PreTrainedConfig"
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

    @property
    def quantize(self) -> Literal["int8", "nf4"] | None:
        """How the base of adapters is quantised."""
        return None if self.adapter is None else self.adapter.quantize

    @property
    def is_whole(self) -> bool:
        """Whether something can't be sharded: a base in 4 or 8 bits, or moments in 8 bits."""
        return self.quantize is not None or self.low_moments

    @property
    def chunk(self) -> int:
        """Tokens whose logits are held at once."""
        return positions_at_once(max(1, count_parameters(self.policy).vocabulary))

    @property
    def held(self) -> int:
        """Bytes of earlier sampling rounds, kept until enough groups have a signal."""
        return (self.rounds - 1) * self.responses * (PROMPT_BYTES * self.prompt + HELD_BYTES * self.max_tokens)

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

    def micro(self, rows: int) -> BatchShape:
        """The micro-batch for this many rows of full length; in DPO of each side."""
        shape = BatchShape(rows, self.width, 0 if self.kind == "reward" else self.response)
        return self.at_once(shape, self.sides)

    def at_once(self, shape: BatchShape, sides: int = 1) -> BatchShape:
        """As many of these rows as are in a micro-batch."""
        rows = min(shape.rows, self.micro_batch or shape.rows)
        if self.micro_batch_tokens is not None:
            rows = min(rows, max(1, self.micro_batch_tokens // max(1, shape.width * sides)))
        return replace(shape, rows=rows)


def can_quantise(workload: Workload) -> bool:
    """Whether the workload has a base that is whole, with linear layers."""
    return workload.adapter is not None and not workload.layout.sharded and bool(count_parameters(workload.policy).linear)


def with_adapters(workload: Workload, adapter: "AdapterSettings") -> Workload:
    """A workload with every role an adapter of the policy's model; the reference is the model without adapters."""
    alone = None if workload.kind == "language" else workload.reference
    of_rewards = (adapter,) * len(workload.rewards)
    return replace(workload, adapter=adapter, critic=None, reference=alone, rewards=(), reward_adapters=of_rewards)


def with_quantised_base(workload: Workload, kind: Literal["int8", "nf4"]) -> Workload:
    """A workload of adapters on a base in 4 or 8 bits."""
    assert workload.adapter is not None
    return replace(workload, adapter=workload.adapter.model_copy(update={"quantize": kind}))


def with_prompts(workload: Workload, prompts: int) -> Workload:
    """A workload with this many prompts per iteration, and at most as many held-out rows."""
    rows = max(1, workload.rows * prompts * workload.samples // workload.responses)
    return replace(workload, responses=prompts * workload.samples, rows=rows, evaluated=min(workload.evaluated, prompts))


def with_ranks(workload: Workload, ranks: int) -> Workload:
    """A workload on this many ranks that share the models."""
    return replace(workload, layout=replace(workload.layout, ranks=ranks, sharding=workload.layout.sharding or "full"))


def model_size(config: "PreTrainedConfig", head: bool = True, trained: float = 1.0) -> ModelSize:
    """The size of a model with or without its head for logits."""
    counts = count_parameters(config)
    return ModelSize(counts.layers, counts.depth, (counts.total if head else counts.trunk) - counts.layers, trained)
