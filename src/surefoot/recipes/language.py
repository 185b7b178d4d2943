"""Recipes for language models: supervised, reward models, online; and which combinations are refused."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from surefoot.core.algorithms import MAX_COUNT, MAX_LENGTH, Objective
from surefoot.errors import SurefootError
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
    nearest_divisor,
    require_size,
)


class LanguageEvaluation(EvaluationSettings):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    rows: int = Field(256, ge=0, le=MAX_LENGTH)
    """held-out rows of each, from the first on; 0 switches evaluation off"""


class OnlineEvaluation(LanguageEvaluation):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    demonstrations: str | None = None
    """file or folder of demonstrations that were never trained on: how likely the policy finds them at each evaluation tells
    what it forgets; none: not measured"""


class SupervisedTraces(TraceSettings):
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
    arguments: dict[str, Any] = Field({})
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
    arguments: dict[str, Any] = Field({})
    """a function's other arguments, by name, such as { tolerance = 0.01 }; a server gets them with every request"""
    batch: Count = 64
    """responses per request to a server"""
    token_from: str | None = None
    """environment variable with the token of the header Authorization; its value is never written"""
    retries: int = Field(5, ge=0, le=100)
    """further tries of a request, at growing intervals, where a server is down or busy"""


def term_error(term: Any) -> str:
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


class DpoReferenceSettings(Section):
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


class ModelRecipe(Recipe):
    """What every run has that trains a model of language."""

    subject: ClassVar[str] = "model"

    model: str
    """folder or hub id of a transformers model, a run, or \"pocket\", the small built-in one"""
    trust_remote_code: bool = False
    """let a model's own code from the hub run"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes the passes through models in autocast; weights stay float32"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    check_memory: bool = True
    """refuse to start a run that needs more memory than there is; false tries it all the same"""
    adapter: AdapterSettings | None = None
    """train adapters (LoRA) and leave the model's own weights frozen; none: train all weights"""
    optimizer: LanguageOptimizer = LanguageOptimizer()
    evaluation: LanguageEvaluation = LanguageEvaluation()

    @pydantic.model_validator(mode="after")
    def _runs_eagerly(self) -> "ModelRecipe":
        if self.engine == "compiled":
            raise SurefootError("engine='compiled': is for control; set engine = 'eager'")
        if self.objective.kl_estimator == "exact":
            raise SurefootError(
                "objective.kl_estimator='exact': is for control; the KL of text is estimated on samples, set k3"
            )
        if self.objective.constraint is not None:
            raise SurefootError(f"algorithm={self.algorithm!r}: natural steps are for control; use PPO_CLIP or PPO_PENALTY")
        return self

    @pydantic.model_validator(mode="after")
    def _adapts(self) -> "ModelRecipe":
        if self.adapter is None:
            return self
        if self.model == "pocket":
            raise SurefootError(
                "adapter: model='pocket' has random weights, which adapters leave as they are; train it with kind = 'sft' and "
                "no adapter first, and name that run"
            )
        if self.adapter.dropout and self.gradient_checkpointing:
            raise SurefootError(
                f"adapter.dropout={self.adapter.dropout}: would be drawn anew where gradient_checkpointing recomputes layers; "
                "set one of them to 0 or false"
            )
        return self


class SupervisedRecipe(ModelRecipe):
    """Learning from rows that are given: the policy-gradient of rows that are all worth 1, which is cross-entropy."""

    default_algorithm: ClassVar[str] = "REINFORCE"

    data: DataSettings
    traces: SupervisedTraces = SupervisedTraces()

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """γ = 0: every token is worth its own reward, which is 1."""
        return {"gamma": 0.0}

    @pydantic.model_validator(mode="after")
    def _weighs_all_alike(self) -> "SupervisedRecipe":
        rate = self.optimizer.critic_learning_rate
        if rate is not None:
            raise SurefootError(f"optimizer.critic_learning_rate={rate}: kind = {self.kind!r} has no critic; unset it")
        free = {name: getattr(self.objective, name) for name in ("aggregation", "aggregation_length", "router_coefficient")}
        if self.objective != Objective(gamma=0.0, **free):
            raise SurefootError(
                f"objective: kind = {self.kind!r} learns from rows that are all worth 1 (REINFORCE with gamma = 0); only its "
                "aggregation can be set, and its router_coefficient in SFT"
            )
        if self.objective.router_coefficient and self.kind != "sft":
            raise SurefootError(
                f"objective.router_coefficient={self.objective.router_coefficient}: is for kind = 'sft' and 'language'; set 0"
            )
        return self


