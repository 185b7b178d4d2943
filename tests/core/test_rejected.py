"""Options that are out of range or do not go together are rejected: one line with the field, its value and the remedy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from surefoot import (
    A2C,
    GRPO,
    ONLINE_DPO,
    PPO_CLIP,
    PPO_PENALTY,
    RLOO,
    TRPO,
    Clip,
    ClippedWeight,
    Constraint,
    Objective,
    Penalty,
    Reuse,
    SurefootError,
)
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import AdamSettings

from .worlds import TinyPolicy

ADAM = AdamSettings(0.01)
OUT_OF_RANGE: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (Reuse, {"epochs": 0}, "epochs=0"),
    (Reuse, {"minibatches": 0}, "minibatches=0"),
    (Clip, {"clip": 0.0}, "clip=0.0"),
    (Clip, {"clip": 1.1}, "clip=1.1"),
    (Clip, {"clip_high": 0.0}, "clip_high=0.0"),
    (Clip, {"dual_clip": 1.0}, "dual_clip=1.0"),
    (Clip, {"schedule": "cosine"}, "schedule='cosine'"),
    (Penalty, {"beta": -1.0}, "beta=-1.0"),
    (Penalty, {"target": 0.0}, "target=0.0"),
    (Penalty, {"beta": 0.0, "target": 0.01}, "beta=0.0"),
    (Penalty, {"fraction": 1.5}, "fraction=1.5: must lie in"),
    (Penalty, {"fraction": -0.1}, "fraction=-0.1: must lie in"),
    (Constraint, {"delta": 0.0}, "delta=0.0"),
    (Constraint, {"damping": -0.1}, "damping=-0.1"),
    (Constraint, {"cg_iterations": 0}, "cg_iterations=0"),
    (Constraint, {"shrink": 1.0}, "shrink=1.0"),
    (Constraint, {"shrink": 0.0}, "shrink=0.0"),
    (Constraint, {"tries": 0}, "tries=0"),
    (ClippedWeight, {"max_weight": 0.9}, "max_weight=0.9"),
]
TOGETHER: list[tuple[Objective, dict[str, Any], str]] = [
    (PPO_CLIP, {"gamma": 1.1}, "objective.gamma=1.1: must lie in"),
    (PPO_CLIP, {"entropy_coefficient": -0.1}, "objective.entropy_coefficient=-0.1: must not be negative"),
    (PPO_CLIP, {"target_kl": 0.0}, "objective.target_kl=0.0: must be positive"),
    (A2C, {"target_kl": 0.1}, "objective.target_kl=0.1: needs objective.reuse"),
    (PPO_PENALTY, {"reuse": None}, "objective.trust_region='penalty': .*objective.reuse"),
    (TRPO, {"target_kl": 0.01}, "objective.target_kl=0.01: .*bounded"),
    (TRPO, {"baseline": "mean", "gae_lambda": 1.0}, "objective.reuse=.*no critic"),
    (PPO_CLIP, {"scale_by_group": True}, "objective.scale_by_group=True: needs objective.baseline"),
    (RLOO, {"scale_by_group": True}, "objective.scale_by_group=True: needs objective.baseline"),
    (RLOO, {"ratio": "sequence"}, "objective.ratio='sequence': needs a reused batch"),
    (RLOO, {"drop_above_kl": 0.1}, "objective.drop_above_kl=0.1: needs a reused batch"),
    (PPO_CLIP, {"drop_above_kl": 0.1}, "objective.drop_above_kl=0.1: needs the same advantage at all tokens"),
    (GRPO, {"drop_above_kl": 0.0}, "objective.drop_above_kl=0.0: must be positive"),
    (GRPO, {"importance_cap": 0.5}, "objective.importance_cap=0.5: must be at least 1"),
    (GRPO, {"importance_mode": "token_mask"}, "objective.importance_mode='token_mask': needs objective.importance_cap"),
    (GRPO, {"pair_beta": 0.5}, "objective.pair_beta=0.5: needs objective.baseline"),
    (ONLINE_DPO, {"pair_beta": 0.0}, "objective.pair_beta=0.0: must be positive"),
    (ONLINE_DPO, {"reuse": Reuse(2, 1)}, "objective.reuse='2 epochs': is for other baselines"),
    (ONLINE_DPO, {"normalise_advantages": "batch"}, "objective.normalise_advantages='batch': would change the weights"),
    (GRPO, {"gae_lambda": 0.95}, "objective.gae_lambda=0.95: needs a critic"),
    (GRPO, {"value_clip": 0.2}, "objective.value_clip=0.2: needs a critic"),
    (PPO_CLIP, {"aggregation": "constant", "aggregation_length": 0}, "objective.aggregation_length=0"),
    (PPO_CLIP, {"aggregation_length": 8}, "objective.aggregation_length=8"),
]


def test_an_option_out_of_range_is_named_with_its_value() -> None:
    for kind, fields, message in OUT_OF_RANGE:
        with pytest.raises(SurefootError, match=message):
            kind(**fields)


def test_options_that_do_not_go_together_are_named_with_the_remedy() -> None:
    for base, changes, message in TOGETHER:
        with pytest.raises(SurefootError, match=message):
            replace(base, **changes)


def test_a_learner_rejects_what_its_policy_or_its_objective_can_not_do() -> None:
    """Dividing by the width of the padding would make the gradient depend on it."""
    learners = [
        (False, replace(PPO_CLIP, aggregation="constant"), LearnerSettings(ADAM), "objective.aggregation_length=None"),
        (False, PPO_CLIP, LearnerSettings(ADAM, schedule="adaptive", warmup=0.1), "optimizer.warmup=0.1: .*sets"),
        (False, A2C, LearnerSettings(ADAM, schedule="adaptive"), "optimizer.schedule='adaptive'"),
        (True, A2C, LearnerSettings(ADAM, ADAM), "optimizer.critic_learning_rate: .*shared_trunk"),
        (True, TRPO, LearnerSettings(ADAM), "objective.trust_region='constraint': .*no parameters of its own"),
    ]
    for shared, objective, settings, message in learners:
        with pytest.raises(SurefootError, match=message):
            Learner(TinyPolicy(shared=shared), objective, settings)
