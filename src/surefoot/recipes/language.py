"""The recipe of online training: policy, critic, reference and reward."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from surefoot.core.algorithms import MAX_LENGTH, Objective
from surefoot.errors import SurefootError
from surefoot.recipes.base import Count, Recipe, Seconds, Section, Size, check_iteration_size, check_shares, nearest_divisor
from surefoot.recipes.callables import GOLD, term_field
from surefoot.recipes.models import LanguageEvaluation, ModelRecipe
from surefoot.recipes.rewards import RewardSettings, term_error, token_error
from surefoot.recipes.rows import PromptSettings


class OnlineEvaluation(LanguageEvaluation):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    demonstrations: str | None = None
    """file or folder of demonstrations that are not trained on; their likelihood at each evaluation shows what the policy
    forgets; none: not measured"""


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
    """texts that end a response, in addition to EOS; one that is a special token does so by its id. Rewards and environments
    get the response without them"""
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


class CriticSettings(Section):
    """The model of the value function."""

    own_model: bool = False
    """use a separate model instead of a linear head on the policy's"""
    start: str | None = None
    """folder or hub id of the reward model that the separate model starts from; none: the policy's start"""
    label: str | None = None
    """label of critic.start whose logit is the value; none: the only one"""


ALGORITHM_SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "DAPO": {"sampling": {"rounds": 10}, "reward": {"overlong": 0.2}},
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
        self._check_missing_eos()
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

    def _check_missing_eos(self) -> None:
        """A penalty needs ``reward.missing_eos``."""
        value = self.reward.missing_eos_value
        if self.reward.missing_eos is None and value != RewardSettings.model_fields["missing_eos_value"].default:
            raise SurefootError(
                f"reward.missing_eos_value={value:g}: has no effect, because truncated responses are scored like others; set "
                "reward.missing_eos = 'penalty'"
            )

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
