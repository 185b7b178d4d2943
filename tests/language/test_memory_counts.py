"""Stored counts: those of the package equal new ones, and others are counted once per machine."""

import importlib.util
import json
from dataclasses import replace
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
    """A new process: nothing is known, and the user's cache is empty."""
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(counts, "_known", {})
    return tmp_path / "cache"


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when anything is counted."""

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


def test_the_package_has_the_counts_of_these_versions() -> None:
    assert tuple(shipped_counts()) == SIZES, f"run python benchmarks/{SCRIPT.name}"


@pytest.mark.parametrize("size", SIZES)
def test_the_plan_of_a_size_needs_no_count_that_the_package_lacks(size: str, cache: Path, never: Any, surefoot: Any) -> None:
    plan = json.loads(surefoot("memory", size, "--json"))
    assert plan["uncounted"] == [], f"run python benchmarks/{SCRIPT.name}"
    if size == "7B":
        surefoot("memory", size)  # with several GPUs
    assert not cache.exists()


def test_a_count_in_the_package_equals_a_new_one() -> None:
    """A cheap one; all of them in the slow test below."""
    config = llama_of(500_000_000)
    with counted_again() as made:
        passes.prompt_reading(config, 64, 512, None)
        passes.decoding(config, 64, 1, 512, 64, 1.0, None)
        parameters.adapter_size(config, AdapterSettings())
    assert len(made) > 3
    assert made.items() <= shipped_counts()["0.5B"].items(), f"run python benchmarks/{SCRIPT.name}"


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_all_counts_in_the_package_equal_new_ones(size: str) -> None:
    assert script().new_counts(size) == shipped_counts()[size], f"run python benchmarks/{SCRIPT.name}"


def scored(rows: int = 3) -> passes.PassMemory:
    return passes.scoring(model("llama").config, passes.PassOptions(head=True), passes.BatchShape(rows, 12, 4))


def test_another_process_counts_the_same_pass_only_once(cache: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    first = scored()
    assert first.peak > 0
    monkeypatch.setattr(counts, "_known", {})
    request.getfixturevalue("never")
    assert scored() == first
    with pytest.raises(AssertionError, match="counted again"):
        scored(rows=4)


def test_counts_of_other_code_or_libraries_are_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    scored()
    monkeypatch.setattr(counts, "_known", {})
    request.getfixturevalue("never")
    versions = {**counts.library_versions(), "torch": "2.0"}
    monkeypatch.setattr(counts, "library_versions", lambda: versions)
    counts._environment.cache_clear()
    try:
        with pytest.raises(AssertionError, match="counted again"):
            scored()
    finally:
        counts._environment.cache_clear()


def test_counts_of_other_libraries_in_the_package_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "library_versions", lambda: {"torch": "2.0", "transformers": "5.0", "peft": "0.1"})
    assert shipped_counts.__wrapped__() == {}


def test_a_damaged_file_or_a_folder_that_can_not_be_written_costs_a_count(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = scored()
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_text("{")
    monkeypatch.setattr(counts, "_known", {})
    assert scored() == first
    (cache / "file").write_text("")
    monkeypatch.setenv("SUREFOOT_CACHE", str(cache / "file"))
    monkeypatch.setattr(counts, "_known", {})
    assert scored() == first


def test_a_setting_with_its_default_keeps_the_key_and_any_other_changes_it(cache: Path) -> None:
    def key(**fields: Any) -> str:
        with counted_again() as made:
            counts.counted_once(int)(lambda options: 1)(replace(passes.PassOptions(), **fields))
        return next(iter(made))

    assert key() == key(temperature=1.0)
    keys = {key(), key(bf16=True), key(head=True), key(adapter=AdapterSettings()), key(adapter=AdapterSettings(rank=8))}
    assert len(keys) == 5
    clipped = surefoot.PPO_CLIP
    assert counts._plain(clipped) != counts._plain(replace(clipped, trust_region=surefoot.Clip(0.1)))
