"""Comparisons that take seconds: a tiny network, tiny batches, no evaluation on the way."""

import pytest

TINY = [
    *("--steps", "192", "--rollout.environments", "2", "--rollout.steps", "32", "--network.hidden", "[8]"),
    *("--evaluation.episodes", "0", "--episodes", "2", "--seeds", "1"),
]


@pytest.fixture
def no_plots(monkeypatch):
    """Pretend that matplotlib is not installed: drawing takes longer than these runs."""
    monkeypatch.setattr("surefoot.compare.report.matplotlib_installed", lambda: False)
