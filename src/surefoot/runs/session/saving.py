"""Save checkpoints while training goes on: copy the state, write the copies in a thread, report those on the disk.

Training copies what it saves (``take_snapshot``) and goes on. The thread writes the copies, flushes them and renames the folder
last; with sharded models every rank's thread writes its shards first, and they exchange whether that worked. An error of the
thread is raised by ``report``, ``wait`` or the next ``copy``.
"""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError, cause_of
from surefoot.ranks.collectives import exchange, from_first, rank, thread_group, together
from surefoot.ranks.launching import rank_timeout
from surefoot.store.checkpoint import (
    RankShards,
    Snapshot,
    check_written,
    shards_folder,
    shards_of_rank,
    take_snapshot,
    write_shards,
    write_snapshot,
)
from surefoot.store.metrics import RowFile


class Saver:
    """The checkpoints of a run that are copied or being written. All ranks call the same methods.

    on_disk   called with the folder of each checkpoint that has been written
    sharded   whether every rank writes its own part of a checkpoint
    """

    def __init__(self, on_disk: Callable[[Path], None], sharded: bool = False) -> None:
        self.on_disk, self.sharded = on_disk, sharded
        self.rank, self.group = rank(), thread_group(rank_timeout()) if sharded else None
        """the number of this rank, and the ranks, for exchanges of the threads"""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[list[Path]] | None = None
        self.copies: list[Callable[[], Path | None]] = []
        """of this iteration, whose end begins to write them; each returns its checkpoint on the rank that commits it"""
        self.reads_back = True
        """whether the next checkpoint to resume from is the first, which is read back before the run goes on"""
        self.waits = False

    def copy(
        self,
        folder: Path | None,
        parts: Callable[[], dict[str, Any]],
        clean: Callable[[Path], None],
        rows: Sequence[RowFile] = (),
        resumable: bool = False,
    ) -> None:
        """Copy the parts of a checkpoint, once the one before is on the disk. ``write`` begins to write the copy.

        folder    of the checkpoint; None on a rank that does not commit it
        clean     removes what it replaces
        rows      the files that it continues
        resumable   whether runs resume from it; the first such checkpoint of a process is read back
        """
        with together():
            self._report()
            own = parts() if folder is not None or self.sharded else {}
        place, commit, shards = folder, None, None
        everyone: list[RankShards] = []
        if self.sharded:
            place = from_first(None if folder is None else folder.absolute())
            with together():
                if folder is not None:
                    shutil.rmtree(shards_folder(folder), ignore_errors=True)
                    shards_folder(folder).mkdir(parents=True)
                shards = shards_of_rank(own, rank())
            everyone = exchange(RankShards({name: {} for name in shards.files}, shards.pieces))
        with together():
            if folder is not None:
                snapshot = take_snapshot(own, everyone, {file.path.stem: file.fingerprint() for file in rows})
                commit = partial(_commit, folder, snapshot, rows, clean, resumable and self.reads_back)
        self.waits = self.waits or (resumable and self.reads_back)
        self.reads_back = self.reads_back and not resumable
        if place is not None:
            self.copies.append(partial(self._write_one, place, commit, shards))

    def write(self) -> None:
        """Begin to write the copies; wait for the first checkpoint, which is read back."""
        if self.copies:
            assert self._future is None, "one at a time"
            copies = self.copies
            self._future = self._pool.submit(lambda: [path for write in copies if (path := write()) is not None])
        self.copies, waits, self.waits = [], self.waits, False
        if waits:
            self.wait()

    def write_first(self) -> None:
        """Write the first checkpoint of a run before the best weights of its iteration."""
        self.copies.reverse()
        self.write()

    def report(self) -> None:
        """Report the checkpoints that have been written since the last call. Raises an error of the thread."""
        if self._future is not None and self._future.done():
            self._report()

    def wait(self) -> None:
        """Wait until all are written, and report them. Raises an error of the thread on all ranks."""
        with together():
            self._report()

    def close(self) -> str | None:
        """Wait for the last checkpoint, which is not reported; the error in writing it as one line."""
        try:
            self._written()
        except Exception as error:
            return str(error) if isinstance(error, SurefootError) else cause_of(error)
        finally:
            self._pool.shutdown()
        return None

    def _written(self) -> list[Path]:
        """The checkpoints that the thread has written, once it is done. Raises its error."""
        future, self._future = self._future, None
        return [] if future is None else future.result()

    def _report(self) -> None:
        for path in self._written():
            self.on_disk(path)

    # ---- in the thread ----

    def _write_one(self, folder: Path, commit: Callable[[], None] | None, shards: RankShards | None) -> Path | None:
        """Write a checkpoint: ``commit`` writes the rest on the first rank, when the shards of all ranks are on the disk."""
        if shards is not None:
            with together(self.group):  # no thread waits for one that has given up
                write_shards(shards_folder(folder), shards, self.rank)
        with together(self.group) if shards is not None else nullcontext():
            if commit is not None:
                commit()
        return None if commit is None else folder


def _commit(folder: Path, snapshot: Snapshot, rows: Sequence[RowFile], clean: Callable[[Path], None], read_back: bool) -> None:
    """Write a checkpoint whose shards are on the disk, read it back if asked to, and remove what it replaces."""
    for file in rows:
        file.flush()
    write_snapshot(folder, snapshot)
    if read_back:
        check_written(folder, snapshot)
    clean(folder)
