"""Replay traced episodes: record where traced steps come from, repeat them later, and check that the replay is the same.

Traces contain no frames, and training renders nothing. An episode is a function of its seed and actions, so it can be
replayed and rendered later. A digest of the observations in training shows whether the replay is the same episode.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.control.environments.looped import LoopedEnvironments, episode_seed
from surefoot.control.evaluate import EpisodeStep
from surefoot.control.spaces import Array, Observations
from surefoot.core.rollout import Rollout
from surefoot.core.seeding import fingerprint
from surefoot.core.traces import TracedRow
from surefoot.errors import SurefootError

MAX_ACTIONS_BEFORE = 20_000
"""largest number of actions before the first traced step that a trace keeps"""

NOT_REPLAYABLE = "it can't be replayed: it is from a vector environment or of several agents, or too long after a reset"


class ReplayMismatchError(SurefootError):
    """A traced episode can't be replayed, or its replay differs."""


@dataclass(frozen=True)
class RawRollout:
    """The last rollout before normalisation."""

    observations: Observations
    """parts [B, T, ...]"""
    done: Array
    """[B, T] True where an episode ended; a lost life does not end one"""


def origin(
    environments: Any, rollout: Rollout, raw: RawRollout, row: int, steps: slice, send: Callable[[Tensor], Array], seed: int
) -> dict[str, Any]:
    """How to replay some steps of a rollout, for ``TracedRow.about``; empty if they can't be replayed.

    episode    number of the episode in its environment
    step       number of steps between the reset and the first of these
    seed       the episode's seed
    before     the actions sent to the environment before that [step, ...]
    observed   the fingerprint of the observations before each of these steps
    """
    if not hasattr(environments, "actions_before_mark"):
        return {}
    episode, lead = environments.actions_before_mark(row)
    ends = np.flatnonzero(raw.done[row, : steps.start])
    since = int(ends[-1]) + 1 if len(ends) else 0
    before = np.zeros((0, *lead.shape[1:]), lead.dtype) if len(ends) else lead
    if steps.start > since:
        sent = send(rollout.actions[row, since : steps.start].cpu()).astype(lead.dtype)
        before = np.concatenate([before, sent]) if len(before) else sent
    if len(before) > MAX_ACTIONS_BEFORE:
        return {}
    episode += len(ends)
    return {
        "episode": episode,
        "step": len(before),
        "seed": episode_seed(seed, row, episode),
        "before": torch.from_numpy(np.ascontiguousarray(before)),
        "observed": fingerprint({path: part[row, steps] for path, part in raw.observations.items()}),
    }


def replay(row: TracedRow, environments: LoopedEnvironments, send: Callable[[Tensor], Array]) -> Iterator[EpisodeStep]:
    """Replay traced steps: yield before every step and after the last, while the environment is in that state.

    environments   one, with the task and seed of the run

    Raises ReplayMismatchError as soon as the replay differs; at the latest after the last step.
    """
    about = row.about
    if "observed" not in about:
        raise ReplayMismatchError(NOT_REPLAYABLE)
    environments.first = row.row
    environments.begin(0, about["episode"])
    first, total, score = about["step"], 0.0, 0.0
    for t, action in enumerate(about["before"].numpy()):
        _, terminated, truncated, score, *_ = environments.act(0, action)
        total += score
        if terminated or truncated:
            raise ReplayMismatchError(f"the replay ended after {t + 1} steps, the episode continued in training")
    observations: list[Observations] = []
    for t, action in enumerate(send(row.actions)):
        observations.append({path: part[0].copy() for path, part in environments.observations.items()})
        yield EpisodeStep(first + t, None, score, total, False)
        reward, terminated, truncated, score, life_lost, _ = environments.act(0, action)
        total += score
        now = float(np.float32(reward)), terminated or (life_lost and not truncated), truncated
        before = float(row.reward_parts["environment"][t]), bool(row.terminated[t]), bool(row.truncated[t])
        if now != before:
            what = ("reward {:g}, terminated {}, truncated {}".format(*each) for each in (now, before))
            raise ReplayMismatchError("step {} of the replay gave {}, in training {}".format(first + t + 1, *what))
    if fingerprint({path: np.stack([each[path] for each in observations]) for path in observations[0]}) != about["observed"]:
        raise ReplayMismatchError("the observations of the replay differ from those in training")
    yield EpisodeStep(first + len(observations), None, score, total, True)
