"""Settings that recipes reject: the field is named, in one line."""

from typing import Any

import pytest

from surefoot.errors import SurefootError
from surefoot.recipes import rewards, rules
from surefoot.recipes.reading import make_recipe, merge_tables
from surefoot.recipes.spaces import nested

REWARD = {"terms": [{"function": "a.py:f"}]}
TEXT = {"model": "m", "data": {"train": "rows.jsonl"}}
SERVED = {"kind": "language", **TEXT, "reward": REWARD, "server": {}}
BASES: dict[str, dict[str, Any]] = {
    "control": {"task": "CartPole-v1"},
    **{kind: {"kind": kind, **TEXT} for kind in ("sft", "reward", "dpo")},
    "language": {"kind": "language", **TEXT, "reward": REWARD},
    "served": SERVED,
}
TERM: dict[str, Any] = {"function": "a.py:f"}
URL = {"url": "http://x"}
JUDGE = {"url": "http://x", "judge": {"model": "j", "prompt": "{prompt} {response}"}}
PPO = {"algorithm": "PPO_CLIP"}
WEIGHED = {"model": "m"}

# base, the field that is named, its value, and other changes
CASES: list[tuple[Any, ...]] = [
    ("control", "kind", "languag"),
    ("control", "steps", "many"),
    ("control", "steps", 0),
    ("control", "steps", 10.5),
    ("control", "steps", True),
    ("control", "seed", -1),
    ("control", "seed", 2**63),
    ("control", "seed", 2**63 - 1),
    ("control", "task", 3),
    ("control", "device", "gpu0"),
    ("control", "algorithm", "PPO_CLOP"),
    ("control", "algorithm", [1]),
    ("control", "environment", "a=1"),
    ("control", "environment", {"a": float("nan")}),
    ("control", "environment.a", 10**400),
    ("control", "objective", 3),
    ("control", "optimizer", 3),
    ("control", "network", 3),
    ("control", "network.hidden", 64),
    ("control", "network.hidden.0", None, {"network.hidden": ["wide"]}),
    ("control", "network.hidden.0", None, {"network.hidden": [10**10]}),
    ("control", "network.hidden", [8] * 101),
    ("control", "network.hidden", [10**400]),
    ("control", "objective.gae_lambda", "two"),
    ("control", "objective.gae_lambda", 2),
    ("control", "objective.value_coefficient", float("inf")),
    ("control", "objective.reuse.epochs", True),
    ("control", "objective.reuse.minibatches", 7),
    ("control", "objective.reuse.minibatches", 3, {"network.lstm": 8}),
    ("control", "objective.trust_region", 3),
    ("control", "objective.trust_region", {"clip": 0.2, "beta": 1.0}),
    ("control", "objective.trust_region.beta", "x"),
    ("control", "objective.trust_region.beta", -1),
    ("control", "objective.trust_region.delta", True, {"algorithm": "TRPO"}),
    ("control", "objective.trust_region", "penalty", {"algorithm": "PPO_PENALTY", "objective.reuse": "none"}, None),
    ("control", "objective.target_kl", 0.1, {"algorithm": "TRPO"}),
    ("control", "objective.gae_lambda", 0.5, {"objective.baseline": "mean"}),
    ("control", "objective.ratio", "sequence"),
    ("control", "objective.aggregation", "sequence-mean"),
    ("control", "objective.reference_coefficient", 0.1),
    ("control", "objective.importance_cap", 2.0),
    ("control", "objective.router_coefficient", 0.1),
    *(("control", "objective.baseline", None, {"algorithm": name}) for name in ("GRPO", "DAPO", "GSPO", "RLOO", "ONLINE_DPO")),
    ("control", "objective.normalise_advantages", "batch", {"rollout.environments": 1, "rollout.steps": 1, "algorithm": "A2C"}),
    ("control", "optimizer.kind", "adam-8bit"),
    ("control", "optimizer.learning_rate", float("nan")),
    ("control", "optimizer.learning_rate", 0.0),
    *(("control", "optimizer.warmup", value) for value in (-0.1, 1.0)),
    ("control", "optimizer.schedule", "square"),
    ("control", "optimizer.micro_batch_tokens", 512),
    ("control", "optimizer.critic_learning_rate", 1e-3, {"algorithm": "REINFORCE"}),
    ("control", "optimizer.critic_learning_rate", 1e-3, {"network.shared_trunk": True}),
    ("control", "network.shared_trunk", True, {"algorithm": "TRPO"}),
    ("control", "network.shared_trunk", True, {"network.critic_parts": ["critic"]}),
    ("control", "network.critic_parts", ["critic"], {"algorithm": "REINFORCE"}),
    ("control", "rollout.environments", 0),
    ("control", "rollout.steps", 0),
    ("control", "evaluation.episodes", -1),
    ("control", "checkpoint.keep", 0),
    ("control", "rollout.environments", 10**6, {"rollout.steps": 10**6}),
    ("control", "rollout.symmetry", "a:b", {"network.lstm": 8, "objective.reuse.minibatches": 2}),
    ("control", "rollout.workers", 2),
    ("control", "rollout.workers", 9, {"rollout.backend": "workers"}),
    ("control", "preferences.errors", 0.1, {"preferences.judge": "people"}),
    ("control", "rollout.backend", "native", {"preferences.labels": 4}),
    ("control", "rollout.backend", "threads"),
    ("control", "rollout.backend", "native", {"algorithm": "REINFORCE"}),
    ("control", "rollout.deadline", 0),
    ("control", "rollout.info", ["return"]),
    ("control", "rollout.info", 3),
    ("control", "rollout.info.0", None, {"rollout.info": [""]}),
    ("control", "normalise.observations", []),
    ("control", "normalise.observations", [1]),
    ("control", "optimizer.kind", "sgd"),
    ("control", "optimizer.weight_decay", -0.1),
    ("control", "optimizer.schedule", "adaptive", {"engine": "compiled"}),
    ("control", "optimizer.micro_batch", 3, {"engine": "compiled"}),
    ("control", "engine", "compiled", {"optimizer.kind": "rmsprop"}),
    ("control", "engine", "compiled", {"optimizer.weight_decay": 0.1}),
    ("control", "engine", "compiled", {"algorithm": "REINFORCE"}),
    ("control", "engine", "compiled", {"device": "cuda"}),
    ("control", "engine", "compiled", {"algorithm": "TRPO", "network.lstm": 8, "objective.reuse.minibatches": 2}),
    *(("control", f"traces.{name}", value) for name, value in (("every", 0), ("rows", -1), ("max_megabytes", 0))),
    ("sft", "start", "runs/x"),
    ("sft", "objective", None, PPO),
    ("sft", "objective.aggregation_length", None, {"objective.aggregation": "constant"}),
    ("sft", "objective.kl_estimator", "exact"),
    ("sft", "optimizer.critic_learning_rate", 0.1),
    ("sft", "optimizer.kind", "adam-8bit", {"sharding": "full"}),
    ("sft", "precision", "nf4"),
    ("sft", "precision", "int8"),
    ("sft", "precision", "half"),
    ("sft", "adapter", {}, {"model": "pocket"}),
    ("sft", "adapter.quantize", "fp4"),
    ("sft", "adapter.rank", 0),
    ("sft", "adapter.targets", []),
    ("sft", "adapter.quantize", "nf4", {"sharding": "full"}),
    ("sft", "adapter.dropout", 0.1, {"gradient_checkpointing": True}),
    ("sft", "sharding", "some"),
    ("sft", "reshard_after_forward", False),
    ("sft", "offload", True),
    ("sft", "offload", ["reference"]),
    ("sft", "data.columns", {"a": "prompt", "b": "prompt"}),
    ("sft", "data.columns", {"a": ""}),
    ("sft", "engine", "compiled", {"adapter.dropout": 0.1}),
    ("sft", "engine", "compiled", {"sharding": "full"}),
    ("sft", "engine", "compiled", {"objective.router_coefficient": 0.1}),
    ("reward", "engine", "compiled", {"adapter.quantize": "nf4"}),
    ("reward", "objective.router_coefficient", 0.1),
    ("reward", "preference.loss", "kto"),
    ("reward", "preference.separator", "; ", {"preference.loss": "binary"}),
    ("reward", "demonstrations", "x.jsonl", {"preference.loss": "steps"}),
    ("reward", "head", "pooled", {"preference.loss": "steps"}),
    ("dpo", "engine", "compiled", {"gradient_checkpointing": True}),
    ("dpo", "objective", None, PPO),
    ("dpo", "objective.aggregation", "token-mean"),
    ("dpo", "objective.router_coefficient", 0.1),
    ("dpo", "optimizer.critic_learning_rate", 0.1),
    ("dpo", "reference.beta", 0.0),
    ("dpo", "reference.model", "x", {"preference.loss": "simpo"}),
    ("dpo", "preference.loss", "hinge"),
    ("dpo", "preference.label_smoothing", 0.5),
    ("dpo", "preference.label_smoothing", 0.1, {"preference.loss": "kto"}),
    ("dpo", "preference.margin", 2.0),
    ("dpo", "preference.desirable_weight", 2.0, {"preference.loss": "ipo"}),
    ("dpo", "preference.undesirable_weight", 0.0),
    ("dpo", "preference.undesirable_weight", 2.0),
    ("language", "algorithm", "TRPO"),
    ("language", "objective.kl_estimator", "exact", {"objective.target_kl": 0.1}),
    ("language", "objective.gamma", 0.0, {"algorithm": "GRPO"}),
    ("language", "objective.gamma", 0.0, {"algorithm": "RLOO"}),
    ("language", "objective.scale_by_group", True, {"objective.baseline": "critic"}),
    ("language", "objective.reuse.minibatches", 4, {"sampling.prompts": 6}),
    ("language", "objective.importance_cap", 3.0, {"sampling.old_log_probs": "sampler"}),
    ("language", "optimizer.critic_learning_rate", 1e-3, {"algorithm": "GRPO"}),
    ("language", "sampling", 3),
    ("language", "sampling.prompts", 10**6, {"sampling.samples": 10**6}),
    ("language", "sampling.samples", 1, {"algorithm": "GRPO"}),
    ("language", "sampling.rounds", 2, PPO),
    ("language", "sampling.rounds", 0),
    ("language", "sampling.max_tokens", "many", {"algorithm": "DR_GRPO"}),
    ("language", "sampling.stop.0", None, {"sampling.stop": [""]}),
    ("language", "sampling.engine", "packed", {"precision": "bfloat16-weights"}),
    ("language", "sampling.engine", "continuous", {"sharding": "full"}),
    ("language", "sampling.ahead", 1),
    ("language", "sampling.old_log_probs", "update", PPO),
    ("language", "sampling.old_log_probs", "update", {"algorithm": "RLOO"}),
    ("language", "sampling.old_log_probs", "update", {"algorithm": "ONLINE_DPO"}),
    ("language", "sampling.old_log_probs", "update", {"algorithm": "GRPO", "objective.importance_cap": 2.0}),
    ("language", "adapter.dropout", 0.1),
    ("language", "reward", None, {"reward.terms": []}),
    ("language", "reward.overlong", 1.5),
    ("language", "reward.missing_eos", "bootstrap", {"algorithm": "GRPO"}),
    ("language", "reward.missing_eos_value", 0.0),
    ("language", "reference.target", 1.0, {"reference.beta": 0.0}),
    ("language", "reference.horizon", 10, {"reference.target": 1.0}),
    ("language", "critic.own_model", True, {"algorithm": "GRPO"}),
    ("language", "critic.start", "x"),
    ("language", "critic.label", "x"),
    ("language", "evaluation.demonstrations", "x", {"evaluation.rows": 0}),
    ("language", "mixing.sft_coefficient", 0.1),
    ("language", "mixing.sft_coefficient", -1.0),
    ("language", "offload", ["policy"]),
    ("language", "offload", "critic,value"),
    ("language", "offload", ["critic"]),
    ("language", "offload", ["critic"], {"critic.own_model": True, "adapter.rank": 2}),
    ("language", "offload", ["critic"], {"algorithm": "GRPO"}),
    ("language", "offload", ["critic"], {"critic.own_model": True, "sharding": "full"}),
    ("language", "offload", ["reference"], {"reference.beta": 0.0}),
    ("language", "offload", ["reference"], {"adapter.rank": 2}),
    ("language", "offload", ["reward"]),
    ("served", "server", None, {"sampling.engine": "packed"}),
    ("served", "server.token_from", "secret"),
    ("served", "sampling.engine", None, {"model": "pocket"}),
    ("served", "sampling.engine", None, {"sharding": "full"}),
    ("served", "sampling.rows", 8),
    ("served", "sampling.ahead", 1, {"turns.environment": "a:b"}),
    ("served", "sampling.ahead", 1, {"algorithm": "GRPO", "sampling.samples": 2, "sampling.rounds": 2}),
    ("served", "sampling.ahead", 1, {"sampling.old_log_probs": "update"}),
]
TERMS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"fun": "x:y"}, ".fun"),
    ({**TERM, "model": "m"}, ""),
    ({**TERM, "weight": float("nan")}, ".weight"),
    ({**TERM, "label": "x"}, ".label"),
    *(
        ({**TERM, name: value}, f".{name}")
        for name, value in (("batch", 2), ("at_once", 2), ("retries", 0), ("token_from", "A"))
    ),
    ({**TERM, "judge": JUDGE["judge"]}, ".judge"),
    ({**TERM, "per": "token", "separator": ";"}, ".separator"),
    ({**WEIGHED, "arguments": {"a": 1}}, ".arguments"),
    ({**WEIGHED, "per": "token"}, ".per"),
    ({**WEIGHED, "per": "step"}, ".per"),
    ({**WEIGHED, "separator": ";"}, ".per"),
    ({**URL, "token_from": "secret"}, ".token_from"),
    *(
        ({**JUDGE, name: value}, f".{name}")
        for name, value in (("batch", 8), ("at_once", 2), ("per", "step"), ("separator", ";"))
    ),
    *(
        ({**URL, "judge": {**JUDGE["judge"], **fields}}, f".judge.{name}")  # type: ignore[dict-item]
        for name, fields in (
            ("prompt", {"prompt": "Rate {prompt}"}),
            ("prompt", {"against": "answer"}),
            ("pattern", {"pattern": "("}),
            ("key", {"pattern": "1", "key": "score"}),
        )
    ),
]


