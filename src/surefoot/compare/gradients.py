"""How noisy a policy gradient is: many independent batches under one frozen θ, and every estimator on the same ones.

Only the estimators differ, because everything else is held: the policy, its critic, its normalisers, the batches (common random
numbers) and the number that a batch's sum is divided by. Batches are of whole episodes, which the estimators without a critic
need, and go through the collector, the credit assignment and the loss that training uses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.compare.statistics import middle, resampled
from surefoot.control.agent import Agent
from surefoot.control.collect import ControlCollector
from surefoot.control.environments.looped import MakeEnvironment, make_environments
from surefoot.core.algorithms import REINFORCE, Objective
from surefoot.core.credit import assign_credit
from surefoot.core.minibatches import rows_of
from surefoot.core.objective import loss
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError

RESAMPLES = 2_000
COLUMNS = 1 << 16
"""parameters whose products are added up at a time, in float64: the gradients themselves are held once, in float32"""


@dataclass(frozen=True)
class Samples:
    """Gradients of the policy loss under one θ."""

    gradients: NDArray[np.float32]
    """[estimators, batches, parameters], of the actor's parameters alone"""
    steps: list[int]
    """in each batch"""
    episodes: int
    """in all batches together"""
    cut: int
    """how many of those a time limit ended: a critic then stands for the rest, a return does not"""


@dataclass(frozen=True)
class Noise:
    """What one estimator's gradients say, with 95 % bootstrap intervals over the batches."""

    variance: float
    """trace of the covariance matrix of one batch's gradient"""
    variance_interval: tuple[float, float]
    relative: float | None
    """variance as a share of the first estimator's; None where that has none, as before there is any reward"""
    relative_interval: tuple[float, float] | None
    """narrow, because both are of the same batches"""
    signal: float
    """squared norm of the expected gradient, estimated without bias; may come out negative where noise hides it"""
    signal_interval: tuple[float, float]
    noise_to_signal: float | None
    """variance / signal: how many batches to average until noise and signal are equal; None where no signal was seen"""


def sample_gradients(
    agent: Agent,
    objectives: Sequence[Objective],
    batches: int,
    at_least: int,
    seed: int,
    task: str | MakeEnvironment | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
) -> Samples:
    """The policy gradient of every objective on each of ``batches`` independent batches of whole episodes.

    Every batch's sum over steps is divided by the same number, the batches' mean length. Training divides each batch by its
    own; where the length of an episode depends on the actions that adds a bias, and a different one to each estimator.

    at_least   steps in a batch; the episode that is running then is finished
    seed       of episodes and actions, apart from those of training with the same number
    on_batch   called after each with how many are done

    The agent is left as it was. Raises SurefootError where an objective needs a critic that the agent hasn't.
    """
    if agent.policy.critic_head is None and any(objective.baseline == "critic" for objective in objectives):
        raise SurefootError(f"agent: {agent.recipe.algorithm} has no critic; measure at an agent that was trained with one")
    recipe, own = agent.recipe, derived_seed(seed, "gradient variance")
    environments = make_environments(task or recipe.task, recipe.environment, 1, own)
    collector = ControlCollector(environments, agent, None, at_least=at_least)
    state = LearnerState.seeded(own, at_least * batches)
    frozen = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    gradients = np.empty((len(objectives), batches, 0), np.float32)
    steps, episodes, cut = [], 0, 0
    try:
        for batch in range(batches):
            rollout = collector.collect(state)
            agent.load_state_dict(frozen)  # the collector has moved the normalisers on, and they belong to θ here
            found = [_gradient(agent, rollout, objective, at_least) for objective in objectives]
            if batch == 0:
                gradients = np.empty((len(objectives), batches, len(found[0])), np.float32)
            gradients[:, batch] = torch.stack(found).cpu().numpy()
            ended = rollout.terminated | rollout.truncated
            steps.append(rollout.steps)
            episodes += int(ended.sum())
            cut += int((rollout.truncated & ~rollout.terminated).sum())
            on_batch(batch + 1)
    finally:
        agent.load_state_dict(frozen)
        environments.close()
    gradients *= at_least / float(np.mean(steps))
    return Samples(gradients, steps, episodes, cut)


def _gradient(agent: Agent, rollout: Rollout, objective: Objective, count: int) -> Tensor:
    """Of the policy term alone, in the parameters that it reaches.   -> [parameters]

    At θ_old the ratio is 1, and every surrogate has the gradient of log π·Â, REINFORCE's own; so what is left of the objective
    is how it assigns credit.
    """
    batch = rows_of(rollout, assign_credit(rollout, objective))
    total, _, _ = loss(agent.policy(batch.inputs, batch.actions, batch.mask), batch, REINFORCE, denominator=count)
    learned = [parameter for parameter in agent.policy.parameters() if parameter.requires_grad]
    parts = torch.autograd.grad(total, learned, allow_unused=True)
    return torch.cat([part.reshape(-1) for part in parts if part is not None])


def noise_of(gradients: NDArray[np.floating[Any]]) -> list[Noise]:
    """What samples [estimators, batches, parameters] of gradients say about each estimator.

    Variance is the mean of ½|g_i − g_j|² over pairs of different batches, signal that of g_i·g_j: both without bias. The
    bootstrap weighs pairs by how often their batches were drawn and never pairs a batch with itself, so it keeps that.
    """
    count = gradients.shape[1]
    if count < 2:
        raise ValueError(f"gradients: {count} batch has no variance; sample at least 2")
    drawn = resampled(count, RESAMPLES)
    weights = np.stack([(drawn == i).sum(1) for i in range(count)], 1).astype(float)
    weights = weights[(weights > 0).sum(1) > 1]  # of a few batches a resample may be one of them alone: no pair
    found, first = [], None
    for rows in gradients:
        products = _products(rows)
        squares = np.diag(products)
        distances = (squares[:, None] + squares[None, :]) / 2 - products
        variance, signal = (float(_over_pairs(m, np.ones((1, count)))[0]) for m in (distances, products))
        variances, signals = (_over_pairs(m, weights) for m in (distances, products))
        first = first or (variance, variances)
        varied = first[1] > 0  # of rare gradients a resample may have drawn none
        found.append(
            Noise(
                variance=variance,
                variance_interval=_interval(variances),
                relative=variance / first[0] if first[0] > 0 else None,
                relative_interval=_interval(variances[varied] / first[1][varied]) if first[0] > 0 else None,
                signal=signal,
                signal_interval=_interval(signals),
                noise_to_signal=variance / signal if signal > 0 else None,
            )
        )
    return found


def _products(rows: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """g_i·g_j of all pairs, added up in float64.   [n, parameters] -> [n, n]"""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], COLUMNS):
        part = rows[:, start : start + COLUMNS].astype(np.float64)
        total += part @ part.T
    return total


def _over_pairs(matrix: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of a matrix's entries off the diagonal, entry (i, j) weighted by w_i w_j.   [n, n], [k, n] -> [k]"""
    whole = np.einsum("ki,ij,kj->k", weights, matrix, weights, optimize=True) - weights**2 @ np.diag(matrix)
    return np.asarray(whole / (weights.sum(1) ** 2 - (weights**2).sum(1)))


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = middle(values)
    return float(low), float(high)
