"""Calculated iteration times (benchmarks/plan.py): laws of the formulas and of plans."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.language.memory.layout import Layout
from surefoot.language.memory.planner import model_config
from surefoot.language.memory.workload import Workload

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # as when a script of it runs
from plan import (
    GPUS,
    Transformer,
    all_reduce_bytes,
    backward_flops,
    decoding_bytes,
    forward_flops,
    gather_bytes,
    iteration_time,
    moved_bytes,
    plans,
    transformer_of,
)

SMALL = Transformer(2, 8, 16, 50, weights=1000, head=400, total=1800, cache=32)
H200 = GPUS["H200"]
RANKS = st.integers(1, 4096)
SIZES = st.floats(1, 1e12)


@pytest.fixture(scope="module")
def workload() -> Workload:
    """PPO with four models of half a billion parameters."""
    config = model_config("0.5B")[0]
    made = Workload("language", config, "own", reference=config, rewards=(config,), bf16=True)
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


# ---- plans --------------------------------------------------------------------------------------------------------------


def test_weak_scaling_keeps_work_per_rank_and_never_reduces_exchanges(workload: Workload) -> None:
    for sharding in (None, "full", "hybrid"):
        sharded = replace(workload, layout=replace(workload.layout, sharding=sharding), micro_batch=4)  # type: ignore[arg-type]
        results = plans(sharded, H200, epochs=4)
        assert {round(result.work["learning"].flops) for result in results} == {round(results[0].work["learning"].flops)}
        seconds = [result.exchanges["learning"] for result in results]
        assert seconds[0] == 0
        assert all(earlier <= later * (1 + 1e-9) for earlier, later in pairwise(seconds)), "more ranks exchange no less"
        assert all(result.total >= max(result.seconds.values()) for result in results)


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
