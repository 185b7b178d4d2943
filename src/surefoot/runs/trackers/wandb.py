"""Weights & Biases, online or offline. Its files are in ``wandb/`` of the run's folder, unless WANDB_DIR is set."""

import contextlib
import inspect
import os
import secrets
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError, cause_of
from surefoot.files import read_bytes
from surefoot.runs.trackers.interface import NOTHING, TrackedRun, columns_of
from surefoot.store.events import Sample
from surefoot.store.finding import Finding

LONGEST_WRITE = 10.0
"""seconds to wait for W&B's own process"""
LEVELS = {"serious": "ERROR", "warning": "WARN"}
BLOCK, HEADER, START = 32_768, 7, 7
"""sizes in a .wandb file, in bytes: a block, the header of a part of a record, the header of the file"""
FULL_PART, LAST_PART = 1, 4
"""kinds of the part that ends a record"""


def check() -> None:
    """Raise SurefootError if W&B would ask for a key."""
    try:
        ready = mode() not in ("online", "shared") or bool(os.environ.get("WANDB_API_KEY") or _has_key())
    except Exception as error:
        raise SurefootError(f"trackers=['wandb']: its settings are invalid ({cause_of(error)}); check WANDB_MODE") from None
    if not ready:
        raise SurefootError("trackers=['wandb']: there is no API key; run: wandb login, or set WANDB_MODE=offline")


def _has_key() -> bool:
    """Whether W&B has a key in its settings or in ~/.netrc, without asking for one."""
    import wandb

    quiet = "prompt" in inspect.signature(wandb.login).parameters  # below 0.26 a login always asks
    return bool(wandb.login(prompt=False) if quiet else wandb.api.api_key)


def mode() -> Any:
    """Whether W&B is online: by WANDB_MODE, else by its settings file."""
    import wandb

    return os.environ.get("WANDB_MODE") or str(wandb.setup().settings.mode)


class WandB:
    """A run of Weights & Biases, resumed by its id; a row of metrics is at its number of steps."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        tracking = run.recipe.tracking
        self.identity: dict[str, Any] = {"id": run.saved.get("id") or secrets.token_hex(4)}
        self.where = Path(os.environ.get("WANDB_DIR") or run.folder)
        wait_for_new_folder(self.where, self.identity["id"])
        with _sweep_of_the_program():
            self.run = wandb.init(
                project=tracking.project,
                id=self.identity["id"],
                name=run.name,
                group=run.group,
                job_type=run.recipe.kind,
                tags=list(tracking.tags),
                dir=str(self.where),
                config=dict(run.table),
                mode=mode(),
                resume=None if mode() == "offline" else "allow",
                reinit="create_new",  # a run of the program stays open, and its own
                settings=wandb.Settings(silent=True, console="off", disable_code=True),
            )
        self.identity["id"] = self.run.id  # in a sweep, that of its trial
        _opened.add(self.run.id)
        self.last_step = last_step_offline(self.where, self.identity["id"]) if self.run.offline else self.run.starting_step - 1

    def log(self, steps: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Add a row; W&B sends it when the next one begins."""
        row: dict[str, Any] = dict(metrics)
        if samples:
            import wandb

            columns = columns_of(samples)
            row["samples"] = wandb.Table(columns=columns, data=[[sample.get(name) for name in columns] for sample in samples])
        self.run.log(row, step=steps)
        self.last_step = steps

    def log_video(self, steps: int, path: Path) -> None:
        """Add the file to the newest row."""
        import wandb

        self.run.log({"video": wandb.Video(str(path), format="mp4")}, step=steps)

    def log_finding(self, steps: int, finding: Finding) -> None:
        """Send an alert, which W&B forwards by mail or Slack as its user settings say."""
        self.run.alert(finding.name, f"step {steps:,}, {finding.line}", level=LEVELS.get(finding.severity, "INFO"))

    def close(self, failed: bool) -> None:
        """Send what is left, and wait until the offline file has it: W&B's process may write after ``finish`` returns."""
        self.run.finish(exit_code=int(failed))
        if self.run.offline:
            wait_for_row(self.where, self.identity["id"], self.last_step)


_opened: set[str] = set()
"""ids of this process's runs"""


@contextlib.contextmanager
def _sweep_of_the_program() -> Iterator[None]:
    """Leave the trial of a sweep, whose id W&B would give every run, to a run of the program, or to an earlier one of ours."""
    import wandb

    settings = wandb.setup().settings
    sweep = settings.sweep_id
    if wandb.run is not None or settings.run_id in _opened:
        settings.sweep_id = None
    try:
        yield
    finally:
        settings.sweep_id = sweep


def wait_for_new_folder(where: Path, run_id: str) -> None:
    """Wait at most a second: W&B names an offline folder by the second, and drops what a second process adds to one."""
    while any(where.glob(f"wandb/offline-run-{time.strftime('%Y%m%d_%H%M%S')}-{run_id}")):
        time.sleep(0.05)


def wait_for_row(where: Path, run_id: str, step: int) -> None:
    """Wait at most ``LONGEST_WRITE`` until the offline files have the row of ``step``."""
    end = time.monotonic() + LONGEST_WRITE
    while last_step_offline(where, run_id) < step and time.monotonic() < end:
        time.sleep(0.05)


def last_step_offline(where: Path, run_id: str) -> int:
    """The newest step in the offline files of a run; ``NOTHING`` without one."""
    return max((steps for path in offline_files(where, run_id) for steps, _ in offline_rows(path)), default=NOTHING)


def offline_files(where: Path, run_id: str) -> list[Path]:
    """The .wandb files of a run, oldest first: one for each process that trained it."""
    return sorted(where.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))


def offline_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows in a .wandb file: steps, and values as JSON. A row that a kill cut off is left out."""
    from wandb.proto import wandb_internal_pb2

    for content in _records(read_bytes(path)):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield record.history.step.num, {item.key or ".".join(item.nested_key): item.value_json for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    """The whole records of a file in the format of LevelDB's log: parts in blocks of 32 KiB."""
    at, record = START, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        at += HEADER
        if kind == 0 or at + size > len(data):
            return
        record += data[at : at + size]
        at += size
        if kind in (FULL_PART, LAST_PART):
            yield record
            record = b""
