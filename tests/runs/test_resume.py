"""A killed and resumed run equals an uninterrupted one bit for bit: weights, moments, normalisers, streams, metrics."""

import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from forked import Forked
from killing import RECIPES, assert_same, begin_or_continue, die_at, in_child, outcome

import surefoot
from surefoot import Interrupted, SurefootError
from surefoot.cli import main as cli
from surefoot.control import evaluate
from surefoot.control.world import ControlWorld
from surefoot.core.rollout import EvaluationReport
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.spaces import with_values
from surefoot.runs import api
from surefoot.store.checkpoint import latest_checkpoint, load_checkpoint
from surefoot.store.folder import recipe_differences, scored_alike
from surefoot.store.manifest import fault_of
from surefoot.store.metrics import read_metrics

SECONDS = {}
"""how long each task's run takes without a kill"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """task -> the outcome of its run from start to end."""
    outcomes = {}

    def get(task):
        if task not in outcomes:
            path = tmp_path_factory.mktemp("whole") / "run"
            started = time.monotonic()
            begin_or_continue(path, task)
            outcomes[task], SECONDS[task] = outcome(path), time.monotonic() - started
        return outcomes[task]

    return get


def test_the_same_seed_gives_the_same_run(uninterrupted, tmp_path):
    begin_or_continue(tmp_path / "again", "CartPole-v1")
    assert_same(uninterrupted("CartPole-v1"), outcome(tmp_path / "again"))


def killed_at_random(path, task, rng, kills):
    """Kill the run ``kills`` times at random moments, then let it finish; how many kills hit a running child.

    A process takes longer for its first run than for those after it: where no kill came in time, all is done again, earlier.
    """
    hits = 0
    for scale in (1.0, 0.5, 0.25, 0.1, 0.05):
        if scale < 1:
            shutil.rmtree(path)
        for _ in range(kills):
            if unfinished(path, task):
                hits += in_child(path, task, delay=scale * rng.uniform(0.05, 0.7) * SECONDS[task]) == -signal.SIGKILL
        assert in_child(path, task) == 0
        if hits:
            break
    return hits


def unfinished(path, task):
    checkpoints = path / "checkpoints"
    done = [int(p.name) for p in checkpoints.glob("[0-9]*")] if checkpoints.exists() else []
    return max(done, default=0) < RECIPES[task]["steps"]


@pytest.mark.parametrize("task", ["CartPole-v1", pytest.param("Pendulum-v1", marks=pytest.mark.release)])
def test_a_kill_at_a_random_moment_changes_no_result(uninterrupted, tmp_path, task):
    expected = uninterrupted(task)
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed of the kills:", seed)
    assert killed_at_random(tmp_path / "run", task, random.Random(seed), kills=2) >= 1
    assert_same(expected, outcome(tmp_path / "run"))


@pytest.mark.parametrize(("name", "call", "after"), [("fsync", 20, False), ("rename", 2, True)])
def test_a_kill_inside_a_save_changes_nothing(uninterrupted, tmp_path, name, call, after):
    path = tmp_path / "run"
    assert in_child(path, "CartPole-v1", before=die_at(os, name, call, after)) == -signal.SIGKILL
    assert in_child(path, "CartPole-v1") == 0
    assert_same(uninterrupted("CartPole-v1"), outcome(path))
    assert not list(path.glob("**/.*.tmp")), "what the kill left half-written was not cleared away"


@pytest.mark.parametrize(("name", "call"), [("unlink", 7), ("rmdir", 4)])
def test_a_kill_inside_a_removal_changes_nothing(uninterrupted, tmp_path, name, call):
    path = tmp_path / "run"
    assert in_child(path, "CartPole-v1", before=die_at(os, name, call)) == -signal.SIGKILL
    numbered = [folder for place in ("checkpoints", "best") for folder in (path / place).glob("[0-9]*")]
    assert [folder for folder in numbered if fault_of(folder)] == [], "half a checkpoint under the name of a whole one"
    assert in_child(path, "CartPole-v1") == 0
    assert_same(uninterrupted("CartPole-v1"), outcome(path))
    assert not list(path.glob("**/.*.tmp")), "what the kill left half-removed was not cleared away"


def test_other_files_in_a_run_are_kept(tmp_path):
    path = tmp_path / "run"
    api.start(find_recipe("CartPole-v1", RECIPES["CartPole-v1"]), path, callback=lambda metrics: metrics["steps"] >= 600)
    for name in ("1", ".notes"):
        (path / name).mkdir()
        (path / name / "letter.txt").write_text("dear")
    api.resume(path)
    assert [(path / name / "letter.txt").read_text() for name in ("1", ".notes")] == ["dear"] * 2


def test_patience_counts_on_in_a_resumed_run(tmp_path, monkeypatch):
    """The first of equal scores is the best one; the fourth after it ends the run."""
    monkeypatch.setattr(ControlWorld, "evaluate", lambda self: EvaluationReport(1.0, {"evaluation_return": 1.0}))
    fields = {"steps": 640, "evaluation": {"every": 64, "patience": 4}, "checkpoint": {"every": 64}}
    fields |= {"rollout": {"environments": 2, "steps": 32}, "objective": {"reuse": {"epochs": 1, "minibatches": 1}}}
    recipe = find_recipe("CartPole-v1", fields)
    api.start(recipe, tmp_path / "whole")
    api.start(recipe, tmp_path / "cut", callback=lambda metrics: metrics["steps"] >= 192)
    api.resume(tmp_path / "cut")
    for name in ("whole", "cut"):
        assert read_metrics(tmp_path / name / "metrics.jsonl")[-1]["steps"] == 320, name


def test_sigterm_saves_and_stops_and_the_run_resumes_exactly(tmp_path, monkeypatch):
    path = tmp_path / "run"
    words = ["train", "CartPole-v1", "--steps", "60000", "--run-dir", str(path)]
    words += ["--evaluation.episodes", "1", "--checkpoint-every", "1000000"]

    monkeypatch.setattr(sys, "argv", ["surefoot", *words])
    process = Forked(cli.main, tmp_path)
    wait_for(path / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    code, _, errors = process.finish()
    assert code == 130
    assert re.fullmatch(r"surefoot: stopped at step \d+; continue with: surefoot resume \S+\n", errors), errors
    stopped_at = int(re.search(r"step (\d+)", errors).group(1))
    assert [p.name for p in (path / "checkpoints").glob("[0-9]*")] == [str(stopped_at)]
    # Exactly: the next iterations are those of a run that was not stopped.
    stop = lambda metrics: metrics["steps"] >= stopped_at + 512  # noqa: E731
    changes = {"steps": 60000, "evaluation": {"episodes": 1}, "checkpoint": {"every": 1000000}}
    api.resume(path, callback=stop)
    api.start(find_recipe("CartPole-v1", changes), tmp_path / "whole", callback=stop)
    stopped, whole = outcome_without_best(path), outcome_without_best(tmp_path / "whole")
    assert_same(stopped, whole)


def outcome_without_best(path):
    return load_checkpoint(latest_checkpoint(path / "checkpoints"))


def wait_for(path, seconds=200):
    end = time.monotonic() + seconds
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def test_a_finished_run_is_rejected_and_can_be_extended(tmp_path):
    path = tmp_path / "run"
    begin_or_continue(path, "CartPole-v1")
    with pytest.raises(SurefootError, match=r"finished, 2048 steps are done; extend it with steps above 2048"):
        api.resume(path)
    surefoot.resume(path, steps=2560)
    assert outcome(path)["at"][0] == "2560"
    assert "steps = 2560" in (path / "config.toml").read_text()


class Unwell(gymnasium.Env):
    """Its evaluation fails while an empty file is there, and is stopped while another is."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, file=""):
        self.file, self.t = Path(file), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.file.exists() and not self.file.stat().st_size:
            raise RuntimeError("the licence server is away")
        if self.file.exists():
            self.file.unlink()  # one signal: a second one would end the run at once
            signal.raise_signal(signal.SIGTERM)
        return self.np_random.random(2, np.float32), float(action), self.t == 5, False, {}


