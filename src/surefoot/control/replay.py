"""A traced episode, once more: what began it, what led to the traced steps, and whether a replay is the same episode.

Traces of control hold no pictures, and nothing is drawn while an agent learns. But an episode is a function of its seed and
its actions, as exact resume has it; so it can be run again later, and be drawn then. A digest of what was observed in training
tells whether the replay is the episode that was learned from.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from surefoot.control.environments.looped import LoopedEnvironments, episode_seed
from surefoot.control.episodes import Moment
from surefoot.control.spaces import Array, Observations
from surefoot.core.rollout import Rollout
from surefoot.core.traces import TracedRow
from surefoot.errors import SurefootError

LONGEST_LEAD = 20_000
"""steps from a reset to the first traced one, beyond which nothing is noted: a trace would be mostly that"""

NO_ORIGIN = "it does not say how to replay it: of a vector environment, too long after a reset, or of an older version"


class NotTheSameError(SurefootError):
    """A traced episode that can't be replayed, or a replay that came out otherwise."""


@runtime_checkable
class Replayable(Protocol):
    """Environments that are reset with ``episode_seed`` and remember what was done since."""

    def mark(self) -> None:
        """A rollout begins."""
        ...

    def led_to_mark(self, index: int) -> tuple[int, Array]:
        """The episode under way in an environment at the last mark, and its actions up to there, as they were sent."""
        ...


@dataclass(frozen=True)
class Seen:
    """What the last rollout's environments showed, before any normalisation."""

    observations: Observations
    """leaves [B, T, ...]"""
    over: Array
    """[B, T] True where an episode ended; a lost life is no end"""


def origin(
    environments: Any, rollout: Rollout, seen: Seen, row: int, steps: slice, send: Callable[[Tensor], Array], seed: int
) -> dict[str, Any]:
    """Where some steps of a rollout come from, for ``TracedRow.about``; nothing where that can't be replayed.

    episode    which one of its environment
    step       how many steps after the reset the first of these was taken
    seed       that the episode was reset with
    before     the actions that led there, as the environment got them [step, ...]
    observed   SHA-256 of what was observed before each of these steps
    """
    if not isinstance(environments, Replayable):
        return {}
    episode, lead = environments.led_to_mark(row)
    ends = np.flatnonzero(seen.over[row, : steps.start])
    since = int(ends[-1]) + 1 if len(ends) else 0
    before = np.zeros((0, *lead.shape[1:]), lead.dtype) if len(ends) else lead
    if steps.start > since:
        sent = send(rollout.actions[row, since : steps.start].cpu()).astype(lead.dtype)
        before = np.concatenate([before, sent]) if len(before) else sent
    if len(before) > LONGEST_LEAD:
        return {}
    episode += len(ends)
    return {
        "episode": episode,
        "step": len(before),
        "seed": episode_seed(seed, row, episode),
        "before": torch.from_numpy(np.ascontiguousarray(before)),
        "observed": digest({path: leaf[row, steps] for path, leaf in seen.observations.items()}),
    }


def digest(observations: Mapping[str, Array]) -> str:
    """SHA-256 of leaves [T, ...] in hexadecimal digits."""
    total = hashlib.sha256()
    for path, leaf in sorted(observations.items()):
        total.update(f"{path} {leaf.dtype.str} {leaf.shape} ".encode())
        total.update(np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


def replay(row: TracedRow, environments: LoopedEnvironments, send: Callable[[Tensor], Array]) -> Iterator[Moment]:
    """The moments of a traced piece, the environment standing at each: before every step, and after the last.

    environments   one, of the task and seed of the run

    Raises NotTheSameError as soon as it is another episode, in the end at the latest.
    """
    about = row.about
    if "observed" not in about:
        raise NotTheSameError(NO_ORIGIN)
    environments.first, environments.episodes[0] = row.row, about["episode"] - 1
    environments.restart(0)
    first, total, score = about["step"], 0.0, 0.0
    for t, action in enumerate(about["before"].numpy()):
        _, terminated, truncated, score, _ = environments.act(0, action)
        total += score
        if terminated or truncated:
            raise NotTheSameError(f"the replay ended after {t + 1} steps, the episode went on")
    seen: list[Observations] = []
    for t, action in enumerate(send(row.actions)):
        seen.append({path: leaf[0].copy() for path, leaf in environments.observations.items()})
        yield Moment(first + t, None, score, total, False)
        reward, terminated, truncated, score, life_lost = environments.act(0, action)
        total += score
        now = float(np.float32(reward)), terminated or (life_lost and not truncated), truncated
        then = float(row.reward_parts["environment"][t]), bool(row.terminated[t]), bool(row.truncated[t])
        if now != then:
            what = ("reward {:g}, terminated {}, truncated {}".format(*each) for each in (now, then))
            raise NotTheSameError("step {} of the replay gave {}, in training {}".format(first + t + 1, *what))
    if digest({path: np.stack([each[path] for each in seen]) for path in seen[0]}) != about["observed"]:
        raise NotTheSameError("the replay showed other observations than training saw")
    yield Moment(first + len(seen), None, score, total, True)