def rejection(table: dict[str, Any]) -> str:
    with pytest.raises(SurefootError) as error:
        make_recipe(table)
    return str(error.value)


def test_an_invalid_setting_is_named_in_one_line() -> None:
    for base, field, value, *changes in CASES:
        tables = [nested(table) for table in ({} if value is None else {field: value}, *filter(None, changes[:1]))]
        line = rejection(merge_tables(BASES[base], merge_tables(*tables) if len(tables) > 1 else tables[0]))
        assert line.startswith((f"{field}=", f"{field}:")), (base, field, value, changes, line)
        assert "secret" not in line
        assert len(line) < 300


def test_an_invalid_term_of_the_reward_is_named_in_one_line() -> None:
    for term, field in TERMS:
        line = rejection({**BASES["language"], "reward": {"terms": [TERM, term]}})
        starts = tuple(f"reward.terms{place}{field}{end}" for place in ("[1]", ".1") for end in "=:")
        assert line.startswith(starts), (term, line)
        assert "secret" not in line


def test_every_field_that_is_for_something_has_a_case() -> None:
    assert {field for field, *_ in rules.FIELDS_FOR} <= {field for _, field, *_ in CASES}
    assert {f".{field}" for field, *_ in rewards.FIELDS_FOR} <= {field for _, field in TERMS}


def test_as_many_workers_as_environments_are_allowed() -> None:
    settings = {"rollout.environments": 4, "rollout.workers": 4, "rollout.backend": "workers"}
    make_recipe(merge_tables(BASES["control"], nested(settings)))
