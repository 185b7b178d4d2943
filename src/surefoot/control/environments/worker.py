"""The worker process: it makes a slice of the environments and answers the calls of its parent.

It needs no torch. It answers calls over a pipe and ends when the pipe closes, whether the parent closed it or died. It ignores
Ctrl-C, SIGTERM and the other signals that stop a run, so that the parent can finish the iteration and save.
"""

import contextlib
import ctypes
import mmap
import os
import pickle
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import gymnasium

from surefoot.control.environments import make_environments, maker
from surefoot.control.environments.looped import LoopedEnvironments
from surefoot.control.environments.observations import environment_failure
from surefoot.control.environments.slices import arrays_of, by_environment, mapped
from surefoot.control.spaces import Array
from surefoot.errors import SurefootError, cause_of, place_of
from surefoot.processes import let_in
from surefoot.signals import STOPPING

NOT_CALLING = -1
"""in place of an environment's index: no environment is being called"""
SPIN_SECONDS = 3e-3
"""seconds that a worker waits for the next call before it sleeps: longer than most policies take to act"""
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def position_in(file: int) -> Any:
    """Environment, episode and step of the call in progress, in memory that parent and worker share."""
    place = ctypes.c_longlong * 3
    return place.from_buffer(mmap.mmap(file, ctypes.sizeof(place)))


def serve(connection: "Connection[Any, Any]", memory: int, task: bytes, name: str, seed: int, numbers: range) -> None:
    """Make the environments, then answer (method, arguments) until the pipe closes.

    memory   the file of ``position_in``
    task     pickled (task, arguments, Gymnasium's spec if the task is an id)
    numbers  of its environments

    An answer is (True, result) or (False, one line, traceback). After "share" a step is written into common memory, and its
    answer is what maps an environment's index to a value.
    """
    let_in(*STOPPING)
    position = position_in(memory)
    environments: LoopedEnvironments | None = None
    arrays: dict[str, Array] = {}
    method = "make"
    arguments: tuple[Any, ...] = ()
    answer: tuple[Any, ...]
    while True:
        try:
            if environments is None:
                environments = _make(task, name, seed, numbers, position)
                answer = True, (environments.observation_space, environments.action_space)
            elif method == "share":
                layout, rows = arguments
                arrays = {name: x[rows] for name, x in mapped(layout, reduction.recv_handle(connection)).items()}
                answer = True, None
            elif method == "step" and arrays:
                step = environments.step(*arguments)
                for part, array in arrays_of(step).items():
                    arrays[part][:] = array
                answer = True, by_environment(step)
            else:
                answer = True, getattr(environments, method)(*arguments)
        except SurefootError as error:
            answer = False, str(error), "".join(traceback.format_exception(error))
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: no exception of an environment ends the process
            line = environment_failure(name, position, f"raised {cause_of(error)}", line=place_of(error))
            answer = False, line, "".join(traceback.format_exception(error))
        position[0] = NOT_CALLING
        try:
            connection.send(answer)
            _await_call(connection)
            method, arguments = connection.recv()
        except (EOFError, OSError):
            break
        except Exception as error:  # an answer that can't be pickled
            what = f"{name}: its environments returned what can't be sent to another process ({cause_of(error)})"
            connection.send((False, what))
            break
    if environments is not None:
        with contextlib.suppress(BaseException):
            environments.close()


def _await_call(connection: "Connection[Any, Any]") -> None:
    """Wait a moment for the next call without sleeping, because waking up takes time at every step."""
    until = time.perf_counter() + SPIN_SECONDS
    while not connection.poll(0) and time.perf_counter() < until:
        _yield_core()


def _make(pickled: bytes, name: str, seed: int, numbers: range, position: Any) -> LoopedEnvironments:
    try:
        task, arguments, spec = pickle.loads(pickled)
    except Exception as error:
        raise SurefootError(
            f"task={name!r}: can't be imported by a worker process ({cause_of(error)}); define it at the top of its "
            "own module, or set rollout.backend = 'loop'"
        ) from None
    make_one = maker(task, arguments)
    if spec is not None and task not in gymnasium.registry:  # registered by the program, not by a package
        make_one = partial(gymnasium.make, spec, disable_env_checker=True, **arguments)

    def make() -> Any:
        position[0] = numbers.start if position[0] == NOT_CALLING else position[0] + 1
        return make_one()

    make.__name__ = name
    made = make_environments(make, {}, len(numbers), seed)
    if not isinstance(made, LoopedEnvironments):
        raise SurefootError(
            f"task={name!r}: makes a vector environment, but worker processes need single ones; set rollout.backend = 'loop'"
        )
    made.first, made.position = numbers.start, position
    return made
