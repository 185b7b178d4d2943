"""A bandit on several ranks, with a collector of its own."""

import sys

import torch
from torch import nn

from surefoot import REINFORCE_BASELINE, SurefootError
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.loop import run_loop
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import Evaluation, LearnerState, Policy, Rollout
from surefoot.functional import token_entropy, token_log_probs
from surefoot.ranks.launching import process_group


class Arms(Policy):
    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(3))  # the same on every rank

    def forward(self, inputs, actions, mask=None):
        logits = self.logits.expand(*actions.shape, -1)
        return Evaluation(token_log_probs(logits, actions), token_entropy(logits))


class Pulls:
    def __init__(self, policy, count=64):
        self.policy, self.count = policy, count

    @torch.no_grad()
    def collect(self, state):
        drawn = torch.multinomial(self.policy.logits.softmax(-1), self.count, True, generator=state.generators["sample"])
        actions, ended, zeros = drawn[:, None], torch.ones(self.count, 1, dtype=torch.bool), torch.zeros(self.count, 1)
        return Rollout(
            inputs=zeros,
            actions=actions,
            mask=ended,
            old_log_probs=self.policy(zeros, actions).log_probs,
            values=zeros,
            next_values=zeros,
            rewards=torch.tensor([0.0, 0.2, 1.0])[actions],
            terminated=ended,
            truncated=~ended,
            steps=self.count,
        )

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def main():
    with process_group("gloo", timeout=60) as rank:
        policy = Arms()
        state = LearnerState.seeded(0, total_steps=20_000)
        state.generators["sample"].manual_seed(1_000 + rank)  # each rank pulls its own arms
        learner = Learner(policy, REINFORCE_BASELINE, LearnerSettings(AdamSettings(0.05)))
        run_loop(Pulls(policy), learner, state, lambda state, metrics: False)
        if rank == 0:
            print(state.steps, [round(p, 2) for p in policy.logits.softmax(-1).tolist()])


if __name__ == "__main__":
    try:
        main()
    except SurefootError as error:  # another rank died, or does not answer
        sys.exit(f"ranks.py: {error}")
