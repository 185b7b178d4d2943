"""Recipes for language models: supervised, reward models, online; and which combinations are refused."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from surefoot.core.algorithms import Objective
from surefoot.errors import SurefootError
from surefoot.recipes.base import Recipe, nearest_divisor, require_size
from surefoot.recipes.sections import (
    AdapterSettings,
    AnchorSettings,
    CriticSettings,
    DataSettings,
    DemonstrationTraces,
    LanguageEvaluation,
    LanguageOptimizer,
    MixingSettings,
    OnlineEvaluation,
    PreferenceSettings,
    PromptSettings,
    ReferenceSettings,
    RewardSettings,
    SamplingSettings,
    TurnSettings,
    term_complaint,
)


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


class DemonstrationRecipe(ModelRecipe):
    """Learning from rows that are given: the policy-gradient of rows that are all worth 1, which is cross-entropy."""

    default_algorithm: ClassVar[str] = "REINFORCE"

    data: DataSettings
    traces: DemonstrationTraces = DemonstrationTraces()

    @classmethod
    def switches(cls, algorithm: Objective) -> dict[str, Any]:
        """γ = 0: every token is worth its own reward, which is 1."""
        return {"gamma": 0.0}

    @pydantic.model_validator(mode="after")
    def _weighs_all_alike(self) -> "DemonstrationRecipe":
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


class SftRecipe(DemonstrationRecipe):
    """Supervised fine-tuning of a model on demonstrations."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_loss", "policy_loss")

    kind: Literal["sft"] = "sft"
    """what is trained, and how: control, sft, reward, dpo or language"""

    @property
    def title(self) -> str:
        """What a run does, in a few words."""
        return f"SFT of {self.trained}"


class RewardRecipe(DemonstrationRecipe):
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


class DpoRecipe(DemonstrationRecipe):
    """A language model from pairs, with a frozen reference as anchor (DPO, IPO): a policy over two answers."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_accuracy", "policy_loss")

    kind: Literal["dpo"] = "dpo"
    """what is trained, and how: control, sft, reward, dpo or language"""
    reference: AnchorSettings = AnchorSettings()
    preference: PreferenceSettings = PreferenceSettings()

    @classmethod
    def switches(cls, algorithm: Objective) -> dict[str, Any]:
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
    def switches(cls, algorithm: Objective) -> dict[str, Any]:
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
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
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
    def mixed_rows(self) -> int:
        """Demonstrations per update, where some are mixed in."""
        reuse = self.objective.reuse
        return self.mixing.batch or self.responses // (reuse.minibatches if reuse else 1)

    @property
    def longest(self) -> int:
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
            if complaint := term_complaint(term):
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
