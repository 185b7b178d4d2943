"""4-bit and 8-bit bases: all roles share the same quantised weights, and saved files contain what was trained."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import assert_same
from safetensors.torch import load_file
from torch import Tensor, nn

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.language.language_model import load_base, load_language_model
from surefoot.language.memory.check import workload_of
from surefoot.language.memory.roles import permanent
from surefoot.language.models.adapter_files import add_adapter
from surefoot.language.models.adapters import POLICY, SharedBase
from surefoot.language.models.loading import load_model
from surefoot.language.models.placement import place, shares_base
from surefoot.language.models.quantised import is_quantised, parameter_count, restored
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.online.world import LanguageWorld
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner

from .test_adapters import SMALL, started, table
from .tiny import logits, moved, whole_and_resumed, write_folder

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

KINDS = ("nf4", "int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2, whose layers have biases."""
    return write_folder(tmp_path_factory.mktemp("base") / "model", "qwen2", initializer_range=0.08)


def quantised(kind: str, **changes: Any) -> dict[str, Any]:
    return {"adapter": {**SMALL, "quantize": kind}, **changes}


def base_of(model: Path, kind: str, precision: str = "float32") -> tuple[Any, SharedBase]:
    recipe = make_recipe(
        {
            "kind": "sft",
            "model": str(model),
            "adapter": {**SMALL, "quantize": kind},
            "data": {"train": "x"},
            "steps": 1,
            "precision": precision,
        }
    )
    loaded, _ = load_base(recipe)
    base = add_adapter(recipe, loaded, str(model))
    return loaded, base


