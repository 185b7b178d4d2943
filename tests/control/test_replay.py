"""Traced episodes can be replayed and recorded; a replay that differs from training is rejected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import surefoot
from surefoot import SurefootError, read_trace
from surefoot.control.environments.looped import LoopedEnvironments
from surefoot.control.normalise import action_converter
from surefoot.control.replay import ReplayMismatchError, replay
from surefoot.control.video.traces import record_traces
from surefoot.core.traces import TracedRow
from surefoot.store.manifest import write_listed
from surefoot.store.reading import trace_video, traces_in
from surefoot.store.traces import to_bytes

from .test_video import decoded

QUICK: dict[str, Any] = {"evaluation": {"episodes": 0}, "display": None}
SHORT: dict[str, Any] = {"rollout": {"environments": 2, "steps": 32}, "traces": {"every": 1, "rows": 2}, **QUICK}


def rows_of(run: Path) -> list[TracedRow]:
    return [row for file in traces_in(run / "traces") for row in read_trace(file).rows]


def replayed(row: TracedRow, task: str, seed: int = 1, stretched: bool = False) -> list[Any]:
    environments = LoopedEnvironments(lambda: gymnasium.make(task), 1, seed, task)
    return list(replay(row, environments, action_converter(environments.action_space, stretched)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts so short that many a piece begins in the middle of an episode."""
    path = tmp_path_factory.mktemp("replayed") / "run"
    surefoot.train("CartPole-v1", steps=512, seed=1, run_dir=path, **SHORT)
    return path


def test_every_traced_piece_can_be_replayed_from_wherever_in_its_episode_it_begins(run: Path) -> None:
    rows = rows_of(run)
    assert len(rows) == 16
    for row in rows:
        moments = replayed(row, "CartPole-v1")
        first = row.about["step"]
        assert [moment.step for moment in moments] == list(range(first, first + len(row.rewards) + 1))
        assert moments[-1].total == moments[-1].step, "every step of CartPole pays 1"
    assert sum(row.about["step"] > 0 for row in rows) >= 4
    assert sum(row.about["episode"] > 0 and row.about["step"] == 0 for row in rows) >= 4


def test_clipped_actions_can_be_replayed_too(tmp_path: Path) -> None:
    surefoot.train("Pendulum-v1", steps=192, seed=3, run_dir=tmp_path / "run", **SHORT, objective={"reuse": {"minibatches": 4}})
    rows = rows_of(tmp_path / "run")
    assert max(float(row.actions.abs().max()) for row in rows) > 2, "nothing was clipped"
    assert {row.about["step"] for row in rows} == {0, 32, 64}
    for row in rows:
        assert len(replayed(row, "Pendulum-v1", 3)) == 33


def test_actions_scaled_to_their_bounds_can_be_replayed_and_recorded(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"objective": {"reuse": {"minibatches": 4}}, "normalise": {"actions": True}}
    surefoot.train("Pendulum-v1", steps=128, seed=3, run_dir=tmp_path / "run", **{**SHORT, **fields})
    rows = rows_of(tmp_path / "run")
    for row in rows:
        assert len(replayed(row, "Pendulum-v1", 3, stretched=True)) == 33
        with pytest.raises(ReplayMismatchError):
            replayed(row, "Pendulum-v1", 3)
    assert all("replayed" in line for line in record_traces(tmp_path / "run", "all"))


def test_a_trace_can_be_replayed_with_gymnasium_alone(run: Path) -> None:
    row = next(row for row in rows_of(run) if row.about["step"] > 0)
    environment = gymnasium.make("CartPole-v1")
    environment.reset(seed=row.about["seed"])
    ends = [environment.step(int(action))[2] for action in [*row.about["before"], *row.actions]]
    assert not any(ends[:-1])
    assert ends[-1] == bool(row.terminated[-1])


@pytest.mark.parametrize("wrong", ["actions", "before", "episode", "reward", "end", "observed"])
def test_a_replay_that_differs_is_rejected(run: Path, wrong: str) -> None:
    row = next(row for row in rows_of(run) if row.about["step"] > 0)
    about = row.about
    changed = {
        "actions": lambda: replace(row, actions=1 - row.actions),
        "before": lambda: replace(row, about={**about, "before": 1 - about["before"]}),
        "episode": lambda: replace(row, about={**about, "episode": about["episode"] + 1}),
        "reward": lambda: replace(row, reward_parts={"environment": row.rewards + 0.5}),
        "end": lambda: replace(row, terminated=~row.terminated),
        "observed": lambda: replace(row, about={**about, "observed": "0" * 64}),
    }[wrong]()
    with pytest.raises(ReplayMismatchError):
        replayed(changed, "CartPole-v1")
    with pytest.raises(ReplayMismatchError):
        replayed(row, "CartPole-v1", seed=2)


