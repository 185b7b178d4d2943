"""Adam with moments in 8 bits: the steps of bitsandbytes on one flat tensor, exact on resume, a fifth of the bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import assert_same
from torch import Tensor, nn

import surefoot
from surefoot.core import optimizer as optimizers
from surefoot.core.optimizer import Adam8BitSettings, AdamSettings, FlatOptimizer
from surefoot.errors import SurefootError
from surefoot.language.memory.check import workload_of
from surefoot.language.memory.roles import moment_bytes, permanent
from surefoot.language.models.quantised import prepare_bitsandbytes
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner

from .test_adapters import table
from .tiny import rejected, whole_and_resumed, write_folder

pytest.importorskip("bitsandbytes")
LOW = {"optimizer": {"kind": "adam-8bit", "learning_rate": 1e-2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("base") / "model", "llama")


def gradients(size: int, steps: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=drawn) * torch.logspace(-4, 0, size) for _ in range(steps)]


def steps_of(settings: AdamSettings, size: int = 5000, steps: int = 12) -> FlatOptimizer:
    made = FlatOptimizer([nn.Parameter(torch.linspace(-1, 1, size))], settings)
    for gradient in gradients(size, steps):
        made.gradients.copy_(gradient)
        made.step(0.0)
    return made


def test_steps_are_those_of_bitsandbytes_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_bitsandbytes()
    from bitsandbytes.optim import Adam8bit

    ours = steps_of(Adam8BitSettings(1e-2, 1e-5, None))
    value = nn.Parameter(torch.linspace(-1, 1, 5000))
    theirs = Adam8bit([value], lr=1e-2, betas=(0.9, 0.999), eps=1e-5, min_8bit_size=0)
    for gradient in gradients(5000, 12):
        value.grad = gradient
        theirs.step()
    assert torch.equal(ours.values, value.detach())
    monkeypatch.setattr(optimizers, "AT_ONCE", 512)
    assert torch.equal(steps_of(Adam8BitSettings(1e-2, 1e-5, None)).values, ours.values), "in parts, the same"


def test_parameters_without_a_gradient_stay_and_the_state_has_the_planned_bytes() -> None:
    made = FlatOptimizer([nn.Parameter(torch.ones(1000))], Adam8BitSettings(1e-2))
    made.step(0.0)
    assert torch.equal(made.values, torch.ones(1000))
    held = sum(x.numel() * x.element_size() for name, x in made.state_dict().items() if name != "step")
    assert held == moment_bytes(1000, low=True) == 2 * (1000 + 4 * 4)
    assert moment_bytes(1000, low=False) == 8000


@pytest.mark.parametrize("precision", ["float32", "bfloat16-weights"])
def test_the_plan_counts_what_the_optimizer_holds(files: Path, model: Path, precision: str) -> None:
    recipe = make_recipe(table("sft", files, model, adapter=None, precision=precision, **LOW))
    world = SupervisedWorld(recipe)
    learner = make_learner(recipe, world.policy)
    group = learner.optimizers["policy"]
    group.zero()
    group.step(0.0)
    held = [x for name, x in group.state_dict().items() if name != "step"]
    held += [group.values] if precision == "bfloat16-weights" else []
    planned = permanent(workload_of(recipe, prompt=8, response=6))["policy"]["optimizer"]
    assert planned == sum(x.numel() * x.element_size() for x in held)


def test_a_run_learns_and_resumes_exactly(files: Path, model: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"adapter": None, "optimizer": {"kind": "adam-8bit", "learning_rate": 1e-3, "weight_decay": 0.1}}
    ends = whole_and_resumed(folder=tmp_path, **table("sft", files, model, **changes))
    assert_same(ends[0]["agent"], ends[1]["agent"])
    config = tmp_path / "cut" / "config.toml"
    config.write_text(config.read_text().replace('kind = "adam-8bit"', 'kind = "adam"'))
    with pytest.raises(SurefootError, match=r"^.*optimizer.kind"):
        surefoot.resume(tmp_path / "cut", steps=64)


@pytest.mark.slow
def test_the_command_plans_moments_in_8_bits_and_bases_in_4(command: Any) -> None:
    def peak(*words: str) -> Any:
        code, out, err = command(
            "memory", "pocket", "--kind", "sft", "--prompt-tokens", "16", "--max-tokens", "8", "--json", *words
        )
        assert code == 0, err
        return json.loads(out)

    plain, low, base = peak(), peak("--optimizer", "adam-8bit"), peak("--adapter", "8", "--quantize", "nf4")
    count = plain["parameters"]
    assert plain["always"]["policy"]["optimizer"] == 8 * count
    assert low["always"]["policy"]["optimizer"] == moment_bytes(count, low=True)
    assert base["always"]["base"]["weights"] < 4 * count / 3
    assert base["setup"]["quantize"] == "nf4"
    for words in (("--quantize", "nf4"), ("--optimizer", "adam-8bit", "--ranks", "2", "--sharding", "full")):
        rejected(command("memory", "pocket", *words), f"{words[0]} {words[1]}: ")
