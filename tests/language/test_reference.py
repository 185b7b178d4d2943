"""The reference of online runs exists only if something uses it, and measuring its KL does not change training."""

from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.language.memory.check import workload_of
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.reading import make_recipe
from surefoot.store.metrics import read_metrics

from .test_online import collected, fields, world
from .test_online import files as files

GROUPS: dict[str, Any] = {"sampling": {"prompts": 4, "samples": 4, "max_tokens": 8}}
KL_METRICS = {"kl_reference", "kl_reference_response", "held_out_kl"}


def recipe_of(files: dict[str, str], model: Path, **changes: Any) -> LanguageRecipe:
    made = make_recipe({"kind": "language", **fields(files, model, **changes)})
    assert isinstance(made, LanguageRecipe)
    return made


@pytest.mark.parametrize(
    ("changes", "exists"),
    [
        ({}, True),
        ({"reference": {"beta": 0.0}}, False),
        ({"reference": {"beta": 0.0, "measure": True}}, True),
        ({"algorithm": "GRPO", **GROUPS}, True),
        ({"algorithm": "DR_GRPO", **GROUPS}, False),
        ({"algorithm": "DAPO", **GROUPS}, False),
        ({"algorithm": "CISPO", **GROUPS}, False),
        ({"algorithm": "DAPO", "reference": {"beta": 0.1}, **GROUPS}, True),
        ({"algorithm": "DAPO", "objective": {"reference_coefficient": 0.1}, **GROUPS}, True),
    ],
)
def test_reference_exists_and_is_planned_only_if_something_uses_it(
    changes: Any, exists: bool, files: dict[str, str], folders: dict[str, Path]
) -> None:
    made = world(files, folders["llama"], **changes)
    assert (made.reference is not None) == exists
    assert (workload_of(made.recipe, prompt=8, response=8).reference is not None) == exists
    assert any("no reference" in line for line in made.arithmetic()) != exists
    rollout = collected(made)
    assert (
        (rollout.ref_log_probs is not None) == exists == ("kl" in rollout.reward_parts) == ("kl_reference" in rollout.metrics)
    )


def test_explicit_reference_model_is_kept_without_a_penalty(files: dict[str, str], folders: dict[str, Path]) -> None:
    recipe = recipe_of(files, folders["llama"], reference={"beta": 0.0, "model": str(folders["llama"])})
    assert recipe.has_reference
    assert workload_of(recipe, prompt=8, response=8).reference is not None


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("algorithm", ["PPO_CLIP", "DAPO"])
def test_measuring_the_reference_changes_no_weight_and_no_other_metric(
    algorithm: str, adapter: bool, files: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"algorithm": algorithm, "steps": 48, **(GROUPS if algorithm == "DAPO" else {})}
    changes["data"] = {"train": files["prompts"], "held_out": files["prompts"], "max_length": 32}
    changes["evaluation"] = {"rows": 4, "every": 16}
    if adapter:
        changes["adapter"] = {"rank": 2, "merge": False}
    runs = {}
    for measure in (False, True):
        settings = fields(files, folders["llama"], **changes, reference={"beta": 0.0, "measure": measure})
        trained = surefoot.train("language", run_dir=tmp_path / str(measure), check_memory=False, **settings)
        runs[measure] = trained.model.state_dict(), read_metrics(tmp_path / str(measure) / "metrics.jsonl")
    for name, weight in runs[False][0].items():
        assert torch.equal(weight, runs[True][0][name]), name
    for without, measured in zip(runs[False][1], runs[True][1], strict=True):
        assert not KL_METRICS & without.keys()
        assert {"kl_reference", "kl_reference_response"} <= measured.keys()
        for name in ("reward", "policy_loss", "gradient_norm_policy", "held_out_reward", "updates"):
            assert without.get(name) == measured.get(name), name
