"""The time of an iteration on 1 to 512 GPUs, by arithmetic, and against measurement on this machine with 1, 2 and 4 ranks.

    python benchmarks/plan.py                      every configuration; writes docs/benchmarks/scale.md
    python benchmarks/plan.py --only ppo-2-full    some of them
    python benchmarks/plan.py --gpus               only print the table of GPUs that the page has

Every formula is a short function of sizes and rates: operations of matrices over FLOP/s, bytes over bytes per second. A
mixture of experts is counted as if all experts read every token.

Each configuration is a line of benchmarks/results/plan.jsonl; an existing one is skipped. The machine's rates (matrices,
memory, small operations, exchanges) and the run are measured one after the other in the same cell; the page is calculated from
these rates by the present formulas. Both are seconds of CPU of one process (``time.process_time``), so other load on the
machine, and ranks that share a core, count less. A rank that waits for another uses no CPU. ``--clock wall`` measures elapsed
seconds instead, for a quiet machine with a core for every rank.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from memory import built, online, rows_in
from record import finished, write
from transformers import PreTrainedConfig

from surefoot.compare.statistics import markdown_table
from surefoot.core.algorithms import PPO_CLIP
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.language.memory.check import readable, workload_of
from surefoot.language.memory.layout import LOW_WEIGHT, WEIGHT, Layout
from surefoot.language.memory.parameters import count_parameters
from surefoot.language.memory.planner import model_config
from surefoot.language.memory.roles import permanent_bytes
from surefoot.language.memory.workload import Workload
from surefoot.ranks.collectives import exchange, rank
from surefoot.ranks.launching import join_ranks, leave_ranks
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner, make_world

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "benchmarks" / "scale.md", ROOT / "benchmarks" / "results" / "plan"
PROMPT, ANSWER, ROWS = 48, 16, 8
"""tokens of a prompt and of a response, and responses of a rank"""
WIDTH = 512
CELLS = [(kind, ranks, sharding) for kind in ("sft", "ppo") for ranks, sharding in ((1, "none"), (2, "none"), (2, "full"))]
CELLS += [("sft", 4, "none"), ("ppo", 4, "full")]
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
RATES = ("flops", "bandwidth", "launch", "latency", "link", "few_rows")
"""of the machine, which are measured"""
ITERATIONS = 2
"""measured, after one that is not"""
Clock = Callable[[], float]
GPU_COUNTS = (1, 8, 64, 512)


# ---- what a phase does --------------------------------------------------------------------------------------------------

MOVED_PER_WIDTH, MOVED_PER_FEED_FORWARD = 40, 12
"""numbers that the operations between the matrices of a layer read and write in a forward pass, per token and unit: norms,
rotations, sums of the residual stream, the products of the feed-forward"""
MOVED_PER_LOGIT = 10
"""the same per logit: the logits, their largest, exponentials, sum, probabilities and entropy"""
OPERATIONS = 40
"""operations of a layer in a forward pass, each started by the host"""
OPTIMIZER_BYTES = 32
"""per trained parameter and step: Adam reads value, gradient and two moments and writes three of them; the gradient's norm"""


@dataclass(frozen=True)
class Transformer:
    """The sizes of a model that its time depends on.

    weights   parameters of all layers
    head      parameters that make logits; 0 without them
    total     all parameters
    cache     numbers that are kept of each token while sampling
    """

    layers: int
    width: int
    feed_forward: int
    vocabulary: int
    weights: int
    head: int
    total: int
    cache: int


