"""Record videos as MP4, rendered without a display: greedy episodes of an agent, or the episodes in a run's traces.

A traced episode is replayed from its seed and actions and rendered at every traced step. Its video is in ``videos/traces/``
under a name with the digest of the observations in training, so it can't be mistaken for another episode's. If the replay
differs, a note with the same name explains how. Browsers play the files: H.264, yuv420p, index first.
"""

import contextlib
import importlib
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium
import numpy as np
import torch
from torch.nn import functional

from surefoot.control.agent import Agent
from surefoot.control.environments import maker, making_error, task_name
from surefoot.control.environments.looped import LoopedEnvironments, MakeEnvironment, close_all, closing
from surefoot.control.evaluate import EpisodeStep, check_same_spaces, greedy_episode
from surefoot.control.normalise import action_converter
from surefoot.control.replay import NOT_REPLAYABLE, ReplayMismatchError, replay
from surefoot.control.spaces import Array
from surefoot.errors import SurefootError, missing_extra
from surefoot.files import read_toml, write_text, writing
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.reading import make_recipe
from surefoot.runs.reading import check_is_run, replay_failure, trace_video, traces_in
from surefoot.runs.traces import read_trace

SMALLEST, LARGEST = 64, 4096
DEFAULT_FPS, EMULATOR_FPS = 30, 60
OTHER_PATH = "choose another path with --out"
LIBRARIES = "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"


@dataclass(frozen=True)
class Video:
    """A recorded video; ``returns`` and ``lengths`` in the order of the episodes."""

    path: Path
    returns: list[float]
    lengths: list[int]
    truncated: bool
    """whether an episode was cut off at ``max_steps``"""
    frames: int
    fps: float

    def line(self) -> str:
        """All fields in one line, with the duration in seconds."""
        several = "s" if len(self.returns) > 1 else ""
        returns = ", ".join(f"{value:,.1f}" for value in self.returns)
        cut = f" (cut off after {max(self.lengths):,} steps)" if self.truncated else ""
        what = f"{len(self.returns)} greedy episode{several}, return{several} {returns}{cut}"
        return f"{self.path}: {what}; {self.frames / self.fps:.1f} s, {self.frames:,} frames at {self.fps:g} a second"


def record_video(
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
) -> Video:
    """Record the first episodes that ``surefoot evaluate`` runs with the same seed.

    path        the MP4, written atomically
    task        default: the task the agent was trained on
    arguments   of the task; default: the recipe's for the recipe's task, else none
    size        (width, height); frames of another shape get black margins
    fps         default: the environment's; for Atari, 60 emulator frames per second
    max_steps   episodes are cut off there
    caption     show step, reward and return below the frame

    Raises SurefootError when the task can't be made or rendered, its spaces are not the agent's, or the encoder fails.
    """
    if path.suffix != ".mp4":
        raise SurefootError(f"out={str(path)!r}: must end in .mp4")
    ffmpeg_path()  # fail early without an encoder
    use_headless_rendering()
    width, height = size
    arguments = (agent.recipe.environment if task is None else {}) if arguments is None else arguments
    task = agent.recipe.task if task is None else task
    name = task_name(task)
    with closing(make_renderable(task, name, arguments)) as environment:
        check_same_spaces(agent, environment, name)
        frame_height = height - caption_height(height) if caption else height
        prepare_mujoco(environment, name, width, frame_height)
        ends: list[EpisodeStep] = []
        with Encoder(path, width, height, fps or frames_per_second(environment, seed)) as encoder:
            for episode in range(episodes):
                for at in greedy_episode(agent, environment, name, seed, episode, max_steps):
                    frame = fit_frame(render_frame(environment, name), width, frame_height)
                    encoder.add(add_caption(frame, caption_text(at, episode, episodes), height) if caption else frame)
                ends.append(at)
    returns, lengths = [end.total for end in ends], [end.step for end in ends]
    return Video(path, returns, lengths, not all(end.done for end in ends), encoder.frames, encoder.fps)


def use_headless_rendering() -> None:
    """Make MuJoCo and pygame render without a window, unless environment variables are set. Call it before importing MuJoCo.

    EGL is used even with a display, which may not be reachable and is not needed.
    """
    if sys.platform == "linux":
        os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or "egl"
    for name, value in (("SDL_VIDEODRIVER", "dummy"), ("SDL_AUDIODRIVER", "dummy"), ("PYGAME_HIDE_SUPPORT_PROMPT", "1")):
        os.environ.setdefault(name, value)


def size_from_text(text: str) -> tuple[int, int]:
    """``320x240`` as (width, height); SurefootError for anything else."""
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.strip().lower())
    size = (int(match[1]), int(match[2])) if match else (0, 0)
    if any(side % 2 or not SMALLEST <= side <= LARGEST for side in size):
        raise SurefootError(f"size={text!r}: must be WIDTHxHEIGHT, even numbers from {SMALLEST} to {LARGEST}, such as 320x240")
    return size


