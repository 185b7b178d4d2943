"""Two ranks that split the prompts or rows match one process: same responses and same updates."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import on_ranks

from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState, Rollout, World
from surefoot.errors import SurefootError
from surefoot.ranks.collectives import sum_count
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.base import Recipe
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner, make_world

from .tiny import write_folder, write_texts
from .vllm_stand_in import StandIn

RANKS = 2


TEXT: dict[str, Any] = {
    "kind": "language",
    "model": "FOLDER/model",
    "data": {"train": "FOLDER/rows.jsonl", "max_length": 32},
    "sampling": {"prompts": 5, "samples": 2, "max_tokens": 6},  # one rank gets three prompts, the other two
}
ONLINE = TEXT | {
    "algorithm": "A2C",
    "reward": {"terms": [{"function": "FOLDER/rewards.py:score"}], "missing_eos": "none", "tolerated": 0.5},
    "reference": {"beta": 0.1, "target": 0.5, "horizon": 20},
}
SFT: dict[str, Any] = {"kind": "sft", "model": "FOLDER/model"}
SFT |= {"data": {"train": "FOLDER/rows.jsonl", "max_length": 64, "batch": 5}}
RECIPES: dict[str, dict[str, Any]] = {
    "online": ONLINE,
    # of seven demonstrations of unequal length, one rank has four in every update
    "mixed": ONLINE | {"mixing": {"sft_coefficient": 0.5, "demonstrations": "FOLDER/rows.jsonl", "batch": 7}},
    "supervised": SFT,
    # scores are sums over answers of unequal length
    "compared": SFT | {"kind": "reward", "head": "pooled", "data": SFT["data"] | {"train": "FOLDER/pairs.jsonl"}},
    # the tokens of each expert are counted over both ranks
    "routed": SFT | {"model": "FOLDER/mixture", "objective": {"router_coefficient": 0.5}},
    # scores are often constant, and groups of one rank replace those of the other
    "in groups": TEXT
    | {
        "algorithm": "DAPO",
        "sampling": TEXT["sampling"] | {"rounds": 4},
        "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    }
    | {"reward": {"terms": [{"function": "FOLDER/rewards.py:rarely"}], "overlong": "none"}},
    # rank 0 sends the server weights, and both ranks request responses
    "served": ONLINE | {"server": {"url": "URL", "weights": "FOLDER/weights"}},
}


def recipe_of(name: str, folder: Path) -> Recipe:
    text = json.dumps(RECIPES[name]).replace("FOLDER", str(folder)).replace("URL", (folder / "url").read_text())
    return make_recipe(json.loads(text))


def prompts_and_tokens(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """Prompt and response tokens of each trained row."""
    if "chosen" in rollout.inputs:
        both = zip(rollout.inputs["chosen"], rollout.inputs["chosen_mask"], strict=True)
        return [(chosen[is_real].tolist(), []) for chosen, is_real in both]
    prompts, kept = rollout.inputs["prompt"], rollout.inputs["prompt_mask"]
    rows = zip(prompts, kept, rollout.actions, rollout.mask, strict=True)
    pairs = [(prompt[is_real].tolist(), tokens[is_kept].tolist()) for prompt, is_real, tokens, is_kept in rows]
    return pairs if rollout.metrics.get("sampling_rounds") is None else [row for row in pairs if row[1]]


def trained(recipe: Recipe) -> dict[str, Any]:
    """Sampled rows, metrics, β and weights of three iterations."""
    world: World = make_world(recipe)
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 1_000)
    learner.auxiliary_loss = world.auxiliary_loss
    results: dict[str, Any] = {"rows": [], "rounds": 0, "metrics": []}
    for _ in range(3):
        rollout = world.collector.collect(state)
        assert recipe.kind in ("sft", "reward") or len(rollout.mask) >= 4, "every rank has rows"
        learner.update(rollout, assign_credit(rollout, recipe.objective), state)
        state.steps += sum_count(rollout.steps, rollout.rewards)
        results["rows"].append(prompts_and_tokens(rollout))
        results["metrics"].append({name: rollout.metrics[name] for name in ("reward", "score_std") if name in rollout.metrics})
        results["rounds"] = max(results["rounds"], rollout.metrics.get("sampling_rounds") or 0)
    return {**results, "beta": dict(state.coefficients), "weights": dict(world.policy.state_dict())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ranks")
    write_folder(folder / "model", "llama")
    write_folder(folder / "mixture", "mixtral")
    write_texts(folder)
    source = (
        "def score(responses):\n    return [None if ord(t[:1] or 'a') % 5 == 0 else float(len(set(t))) for t in responses]\n"
    )
    source += "def rarely(responses):\n    return [float(ord(t[:1] or 'a') % 3 == 0) for t in responses]\n"
    (folder / "rewards.py").write_text(source)
    server = StandIn(folder / "model")
    (folder / "url").write_text(server.url)
    yield folder
    server.close()


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    def body(_: int) -> dict[str, Any]:
        join_ranks()
        results: dict[str, Any] = {name: trained(recipe_of(name, folder)) for name in RECIPES}
        try:
            trained(make_recipe({"kind": "sft", "model": str(folder / "model"), "data": {**few, "batch": 1}}))
        except SurefootError as error:
            results["too few"] = str(error)
        return results

    few = {"train": str(folder / "rows.jsonl"), "max_length": 64}
    return on_ranks(RANKS, body, folder / "results")


@pytest.mark.parametrize("kind", RECIPES)
def test_two_ranks_match_the_rows_and_updates_of_one_process(kind: str, ranks: list[dict[str, Any]], folder: Path) -> None:
    alone = trained(recipe_of(kind, folder))
    assert kind != "in groups" or alone["rounds"] > 1
    for iteration, rows in enumerate(alone["rows"]):
        shares = [rank[kind]["rows"][iteration] for rank in ranks]
        assert kind == "in groups" or len(shares[0]) > len(shares[1]) > 0
        assert sorted(shares[0] + shares[1]) == sorted(rows)
    for rank in ranks:
        assert rank[kind]["beta"] == pytest.approx(alone["beta"], rel=1e-5)
        for name, weights in alone["weights"].items():
            torch.testing.assert_close(rank[kind]["weights"][name], weights, rtol=1e-4, atol=2e-6)
    assert ranks[0][kind]["beta"] == ranks[1][kind]["beta"]
    assert ranks[0][kind]["metrics"] == ranks[1][kind]["metrics"]
    for ours, whole in zip(ranks[0][kind]["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(whole, rel=1e-5)
    assert kind in ("supervised", "compared", "routed") or min(whole["score_std"] for whole in alone["metrics"]) > 0


def test_fewer_rows_than_ranks_are_rejected_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """If only one rank raised, the others would wait for it."""
    assert [rank["too few"] for rank in ranks] == [
        "1 rows in each batch: too few for 2 ranks; give at least one row per rank"
    ] * 2
