"""Which class trains which kind of recipe, and what a checkpoint holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.core.rollout import World
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import SupervisedRecipe, LanguageRecipe
from surefoot.runs.checkpoint import require


def make_world(recipe: Recipe, task: Callable[..., Any] | None = None, environments: int | None = None) -> World:
    """The world that a recipe asks for; ``task`` makes the environments of control where the recipe's can't be imported, and
    ``environments`` says how many are enough to look at it.
    """
    if isinstance(recipe, ControlRecipe):
        from surefoot.control.world import ControlWorld

        return ControlWorld(recipe, task, environments)
    if isinstance(recipe, LanguageRecipe):
        from surefoot.language.online.world import LanguageWorld

        return LanguageWorld(recipe)
    assert isinstance(recipe, SupervisedRecipe)
    from surefoot.language.supervised.world import SupervisedWorld

    return SupervisedWorld(recipe)


def load_result(trees: dict[str, Any], where: Path, trust_remote_code: bool = False) -> Any:
    """What a checkpoint's trees hold, as training gave it back: an agent, or a model of language.

    Raises SurefootError where they are not those of such a thing, or don't fit each other.
    """
    require(trees, ("agent", "recipe"), where)
    if trees["recipe"].get("kind", "control") == "control":
        from surefoot.control.agent import Agent

        return Agent.from_trees(trees, where)
    from surefoot.language.models.trained import from_trees

    return from_trees(trees, where, trust_remote_code)
