"""Memory planning for several ranks: laws, measurements on two ranks, and the memory check."""

import gc
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import on_ranks

from surefoot.errors import SurefootError
from surefoot.language.memory import check, estimate
from surefoot.language.memory.check import MemoryCheck, available_to_a_rank, readable_workload, running_peak, workload_of
from surefoot.language.memory.layout import Layout, ModelSize, held_after_forward, held_at_the_end, held_in_layers, whole_bytes
from surefoot.language.memory.planner import MemoryPlan, model_config, to_json
from surefoot.language.memory.probe import HeapTracker
from surefoot.language.memory.roles import host_bytes, permanent_bytes
from surefoot.language.memory.savings import alternatives, settings
from surefoot.language.memory.workload import Workload, with_ranks
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_world

from .test_memory import MEASURING, PROMPT, TOKENS, equal, online, state_of, supervised, trial
from .test_memory import here as here

FULL = Layout(2, "full", 2)
GPU = "cuda"


@pytest.fixture
def workload(here: Path) -> Workload:
    """PPO with four models, in micro-batches of one row."""
    config = model_config(str(here / "llama"))[0]
    made = Workload("language", config, "own", reference=config, rewards=(config,), prompt=24, response=16)
    return replace(made, micro_batch_tokens=40)


def on(workload: Workload, ranks: int, sharding: Any = "full", **more: Any) -> Workload:
    return replace(workload, layout=Layout(ranks, sharding, **more))


# ---- laws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sharded_ranks_share_one_copy_and_unsharded_ranks_hold_one_each(workload: Workload, ranks: int) -> None:
    whole = permanent_bytes(workload)
    assert permanent_bytes(on(workload, ranks, None)) == whole
    together = ranks * permanent_bytes(on(workload, ranks))
    assert whole <= together <= whole + 100 * ranks, "each part is rounded up"
    assert permanent_bytes(on(workload, 8, "hybrid", per_machine=2)) == permanent_bytes(on(workload, 2))


@pytest.mark.parametrize("sharding", [None, "full"])
def test_more_ranks_never_need_more_memory_per_rank(workload: Workload, sharding: Any) -> None:
    peaks = [running_peak(estimate(on(workload, ranks, sharding))) for ranks in (2, 4, 8, 64)]
    assert all(later <= earlier for earlier, later in pairwise(peaks))
    assert peaks[0] < running_peak(estimate(workload))


def test_each_rank_gets_its_share_of_the_rows(workload: Workload) -> None:
    one = replace(on(workload, 3), evaluated=7, samples=2).of_one_rank()
    assert (one.rows, one.responses, one.evaluated) == (6, 22, 3), "of 16 rows, 64 responses to 32 prompts, and 7 held-out rows"
    assert replace(on(workload, 8), evaluated=7).of_one_rank().evaluated == 7, "fewer rows than ranks: each rank evaluates all"


def test_offloading_moves_all_model_parts_to_the_cpu_only_with_a_gpu(workload: Workload) -> None:
    kept, moved = (estimate(on(workload, 4, offload=offload)) for offload in (False, True))
    data = kept.always["data"]
    assert moved.always == {"data": data}
    assert host_bytes(moved.host) == kept.permanent - sum(data.values())
    assert moved.peak < kept.peak
    assert estimate(on(workload, 4, offload=True, gpu=False)) == estimate(on(workload, 4, gpu=False))


def test_resharding_needs_less_memory_and_bfloat16_halves_gathered_weights(workload: Workload) -> None:
    learning = [estimate(on(workload, 2, reshard=reshard)).at("learning") for reshard in (True, False)]
    assert learning[0] < learning[1]
    low, high = (estimate(replace(on(workload, 2), bf16=bf16)) for bf16 in (True, False))
    gathered = [each.phases["sampling"]["gathered weights"] for each in (low, high)]
    assert gathered[1] == 2 * gathered[0]
    assert low.always["reference"]["weights"] * 2 == high.always["reference"]["weights"]
    assert low.always["policy"] == high.always["policy"], "trained models stay in float32"


def test_gathered_memory_is_between_the_embeddings_and_all_weights_and_gradients() -> None:
    models = [ModelSize(1200, 12, 300), ModelSize(1200, 12, 150)]
    rest, whole = 450 * 4, whole_bytes(models, 4)
    assert whole == (1500 + 1350) * 4
    assert sum(held_after_forward(models, 4, True).values()) == rest + 100 * 4
    assert sum(held_after_forward(models, 4, False).values()) == whole
    for held in (held_in_layers(models, 4, True), held_in_layers(models, 4, False), held_at_the_end(models, 4)):
        assert rest <= sum(held.values()) <= 3 * whole
    frozen = [replace(model, trained=0.0) for model in models]
    assert held_in_layers(frozen, 4, True)["whole gradients"] == held_at_the_end(frozen, 4)["whole gradients"] == 0


