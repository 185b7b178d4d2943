"""What a run trains: the protocol that a session sees, and which class serves which kind of recipe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from surefoot.errors import SurefootError
from surefoot.kinds import ControlRecipe, DemonstrationRecipe, LanguageRecipe, Recipe
from surefoot.rollout import Beside, Collector, Metrics, Policy, Rollout
from surefoot.run.checkpoint import require


@dataclass(frozen=True)
class Judgement:
    """How good something is now."""

    score: float | None
    """what the best checkpoint is chosen by, more is better; None where nothing tells"""
    metrics: Metrics
    """what to tell of it"""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """what it said, a row each, where it says something"""


class World(Protocol):
    """One kind of task, as a run sees it."""

    @property
    def leaves(self) -> bool:
        """Whether ``finish`` leaves something, without which a run is not finished."""
        ...

    @property
    def facts(self) -> Sequence[str]:
        """What is trained, where that is not all of it: a line each, which a run begins with."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What to know before training begins, a line each: rows that were left out, memory that may not suffice."""
        ...

    @property
    def policy(self) -> Policy:
        """What is trained."""
        ...

    @property
    def collector(self) -> Collector:
        """Where experience comes from."""
        ...

    @property
    def beside(self) -> Beside | None:
        """A loss on other data, whose gradient is added to every update; None without one."""
        ...

    @property
    def result(self) -> Any:
        """What training gives back."""
        ...

    def arithmetic(self) -> list[str]:
        """Parameter counts and what the recipe comes to, for a dry run."""
        ...

    def trees(self) -> dict[str, Any]:
        """What a checkpoint holds of the trained thing itself; enough to load it without the run."""
        ...

    def load(self, trees: dict[str, Any], where: Path) -> list[str]:
        """Continue from a checkpoint's trees; one line for everything that could not be restored exactly."""
        ...

    def evaluate(self) -> Judgement | None:
        """How good it is now; None where there is nothing to judge on."""
        ...

    def describe(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """What a person wants to know of some steps of a row, beside its numbers; plain values, for traces."""
        ...

    def finish(self, folder: Path) -> list[str]:
        """Leave in a finished run's folder what others read, and say what."""
        ...

    def close(self) -> None:
        """Give back processes and windows."""
        ...


def make_world(recipe: Recipe, task: Callable[..., Any] | None = None, environments: int | None = None) -> World:
    """The world that a recipe asks for; ``task`` makes the environments of control where the recipe's can't be imported, and
    ``environments`` says how many are enough to look at it.
    """
    if isinstance(recipe, ControlRecipe):
        from surefoot.control.world import ControlWorld

        return ControlWorld(recipe, task, environments)
    if isinstance(recipe, LanguageRecipe):
        from surefoot.language.world import LanguageWorld

        return LanguageWorld(recipe)
    assert isinstance(recipe, DemonstrationRecipe)
    from surefoot.language.supervised import SupervisedWorld

    return SupervisedWorld(recipe)


def check_device(device: str) -> None:
    """Raise SurefootError unless PyTorch can use the device here."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise SurefootError(f"device={device!r}: can't be used here ({reason}); set device = 'cpu'") from None


def load_result(trees: dict[str, Any], where: Path, trust_remote_code: bool = False) -> Any:
    """What a checkpoint's trees hold, as training gave it back: an agent, or a model of language.

    Raises SurefootError where they are not those of such a thing, or don't fit each other.
    """
    require(trees, ("agent", "recipe"), where)
    if trees["recipe"].get("kind", "control") == "control":
        from surefoot.control.agent import Agent

        return Agent.from_trees(trees, where)
    from surefoot.language.trained import from_trees

    return from_trees(trees, where, trust_remote_code)
