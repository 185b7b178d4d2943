"""Environments in worker processes, each a loop over a slice of them, with the same results as in one process, bit for bit.

Processes are spawned, never forked: they inherit no thread, lock or GPU context. When a worker fails (an exception of any
kind, an exit, a signal, no answer), the parent reports the environment, episode and step, and ends all workers.
"""

import ctypes
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import gymnasium
import numpy as np

from surefoot.control.environments import task_name
from surefoot.control.environments.atari import ATARI
from surefoot.control.environments.looped import Lost, MakeEnvironment, Step, check_same_actions
from surefoot.control.environments.observations import copied, environment_failure
from surefoot.control.environments.records import check_saved_count
from surefoot.control.environments.slices import (
    arrays_of,
    concatenate,
    concatenate_steps,
    join_states,
    joined,
    layout_of,
    mapped,
    new_memory,
    slice_state,
    step_of,
)
from surefoot.control.environments.worker import NOT_CALLING, position_in
from surefoot.control.spaces import Array, Observations
from surefoot.errors import SurefootError, cause_of
from surefoot.processes import Child, ChildEnded, ChildLate, end, held_back, is_importing_main

MAIN_REIMPORTED = 81
"""exit code of a worker in which the user's script started to train again"""
START_TIMEOUT = 120
"""least number of seconds that a worker may take to start and import"""
CLOSE_TIMEOUT = 3
"""seconds that workers have to close their environments"""


@dataclass
class Worker:
    """A process, and its position: environment, episode and step of the current call."""

    child: Child
    position: Any
    first: int
    """its first row of a batch"""
    count: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)