def test_alternatives_for_several_ranks_start_with_sharding_and_offload_needs_a_gpu(workload: Workload) -> None:
    names = [name for name, _ in alternatives(on(workload, 4, None))]
    assert names[0] == 'sharding = "full"'
    assert "offload = true" in [name for name, _ in alternatives(on(workload, 4))]
    assert "offload = true" not in [name for name, _ in alternatives(on(workload, 4, gpu=False))]
    tried = [names for names, _ in settings(replace(with_ranks(workload, 4), responses=64))]
    assert tried[0] == ()
    assert not any("sampling.prompts = 1" in names for names in tried), "each rank needs at least one prompt"


def test_7b_ppo_on_8_sharded_ranks_keeps_30_gb_on_each() -> None:
    config = model_config("7B")[0]
    made = Workload("language", config, "own", reference=config, rewards=(config,), bf16=True)
    made = replace(made, prompt=512, response=64, checkpointing=True, micro_batch_tokens=576)
    parts = permanent_bytes(on(made, 8))
    assert parts == pytest.approx(30.0e9, rel=0.01), "bytes per parameter: 16 for policy and critic, 2 for reference and reward"
    assert whole_bytes([ModelSize(6_476_271_616, 32, 262_144_000)], 2) == pytest.approx(13.5e9, rel=0.01)


# ---- measured -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "language"])
def test_estimates_for_two_sharded_ranks_are_within_15_percent(kind: str, here: Path, tmp_path: Path) -> None:
    MEASURING.built(here / "wide", "llama", width=512, layers=6, vocabulary=2048, context=64)
    if kind == "sft":
        table = {**supervised(here, "sft", "demonstrations"), "model": str(here / "wide")}
    else:
        table = online(here, "wide", critic={"own_model": True})
    table |= {"sharding": "full", "check_memory": False}
    small = table | {"model": str(here / "llama")}

    def body(_: int) -> dict[str, int]:
        join_ranks()
        MEASURING.Watched(make_recipe(small), tracker=HeapTracker()).run()  # imports must not count
        gc.collect()
        watched = MEASURING.Watched(make_recipe(table), tracker=HeapTracker())
        watched.run()
        return dict(watched.peaks)

    peaks = on_ranks(2, body, tmp_path / "peaks")
    recipe = make_recipe(table)
    planned = estimate(replace(workload_of(recipe, prompt=PROMPT, response=TOKENS), layout=Layout(2, "full", 2, gpu=False)))
    phases = peaks[0].keys() & planned.phases.keys()
    assert phases == ({"learning"} if kind == "sft" else {"sampling", "scoring", "learning"})
    for phase in phases:
        measured = max(peak[phase] for peak in peaks)
        assert measured == pytest.approx(planned.at(phase), rel=0.15), phase


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_the_longest_micro_batch_changes_nothing_on_two_ranks(sharding: str, here: Path, tmp_path: Path) -> None:
    table = online(here, critic={"own_model": True}) | {"sharding": sharding}

    def body(_: int) -> tuple[bool, list[str]]:
        join_ranks()
        world, learner, before = trial(table)
        world.memory.available = 2 * running_peak(estimate(world.memory.full)) - 1
        lines = world.try_longest(learner)
        return all(same(a, b) for a, b in zip(before, state_of(world, learner), strict=True)), lines

    (unchanged, lines), other = on_ranks(2, body, tmp_path / "lines")
    assert (unchanged, lines) == other
    assert unchanged
    assert "on each of 2 ranks while learning" in lines[0]


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, of sharded tensors this rank's part."""
    return equal(*(getattr(x, "_local_tensor", x) for x in (a, b)))