@pytest.mark.parametrize("at", [128, 256], ids=["on the way", "at the end"])
@pytest.mark.parametrize("why", ["", "Ctrl-C"], ids=["failed", "stopped"])
def test_a_failed_or_stopped_evaluation_loses_nothing_and_is_repeated_on_resume(why, at, tmp_path):
    fields = {"rollout": {"environments": 2, "steps": 16}, "evaluation": {"episodes": 2, "every": 128}, "traces": {"every": 64}}
    fields |= {"objective": {"reuse": {"epochs": 2, "minibatches": 4}}}
    away = tmp_path / "away"
    recipe = find_recipe(f"{__name__}:Unwell", {"steps": 256, "environment": {"file": str(away)}, **fields})
    api.start(recipe, tmp_path / "whole")

    due = []
    real = evaluate._run

    def failing(*arguments):
        if due:
            away.write_text(why)
        try:
            return real(*arguments)
        finally:
            away.unlink(missing_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "_run", failing)
        message = r"environment 0 of the evaluation raised RuntimeError: .* \(test_resume\.py:\d+\), then resume the run"
        message = f"stopped at step {at}; continue with" if why else message
        with pytest.raises((SurefootError, Interrupted), match=message):
            api.start(recipe, tmp_path / "cut", callback=lambda metrics: due.append(1) if metrics["steps"] == at - 32 else None)
        assert max(int(path.name) for path in (tmp_path / "cut" / "checkpoints").iterdir()) == at
        with pytest.raises((SurefootError, Interrupted), match=message):
            api.resume(tmp_path / "cut")  # it is away still
    api.resume(tmp_path / "cut")
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))
    traces = [{p.name: p.read_bytes() for p in (tmp_path / run / "traces").iterdir()} for run in ("whole", "cut")]
    assert traces[0] == traces[1]


