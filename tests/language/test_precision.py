"""``precision`` applies to every role, trained weights keep float32 values, and runs resume exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import assert_same
from ranked import on_ranks

import surefoot
from surefoot.core.rollout import LearnerState
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.models.reward_model import RewardModel, new_reward_model
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.terms import parts_of
from surefoot.ranks.collectives import stored
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_world
from surefoot.store.checkpoint import load_checkpoint

from .tiny import model, tokenizer, write_texts

PRECISIONS = ("float32", "bfloat16", "bfloat16-weights")
LOW, EXACT = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, demonstrations, pairs, and a reward function."""
    folder = tmp_path_factory.mktemp("precision")
    new_reward_model(model("llama", seed=2), 3, tokenizer()).save(folder / "reward")
    write_texts(folder, 16)
    return folder


def table(kind: str, files: Path, start: Path, precision: str, **changes: Any) -> dict[str, Any]:
    """Settings of a 32-step run (two iterations)."""
    rows = files / ("pairs.jsonl" if kind in ("reward", "dpo") else "rows.jsonl")
    fields: dict[str, Any] = {"model": str(start), "precision": precision, "steps": 32, "check_memory": False}
    fields |= {"data": {"train": str(rows), "max_length": 64}, "optimizer": {"learning_rate": 1e-3, "micro_batch": 4}}
    if kind == "language":
        terms = [{"model": str(files / "reward")}, {"function": f"{files}/rewards.py:score"}]
        fields |= {"sampling": {"prompts": 8, "samples": 2, "max_tokens": 6}, "reward": {"terms": terms}}
        fields |= {"reference": {"beta": 0.1}, "objective": {"reuse": {"epochs": 2, "minibatches": 1}}}
        fields |= {"critic": {"own_model": True}}
    else:
        fields["data"] |= {"batch": 16, "held_out": str(rows)}
    return {**fields, **changes}


def world_of(kind: str, *args: Any, **changes: Any) -> Any:
    return make_world(make_recipe({"kind": kind, **table(kind, *args, **changes)}))


def roles_of(world: LanguageWorld) -> dict[str, torch.nn.Module]:
    """The four models."""
    reward = next(part.model for part in parts_of(world.reward) if isinstance(part, ModelReward))
    return {"policy": world.policy.model, "critic": world.policy.critic, "reference": world.reference, "reward": reward}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_role_computes_in_the_recipe_precision(precision: str, files: Path, folders: dict[str, Path]) -> None:
    """By the dtypes that linear layers in the blocks give, while sampling and after it."""
    world = world_of("language", files, folders["llama"], precision)
    seen: set[tuple[str, torch.dtype]] = set()
    for role, module in roles_of(world).items():
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.Linear) and name.endswith("_proj"):
                part.register_forward_hook(lambda _, __, result, role=role: seen.add((role, result.dtype)))
    sample, sampling = world.engine.sample, set[tuple[str, torch.dtype]]()

    def sampled(*args: Any) -> Any:
        seen.clear()
        result = sample(*args)
        sampling.update(seen)
        seen.clear()
        return result

    world.engine.sample = sampled
    world.collector.collect(LearnerState.seeded(1, 100))
    wanted = EXACT if precision == "float32" else LOW
    assert seen == {(role, wanted) for role in ("policy", "critic", "reference", "reward")}
    assert sampling == {("policy", wanted)}
    assert world.engine.name == ("packed" if precision == "float32" else "model")


