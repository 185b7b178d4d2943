"""What a recipe asks for: that it can begin, its arithmetic, its memory, its environment or its reward."""

from surefoot.diagnostics.check import Check
from surefoot.errors import SurefootError
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.runs.api import make_world


def check_recipe(recipe: Recipe) -> list[Check]:
    """Everything about a recipe that can be known without training by it.

    A model is loaded and a few answers are sampled and scored; an environment is made, checked and stepped.
    """
    try:
        world = make_world(recipe)
    except SurefootError as error:
        wrong, _, fix = str(error).rpartition("; ")
        found = [Check("begins", "failed", wrong or fix, fix if wrong else "")]
        if isinstance(recipe, ControlRecipe):  # it may be the environment's fault, and then the checker says more
            found += _environment(recipe)
        return found
    try:
        found = [Check("begins", "ok", f"{recipe.title}, seed {recipe.seed}"), *_arithmetic(recipe, world.arithmetic())]
        found += [Check("notes", "warning", note) for note in world.warnings]
        if isinstance(recipe, LanguageRecipe):
            from surefoot.diagnostics.reward_function import check_reward
            from surefoot.language.online.world import LanguageWorld

            assert isinstance(world, LanguageWorld)
            found += check_reward(world)
    finally:
        world.close()
    if isinstance(recipe, ControlRecipe):
        found += _environment(recipe)
    return found


def _environment(recipe: ControlRecipe) -> list[Check]:
    from surefoot.diagnostics.environment import check_environment

    return check_environment(recipe.task, recipe.environment, recipe.seed, recipe.normalise.actions, recipe.network.log_std)


def _arithmetic(recipe: Recipe, lines: list[str]) -> list[Check]:
    """The lines of a dry run, one check each; a budget that buys less than one iteration is a warning."""
    found = []
    for line in lines:
        name, colon, what = line.partition(": ")
        found.append(Check(name, "ok", what) if colon else Check("notes", "ok", line))
    size = recipe.batch_size if isinstance(recipe, ControlRecipe) else getattr(recipe, "responses", 0)
    if size > recipe.steps and not recipe.objective.needs_whole_episodes:
        found.append(
            Check(
                "budget",
                "warning",
                f"steps = {recipe.steps:,} is less than one iteration collects ({size:,}): there will be one iteration",
                f"set steps to {20 * size:,} or more",
            )
        )
    return found
