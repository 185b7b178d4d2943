"""The sections of a recipe: frozen tables, each field with its range and its meaning."""

import math
import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import ConfigDict, Field

from surefoot.core.algorithms import MAX_COUNT, MAX_LENGTH
from surefoot.core.seeding import MAX_SEED

# Bounds above are far beyond any use: they are where a slip of the keyboard ends, before memory or a lifetime does.
Steps = Annotated[int, Field(ge=1, le=1_000_000_000_000_000)]
"""of a budget, or between two of the same thing"""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""of things that are there, or done, one after the other"""
Size = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
"""of a batch: steps, rows or tokens"""
Width = Annotated[int, Field(ge=1, le=16_384)]
"""of a layer"""
Cores = Annotated[int, Field(ge=1, le=1_024)]
"""threads or processes on one machine"""
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""that something may take"""


class Section(pydantic.BaseModel):
    """A frozen table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Network(Section):
    """The policy network of control."""

    hidden: Annotated[tuple[Width, ...], Field(max_length=100)] = (64, 64)
    """widths of the hidden layers"""
    activation: Literal["tanh", "relu"] = "tanh"
    """between the layers"""
    shared_trunk: bool = False
    """let actor and critic share all layers but the last"""
    log_std: float = 0.0
    """initial log standard deviation of Box actions"""
    lstm: Width | None = None
    """width of an LSTM behind the hidden layers, for observations that don't tell all; none: no memory"""
    custom: str | None = None
    """module:factory of a network of your own, in place of encoders and hidden layers"""


class OptimizerSettings(Section):
    """How θ moves."""

    learning_rate: float = Field(3e-4, gt=0)
    """Adam's learning rate; under TRPO the critic's, unless critic_learning_rate is set"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine fall to zero over the budget"""
    warmup: float = Field(0.0, ge=0, lt=1)
    """share of the budget over which the learning rate first rises from zero"""
    epsilon: float = Field(1e-5, gt=0)
    """Adam's epsilon"""
    max_grad_norm: float | None = Field(0.5, gt=0)
    """scale larger gradients down to this norm; TRPO's own step is bounded by its KL and not by this"""
    critic_learning_rate: float | None = Field(None, gt=0)
    """give the critic its own optimizer, with this learning rate"""
    critic_max_grad_norm: float | None = Field(0.5, gt=0)
    """gradient clip of the critic's own optimizer"""
    micro_batch: Size | None = None
    """rows per backward pass; bounds memory, changes no gradient"""
    micro_batch_tokens: Size | None = None
    """tokens of text per backward pass, padding included, in rows of like length; bounds memory, changes no gradient"""


class RolloutSettings(Section):
    """How much experience is collected before each update."""

    environments: Count = 8
    """environments stepped together"""
    steps: Count = 128
    """steps of each environment per iteration"""
    episodes: Count = 1
    """whole episodes of each environment per iteration, instead of steps, where the objective has no critic"""
    at_least: Size | None = None
    """instead of a number of episodes: whole ones until a batch has this many steps, where the objective has no critic"""
    backend: Literal["loop", "workers", "native", "envpool"] = "loop"
    """where environments run: in this process, in worker processes, or in the id's own vector environment or EnvPool's"""
    workers: Cores | None = None
    """how many processes for backend "workers"; none means one per core"""
    deadline: Seconds = 60.0
    """seconds that one step or reset of an environment may take in a worker process"""


class NormaliseSettings(Section):
    """One scale for whatever the task has: of what the network sees, by running statistics, and of what it does."""

    observations: bool = False
    """shift and scale observations by their running mean and standard deviation"""
    rewards: bool = False
    """divide rewards by the running standard deviation of the discounted return"""
    actions: bool = True
    """stretch −1 … 1 of the policy over the bounds of Box actions, where both are finite; false: actions are only clipped"""
    clip: float = Field(10.0, gt=0)
    """clip observations and rewards that were normalised at ±this"""


class EvaluationSettings(Section):
    """Periodic evaluation; the best checkpoint is kept in best/."""

    every: Steps | None = None
    """steps between evaluations; none means a tenth of the budget"""
    seed: int = Field(1_000_000, ge=0, le=MAX_SEED)
    """seed of the evaluation's episodes or samples"""
    patience: Count | None = None
    """stop after so many evaluations in a row without a better one; none trains to the end"""


class ControlEvaluation(EvaluationSettings):
    """Periodic greedy evaluation; the best agent is kept in best/."""

    episodes: int = Field(10, ge=0, le=MAX_COUNT)
    """episodes of each; 0 switches evaluation off"""


class LanguageEvaluation(EvaluationSettings):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    rows: int = Field(256, ge=0, le=MAX_LENGTH)
    """held-out rows of each, from the first on; 0 switches evaluation off"""


class OnlineEvaluation(LanguageEvaluation):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    demonstrations: str | None = None
    """file or folder of demonstrations that were never trained on: how likely the policy finds them at each evaluation tells
    what it forgets; none: not measured"""


