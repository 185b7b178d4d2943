"""On a bandit, PPO with the KL in the reward converges to π_ref·exp(r/β)/Z: the end-to-end check of sign and scale.

Five arms, a reference that is far from uniform, and the loop, credit and learner that everything else uses. At that optimum
r − β log(π/π_ref) is the same for every arm, so that every advantage is zero and what is left of the noise dies out.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import DR_GRPO, GRPO, PPO_CLIP, RLOO, Reuse
from surefoot.core.algorithms import Objective
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.loop import run_loop
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import Evaluation, LearnerState, Policy, Rollout
from surefoot.functional import kl_shaped_rewards, token_entropy, token_log_probs

REWARDS = torch.tensor([1.0, 0.6, 0.0, -0.4, 0.3])
REFERENCE = torch.tensor([0.05, 0.15, 0.40, 0.30, 0.10])
BETAS = [0.5, 1.0]
BAR = 0.01
PULLS = 256
GROUP = 8


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
            ref_log_probs=reference,
            group=torch.arange(PULLS) // GROUP,
            steps=PULLS,
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


OBJECTIVE = Objective(
    baseline="critic", gae_lambda=PPO_CLIP.gae_lambda, reuse=Reuse(2, 2), trust_region=PPO_CLIP.trust_region, gamma=1.0
)


@cache
def learned(beta: float, objective: Objective = OBJECTIVE, batches: int = 60) -> Tensor:
    """The policy after so many batches of pulls."""
    policy = Arms()
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(0.05, max_grad_norm=None), schedule="linear"))
    run_loop(Pulls(policy, beta), learner, LearnerState.seeded(0, batches * PULLS), lambda state, metrics: False)
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
def test_the_bar_separates_the_optimum_from_that_of_a_wrong_sign_or_scale(beta: float) -> None:
    """Twice or half the β, the other sign, no reference, no reward: all are further away than the bar, by a wide margin."""
    actual = learned(beta)
    wrong = [optimum(beta * 2), optimum(beta / 2), optimum(-beta), REFERENCE, (REWARDS / beta).softmax(-1)]
    assert min(distance(actual, other) for other in wrong) > 3 * BAR


def test_a_penalty_of_the_wrong_sign_is_detected() -> None:
    """Paid for leaving the reference, the policy leaves it."""
    assert distance(learned(-0.5), optimum(0.5)) > 3 * BAR


# ---- baselines of groups ------------------------------------------------------------------------------------------------

COMPARED = {
    "RLOO": RLOO,
    "RLOO, reused": replace(RLOO, reuse=Reuse(2, 2), trust_region=PPO_CLIP.trust_region),
    "centred": replace(DR_GRPO, reuse=Reuse(2, 2), aggregation="token-mean"),
}


@pytest.mark.parametrize("name", COMPARED)
def test_comparing_in_groups_with_the_kl_in_the_reward_converges_there_too(name: str) -> None:
    """A factor on the advantage, such as 1 − 1/n of the mean that holds the response itself, moves no optimum."""
    assert distance(learned(0.5, COMPARED[name], 120), optimum(0.5)) <= BAR


def in_the_loss(beta: float, estimator: str, base: Objective = RLOO) -> Objective:
    reuse = {"reuse": Reuse(2, 2), "aggregation": "token-mean"}
    return replace(base, reference_coefficient=beta, reference_estimator=estimator, **reuse)


@pytest.mark.parametrize(("estimator", "beta"), [("k2", BETAS[0]), ("ratio_k3", BETAS[1])])
def test_a_kl_in_the_loss_with_the_right_gradient_converges_there_too(estimator: str, beta: float) -> None:
    assert distance(learned(0.0, in_the_loss(beta, estimator), 240), optimum(beta)) <= 2 * BAR


def other_optimum(beta: float) -> Tensor:
    """argmax E_π[r] − β·KL(π_ref‖π): π = β·π_ref/(λ − r), with λ by bisection."""
    low, high = float(REWARDS.max()), float(REWARDS.max()) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float((beta * REFERENCE / (middle - REWARDS)).sum()) > 1 else (low, middle)
    return beta * REFERENCE / (high - REWARDS)


def test_k3_in_the_loss_as_in_grpo_converges_to_the_optimum_of_the_other_kl() -> None:
    actual = learned(0.0, in_the_loss(0.5, GRPO.reference_estimator), 240)
    assert distance(actual, other_optimum(0.5)) <= 2 * BAR
    assert distance(actual, optimum(0.5)) > 3 * BAR
