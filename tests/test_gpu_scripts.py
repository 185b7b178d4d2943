"""The GPU scripts run here with tiny sizes on the CPU: every step passes, and a wrong number fails its step."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))
import features  # noqa: E402
import rates  # noqa: E402
import steps  # noqa: E402

sys.path.remove(str(FOLDER))


def failures(report: Any) -> list[Any]:
    return [(step["name"], step["error"]) for step in report.steps if step["error"]]


def test_a_wrong_number_fails_its_step_and_the_next_one_runs(tmp_path: Path) -> None:
    def wrong() -> dict[str, Any]:
        steps._near("kl", 1.0, 0.0, 0.1)
        return {}

    settings = steps.Settings(tmp_path, "cpu", tiny=True)
    report = steps.run_steps("some", settings, {"wrong": wrong, "right": lambda: {"x": 1.0}})
    assert failures(report) == [("wrong", "AssertionError: kl is 1, expected 0 within 0.1")]
    report.write(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["steps"][1]["numbers"] == {"x": 1.0}
    assert "| right | passed |" in (tmp_path / "out" / "report.md").read_text()


def test_a_step_that_does_not_exist_is_one_line_and_not_a_pass(tmp_path: Path) -> None:
    words = [sys.executable, str(FOLDER / "one.py"), "--device", "cpu", "--tiny", "--only", "stf", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("one.py: --only 'stf': is no step of this script; name some of: control, sft, ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.release
def test_all_steps_pass_in_one_process(tmp_path: Path) -> None:
    settings = steps.Settings(tmp_path, "cpu", tiny=True)
    wanted = {**steps.steps_of(settings), **features.features_of(settings), **rates.rates_of(settings)}
    left_out = {"a simulator on the GPU", *(name for name in wanted if "compiled" in name)}  # they compile for minutes
    report = steps.run_steps("one", settings, {name: step for name, step in wanted.items() if name not in left_out})
    assert failures(report) == []
    assert len(report.steps) == 40


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_script_for_several_passes_every_step_and_restarts_a_killed_rank(tmp_path: Path) -> None:
    """Ranks are processes of torchrun, as on GPUs: forks of a test process with threads may hang."""
    words = [sys.executable, str(FOLDER / "several.py"), "--device", "cpu", "--tiny", "--ranks", "2", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(step["name"], step["error"]) for step in report["steps"] if step["error"]] == []
    assert len(report["steps"]) == 14
    assert report["steps"][-1]["name"] == "a killed rank"
    assert "restart 1, because a rank died" in done.stdout
