"""Comparisons that take seconds: a tiny network, tiny batches, no evaluation on the way."""

import sys

import pytest

from surefoot import cli

TINY = [
    *("--steps", "192", "--rollout.environments", "2", "--rollout.steps", "32", "--network.hidden", "[8]"),
    *("--evaluation.episodes", "0", "--episodes", "2", "--seeds", "1"),
]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run the command line in this process, in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["surefoot", *words])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        captured = capsys.readouterr()
        return leaving.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def no_plots(monkeypatch):
    """As if matplotlib were not installed: drawing takes longer than these trainings."""
    monkeypatch.setattr("surefoot.compare.report.matplotlib_is_there", lambda: False)
