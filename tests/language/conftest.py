"""Small model folders, written once per session; a test that changes one copies it first."""

from pathlib import Path
from typing import Any

import pytest

from .tiny import FAMILIES, write_folder, write_texts

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Work in an empty folder, where stray files stay."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder per family: ``folders["llama"]``."""
    root = tmp_path_factory.mktemp("models")
    return {family: write_folder(root / family, family) for family in FAMILIES}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with data of every kind and a reward."""
    write_texts(tmp_path, 16)
    return tmp_path


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """The name of a family; a test with this fixture runs once for each of the four."""
    return str(request.param)


@pytest.fixture(params=("llama", "gpt2"))
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    """The model folders of two families that differ most, for tests of what is the same in all."""
    return folders[request.param]


@pytest.fixture
def loaded(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of ``folder``, freshly loaded, so that a test may change them."""
    from surefoot.language.models.loading import load_model

    return load_model(folder)
