"""Runs whose rewards people, or a judge in their place, teach by comparing clips."""

import re
import shlex
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from killing import assert_same, rows_of

import surefoot
from surefoot import SurefootError
from surefoot.cli import main as cli
from surefoot.control.collect import preferences
from surefoot.errors import LabelsNeededError
from surefoot.people.log import LABELS, Queue, write_log
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.store.checkpoint import checkpoints_in, latest_checkpoint, load_checkpoint

SMALL = {
    "steps": 600,
    "rollout": {"environments": 2, "steps": 30},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    "evaluation": {"every": 300, "episodes": 1},
    "preferences": {"labels": 12, "segment": 8, "errors": 0.2, "refits": 2},
}
"""clips of 8 steps in rollouts of 30: two steps of each environment are half-open after the first"""


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """How well the reward models fit is not tested here."""
    monkeypatch.setattr(preferences, "FIRST", 8)
    monkeypatch.setattr(preferences, "AGAIN", 4)


def final(run):
    parts = load_checkpoint(latest_checkpoint(run / "checkpoints"))
    return {name: parts[name] for name in ("agent", "learner", "collector", "state")}


@pytest.mark.parametrize("stop", [1, 5])
def test_a_run_that_stops_within_a_clip_and_between_refits_resumes_exactly(tmp_path, stop):
    recipe = find_recipe("Pendulum-v1", SMALL)
    api.start(recipe, tmp_path / "whole")
    api.start(recipe, tmp_path / "cut", callback=lambda metrics: metrics["iteration"] == stop)
    saved = final(tmp_path / "cut")["collector"]["preferences"]
    assert 0 < len(saved["open"][0][1]) < 8, "within a clip"
    assert len(saved["labels"]) == {1: 6, 5: 9}[stop]
    surefoot.resume(tmp_path / "cut")
    rows = rows_of(tmp_path / "whole")
    assert rows[-1]["labels_trained"] == 12
    assert_same(rows, rows_of(tmp_path / "cut"))
    assert_same(final(tmp_path / "whole"), final(tmp_path / "cut"))


def label_by_return(run):
    """Answer as the judge "return" does, from the rewards of the clips in the checkpoint."""
    pending = load_checkpoint(latest_checkpoint(run / "checkpoints"))["collector"]["preferences"]["pending"]
    first, second = pending[1].double().sum(-1).unbind(-1)
    folder = max(run.glob("round-*"), key=lambda path: path.name)
    queue = Queue(folder / "queue.jsonl")
    better = ["equal" if a == b else "a" if a > b else "b" for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    write_log(folder / LABELS / "ann.jsonl", queue, better)
    return queue


def test_people_who_judge_by_the_return_train_the_same_run_as_the_judge_return(tmp_path):
    """Three rounds, each of which stops the run and exits with 0."""
    settings = {"labels": 4, "segment": 8, "refits": 2}
    own, people = ({**SMALL, "preferences": {**settings, "judge": judge}} for judge in ("return", "people"))
    api.start(find_recipe("Pendulum-v1", own), tmp_path / "own")
    run, act = tmp_path / "people", None
    for number, count in ((1, 2), (2, 1), (3, 1)):
        text = (
            rf"^round-{number}: 0 of {count} pairs of clips are labelled; label them with: surefoot.* {re.escape(str(run))}, "
        )
        with pytest.raises(LabelsNeededError, match=text):
            surefoot.resume(run) if act else api.start(find_recipe("Pendulum-v1", people), run)
        queue, act = label_by_return(run), "resume"
        for pair in queue.pairs:
            assert b"ftyp" in (queue.path.parent / pair["video_a"]).read_bytes()[:12], "an MP4"
    surefoot.resume(run)
    assert_same(rows_of(tmp_path / "own"), rows_of(run))
    assert_same(final(tmp_path / "own")["agent"], final(run)["agent"])
    assert checkpoints_in(tmp_path / "own" / "best")
    assert not checkpoints_in(run / "best"), "the task's return does not say what people find better"


def test_the_command_prints_the_next_one_and_exits_with_0_until_all_clips_have_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["--preferences.judge", "people", "--preferences.labels", "2", "--preferences.segment", "4", "--steps", "200"]
    words = ["train", "Pendulum-v1", *settings, "--rollout.environments", "1", "--rollout.steps", "64", "--name", "p"]
    line = "round-1: 0 of 1 pairs of clips are labelled; label them with: surefoot label runs/p, "
    line += "then go on with: surefoot resume runs/p"
    first = [*words, "--objective.reuse.minibatches", "1"]
    for command, code, prints in ((first, 0, line), (["resume", "p"], 0, line), (["check", "p"], 2, f"runs/p: {line}")):
        monkeypatch.setattr("sys.argv", ["surefoot", *command])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == code
        assert prints in " ".join("".join(capsys.readouterr()).split())


class Blind(gymnasium.Env):
    """Has no pictures."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    metadata: ClassVar = {"render_modes": []}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Unrepeatable(Blind):
    """Draws from no generator of its own."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def step(self, action):
        return np.random.default_rng().uniform(-1, 1, 1).astype(np.float32), 0.0, False, False, {}

    def render(self):
        return np.zeros((64, 64, 3), np.uint8)


def test_a_task_without_pictures_is_an_error_before_there_is_a_folder(tmp_path):
    with pytest.raises(SurefootError, match="rgb_array"):
        surefoot.train(Blind, run_dir=tmp_path / "run", preferences={"judge": "people"})
    assert not (tmp_path / "run").exists()


def test_clips_that_replay_differently_are_an_error_before_the_first_update_and_no_queue(tmp_path):
    people = {**SMALL, "preferences": {"judge": "people", "labels": 4, "segment": 8}}
    with pytest.raises(SurefootError, match=r"^preferences.judge='people': needs exact replay, and step \d+ of episode 0 of "):
        surefoot.train(Unrepeatable, run_dir=tmp_path / "run", **people)
    assert not rows_of(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("queue.jsonl"))


@pytest.mark.slow
def test_the_how_to_works_as_it_is_written_with_a_person_who_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "train-from-clips.md").read_text("utf-8")
    section = page.split("## A first run")[1].split("\n## ")[0]
    printed = []
    for line in re.findall(r"^\$ surefoot (.*)$", section, re.MULTILINE):
        if line.startswith("label"):  # opens the page
            label_by_return(tmp_path / "runs" / "clips")
            continue
        monkeypatch.setattr("sys.argv", ["surefoot", *shlex.split(line)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        printed.append(" ".join(capsys.readouterr().out.split()))
    first, second, done = printed
    assert "round-1: 0 of 4 pairs of clips are labelled" in first
    assert "round-2: 0 of 4 pairs of clips are labelled" in second
    assert "Pendulum-v1, seed 1: return" in done
    assert rows_of(tmp_path / "runs" / "clips")[-1]["labels_trained"] == 8
