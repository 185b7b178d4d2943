"""``engine = "compiled"`` of language models: the blocks of their transformers as programs."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import surefoot  # noqa: E402
from surefoot.core.rollout import map_tensors  # noqa: E402
from surefoot.diagnostics.metrics import TIMING  # noqa: E402
from surefoot.errors import announced  # noqa: E402
from surefoot.language import blocks  # noqa: E402
from surefoot.language.models.adapters import POLICY, VALUE, RoleTrunk, SharedBase  # noqa: E402
from surefoot.language.models.policy import LanguagePolicy, ReferencePolicy  # noqa: E402
from surefoot.language.models.policy.critic import Critic, ValueHead  # noqa: E402
from surefoot.recipes.models import AdapterSettings  # noqa: E402
from surefoot.store.metrics import read_metrics  # noqa: E402

from . import tiny  # noqa: E402
from .test_padding_free import RUNS, module_of, settings  # noqa: E402
from .test_padding_free import files as files  # noqa: E402 (a fixture)
from .test_policy import PAD, make, near, text  # noqa: E402

Calls = list[tuple[str, bool]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What would be compiled runs as it is, and its calls are recorded: class of the block, and whether gradients are on."""
    made: Calls = []

    def uncompiled(function: Any, dynamic: bool) -> Any:
        assert dynamic

        def call(self: nn.Module, *inputs: Any, **options: Any) -> Any:
            made.append((type(self).__name__, torch.is_grad_enabled()))
            return function(self, *inputs, **options)

        return call

    monkeypatch.setattr(torch, "compile", uncompiled)
    forget()
    yield made
    forget()


def forget() -> None:
    """Forget all programs, as a new process has none."""
    torch._dynamo.reset()
    blocks._compiled.cache_clear()


def programs_made() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_blocks_are_compiled_before_the_first_pass_with_and_without_gradient(kind: str, calls: Calls) -> None:
    policy, wanted, lines = LanguagePolicy(make(kind), "head", PAD), LanguagePolicy(make(kind), "head", PAD), []
    blocks.compile_blocks(policy)
    assert calls == []
    with announced(lines.append):
        near(policy(*text()).log_probs, wanted(*text()).log_probs)
    name = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}[kind]
    assert calls == [*[(name, True)] * 4, *[(name, False)] * 4, *[(name, True)] * 2]
    assert [line.partition(" in ")[0] for line in lines] == [
        f"engine: compiling the block of {type(policy.model).__name__}; this may take minutes …",
        "engine: compiled 2 blocks",
    ]
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_passes_with_a_cache_are_not_compiled(calls: Calls) -> None:
    model, ids = make("llama"), torch.arange(10).view(2, 5)
    blocks.compile_blocks(policy := LanguagePolicy(model, None, PAD))
    policy(*text())
    calls.clear()
    with torch.no_grad():
        model(input_ids=ids, use_cache=True)
        assert calls == []
        model(input_ids=ids, use_cache=False)
    assert len(calls) == 2


