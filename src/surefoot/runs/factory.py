"""Make the parts of a run from its recipe: the world, the learner and the engine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from surefoot.accel.programs import no_compiler
from surefoot.accel.steps import compiled_stepper
from surefoot.control.agent import Agent
from surefoot.control.world import ControlWorld
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import Adam8BitSettings, AdamSettings, RMSpropSettings, scheduled
from surefoot.core.rollout import Policy, World
from surefoot.ranks.collectives import exchange
from surefoot.recipes.base import SCHEDULES, Recipe
from surefoot.recipes.callables import CLIP_SCHEDULE, SCHEDULE, Functions, load_function
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.supervised import SupervisedRecipe

OPTIMIZERS: dict[str, type[AdamSettings]] = {"adam": AdamSettings, "adam-8bit": Adam8BitSettings, "rmsprop": RMSpropSettings}
"""settings by optimizer.kind"""


def make_world(
    recipe: Recipe, task: Callable[..., Any] | None = None, environments: int | None = None, functions: Functions | None = None
) -> World:
    """The world of a recipe. For control, ``task`` makes the environments if the recipe's task can't be imported, and
    ``environments`` limits their number, to inspect a recipe without training. ``functions`` are the rewards, or the network,
    that were passed as objects.
    """
    if isinstance(recipe, ControlRecipe):
        return ControlWorld(recipe, task, environments, functions)
    if isinstance(recipe, LanguageRecipe):
        from surefoot.language.online.world import LanguageWorld

        return LanguageWorld(recipe, functions)
    assert isinstance(recipe, SupervisedRecipe)
    from surefoot.language.supervised.world import SupervisedWorld

    return SupervisedWorld(recipe)


def start_from(world: World, agent: Agent | None = None) -> None:
    """Give a new agent the weights that its recipe, or the caller, says that it starts from."""
    if isinstance(world, ControlWorld) and (agent is not None or world.recipe.start is not None):
        world.start_from(agent)


def prepared_world(recipe: Recipe, environments: int | None = None) -> World:
    """The world of a recipe whose schedules can be used, with the weights that it starts from; to inspect it."""
    schedules_of(recipe)
    world = make_world(recipe, environments=environments)
    try:
        start_from(world)
    except BaseException:
        world.close()
        raise
    return world


def with_engine(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the engine that "auto" stands for, which a resumed run keeps; and a line with the reason, unless it is
    eager in control as in most runs. Without a compiler on one of the ranks it is eager too.
    """
    if recipe.engine != "auto":
        return recipe, ()
    engine, reason = recipe.engine_choice()
    shown = engine == "compiled" or recipe.kind != "control"  # where "auto" was asked for
    if engine == "compiled" and (obstacles := [obstacle for obstacle in exchange(no_compiler()) if obstacle]):
        engine, reason = "eager", f"{obstacles[0]}; with one, this run would be compiled, and faster"
    return recipe.with_value("engine", engine), (f"engine: {engine} ({reason})",) if shown else ()


def make_learner(recipe: Recipe, policy: Policy, functions: Functions | None = None) -> Learner:
    """The learner that a recipe describes; ``functions`` are the schedules that were passed as objects.

    Raises SurefootError for a schedule that can't be imported, and for moments in 8 bits without ``bitsandbytes``.
    """
    settings = recipe.optimizer
    kind = OPTIMIZERS[settings.kind]
    if kind is Adam8BitSettings:
        from surefoot.language.models.quantised import require_bitsandbytes

        require_bitsandbytes(f"optimizer.kind={settings.kind!r}")
    critic, (rate_schedule, clip_schedule) = None, schedules_of(recipe, functions)
    if settings.critic_learning_rate is not None:
        critic = kind(settings.critic_learning_rate, settings.epsilon, settings.critic_max_grad_norm, settings.weight_decay)
    adam = kind(settings.learning_rate, settings.epsilon, settings.max_grad_norm, settings.weight_decay)
    moving = LearnerSettings(
        adam,
        critic,
        rate_schedule,
        settings.warmup,
        settings.kl_target,
        clip_schedule,
        settings.micro_batch,
        settings.micro_batch_tokens,
    )
    if recipe.compiled_rows is not None:
        moving = replace(moving, stepper=partial(compiled_stepper, rows=recipe.compiled_rows))
    return Learner(policy, recipe.objective, moving)


def schedules_of(recipe: Recipe, functions: Functions | None = None) -> tuple[Any, Any]:
    """The schedules of the learning rate and of the clip, each a name or a function; None without a clip.

    Raises SurefootError for a function that can't be imported, or fails, which is tried now: before training.
    """
    clip = recipe.objective.clip
    named = {SCHEDULE: recipe.optimizer.schedule, CLIP_SCHEDULE: None if clip is None else clip.schedule}
    loaded: dict[str, Any] = {}
    for field, name in named.items():
        loaded[field] = name if name in (None, *SCHEDULES) else load_function(field, name, functions or {})
        for left in (1.0, 0.5) if callable(loaded[field]) else ():
            scheduled(field, loaded[field], left)
    return loaded[SCHEDULE], loaded[CLIP_SCHEDULE]
