"""Surefoot: policy-gradient learning, from REINFORCE to PPO, for agents and language models.

    agent = surefoot.train("CartPole-v1", surefoot.PPO_CLIP, steps=100_000, seed=1)

The public names are listed in ``__all__``; ``surefoot.functional`` holds the formulas.
"""

import sys

if sys.platform == "win32":
    raise ImportError("surefoot runs on Linux and macOS, not on Windows; install it in WSL 2, the Linux of Windows")

if sys.argv[:1] == ["-m"] and sys.orig_argv[1:3] == ["-m", "surefoot"] and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, which may be a stranger's; see surefoot.recipes.callables
if (sys.orig_argv[1:2] or [""])[0].endswith("/surefoot") or sys.orig_argv[1:3] == ["-m", "surefoot"]:
    import signal  # Ctrl-C during the imports ends the command without a traceback; main handles it from then on

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import importlib
from typing import TYPE_CHECKING, Any

from surefoot.core.algorithms import (
    A2C,
    ACTOR_CRITIC,
    ALGORITHMS,
    CISPO,
    DAPO,
    DR_GRPO,
    GRPO,
    GSPO,
    KL_COV,
    LADDER,
    ONLINE_DPO,
    PPO_CLIP,
    PPO_PENALTY,
    PPO_PENALTY_ADAPTIVE,
    PPO_UNCLIPPED,
    REINFORCE,
    REINFORCE_BASELINE,
    REINFORCE_PLUS_PLUS,
    RLOO,
    TRPO,
    Clip,
    ClippedWeight,
    Constraint,
    Objective,
    Penalty,
    Reuse,
)
from surefoot.errors import Interrupted, NotFiniteError, SurefootError

if TYPE_CHECKING:
    from surefoot import functional
    from surefoot.control.agent import Agent
    from surefoot.control.evaluate import EvaluationResult
    from surefoot.core.rollout import Credit, Rollout
    from surefoot.core.traces import Trace, TracedRow, Visits
    from surefoot.runs.api import evaluate, load, resume, train
    from surefoot.runs.callbacks import Callback, Run
    from surefoot.runs.loop import Loop
    from surefoot.store.traces import read_trace

__version__ = "0.1.0"

# Imported at first use: they need torch, which takes seconds, and `surefoot --help` should not.
_LATER = {
    name: f"surefoot.{module}"
    for module, names in {
        "runs.api": ("train", "resume", "load", "evaluate"),
        "runs.callbacks": ("Callback", "Run"),
        "runs.loop": ("Loop",),
        "core.rollout": ("Credit", "Rollout"),
        "control.agent": ("Agent",),
        "control.evaluate": ("EvaluationResult",),
        "store.traces": ("read_trace",),
        "core.traces": ("Trace", "TracedRow", "Visits"),
        "functional": ("functional",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    return module if name == "functional" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


__all__ = [
    "A2C",
    "ACTOR_CRITIC",
    "ALGORITHMS",
    "CISPO",
    "DAPO",
    "DR_GRPO",
    "GRPO",
    "GSPO",
    "KL_COV",
    "LADDER",
    "ONLINE_DPO",
    "PPO_CLIP",
    "PPO_PENALTY",
    "PPO_PENALTY_ADAPTIVE",
    "PPO_UNCLIPPED",
    "REINFORCE",
    "REINFORCE_BASELINE",
    "REINFORCE_PLUS_PLUS",
    "RLOO",
    "TRPO",
    "Agent",
    "Callback",
    "Clip",
    "ClippedWeight",
    "Constraint",
    "Credit",
    "EvaluationResult",
    "Interrupted",
    "Loop",
    "NotFiniteError",
    "Objective",
    "Penalty",
    "Reuse",
    "Rollout",
    "Run",
    "SurefootError",
    "Trace",
    "TracedRow",
    "Visits",
    "evaluate",
    "functional",
    "load",
    "read_trace",
    "resume",
    "train",
]
