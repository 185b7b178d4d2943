"""From the steps of a rollout to what learning reads: one pass over all of them, by the function that training uses.

Everything is a tensor, on the CPU after numpy environments, on the policy's device after tensor environments.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from surefoot.accel.programs import FAST, Program, program_of, structure
from surefoot.control.agent import Agent
from surefoot.control.collect.symmetry import Symmetry
from surefoot.control.networks import LSTM_STATE
from surefoot.control.normalise import Normalise, as_inputs, true_fraction
from surefoot.control.spaces import ObservationPart
from surefoot.core.rollout import Evaluation, Metrics, Rollout, concatenated, map_tensors, tensors_in
from surefoot.core.timer import Timer
from surefoot.functional import gae, successor_values
from surefoot.ranks.collectives import all_sum
from surefoot.recipes.base import nearest_divisor


@dataclass(frozen=True)
class Finals:
    """The observations that episodes were truncated on, where the next row shows another.   n of them"""

    rows: Tensor
    """[n] the environment"""
    steps: Tensor
    """[n] the step in the rollout"""
    observations: dict[str, Tensor]
    """[n, *part] each"""
    lstm_state: Tensor | None
    """[n, LSTMs, 2, width] after that step; None without an LSTM"""


@dataclass(frozen=True)
class Acted:
    """What the steps of a rollout leave.   [B, T] unless said otherwise"""

    observed: dict[str, Tensor]
    """[B, T, *part] each, as the environments returned them; masks and episode starts too"""
    actions: Tensor
    """[B, T] or [B, T, d], as sampled"""
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    """False where the action was not taken"""
    last: dict[str, Tensor]
    """[B, *part] each, after the last step"""
    lstm_state: tuple[Tensor, Tensor] | None
    """[B, LSTMs, 2, width] before the first step and after the last; None without an LSTM"""
    finals: Finals | None
    """None: there are none"""
    learned: Tensor | None = None
    """rewards of reward models, which replace the task's; None without preferences"""


def rollout_of(
    agent: Agent,
    acted: Acted,
    discounted: Tensor,
    metrics: Metrics,
    timer: Timer,
    score: "Scorer | None" = None,
    symmetry: Symmetry | None = None,
) -> tuple[Rollout, Tensor]:
    """Score the actions, then update the normalisers: a rollout, and the discounted returns to carry into the next.

    discounted     [B] float64, the running returns of the reward normaliser
    metrics        of the collector, to which those of the normalisers are added
    timer          of the run
    score          evaluates the actions; None: the policy, all at once
    symmetry       the rollout then ends with the mirror images of its rows, as likely as the policy makes them, with the same
                   rewards and values
    """
    device, mask, rewards = agent.device, acted.mask, acted.rewards if acted.learned is None else acted.learned
    terminated, truncated = acted.terminated, acted.truncated
    actions = acted.actions.to(device)
    with torch.no_grad():
        normalise = agent.normaliser()
        with timer.detail("normalising"):
            inputs = normalise(acted.observed)
            shaped = rewards if agent.reward_normaliser is None else agent.reward_normaliser(rewards)
        if acted.lstm_state is not None:
            inputs[LSTM_STATE] = acted.lstm_state[0].clone()  # inference tensors can't be used in autograd
        with timer.detail("log-probs and values"):
            evaluation: Evaluation = (score or agent.policy)(inputs, actions)
            values, next_values = _values(agent, evaluation.values, acted)
        image = None if symmetry is None else _image(symmetry, acted, normalise, score or agent.policy)
    with timer.detail("normalising"):
        if agent.observation_normaliser is not None:
            agent.observation_normaliser.add(acted.observed, mask)
        if agent.reward_normaliser is not None:
            _follow_critic(agent, shaped, values, next_values, terminated, truncated, mask)
            discounted = agent.reward_normaliser.observe(rewards, terminated | truncated, mask, discounted)
    rollout = Rollout(
        inputs=inputs,
        actions=actions,
        mask=mask.to(device),
        old_log_probs=evaluation.log_probs,
        old_distribution=map_tensors(torch.clone, evaluation.distribution),  # log σ is a view of θ, which changes
        values=values,
        next_values=next_values,
        rewards=shaped.to(device),
        terminated=terminated.to(device),
        truncated=truncated.to(device),
        unit="step" if acted.lstm_state is None else "row",
        reward_parts={"environment": acted.rewards} | ({} if acted.learned is None else {"learned": acted.learned}),
        steps=int(mask.sum()),
        metrics=metrics | _clipped(agent, inputs, shaped, acted.actions, mask) | _observed(agent, acted),
    )
    return (rollout if image is None else concatenated([rollout, replace(rollout, **image)])), discounted


