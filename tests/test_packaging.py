"""The wheel, built and installed outside the checkout: typed, with its recipes, and working."""

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built without the network: hatchling comes from the test environment."""
    out = tmp_path_factory.mktemp("wheel")
    code = f"import os, hatchling.build as b; os.chdir({str(ROOT)!r}); print(b.build_wheel({str(out)!r}))"
    name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]
    return out / name


def test_the_wheel_holds_types_recipes_and_licence(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"surefoot/py.typed", "surefoot/recipes/presets/mujoco.toml", "surefoot/cli/scaffold/control/recipe.toml"} <= names
    static = "surefoot/inspector/static"
    assert {f"{static}/clip.js", f"{static}/vendor/uPlot.esm.js", f"{static}/vendor/uPlot.LICENSE"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]


def test_the_wheel_holds_every_file_of_the_package(wheel):
    listed = subprocess.run(["git", "ls-files", "-z", "src/surefoot"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = {name.removeprefix("src/") for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    assert len(files) > 150
    assert files - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_the_metadata_is_what_an_index_shows(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert "# Surefoot" in text
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    versions = re.findall(r"Classifier: Programming Language :: Python :: (3\.\d+)\n", text)
    assert versions == ["3.11", "3.12", "3.13"], "those that the tests have passed on (docs/dependencies.md)"


def test_the_image_has_an_unprivileged_user_and_the_cpu_build_of_torch():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER surefoot" in lines
    assert 'ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"' in lines
    assert lines.index("USER surefoot") < len(lines) - 1
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1] if not word.startswith("--")]
    assert copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.fixture
def installed(wheel, tmp_path, monkeypatch):
    """The folder of an environment with the wheel."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    options = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *options], check=True)
    # Its dependencies are the test environment's; the wheel's own folder comes first, so Surefoot itself is the wheel's.
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    where = subprocess.run(
        [python, "-c", "import surefoot; print(surefoot.__file__)"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert where.stdout.startswith(str(site))
    return tmp_path / "venv"


@pytest.mark.slow
def test_the_wheel_installs_and_runs_outside_the_checkout(installed, tmp_path):
    surefoot = str(installed / "bin" / "surefoot")
    train = [surefoot, "train", "CartPole-v1", "--steps", "512", "--name", "small", "--quiet", "--evaluation.episodes", "1"]
    subprocess.run(train, cwd=tmp_path, check=True, capture_output=True)
    result = subprocess.run(
        [surefoot, "evaluate", "runs/small", "--episodes", "1"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "over 1 greedy episodes" in result.stdout


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "folder"), [("control", "demo"), ("language", "demo-language"), ("verifier", "demo-verifier")]
)
def test_every_demo_works_from_the_wheel_in_an_empty_folder(installed, tmp_path, name, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    result = subprocess.run([installed / "bin" / "surefoot", "demo", name], cwd=empty, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Try next:" in result.stdout
    runs = sorted(path.parent.name for path in (empty / "runs" / folder).rglob("config.toml"))
    assert runs == {"control": ["demo"], "language": ["ppo", "reward", "sft"], "verifier": ["grpo", "ppo", "sft"]}[name]


def test_every_pin_is_exact_and_torch_is_the_cpu_build():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(pin.count("==") == 1 for pin in pins)
    assert "torch==2.13.0" in pins
    assert not [pin for pin in pins if "+" in pin]


def test_the_citation_is_of_this_version_and_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.partition(": ") for line in (ROOT / "CITATION.cff").read_text().splitlines() if not line.startswith(" ")]
    citation = {key: value for key, _, value in lines}
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors:"} <= set(citation)
