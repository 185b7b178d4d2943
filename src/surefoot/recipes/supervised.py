"""Recipes that learn from given rows: SFT, reward models, and DPO with its relatives."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from surefoot.core.algorithms import MAX_COUNT, Objective
from surefoot.recipes.base import Section, TraceSettings, check_shares
from surefoot.recipes.models import ModelRecipe
from surefoot.recipes.rows import DataSettings


class SupervisedTraces(TraceSettings):
    """Traces: every number behind an update, for a few rows, in traces/; off by default."""

    rows: int = Field(0, ge=0, le=MAX_COUNT)
    """rows per trace; 0: no traces"""


class DpoReferenceSettings(Section):
    """The reference of DPO, IPO and KTO, and how close the model stays to it."""

    model: str | None = None
    """folder of the reference; none: the model that training starts from"""
    beta: float = Field(0.1, gt=0)
    """β: larger values stay closer to the reference. DPO, KTO: the implicit reward is β·(log π_θ − log π_ref). SimPO: the scale
    of the margin, by default 2. ORPO: λ, the weight of the odds ratio"""


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
    """kto: weight of good answers; together they usually weigh 1 to 4/3 times as much as the bad ones"""
    undesirable_weight: float = Field(1.0, gt=0)
    """kto: weight of bad answers"""


class RewardPreferenceSettings(Section):
    """The loss of a reward model."""

    loss: Literal["bradley_terry", "binary", "steps"] = "bradley_terry"
    """bradley_terry: the chosen answer of a pair is better with probability σ(difference of the scores); binary: a single
    answer is good with probability σ(score); steps: so is every step of an answer (process reward models)"""
    separator: str = "\n"
    """steps: text between two steps; empty: every character is a step"""


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

    @property
    def iteration_steps(self) -> int:
        """Rows of an update."""
        return self.data.batch


class SftRecipe(SupervisedRecipe):
    """Supervised fine-tuning on demonstrations."""

    scores: ClassVar[tuple[str, ...]] = ("held_out_loss", "policy_loss")

    kind: Literal["sft"] = "sft"

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
    demonstrations: str | None = None
    """rows on which the scores are normalised to mean 0 and standard deviation 1; none: the chosen or good answers of
    data.train"""
    preference: RewardPreferenceSettings = RewardPreferenceSettings()
    head: Literal["last", "pooled"] = "last"
    """last: the score is the output of a linear layer at the last token; pooled: its sum over the tokens of the answer, which
    learns more from a few hundred labels"""

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
    reference: DpoReferenceSettings = DpoReferenceSettings()
    preference: PreferenceSettings = PreferenceSettings()

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """γ = 0; the loss of a row is the sum over its labels."""
        return {"gamma": 0.0, "aggregation": "sequence-sum"}

    @classmethod
    def with_defaults(cls, table: dict[str, Any]) -> dict[str, Any]:
        """SimPO's β has another scale than a KL penalty."""
        if table.get("preference", {}).get("loss") == "simpo":
            table["reference"] = {"beta": SIMPO_BETA, **table.get("reference", {})}
        return table

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.preference.loss not in ("simpo", "orpo")

    @property
    def title(self) -> str:
        """The run in a few words."""
        return f"{self.preference.loss.upper()} of {self.trained}"