def test_traces_of_worker_processes_can_be_replayed_too(run: Path, tmp_path: Path) -> None:
    settings = {**SHORT, "rollout": {**SHORT["rollout"], "backend": "workers", "workers": 2}}
    surefoot.train("CartPole-v1", steps=512, seed=1, run_dir=tmp_path / "run", **settings)
    here, there = ([file.read_bytes() for file in traces_in(path / "traces")] for path in (run, tmp_path / "run"))
    assert here == there


def test_a_vector_environment_that_cannot_be_replayed_has_no_video(tmp_path: Path) -> None:
    settings = {**SHORT, "rollout": {**SHORT["rollout"], "backend": "native"}}
    surefoot.train("CartPole-v1", steps=64, seed=1, run_dir=tmp_path / "run", **settings)
    assert [row.about for row in rows_of(tmp_path / "run")][:2] == [{}, {}]
    with pytest.raises(SurefootError, match=r"no traced episode could be recorded; traces/\d+.safetensors, row 1: .*vector"):
        list(record_traces(tmp_path / "run"))
    assert not (tmp_path / "run" / "videos").exists()


def test_a_video_has_a_frame_before_every_step_and_one_after_the_last(run: Path) -> None:
    messages = list(record_traces(run, "last", size=(96, 64), caption=False))
    last = traces_in(run / "traces")[-1]
    rows = read_trace(last).rows
    assert len(messages) == len(rows) == 2
    for index, row in enumerate(rows):
        path = trace_video(run, int(last.stem), index, row)
        assert path is not None
        about, pictures = decoded(path)
        assert (len(pictures), ", 50 fps," in about) == (len(row.rewards) + 1, True)
        environment = gymnasium.make("CartPole-v1", render_mode="rgb_array")
        environment.reset(seed=row.about["seed"])
        for action in [*row.about["before"], *row.actions]:
            environment.step(int(action))
        drawn = np.asarray(environment.render(), np.float64)[::5, ::5].mean((0, 2))
        shown = pictures[-1].mean((0, 2))
        across = np.linspace(0, 1, 50)
        of_both = [np.interp(across, np.linspace(0, 1, len(x)), 255 - x) for x in (drawn, shown)]
        centres = [float((across * x).sum() / x.sum()) for x in of_both]
        assert centres[0] == pytest.approx(centres[1], abs=0.02), "the cart stands elsewhere"
    assert all(line.endswith("exists already") for line in record_traces(run, "last", size=(96, 64)))
    assert not list((run / "videos" / "traces").glob(".*"))


def test_a_replay_that_differs_is_not_recorded(run: Path, tmp_path: Path, command: Any) -> None:
    other = tmp_path / "other"
    (other / "traces").mkdir(parents=True)
    (other / "config.toml").write_text((run / "config.toml").read_text())
    last = traces_in(run / "traces")[-1]
    trace = read_trace(last)
    rows = [replace(row, actions=torch.zeros_like(row.actions)) for row in trace.rows[:1]]
    write_listed(other / "traces" / last.name, to_bytes(replace(trace, rows=rows + trace.rows[1:])))
    code, output, _ = command("watch", str(other), "--traced", "all", "--size", "96x80")
    assert code == 0
    first, second = output.strip().split("\n")
    assert "row 0: not recorded; " in first
    assert ", replayed from its step " in second
    videos = other / "videos" / "traces"
    (note,) = videos.glob("*.txt")
    assert len(list(videos.iterdir())) == 2
    assert note.name.startswith(f"{last.stem}-0-")
    assert note.read_text().strip() in first
    write_listed(other / "traces" / last.name, last.read_bytes())  # as on a machine where it comes out as it did in training
    note.rename(videos / trace_video(run, int(last.stem), 0, trace.rows[0]).with_suffix(".txt").name)  # type: ignore[union-attr]
    assert command("watch", str(other), "--traced", "all", "--size", "96x80")[0] == 0
    assert sorted(file.suffix for file in videos.iterdir()) == [".mp4", ".mp4"]
    for flags, remedy in (
        (["--traced", "7"], "must be last, all, or the steps of a trace: 512"),
        (["--episodes", "1"], "leave it out"),
    ):
        code, _, output = command("watch", str(other), "--traced", "last", *flags)
        assert code == 2
        assert remedy in output
        assert output.count("\n") == 1
