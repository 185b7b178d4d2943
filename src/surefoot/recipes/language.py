"""The recipe of online training: policy, critic, reference and reward."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from surefoot.core.algorithms import MAX_LENGTH, Objective
from surefoot.recipes.base import Count, Seconds, Section, Size, check_shares
from surefoot.recipes.models import LanguageEvaluation, ModelRecipe
from surefoot.recipes.rewards import RewardSettings
from surefoot.recipes.rows import PromptSettings


class OnlineEvaluation(LanguageEvaluation):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    demonstrations: str | None = None
    """demonstrations that are not trained on; their likelihood at each evaluation shows what the policy forgets"""


class SamplingSettings(Section):
    """How responses are sampled in each iteration."""

    prompts: Count = 64
    """prompts per iteration"""
    samples: Count = 1
    """responses to each prompt"""
    rounds: Count = 1
    """replace prompts whose responses all earn the same, in at most this many rounds of sampling (DAPO's dynamic sampling)"""
    max_tokens: Count = 64
    """longest response in tokens, with EOS; of each turn, in conversations"""
    temperature: float = Field(1.0, gt=0)
    """divides the logits, in sampling and in all log-probabilities"""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        pydantic.BeforeValidator(lambda texts: [texts] if isinstance(texts, str) else texts),  # a text may have commas
    ] = ()
    """texts that end a response, as EOS does; rewards and environments get the response without them"""
    old_log_probs: Literal["auto", "trainer", "sampler", "update"] = "auto"
    """log π_old of the ratios. trainer: computed by the trained model, in a pass of its own; sampler: kept from sampling;
    update: those of the only update on each batch, without a pass of their own. auto: update if each batch has one update,
    nothing else reads log π_old (no critic, pairs, KL in the reward or KL penalty) and the sampler's arithmetic is the
    trainer's (float32; packed or model), else trainer"""
    engine: Literal["auto", "packed", "model", "continuous", "vllm"] = "auto"
    """what samples. packed: packed weights, for small models of known families; model: the model's own forward pass;
    continuous: continuous batching of transformers; vllm: a vLLM server. auto: vllm with a [server], else packed if possible,
    else model"""
    rows: Size | None = None
    """most responses that are sampled at a time, by packed and model; limits memory, tokens stay the same. none: as many as fit
    into 40 % of the device's memory"""
    ahead: int = Field(0, ge=0, le=1)
    """iterations that a vLLM server samples ahead. With 1, responses are those of weights that are one iteration old;
    objective.importance_cap corrects for that"""


class ServerSettings(Section):
    """The vLLM server of sampling.engine = "vllm"; surefoot check RECIPE prints the command that starts it."""

    url: str = "http://127.0.0.1:8000"
    """its address"""
    model: str = "policy"
    """name of the model on the server (--served-model-name)"""
    weights: str | None = None
    """folder that trainer and server read, for new weights: twice the size of the model for a moment; none: a temporary
    folder"""
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
    """module:Class or file.py:Class; an object of it answers each turn, with step or with public methods as tools; none: one
    turn, unless there are tools"""
    tools: tuple[str, ...] = ()
    """typed functions with docstrings that the model can call, such as ["calc.py:multiply"]"""
    response_template: str | dict[str, Any] | None = None
    """how the model writes its calls, if its tokenizer has no response template: a table as in transformers, or a JSON file"""
    tool_deadline: Seconds = 10.0
    """seconds for each call of a tool"""
    max_calls: Count = 100
    """most calls of tools in a conversation; further ones get an error as their result"""
    tolerated: float = Field(0.5, ge=0, le=1)
    """largest share of a batch's calls in which a tool may raise, hang or return something unusable; arguments that don't fit
    don't count"""
    arguments: dict[str, Any] = Field({})
    """keyword arguments of the class, such as { patience = 3 }"""
    at_once: Count = 64
    """environments that are called at the same time, each by one thread; 1: for those that share state"""
    max_turns: int = Field(8, ge=1, le=1_000)
    """most turns of the model in a conversation; each has sampling.max_tokens"""
    max_length: int | None = Field(None, ge=2, le=MAX_LENGTH)
    """longest conversation in tokens. A turn starts only if sampling.max_tokens more fit; none: the model's context"""

    @property
    def conversations(self) -> bool:
        """Whether responses may have several turns."""
        return bool(self.environment or self.tools)


