"""``surefoot plan``: the time of an iteration on 1 to 512 GPUs, phase by phase."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from surefoot.language.memory.check import readable
from surefoot.language.memory.layout import LOW_WEIGHT, WEIGHT, Layout
from surefoot.language.memory.roles import permanent_bytes
from surefoot.language.memory.workload import Workload
from surefoot.language.speed import (
    OPERATIONS,
    OPTIMIZER_BYTES,
    Transformer,
    all_reduce_bytes,
    backward_flops,
    decoding_bytes,
    exchange_seconds,
    forward_flops,
    gather_bytes,
    moved_bytes,
    together,
    transformer_of,
    unpacked_bytes,
)
from surefoot.language.speed.machines import Machine

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""numbers of GPUs in a plan"""


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
    at_once = workload.micro(workload.rows).rows / workload.least_rows
    passes = -(-workload.rows // max(1, int(at_once)))
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


def plans(workload: Workload, machine: Machine, epochs: int = 1, counts: Sequence[int] = COUNTS) -> list[IterationTime]:
    """The time of an iteration with other numbers of ranks, each with as many rows as the one rank of the workload."""
    results = []
    for ranks in counts:
        layout = replace(workload.layout, ranks=ranks, per_machine=machine.per_machine)
        rows = {"rows": workload.rows * ranks, "responses": workload.responses * ranks}
        results.append(iteration_time(replace(workload, layout=layout, **rows), machine, epochs))  # type: ignore[arg-type]
    return results


def to_json(model: str, machine: Machine, results: Sequence[IterationTime]) -> dict[str, Any]:
    """All of a plan, in seconds and bytes."""
    return {
        "model": model,
        "machine": vars(machine) | ({"memory": None} if machine.memory == float("inf") else {}),
        "calculated": True,
        "ranks": {
            str(result.layout.ranks): {
                "seconds": {**result.seconds, "total": result.total},
                "exchanges": result.exchanges,
                "work": {name: vars(work) for name, work in result.work.items()},
                "responses": result.responses,
                "tokens_per_second": result.tokens / result.total,
                "stays": result.stays,
                "fits": result.fits,
            }
            for result in results
        },
    }


def tables(model: str, workload: Workload, machine: Machine, results: Sequence[IterationTime]) -> Iterator[Text | Table]:
    """The plan as lines and a table."""
    rows = f"{workload.responses} rows of {workload.prompt} + {workload.response} tokens on each rank"
    shared = "whole models" if workload.layout.sharding is None else f'sharding = "{workload.layout.sharding}"'
    yield Text(f"{model} on {machine.name}: kind = {workload.kind}; {rows}; {shared}", style="bold")
    table = Table(title="seconds of an iteration, calculated", title_justify="left", box=None)
    phases = list(results[0].seconds)
    for name in ("ranks", *phases, "all", "of which exchanges", "tokens/s", "scaling", "stays on a rank"):
        table.add_column(name, justify="right")
    first = results[0].tokens / results[0].total / results[0].layout.ranks
    for result in results:
        rate = result.tokens / result.total
        exchanged = sum(
            seconds - min(seconds, result.work[name].device_seconds(machine)) for name, seconds in result.seconds.items()
        )
        table.add_row(
            str(result.layout.ranks),
            *(number(result.seconds[name]) for name in phases),
            number(result.total),
            number(exchanged),
            f"{rate:,.0f}",
            f"{rate / result.layout.ranks / first:.0%}",
            readable(result.stays) + ("" if result.fits else " (too much)"),
        )
    yield table
    yield Text(
        "Calculated, not measured: a model of operations, bytes and links (docs/scale.md). surefoot memory plans the memory."
    )


def number(seconds: float) -> str:
    """Seconds in three digits."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
