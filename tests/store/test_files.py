"""Small files are written whole or not at all, also by several writers at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from surefoot.files import is_temporary, write_bytes


def test_a_file_with_several_writers_is_that_of_one_of_them(tmp_path: Path) -> None:
    file, contents = tmp_path / "page.html", [bytes([letter]) * 1_000_000 for letter in b"abcd"]

    def write(content: bytes) -> None:
        for _ in range(10):
            write_bytes(file, content)
            assert file.read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(write, contents))
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_the_older_file_and_no_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.json"
    write_bytes(file, b"old")
    seen = []

    def fail(source: Path, target: Path) -> None:
        seen.append(source)
        raise OSError(28, "no space")

    monkeypatch.setattr("surefoot.files.os.replace", fail)
    with pytest.raises(OSError, match="no space") as error:
        write_bytes(file, b"new")
    assert error.value.filename == str(file), "a full disk has no name by itself"
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
    assert len(seen) == 1
    assert is_temporary(seen[0])