@pytest.mark.parametrize("shared", [False, True], ids=["models of their own", "one base"])
def test_weights_are_bfloat16_but_heads_and_adapters_stay_float32(shared: bool, files: Path, folders: dict[str, Path]) -> None:
    adapter = {"adapter": {"rank": 2}} if shared else {}
    if shared:
        pytest.importorskip("peft")
    world = world_of("language", files, folders["llama"], "bfloat16-weights", **adapter)
    for role, module in roles_of(world).items():
        for name, parameter in module.named_parameters():
            exact = "head" in name.split(".") or ".lora_" in name or name.startswith("trunk.parts.")
            assert parameter.dtype == (EXACT if exact else LOW), f"{role} {name}"
            trained = parameter.requires_grad and not exact
            assert (stored(parameter) is not parameter) == trained, f"{role} {name}"
        assert {x.dtype for x in module.buffers() if x.is_floating_point()} <= {EXACT}, "rounded frequencies are wrong"
    assert not world.policy.exact


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "language"])
def test_losses_and_gradients_are_close_to_float32(kind: str, files: Path, folders: dict[str, Path]) -> None:
    from .test_sharded import trained

    exact, *others = (
        trained(make_recipe({"kind": kind, **table(kind, files, folders["llama"], precision)})) for precision in PRECISIONS
    )
    for other in others:
        first, wanted = other["metrics"][0], exact["metrics"][0]
        assert first["gradient_norm_policy"] == pytest.approx(wanted["gradient_norm_policy"], rel=0.1)
        assert first["gradient_norm_policy"] != wanted["gradient_norm_policy"], "the result is rounded"
        if kind == "language":
            assert abs(first["kl_reference"]) < 2e-3, "the reference and the policy compute alike"
            assert first["ratio_at_start"] == pytest.approx(1, abs=1e-6), "old and new log-probabilities use equal passes"
        else:
            assert first["policy_loss"] == pytest.approx(wanted["policy_loss"], rel=2e-2)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def test_exported_model_has_rounded_weights_and_checkpoint_exact_ones(
    files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    result = surefoot.train("sft", run_dir=tmp_path / "run", **table("sft", files, folders["qwen2"], "bfloat16-weights"))
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="auto")
    exact = surefoot.load(tmp_path / "run").model.state_dict()
    assert read.dtype == LOW
    for name, weights in read.state_dict().items():
        assert torch.equal(weights, result.model.state_dict()[name]), "the exported weights are the trained ones"
        assert exact[name].dtype == EXACT
        assert torch.equal(weights, exact[name].to(LOW)), name
    assert any(not torch.equal(x, x.to(LOW).float()) for x in exact.values()), "the checkpoint is more precise than bfloat16"


