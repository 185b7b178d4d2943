"""A response of three tokens, worked out by hand: KL, rewards, advantages, returns and loss.

The model says the same whatever stands before: its logits are the bias of its head. "a", "b" and EOS have probability
.5, .3, .2 under the policy and .25, .25, .5 under the reference; V is 0.5 everywhere. The response is "a", "b", EOS and scores
2; β is 0.1.

    k1        ln 2         ln 1.2       ln 0.4         (log π − log π_ref)
    r         −0.0693147   −0.0182322   2 + 0.0916291  (−β·k1, and the score at EOS)
    δ         −0.0693147   −0.0182322   1.5916291      (γ = 1, V(s') − V(s) = 0, and −0.5 at the end)
    Â          1.3498099    1.4938154   1.5916291      (λ = .95, from the right)

Then the policy moves to .65, .15, .2: ρ = 1.3, .5, 1. All Â are above 0, so that the clip at 1.2 cuts the first alone.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefoot import PPO_CLIP
from surefoot.core.credit import assign_credit
from surefoot.core.minibatches import global_count, rows_of
from surefoot.core.objective import loss
from surefoot.core.rollout import LearnerState, Rollout, map_tensors

from .tiny import fields_of, set_probabilities, world_of

BETA = 0.1
POLICY, MOVED, REFERENCE = (0.5, 0.3, 0.2), (0.65, 0.15, 0.2), (0.25, 0.25, 0.5)
ADVANTAGES = (1.3498099, 1.4938154, 1.5916291)
OBJECTIVE = replace(PPO_CLIP, gamma=1.0, gae_lambda=0.95, value_coefficient=0.1, normalise_advantages=None)


def near(actual: torch.Tensor, *wanted: float) -> None:
    torch.testing.assert_close(actual[0, :3], torch.tensor(wanted), rtol=0, atol=2e-6)


def test_kl_rewards_advantages_and_loss_are_those_worked_out_by_hand(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("def two(responses):\n    return [2.0] * len(responses)\n")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    sampling = {"prompts": 4, "samples": 64, "max_tokens": 8}
    fields = fields_of(folders["gpt2"], tmp_path / "prompts.jsonl", f"{tmp_path}/two.py:two", sampling=sampling)
    made = world_of({**fields, "reference": {"beta": BETA}})
    ids = [*made.tokens.encode_completion("ab")]
    set_probabilities(made.policy.model, ids, POLICY)
    set_probabilities(made.reference.policy.model, ids, REFERENCE)
    with torch.no_grad():
        made.policy.value_head.bias.fill_(0.5)
    whole = made.collector.collect(LearnerState.seeded(1, 256))
    row = [tokens[kept].tolist() for tokens, kept in zip(whole.actions, whole.mask, strict=True)].index(ids)
    rollout: Rollout = map_tensors(lambda x: x[row : row + 1], whole)
    near(rollout.reward_parts["kl"], math.log(2), math.log(1.2), math.log(0.4))
    near(rollout.rewards, -0.0693147, -0.0182322, 2.0916291)
    near(rollout.values, 0.5, 0.5, 0.5)
    credit = assign_credit(rollout, OBJECTIVE)
    near(credit.advantages, *ADVANTAGES)
    near(credit.returns, *(a + 0.5 for a in ADVANTAGES))
    assert credit.advantages[0, 3:].eq(0).all()

    batch = rows_of(rollout, credit)
    set_probabilities(made.policy.model, ids, MOVED)
    evaluation = made.policy(batch.inputs, batch.actions, batch.mask)
    total, terms, metrics, ratio = loss(evaluation, batch, OBJECTIVE, denominator=global_count(batch, "token-mean"))
    near(ratio, 1.3, 0.5, 1.0)
    wanted = {
        "policy_loss": -1.3194362,  # −(1.2·Â₁ + .5·Â₂ + Â₃) / 3
        "value_loss": 2.1955848,  # V − R̂ = −Â
        "kl": (0.3 - math.log(1.3) + math.log(2) - 0.5) / 3,  # ρ − 1 − ln ρ; 0.0769276
        "entropy": 0.8864645,  # of .65, .15, .2
        "clip_active": 1 / 3,
        "ratio_outside": 2 / 3,
    }
    for name, value in wanted.items():
        assert float((terms | metrics)[name]) == pytest.approx(value, abs=2e-6), name
    c_e = OBJECTIVE.entropy_coefficient
    assert float(total.detach()) == pytest.approx(-1.3194362 + 0.1 * 2.1955848 - c_e * 0.8864645, abs=2e-6)
