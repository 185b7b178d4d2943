"""Recipes of agents in environments, the checks of their fields, and of environment ids."""

import ast
import contextlib
import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import distribution, entry_points, packages_distributions, requires
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from surefoot.core.algorithms import ALGORITHMS, MAX_COUNT
from surefoot.errors import SurefootError, cause_of, did_you_mean, require_package
from surefoot.files import BOOLEAN_WORDS, read_bytes
from surefoot.recipes.base import (
    Cores,
    Count,
    EvaluationSettings,
    Recipe,
    Seconds,
    Section,
    Size,
    Width,
    check_shares,
    names_in,
    nearest_divisor,
)

TENSOR = "tensor/"
"""begins the ids of tensor environments that Surefoot has: tensor/CartPole-v1"""
TENSOR_IDS = tuple(TENSOR + name for name in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0"))
COMPILED = "engine='compiled': "
TRACED_ITERATIONS = 4
"""iterations from one trace to the next, at least: with the compiled engine they learn about as long as a traced one"""
COMPILING = 40.0
"""seconds that compiling a recipe's programs may take, on a slow core"""
SAVED_PER_UPDATE, SAVED_PER_CALL = 4e-4, 3e-5
"""seconds that a compiled update, and a compiled call of the policy, save at least, on a fast core (benchmarks/engines.py)"""
COMPILED_LSTM = 64
"""width of an LSTM up to which a compiled update saves that (docs/benchmarks/engines.md)"""
COMPILING_NATURAL, SAVED_PER_NATURAL_STEP = 60.0, 2e-2
"""the same of the programs of a natural step"""
RUN_METRICS = {"return", "length"}
"""what follows ``episode_`` in the metrics of every run"""


MAKERS = ("make", "make_env", "make_environment")
"""usual names of a function that makes an environment, such as one with a time limit"""

PartNames = Annotated[
    Annotated[tuple[Annotated[str, Field(min_length=1, max_length=128)], ...], Field(min_length=1, max_length=256)] | None,
    BeforeValidator(names_in),
]
"""names of the parts of an observation"""


def with_class(task: str) -> str:
    """``file.py:Class`` for a file with one environment class, which is parsed and not run; any other task as it is.

    An environment class has the methods ``reset`` and ``step``, or inherits from such a class of the file, or if there is none,
    from a class named ``…Env`` or ``…Wrapper``. A function ``make`` counts too. Raises SurefootError unless there is one.
    """
    if not task.endswith(".py"):
        return task
    path = Path(task).expanduser()
    if not path.is_file():
        raise SurefootError(f"task={task!r}: there is no file {path.resolve()}; check the path")
    try:
        module = ast.parse(read_bytes(path), path.name)
    except (SyntaxError, ValueError) as error:
        raise SurefootError(f"task={task!r}: can't be read ({cause_of(error)}); fix the file") from None
    names: list[str] = []
    bases = {each.name: [ast.unparse(base) for base in each.bases] for each in module.body if isinstance(each, ast.ClassDef)}
    for thing in module.body:
        if isinstance(thing, ast.ClassDef):
            methods = {part.name for part in thing.body if isinstance(part, ast.FunctionDef)}
            if {"reset", "step"} <= methods or not {*names}.isdisjoint(bases[thing.name]):
                names.append(thing.name)
    names = names or [name for name, parents in bases.items() if any(base.endswith(("Env", "Wrapper")) for base in parents)]
    names += [each.name for each in module.body if isinstance(each, ast.FunctionDef) and each.name in MAKERS]
    if len(names) != 1:
        found = f"has several environments ({', '.join(names)})" if names else "has no class with the methods reset and step"
        example = names[0] if names else "make"
        raise SurefootError(f"task={task!r}: {found}; name a class or function, as in '{task}:{example}'")
    return f"{task}:{names[0]}"


class Network(Section):
    """The policy network."""

    hidden: Annotated[tuple[Width, ...], Field(max_length=100)] = (64, 64)
    """widths of the hidden layers"""
    activation: Literal["tanh", "relu"] = "tanh"
    """activation between the layers"""
    shared_trunk: bool = False
    """share all layers of actor and critic except the last"""
    log_std: float = 0.0
    """initial log standard deviation of Box actions"""
    lstm: Width | None = None
    """width of an LSTM after the hidden layers, for partial observations"""
    custom: str | None = None
    """module:function that makes your own network, instead of encoders and hidden layers"""
    actor_parts: PartNames = None
    """parts of a Dict observation that the policy reads; none: all"""
    critic_parts: PartNames = None
    """parts of a Dict observation that the critic reads, also such as the policy lacks (privileged); none: all"""


class RolloutSettings(Section):
    """Environments, and the steps of one iteration."""

    environments: Count = 8
    """number of environments"""
    steps: Count = 128
    """steps of each environment per iteration"""
    episodes: Count = 1
    """without a critic: whole episodes of each environment per iteration, instead of steps"""
    at_least: Size | None = None
    """without a critic: collect whole episodes until the batch has this many steps"""
    backend: Literal["loop", "workers", "native", "envpool"] = "loop"
    """loop: environments run in this process; workers: in worker processes; native: the id's own vector environment; envpool:
    EnvPool"""
    workers: Cores | None = None
    """worker processes of backend "workers"; none: one per core"""
    deadline: Seconds = 60.0
    """seconds that a step or reset in a worker process may take"""
    info: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=64)] | None = None
    """numbers in the info of an episode's last step whose means are the metrics episode_NAME and evaluation_NAME; none:
    is_success and success, if they are there"""

    symmetry: str | None = None
    """module:function (or a function in Python) from observations and actions to their mirror images, which the update learns
    from too"""

    @pydantic.field_validator("info", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        names = names_in(value)
        for name in RUN_METRICS.intersection(x for x in names if isinstance(x, str)) if isinstance(names, list) else ():
            raise SurefootError(f"rollout.info={names}: episode_{name} is a metric of every run; rename {name!r}")
        return names


def _check_parts(value: Any) -> Any:
    """A boolean, or the names of parts."""
    if isinstance(value, int) or (isinstance(value, str) and value.lower() in BOOLEAN_WORDS):
        return value
    names = names_in(value)
    if isinstance(names, list) and names and all(isinstance(name, str) and name for name in names):
        return names
    raise SurefootError(
        f"normalise.observations={value!r}: must be true, false, or a list of the names of parts, such as ['position']"
    )


class NormaliseSettings(Section):
    """Scales of observations, rewards and actions."""

    observations: Annotated[bool | tuple[str, ...], BeforeValidator(_check_parts)] = False
    """subtract the running mean of observations and divide by their running standard deviation; a list of names: only these
    parts of a Dict or Tuple. Images, bits and choices are never normalised"""
    rewards: bool = False
    """divide rewards by the running standard deviation of the discounted return"""
    actions: bool = True
    """scale the policy's −1 … 1 to the bounds of Box actions, if both are finite; false: only clip actions to the bounds"""
    clip: float = Field(10.0, gt=0)
    """clip normalised observations and rewards at ±this"""


class ClipPreferences(Section):
    """Rewards learned from comparisons of clips, which are equally long pieces of episodes, instead of the task's."""

    judge: Literal["return", "people"] = "return"
    """return: the clip with more of the task's reward is better; people: the run stops where labels are needed, for surefoot
    label RUN and then surefoot resume RUN"""
    labels: int = Field(400, ge=2, le=MAX_COUNT)
    """pairs of clips that are labelled"""
    segment: int = Field(25, ge=2, le=MAX_COUNT)
    """steps of a clip; about a second is best"""
    first: float = Field(0.5, gt=0, le=1)
    """share of the labels that is asked for before the first update"""
    refits: Count = 5
    """how often the rest is asked for and the reward models are trained again"""
    until: float = Field(0.75, gt=0, le=1)
    """share of the steps over which the refits are spread; less, with an objective.entropy_coefficient, helps where the policy
    stops exploring before it is corrected"""
    weight_decay: float = Field(10.0, ge=0, le=100)
    """of the reward models, decoupled; strong decay keeps wrong labels from being learned, and 1 taught the pendulum better"""
    errors: float = Field(0.0, ge=0, lt=0.5)
    """share of wrong labels, of judge = "return" alone"""
    terminations: Literal["reject", "keep"] = "reject"
    """reject: an error if an episode terminates, because comparisons don't show whether longer episodes are better; keep: train
    anyway"""


class Cloning(Section):
    """Behaviour cloning: learn from rows of observations and actions, by maximum likelihood, instead of from rewards."""

    data: str
    """a file of JSON lines with observation and action (in Python also the rows), or minari:NAME, a data set of Minari"""
    batch: Size = 256
    """rows per update; steps counts rows"""


class ControlEvaluation(EvaluationSettings):
    """Periodic greedy evaluation; the best agent is kept in best/. Without ``every``, a run of less than ten iterations is
    evaluated only at its end.
    """

    episodes: int = Field(10, ge=0, le=MAX_COUNT)
    """episodes per evaluation; 0: no evaluation"""


class ControlRecipe(Recipe):
    """An agent in Gymnasium environments."""

    subject: ClassVar[str] = "task"
    scores: ClassVar[tuple[str, ...]] = ("evaluation_return", "episode_return")

    kind: Literal["control"] = "control"
    task: Annotated[str, AfterValidator(with_class)]
    """Gymnasium id; module:function, or file.py:function, that makes an environment; or a file with one environment class"""
    environment: dict[str, Any] = Field({})
    """keyword arguments of the environment"""
    engine: Literal["eager", "compiled", "auto"] = "auto"
    start: str | None = None
    """agent or run that training starts from, with its weights and normalisers; none: new weights"""
    rollout: RolloutSettings = RolloutSettings()
    network: Network = Network()
    normalise: NormaliseSettings = NormaliseSettings()
    evaluation: ControlEvaluation = ControlEvaluation()
    preferences: ClipPreferences | None = None
    """learn the rewards from comparisons of clips; none: the task's rewards"""
    cloning: Cloning | None = None
    """learn from rows of observations and actions; none: from the task"""

    @property
    def batch_size(self) -> int:
        """Steps per iteration, unless the algorithm collects whole episodes."""
        return self.rollout.environments * self.rollout.steps

    @property
    def iteration_steps(self) -> int | None:
        """Steps of an iteration; None for whole episodes, for vector environments, which may not count every row, and for
        preferences, which first collect clips.
        """
        known = self.rollout.backend == "loop" and self.preferences is None and not self.objective.needs_whole_episodes
        return self.batch_size if known else None

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations. By default the whole budget if a tenth of it is less than an iteration, because such a run
        would spend most of its time on evaluations.
        """
        few = self.steps // 10 < self.batch_size and not self.objective.needs_whole_episodes
        return self.steps if few and self.evaluation.every is None else super().evaluate_every

    @property
    def trace_every(self) -> int:
        """Steps between traces; by default at least four iterations, unless those are whole episodes."""
        known = self.traces.every is not None or self.objective.needs_whole_episodes
        return super().trace_every if known else max(super().trace_every, TRACED_ITERATIONS * self.batch_size)

    @property
    def learned_steps(self) -> int:
        """Steps per iteration that the update learns from, mirror images included."""
        return self.batch_size * (1 if self.rollout.symmetry is None else 2)

    @property
    def compiled_rows(self) -> int | None:
        """Rows per update of the compiled engine: the whole batch; None for the eager engine."""
        return self.learned_rows if self.engine == "compiled" else None

    @property
    def learned_rows(self) -> int:
        """What is shuffled in an iteration: single steps, or with an LSTM one sequence per environment."""
        return self.learned_steps if self.network.lstm is None else self.rollout.environments

    def check_ranks(self, ranks: int) -> None:
        """Every rank has an environment, and rows for all minibatches."""
        if self.cloning is not None and ranks > 1:
            raise SurefootError(f"cloning: is for one process, and there are {ranks} ranks; train on one")
        if self.preferences is not None and ranks > 1:
            raise SurefootError(f"preferences: are compared by one process, and there are {ranks} ranks; train on one")
        rollout, rows = self.rollout, 1 if self.network.lstm else self.rollout.steps
        minibatches = 1 if self.objective.needs_whole_episodes else self.minibatches
        check_shares("rollout.environments", rollout.environments, ranks, rows, minibatches)

    def engine_choice(self) -> tuple[str, str]:
        """The engine that "auto" stands for where there is a compiler, and why. It depends on the recipe alone, not on cache
        or speed of the machine: the engines' numbers differ by rounding, and a recipe must give the same numbers again.
        """
        if (obstacle := self.compiled_obstacle()) is not None:
            return "eager", obstacle.removeprefix(COMPILED).partition(";")[0]
        if self.network.custom is not None:
            return "eager", "network.custom may have code that can't be compiled"
        if self.task.startswith("ALE/"):
            return "eager", "pictures take most of the time"
        reuse = self.objective.reuse
        if (self.network.lstm or 0) > COMPILED_LSTM:
            return "eager", f"network.lstm = {self.network.lstm} takes most of the time"
        iterations = -(-self.steps // self.batch_size)
        updates = iterations * (reuse.epochs * reuse.minibatches if reuse else 1)
        calls = iterations * self.rollout.steps
        saved, compiling = updates * SAVED_PER_UPDATE + calls * SAVED_PER_CALL, COMPILING
        if self.objective.constraint is not None:
            updates, saved = updates + iterations, saved + iterations * SAVED_PER_NATURAL_STEP
            compiling += COMPILING_NATURAL
        work = f"{updates:,} updates and {calls:,} calls of the policy save about {saved:,.0f} s, and compiling may take "
        work += f"{compiling:.0f} s"
        return ("compiled" if saved >= compiling else "eager"), work

    def compiled_obstacle(self) -> str | None:
        """The error of a recipe that has no compiled engine, None if it has one: a compiled update has a static shape."""
        reasons = {
            f"{self.algorithm} collects whole episodes, whose lengths differ": self.objective.needs_whole_episodes,
            f"device = {self.device!r} is not the CPU": self.device != "cpu",
            f"network.lstm has no compiled natural step ({self.algorithm})": (
                self.network.lstm is not None and self.objective.constraint is not None
            ),
            f"optimizer.kind = {self.optimizer.kind!r} has no compiled step": self.optimizer.kind != "adam",
            f"optimizer.weight_decay = {self.optimizer.weight_decay:g} has no compiled step": self.optimizer.weight_decay != 0,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            return f"{COMPILED}{reason}; set engine = 'eager'"
        if self.optimizer.schedule == "adaptive" and self.optimizer.micro_batch is None:
            return (
                "optimizer.schedule='adaptive': a compiled step has its learning rate before its KL is known; set "
                "optimizer.micro_batch, which compiles gradients alone, or engine = 'eager'"
            )
        micro_batch, minibatch = self.optimizer.micro_batch, self.learned_rows // self.minibatches
        unit = "steps" if self.network.lstm is None else "sequences"
        if micro_batch is not None and minibatch % micro_batch:
            return (
                f"optimizer.micro_batch={micro_batch}: compiled programs need micro-batches of one size, and this does not "
                f"divide the minibatch of {minibatch:,} {unit}; choose one that does: {nearest_divisor(minibatch, micro_batch)}"
            )
        return None


def check_id(task: str, extra: Iterable[str] = ()) -> None:
    """Raise SurefootError, with a suggestion, if Gymnasium does not know an id; ``extra`` names may be suggested too."""
    import gymnasium

    if task.startswith("ALE/"):
        require_package("ale-py", "atari", f"task={task!r}")
        gymnasium.register_envs(importlib.import_module("ale_py"))
    if task in gymnasium.registry or task in TENSOR_IDS:
        return
    if package := _package_with(task):
        raise SurefootError(f"task={task!r}: is registered when {package} is imported; name it {f'{package}:{task}'!r}")
    if task.upper() in ALGORITHMS:
        raise SurefootError(f"{task!r}: is an algorithm; run: surefoot train TASK --algorithm {task.upper()}")
    suggestion = did_you_mean(task, {*gymnasium.registry, *TENSOR_IDS, *extra})
    raise SurefootError(f"{task!r}: no recipe, .toml file or environment id of that name{suggestion} (see: surefoot list)")


def _package_with(task: str) -> str | None:
    """The installed package that registers an id when it is imported, or None.

    Tried are packages with the entry point ``gymnasium.envs``, and those that need Gymnasium and register something.
    """
    import gymnasium

    candidates = {entry.module.partition(".")[0] for entry in entry_points(group="gymnasium.envs")}
    candidates |= {module for module, names in packages_distributions().items() if any(map(_registers, names))}
    for package in sorted(candidates):
        with contextlib.suppress(Exception):  # a package that can't be imported registers nothing
            importlib.import_module(package)
        if task in gymnasium.registry:
            return package
    return None


@cache
def _registers(name: str) -> bool:
    """Whether an installed distribution needs Gymnasium and has a call that may register environments."""
    if not any(re.match(r"gymnasium\b", need) for need in requires(name) or ()):
        return False
    code = [file for file in distribution(name).files or () if file.suffix == ".py"]
    call = re.compile(r"\bregister(_envs?)?\(")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return not code or any(call.search(text) and "gym" in text for text in (file.read_text("utf-8") for file in code))
    return True
