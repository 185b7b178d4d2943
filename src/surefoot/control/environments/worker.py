"""What runs in a worker process: a slice of the environments, doing what it is told over a pipe, answer by answer.

It ends when the pipe does: closed by the parent, or because the parent is no more, however it died. Ctrl-C and SIGTERM are
the parent's to answer, so that it can finish the iteration and save. No torch is needed here.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import gymnasium

from surefoot.control.environments.faults import at_fault
from surefoot.control.environments.looped import LoopedEnvironments, MakeEnvironment, make_environments, maker
from surefoot.errors import SurefootError, cause_of, place_of
from surefoot.recipes.import_object import unset_python_safe_path

IDLE = -1
"""in place of an environment's number: none is being called"""
IMPORTED_AGAIN = 81
"""exit code of a worker in which the user's script began to train once more"""


@dataclass(frozen=True)
class Slice:
    """Which environments a worker makes."""

    first: int
    count: int
    seed: int
    name: str
    purpose: str


def serve(connection: "Connection[Any, Any]", place: Any, task: bytes, part: Slice, kill_with_parent: bool) -> None:
    """Make the environments, then answer (method, arguments) until the pipe ends.

    place    shared with the parent: environment, episode and step of the call in progress, should it never return
    task     pickled (task, arguments, Gymnasium's spec of an id)

    An answer is (True, result) or (False, one line, traceback).
    """
    unset_python_safe_path()
    _stay_until_the_parent_ends(kill_with_parent)
    environments: LoopedEnvironments | None = None
    method, arguments = "make", ()
    answer: tuple[Any, ...]
    while True:
        try:
            if environments is None:
                environments = _make(task, part, place)
                answer = True, (environments.observation_space, environments.action_space)
            else:
                answer = True, getattr(environments, method)(*arguments)
        except SurefootError as error:
            answer = False, str(error), "".join(traceback.format_exception(error))
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: what an environment raises ends no process
            line = at_fault(part.name, place, f"raised {cause_of(error)}", part.purpose, place_of(error))
            answer = False, line, "".join(traceback.format_exception(error))
        place[0] = IDLE
        try:
            connection.send(answer)
            method, arguments = connection.recv()
        except (EOFError, OSError):
            break
        except Exception as error:  # an answer that can't be pickled
            connection.send((False, f"{part.name}: what its environments gave can't leave their process ({cause_of(error)})"))
            break
    if environments is not None:
        with contextlib.suppress(BaseException):
            environments.close()


def _make(packed: bytes, part: Slice, place: Any) -> LoopedEnvironments:
    try:
        task, arguments, spec = pickle.loads(packed)
    except Exception as error:
        raise SurefootError(
            f"task={part.name!r}: can't be imported by a worker process ({cause_of(error)}); define it at the top of a module "
            "of its own, or set rollout.backend = 'loop'"
        ) from None
    place[:] = IDLE, -1, -1
    make_one = maker(task, arguments, part.purpose)
    if spec is not None and task not in gymnasium.registry:  # an id that was registered by the program, not by a package
        make_one = partial(gymnasium.make, spec, disable_env_checker=True, **arguments)

    def make() -> Any:
        place[0] = part.first if place[0] == IDLE else place[0] + 1
        return make_one()

    make.__name__ = part.name
    made = make_environments(make, {}, part.count, part.seed, part.purpose)
    if not isinstance(made, LoopedEnvironments):
        raise SurefootError(
            f"task={part.name!r}: makes a vector environment, and worker processes need single ones; set "
            "rollout.backend = 'loop' for it"
        )
    made.first, made.place = part.first, place
    return made


def _stay_until_the_parent_ends(kill_with_parent: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # the parent started this process with SIGINT blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if kill_with_parent and sys.platform == "linux":
        # What hangs in C code without letting go of the interpreter ends with the parent too: prctl(PR_SET_PDEATHSIG).
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    threading.Thread(target=_follow_the_parent, daemon=True).start()


def _follow_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has been started by someone"
    parent.join()
    os._exit(1)


__all__ = ["IDLE", "IMPORTED_AGAIN", "MakeEnvironment", "Slice", "serve"]