def test_only_what_changes_no_result_may_change_on_resume():
    recipe = find_recipe("CartPole-v1", {"rollout": {"backend": "workers", "workers": 1}})
    for field in ("rollout.deadline", "rollout.workers", "steps", "tracking.name", "tracking.tags"):
        changed = with_values(recipe, {field: ["a"] if field.endswith("tags") else "b" if field.endswith("name") else 2})
        assert changed != recipe
        assert recipe_differences(recipe.table, changed) == []
    for field, value in (("rollout.environments", 4), ("seed", 2), ("network.hidden", [8]), ("evaluation.episodes", 3)):
        (line,) = recipe_differences(recipe.table, with_values(recipe, {field: value}))
        assert line.startswith(f"{field}: ")
        assert line.endswith(f" -> {value}")


def test_scores_are_compared_where_they_are_measured_alike():
    recipe = find_recipe("CartPole-v1")
    for field, value, alike in (("seed", 2, True), ("evaluation.every", 64, True), ("evaluation.episodes", 3, False)):
        assert scored_alike(recipe.table, with_values(recipe, {field: value}).table) is alike, field


def test_a_changed_recipe_is_rejected_with_the_difference(tmp_path):
    path = tmp_path / "run"
    api.start(find_recipe("CartPole-v1", RECIPES["CartPole-v1"]), path, callback=lambda m: m["steps"] >= 1024)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("gae_lambda = 0.8", "gae_lambda = 0.9"))
    before = outcome_without_best(path)
    with pytest.raises(SurefootError, match=r"objective.gae_lambda: 0.8 -> 0.9.*allow_changes=True"):
        api.resume(path)
    assert_same(before, outcome_without_best(path))
    api.resume(path, allow_changes=True)
    assert outcome_without_best(path)["recipe"]["objective"]["gae_lambda"] == 0.9


def test_changes_to_an_algorithm_with_another_kind_of_trust_region_are_never_allowed(tmp_path):
    """It would train the old algorithm under the new name."""
    path = tmp_path / "run"
    api.start(find_recipe("CartPole-v1", RECIPES["CartPole-v1"]), path, callback=lambda m: m["steps"] >= 1024)
    config = path / "config.toml"
    before, text = outcome_without_best(path), config.read_text()
    config.write_text(text.replace('algorithm = "PPO_CLIP"', 'algorithm = "TRPO"'))
    with pytest.raises(
        SurefootError, match=r"objective.trust_region: has keys of a clip .*'TRPO' has a constraint; name PPO_CLIP"
    ):
        api.resume(path, allow_changes=True)
    config.write_text(text)
    assert_same(before, outcome_without_best(path))


def test_another_architecture_is_rejected_by_tensor(tmp_path):
    path = tmp_path / "run"
    api.start(find_recipe("CartPole-v1", RECIPES["CartPole-v1"]), path, callback=lambda m: m["steps"] >= 1024)
    config = path / "config.toml"
    config.write_text(re.sub(r"hidden = \[\s*64,\s*64,\s*\]", "hidden = [32, 64]", config.read_text()))
    with pytest.raises(SurefootError, match=r"another architecture: policy.actor_trunk.layers.0.bias is \(64,\).*\(32,\)"):
        api.resume(path, allow_changes=True)


def test_a_run_in_use_is_rejected(tmp_path):
    path = tmp_path / "run"
    seen = []

    def second_writer(metrics):
        try:
            api.resume(path)
        except SurefootError as error:
            seen.append(str(error))
        return True

    api.start(find_recipe("CartPole-v1", RECIPES["CartPole-v1"]), path, callback=second_writer)
    assert "in use by another process" in seen[0]
    assert Path(path / "checkpoints").exists()


@pytest.mark.parametrize(("algorithm", "trust_region"), [("PPO_PENALTY_ADAPTIVE", {"target": 1e-4}), ("TRPO", {"delta": 0.02})])
def test_a_stopped_run_of_another_trust_region_resumes_exactly(tmp_path, algorithm, trust_region):
    """With the β it had by then, and with a policy that has no optimizer's moments to remember."""
    objective = {"reuse": {"epochs": 4, "minibatches": 4}, "trust_region": trust_region}
    changes = {"algorithm": algorithm, "steps": 1024, "objective": objective, "evaluation": {"every": 512, "episodes": 1}}
    recipe = find_recipe("CartPole-v1", changes)
    api.start(recipe, tmp_path / "whole")
    api.start(recipe, tmp_path / "stopped", callback=lambda metrics: metrics["steps"] >= 512)
    stopped = outcome_without_best(tmp_path / "stopped")["state"]
    api.resume(tmp_path / "stopped")
    whole = outcome(tmp_path / "whole")
    assert_same(whole, outcome(tmp_path / "stopped"))
    if algorithm == "PPO_PENALTY_ADAPTIVE":
        assert stopped["coefficients"]["beta"] != 1.0, "this example would not show a β that was forgotten"
        assert len({row["beta"] for row in whole["rows"]}) > 2
