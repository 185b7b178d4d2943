"""A run with other settings, by the words of a recipe."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from surefoot.language.memory.roles import can_leave, frozen_roles, permanent_bytes
from surefoot.language.memory.workload import Value, Workload, can_quantise, with_adapters, with_prompts, with_quantised_base
from surefoot.recipes.models import AdapterSettings

CRITICS: dict[Value, str] = {
    "own": "a value model of its own",
    "head": "value head on a shared trunk",
    "none": "no critic (GRPO, REINFORCE)",
}
QUANTISED: tuple[Literal["int8", "nf4"], ...] = ("int8", "nf4")
Setting = tuple[tuple[str, ...], Workload]
"""settings of a recipe, and the workload with them"""


def alternatives(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Other settings for the same run, the ones that cost only time first."""
    layout = workload.layout
    if layout.ranks > 1 and not layout.sharded and not workload.is_whole:
        yield 'sharding = "full"', replace(workload, layout=replace(layout, sharding="full"))
    if not workload.checkpointing:
        yield "gradient_checkpointing = true", replace(workload, checkpointing=True)
    learned = workload.micro(workload.rows)
    if learned.rows > 1:
        tokens = workload.width * workload.sides
        yield f"optimizer.micro_batch_tokens = {tokens}", replace(workload, micro_batch_tokens=tokens)
    lower = replace(workload, bf16=False, low_weights=True)
    if not workload.low_weights and permanent_bytes(lower) < permanent_bytes(workload):
        yield 'precision = "bfloat16-weights"', lower
    elif not workload.low_weights and not workload.bf16:
        yield 'precision = "bfloat16"', replace(workload, bf16=True)
    if can_quantise(workload) and workload.quantize is None:
        yield 'adapter.quantize = "nf4"', with_quantised_base(workload, "nf4")
    if not workload.low_moments and not layout.sharded:
        yield 'optimizer.kind = "adam-8bit"', replace(workload, low_moments=True)
    resting = (
        *(role for role in ("reference", "reward") if role in frozen_roles(workload)),
        *(["critic"] * can_leave(workload)),
    )
    if resting and not workload.idle and layout.gpu and not layout.sharded:
        yield f"offload = {json.dumps(resting)}", replace(workload, idle=resting)
    if workload.value == "own":
        started = "" if workload.critic is None else ' and critic.start = "none"'
        yield f"critic.own_model = false{started}", replace(workload, value="head", critic=None)
    if layout.sharded and not layout.reshard:
        yield "reshard_after_forward = true", replace(workload, layout=replace(layout, reshard=True))
    if layout.sharded and layout.gpu and not layout.offload:
        yield "offload = true", replace(workload, layout=replace(layout, offload=True))
    if layout.sharded and layout.shards < layout.ranks:
        yield 'sharding = "full"', replace(workload, layout=replace(layout, sharding="full"))


def settings(workload: Workload) -> Iterator[Setting]:
    """Settings that need less and less memory: first those that cost only time, then adapters, then fewer prompts."""
    branches: list[Setting] = [((), workload)]
    if workload.adapter is None:
        branches.append(((f"adapter.rank = {AdapterSettings().rank}",), with_adapters(workload, AdapterSettings())))
    for branch in branches:
        reduced = [branch, *_reductions(*branch)]
        yield from reduced
    names, smallest = reduced[-1]
    prompts = workload.responses // workload.samples
    while workload.kind == "language" and (prompts := prompts // 4) >= workload.layout.ranks:
        yield (*names, f"sampling.prompts = {prompts}"), with_prompts(smallest, prompts)


def _reductions(names: tuple[str, ...], workload: Workload) -> Iterator[Setting]:
    """The alternatives to a workload one after another, each together with those before it."""
    while step := next(alternatives(workload), None):
        name, workload = step
        names = (*names, name)
        yield names, workload


def variants(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Other settings, one at a time."""
    layout = workload.layout
    if layout.ranks > 1:
        yield "whole models on every rank", replace(workload, layout=replace(layout, sharding=None))
        if not workload.is_whole:
            yield 'sharding = "full"', replace(workload, layout=replace(layout, sharding="full"))
    if layout.sharded:
        yield "reshard_after_forward = false", replace(workload, layout=replace(layout, reshard=False))
        yield "offload = true", replace(workload, layout=replace(layout, offload=True))
    if workload.kind == "language":
        for value, name in CRITICS.items():
            if workload.value != value:
                yield name, replace(workload, value=value)
    if workload.adapter is None:
        yield "adapters of one base, rank 16", with_adapters(workload, AdapterSettings())
    elif can_quantise(workload):
        for kind in QUANTISED:
            if workload.quantize != kind:
                yield f"a base in {kind}", with_quantised_base(workload, kind)
    if not workload.bf16:
        yield "bfloat16 passes", replace(workload, bf16=True, low_weights=False)
    if not workload.low_weights:
        yield "bfloat16 weights", replace(workload, bf16=False, low_weights=True)
    if not workload.low_moments and not layout.sharded:
        yield "Adam's moments in 8 bits", replace(workload, low_moments=True)
    if not workload.checkpointing:
        yield "gradient checkpointing", replace(workload, checkpointing=True)
    tokens = workload.width * workload.sides
    if workload.micro(workload.rows).rows > 1:
        yield f"micro-batches of one row ({tokens} tokens)", replace(workload, micro_batch_tokens=tokens)
