"""The frame beside a traced step is the frame of that step: real videos, decoded by a real browser."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from starlette.testclient import TestClient

from surefoot import read_trace
from surefoot.control.video.traces import record_traces
from surefoot.core.traces import TracedRow
from surefoot.inspector.folders import RunFolders
from surefoot.store.reading import replay_failure, trace_video, traces_in

from .test_inspector import go_to, settled, until
from .test_server import TOKEN, client

Begin = Callable[[list[Path]], str]
PROFILES = """() => {
  const [video, canvas] = [document.getElementById("frame-video"), document.createElement("canvas")];
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  const pen = canvas.getContext("2d");
  pen.drawImage(video, 0, 0);
  const { data, width, height } = pen.getImageData(0, 0, canvas.width, canvas.height);
  const found = new Array(width + height).fill(0);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const light = (data[4 * (y * width + x)] + data[4 * (y * width + x) + 1] + data[4 * (y * width + x) + 2]) / 3;
    found[x] += light / height;
    found[width + y] += light / width;
  }
  return found;
}"""
"""how light each column and each row of the shown frame is"""


@pytest.fixture(scope="module")
def recorded(cart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, with videos of its last trace."""
    copy = tmp_path_factory.mktemp("has_video") / "cart"
    shutil.copytree(cart, copy)
    assert len(list(record_traces(copy, "last", size=(600, 400), caption=False))) == 3
    return copy


def pictures(row: TracedRow) -> np.ndarray:
    """The states before each step and after the last as Gymnasium draws them: columns and rows.   [T + 1, 600 + 400]"""
    environment = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    environment.reset(seed=row.about["seed"])
    for action in row.about["before"]:
        environment.step(int(action))
    drawn = [environment.render()]
    for action in row.actions:
        environment.step(int(action))
        drawn.append(environment.render())
    light = np.stack(drawn).astype(float).mean(-1)  # type: ignore[arg-type]
    return np.concatenate([light.mean(1), light.mean(2)], 1)


def test_the_frame_beside_a_step_is_the_state_that_the_step_was_chosen_in(page: Any, recorded: Path, inspector: Begin) -> None:
    trace = read_trace(traces_in(recorded / "traces")[-1])
    index = max(range(3), key=lambda i: len(trace.rows[i].rewards))
    row = trace.rows[index]
    frames, last = pictures(row), len(row.rewards) - 1
    assert last > 10
    page.goto(inspector([recorded]))
    page.click("nav a[data-view=steps]")
    settled(page)
    go_to(page, traces_in(recorded / "traces")[-1], index)
    for t in (last // 2, last, 0, last - 3):
        page.click(f"#steps [data-t='{t}']")
        page.wait_for_selector(f"#frame[data-step='{t}']")
        shown = np.array(page.evaluate(PROFILES))
        assert int(np.abs(frames - shown).mean(1).argmin()) == t, "another moment of the episode looks more like it"
        assert f"Before t = {row.about['step'] + t} of episode {row.about['episode']}" in page.inner_text("#frame")
        assert f": action {int(row.actions[t])}" in page.inner_text("#chain h3 >> nth=0")
    page.click("#steps [data-t='0']")
    page.wait_for_selector("#frame[data-step='0']")
    page.click("#play")
    page.wait_for_selector(f"#frame[data-step='{last + 1}']")
    assert "After the last step" in page.inner_text("#frame")
    until(page, "document.getElementById('play').textContent === 'Play'")
    chosen = int(page.get_attribute("#steps [aria-selected=true]", "data-t"))
    assert chosen > last // 2, "whoever plays the video walks along the steps"
    assert page.get_attribute("#audit", "data-wrong") == "0"


@pytest.mark.slow
def test_videos_of_whole_episodes_are_shown_without_text_tabs(
    page: Any, recorded: Path, inspector: Begin, tmp_path: Path
) -> None:
    run = tmp_path / "cart"
    shutil.copytree(recorded, run)
    shutil.copy(next((run / "videos" / "traces").glob("*.mp4")), run / "videos" / "CartPole-v1-10.mp4")
    page.goto(inspector([run]))
    page.click("nav a[data-view=samples]")
    page.wait_for_selector("#videos video")
    assert page.inner_text("#videos figcaption") == "CartPole-v1-10.mp4"
    assert "[object" not in page.inner_text("body")
    until(page, "document.querySelector('#videos video').readyState > 0")
    assert page.locator("#before").is_hidden(), "an agent gave no answers"


@pytest.mark.slow
def test_a_step_without_a_video_shows_the_command_that_records_one(
    page: Any, recorded: Path, text_run: Path, inspector: Begin
) -> None:
    first = traces_in(recorded / "traces")[0].stem
    page.goto(inspector([recorded, text_run]))
    page.click("nav a[data-view=steps]")
    settled(page)
    go_to(page, traces_in(recorded / "traces")[-1])
    page.wait_for_selector("#frame-video")
    page.locator("#iteration").fill("0")
    until(page, f"location.hash.startsWith('#steps/0/{first}/')")
    assert page.inner_text("#frame code") == f"surefoot watch {recorded} --traced {first}"
    assert page.locator("#frame-video").is_hidden()
    row = read_trace(traces_in(recorded / "traces")[0]).rows[0]
    replay_failure(trace_video(recorded, int(first), 0, row)).write_text("<b>the reward</b> of step 3 came out otherwise\n")  # type: ignore[arg-type]
    page.reload()
    settled(page)
    until(page, "document.querySelector('#frame figcaption').textContent.includes('No video: <b>the reward</b> of step 3')")
    assert page.inner_text("#frame code") == f"surefoot watch {recorded} --traced {first}"
    page.select_option("#steps-run", "1")
    until(page, "location.hash.startsWith('#steps/1/')")
    assert page.locator("#frame").is_hidden(), "text has no frames"


def test_a_video_is_sent_in_ranges_to_logged_in_browsers_and_only_for_its_own_row(recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    steps = traces_in(run / "traces")[-1].stem
    inside = client(RunFolders([run]))
    path = f"/api/runs/0/traces/{steps}/rows/1/video"
    assert inside.get(path).status_code == 403
    assert inside.get(f"/enter?token={TOKEN}").status_code == 303
    part = inside.get(path, headers={"range": "bytes=4-7"})
    assert (part.status_code, part.content, part.headers["content-type"]) == (206, b"ftyp", "video/mp4")
    assert inside.get(f"/api/runs/0/traces/{steps}/rows/9/video").status_code == 404
    assert inside.get(f"/api/runs/0/traces/{traces_in(run / 'traces')[0].stem}/rows/1/video").status_code == 404
    video = next((run / "videos" / "traces").glob(f"{steps}-1-*.mp4"))
    video.rename(video.with_name(video.name.replace(f"{steps}-1-", f"{steps}-1-0")))
    assert inside.get(path).status_code == 404, "it is not known to be of this episode"
    video.symlink_to(run / "config.toml")
    assert inside.get(path).status_code == 404
    assert isinstance(inside, TestClient)
