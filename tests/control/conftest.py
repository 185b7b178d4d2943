"""Stray files, such as MuJoCo's log, go to a temporary folder."""

import pytest


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
