"""Manifests: what is listed is compared, what is not is not believed, and a kill at any moment leaves a sound file."""

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot import files
from surefoot.errors import SurefootError
from surefoot.recipes.rewards import term_from_text
from surefoot.store import manifest
from surefoot.store.manifest import atomic_folder, check_folder, check_listed, read_listed, read_listed_table, write_listed


def test_a_flipped_bit_of_a_listed_file_is_detected(tmp_path: Path) -> None:
    write_listed(tmp_path / "result.json", json.dumps({"score": 4.25}))
    assert read_listed_table(tmp_path / "result.json") == {"score": 4.25}
    (tmp_path / "result.json").write_text(json.dumps({"score": 5.25}))
    for read in (check_listed, read_listed, read_listed_table):
        with pytest.raises(SurefootError, match=r"result\.json: does not match its SHA-256"):
            read(tmp_path / "result.json")


def test_a_file_that_no_manifest_lists_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "8.jsonl").write_text("{}")
    with pytest.raises(SurefootError, match=r"8\.jsonl: is not in .*manifest\.json"):
        check_listed(tmp_path / "8.jsonl")
    write_listed(tmp_path / "16.jsonl", "{}")
    with pytest.raises(SurefootError, match="so no run wrote it"):
        read_listed(tmp_path / "8.jsonl")


@pytest.mark.parametrize("last", range(4))
def test_a_kill_between_any_two_writes_leaves_the_older_file_or_the_new_one_both_sound(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KillError(BaseException):
        pass

    path, write = tmp_path / "a.json", files.write_bytes
    write_listed(path, "{}")
    count = itertools.count()

    def dying(to: Path, content: bytes) -> None:
        if next(count) == last:
            raise KillError
        write(to, content)

    for module in (files, manifest):
        monkeypatch.setattr(module, "write_bytes", dying)
    for name in ("a.json", "b.json"):
        try:
            write_listed(tmp_path / name, '{"new": 1}')
        except KillError:
            break
    monkeypatch.setattr(files, "write_bytes", write)
    monkeypatch.setattr(manifest, "write_bytes", write)
    assert read_listed_table(path) in ({}, {"new": 1})
    write_listed(path, '{"newer": 1}')
    assert read_listed_table(path) == {"newer": 1}
    if (tmp_path / "b.json").exists():
        assert read_listed_table(tmp_path / "b.json") == {"new": 1}


def written(folder: Path) -> Path:
    with atomic_folder(folder, "config.json", "a model") as temporary:
        (temporary / "config.json").write_text("{}")
        (temporary / "model.safetensors").write_bytes(b"0" * 64)
    return folder


def test_a_folder_is_on_the_disk_whole_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []

    def flush(path: Path) -> None:
        assert (tmp_path / "model").exists() == (path == tmp_path)
        flushed.append(path.name)

    monkeypatch.setattr(manifest, "flush", flush)
    written(tmp_path / "model")
    temporary, *files = sorted(flushed[:4])
    assert temporary.startswith(".model.")
    assert files == ["config.json", "manifest.json", "model.safetensors"]
    assert flushed[4:] == [tmp_path.name], "the new name is on the disk too"


def test_a_kill_while_a_folder_is_replaced_leaves_the_older_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "model")
    renames, rename = itertools.count(), manifest.os.rename

    def dying(*names: Path) -> None:
        if next(renames):
            raise KeyboardInterrupt
        rename(*names)

    monkeypatch.setattr(manifest.os, "rename", dying)
    with contextlib.suppress(KeyboardInterrupt):
        written(tmp_path / "model")
    check_folder(tmp_path / "model", "model", required=True)


def test_the_home_folder_of_nobody_is_a_folder_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (written(Path("~nobody-here/model")) / "manifest.json").exists()
    assert term_from_text("~nobody-here/rewards.py:score") == {"function": "~nobody-here/rewards.py:score"}


def flipped(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"0" * 63 + b"1")


def unlisted(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")


def lost(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [flipped, unlisted, lost, without_manifest])
def test_a_folder_that_is_not_as_it_was_written_is_rejected(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    check_folder(folder, "model", required=True)
    (folder / "README.md").write_text("a card of one's own is fine")
    check_folder(folder, "model", required=True)
    damage(folder)
    with pytest.raises(SurefootError, match=r"^model: .*; "):
        check_folder(folder, "model", required=True)


def test_a_folder_that_others_wrote_is_read_without_a_manifest(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    (folder / "manifest.json").unlink()
    check_folder(folder, "model")
