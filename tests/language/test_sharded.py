"""Models sharded over two ranks train like one process with whole models: same gradients, updates and metrics."""

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import on_ranks, own_memory
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState, World
from surefoot.errors import SurefootError
from surefoot.language.models import placement
from surefoot.language.models.placement import shard_role
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.terms import parts_of
from surefoot.language.supervised import reference as references
from surefoot.language.supervised import world as worlds
from surefoot.ranks.collectives import check_same_weights, sum_count
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.base import Recipe
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner, make_world
from surefoot.sharding import gathered, is_sharded, local_part

from .tiny import model, tokenizer, write_folder, write_texts

RANKS = 2
METRICS = (
    "policy_loss",
    "sft_loss",
    "value_loss",
    "gradient_norm_policy",
    "gradient_norm_critic",
    "kl",
    "reward",
    "kl_reference",
)
SAMPLING = {"prompts": 5, "samples": 2, "max_tokens": 6}


def recipe(folder: Path, kind: str, sharding: str, **changes: Any) -> Recipe:
    """A recipe on rows of different lengths; one of the two ranks has more rows than the other."""
    table: dict[str, Any] = {"kind": kind, "model": str(folder / "model"), "sharding": sharding, "steps": 200}
    data = {"train": str(folder / "rows.jsonl"), "max_length": 64}
    table["optimizer"] = {"micro_batch_tokens": 40, "weight_decay": 0.1, "learning_rate": 1e-3}
    if kind == "language":
        terms = [{"function": f"{folder}/rewards.py:score"}, {"model": str(folder / "reward")}]
        table |= {"algorithm": "PPO_CLIP", "data": {**data, "max_length": 32}, "sampling": SAMPLING}
        table |= {"reward": {"terms": terms, "missing_eos": "bootstrap", "tolerated": 0.5}, "critic": {"own_model": True}}
        table |= {"reference": {"beta": 0.1}, "objective": {"reuse": {"epochs": 2, "minibatches": 1}}}
    else:
        table |= {"data": {**data, "batch": 5}}
    if kind in ("dpo", "reward"):
        table["data"]["train"] = str(folder / "pairs.jsonl")
    for name, value in changes.items():
        table[name] = {**table[name], **value} if isinstance(table.get(name), dict) else value
    return make_recipe(table)


MIXED = {"sft_coefficient": 0.5, "batch": 7, "demonstrations": "FOLDER/rows.jsonl"}
LOW_REWARD: dict[str, Any] = {
    "reward": {"terms": [{"model": "FOLDER/low reward"}, {"function": "FOLDER/rewards.py:score"}]},
    "critic": {"start": "FOLDER/low reward"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "gathered once": ("sft", {"model": "FOLDER/tied", "reshard_after_forward": False, "gradient_checkpointing": True}),
    "offload": ("sft", {"offload": True}),
    "row by row": ("sft", {"optimizer": {"micro_batch": 1, "micro_batch_tokens": None}}),  # three passes, two on rank 1
    "routed": ("sft", {"model": "FOLDER/mixture", "objective": {"router_coefficient": 0.5}}),
    "reward": ("reward", {}),
    "kto": ("dpo", {"preference": {"loss": "kto"}, "data": {"train": "FOLDER/labels.jsonl"}}),
    "dpo": ("dpo", {}),
    "dpo row by row": ("dpo", {"optimizer": {"micro_batch": 1, "micro_batch_tokens": None}}),
    "dpo of another reference": ("dpo", {"reference": {"model": "FOLDER/low"}}),
    "ppo": ("language", {}),
    "mixed": ("language", {"mixing": MIXED, "sampling": {"temperature": 0.7}}),
    "shared head": ("language", {"critic": {"own_model": False}, "gradient_checkpointing": True}),
    "minibatches": ("language", {"objective": {"reuse": {"epochs": 1, "minibatches": 2}}}),
    "ppo of bfloat16": ("language", {"model": "FOLDER/low", **LOW_REWARD}),
    "padding-free": ("language", {"padding_free": True}),
    "idle": ("language", {"offload": ["reference", "reward"]}),
    "penalty": ("language", {"algorithm": "PPO_PENALTY_ADAPTIVE"}),
}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "sft with an adapter": ("sft", {"adapter": {"rank": 2}}),
    "dpo with an adapter": ("dpo", {"adapter": {"rank": 2}}),
    "steps with an adapter": (
        "reward",
        {"adapter": {"rank": 2}, "preference": {"loss": "steps"}, "data": {"train": "FOLDER/steps.jsonl"}},
    ),
    "ppo on a shared base": ("language", {"adapter": {"rank": 2}, "gradient_checkpointing": True}),
}
if find_spec("peft") is not None:
    CASES |= ADAPTED


