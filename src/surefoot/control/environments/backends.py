"""Where the environments of a run are stepped: one after the other here, in worker processes, or by code of their own."""

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from surefoot.control.environments.atari import ATARI, make_atari_vector
from surefoot.control.environments.envpool import Pool
from surefoot.control.environments.faults import making_failed
from surefoot.control.environments.looped import (
    Environments,
    MakeEnvironment,
    VectorEnvironments,
    close_all,
    make_environments,
    task_name,
)
from surefoot.control.environments.workers import WorkerEnvironments, cores
from surefoot.errors import SurefootError
from surefoot.recipes.control import ControlRecipe


def training_environments(task: str | MakeEnvironment, recipe: ControlRecipe, count: int | None = None) -> Environments:
    """The environments that a recipe asks for, by ``rollout.backend``; ``count`` of them, where that is given.

    Raises SurefootError when the backend does not have the task, or the task can't be made.
    """
    rollout, arguments, seed = recipe.rollout, recipe.environment, recipe.seed
    count = rollout.environments if count is None else count
    if rollout.backend == "workers":
        return WorkerEnvironments(task, arguments, count, seed, rollout.workers or cores(), rollout.deadline)
    if rollout.backend == "native":
        return _vector(task, recipe, count, native)
    if rollout.backend == "envpool":
        return _vector(task, recipe, count, Pool)
    made = make_environments(task, arguments, count, seed)
    if isinstance(made, VectorEnvironments):
        try:
            _check_vector(recipe, task_name(task), made.count)
        except SurefootError:
            close_all([made])
            raise
    return made


def native(task: str, count: int, arguments: dict[str, Any]) -> VectorEnv[Any, Any, Any]:
    """The vector environment that an id has of its own.

    Raises SurefootError when it has none.
    """
    if task.startswith(ATARI):
        return make_atari_vector(task, count, arguments)
    if gymnasium.spec(task).vector_entry_point is None:
        raise SurefootError(
            f"rollout.backend='native': {task!r} has no vector environment of its own; set rollout.backend = 'workers', or "
            "'loop'"
        )
    return gymnasium.make_vec(task, num_envs=count, vectorization_mode="vector_entry_point", **arguments)


def _vector(
    task: str | MakeEnvironment,
    recipe: ControlRecipe,
    count: int,
    make: Callable[[str, int, dict[str, Any]], VectorEnv[Any, Any, Any]],
) -> VectorEnvironments:
    """A vector environment of an id, with the spaces of its single environments, in which the agent is evaluated."""
    name, backend = task_name(task), recipe.rollout.backend
    if not isinstance(task, str) or task.partition(":")[2]:
        raise SurefootError(
            f"rollout.backend={backend!r}: is for environment ids, and task={name!r} makes its own environments; set "
            "rollout.backend = 'workers' or 'loop'"
        )
    try:
        made = make(name, count, recipe.environment)
    except SurefootError:
        raise
    except Exception as error:
        raise making_failed(name, error) from error
    try:
        single = make_environments(task, recipe.environment, 1, recipe.seed)
        single.close()
        for kind in ("observation_space", "action_space"):
            theirs, ours = getattr(made, f"single_{kind}"), getattr(single, kind)
            if not _alike(theirs, ours):
                raise SurefootError(
                    f"rollout.backend={backend!r}: its {kind.replace('_', ' ')} of {name!r} is {theirs}, that of a single "
                    f"environment is {ours}; set rollout.backend = 'workers' or 'loop'"
                )
            setattr(made, f"single_{kind}", ours)
        return VectorEnvironments(made, recipe.seed, name)
    except BaseException:
        made.close()
        raise


def _alike(a: gymnasium.Space[Any], b: gymnasium.Space[Any]) -> bool:
    """Bounds and number types aside, which differ between implementations."""
    same = type(a) is type(b) and a.shape == b.shape
    return same and all(getattr(a, name, None) == getattr(b, name, None) for name in ("n", "start"))


def _check_vector(recipe: ControlRecipe, task: str, count: int) -> None:
    """Refuse at the start what a task that makes a vector environment can't do in the middle of a run."""
    if recipe.objective.needs_whole_episodes:
        raise SurefootError(
            f"task={task!r}: a vector environment can't run whole episodes side by side, and {recipe.algorithm} needs them; "
            "use an objective with a critic, or a task that makes single environments"
        )
    if recipe.evaluation.episodes:
        raise SurefootError(
            f"evaluation.episodes={recipe.evaluation.episodes}: evaluation needs single environments, and task={task!r} makes "
            "a vector environment; set evaluation.episodes = 0"
        )
    if recipe.rollout.environments != count:
        raise SurefootError(
            f"rollout.environments={recipe.rollout.environments}: task={task!r} makes a vector of {count}; set it to that"
        )
