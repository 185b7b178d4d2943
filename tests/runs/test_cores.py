"""The number of CPU cores."""

from pathlib import Path

import pytest

from surefoot import files
from surefoot.files import available_cores


def test_cores_are_those_of_the_affinity_within_the_limit_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, expected in (
        (None, 8),
        ("max 100000", 8),
        ("", 8),
        ("300000 100000", 3),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("9000000 100000", 8),
    ):
        monkeypatch.setattr(files.os, "sched_getaffinity", lambda _: range(8), raising=False)
        if text is not None:
            (tmp_path / "cpu.max").write_text(text)
        assert available_cores(tmp_path / "cpu.max") == expected
