"""The staircase in plain Python, from the definitions and one row at a time: what the vectorised functions must equal.

Nothing here is recursive where the functions are, and nothing here imports them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

Numbers = Sequence[float]


@dataclass(frozen=True)
class Row:
    """One environment or response: T steps."""

    rewards: Numbers
    values: Numbers
    next_values: Numbers
    terminated: Sequence[bool]
    truncated: Sequence[bool]
    mask: Sequence[bool]

    def ended(self, t: int) -> bool:
        return bool(self.terminated[t] or self.truncated[t])

    def steps_from(self, t: int) -> list[int]:
        """The kept steps from t to where the episode, the trace or the batch ends; empty where t is masked."""
        if not self.mask[t]:
            return []
        steps = []
        for s in range(t, len(self.rewards)):
            if self.mask[s]:
                steps.append(s)
                if self.ended(s):
                    break
        return steps


def td_residual(row: Row, t: int, gamma: float) -> float:
    to_come = 0.0 if row.terminated[t] else gamma * row.next_values[t]
    return row.rewards[t] + to_come - row.values[t]


def n_step_advantage(row: Row, t: int, gamma: float, n: int) -> float:
    return sum(gamma**k * td_residual(row, s, gamma) for k, s in enumerate(row.steps_from(t)[:n]))


def lambda_mix(row: Row, t: int, gamma: float, lam: float) -> float:
    """(1−λ) Σ_{n<N} λ^{n−1} Â^{(n)} + λ^{N−1} Â^{(N)}, with N the steps to the cut."""
    steps = len(row.steps_from(t))
    if steps == 0:
        return 0.0
    mix = (1 - lam) * sum(lam ** (n - 1) * n_step_advantage(row, t, gamma, n) for n in range(1, steps))
    return mix + lam ** (steps - 1) * n_step_advantage(row, t, gamma, steps)


def discounted_return(row: Row, t: int, gamma: float) -> float:
    """Σ γ^k r_{t+k}, and γ^N V of the successor where the trace or the batch was cut."""
    steps = row.steps_from(t)
    if not steps:
        return 0.0
    total = sum(gamma**k * row.rewards[s] for k, s in enumerate(steps))
    cut = steps[-1]
    return total if row.terminated[cut] else total + gamma ** len(steps) * row.next_values[cut]


def successors(
    values: Numbers,
    last_value: float,
    mask: Sequence[bool],
    truncated: Sequence[bool] | None = None,
    final_values: Numbers | None = None,
) -> list[float]:
    """V of the true successor of every kept step; NaN at the others, where nothing is promised."""
    result = []
    for t in range(len(values)):
        if not mask[t]:
            result.append(nan)
        elif truncated is not None and truncated[t]:
            if final_values is not None:
                result.append(final_values[t])
            else:
                result.append(values[t + 1] if t + 1 < len(values) else last_value)
        else:
            kept_after = [values[s] for s in range(t + 1, len(values)) if mask[s]]
            result.append(kept_after[0] if kept_after else last_value)
    return result
