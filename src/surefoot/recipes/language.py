"""Recipes of language models (SFT, reward models, DPO, online training) and the checks of their fields."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic
from pydantic import Field

from surefoot.core.algorithms import MAX_COUNT, MAX_LENGTH, Objective
from surefoot.errors import SurefootError
from surefoot.files import BOOLEAN_WORDS
from surefoot.recipes.base import (
    Count,
    EvaluationSettings,
    OptimizerSettings,
    Recipe,
    Seconds,
    Section,
    Size,
    TraceSettings,
    Width,
    check_iteration_size,
    check_shares,
    names_in,
    nearest_divisor,
)
from surefoot.recipes.callables import GOLD, term_field


class LanguageEvaluation(EvaluationSettings):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    rows: int = Field(256, ge=0, le=MAX_LENGTH)
    """held-out rows per evaluation, from the first row; 0: no evaluation"""


class OnlineEvaluation(LanguageEvaluation):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    demonstrations: str | None = None
    """file or folder of demonstrations that are not trained on; their likelihood at each evaluation shows what the policy
    forgets; none: not measured"""


class SupervisedTraces(TraceSettings):
    """Traces: every number behind an update, for a few rows, in traces/; off by default."""

    rows: int = Field(0, ge=0, le=MAX_COUNT)
    """rows per trace; 0: no traces"""


class LanguageOptimizer(OptimizerSettings):
    """Adam, with defaults for pretrained models."""

    kind: Literal["adam", "adam-8bit", "rmsprop"] = "adam"  # type: ignore[assignment]
    """adam-8bit: moments in 8 bits, 2 bytes per trained parameter instead of 8; needs the extra ``quantized``. rmsprop is the
    optimizer of the original A2C"""
    learning_rate: float = Field(1e-5, gt=0)
    """Adam's learning rate: 1e-6 to 1e-5 for pretrained models, more for small models from scratch"""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """clip gradients to this norm; none: no clipping"""


class AdapterSettings(Section):
    """Train adapters (LoRA) and keep the model's weights frozen; needs the extra ``adapters``."""

    rank: Width = 16
    """rank r of the adapter's two matrices"""
    alpha: float = Field(32.0, gt=0)
    """the adapter's output is multiplied by alpha / rank"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout on the adapters' inputs; must be 0 in online runs, where it would change the policy"""
    targets: Annotated[
        Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)],
        pydantic.BeforeValidator(lambda targets: targets if targets == "all-linear" else names_in(targets)),
    ] = "all-linear"
    """layers with adapters, by the ends of their names, such as ["q_proj", "v_proj"], or ["experts.gate_up_proj"] for fused
    experts; all-linear: all linear layers of the trunk, without fused experts"""
    quantize: Literal["int8", "nf4"] | None = None
    """hold the frozen weights of the trunk's linear layers in 8 or 4 bits (QLoRA), by bitsandbytes; needs the extra
    ``quantized``. int8: activations are rounded to 8 bits too; none: in the precision of the run"""
    convert_targets: bool = False
    """let ``peft`` convert targets from ``transformers`` 4, as runs of older versions did: in some mixtures of experts
    gate_proj, up_proj and down_proj then mean the fused experts, and dense layers of these names get no adapter"""
    merge: bool = True
    """also save the merged model in model/; false: save adapter/ only"""


def saved_adapter(table: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter of a saved recipe; those saved before ``convert_targets`` existed get true, as they were trained."""
    return {"convert_targets": True, **table}


def saved_reference(table: Mapping[str, Any]) -> dict[str, Any]:
    """The reference of a saved recipe; those saved before ``measure`` existed measured the KL always."""
    return {"measure": True, **table}


def saved_data(table: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a saved recipe; those saved before ``control_tokens`` existed keep them, as they were trained."""
    return {"control_tokens": "keep", **table}


class RowSettings(Section):
    """How rows are read."""

    columns: dict[str, str] = Field({})
    """own names of columns in train and held_out, and the names they are read by, such as { question = "prompt" }"""
    control_tokens: Literal["split", "keep", "reject"] = "split"
    """control tokens, such as EOS, in messages of the user, the system and tools. split: encoded as ordinary text; keep: as
    control tokens; reject: the run does not start if any text of a row has one"""

    @pydantic.model_validator(mode="after")
    def _check_columns(self) -> "RowSettings":
        for own, name in self.columns.items():
            if list(self.columns.values()).count(name) > 1:
                raise SurefootError(f"data.columns={self.columns}: reads several columns as {name!r}; choose one")
            if not own or not name:
                raise SurefootError(f"data.columns={self.columns}: has an empty name; name both columns")
        return self


class DataSettings(RowSettings):
    """Training rows: a file, a folder, or a data set on the hub."""

    train: str
    """training rows: a file (.jsonl, .json, .csv, .parquet, also .gz and .zst), a folder, or hf://org/name:split"""
    held_out: str | None = None
    """rows for evaluation, never trained on; none: no evaluation"""
    max_length: int = Field(1024, ge=2, le=MAX_LENGTH)
    """longest row in tokens; longer rows are dropped and counted"""
    batch: Count = 64
    """rows per update"""


class PromptSettings(RowSettings):
    """Prompts: a file, a folder, or a data set on the hub. The reward gets the other columns of a row."""

    train: str
    """training prompts: a file (.jsonl, .json, .csv, .parquet, also .gz and .zst), a folder, or hf://org/name:split"""
    held_out: str | None = None
    """prompts for evaluation, never trained on; none: no evaluation"""
    max_length: Size = 1024
    """longest prompt in tokens; longer prompts are dropped and counted"""


class SamplingSettings(Section):
    """How responses are sampled in each iteration."""

    prompts: Count = 64
    """prompts per iteration"""
    samples: Count = 1
    """responses to each prompt"""
    rounds: Count = 1
    """replace prompts whose responses all earn the same, in at most this many rounds of sampling (DAPO's dynamic sampling);
    1: keep all"""
    max_tokens: Count = 64
    """longest response in tokens, with EOS; of each turn, in conversations"""
    temperature: float = Field(1.0, gt=0)
    """divides the logits, in sampling and in all log-probabilities"""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        pydantic.BeforeValidator(lambda texts: [texts] if isinstance(texts, str) else texts),  # a text may have commas
    ] = ()
    """texts that end a response, in addition to EOS; rewards and environments get the response without them"""
    old_log_probs: Literal["auto", "trainer", "sampler", "update"] = "auto"
    """log π_old of the ratios. trainer: computed again by the trained model, in a pass of its own; sampler: kept from sampling;
    update: those of the only update on each batch, where ρ is 1, without a pass of their own. auto: update if each batch has
    one update, nothing else reads log π_old (no critic, pairs, KL in the reward or KL penalty) and the sampler's arithmetic is
    the trainer's (float32; packed or model), else trainer"""
    engine: Literal["auto", "packed", "model", "continuous", "vllm"] = "auto"
    """what samples. packed: packed weights, for small models of known families; model: the model's own forward pass;
    continuous: continuous batching of transformers; vllm: a vLLM server. auto: vllm with a [server], else packed where it
    can, else model"""
    rows: Size | None = None
    """most responses that are sampled at a time, by packed and model; limits memory, tokens stay the same. none: as many as
    fit into 40 % of the device's memory"""
    ahead: int = Field(0, ge=0, le=1)
    """iterations that a vLLM server samples ahead, while the learner uses the responses before. With 1, responses are those of
    weights that are one iteration old; objective.importance_cap corrects for that"""


