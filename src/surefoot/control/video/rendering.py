"""Render environments to arrays without a display."""

import contextlib
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np

from surefoot.control.environments import maker, making_error, task_name
from surefoot.control.environments.looped import MakeEnvironment
from surefoot.control.environments.records import close_all, closing
from surefoot.control.spaces import Array
from surefoot.control.video.encoder import ffmpeg_path
from surefoot.control.video.frames import caption_height, captioned
from surefoot.errors import SurefootError, missing_extra

DEFAULT_FPS, EMULATOR_FPS = 30, 60
LIBRARIES = "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"


def use_headless_rendering() -> None:
    """Make MuJoCo and pygame render without a window, unless environment variables are set. Call it before importing MuJoCo.

    EGL is used even with a display, which may not be reachable and is not needed.
    """
    if sys.platform == "linux":
        os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or "egl"
    for name, value in (("SDL_VIDEODRIVER", "dummy"), ("SDL_AUDIODRIVER", "dummy"), ("PYGAME_HIDE_SUPPORT_PROMPT", "1")):
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def rendered(
    task: str | MakeEnvironment, arguments: Mapping[str, Any], size: tuple[int, int], caption: bool, purpose: str = "evaluation"
) -> Iterator[tuple[gymnasium.Env[Any, Any], Callable[[str], Array]]]:
    """One environment of a task, and a function that renders it: its present frame in a size, (width, height), with a caption
    if there are captions.

    Raises SurefootError without an encoder, or if the task can't be rendered.
    """
    ffmpeg_path()
    use_headless_rendering()
    (width, height), name = size, task_name(task)
    with closing(make_renderable(task, name, arguments, purpose)) as environment:
        prepare_mujoco(environment, name, width, height - caption_height(height) if caption else height)
        yield environment, lambda text: captioned(render_frame(environment, name), width, height, text if caption else None)


def make_renderable(
    task: str | MakeEnvironment, name: str, arguments: Mapping[str, Any], purpose: str = "evaluation"
) -> gymnasium.Env[Any, Any]:
    """One environment of a task that renders to arrays."""
    plain = dict(arguments)
    try:
        with warnings.catch_warnings():  # raised below as an error
            warnings.filterwarnings("ignore", ".*not in the possible render_modes")
            try:
                environment = maker(task, {**plain, "render_mode": "rgb_array"}, purpose)()
            except TypeError:  # it has no such argument, but may render anyway
                environment = maker(task, plain, purpose)()
    except SurefootError as error:
        raise SurefootError(f"{error}; or choose another with --task") from None
    except (Exception, SystemExit) as error:
        if _is_about_opengl(error):
            raise _no_opengl(name, error) from error
        raise making_error(name, error) from error
    if not isinstance(environment, gymnasium.Env):
        raise SurefootError(f"task={name!r}: made a {type(environment).__name__}; only a single gymnasium.Env can be recorded")
    if environment.render_mode != "rgb_array":
        modes = environment.metadata.get("render_modes") or ()
        close_all([environment])
        if "rgb_array" in modes:
            remedy = "add an argument render_mode to the function that makes it, and pass it on"
        else:
            has = f"has the render modes {', '.join(modes)}" if modes else "has no render mode"
            remedy = f"it {has}; give it 'rgb_array' and render(), as in docs/how-to/watch-an-agent.md"
        raise SurefootError(f"task={name!r}: can't be rendered; {remedy}")
    return environment


def render_frame(environment: gymnasium.Env[Any, Any], name: str) -> Array:
    """The environment's current frame, uint8 [h, w, 3]."""
    try:
        frame = environment.render()
    except gymnasium.error.DependencyNotInstalled as error:
        if "pygame" in str(error):
            raise missing_extra("pygame", "video", f"task={name!r}: rendering it") from None
        raise making_error(name, error) from error
    except Exception as error:
        raise SurefootError(f"task={name!r}: raised {type(error).__name__}: {error} in render()") from error
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        what = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise SurefootError(f"task={name!r}: render() returned {what}, not a uint8 array [height, width, 3]")
    return frame


def prepare_mujoco(environment: gymnasium.Env[Any, Any], name: str, width: int, height: int) -> None:
    """Make a MuJoCo environment render in this size, by a camera that follows, without shadows and reflections. The physics
    don't change.

    Shadows take most of the time of software rendering, which machines without a display use.
    Raises SurefootError if OpenGL is missing.
    """
    unwrapped: Any = environment.unwrapped
    renderer, model = getattr(unwrapped, "mujoco_renderer", None), getattr(unwrapped, "model", None)
    if renderer is None or model is None:
        return
    _check_opengl(name, width, height)
    renderer.width, renderer.height = width, height
    model.vis.global_.offwidth, model.vis.global_.offheight = width, height
    if renderer.camera_id == -1 and "trackbodyid" not in (renderer.default_cam_config or {}):
        with contextlib.suppress(KeyError):  # Gymnasium's HalfCheetah runs out of the picture of a camera that stays
            renderer.camera_id = model.camera("track").id
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0


def _check_opengl(name: str, width: int, height: int) -> None:
    """Create and free an OpenGL context: a failure inside Gymnasium leaves objects that raise errors when deleted."""
    backend = os.environ.get("MUJOCO_GL") or "glfw"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            importlib.import_module(f"mujoco.{backend}").GLContext(width, height).free()
        failure = next((warning.message for warning in caught if warning.category.__name__ == "GLFWError"), None)
        if failure is not None:  # without a display glfw only warns
            raise RuntimeError(str(failure))
    except Exception as error:
        raise _no_opengl(name, error) from error


def _is_about_opengl(error: BaseException) -> bool:
    """Whether MuJoCo's or PyOpenGL's rendering code raised it, which can happen when MuJoCo is imported."""
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    pattern = re.compile(r"[\\/](OpenGL|mujoco[\\/](egl|glfw|osmesa|cgl|rendering|gl_context))\b")
    return any(pattern.search(file) for file in files)


def _no_opengl(name: str, error: BaseException) -> SurefootError:
    used = os.environ.get("MUJOCO_GL") or ""
    remedy = f"install {LIBRARIES} (Debian's names)" if used == "egl" else "unset MUJOCO_GL, or set MUJOCO_GL=egl"
    reason = " ".join(str(error).split()).partition(". ")[0]
    return SurefootError(f"task={name!r}: MuJoCo can't render with MUJOCO_GL={used!r} ({reason}); {remedy}")


def frames_per_second(environment: gymnasium.Env[Any, Any], seed: int) -> float:
    """Playback speed. An Atari step is several emulator frames of 1/60 second; one step is taken to count them."""
    emulator = getattr(environment.unwrapped, "ale", None)
    if emulator is None:
        return float(environment.metadata.get("render_fps") or DEFAULT_FPS)
    environment.reset(seed=seed)
    before = emulator.getEpisodeFrameNumber()
    environment.action_space.seed(seed)
    environment.step(environment.action_space.sample())
    return EMULATOR_FPS / max(1, int(emulator.getEpisodeFrameNumber() - before))
