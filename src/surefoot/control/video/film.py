"""Watch an agent: greedy episodes as an MP4, drawn without a display."""

import importlib
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from surefoot.control.agent import Agent
from surefoot.control.environments.faults import making_failed
from surefoot.control.environments.looped import MakeEnvironment, maker, task_name
from surefoot.control.episodes import Moment, check_same_spaces, greedy_episode
from surefoot.control.spaces import Array
from surefoot.control.video.encoder import Encoder, program
from surefoot.control.video.pictures import caption_height, captioned, fitted
from surefoot.errors import SurefootError, missing_extra

SMALLEST, LARGEST = 64, 4096
USUAL_FPS, EMULATOR_FPS = 30, 60
LIBRARIES = "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"


@dataclass(frozen=True)
class Film:
    """What was filmed; ``returns`` and ``lengths`` in the order of the episodes."""

    path: Path
    returns: list[float]
    lengths: list[int]
    cut: bool
    """whether an episode was cut off before it was over"""
    frames: int
    fps: float

    def line(self) -> str:
        """All of it in one line; the seconds are how long the film plays."""
        several = "s" if len(self.returns) > 1 else ""
        returns = ", ".join(f"{value:,.1f}" for value in self.returns)
        cut = f" (cut off after {max(self.lengths):,} steps)" if self.cut else ""
        what = f"{len(self.returns)} greedy episode{several}, return{several} {returns}{cut}"
        return f"{self.path}: {what}; {self.frames / self.fps:.1f} s, {self.frames:,} frames at {self.fps:g} a second"


def film(
    agent: Agent,
    path: Path,
    task: str | MakeEnvironment | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    episodes: int = 1,
    seed: int = 0,
    size: tuple[int, int] = (320, 240),
    fps: float | None = None,
    max_steps: int = 10_000,
    caption: bool = True,
) -> Film:
    """Film the first episodes that ``surefoot evaluate`` judges with the same seed.

    path        where the MP4 goes: there whole in the end, or nothing is changed
    task        default: what the agent was trained on
    arguments   of the task's maker; default: the recipe's for the recipe's task, else none
    size        (width, height); pictures of another shape get black margins
    fps         default: what the environment says; for Atari, 60 frames of the emulator a second
    max_steps   an episode is cut off there
    caption     small print below: step, reward and return so far

    Raises SurefootError when the task can't be made or drawn, has other spaces than the agent, or the encoder fails.
    """
    if path.suffix != ".mp4":
        raise SurefootError(f"out={str(path)!r}: must end in .mp4")
    program()  # first of all, whether there is an encoder
    choose_headless()
    width, height = size
    arguments = (agent.recipe.environment if task is None else {}) if arguments is None else arguments
    task = agent.recipe.task if task is None else task
    name = task_name(task)
    with closing(drawable(task, name, arguments)) as environment:
        check_same_spaces(agent, environment, name)
        room = height - caption_height(height) if caption else height
        prepare_mujoco(environment, name, width, room)
        ends: list[Moment] = []
        with Encoder(path, width, height, fps or frames_per_second(environment, seed)) as encoder:
            for episode in range(episodes):
                for moment in greedy_episode(agent, environment, name, seed, episode, max_steps):
                    picture = fitted(picture_of(environment, name), width, room)
                    encoder.add(captioned(picture, small_print(moment, episode, episodes), height) if caption else picture)
                ends.append(moment)
    returns, lengths = [end.total for end in ends], [end.step for end in ends]
    return Film(path, returns, lengths, not all(end.over for end in ends), encoder.frames, encoder.fps)


def choose_headless() -> None:
    """Let MuJoCo and pygame draw without a window; what is set already stays. To be called before MuJoCo is imported.

    EGL also where there is a display: it may be one that can't be reached, and a film needs none.
    """
    if sys.platform == "linux":
        os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or "egl"
    for name, value in (("SDL_VIDEODRIVER", "dummy"), ("SDL_AUDIODRIVER", "dummy"), ("PYGAME_HIDE_SUPPORT_PROMPT", "1")):
        os.environ.setdefault(name, value)


def size_from_text(text: str) -> tuple[int, int]:
    """``320x240`` as (width, height); SurefootError for anything else."""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.strip().lower())
    size = (int(found[1]), int(found[2])) if found else (0, 0)
    if any(side % 2 or not SMALLEST <= side <= LARGEST for side in size):
        raise SurefootError(f"size={text!r}: must be WIDTHxHEIGHT, even numbers from {SMALLEST} to {LARGEST}, such as 320x240")
    return size


def small_print(moment: Moment, episode: int = 0, episodes: int = 1) -> str:
    """What stands below a picture."""
    which = f"episode {episode + 1}/{episodes} " if episodes > 1 else ""
    return f"{which}step {moment.step:<4} reward {_short(moment.reward, 2):<7} return {_short(moment.total, 1)}"


def _short(value: float, decimals: int) -> str:
    rounded = round(value, decimals) + 0.0 if math.isfinite(value) else value  # + 0.0: no "-0.00"
    return f"{rounded:.{decimals}f}" if abs(value) < 1e5 else f"{value:.1e}"


