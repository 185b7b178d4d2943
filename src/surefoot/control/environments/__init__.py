"""Make the environments of a task: a Gymnasium id, ``module:function`` (or ``pettingzoo/module:function``), or a callable.

MuJoCo's warnings go to Python's logging, each once; by default MuJoCo prints every one and writes MUJOCO_LOG.TXT.
"""

import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version
from gymnasium.vector import VectorEnv

from surefoot.control.environments.agents import AgentEnvironments, Seat, copies_of, is_turn_based
from surefoot.control.environments.atari import ATARI, make_atari
from surefoot.control.environments.looped import Environments, LoopedEnvironments, MakeEnvironment
from surefoot.control.environments.observations import masks_elsewhere, with_masks
from surefoot.control.environments.records import close_all
from surefoot.control.environments.vector import VectorEnvironments
from surefoot.errors import SurefootError, cause_of, place_of, require_package, to_install
from surefoot.recipes.callables import append_working_folder, import_object
from surefoot.recipes.control import TENSOR

if TYPE_CHECKING:  # what needs torch is imported where it is used, because worker processes start without torch
    from surefoot.control.environments.tensor import TensorEnvironments

MUJOCO_LOGGER = logging.getLogger("surefoot.mujoco")
EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "ale_py": "atari", "ale-py": "atari", "opencv": "atari"}
"""words in import errors -> the extra to install"""
PETTINGZOO = "pettingzoo/"
"""may begin the name of an environment with several agents: then ``environment`` may have the arguments of ``Seat``"""
_logged: set[str] = set()


def make_environments(
    task: str | MakeEnvironment,
    arguments: dict[str, Any],
    count: int,
    seed: int,
    purpose: str = "training",
    first: int = 0,
    device: str = "cpu",
) -> "Environments | TensorEnvironments":
    """B environments of a task: a Gymnasium id, ``module:function``, or a callable that makes an Env, a VectorEnv or a tensor
    environment; or of several agents: B rows, B copies in evaluation.

    first    the number of the first one, if these are a slice of more
    device   of the tensors of tensor environments

    Raises SurefootError when the task can't be made; it names the extra to install if one is missing.
    """
    name = task_name(task)
    made: list[Any] = []
    try:
        try:
            make = maker(task, arguments, purpose, count, device)
            made.append(make())
            if copies := copies_of(made[0]):
                waiting = iter(made)
                rows = count if purpose == "training" else count * len(copies[0].possible_agents)
                return AgentEnvironments(lambda: next(waiting, None) or make(), rows, seed, name, purpose, first)
            several = isinstance(made[0], VectorEnv) or is_tensor_environment(made[0])
            while len(made) < count and not several:
                made.append(make())
        except SurefootError:
            raise
        except (Exception, SystemExit) as error:
            raise making_error(name, error) from error
        if is_tensor_environment(made[0]):
            import torch

            from surefoot.control.environments.tensor import TensorEnvironments

            return TensorEnvironments(made[0], torch.device(device), seed, name, first)
        if isinstance(made[0], VectorEnv):
            return VectorEnvironments(made[0], seed, name, first, make)
        if not isinstance(made[0], gymnasium.Env):
            raise SurefootError(f"task={name!r}: made a {type(made[0]).__name__}, not a gymnasium.Env")
        ready = iter(made)
        looped = LoopedEnvironments(lambda: next(ready), count, seed, name, purpose, first)
        looped.reader.elsewhere = masks_elsewhere(made[0])
        return looped
    except BaseException:
        close_all(made)
        raise


def maker(
    task: str | MakeEnvironment, arguments: dict[str, Any], purpose: str = "training", count: int = 1, device: str = "cpu"
) -> Callable[[], Any]:
    """A function without arguments that makes one environment of a task. Atari environments differ in evaluation.

    A tensor environment has ``count`` rows on the device. In evaluation it is a Gymnasium environment with its only row.
    """
    training, seat = purpose == "training", {}
    if isinstance(task, str) and task.startswith(PETTINGZOO):
        seat = {key: value for key, value in arguments.items() if key in ("seat", "opponent")}
        task, arguments = task.removeprefix(PETTINGZOO), {key: x for key, x in arguments.items() if key not in seat}
        if task.startswith("pettingzoo."):
            require_package("pettingzoo", "pettingzoo", f"task={PETTINGZOO + task!r}")
    make = _maker(task, arguments, purpose, count if training else 1, device if training else "cpu")

    def make_and_log() -> Any:
        log_mujoco_warnings(task)
        made, name = make(), task_name(task)
        log_mujoco_warnings(task)  # for tasks that import MuJoCo when called
        if all(hasattr(made, attribute) for attribute in ("num_envs", "num_actions", "get_observations", "step")):
            from surefoot.control.environments.adapters import RslRlEnvironment

            made = RslRlEnvironment(made, name)
        if is_turn_based(made):
            made = Seat(made, name=name, **seat)
        if is_tensor_environment(made) and not training:
            from surefoot.control.environments.tensor import SingleEnvironment

            made = SingleEnvironment(made, name)
        _check_spaces(made, name)
        return with_masks(made)

    return make_and_log


