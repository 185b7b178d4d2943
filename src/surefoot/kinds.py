"""Recipes of every kind: what decides a run, the machine aside, and which combinations are refused.

A recipe is a frozen value. What follows from its fields (batch size, number of iterations) is a property, never filled in
later. ``KINDS`` lists the classes by the word that ``kind`` says. No torch is imported here, so that ``--help`` is quick.
"""

from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from surefoot.algorithms import Objective
from surefoot.errors import SurefootError
from surefoot.sections import (
    MAX_SEED,
    CheckpointSettings,
    ControlEvaluation,
    CriticSettings,
    DataSettings,
    DemonstrationTraces,
    EvaluationSettings,
    LanguageEvaluation,
    LanguageOptimizer,
    Network,
    NormaliseSettings,
    OptimizerSettings,
    PromptSettings,
    ReferenceSettings,
    RewardSettings,
    RolloutSettings,
    SamplingSettings,
    Section,
    Steps,
    TraceSettings,
)


class Recipe(Section):
    """What every run has, whatever is trained."""

    default_algorithm: ClassVar[str] = "PPO_CLIP"
    subject: ClassVar[str]
    """the field that says what is trained"""
    scores: ClassVar[tuple[str, ...]]
    """metrics that tell how well a run ended, the best known first"""

    kind: str
    """what is trained, and how: control, sft, reward or language"""
    algorithm: str = "PPO_CLIP"
    """name of the algorithm that [objective] starts from; \"custom\" starts from nothing"""
    steps: Steps = 100_000
    """the budget: environment steps in control; rows to learn from, or responses, in language"""
    seed: int = Field(1, ge=0, le=MAX_SEED)
    """decides everything random"""
    device: str = Field("cpu", pattern=r"^(cpu|mps|cuda(:\d+)?)$")
    """where the network lives: cpu, cuda, cuda:1 …"""
    threads: int = Field(1, ge=1)
    """torch threads; one is fastest for small networks, and results are exact for a given number"""
    engine: Literal["eager", "compiled"] = "eager"
    """compiled runs each update as one compiled program: many times faster, once a C++ compiler has made it (about 30 s)"""
    objective: Objective
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    traces: TraceSettings = TraceSettings()

    @classmethod
    def switches(cls, algorithm: Objective) -> dict[str, Any]:
        """What this kind sets otherwise in an algorithm's objective, where a recipe doesn't say."""
        return {}

    @property
    def trained(self) -> str:
        """What is trained, by name."""
        return str(getattr(self, self.subject))

    @property
    def title(self) -> str:
        """What a run does, in a few words."""
        return f"{self.algorithm} on {self.trained}"

    @property
    def compiled_rows(self) -> int | None:
        """How many single steps an update by the compiled engine reads; None for the eager one."""
        return None

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations."""
        return self.evaluation.every or max(1, self.steps // 10)

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints."""
        return self.checkpoint.every or max(1, self.steps // 10)

    @property
    def trace_every(self) -> int:
        """Steps between traces."""
        return self.traces.every or max(1, self.steps // 10)


class ControlRecipe(Recipe):
    """An agent in Gymnasium environments."""

    subject: ClassVar[str] = "task"
    scores: ClassVar[tuple[str, ...]] = ("evaluation_return", "episode_return")

    kind: Literal["control"] = "control"
    """what is trained, and how: control, sft, reward or language"""
    task: str
    """Gymnasium id, or module:function that makes an environment"""
    environment: dict[str, Any] = Field({})
    """keyword arguments for the environment's maker"""
    rollout: RolloutSettings = RolloutSettings()
    network: Network = Network()
    normalise: NormaliseSettings = NormaliseSettings()
    evaluation: ControlEvaluation = ControlEvaluation()

    @property
    def batch_size(self) -> int:
        """Steps per iteration, where they are counted in steps."""
        return self.rollout.environments * self.rollout.steps

    @property
    def compiled_rows(self) -> int | None:
        """The whole batch, where the recipe asks for the compiled engine."""
        return self.batch_size if self.engine == "compiled" else None

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "ControlRecipe":
        reuse, objective = self.objective.reuse, self.objective
        if reuse and self.network.lstm and self.rollout.environments % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: an LSTM learns from whole sequences, one per environment, "
                f"and this does not divide rollout.environments={self.rollout.environments}; choose a divisor, such as "
                f"{_nearest_divisor(self.rollout.environments, reuse.minibatches)}"
            )
        if reuse and not objective.needs_whole_episodes and self.batch_size % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: does not divide the batch of {self.batch_size} steps "
                f"(rollout.environments={self.rollout.environments} x rollout.steps={self.rollout.steps}); "
                f"choose a divisor, such as {_nearest_divisor(self.batch_size, reuse.minibatches)}"
            )
        rollout = self.rollout
        if rollout.workers is not None and rollout.backend != "workers":
            raise SurefootError(
                f"rollout.workers={rollout.workers}: environments run in backend {rollout.backend!r}; set rollout.backend = "
                "'workers', or unset it"
            )
        if rollout.workers is not None and rollout.workers > rollout.environments:
            raise SurefootError(
                f"rollout.workers={rollout.workers}: more processes than rollout.environments={rollout.environments}; set at "
                "most that many"
            )
        if rollout.backend in ("native", "envpool") and objective.needs_whole_episodes:
            raise SurefootError(
                f"rollout.backend={rollout.backend!r}: can't run whole episodes side by side, and {self.algorithm} needs them; "
                "set 'workers' or 'loop', or use an objective with a critic"
            )
        if objective.aggregation != "token-mean":
            raise SurefootError(
                f"objective.aggregation={objective.aggregation!r}: is for sequences; control learns from single steps, "
                "set token-mean"
            )
        if objective.reference_coefficient:
            raise SurefootError(
                f"objective.reference_coefficient={objective.reference_coefficient}: control has no reference policy; set 0"
            )
        if objective.baseline != "critic" and self.optimizer.critic_learning_rate is not None:
            raise SurefootError(
                f"optimizer.critic_learning_rate={self.optimizer.critic_learning_rate}: {self.algorithm} has no critic; "
                "unset it"
            )
        if self.network.shared_trunk and objective.constraint is not None and objective.baseline == "critic":
            raise SurefootError(
                f"network.shared_trunk=true: under a KL constraint ({self.algorithm}) the critic is fitted apart from the "
                "policy and can't share its trunk; set network.shared_trunk = false"
            )
        if self.optimizer.micro_batch_tokens is not None:
            raise SurefootError(
                f"optimizer.micro_batch_tokens={self.optimizer.micro_batch_tokens}: counts tokens of text, and control has "
                "none; set optimizer.micro_batch"
            )
        if self.engine == "compiled":
            self._can_be_compiled()
        if self.network.shared_trunk and self.optimizer.critic_learning_rate is not None:
            raise SurefootError(
                f"optimizer.critic_learning_rate={self.optimizer.critic_learning_rate}: a critic on a shared trunk cannot "
                "have its own optimizer; unset it, or set network.shared_trunk = false"
            )
        return self

    def _can_be_compiled(self) -> None:
        """Raise SurefootError where an update has no static shape, or is more than one gradient step per minibatch."""
        reasons = {
            f"{self.algorithm} takes natural steps": self.objective.constraint is not None,
            f"{self.algorithm} collects whole episodes, whose lengths differ": self.objective.needs_whole_episodes,
            f"device = {self.device!r} is not the CPU": self.device != "cpu",
            "network.lstm learns from whole sequences": self.network.lstm is not None,
            "optimizer.micro_batch splits the minibatch": self.optimizer.micro_batch is not None,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise SurefootError(f"engine='compiled': {reason}; set engine = 'eager'")


def _nearest_divisor(total: int, wanted: int) -> int:
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - wanted), d))


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
        wanted = Objective(
            gamma=0.0, aggregation=self.objective.aggregation, aggregation_length=self.objective.aggregation_length
        )
        if self.objective != wanted:
            raise SurefootError(
                f"objective: kind = {self.kind!r} learns from rows that are all worth 1 (REINFORCE with gamma = 0); only its "
                "aggregation can be set"
            )
        return self


