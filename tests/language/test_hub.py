"""Data sets of the Hugging Face hub: names, commits, configurations, splits, the offline cache, and errors.

The hub is a local server. ``datasets`` reads its address on import, so reading runs in new processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_hub import NEW, OLD, Hub

from surefoot.errors import SurefootError
from surefoot.language.data.sources import open_rows
from surefoot.language.data.sources.hub import parse_data
from surefoot.store.hub import HubName, is_hub_name

READ = """
import json, sys, time
time.sleep = lambda seconds: None  # without the hub, huggingface_hub waits 23 s over the retries of each request
from surefoot.errors import SurefootError
from surefoot.language.data.sources.hub import pinned
from surefoot.language.data.sources import open_rows

results = []
for name in sys.argv[1:]:
    try:
        source = open_rows(name)
        rows = list(source)
        results.append([source.content, [row.columns["completion"] for row in rows], rows[-1].where, source.size > 0])
    except SurefootError as error:
        results.append(str(error))
print("RESULT", json.dumps(results))
"""
TRAIN = """
import sys
from surefoot.cli.main import main
sys.exit(main())
"""


def run(hub: Hub | None, home: Path, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    address = "http://127.0.0.1:9" if hub is None else hub.address
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "SUREFOOT_CACHE": str(home / "own")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False, cwd=home)


def read(hub: Hub | None, home: Path, *names: str) -> list[Any]:
    completed = run(hub, home, READ, *names)
    assert "RESULT" in completed.stdout, completed.stderr
    result: list[Any] = json.loads(completed.stdout.partition("RESULT")[2])
    return result


def test_valid_hub_names_parse_and_round_trip_and_malformed_names_are_rejected() -> None:
    for text, parts in {
        "hf://org/name:train": ("org/name", None, None, "train"),
        "hf://name": ("name", None, None, None),
        "hf:/org/name/main@refs/pr/1:test[:10%]": ("org/name", "main", "refs/pr/1", "test[:10%]"),
        f"hf://org/na.me-x@{OLD}:train+test": ("org/na.me-x", None, OLD, "train+test"),
    }.items():
        assert parse_data(text) == HubName(*parts)
        assert parse_data(str(parse_data(text))) == HubName(*parts)
        assert is_hub_name(Path(text))
    assert not is_hub_name("data/hf.jsonl")
    for text in ("hf://", "hf://org/name:", "hf://a/b/c/d:train", "hf://a b:train", "hf://org/name@:train"):
        with pytest.raises(SurefootError, match="is not the name of a data set on the hub; write hf://org/name:split"):
            open_rows(text)


def test_missing_datasets_package_is_reported_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SurefootError, match=r"hf://org/name:train: reading the hub needs datasets.*pip install .*\[data\]'"):
        open_rows("hf://org/name:train")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_come_from_the_named_commit_online_and_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    """Names that do not exist raise errors. Slow: four processes import ``datasets``."""
    pytest.importorskip("datasets")
    old, name, split, other, missing, branch, config = read(
        hub,
        tmp_path,
        "hf://org/name:train",
        "hf://org/name",
        "hf://org/name:tran",
        "hf://org/name/other",
        "hf://org/missing:train",
        "hf://org/name@nowhere:train",
        "hf://org/name/none:train",
    )
    where = f"hf://org/name@{OLD}:train"
    assert old == [where, ["c", "d"], f"{where}, row 2", True]
    assert name == f"hf://org/name@{OLD}: has the splits train, test; name one, as in hf://org/name@{OLD}:train"
    assert split == f"hf://org/name@{OLD}:tran: has no split 'tran'; did you mean 'train'?; its splits: train, test"
    assert other == [f"hf://org/name/other@{OLD}", ["f"], f"hf://org/name/other@{OLD}, row 1", True]
    assert missing.startswith("hf://org/missing:train: can't be read from the hub (RepositoryNotFoundError: ")
    assert branch.startswith("hf://org/name@nowhere:train: can't be read from the hub (RevisionNotFoundError: ")
    assert config.startswith(f"hf://org/name/none@{OLD}:train: can't be read from the hub (ValueError: BuilderConfig 'none'")
    assert not any("\n" in line for line in (name, split, missing, branch, config))

    hub.repositories["datasets/org/name"].head = NEW
    assert [row[1] for row in read(hub, tmp_path, "hf://org/name:train", where)] == [["x"], ["c", "d"]]

    offline = read(None, tmp_path, where, f"hf://org/name@{NEW}:train", "hf://org/name:train", "hf://org/new:train")
    assert [row[1] for row in offline[:3]] == [["c", "d"], ["x"], ["x"]]
    assert offline[3].startswith("hf://org/new:train: the hub can't be reached, and the cache lacks it (ConnectError: ")
    (unknown,) = read(None, tmp_path, f"hf://org/name@{'c' * 40}:train")
    assert unknown.endswith("this revision is not in the cache and the hub can't be reached; connect to the network once")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_keeps_the_commit_it_started_with(hub: Hub, tmp_path: Path) -> None:
    """Slow: two processes train and import ``datasets``."""
    pytest.importorskip("datasets")
    args = ["train", "sft", "--model", "pocket", "--steps", "2", "--data.train", "hf://org/name:train", "--data.batch", "2"]
    completed = run(hub, tmp_path, TRAIN, *args, "--data.held-out", "none", "--run-dir", "runs/a")
    assert completed.returncode == 0, completed.stderr
    config = next(tmp_path.rglob("config.toml"))
    assert f'train = "hf://org/name@{OLD}:train"' in config.read_text()
    hub.repositories["datasets/org/name"].head = NEW
    completed = run(hub, tmp_path, TRAIN, "resume", str(config.parent), "--steps", "4")
    assert completed.returncode == 0, completed.stderr
    assert f'train = "hf://org/name@{OLD}:train"' in config.read_text()
    assert NEW not in config.read_text()
