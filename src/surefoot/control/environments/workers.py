"""Environments in worker processes, each a loop over a slice of them; the same steps as in one process, to the last bit.

Processes are spawned, never forked: no thread, lock or GPU context of the parent is copied into them. Whatever happens to
one (an exception of any kind, an exit, a signal, no answer), the parent says which environment, episode and step it was,
and ends them all.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, NoReturn

import gymnasium
import numpy as np

from surefoot.control.environments.atari import ATARI
from surefoot.control.environments.faults import at_fault
from surefoot.control.environments.looped import MakeEnvironment, Step, task_name
from surefoot.control.environments.worker import IDLE, IMPORTED_AGAIN, Slice, serve
from surefoot.control.spaces import Array
from surefoot.errors import SurefootError, cause_of
from surefoot.recipes.import_object import python_safe_path

STARTING = 120
"""seconds that a worker may take to start and to import what it needs, at least"""
GRACE = 3
"""seconds that workers get to close their environments"""
LOOK = 0.5
"""seconds between two looks at a worker that is at work"""


@dataclass
class Worker:
    """A process, the pipe to it, and what it is at: environment, episode, step."""

    process: SpawnProcess
    connection: "Connection[Any, Any]"
    place: Any
    first: int
    count: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)


class WorkerEnvironments:
    """B environments in ``workers`` processes, as evenly spread as can be.

    task         a Gymnasium id, ``module:function``, or a callable that another process can import
    deadline     seconds that one call of an environment may take

    Raises SurefootError when the task can't be sent to another process or made there.
    """

    def __init__(
        self,
        task: str | MakeEnvironment,
        arguments: dict[str, Any],
        count: int,
        seed: int,
        workers: int,
        deadline: float,
        purpose: str = "training",
    ) -> None:
        self.count, self.name, self.deadline = count, task_name(task), deadline
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            sys.exit(IMPORTED_AGAIN)  # this is a worker that imports the script that started it; the parent explains
        packed, needs_main = _packed(task, arguments, self.name)
        self._crew: list[Worker] = []
        self._end = Finalize(self, _end, args=(self._crew,), exitpriority=10)  # at the latest when Python exits
        try:
            for rows in np.array_split(np.arange(count), min(workers, count)):
                part = Slice(int(rows[0]), len(rows), seed, self.name, purpose)
                self._crew.append(_start(packed, part, needs_main))
            made = [self._answer(worker, max(deadline, STARTING)) for worker in self._crew]
        except BaseException:
            self.close()
            raise
        self.observation_space: gymnasium.Space[Any] = made[0][0]
        self.action_space: gymnasium.Space[Any] = made[0][1]
        self._seen: list[Any] = [None] * len(self._crew)

    def reset(self) -> Any:
        self._seen = self._all("reset")
        return joined(self._seen)

    def step(self, actions: Array, active: Array | None = None) -> Step:
        parts = [(actions[w.rows], None if active is None else active[w.rows]) for w in self._crew]
        steps: list[Step] = self._all("step", parts)
        self._seen = [step.observations for step in steps]
        return joined_steps(steps, [worker.first for worker in self._crew])

    def mark(self) -> None:
        self._all("mark")

    def led_to_mark(self, index: int) -> tuple[int, Array]:
        _, worker = self._worker_of(index)
        self._tell(worker, "led_to_mark", (index - worker.first,))
        found: tuple[int, Array] = self._answer(worker, self.deadline)
        return found

    def restart(self, index: int) -> tuple[Any, list[int]]:
        number, worker = self._worker_of(index)
        self._tell(worker, "restart", (index - worker.first,))
        self._seen[number], began = self._answer(worker, self.deadline)
        return joined(self._seen), [worker.first + local for local in began]

    def state_dict(self) -> dict[str, Any]:
        """The same as that of one process, so that a run may go on with another number of workers."""
        state: dict[str, Any] = {"episodes": [], "actions": {}}
        parts = self._all("state_dict")
        for worker, part in zip(self._crew, parts, strict=True):
            state["episodes"] += part["episodes"]
            state["actions"] |= {str(worker.first + int(local)): log for local, log in part["actions"].items()}
        return state | {"observations": joined([part["observations"] for part in parts])}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Any, list[int]]:
        if "episodes" not in state:  # a vector environment's
            return self.reset(), list(range(self.count))
        if len(state["episodes"]) != self.count:
            raise SurefootError(
                f"rollout.environments={self.count}: the checkpoint has {len(state['episodes'])} environments; set that many"
            )
        answers = self._all("load_state_dict", [(_part(state, worker),) for worker in self._crew])
        self._seen = [seen for seen, _ in answers]
        lost = [w.first + local for w, (_, lost) in zip(self._crew, answers, strict=True) for local in lost]
        return joined(self._seen), lost

    def close(self) -> None:
        """End every worker; one that does not close its environments within seconds is killed."""
        self._end()

    def _worker_of(self, index: int) -> tuple[int, Worker]:
        return next((i, worker) for i, worker in enumerate(self._crew) if index < worker.first + worker.count)

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Tell all, then hear all: they work at the same time. Whatever cuts this short ends them."""
        try:
            for index, worker in enumerate(self._crew):
                self._tell(worker, method, arguments[index] if arguments else ())
            return [self._answer(worker, self.deadline) for worker in self._crew]
        except BaseException:  # an interrupt too: an answer that nobody heard would be taken for the next one
            self.close()
            raise

    def _tell(self, worker: Worker, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            worker.connection.send((method, arguments))
        except OSError:
            self._lost(worker)

    def _answer(self, worker: Worker, deadline: float) -> Any:
        at, since = None, time.monotonic()
        try:
            while not worker.connection.poll(min(LOOK, deadline / 4)):
                # Each call of an environment has the whole deadline, however many there are in an answer.
                before, at = at, tuple(worker.place)
                if at != before:
                    since = time.monotonic()
                elif time.monotonic() - since > deadline:
                    self._lost(worker, deadline)
            done, answer, *trace = worker.connection.recv()
        except (EOFError, OSError):
            self._lost(worker)
        if not done:
            self.close()
            error = SurefootError(answer)
            for text in trace:
                error.add_note(text)
            raise error
        return answer

    def _lost(self, worker: Worker, waited: float | None = None) -> NoReturn:
        """Say what became of a worker that ended, or did not answer in time, once none is left."""
        place = tuple(worker.place)
        if waited is None:
            worker.process.join(GRACE)
            what = f"ended its worker process ({_exit(worker.process.exitcode)})"
        else:
            worker.process.kill()
            least = f"; {STARTING} s at least" if place[1] < 0 else ""
            what = f"did not come back within {waited:g} s (rollout.deadline{least})"
        self.close()
        if worker.process.exitcode == IMPORTED_AGAIN:
            raise SurefootError(
                f"task={self.name!r}: a worker process imports the script that defines it, which began to train again; put the "
                "call under if __name__ == '__main__':, or the task in a module of its own"
            )
        if place[0] == IDLE:
            who = f"environments {worker.first} to {worker.first + worker.count - 1}"
            happened = what.replace("its", "their") + " while none of them was called"
            raise SurefootError(f"{self.name}: {who} {happened}; resume from the last checkpoint")
        raise SurefootError(at_fault(self.name, place, what))


def _start(packed: bytes, part: Slice, needs_main: bool) -> Worker:
    context = multiprocessing.get_context("spawn")
    place = RawArray(ctypes.c_longlong, [IDLE, -1, -1])
    ours, theirs = context.Pipe()
    # The kernel counts the end of the thread that started a process as the end of its parent.
    with_us = threading.current_thread() is threading.main_thread()
    process = context.Process(target=serve, args=(theirs, place, packed, part, with_us), name=f"surefoot-{part.first}")
    try:
        with python_safe_path(), _interrupts_held(), contextlib.nullcontext() if needs_main else _main_hidden():
            process.start()
    except (OSError, AssertionError) as error:  # no more processes; a daemon may have none
        ours.close()
        raise SurefootError(
            f"task={part.name!r}: a worker process could not be started ({cause_of(error)}); set rollout.workers lower, or "
            "rollout.backend = 'loop'"
        ) from None
    finally:
        theirs.close()
    return Worker(process, ours, place, part.first, part.count)


def _end(crew: list[Worker]) -> None:
    """Close every pipe, which a worker takes for the end, and wait; kill what is still there."""
    for worker in crew:
        worker.connection.close()
    until = time.monotonic() + GRACE
    try:
        for worker in crew:
            worker.process.join(max(0.0, until - time.monotonic()))
    finally:  # after a Ctrl-C, too
        for worker in crew:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()


def _exit(code: int | None) -> str:
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name


def _packed(task: str | MakeEnvironment, arguments: dict[str, Any], name: str) -> tuple[bytes, bool]:
    """The task as bytes, and whether a worker must import the main script to understand them."""
    spec = gymnasium.registry.get(task) if isinstance(task, str) and not task.startswith(ATARI) else None
    with contextlib.suppress(Exception), _main_hidden():
        return pickle.dumps((task, arguments, spec)), False
    try:
        return pickle.dumps((task, arguments, spec)), True
    except Exception as error:
        raise SurefootError(
            f"task={name!r}: can't be sent to a worker process ({cause_of(error)}); define it at the top of a module and name "
            "it module:function, or set rollout.backend = 'loop'"
        ) from None


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """A worker that does not need the user's script is not made to import it: a script without a guard stays harmless."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A worker begins with SIGINT blocked, until it has said that it ignores it; a Ctrl-C meanwhile reaches us after."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- slices of B and back -----------------------------------------------------------------------------------------------


def joined(parts: Sequence[Any]) -> Any:
    """Arrays [b, ...] of every slice as one [B, ...]; dicts of arrays leaf by leaf; None stays None."""
    if isinstance(parts[0], dict):
        return {name: joined([part[name] for part in parts]) for name in parts[0]}
    return None if parts[0] is None else np.concatenate(parts)


def joined_steps(steps: Sequence[Step], firsts: Sequence[int]) -> Step:
    """The steps of every slice as one, environments counted from the first slice's."""
    whole: dict[str, Any] = {
        field.name: joined([getattr(step, field.name) for step in steps])
        for field in fields(Step)
        if field.name != "final_observations"
    }
    finals = {
        first + index: final
        for step, first in zip(steps, firsts, strict=True)
        for index, final in step.final_observations.items()
    }
    return Step(**whole, final_observations=finals)


def _part(state: dict[str, Any], worker: Worker) -> dict[str, Any]:
    """A worker's share of a state, as arrays: a tensor would make it import torch."""
    logs = {index - worker.first: state["actions"].get(str(index)) for index in range(worker.rows.start, worker.rows.stop)}
    return {
        "episodes": list(state["episodes"][worker.rows]),
        "actions": {str(local): np.asarray(log) for local, log in logs.items() if log is not None},
        "observations": _each(state["observations"], lambda leaf: np.asarray(leaf)[worker.rows]),
    }


def _each(tree: Any, function: Callable[[Any], Any]) -> Any:
    return {name: _each(below, function) for name, below in tree.items()} if isinstance(tree, dict) else function(tree)
