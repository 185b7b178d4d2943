"""Writes checkpoints in a thread while training goes on, one after another.

Training copies what it saves (``take_snapshot``) and goes on. The thread writes the copies, flushes them and renames the folder
last; with sharded models every rank's thread writes its shards first, and they exchange whether that worked. An error of the
thread is raised by ``finished``, ``wait`` or the next ``begin``.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError, cause_of
from surefoot.ranks.collectives import exchange
from surefoot.store.checkpoint import RankShards, shards_folder, write_shards


@dataclass(frozen=True)
class Writing:
    """A checkpoint to be written.

    folder   of the checkpoint, whose shards also other ranks than the first write
    commit   writes the rest on the first rank, when all shards are on the disk
    shards   of this rank; None: the models are not sharded
    """

    folder: Path
    commit: Callable[[], None] | None
    shards: RankShards | None = None


class CheckpointWriter:
    """The thread of one rank.

    rank   its number
    group  the ranks, for exchanges of the threads, if models are sharded
    """

    def __init__(self, rank: int = 0, group: Any = None) -> None:
        self.rank, self.group = rank, group
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[list[Path]] | None = None

    def begin(self, writings: Sequence[Writing]) -> None:
        """Write checkpoints in this order. Those begun before have been collected by ``finished`` or ``wait``."""
        assert self._future is None, "one at a time"
        self._future = self._pool.submit(self._write, list(writings))

    def finished(self) -> list[Path]:
        """The checkpoints on the disk that are not reported yet; none while the thread is writing.

        Raises the thread's error.
        """
        return self.wait() if self._future is not None and self._future.done() else []

    def wait(self) -> list[Path]:
        """The same after waiting for the thread."""
        future, self._future = self._future, None
        return [] if future is None else future.result()

    def close(self) -> str | None:
        """Let the thread end what it has begun; its error as one line."""
        try:
            self.wait()
        except Exception as error:
            return str(error) if isinstance(error, SurefootError) else cause_of(error)
        finally:
            self._pool.shutdown()
        return None

    def _write(self, writings: list[Writing]) -> list[Path]:
        for writing in writings:
            if writing.shards is None:
                assert writing.commit is not None, "only the first rank writes"
                writing.commit()
                continue
            self._together(partial(write_shards, shards_folder(writing.folder), writing.shards, self.rank))
            self._together(writing.commit or (lambda: None))
        return [writing.folder for writing in writings if writing.commit is not None]

    def _together(self, step: Callable[[], None]) -> None:
        """Take a step on all ranks, of whose errors each is one for all: no thread waits for one that has given up."""
        mine: Exception | None = None
        try:
            step()
        except Exception as error:
            mine = error
        text = None if mine is None else str(mine) if isinstance(mine, SurefootError) else cause_of(mine)
        errors = exchange(text, self.group)
        if mine is not None:
            raise mine
        if others := [error for error in errors if error]:
            raise SurefootError(others[0])
