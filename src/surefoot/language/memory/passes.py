"""The memory of a run's passes, by arithmetic on a model's configuration.

A layer keeps for the backward pass what its operations need there: the inputs of its matrices, what its norms normalised, the
queries, keys and values, the two factors of a gated feed-forward. The counts below are those of the operations of
``transformers`` in PyTorch on a CPU, per token, for the families in ``KNOWN``. Others are read as a Llama.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surefoot.language.memory.parameters import count_parameters
from surefoot.language.sampling.fast_decode import PACKED_LIMIT, READERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from surefoot.recipes.models import AdapterSettings

KNOWN = ("gemma2", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""families whose counts were compared with measurements or with what autograd keeps"""
FLOAT = 4
"""bytes of a float32"""
LOGITS, LOGITS_IN_CHUNKS, DRAWN = 5, 3, 20
"""float32 numbers per logit at once in a pass, and in one whose logits come in chunks; bytes per logit when tokens are drawn"""


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
class PassOptions:
    """Options that change the memory of a pass through the policy."""

    critic: "PreTrainedConfig | None" = None
    """of a separate value model"""
    bf16: bool = False
    checkpointing: bool = False
    chunk: int = 2**62
    """tokens whose logits are held at once"""
    adapter: "AdapterSettings | None" = None
    """the trained adapter, if the weights are frozen"""
    value_role: bool = False
    """whether the critic is an adapter of the same base"""
    low: bool = False
    """whether the weights themselves are in bfloat16"""
    rounded: bool = False
    """whether their gradients are added to float32 ones, and dropped, as soon as they are complete"""
    quantised: bool = False
    """whether the base of the adapters is in 4 or 8 bits"""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of one pass."""

    kept: dict[str, int] = field(default_factory=dict)
    """for the backward pass or the next token, by role"""
    work: int = 0
    """the most that is needed besides"""

    @property
    def peak(self) -> int:
        """Their sum."""
        return sum(self.kept.values()) + self.work


@dataclass(frozen=True)
class Model:
    """The sizes of a model that its passes depend on, and how they compute.

    kind             the family
    width, feed      numbers of a token between layers, and in the feed-forward of one expert
    queries, keys    numbers of its queries, and of its keys
    layer            parameters of a layer, and of these in experts
    bf16, low        matrix products in autocast; weights in bfloat16
    adapter          rank of the trained adapters of frozen weights; 0 without
    """

    kind: str
    width: int
    feed: int
    queries: int
    keys: int
    heads: int
    layers: int
    vocabulary: int
    experts: int
    chosen: int
    layer: int
    in_experts: int
    bf16: bool
    low: bool
    adapter: int

    @classmethod
    def of(cls, config: "PreTrainedConfig", options: PassOptions) -> "Model":
        """From a configuration, whose names differ between families."""
        text = config.get_text_config()

        def first(*names: str, default: int = 0) -> int:
            return int(next((value for name in names if (value := getattr(text, name, None))), default))

        counts, width, heads = count_parameters(config), first("hidden_size"), first("num_attention_heads", default=1)
        layers, experts = first("num_hidden_layers", default=1), first("num_local_experts", "num_experts", "n_routed_experts")
        feed = first(*["moe_intermediate_size"] * bool(experts), "intermediate_size", "n_inner", default=4 * width)
        size = first("head_dim", default=width // heads)
        return cls(
            kind=text.model_type,
            width=width,
            feed=feed,
            queries=heads * size,
            keys=first("num_key_value_heads", default=heads) * size,
            heads=heads,
            layers=layers,
            vocabulary=counts.vocabulary,
            experts=experts,
            chosen=first("num_experts_per_tok", default=1) if experts else 1,
            layer=counts.layers // layers,
            in_experts=3 * experts * width * feed,
            bf16=options.bf16,
            low=options.low,
            adapter=0 if options.adapter is None else options.adapter.rank,
        )

    @property
    def number(self) -> int:
        """Bytes of what a matrix product returns."""
        return 2 if self.bf16 or self.low else FLOAT

    @property
    def stream(self) -> int:
        """Bytes of a number between layers."""
        return 2 if self.low else FLOAT

    @property
    def cast(self) -> int:
        """Bytes of a layer's weights that autocast keeps in bfloat16; experts multiply in float32 there."""
        return 2 * max(0, self.layer - self.in_experts) if self.bf16 else 0

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has three matrices."""
        return self.kind != "gpt2"

    def norms(self) -> int:
        """Bytes per token that a layer keeps for its norms, and of the inputs of the matrices after them."""
        if self.kind == "gpt2":
            return self.width * 2 * (self.stream + self.input(2) // 2)
        gemma = self.kind == "gemma2"
        scaled = FLOAT if gemma or not self.low else 2  # the normalised numbers, for the gradient of the norm's own weights
        each = FLOAT + (0 if self.adapter else scaled)
        of_heads = (self.queries + self.keys) * each if self.kind in ("qwen3", "qwen3_moe") else 0
        return self.width * ((4 if gemma else 2) * each + self.input(4 if self.experts else 5)) + of_heads

    def input(self, matrices: int) -> int:
        """Bytes per number of the inputs of matrices that read one of two tensors: autocast copies them for each."""
        if self.bf16:
            return 2 * matrices
        return FLOAT * matrices if self.low and self.adapter else 2 * self.number

    def kept(self, shape: BatchShape, padded: bool = False) -> int:
        """Bytes that one layer keeps for the backward pass; of ``padded`` rows also the mask, and keys as many as queries."""
        number, attention = self.number, 2 * self.queries + 2 * (self.queries if padded else self.keys)
        each = self.norms() + 16 * (FLOAT if self.experts else 1)
        if self.kind == "gemma2":  # with a soft cap of the scores, which are kept: in float32, and their softmax
            each += 4 * self.queries * number + (FLOAT + number * (2 if number == 2 else 1)) * self.heads * shape.width
        else:
            each += attention * number + FLOAT * self.heads + (number * shape.width if padded else 0)
        if self.experts:
            of_experts = self.stream
            each += self.chosen * of_experts * (4 * self.feed + 2 * self.width) + FLOAT * self.experts
        else:
            each += self.feed * number * (4 if self.gated else 5)
        if self.adapter:
            each += self.adapter * (FLOAT if not self.bf16 else 2) * (7 if self.gated else 4)
            each += (self.queries + self.feed) * (FLOAT if self.low else 0)  # copies in float32 of the other two inputs
        return shape.tokens * each + self.cast

    def work(self, shape: BatchShape, gradients: bool) -> int:
        """Bytes of one layer's pass besides: the widest of its tensors, with gradients those and the largest matrix's own."""
        wide = self.chosen * self.feed * (3 if self.gated else 2)
        attention = 3 * self.queries + 2 * self.width
        if self.kind == "gemma2":
            attention += 3 * self.heads * shape.width
        matrix = self.width * self.feed * max(1, 2 * self.experts)
        own = (FLOAT + 2 if self.bf16 else self.stream) * matrix if gradients and not self.adapter else 0
        return shape.tokens * (self.number * max(wide, attention) + self.stream * 2 * self.width) + own

    def trunk(self, shape: BatchShape, checkpointing: bool, padded: bool = False) -> int:
        """Bytes that all layers and the last norm keep."""
        layer = shape.tokens * self.width * self.stream if checkpointing else self.kept(shape, padded)
        casts = self.cast * self.layers if checkpointing else 0
        return self.layers * layer + casts + shape.tokens * (self.width * 2 * FLOAT + 16)

    def logits(self, count: int, chunk: int, gradients: bool) -> int:
        """Bytes of the logits at ``count`` tokens, their probabilities and entropy, and of the head's gradient."""
        some = min(count, chunk)
        head = self.vocabulary * self.width
        copies = head * 2 if self.bf16 else 0
        each = self.vocabulary * (FLOAT * (LOGITS if some == count else LOGITS_IN_CHUNKS) + (2 if self.number == 2 else 0))
        of_head = head * FLOAT if gradients and not self.adapter else 0
        if some < count:
            return some * each + of_head + count * self.width * FLOAT * gradients + copies + count * 48
        return max(some * each, some * 2 * FLOAT * self.vocabulary + of_head) + copies + count * 48


