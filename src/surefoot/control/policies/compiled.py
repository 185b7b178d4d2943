"""Acting as one compiled program: observations and noise in, actions out.

For one observation a small network spends nearly all of its time on the way to the arithmetic. What acts is the same code that
acts otherwise, traced; the noise is drawn as ever, from the same generator, and so the same actions come out, to float error.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from surefoot.control.agent import Act, Agent
from surefoot.control.policies.distributions import Sampled
from surefoot.control.spaces import MASK, Array, Observations
from surefoot.core.steps.compiled import Program, program_of


class CompiledActor:
    """Samples an agent's actions; for policies without memory, on the CPU, for always as many observations at once."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.program: Program | None = None
        self.distribution: Sampled
        """of some observations: it knows what noise theirs takes"""

    def actor(self, generator: torch.Generator) -> Act:
        """What ``Agent.actor`` gives, compiled when it first acts.

        Raises SurefootError then, when there is no C++ compiler or the policy can't be traced.
        """
        agent = self.agent
        acting = _Acting(agent)
        critic = {id(p) for p in agent.policy.critic_parameters()}
        named = {name: x.detach() for name, x in (*acting.named_parameters(), *acting.named_buffers()) if id(x) not in critic}
        numbers, send, paths = list(named.values()), agent.sender(), [*agent.leaves, *([MASK] if agent.masked else [])]

        def act(observations: Observations, memory: Tensor | None, starts: Array) -> tuple[Tensor, Array, Tensor | None]:
            seen = [torch.from_numpy(observations[path]) for path in paths]
            if self.program is None:
                self.program = self._compiled(acting, list(named), paths, [*numbers, *seen])
            (actions,) = self.program([*numbers, *seen, self.distribution.noise(generator)])
            return actions, send(actions), memory

        return act

    def _compiled(self, acting: "_Acting", names: list[str], paths: list[str], arguments: list[Tensor]) -> Program:
        def act(*tensors: Tensor) -> tuple[Tensor, ...]:
            observations = dict(zip(paths, tensors[len(names) : -1], strict=True))
            return (functional_call(acting, dict(zip(names, tensors, strict=False)), (observations, tensors[-1])),)

        with torch.no_grad():
            self.distribution = acting.distribution(dict(zip(paths, arguments[len(names) :], strict=True)))
        return program_of(act, [*arguments, self.distribution.noise(torch.Generator())])


class _Acting(nn.Module):
    """An agent's way from observations to actions."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.policy, self.normaliser = agent.policy, agent.observation_normaliser

    def distribution(self, observations: dict[str, Tensor]) -> Sampled:
        """[B, *leaf] each -> over [B]"""
        inputs = observations if self.normaliser is None else self.normaliser(observations)
        found: Sampled = self.policy.step(inputs)[0]
        return found

    def forward(self, observations: dict[str, Tensor], noise: Tensor) -> Tensor:
        return self.distribution(observations).drawn(noise)
