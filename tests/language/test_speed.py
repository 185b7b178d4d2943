"""Calculated iteration times: formulas, plans, measured machine rates, and the plan command."""

import json
import multiprocessing
import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import surefoot
from surefoot import SurefootError
from surefoot.language.memory.layout import Layout
from surefoot.language.memory.planner import model_config
from surefoot.language.memory.workload import Workload
from surefoot.language.speed import (
    Transformer,
    all_reduce_bytes,
    backward_flops,
    decoding_bytes,
    exchange_seconds,
    forward_flops,
    gather_bytes,
    machines,
    moved_bytes,
    together,
    transformer_of,
)
from surefoot.language.speed.machines import GPUS, Machine, measured_machine
from surefoot.language.speed.plan import Work, iteration_time, plans

SMALL = Transformer(2, 8, 16, 50, weights=1000, head=400, total=1800, cache=32)
H200 = GPUS["H200"]
RANKS = st.integers(1, 4096)
SIZES = st.floats(1, 1e12)


@pytest.fixture(scope="module")
def workload() -> Workload:
    """PPO with four models of half a billion parameters."""
    config = model_config("0.5B")[0]
    made = Workload("language", config, surefoot.PPO_CLIP, "own", reference=config, rewards=(config,), bf16=True)
    return replace(made, prompt=512, response=64, max_tokens=64, rows=16, responses=64)


# ---- formulas -----------------------------------------------------------------------------------------------------------


def test_forward_pass_takes_two_flops_per_weight_and_token() -> None:
    assert forward_flops(SMALL, 10, 0, 0) == 2 * 1000 * 10
    assert forward_flops(SMALL, 10, 3, 0) == 2 * (1000 * 10 + 400 * 3)
    assert forward_flops(SMALL, 10, 0, 5) - forward_flops(SMALL, 10, 0, 0) == 2 * (2 * 2 * 8 * 5) * 10, "q·k and a·v: 2 each"


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.booleans())
def test_backward_pass_costs_two_forward_passes_plus_recomputed_layers(tokens: int, logits: int, checkpointing: bool) -> None:
    forward = forward_flops(SMALL, tokens, logits, 7)
    again = forward_flops(SMALL, tokens, 0, 7) * checkpointing
    assert backward_flops(SMALL, tokens, logits, 7, checkpointing) == pytest.approx(2 * forward + again)


def test_decoding_reads_all_weights_once_and_the_cache_of_each_row() -> None:
    assert decoding_bytes(SMALL, 0, 9, 2) == 2 * 1400
    assert decoding_bytes(SMALL, 5, 9, 2) - decoding_bytes(SMALL, 4, 9, 2) == 2 * 9 * 32
    assert moved_bytes(SMALL, 20, 0, 4) == 2 * moved_bytes(SMALL, 10, 0, 4) == 2 * moved_bytes(SMALL, 20, 0, 2)


@given(SIZES, RANKS)
def test_one_rank_exchanges_nothing_and_many_gather_up_to_the_whole_size(size: float, ranks: int) -> None:
    assert gather_bytes(size, 1) == all_reduce_bytes(size, 1) == 0
    assert gather_bytes(size, ranks) <= size
    assert gather_bytes(size, ranks) <= gather_bytes(size, ranks + 1)
    assert all_reduce_bytes(size, ranks) == 2 * gather_bytes(size, ranks)
    assert gather_bytes(size, 2) == size / 2


@given(SIZES, SIZES, st.integers(0, 1000), st.floats(0, 1))
def test_an_exchange_is_never_faster_than_bytes_over_bandwidth(size: float, bandwidth: float, count: int, wait: float) -> None:
    assert exchange_seconds(size, bandwidth, count, wait) >= size / bandwidth


def test_overlapping_times_take_the_maximum_and_sequential_ones_the_sum() -> None:
    assert together((1.0, 3.0), True) == 3.0
    assert together((1.0, 3.0), False) == 4.0


def test_transformer_sizes_match_the_model_config() -> None:
    config = model_config("7B")[0]
    model = transformer_of(config)
    assert (model.layers, model.width, model.feed_forward, model.vocabulary) == (32, 4096, 11008, 32_000)
    assert model.total == 6_738_415_616
    assert model.head == 32_000 * 4096
    assert model.cache == 2 * 32 * 4096
    assert transformer_of(config, head=False).total == model.total - model.head


# ---- plans --------------------------------------------------------------------------------------------------------------


def test_doubling_the_ranks_halves_the_work_of_each(workload: Workload) -> None:
    work = [iteration_time(replace(workload, layout=Layout(ranks)), H200).work["learning"] for ranks in (1, 2, 4)]
    assert work[0].flops == pytest.approx(2 * work[1].flops) == pytest.approx(4 * work[2].flops)


def test_weak_scaling_keeps_work_per_rank_and_never_reduces_exchanges(workload: Workload) -> None:
    for sharding in (None, "full", "hybrid"):
        sharded = replace(workload, layout=replace(workload.layout, sharding=sharding), micro_batch=4)  # type: ignore[arg-type]
        results = plans(sharded, H200, epochs=4)
        assert {round(result.work["learning"].flops) for result in results} == {round(results[0].work["learning"].flops)}
        seconds = [result.exchanges["learning"] for result in results]
        assert seconds[0] == 0
        assert all(earlier <= later * (1 + 1e-9) for earlier, later in pairwise(seconds)), "more ranks exchange no less"
        assert all(result.total >= max(result.seconds.values()) for result in results)


