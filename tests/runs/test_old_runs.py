"""Runs begun by an older version resume with the same numbers.

``fixtures/<run>`` holds config, metrics and checkpoint of a run; ``fixtures/<run>.expected.json`` the rows of metrics.jsonl,
times removed, that the older version wrote when it resumed the run to its end.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import surefoot
from surefoot.runs.metrics import TIMING
from surefoot.runs.trackers.metrics_jsonl import read_metrics

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("name", ["control", "language", "sft"])
def test_a_run_of_an_older_version_resumes_with_the_numbers_of_that_version(name, tmp_path, monkeypatch):
    """Counts are equal. Floats may differ in the last digits, because processors round differently."""
    if name != "control":
        pytest.importorskip("transformers")
    shutil.copytree(FIXTURES, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    surefoot.resume(name)
    expected = json.loads(Path(f"{name}.expected.json").read_text("utf-8"))
    rows = [
        {key: value for key, value in row.items() if key not in TIMING} for row in read_metrics(Path(name) / "metrics.jsonl")
    ]
    assert [row["steps"] for row in rows] == [row["steps"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for key, value in wanted.items():
            if isinstance(value, float):
                assert row[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
            else:
                assert row[key] == value, key


def test_an_older_version_s_iteration_without_its_evaluation_gets_it_on_resuming(tmp_path):
    """Its checkpoint has the iteration as ``untold``."""
    run = shutil.copytree(FIXTURES / "control", tmp_path / "run")
    *before, last = (run / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    row = json.loads(last)
    score = row.pop("evaluation_return")
    (run / "metrics.jsonl").write_text("".join(before), "utf-8")
    checkpoint = run / "checkpoints" / "256"
    content = json.dumps({"previous": 128, "metrics": row}).encode()
    (checkpoint / "untold.json").write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text("utf-8"))
    manifest["files"]["untold.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    surefoot.resume(run)
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["steps"] for row in rows] == [128, 256, 384, 512]
    assert rows[1] == {**row, "evaluation_return": score}
