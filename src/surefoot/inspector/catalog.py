"""The runs of some folders: a table of them, their tags, and a trash that they can be taken back from.

A run is deleted by renaming its folder to ``FOLDER/.trash/TIME/RUN``, in one step and never while a process writes in it.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from surefoot.diagnostics.metrics import title_of
from surefoot.errors import SurefootError
from surefoot.files import read_table, read_toml, write_text, writing
from surefoot.inspector.curves import Results
from surefoot.inspector.folders import recipe_summary
from surefoot.store.reading import FINISHED, LOCK, acquire, in_use

TRASH = ".trash"
TAGS = "tags.json"
MOST_TAGS, LONGEST_TAG = 64, 64
DEEPEST = 3
"""folders between a folder of runs and a run: a comparison or rounds have their own"""
MOST_FOLDERS = 20_000
"""how many folders are searched"""
READING_SECONDS = 1.0
"""maximum seconds that one request reads metrics; the rest follows with later requests"""


@dataclass(frozen=True)
class Place:
    """A run, and the folder that contains it."""

    root: Path
    path: Path
    name: str
    """path as the page shows it"""


class Catalog:
    """The runs in some folders.

    paths   folders of runs, or single runs

    Raises SurefootError if a path is neither.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = list(dict.fromkeys(paths))
        self.results: dict[Path, Results] = {}
        self.lock = threading.Lock()
        for path in self.paths:
            if not path.is_dir():
                raise SurefootError(f"{path}: no such folder; name a run or a folder of runs")
            if not is_run(path) and next(runs_below(path), None) is None:
                raise SurefootError(
                    f"{path}: has no runs, which are folders with a config.toml; begin one with: surefoot train"
                )

    # ---- the table -------------------------------------------------------------------------------------------------------

    def places(self) -> list[Place]:
        """All runs, by name."""
        places: dict[Path, Place] = {}
        for root in self.paths:
            if is_run(root):
                places.setdefault(root.resolve(), Place(root.parent, root, str(root)))
                continue
            for path in runs_below(root):
                name = str(path.relative_to(root)) if len(self.paths) == 1 else str(path)
                places.setdefault(path.resolve(), Place(root, path, name))
        return sorted(places.values(), key=lambda place: place.name)

    def place(self, name: str) -> Place:
        """The run of a name. Raises SurefootError if there is none."""
        for place in self.places():
            if place.name == name:
                return place
        raise SurefootError(f"run={name!r}: no such run; reload the page")

    def table(self) -> dict[str, Any]:
        """A row for each run, and the runs in the trash."""
        until = time.monotonic() + READING_SECONDS
        with self.lock:
            rows = [self._row(place, until) for place in self.places()]
        return {"folders": [str(path) for path in self.paths], "runs": rows, "trash": self.trash()}

    def reads_on(self) -> bool:
        """Read metrics for a while; whether there are more."""
        with suppress(SurefootError):
            return any(row["unread"] for row in self.table()["runs"])
        return False

    def _row(self, place: Place, until: float) -> dict[str, Any]:
        recipe, damage = {}, None
        try:
            recipe = read_toml(place.path / "config.toml")
        except SurefootError as error:
            damage = str(error)
        about = recipe_summary(recipe)
        if place.path not in self.results:
            self.results[place.path] = Results(place.path / "metrics.jsonl", scores_of(about["kind"]))
        results = self.results[place.path]
        results.read_on(max(0.0, until - time.monotonic()))
        metric = next((name for name in results.names if name in results.last), None)
        finished = (place.path / FINISHED).is_file() or (about["budget"] or results.steps + 1) <= results.steps
        return {
            "name": place.name,
            **about,
            "damage": damage,
            "iterations": results.iterations,
            "steps": results.steps,
            "metric": metric and title_of(metric),
            "last": results.last.get(metric or ""),
            "best": results.best.get(metric or ""),
            "unread": results.source.unread,
            "status": "running" if in_use(place.path) else "finished" if finished else "stopped",
            "started": started(place.path),
            "tags": tags_of(place.path, recipe),
        }

    # ---- tags ------------------------------------------------------------------------------------------------------------

    def set_tags(self, name: str, tags: Any) -> list[str]:
        """Replace the tags of a run. Raises SurefootError for tags that can't be kept."""
        place, kept = self.place(name), checked_tags(tags)
        with writing(place.path / TAGS, "check the folder"):
            write_text(place.path / TAGS, json.dumps({"tags": kept}))
        return kept

    # ---- trash -----------------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> str:
        """Move a run to the trash; its id there. Raises SurefootError if the run is in use or can't be moved."""
        place = self.place(name)
        if place.path.is_symlink():
            raise SurefootError(f"{place.path}: is a link; remove it where it was made")
        inside = place.path.relative_to(place.root)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
        target = place.root / TRASH / stamp / inside
        lock = filelock.FileLock(place.path / LOCK)
        try:
            acquire(lock, place.path)
            move(place.path, target)
        except OSError as error:
            raise SurefootError(
                f"{place.path}: can't be moved to {place.root / TRASH} ({error.strerror}); move it by hand"
            ) from None
        finally:
            lock.release()
        return f"{self._roots().index(place.root)}/{stamp}/{inside.as_posix()}"

    def trash(self) -> list[dict[str, Any]]:
        """The deleted runs, the latest first: id, name and time."""
        entries = []
        for number, root in enumerate(self._roots()):
            for stamp in sorted((root / TRASH).glob("*-*-*")):
                for path in runs_below(stamp):
                    inside = path.relative_to(stamp).as_posix()
                    entries.append({"id": f"{number}/{stamp.name}/{inside}", "name": inside, "deleted": stamp.name})
        return sorted(entries, key=lambda each: each["deleted"], reverse=True)

    def restore(self, trashed: str) -> str:
        """Move a deleted run back; its path. Raises SurefootError if it is gone, or another run has its name now."""
        if trashed not in {each["id"] for each in self.trash()}:
            raise SurefootError(f"run={trashed!r}: is not in the trash; reload the page")
        number, stamp, inside = trashed.split("/", 2)
        root = self._roots()[int(number)]
        source, target = root / TRASH / stamp / inside, root / inside
        if target.exists():
            raise SurefootError(f"{target}: exists; rename it, then take the deleted run back")
        try:
            move(source, target)
        except OSError as error:
            raise SurefootError(f"{source}: can't be moved back ({error.strerror}); move it by hand") from None
        for folder in [*list(source.parents)[: inside.count("/") + 2]]:  # empty folders of the trash
            with suppress(OSError):
                folder.rmdir()
        return str(target)

    def _roots(self) -> list[Path]:
        return list(dict.fromkeys(path.parent if is_run(path) else path for path in self.paths))