class ReferenceSettings(Section):
    """The KL penalty in the reward, β·KL(π_θ‖π_ref), token by token."""

    model: str | None = None
    """folder of the reference; none: the model that training starts from"""
    beta: float = Field(0.05, ge=0)
    """β, at the first iteration if it is adapted; 0: no penalty"""
    measure: bool = False
    """measure the KL at β = 0 too, which takes a frozen copy of the model and a pass per batch"""
    target: float | None = Field(None, gt=0)
    """KL per response, in nats, that β is adapted to (Ziegler et al. 2019)"""
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


class CriticSettings(Section):
    """The model of the value function."""

    own_model: bool = False
    """use a separate model instead of a linear head on the policy's"""
    start: str | None = None
    """folder or hub id of the reward model that the separate model starts from; none: the policy's start"""
    label: str | None = None
    """label of critic.start whose logit is the value; none: the only one"""


ALGORITHM_SECTIONS: dict[str, dict[str, dict[str, Any]]] = {"DAPO": {"sampling": {"rounds": 10}, "reward": {"overlong": 0.2}}}
"""settings outside the objective that belong to a named algorithm"""
GROUP_SIZES = {"group": 8, "leave_one_out": 8, "pair": 2}
"""default responses to each prompt, if they are compared, by ``objective.baseline``"""


class LanguageRecipe(ModelRecipe):
    """Online training of a language model: policy, value, reference and reward."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_reward", "reward")

    kind: Literal["language"] = "language"
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
        objective = table["objective"]
        defaults: dict[str, Any] = dict(ALGORITHM_SECTIONS.get(table["algorithm"], {}))
        if (baseline := objective.get("baseline")) in GROUP_SIZES:
            defaults["sampling"] = {"samples": GROUP_SIZES[baseline], **defaults.get("sampling", {})}
        if baseline in ("group", "pair"):
            defaults["reference"] = {"beta": 0.0}
        for name, settings in defaults.items():
            table = {**table, name: {**settings, **table.get(name, {})}}
        table = {**table, "sampling": cls._with_old_log_probs(table)}
        if objective.get("aggregation") == "constant" and objective.get("aggregation_length") is None:
            turns = table.get("turns", {})
            longest = table["sampling"].get("max_tokens", SamplingSettings().max_tokens)
            several = turns.get("environment") or turns.get("tools")
            number = turns.get("max_turns", TurnSettings().max_turns) if several else 1
            if isinstance(longest, int) and isinstance(number, int):  # else they are errors
                table = {**table, "objective": {**objective, "aggregation_length": longest * number}}
        return table

    @classmethod
    def _with_old_log_probs(cls, table: Mapping[str, Any]) -> Any:
        """The sampling table with "auto" replaced by what it means for this objective and reference."""
        sampling, objective, reference = table.get("sampling", {}), table["objective"], table.get("reference", {})
        if sampling.get("old_log_probs", "auto") != "auto":
            return sampling
        once = objective.get("reuse") in (None, {"epochs": 1, "minibatches": 1})
        penalty = "beta" in (objective.get("trust_region") or {})
        beta = reference.get("beta", ReferenceSettings().beta)
        unread = once and not penalty and objective.get("baseline") not in ("critic", "pair") and beta == 0
        exact = table.get("precision", "float32") == "float32" and sampling.get("engine", "auto") in ("auto", "packed", "model")
        exact &= (table.get("adapter") or {}).get("quantize") != "int8"  # its roundings may flip
        unread &= exact and table.get("server") is None and objective.get("importance_cap") is None
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
    def iteration_steps(self) -> int | None:
        """Responses of an iteration; None if a batch may be smaller."""
        return self.responses if self.sampling.rounds == 1 else None

    @property
    def has_reference(self) -> bool:
        """Whether anything reads the reference: a KL in the reward or in the loss, or the metrics."""
        settings = self.reference
        return bool(settings.beta or settings.measure or settings.model or self.objective.compares_with_reference)

    @property
    def mixed_batch(self) -> int:
        """Demonstrations per update, if any are mixed in."""
        return self.mixing.batch or self.responses // self.minibatches

    def check_ranks(self, ranks: int) -> None:
        """Every rank has a prompt, responses for all minibatches, and a demonstration if some are mixed in."""
        check_shares("sampling.prompts", self.sampling.prompts, ranks, self.sampling.samples, self.minibatches)
        if self.mixing.sft_coefficient:
            check_shares("mixing.batch", self.mixed_batch, ranks)

    @property
    def max_response_tokens(self) -> int:
        """Most tokens of a response, over all its turns, without the environment's answers."""
        return self.sampling.max_tokens * (self.turns.max_turns if self.turns.conversations else 1)
