"""An agent: a policy with its normalisers and spaces, ready to act in the environment it was trained for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.control.actions import Bounds, sender_for
from surefoot.control.normalise import Normalise, ObservationNormaliser, RewardNormaliser
from surefoot.control.policies.actor_critic import ActorCritic
from surefoot.control.policies.recurrent import REMEMBERED, STARTS
from surefoot.control.spaces import (
    MASK,
    NOT_FINITE,
    Array,
    Misfit,
    Observations,
    as_float32,
    check_action_space,
    choices,
    leaves,
    read_mask,
    space_from_json,
    space_to_json,
)
from surefoot.core.optimizer import flatten_parameters, parameter_groups
from surefoot.core.seeding import stream
from surefoot.errors import SurefootError
from surefoot.files import made_from
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.reading import control_recipe, to_table
from surefoot.runs.checkpoint import load_weights, require, save_checkpoint

Act = Callable[[Observations, Tensor | None, Array], tuple[Tensor, Array, Tensor | None]]


class Agent(nn.Module):
    """What training makes.

    Everything an observation goes through on its way to an action is in here, so nothing is lost between training,
    evaluation and another program: the running statistics are buffers and are saved with the weights.
    """

    def __init__(self, recipe: ControlRecipe, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.recipe, self.observation_space, self.action_space = recipe, observation_space, action_space
        self.leaves = leaves(observation_space)
        self.masked: bool | None = None
        """whether the task it was trained on masks actions; None where nobody has said so"""
        generator = stream(recipe.seed, "weights")
        critic = recipe.objective.baseline == "critic"
        self.policy = ActorCritic(observation_space, action_space, recipe.network, critic, generator)
        normalise = recipe.normalise
        vectors = {path: leaf.shape for path, leaf in self.leaves.items() if leaf.vector}
        wanted = normalise.observations and vectors
        self.observation_normaliser = ObservationNormaliser(vectors, normalise.clip) if wanted else None
        self.reward_normaliser = RewardNormaliser(recipe.objective.gamma, normalise.clip) if normalise.rewards else None
        self.bounds = Bounds(action_space, normalise.actions) if isinstance(action_space, spaces.Box) else None
        self.policy.to(recipe.device)
        self.generator = stream(recipe.seed, "predict")

    def __repr__(self) -> str:
        """One line; ``agent.policy`` shows its layers."""
        count = sum(parameter.numel() for parameter in self.policy.parameters())
        return f"<Agent {self.recipe.algorithm} on {self.recipe.task}, {count:,} parameters>"

    @classmethod
    def for_spaces(cls, recipe: ControlRecipe, observation_space: Any, action_space: Any, task: str) -> "Agent":
        """An untrained agent; SurefootError when a space is not supported."""
        leaves(observation_space, task)
        return cls(recipe, observation_space, check_action_space(action_space, task))

    @property
    def device(self) -> torch.device:
        """Where the policy lives."""
        return self.policy.actor_head.weight.device

    def normaliser(self) -> Normalise:
        """What the leaves of observations go through before the policy reads them, with the statistics as they stand now."""
        return dict if self.observation_normaliser is None else self.observation_normaliser.frozen()

    def tensors(self, observations: Mapping[str, Array]) -> dict[str, Tensor]:
        """Leaves as tensors where the policy lives, not normalised."""
        device = self.device
        return {path: torch.from_numpy(values).to(device) for path, values in observations.items()}

    def actor(self, generator: torch.Generator) -> "Act":
        """A function that samples actions while nothing else changes.

        observations [B, ...], memory or None, episode starts [B] -> actions as stored, actions as sent, memory after the step
        """
        policy, device, normalise, send = self.policy, self.device, self.normaliser(), self.sender()

        @torch.inference_mode()
        def act(observations: Observations, memory: Tensor | None, starts: Array) -> tuple[Tensor, Array, Tensor | None]:
            inputs = normalise({path: torch.from_numpy(values).to(device) for path, values in observations.items()})
            distribution, memory = policy.step(remembering(inputs, memory, starts))
            actions = distribution.sample(generator).cpu()
            return actions, send(actions), memory

        return act

    def sender(self) -> Callable[[Tensor], Array]:
        """What an environment gets for actions as stored."""
        return sender_for(self.action_space, self.recipe.normalise.actions)

    @property
    def unit_of_value(self) -> float:
        """What 1 of the critic's V is in the task's rewards: the running standard deviation that they were divided by."""
        return 1.0 if self.reward_normaliser is None else 1 / float(self.reward_normaliser.scale)

    @torch.no_grad()
    def values(self, observations: Mapping[str, Array], memory: Tensor | None = None, starts: Array | None = None) -> Tensor:
        """V of the leaves of observations [..., *leaf] as a tensor on the policy's device, in units of (normalised) rewards.

        With memory [N, ...] the observations are [N, *leaf]; ``starts`` [N] is False everywhere where it is not given.
        """
        inputs = self.normaliser()(self.tensors(observations))
        if memory is not None and starts is None:
            starts = np.zeros(len(memory), bool)
        return self.policy.values(remembering(inputs, memory, starts))

    @torch.inference_mode()
    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_mask: Any = None,
    ) -> tuple[Any, Any]:
        """The action for one observation, or actions for several [B, ...], and what the policy remembers (None without LSTM).

        The signature is Stable-Baselines3's, so that its tools work on agents from here. Observations come as the environment
        gives them: an array, or a dict or tuple of them. ``deterministic`` takes the likeliest action instead of sampling.
        ``state`` is what the step before returned, None at first; ``episode_start``, one flag or [B], makes it forgotten.
        ``action_mask`` [choices] or [B, choices] is True where an action may be taken; without it all may.
        Raises SurefootError for an observation or a mask of the wrong shape, and for an observation that is not finite.
        """
        leaves_, batch = self.read(observation)
        if action_mask is not None:
            try:
                leaves_[MASK] = read_mask(action_mask, choices(self.action_space), batch)
            except Misfit as misfit:
                raise SurefootError(f"action_mask: is {misfit}") from None
        inputs, single = self._remembering(leaves_, batch, state, episode_start)
        distribution, memory = self.policy.step(inputs)
        actions = distribution.mode() if deterministic else distribution.sample(self.generator)
        sent = self.sender()((actions.squeeze(0) if single else actions).cpu())
        return (
            sent[()] if isinstance(self.action_space, spaces.Discrete) else sent
        ), state if memory is None else memory.cpu().numpy()

    def value(self, observation: Any, state: Any = None, episode_start: Any = None) -> Any:
        """V(s) of one observation (a float) or of several (an array [B]): the discounted return that the critic expects, in
        the task's own rewards, normalised or not (what normalise.clip cut off aside). State and starts as in ``predict``.

        Raises SurefootError when the agent was trained without a critic, or for an observation of the wrong shape.
        """
        if self.policy.critic_head is None:
            raise SurefootError(f"value: {self.recipe.algorithm} has no critic; train with objective.baseline = 'critic'")
        with torch.inference_mode():
            inputs, single = self._remembering(*self.read(observation), state, episode_start)
            values = self.policy.values(inputs).cpu().numpy() * self.unit_of_value
        values = values[0] if single else values
        return float(values) if values.ndim == 0 else values

    def _remembering(
        self, leaves_: Observations, batch: tuple[int, ...], state: Any, episode_start: Any
    ) -> tuple[dict[str, Tensor], bool]:
        """Normalised inputs of a step, and whether a single observation was made a batch of one for the memory's sake."""
        inputs = self.normaliser()(self.tensors(leaves_))
        single = self.policy.actor_memory is not None and batch == ()
        if single:
            inputs = {path: x.unsqueeze(0) for path, x in inputs.items()}
        count = batch[0] if batch else 1
        memory = self.policy.nothing_remembered(count)
        if memory is None:
            return inputs, False
        try:
            starts = np.asarray(False if episode_start is None else episode_start, bool).reshape(-1)
            given = None if state is None else torch.from_numpy(np.array(state, np.float32)).to(memory)
        except (TypeError, ValueError, OverflowError) as error:
            raise SurefootError(f"state, episode_start: {error}; give what predict returned, and flags") from None
        if len(starts) not in (1, count):
            raise SurefootError(
                f"episode_start: has {len(starts)} flags for {count} observations; give one each, or one for all"
            )
        starts = np.broadcast_to(starts, count)
        if given is not None:
            if given.shape != memory.shape:
                raise SurefootError(
                    f"state: has shape {tuple(given.shape)}; for these observations it is {tuple(memory.shape)}"
                )
            memory = given
        return remembering(inputs, memory, starts), single

    def read(self, observation: Any) -> tuple[Observations, tuple[int, ...]]:
        """The leaves of one observation, or of several, and their leading shape: () or (B,)."""
        found: Observations = {}
        batches = set()
        for path, leaf in self.leaves.items():
            try:
                part = leaf.part_of(observation)
                part = leaf.array_of(part) if isinstance(part, (list, tuple)) else part
                array = as_float32(part) if leaf.vector else np.asarray(part)
                batch = array.shape[: array.ndim - len(leaf.shape)]
                if array.shape[len(batch) :] != leaf.shape or len(batch) > 1:
                    raise SurefootError(f"{path}: has shape {array.shape}; this agent takes {leaf.shape}, or a batch of them")
                if not leaf.vector:
                    leaf.check_kind(array)
                elif not np.isfinite(array).all():
                    raise SurefootError(f"{path}: is {NOT_FINITE}; agents learn what finite observations mean")
            except Misfit as misfit:
                raise SurefootError(f"observation: is {misfit}") from None
            except (TypeError, ValueError) as error:
                raise error if isinstance(error, SurefootError) else SurefootError(f"{path}: {error}") from None
            found[path] = array.astype(leaf.dtype, copy=False)
            batches.add(batch)
        if len(batches) > 1:
            raise SurefootError(f"observation: its leaves are of {len(batches)} batch sizes: {sorted(batches)}")
        return found, batches.pop()

    def trees(self) -> dict[str, Any]:
        """What a checkpoint holds of an agent."""
        spaces_ = {"observation": space_to_json(self.observation_space), "action": space_to_json(self.action_space)}
        return {"agent": self.state_dict(), "recipe": to_table(self.recipe), "spaces": {**spaces_, "masked": self.masked}}

    def save(self, folder: str | Path) -> None:
        """Write the agent to a folder that ``surefoot.load`` reads: weights, normalisers, spaces, recipe; no pickle."""
        save_checkpoint(Path(folder), self.trees())

    @classmethod
    def from_trees(cls, trees: dict[str, Any], where: Path) -> "Agent":
        """The agent that a checkpoint holds; SurefootError where weights and recipe don't fit."""
        require(trees, ("agent", "recipe", "spaces"), where)
        recipe = control_recipe({**trees["recipe"], "device": "cpu"})
        with made_from(where):
            observation, action = (space_from_json(trees["spaces"][name]) for name in ("observation", "action"))
            agent = cls.for_spaces(recipe, observation, action, recipe.task)
            agent.masked = trees["spaces"].get("masked")  # older checkpoints don't say
            load_weights(agent, trees["agent"], where)
            agent._lay_out()
        return agent

    def _lay_out(self) -> None:
        """Put the weights where a learner has them in memory, side by side in its groups: some processors round a product by
        where its numbers lie, and a loaded agent gives the very numbers of the trained one.
        """
        critic_rate = self.recipe.optimizer.critic_learning_rate is not None
        for group in parameter_groups(self.policy, self.recipe.objective, critic_rate).values():
            flatten_parameters(group)
            for parameter in group:
                parameter.grad = None


def remembering(inputs: dict[str, Tensor], memory: Tensor | None, starts: Array | None) -> dict[str, Tensor]:
    """The inputs of a policy with memory; without, the inputs as they are."""
    if memory is None:
        return inputs
    return inputs | {REMEMBERED: memory, STARTS: torch.tensor(starts, device=memory.device)}