class ServerSettings(Section):
    """The vLLM server of sampling.engine = "vllm"; surefoot check RECIPE prints the command that starts it."""

    url: str = "http://127.0.0.1:8000"
    """its address"""
    model: str = "policy"
    """name of the model on the server (--served-model-name)"""
    weights: str | None = None
    """folder that trainer and server read, for new weights: the size of the model, twice for a moment; none: a temporary folder
    of this machine"""
    transfer: Literal["folder", "nccl"] = "folder"
    """how new weights reach the server. nccl: from GPU to GPU, by vLLM's own transfer, which needs vLLM beside Surefoot"""
    token_from: str | None = None
    """environment variable with the token of the Authorization header; its value is never saved"""
    at_once: Count = 64
    """responses in progress at the same time"""
    timeout: Seconds = 600.0
    """seconds for all responses of a batch, and for new weights"""
    retries: int = Field(5, ge=0, le=100)
    """retries of a request, at growing intervals, while the server is down or busy"""
    tolerance: float = Field(0.05, gt=0)
    """largest mean difference between log-probabilities of server and trainer, in nats, on a probe after each update"""


class TurnSettings(Section):
    """Conversations of several turns with an environment."""

    environment: str | None = None
    """module:Class or file.py:Class; an object of it answers each turn of a conversation; none: responses are one turn"""
    arguments: dict[str, Any] = Field({})
    """keyword arguments of the class, such as { patience = 3 }"""
    at_once: Count = 64
    """environments that are called at the same time, each by one thread; 1: one after another, for those that share state"""
    max_turns: int = Field(8, ge=1, le=1_000)
    """most turns of the model in a conversation; each has sampling.max_tokens"""
    max_length: int | None = Field(None, ge=2, le=MAX_LENGTH)
    """longest conversation in tokens, with the prompt and the environment's answers. A turn starts only if
    sampling.max_tokens more fit; none: the model's context"""


JUDGE_FIELDS = ("prompt", "response", "first", "second")
"""names in a judge's prompt that are not columns"""


def placeholders(template: str) -> list[str]:
    """The names in braces in a judge's prompt."""
    return re.findall(r"\{(\w+)\}", template)


class JudgeSettings(Section):
    """How a language model judges a response."""

    model: str
    """name of the model, as the server knows it"""
    prompt: str
    """the question: {prompt}, {response} and names of columns in braces are replaced; with against, {first} and {second}"""
    pattern: str | None = None
    """regular expression whose last match in the answer, or its first group there, is the score; none: a number. With against:
    1, 2 or tie, for the better answer"""
    key: str | None = None
    """key of the score in a JSON object that the answer contains, instead of a pattern"""
    against: str | None = None
    """column with an answer to compare with, in both orders; the score is 1 for two wins, 0 for two losses"""
    in_flight: int = Field(64, ge=1, le=1024)
    """most requests at a time"""


def judge_error(judge: JudgeSettings) -> str:
    """The error in the settings of a judge, after the name of the term; "" if they are valid."""
    needed = ("response",) if judge.against is None else ("first", "second")
    missing = [name for name in needed if name not in placeholders(judge.prompt)]
    if missing:
        return f".judge.prompt: has no {{{missing[0]}}}; the judge would not see the answer"
    if judge.pattern is not None and judge.key is not None:
        return f".judge.key={judge.key!r}: replaces judge.pattern; unset one of them"
    try:
        re.compile(judge.pattern or "")
    except re.error as error:
        return f".judge.pattern={judge.pattern!r}: is no regular expression ({error}); correct it"
    return ""


class RewardTerm(Section):
    """One term of the reward: a reward model, a function or a server."""

    model: str | None = None
    """folder or hub id of a reward model: a run, or a model that AutoModelForSequenceClassification of transformers loads"""
    label: str | None = None
    """label of the model whose logit is the score; none: the only one"""
    function: str | None = None
    """module:function or file.py:function: prompts, responses and columns in, floats out; or with the signature of TRL or of
    verifiers"""
    url: str | None = None
    """address of a server that works like a function: JSON in, JSON out; or of a judge"""
    judge: JudgeSettings | None = None
    """the server at url is a language model (OpenAI's chat completions) that is asked about each response; none: a function"""
    weight: float = 1.0
    """weight in the sum"""
    per: Literal["response", "token", "step"] | None = None
    """unit that gets a score; none: the function's attribute ``per``, else response"""
    separator: str | None = None
    """text that ends each step; empty: every character is a step; none: the function returns the ends of its steps"""
    arguments: dict[str, Any] = Field({})
    """other keyword arguments of a function, such as { tolerance = 0.01 }; a server gets them with every request"""
    batch: Count = 64
    """responses per request to a server"""
    at_once: Count = 8
    """requests to a server at the same time"""
    token_from: str | None = None
    """environment variable with the token of the Authorization header; its value is never saved"""
    retries: int = Field(5, ge=0, le=100)
    """retries of a request, at growing intervals, while a server is down or busy"""


def term_from_text(text: str) -> dict[str, str]:
    """The table of a term that is a text: the URL of a server; with a colon, and no such folder, a function; else a model."""
    if text.startswith(("http://", "https://")):
        return {"url": text}
    return {"function": text} if ":" in text and not Path(text).expanduser().exists() else {"model": text}