def layers(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if is_quantised(part)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_trunk_linear_layers_are_quantised_and_only_adapters_train(model: Path, kind: str) -> None:
    whole, _ = load_model(model)
    loaded, base = base_of(model, kind)
    linear = [name for name, part in whole.base_model.named_modules() if isinstance(part, nn.Linear)]
    assert len(layers(loaded)) == len(linear) == 14
    trained = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    head: Any = loaded.get_output_embeddings()
    assert type(head) is nn.Linear
    assert head.weight.dtype == torch.float32
    assert (
        base.size
        == sum(p.numel() for p in whole.parameters())
        == parameter_count(loaded) - sum(p.numel() for _, p in base.parameters(POLICY))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_depend_on_no_other_row_and_no_later_token(model: Path, kind: str) -> None:
    """LLM.int8() with outlier detection would choose its columns from the whole batch."""
    loaded, _ = base_of(model, kind)
    ids = torch.arange(36).view(3, 12) * 5 % 100
    with torch.no_grad():
        together = loaded(input_ids=ids).logits
        assert torch.allclose(loaded(input_ids=ids[:1]).logits, together[:1], atol=1e-5)
        assert torch.allclose(loaded(input_ids=ids[:, :6]).logits, together[:, :6], atol=1e-5 if kind == "nf4" else 5e-2)


def test_nf4_outputs_and_gradients_match_the_dequantised_weights(model: Path) -> None:
    """Also after a pass without gradient, in which bitsandbytes would repack weights for a kernel without backward."""
    gradients: list[dict[str, Tensor]] = []
    outputs = []
    for plain in (False, True):
        loaded, base = base_of(model, "nf4")
        moved(base, POLICY)
        if plain:
            for layer in base.layers:
                whole = nn.Linear(layer.in_features, layer.out_features, layer.base_layer.bias is not None)
                whole.weight, whole.bias = nn.Parameter(restored(layer.base_layer)), layer.base_layer.bias
                layer.base_layer = whole.requires_grad_(False)
        logits(loaded)
        outputs.append(logits(loaded))
        loaded(input_ids=torch.arange(24).view(2, 12) * 4 % 100).logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in base.parameters(POLICY) if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) == 28
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize(("kind", "padding_free"), [("nf4", True), ("int8", False)])
def test_reference_is_the_quantised_base_and_the_initial_ratio_is_one(
    files: Path, model: Path, kind: str, padding_free: bool
) -> None:
    changes = {"objective": {"reuse": {"epochs": 1, "minibatches": 1}}, "reference": {"beta": 0.1}}
    changes |= {"padding_free": padding_free}
    world = LanguageWorld(make_recipe(table("language", files, model, **quantised(kind), **changes)))
    assert world.engine.name == "model"
    assert "quantised" in world.engine.reason
    learner, state = make_learner(world.recipe, world.policy), LearnerState.seeded(1, 32)
    rollout = world.collector.collect(state)
    assert rollout.metrics["kl_reference"] == 0, "B is 0, so the policy equals the reference"
    metrics = learner.update(rollout, assign_credit(rollout, world.recipe.objective), state)
    assert metrics["ratio_at_start"] == 1
    assert float(rollout.metrics["sampler_gap"] or 0) < (1e-4 if kind == "nf4" else 0.05)


@pytest.mark.parametrize(("kind", "precision"), [("nf4", "float32"), ("nf4", "bfloat16-weights"), ("int8", "float32")])
def test_sft_learns_and_saved_files_match_the_trained_model(
    files: Path, model: Path, tmp_path: Path, kind: str, precision: str
) -> None:
    run = tmp_path / "run"
    result = started("sft", files, model, run, **quantised(kind), steps=192, precision=precision)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    exported, _ = load_model(run / "model")
    again = load_language_model(str(run)).model
    assert not layers(exported)
    assert not layers(again)
    rounding = 0.05 if precision == "bfloat16-weights" else 0  # model/ is in bfloat16
    assert torch.allclose(logits(exported), logits(again), rtol=rounding, atol=rounding)
    wanted = {"bfloat16-weights": torch.bfloat16}.get(precision, torch.float32)
    assert {x.dtype for x in load_file(run / "model" / "model.safetensors").values()} == {wanted}
    if kind == "nf4" and precision == "float32":
        assert torch.allclose(logits(exported), logits(result.model), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft still uses the old name
def test_peft_loads_the_adapter_on_a_base_quantised_by_transformers(files: Path, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    run = tmp_path / "run"
    result = started("sft", files, model, run, **quantised("nf4"))
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )
    options: dict[str, Any] = {"quantization_config": settings, "dtype": torch.float32, "device_map": {"": "cpu"}}
    other = AutoModelForCausalLM.from_pretrained(model, **options)
    for layer in layers(other):
        layer.support_avx512bf16_for_cpu = False
    theirs = PeftModel.from_pretrained(other, str(run / "adapter")).eval()
    assert torch.allclose(logits(theirs), logits(result.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("reward", marks=pytest.mark.slow), "language"])
def test_resuming_is_exact(files: Path, model: Path, tmp_path: Path, kind: str) -> None:
    changes = quantised("nf4", critic={"own_model": True}) if kind == "language" else quantised("nf4")
    ends = [parts["agent"] for parts in whole_and_resumed(folder=tmp_path, **table(kind, files, model, **changes))]
    assert_same(*ends)
    assert all(".lora_" in name or "head" in name for name in ends[0]), "checkpoints do not contain the base"
    if kind == "reward":
        loaded, left = surefoot.load(tmp_path / "whole"), RewardModel.load(tmp_path / "whole" / "model")
        ids = torch.arange(20).view(2, 10) + 5
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids, ids > 0), left(ids, ids > 0), atol=1e-5, rtol=1e-4)


def test_continuous_batching_samples_from_the_quantised_policy(files: Path, model: Path) -> None:
    changes = quantised("nf4", sampling={"prompts": 8, "max_tokens": 6, "engine": "continuous"})
    world = LanguageWorld(make_recipe(table("language", files, model, **changes)))
    moved(world.base, POLICY)
    rollout = world.collector.collect(LearnerState.seeded(1, 32))
    assert float(rollout.metrics["sampler_gap"] or 0) < 1e-3


