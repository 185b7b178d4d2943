"""MuJoCo's warnings go to Python's logging, each once; by itself it prints every one and leaves a MUJOCO_LOG.TXT behind."""

import importlib
import logging
import re
import sys
from typing import Any

import gymnasium

LOGGER = logging.getLogger("surefoot.mujoco")
_heard: set[str] = set()


def mujoco_to_logging(task: Any) -> None:
    """Listen from now on, where ``task`` is an id of Gymnasium's MuJoCo environments or something has imported mujoco."""
    spec = gymnasium.registry.get(task) if isinstance(task, str) else None
    if spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs.mujoco."):
        try:
            importlib.import_module("mujoco")
        except ImportError:
            return  # making the environment says what to install
    module: Any = sys.modules.get("mujoco")
    if hasattr(module, "get_mju_user_warning") and module.get_mju_user_warning() is None:
        module.set_mju_user_warning(_hear)


def _hear(message: str) -> None:
    """Each message once, whatever its numbers are; what only the model's author can mend is for those who debug."""
    kind = re.sub(r"[\d.]+", "#", message)
    if kind not in _heard:
        _heard.add(kind)
        LOGGER.log(logging.DEBUG if "deprecated" in message else logging.WARNING, "MuJoCo: %s", message)