FAST = ("sft", "ppo of bfloat16", "row by row", "reward", "dpo row by row", "ppo", "ppo on a shared base")
"""cases that make test runs; make slow runs all"""


def case(folder: Path, name: str, sharding: str) -> Recipe:
    kind, changes = CASES[name]
    return recipe(folder, kind, sharding, **json.loads(json.dumps(changes).replace("FOLDER", str(folder))))


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """The bytes that this process holds beyond those at the beginning, again and again."""
    before, seen, done = own_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(own_memory() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def whole_weights(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in policy.state_dict().items()}
    return {name: x.detach().cpu().clone() for name, x in state.items()}


def trained(recipe: Recipe) -> dict[str, Any]:
    """Weights and metrics of two iterations, including gradient norms."""
    world: World = make_world(recipe)
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 1_000)
    learner.auxiliary_loss = world.auxiliary_loss
    history = []
    for _ in range(2):
        with learner.resting():
            rollout = world.collector.collect(state)
        metrics = learner.update(rollout, assign_credit(rollout, recipe.objective), state)
        state.steps += sum_count(rollout.steps, rollout.rewards)
        history.append({**rollout.metrics, **metrics})
    sharded = is_sharded(world.policy)
    return {"weights": whole_weights(world.policy), "metrics": history, "sharded": sharded, "state": dict(state.coefficients)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForSequenceClassification

    from surefoot.language.models.classifier import SCALE
    from surefoot.language.models.reward_model import new_reward_model

    folder = tmp_path_factory.mktemp("sharded")
    write_folder(folder / "model", "llama")
    write_folder(folder / "mixture", "mixtral")
    write_folder(folder / "tied", "llama", tie_word_embeddings=True)
    new_reward_model(model("llama", seed=2), 3, tokenizer()).save(folder / "reward")
    model("llama", seed=4).bfloat16().save_pretrained(folder / "low")
    tokenizer().save_pretrained(folder / "low")
    new_reward_model(model("llama", seed=2), 3, tokenizer()).save(folder / "low reward")
    scores = AutoModelForSequenceClassification.from_pretrained(folder / "low reward", dtype=torch.bfloat16)
    delattr(scores.config, SCALE)
    scores.save_pretrained(folder / "low reward")
    (folder / "low reward" / "manifest.json").unlink()  # of the model that was there
    write_texts(folder)
    return folder


def trained_on_ranks(folder: Path, names: Iterable[str], results: str) -> list[Any]:
    def body(rank: int) -> dict[str, Any]:
        join_ranks()
        done = {name: trained(case(folder, name, "full")) for name in names}
        return done | ({"whole minibatches": trained(case(folder, "minibatches", "none"))} if "minibatches" in done else {})

    return on_ranks(RANKS, body, folder / results)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    return trained_on_ranks(folder, [name for name in CASES if name in FAST], "fast")


@pytest.fixture(scope="module")
def other_ranks(folder: Path) -> list[Any]:
    return trained_on_ranks(folder, [name for name in CASES if name not in FAST], "slow")


@pytest.mark.parametrize("name", [name for name in CASES if name in FAST])
def test_sharded_ranks_match_one_process(name: str, ranks: list[Any], folder: Path) -> None:
    check_same_steps(name, ranks, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FAST])