def learning(config: "PreTrainedConfig", options: PassOptions, shape: BatchShape, sides: int = 1) -> PassMemory:
    """Forward and backward pass of one micro-batch; ``sides`` passes that are all kept until the backward pass, as in DPO."""
    model, count, check = Model.of(config, options), shape.rows * shape.decisions, options.checkpointing
    kept = {"policy": sides * (model.trunk(shape, check) + count * model.width * FLOAT)}
    if count <= options.chunk:  # an earlier side keeps its log-probabilities, and its entropy is dropped
        kept["policy"] += (sides - 1) * FLOAT * count * model.vocabulary
    widest = model
    if options.critic is not None or options.value_role:
        critic = Model.of(options.critic or config, options)
        kept["value"] = critic.trunk(shape, check)
        widest = max(model, critic, key=lambda each: each.width * each.feed)
    again = widest.kept(shape) if check else 0
    backward = again + widest.work(shape, True) + (2 * widest.layer if options.rounded and not widest.adapter else 0)
    return PassMemory(kept, max(model.logits(count, options.chunk, True), backward))


def scoring(config: "PreTrainedConfig", options: PassOptions, shape: BatchShape) -> PassMemory:
    """The same rows without gradient: log-probabilities of policy or reference, and values with a critic."""
    model, count = Model.of(config, options), shape.rows * shape.decisions
    states = shape.tokens * model.width * FLOAT + count * model.width * FLOAT
    work = max(model.work(shape, False), model.logits(count, options.chunk, False))
    return PassMemory({}, model.layers * model.cast + states + work)


