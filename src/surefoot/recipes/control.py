"""Recipes for agents in environments, and which combinations are refused."""

import contextlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points, packages_distributions, requires
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from surefoot.core.algorithms import MAX_COUNT
from surefoot.errors import SurefootError, did_you_mean, missing_extra
from surefoot.recipes.base import (
    Cores,
    Count,
    EvaluationSettings,
    Recipe,
    Seconds,
    Section,
    Size,
    Width,
    nearest_divisor,
    require_size,
)


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


class ControlEvaluation(EvaluationSettings):
    """Periodic greedy evaluation; the best agent is kept in best/."""

    episodes: int = Field(10, ge=0, le=MAX_COUNT)
    """episodes of each; 0 switches evaluation off"""


WHOLE = {"seed", "device", "threads", "rollout", "network", "normalise", "optimizer", "evaluation", "checkpoint"}
"""what every recipe states that a run or an agent keeps, whatever version wrote it; one typed by hand does not"""


class ControlRecipe(Recipe):
    """An agent in Gymnasium environments."""

    subject: ClassVar[str] = "task"
    scores: ClassVar[tuple[str, ...]] = ("evaluation_return", "episode_return")

    kind: Literal["control"] = "control"
    """what is trained, and how: control, sft, reward, dpo or language"""
    task: str
    """Gymnasium id, or module:function that makes an environment"""
    environment: dict[str, Any] = Field({})
    """keyword arguments for the environment's maker"""
    rollout: RolloutSettings = RolloutSettings()
    network: Network = Network()
    normalise: NormaliseSettings = NormaliseSettings()
    evaluation: ControlEvaluation = ControlEvaluation()

    @classmethod
    def with_defaults(cls, table: dict[str, Any]) -> dict[str, Any]:
        """What was kept whole before there was ``normalise.actions`` goes on without."""
        normalise = table.get("normalise")
        if not (table.keys() >= WHOLE and isinstance(normalise, Mapping) and "actions" not in normalise):
            return table
        return {**table, "normalise": {**normalise, "actions": False}}

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
        reuse, objective, rollout = self.objective.reuse, self.objective, self.rollout
        require_size(self.batch_size, "steps", ("rollout.environments", rollout.environments), ("rollout.steps", rollout.steps))
        if reuse and self.network.lstm and self.rollout.environments % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: an LSTM learns from whole sequences, one per environment, "
                f"and this does not divide rollout.environments={self.rollout.environments}; choose a divisor, such as "
                f"{nearest_divisor(self.rollout.environments, reuse.minibatches)}"
            )
        if reuse and not objective.needs_whole_episodes and self.batch_size % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: does not divide the batch of {self.batch_size} steps "
                f"(rollout.environments={self.rollout.environments} x rollout.steps={self.rollout.steps}); "
                f"choose a divisor, such as {nearest_divisor(self.batch_size, reuse.minibatches)}"
            )
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
        if objective.compares_in_groups:
            raise SurefootError(
                f"objective.baseline={objective.baseline!r}: compares responses to the same prompt, which are for kind = "
                "'language'; set 'critic' or 'mean'"
            )
        if objective.ratio != "token":
            raise SurefootError(
                f"objective.ratio={objective.ratio!r}: is for sequences; control learns from single steps, set token"
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
        if objective.router_coefficient:
            raise SurefootError(
                f"objective.router_coefficient={objective.router_coefficient}: is for mixtures of experts in language; set 0"
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


def check_id(task: str, extra: Iterable[str] = ()) -> None:
    """Raise SurefootError, with a suggestion, if Gymnasium does not know an id; ``extra`` names may be suggested too."""
    import gymnasium

    if task.startswith("ALE/"):
        if importlib.util.find_spec("ale_py") is None:
            raise missing_extra("ale-py", "atari", f"task={task!r}")
        gymnasium.register_envs(importlib.import_module("ale_py"))
    if task in gymnasium.registry:
        return
    if task.endswith(".py"):
        raise SurefootError(f"task={task!r}: is a file; name the function that makes the environment, as in '{task}:make'")
    if package := _package_with(task):
        raise SurefootError(f"task={task!r}: is registered when {package} is imported; name it {f'{package}:{task}'!r}")
    suggestion = did_you_mean(task, {*gymnasium.registry, *extra})
    raise SurefootError(f"{task!r}: no recipe, .toml file or environment id of that name{suggestion} (see: surefoot list)")


def _package_with(task: str) -> str | None:
    """The installed package that registers an id when it is imported, or None.

    Tried are packages with the entry point ``gymnasium.envs``, and the package whose name begins the id, if it needs Gymnasium.
    """
    import gymnasium

    candidates = {entry.module.partition(".")[0] for entry in entry_points(group="gymnasium.envs")}
    first = re.split(r"\W", task)[0].lower()
    if any("gymnasium" in need for name in packages_distributions().get(first, ()) for need in requires(name) or ()):
        candidates.add(first)
    for package in sorted(candidates):
        with contextlib.suppress(Exception):  # a package that can't be imported registers nothing
            importlib.import_module(package)
        if task in gymnasium.registry:
            return package
    return None
