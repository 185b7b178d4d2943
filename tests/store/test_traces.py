"""Traces on disk: complete files, equal bytes after a resume, limited size, and no pickles."""

import pickle
from dataclasses import replace

import pytest
import torch
from chain import check_chain
from killing import RECIPES, assert_same

from surefoot import SurefootError, read_trace
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.runs.display import Display
from surefoot.store.metrics import read_metrics
from surefoot.store.reading import traces_in
from surefoot.store.traces import TraceFolder, to_bytes


def start(path, task="CartPole-v1", callback=None, display=None, **changes):
    return api.start(find_recipe(task, {**RECIPES[task], **changes}), path, callback=callback, display=display)


def contents(path):
    return {file.name: file.read_bytes() for file in traces_in(path / "traces")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a trace of every iteration."""
    path = tmp_path_factory.mktemp("traced") / "run"
    start(path, traces={"every": 1})
    return path


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_every_trace_of_a_run_adds_up_and_joins_the_metrics(tmp_path, task):
    start(tmp_path / "run", task)
    objective = find_recipe(task, RECIPES[task]).objective
    assert objective.normalise_advantages == "minibatch"
    files, budget = traces_in(tmp_path / "run" / "traces"), RECIPES[task]["steps"]
    rows = {row["steps"]: row for row in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    size = min(rows)
    assert [int(file.stem) for file in files] == [
        first + size for first in range(0, budget, size) if -first % (budget // 10) < size
    ]
    assert len(files) >= 4
    for file in files:
        trace = read_trace(file)
        check_chain(trace, "minibatch")
        assert file.stem == str(trace.steps)
        assert rows[trace.steps]["iteration"] == trace.iteration
        assert len(trace.rows) == 2
        for row in trace.rows:
            assert row.reward_parts.keys() == {"environment"}
            updates = row.visits.updates
            assert updates.max() < rows[trace.steps]["updates"]
            ratios = row.visits.ratio[updates >= 0]
            assert ratios.max() <= rows[trace.steps]["ratio_max"] + 1e-6
            assert ratios.min() >= rows[trace.steps]["ratio_min"] - 1e-6


def test_a_trace_is_read_as_written(run):
    for file in traces_in(run / "traces"):
        assert to_bytes(read_trace(file)) == file.read_bytes()


def test_the_weights_are_those_of_a_run_without_traces(run, tmp_path):
    silent = start(tmp_path / "silent", traces={"rows": 0})
    unwritten = start(None)
    assert not (tmp_path / "silent" / "traces").exists()
    assert_same(dict(api.load(run / "checkpoints" / "2048").state_dict()), dict(silent.state_dict()))
    assert_same(dict(silent.state_dict()), dict(unwritten.state_dict()))


def test_resuming_cuts_traces_back_and_writes_the_same_again(run, tmp_path):
    path, seen = tmp_path / "run", []
    settings = {"traces": {"every": 1}, "checkpoint": {"every": 1024}}

    def fall_over(metrics):
        seen.append(metrics["steps"])
        if metrics["steps"] > 1536:
            raise RuntimeError("fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        start(path, callback=fall_over, **settings)
    (path / "traces" / ".9.safetensors.tmp").write_bytes(b"half")
    beyond = max(map(int, (file.removesuffix(".safetensors") for file in contents(path))))
    assert beyond > 1024, "nothing was written beyond the checkpoint"
    kept = []
    api.resume(path, callback=lambda metrics: kept.append(len(contents(path))) or None)
    assert kept[0] < len(seen), "what lay beyond the checkpoint was still there"
    assert contents(path) == contents(run)
    assert not list((path / "traces").glob(".*.tmp"))


def test_the_oldest_traces_are_removed_and_a_resumed_run_keeps_the_same_ones(run, tmp_path):
    sizes = [len(content) for content in contents(run).values()]
    limit = 3.5 * max(sizes) / 1e6
    totals = []

    def look(metrics):
        totals.append(sum(map(len, contents(tmp_path / "run").values())))

    start(tmp_path / "run", callback=look, traces={"every": 1, "max_megabytes": limit})
    kept = contents(tmp_path / "run")
    assert 2 <= len(kept) < len(sizes)
    assert max(totals) <= limit * 1e6
    assert kept == dict(list(contents(run).items())[-len(kept) :])
    start(tmp_path / "cut", callback=lambda metrics: metrics["steps"] >= 1024, traces={"every": 1, "max_megabytes": limit})
    api.resume(tmp_path / "cut")
    assert contents(tmp_path / "cut") == kept


def test_a_trace_larger_than_the_limit_is_not_written_and_reported_once(tmp_path):
    class Listener(Display):
        said: list[str] = []  # noqa: RUF012

        def message(self, message):
            self.said.append(message)

    start(tmp_path / "run", display=Listener(), traces={"every": 1, "max_megabytes": 0.001})
    assert contents(tmp_path / "run") == {}
    notes = [line for line in Listener.said if "traces.max_megabytes" in line]
    assert len(notes) == 1
    assert notes[0].startswith("traces.max_megabytes=0.001: a trace has 0.")


def test_a_full_disk_stops_the_run_in_one_line(run, tmp_path, monkeypatch):
    trace = read_trace(traces_in(run / "traces")[0])
    folder = TraceFolder(tmp_path / "traces", 0, 1.0)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SurefootError, match=r"can't be written \(No space left on device\); free space and resume"):
        folder.write(trace)
    assert list((tmp_path / "traces").iterdir()) == []


def test_files_that_are_not_traces_are_rejected_in_one_line(run, tmp_path):
    good = traces_in(run / "traces")[0]
    whole = good.read_bytes()
    trace = read_trace(good)
    bad = {
        "half": whole[: len(whole) // 2],
        "empty": b"",
        "pickle": pickle.dumps({"rows": 1}),
        "other": b"\x02\x00\x00\x00\x00\x00\x00\x00{}",
        "format": whole.replace(b'\\"format\\": 1', b'\\"format\\": 7'),
    }
    assert bad["format"] != whole
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SurefootError, match=name):
            read_trace(tmp_path / name)
    with pytest.raises(SurefootError, match=r"no such file; a run's traces are in its folder traces/"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "good").write_bytes(to_bytes(replace(trace, steps=7)))
    assert read_trace(tmp_path / "good").steps == 7


def test_a_recurrent_policy_is_traced_too(tmp_path):
    objective = {"reuse": {"epochs": 2, "minibatches": 2}}
    start(tmp_path / "run", steps=512, network={"lstm": 8}, objective=objective, traces={"every": 1})
    files = traces_in(tmp_path / "run" / "traces")
    assert files
    for file in files:
        check_chain(read_trace(file), "minibatch")


def test_box_actions_keep_their_shape(tmp_path):
    start(tmp_path / "run", "Pendulum-v1", steps=256)
    for row in read_trace(traces_in(tmp_path / "run" / "traces")[0]).rows:
        assert row.actions.shape == (len(row.mask), 1)
        assert row.actions.dtype == torch.float32
