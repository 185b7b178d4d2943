"""On a bandit, PPO with the KL in the reward converges to π_ref·exp(r/β)/Z: the end-to-end check of sign and scale.

Five arms, a reference that is far from uniform, and the loop, credit and learner that everything else uses. At that optimum
r − β log(π/π_ref) is the same for every arm, so that every advantage is zero and what is left of the noise dies out.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import PPO_CLIP, Reuse
from surefoot.algorithms import Objective
from surefoot.functional import kl_shaped_rewards, token_entropy, token_log_probs
from surefoot.learner import Learner
from surefoot.loop import run_loop
from surefoot.optimizer import AdamSettings
from surefoot.rollout import Evaluation, LearnerState, Policy, Rollout

REWARDS = torch.tensor([1.0, 0.6, 0.0, -0.4, 0.3])
REFERENCE = torch.tensor([0.05, 0.15, 0.40, 0.30, 0.10])
BETAS = [0.5, 1.0]
BAR = 0.01
PULLS = 256


class Arms(Policy):
    """A softmax over the arms, and one number for V. The inputs say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(len(REWARDS)))
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        logits = self.logits.expand(*actions.shape, -1)
        return Evaluation(token_log_probs(logits, actions), token_entropy(logits), self.value.expand(actions.shape))


class Pulls:
    """Episodes of one pull each."""

    def __init__(self, policy: Arms, beta: float) -> None:
        self.policy, self.beta = policy, beta

    @torch.no_grad()
    def collect(self, state: LearnerState) -> Rollout:
        probabilities = self.policy.logits.softmax(-1)
        drawn = torch.multinomial(probabilities, PULLS, replacement=True, generator=state.generators["sample"])
        actions = drawn.unsqueeze(-1)
        mask, nothing = torch.ones_like(actions, dtype=torch.bool), torch.zeros(PULLS, 1)
        here = self.policy(nothing, actions)
        reference = REFERENCE.log()[actions]
        return Rollout(
            inputs=nothing,
            actions=actions,
            mask=mask,
            old_log_probs=here.log_probs,
            values=here.values.clone(),  # V is itself a parameter here, and moves
            next_values=torch.full((PULLS, 1), torch.nan),
            rewards=kl_shaped_rewards(REWARDS[actions], here.log_probs, reference, mask, self.beta),
            terminated=mask,
            truncated=~mask,
            steps=PULLS,
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


OBJECTIVE = Objective(
    baseline="critic", gae_lambda=PPO_CLIP.gae_lambda, reuse=Reuse(2, 2), trust_region=PPO_CLIP.trust_region, gamma=1.0
)


@cache
def learned(beta: float) -> Tensor:
    """The policy after 60 batches of pulls."""
    policy = Arms()
    learner = Learner(policy, OBJECTIVE, AdamSettings(0.05, max_grad_norm=None), schedule="linear")
    run_loop(Pulls(policy, beta), learner, LearnerState.seeded(0, 60 * PULLS), lambda state, metrics: False)
    return policy.logits.detach().softmax(-1)


def optimum(beta: float) -> Tensor:
    weight = REFERENCE * (REWARDS / beta).exp()
    return weight / weight.sum()


def distance(a: Tensor, b: Tensor) -> float:
    """Total variation."""
    return float((a - b).abs().sum() / 2)


@pytest.mark.parametrize("beta", BETAS)
def test_ppo_with_the_kl_in_the_reward_converges_to_the_tilted_reference(beta: float) -> None:
    assert distance(learned(beta), optimum(beta)) <= BAR


@pytest.mark.parametrize("beta", BETAS)
def test_the_bar_tells_the_optimum_from_that_of_a_wrong_sign_or_scale(beta: float) -> None:
    """Twice or half the β, the other sign, no reference, no reward: all are further away than the bar, by a wide margin."""
    found = learned(beta)
    wrong = [optimum(beta * 2), optimum(beta / 2), optimum(-beta), REFERENCE, (REWARDS / beta).softmax(-1)]
    assert min(distance(found, other) for other in wrong) > 3 * BAR


def test_a_penalty_of_the_wrong_sign_is_found_out() -> None:
    """Paid for leaving the reference, the policy leaves it."""
    assert distance(learned(-0.5), optimum(0.5)) > 3 * BAR