class CheckpointSettings(Section):
    """What is saved, and when."""

    every: Steps | None = None
    """steps between checkpoints; none means a tenth of the budget"""
    keep: Count = 2
    """how many of the last are kept, besides best/"""


class TraceSettings(Section):
    """Traces: every number behind an update, for a few steps or tokens, in traces/."""

    every: Steps | None = None
    """steps between traces, of which the first iteration has one; none means a tenth of the budget"""
    rows: int = Field(2, ge=0, le=MAX_COUNT)
    """responses, or episodes (the longest piece in the batch, of one environment each), per trace; 0 switches traces off"""
    max_megabytes: float = Field(64.0, gt=0, le=MAX_LENGTH)
    """what all traces of a run may take on the disk, in 10⁶ bytes; the oldest make room"""


class DemonstrationTraces(TraceSettings):
    """Traces: every number behind an update, for a few rows, in traces/; off unless asked for."""

    rows: int = Field(0, ge=0, le=MAX_COUNT)
    """rows per trace; 0 switches traces off"""


class LanguageOptimizer(OptimizerSettings):
    """How θ moves, from where a pretrained model stands."""

    learning_rate: float = Field(1e-5, gt=0)
    """Adam's learning rate: 1e-6 to 1e-5 for pretrained models, more for small ones from scratch"""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """scale larger gradients down to this norm"""