def test_sharded_ranks_match_one_process_in_the_other_cases(name: str, other_ranks: list[Any], folder: Path) -> None:
    check_same_steps(name, other_ranks, folder)


def check_same_steps(name: str, ranks: list[Any], folder: Path) -> None:
    """Check that the weights and metrics of every rank match one process."""
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    # Each rank shuffles its own rows, so minibatches are compared with two ranks that have whole models.
    alone = ranks[0]["whole minibatches"] if name == "minibatches" else trained(case(folder, name, "full"))
    assert not alone["sharded"], "a single process does not shard"
    for rank in ranks:
        assert rank[name]["sharded"]
        assert rank[name]["state"] == pytest.approx(alone["state"], rel=1e-5)
        for key, weights in alone["weights"].items():
            torch.testing.assert_close(rank[name]["weights"][key], weights, rtol=1e-4, atol=2e-6)
        for ours, theirs in zip(rank[name]["metrics"], alone["metrics"], strict=True):
            shown = [name for name in METRICS if theirs.get(name) is not None]
            assert {m: ours[m] for m in shown} == pytest.approx({m: theirs[m] for m in shown}, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_hybrid_sharding_matches_one_process_and_checks_its_replicas(folder: Path) -> None:
    """Two machines of two ranks each: sharded within a machine, replicated between machines."""

    def body(rank: int) -> dict[str, Any]:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        join_ranks()
        results = {name: trained(case(folder, name, "hybrid")) for name in ("sft", "ppo")}
        world = make_world(case(folder, "sft", "hybrid"))
        check_same_weights(world.policy)
        with torch.no_grad():
            next(p for p in map(local_part, world.policy.parameters()) if p.numel()).add_(rank == 3)
        try:
            check_same_weights(world.policy)
        except SurefootError as error:
            results["damaged"] = str(error)
        return results

    ranks = on_ranks(4, body, folder / "hybrid")
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    for name in ("sft", "ppo"):
        alone = trained(case(folder, name, "full"))
        for rank in ranks:
            assert rank["damaged"].startswith("ranks: the weights of rank 3 differ")
            for key, weights in alone["weights"].items():
                torch.testing.assert_close(rank[name]["weights"][key], weights, rtol=1e-4, atol=2e-6)


def test_hybrid_sharding_rejects_a_mismatched_local_world_size(folder: Path) -> None:
    def body(rank: int) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = "3"
        join_ranks()
        make_world(case(folder, "sft", "hybrid"))

    message = "SurefootError: sharding='hybrid': 2 ranks are not machines with LOCAL_WORLD_SIZE=3 ranks each; start the same "
    message += "number on every machine, or set sharding = 'full'"
    assert on_ranks(2, body, folder / "uneven") == [message] * 2


def evaluated(recipe: Recipe) -> Any:
    """The metrics of an evaluation after one update. Only the evaluation runs block by block."""
    world = make_world(recipe)
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 1_000)
    rollout = world.collector.collect(state)
    learner.update(rollout, assign_credit(rollout, recipe.objective), state)
    with torch.no_grad():
        report = world.evaluate()
    return report.metrics