def test_exchanges_are_bounded_below_by_their_bytes(workload: Workload) -> None:
    result = iteration_time(replace(workload, layout=Layout(16, "full", per_machine=8), rows=256, responses=1024), H200)
    parameters = 2 * transformer_of(workload.policy).total - transformer_of(workload.policy).head
    assert result.work["learning"].exchanged >= (2 + 4) * parameters * 15 / 16, "weights gathered, gradients summed"
    assert result.exchanges["learning"] >= result.work["learning"].exchanged / (8 * H200.network)


def test_hybrid_sharding_and_no_resharding_reduce_exchanges(workload: Workload) -> None:
    spread = replace(workload, rows=512, responses=2048, micro_batch=4)
    full, hybrid, kept = (
        iteration_time(replace(spread, layout=Layout(32, sharding, per_machine=8, reshard=reshard)), H200)
        for sharding, reshard in (("full", True), ("hybrid", True), ("full", False))
    )
    assert kept.work["learning"].exchanged < full.work["learning"].exchanged
    assert hybrid.work["sampling"].across == 8
    assert hybrid.exchanges["sampling"] < full.exchanges["sampling"]
    assert full.work["learning"].between == 0 < hybrid.work["learning"].between < hybrid.work["learning"].exchanged


def test_faster_gpus_take_less_time_and_none_exceeds_its_peak(workload: Workload) -> None:
    slow, fast = (iteration_time(workload, GPUS[name]) for name in ("A100", "B200"))
    assert all(fast.seconds[name] < slow.seconds[name] for name in slow.seconds)
    for name, gpu in GPUS.items():
        made = iteration_time(workload, gpu)
        assert made.seconds["learning"] >= made.work["learning"].flops / gpu.flops, name
        read = workload.max_tokens * 2 * transformer_of(workload.policy).weights
        assert made.seconds["sampling"] >= read / gpu.bandwidth, name


def test_overlap_never_increases_the_time(workload: Workload) -> None:
    one_after_another = replace(H200, overlap=False)
    work = Work(flops=1e12, moved=1e9, launches=100, exchanged=1e9, exchanges=3, across=8)
    assert work.seconds(H200) <= work.seconds(one_after_another)
    assert work.seconds(one_after_another) == pytest.approx(
        work.device_seconds(one_after_another) + work.exchange_seconds(one_after_another)
    )


@pytest.mark.slow
def test_measured_rates_of_this_machine_are_plausible() -> None:
    machine = measured_machine(64, 128, 64, 8, ranks=2, clock=time.process_time, seconds=0.02)
    assert isinstance(machine, Machine)
    assert 1e8 < machine.flops < 1e13
    assert machine.few_rows is not None
    assert 1e7 < machine.few_rows < 1e13
    assert 1e8 < machine.bandwidth < 1e12
    assert 1e-8 < machine.launch < 1e-2
    assert machine.link > 1e6
    assert not machine.overlap


def fail_on_rank_one(rank: int, *rest: Any) -> None:
    os._exit(3) if rank else time.sleep(60)


def test_failed_measurement_rank_raises_at_once_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the other ranks would wait for half an hour."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(machines, "_exchange", fail_on_rank_one)
    with pytest.raises(SurefootError, match="--ranks 3: a process that measures exchanges ended with code 3; use fewer ranks"):
        machines._exchange_rates(3, time.perf_counter)
    assert multiprocessing.active_children() == []


# ---- the command --------------------------------------------------------------------------------------------------------


def test_command_plans_up_to_512_gpus_and_labels_times_as_calculated(command: Any) -> None:
    code, output, _ = command("plan", "0.5B", "--gpu", "H100", "--micro-batch", "4")
    assert code == 0
    assert "0.5B on H100" in output
    assert "Calculated, not measured" in output
    assert [line.split()[0] for line in output.splitlines() if line[:6].strip().isdigit()][-1] == "512"


def test_machine_rates_can_be_set_by_flags(command: Any) -> None:
    code, output, _ = command("plan", "0.5B", "--ranks", "8", "--tflops", "100", "--network", "10", "--json")
    assert code == 0
    report = json.loads(output)
    assert report["calculated"] is True
    assert report["machine"]["flops"] == 100e12
    assert report["machine"]["network"] == 10e9
    assert set(report["ranks"]) == {"8"}
    assert report["ranks"]["8"]["seconds"]["total"] > 0


def test_a_plan_in_float32_has_the_rate_of_float32_unless_a_flag_sets_another(command: Any) -> None:
    """In bfloat16 an H200 multiplies 15 times as fast."""

    def rate(*options: str) -> float:
        code, output, _ = command("plan", "0.5B", "--gpu", "H200", "--kind", "sft", "--ranks", "8", "--json", *options)
        assert code == 0
        return float(json.loads(output)["machine"]["flops"])

    assert rate() == rate("--precision", "bfloat16-weights") == 989e12
    assert rate("--precision", "float32") == 67e12
    assert rate("--precision", "float32", "--tflops", "100") == 100e12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measure"], "--precision bfloat16: --measure measures matrices in float32; add --precision float32"),
        (["--measure", "--precision", "float32", "--tflops", "5"], "--tflops 5: --measure measures it; leave one of them out"),
        (["--minibatches", "100"], "--minibatches 100: more than the 64 responses of an iteration"),
    ],
)
def test_conflicting_options_are_rejected(command: Any, options: Any, message: str, tmp_path: Path) -> None:
    code, _, error = command("plan", "0.5B", *options)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
