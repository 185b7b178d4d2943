"""Types of the keyword arguments of ``surefoot.train``, for editors and type checkers.

Written by docs/generate.py from the recipes; change the fields of the recipes instead.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from surefoot.core.algorithms import Clip, ClippedWeight, Constraint, Objective, Penalty, Reuse
from surefoot.recipes.base import CheckpointSettings, OptimizerSettings, TraceSettings, TrackingSettings
from surefoot.recipes.control import ClipPreferences, Cloning, ControlEvaluation, Network, NormaliseSettings, RolloutSettings
from surefoot.recipes.language import CriticSettings, MixingSettings, OnlineEvaluation, ReferenceSettings, SamplingSettings, ServerSettings, TurnSettings
from surefoot.recipes.models import AdapterSettings, LanguageEvaluation, LanguageOptimizer
from surefoot.recipes.rewards import JudgeSettings, RewardSettings, RewardTerm
from surefoot.recipes.rows import DataSettings, PromptSettings
from surefoot.recipes.supervised import DpoReferenceSettings, PreferenceSettings, RewardPreferenceSettings, SupervisedTraces
from typing import Any, Literal, TypedDict

AgentTask = Literal["Acrobot-v1", "CartPole-v1", "HalfCheetah-v5", "Hopper-v5", "InvertedDoublePendulum-v5", "InvertedPendulum-v5", "LunarLander-v3", "MountainCarContinuous-v0", "Pendulum-v1", "Reacher-v5", "Swimmer-v5", "Walker2d-v5", "acrobot", "atari", "cartpole", "lunar_lander", "mountain_car_continuous", "mujoco", "pendulum", "people_cheetah", "swimmer", "tensor/Acrobot-v1", "tensor/CartPole-v1", "tensor/MountainCar-v0", "tensor/Pendulum-v1", "tensor_acrobot", "tensor_cartpole", "tensor_mountain_car", "tensor_pendulum"]
"""environment ids that a preset is tuned for"""
ModelTask = Literal["addition", "calculator", "calculator_sft", "dpo", "guess", "guess_sft", "language", "reviews", "reviews_sft", "sft", "sorting", "task_sft"]
"""presets that train a language model"""
RewardModelTask = Literal["reviews_people", "reviews_reward", "reward"]
"""presets that train a reward model"""

class ReuseTable(TypedDict, total=False):
    """The fields of ``Reuse``."""
    epochs: int
    minibatches: int

class ClipTable(TypedDict, total=False):
    """The fields of ``Clip``."""
    clip: float
    clip_high: float | None
    dual_clip: float | None
    schedule: Callable[..., Any] | Literal["constant", "linear"] | str

class PenaltyTable(TypedDict, total=False):
    """The fields of ``Penalty``."""
    beta: float
    target: float | None
    fraction: float

class ConstraintTable(TypedDict, total=False):
    """The fields of ``Constraint``."""
    delta: float
    damping: float
    cg_iterations: int
    shrink: float
    tries: int

class ClippedWeightTable(TypedDict, total=False):
    """The fields of ``ClippedWeight``."""
    max_weight: float

class ObjectiveTable(TypedDict, total=False):
    """The fields of ``Objective``."""
    baseline: Literal["mean", "group", "leave_one_out", "pair", "critic"] | None
    pair_beta: float
    scale_by_group: bool
    gae_lambda: float
    reuse: ReuseTable | Reuse | None
    trust_region: ClipTable | Clip | PenaltyTable | Penalty | ConstraintTable | Constraint | ClippedWeightTable | ClippedWeight | None
    ratio: Literal["token", "sequence"]
    drop_above_kl: float | None
    importance_cap: float | None
    importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
    gamma: float
    value_lambda: float | None
    normalise_advantages: Literal["minibatch", "batch"] | None
    value_coefficient: float
    value_clip: float | None
    entropy_coefficient: float
    target_kl: float | None
    kl_estimator: Literal["k3", "exact"]
    reference_coefficient: float
    reference_estimator: Literal["k1", "k2", "k3", "ratio_k3"]
    router_coefficient: float
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum", "constant"]
    aggregation_length: int | None

class OptimizerSettingsTable(TypedDict, total=False):
    """The fields of ``OptimizerSettings``."""
    kind: Literal["adam", "rmsprop"]
    learning_rate: float
    schedule: Callable[..., Any] | Literal["constant", "linear", "cosine", "adaptive"] | str
    kl_target: float
    warmup: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float | None
    critic_learning_rate: float | None
    critic_max_grad_norm: float | None
    micro_batch: int | None
    micro_batch_tokens: int | None

class ControlEvaluationTable(TypedDict, total=False):
    """The fields of ``ControlEvaluation``."""
    every: int | None
    seed: int
    patience: int | None
    episodes: int

class CheckpointSettingsTable(TypedDict, total=False):
    """The fields of ``CheckpointSettings``."""
    every: int | None
    keep: int

class TraceSettingsTable(TypedDict, total=False):
    """The fields of ``TraceSettings``."""
    every: int | None
    rows: int
    max_megabytes: float

class TrackingSettingsTable(TypedDict, total=False):
    """The fields of ``TrackingSettings``."""
    project: str
    group: str | None
    name: str | None
    tags: Sequence[str]

class RolloutSettingsTable(TypedDict, total=False):
    """The fields of ``RolloutSettings``."""
    environments: int
    steps: int
    episodes: int
    at_least: int | None
    backend: Literal["loop", "workers", "native", "envpool"]
    workers: int | None
    deadline: float
    info: Sequence[str] | None
    symmetry: str | None

class NetworkTable(TypedDict, total=False):
    """The fields of ``Network``."""
    hidden: Sequence[int]
    activation: Literal["tanh", "relu"]
    shared_trunk: bool
    log_std: float
    lstm: int | None
    custom: Callable[..., Any] | str | None
    actor_parts: Sequence[str] | None
    critic_parts: Sequence[str] | None

class NormaliseSettingsTable(TypedDict, total=False):
    """The fields of ``NormaliseSettings``."""
    observations: bool | Sequence[str]
    rewards: bool
    actions: bool
    clip: float

class ClipPreferencesTable(TypedDict, total=False):
    """The fields of ``ClipPreferences``."""
    judge: Literal["return", "people"]
    labels: int
    segment: int
    first: float
    refits: int
    until: float
    weight_decay: float
    errors: float
    terminations: Literal["reject", "keep"]

class CloningTable(TypedDict, total=False):
    """The fields of ``Cloning``."""
    data: str | Iterable[Mapping[str, Any]] | str
    batch: int

class LanguageOptimizerTable(TypedDict, total=False):
    """The fields of ``LanguageOptimizer``."""
    kind: Literal["adam", "adam-8bit", "rmsprop"]
    learning_rate: float
    schedule: Callable[..., Any] | Literal["constant", "linear", "cosine", "adaptive"] | str
    kl_target: float
    warmup: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float | None
    critic_learning_rate: float | None
    critic_max_grad_norm: float | None
    micro_batch: int | None
    micro_batch_tokens: int | None

class LanguageEvaluationTable(TypedDict, total=False):
    """The fields of ``LanguageEvaluation``."""
    every: int | None
    seed: int
    patience: int | None
    rows: int

class SupervisedTracesTable(TypedDict, total=False):
    """The fields of ``SupervisedTraces``."""
    every: int | None
    rows: int
    max_megabytes: float

class AdapterSettingsTable(TypedDict, total=False):
    """The fields of ``AdapterSettings``."""
    rank: int
    alpha: float
    dropout: float
    targets: Literal["all-linear"] | Sequence[str]
    quantize: Literal["int8", "nf4"] | None
    merge: bool

class DataSettingsTable(TypedDict, total=False):
    """The fields of ``DataSettings``."""
    columns: Mapping[str, str]
    control_tokens: Literal["split", "keep", "reject"]
    answers: Literal["template", "row"]
    train: Iterable[Mapping[str, Any]] | str
    held_out: Iterable[Mapping[str, Any]] | str | None
    max_length: int
    batch: int

class RewardPreferenceSettingsTable(TypedDict, total=False):
    """The fields of ``RewardPreferenceSettings``."""
    loss: Literal["bradley_terry", "binary", "steps"]
    separator: str

class DpoReferenceSettingsTable(TypedDict, total=False):
    """The fields of ``DpoReferenceSettings``."""
    model: str | None
    beta: float

class PreferenceSettingsTable(TypedDict, total=False):
    """The fields of ``PreferenceSettings``."""
    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"]
    label_smoothing: float
    margin: float
    desirable_weight: float
    undesirable_weight: float

class OnlineEvaluationTable(TypedDict, total=False):
    """The fields of ``OnlineEvaluation``."""
    every: int | None
    seed: int
    patience: int | None
    rows: int
    demonstrations: Iterable[Mapping[str, Any]] | str | None

class PromptSettingsTable(TypedDict, total=False):
    """The fields of ``PromptSettings``."""
    columns: Mapping[str, str]
    control_tokens: Literal["split", "keep", "reject"]
    answers: Literal["template", "row"]
    train: Iterable[Mapping[str, Any]] | str
    held_out: Iterable[Mapping[str, Any]] | str | None
    max_length: int

class SamplingSettingsTable(TypedDict, total=False):
    """The fields of ``SamplingSettings``."""
    prompts: int
    samples: int
    rounds: int
    max_tokens: int
    temperature: float
    stop: Sequence[str]
    old_log_probs: Literal["auto", "trainer", "sampler", "update"]
    engine: Literal["auto", "packed", "model", "continuous", "vllm"]
    rows: int | None
    ahead: int

class ServerSettingsTable(TypedDict, total=False):
    """The fields of ``ServerSettings``."""
    url: str
    model: str
    weights: str | None
    token_from: str | None
    at_once: int
    timeout: float
    retries: int
    tolerance: float

class TurnSettingsTable(TypedDict, total=False):
    """The fields of ``TurnSettings``."""
    environment: str | None
    tools: Sequence[str]
    response_template: str | Mapping[str, Any] | None
    tool_deadline: float
    max_calls: int
    tolerated: float
    arguments: Mapping[str, Any]
    at_once: int
    max_turns: int
    max_length: int | None

class JudgeSettingsTable(TypedDict, total=False):
    """The fields of ``JudgeSettings``."""
    model: str
    prompt: str
    pattern: str | None
    key: str | None
    against: str | None
    in_flight: int

class RewardTermTable(TypedDict, total=False):
    """The fields of ``RewardTerm``."""
    model: str | None
    label: str | None
    function: Callable[..., Any] | str | None
    url: str | None
    judge: JudgeSettingsTable | JudgeSettings | None
    weight: float
    per: Literal["response", "token", "step"] | None
    separator: str | None
    arguments: Mapping[str, Any]
    batch: int
    at_once: int
    token_from: str | None
    retries: int

class RewardSettingsTable(TypedDict, total=False):
    """The fields of ``RewardSettings``."""
    terms: Sequence[RewardTermTable | RewardTerm]
    missing_eos: Literal["penalty", "subtract", "bootstrap"] | None
    missing_eos_value: float
    overlong: float | None
    deadline: float
    tolerated: float
    special_tokens: bool
    gold: Callable[..., Any] | str | None

class ReferenceSettingsTable(TypedDict, total=False):
    """The fields of ``ReferenceSettings``."""
    model: str | None
    beta: float
    measure: bool
    target: float | None
    horizon: int

class CriticSettingsTable(TypedDict, total=False):
    """The fields of ``CriticSettings``."""
    own_model: bool
    start: str | None
    label: str | None

class MixingSettingsTable(TypedDict, total=False):
    """The fields of ``MixingSettings``."""
    sft_coefficient: float
    demonstrations: Iterable[Mapping[str, Any]] | str | None
    batch: int | None

class ControlArguments(TypedDict, total=False):
    """The fields of a recipe of kind "control"."""
    steps: int
    seed: int
    device: str
    threads: int
    tf32: bool
    deterministic: bool
    engine: Literal["eager", "compiled", "auto"]
    objective: ObjectiveTable | Objective
    optimizer: OptimizerSettingsTable | OptimizerSettings
    evaluation: ControlEvaluationTable | ControlEvaluation
    checkpoint: CheckpointSettingsTable | CheckpointSettings
    traces: TraceSettingsTable | TraceSettings
    fingerprints: bool
    trackers: Sequence[Literal["tensorboard", "wandb", "trackio"]]
    tracking: TrackingSettingsTable | TrackingSettings
    environment: Mapping[str, Any]
    start: Any
    rollout: RolloutSettingsTable | RolloutSettings
    network: NetworkTable | Network
    normalise: NormaliseSettingsTable | NormaliseSettings
    preferences: ClipPreferencesTable | ClipPreferences | None
    cloning: CloningTable | Cloning | None

class Arguments(TypedDict, total=False):
    """The fields of recipes of all kinds."""
    steps: int
    seed: int
    device: str
    threads: int
    tf32: bool
    deterministic: bool
    engine: Literal["eager", "compiled", "auto"]
    objective: ObjectiveTable | Objective
    optimizer: OptimizerSettingsTable | OptimizerSettings | LanguageOptimizerTable | LanguageOptimizer
    evaluation: ControlEvaluationTable | ControlEvaluation | LanguageEvaluationTable | LanguageEvaluation | OnlineEvaluationTable | OnlineEvaluation
    checkpoint: CheckpointSettingsTable | CheckpointSettings
    traces: TraceSettingsTable | TraceSettings | SupervisedTracesTable | SupervisedTraces
    fingerprints: bool
    trackers: Sequence[Literal["tensorboard", "wandb", "trackio"]]
    tracking: TrackingSettingsTable | TrackingSettings
    environment: Mapping[str, Any]
    start: Any
    rollout: RolloutSettingsTable | RolloutSettings
    network: NetworkTable | Network
    normalise: NormaliseSettingsTable | NormaliseSettings
    preferences: ClipPreferencesTable | ClipPreferences | None
    cloning: CloningTable | Cloning | None
    model: str
    trust_remote_code: bool
    precision: Literal["float32", "bfloat16", "bfloat16-weights"]
    gradient_checkpointing: bool
    padding_free: bool
    sharding: Literal["full", "hybrid"] | None
    reshard_after_forward: bool
    offload: bool | Sequence[Literal["reference", "reward", "critic"]]
    check_memory: bool
    adapter: AdapterSettingsTable | AdapterSettings | None
    data: str | Iterable[Mapping[str, Any]] | DataSettingsTable | DataSettings | PromptSettingsTable | PromptSettings
    demonstrations: Iterable[Mapping[str, Any]] | str | None
    preference: RewardPreferenceSettingsTable | RewardPreferenceSettings | PreferenceSettingsTable | PreferenceSettings
    head: Literal["last", "pooled"]
    reference: DpoReferenceSettingsTable | DpoReferenceSettings | ReferenceSettingsTable | ReferenceSettings
    sampling: SamplingSettingsTable | SamplingSettings
    server: ServerSettingsTable | ServerSettings | None
    turns: TurnSettingsTable | TurnSettings
    reward: RewardSettingsTable | RewardSettings | Callable[..., Any] | Sequence[RewardTermTable | RewardTerm | Callable[..., Any]]
    critic: CriticSettingsTable | CriticSettings
    mixing: MixingSettingsTable | MixingSettings
