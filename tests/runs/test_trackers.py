"""Trackers get every step once, also after a kill; a failing tracker never ends a run. Each store is read back."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import get_args

import pytest
from killing import rows_of

import surefoot
from surefoot import SurefootError
from surefoot.core.rollout import EvaluationReport, LearnerState
from surefoot.diagnostics.findings import of_run
from surefoot.diagnostics.machine import EXTRAS
from surefoot.diagnostics.metrics import TIMING
from surefoot.recipes.base import TrackerName
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.runs import api
from surefoot.runs.trackers import delivery, interface
from surefoot.runs.trackers import wandb as wandb_tracker
from surefoot.runs.trackers.delivery import Delivery
from surefoot.runs.trackers.interface import NOTHING, TRACKERS, TrackedRun
from surefoot.store.events import EvaluationEnd, FindingReported, InitialSamples, IterationEnd, RunEnd, RunStart
from surefoot.store.finding import check_result
from surefoot.store.manifest import write_listed
from surefoot.store.metrics import read_metrics

FIELDS = {
    "steps": 1024,
    "rollout": {"environments": 4, "steps": 16},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    "evaluation": {"episodes": 1, "every": 512},
    "checkpoint": {"every": 256},
    "traces": {"rows": 0},
}


# ---- the recipe -------------------------------------------------------------------------------------------------------


def test_trackers_are_a_list_or_comma_separated_names():
    for value in (["wandb", "trackio", "wandb"], "wandb, trackio"):
        recipe = find_recipe("CartPole-v1", {"trackers": value})
        assert recipe.trackers == ("wandb", "trackio")
        assert make_recipe(to_table(recipe)) == recipe


def test_every_list_of_trackers_has_the_same_names():
    """The recipe's, the classes', those whose store is read here, and the extras."""
    assert set(get_args(TrackerName)) == set(TRACKERS) == set(READERS)
    assert set(TRACKERS) <= set(EXTRAS)
    for name, kind in TRACKERS.items():
        source = (Path(interface.__file__).parent / f"{name}.py").read_text()
        assert f"class {kind}:" in source


def test_an_unknown_tracker_is_one_line(command):
    for name, expected in (
        ("neptune", "trackers.0='neptune': input should be 'tensorboard', 'wandb' or 'trackio'"),
        ("wandb,mlflow", "trackers='mlflow': is a callback; train from Python, see docs/how-to/log-to-trackers.md"),
    ):
        code, _, err = command("train", "CartPole-v1", "--trackers", name)
        assert (code, err.count("\n")) == (2, 1)
        assert expected in err


@pytest.mark.parametrize("problem", ["tensorboard", "wandb", "trackio", "no key", "invalid settings"])
def test_a_tracker_that_can_not_work_is_one_line_before_work_starts(problem, command, monkeypatch, tmp_path):
    if problem in READERS:
        monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
        expected = f"trackers=['{problem}'] needs {problem}, which is not installed; run: pip install"
    elif problem == "no key":
        pytest.importorskip("wandb")
        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        expected = "trackers=['wandb']: there is no API key; run: wandb login, or set WANDB_MODE=offline\n"
    else:  # as with WANDB_MODE=online2; the package keeps what it read first for the whole process
        wandb = pytest.importorskip("wandb")
        monkeypatch.setattr("surefoot.runs.trackers.wandb.mode", lambda: wandb.Settings(mode="online2"))
        expected = "trackers=['wandb']: its settings are invalid (ValidationError: "
    name = problem if problem in READERS else "wandb"
    code, _, err = command("train", "CartPole-v1", "--trackers", name, "--run-dir", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert expected in err
    assert not (tmp_path / "run").exists()


def test_trackers_need_a_run_folder():
    with pytest.raises(SurefootError, match=r"trackers=\['tensorboard'\]: a run without a folder .* set run_dir"):
        surefoot.train("CartPole-v1", trackers=["tensorboard"])


def test_trackers_may_change_when_a_run_resumes(tmp_path):
    api.start(find_recipe("CartPole-v1", FIELDS), tmp_path / "run", callback=lambda metrics: metrics["steps"] >= 512)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("trackers = []", 'trackers = ["tensorboard"]'))
    api.resume(tmp_path / "run")
    assert steps_of_tensorboard(tmp_path / "run") == steps_of(tmp_path / "run"), "also the rows before"


# ---- each store -------------------------------------------------------------------------------------------------------


def steps_of(run: Path) -> list[int]:
    return [row["steps"] for row in read_metrics(run / "metrics.jsonl")]


def identity(run: Path, name: str) -> dict:
    return json.loads((run / "trackers.json").read_text())[name]["identity"]


def rows_of_tensorboard(run: Path) -> list[dict]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in rows.setdefault(event.step, {}), (name, event.step)
            rows[event.step][name] = event.value
    return [rows[step] for step in sorted(rows)]


def steps_of_tensorboard(run: Path) -> list[int]:
    return [int(row["steps"]) for row in rows_of_tensorboard(run)]


def rows_of_wandb(run: Path) -> list[dict]:
    from surefoot.runs.trackers.wandb import offline_files, offline_rows

    rows = [row for path in offline_files(run, identity(run, "wandb")["id"]) for row in offline_rows(path)]
    parsed = [(step, {name: json.loads(value) for name, value in row.items()}) for step, row in rows]
    assert all(step == row["_step"] == row["steps"] for step, row in parsed)
    return [{name: value for name, value in row.items() if not name.startswith("_")} for _, row in parsed]


def rows_of_trackio(run: Path) -> list[dict]:
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; print(json.dumps(S.get_logs(*sys.argv[1:])))"
    )
    command = [sys.executable, "-c", code, "surefoot", identity(run, "trackio")["name"]]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rows = [row for row in rows if set(row) != {"step", "timestamp", "video"}]
    assert all(row["step"] == row["steps"] for row in rows)
    return [{name: value for name, value in row.items() if name not in ("step", "timestamp")} for row in rows]


READERS = {"tensorboard": rows_of_tensorboard, "wandb": rows_of_wandb, "trackio": rows_of_trackio}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Every tracker writes to local stores below a temporary folder, which is the working folder."""
    for package in READERS:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return tmp_path