class WorkerEnvironments:
    """B environments, spread evenly over ``workers`` processes.

    task         a Gymnasium id, ``module:function``, or a callable that another process can import
    deadline     seconds that one call of an environment may take
    first        the number of the first environment, if these are a slice of more

    Raises SurefootError when the task can't be sent to a worker process or made there.
    """

    def __init__(
        self,
        task: str | MakeEnvironment,
        arguments: dict[str, Any],
        count: int,
        seed: int,
        workers: int,
        deadline: float,
        first: int = 0,
    ) -> None:
        self.count, self.name, self.deadline, self.first = count, task_name(task), deadline, first
        if is_importing_main():
            sys.exit(MAIN_REIMPORTED)  # a worker imports the script that started it; the parent reports that
        pickled = _pickled(task, arguments, self.name)
        self._workers: list[Worker] = []
        children: list[Child] = []
        self._finalizer = Finalize(
            self, end, args=(children, CLOSE_TIMEOUT), exitpriority=10
        )  # at Python's exit, at the latest
        try:
            for rows in np.array_split(np.arange(count), min(workers, count)):
                numbers = range(first + int(rows[0]), first + int(rows[-1]) + 1)
                with held_back():
                    child, position = _start(pickled, self.name, seed, numbers)
                    children.append(child)
                self._workers.append(Worker(child, position, int(rows[0]), len(rows)))
            made = [self._receive(worker, max(deadline, START_TIMEOUT)) for worker in self._workers]
            check_same_actions([space for _, space in made], self.name, [worker.first for worker in self._workers])
        except BaseException:
            self.close()
            raise
        self.observation_space: gymnasium.Space[Any] = made[0][0]
        self.action_space: gymnasium.Space[Any] = made[0][1]
        self._observations: Observations = {}
        self._arrays: dict[str, Array] | None = None
        """of a step, written by the workers; None before the first step, and where memory can't be shared"""

    def reset(self) -> Observations:
        self._observations = concatenate(self._call("reset"))
        return self._observations

    def step(self, actions: Array, active: Array | None = None) -> Step:
        parts = [(actions[w.rows], None if active is None else active[w.rows]) for w in self._workers]
        answers, firsts = self._call("step", parts), [worker.first for worker in self._workers]
        if self._arrays is None:
            step = concatenate_steps(answers, firsts)
            self._share(arrays_of(step))
        else:
            step = step_of(self._arrays, **joined(answers, firsts))
        self._observations = step.observations
        return step

    def _share(self, arrays: dict[str, Array]) -> None:
        """Let the workers write such arrays into common memory from now on."""
        layout = layout_of(arrays)
        if (file := new_memory(layout)) is None:
            return
        try:
            self._call("share", [(layout, worker.rows) for worker in self._workers], file)
        finally:
            arrays_here = mapped(layout, file)  # closes the file too
        self._arrays = arrays_here

    def mark(self) -> None:
        self._call("mark")

    def actions_before_mark(self, index: int) -> tuple[int, Array]:
        worker = self._worker_of(index)
        self._send(worker, "actions_before_mark", (index - worker.first,))
        answer: tuple[int, Array] = self._receive(worker, self.deadline)
        return answer

    def restart(self, index: int) -> tuple[Any, list[int]]:
        worker = self._worker_of(index)
        self._send(worker, "restart", (index - worker.first,))
        observations, restarted = self._receive(worker, self.deadline)
        self._observations = copied(self._observations)
        for path, rows in observations.items():
            self._observations[path][worker.rows] = rows
        return self._observations, [worker.first + local for local in restarted]

    def state_dict(self) -> dict[str, Any]:
        """The state that one process would save, so that a run may resume with another number of workers."""
        return join_states(self._call("state_dict"))

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Any, Lost]:
        if "rows" not in state:  # saved by a vector environment
            return self.reset(), dict.fromkeys(range(self.count), "")
        check_saved_count(len(state["rows"]), self.count)
        answers = self._call("load_state_dict", [(slice_state(state, worker.rows),) for worker in self._workers])
        self._observations = concatenate([observations for observations, _ in answers])
        return self._observations, self._by_environment([lost for _, lost in answers])

    def forgotten(self) -> dict[int, str]:
        """Environments that replayed but have other attributes than when they were saved -> these attributes."""
        return self._by_environment(self._call("forgotten"))

    def _by_environment(self, answers: list[dict[int, str]]) -> dict[int, str]:
        return {w.first + local: what for w, rows in zip(self._workers, answers, strict=True) for local, what in rows.items()}

    def close(self) -> None:
        """End every worker; kill those that don't close their environments within ``CLOSE_TIMEOUT`` seconds."""
        self._finalizer()

    def _worker_of(self, index: int) -> Worker:
        return next(worker for worker in self._workers if index < worker.first + worker.count)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, file: int | None = None) -> list[Any]:
        """Send the call to all workers, then receive all answers, so that they work in parallel. Any exception ends them."""
        try:
            for index, worker in enumerate(self._workers):
                self._send(worker, method, arguments[index] if arguments else (), file)
            return [self._receive(worker, self.deadline) for worker in self._workers]
        except BaseException:  # an interrupt too: an unread answer would be taken for the next one
            self.close()
            raise

    def _send(self, worker: Worker, method: str, arguments: tuple[Any, ...], file: int | None = None) -> None:
        """Send a call, and an open file if it needs one."""
        try:
            worker.child.connection.send((method, arguments))
            if file is not None:
                reduction.send_handle(worker.child.connection, file, worker.child.process.pid)
        except OSError:
            self._raise_failure(worker)

    def _receive(self, worker: Worker, deadline: float) -> Any:
        try:
            # Each call of an environment has the whole deadline, however many calls one answer needs.
            succeeded, answer, *trace = worker.child.receive(deadline, progress=lambda: tuple(worker.position))
        except ChildEnded:
            self._raise_failure(worker)
        except ChildLate:
            self._raise_failure(worker, deadline)
        if not succeeded:
            self.close()
            error = SurefootError(answer)
            for text in trace:
                error.add_note(text)
            raise error
        return answer

    def _raise_failure(self, worker: Worker, waited: float | None = None) -> NoReturn:
        """End all workers; raise an error for one that ended or did not answer within ``waited`` seconds."""
        position = tuple(worker.position)
        if waited is None:
            what = f"ended its worker process ({worker.child.exit_cause()})"
        else:
            worker.child.process.kill()
            least = f"; at least {START_TIMEOUT} s" if position[1] < 0 else ""
            what = f"did not return within {waited:g} s (rollout.deadline{least})"
        self.close()
        if worker.child.process.returncode == MAIN_REIMPORTED:
            raise SurefootError(
                f"task={self.name!r}: a worker process imports the script that defines it, which started to train again; put "
                "the call under if __name__ == '__main__':, or move the task to its own module"
            )
        if position[0] == NOT_CALLING:
            number = self.first + worker.first
            rows = f"environments {number} to {number + worker.count - 1}"
            what = what.replace("its", "their") + " between two calls"
            raise SurefootError(f"{self.name}: {rows} {what}; resume from the last checkpoint")
        raise SurefootError(environment_failure(self.name, position, what))


def _start(pickled: bytes, name: str, seed: int, numbers: range) -> tuple[Child, Any]:
    """A worker process, and its position."""
    with tempfile.TemporaryFile() as memory:
        os.ftruncate(memory.fileno(), ctypes.sizeof(ctypes.c_longlong) * 3)
        position = position_in(memory.fileno())
        position[:] = NOT_CALLING, -1, -1
        files = (memory.fileno(),)
        try:
            serve = "surefoot.control.environments.worker:serve"
            return Child(serve, *files, pickled, name, seed, numbers, files=files), position
        except OSError as error:  # out of processes
            raise SurefootError(
                f"task={name!r}: a worker process could not be started ({cause_of(error)}); lower rollout.workers, or "
                "set rollout.backend = 'loop'"
            ) from None


def _pickled(task: str | MakeEnvironment, arguments: dict[str, Any], name: str) -> bytes:
    spec = gymnasium.registry.get(task) if isinstance(task, str) and not task.startswith(ATARI) else None
    try:
        return pickle.dumps((task, arguments, spec))
    except Exception as error:
        raise SurefootError(
            f"task={name!r}: can't be sent to a worker process ({cause_of(error)}); define it at the top of a module and name "
            "it module:function, or set rollout.backend = 'loop'"
        ) from None
