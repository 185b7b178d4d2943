"""Machine usage in the metrics is measured, in every row."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import surefoot
from surefoot.diagnostics.metrics import METRICS, SYSTEM, TIMING
from surefoot.runs import machine_use
from surefoot.runs.machine_use import MachineUse
from surefoot.store.metrics import read_metrics

BUSY = "import time\nend = time.perf_counter() + 20\nprint(flush=True)\nwhile time.perf_counter() < end: pass"


def spent(seconds: float) -> None:
    """Use this many seconds of one core, however slow the machine is."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_cpu_time_is_divided_by_the_time_that_passed() -> None:
    use = MachineUse("cpu")
    start = time.perf_counter()
    spent(0.2)
    busy = use.measure()["cpu_cores"]
    assert busy == pytest.approx(0.2 / (time.perf_counter() - start), rel=0.1)
    time.sleep(0.2)
    assert use.measure()["cpu_cores"] < 0.5 * min(busy, 1)


def test_worker_processes_count_from_their_detection_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_use, "WORKERS_EVERY", -1.0)
    use = MachineUse("cpu")
    alone = use.measure()["memory_gb"]
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        use.measure()
        start, used = time.perf_counter(), psutil.Process(worker.pid).cpu_times().user
        time.sleep(1)
        measured = use.measure()
        expected = (psutil.Process(worker.pid).cpu_times().user - used) / (time.perf_counter() - start)
        assert measured["cpu_cores"] == pytest.approx(expected, abs=0.2)
        assert measured["memory_gb"] > alone + 0.003
        worker.kill()
    assert use.measure()["memory_gb"] < measured["memory_gb"]


def test_memory_is_the_resident_memory_of_the_process_and_its_workers() -> None:
    measured, here = MachineUse("cpu").measure()["memory_gb"], psutil.Process()
    expected = sum(process.memory_info().rss for process in [here, *here.children(recursive=True)]) / 1e9
    assert measured == pytest.approx(expected, rel=0.05)


def test_a_gpu_adds_its_memory_and_its_load_if_the_driver_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_package(device: str) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: {"cuda:1": 3_000_000_000}[device])
    monkeypatch.setattr(torch.cuda, "utilization", without_package)
    measured = MachineUse("cuda:1").measure()
    assert measured["gpu_memory_gb"] == 3.0
    assert "gpu_percent" not in measured
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40)
    assert MachineUse("cuda:1").measure()["gpu_percent"] == 40.0
    assert not {"gpu_memory_gb", "gpu_percent"} & set(MachineUse("cpu").measure())


def test_every_row_of_a_run_has_them_and_they_may_differ_between_equal_runs(tmp_path: Path) -> None:
    surefoot.train("CartPole-v1", steps=512, run_dir=tmp_path / "run")
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert 0 <= row["cpu_cores"] < 1000
        assert row["memory_gb"] > 0.05
    assert set(SYSTEM) <= set(TIMING) & set(METRICS)
