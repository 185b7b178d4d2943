"""A run folder: its files, its lock, and the checkpoints in it.

config.toml        the resolved recipe, re-runnable
rows/              rows that were passed to ``train`` as objects
environment.json   versions, seed, threads: all that results depend on besides the recipe; settings from a preset
metrics.jsonl      one object per iteration, cut back to the checkpoint on resume
fingerprints.jsonl   hashes of what each stage of an iteration computed, cut back as well
metrics.damaged.jsonl   lines of it that could not be read on resume
events.*, wandb/    what trackers write here, if the recipe has them
trackers.json      the ids by which they continue the run, and what stopped them
samples/<steps>.*  responses of a language model at an evaluation; cut back as well
traces/<steps>.*   every number behind some of the updates, cut back as well
checkpoints/<step> the last few; best/<step> the best evaluated
model/             of a language run: the trained model, for transformers and other runs
adapter/           of a run with an [adapter]: the same for peft
finished.json      the steps after which these were written
tags.json          tags that a person gave the run; nothing in training reads them
"""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import filelock

from surefoot.errors import SurefootError
from surefoot.files import (
    check_link,
    check_shown,
    copy_file,
    is_temporary,
    made_from,
    package_source,
    read_table,
    read_text,
    read_toml,
    write_text,
    writing,
    written_whole,
)
from surefoot.recipes.base import Recipe
from surefoot.recipes.callables import Functions
from surefoot.recipes.reading import check_trust_region, make_recipe, set_fields, to_toml
from surefoot.recipes.rows import with_row_fields
from surefoot.store.checkpoint import check_numbered, checkpoints_in, latest_checkpoint
from surefoot.store.hub import is_hub_name, local_folder
from surefoot.store.manifest import LISTING, clear, fingerprint, flush, is_checkpoint, read_listed_table, write_listed
from surefoot.store.metrics import FILE, read_metrics
from surefoot.store.reading import ENVIRONMENT, FINISHED, LOCK, ROWS, acquire, check_is_run, others_in, samples_in, traces_in
from surefoot.store.source import SHOWN, source_differences, sources_of
from surefoot.terminal import visible

CHANGE_NOTHING = (
    "check_memory",
    "fingerprints",
    "reward.deadline",
    "rollout.deadline",
    "rollout.info",
    "rollout.workers",
    "trackers",
    "tracking.project",
    "tracking.group",
    "tracking.name",
    "tracking.tags",
)
"""recipe fields that change no result, only whether a run continues"""
MEASURES = (
    "task",
    "environment",
    "evaluation.episodes",
    "evaluation.rows",
    "evaluation.seed",
    "data.held_out",
    "data.max_length",
    "turns",
    "sampling.max_tokens",
    "sampling.stop",
    "sampling.temperature",
    "reward.terms",
    "reward.missing_eos",
    "reward.missing_eos_value",
    "reward.overlong",
    "reward.special_tokens",
    "reference.model",
    "reference.beta",
    "reference.target",
    "preference",
)
"""recipe fields that define the score of an evaluation"""
ASKING = ("batch", "retries", "token_from")
"""fields of a reward term that change how it is computed, not its value"""
FIRST_CHECKPOINT = 60.0
"""seconds after which a run saves its first checkpoint, at the end of the iteration"""
SOURCES = "code.json"
"""the file in a checkpoint with the hashes of the user's code"""
OTHER_FOLDER = "choose another --run-dir"
SAVED_ROWS = re.compile(r"(?:.*[\\/])?rows[\\/](\w+-[0-9a-f]{16}\.jsonl)")
PACKAGES = ("surefoot", "torch", "numpy", "gymnasium", "mujoco", "ale-py", "envpool", "transformers", "tokenizers", "peft")
"""those whose versions results may depend on"""


def check_free(path: Path) -> None:
    """Raise SurefootError if a new run can't have this folder, because it already holds something."""
    check_shown("run_dir", path.resolve().name)
    check_link(path)
    if (path / "config.toml").is_file():
        raise SurefootError(f"{path}: contains a run; continue it with: surefoot resume {path}; or choose another --name")
    if path.exists() and not path.is_dir():
        raise SurefootError(f"{path}: is not a folder; choose another --name")
    if path.exists() and (others := others_in(path)):  # what a kill before begin() leaves is written again
        names = ", ".join([*map(visible, others[:3]), *(["…"] if len(others) > 3 else [])])
        raise SurefootError(
            f"{path}: contains other files ({names}), and no config.toml of a run; restore that, or choose another --name"
        )


