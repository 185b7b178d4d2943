"""Tiny policies and random rollouts with every kind of end, in float64; and the gradient that an objective makes of them."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.algorithms import Objective, Reuse
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import Credit, Evaluation, LearnerState, Metrics, Policy, Rollout
from surefoot.functional import categorical_kl, successor_values, token_entropy, token_log_probs

DOUBLE = torch.float64
FEATURES, ACTIONS = 3, 4


@dataclass(frozen=True)
class Choice:
    """One of a few actions."""

    logits: Tensor

    def kl(self, other: "Choice") -> Tensor:
        """Exact KL(self‖other)."""
        return categorical_kl(self.logits, other.logits)


class TinyPolicy(Policy):
    """Features [..., n] to a choice among a few actions, and a value.

    memory   every position also sees the mean of its row up to itself, as a causal model does: for whole rows
    shared   actor and critic share the hidden layer
    exact    False: rollouts may be those of another policy, and the learner does not reject them
    """

    def __init__(
        self, seed: int = 0, *, critic: bool = True, shared: bool = False, memory: bool = False, exact: bool = True
    ) -> None:
        super().__init__()
        self.memory, self.exact = memory, exact
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.hidden = nn.Linear(FEATURES, 8, dtype=DOUBLE)
            self.head = nn.Linear(8, ACTIONS, dtype=DOUBLE)
            self.critic_hidden = nn.Linear(FEATURES, 8, dtype=DOUBLE) if critic and not shared else None
            self.critic_head = nn.Linear(8, 1, dtype=DOUBLE) if critic else None

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        if self.memory:
            lengths = torch.arange(1, inputs.shape[-2] + 1, dtype=inputs.dtype).unsqueeze(-1)
            inputs = inputs + inputs.cumsum(-2) / lengths
        features = self.hidden(inputs).tanh()
        logits = self.head(features)
        values = None
        if self.critic_head is not None:
            if self.critic_hidden is not None:
                features = self.critic_hidden(inputs).tanh()
            values = self.critic_head(features).squeeze(-1)
        return Evaluation(token_log_probs(logits, actions), token_entropy(logits), values, Choice(logits))

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        if self.critic_hidden is None or self.critic_head is None:
            return ()
        return [*self.critic_hidden.parameters(), *self.critic_head.parameters()]


def random_rollout(
    policy: TinyPolicy, seed: int, rows: int = 4, steps: int = 6, *, unit: str = "step", whole: bool = False, holes: bool = True
) -> Rollout:
    """Experience that never happened, scored by the policy.

    unit    "step": masked entries and ends of both kinds anywhere. "row": responses of random length, the first of them 0,
            each ended by termination or by truncation; two and two of them answer the same prompt
    whole   every row is one whole episode, and nothing is masked
    holes   False masks nothing where the unit is a step
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DOUBLE)

    def chance(share: float) -> Tensor:
        return torch.rand(rows, steps, generator=generator) < share

    mask, terminated, truncated = ~chance(0.2 if holes else 0.0), chance(0.15), chance(0.15)
    if unit == "row":
        lengths = torch.randint(1, steps + 1, (rows,), generator=generator)
        lengths[0] = 0 if rows > 1 else steps
        mask = torch.arange(steps) < lengths.unsqueeze(-1)
        last = torch.arange(steps) == lengths.unsqueeze(-1) - 1
        cut = chance(0.5)
        terminated, truncated = last & ~cut, last & cut
    if whole:
        mask, truncated = torch.ones_like(mask), torch.zeros_like(mask)
        terminated = (torch.arange(steps) == steps - 1).expand(rows, steps).clone()
    inputs = normal(rows, steps, FEATURES)
    actions = torch.randint(0, ACTIONS, (rows, steps), generator=generator)
    with torch.no_grad():
        evaluation = policy(inputs, actions, mask)
    values = torch.zeros_like(evaluation.log_probs) if evaluation.values is None else evaluation.values
    following = successor_values(values, normal(rows), truncated=truncated, final_values=normal(rows, steps))
    if policy.critic_head is None:
        following = torch.zeros_like(following)
    return Rollout(
        inputs=inputs,
        actions=actions,
        mask=mask,
        old_log_probs=evaluation.log_probs,
        values=values,
        next_values=following,
        rewards=normal(rows, steps),
        terminated=terminated,
        truncated=truncated,
        unit=unit,  # type: ignore[arg-type]
        old_distribution=evaluation.distribution,
        ref_log_probs=evaluation.log_probs + 0.3 * normal(rows, steps),
        group=torch.arange(rows) // 2 if unit == "row" else None,
        steps=int(mask.sum()),
    )


def moved(rollout: Rollout, seed: int, size: float = 0.4) -> Rollout:
    """The same as collected by another policy, so that ratios are spread around 1 and values have changed since.

    For policies that are not ``exact``: of others the learner rejects one that disagrees with its own past.
    """
    noise = torch.randn(2, *rollout.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) * size
    old = rollout.old_log_probs + noise[0]
    return replace(rollout, old_log_probs=old, values=rollout.values + noise[1])


def gradient(
    policy: Policy,
    rollout: Rollout,
    objective: Objective,
    micro_batch: int | None = None,
    micro_batch_tokens: int | None = None,
) -> Tensor:
    """The gradient of one whole-batch update, flat, as the learner makes it: credit, normalisation, loss, backward."""
    return gradient_of(policy, rollout, assign_credit(rollout, objective), objective, micro_batch, micro_batch_tokens)


def gradient_of(
    policy: Policy,
    rollout: Rollout,
    credit: Credit,
    objective: Objective,
    micro_batch: int | None = None,
    micro_batch_tokens: int | None = None,
) -> Tensor:
    """The gradient of one whole-batch update with a given credit, flat."""
    one_pass = replace(objective, reuse=objective.reuse and Reuse(1, 1))
    adam = AdamSettings(1e-3, max_grad_norm=None)
    sizes = {"micro_batch": micro_batch, "micro_batch_tokens": micro_batch_tokens}
    trained = copy.deepcopy(policy)
    trained.exact = False  # rollouts may be those of another policy
    learner = Learner(trained, one_pass, LearnerSettings(adam, **sizes))
    learner.update(rollout, credit, LearnerState.seeded(0, 1))
    return learner.optimizers["policy"].gradients


def parameters(policy: nn.Module) -> Tensor:
    """All parameters as one flat copy."""
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def joined(*rollouts: Rollout) -> Rollout:
    """The rows of several rollouts as one."""
    return _cat(list(rollouts))


def _cat(trees: list[Any]) -> Any:
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(trees)
    if is_dataclass(first) and not isinstance(first, type):
        parts = {f.name: _cat([getattr(tree, f.name) for tree in trees]) for f in fields(first)}
        return replace(first, **parts)
    return sum(trees) if isinstance(first, int) else first


def state(total: int = 100) -> LearnerState:
    return LearnerState.seeded(0, total)


def update(learner: Learner, rollout: Rollout, at: LearnerState | None = None, **credit: Tensor) -> Metrics:
    """One update, with the credit that the objective assigns unless some of it is given."""
    assigned = replace(assign_credit(rollout, learner.objective), **credit)
    return learner.update(rollout, assigned, at or state())
