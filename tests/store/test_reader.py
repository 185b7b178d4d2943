"""One reader for files: it opens plain files alone, and nothing else in the package opens what a run or a person left."""

import ast
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import surefoot
from surefoot.errors import SurefootError
from surefoot.files import copy_file, open_file, read_bytes, read_table, read_text, read_toml
from surefoot.language.data.sources.formats import READERS, saved_rows
from surefoot.store.manifest import check_listed, fingerprint, read_listed
from surefoot.store.tensors import StoredTensor, read_tensors, stored_tensors, write_tensors

SOURCE = Path(surefoot.__file__).parent
OWN = {
    "cli/new.py": "templates of the package",
    "accel/programs.py": "the cache of compiled programs, and source of the package",
    "inspector/clip_table.py": "pages of the package",
    "language/data/cache.py": "a map of a file that was checked",
    "language/memory/available.py": "files of the kernel",
    "language/language_model.py": "a temporary folder of this process",
    "language/models/mapped.py": "a temporary file of this process",
    "recipes/control.py": "source of an installed package",
    "sandbox/__init__.py": "pipes, and a program of the package",
    "store/tensors.py": "the reader of safetensors",
}
"""modules that open files in another way, and which"""
READ = {"read_text", "read_bytes", "safe_open", "load_file", "memmap", "memory_map"}
READ |= {"fromfile", "copyfile", "copy2", "ParquetFile"}


def opened_otherwise(tree: ast.AST) -> Iterator[str]:
    """Calls that read a file, and are not those of the reader."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            text = ast.unparse(node)
            ours = isinstance(node.func, ast.Name) and name in ("read_text", "read_bytes")
            if (name in READ and not ours) or (name == "open" and "'rb'" in text):
                yield text


def test_every_module_reads_files_by_the_reader() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        calls = [call for call in opened_otherwise(ast.parse(path.read_text("utf-8"))) if "ParquetFile(plain)" not in call]
        if calls and name != "files.py":
            found[name] = calls
    others = {name: calls for name, calls in found.items() if name not in OWN}
    assert others == {}, "use open_file, read_text, read_bytes, read_tensors or copy_file"
    assert set(OWN) - set(found) == set(), "not needed any more"


@pytest.fixture(params=["pipe", "device", "socket", "folder", "link to a pipe"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("x.json")
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "link to a pipe":
        os.mkfifo("pipe")
        path.symlink_to("pipe")
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    return path


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_rejected_at_once(place: Path) -> None:
    readers = [open_file, read_bytes, read_text, read_table, read_toml, fingerprint, read_tensors, read_listed, check_listed]
    for read in readers:
        with pytest.raises(SurefootError, match=r"not a regular file|is not in .*manifest"):
            read(place)
    with pytest.raises(SurefootError, match="not a regular file"):
        copy_file(place, Path("copy"))
    assert not Path("copy").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", [*READERS, ".jsonl.gz", ".arrow"])
def test_rows_are_not_read_from_a_pipe(suffix: str, tmp_path: Path) -> None:
    from surefoot.language.data.sources.formats import rows_of

    path = tmp_path / f"rows{suffix}"
    os.mkfifo(path)
    if suffix == ".arrow":
        (tmp_path / "state.json").write_text(f'{{"_data_files": [{{"filename": "{path.name}"}}]}}')
    with pytest.raises(SurefootError, match="not a regular file"):
        list(saved_rows(tmp_path) if suffix == ".arrow" else rows_of(path))


def test_a_damaged_or_foreign_file_of_tensors_is_one_line_also_where_only_a_range_is_read(tmp_path: Path) -> None:
    file = tmp_path / "shard.safetensors"
    write_tensors({"x": torch.arange(6.0)}, file)
    stored = stored_tensors(file)["x"]
    assert stored.read(2, 4).tolist() == [2.0, 3.0]
    file.write_bytes(file.read_bytes()[:-4])
    for read in (lambda: stored.read(2, 4), lambda: stored_tensors(file)):
        with pytest.raises(SurefootError, match=r"shard.safetensors: can't be read"):
            read()
    write_tensors({"x": torch.arange(2.0)}, file)
    with pytest.raises(SurefootError, match=r"shard.safetensors: has content that can't be used"):
        stored.read(2, 4)  # of another shape
    file.unlink()
    for read in (lambda: stored.read(2, 4), lambda: stored_tensors(file)):
        with pytest.raises(SurefootError, match=r"shard.safetensors: has content that can't be used .*; take another"):
            read()
    for table in ({"shape": [6], "dtype": "float99", "pieces": []}, {"shape": 6}, {"shape": [6], "dtype": "float32"}):
        with pytest.raises(SurefootError, match=r"agent.json: has content that can't be used .*; take another"):
            StoredTensor.of(table, tmp_path / "agent.json", [])
    write_tensors({"x": torch.zeros(4, dtype=torch.float8_e4m3fn)}, file)
    with pytest.raises(SurefootError, match=r"shard.safetensors: has content that can't be used \(KeyError: 'F8_E4M3'\)"):
        stored_tensors(file)