def move(source: Path, target: Path) -> None:
    """Rename a folder, whose new place must be free."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)


def is_run(path: Path) -> bool:
    """Whether a folder is a run."""
    return (path / "config.toml").is_file()


def runs_below(root: Path) -> Iterator[Path]:
    """The runs in a folder and in its folders. Hidden folders and those of runs are not searched.

    Raises SurefootError for a folder with too many folders to be one of runs.
    """
    waiting, seen = [(root, 0)], 0
    while waiting:
        folder, depth = waiting.pop(0)
        seen += 1
        if seen > MOST_FOLDERS:
            raise SurefootError(f"{root}: has over {MOST_FOLDERS:,} folders; name the folder that has the runs")
        with suppress(OSError):  # a folder that was removed, or can't be read
            for path in sorted(folder.iterdir()):
                if path.name.startswith(".") or not path.is_dir():
                    continue
                if is_run(path):
                    yield path
                elif depth + 1 < DEEPEST:
                    waiting.append((path, depth + 1))


def scores_of(kind: str) -> tuple[str, ...]:
    """The metrics that show how good the result of a kind of run is, the most reliable first."""
    from surefoot.recipes.fields import KINDS  # imports pydantic, which the server doesn't need to begin

    return KINDS[kind].scores if kind in KINDS else ()


def started(path: Path) -> float | None:
    """When a run began, in seconds since 1970; None if unknown."""
    for name in ("environment.json", "config.toml"):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return None


def tags_of(path: Path, recipe: Mapping[str, Any]) -> list[str]:
    """The tags of a run: those given here, else those of its recipe."""
    with suppress(SurefootError):
        if (path / TAGS).is_file():
            return checked_tags(read_table(path / TAGS).get("tags"))
    tracking = recipe.get("tracking")
    with suppress(SurefootError):
        return checked_tags(tracking.get("tags", []) if isinstance(tracking, Mapping) else [])
    return []


def checked_tags(tags: Any) -> list[str]:
    """The tags, each once and without blanks around it. Raises SurefootError for anything but short printable texts."""
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise SurefootError(f"tags={tags!r:.80}: must be a list of texts")
    kept = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    for tag in kept:
        if len(tag) > LONGEST_TAG or not tag.isprintable() or "," in tag:
            raise SurefootError(f"tags={tag[:80]!r}: must be printable, without a comma, of at most {LONGEST_TAG} characters")
    if len(kept) > MOST_TAGS:
        raise SurefootError(f"tags: are {len(kept)}; keep at most {MOST_TAGS}")
    return kept
