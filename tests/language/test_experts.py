"""Mixtures of experts: adapters of experts and dense layers, runs with them, and the router loss of ``transformers``."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from killing import assert_same
from torch import Tensor

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.functional import expert_load, load_balance
from surefoot.language.data.batches import pack_batch
from surefoot.language.models.adapter_files import reward_role
from surefoot.language.models.adapters import POLICY, VALUE, SharedBase, merge, merged_state
from surefoot.language.models.loading import load_model
from surefoot.language.models.policy import LanguagePolicy, Routers
from surefoot.language.models.reward_model import RewardModel
from surefoot.recipes.models import AdapterSettings
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner, make_world

from . import tiny
from .tiny import VOCABULARY, logits, moved, tokenizer

pytest.importorskip("peft")

EXPERTS = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
ROUTED = (*EXPERTS, "gate.weight")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "dtype": "float32",
}
OWN = {
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [0]},
}


def make_mixture(family: str, seed: int = 1) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **OWN[family]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                weight.mul_(4)
    return model.eval()


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of small mixtures of experts."""
    folders = {family: tmp_path_factory.mktemp("mixtures") / family for family in OWN}
    for family, folder in folders.items():
        make_mixture(family).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folders


@pytest.fixture(params=OWN)
def mixture(request: pytest.FixtureRequest, mixtures: dict[str, Path]) -> Path:
    """Each of the mixtures."""
    return mixtures[request.param]


@pytest.fixture
def mixed(mixtures: dict[str, Path]) -> Path:
    """A model with a dense layer and a layer of experts; ``peft`` knows its layer names from ``transformers`` 4."""
    return mixtures["qwen3_moe"]


# ---- adapters -----------------------------------------------------------------------------------------------------------


def test_model_with_expert_adapters_off_equals_its_base_bit_for_bit(mixture: Path) -> None:
    model, _ = load_model(mixture)
    before = logits(model)
    base = SharedBase(model)
    base.add(POLICY, AdapterSettings(rank=2, targets=EXPERTS))
    assert torch.equal(logits(model), before), "a new adapter adds nothing"
    base.add(VALUE, AdapterSettings(rank=3, targets=EXPERTS))
    moved(base, POLICY)
    moved(base, VALUE, 6)
    as_policy = logits(model)
    with base.using(None):
        assert torch.equal(logits(model), before)
    with base.using(VALUE):
        as_value = logits(model)
    assert min((as_policy - before).abs().max(), (as_value - before).abs().max(), (as_value - as_policy).abs().max()) > 1e-2


def test_only_adapters_get_gradients_including_those_of_experts(mixture: Path) -> None:
    model, _ = load_model(mixture)
    base = SharedBase(model)
    base.add(POLICY, AdapterSettings(rank=2, targets=EXPERTS))
    moved(base, POLICY)
    model(input_ids=torch.arange(96).view(2, 48)).logits.square().mean().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert with_gradient == {f"model.{name}" for name, _ in base.parameters(POLICY)}
    assert any("experts" in name for name in with_gradient)
    for name, p in model.named_parameters():
        if "experts" in name and p.grad is not None:  # 4 experts of rank 2, in the layout of peft
            of_experts = p.grad.view(4, 2, -1) if "lora_A" in name else p.grad.view(-1, 2, 4).permute(2, 1, 0)
            assert of_experts.abs().amax((1, 2)).min() > 0, f"every expert of {name}"