@pytest.mark.parametrize("kind", ["reward", "dpo", "kto"])
def test_evaluation_gathers_one_block_at_a_time_and_matches_one_process(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the layer that computes is gathered, in the policy and in the reference."""
    made = case(folder, kind, "full")
    data = made.data.model_copy(update={"held_out": made.data.train})
    made = made.model_copy(update={"data": data})
    layer_forward, most = LlamaDecoderLayer.forward, [0]

    def body(rank: int) -> tuple[Any, int]:
        join_ranks()
        roots: list[torch.nn.Module] = []

        def counted(layer: Any, *arguments: Any, **named: Any) -> Any:
            layers = [each for root in roots for each in root.modules() if isinstance(each, LlamaDecoderLayer)]
            whole = [each for each in layers if not any(hasattr(p, "to_local") for p in each.parameters())]
            most[0] = most[0] if torch.is_grad_enabled() else max(most[0], len(whole))
            assert layer in whole or layer not in layers, "layers compute ungathered only before sharding"
            return layer_forward(layer, *arguments, **named)

        def shard_and_note(module: torch.nn.Module, *arguments: Any, **named: Any) -> None:
            shard_role(module, *arguments, **named)
            roots.append(module)

        for place in (worlds, references):
            monkeypatch.setattr(place, "shard_role", shard_and_note)
        monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
        metrics = evaluated(made)
        assert len(roots) == (3 if kind in ("dpo", "kto") else 1), "the reference is sharded once per set of rows"
        return metrics, most[0]

    alone = evaluated(made)
    for metrics, layers in on_ranks(2, body, folder / f"evaluated {kind}"):
        assert layers == (2 if kind == "kto" else 1), "only the KTO baseline gathers the whole model"
        assert metrics == pytest.approx(alone, rel=1e-4, abs=1e-6)


def dtypes_of(module: torch.nn.Module) -> dict[str, set[torch.dtype]]:
    buffers = {x.dtype for x in module.buffers() if x.is_floating_point()}
    return {"weights": {local_part(x).dtype for x in module.parameters()}, "buffers": buffers}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_frozen_roles_use_bfloat16_shards_only_where_this_is_lossless(precision: str, folder: Path) -> None:
    """References from bfloat16 files stay bfloat16; with bfloat16 precision rewards do too. Trained weights are float32."""

    def body(rank: int) -> list[Any]:
        join_ranks()
        made: Any = make_world(case(folder, "ppo of bfloat16", "full").model_copy(update={"precision": precision}))
        rewards = next(part for part in parts_of(made.reward) if isinstance(part, ModelReward)).model
        inputs = {"prompt": torch.arange(2, 98).view(1, 96), "prompt_mask": torch.ones(1, 96, dtype=torch.bool)}
        actions = torch.arange(5, 15).view(1, 10)
        with torch.no_grad(), gathered(made.reference.policy), gathered(made.policy):
            difference = made.reference.log_probs(inputs, actions, actions > 0) - made.policy(inputs, actions).log_probs
        return [*map(dtypes_of, (made.policy, made.reference, rewards)), float(difference.abs().max())]

    low, exact = {torch.bfloat16}, {torch.float32}
    for policy, reference, reward, difference in on_ranks(2, body, folder / f"frozen {precision}"):
        assert policy == {"weights": exact, "buffers": exact}
        assert reference == {"weights": low, "buffers": exact}, "rounded frequencies give wrong distant positions"
        assert reward == {"weights": low if precision == "bfloat16" else exact, "buffers": exact}
        assert difference < (1e-6 if precision == "float32" else 0.1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_rank_holds_the_whole_model_while_loading(dtype: str, folder: Path, tmp_path: Path) -> None:
    big = model("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    size = 4 * sum(p.numel() for p in big.parameters())
    big.to(getattr(torch, dtype)).save_pretrained(tmp_path / "big")
    tokenizer().save_pretrained(tmp_path / "big")
    del big

    def body(rank: int) -> int:
        join_ranks()
        with watched_memory() as seen:
            make_world(recipe(folder, "sft", "full", model=str(tmp_path / "big")))
        return max(seen)

    for peak in on_ranks(2, body, tmp_path / "results", timeout=80):
        assert isinstance(peak, int), peak
        assert peak < 0.8 * size, f"{peak / 1e6:.0f} of {size / 1e6:.0f} MB; its share is half"


@pytest.mark.parametrize("kind", ["sft", "language"])
def test_sharding_with_an_older_pytorch_is_rejected_before_models_are_read(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.11 has no such method."""
    settings = recipe(folder, kind, sharding="full")
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params")
    monkeypatch.setattr(placement, "world_size", lambda: 2)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("read the model"))
    with pytest.raises(
        SurefootError, match=r"^sharding='full': needs PyTorch 2.13, and this is 2[^\n]*; install torch==2.13.0, or"
    ):
        make_world(settings)
