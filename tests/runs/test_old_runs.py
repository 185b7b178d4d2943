"""Runs that an older version began and stopped halfway continue as that version continued them.

``fixtures/<run>`` holds config, metrics and checkpoint of a run; ``fixtures/<run>.expected.json`` the rows of metrics.jsonl,
times removed, that the older version wrote when it resumed the run to its end.
"""

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