def token_error(name: str) -> str:
    """The error in a ``token_from``, without its value, to append to the name of its place; "" if it is valid."""
    if re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        return ""
    return ".token_from: must be the name of an environment variable, in capitals, such as REWARD_TOKEN, not the token"


def term_error(term: Any) -> str:
    """The error in a reward term, to append to the name of its place: ``.weight=nan: …`` or ``: …``; "" if it is valid."""
    kinds = [name for name in ("model", "function", "url") if getattr(term, name) is not None]
    if len(kinds) != 1:
        has = " and ".join(kinds) if kinds else "neither model, function nor url"
        return f": has {has}; give one of model, function and url, and a term for each"
    if not math.isfinite(term.weight):
        return f".weight={term.weight}: must be a finite number"
    if term.model is not None and term.arguments:
        return f".arguments={dict(term.arguments)}: arguments are for functions, not for models; unset them"
    if term.model is None and term.label is not None:
        return f".label={term.label!r}: is for a model; unset it"
    if term.judge is not None:
        for name in ("per", "separator", "batch", "at_once"):
            if getattr(term, name) != RewardTerm.model_fields[name].default:
                return f".{name}: a judge scores whole responses, one per request, judge.in_flight at a time; unset it"
        if error := judge_error(term.judge):
            return error
    if term.url is None:
        for name in ("batch", "at_once", "token_from", "retries", "judge"):
            if getattr(term, name) != RewardTerm.model_fields[name].default:
                return f".{name}: is for a url; unset it"
    if term.token_from is not None and (error := token_error(term.token_from)):
        return error
    if term.separator is not None and term.per not in ("step", None):
        return f".separator={term.separator!r}: is for steps; set per = 'step'"
    if term.model is not None and term.per == "token":
        return ".per='token': the reward model may have other tokens than the policy; set per = 'step' and a separator"
    if term.model is not None and (term.per == "step") != (term.separator is not None):
        return f".per={term.per!r}: a model's steps need both per = 'step' and a separator, such as '\\n'"
    return ""


class RewardSettings(Section):
    """The reward of a response: at its last token, or at each of its steps or tokens."""

    terms: tuple[RewardTerm, ...] = ()
    """terms of the reward, added up; may be empty if the environment rewards turns. A text, such as file.py:function, is a term
    with only a function, a model or a URL"""
    missing_eos: Literal["penalty", "subtract", "bootstrap"] | None = "penalty"
    """for a response truncated by a length limit, or a conversation that did not end. penalty: it earns missing_eos_value
    (for its last turn) instead; subtract: it loses that much; bootstrap: V stands for the rest; none: scored like any other"""
    missing_eos_value: float = -1.0
    """the penalty, or what is subtracted"""
    overlong: float | None = Field(None, gt=0, le=1)
    """soft length penalty: falls linearly from 0 to −1 over the last tokens, this share of sampling.max_tokens (times
    turns.max_turns in conversations); DAPO uses 0.2; none: no penalty"""
    deadline: Seconds = 60.0
    """seconds that a reward function or server may take for a batch, and an environment for a turn of all conversations"""
    tolerated: float = Field(0.1, ge=0, le=1)
    """share of a batch that may get no finite reward, or whose environments may fail; these responses are masked"""
    gold: str | None = None
    """module:function or file.py:function with the true reward, if there is one; measured, never trained on"""

    @pydantic.field_validator("terms", mode="before")
    @classmethod
    def _from_texts(cls, terms: Any) -> Any:
        """Terms that are texts, alone or in a list, as tables."""
        terms = [terms] if isinstance(terms, str) else terms
        return [term_from_text(x) if isinstance(x, str) else x for x in terms] if isinstance(terms, (list, tuple)) else terms


def reward_functions(recipe: Recipe) -> dict[str, str | None]:
    """The names of a recipe's reward functions, by field; none if it is of another kind."""
    if not isinstance(recipe, LanguageRecipe):
        return {}
    terms = {term_field(place): term.function for place, term in enumerate(recipe.reward.terms)}
    return {**terms, GOLD: recipe.reward.gold}


class ReferenceSettings(Section):
    """The KL penalty in the reward, β·KL(π_θ‖π_ref), token by token."""

    model: str | None = None
    """folder of the reference; none: the model that training starts from"""
    beta: float = Field(0.05, ge=0)
    """β, at the first iteration if it is adapted; 0: no penalty"""
    measure: bool = False
    """measure the KL at β = 0 too, which takes a frozen copy of the model and a pass per batch. Otherwise a run at β = 0 has no
    reference, unless reference.model or objective.reference_coefficient is set, or objective.baseline = "pair\""""
    target: float | None = Field(None, gt=0)
    """KL per response, in nats, that β is adapted to (Ziegler et al. 2019); none: β is fixed"""
    horizon: Size = 10_000
    """responses over which a KL error of 10 % changes β by 10 %"""


class MixingSettings(Section):
    """Demonstrations in every update, against forgetting (PPO-ptx)."""

    sft_coefficient: float = Field(0.0, ge=0)
    """weight of the demonstrations' mean −log π per token in the loss; 0: no demonstrations"""
    demonstrations: str | None = None
    """file or folder of demonstrations, in the format of SFT rows: supervised or pretraining text"""
    batch: Count | None = None
    """demonstrations per update; none: as many as a minibatch has responses"""


class DpoReferenceSettings(Section):
    """The reference of DPO, IPO and KTO, and how close the model stays to it."""

    model: str | None = None
    """folder of the reference; none: the model that training starts from"""
    beta: float = Field(0.1, gt=0)
    """β. DPO, KTO: the implicit reward of an answer is β·(log π_θ − log π_ref). Larger values stay closer to the reference.
    SimPO: the scale of the margin, by default 2. ORPO: λ, the weight of the odds ratio"""