class SftRecipe(SupervisedRecipe):
    """Supervised fine-tuning of a model on demonstrations."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_loss", "policy_loss")

    kind: Literal["sft"] = "sft"
    """what is trained, and how: control, sft, reward, dpo or language"""

    @property
    def title(self) -> str:
        """What a run does, in a few words."""
        return f"SFT of {self.trained}"


class RewardRecipe(SupervisedRecipe):
    """A reward model from pairs of a chosen and a rejected answer (Bradley-Terry): a policy over two answers."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_accuracy", "policy_loss")

    kind: Literal["reward"] = "reward"
    """what is trained, and how: control, sft, reward, dpo or language"""
    demonstrations: str | None = None
    """rows on which the scores are brought to mean 0 and standard deviation 1; none: the chosen answers of data.train"""

    @property
    def title(self) -> str:
        """What a run does, in a few words."""
        return f"reward model from {self.trained}"


class DpoRecipe(SupervisedRecipe):
    """A language model from pairs, with a frozen reference as anchor (DPO, IPO): a policy over two answers."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_accuracy", "policy_loss")

    kind: Literal["dpo"] = "dpo"
    """what is trained, and how: control, sft, reward, dpo or language"""
    reference: DpoReferenceSettings = DpoReferenceSettings()
    preference: PreferenceSettings = PreferenceSettings()

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """γ = 0; both labels of a pair are weighed, and a pair's loss is their sum."""
        return {"gamma": 0.0, "aggregation": "sequence-sum"}

    @pydantic.model_validator(mode="after")
    def _weighs_pairs(self) -> "DpoRecipe":
        if self.objective.aggregation != "sequence-sum":
            raise SurefootError(
                f"objective.aggregation={self.objective.aggregation!r}: a pair's loss is the sum over its two labels; unset it"
            )
        return self

    @property
    def title(self) -> str:
        """What a run does, in a few words."""
        return f"{self.preference.loss.upper()} of {self.trained}"


BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "DAPO": {"sampling": {"rounds": 10}, "reward": {"overlong": 0.2, "missing_eos": None}},
}
"""what belongs to a named algorithm and is no switch of its objective: which prompts are kept, what else is paid"""
GROUP = 8
"""responses to each prompt where they are compared and nothing else is said"""