def test_a_copy_of_a_compiled_policy_uses_its_own_weights(calls: Calls) -> None:
    policy = LanguagePolicy(make("llama"), None, PAD)
    blocks.compile_blocks(policy)
    before = policy(*text()).log_probs.detach()
    reference = ReferencePolicy(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    assert torch.equal(reference.log_probs(*text()), before)
    assert not torch.allclose(policy(*text()).log_probs, before, atol=1e-3)
    assert policy.state_dict().keys() == copy.deepcopy(policy).state_dict().keys()


def test_blocks_that_compute_something_else_when_compiled_are_one_line(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(function: Any, dynamic: bool) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no kernel")

        return call

    def wrong(function: Any, dynamic: bool) -> Any:
        return lambda self, hidden, *inputs, **options: function(self, 2 * hidden + 1, *inputs, **options)

    for compile, message in (
        (failing, r"can't be compiled \(.*no kernel"),
        (wrong, "has other log-probabilities when compiled"),
    ):
        monkeypatch.setattr(torch, "compile", compile)
        blocks._compiled.cache_clear()
        blocks.compile_blocks(policy := LanguagePolicy(make("llama"), None, PAD))
        with pytest.raises(
            surefoot.SurefootError, match=f"^engine='compiled': LlamaForCausalLM {message}.*; set engine = 'eager'$"
        ):
            policy(*text())


def test_a_missing_compiler_is_one_line_before_the_run(
    files: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(surefoot.SurefootError, match=r"^engine='compiled': needs a C\+\+ compiler"):
        surefoot.train("sft", run_dir=tmp_path / "run", **settings("sft", files, folders["llama"], engine="compiled"))
    assert not (tmp_path / "run").exists()


def test_runs_compile_the_policy_and_its_reference(files: Path, folders: dict[str, Path], tmp_path: Path, calls: Calls) -> None:
    fields = settings("grpo", files, folders["llama"], engine="compiled", padding_free=False)
    fields["sampling"] |= {"engine": "model"}
    surefoot.train("language", run_dir=tmp_path / "run", **fields)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["engine"] == "compiled"
    # of 2 blocks; each model makes programs in 4 passes; 3 passes compare the first rows with single ones; then log π_old, the
    # reference and 2 updates, twice
    assert len(calls) == 2 * (4 + 4 + 3 + 2 * (1 + 1 + 2))


def test_runs_compile_reward_models_which_then_run_eagerly(
    files: Path, folders: dict[str, Path], tmp_path: Path, calls: Calls
) -> None:
    fields = settings("steps", files, folders["llama"], engine="compiled", padding_free=False)
    result = surefoot.train("reward", run_dir=tmp_path / "run", **fields)
    assert calls[:4] == [("LlamaDecoderLayer", True)] * 4
    assert not any("forward" in vars(module) for module in result.modules())


def test_runs_compile_the_roles_of_a_shared_base(files: Path, folders: dict[str, Path], tmp_path: Path, calls: Calls) -> None:
    fields = settings("ppo", files, folders["llama"], engine="compiled", padding_free=False, adapter={"rank": 2})
    fields |= {"critic": {"own_model": True}, "sampling": {**fields["sampling"], "engine": "model"}}
    surefoot.train("language", run_dir=tmp_path / "run", **fields)
    # of 2 blocks: 4 passes of policy and critic and 4 of the reference make programs; then two iterations of policy and
    # critic before 4 updates, the reference, the values of ends, and the demonstrations in every update
    assert len(calls) >= 2 * (2 * 4 + 4)


ALSO = [("sft", False), ("ppo", False), ("reward", False)]


@pytest.mark.parametrize(
    ("name", "free"),
    [pytest.param("sft", True, marks=pytest.mark.slow), *(pytest.param(*x, marks=pytest.mark.release) for x in ALSO)],
)
def test_compiled_runs_are_near_eager_ones_and_repeat_and_resume_to_the_last_bit(
    name: str, free: bool, files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Programs are forgotten between the runs, as in processes of their own."""
    kind = RUNS[name]
    fields = settings(name, files, folders["llama"], padding_free=free, checkpoint={"every": 16})
    results = {}
    for place, engine, steps in (("eager", "eager", 32), ("whole", "compiled", 32), ("parts", "compiled", 16)):
        forget()
        result = surefoot.train(kind, run_dir=tmp_path / place, **{**fields, "engine": engine, "steps": steps})
        if steps == 16:
            forget()
            result = surefoot.resume(tmp_path / place, steps=32)
        results[place] = module_of(result).state_dict()
    for key, weight in results["whole"].items():
        assert torch.equal(results["parts"][key], weight)
        torch.testing.assert_close(results["eager"][key], weight, rtol=0, atol=1e-4)
    eager, compiled = (read_metrics(tmp_path / place / "metrics.jsonl") for place in ("eager", "whole"))
    for one, other in zip(eager, compiled, strict=True):
        for key in (*TIMING, "held_out_accuracy"):  # before the first update scores are equal, up to rounding
            one.pop(key, None), other.pop(key, None)
        assert one == pytest.approx(other, rel=2e-3, abs=2e-4)


@pytest.mark.slow
def test_rows_of_other_lengths_need_no_new_program() -> None:
    forget()
    blocks.compile_blocks(policy := LanguagePolicy(make("llama"), "head", PAD))
    policy(*text())
    made = programs_made()
    for rows, response in ((3, 5), (9, 17), (2, 30), (4, 3), (1, 9)):
        batch = text(rows=max(rows, 2), response=response)
        batch = map_tensors(lambda x, rows=rows: x[-rows:], batch)
        evaluation = policy(*batch)
        (evaluation.log_probs.sum() + evaluation.values.sum()).backward()
        with torch.no_grad():
            policy(*batch)
    assert programs_made() == made


def roles_of_a_base() -> tuple[LanguagePolicy, ReferencePolicy]:
    """A policy and its critic with adapters that do something, and the reference, which is their base."""
    model = make("llama", num_hidden_layers=1)
    base = SharedBase(model)
    draw = torch.Generator().manual_seed(1)
    for role in (POLICY, VALUE):
        base.add(role, AdapterSettings(rank=2))
        with torch.no_grad():
            for _, parameter in base.parameters(role):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    head = ValueHead(tiny.WIDTH, next(model.parameters()))
    nn.init.constant_(head.weight, 0.1)
    policy = LanguagePolicy(model, Critic(RoleTrunk(base, VALUE), head), PAD)
    return policy, ReferencePolicy(policy, base)


@pytest.mark.release
def test_each_role_of_a_base_has_the_numbers_of_eager_passes_and_no_new_program_for_other_lengths() -> None:
    forget()
    made = None
    eager, compiled = roles_of_a_base(), roles_of_a_base()
    blocks.compile_blocks(compiled[0], compiled[1].policy)
    for rows, response in ((3, 5), (9, 17), (2, 30), (1, 9)):
        batch = map_tensors(lambda x, rows=rows: x[-rows:], text(rows=max(rows, 2), response=response))
        of_both = []
        for policy, reference in (eager, compiled):
            evaluation = policy(*batch)
            trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
            gradient = torch.autograd.grad((evaluation.log_probs + evaluation.values).sum(), trained)
            with torch.no_grad():
                again = policy(*batch)
            outputs = [evaluation.log_probs, evaluation.values, again.log_probs, again.values, reference.log_probs(*batch)]
            of_both.append([*outputs, *gradient])
        for one, other in zip(*of_both, strict=True):
            near(other, one, 1e-4)
        made = made or programs_made()
    assert programs_made() == made
