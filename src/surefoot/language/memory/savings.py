"""Workloads that need less memory, with the settings that make them."""

import json
from collections.abc import Iterator
from dataclasses import replace

from surefoot.language.memory.roles import can_leave, frozen_roles, permanent_bytes
from surefoot.language.memory.workload import Workload, can_quantise


def alternatives(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Other settings for the same run, the ones that cost only time first."""
    layout = workload.layout
    if layout.ranks > 1 and not layout.sharded and not is_whole(workload):
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
        yield 'adapter.quantize = "nf4"', replace(workload, quantize="nf4")
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


def is_whole(workload: Workload) -> bool:
    """Whether the workload has something that can't be sharded: a base in 4 or 8 bits, or moments in 8 bits."""
    return workload.quantize is not None or workload.low_moments