def test_merged_experts_give_the_logits_of_the_adapted_model(mixture: Path) -> None:
    model, _ = load_model(mixture)
    names = set(model.state_dict())
    base = SharedBase(model)
    base.add(POLICY, AdapterSettings(rank=2, targets=ROUTED))
    base.add(VALUE, AdapterSettings(rank=3, targets=ROUTED))
    moved(base, POLICY)
    moved(base, VALUE, 6)
    adapted, state = logits(model), merged_state(model)
    plain, _ = load_model(mixture)
    plain.load_state_dict(state)
    torch.testing.assert_close(logits(plain), adapted, rtol=1e-4, atol=1e-4)
    merge(base.trunk)
    assert set(model.state_dict()) == names
    torch.testing.assert_close(logits(model), adapted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"targets": EXPERTS, "dropout": 0.1},
            r"dropout=0.1: experts \(experts.down_.*up_proj\) don't support dropout; set 0$",
        ),
        ({"targets": ("experts.up",)}, r"targets='experts.up': the model's trunk has no linear layer .*gate_up_proj"),
    ],
)
def test_dropout_and_unknown_targets_of_experts_are_rejected(settings: Any, line: str, mixed: Path) -> None:
    model, _ = load_model(mixed)
    with pytest.raises(SurefootError, match=rf"^adapter.{line}"):
        SharedBase(model).add(POLICY, AdapterSettings(rank=2, **settings))


def test_roles_must_adapt_the_same_experts_or_none(mixed: Path) -> None:
    model, _ = load_model(mixed)
    base = SharedBase(model)
    base.add(POLICY, AdapterSettings(rank=2, targets=EXPERTS))
    base.add(VALUE, AdapterSettings(rank=2, targets=("q_proj",)))
    with pytest.raises(SurefootError, match=r"^adapter of the judge: adapts experts.down_proj, but that of the policy adapts"):
        base.add("judge", AdapterSettings(rank=2, targets=("experts.down_proj",)))