def caption_text(at: EpisodeStep, episode: int = 0, episodes: int = 1) -> str:
    """The caption of a frame."""
    which = f"episode {episode + 1}/{episodes} " if episodes > 1 else ""
    return f"{which}step {at.step:<4} reward {_short(at.reward, 2):<7} return {_short(at.total, 1)}"


def _short(value: float, decimals: int) -> str:
    rounded = round(value, decimals) + 0.0 if math.isfinite(value) else value  # + 0.0: no "-0.00"
    return f"{rounded:.{decimals}f}" if abs(value) < 1e5 else f"{value:.1e}"


# ---- rendering --------------------------------------------------------------------------------------------------------


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
    except Exception as error:
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
            remedy = f"it needs the render mode 'rgb_array' (it has: {', '.join(modes) or 'none'})"
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
    """Make a MuJoCo environment render in this size, without shadows and reflections. The physics don't change.

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


def _is_about_opengl(error: Exception) -> bool:
    """Whether MuJoCo's or PyOpenGL's rendering code raised it, which can happen when MuJoCo is imported."""
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    pattern = re.compile(r"[\\/](OpenGL|mujoco[\\/](egl|glfw|osmesa|cgl|rendering|gl_context))\b")
    return any(pattern.search(file) for file in files)


def _no_opengl(name: str, error: Exception) -> SurefootError:
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


def record_traces(
    run: Path,
    which: str = "last",
    task: MakeEnvironment | None = None,
    *,
    size: tuple[int, int] = (320, 240),
    fps: float | None = None,
    caption: bool = True,
) -> Iterator[str]:
    """Record the traced episodes of a run; yield a line for each. Existing videos are kept.

    which   "last", "all", or the steps of one trace
    task    replaces the recipe's, if that can't be imported
    size    (width, height) of the videos

    Raises SurefootError when there is no such trace, the task can't be rendered, or no replay matches training.
    """
    files = select_traces(run, which)
    recipe = make_recipe(read_toml(run / "config.toml"))
    if not isinstance(recipe, ControlRecipe):
        raise SurefootError(f"{run}: was trained on text, but only environments can be recorded; use surefoot inspect {run}")
    ffmpeg_path()
    use_headless_rendering()
    width, height = size
    made: str | MakeEnvironment = task or recipe.task
    name = task_name(made)
    recorded, failure = 0, ""
    with closing(make_renderable(made, name, recipe.environment, "training")) as environment:
        frame_height = height - caption_height(height) if caption else height
        prepare_mujoco(environment, name, width, frame_height)
        environments = LoopedEnvironments(lambda: environment, 1, recipe.seed, name)
        convert = action_converter(environment.action_space, recipe.normalise.actions)
        speed = fps or frames_per_second(environment, recipe.seed)
        for file in files:
            for index, row in enumerate(read_trace(file).rows):
                path = trace_video(run, int(file.stem), index, row)
                if path is not None and path.is_file():
                    recorded += 1
                    yield f"{path}: exists already"
                    continue
                try:
                    if path is None:
                        raise ReplayMismatchError(NOT_REPLAYABLE)
                    with Encoder(path, width, height, speed) as encoder:
                        for at in replay(row, environments, convert):
                            frame = fit_frame(render_frame(environment, name), width, frame_height)
                            encoder.add(add_caption(frame, caption_text(at), height) if caption else frame)
                except ReplayMismatchError as error:
                    failure = f"traces/{file.name}, row {index}: not recorded; {error}"
                    if path is not None:
                        _write_note(replay_failure(path), f"{error}\n")
                    yield failure
                    continue
                recorded += 1
                replay_failure(path).unlink(missing_ok=True)  # from a machine where the replay differed
                what = f"episode {row.about['episode']} of environment {row.row}, replayed from its step {row.about['step']}"
                yield f"{path}: {what}; {encoder.frames:,} frames at {encoder.fps:g} a second"
    if not recorded:
        raise SurefootError(f"{run}: no traced episode could be recorded; {failure}")


def _write_note(path: Path, text: str) -> None:
    with suppress(OSError):  # the error is printed anyway
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def select_traces(run: Path, which: str) -> list[Path]:
    """The trace files selected by "last", "all" or a number of steps.

    Raises SurefootError, with the traces that exist, when none matches.
    """
    check_is_run(run)
    files = traces_in(run / "traces")
    if not files:
        raise SurefootError(f"{run}: has no traces; training writes them unless traces.rows = 0")
    if which in ("last", "all"):
        return files[-1:] if which == "last" else files
    selected = [file for file in files if file.stem == which] if re.fullmatch(r"\d+", which) else []
    if not selected:
        existing = ", ".join(file.stem for file in files)
        raise SurefootError(f"traced={which!r}: must be last, all, or the steps of a trace: {existing}")
    return selected


PADDING = 2
"""rows above and below the caption"""
INK = 224
"""brightness of the caption"""

# One byte per column from left to right, the lowest bit on top.
FONT = {
    " ": "0000000000", "+": "08083e0808", "-": "0808080808", ".": "0060600000", ",": "0050300000", "/": "2010080402",
    "0": "3e5149453e", "1": "00427f4000", "2": "4261514946", "3": "2141454b31", "4": "1814127f10",
    "5": "2745454539", "6": "3c4a494930", "7": "0171090503", "8": "3649494936", "9": "064949291e",
    "a": "2054545478", "d": "384444487f", "e": "3854545418", "f": "087e090102", "i": "00447d4000", "n": "7c08040478",
    "o": "3844444438", "p": "7c14141408", "r": "7c08040408", "s": "4854545420", "t": "043f444020", "u": "3c4040207c",
    "w": "3c4030403c",
}  # fmt: skip
ROWS, COLUMNS = 7, 6  # the sixth column separates letters


class Encoder:
    """A context manager; ``add`` takes uint8 frames [height, width, 3]. The file appears when the block ends without an error.

    Raises SurefootError when the encoder is not installed or fails.
    """

    def __init__(self, path: Path, width: int, height: int, fps: float) -> None:
        self.path, self.shape, self.fps = path, (height, width, 3), fps
        self.frames = 0
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, frame: Array) -> None:
        """Append a frame. The first one starts the encoder, so that a failure to render leaves nothing behind."""
        assert frame.shape == self.shape, f"{frame.shape} in a video of {self.shape}"
        self._process = self._process or self._start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame.tobytes())
        except OSError:  # the encoder has ended
            raise self._failure() from None
        self.frames += 1

    def __enter__(self) -> "Encoder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process is None:
            return
        try:
            with writing(self.path, OTHER_PATH):
                if kind is not None:
                    self._process.kill()
                elif self._finish() != 0:
                    raise self._failure()
                else:
                    os.replace(self._temporary, self.path)
        finally:
            self._finish()
            self._stderr.close()
            self._temporary.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        with writing(self.path, OTHER_PATH):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        height, width, _ = self.shape
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:g}", "-i", "-"]
        kind = ["-an", "-c:v", "libx264", "-crf", "20", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
        return subprocess.Popen(
            [ffmpeg_path(), "-y", "-loglevel", "error", *source, *kind, str(self._temporary.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C reaches only this process, which then removes the unfinished file
        )

    def _finish(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the exit code is more useful
            self._process.stdin.close()
        return self._process.wait()

    def _failure(self) -> SurefootError:
        code = self._finish()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return SurefootError(f"{self.path}: not written, the encoder failed ({lines[-1] if lines else f'exit code {code}'})")


def ffmpeg_path() -> str:
    """Path of the ffmpeg of imageio-ffmpeg; SurefootError if it is not installed."""
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]
    except ImportError:
        raise missing_extra("imageio-ffmpeg", "video", "a video") from None
    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        raise SurefootError(f"a video needs ffmpeg, but imageio-ffmpeg has none here ({error}); install ffmpeg") from None


def fit_frame(frame: Array, width: int, height: int) -> Array:
    """Scale a uint8 frame [h, w, 3] to fit [height, width, 3], centred on black, with its aspect ratio."""
    h, w = frame.shape[:2]
    scale = min(width / w, height / h)
    inner_w, inner_h = min(width, max(1, round(w * scale))), min(height, max(1, round(h * scale)))
    if (inner_h, inner_w) != (h, w):
        channels_first = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None]
        # Antialiased: otherwise thin lines, such as a pole's, vanish from some frames.
        resized = functional.interpolate(channels_first, (inner_h, inner_w), mode="bilinear", antialias=True)
        frame = resized[0].permute(1, 2, 0).numpy()
    if (inner_h, inner_w) == (height, width):
        return np.ascontiguousarray(frame)
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner_h) // 2, (width - inner_w) // 2
    canvas[top : top + inner_h, left : left + inner_w] = frame
    return canvas


def caption_height(height: int) -> int:
    """Rows that the caption takes of a frame of this height."""
    return (ROWS + 2 * PADDING) * _font_scale(height)


def add_caption(frame: Array, text: str, height: int) -> Array:
    """A frame [h, w, 3] with a line of text below, [height, w, 3]; text beyond the width is cut off."""
    rows, width = height - frame.shape[0], frame.shape[1]
    scale = _font_scale(height)
    bar = np.zeros((rows, width, 3), np.uint8)
    ink = np.repeat(np.repeat(_letters(text), scale, 0), scale, 1)
    top, left = (rows - ink.shape[0]) // 2, 2 * scale
    ink = ink[:, : max(0, width - left)]
    bar[top : top + ink.shape[0], left : left + ink.shape[1]] = ink[..., None] * INK
    return np.concatenate([frame, bar])


def _font_scale(height: int) -> int:
    """Scale of the letters, which are 7 rows high."""
    return max(1, height // 240)


def _letters(text: str) -> Array:
    """A line of text as 0 and 1, [7, 6 per letter]."""
    columns = np.frombuffer(b"".join(bytes.fromhex(FONT[letter] + "00") for letter in text), np.uint8)
    return (columns >> np.arange(ROWS, dtype=np.uint8)[:, None]) & 1
