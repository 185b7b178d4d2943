"""The sections of a recipe: frozen tables, each field with its range and its meaning."""

from typing import Annotated, Literal

import pydantic
from pydantic import ConfigDict, Field

MAX_SEED = 2**53
Steps = Annotated[int, Field(ge=1)]


class Section(pydantic.BaseModel):
    """A frozen table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Network(Section):
    """The policy network of control."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (64, 64)
    """widths of the hidden layers"""
    activation: Literal["tanh", "relu"] = "tanh"
    """between the layers"""
    shared_trunk: bool = False
    """let actor and critic share all layers but the last"""
    log_std: float = 0.0
    """initial log standard deviation of Box actions"""
    lstm: int | None = Field(None, ge=1)
    """width of an LSTM behind the hidden layers, for observations that don't tell all; none: no memory"""
    custom: str | None = None
    """module:factory of a network of your own, in place of encoders and hidden layers"""


class OptimizerSettings(Section):
    """How θ moves."""

    learning_rate: float = Field(3e-4, gt=0)
    """Adam's learning rate; under TRPO the critic's, unless critic_learning_rate is set"""
    schedule: Literal["constant", "linear"] = "constant"
    """linear falls to zero over the budget"""
    epsilon: float = Field(1e-5, gt=0)
    """Adam's epsilon"""
    max_grad_norm: float | None = Field(0.5, gt=0)
    """scale larger gradients down to this norm; TRPO's own step is bounded by its KL and not by this"""
    critic_learning_rate: float | None = Field(None, gt=0)
    """give the critic its own optimizer, with this learning rate"""
    critic_max_grad_norm: float | None = Field(0.5, gt=0)
    """gradient clip of the critic's own optimizer"""
    micro_batch: int | None = Field(None, ge=1)
    """rows per backward pass; bounds memory, changes no gradient"""


class RolloutSettings(Section):
    """How much experience is collected before each update."""

    environments: int = Field(8, ge=1)
    """environments stepped together"""
    steps: int = Field(128, ge=1)
    """steps of each environment per iteration"""
    episodes: int = Field(1, ge=1)
    """whole episodes of each environment per iteration, instead of steps, where the objective has no critic"""
    at_least: int | None = Field(None, ge=1)
    """instead of a number of episodes: whole ones until a batch has this many steps, where the objective has no critic"""
    backend: Literal["loop", "workers", "native", "envpool"] = "loop"
    """where environments run: in this process, in worker processes, or in the id's own vector environment or EnvPool's"""
    workers: int | None = Field(None, ge=1)
    """how many processes for backend "workers"; none means one per core"""
    deadline: float = Field(60.0, gt=0)
    """seconds that one step or reset of an environment may take in a worker process"""


class NormaliseSettings(Section):
    """Running normalisation of what the network sees."""

    observations: bool = False
    """shift and scale observations by their running mean and standard deviation"""
    rewards: bool = False
    """divide rewards by the running standard deviation of the discounted return"""
    clip: float = Field(10.0, gt=0)
    """clip what was normalised at ±this"""


class EvaluationSettings(Section):
    """Periodic greedy evaluation; the best agent is kept in best/."""

    every: int | None = Field(None, ge=1)
    """steps between evaluations; none means a tenth of the budget"""
    episodes: int = Field(10, ge=0)
    """episodes of each; 0 switches evaluation off"""
    seed: int = Field(1_000_000, ge=0, le=MAX_SEED)
    """seed of the evaluation episodes"""


class CheckpointSettings(Section):
    """What is saved, and when."""

    every: int | None = Field(None, ge=1)
    """steps between checkpoints; none means a tenth of the budget"""
    keep: int = Field(2, ge=1)
    """how many of the last are kept, besides best/"""