def test_bfloat16_reward_model_keeps_its_exact_head_and_scale(files: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    trained = surefoot.train("reward", run_dir=tmp_path / "run", **table("reward", files, folders["llama"], "bfloat16-weights"))
    written, kept = RewardModel.load(tmp_path / "run" / "model"), surefoot.load(tmp_path / "run")
    for other in (written, kept):
        assert torch.equal(other.head.weight, trained.head.weight), "the trained head, not the rounded one"
        assert (float(other.mean), float(other.std)) == (float(trained.mean), float(trained.std)) != (0.0, 1.0)
    ids = torch.arange(20).view(2, 10) + 5
    with torch.no_grad():
        ours, theirs = (one(ids, ids > 0) for one in (trained, written))
    assert ours.dtype == EXACT
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def test_adapters_on_a_bfloat16_base_merge_into_a_bfloat16_model(files: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = table("sft", files, folders["llama"], "bfloat16-weights", adapter={"rank": 2})
    surefoot.train("sft", run_dir=tmp_path / "run", **settings)
    base, merged = (tensors_in(folder) for folder in (folders["llama"], tmp_path / "run" / "model"))
    assert {x.dtype for x in merged.values()} == {LOW}
    moved = {name for name, x in merged.items() if not torch.equal(x, base[name].to(LOW))}
    assert moved, "the adapter is merged"
    assert all("_proj" in name for name in moved), "only adapted layers change"


def test_expert_adapters_train_on_a_bfloat16_base(files: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model("mixtral").save_pretrained(tmp_path / "experts")
    tokenizer().save_pretrained(tmp_path / "experts")
    adapter = {"rank": 2, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
    settings = table("sft", files, tmp_path / "experts", "bfloat16-weights", adapter=adapter)
    surefoot.train("sft", run_dir=tmp_path / "run", **settings)
    agent = load_checkpoint(tmp_path / "run" / "checkpoints" / "32")["agent"]
    assert all(float(x.abs().max()) > 0 for name, x in agent.items() if ".lora_B." in name)


def test_sharded_bfloat16_weights_train_like_unsharded_ones_and_close_to_float32(
    files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Shards hold float32 weights; gathered parameters are bfloat16."""
    from .test_sharded import trained

    def body(rank: int) -> Any:
        join_ranks()
        fields = table("sft", files, folders["llama"], "bfloat16-weights", sharding="full")
        done = trained(make_recipe({"kind": "sft", **fields}))
        surefoot.train("sft", run_dir=tmp_path / "run", **fields)
        return done

    exact, rounded = (
        trained(make_recipe({"kind": "sft", **table("sft", files, folders["llama"], precision)}))
        for precision in ("float32", "bfloat16-weights")
    )
    ranks = on_ranks(2, body, tmp_path / "results")
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    for rank in ranks:
        assert {x.dtype for x in rank["weights"].values()} == {EXACT}
        first, wanted = rank["metrics"][0], exact["metrics"][0]
        assert first["gradient_norm_policy"] == pytest.approx(wanted["gradient_norm_policy"], rel=0.02)
        assert first["gradient_norm_policy"] == pytest.approx(rounded["metrics"][0]["gradient_norm_policy"], rel=2e-3)
        assert first["policy_loss"] == pytest.approx(wanted["policy_loss"], rel=2e-2)
    assert {x.dtype for x in tensors_in(tmp_path / "run" / "model").values()} == {LOW}
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_evaluation_passes_do_not_change_later_updates(files: Path, folders: dict[str, Path]) -> None:
    """Passes without gradient must not affect later gradients, although autocast caches weight casts."""
    from surefoot.core.credit import assign_credit
    from surefoot.runs.factory import make_learner

    ends = []
    for evaluates in (False, True):
        world = world_of("sft", files, folders["llama"], "bfloat16-weights")
        learner, state = make_learner(world.recipe, world.policy), LearnerState.seeded(1, 100)
        for _ in range(2):
            rollout = world.collector.collect(state)
            if evaluates:
                world.evaluate()
            learner.update(rollout, assign_credit(rollout, world.recipe.objective), state)
        ends.append({name: stored(p).detach().clone() for name, p in world.policy.named_parameters()})
    assert_same(*ends)


def test_tf32_is_enabled_only_during_a_run_that_sets_it(files: Path, folders: dict[str, Path]) -> None:
    matmul, seen = torch.backends.cuda.matmul, []
    was = matmul.allow_tf32
    try:
        for asked in (False, True):
            matmul.allow_tf32 = not asked
            fields = table("sft", files, folders["llama"], "float32", tf32=asked)
            surefoot.train("sft", callback=lambda _: bool(seen.append(matmul.allow_tf32)), **fields)
            assert matmul.allow_tf32 != asked
            with pytest.raises(ValueError, match="enough"):
                surefoot.train("sft", callback=fail, **fields)
            assert matmul.allow_tf32 != asked, "also after an error"
    finally:
        matmul.allow_tf32 = was
    assert seen == [False] * 2 + [True] * 2, "the recipe decides, not the program"


def fail(_: Any) -> bool:
    raise ValueError("enough")


def test_packed_engine_can_be_selected_under_bfloat16_autocast(files: Path, folders: dict[str, Path]) -> None:
    sampling = {"prompts": 8, "max_tokens": 6, "engine": "packed"}
    world = world_of("language", files, folders["llama"], "bfloat16", sampling=sampling)
    world.collector.collect(LearnerState.seeded(1, 100))
    assert world.engine.name == "packed"


def test_bfloat16_policy_equals_transformers_bit_for_bit(folders: dict[str, Path]) -> None:
    """The reference is the same model, loaded in bfloat16 by ``transformers``."""
    from transformers import AutoModelForCausalLM

    from surefoot.language.models.loading import load_model
    from surefoot.sharding.master import to_bfloat16

    policy = LanguagePolicy(load_model(folders["llama"])[0], None, 0)
    to_bfloat16(policy)
    theirs = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=LOW).eval()
    ids = torch.arange(2, 34).view(2, 16)
    inputs = {"prompt": ids[:, :8], "prompt_mask": torch.ones(2, 8, dtype=torch.bool)}
    with torch.no_grad():
        ours = policy(inputs, ids[:, 8:]).log_probs
        logits = theirs(input_ids=ids).logits[:, 7:-1].float().log_softmax(-1)
    assert torch.equal(ours, logits.gather(-1, ids[:, 8:].unsqueeze(-1)).squeeze(-1))
