"""The examples in the docstrings of the top-level functions are right."""

import doctest
import inspect
from pathlib import Path

import pytest

import surefoot

VERBS = sorted(name for name in surefoot.__all__ if inspect.isfunction(getattr(surefoot, name)))


def test_the_top_level_functions_are_these() -> None:
    assert VERBS == ["evaluate", "load", "read_trace", "resume", "train"]


@pytest.mark.parametrize("name", VERBS)
def test_its_example_prints_what_its_docstring_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(surefoot, name), globs={"surefoot": surefoot})
    failed, tried = doctest.DocTestRunner().run(example)
    assert tried
    assert not failed