def test_reward_model_shares_the_base_only_if_quantised_the_same_way(files: Path, model: Path, tmp_path: Path) -> None:
    started("reward", files, model, tmp_path / "reward", **quantised("nf4"))
    for kind, shared in (("nf4", True), ("int8", False)):
        changes = quantised(kind, reward={"terms": [{"model": str(tmp_path / "reward")}]})
        recipe = make_recipe(table("language", files, model, **changes))
        world = LanguageWorld(recipe)
        assert shares_base(world.reward.model) == shared
        planned = workload_of(recipe, prompt=8, response=6)
        assert (len(planned.reward_adapters), len(planned.rewards)) == ((1, 0) if shared else (0, 1))
    changes = quantised("int8", critic={"own_model": True, "start": str(tmp_path / "reward")})
    with pytest.raises(SurefootError, match=r"^critic.start=.*is not an adapter of model="):
        LanguageWorld(make_recipe(table("language", files, model, **changes)))


@pytest.mark.parametrize(("kind", "precision"), [("nf4", "bfloat16"), ("nf4", "bfloat16-weights"), ("int8", "float32")])
def test_memory_plan_counts_the_base_bytes(files: Path, model: Path, kind: str, precision: str) -> None:
    recipe = make_recipe(table("language", files, model, **quantised(kind), precision=precision))
    world = LanguageWorld(recipe)
    world.policy(*one_row(world))  # the first pass moves the int8 scales
    held = [x.numel() * x.element_size() for x in tensors_of(world.result.model)]
    planned = permanent(workload_of(recipe, prompt=8, response=6))["base"]["weights"]
    biases = sum(layer.bias.numel() for layer in layers(world.result.model) if layer.bias is not None)
    assert planned == sum(held) + (2 * biases if kind == "nf4" and precision == "bfloat16" else 0)  # bitsandbytes casts biases


def one_row(world: LanguageWorld) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.arange(12).view(1, 12) + 5
    return {"prompt": ids[:, :4], "prompt_mask": torch.ones(1, 4, dtype=torch.bool)}, ids[:, 4:]


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """The frozen weights of a model and the tensors that dequantise them."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield parameter.data
    for layer in layers(model):
        state = getattr(layer.weight, "quant_state", None)
        if state is None:
            yield layer.state.SCB
        else:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)


def test_unsupported_layers_and_a_missing_package_are_rejected(
    files: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_folder(tmp_path / "gpt2", "gpt2")
    with pytest.raises(SurefootError, match=r"^adapter.quantize='nf4': GPT2Model has layers that are not nn.Linear"):
        SupervisedWorld(make_recipe(table("sft", files, other, **quantised("nf4"))))

    real, missing = importlib.util.find_spec, "bitsandbytes"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == missing else real(name, *a))
    with pytest.raises(SurefootError, match=r"adapter.quantize='nf4' needs bitsandbytes, .*pip install .*\[quantized\]'"):
        SupervisedWorld(make_recipe(table("sft", files, model, **quantised("nf4"))))


class Scales:
    """Stands for scales that were left on another device."""

    device = torch.device("meta")

    def to(self, device: torch.device) -> "Scales":
        self.device = device
        return self


@pytest.mark.parametrize("held", ["weight", "state"])
def test_placing_an_int8_model_moves_the_scales_of_its_layers_with_the_weights(model: Path, held: str) -> None:
    """``module.to(device)`` moves the data of weights alone. A pass keeps both in the layer's state."""
    _, base = base_of(model, "int8")
    if held == "state":
        base.trunk(input_ids=torch.arange(6).view(1, 6))
    for layer in layers(base.trunk):
        layer.weight.data = layer.weight.data.clone()
        getattr(layer, held).SCB = Scales()
    place(base.trunk, make_recipe({"kind": "sft", "model": str(model), "data": {"train": "x"}, "steps": 1}))
    for layer in layers(base.trunk):
        assert getattr(layer, held).CB.data_ptr() == layer.weight.data_ptr()
        assert getattr(layer, held).SCB.device == layer.weight.device
