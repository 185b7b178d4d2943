"""EnvPool's environments, written in C++ and stepped by its own threads, as a Gymnasium vector environment."""

import contextlib
import importlib
import io
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from surefoot.control.environments.atari import ATARI, AtariSettings, atari_settings
from surefoot.control.environments.vector import SAID
from surefoot.errors import SurefootError, cause_of, missing_extra


class Pool(VectorEnv[Any, Any, Any]):
    """``count`` environments of an id that EnvPool has. Its mode is NEXT_STEP.

    EnvPool takes its seed when it is made, so a reset with a seed makes another pool.
    Raises SurefootError when EnvPool is not installed, does not have the id, or refuses the arguments.
    """

    def __init__(self, task: str, count: int, arguments: dict[str, Any]) -> None:
        self.task, self.num_envs = task, count
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.atari: AtariSettings | None = None
        self.arguments = arguments
        if task.startswith(ATARI):
            self.atari, rest = atari_settings(arguments)
            self.arguments = {**_atari_arguments(self.atari), **rest}
        self.pool = self._make(0)
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)

    def _make(self, seed: int) -> Any:
        try:
            envpool = importlib.import_module("envpool")
        except ImportError:
            raise missing_extra("envpool", "envpool", "rollout.backend='envpool'") from None
        name = self.task.removeprefix(ATARI)
        if name not in envpool.list_all_envs():
            raise SurefootError(
                f"rollout.backend='envpool': EnvPool has no {name!r}; set rollout.backend = 'workers' or 'loop'"
            )
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")  # about float64 bounds of its own spaces
                pool = envpool.make(name, env_type="gymnasium", num_envs=self.num_envs, seed=seed, **self.arguments)
                self.single_observation_space: gymnasium.Space[Any] = pool.observation_space
                self.single_action_space: gymnasium.Space[Any] = pool.action_space
                return pool
        except Exception as error:
            raise SurefootError(
                f"task={self.task!r}: EnvPool could not make it with environment={self.arguments} ({cause_of(error)})"
            ) from error

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.pool.close()
            self.pool = self._make(int(np.ravel(seed)[0]) & 0x7FFFFFFF)
        observations, infos = self.pool.reset()
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.pool.step(np.asarray(actions))
        if self.atari is None:
            return observations, rewards, terminated, truncated, infos
        # A lost life ends an episode of EnvPool's, whose reset goes on with the game; its info knows when the game is over.
        lost = terminated & ~infos["terminated"].astype(bool)
        learned = np.sign(rewards) if self.atari.sign_rewards else rewards
        return observations, learned, terminated, truncated, {**infos, SAID: {"score": rewards, "life_lost": lost}}

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close()


def _atari_arguments(settings: AtariSettings) -> dict[str, Any]:
    """What EnvPool calls the same."""
    if not settings.preprocess:
        raise SurefootError("environment.preprocess=false: EnvPool always preprocesses Atari frames; set it to true")
    return {
        "noop_max": settings.noop_max,
        "frame_skip": settings.frame_skip,
        "img_height": settings.screen_size,
        "img_width": settings.screen_size,
        "stack_num": settings.stack,
        "use_fire_reset": settings.fire,
        "episodic_life": settings.episodic_life,
        "reward_clip": False,
    }