def _check_spaces(made: Any, name: str) -> None:
    """Raise SurefootError for an environment without its spaces; vector environments have a check of their own."""
    if isinstance(made, VectorEnv) or not (isinstance(made, gymnasium.Env) or is_tensor_environment(made)):
        return
    prefix = "single_" if is_tensor_environment(made) else ""
    found = {f"{prefix}{kind}": getattr(made, f"{prefix}{kind}", None) for kind in ("observation_space", "action_space")}
    wrong = [
        f"no {key}" if space is None else f"{key} of {type(space).__module__}"
        for key, space in found.items()
        if not isinstance(space, gymnasium.Space)
    ]
    if wrong:
        raise SurefootError(
            f"task={name!r}: made an environment with {' and '.join(wrong)}; set {' and '.join(found)}, of gymnasium.spaces"
        )


def _maker(task: str | MakeEnvironment, arguments: dict[str, Any], purpose: str, count: int, device: str) -> Callable[[], Any]:
    if callable(task):
        function = task
        return lambda: function(**with_size(function, arguments, count, device))
    if task.startswith(TENSOR):
        name = task
        if purpose == "training":
            from surefoot.control.environments.classic import make_classic

            return lambda: make_classic(name, count, device, arguments)
        task = task.removeprefix(TENSOR)  # Gymnasium's own, which has the same steps
    if ":" in task:  # Gymnasium imports the module of an id such as module:Robot-v0
        append_working_folder()
    if not is_id(task):
        make = import_object("task", task, "or pass the function itself: surefoot.train(make), surefoot.resume(run, task=make)")
        return lambda: make(**with_size(make, arguments, count, device))
    if task.startswith(ATARI):
        return lambda: make_atari(task, purpose, **arguments)
    return lambda: gymnasium.make(task, disable_env_checker=True, **arguments)


def is_tensor_environment(made: Any) -> bool:
    """Whether an object is a tensor environment, by its attributes: rows, and a device that its tensors are on."""
    return all(hasattr(made, name) for name in ("num_envs", "device", "step"))


def with_size(task: Callable[..., Any], arguments: dict[str, Any], count: int, device: str) -> dict[str, Any]:
    """The arguments of a function that makes environments, with their number and device if it has these parameters."""
    try:
        taken = inspect.signature(task).parameters
    except (TypeError, ValueError):
        return arguments
    size = {"num_envs": count, "device": device} if "num_envs" in taken else {}
    return {name: value for name, value in size.items() if name in taken} | arguments


def is_id(task: str) -> bool:
    """Whether a task is an id, perhaps with the module that registers it (``module:Robot-v0``), and not ``module:function``."""
    function = task.partition(":")[2]
    return not function or function.rpartition("-v")[2].isdigit()


def spec_of(task: str) -> EnvSpec:
    """Gymnasium's specification of an id; the module of ``module:Robot-v0`` is imported first."""
    module, _, name = task.rpartition(":")
    if module:
        append_working_folder()
        importlib.import_module(module)
    return gymnasium.spec(name)


def task_name(task: str | MakeEnvironment) -> str:
    """The name of a task in messages and folders."""
    return task if isinstance(task, str) else str(getattr(task, "__name__", type(task).__name__))


def making_error(name: str, error: BaseException) -> SurefootError:
    """The error for an environment that could not be made; it names the extra to install if a package is missing."""
    text = str(error).replace("\n", " ")
    stem = name.rpartition("-v")[0]
    if text.startswith("The mujoco v2 and v3") and stem:  # Gymnasium still lists them
        return SurefootError(f"task={name!r}: was removed from Gymnasium; use '{stem}-v{find_highest_version(None, stem)}'")
    if isinstance(error, (gymnasium.error.DependencyNotInstalled, ImportError)):
        extra = next((value for key, value in EXTRAS.items() if key in text.lower()), None)
        if extra:
            return SurefootError(f"task={name!r}: needs an extra that is not installed; run: {to_install(extra)}")
    remedy = f"; fix it ({where})" if (where := place_of(error)) else ""
    if not where and isinstance(error, TypeError) and "argument" in text:
        remedy = "; its arguments are the table environment, such as { size = 8 }"
    return SurefootError(f"task={name!r}: could not be made ({cause_of(error)}){remedy}")


def log_mujoco_warnings(task: Any) -> None:
    """Send MuJoCo's warnings to logging, if ``task`` is one of Gymnasium's MuJoCo ids or MuJoCo is imported already."""
    spec = gymnasium.registry.get(task) if isinstance(task, str) else None
    if spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs.mujoco."):
        try:
            importlib.import_module("mujoco")
        except ImportError:
            return  # the error from making the environment names the extra
    module: Any = sys.modules.get("mujoco")
    if hasattr(module, "get_mju_user_warning") and module.get_mju_user_warning() is None:
        module.set_mju_user_warning(_log_once)


def _log_once(message: str) -> None:
    """Log each message once, whatever its numbers; deprecations, which only the model's author can fix, at debug level."""
    kind = re.sub(r"[\d.]+", "#", message)
    if kind not in _logged:
        _logged.add(kind)
        MUJOCO_LOGGER.log(logging.DEBUG if "deprecated" in message else logging.WARNING, "MuJoCo: %s", message)
