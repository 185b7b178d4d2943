"""An agent: a policy with its normalisers and spaces, ready to act in the environment it was trained for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.config import Recipe, make_recipe, to_table
from surefoot.control.environments import Array
from surefoot.control.normalise import ObservationNormaliser, RewardNormaliser
from surefoot.control.policies import ActorCritic
from surefoot.control.spaces import check_action_space, check_observation_space, space_from_json, space_to_json
from surefoot.errors import SurefootError
from surefoot.run.checkpoint import save_checkpoint
from surefoot.seeding import stream


class Agent(nn.Module):
    """What training makes.

    Everything an observation goes through on its way to an action is in here, so nothing is lost between training,
    evaluation and another program: the running statistics are buffers and are saved with the weights.
    """

    def __init__(self, recipe: Recipe, observation_space: spaces.Box, action_space: spaces.Box | spaces.Discrete) -> None:
        super().__init__()
        self.recipe, self.observation_space, self.action_space = recipe, observation_space, action_space
        generator = stream(recipe.seed, "weights")
        size = observation_space.shape[0]
        critic = recipe.objective.baseline == "critic"
        self.policy = ActorCritic(size, action_space, recipe.network, critic, generator)
        normalise = recipe.normalise
        self.observation_normaliser = ObservationNormaliser((size,), normalise.clip) if normalise.observations else None
        self.reward_normaliser = RewardNormaliser(recipe.objective.gamma, normalise.clip) if normalise.rewards else None
        self.policy.to(recipe.device)
        self.generator = stream(recipe.seed, "predict")

    @classmethod
    def for_spaces(cls, recipe: Recipe, observation_space: Any, action_space: Any, task: str) -> "Agent":
        """An untrained agent; SurefootError when a space is not supported."""
        return cls(recipe, check_observation_space(observation_space, task), check_action_space(action_space, task))

    @property
    def device(self) -> torch.device:
        """Where the policy lives."""
        return self.policy.actor_head.weight.device

    def normaliser(self) -> Callable[[Tensor], Tensor]:
        """What observations [..., n] go through before the policy reads them, with the statistics as they stand now."""
        return (
            (lambda observations: observations) if self.observation_normaliser is None else self.observation_normaliser.frozen()
        )

    def actor(self, generator: torch.Generator) -> Callable[[Array], tuple[Tensor, Array]]:
        """A function that samples actions for observations [B, n] while nothing else changes: (as stored, as sent)."""
        policy, device, normalise, send = self.policy, self.device, self.normaliser(), self.sender()

        @torch.inference_mode()
        def act(observations: Array) -> tuple[Tensor, Array]:
            inputs = normalise(torch.from_numpy(observations).to(device))
            actions = policy.distribution(inputs).sample(generator).cpu()
            return actions, send(actions)

        return act

    def sender(self) -> Callable[[Tensor], Array]:
        """What an environment gets for actions as stored: within a Box's bounds, or counted from a Discrete's start."""
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            start = int(space.start)
            return lambda actions: actions.numpy() + start if start else actions.numpy()
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        return lambda actions: torch.minimum(torch.maximum(actions, low), high).numpy()

    @torch.no_grad()
    def values(self, observations: Array) -> Tensor:
        """V of observations [..., n] as a tensor on the policy's device."""
        return self.policy.values(self.normaliser()(torch.from_numpy(np.asarray(observations, np.float32)).to(self.device)))

    @torch.inference_mode()
    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, Any]:
        """The action for one observation [n], or actions for several [B, n], and the recurrent state (None here).

        The signature is Stable-Baselines3's, so that its tools work on agents from here. ``deterministic`` takes the
        likeliest action instead of sampling; ``episode_start`` is for recurrent policies.
        Raises SurefootError for an observation of the wrong shape.
        """
        array = self._read(observation)
        inputs = self.normaliser()(torch.from_numpy(array).to(self.device))
        distribution = self.policy.distribution(inputs)
        actions = distribution.mode() if deterministic else distribution.sample(self.generator)
        sent = self.sender()(actions.cpu())
        return (sent if sent.ndim or array.ndim > 1 else sent[()]), state

    def value(self, observation: Any) -> Any:
        """V(s) of one observation (a float) or of several (an array [B]).

        Raises SurefootError when the agent was trained without a critic, or for an observation of the wrong shape.
        """
        if self.policy.critic_head is None:
            raise SurefootError(f"value: {self.recipe.algorithm} has no critic; train with objective.baseline = 'critic'")
        values = self.values(self._read(observation)).cpu().numpy()
        return float(values) if values.ndim == 0 else values

    def _read(self, observation: Any) -> Array:
        array = np.asarray(observation, np.float32)
        expected = self.observation_space.shape
        if array.shape[-1:] != expected or array.ndim > 2:
            raise SurefootError(f"observation: has shape {array.shape}; this agent takes {expected}, or a batch of them")
        return array

    def trees(self) -> dict[str, Any]:
        """What a checkpoint holds of an agent."""
        spaces_ = {"observation": space_to_json(self.observation_space), "action": space_to_json(self.action_space)}
        return {"agent": self.state_dict(), "recipe": to_table(self.recipe), "spaces": spaces_}

    def save(self, folder: str | Path) -> None:
        """Write the agent to a folder that ``surefoot.load`` reads: weights, normalisers, spaces, recipe; no pickle."""
        save_checkpoint(Path(folder), self.trees())

    @classmethod
    def from_trees(cls, trees: dict[str, Any], where: Path) -> "Agent":
        """The agent that a checkpoint holds; SurefootError where weights and recipe don't fit."""
        recipe = make_recipe({**trees["recipe"], "device": "cpu"})
        agent = cls(recipe, *(space_from_json(trees["spaces"][name]) for name in ("observation", "action")))
        load_weights(agent, trees["agent"], where)
        return agent


def load_weights(module: nn.Module, weights: dict[str, Tensor], where: Path) -> None:
    """Load a state dict into a module of the same architecture; one line naming the first tensor that doesn't fit."""
    own = module.state_dict()
    for name in sorted(set(own) | set(weights)):
        mine = tuple(own[name].shape) if name in own else "no such tensor"
        theirs = tuple(weights[name].shape) if name in weights else "no such tensor"
        if mine != theirs:
            raise SurefootError(f"{where}: another architecture: {name} is {theirs} in the checkpoint and {mine} in the recipe")
    module.load_state_dict(weights)