class LanguageRecipe(ModelRecipe):
    """A language model by policy gradient: policy, value, reference and reward."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_reward", "reward")

    kind: Literal["language"] = "language"
    """what is trained, and how: control, sft, reward, dpo or language"""
    data: PromptSettings
    evaluation: OnlineEvaluation = OnlineEvaluation()
    sampling: SamplingSettings = SamplingSettings()
    turns: TurnSettings = TurnSettings()
    reward: RewardSettings = RewardSettings()
    reference: ReferenceSettings = ReferenceSettings()
    critic: CriticSettings = CriticSettings()
    mixing: MixingSettings = MixingSettings()

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """The usual settings for responses: γ = 1, advantages normalised over the whole batch, few passes.

        What compares responses in groups has scaled its advantages, and says its passes, itself. Without a baseline nothing is
        normalised: less its mean, the return would have one.
        """
        if algorithm.compares_in_groups:
            return {"gamma": 1.0}
        reuse = {"reuse": {"epochs": 4, "minibatches": 4}} if algorithm.reuse else {}
        normalise = {} if algorithm.baseline is None else {"normalise_advantages": "batch"}
        return {"gamma": 1.0, **normalise, **reuse}

    @classmethod
    def with_defaults(cls, table: dict[str, Any]) -> dict[str, Any]:
        """Several responses to each prompt where they are compared; no KL in the reward beside a "group" baseline, which has it
        in the loss or not at all; the longest response allowed, where "constant" needs it; the algorithm's part of ``BESIDE``.
        """
        objective = table["objective"]
        below: dict[str, Any] = dict(BESIDE.get(table["algorithm"], {}))
        if objective.get("baseline") in ("group", "leave_one_out"):
            below["sampling"] = {"samples": GROUP, **below.get("sampling", {})}
        if objective.get("baseline") == "group":
            below["reference"] = {"beta": 0.0}
        for name, settings in below.items():
            given = table.get(name, {})
            table = {**table, name: {**settings, **given} if isinstance(given, Mapping) else given}
        if objective.get("aggregation") == "constant" and objective.get("aggregation_length") is None:
            sampling, turns = table.get("sampling", {}), table.get("turns", {})
            longest = sampling.get("max_tokens", SamplingSettings().max_tokens) if isinstance(sampling, Mapping) else None
            if isinstance(turns, Mapping) and turns.get("environment") and isinstance(longest, int):
                number = turns.get("max_turns", TurnSettings().max_turns)
                longest = longest * number if isinstance(number, int) else None
            if isinstance(longest, int):
                table = {**table, "objective": {**objective, "aggregation_length": longest}}
        return table

    @property
    def responses(self) -> int:
        """Responses per iteration."""
        return self.sampling.prompts * self.sampling.samples

    @property
    def mixed_batch(self) -> int:
        """Demonstrations per update, where some are mixed in."""
        reuse = self.objective.reuse
        return self.mixing.batch or self.responses // (reuse.minibatches if reuse else 1)

    @property
    def max_response_tokens(self) -> int:
        """Tokens that a response may have at most, those of others aside."""
        return self.sampling.max_tokens * (1 if self.turns.environment is None else self.turns.max_turns)

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "LanguageRecipe":
        reuse, critic, sampling = self.objective.reuse, self.objective.baseline == "critic", self.sampling
        require_size(
            self.responses, "responses", ("sampling.prompts", sampling.prompts), ("sampling.samples", sampling.samples)
        )
        if self.adapter is not None and self.adapter.dropout:
            raise SurefootError(
                f"adapter.dropout={self.adapter.dropout}: would make the policy another than what sampled; set 0 in online runs"
            )
        if reuse and self.responses % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: does not divide the {self.responses} responses of an "
                f"iteration (sampling.prompts={self.sampling.prompts} x sampling.samples={self.sampling.samples}); choose a "
                f"divisor, such as {nearest_divisor(self.responses, reuse.minibatches)}"
            )
        if self.objective.compares_in_groups and self.objective.gamma != 1:
            raise SurefootError(
                f"objective.gamma={self.objective.gamma:g}: baseline {self.objective.baseline!r} compares what whole responses "
                "earned, undiscounted; set 1"
            )
        if self.evaluation.demonstrations is not None and not self.evaluation.rows:
            raise SurefootError(
                f"evaluation.demonstrations={self.evaluation.demonstrations!r}: evaluation.rows=0 switches evaluation off; set "
                "how many rows, such as 256, or unset it"
            )
        if self.mixing.sft_coefficient and self.mixing.demonstrations is None:
            raise SurefootError(
                f"mixing.sft_coefficient={self.mixing.sft_coefficient:g}: is the weight of demonstrations, and there are "
                "none; name their file with mixing.demonstrations, or set 0"
            )
        if not self.reward.terms and self.turns.environment is None:
            raise SurefootError(
                "reward: is missing; set it, for example reward.terms = [{ function = 'file.py:function' }], or "
                "turns.environment, which rewards turns"
            )
        for place, term in enumerate(self.reward.terms):
            if complaint := term_error(term):
                raise SurefootError(f"reward.terms[{place}]{complaint}")
        samples = self.sampling.samples
        if self.objective.compares_in_groups and samples < 2:
            raise SurefootError(
                f"sampling.samples={samples}: objective.baseline={self.objective.baseline!r} compares the responses to a "
                "prompt and needs at least 2; set sampling.samples = 8, or objective.baseline = 'critic'"
            )
        if self.sampling.rounds > 1 and not self.objective.compares_in_groups:
            raise SurefootError(
                f"sampling.rounds={self.sampling.rounds}: replaces groups without signal, and {self.algorithm} compares no "
                "groups; set sampling.rounds = 1, or objective.baseline = 'group'"
            )
        reference = self.reference
        if reference.target is not None and not reference.beta:
            raise SurefootError(
                f"reference.target={reference.target}: β is adapted by factors, and reference.beta=0 stays 0; start it above"
            )
        if reference.target is not None and reference.horizon < self.responses:
            raise SurefootError(
                f"reference.horizon={reference.horizon}: β would move too far at once, below 0 even; set at least the "
                f"{self.responses} responses of an iteration"
            )
        if self.reward.missing_eos == "bootstrap" and not critic:
            raise SurefootError("reward.missing_eos='bootstrap': needs a critic; set objective.baseline = 'critic', or penalty")
        if self.optimizer.critic_learning_rate is not None and not critic:
            rate = self.optimizer.critic_learning_rate
            raise SurefootError(f"optimizer.critic_learning_rate={rate}: {self.algorithm} has no critic; unset it")
        if self.critic.start is not None and not self.critic.own_model:
            raise SurefootError(f"critic.start={self.critic.start!r}: is for a critic's own model; set critic.own_model = true")
        if self.critic.own_model and not critic:
            raise SurefootError(f"critic.own_model=true: {self.algorithm} has no critic; unset it")
        return self