class PreferenceSettings(Section):
    """The loss of pairs, or of labelled answers."""

    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """dpo: the chosen answer is better with probability σ(margin of implicit rewards); ipo: pulls the margin of log π_θ −
    log π_ref towards 1/(2β), so consistent labels don't drive it to infinity; simpo, orpo: no reference, mean log π per token,
    and orpo also learns the chosen answer as SFT does; kto: single answers, labelled good or bad"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo, ipo: assumed share of pairs with swapped labels"""
    margin: float = Field(1.0, ge=0)
    """simpo: γ, by how much the chosen answer is to be ahead, in units of β · mean log π"""
    desirable_weight: float = Field(1.0, gt=0)
    """kto: weight of good answers; the good answers together usually weigh 1 to 4/3 times as much as the bad ones"""
    undesirable_weight: float = Field(1.0, gt=0)
    """kto: weight of bad answers"""

    @pydantic.model_validator(mode="after")
    def _check_loss(self) -> "PreferenceSettings":
        if self.loss not in ("dpo", "ipo") and self.label_smoothing:
            raise SurefootError(
                f"preference.label_smoothing={self.label_smoothing}: is for preference.loss = 'dpo' and 'ipo', and it is "
                f"{self.loss!r}; set 0"
            )
        if self.loss != "simpo" and self.margin != 1:
            raise SurefootError(
                f"preference.margin={self.margin:g}: is for preference.loss = 'simpo', and it is {self.loss!r}; unset it"
            )
        for name in ("desirable_weight", "undesirable_weight"):
            if self.loss != "kto" and getattr(self, name) != 1:
                raise SurefootError(
                    f"preference.{name}={getattr(self, name):g}: is for preference.loss = 'kto', and it is {self.loss!r}; "
                    "unset it"
                )
        return self


class RewardPreferenceSettings(Section):
    """The loss of a reward model."""

    loss: Literal["bradley_terry", "binary", "steps"] = "bradley_terry"
    """bradley_terry: pairs, of which the chosen answer is better with probability σ(difference of the scores); binary: single
    answers, labelled good or bad, good with probability σ(score); steps: the same for every step of an answer (process reward
    models)"""
    separator: str = "\n"
    """steps: text between two steps; empty: every character is a step"""

    @pydantic.model_validator(mode="after")
    def _check_separator(self) -> "RewardPreferenceSettings":
        if self.loss != "steps" and self.separator != "\n":
            raise SurefootError(
                f"preference.separator={self.separator!r}: is for preference.loss = 'steps', and it is {self.loss!r}; unset it"
            )
        return self


class CriticSettings(Section):
    """The model of the value function."""

    own_model: bool = False
    """use a separate model instead of a linear head on the policy's"""
    start: str | None = None
    """folder or hub id of the reward model that the separate model starts from; none: the policy's start"""
    label: str | None = None
    """label of critic.start whose logit is the value; none: the only one"""


ROW_FIELDS = ("data.train", "data.held_out", "evaluation.demonstrations", "mixing.demonstrations", "demonstrations")
"""fields that name rows"""