def test_adapters_of_modules_that_the_model_bypasses_are_rejected(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(mixed)
    experts = model.model.layers[1].mlp.experts
    kind = type(model.model.layers[1].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, hidden, *_: experts.down_proj.sum() * 0 + hidden)
    with pytest.raises(SurefootError, match=r"^adapter.targets='.*': .*Model bypasses its module, .*; leave it out$"):
        SharedBase(model).add(POLICY, AdapterSettings(rank=2, targets=EXPERTS))


# ---- dense layers beside experts ----------------------------------------------------------------------------------------

DENSE = ("q_proj", "gate_proj", "up_proj", "down_proj")


def adapted(base: SharedBase) -> set[str]:
    return {name.split(".lora_A")[0] for name, _ in base.parameters(POLICY) if ".lora_A" in name}


@pytest.mark.parametrize(("targets", "experts"), [("all-linear", False), (DENSE, False), ((*DENSE, *EXPERTS), True)])
def test_adapter_targets_select_dense_layers_and_experts_of_a_mixture(targets: Any, experts: bool, mixed: Path) -> None:
    model, _ = load_model(mixed)
    before = logits(model)
    base = SharedBase(model)
    base.add(POLICY, AdapterSettings(rank=2, targets=targets))
    layers = adapted(base)
    assert {f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")} <= layers
    assert {"layers.1.mlp.experts", "layers.1.mlp.experts.base_layer"} <= layers if experts else "experts" not in str(layers)
    assert {layer.r[POLICY] for layer in base.layers} == {2}, "ranks stay as configured"
    line = base.summary()
    assert "down_proj, gate_proj, up_proj (1 layer each)" in line
    assert ("rank 2 for each of 4 experts on experts.down_proj, experts.gate_up_proj (1 layer each)" in line) == experts
    assert line.endswith("% of all are frozen" if experts else "gate_up_proj: name them in adapter.targets)")
    moved(base, POLICY)
    after = logits(model)
    assert (after - before).abs().max() > 1e-2
    merge(base.trunk)
    torch.testing.assert_close(logits(model), after, rtol=1e-4, atol=1e-4)


def test_reward_adapter_of_dense_layers_and_experts_loads_onto_the_base(mixed: Path, files: Path, tmp_path: Path) -> None:
    adapter = {"rank": 2, "targets": (*DENSE, *EXPERTS[1:])}
    table = fields("sft", files, mixed, steps=16, adapter=adapter)
    table["data"] |= {"train": f"{files}/pairs.jsonl", "held_out": "none"}
    surefoot.train("reward", run_dir=tmp_path / "reward", **table)
    model, _ = load_model(mixed)
    base = SharedBase(model)
    base.add(POLICY, AdapterSettings(**adapter))
    reward = reward_role(base, str(tmp_path / "reward"))
    assert type(base.trunk.layers[0].mlp.gate_proj.lora_A).__name__ == "ModuleDict"
    assert not hasattr(base.trunk.layers[0].mlp.gate_proj, "parameter_name"), "adapted as a linear layer, not as a parameter"
    alone = RewardModel.load(tmp_path / "reward" / "model")
    ids = torch.arange(24).view(2, 12) * 4 % 100
    with torch.no_grad():
        ours, expected_states = (m.backbone(input_ids=ids).last_hidden_state for m in (reward, alone))
    torch.testing.assert_close(ours, expected_states, rtol=1e-4, atol=1e-4)


# ---- runs ---------------------------------------------------------------------------------------------------------------


def fields(kind: str, files: Path, model: Path, **changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {"steps": 32, "optimizer": {"learning_rate": 1e-2}}
    if kind == "sft":
        data = {"train": f"{files}/rows.jsonl", "held_out": f"{files}/rows.jsonl", "max_length": 32, "batch": 8}
        return {"model": str(model), **table, "data": data, **changes}
    table |= {"sampling": {"prompts": 8, "max_tokens": 6}, "objective": {"reuse": {"epochs": 2, "minibatches": 2}}}
    return tiny.fields_of(model, files / "rows.jsonl", f"{files}/rewards.py:score", **{**table, **changes})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses the old name in transformers
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("language", EXPERTS), pytest.param("sft", "all-linear", marks=pytest.mark.slow)],
    ids=["language-experts", "sft-all-linear"],
)
def test_adapted_run_resumes_exactly_and_loads_in_peft_and_transformers(
    kind: str, targets: Any, mixture: Path, files: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    table = fields(kind, files, mixture, adapter={"rank": 2, "targets": targets}, checkpoint={"every": 16})
    ends = tiny.whole_and_resumed(kind, tmp_path, **table)
    assert_same(ends[0]["agent"], ends[1]["agent"])
    whole = surefoot.load(tmp_path / "whole" / "checkpoints" / "32")
    base = AutoModelForCausalLM.from_pretrained(mixture)
    assert (logits(base) - logits(whole.model)).abs().max() > 1e-3
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    loaded = surefoot.load(tmp_path / "cut" / "checkpoints" / "32").model
    by_peft = PeftModel.from_pretrained(base, tmp_path / "whole" / "adapter")
    for model in (merged, loaded, by_peft):
        torch.testing.assert_close(logits(model.eval()), logits(whole.model), rtol=1e-4, atol=1e-4)


# ---- router loss --------------------------------------------------------------------------------------------------------


def transformers_loss(model: Any, ids: Tensor, real: Tensor) -> Tensor:
    """The router loss computed by the model's own class in ``transformers``."""
    loss: Tensor = model(input_ids=ids, attention_mask=real.long(), use_cache=False, output_router_logits=True).aux_loss
    return loss


def some_text() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(11) < torch.tensor([[11], [4], [7]])


def test_router_loss_matches_transformers_on_the_same_logits(mixture: Path) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, _ = load_model(mixture)
    ids, real = some_text()
    routers = Routers(model)
    with routers.recording() as recorded:
        model.base_model(input_ids=ids)
    expected = load_balancing_loss_func(tuple(recorded), 4, 2, real.long())
    torch.testing.assert_close(routers.loss(recorded, real), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(expected, transformers_loss(model, ids, real), rtol=1e-6, atol=0)
    assert len(recorded) == (1 if "qwen3" in str(mixture) else 2), "layers without experts have no router"


def test_balance_loss_is_lower_for_equal_loads_and_ignores_masked_tokens() -> None:
    even = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    all_kept = torch.ones(2, dtype=torch.bool)
    counts, probabilities = expert_load(even, 2, all_kept)
    assert counts.tolist() == [1, 1, 1, 1]
    assert float(load_balance(counts, probabilities, torch.tensor(2.0))) == pytest.approx(2)
    counts, probabilities = expert_load(even[:1].expand(2, 4) * 9, 2, all_kept)
    assert float(load_balance(counts, probabilities, torch.tensor(2.0))) == pytest.approx(4, abs=1e-2)
    counts, probabilities = expert_load(even, 2, torch.tensor([True, False]))
    assert counts.tolist() == [1, 1, 0, 0]


def gradients(kind: str, files: Path, mixture: Path, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """Gradients by parameter, metrics, world and rollout of one update; parameters are restored."""
    table = fields(kind, files, mixture, **changes)
    if kind == "language":
        table["objective"] = {**table["objective"], "reuse": {"epochs": 1, "minibatches": 1}}
    recipe = make_recipe(
        {"kind": kind, **table, "optimizer": {"learning_rate": 1e-2, "max_grad_norm": "none", **table["optimizer"]}}
    )
    world: Any = make_world(recipe)
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 100)
    rollout = world.collector.collect(state)
    parameters = {name: p for name, p in world.policy.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    metrics = learner.update(rollout, assign_credit(rollout, recipe.objective), state)
    grads = {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
    return grads, metrics, (world, rollout)


@pytest.mark.parametrize(("kind", "adapter"), [("sft", None), ("language", {"rank": 2, "targets": EXPERTS})], ids=str)
def test_router_coefficient_scales_the_added_gradient_of_the_router_loss(
    kind: str, adapter: Any, mixture: Path, files: Path
) -> None:
    extra = {} if adapter is None else {"adapter": adapter}
    objective = fields(kind, files, mixture).get("objective", {})
    off, metrics_off, (world, rollout) = gradients(kind, files, mixture, **extra)
    on, metrics, _ = gradients(kind, files, mixture, objective={**objective, "router_coefficient": 0.5}, **extra)
    batch = pack_batch(rollout.inputs, rollout.actions, rollout.mask, 0)
    loss = transformers_loss(world.policy.model, batch.ids, batch.real)
    moving = {name: p for name, p in world.policy.named_parameters() if p.requires_grad}
    expected = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    assert "router_loss" not in metrics_off
    assert metrics["router_loss"] == pytest.approx(loss.item(), rel=1e-5)
    nonzero = False
    for (name, _), ours in zip(moving.items(), expected, strict=True):
        if ours is not None:
            torch.testing.assert_close(on[name] - off[name], 0.5 * ours, rtol=1e-3, atol=2e-5)
            nonzero |= bool(ours.abs().max() > 1e-3)
    assert nonzero, "all gradients of the router loss are tiny"


def test_micro_batches_and_checkpointing_change_no_gradient_with_router_loss(mixture: Path, files: Path) -> None:
    objective = {"router_coefficient": 0.5}
    whole, metrics, _ = gradients("sft", files, mixture, objective=objective)
    optimizer = {"learning_rate": 1e-2, "micro_batch_tokens": 24}
    parts, parts_metrics, _ = gradients(
        "sft", files, mixture, objective=objective, optimizer=optimizer, gradient_checkpointing=True
    )
    assert parts_metrics["router_loss"] == pytest.approx(metrics["router_loss"], rel=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-3, atol=2e-5)


def test_router_logits_are_not_computed_without_a_coefficient(
    mixed: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = Mock(side_effect=AssertionError("asked"))
    before, _, _ = gradients("sft", files, mixed)
    monkeypatch.setattr(Routers, "__init__", never)
    monkeypatch.setattr(LanguagePolicy, "prepare", never)
    after, metrics, _ = gradients("sft", files, mixed)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "router_loss" not in metrics


def test_router_coefficient_is_rejected_without_routers(folders: dict[str, Path], files: Path) -> None:
    with pytest.raises(SurefootError, match=r"^objective.router_coefficient: LlamaForCausalLM has no routers .*; set 0$"):
        surefoot.train("sft", **fields("sft", files, folders["llama"], objective={"router_coefficient": 0.1}))