def pair_learning(config: "PreTrainedConfig", options: PassOptions, shape: BatchShape, sides: int) -> PassMemory:
    """Forward and backward pass of a reward model on the one or two answers of each row of a micro-batch."""
    model = Model.of(config, options)
    kept = sides * model.trunk(shape, options.checkpointing, padded=True) - (sides - 1) * model.cast * model.layers
    again = model.kept(shape, padded=True) if options.checkpointing else 0
    return PassMemory({"policy": kept}, again + model.work(shape, True))


def reward_scoring(config: "PreTrainedConfig", options: PassOptions, shape: BatchShape) -> PassMemory:
    """A reward model's scores of texts, without gradient."""
    model = Model.of(config, options)
    mask = shape.tokens * shape.width * (1 + model.number)
    return PassMemory({}, model.work(shape, False) + shape.tokens * model.width * FLOAT + mask)


def prompt_reading(config: "PreTrainedConfig", options: PassOptions, prompts: int, length: int) -> PassMemory:
    """Read all prompts of a batch at once, and keep their keys and values."""
    model, shape = Model.of(config, options), BatchShape(prompts, length, 0)
    cache = shape.tokens * 2 * model.keys * model.layers * model.number
    mask = shape.tokens * length * (1 + model.number)
    states = shape.tokens * model.width * FLOAT
    return PassMemory({"cache": cache}, model.layers * model.cast + model.work(shape, False) + states + mask)


def decoding(
    config: "PreTrainedConfig", options: PassOptions, prompts: int, samples: int, length: int, more: int
) -> PassMemory:
    """The last token of all responses, if none has ended: caches, packed weights, and sampling from logits.

    prompts, samples  number of prompts, and responses to each
    length, more      tokens of the longest prompt and of a response
    """
    model = Model.of(config, options)
    weights = model.layers * model.layer
    fits = model.number == FLOAT and weights <= PACKED_LIMIT and not options.quantised
    packed = weights if fits and model.kind in READERS else 0
    of_prompts = prompts * length * 2 * model.keys * model.layers * model.number
    # Of a GPT-2, which stores matrices as they are needed, only those after norms are copied, unless adapters are merged in.
    kept = {"packed weights": FLOAT * packed * (12 if model.gated or model.adapter else 7) // 12}
    kept["cache"] = prompts * samples * (length + more) * 2 * model.keys * model.layers * model.number
    drawn = prompts * samples * model.vocabulary * (DRAWN + (2 if model.number == 2 else 0))
    casts = model.layers * model.cast + (2 * model.vocabulary * model.width if model.bf16 else 0)
    return PassMemory(kept, casts + drawn + (of_prompts if packed else 0))
