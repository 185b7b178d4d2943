"""Adapters: only they are trained and saved, the base is the reference bit for bit, and each role uses its own."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import assert_same

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.objective import Batch, loss
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.language.analysis.evaluate import evaluate_run
from surefoot.language.language_model import from_parts
from surefoot.language.models.adapters import POLICY, VALUE, RoleTrunk, SharedBase
from surefoot.language.models.loading import load_model
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.models.policy.critic import Critic, ValueHead
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.sampling.engines import Request
from surefoot.language.sampling.sampler import sample
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.recipes.models import AdapterSettings
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner
from surefoot.store.checkpoint import load_checkpoint, save_checkpoint
from surefoot.store.folder import checkpoint_to_load

from .tiny import logits, moved, whole_and_resumed, world_of, write_folder

pytest.importorskip("peft")

SMALL = {"rank": 4, "alpha": 8}


def table(kind: str, files: Path, model: Path, /, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": kind, "model": str(model), "adapter": SMALL, "optimizer": {"learning_rate": 1e-2}}
    if kind == "language":
        fields |= {
            "steps": 32,
            "data": {"train": f"{files}/rows.jsonl", "held_out": f"{files}/rows.jsonl", "max_length": 32},
            "sampling": {"prompts": 8, "max_tokens": 6},
            "reward": {"terms": [f"{files}/rewards.py:score"], "missing_eos": "none"},
            "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
        }
    else:
        rows = f"{files}/{'steps' if 'preference' in changes else 'rows' if kind == 'sft' else 'pairs'}.jsonl"
        fields |= {"steps": 32, "data": {"train": rows, "held_out": rows, "max_length": 32, "batch": 8}}
    return {**fields, **changes}


def started(kind: str, files: Path, model: Path, run: Path, **changes: Any) -> Any:
    fields = table(kind, files, model, **changes)
    return surefoot.train(fields.pop("kind"), run_dir=run, **fields)


# ---- the base -----------------------------------------------------------------------------------------------------------


def test_with_adapters_off_the_model_is_its_base_bit_for_bit(loaded: tuple[Any, Any]) -> None:
    model = loaded[0]
    before = logits(model)
    base = SharedBase(model)
    base.add(POLICY, AdapterSettings(**SMALL))
    assert torch.equal(logits(model), before), "an adapter begins by adding nothing"
    base.add(VALUE, AdapterSettings(rank=2))
    moved(base, POLICY)
    moved(base, VALUE)
    assert (logits(model) - before).abs().max() > 1e-2
    with base.using(None):
        assert torch.equal(logits(model), before)
    with base.using(VALUE):
        as_value = logits(model)
    assert (as_value - logits(model)).abs().max() > 1e-2


def test_only_adapters_can_be_trained_and_each_starts_from_a_stream_of_its_own(loaded: tuple[Any, Any]) -> None:
    state = torch.get_rng_state()
    model = loaded[0]
    base = SharedBase(model, seed=3)
    base.add(POLICY, AdapterSettings(**SMALL))
    base.add(VALUE, AdapterSettings(**SMALL))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(".lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    layers = len(base.linear)
    assert len(list(base.parameters(POLICY))) == len(list(base.parameters(VALUE))) == 2 * layers > 0
    a, b = (base.tensors(role) for role in (POLICY, VALUE))
    assert a.keys() == b.keys()
    assert not any(torch.equal(a[name], b[name]) for name in a if ".lora_A." in name)


# ---- roles --------------------------------------------------------------------------------------------------------------


def roles(folder: Path, checkpointing: bool) -> tuple[LanguagePolicy, SharedBase]:
    """A policy and a critic as adapters of one base."""
    model, tokenizer = load_model(folder)
    base = SharedBase(model)
    for seed, role in enumerate((POLICY, VALUE)):
        base.add(role, AdapterSettings(**SMALL))
        moved(base, role, seed)
    critic = Critic(RoleTrunk(base, VALUE), head_of(model))
    policy = LanguagePolicy(model, critic, tokenizer.pad_token_id, checkpointing=checkpointing)
    LanguagePolicy(model, None, tokenizer.pad_token_id, checkpointing=checkpointing)  # another reader takes no role away
    return policy, base


def apart(folder: Path) -> tuple[LanguagePolicy, dict[str, SharedBase]]:
    """The same two on a base each."""
    models = [load_model(folder)[0] for _ in range(2)]
    bases = {POLICY: SharedBase(models[0]), VALUE: SharedBase(models[1])}
    for seed, (role, base) in enumerate(bases.items()):
        base.add(role, AdapterSettings(**SMALL))
        base.switch(role)
        moved(base, role, seed)
    critic = Critic(models[1].base_model, head_of(models[1]))
    return LanguagePolicy(models[0], critic, 0), bases


def head_of(model: Any) -> ValueHead:
    head = ValueHead(32, next(model.parameters()))
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return head


def batch() -> Batch:
    drawn = torch.Generator().manual_seed(2)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 3:] = False
    ids = torch.randint(3, 100, (3, 9), generator=drawn)
    numbers = [torch.randn(3, 5, generator=drawn) for _ in range(4)]
    inputs = {"prompt": ids[:, :4], "prompt_mask": torch.ones(3, 4, dtype=torch.bool)}
    return Batch(inputs, ids[:, 4:], mask, numbers[0] - 4.0, *numbers[1:])


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", True), ("gpt2", False)])
def test_roles_on_one_base_have_the_loss_and_the_gradients_of_separate_copies(
    family: str, checkpointing: bool, folders: dict[str, Path]
) -> None:
    together, base = roles(folders[family], checkpointing)
    separate, bases = apart(folders[family])
    results = []
    for policy in (together, separate):
        b = batch()
        objective = make_recipe({"kind": "control", "task": "CartPole-v1"}).objective
        total = loss(policy(b.inputs, b.actions, b.mask), b, objective, denominator=b.mask.sum(), beta=0.0).total
        total.backward()
        results.append(float(total.detach()))
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    for role in (POLICY, VALUE):
        own = {name: p.grad for name, p in base.parameters(role)}
        other = {name: p.grad for name, p in bases[role].parameters(role)}
        assert own.keys() == other.keys()
        assert sum(float(g.abs().sum()) for g in own.values() if g is not None) > 0
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, other[name], atol=1e-4, rtol=1e-3, msg=name)


def test_four_roles_live_on_one_base(files: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    started("reward", files, folders["llama"], tmp_path / "scores")
    changes = {
        "reward": {"terms": [{"model": str(tmp_path / "scores")}], "missing_eos": "none"},
        "critic": {"own_model": True, "start": str(tmp_path / "scores")},
        "gradient_checkpointing": True,
    }
    made = world_of(table("language", files, folders["llama"], **changes))
    assert set(made.base.configs) == {POLICY, VALUE, "reward0"}
    every = {p.data_ptr(): p.numel() for part in (made.policy, made.reference, made.reward.model) for p in part.parameters()}
    alone = sum(p.numel() for p in load_model(folders["llama"])[0].parameters())
    adapters = sum(p.numel() for role in made.base.configs for _, p in made.base.parameters(role))
    heads = 2 * 33
    assert sum(every.values()) == alone + adapters + heads, "no second copy of the base"
    untouched = {name: p.clone() for name, p in made.policy.named_parameters() if not p.requires_grad}
    whole = RewardModel.load(tmp_path / "scores" / "model")
    ids = torch.arange(20).view(2, 10) + 5
    with torch.no_grad():
        torch.testing.assert_close(made.reward.model(ids, ids > 0), whole(ids, ids > 0), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(made.policy.critic(ids)[:, -1], whole(ids, ids > 0), atol=1e-4, rtol=1e-3)
    learner, state = make_learner(made.recipe, made.policy), LearnerState.seeded(1, 32)
    for _ in range(2):
        rollout = made.collector.collect(state)
        metrics = learner.update(rollout, assign_credit(rollout, made.recipe.objective), state)
        assert float(metrics["ratio_at_start"] or 0) == pytest.approx(1, abs=1e-4)
        state.steps += rollout.steps
    for name, p in made.policy.named_parameters():
        assert name not in untouched or torch.equal(p, untouched[name]), name
    with torch.no_grad():
        plain = load_model(folders["llama"])[0]
        drawn = rollout.inputs, rollout.actions, rollout.mask
        wanted = LanguagePolicy(plain, None, made.tokens.pad_id)(*drawn).log_probs
        assert torch.equal(made.reference.log_probs(*drawn), wanted), "the reference is the base, bit for bit"
        assert not torch.allclose(made.policy(*drawn).log_probs, wanted, atol=1e-3)


def test_a_reward_model_of_another_base_is_loaded_as_its_own(files: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", "llama", seed=9)
    started("reward", files, other, tmp_path / "scores")
    changes = {"reward": {"terms": [{"model": str(tmp_path / "scores")}], "missing_eos": "none"}}
    made = world_of(table("language", files, folders["llama"], **changes))
    assert set(made.base.configs) == {POLICY}
    critic = {"critic": {"own_model": True, "start": str(tmp_path / "scores")}}
    with pytest.raises(SurefootError, match=r"^critic.start=.*is not an adapter of model="):
        world_of(table("language", files, folders["llama"], **critic))


# ---- the sampler --------------------------------------------------------------------------------------------------------


def test_the_fast_sampler_draws_with_the_adapters_log_probabilities(loaded: tuple[Any, Any]) -> None:
    model = loaded[0]
    base = SharedBase(model)
    base.add(POLICY, AdapterSettings(**SMALL))
    moved(base, POLICY)
    prompts = [[5, 6, 7], [8, 9]]
    options: dict[str, Any] = {"max_tokens": 8, "eos_ids": [1], "pad_id": 0, "seeds": [1, 2]}
    drawn = sample(model, Request(prompts, **options))
    assert drawn.path == "packed"
    with torch.no_grad():
        inputs = {"prompt": drawn.prompt, "prompt_mask": drawn.prompt_mask}
        scored = LanguagePolicy(model, None, 0)(inputs, drawn.actions, drawn.mask).log_probs
    assert (scored - drawn.log_probs)[drawn.mask].abs().max() < 1e-4
    with base.using(None):
        plain = sample(model, Request(prompts, **options))
    assert not torch.allclose(plain.log_probs[:, 0], drawn.log_probs[:, 0], atol=1e-3)


# ---- runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers by the old name
@pytest.mark.parametrize(
    "kind", ["sft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("reward", "steps", "dpo")), "language"]
)
def test_a_run_trains_keeps_and_leaves_adapters_and_resumes_exactly(
    kind: str, files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    model = folders["gpt2" if kind == "sft" else "llama"]
    extra: dict[str, Any] = {"critic": {"own_model": True}} if kind == "language" else {}
    if kind != "language":
        extra = {"adapter": {**SMALL, "dropout": 0.2}}
    classifier: Any = AutoModelForSequenceClassification
    if kind == "steps":
        kind, classifier = "reward", AutoModelForTokenClassification
        extra["preference"] = {"loss": "steps"}
    ends = whole_and_resumed(folder=tmp_path, **table(kind, files, model, **extra))
    assert_same(ends[0]["agent"], ends[1]["agent"])
    assert all(".lora_" in name or "head" in name for name in ends[0]["agent"]), "the base is not in a checkpoint"
    assert any(float(t.abs().max()) > 0 for name, t in ends[0]["agent"].items() if ".lora_B." in name), "it moved"
    folder = tmp_path / "whole"
    assert json.loads((folder / "adapter" / "base.json").read_text())["model"] == str(model)
    if kind == "reward":
        adapter = PeftModel.from_pretrained(AutoModel.from_pretrained(model), str(folder / "adapter")).eval()
        merged = classifier.from_pretrained(folder / "model").base_model.eval()
        ids = torch.arange(20).view(2, 10) + 5
        with torch.no_grad():
            one, two = (m(input_ids=ids).last_hidden_state for m in (adapter, merged))
        loaded = surefoot.load(folder)
        left = RewardModel.load(folder / "model")
        assert loaded.of_steps == left.of_steps == ("preference" in extra)
        assert (float(loaded.mean), float(loaded.std)) == (float(left.mean), float(left.std)) != (0, 1)
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids, ids > 0), left(ids, ids > 0), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                loaded.prefix_scores(ids, ids > 0), left.prefix_scores(ids, ids > 0), atol=1e-5, rtol=1e-4
            )
    else:
        adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder / "adapter")).eval()
        merged = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
        one, two = logits(adapter), logits(merged)
        assert (one - logits(load_model(model)[0])).abs().max() > 1e-3
        torch.testing.assert_close(logits(surefoot.load(folder).model), two, atol=1e-6, rtol=0)
    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    report = evaluate_run(folder)
    assert report["steps"] > 0


def test_a_base_that_has_changed_or_gone_is_rejected(files: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    model, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(folders["llama"], model)
    started("sft", files, model, run, callback=lambda metrics: metrics["steps"] >= 16)
    write_folder(model, "llama", seed=7)
    for use in (surefoot.resume, surefoot.load, evaluate_run):
        with pytest.raises(SurefootError, match=r"base model=.*its content has changed"):
            use(run)
    shutil.rmtree(model)
    with pytest.raises(SurefootError, match="no such folder"):
        surefoot.resume(run)
    with pytest.raises(SurefootError, match=r"contains an adapter whose base can't be loaded: .*no such folder"):
        surefoot.load(run)


def test_the_code_of_a_checkpoints_base_runs_only_if_the_caller_allows_it(
    files: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    started("sft", files, folders["llama"], tmp_path / "run", adapter=SMALL)
    evil = tmp_path / "evil"
    shutil.copytree(folders["llama"], evil)
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (evil / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto, "architectures": ["Own"]}))
    (evil / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise RuntimeError('ran')\n")
    where = checkpoint_to_load(tmp_path / "run")
    parts = load_checkpoint(where)
    parts["recipe"]["trust_remote_code"], parts["base"]["model"] = True, str(evil)
    with pytest.raises(SurefootError, match="its own Python code, which is not run by default"):
        from_parts(parts, where)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(SurefootError, match="RuntimeError: ran"):
        from_parts(parts, where, trust_remote_code=True)
    (tmp_path / "ran").unlink()
    save_checkpoint(where, parts)
    words = ("merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged"))
    assert "its own Python code, which is not run by default" in command(*words)[2]
    assert not (tmp_path / "ran").exists()
    assert "RuntimeError: ran" in command(*words, "--trust-remote-code")[2]


def test_without_merging_a_run_leaves_the_adapter_alone_until_it_is_merged(
    files: Path, folders: dict[str, Path], tmp_path: Path, command: Callable[..., Any]
) -> None:
    started("sft", files, folders["llama"], tmp_path / "run", adapter={**SMALL, "merge": False})
    assert (tmp_path / "run" / "adapter").is_dir()
    assert not (tmp_path / "run" / "model").exists()
    with pytest.raises(SurefootError, match="saved only an adapter; merge it: surefoot merge"):
        SupervisedWorld(make_recipe(table("sft", files, tmp_path / "run")))
    assert command("merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged"))[0] == 0
    torch.testing.assert_close(
        logits(load_model(tmp_path / "merged")[0]), logits(surefoot.load(tmp_path / "run").model), atol=1e-6, rtol=0
    )


# ---- bad input ----------------------------------------------------------------------------------------------------------


def test_targets_name_layers_of_the_trunk(files: Path, folders: dict[str, Path]) -> None:
    def world(*targets: str) -> SupervisedWorld:
        fields = table("sft", files, folders["llama"], adapter={**SMALL, "targets": targets})
        return SupervisedWorld(make_recipe(fields))

    for wrong, what in (("q_prj", ".*did you mean 'q_proj'"), ("lm_head", "the model's trunk has no linear layer")):
        with pytest.raises(SurefootError, match=rf"^adapter.targets='{wrong}': {what}"):
            world(wrong)
    base = world("q_proj", "v_proj").base
    assert len(list(base.parameters(POLICY))) == 2 * 2 * 2


@pytest.mark.parametrize(
    ("package", "line", "changes"),
    [
        ("peft", r"^adapter needs peft, which .*pip install .*\[adapters\]'", {}),
        (
            "bitsandbytes",
            r"^optimizer.kind='adam-8bit' needs bitsandbytes, .*pip install .*\[quantized\]'",
            {"adapter": None, "optimizer": {"kind": "adam-8bit"}},
        ),
    ],
)
def test_a_missing_package_names_the_extra(
    package: str, line: str, changes: dict[str, Any], files: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else real(name, *a))
    recipe = make_recipe(table("sft", files, folders["llama"], **changes))
    with pytest.raises(SurefootError, match=line):
        make_learner(recipe, SupervisedWorld(recipe).policy)
