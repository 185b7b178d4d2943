"""A run begins again at zero only if it has never saved a checkpoint; else resuming changes nothing and names what is lost."""

import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import assert_same, die_at, in_child, outcome

import surefoot
from surefoot import Callback, SurefootError
from surefoot.diagnostics.findings import check_run
from surefoot.runs import session as sessions
from surefoot.runs.session import saving
from surefoot.store.checkpoint import checkpoints_in, write_snapshot
from surefoot.store.events import Event, Message
from surefoot.store.manifest import MANIFEST

FIELDS: dict[str, Any] = {
    "steps": 256,
    "rollout": {"environments": 4, "steps": 16},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    "evaluation": {"episodes": 1, "every": 128},
    "checkpoint": {"every": 1000},
    "traces": {"rows": 0},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of 128 and 256 steps."""
    path = tmp_path_factory.mktemp("whole") / "run"
    surefoot.train("CartPole-v1", run_dir=path, **FIELDS)
    return path


def files_of(run: Path) -> dict[str, str]:
    """The content of every file of a run, and the target of every link."""
    return {
        str(path.relative_to(run)): os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_symlink() or (path.is_file() and path.name != ".lock")
    }


def only(*kept: str) -> Callable[[Path], None]:
    """Leave the recipe and some other things."""

    def change(run: Path) -> None:
        for path in run.iterdir():
            if path.name not in (*kept, "config.toml", "environment.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def linked(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to("/mnt/not-mounted/checkpoints")


def without_manifests(run: Path) -> None:
    for folder in checkpoints_in(run / "checkpoints"):
        (folder / MANIFEST).unlink()


def emptied(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()


def exported(run: Path) -> None:
    only()(run)
    (run / "finished.json").write_text('{"steps": 256}')


def traced(run: Path) -> None:
    only()(run)
    (run / "traces").mkdir()
    for steps in (64, 128, 192):
        (run / "traces" / f"{steps}.safetensors").touch()


LOST: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link to a disk that is not mounted": (linked, "checkpoints: is a link to /mnt/not-mounted/checkpoints, which is no"),
    "an empty folder": (emptied, "checkpoints: has no checkpoint, but there is best/"),
    "no folder, but metrics": (only("metrics.jsonl"), "has no checkpoint, but metrics.jsonl has 4 iterations"),
    "no folder, but the best agent": (only("best"), "has no checkpoint, but there is best/"),
    "no folder, but the end": (exported, "has no checkpoint, but there is finished.json"),
    "no folder, but traces": (traced, "has no checkpoint, but there is traces/128.safetensors"),
    "no manifests": (without_manifests, "checkpoints/256: no manifest.json: it was removed, or lost in a copy; copy it again"),
}


@pytest.mark.parametrize(("lose", "message"), LOST.values(), ids=LOST)
def test_a_run_whose_checkpoints_are_lost_is_left_as_it_is(
    lose: Callable[[Path], None], message: str, run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    lose(copy)
    before = files_of(copy)
    with pytest.raises(SurefootError) as error:
        surefoot.resume(copy, steps=512)
    assert message in str(error.value)
    assert files_of(copy) == before
    assert check_run(copy).findings[0].name == "checkpoints_lost"


@pytest.mark.parametrize("name", ["metrics.jsonl", "fingerprints.jsonl", "traces", ".lock", ""])
def test_a_link_to_what_is_not_there_is_named_and_stays(name: str, run: Path, tmp_path: Path) -> None:
    link = shutil.copytree(run, tmp_path / "run") / name
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.symlink_to("/mnt/not-mounted")
    for call in (surefoot.resume, lambda path, steps: surefoot.train("CartPole-v1", run_dir=path, steps=steps)):
        with pytest.raises(SurefootError, match=r"is a link to /mnt/not-mounted, which is not there; mount it|contains a run"):
            call(tmp_path / "run", steps=512)
    assert link.is_symlink()


def test_a_numbered_folder_without_a_manifest_is_never_removed(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    for place, name in (("checkpoints", "128"), ("best", "7")):
        shutil.copytree(run / "checkpoints" / "128", copy / place / name, dirs_exist_ok=True)
        (copy / place / name / MANIFEST).unlink()
    surefoot.resume(copy, steps=512)
    assert (copy / "checkpoints" / "128" / "agent.safetensors").exists()
    assert (copy / "best" / "7" / "agent.safetensors").exists()
    assert [finding.name for finding in check_run(copy).findings if finding.severity == "serious"] == ["files_damaged"]


def test_best_weights_whose_scores_no_longer_count_are_removed_by_name(run: Path, tmp_path: Path) -> None:
    copy, lines = shutil.copytree(run, tmp_path / "run"), Lines()
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("episodes = 1", "episodes = 2"))
    best = checkpoints_in(copy / "best")[0].name
    surefoot.resume(copy, steps=320, allow_changes=True, display=lines)
    assert any(line.startswith("removed ") and f"best/{best}:" in line for line in lines.said)


class Lines:
    """The messages of a run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Message):
            self.said.append(event.text)