def _image(symmetry: Symmetry, acted: Acted, normalise: Normalise, score: Callable[..., Evaluation]) -> dict[str, Any]:
    """The fields of a rollout that its mirror image has for itself."""
    seen, images = symmetry(acted.observed, acted.actions)
    inputs = normalise(seen)
    images = images.to(next(iter(inputs.values())).device)
    evaluation = score(inputs, images)
    return {
        "inputs": inputs,
        "actions": images,
        "old_log_probs": evaluation.log_probs,
        "old_distribution": map_tensors(torch.clone, evaluation.distribution),
    }


class Scorer:
    """The policy's evaluation of a rollout, some steps at a time, so that their activations stay in a core's cache.

    The order is by time, as tensor environments store it. A recurrent policy reads whole rows.

    rows       steps per forward pass, at most about
    compiled   run a compiled program; without an LSTM, on the CPU
    """

    def __init__(self, agent: Agent, rows: int, compiled: bool = False) -> None:
        self.agent, self.rows, self.compiled = agent, rows, compiled
        self.program: Program | None = None
        self.form: Evaluation | None = None

    def __call__(self, inputs: dict[str, Tensor], actions: Tensor) -> Evaluation:
        """[B, T, *part] each, [B, T] or [B, T, d] -> all [B, T]; of a compiled program the entropy is 0"""
        count, steps = actions.shape[:2]
        if LSTM_STATE in inputs:
            size = max(1, self.rows // steps)
            parts = [(rows_of(inputs, rows), actions[rows]) for rows in slices(count, size)]
            evaluation: Evaluation = concatenated([self.agent.policy(*part) for part in parts])
            return evaluation
        by_time = {path: x.transpose(0, 1).flatten(0, 1) for path, x in inputs.items()}
        flat = actions.transpose(0, 1).flatten(0, 1)
        size = nearest_divisor(count * steps, self.rows) if self.compiled else self.rows
        evaluate = self._run if self.compiled else self.agent.policy
        parts = [(rows_of(by_time, rows), flat[rows]) for rows in slices(count * steps, size)]
        evaluation = concatenated([evaluate(*part) for part in parts])
        rows_first: Evaluation = map_tensors(lambda x: x.reshape(steps, count, *x.shape[1:]).transpose(0, 1), evaluation)
        return rows_first

    def _run(self, inputs: dict[str, Tensor], actions: Tensor) -> Evaluation:
        """The compiled evaluation of some steps."""
        policy = self.agent.policy
        named = {name: x.detach() for name, x in policy.named_parameters()}
        arguments = [*named.values(), *inputs.values(), actions]
        if self.program is None:
            form: Evaluation = policy(inputs, actions)
            self.form = replace(form, entropy=None)  # type: ignore[arg-type]

            def evaluate(*tensors: Tensor) -> tuple[Tensor, ...]:
                parameters = dict(zip(named, tensors, strict=False))
                read = dict(zip(inputs, tensors[len(named) : -1], strict=True))
                outcome = functional_call(policy, parameters, (read, tensors[-1]))
                return tuple(x.clone() for x in tensors_in(replace(outcome, entropy=None)))

            parts = structure(policy, constants=True)
            decided_by = None if parts is None else [list(named), list(inputs), *parts]
            self.program = program_of("log-probs and values", evaluate, arguments, decided_by, FAST)
        rest = iter(self.program(arguments))
        evaluation: Evaluation = map_tensors(lambda _: next(rest), self.form)
        return replace(evaluation, entropy=torch.zeros_like(evaluation.log_probs))


def rows_of(tree: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Some rows of every tensor."""
    return {path: x[rows] for path, x in tree.items()}


def slices(count: int, size: int) -> list[slice]:
    """Consecutive parts of ``count`` rows, ``size`` each; the last may be smaller."""
    return [slice(start, start + size) for start in range(0, count, size)]


def _values(agent: Agent, values: Tensor | None, acted: Acted) -> tuple[Tensor, Tensor]:
    """V of every observation, and of every successor: the final observation where an episode was truncated."""
    if values is None:
        zeros = torch.zeros(acted.truncated.shape, dtype=torch.float32, device=agent.device)
        return zeros, zeros
    last = agent.values_of(acted.last, None if acted.lstm_state is None else acted.lstm_state[1])
    following = successor_values(values, last, truncated=acted.truncated.to(values.device))
    if acted.finals is not None:
        finals = acted.finals
        following[finals.rows, finals.steps] = agent.values_of(finals.observations, finals.lstm_state)
    return values, following


def _follow_critic(
    agent: Agent, rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor
) -> None:
    """Update the unit of the critic's values, for ``agent.value``, from the parts of its targets.   [B, T] each"""
    objective, normaliser = agent.recipe.objective, agent.reward_normaliser
    if objective.baseline != "critic" or normaliser is None:
        return
    ends = {"terminated": terminated.repeat(2, 1), "truncated": truncated.repeat(2, 1)}
    v, following = values.to(rewards.device), next_values.to(rewards.device)
    with_and_without = [torch.cat([x, torch.zeros_like(x)]) for x in (v, following)]  # one recursion for both
    options: dict[str, Any] = {**ends, "gamma": objective.gamma, "lam": objective.target_lambda, "mask": mask.repeat(2, 1)}
    advantages, from_rewards = gae(rewards.repeat(2, 1), *with_and_without, **options).chunk(2)
    normaliser.follow_critic(from_rewards, advantages + v - from_rewards, mask)


def _clipped(agent: Agent, inputs: Mapping[str, Tensor], rewards: Tensor, actions: Tensor, mask: Tensor) -> Metrics:
    """Fractions of normalised observations and rewards at ±clip, and of actions outside their bounds."""
    observations, reward = agent.observation_normaliser, agent.reward_normaliser
    metrics: Metrics = {}
    if observations is not None and observations.shapes:
        kept = mask.to(agent.device)
        flat = [inputs[path].reshape(*mask.shape, -1) for path in observations.shapes]
        metrics["observations_clipped"] = observations.clipped_fraction(torch.cat(flat, -1), kept)
    if reward is not None:
        metrics["rewards_clipped"] = reward.clipped_fraction(rewards, mask)
    bounds = agent.bounds
    if bounds is not None and bounds.bounded.any():
        metrics["actions_clipped"] = true_fraction(bounds.on(actions.device).clipped(actions[..., agent.first_number :])[mask])
    return metrics


def _observed(agent: Agent, acted: Acted) -> Metrics:
    """Parts of the observation that never change, on any rank, and the share of the steps with a number outside its bounds."""
    normaliser, observed = agent.observation_normaliser, acted.observed
    constant = constant_parts(observed, list(agent.parts), () if normaliser is None else normaliser.shapes)
    outside = steps_outside(observed, agent.parts)
    count = 0 if not outside else int((torch.stack(list(outside.values())).any(0) & acted.mask).sum())
    flags = [float(path in constant) for path in agent.parts]
    counts = torch.tensor([count, acted.mask.sum(), *flags, 1.0], dtype=torch.float64)
    beyond, steps, *flags, ranks = all_sum(counts).tolist()
    metrics: Metrics = {"observations_constant": float(sum(flag == ranks for flag in flags))}
    if any(part.limits is not None for part in agent.parts.values()):
        metrics["observations_outside"] = beyond / steps if steps else math.nan
    return metrics


def constant_parts(observed: Mapping[str, Tensor], paths: Sequence[str], normalised: Container[str]) -> list[str]:
    """The parts that are the same in all steps: as observed if they are normalised, else as a policy reads them.

    [B, T, *part] each; none if there is a single step
    """

    def constant(path: str, x: Tensor) -> bool:
        x = x if path in normalised else as_inputs({path: x})[path]
        first = x[:1, :1]
        return bool((x[-1:, -1:] == first).all()) and bool((x == first).all())

    return [path for path in paths if observed[path].shape[:2].numel() > 1 and constant(path, observed[path])]


def steps_outside(observed: Mapping[str, Tensor], parts: Mapping[str, ObservationPart]) -> dict[str, Tensor]:
    """For the parts with a number outside the bounds of their space: in which steps.   [B, T, *part] each -> [B, T] each"""
    outside = {}
    for path, part in parts.items():
        if (limits := part.bounds or part.limits) is None:
            continue
        x = observed[path]
        low, high = (torch.as_tensor(limit).to(x) for limit in limits)
        if (x.amin((0, 1)) < low).any() or (x.amax((0, 1)) > high).any():
            outside[path] = ((x < low) | (x > high)).reshape(*x.shape[:2], -1).any(-1)
    return outside