def test_every_rank_rejects_whole_models_that_fit_only_when_sharded(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = online(here, critic={"own_model": True}, optimizer={"micro_batch_tokens": 64})
    setup = workload_of(make_recipe(table), prompt=PROMPT, response=TOKENS)
    each = running_peak(estimate(replace(setup, layout=replace(FULL, gpu=False))))
    assert each < permanent_bytes(setup)
    monkeypatch.setattr(check, "available_memory", lambda device: 2 * each)  # of the machine, shared by two ranks

    def body(_: int) -> list[str]:
        join_ranks()
        messages = []
        for sharding in ("none", "full"):
            try:
                make_world(make_recipe({**table, "sharding": sharding}))
                messages.append("")
            except SurefootError as error:
                messages.append(str(error))
        return messages

    for rejected, started in on_ranks(2, body, tmp_path / "messages"):
        assert started == ""
        assert "on each of 2 ranks for weights, gradients and Adam's moments alone" in rejected
        assert 'available for each; set sharding = "full" (' in rejected


# ---- rejections and suggested settings ----------------------------------------------------------------------------------


def test_a_rejection_suggests_sharding_over_all_gpus_of_the_machine(
    workload: Workload, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "total_memory", lambda device: 10**12)
    recipe = make_recipe({**online(here, critic={"own_model": True}), "device": GPU})
    needed = [permanent_bytes(with_ranks(readable_workload(recipe), ranks)) for ranks in (1, 2, 4)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(check, "available_memory", lambda device: needed[2] if device == GPU else 10**12)
    with pytest.raises(SurefootError, match=r'set sharding = "full" and add --ranks 4 \('):
        MemoryCheck(recipe)


def test_offloaded_models_must_fit_in_cpu_memory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "total_memory", lambda device: 10**12)
    recipe = make_recipe({**online(here), "device": GPU, "sharding": "full", "offload": True})
    monkeypatch.setattr(check, "layout_of", lambda recipe: replace(FULL, offload=True))
    monkeypatch.setattr(check, "available_memory", lambda device: 10**12 if device == GPU else 10**6)
    with pytest.raises(SurefootError, match=r"offload=true: keeps .* on each of 2 ranks in the memory of the CPU"):
        MemoryCheck(recipe)
    monkeypatch.setattr(check, "available_memory", lambda device: 10**12)
    made = MemoryCheck(recipe)
    made.check(prompt=PROMPT, response=1, most=TOKENS, evaluated=0)
    device, host = made.summary()
    assert "on each of 2 ranks at its peak" in device
    assert "memory of the CPU" in host


def test_ranks_share_cpu_memory_and_plan_for_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "available_memory", lambda device: 1000)
    monkeypatch.setattr(check, "local_ranks", lambda: 4)
    monkeypatch.setattr(check, "exchange", lambda mine: [mine, None, 700])
    assert available_to_a_rank("cpu") == 250
    assert available_to_a_rank(GPU) == 700, "the minimum over ranks"


# ---- the command --------------------------------------------------------------------------------------------------------


def test_only_plans_for_one_process_have_settings_for_several_gpus(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for several ranks has variants of its sharding instead."""
    monkeypatch.setattr("surefoot.language.memory.planner.GPUS", (2,))
    several = MemoryPlan("llama", workload).several()
    assert set(several) == {2}
    assert set(several[2]) == {24, 48, 80, 141}
    sharded = MemoryPlan("llama", on(workload, 2))
    assert sharded.several() == {}
    assert to_json(sharded)["setup"]["ranks"] == 2
    assert {"whole models on every rank", "offload = true", "reshard_after_forward = false"} <= set(sharded.others())


def test_the_memory_command_plans_several_ranks(here: Path, command: Any) -> None:
    options = ["--kind", "sft", "--batch", "4", "--prompt-tokens", "16", "--max-tokens", "8"]
    model = str(here / "llama" / "config.json")
    code, output, _ = command("memory", model, *options, "--ranks", "4", "--sharding", "full", "--offload")
    assert code == 0
    assert '4 ranks, sharding = "full": fits 4 GPUs of 24, 48, 80, 141 GB, ' in output
    assert "a rank in the memory of the CPU" in output
    code, output, _ = command("memory", model, *options, "--ranks", "4", "--sharding", "full", "--json")
    report = json.loads(output)
    assert report["setup"]["sharding"] == "full"
    assert 4 * report["always"]["policy"]["weights"] == pytest.approx(4 * report["parameters"], abs=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sharding", "full"], "--sharding full: shares models among ranks, and there is one; add --ranks 8"),
        (["--ranks", "2", "--offload"], "--offload: is for sharded models; add --sharding full"),
        (["--ranks", "2", "--no-reshard-after-forward"], "--no-reshard-after-forward: is for sharded models"),
        (["--ranks", "12", "--sharding", "hybrid"], "--ranks 12: is not a multiple of --ranks-per-machine 8"),
        (["--minibatches", "100"], "--minibatches 100: more than the 64 responses of an iteration; use fewer"),
        (["--ranks", "128"], "--ranks 128: more than 64 prompts; use fewer ranks"),
        (["--quantize", "nf4"], "--quantize nf4: is for the frozen base of adapters; add --adapter 16"),
        (["--ranks", "2", "--sharding", "full", "--optimizer", "adam-8bit"], "--optimizer adam-8bit: is whole on every rank"),
    ],
)
def test_incompatible_rank_options_are_rejected(here: Path, command: Any, options: Any, message: str) -> None:
    code, _, error = command("memory", str(here / "llama"), *options)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
