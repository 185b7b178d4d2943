"""The fields that every kind of language-model recipe has: the model, its adapter, optimizer and evaluation."""

import re
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic
from pydantic import Field

from surefoot.core.algorithms import MAX_LENGTH
from surefoot.errors import SurefootError
from surefoot.files import BOOLEAN_WORDS
from surefoot.recipes.base import EvaluationSettings, OptimizerSettings, Recipe, Section, Width, names_in


class LanguageEvaluation(EvaluationSettings):
    """Periodic evaluation on held-out rows; the best checkpoint is kept in best/."""

    rows: int = Field(256, ge=0, le=MAX_LENGTH)
    """held-out rows per evaluation, from the first row; 0: no evaluation"""


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
    """layers with adapters, by the ends of their names, such as ["q_proj", "v_proj"]; all-linear: all linear layers of the
    trunk, without fused experts ("experts.gate_up_proj")"""
    quantize: Literal["int8", "nf4"] | None = None
    """hold the frozen weights of the trunk's linear layers in 8 or 4 bits (QLoRA), by bitsandbytes (extra ``quantized``). int8
    rounds activations to 8 bits too"""
    merge: bool = True
    """also save the merged model in model/; false: save adapter/ only"""


SMALL, SMALLEST_RATE = 5_000_000, 5e-5
"""parameters of a model and its learning rate, below which it learns slowly; presets for large models have 1e-6 to 1e-5"""


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
    """of all models. bfloat16: matrix products in autocast, weights stay float32; bfloat16-weights: weights are bfloat16, and
    the optimizer keeps float32 copies of trained ones. Adapters and heads are always float32"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    padding_free: bool = False
    """read the rows of a pass end to end instead of padding them, and a prompt once for all rows that begin with it: less time
    and memory. Models with recurrent layers, or attention other than sdpa, are padded, and the run prints why"""
    sharding: Literal["full", "hybrid"] | None = None
    """how several ranks hold models. none: each has all weights; full: each has a part of every weight, gradient and moment
    (FSDP2); hybrid: parts among the ranks of a machine, copies on the others"""
    reshard_after_forward: bool = True
    """with sharding: drop a layer's gathered weights after its forward pass; false: keep them until its backward pass, faster
    and with more memory"""
    offload: bool | tuple[Role, ...] = False
    """what is in the memory of the CPU. true: with sharding, all models, gradients and moments; a list, such as ["reference",
    "reward"]: these models of an online run while they are not used; "critic" is the critic's own model"""
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

    def compiled_obstacle(self) -> str | None:
        """The error of a recipe whose blocks can't be compiled, None if they can."""
        obstacles = {
            "adapters with dropout": self.adapter is not None and self.adapter.dropout > 0,
            "adapters on a base in 4 or 8 bits": self.adapter is not None and self.adapter.quantize is not None,
            "sharded models": self.sharding is not None,
            "gradient_checkpointing = true, which computes layers again": self.gradient_checkpointing,
            "the load-balancing loss of experts": self.objective.router_coefficient > 0,
        }
        what = next((what for what, holds in obstacles.items() if holds), None)
        return None if what is None else f"engine='compiled': is not for {what}; set engine = 'eager'"

    def notes(self, parameters: int) -> list[str]:
        """Warnings about settings that are allowed, but seldom meant; ``parameters``: how many the model has."""
        rate = self.optimizer.learning_rate
        if parameters < SMALL and rate < SMALLEST_RATE:
            return [
                f"optimizer.learning_rate={rate:g}: is for large models, and this one has {parameters / 1e6:.1f} M parameters, "
                "which learn slowly at this rate; 1e-3 suits SFT, and 3e-4 PPO"
            ]
        return []