class RunFolder:
    """One run's folder, opened for writing by this process alone until ``close``.

    shown   its name in messages; default: the path as given. The path itself is absolute, because environments may change the
            working folder
    """

    def __init__(self, path: Path, shown: Path | None = None) -> None:
        self.path, self.shown = path.absolute(), shown or path
        self.checkpoints, self.best = self.path / "checkpoints", self.path / "best"
        self._lock = filelock.FileLock(self.path / LOCK)
        self._rows: list[Path] = []

    def as_shown(self, line: str) -> str:
        """A line with the folder's name instead of its absolute path."""
        return line.replace(str(self.path), str(self.shown))

    @classmethod
    def reserve(cls, path: Path, rows: Iterable[Path] = (), shown: Path | None = None) -> "RunFolder":
        """The folder of a new run, locked, with files of rows; SurefootError when it already holds something, or can't be made.

        It is not a run before ``begin``; ``discard`` removes it.
        """
        check_free(path)
        with writing(path, OTHER_FOLDER):
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path, shown)
            run._acquire()
            clear(path)
            try:
                for file in rows:
                    run._keep(file)
            except BaseException:
                run.discard()
                raise
        return run

    def _keep(self, file: Path) -> None:
        """Copy a file of rows, whole or not at all."""
        kept = self.path / ROWS / file.name
        kept.parent.mkdir(exist_ok=True)
        self._rows.append(kept)
        with written_whole(kept) as temporary:
            copy_file(file, temporary)
            flush(temporary)

    def begin(self, recipe: Recipe, preset: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Write the recipe: from now on this is a run.

        preset  the name of the preset that the recipe has settings from, and which; environment.json keeps it
        facts   those of ``environment`` from before the task was made, which may change the working folder; default: now
        """
        with writing(self.path, OTHER_FOLDER):
            facts = facts or environment(recipe)
            write_listed(self.path / ENVIRONMENT, json.dumps({**facts, "preset": preset}, indent=1))
            write_text(self.path / "config.toml", to_toml(recipe))  # last: without it, a killed run begins again
        self._rows = []

    def change_engine(self, recipe: Recipe) -> None:
        """Record that the run goes on with another engine than it began with."""
        self.write_recipe(recipe)
        file = self.path / ENVIRONMENT
        write_listed(file, json.dumps({**read_listed_table(file), "engine": recipe.engine}, indent=1))

    def discard(self) -> None:
        """Remove the rows of a run that did not begin, and the folder if nothing else is in it; release the lock."""
        for file in self._rows:
            file.unlink(missing_ok=True)
        if self._rows:
            self._lock.release()
            (self.path / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds something else
                (self.path / ROWS).rmdir()
                self.path.rmdir()
        self.close()

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run, for continuing; SurefootError when it is missing, empty, or in use."""
        check_is_run(path)
        if (path / LISTING).is_file():
            raise SurefootError(
                f"{path}: comes from the hub, without what resuming needs; begin a new run, with start or model = {str(path)!r}"
            )
        for entry in path.iterdir():
            check_link(entry)
        run = cls(path)
        run._acquire()
        for folder in (run.path, run.checkpoints, run.best):
            clear(folder)
        return run

    def _acquire(self) -> None:
        with writing(self.path, "a run needs a folder of its own"):
            acquire(self._lock, self.path)

    def recipe(self) -> Recipe:
        """The recipe as config.toml has it now."""
        return recipe_of(self.path, self.shown)

    def write_recipe(self, recipe: Recipe) -> None:
        """Replace config.toml (a run that was extended, or changed on purpose)."""
        write_text(self.path / "config.toml", to_toml(recipe))

    @property
    def finished_at(self) -> int | None:
        """The steps after which the trained model was exported; None if it was not."""
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            return int(read_listed_table(self.path / FINISHED)["steps"])
        return None

    def finish(self, steps: int) -> None:
        """Record that the export is complete."""
        write_listed(self.path / FINISHED, json.dumps({"steps": steps}))

    def latest(self, recipe: Recipe) -> Path | None:
        """The newest sound checkpoint; None if the run, of this recipe, was stopped before its first one.

        Raises SurefootError if there is none although the run has saved one: starting again would replace what it left.
        """
        if lost := lost_checkpoints(self.path, recipe):
            raise SurefootError(
                f"{self.shown / 'checkpoints'}: has no checkpoint, but {lost}; bring it back, or begin another run with: "
                f"surefoot train {self.shown / 'config.toml'} --run-dir OTHER"
            )
        return latest_checkpoint(self.checkpoints)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()


def working_folder(run: Path) -> str | None:
    """The folder in which a run began; None if unknown."""
    with contextlib.suppress(SurefootError, KeyError):
        return str(read_listed_table(run / ENVIRONMENT)["working_folder"])
    return None


def lost_checkpoints(run: Path, recipe: Recipe) -> str | None:
    """What in a run's folder shows that it has saved checkpoints, none of which is there now; None if nothing does.

    The first one is on the disk before an iteration follows the one that saves it, and before best/ is written.
    """
    for name in ("checkpoints", "best"):
        check_numbered(run / name)
    if checkpoints_in(run / "checkpoints"):
        return None
    if best := checkpoints_in(run / "best"):
        return f"there is {best[-1].parent.name}/{best[-1].name}"
    if exported := [name for name in (FINISHED, "model", "adapter") if os.path.lexists(run / name)]:
        return f"there is {exported[0]}"
    rows, periods = read_metrics(run / FILE), (recipe.checkpoint_every, recipe.evaluate_every)
    for file in (*traces_in(run / "traces")[:-1], *samples_in(run / "samples")[:-1]):
        if int(file.stem) >= min(periods):
            return f"there is {file.parent.name}/{file.name}"
    seconds, before = 0.0, 0
    for row in rows[:-1]:
        seconds += max(row.get("seconds_collecting") or 0, row.get("seconds_learning") or 0)
        if seconds >= FIRST_CHECKPOINT or any(row["steps"] // every > before // every for every in periods):
            return f"metrics.jsonl has {rows[-1]['iteration']:,} iterations, after the first of which one was saved"
        before = row["steps"]
    return None


def recipe_of(run: Path, shown: Path | None = None) -> Recipe:
    """The recipe of a run, with its rows where the folder is now, if it was moved. Errors name the file, as ``shown``."""
    file, shown = run / "config.toml", shown or run

    def path_of(field: str, value: Any) -> Any:
        match = SAVED_ROWS.fullmatch(str(value))
        here = [] if match is None else [path for path in (Path(value), shown / ROWS / match[1]) if path.is_file()]
        if not here:
            return value
        if fingerprint(here[0])["sha256"][:16] != here[0].stem.rpartition("-")[2]:
            fault = "does not match the SHA-256 in its name (changed or damaged); copy it again"
            raise SurefootError(f"{field}={str(here[0])!r}: {fault}")
        return str(value) if here[0] == Path(value) else str(here[0])

    try:
        return make_recipe(with_row_fields(read_toml(file), path_of))
    except SurefootError as error:
        raise SurefootError(f"{shown / file.name}: {str(error).removeprefix(f'{file}: ')}") from None


def _by_content(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a recipe with the names of saved rows instead of their paths."""

    def named(field: str, value: Any) -> Any:
        match = SAVED_ROWS.fullmatch(str(value))
        return match[1] if match else value

    return with_row_fields(table, named)


def checkpoint_to_load(path: Path) -> Path:
    """The checkpoint that a path means: itself, a saved agent, or a run's best, else its latest.

    A name on the hub (``hf://org/name``) means the run in that repository.

    Raises SurefootError when there is none, or none that is sound.
    """
    path = local_folder(path)
    if is_checkpoint(path):
        return path
    if (path / "agent.safetensors").is_file():  # a saved agent whose manifest is gone: say so, not "not a run"
        return path
    check_is_run(path)
    checkpoint = latest_checkpoint(path / "best") or latest_checkpoint(path / "checkpoints")
    if checkpoint is None:
        raise SurefootError(f"{path}: has no checkpoint yet; continue the run with: surefoot resume {path}")
    return checkpoint


def is_model(path: Path) -> bool:
    """Whether a folder has a model in the files of ``transformers``, as repositories of models have beside the recipe."""
    return (path / "config.json").is_file()


def kind_of(run: Path) -> str:
    """The kind of a run; "control" for a saved agent, which has no recipe file."""
    run = local_folder(run)
    config = run / "config.toml"
    return str(read_toml(config).get("kind", "control")) if config.is_file() else "control"


def chosen_checkpoint(path: Path, which: str | None) -> Path:
    """The checkpoint of a run that a word names: "best", "last", or a number of steps; None as ``checkpoint_to_load``.

    Raises SurefootError, with what there is, when the run has no such checkpoint.
    """
    if which is None:
        return checkpoint_to_load(path)
    path = local_folder(path)
    if is_checkpoint(path):
        raise SurefootError(f"checkpoint={which!r}: {path} is a checkpoint itself; leave --checkpoint out")
    check_is_run(path)
    kept = {name: checkpoints_in(path / name) for name in ("best", "checkpoints")}
    if which in ("best", "last"):
        checkpoint = latest_checkpoint(path / ("best" if which == "best" else "checkpoints"))
    else:
        checkpoint = next((folder for folders in kept.values() for folder in folders if folder.name == which), None)
    if checkpoint is None:
        there = [f"best ({folder.name})" for folder in kept["best"]] + [folder.name for folder in kept["checkpoints"]]
        raise SurefootError(f"checkpoint={which!r}: {path} has none of that name; there is {', '.join(there) or 'none yet'}")
    return checkpoint


def output_file(path: Path, checkpoint: Path, task: str, kind: str, ending: str) -> Path:
    """Where what is made of a checkpoint goes by itself: ``RUN/<kind>/<task>-<step><ending>``.

    ``path`` is a run or one of its checkpoints. Raises SurefootError for an agent saved elsewhere: it has no such place.
    """
    checkpoint = checkpoint.absolute()
    for run in () if is_hub_name(path) else (path, checkpoint.parent.parent):
        if (run / "config.toml").is_file():
            return run / kind / f"{task_label(task)}-{checkpoint.name}{ending}"
    raise SurefootError(f"{path}: belongs to no run; set --out FILE")


def task_label(task: str) -> str:
    """A task's name as part of a file's."""
    return task.rpartition("/")[2].replace(":", "-").lower()


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """Fields in which two recipe tables differ, each as ``field: old -> new``."""
    lines: list[str] = []
    for key in sorted(set(before) | set(after)):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {set_fields(old)} -> {set_fields(new)}")
    return lines


@contextlib.contextmanager
def folder_lock(folder: Path, file: str, timeout: float = 0, remedy: str = "choose another --run-dir") -> Iterator[None]:
    """Make a folder, which is empty or has ``file``, and lock it; wait for another process at most ``timeout`` seconds.

    Raises SurefootError if the folder contains other files, can't be written, or is in use.
    """
    lock = filelock.FileLock(folder / LOCK)
    if not (folder / LOCK).exists():  # else another process may be writing the file
        _check_own(folder, file, remedy)
    with writing(folder, remedy):
        folder.mkdir(parents=True, exist_ok=True)
        acquire(lock, folder, timeout)
    try:
        _check_own(folder, file, remedy)
        clear(folder)
        yield
    finally:
        lock.release()


def _check_own(folder: Path, file: str, remedy: str) -> None:
    """Raise SurefootError for a folder that is neither new nor empty, and has no ``file``."""
    if not folder.exists() or (folder / file).exists():
        return
    if not folder.is_dir() or any(path.name != LOCK and not is_temporary(path) for path in folder.iterdir()):
        raise SurefootError(f"{folder}: contains a run or other files; {remedy}")


def match_settings(file: Path, settings: Mapping[str, Any], remedy: str, free: Sequence[str] = ()) -> None:
    """Save settings in a new file of a folder, with hashes of the code that they name, or compare them with those in the file.

    remedy   how to continue without the folder
    free     fields that may differ

    Raises SurefootError if the file has other settings, or if the code has changed.
    """
    wanted = json.loads(json.dumps(settings))
    if not file.exists():
        sources = sources_of(wanted)
        write_text(file, json.dumps({**wanted, **({"sources": sources} if sources["roots"] else {})}, indent=1))
        return
    before = read_table(file)
    code = before.pop("sources", None)
    lines = differences(before, wanted)
    try:
        lines += source_differences(code, [Path.cwd()]) if code else []
    except (LookupError, TypeError, AttributeError):
        raise SurefootError(f"{file}: has no sources that can be read; {remedy}") from None
    changed = [line for line in lines if not line.startswith(tuple(f"{name}: " for name in free))]
    if changed:
        short = [line if len(line) < 100 else line.partition(":")[0] for line in changed]
        shown = "; ".join(short[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise SurefootError(f"{file.parent}: was started with other settings ({shown}); repeat those, or {remedy}")


def table_differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """How two recipe tables differ; saved rows are compared by content, whatever their folder."""
    return differences(_by_content(before), _by_content(after))


def recipe_differences(before: dict[str, Any], recipe: Recipe) -> list[str]:
    """How a recipe differs from the table a checkpoint holds, aside from the budget and from what changes no number."""
    free = tuple(f"{name}: " for name in ("steps", *CHANGE_NOTHING))
    return [line for line in table_differences(before, recipe.table) if not line.startswith(free)]


def changed_since(run: Path, recipe: Recipe, checkpoint: Path | None = None) -> list[str]:
    """How a run's recipe, as config.toml has it now, and its code differ from those of a checkpoint, by default the newest."""
    with contextlib.suppress(SurefootError, LookupError, TypeError):  # whoever loads the checkpoint says so
        checkpoint = checkpoint or checkpoints_in(run / "checkpoints")[-1]
        changed = recipe_differences(read_listed_table(checkpoint / "recipe.json"), recipe)
        return changed + code_changed_since(run, checkpoint)
    return []


def code_changed_since(run: Path, checkpoint: Path | None = None) -> list[str]:
    """How the code that a run's recipe names differs from that of a checkpoint, by default the newest; empty without one."""
    with contextlib.suppress(SurefootError, LookupError, TypeError):
        checkpoint = checkpoint or checkpoints_in(run / "checkpoints")[-1]  # best/ has no code
        places = [Path.cwd(), Path(working_folder(run) or ".")]  # of relative paths
        return source_differences(read_listed_table(checkpoint / SOURCES), places)
    return []


def sources_in(checkpoints: Sequence[Path]) -> dict[str, str]:
    """The code that the newest sound checkpoint was made by, each file or package with its hash or version, shortened; empty
    without checkpoints. Raises SurefootError if all are damaged.
    """
    fault: SurefootError | None = None
    for checkpoint in reversed(checkpoints):
        try:
            sources = read_listed_table(checkpoint / SOURCES)
            return {name: str(value)[:SHOWN] for kind in ("code", "packages") for name, value in sources[kind].items()}
        except SurefootError as error:
            fault = fault or error
    if fault is not None:
        raise fault
    return {}


def check_unchanged(checkpoint: Path, recipe: Recipe, functions: Functions | None, allow_changes: bool) -> None:
    """Raise SurefootError if the recipe, or the code that it names, has changed since a checkpoint, unless that is allowed.

    functions  those that were passed again, and nothing else is compared; None: the recipe and files, of which none has run
    """
    run = checkpoint.parent.parent
    with made_from(checkpoint):
        parts = {name: read_listed_table(checkpoint / f"{name}.json") for name in ("recipe", "code")}
        before, changed = parts["code"], list[str]()
        if functions is None:
            changed = recipe_differences(parts["recipe"], recipe)
        where = run / "config.toml" if changed else run
        changed += source_differences(before, [Path.cwd()], functions)
    if changed and not allow_changes:
        raise SurefootError(f"{where}: changed since the checkpoint ({'; '.join(changed)}); undo it, or pass --allow-changes")
    if any(line.startswith("algorithm: ") for line in changed):  # the old algorithm would train under the new name
        check_trust_region(recipe.algorithm, recipe.table)


def scored_alike(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether evaluation scores under two recipe tables are comparable."""

    def measure(table: dict[str, Any]) -> dict[str, Any]:
        measures = {name: _at(table, name) for name in MEASURES}
        if measures["reference.target"] not in (None, "none"):
            measures["reference.beta"] = None  # with an adaptive β, the KL penalty is not part of the score
        terms = measures["reward.terms"] or ()
        return measures | {"reward.terms": [{key: value for key, value in term.items() if key not in ASKING} for term in terms]}

    return measure(before) == measure(after)


def _at(table: Any, path: str) -> Any:
    """What stands at a dotted path; None where nothing does."""
    for key in path.split("."):
        table = table.get(key) if isinstance(table, dict) else None
    return table


def machine(recipe: Recipe, ranks: int = 1) -> dict[str, Any]:
    """What the bits of a run depend on besides the recipe and the code that it names."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(recipe.device),
        "versions": dict(_versions()),
        "threads": recipe.threads,
        "engine": recipe.engine,
        "ranks": ranks,
        "surefoot source": package_source(),
    }


@cache
def _processor(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        if model := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE):
            return f"{model[1]}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def environment(recipe: Recipe, ranks: int = 1) -> dict[str, Any]:
    """All that results depend on besides the recipe."""
    return {
        **machine(recipe, ranks),
        "seed": recipe.seed,
        "git": _git_commit(),
        "command": sys.argv,
        "working_folder": os.getcwd(),
    }


@cache  # each takes milliseconds to read, and a study or a comparison has many runs
def _versions() -> tuple[tuple[str, str], ...]:
    versions = []
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append((package, version(package)))
    return tuple(versions)


def _git_commit() -> str | None:
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