class SftRecipe(DemonstrationRecipe):
    """Supervised fine-tuning of a model on demonstrations."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_loss", "policy_loss")

    kind: Literal["sft"] = "sft"
    """what is trained, and how: control, sft, reward or language"""

    @property
    def title(self) -> str:
        """What a run does, in a few words."""
        return f"SFT of {self.trained}"


class RewardRecipe(DemonstrationRecipe):
    """A reward model from pairs of a chosen and a rejected answer (Bradley-Terry): a policy over two answers."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_accuracy", "accuracy")

    kind: Literal["reward"] = "reward"
    """what is trained, and how: control, sft, reward or language"""
    demonstrations: str | None = None
    """rows on which the scores are brought to mean 0 and standard deviation 1; none: the chosen answers of data.train"""

    @property
    def title(self) -> str:
        """What a run does, in a few words."""
        return f"reward model from {self.trained}"


class LanguageRecipe(ModelRecipe):
    """A language model by policy gradient: policy, value, reference and reward."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_reward", "reward")

    kind: Literal["language"] = "language"
    """what is trained, and how: control, sft, reward or language"""
    data: PromptSettings
    sampling: SamplingSettings = SamplingSettings()
    reward: RewardSettings
    reference: ReferenceSettings = ReferenceSettings()
    critic: CriticSettings = CriticSettings()

    @classmethod
    def switches(cls, algorithm: Objective) -> dict[str, Any]:
        """The usual settings for responses: γ = 1, advantages normalised over the whole batch, few passes."""
        reuse = {"reuse": {"epochs": 4, "minibatches": 4}} if algorithm.reuse else {}
        return {"gamma": 1.0, "normalise_advantages": "batch", **reuse}

    @property
    def responses(self) -> int:
        """Responses per iteration."""
        return self.sampling.prompts * self.sampling.samples

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "LanguageRecipe":
        reuse, critic = self.objective.reuse, self.objective.baseline == "critic"
        if reuse and self.responses % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: does not divide the {self.responses} responses of an "
                f"iteration (sampling.prompts={self.sampling.prompts} x sampling.samples={self.sampling.samples}); choose a "
                f"divisor, such as {_nearest_divisor(self.responses, reuse.minibatches)}"
            )
        for term in self.reward.terms:
            if (term.model is None) == (term.function is None):
                raise SurefootError(
                    f"reward.terms={term.model or term.function!r}: each term is a model or a function; set one"
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


KINDS: dict[str, type[Recipe]] = {
    "control": ControlRecipe,
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "language": LanguageRecipe,
}
"""every kind of run, by name"""
