"""The memory of a run's passes, by arithmetic on a model's configuration.

A layer keeps for the backward pass what its operations need there: the inputs of its matrices, what its norms normalised, the
queries, keys and values, the two factors of a gated feed-forward. The counts below are those of the operations of
``transformers`` in PyTorch on a CPU, per token, for the families in ``KNOWN``. Others are read as a Llama.
"""

from typing import TYPE_CHECKING

from surefoot.language.memory.parameters import count_parameters
from surefoot.language.memory.workload import BatchShape, Workload
from surefoot.language.sampling.fast_decode import PACKED_LIMIT, READERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KNOWN = ("gemma2", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""families whose counts were compared with measurements or with what autograd keeps"""
FLOAT = 4
"""bytes of a float32"""
LOGITS, LOGITS_IN_CHUNKS, DRAWN = 5, 3, 20
"""float32 numbers per logit at once in a pass, and in one whose logits come in chunks; bytes per logit when tokens are drawn"""
WORK = "logits and work"
"""the most that is needed besides what a pass keeps for the backward pass or the next token"""


class Model:
    """The sizes of a model that its passes depend on, and how they compute.

    config   names of sizes differ between families
    s        the run: precision, and the adapters that are trained on frozen weights
    """

    def __init__(self, config: "PreTrainedConfig", s: Workload) -> None:
        text = config.get_text_config()

        def first(*names: str, default: int = 0) -> int:
            return int(next((value for name in names if (value := getattr(text, name, None))), default))

        counts = count_parameters(config)
        self.kind: str = text.model_type
        self.vocabulary = counts.vocabulary
        self.width = first("hidden_size")
        """numbers of a token between layers"""
        self.heads, self.layers = first("num_attention_heads", default=1), first("num_hidden_layers", default=1)
        self.experts = first("num_local_experts", "num_experts", "n_routed_experts")
        self.chosen = first("num_experts_per_tok", default=1) if self.experts else 1
        feeds = [*["moe_intermediate_size"] * bool(self.experts), "intermediate_size", "n_inner"]
        self.feed = first(*feeds, default=4 * self.width)
        """numbers in the feed-forward of one expert"""
        size = first("head_dim", default=self.width // self.heads)
        self.queries, self.keys = self.heads * size, first("num_key_value_heads", default=self.heads) * size
        """numbers of a token's queries, and of its keys"""
        self.layer = counts.layers // self.layers
        """parameters of a layer"""
        self.in_experts = 3 * self.experts * self.width * self.feed
        """of these in experts"""
        self.bf16, self.low = s.bf16 and not s.low, s.low
        """matrix products in autocast; weights in bfloat16"""
        self.adapter = 0 if s.adapter is None else s.adapter.rank
        """rank of the trained adapters of frozen weights; 0 without"""

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


def learning(s: Workload, shape: BatchShape, sides: int = 1, critic: bool = True) -> dict[str, int]:
    """Forward and backward pass of one micro-batch, in parts.

    sides    passes that are all kept until the backward pass, as in DPO
    critic   with that of the run, if it has its own passes
    """
    model, count, check = Model(s.policy, s), shape.rows * shape.decisions, s.checkpointing
    kept = sides * (model.trunk(shape, check) + count * model.width * FLOAT)
    if count <= s.chunk:  # an earlier side keeps its log-probabilities, and its entropy is dropped
        kept += (sides - 1) * FLOAT * count * model.vocabulary
    parts, widest = {"policy activations": kept}, model
    if critic and s.value == "own":
        other = Model(s.policy if s.critic is None or s.adapter is not None else s.critic, s)
        parts["value activations"] = other.trunk(shape, check)
        widest = max(model, other, key=lambda each: each.width * each.feed)
    again = widest.kept(shape) if check else 0
    backward = again + widest.work(shape, True) + (2 * widest.layer if s.rounded and not widest.adapter else 0)
    return {**parts, WORK: max(model.logits(count, s.chunk, True), backward)}


def scoring(config: "PreTrainedConfig", s: Workload, shape: BatchShape) -> int:
    """A pass over a micro-batch without gradient: log-probabilities of policy or reference, and values with a critic."""
    model, count = Model(config, s), shape.rows * shape.decisions
    states = shape.tokens * model.width * FLOAT + count * model.width * FLOAT
    return model.layers * model.cast + states + max(model.work(shape, False), model.logits(count, s.chunk, False))


def pair_learning(s: Workload, shape: BatchShape) -> dict[str, int]:
    """Forward and backward pass of a reward model on the one or two answers of each row of a micro-batch, in parts."""
    model = Model(s.policy, s)
    kept = s.sides * model.trunk(shape, s.checkpointing, padded=True) - (s.sides - 1) * model.cast * model.layers
    again = model.kept(shape, padded=True) if s.checkpointing else 0
    return {"policy activations": kept, WORK: again + model.work(shape, True)}


def reward_scoring(config: "PreTrainedConfig", s: Workload, shape: BatchShape) -> int:
    """A reward model's scores of texts, without gradient."""
    model = Model(config, s)
    mask = shape.tokens * shape.width * (1 + model.number)
    return model.work(shape, False) + shape.tokens * model.width * FLOAT + mask


def prompt_reading(s: Workload, prompts: int) -> int:
    """Read prompts at once, and keep their keys and values."""
    model, shape = Model(s.policy, s), BatchShape(prompts, s.prompt, 0)
    cache = shape.tokens * 2 * model.keys * model.layers * model.number
    mask = shape.tokens * s.prompt * (1 + model.number)
    states = shape.tokens * model.width * FLOAT
    return cache + model.layers * model.cast + model.work(shape, False) + states + mask


def decoding(s: Workload, prompts: int, samples: int) -> dict[str, int]:
    """The last token of all responses, if none has ended: caches, packed weights, and sampling from logits.

    prompts, samples  number of prompts, and responses to each
    """
    model = Model(s.policy, s)
    weights = model.layers * model.layer
    fits = model.number == FLOAT and weights <= PACKED_LIMIT and s.quantize is None
    packed = weights if fits and model.kind in READERS else 0
    token = 2 * model.keys * model.layers * model.number
    drawn = prompts * samples * model.vocabulary * (DRAWN + (2 if model.number == 2 else 0))
    casts = model.layers * model.cast + (2 * model.vocabulary * model.width if model.bf16 else 0)
    return {
        # A GPT-2 stores matrices as they are needed: only those after norms are copied, unless adapters are merged in.
        "packed weights": FLOAT * packed * (12 if model.gated or model.adapter else 7) // 12,
        "cache": prompts * samples * (s.prompt + s.max_tokens) * token,
        WORK: casts + drawn + (prompts * s.prompt * token if packed else 0),
    }


def family_note(workload: Workload) -> str:
    """A line about families whose layers are read as those of a Llama; empty if all are known."""
    kinds = ", ".join(unknown_families(workload))
    return kinds and f"memory: layers of {kinds} are read as those of a Llama, so their activations may be other ones"


def unknown_families(workload: Workload) -> list[str]:
    """These families."""
    configs = [workload.policy, workload.critic, workload.reference, *workload.rewards]
    return sorted({kind for each in configs if each is not None and (kind := each.get_text_config().model_type) not in KNOWN})
