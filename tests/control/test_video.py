"""Videos show the evaluated episodes step by step, play in browsers, and are written completely or not at all."""

import ctypes.util
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest

import surefoot
from surefoot import SurefootError
from surefoot.control.evaluate import greedy_episode
from surefoot.control.video import record_video
from surefoot.control.video.encoder import Encoder
from surefoot.control.video.rendering import use_headless_rendering

from .tiny import Endless

QUICK: dict[str, Any] = {"rollout": {"environments": 1, "steps": 64}, "evaluation": {"episodes": 0}}


def decoded(path: Path) -> tuple[str, np.ndarray]:
    """The decoder's description of a video's only stream, and its frames [T, h, w, 3]."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    about = re.findall(r"Stream #0:.*(Video: .*)", done.stderr.decode())[0]
    width, height = map(int, re.findall(r", (\d+)x(\d+)", about)[0])
    return about, np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


def check_video(path: Path, size: tuple[int, int], frames: int, fps: float) -> np.ndarray:
    """The frames of a video, after checks of its format: none is black, and they change above the caption too."""
    about, pictures = decoded(path)
    assert about.startswith("Video: h264 ")
    assert ", yuv420p(" in about
    assert f", {fps:g} fps, " in about
    assert pictures.shape == (frames, size[1], size[0], 3)
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat"), "browsers can start early only if the index is first"
    above = pictures[:, : size[1] - 16].astype(int)
    assert (above.reshape(frames, -1).max(1) > 100).all(), "a frame is black"
    assert all(np.abs(above[t] - above[0]).max() > 50 for t in (frames // 2, frames - 1)), "the frames don't change"
    return pictures


@pytest.fixture(scope="module")
def agent() -> surefoot.Agent:
    return surefoot.train("CartPole-v1", surefoot.A2C, steps=1, seed=1, **QUICK)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    fields = {**QUICK, "evaluation": {"every": 256, "episodes": 1}, "checkpoint": {"every": 256}}
    surefoot.train("CartPole-v1", surefoot.A2C, steps=512, seed=1, run_dir=path, **fields)
    return path


# ---- recorded episodes ---------------------------------------------------------------------------------------------------


def test_a_video_shows_every_step_of_the_evaluated_episodes(agent: surefoot.Agent, tmp_path: Path) -> None:
    made = record_video(agent, tmp_path / "video.mp4", episodes=3, seed=5)
    evaluation = surefoot.evaluate(agent, episodes=3, seed=5)
    assert made.returns == evaluation.returns
    assert made.lengths == evaluation.lengths
    assert len(set(evaluation.lengths)) > 1, "the episodes must differ"
    assert not made.truncated
    assert made.frames == sum(evaluation.lengths) + 3
    check_video(tmp_path / "video.mp4", (320, 240), made.frames, 50)
    assert list(tmp_path.iterdir()) == [tmp_path / "video.mp4"]


def test_greedy_episodes_are_those_of_evaluate_in_the_same_order(agent: surefoot.Agent) -> None:
    """With more episodes than evaluate runs at a time."""
    environment = gymnasium.make("CartPole-v1")
    ends = [list(greedy_episode(agent, environment, "it", 5, episode, 500))[-1] for episode in range(12)]
    evaluation = surefoot.evaluate(agent, episodes=12, seed=5)
    assert [end.step for end in ends] == evaluation.lengths
    assert [end.total for end in ends] == evaluation.returns
    assert all(end.done for end in ends)


def test_size_speed_length_and_caption_are_options(agent: surefoot.Agent, tmp_path: Path) -> None:
    made = record_video(agent, tmp_path / "video.mp4", size=(200, 100), fps=12, max_steps=6, caption=False)
    assert (made.lengths, made.truncated, made.frames) == ([6], True, 7)
    assert made.line().endswith(
        "video.mp4: 1 greedy episode, return 6.0 (cut off after 6 steps); 0.6 s, 7 frames at 12 a second"
    )
    about, pictures = decoded(tmp_path / "video.mp4")
    assert ", 12 fps, " in about
    assert pictures.shape == (7, 100, 200, 3)
    assert pictures[0, :, 30:170].min(0).max() > 200, "white above and below the cart, so no caption"


OTHER_LIBRARIES = """
import json, sys
from pathlib import Path
import surefoot
from surefoot.control.video import record_video
from surefoot.control.video.rendering import use_headless_rendering
use_headless_rendering()
fields = {"rollout": {"environments": 1, "steps": 64}, "evaluation": {"episodes": 0}}
for task, arguments in json.loads(sys.argv[1]).items():
    agent = surefoot.train(task, surefoot.A2C, steps=1, seed=1, environment=arguments, **fields)
    record_video(agent, Path(task.rpartition("/")[2] + ".mp4"), max_steps=20, seed=3)
