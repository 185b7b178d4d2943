"""What a vector environment says of itself: how it resets, checked against what it does, and what its infos add to a step."""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from surefoot.errors import SurefootError

Array = NDArray[Any]
SAID = "surefoot"
"""the key of a step's ``info`` under which an environment may say {"score": number, "life_lost": bool}; see ``Step``"""


def check_complete(environments: VectorEnv[Any, Any, Any], name: str) -> None:
    """Raise SurefootError for a vector environment without what Gymnasium's interface promises: the class itself sets none."""
    lacking = [
        part for part in ("num_envs", "single_observation_space", "single_action_space") if not hasattr(environments, part)
    ]
    if lacking:
        kind = type(environments).__name__
        raise SurefootError(
            f"task={name!r}: made a vector environment ({kind}) without {' and '.join(lacking)}, which Gymnasium's interface "
            "has; set them, or make single environments (gymnasium.Env)"
        )


def stated_mode(environments: VectorEnv[Any, Any, Any], name: str) -> AutoresetMode:
    """The autoreset mode in a vector environment's metadata.

    Raises SurefootError when there is none, or when its sub-environments state others: rows that reset differently would
    be read wrongly, and episodes joined that are none.
    """
    stated = environments.metadata.get("autoreset_mode")
    try:
        mode = AutoresetMode(stated)
    except ValueError:
        raise SurefootError(
            f"task={name!r}: metadata['autoreset_mode']={stated!r} of this vector environment is no autoreset mode; set it to "
            f"what it does, one of {', '.join(f'AutoresetMode.{known.name}' for known in AutoresetMode)}"
        ) from None
    inner = {index: row["autoreset_mode"] for index, row in enumerate(_metadata(environments)) if "autoreset_mode" in row}
    others = [f"{index} {getattr(value, 'name', value)}" for index, value in inner.items() if value != mode]
    if others:
        raise SurefootError(
            f"task={name!r}: mixed autoreset modes: the vector environment says {mode.name}, its environments "
            f"{', '.join(others)}; make them all reset in one way"
        )
    return mode


def _metadata(environments: VectorEnv[Any, Any, Any]) -> list[dict[str, Any]]:
    """Of the environments inside, where the vector environment can be asked (Gymnasium's own can)."""
    ask = getattr(environments.unwrapped, "get_attr", None)
    return [] if ask is None else [row for row in ask("metadata") if isinstance(row, dict)]


def check_infos(mode: AutoresetMode, ended: Array, resetting: Array, infos: dict[str, Any], name: str) -> None:
    """Raise SurefootError where a step shows that rows don't reset as the vector environment's metadata says.

    ended        [B] rows that say terminated or truncated
    resetting    [B] rows that ended one step ago, which a NEXT_STEP environment uses to reset
    """
    final = infos.get("final_obs")
    given = np.zeros(len(ended), bool) if final is None else np.array(infos.get("_final_obs", [x is not None for x in final]))
    if mode is AutoresetMode.SAME_STEP:
        wrong, what = ended & ~given, "ended without info['final_obs']"
    elif given.any():
        wrong, what = given, "gave info['final_obs'], as in SAME_STEP"
    elif mode is AutoresetMode.NEXT_STEP:
        wrong, what = ended & resetting, "ended again in the step that should have reset them"
    else:
        return
    if wrong.any():
        raise SurefootError(
            f"task={name!r}: mixed autoreset modes: the vector environment says {mode.name}, but its environments "
            f"{np.flatnonzero(wrong).tolist()} {what}; make metadata['autoreset_mode'] say what all of them do"
        )


def said(infos: dict[str, Any], key: str, otherwise: Array) -> Array:
    """[B] what environments said under ``info["surefoot"][key]``, and ``otherwise`` where one said nothing.

    In SAME_STEP, what the last step of an episode said is in ``infos["final_info"]``.
    """
    result = otherwise.copy()
    for source in (infos, infos.get("final_info", {})):
        found = source.get(SAID, {})
        if key in found:
            rows = np.asarray(found.get(f"_{key}", np.ones(len(result), bool)))
            result[rows] = np.asarray(found[key])[rows]
    return result
