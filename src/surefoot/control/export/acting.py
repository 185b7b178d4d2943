"""What an agent does with an observation, as one graph without state: what an exported file holds."""

import copy
from dataclasses import fields

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.control.agent import Agent
from surefoot.control.policies.recurrent import REMEMBERED, STARTS
from surefoot.control.spaces import MASK, choices
from surefoot.errors import SurefootError

MEMORY, START, NEXT_MEMORY = "memory", "episode_start", "next_memory"
"""what a graph with memory takes beside the observation, and gives last"""


class Acting(nn.Module):
    """What an agent does with a batch of raw observations, as one graph without state.

    Outputs are (action, the parameters of the distribution, V if there is a critic), named by ``outputs``. After the leaves of
    the observation goes in, where ``masked``, the mask of actions [N, choices]; then an LSTM's memory, with a flag that says
    where it is to be forgotten. Memory comes out last.
    Raises SurefootError where a leaf of the observation has the name of one of these.
    """

    def __init__(self, agent: Agent, masked: bool) -> None:
        super().__init__()
        self.policy = copy.deepcopy(agent.policy).cpu().requires_grad_(False)
        self.normalise = agent.normaliser()
        space = agent.action_space
        self.shape, self.discrete = tuple(space.shape or ()), isinstance(space, spaces.Discrete)
        self.kind = torch.from_numpy(np.empty(0, space.dtype)).dtype
        self.bounds, self.value_unit = agent.bounds, agent.unit_of_value
        self.first = torch.from_numpy(np.array(getattr(space, "start", 0), np.int64))  # PyTorch adds up no unsigned numbers
        self.inputs = {
            path: torch.from_numpy(np.full((2, *leaf.shape), 0 if leaf.bounds is None else leaf.bounds[0], leaf.dtype))
            for path, leaf in agent.leaves.items()
        }
        self.leaves = list(self.inputs)
        self.masked = masked
        if masked:
            self.inputs[MASK] = torch.ones(2, sum(choices(agent.action_space) or ()), dtype=torch.bool)
        memory = self.policy.nothing_remembered(2)
        self.remembers = memory is not None
        if memory is not None:
            _check_names(self.leaves, [MEMORY, START])
            self.inputs |= {MEMORY: memory, START: torch.ones(2, dtype=torch.bool)}
        distribution, _ = self.policy.step(self._inputs(*self.inputs.values()))
        self.outputs = ["action", *(field.name for field in fields(distribution))]
        if self.policy.critic_head is not None:
            self.outputs.append("value")
        if self.remembers:
            self.outputs.append(NEXT_MEMORY)
        _check_names(self.leaves, self.outputs)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The inputs for N observations, in the order of ``inputs`` -> what ``outputs`` names."""
        inputs = self._inputs(*given)
        distribution, memory = self.policy.step(inputs)
        action = distribution.mode()
        if self.bounds is not None:
            action = self.bounds.within(action)
        action = action.reshape(action.shape[:1] + self.shape)
        if self.bounds is None:
            action = action + self.first
        found = [action.to(self.kind), *(getattr(distribution, field.name) for field in fields(distribution))]
        if self.policy.critic_head is not None:
            found.append(self.policy.values(inputs) * self.value_unit)
        if memory is not None:
            found.append(memory)
        return tuple(found)

    def _inputs(self, *given: Tensor) -> dict[str, Tensor]:
        """What the policy reads."""
        inputs = self.normalise(dict(zip(self.leaves, given, strict=False)))
        if self.masked:
            inputs[MASK] = given[len(self.leaves)]
        if self.remembers:
            inputs |= {REMEMBERED: given[-2], STARTS: given[-1]}
        return inputs


def _check_names(leaves: list[str], taken: list[str]) -> None:
    for name in set(leaves) & set(taken):
        raise SurefootError(
            f"observation {name!r}: an exported file has that name for something else; rename this part of the space"
        )