class AdapterSettings(Section):
    """Train adapters (LoRA) beside frozen weights, and not the weights themselves; needs the extra ``adapters``."""

    rank: Width = 16
    """r of the two matrices beside each adapted layer"""
    alpha: float = Field(32.0, gt=0)
    """what they add is multiplied by alpha / rank"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """share of their inputs that is dropped while learning; 0 for online runs, where it would change the policy"""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """layers that get one, by the ends of their names such as ["q_proj", "v_proj"], experts such as ["experts.gate_up_proj"]
    among them; all-linear: all linear ones of the trunk, which fused experts are not"""
    merge: bool = True
    """leave the merged model in model/ as well; false: adapter/ alone"""


class DataSettings(Section):
    """Rows to learn from: JSONL, Parquet, or a saved ``datasets`` folder."""

    train: str
    """file or folder of the training rows"""
    held_out: str | None = None
    """file or folder of rows that are never trained on, for evaluation; none: evaluation is off"""
    max_length: int = Field(1024, ge=2, le=MAX_LENGTH)
    """tokens of a row at most; longer rows are dropped and counted"""
    batch: Count = 64
    """rows per update"""


class PromptSettings(Section):
    """Prompts to answer: JSONL, Parquet, or a saved ``datasets`` folder. Other columns of a row go to the reward."""

    train: str
    """file or folder of the training prompts"""
    held_out: str | None = None
    """file or folder of prompts that are never trained on, for evaluation; none: evaluation is off"""
    max_length: Size = 1024
    """tokens of a prompt at most; longer prompts are dropped and counted"""


class SamplingSettings(Section):
    """How responses are sampled, each iteration."""

    prompts: Count = 64
    """prompts per iteration"""
    samples: Count = 1
    """responses to each prompt"""
    rounds: Count = 1
    """replace prompts whose responses all earn the same by further ones, in at most so many rounds (DAPO's dynamic sampling); 1
    keeps what was sampled"""
    max_tokens: Count = 64
    """tokens of a response at most, EOS included"""
    temperature: float = Field(1.0, gt=0)
    """divides logits: in sampling, and in every log-probability alike"""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """texts that end a response, besides EOS; they are no part of the text that rewards and environments get"""
    old_log_probs: Literal["trainer", "sampler"] = "trainer"
    """whose log π_old ratios are formed with: scored again by what is trained, or as the sampler had it when it drew"""


class TurnSettings(Section):
    """Conversations: an environment answers what the model writes, and the model goes on."""

    environment: str | None = None
    """module:Class or file.py:Class: an object of it answers in each conversation; none: a response is one turn"""
    arguments: dict[str, Any] = {}
    """what the class is called with, by name, such as { patience = 3 }"""
    max_turns: int = Field(8, ge=1, le=1_000)
    """turns of the model in a conversation at most; each has sampling.max_tokens"""
    max_length: int | None = Field(None, ge=2, le=MAX_LENGTH)
    """tokens of a conversation at most, its prompt and what others say included; a turn begins only where all of
    sampling.max_tokens still fits; none: the model's context"""


class RewardTerm(Section):
    """One part of the reward: a model's score, a function's or a server's."""

    model: str | None = None
    """folder of a reward model"""
    function: str | None = None
    """module:function or file.py:function: prompts, responses and columns in, floats out"""
    url: str | None = None
    """address of a server that does what a function does: JSON in, JSON out"""
    weight: float = 1.0
    """what it is multiplied by in the sum"""
    per: Literal["response", "token", "step"] | None = None
    """what a score is for; none: what the function's attribute ``per`` says, else response"""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """text that steps end with, which get a score each; none: the function says itself where they end"""
    arguments: dict[str, Any] = {}
    """a function's other arguments, by name, such as { tolerance = 0.01 }; a server gets them with every request"""
    batch: Count = 64
    """responses per request to a server"""
    token_from: str | None = None
    """environment variable with the token of the header Authorization; its value is never written"""
    retries: int = Field(5, ge=0, le=100)
    """further tries of a request, at growing intervals, where a server is down or busy"""


def term_complaint(term: Any) -> str:
    """What is wrong with a term, to be put behind the name of its place: ``.weight=nan: …`` or ``: …``; "" where nothing is."""
    kinds = [name for name in ("model", "function", "url") if getattr(term, name) is not None]
    if len(kinds) != 1:
        has = " and ".join(kinds) if kinds else "neither model, function nor url"
        return f": has {has}; give one of model, function and url, and a term for each"
    if not math.isfinite(term.weight):
        return f".weight={term.weight}: must be a finite number"
    if term.model is not None and term.arguments:
        return f".arguments={dict(term.arguments)}: arguments are for functions; a model takes none"
    if term.url is None:
        for name in ("batch", "token_from", "retries"):
            if getattr(term, name) != RewardTerm.model_fields[name].default:
                return f".{name}: is for a url; unset it"
    if term.token_from is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", term.token_from):
        return (
            ".token_from: must be the name of an environment variable, in capitals, such as REWARD_TOKEN, and never the token"
        )
    if term.separator is not None and term.per not in ("step", None):
        return f".separator={term.separator!r}: is for steps; set per = 'step'"
    if term.model is not None and term.per == "token":
        return ".per='token': a model has tokens of its own; set per = 'step' and a separator"
    if term.model is not None and (term.per == "step") != (term.separator is not None):
        return f".per={term.per!r}: a model's steps need both per = 'step' and a separator, such as '\\n'"
    return ""


class RewardSettings(Section):
    """What a response earns: at its last token, or at each of its steps or tokens."""

    terms: tuple[RewardTerm, ...] = ()
    """the parts of the reward, which are added up; may be empty where an environment rewards turns"""
    missing_eos: Literal["penalty", "subtract", "bootstrap"] | None = "penalty"
    """a response cut by the length limit, or before its environment was done: earns missing_eos_value instead (for its last
    turn), or loses that much, or what follows is bootstrapped by V; none: it is scored like any other"""
    missing_eos_value: float = -1.0
    """the penalty, or what is subtracted"""
    overlong: float | None = Field(None, gt=0, le=1)
    """soft penalty on length, in a straight line from 0 to −1 over the last tokens, this share of sampling.max_tokens (times
    turns.max_turns, where turns are taken); DAPO has 0.2; none: no penalty"""
    deadline: Seconds = 60.0
    """seconds that a reward function or a server may take for a batch, and an environment for a turn of all conversations"""
    tolerated: float = Field(0.1, ge=0, le=1)
    """share of a batch that a function or a server may leave without a finite number, or whose environment may fail; such
    responses are masked"""
    gold: str | None = None
    """module:function or file.py:function that tells the truth, where there is one; it is measured and never trained on"""


class ReferenceSettings(Section):
    """The anchor: β·KL(π_θ‖π_ref) is taken off the reward, token by token."""

    model: str | None = None
    """folder of the reference; none: the model that training starts from"""
    beta: float = Field(0.05, ge=0)
    """β; where it is adapted, that of the first iteration. 0: no anchor in the reward, the KL is still measured"""
    target: float | None = Field(None, gt=0)
    """KL per response, in nats, that β is adapted to (Ziegler et al. 2019); none: β stays"""
    horizon: Size = 10_000
    """responses over which an error of the KL moves β by its own size"""


class MixingSettings(Section):
    """Demonstrations that every update learns from beside the reward, so that less is forgotten (PPO-ptx)."""

    sft_coefficient: float = Field(0.0, ge=0)
    """weight in the loss of the mean −log π per token of demonstrations; 0: none are read"""
    demonstrations: str | None = None
    """file or folder of them, as for SFT: supervised or pretraining text"""
    batch: Count | None = None
    """rows of them per update; none: as many as a minibatch has responses"""


class AnchorSettings(Section):
    """The anchor of learning from pairs: what the model starts to move from, and what moving costs."""

    model: str | None = None
    """folder of the reference; none: the model that training starts from"""
    beta: float = Field(0.1, gt=0)
    """β: the implicit reward of an answer is β·(log π_θ − log π_ref). Larger stays closer to the reference"""


class PreferenceSettings(Section):
    """How labels of pairs are read."""

    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: the chosen answer is better with probability σ(margin of implicit rewards); ipo: the margin of log π_θ −
    log π_ref is drawn to 1/(2β), so that labels that never contradict each other don't drive it to infinity"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """assumed rate of pairs whose labels are swapped"""


class CriticSettings(Section):
    """Where V lives."""

    own_model: bool = False
    """a model of the critic's own, instead of a linear head on the policy's"""
    start: str | None = None
    """folder of the reward model that the critic's own model starts from; none: the policy's start"""
