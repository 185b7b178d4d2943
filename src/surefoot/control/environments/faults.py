"""What is said of environments that can't be made, or fail: one line, which of them, in which call, and what to do."""

from typing import Any

import gymnasium
from gymnasium.envs.registration import find_highest_version

from surefoot.errors import SurefootError, cause_of, place_of, to_install

GO_ON = "resume the run, or repeat the command"
"""after a fault in an evaluation, which belongs to either"""


def at_fault(name: str, place: Any, what: str, purpose: str = "training", line: str = "") -> str:
    """One line: which environment, what happened to it, in which call.

    place   environment, episode (-1 while it is made) and step (0 in a reset)
    line    of the user's code, where one is known

    In training nothing can have been saved before an environment's first reset, so there is nothing to resume from.
    """
    environment, episode, step = place
    where = "while it was made" if episode < 0 else f"in {'step()' if step else 'reset()'}, episode {episode}, step {step}"
    mend = f"mend the environment{f' ({line})' if line else ''}"
    if purpose == "evaluation":
        return f"{name}: environment {environment} of the evaluation {what} {where}; {mend}, then {GO_ON}"
    then = ", then resume from the last checkpoint" if episode > 0 or step else ""
    return f"{name}: environment {environment} {what} {where}; {mend}{then}"


def making_failed(name: str, error: Exception) -> SurefootError:
    """One line for an environment that could not be made; names the extra where a package is missing."""
    extras = {"mujoco": "mujoco", "box2d": "box2d", "ale_py": "atari", "ale-py": "atari", "opencv": "atari"}
    text = str(error).replace("\n", " ")
    stem = name.rpartition("-v")[0]
    if text.startswith("The mujoco v2 and v3") and stem:  # Gymnasium lists them, and no longer has them
        return SurefootError(f"task={name!r}: is no longer in Gymnasium; take '{stem}-v{find_highest_version(None, stem)}'")
    if isinstance(error, (gymnasium.error.DependencyNotInstalled, ImportError)):
        extra = next((value for key, value in extras.items() if key in text.lower()), None)
        if extra:
            return SurefootError(f"task={name!r}: needs an extra that is not installed; run: {to_install(extra)}")
    line = f"; mend it ({where})" if (where := place_of(error)) else ""
    return SurefootError(f"task={name!r}: could not be made ({cause_of(error)}){line}")
