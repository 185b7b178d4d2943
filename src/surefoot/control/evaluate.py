"""How good an agent is: whole episodes, each from its own seed, with the normalisers frozen."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from surefoot.control.agent import Agent, remembering
from surefoot.control.environments.faults import GO_ON
from surefoot.control.environments.looped import (
    LoopedEnvironments,
    MakeEnvironment,
    make_environments,
    task_name,
)
from surefoot.control.environments.observations import broken_parts, not_finite
from surefoot.core.seeding import stream
from surefoot.errors import NotFiniteError, SurefootError

SIDE_BY_SIDE = 10
LONGEST_EPISODE = 1_000_000
"""steps after which an episode is taken for one that never ends"""


@dataclass(frozen=True)
class EvaluationResult:
    """Undiscounted, unnormalised returns of whole episodes in true scores, in the order of the episodes."""

    mean_return: float
    std_return: float
    returns: list[float]
    lengths: list[int]
    episodes: int
    seed: int
    checkpoint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


@torch.inference_mode()
def evaluate_agent(
    agent: Agent,
    task: str | MakeEnvironment,
    arguments: dict[str, Any],
    episodes: int,
    seed: int,
    deterministic: bool = True,
) -> EvaluationResult:
    """Run ``episodes`` whole episodes, the likeliest action at every step unless ``deterministic`` is False.

    Episode i is reset from (seed, i mod width, i div width, "evaluation"): the same call always gives the same result, on
    episodes that training has not seen.
    Raises SurefootError when the task's spaces are not the agent's.
    """
    if episodes < 1:
        raise SurefootError(f"episodes={episodes}: must be at least 1")
    width = min(episodes, SIDE_BY_SIDE)
    environments = make_environments(task, arguments, width, seed, "evaluation")
    try:
        if not isinstance(environments, LoopedEnvironments):
            raise SurefootError(f"task={task_name(task)!r}: evaluation needs single environments, not a vector environment")
        spaces = (environments.observation_space, environments.action_space)
        if spaces != (agent.observation_space, agent.action_space):
            raise SurefootError(
                f"task={task_name(task)!r}: has spaces {spaces}, the agent was trained on "
                f"({agent.observation_space}, {agent.action_space})"
            )
        return _run(agent, environments, episodes, seed, deterministic)
    finally:
        environments.close()


def _run(agent: Agent, environments: LoopedEnvironments, episodes: int, seed: int, deterministic: bool) -> EvaluationResult:
    width = environments.count
    quota = np.array([len(range(b, episodes, width)) for b in range(width)])
    returns: list[list[float]] = [[] for _ in range(width)]
    lengths: list[list[int]] = [[] for _ in range(width)]
    running, length = np.zeros(width), np.zeros(width, np.int64)
    normalise, send, policy = agent.normaliser(), agent.sender(), agent.policy
    generator = stream(seed, "evaluation")
    observations = environments.reset()
    memory, starts = policy.nothing_remembered(width), np.ones(width, bool)
    _check(environments.name, broken_parts(observations, None, {}), length)
    while (active := quota > 0).any():
        distribution, memory = policy.step(remembering(normalise(agent.tensors(observations)), memory, starts))
        actions = distribution.mode() if deterministic else distribution.sample(generator)
        step = environments.step(send(actions.cpu()), active)
        running += step.rewards if step.scores is None else step.scores
        length += active
        _check(environments.name, broken_parts(step.observations, step.rewards, step.final_observations), length)
        starts = step.over
        for index in np.flatnonzero(starts):
            returns[index].append(float(running[index]))
            lengths[index].append(int(length[index]))
            running[index], length[index] = 0.0, 0
            quota[index] -= 1
        if length.max() >= LONGEST_EPISODE:
            raise SurefootError(
                f"task={environments.name!r}: an episode did not end within {LONGEST_EPISODE:,} steps of evaluation; limit it "
                "(gymnasium.wrappers.TimeLimit, or max_episode_steps), or set evaluation.episodes = 0"
            )
        observations = step.observations
    ordered = [(returns[i % width][i // width], lengths[i % width][i // width]) for i in range(episodes)]
    values = [row[0] for row in ordered]
    return EvaluationResult(
        mean_return=float(np.mean(values)),
        std_return=float(np.std(values)),
        returns=values,
        lengths=[row[1] for row in ordered],
        episodes=episodes,
        seed=seed,
    )


def _check(name: str, bad: dict[int, str], length: Any) -> None:
    if bad:
        index, what = next(iter(bad.items()))
        raise NotFiniteError(
            f"{not_finite(name, what, index, length[index])}, in an evaluation; mend the "
            f"environment, or take another evaluation.seed (--seed of a command), then {GO_ON}"
        )
