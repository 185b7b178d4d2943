"""Stored memory counts: shipped counts equal fresh ones, and all others are cached once per machine."""

import importlib.util
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.language.memory import counts, parameters, passes
from surefoot.language.memory.counts import SIZES, counted_again, shipped_counts
from surefoot.language.memory.planner import llama_of
from surefoot.recipes.models import AdapterSettings

from .tiny import model

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_counts.py"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a new process with an empty user cache."""
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(counts, "_known", {})
    return tmp_path / "cache"


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is counted."""

    def fail(*_: Any) -> Any:
        raise AssertionError("counted again")

    for name in ("fake_tensors", "causal_model", "trunk_model"):
        monkeypatch.setattr(passes, name, fail)


def script() -> Any:
    spec = importlib.util.spec_from_file_location("memory_counts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_ships_counts_for_the_installed_versions() -> None:
    assert tuple(shipped_counts()) == SIZES, f"run python benchmarks/{SCRIPT.name}"


@pytest.mark.parametrize("size", SIZES)
def test_planning_a_listed_size_uses_only_shipped_counts(size: str, cache: Path, never: Any, surefoot: Any) -> None:
    plan = json.loads(surefoot("memory", size, "--json"))
    assert plan["uncounted"] == [], f"run python benchmarks/{SCRIPT.name}"
    if size == "7B":
        surefoot("memory", size)  # also plans several GPUs
    assert not cache.exists()


def test_some_shipped_counts_equal_fresh_counts() -> None:
    """Checks only cheap counts; the slow test below checks all of them."""
    config = llama_of(500_000_000)
    with counted_again() as fresh:
        passes.prompt_reading(config, 64, 512, None)
        passes.decoding(config, 64, 1, 512, 64, 1.0, None)
        parameters.adapter_size(config, AdapterSettings())
    assert len(fresh) > 3
    assert fresh.items() <= shipped_counts()["0.5B"].items(), f"run python benchmarks/{SCRIPT.name}"


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_all_shipped_counts_equal_fresh_counts(size: str) -> None:
    assert script().new_counts(size) == shipped_counts()[size], f"run python benchmarks/{SCRIPT.name}"


def count_scoring(rows: int = 3) -> passes.PassMemory:
    return passes.scoring(model("llama").config, passes.PassOptions(head=True), passes.BatchShape(rows, 12, 4))


def test_a_new_process_reuses_cached_counts_of_a_pass(cache: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    before = count_scoring()
    assert before.peak > 0
    monkeypatch.setattr(counts, "_known", {})
    request.getfixturevalue("never")
    assert count_scoring() == before
    with pytest.raises(AssertionError, match="counted again"):
        count_scoring(rows=4)


@pytest.mark.parametrize("changed", ["library", "code"])
def test_cached_counts_of_other_libraries_or_code_are_ignored(
    changed: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    count_scoring()
    monkeypatch.setattr(counts, "_known", {})
    request.getfixturevalue("never")
    if changed == "library":
        versions = {**counts.library_versions(), "torch": "2.0"}
        monkeypatch.setattr(counts, "library_versions", lambda: versions)
    else:
        monkeypatch.setattr(counts, "package_source", lambda parts: "another")
    counts._environment.cache_clear()
    try:
        with pytest.raises(AssertionError, match="counted again"):
            count_scoring()
    finally:
        counts._environment.cache_clear()


def test_shipped_counts_of_other_libraries_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "library_versions", lambda: {"torch": "2.0", "transformers": "5.0", "peft": "0.1"})
    assert shipped_counts.__wrapped__() == {}


def test_passes_are_counted_again_if_the_cache_is_damaged_or_unwritable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = count_scoring()
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_text("{")
    monkeypatch.setattr(counts, "_known", {})
    assert count_scoring() == before
    (cache / "file").write_text("")
    monkeypatch.setenv("SUREFOOT_CACHE", str(cache / "file"))
    monkeypatch.setattr(counts, "_known", {})
    assert count_scoring() == before


def test_cache_keys_ignore_explicit_defaults_and_differ_for_other_settings(cache: Path) -> None:
    def key(**fields: Any) -> str:
        with counted_again() as fresh:
            counts.counted_once(int)(lambda options: 1)(replace(passes.PassOptions(), **fields))
        return next(iter(fresh))

    assert key() == key(temperature=1.0)
    others: dict[str, Any] = {"critic": model("llama").config, "chunk": 7, "temperature": 0.5, "adapter": AdapterSettings()}
    others |= {each.name: True for each in fields(passes.PassOptions) if each.default is False}
    assert others.keys() == {each.name for each in fields(passes.PassOptions)}
    keys = {key(), key(adapter=AdapterSettings(rank=8)), *(key(**{name: value}) for name, value in others.items())}
    assert len(keys) == len(others) + 2
    clipped = surefoot.PPO_CLIP
    assert counts._plain(clipped) != counts._plain(replace(clipped, trust_region=surefoot.Clip(0.1)))
