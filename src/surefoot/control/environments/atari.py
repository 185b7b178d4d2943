"""Atari games: Gymnasium's preprocessing of frames, and episodic lives.

No-op starts, 4 frames per action with the maximum of the last two, 84x84 grey and a stack of 4 are Gymnasium's own wrappers
(described by Machado et al. 2018, arXiv 1709.06009). This module adds the rest: a lost life ends the value but not the game,
FIRE is pressed when a life starts, and training uses the signs of rewards while returns use the true score.
"""

from dataclasses import dataclass, fields
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import VectorEnv, VectorWrapper

from surefoot.control.environments.observations import INFO_KEY
from surefoot.errors import SurefootError

ATARI = "ALE/"
"""prefix of the ids of Atari tasks"""


@dataclass(frozen=True)
class AtariSettings:
    """Keys of a recipe's ``environment`` table for an ``ALE/`` task; all other keys are arguments of the emulator."""

    preprocess: bool = True
    """False leaves the environment as ale-py makes it"""
    noop_max: int = 30
    """games start with 1 to this many idle frames; 0 for none"""
    frame_skip: int = 4
    """frames per action"""
    screen_size: int = 84
    """height and width in pixels"""
    stack: int = 4
    """frames per observation"""
    fire: bool = True
    """press FIRE whenever a life starts, in games with that button"""
    episodic_life: bool = True
    """in training, a lost life ends the value but not the game"""
    sign_rewards: bool = True
    """in training, learn from the signs of rewards"""


def make_atari(task: str, purpose: str = "training", **arguments: Any) -> "gymnasium.Env[Any, Any]":
    """One environment of an ``ALE/`` id: uint8 frames [stack, 84, 84], oldest first.

    In training, ``terminated`` is the end of a game, and ``info["surefoot"]`` has the true score of the step and whether a
    life was lost. For any other purpose, lives don't count and rewards are the game's own.
    Raises SurefootError for arguments that would undo the preprocessing, and ImportError without ale-py or OpenCV.
    """
    register()
    settings, rest = atari_settings(arguments)
    if not settings.preprocess:
        return gymnasium.make(task, disable_env_checker=True, **rest)
    # The emulator's own observations are not used; grey ones cost a third.
    rest = {"obs_type": "grayscale", **rest, "frameskip": 1}
    env: gymnasium.Env[Any, Any] = gymnasium.make(task, disable_env_checker=True, **rest)
    if env.spec is not None and env.spec.kwargs.get("repeat_action_probability") == 0:
        env = FastReset(env)
    env = gymnasium.wrappers.AtariPreprocessing(env, settings.noop_max, settings.frame_skip, settings.screen_size)
    env = EpisodicLife(env, settings.fire, training=purpose == "training", ends_value=settings.episodic_life)
    if settings.sign_rewards and purpose == "training":
        env = gymnasium.wrappers.TransformReward(env, lambda reward: float(np.sign(float(reward))))
    return gymnasium.wrappers.FrameStackObservation(env, settings.stack)


def atari_settings(arguments: dict[str, Any]) -> tuple[AtariSettings, dict[str, Any]]:
    """The settings among the arguments, and the others.

    Raises SurefootError for arguments of the emulator that preprocessing sets itself.
    """
    own = {field.name for field in fields(AtariSettings)}
    settings = AtariSettings(**{name: value for name, value in arguments.items() if name in own})
    rest = {name: value for name, value in arguments.items() if name not in own}
    taken = {"frameskip": "frame_skip", "obs_type": "preprocess = false", "sound_obs": "preprocess = false"}
    for name, instead in taken.items():
        if settings.preprocess and name in rest:
            raise SurefootError(
                f"environment.{name}={rest[name]!r}: Atari preprocessing sets this itself; set environment.{instead}"
            )
    return settings, rest


def register() -> None:
    """Register the ``ALE/`` ids with Gymnasium and silence the emulator's banner. Raises ImportError without ale-py."""
    import ale_py

    gymnasium.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


class FastReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Starts games without reloading the ROM, which ale-py does for every seed and which takes as long as 250 steps.

    Without sticky actions the emulator draws no random numbers: the seed only decides the number of idle frames, and loading
    the ROM always gives the same state. (A plain reset is not enough: in some games it leaves traces of the last game.)
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]") -> None:
        super().__init__(env)
        self.base: Any = env.unwrapped
        self.loaded = env.unwrapped.ale.cloneState(include_rng=True)  # type: ignore[attr-defined]  # ale-py's

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            drawn = np.random.SeedSequence(seed).generate_state(2)  # as ale-py does
            self.base.np_random = seeding.np_random(int(drawn[0]))[0]
            self.base.ale.restoreState(self.loaded)
        return self.env.reset(options=options)


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports lost lives in ``info``, and presses FIRE to start the next life. The episode is the whole game.

    With Gymnasium's ``terminal_on_life_loss`` an episode is one life and its reset restarts the game, so later lives are
    never seen. Here the game continues, and a whole game can be replayed from its one reset.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", fire: bool, training: bool, ends_value: bool) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]  # ale-py's
        self.fire = meanings.index("FIRE") if fire and "FIRE" in meanings else None
        self.training, self.ends_value, self.lives = training, ends_value, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        if self.fire is not None:
            observation, _, terminated, truncated, info = self.env.step(self.fire)
            if terminated or truncated:
                observation, info = self.env.reset(options=options)
        self.lives = self._left()
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        score = float(reward)
        left = self._left()
        # Some games show 0 lives for some frames before the end; then the game ends, not a life.
        lost = 0 < left < self.lives and not (terminated or truncated)
        if lost and self.fire is not None:
            observation, extra, terminated, truncated, info = self.env.step(self.fire)
            score += float(extra)
            lost = not (terminated or truncated)
        self.lives = self._left()
        if not self.training:
            return observation, score, terminated, truncated, info
        reported = {"score": score, "life_lost": lost and self.ends_value}
        return observation, score, terminated, truncated, {**info, INFO_KEY: reported}

    def _left(self) -> int:
        return int(self.env.unwrapped.ale.lives())  # type: ignore[attr-defined]  # ale-py's


def make_atari_vector(task: str, count: int, arguments: dict[str, Any]) -> VectorEnv[Any, Any, Any]:
    """ale-py's own vector environment of an ``ALE/`` id, in C++ threads, with the same training observations and rewards.

    It presses FIRE only when a game starts, not after a lost life.
    """
    register()
    settings, rest = atari_settings(arguments)
    if not settings.preprocess:
        raise SurefootError("environment.preprocess=false: ale-py's vector environment always preprocesses; set it to true")
    made: VectorEnv[Any, Any, Any] = gymnasium.make_vec(
        task,
        num_envs=count,
        vectorization_mode="vector_entry_point",
        noop_max=settings.noop_max,
        frameskip=settings.frame_skip,
        img_height=settings.screen_size,
        img_width=settings.screen_size,
        stack_num=settings.stack,
        use_fire_reset=settings.fire,
        life_loss_info=True,  # reports lost lives and continues the game; episodic_life would restart it
        reward_clipping=False,
        **rest,
    )
    return VectorEpisodicLife(made, settings)


class VectorEpisodicLife(VectorWrapper):
    """Separates lost lives from ended games, and gives signs of rewards with the true score, for ale-py's vectors."""

    def __init__(self, env: VectorEnv[Any, Any, Any], settings: AtariSettings) -> None:
        super().__init__(env)
        self.settings = settings

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        seeds = None if seed is None else np.asarray(seed) & 0x7FFFFFFF  # a C int
        return self.env.reset(seed=seeds, options=options)  # type: ignore[arg-type]  # ale-py's takes an array

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        lost = terminated & (infos["lives"] > 0)
        reported = {"score": rewards, "life_lost": lost & self.settings.episodic_life}
        learned = np.sign(rewards) if self.settings.sign_rewards else rewards
        return observations, learned, terminated & ~lost, truncated, {**infos, INFO_KEY: reported}