"""
KINDS = {
    "LunarLander-v3": ("Box2D", 50, {}),
    "HalfCheetah-v5": ("mujoco", 20, {}),
    "ale_py:ALE/Pong-v5": ("ale_py", 15, {"obs_type": "ram"}),
}


def is_here(package: str) -> bool:
    egl = package != "mujoco" or sys.platform != "linux" or ctypes.util.find_library("EGL") is not None
    return egl and importlib.util.find_spec(package) is not None


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In another process: MuJoCo must be imported after EGL is set, and importing Box2D fails if warnings are errors."""
    folder = tmp_path_factory.mktemp("videos")
    hidden = ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "PYTHONWARNINGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    tasks = {task: arguments for task, (package, _, arguments) in KINDS.items() if is_here(package)}
    command = [sys.executable, "-c", OTHER_LIBRARIES, json.dumps(tasks)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("task", KINDS)
def test_box2d_mujoco_and_atari_are_recorded_without_a_display(task: str, videos: Path) -> None:
    package, fps, _ = KINDS[task]
    if not is_here(package):
        pytest.skip(f"{package}, or its renderer, is not installed")
    pictures = check_video(videos / f"{task.rpartition('/')[2]}.mp4", (320, 240), 21, fps)
    shades = pictures[-1, :220].reshape(-1, 3).astype(int)
    assert np.ptp(shades, axis=1).max() > 40, "no colours"


# ---- without a display ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUJOCO_GL", "SDL_VIDEODRIVER", "SDL_AUDIODRIVER", "PYGAME_HIDE_SUPPORT_PROMPT", "DISPLAY"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_choice")
def test_egl_and_a_dummy_display_are_used_unless_the_user_sets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    use_headless_rendering()
    assert (os.environ["MUJOCO_GL"], os.environ["SDL_VIDEODRIVER"]) == ("egl", "dummy")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setenv("SDL_VIDEODRIVER", "x11")
    use_headless_rendering()
    assert (os.environ["MUJOCO_GL"], os.environ["SDL_VIDEODRIVER"]) == ("osmesa", "x11")
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(sys, "platform", "darwin")
    use_headless_rendering()
    assert "MUJOCO_GL" not in os.environ, "there is no EGL"


@pytest.mark.parametrize(
    ("backend", "remedy"), [("egl", "install libegl1 "), ("disable", "unset MUJOCO_GL, or set MUJOCO_GL=egl")]
)
def test_mujoco_without_opengl_is_one_line_with_a_remedy(
    backend: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = surefoot.train("InvertedPendulum-v5", surefoot.A2C, steps=1, **QUICK)
    monkeypatch.setenv("MUJOCO_GL", backend)
    monkeypatch.setitem(sys.modules, f"mujoco.{backend}", None)
    with pytest.raises(SurefootError) as raised:
        record_video(agent, tmp_path / "video.mp4")
    assert str(raised.value).startswith(f"task='InvertedPendulum-v5': MuJoCo can't render with MUJOCO_GL='{backend}' (")
    assert str(raised.value).count(remedy) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_libegl_is_the_same_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyOpenGL then raises an AttributeError when it is imported."""
    failing = compile("raise AttributeError('no eglQueryString')", "site-packages/mujoco/egl/__init__.py", "exec")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    agent = surefoot.train(Endless, surefoot.A2C, steps=1, **QUICK)
    with pytest.raises(SurefootError, match=r"MuJoCo can't render with MUJOCO_GL='egl' \(no eglQueryString\); install libegl1"):
        record_video(agent, tmp_path / "video.mp4", lambda **_: exec(failing))
    failing = compile("raise AttributeError('no wheel')", "site-packages/mine/car.py", "exec")
    with pytest.raises(SurefootError, match=r"could not be made \(AttributeError: no wheel\)"):
        record_video(agent, tmp_path / "video.mp4", lambda **_: exec(failing))


# ---- environments that can't be recorded ------------------------------------------------------------------------------


class Painted(Endless):
    """Renders the object that it was made with, or raises it."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # as in Gymnasium

    def __init__(self, painting: Any, render_mode: str | None = None) -> None:
        self.painting, self.render_mode = painting, render_mode

    def render(self) -> Any:
        if isinstance(self.painting, Exception):
            raise self.painting
        return self.painting


def recorded(make: Any, tmp_path: Path) -> Path:
    agent = surefoot.train(make, surefoot.A2C, steps=1, **QUICK)
    return record_video(agent, tmp_path / "videos" / "video.mp4", make, max_steps=3).path


def test_any_environment_that_renders_can_be_recorded(tmp_path: Path) -> None:
    picture = np.full((10, 20, 3), 200, np.uint8)
    _, pictures = decoded(recorded(lambda render_mode=None: Painted(picture, render_mode), tmp_path))
    assert len(pictures) == 4
    assert ", 30 fps, " in decoded(recorded(lambda: Painted(picture, "rgb_array"), tmp_path))[0]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (Endless, r"can't be rendered; it has no render mode; give it 'rgb_array' and render\(\)"),
        (lambda: Painted(None), "can't be rendered; add an argument render_mode to the function that makes it, and pass it on"),
        (lambda: Painted(None, "rgb_array"), r"render\(\) returned NoneType, not a uint8 array"),
        (lambda: Painted(np.zeros((4, 4, 3)), "rgb_array"), r"render\(\) returned float64 \(4, 4, 3\), not a uint8 array"),
        (lambda: Painted(ValueError("paint ran out"), "rgb_array"), r"raised ValueError: paint ran out in render\(\)"),
        (
            lambda: Painted(gymnasium.error.DependencyNotInstalled("pygame is not installed"), "rgb_array"),
            r"needs pygame, which is not installed; run: pip install .*\[video\]'",
        ),
    ],
)
def test_an_environment_that_does_not_render_is_rejected_and_no_file_is_left(make: Any, part: str, tmp_path: Path) -> None:
    with pytest.raises(SurefootError, match=part):
        recorded(make, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_middle_keeps_the_old_video(tmp_path: Path) -> None:
    class Short(Painted):
        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 3:
                raise RuntimeError("the wheel came off")
            return super().step(action)

    agent = surefoot.train(Endless, surefoot.A2C, steps=1, **QUICK)
    (tmp_path / "video.mp4").write_text("old")
    with pytest.raises(SurefootError, match=r"raised RuntimeError: the wheel came off in step\(\), episode 0, step 3"):
        record_video(agent, tmp_path / "video.mp4", lambda: Short(np.zeros((8, 8, 3), np.uint8), "rgb_array"), max_steps=5)
    assert [path.name for path in tmp_path.iterdir()] == ["video.mp4"]
    assert (tmp_path / "video.mp4").read_text() == "old"


def black(path: Path, count: int) -> None:
    with Encoder(path, 320, 240, 30) as encoder:
        for _ in range(count):
            encoder.add(np.zeros((240, 320, 3), np.uint8))


@pytest.mark.parametrize("count", [1, 100], ids=["at the end", "on the way"])
def test_an_error_of_the_encoder_is_shown_and_no_file_is_left(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "ffmpeg"
    script.write_text('#!/bin/sh\nfor last; do :; done\nhead -c 1000 > "$last"\necho "$last: No space left" >&2\nexit 1\n')
    script.chmod(0o700)
    monkeypatch.setattr(surefoot.control.video.encoder, "ffmpeg_path", lambda: str(script))
    with pytest.raises(SurefootError, match=r"out/video.mp4: not written, the encoder failed \(.*No space left\)"):
        black(tmp_path / "out" / "video.mp4", count)
    assert list((tmp_path / "out").iterdir()) == []


# ---- the command ------------------------------------------------------------------------------------------------------


def test_watch_records_the_best_checkpoint_else_the_last_or_the_chosen_one(command: Any, run: Path, tmp_path: Path) -> None:
    best = next(folder.name for folder in (run / "best").iterdir() if folder.name.isdigit())
    copy = shutil.copytree(run, tmp_path / "run")
    code, out, err = command("watch", str(copy), "--max-steps", "2", "--seed", "4")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert out.startswith(f"{copy}/videos/cartpole-v1-{best}-seed4.mp4: 1 greedy episode, return 2.0 (cut off after 2 steps)")
    shutil.rmtree(copy / "best")
    for words, step in [((), "512"), (("--checkpoint", "256"), "256"), (("--checkpoint", "last"), "512")]:
        code, out, _ = command("watch", str(copy), "--max-steps", "2", *words)
        assert out.startswith(f"{copy}/videos/cartpole-v1-{step}-seed0.mp4: ")
    code, out, _ = command("watch", str(copy / "checkpoints" / "256"), "--max-steps", "2", "--out", str(tmp_path / "a.mp4"))
    assert out.startswith(f"{tmp_path}/a.mp4: ")


def test_an_agent_outside_a_run_needs_out(
    command: Any, agent: surefoot.Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agent.save("agent")
    assert "surefoot: agent: belongs to no run; set --out FILE" in command("watch", "agent")[2]
    assert command("watch", "agent", "--out", "a.mp4", "--max-steps", "1")[0] == 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--size", "321x240"], ["size='321x240'", "even numbers"]),
        (["--episodes", "0"], ["--episodes"]),
        (["--out", "video.gif"], ["out='video.gif'", "must end in .mp4"]),
        (["--out", "/dev/null/video.mp4"], ["/dev/null/video.mp4: can't be written", "--out"]),
        (["--checkpoint", "1"], ["checkpoint='1'", "has none of that name", "256, 512"]),
        (["--task", "nowhere:make"], ["task='nowhere:make'", "can't be imported", "--task"]),
        (["--task", "Nothing-v1"], ["Nothing-v1", "could not be made"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_bad_options_are_rejected_in_one_line(command: Any, run: Path, words: list[str], parts: list[str]) -> None:
    before = sorted(run.rglob("*"))
    code, out, err = command("watch", str(run), *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert [part for part in parts if part not in err] == []
    assert sorted(run.rglob("*")) == before


def test_a_run_without_a_checkpoint_is_rejected(command: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    shutil.copy(run / "config.toml", tmp_path / "new")
    assert "has no checkpoint yet" in command("watch", str(tmp_path / "new"))[2]
    for which in ("best", "last", "7"):
        assert "there is none yet" in command("watch", str(tmp_path / "new"), "--checkpoint", which)[2]


def test_a_missing_encoder_names_the_extra_to_install(command: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    code, _, err = command("watch", str(run))
    assert code == 2
    assert err.startswith("surefoot: a video needs imageio-ffmpeg, which is not installed; run: pip install ")
    assert err.endswith("[video]'\n")