def assert_each_step_is_there_once(rows: list[dict], expected: list[dict]) -> None:
    """The rows of a store have the steps and, except for times, the numbers of metrics.jsonl."""
    assert [row["steps"] for row in rows] == [row["steps"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        known = {key: value for key, value in wanted.items() if value is not None and key not in TIMING}
        got = {key: value for key, value in row.items() if key not in TIMING and value is not None}
        assert got == pytest.approx(known, rel=1e-5, abs=1e-6), row["steps"]


@pytest.mark.parametrize("name", list(READERS))
def test_a_run_that_an_error_ended_and_that_was_resumed_is_in_a_store_with_each_step_once(name, offline):
    """Three rows after the checkpoint are in the store when the error comes."""

    def fail(metrics):
        if metrics["steps"] == 448:
            raise RuntimeError("stop here")

    run = offline / "run"
    with pytest.raises(RuntimeError, match="stop here"):
        api.start(find_recipe("CartPole-v1", {**FIELDS, "trackers": [name]}), run, callback=fail)
    assert max(int(path.name) for path in (run / "checkpoints").iterdir()) == 256
    api.resume(run)
    expected = read_metrics(run / "metrics.jsonl")
    assert len(expected) == 16
    assert_each_step_is_there_once(READERS[name](run), expected)


def test_runs_that_the_program_has_open_stay_its_own(offline, monkeypatch):
    """Also the trial of a sweep, whose id W&B would give every run of the process."""
    import trackio
    import wandb

    monkeypatch.setattr(wandb.setup().settings, "sweep_id", "asweep")
    mine = wandb.init(
        project="p", dir=str(offline), id="mine", mode="offline", settings=wandb.Settings(silent=True, console="off")
    )
    trial = trackio.init(project="mine", name="mine", embed=False)
    mine.log({"before": 1.0}, step=1000)
    before = dict(os.environ)
    surefoot.train("CartPole-v1", **FIELDS | {"steps": 256}, run_dir=offline / "run", trackers=list(READERS), display=False)
    assert {name: value for name, value in os.environ.items() if before.get(name) != value} == {}
    assert wandb.run is mine
    mine.log({"score": 2.0})
    mine.finish()
    trackio.log({"score": 2.0})
    trial.finish()
    trackio.context_vars.current_run.set(None)
    for name, rows in READERS.items():
        assert [row["steps"] for row in rows(offline / "run")] == [64, 128, 192, 256], name
    assert identity(offline / "run", "wandb")["id"] != mine.id


def test_closing_an_offline_run_of_wandb_waits_for_the_process_that_writes_its_file(tmp_path, monkeypatch):
    steps_in_file = iter([NOTHING, 64, 64, 128, 192])
    monkeypatch.setattr(wandb_tracker, "last_step_offline", lambda where, run_id: next(steps_in_file))
    wandb_tracker.wait_for_row(tmp_path, "run", 128)
    assert list(steps_in_file) == [192]


def test_what_a_run_publishes_is_in_every_store(offline):
    """Samples as a table, a finding, a video, the recipe and the group, in one run of two iterations without a process."""
    run = offline / "run"
    (run / "videos").mkdir(parents=True)
    recipe = find_recipe("CartPole-v1", {"trackers": list(READERS), "tracking": {"tags": ["first"]}})
    problems: list = []
    listeners = delivery.tracker_listeners(recipe, run, problems.append)
    state, samples = LearnerState(1000), [{"prompt": "2+2", "response": "4 | 5", "reward": 1.0}, {"prompt": "x", "gold": None}]
    for steps in (100, 200):
        state.steps = steps
        ended = IterationEnd(state, {"iteration": steps // 100, "steps": steps, "loss": 1 / steps, "none": None})
        first = RunStart(state, run) if steps == 100 else EvaluationEnd(state, EvaluationReport(None, {}, samples))
        for event in (first, ended):
            for listener in listeners:
                listener(event)
    (run / "videos" / "one.mp4").write_bytes(b"\0" * 64)
    for event in (FindingReported(200, check_result("entropy_collapsed", "warning", "it fell")), RunEnd(state, run, False)):
        for listener in listeners:
            listener(event)
    assert problems == []
    for name, read in READERS.items():
        rows = read(run)
        assert [row["loss"] for row in rows] == pytest.approx([1 / 100, 1 / 200]), name
        assert all("none" not in row for row in rows), name
    look_at_trackio(run)
    look_at_wandb(run)


def look_at_trackio(run):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    name = identity(run, "trackio")["name"]
    (found,) = [each for each in trackio.Api().runs("surefoot") if each.name == name]
    assert (found.config["_Group"], found.config["optimizer.learning_rate"]) == ("CartPole-v1-ppo_clip", 0.001)
    assert [alert["title"] for alert in found.alerts()] == ["entropy_collapsed"]
    rows = SQLiteStorage.get_logs("surefoot", name)
    assert rows[1]["samples"]["_value"][0] == {"prompt": "2+2", "response": "4 | 5", "reward": 1.0}
    assert rows[2]["video"]["file_path"].endswith(".mp4")


def look_at_wandb(run):
    from wandb.proto import wandb_internal_pb2

    from surefoot.runs.trackers.wandb import _records, offline_files

    (path,) = offline_files(run, identity(run, "wandb")["id"])
    records = [wandb_internal_pb2.Record() for _ in _records(path.read_bytes())]
    for record, content in zip(records, _records(path.read_bytes()), strict=True):
        record.ParseFromString(content)
    (begun,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (begun.run_group, begun.display_name, list(begun.tags)) == ("CartPole-v1-ppo_clip", "run", ["first"])
    config = {update.key: json.loads(update.value_json) for update in begun.config.update}
    assert config["optimizer"]["learning_rate"] == 0.001
    assert [record.alert.title for record in records if record.WhichOneof("record_type") == "alert"] == ["entropy_collapsed"]
    assert len(list(run.glob("wandb/offline-run-*/files/media/table/samples_*.json"))) == 1
    assert len(list(run.glob("wandb/offline-run-*/files/media/videos/video_*.mp4"))) == 1


# ---- failures ---------------------------------------------------------------------------------------------------------


class Ledger:
    """A tracker of the tests: keeps what it gets, and fails where it should."""

    def __init__(self, fail_at=None, had=NOTHING):
        self.identity, self.last_step, self.fail_at = {"id": 7}, had, fail_at
        self.rows, self.closed = [], None

    def log(self, steps, metrics, samples):
        if steps == self.fail_at:
            raise ConnectionError("the server\nis down")
        self.rows.append((steps, dict(metrics), list(samples)))
        self.last_step = steps

    def log_video(self, steps, path):
        self.rows.append((steps, path.name))

    def log_finding(self, steps, finding):
        self.rows.append((steps, finding.name))

    def close(self, failed):
        self.closed = failed


def deliver(tmp_path, tracker, rows=(), new=(), name="wandb"):
    """Run a delivery over new rows; the findings it reports. ``tracker`` may be a class, of a run."""
    recipe, reported = find_recipe("CartPole-v1"), []
    run = TrackedRun(recipe, {}, tmp_path, rows[-1]["steps"] if rows else 0, "run", "group", {})
    listener = Delivery(name, lambda: tracker(run) if isinstance(tracker, type) else tracker, run, rows, reported.append)
    state = LearnerState(1000)
    listener(RunStart(state, tmp_path))
    for row in new:
        state.steps = row["steps"]
        listener(IterationEnd(state, row))
    listener(RunEnd(state, tmp_path, False))
    return reported


@pytest.mark.parametrize("name", ["wandb", "tensorboard"], ids=["in a thread", "in training's thread"])
def test_a_resumed_tracker_gets_only_missing_rows(name, tmp_path):
    rows = [{"steps": steps, "x": 1.0} for steps in (10, 20, 30)]
    new = [{"steps": steps, "x": 2.0} for steps in (40, 50)]
    for had in (NOTHING, 20, 30, 40):
        ledger = Ledger(had=had)
        assert deliver(tmp_path, ledger, rows, new, name) == []
        assert [row[0] for row in ledger.rows] == [steps for steps in (10, 20, 30, 40, 50) if steps > had]
        assert ledger.closed is False


def log_rows(folder, steps, rows):
    """Resume a run with TensorBoard after rows without it, and log the rows that follow."""
    from surefoot.runs.trackers.tensorboard import TensorBoard

    if any(folder.iterdir()):
        time.sleep(1.01)  # files are read in the order of the seconds in their names
    known = [{"steps": steps} for steps in range(10, steps + 1, 10)]
    deliver(folder, TensorBoard, known, [{"steps": row} for row in rows], "tensorboard")


def test_tensorboard_gets_the_rows_that_a_session_without_rows_has_hidden(tmp_path):
    """A is killed after its checkpoint at 20; B resumes and has no row; C has no TensorBoard; D gets the rest."""
    pytest.importorskip("tensorboard")
    log_rows(tmp_path, 0, [10, 20, 30, 40])
    log_rows(tmp_path, 20, [])
    assert steps_of_tensorboard(tmp_path) == [10, 20]
    log_rows(tmp_path, 40, [50])
    assert steps_of_tensorboard(tmp_path) == [10, 20, 30, 40, 50]


def test_tensorboard_gets_a_row_again_of_which_a_kill_left_a_part(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    log_rows(tmp_path, 0, [10])
    time.sleep(1.01)
    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("value_loss", 1.0, 20)  # "steps" comes last
    writer.close()
    log_rows(tmp_path, 20, [])
    assert [row.keys() for row in rows_of_tensorboard(tmp_path)] == [{"steps"}, {"steps"}]


def test_tensorboard_gets_every_row_after_a_kill_during_the_first_ones(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    SummaryWriter(str(tmp_path)).close()
    log_rows(tmp_path, 40, [50])
    assert steps_of_tensorboard(tmp_path) == [10, 20, 30, 40, 50]


def test_trackio_does_not_continue_another_run_of_the_same_name(offline):
    from surefoot.runs.trackers.trackio import Trackio

    def opened(saved):
        return Trackio(TrackedRun(find_recipe("CartPole-v1"), {}, offline, 0, "same", "group", saved))

    first = opened({})
    identity_of_first = first.identity
    second = opened({})  # before the first has a row
    assert second.identity["name"] == identity_of_first["name"]
    assert second.identity["id"] != identity_of_first["id"]
    second.log(10, {"steps": 10.0}, [])
    second.close(False)
    assert opened(second.identity).last_step == 10
    third = opened(identity_of_first)
    assert (third.identity["name"], third.last_step) == ("same-2", NOTHING), "gets all rows"


def test_samples_that_a_tracker_lacks_are_logged_with_their_row(tmp_path):
    (tmp_path / "samples").mkdir()
    write_listed(tmp_path / "samples" / "20.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    ledger = Ledger()
    deliver(tmp_path, ledger, [{"steps": 10}, {"steps": 20}])
    assert [row[2] for row in ledger.rows] == [[], [{"prompt": "a"}, {"prompt": "b"}]]


@pytest.mark.parametrize("written", [False, True], ids=["sampled now", "sampled before a kill"])
def test_samples_before_training_are_logged_once_at_step_0(tmp_path, written):
    samples, ledger, state = [{"prompt": "a"}], Ledger(), LearnerState(1000)
    if written:
        (tmp_path / "samples").mkdir()
        write_listed(tmp_path / "samples" / "0.jsonl", '{"prompt": "a"}\n')
    listener = Delivery(
        "tensorboard", lambda: ledger, TrackedRun(find_recipe("CartPole-v1"), {}, tmp_path, 0, "", "", {}), [], print
    )
    for event in (RunStart(state, tmp_path), InitialSamples(state, samples)):
        listener(event)
    state.steps = 10
    listener(IterationEnd(state, {"steps": 10}))
    listener(RunEnd(state, tmp_path, False))
    assert ledger.rows == [(0, {"steps": 0.0}, samples), (10, {"steps": 10.0}, [])]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"], ids=["in a thread", "in training's thread"])
def test_a_failing_tracker_is_reported_once_and_then_disabled(name, tmp_path):
    ledger = Ledger(fail_at=20)
    reported = deliver(tmp_path, ledger, new=[{"steps": steps} for steps in range(10, 100, 10)], name=name)
    (finding,) = reported
    assert finding.what == f"the tracker {name} stopped, and training went on without it (ConnectionError: the server is down)"
    assert [row[0] for row in ledger.rows] == [10]


def test_a_tracker_that_hangs_holds_up_neither_training_nor_its_end(tmp_path, monkeypatch):
    ended = threading.Event()

    class Slow(Ledger):
        def log(self, steps, metrics, samples):
            ended.wait(60)

    monkeypatch.setattr(delivery, "CLOSING_SECONDS", 0.2)
    begun = time.monotonic()
    (finding,) = deliver(tmp_path, Slow(), new=[{"steps": steps} for steps in range(10, 100, 10)])
    assert time.monotonic() - begun < 50
    ended.set()
    assert "it did not finish within 0 s of the end" in finding.what


def test_a_tracker_that_does_not_keep_up_is_stopped(tmp_path, monkeypatch):
    class Slow(Ledger):
        def log(self, steps, metrics, samples):
            time.sleep(0.5)

    monkeypatch.setattr(delivery, "WAITING", 3)
    (finding,) = deliver(tmp_path, Slow(), new=[{"steps": steps} for steps in range(10, 200, 10)])
    assert "it is 3 events behind" in finding.what
    assert json.loads((tmp_path / "trackers.json").read_text())["wandb"]["failed"] == "it is 3 events behind"


def test_a_tracker_that_fails_does_not_end_a_run_and_resuming_fills_the_gap(offline, monkeypatch):
    def fail(*row):
        raise ConnectionError("no server")

    run, lines = offline / "run", []
    recipe = find_recipe("CartPole-v1", {**FIELDS, "trackers": ["tensorboard"]})
    with monkeypatch.context() as patch:
        patch.setattr("surefoot.runs.trackers.tensorboard.TensorBoard.log", fail)
        api.start(recipe, run, display=lambda event: lines.append(event.text) if hasattr(event, "text") else None)
    warnings = [line for line in lines if "the tracker tensorboard stopped, and training went on without it" in line]
    assert len(warnings) == 1
    assert len(steps_of(run)) == 16
    assert [finding.name for finding in of_run(run)].count("tracker_failed") == 1
    surefoot.resume(run, steps=1280)
    assert [int(row["steps"]) for row in rows_of_tensorboard(run)] == steps_of(run) == list(range(64, 1281, 64))
    assert "tracker_failed" not in [finding.name for finding in of_run(run)]


def test_a_damaged_trackers_file_does_not_end_a_run(tmp_path):
    (tmp_path / "trackers.json").write_text("{")
    assert deliver(tmp_path, Ledger(), new=[{"steps": 10}]) == []


def test_trackers_change_no_number_of_a_run(tmp_path):
    api.start(find_recipe("CartPole-v1", FIELDS), tmp_path / "plain")
    api.start(find_recipe("CartPole-v1", {**FIELDS, "trackers": ["tensorboard"]}), tmp_path / "tracked")
    assert rows_of(tmp_path / "plain") == rows_of(tmp_path / "tracked")


def test_a_truncated_record_is_skipped(offline):
    pytest.importorskip("wandb")
    import struct

    from surefoot.runs.trackers.wandb import _records

    def part(kind, content):
        return struct.pack("<IHB", 0, len(content), kind) + content

    long = b"x" * 40_000
    first = 32_768 - 7 - 7 - len(part(1, b"ab"))
    data = b":W&B\0\0\0" + part(1, b"ab") + part(2, long[:first]) + part(4, long[first:])
    assert list(_records(data)) == [b"ab", long]
    assert list(_records(data[:-1])) == [b"ab"]
    assert list(_records(data + part(1, b"cd")[:-1])) == [b"ab", long]