# ---- drawing ----------------------------------------------------------------------------------------------------------


def drawable(
    task: str | MakeEnvironment, name: str, arguments: Mapping[str, Any], purpose: str = "evaluation"
) -> gymnasium.Env[Any, Any]:
    """One environment of a task that draws into arrays."""
    plain = dict(arguments)
    try:
        with warnings.catch_warnings():  # said below, as an error
            warnings.filterwarnings("ignore", ".*not in the possible render_modes")
            try:
                environment = maker(task, {**plain, "render_mode": "rgb_array"}, purpose)()
            except TypeError:  # it takes no such argument; perhaps it draws without being asked to
                environment = maker(task, plain, purpose)()
    except SurefootError as error:
        raise SurefootError(f"{error}; or name another with --task") from None
    except Exception as error:
        if _is_about_opengl(error):
            raise _no_opengl(name, error) from error
        raise making_failed(name, error) from error
    if not isinstance(environment, gymnasium.Env):
        raise SurefootError(f"task={name!r}: made a {type(environment).__name__}; only a single gymnasium.Env can be watched")
    if environment.render_mode != "rgb_array":
        known = environment.metadata.get("render_modes") or ()
        environment.close()
        if "rgb_array" in known:
            remedy = "let the function that makes it take render_mode and pass it on"
        else:
            remedy = f"only what has the render mode 'rgb_array' can be (this has: {', '.join(known) or 'none'})"
        raise SurefootError(f"task={name!r}: can't be drawn; {remedy}")
    return environment


def picture_of(environment: gymnasium.Env[Any, Any], name: str) -> Array:
    """What the environment draws, [h, w, 3] bytes."""
    try:
        picture = environment.render()
    except gymnasium.error.DependencyNotInstalled as error:
        if "pygame" in str(error):
            raise missing_extra("pygame", "video", f"task={name!r}: drawing it") from None
        raise making_failed(name, error) from error
    except Exception as error:
        raise SurefootError(f"task={name!r}: raised {type(error).__name__}: {error} in render()") from error
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        found = f"{picture.dtype} {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
        raise SurefootError(f"task={name!r}: render() gave {found}, not a picture of bytes [height, width, 3]")
    return picture


def prepare_mujoco(environment: gymnasium.Env[Any, Any], name: str, width: int, height: int) -> None:
    """Let a MuJoCo environment draw in the size of the film, without shadows and reflections: the physics don't change.

    Drawn in software, as on most machines without a display, shadows take most of the time.
    Raises SurefootError where OpenGL is missing.
    """
    inside: Any = environment.unwrapped
    renderer, model = getattr(inside, "mujoco_renderer", None), getattr(inside, "model", None)
    if renderer is None or model is None:
        return
    _check_opengl(name, width, height)
    renderer.width, renderer.height = width, height
    model.vis.global_.offwidth, model.vis.global_.offheight = width, height
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0


def _check_opengl(name: str, width: int, height: int) -> None:
    """Make a context and drop it: where Gymnasium's fails, it leaves objects behind that complain on their way out."""
    backend = os.environ.get("MUJOCO_GL") or "glfw"
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            importlib.import_module(f"mujoco.{backend}").GLContext(width, height).free()
        complaint = next((warning.message for warning in said if warning.category.__name__ == "GLFWError"), None)
        if complaint is not None:  # glfw only warns that it found no display
            raise RuntimeError(str(complaint))
    except Exception as error:
        raise _no_opengl(name, error) from error


def _is_about_opengl(error: Exception) -> bool:
    """Whether MuJoCo's or PyOpenGL's files for drawing raised it: then MuJoCo can't even be imported."""
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    pattern = re.compile(r"[\\/](OpenGL|mujoco[\\/](egl|glfw|osmesa|cgl|rendering|gl_context))\b")
    return any(pattern.search(file) for file in files)


def _no_opengl(name: str, error: Exception) -> SurefootError:
    used = os.environ.get("MUJOCO_GL") or ""
    remedy = f"install {LIBRARIES} (Debian's names)" if used == "egl" else "unset MUJOCO_GL, or set MUJOCO_GL=egl"
    reason = " ".join(str(error).split()).partition(". ")[0]
    return SurefootError(f"task={name!r}: MuJoCo can't draw with MUJOCO_GL={used!r} ({reason}); {remedy}")


def frames_per_second(environment: gymnasium.Env[Any, Any], seed: int) -> float:
    """How fast to play. An Atari step is several frames of an emulator that shows 60 a second; count them in one step."""
    emulator = getattr(environment.unwrapped, "ale", None)
    if emulator is None:
        return float(environment.metadata.get("render_fps") or USUAL_FPS)
    environment.reset(seed=seed)
    before = emulator.getEpisodeFrameNumber()
    environment.action_space.seed(seed)
    environment.step(environment.action_space.sample())
    return EMULATOR_FPS / max(1, int(emulator.getEpisodeFrameNumber() - before))