def transformer_of(config: "PreTrainedConfig", head: bool = True) -> Transformer:
    """The sizes of a model, with or without its head for logits."""
    counts, text = count_parameters(config), config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 1) or 1)
    of_keys = int(getattr(text, "num_key_value_heads", None) or heads)
    size = int(getattr(text, "head_dim", None) or counts.width // heads)
    return Transformer(
        layers=counts.depth,
        width=counts.width,
        feed_forward=int(getattr(text, "intermediate_size", None) or 4 * counts.width),
        vocabulary=counts.vocabulary,
        weights=counts.layers,
        head=counts.vocabulary * counts.width if head else 0,
        total=counts.total if head else counts.trunk,
        cache=2 * counts.depth * of_keys * size,
    )


def forward_flops(model: Transformer, tokens: float, logits: float, context: float) -> float:
    """Operations of a forward pass: 2 per weight and token, and those of attention.

    tokens    that are read
    logits    of how many of them logits are made
    context   mean number of tokens that a token attends to
    """
    return 2 * (model.weights * tokens + model.head * logits) + 4 * model.layers * model.width * context * tokens


def backward_flops(model: Transformer, tokens: float, logits: float, context: float, checkpointing: bool) -> float:
    """Operations of a backward pass: twice the forward pass, and with checkpointing its layers once more."""
    again = forward_flops(model, tokens, 0, context) if checkpointing else 0.0
    return 2 * forward_flops(model, tokens, logits, context) + again


def moved_bytes(model: Transformer, tokens: float, logits: float, each: int) -> float:
    """Bytes that operations between matrices move in a forward pass; a backward pass moves twice as many.

    each   bytes of a number; logits are in float32
    """
    of_layer = MOVED_PER_WIDTH * model.width + MOVED_PER_FEED_FORWARD * model.feed_forward
    return model.layers * of_layer * tokens * each + MOVED_PER_LOGIT * model.vocabulary * logits * 4 * (model.head > 0)


def decoding_bytes(model: Transformer, rows: float, context: float, each: int) -> float:
    """Bytes that are read for one more token of every row: all weights once, and the cache of every row."""
    return each * (model.weights + model.head + rows * context * model.cache)


def gather_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank receives to hold the whole of what ``ranks`` ranks share; as many as it sends to sum parts of it."""
    return size * (ranks - 1) / ranks


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank sends to have the sum of all: a sum of parts, and a gather of them."""
    return 2 * gather_bytes(size, ranks)


def unpacked_bytes(size: float, ranks: int) -> float:
    """Bytes read and written to copy what was gathered in one tensor to the parameters, or gradients into one."""
    return 2 * size if ranks > 1 else 0.0


def exchange_seconds(size: float, bandwidth: float, count: float, latency: float) -> float:
    """Seconds of ``count`` exchanges of ``size`` bytes together: never less than bytes over bandwidth."""
    return size / bandwidth + count * latency


def together(seconds: Iterable[float], overlap: bool) -> float:
    """Seconds of things that a device does: at the same time, so that the longest counts, or one after another."""
    return max(seconds) if overlap else sum(seconds)


# ---- machines -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The rates of a device and its links.

    flops         multiplications and additions of matrices per second, at best; of a GPU in bfloat16
    float32       the same in float32 without TF32; None: as ``flops``
    bandwidth     bytes of memory per second, at best
    link          bytes per second that a rank receives from ranks of its machine
    network       bytes per second that a rank receives from other machines
    memory        bytes of the device
    launch        seconds in which the host starts an operation
    latency       seconds of a step of an exchange, which goes around all its ranks
    few_rows      multiplications and additions of matrices with a row for each sampled token; None: bound by ``flops`` and the
                  bytes of the weights
    efficiency    the share of ``flops`` that matrices of a model reach
    reached       the share of ``bandwidth``, ``link`` and ``network`` that is reached
    overlap       whether device, host and links work at the same time
    """

    name: str
    flops: float
    bandwidth: float
    link: float
    network: float
    memory: float
    per_machine: int = 8
    launch: float = 5e-6
    latency: float = 5e-6
    efficiency: float = 0.6
    reached: float = 0.8
    overlap: bool = True
    few_rows: float | None = None
    float32: float | None = None

    def in_float32(self) -> "Machine":
        """The same machine for passes in float32."""
        return self if self.float32 is None else replace(self, flops=self.float32, float32=None)

    def link_of(self, ranks: int) -> float:
        """Bytes per second of an exchange among this many consecutive ranks.

        Of several machines, what goes around in rings enters each machine once, over the networks of all its ranks.
        """
        return self.reached * (self.link if ranks <= self.per_machine else min(self.link, self.per_machine * self.network))

    @property
    def between(self) -> float:
        """Bytes per second of an exchange of one rank of every machine, as between the copies of hybrid sharding."""
        return self.reached * min(self.link, self.network)


GPUS = {
    machine.name: machine
    for machine in (
        Machine("A100", 312e12, 2.0e12, 300e9, 25e9, 80e9, float32=19.5e12),
        Machine("H100", 989e12, 3.35e12, 450e9, 50e9, 80e9, float32=67e12),
        Machine("H200", 989e12, 4.8e12, 450e9, 50e9, 141e9, float32=67e12),
        Machine("B200", 2250e12, 7.7e12, 900e9, 50e9, 180e9, float32=80e12),
        Machine("L40S", 362e12, 0.86e12, 25e9, 12.5e9, 48e9, float32=91.6e12),
    )
}
"""bfloat16 without sparsity, float32 and memory by the makers' data sheets; NVLink in one direction (PCIe 4 for L40S), and per
GPU a network of 200 Gbit/s (A100), 100 Gbit/s (L40S) or 400 Gbit/s"""


def measured_machine(
    width: int,
    feed_forward: int,
    tokens: int,
    rows: int,
    ranks: int = 1,
    clock: Clock = time.perf_counter,
    seconds: float = 0.3,
) -> Machine:
    """This machine's CPU, one thread per rank: matrices of a model's shape, copies in memory, small operations, and exchanges
    of this many ranks with gloo.

    tokens    rows of the matrices in passes
    rows      the same while sampling
    clock     ``time.process_time`` counts only this process's own work, also on a busy machine
    seconds   of each measurement
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = _matrix_rate(width, feed_forward, tokens, clock, seconds)
        few_rows = _matrix_rate(width, feed_forward, rows, clock, seconds)
        bandwidth, launch = _copy_rate(clock, seconds), _launch_time(clock, seconds)
        latency, link = (0.0, bandwidth) if ranks == 1 else _exchange_rates(ranks, clock)
    finally:
        torch.set_num_threads(threads)
    return cpu_machine(ranks, flops=flops, bandwidth=bandwidth, link=link, launch=launch, latency=latency, few_rows=few_rows)


def cpu_machine(
    ranks: int, *, flops: float, bandwidth: float, link: float, launch: float, latency: float, few_rows: float
) -> Machine:
    """A machine whose processes compute and exchange one after the other, at rates that are reached."""
    return Machine(
        name=f"this machine, {ranks} rank{'s' * (ranks > 1)}",
        flops=flops,
        bandwidth=bandwidth,
        link=link,
        network=link,
        memory=float("inf"),
        per_machine=ranks,
        launch=launch,
        latency=latency,
        efficiency=1.0,
        reached=1.0,
        overlap=False,
        few_rows=few_rows,
    )


MATRICES = 8
"""that are multiplied in turn, so that weights come from memory as in a model"""


def _repeated(action: Callable[[], object], clock: Clock, seconds: float) -> float:
    """The median seconds of an action, of several in this time; the first does not count."""
    action()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        started = clock()
        for _ in range(4):
            action()
        times.append((clock() - started) / 4)
    return max(median(times), 1e-9)


def _matrix_rate(width: int, feed_forward: int, tokens: int, clock: Clock, seconds: float) -> float:
    """Multiplications and additions per second."""
    x, weights = torch.randn(tokens, width), [torch.randn(feed_forward, width) for _ in range(MATRICES)]

    def multiply() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return 2 * MATRICES * tokens * width * feed_forward / _repeated(multiply, clock, seconds)


def _copy_rate(clock: Clock, seconds: float) -> float:
    """Bytes read and written per second, in blocks larger than caches."""
    source, target = torch.ones(2**24), torch.empty(2**24)
    return 2 * source.nbytes / _repeated(lambda: torch.add(source, 1.0, out=target), clock, seconds)


def _launch_time(clock: Clock, seconds: float) -> float:
    """Seconds of an operation that computes next to nothing."""
    small = torch.ones(8)
    return _repeated(lambda: small + small, clock, seconds)


def _exchange_rates(ranks: int, clock: Clock) -> tuple[float, float]:
    """Seconds of a step of a small all-reduce, and bytes per second that a rank sends in a large one."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_exchange, (ranks, folder, clock), nprocs=ranks)
        times = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    small, large = (max(column) for column in zip(*times, strict=True))
    return small / (ranks - 1), 2 * LARGE * (ranks - 1) / ranks / max(large - small, 1e-9)


SMALL, LARGE = 1024, 2**26
"""bytes of the exchanges that are measured"""


def _exchange(rank: int, ranks: int, folder: str, clock: Clock) -> None:
    """One rank of ``_exchange_rates``: writes its seconds of a small and of a large exchange."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    times = []
    for size, count in ((SMALL, 50), (LARGE, 3)):
        tensor = torch.ones(size // 4)
        dist.all_reduce(tensor)
        started = clock()
        for _ in range(count):
            dist.all_reduce(tensor)
        times.append((clock() - started) / count)
    (Path(folder) / str(rank)).write_text(json.dumps(times))
    dist.destroy_process_group()


# ---- the time of an iteration -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a rank does in a phase of an iteration.

    flops       operations of matrices
    moved       bytes of memory
    launches    operations that the host starts
    exchanged   bytes that the rank receives or sends
    exchanges   their number
    across      consecutive ranks that take part in them
    between     bytes exchanged with the ranks of other machines that hold a copy
    few         operations of matrices that have a row for each sampled token
    read        bytes of the weights that these read
    """

    flops: float = 0.0
    moved: float = 0.0
    launches: float = 0.0
    exchanged: float = 0.0
    exchanges: float = 0.0
    across: int = 1
    between: float = 0.0
    few: float = 0.0
    read: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        added = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return Work(**{**added, "across": max(self.across, other.across)})

    def __mul__(self, times: float) -> "Work":
        scaled = {each.name: getattr(self, each.name) * times for each in fields(self)}
        return Work(**{**scaled, "across": self.across})

    def device_seconds(self, machine: Machine) -> float:
        """Seconds without exchanges."""
        rate, bandwidth = machine.flops * machine.efficiency, machine.bandwidth * machine.reached
        few = self.few / rate + self.read / bandwidth if machine.few_rows is None else self.few / machine.few_rows
        computing = self.flops / rate + self.moved / bandwidth + few
        return together((computing, self.launches * machine.launch), machine.overlap)

    def exchange_seconds(self, machine: Machine) -> float:
        """Seconds of the exchanges by themselves."""
        latency = machine.latency * (self.across - 1)
        inside = exchange_seconds(self.exchanged, machine.link_of(self.across), self.exchanges, latency)
        return inside + exchange_seconds(self.between, machine.between, 0, 0)

    def seconds(self, machine: Machine, overlap: bool = True) -> float:
        """Seconds of all; ``overlap``: the exchanges can go on during computation, if the machine can do that."""
        return together((self.device_seconds(machine), self.exchange_seconds(machine)), machine.overlap and overlap)


@dataclass(frozen=True)
class IterationTime:
    """Seconds of an iteration of a rank, by phase."""

    layout: Layout
    work: dict[str, Work]
    seconds: dict[str, float]
    exchanges: dict[str, float]
    """of each phase, what its exchanges take by themselves"""
    responses: int
    """of all ranks"""
    tokens: int
    """sampled or read, of all ranks"""
    stays: int
    """bytes that a rank holds throughout"""
    fits: bool
    """whether those, and the whole weights of the policy, are less than the device's memory"""

    @property
    def total(self) -> float:
        """Seconds of the iteration."""
        return sum(self.seconds.values())


def iteration_time(workload: Workload, machine: Machine, epochs: int = 1) -> IterationTime:
    """The time of an iteration; the workload's rows are those of all ranks."""
    one = workload.of_one_rank()
    phases = {"learning": _learning(one, epochs)}
    if workload.kind == "language":
        phases = {"sampling": _sampling(one), "scoring": _scoring(one), **phases}
    # A phase without gradient needs all weights before it starts; only learning overlaps exchanges with computation.
    seconds = {name: work.seconds(machine, overlap=name == "learning") for name, work in phases.items()}
    stays = permanent_bytes(workload)
    gathered = _each(workload) * transformer_of(workload.policy).total if workload.layout.sharded else 0
    return IterationTime(
        layout=workload.layout,
        work=phases,
        seconds=seconds,
        exchanges={name: work.exchange_seconds(machine) for name, work in phases.items()},
        responses=workload.responses,
        tokens=workload.responses * workload.sides * (workload.width if workload.kind != "language" else workload.max_tokens),
        stays=stays,
        fits=stays + gathered <= machine.memory,
    )


def _each(workload: Workload) -> int:
    """Bytes of a number in a pass."""
    return LOW_WEIGHT if workload.bf16 or workload.low_weights else WEIGHT


def _trunks(workload: Workload) -> list[Transformer]:
    """The models that are trained together: the policy, and a critic of its own."""
    models = [transformer_of(workload.policy, head=workload.kind != "reward")]
    if workload.value == "own":
        models.append(transformer_of(workload.critic or workload.policy, head=False))
    return models


def _forward(models: Sequence[Transformer], workload: Workload, rows: float, logits: float) -> Work:
    """A forward pass of every model over whole rows, without gradient."""
    tokens = rows * workload.width * workload.sides
    each, context = _each(workload), workload.width / 2
    return Work(
        sum(forward_flops(model, tokens, rows * logits * workload.sides, context) for model in models),
        sum(moved_bytes(model, tokens, rows * logits * workload.sides, each) for model in models),
        sum(model.layers for model in models) * OPERATIONS,
    )


def _gathering(models: Sequence[Transformer], workload: Workload, each: int) -> Work:
    """What a phase exchanges to hold these models whole; nothing if they are not sharded."""
    shards = workload.layout.shards
    size, layers = sum(model.total for model in models) * each, sum(model.layers + 1 for model in models)
    exchanges = layers if shards > 1 else 0
    return Work(moved=unpacked_bytes(size, shards), exchanged=gather_bytes(size, shards), exchanges=exchanges, across=shards)


def _sampling(workload: Workload) -> Work:
    """Read all prompts, then make one token of every response at a time."""
    (model, *_), rows, each = _trunks(workload), workload.responses, _each(workload)
    prompts, steps = rows / workload.samples, workload.max_tokens
    reading = Work(
        forward_flops(model, prompts * workload.prompt, prompts, workload.prompt / 2),
        moved_bytes(model, prompts * workload.prompt, prompts, each),
        model.layers * OPERATIONS,
    )
    context = workload.prompt + steps / 2
    read = decoding_bytes(model, 0, context, each)
    decoding = Work(
        moved=decoding_bytes(model, rows, context, each) - read + moved_bytes(model, rows, rows, each),
        launches=model.layers * OPERATIONS,
        few=forward_flops(model, rows, rows, context),
        read=read,
    )
    return reading + decoding * steps + _gathering([model], workload, each)


def _scoring(workload: Workload) -> Work:
    """A pass of policy and critic, one of the reference, and one of each reward model."""
    rows, each = workload.responses, _each(workload)
    trained = _trunks(workload)
    work = _forward(trained, workload, rows, workload.response) + _gathering(trained, workload, each)
    reference = [transformer_of(workload.reference)] if workload.reference is not None else []
    for models, logits in (
        (reference, workload.response),
        ([transformer_of(each, head=False) for each in workload.rewards], 0),
    ):
        if models:
            work = work + _forward(models, workload, rows, logits) + _gathering(models, workload, each)
    return work


def _learning(workload: Workload, epochs: int) -> Work:
    """Forward and backward passes of all updates, their exchanges, and the steps of Adam."""
    models, layout, each = _trunks(workload), workload.layout, _each(workload)
    updates = epochs * max(1, round(workload.responses / workload.rows))
    at_once = workload.micro(workload.rows).rows
    passes = -(-workload.rows // max(1, at_once))
    tokens, logits = workload.rows * workload.width * workload.sides, workload.rows * workload.response * workload.sides
    forward = _forward(models, workload, workload.rows, workload.response)
    backward = sum(backward_flops(model, tokens, logits, workload.width / 2, workload.checkpointing) for model in models)
    launches = forward.launches * (4 if workload.checkpointing else 3) * passes
    parameters = sum(model.total for model in models)
    stepping = OPTIMIZER_BYTES * parameters / layout.shards
    one = Work(forward.flops + backward, 3 * forward.moved + stepping, launches)
    return (one + _gradient_exchange(models, layout, each, passes)) * updates


def _gradient_exchange(models: Sequence[Transformer], layout: Layout, each: int, passes: int) -> Work:
    """The exchanges of an update: of whole gradients once, or of weights and parts of gradients in every pass."""
    parameters, layers = sum(model.total for model in models), sum(model.layers + 1 for model in models)
    if not layout.sharded:
        count = 1 if layout.ranks > 1 else 0
        return Work(exchanged=all_reduce_bytes(WEIGHT * parameters, layout.ranks), exchanges=count, across=layout.ranks)
    gathers = parameters + (sum(model.weights for model in models) if layout.reshard else 0)
    machines = max(1, layout.ranks // layout.shards)
    count = layers * (3 if layout.reshard else 2) + (layers if machines > 1 else 0)
    size = each * gathers + WEIGHT * parameters
    one = Work(
        moved=unpacked_bytes(size, layout.shards),
        exchanged=gather_bytes(size, layout.shards),
        exchanges=count,
        across=layout.shards,
        between=all_reduce_bytes(WEIGHT * parameters / layout.shards, machines),
    )
    return one * passes


def plans(workload: Workload, machine: Machine, epochs: int = 1, counts: Sequence[int] = GPU_COUNTS) -> list[IterationTime]:
    """The time of an iteration with other numbers of ranks, each with as many rows as the one rank of the workload."""
    results = []
    for ranks in counts:
        layout = replace(workload.layout, ranks=ranks, per_machine=machine.per_machine)
        rows = {"rows": workload.rows * ranks, "responses": workload.responses * ranks}
        results.append(iteration_time(replace(workload, layout=layout, **rows), machine, epochs))  # type: ignore[arg-type]
    return results


def gpu_table() -> str:
    """PPO with four models of one size on H200, each rank with 64 prompts of 512 tokens and answers of 64."""
    rows = []
    for name, sharding, micro in (("7B", "full", 4), ("7B", "hybrid", 4), ("70B", "full", 16)):
        config, _ = model_config(name)
        workload = Workload("language", config, PPO_CLIP, "own", reference=config, rewards=(config,), bf16=True)
        workload = replace(workload, prompt=512, response=64, max_tokens=64, rows=16, responses=64, micro_batch=micro)
        workload = replace(workload, checkpointing=True, layout=Layout(1, sharding, per_machine=1))
        times = plans(workload, GPUS["H200"], epochs=4)
        for each in times:
            gpus, scaling = each.layout.ranks, times[0].total / each.total
            stays = readable(each.stays) + ("" if each.fits else r"\*")
            seconds = [f"{x:.3g}" for x in (*each.seconds.values(), each.total)]
            rows.append([f"{name}, {sharding}", str(gpus), *seconds, f"{scaling:.0%}", stays])
    header = ["model, sharding", "GPUs", "sampling", "scoring", "learning", "all", "scaling", "stays on a rank"]
    return markdown_table(header, rows)


# ---- measurement --------------------------------------------------------------------------------------------------------


def table_of(folder: Path, kind: str, ranks: int, sharding: str) -> dict[str, Any]:
    """The recipe table: a Llama of width 512 and 6 layers (27.7 M parameters with 8,192 tokens)."""
    files = rows_in(folder, prompt=PROMPT, answer=ANSWER, count=256)
    model = folder / "model"
    if not model.exists():
        built(model, "llama", width=WIDTH, layers=6, vocabulary=8192)
    if kind == "ppo":
        sampling = {"prompts": ROWS * ranks, "max_tokens": ANSWER}
        table = online(model, files, critic={"own_model": True}, sampling=sampling, steps=1024)
    else:
        data = {"train": files["demonstrations"], "max_length": 128, "batch": ROWS * ranks}
        table = {
            "kind": "sft",
            "model": str(model),
            "steps": 1024,
            "threads": 1,
            "data": data,
            "optimizer": {"learning_rate": 1e-5},
        }
    return {**table, "sharding": sharding, "check_memory": False}


def on_rank(folder: Path, kind: str, ranks: int, sharding: str, clock_name: str) -> None:
    """Run iterations on this rank, and write the mean seconds of each phase over all ranks."""
    torch.set_num_threads(1)
    join_ranks()
    clock = CLOCKS[clock_name]
    recipe = make_recipe(table_of(folder, kind, ranks, sharding))
    world = make_world(recipe)
    learner = make_learner(recipe, world.policy)
    learner.auxiliary_loss = world.auxiliary_loss
    state = LearnerState.seeded(recipe.seed, recipe.steps)
    seconds: dict[str, list[float]] = {}
    collector: Any = world.collector
    sampled = [0.0]
    if hasattr(collector, "respond"):
        respond = collector.respond

        def timed(*args: Any) -> Any:
            started = clock()
            output = respond(*args)
            sampled[0] = clock() - started
            return output

        collector.respond = timed
    for _ in range(1 + ITERATIONS):
        started = clock()
        rollout = collector.collect(state)
        collected = clock()
        learner.update(rollout, assign_credit(rollout, learner.objective), state)
        state.steps += rollout.steps
        times = {"learning": clock() - collected}
        if kind == "ppo":
            times |= {"sampling": sampled[0], "scoring": collected - started - sampled[0]}
        for name, value in times.items():
            seconds.setdefault(name, []).append(value)
    everyone = exchange({name: min(values[1:]) for name, values in seconds.items()})
    if rank() == 0:
        means = {name: sum(one[name] for one in everyone) / len(everyone) for name in everyone[0]}
        (folder / "measured.json").write_text(json.dumps(means))
    leave_ranks()


def measured(kind: str, ranks: int, sharding: str, clock: str) -> dict[str, Any]:
    """Measure the machine and a run in new processes, and calculate the same."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        table_of(folder, kind, ranks, sharding)  # makes the files before the ranks read them
        machine = measured_machine(WIDTH, WIDTH * 11 // 4, ROWS * (PROMPT + ANSWER), ROWS, ranks, CLOCKS[clock], seconds=2.0)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [__file__, "--rank-of", str(folder), kind, str(ranks), sharding, clock]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seconds = json.loads((folder / "measured.json").read_text())
    about = {"kind": kind, "ranks": ranks, "sharding": sharding, "clock": clock}
    return {**about, "machine": {name: getattr(machine, name) for name in RATES}, "measured": seconds}


def calculated(cell: dict[str, Any]) -> dict[str, float]:
    """The seconds of each phase by the present formulas, from the rates that were measured with the run."""
    ranks = cell["ranks"]
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(table_of(Path(folder), cell["kind"], ranks, cell["sharding"]))
        workload = workload_of(recipe, prompt=PROMPT, response=ANSWER)
    rates = cell["machine"]
    machine = cpu_machine(ranks, **{name: rates[name] for name in RATES})
    layout = Layout(ranks, recipe.sharding, ranks, gpu=False)
    return iteration_time(replace(workload, layout=layout), machine).seconds


COLUMNS = ("sampling", "scoring", "learning", "all")


def line(cell: dict[str, Any]) -> list[str]:
    """A row of the table: measured seconds of each phase and of all, with the error of the calculation."""
    both = {name: (seconds, cell["measured"][name]) for name, seconds in calculated(cell).items()}
    both["all"] = (sum(c for c, _ in both.values()), sum(m for _, m in both.values()))
    shown = {name: f"{m:.2f} ({c / m - 1:+.0%})" for name, (c, m) in both.items()}
    return [f"{cell['kind']}, {cell['ranks']} x {cell['sharding']}", *(shown.get(name, "") for name in COLUMNS)]


def main() -> None:
    """Measure missing configurations, and write the page from all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["-".join(map(str, cell)) for cell in CELLS]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gpus:
        print(gpu_table())
        return
    if options.rank_of is not None:
        folder, kind, ranks, sharding, clock = options.rank_of
        on_rank(Path(folder), kind, int(ranks), sharding, clock)
        return
    files = {name: RESULTS / f"{name}{'-wall' * (options.clock == 'wall')}" for name in names}
    for name, cell in zip(names, CELLS, strict=True):
        if name in options.only and not finished(files[name]):
            write(files[name], measured(*cell, options.clock))
            print(finished(files[name]), flush=True)
    cells = [cell for path in files.values() if (cell := finished(path))]
    table = markdown_table(["run", *COLUMNS], [line(cell) for cell in cells])
    print(table)
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    begin, end = f"<!-- begin: benchmarks/plan.py {options.clock} -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    if found:
        PAGE.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}", "utf-8")


if __name__ == "__main__":
    main()
