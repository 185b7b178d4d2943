"""The recent episodes of a run, and the metrics that they make."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from surefoot.control.environments.observations import SUCCESS, mean_numbers
from surefoot.core.rollout import Metrics
from surefoot.errors import SurefootError, did_you_mean
from surefoot.ranks.collectives import exchange

RECENT_EPISODES = 100
"""episodes whose mean return and length are reported"""
Episode = tuple[float, int, dict[str, float]]
"""return, length and numbers in the last info"""


class EpisodeLog:
    """The recent episodes of all ranks.

    task    in errors
    first   the number of this rank's first environment
    names   ``rollout.info`` of the recipe
    more    names of numbers that some episodes have: the returns of single agents
    """

    def __init__(self, task: str, first: int, names: tuple[str, ...] | None, more: tuple[str, ...] = ()) -> None:
        self.task, self.first, self.names, self.more = task, first, names, more
        self.finished: deque[Episode] = deque(maxlen=RECENT_EPISODES)
        """the recent episodes of all ranks"""
        self.finished_count = 0
        self.ended: list[tuple[int, int, Episode]] = []
        """the episodes of this rank that are not in ``finished`` yet, with the step and environment where they ended"""
        self.uncounted = 0
        """episodes of this rank that ended before those in ``ended`` and are too many to be recent"""

    def add(self, step: int, index: int, total: float, length: int, numbers: Mapping[str, float]) -> None:
        """An episode of this rank that ended at a step of the run in the environment ``index``."""
        episode = total, length, self._chosen(numbers, index)
        self.ended.append((step, self.first + index, episode))

    def exchange(self) -> None:
        """Add the episodes that have ended on all ranks to the recent ones, in the order in which they ended."""
        parts = exchange((self.ended, self.uncounted))
        ended = sorted((row for rows, _ in parts for row in rows), key=lambda row: row[:2])
        self.finished.extend(episode for _, _, episode in ended)
        self.finished_count += len(ended) + sum(uncounted for _, uncounted in parts)
        self.ended, self.uncounted = [], 0

    def _chosen(self, numbers: Mapping[str, float], index: int) -> dict[str, float]:
        """The numbers of an episode that become metrics. Raises SurefootError if the recipe names one that is missing."""
        names = self.names
        missing = [name for name in names or () if name not in numbers]
        if missing:
            raise SurefootError(
                f"rollout.info={list(names or ())}: {self.task} has no number {missing[0]!r} in the info of an "
                f"episode's last step (environment {self.first + index}){did_you_mean(missing[0], numbers)} "
                f"(numbers there: {', '.join(map(repr, numbers)) or 'none'})"
            )
        return {name: numbers[name] for name in (*(SUCCESS if names is None else names), *self.more) if name in numbers}

    def metrics(self) -> Metrics:
        """Means over the recent episodes, and the number of all."""
        returns = [row[0] for row in self.finished]
        lengths = [row[1] for row in self.finished]
        numbers = mean_numbers((row[2] for row in self.finished), self.names, self.more)
        return {
            "episode_return": float(np.mean(returns)) if returns else None,
            "episode_length": float(np.mean(lengths)) if lengths else None,
            "episodes": float(self.finished_count),
            **{f"episode_{name}": mean for name, mean in numbers.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """The recent episodes and the number of all."""
        return {"finished": [list(row) for row in self.finished], "finished_count": self.finished_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        rows = ((float(r), int(n), dict(numbers)) for r, n, numbers in state["finished"])
        self.finished = deque(rows, maxlen=RECENT_EPISODES)
        self.finished_count = state["finished_count"]