def with_row_fields(table: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The tables of a recipe with ``change(field, value)`` for each value that names rows."""
    result = dict(table)
    for field in ROW_FIELDS:
        section, _, name = field.rpartition(".")
        place = result.get(section) if section else result
        if isinstance(place, Mapping) and name in place:
            changed = {**place, name: change(field, place[name])}
            result = {**result, section: changed} if section else changed
    return result


SAVED_FIELDS = {"seed", "device", "threads", "precision", "gradient_checkpointing", "optimizer", "evaluation", "checkpoint"}
"""fields that the recipes of runs have, whatever version wrote them; a recipe written by hand leaves some out"""


SMALLEST_UNTRAINED_RATE = 5e-5
"""the learning rate below which random weights learn slowly; presets for pretrained models have 1e-6 to 1e-5"""

Role = Literal["reference", "reward", "critic"]
"""a model of an online run that need not be on the device all the time"""


class ModelRecipe(Recipe):
    """The fields of every kind that trains a language model."""

    subject: ClassVar[str] = "model"

    model: str
    """folder or hub id of a transformers model, a run, or \"pocket\", the small built-in model"""
    trust_remote_code: bool = False
    """run a model's own code from the hub"""
    precision: Literal["float32", "bfloat16", "bfloat16-weights"] = "float32"
    """of all models, in sampling, scoring and learning. bfloat16: matrix products in autocast, weights stay float32;
    bfloat16-weights: weights are bfloat16 too, and the optimizer keeps float32 copies of those that are trained. Adapters and
    heads of critics and reward models are float32 in any case"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    padding_free: bool = False
    """read the rows of a pass end to end instead of padding them to the longest, and a prompt once for all rows that begin with
    it: less time and memory if lengths differ, and in groups of responses to one prompt. Models with recurrent layers, or
    attention other than sdpa, are padded, and the run prints why"""
    sharding: Literal["full", "hybrid"] | None = None
    """how several ranks hold models. none: each has all weights; full: each has a part of every weight, gradient and
    moment (FSDP2); hybrid: parts among the ranks of a machine, copies on the other machines. No effect in a single process"""
    reshard_after_forward: bool = True
    """with sharding: drop a layer's gathered weights after its forward pass; false: keep them until its backward pass, which is
    faster and takes more memory"""
    offload: bool | tuple[Role, ...] = False
    """what is in the memory of the CPU. true: with sharding, the parts of all models, their gradients and moments; a list, such
    as ["reference", "reward"]: these models of an online run while they are not used, with and without sharding; "critic" is
    the critic's own model with gradients and moments, between updates. No effect on a CPU"""
    check_memory: bool = True
    """reject a run that needs more memory than there is; false: try it anyway"""
    adapter: AdapterSettings | None = None
    """train adapters (LoRA) and keep the model's weights frozen; none: train all weights"""
    optimizer: LanguageOptimizer = LanguageOptimizer()
    evaluation: LanguageEvaluation = LanguageEvaluation()

    @property
    def autocast(self) -> bool:
        """Whether passes multiply in bfloat16 with weights in float32."""
        return self.precision == "bfloat16"

    @property
    def low_weights(self) -> bool:
        """Whether weights are bfloat16; those that are trained have float32 copies."""
        return self.precision == "bfloat16-weights"

    @pydantic.field_validator("precision", mode="before")
    @classmethod
    def _check_precision(cls, precision: Any) -> Any:
        """4 and 8 bits are a setting of adapters."""
        if isinstance(precision, str) and re.fullmatch(r"(nf|fp|int)?[48](bit)?", precision):
            kind = "nf4" if "4" in precision else "int8"
            raise SurefootError(
                f"precision={precision!r}: weights in 4 or 8 bits can't be trained, only frozen under adapters; set "
                f"adapter.quantize = {kind!r}"
            )
        return precision

    @pydantic.field_validator("offload", mode="before")
    @classmethod
    def _check_offload(cls, offload: Any) -> Any:
        """One message for a list, which pydantic would compare with true and false as well."""
        if isinstance(offload, str) and offload.lower() in BOOLEAN_WORDS:
            return offload
        offload = names_in(offload)
        unknown = [role for role in offload if role not in get_args(Role)] if isinstance(offload, list) else []
        if unknown:
            raise SurefootError(
                f"offload={list(offload)}: {unknown[0]!r} is always in use; name 'reference', 'reward' or 'critic'"
            )
        return offload

    @property
    def idle_roles(self) -> tuple[Role, ...]:
        """The roles that are in the memory of the CPU while they are not used."""
        return () if isinstance(self.offload, bool) else self.offload

    @classmethod
    def with_defaults(cls, table: dict[str, Any]) -> dict[str, Any]:
        """Recipes saved before a field existed get the value that they were trained with."""
        if not table.keys() >= SAVED_FIELDS:
            return table
        saved = {"adapter": saved_adapter, "data": saved_data}
        known = {name: older(table[name]) for name, older in saved.items() if isinstance(table.get(name), Mapping)}
        return {**table, **known}

    def _check_compiled(self) -> None:
        """Raise SurefootError if the blocks of these models can't be compiled."""
        obstacles = {
            "adapters with dropout": self.adapter is not None and self.adapter.dropout > 0,
            "adapters on a base in 4 or 8 bits": self.adapter is not None and self.adapter.quantize is not None,
            "sharded models": self.sharding is not None,
            "gradient_checkpointing = true, which computes layers again": self.gradient_checkpointing,
            "the load-balancing loss of experts": self.objective.router_coefficient > 0,
        }
        for what, holds in obstacles.items():
            if holds:
                raise SurefootError(f"engine='compiled': is not for {what}; set engine = 'eager'")

    @pydantic.model_validator(mode="after")
    def _check_model(self) -> "ModelRecipe":
        if self.engine == "compiled":
            self._check_compiled()
        if self.sharding is None:
            if self.offload is True:
                raise SurefootError(
                    "offload=true: is for sharded models; set sharding = 'full', or name models, such as ['reference']"
                )
            if not self.reshard_after_forward:
                raise SurefootError("reshard_after_forward: is for sharded models; set sharding = 'full', or leave it out")
        if self.idle_roles and self.kind != "language":
            raise SurefootError(
                f"offload={list(self.idle_roles)}: names models of online runs, and kind = {self.kind!r} has none of them "
                "while it trains; leave it out"
            )
        if self.objective.kl_estimator == "exact":
            raise SurefootError("objective.kl_estimator='exact': is for control; text has only samples of the KL, set k3")
        if self.objective.constraint is not None:
            raise SurefootError(f"algorithm={self.algorithm!r}: natural steps are for control; use PPO_CLIP or PPO_PENALTY")
        if self.optimizer.kind == "adam-8bit" and self.sharding is not None:
            raise SurefootError(
                f"optimizer.kind='adam-8bit': blocks of moments are whole on every rank, and sharding={self.sharding!r}; set "
                "kind = 'adam', or unset sharding"
            )
        if self.adapter is None:
            return self
        if self.model == "pocket":
            raise SurefootError(
                "adapter: model='pocket' has random weights, which adapters would keep frozen; first train it with kind = "
                "'sft' and no adapter, then name that run"
            )
        if self.adapter.quantize is not None and self.sharding is not None:
            raise SurefootError(
                f"adapter.quantize={self.adapter.quantize!r}: weights in 4 or 8 bits are whole on every rank, and "
                f"sharding={self.sharding!r}; unset one of them"
            )
        if self.adapter.dropout and self.gradient_checkpointing:
            raise SurefootError(
                f"adapter.dropout={self.adapter.dropout}: gradient_checkpointing would draw another dropout when it recomputes "
                "layers; set one of them to 0 or false"
            )
        return self

    @property
    def notes(self) -> list[str]:
        """Warnings about settings that are allowed, but seldom meant."""
        rate = self.optimizer.learning_rate
        if self.model == "pocket" and rate < SMALLEST_UNTRAINED_RATE:
            return [
                f"optimizer.learning_rate={rate:g}: is for pretrained models, and model = 'pocket' has random weights, which "
                "learn slowly at this rate; 1e-3 suits them"
            ]
        return []


class SupervisedRecipe(ModelRecipe):
    """Learning from given rows: REINFORCE with a reward of 1 for every row, which is cross-entropy."""

    default_algorithm: ClassVar[str] = "REINFORCE"

    data: DataSettings
    traces: SupervisedTraces = SupervisedTraces()

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """γ = 0: every token earns its own reward of 1."""
        return {"gamma": 0.0}

    def check_ranks(self, ranks: int) -> None:
        """Every rank has a row of each batch."""
        check_shares("data.batch", self.data.batch, ranks)

    @pydantic.model_validator(mode="after")
    def _check_objective(self) -> "SupervisedRecipe":
        rate = self.optimizer.critic_learning_rate
        if rate is not None:
            raise SurefootError(f"optimizer.critic_learning_rate={rate}: kind = {self.kind!r} has no critic; unset it")
        free = {name: getattr(self.objective, name) for name in ("aggregation", "aggregation_length", "router_coefficient")}
        if self.objective != Objective(gamma=0.0, **free):
            raise SurefootError(
                f"objective: kind = {self.kind!r} gives every row a reward of 1 (REINFORCE with gamma = 0); set only its "
                "aggregation, and router_coefficient in SFT"
            )
        if self.objective.router_coefficient and self.kind != "sft":
            raise SurefootError(
                f"objective.router_coefficient={self.objective.router_coefficient}: is for kind = 'sft' and 'language'; set 0"
            )
        return self


class SftRecipe(SupervisedRecipe):
    """Supervised fine-tuning on demonstrations."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_loss", "policy_loss")

    kind: Literal["sft"] = "sft"
    """kind of training: control, sft, reward, dpo or language"""

    @property
    def title(self) -> str:
        """The run in a few words."""
        return f"SFT of {self.trained}"


class RewardRecipe(SupervisedRecipe):
    """A reward model: a policy over the chosen and the rejected answer of a pair (Bradley-Terry), or over the two labels of an
    answer.
    """

    scores: ClassVar[tuple[str, ...]] = ("held_out_accuracy", "policy_loss")

    kind: Literal["reward"] = "reward"
    """kind of training: control, sft, reward, dpo or language"""
    demonstrations: str | None = None
    """rows on which the scores are normalised to mean 0 and standard deviation 1; none: the chosen or good answers of
    data.train"""
    preference: RewardPreferenceSettings = RewardPreferenceSettings()

    @pydantic.model_validator(mode="after")
    def _check_steps(self) -> "RewardRecipe":
        """Scores of steps are standardised on steps."""
        if self.preference.loss == "steps" and self.demonstrations is not None:
            raise SurefootError(f"demonstrations={self.demonstrations!r}: is not for preference.loss = 'steps'; unset it")
        return self

    @property
    def title(self) -> str:
        """The run in a few words."""
        return f"reward model from {self.trained}"


SIMPO_BETA = 2.0
"""default of reference.beta with SimPO: the paper uses 2 to 2.5"""


class DpoRecipe(SupervisedRecipe):
    """A language model from pairs or labelled answers, most often relative to a frozen reference (DPO, IPO, KTO): a policy over
    the two answers, or labels. SimPO and ORPO have no reference.
    """

    scores: ClassVar[tuple[str, ...]] = ("held_out_accuracy", "policy_loss")

    kind: Literal["dpo"] = "dpo"
    """kind of training: control, sft, reward, dpo or language"""
    reference: DpoReferenceSettings = DpoReferenceSettings()
    preference: PreferenceSettings = PreferenceSettings()

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """γ = 0; the loss of a row is the sum over its labels."""
        return {"gamma": 0.0, "aggregation": "sequence-sum"}

    @classmethod
    def with_defaults(cls, table: dict[str, Any]) -> dict[str, Any]:
        """SimPO's β has another scale than a KL penalty."""
        table = super().with_defaults(table)
        if table.get("preference", {}).get("loss") == "simpo":
            table["reference"] = {"beta": SIMPO_BETA, **table.get("reference", {})}
        return table

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.preference.loss not in ("simpo", "orpo")

    @pydantic.model_validator(mode="after")
    def _check_reference(self) -> "DpoRecipe":
        if self.reference.model is not None and not self.has_reference:
            raise SurefootError(
                f"reference.model={self.reference.model!r}: preference.loss = {self.preference.loss!r} has no reference; "
                "unset it"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_aggregation(self) -> "DpoRecipe":
        if self.objective.aggregation != "sequence-sum":
            raise SurefootError(
                f"objective.aggregation={self.objective.aggregation!r}: a pair's loss is the sum over its two labels; unset it"
            )
        return self

    @property
    def title(self) -> str:
        """The run in a few words."""
        return f"{self.preference.loss.upper()} of {self.trained}"


ALGORITHM_SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "DAPO": {"sampling": {"rounds": 10}, "reward": {"overlong": 0.2, "missing_eos": None}},
}
"""settings outside the objective that belong to a named algorithm"""
GROUP_SIZES = {"group": 8, "leave_one_out": 8, "pair": 2}
"""default responses to each prompt, if they are compared, by ``objective.baseline``"""


class LanguageRecipe(ModelRecipe):
    """Online training of a language model: policy, value, reference and reward."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_reward", "reward")

    kind: Literal["language"] = "language"
    """kind of training: control, sft, reward, dpo or language"""
    data: PromptSettings
    evaluation: OnlineEvaluation = OnlineEvaluation()
    sampling: SamplingSettings = SamplingSettings()
    server: ServerSettings | None = None
    """the vLLM server of sampling.engine = "vllm"; none: the defaults of a server"""
    turns: TurnSettings = TurnSettings()
    reward: RewardSettings = RewardSettings()
    reference: ReferenceSettings = ReferenceSettings()
    critic: CriticSettings = CriticSettings()
    mixing: MixingSettings = MixingSettings()

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """The usual settings for responses: γ = 1, advantages normalised over the batch, few epochs.

        Algorithms with groups scale their own advantages. They and REINFORCE_PLUS_PLUS set their own epochs. Without a baseline
        nothing else is normalised: subtracting the mean would be a baseline.
        """
        if algorithm.compares_in_groups:
            return {"gamma": 1.0}
        reuse = {"reuse": {"epochs": 4, "minibatches": 4}} if algorithm.reuse and algorithm.baseline == "critic" else {}
        normalise = {} if algorithm.baseline is None else {"normalise_advantages": "batch"}
        return {"gamma": 1.0, **normalise, **reuse}

    @classmethod
    def with_defaults(cls, table: dict[str, Any]) -> dict[str, Any]:
        """Defaults that depend on the algorithm.

        Groups get several responses to each prompt. A "group" baseline gets no KL in the reward, because it has it in the loss
        or not at all; nor does "pair", since the KL is in DPO's weights. Aggregation "constant" gets the longest response.
        Named algorithms get their ``ALGORITHM_SECTIONS``.
        """
        if table.keys() >= SAVED_FIELDS and isinstance(table.get("reference"), Mapping):
            table = {**table, "reference": saved_reference(table["reference"])}
        table = super().with_defaults(table)
        objective = table["objective"]
        defaults: dict[str, Any] = dict(ALGORITHM_SECTIONS.get(table["algorithm"], {}))
        if (baseline := objective.get("baseline")) in GROUP_SIZES:
            defaults["sampling"] = {"samples": GROUP_SIZES[baseline], **defaults.get("sampling", {})}
        if baseline in ("group", "pair"):
            defaults["reference"] = {"beta": 0.0}
        for name, settings in defaults.items():
            section = table.get(name, {})
            table = {**table, name: {**settings, **section} if isinstance(section, Mapping) else section}
        table = {**table, "sampling": cls._with_old_log_probs(table)}
        if objective.get("aggregation") == "constant" and objective.get("aggregation_length") is None:
            sampling, turns = table.get("sampling", {}), table.get("turns", {})
            longest = sampling.get("max_tokens", SamplingSettings().max_tokens) if isinstance(sampling, Mapping) else None
            if isinstance(turns, Mapping) and turns.get("environment") and isinstance(longest, int):
                number = turns.get("max_turns", TurnSettings().max_turns)
                longest = longest * number if isinstance(number, int) else None
            if isinstance(longest, int):
                table = {**table, "objective": {**objective, "aggregation_length": longest}}
        return table

    @classmethod
    def _with_old_log_probs(cls, table: Mapping[str, Any]) -> Any:
        """The sampling table with "auto" replaced by what it means for this objective and reference."""
        sampling, objective, reference = table.get("sampling", {}), table["objective"], table.get("reference", {})
        if not isinstance(sampling, Mapping) or sampling.get("old_log_probs", "auto") != "auto":
            return sampling
        reuse, region = objective.get("reuse"), objective.get("trust_region")
        once = reuse is None or (isinstance(reuse, Mapping) and dict(reuse) == {"epochs": 1, "minibatches": 1})
        penalty = isinstance(region, Mapping) and "beta" in region
        beta = reference.get("beta", ReferenceSettings().beta) if isinstance(reference, Mapping) else None
        unread = once and not penalty and objective.get("baseline") not in ("critic", "pair") and beta == 0
        exact = table.get("precision", "float32") == "float32" and sampling.get("engine", "auto") in ("auto", "packed", "model")
        adapter = table.get("adapter")
        exact &= not (isinstance(adapter, Mapping) and adapter.get("quantize") == "int8")  # its roundings may flip
        unread &= exact and "server" not in table and objective.get("importance_cap") is None
        return {**sampling, "old_log_probs": "update" if unread else "trainer"}

    @property
    def samples_on_server(self) -> bool:
        """Whether a vLLM server samples."""
        return self.sampling.engine == "vllm" or (self.sampling.engine == "auto" and self.server is not None)

    @property
    def responses(self) -> int:
        """Responses per iteration."""
        return self.sampling.prompts * self.sampling.samples

    @property
    def has_reference(self) -> bool:
        """Whether anything reads the reference: a KL in the reward or in the loss, or the metrics."""
        settings = self.reference
        return bool(settings.beta or settings.measure or settings.model or self.objective.compares_with_reference)

    @property
    def mixed_batch(self) -> int:
        """Demonstrations per update, if any are mixed in."""
        reuse = self.objective.reuse
        return self.mixing.batch or self.responses // (reuse.minibatches if reuse else 1)

    def check_ranks(self, ranks: int) -> None:
        """Every rank has a prompt, responses for all minibatches, and a demonstration if some are mixed in."""
        reuse = self.objective.reuse
        minibatches = reuse.minibatches if reuse else 1
        check_shares("sampling.prompts", self.sampling.prompts, ranks, self.sampling.samples, minibatches)
        if self.mixing.sft_coefficient:
            check_shares("mixing.batch", self.mixed_batch, ranks)

    @property
    def max_response_tokens(self) -> int:
        """Most tokens of a response, over all its turns, without the environment's answers."""
        return self.sampling.max_tokens * (1 if self.turns.environment is None else self.turns.max_turns)

    @pydantic.model_validator(mode="after")
    def _check(self) -> "LanguageRecipe":
        self._check_batch()
        self._check_sampling()
        self._check_groups()
        self._check_rows()
        self._check_reward()
        self._check_reference()
        self._check_idle_roles()
        self._check_old_log_probs()
        self._check_critic()
        return self

    def _check_batch(self) -> None:
        """Minibatches must divide the responses; the policy must be the one that samples."""
        prompts, samples, reuse = self.sampling.prompts, self.sampling.samples, self.objective.reuse
        check_iteration_size(self.responses, "responses", ("sampling.prompts", prompts), ("sampling.samples", samples))
        if self.adapter is not None and self.adapter.dropout:
            raise SurefootError(
                f"adapter.dropout={self.adapter.dropout}: the trained policy would differ from the one that samples; set 0 in "
                "online runs"
            )
        if reuse and self.responses % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: does not divide the {self.responses} responses of an "
                f"iteration (sampling.prompts={prompts} x sampling.samples={samples}); choose a "
                f"divisor, such as {nearest_divisor(self.responses, reuse.minibatches)}"
            )

    def _check_sampling(self) -> None:
        """Settings of an engine need that engine; a correction needs log-probabilities of both sampler and trainer."""
        sampling, cap = self.sampling, self.objective.importance_cap
        if cap is not None and sampling.old_log_probs == "sampler":
            raise SurefootError(
                f"objective.importance_cap={cap:g}: corrects from the sampler's log-probabilities to the trainer's, and "
                "sampling.old_log_probs='sampler' takes the sampler's for both; set 'trainer'"
            )
        if self.server is not None and not self.samples_on_server:
            raise SurefootError(
                f"server: is for sampling.engine = 'vllm', and it is {sampling.engine!r}; unset it, or set engine = 'vllm'"
            )
        if self.samples_on_server and self.model == "pocket":
            raise SurefootError(
                "sampling.engine='vllm': model='pocket' has no folder that vLLM can serve; first train it with kind = 'sft', "
                "then name that run"
            )
        if self.samples_on_server and self.sharding is not None:
            raise SurefootError(
                f"sampling.engine='vllm': needs whole models, and sharding={self.sharding!r}; unset [server] and the engine"
            )
        if sampling.engine == "packed" and self.low_weights:
            raise SurefootError(
                f"sampling.engine='packed': computes in float32, and precision={self.precision!r} has weights in bfloat16; set "
                "engine = 'auto'"
            )
        if self.server is not None and self.server.transfer == "nccl":
            self._check_nccl(self.server)
        token = None if self.server is None else self.server.token_from
        if token is not None and (error := token_error(token)):
            raise SurefootError(f"server{error}")
        if sampling.rows is not None and self.samples_on_server:
            raise SurefootError(
                f"sampling.rows={sampling.rows}: the server bounds its own rows; unset it, and set --max-num-seqs of vllm serve"
            )
        if sampling.ahead:
            self._check_ahead()
        if sampling.engine == "continuous" and self.sharding is not None:
            raise SurefootError(
                f"sampling.engine='continuous': needs whole models, and sharding={self.sharding!r}; set engine = 'auto'"
            )

    def _check_nccl(self, server: ServerSettings) -> None:
        """Only whole weights go from GPU to GPU."""
        name = "server.transfer='nccl'"
        if self.adapter is not None:
            raise SurefootError(f"{name}: sends all weights, and an adapter must be merged first; set 'folder'")
        if server.weights is not None:
            raise SurefootError(f"{name}: needs no folder, and server.weights={server.weights!r}; unset it")

    def _check_ahead(self) -> None:
        """Only a server samples beside the learner; what to sample, and what to correct, must be known before."""
        sampling, name = self.sampling, f"sampling.ahead={self.sampling.ahead}"
        if not self.samples_on_server:
            raise SurefootError(f"{name}: needs a vLLM server, which samples beside the learner; add [server], or set 0")
        if self.turns.environment is not None:
            raise SurefootError(f"{name}: conversations are not sampled ahead; set 0, or unset turns.environment")
        if sampling.rounds > 1:
            raise SurefootError(f"{name}: sampling.rounds={sampling.rounds} depends on rewards of the same iteration; set 0")
        if sampling.old_log_probs != "trainer":
            raise SurefootError(
                f"{name}: sampling.old_log_probs={sampling.old_log_probs!r} would take old weights for the present ones; set "
                "'trainer'"
            )

    def _check_groups(self) -> None:
        """Groups need at least two responses and no discount; only groups can be replaced."""
        objective, samples, rounds = self.objective, self.sampling.samples, self.sampling.rounds
        if objective.compares_in_groups and objective.gamma != 1:
            raise SurefootError(
                f"objective.gamma={objective.gamma:g}: baseline {objective.baseline!r} compares the undiscounted rewards of "
                "whole responses; set 1"
            )
        if objective.compares_in_groups and samples < 2:
            raise SurefootError(
                f"sampling.samples={samples}: objective.baseline={objective.baseline!r} compares the responses to a "
                "prompt and needs at least 2; set sampling.samples = 8, or objective.baseline = 'critic'"
            )
        if rounds > 1 and not objective.compares_in_groups:
            raise SurefootError(
                f"sampling.rounds={rounds}: replaces groups whose responses all earn the same, and {self.algorithm} has no "
                "groups; set sampling.rounds = 1, or objective.baseline = 'group'"
            )

    def _check_rows(self) -> None:
        """Demonstrations are evaluated only with evaluation on, and mixed in only from a file."""
        if self.evaluation.demonstrations is not None and not self.evaluation.rows:
            raise SurefootError(
                f"evaluation.demonstrations={self.evaluation.demonstrations!r}: evaluation.rows=0 switches evaluation off; set "
                "evaluation.rows, for example to 256, or unset evaluation.demonstrations"
            )
        if self.mixing.sft_coefficient and self.mixing.demonstrations is None:
            raise SurefootError(
                f"mixing.sft_coefficient={self.mixing.sft_coefficient:g}: weighs demonstrations, and there are none; name "
                "their file with mixing.demonstrations, or set 0"
            )

    def _check_reward(self) -> None:
        """Something must give a reward, and every term must be valid."""
        if not self.reward.terms and self.turns.environment is None:
            raise SurefootError(
                "reward: is missing; set it, for example reward.terms = [{ function = 'file.py:function' }], or "
                "turns.environment, which rewards turns"
            )
        for index, term in enumerate(self.reward.terms):
            if error := term_error(term):
                raise SurefootError(f"reward.terms[{index}]{error}")

    def _check_reference(self) -> None:
        """An adapted β starts above 0 and moves slowly."""
        reference = self.reference
        if reference.target is not None and not reference.beta:
            raise SurefootError(
                f"reference.target={reference.target}: adapting multiplies β, and reference.beta=0 stays 0; set reference.beta "
                "above 0"
            )
        if reference.target is not None and reference.horizon < self.responses:
            raise SurefootError(
                f"reference.horizon={reference.horizon}: β would change too much at once and could become negative; set at "
                f"least the {self.responses} responses of an iteration"
            )

    def _check_idle_roles(self) -> None:
        """What is to rest on the CPU must be a model of its own."""
        if "reference" in self.idle_roles and not self.has_reference:
            raise SurefootError("offload: names the reference, and nothing reads one; leave it out")
        if "reference" in self.idle_roles and self.adapter is not None and self.reference.model is None:
            raise SurefootError(
                "offload: names the reference, which is the base of the adapters, and that is always in use; leave it out"
            )
        if "reward" in self.idle_roles and all(term.model is None for term in self.reward.terms):
            raise SurefootError("offload: names the reward, and no term of reward.terms is a model; leave it out")
        if "critic" not in self.idle_roles:
            return
        if self.objective.baseline != "critic":
            raise SurefootError(f"offload: names the critic, and {self.algorithm} has none; leave it out")
        if self.adapter is not None:
            raise SurefootError(
                "offload: names the critic, which is on the base of the adapters, and that is always in use; leave it out"
            )
        if not self.critic.own_model:
            raise SurefootError(
                "offload: names the critic, which is a head on the policy's model, and that is always in use; set "
                "critic.own_model = true, or leave it out"
            )
        if self.sharding is not None:
            raise SurefootError(
                f"offload: names the critic, which is sharded with the policy by sharding={self.sharding!r}; set offload = "
                "true, which keeps the parts of all models on the CPU, or unset sharding"
            )

    def _check_old_log_probs(self) -> None:
        """Without a pass for log π_old, nothing may read it before the update."""
        if self.sampling.old_log_probs != "update":
            return
        objective, beta = self.objective, self.reference.beta
        readers = {
            "objective.trust_region is a KL penalty": objective.penalty is not None,
            "objective.baseline='pair' compares it with the reference's": objective.baseline == "pair",
            "objective.importance_cap is set": objective.importance_cap is not None,
            "objective.reuse makes several updates per batch": objective.reads_old_log_probs,
            "the critic's values come from the same pass": objective.baseline == "critic",
            f"reference.beta={beta:g} puts a KL into the reward": beta > 0,
        }
        for reader, reads in readers.items():
            if reads:
                raise SurefootError(f"sampling.old_log_probs='update': computes no log π_old, and {reader}; set 'auto'")

    def _check_critic(self) -> None:
        """Settings of a critic need a critic."""
        has_critic, rate = self.objective.baseline == "critic", self.optimizer.critic_learning_rate
        if self.reward.missing_eos == "bootstrap" and not has_critic:
            raise SurefootError("reward.missing_eos='bootstrap': needs a critic; set objective.baseline = 'critic', or penalty")
        if rate is not None and not has_critic:
            raise SurefootError(f"optimizer.critic_learning_rate={rate}: {self.algorithm} has no critic; unset it")
        if self.critic.start is not None and not self.critic.own_model:
            raise SurefootError(f"critic.start={self.critic.start!r}: is for a separate model; set critic.own_model = true")
        if self.critic.label is not None and self.critic.start is None:
            raise SurefootError(f"critic.label={self.critic.label!r}: is a label of critic.start; set it, or unset the label")
        if self.critic.own_model and not has_critic:
            raise SurefootError(f"critic.own_model=true: {self.algorithm} has no critic; unset it")
