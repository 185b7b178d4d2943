"""Find the files of a run: traces, samples, videos. This module imports no torch, so that readers start fast."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.errors import SurefootError
from surefoot.files import steps_named

if TYPE_CHECKING:
    from surefoot.core.traces import TracedRow

FINISHED = "finished.json"
TRACE = ".safetensors"
SAMPLES = ".jsonl"


def check_is_run(path: Path) -> None:
    """Raise SurefootError unless ``path`` is a run folder."""
    if not path.exists():
        raise SurefootError(f"{path}: no such run folder; see what there is with: ls {path.parent}")
    if not path.is_dir():
        raise SurefootError(f"{path}: is a file; a run is a folder, such as runs/cartpole-v1-ppo_clip-1")
    if not any(p.name != ".lock" for p in path.iterdir()):
        raise SurefootError(f"{path}: is empty; begin a run with: surefoot train TASK --run-dir {path}")
    if not (path / "config.toml").is_file():
        raise SurefootError(f"{path}: is not a run folder (no config.toml)")


def traces_in(folder: Path) -> list[Path]:
    """The files of a folder of traces, oldest first; none where there is no such folder."""
    return files_by_steps(folder, TRACE)


def samples_in(folder: Path) -> list[Path]:
    """The files of a folder of samples, oldest first; none where there is no such folder."""
    return files_by_steps(folder, SAMPLES)


def files_by_steps(folder: Path, ending: str) -> list[Path]:
    """The plain files in a folder that are named by a number of steps, oldest first; none where there is no such folder."""
    found = (path for path in folder.glob(f"*{ending}") if steps_named(path.stem) is not None and path.is_file())
    return sorted(found, key=lambda path: int(path.stem))


def film_of(run: Path, steps: int, index: int, row: "TracedRow") -> Path | None:
    """Where the film of a traced piece of an episode is, if ``surefoot watch --traced`` made one; None where none can be made.

    The name holds a digest of what was observed, so that a film is never taken for that of another episode.
    """
    observed = str(row.about.get("observed", ""))
    if not re.fullmatch(r"[0-9a-f]{64}", observed):
        return None
    return run / "videos" / "traces" / f"{steps}-{index}-{observed[:16]}.mp4"


def refusal_of(film: Path) -> Path:
    """Where it says why there is no such film: the replay came out otherwise when it was last tried."""
    return film.with_suffix(".txt")