def test_a_run_killed_in_its_first_checkpoint_begins_again_and_says_so(run: Path, tmp_path: Path) -> None:
    path, lines = tmp_path / "run", Lines()
    assert in_child(path, "CartPole-v1", die_at(os, "rename", 1), fields=FIELDS) == -signal.SIGKILL
    surefoot.resume(path, display=lines)
    assert f"{path}: was stopped before its first checkpoint, so it begins again at step 0" in lines.said
    assert_same(outcome(run), outcome(path))


def test_a_kill_between_the_first_checkpoint_and_the_best_weights_changes_nothing(run: Path, tmp_path: Path) -> None:
    def die() -> None:
        def write(folder: Path, snapshot: Any) -> None:
            write_snapshot(folder, snapshot)
            os.kill(os.getpid(), signal.SIGKILL)

        saving.write_snapshot = write

    path = tmp_path / "run"
    assert in_child(path, "CartPole-v1", die, fields=FIELDS) == -signal.SIGKILL
    assert ([p.name for p in checkpoints_in(path / "checkpoints")], checkpoints_in(path / "best")) == (["128"], [])
    surefoot.resume(path)
    assert_same(outcome(run), outcome(path))


@pytest.mark.parametrize(("minute", "first"), [(0.0, 64), (1e9, 128)], ids=["the first iteration", "the first evaluation"])
def test_the_first_checkpoint_comes_after_an_iteration_and_a_minute_or_before_the_best_weights(
    minute: float, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the disk when training goes on, so best/ without a checkpoint is one that was lost."""
    monkeypatch.setattr(sessions, "FIRST_CHECKPOINT", minute)
    kept: list[list[str]] = []

    class Watch(Callback):
        def on_iteration(self, run: Any, metrics: Any) -> None:
            kept.append([path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")])

    surefoot.train("CartPole-v1", run_dir=tmp_path / "run", callbacks=Watch(), **FIELDS)
    assert kept == [[str(first)] if steps > first else [] for steps in (64, 128, 192, 256)]


def test_a_run_killed_before_it_began_is_begun_by_the_same_command(run: Path, tmp_path: Path) -> None:
    """At every change of the disk until config.toml is there. An agent that is passed is saved before that."""
    agent, stuck = surefoot.load(run), []

    def train(path: Path) -> None:
        surefoot.train("CartPole-v1", run_dir=path, start=agent, **{**FIELDS, "steps": 64})

    for call in range(1, 40):
        path = tmp_path / str(call)

        def killed(path: Path = path, call: int = call) -> None:
            die_at(os, ("mkdir", "rename", "replace", "fsync"), call)()
            train(path)
            os._exit(0)

        assert in_child(path, "CartPole-v1", killed) == -signal.SIGKILL
        if (path / "config.toml").exists():
            surefoot.resume(path)
            break
        train(path)
        stuck += list(path.glob("**/.*.tmp"))
    assert call > 3
    assert stuck == []
