"""``surefoot memory``: plan the memory of a run, what other settings would save, and which GPUs it fits."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from surefoot.errors import SurefootError, cause_of
from surefoot.language import quiet_transformers, require_transformers
from surefoot.language.memory import Estimate, Value, Workload, estimate, with_adapters
from surefoot.language.memory.check import readable, running_peak
from surefoot.language.memory.passes import ParameterCounts, count_parameters, layer_count
from surefoot.language.models.language_model import model_folder
from surefoot.language.models.loading import check_causal, load_config, read_only_config
from surefoot.recipes.language import AdapterSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CARDS = (24, 48, 80, 141)
"""GB, 10⁹ bytes, of common GPUs. Most have 2³⁰ to the GB; the difference is for their context and the allocator's leftovers"""
PARTS = ("weights", "gradients", "optimizer")
TEXTBOOK = {"policy": 4, "value": 4, "reference": 2, "reward": 2}
MIXED = {"policy": 16, "value": 16, "reference": 2, "reward": 2}
OURS = {"policy": 16, "value": 16, "reference": 4, "reward": 4}
"""bytes per parameter: 2 for a weight and 2 for its gradient; AdamW in mixed precision; this library"""


@dataclass(frozen=True)
class MemoryPlan:
    """A workload with its estimate, and variants for comparison."""

    model: str
    nominal: int
    """parameters for the textbook's count: the size in the model's name, else the exact number"""
    counts: ParameterCounts
    layers: int
    workload: Workload
    estimate: Estimate
    others: dict[str, Estimate]


def plan_memory(model: str, workload: Workload, nominal: int | None = None) -> MemoryPlan:
    """Everything that ``surefoot memory`` prints. Takes some seconds for large models."""
    counts = count_parameters(workload.policy)
    others = {name: estimate(other) for name, other in variants(workload)}
    return MemoryPlan(
        model, nominal or counts.total, counts, layer_count(workload.policy), workload, estimate(workload), others
    )


def variants(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Other settings, one at a time, then those that save the most together."""
    smallest = workload
    if workload.kind == "language":
        if workload.value != "own":
            yield "a value model of its own", with_value(workload, "own")
        if workload.value != "head":
            yield "value head on a shared trunk", with_value(workload, "head")
        if workload.value != "none":
            yield "no critic (GRPO, REINFORCE)", with_value(workload, "none")
        if workload.value == "own":
            smallest = with_value(smallest, "head")
    if workload.adapter is None:
        yield "adapters of one base, rank 16", with_adapters(workload, AdapterSettings())
    if not workload.bf16:
        yield "bfloat16 passes", replace(workload, bf16=True)
    if not workload.checkpointing:
        yield "gradient checkpointing", replace(workload, checkpointing=True)
    tokens = workload.width * workload.sides
    if workload.micro(workload.rows).rows > (2 if workload.kind == "dpo" else 1):
        yield f"micro-batches of one row ({tokens} tokens)", replace(workload, micro_batch_tokens=tokens)
    if workload.kind != "reward":
        yield "logits not in chunks", replace(workload, chunked=False)
    prompts = workload.responses // workload.samples
    smallest = replace(smallest, checkpointing=True, micro_batch_tokens=tokens)
    yield "checkpointing, one row" + (", shared trunk" if workload.value == "own" else ""), smallest
    if workload.kind == "language" and prompts > 4:
        few = replace(smallest, responses=4 * workload.samples, rows=max(1, workload.rows * 4 // prompts))
        yield "the same with 4 prompts an iteration", few


def with_value(workload: Workload, value: Value) -> Workload:
    """The same workload with another critic or none, and a matching objective."""
    if value == "none":
        objective = replace(workload.objective, baseline="mean", gae_lambda=1.0, value_lambda=None, value_clip=None)
    else:
        objective = replace(workload.objective, baseline="critic")
    return replace(workload, value=value, objective=objective)


def model_config(name: str) -> "tuple[PreTrainedConfig, int | None]":
    """The configuration of a model's name, and its number of parameters if the name is a size.

    name  ``pocket``, a size such as ``7B`` or ``350M``, a config.json, a folder that holds one, a run, or a hub id

    Raises SurefootError for any other name.
    """
    require_transformers(f"model={name!r}")
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([bm])", name.lower()):
        parameters = int(float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]])
        return llama_of(parameters), parameters
    path = Path(name).expanduser()
    if path.name.endswith(".json") and path.is_file():
        path = path.parent if path.name == "config.json" else path
    if (path / "config.json").is_file() or path.is_file():
        try:
            with quiet_transformers():
                config = read_only_config(path)
        except Exception as error:
            raise SurefootError(f"model={name!r}: can't be read ({cause_of(error)})") from None
        check_causal(str(path), config)
        return config, None
    return load_config(model_folder(name)), None


def llama_of(parameters: int) -> "PreTrainedConfig":
    """A Llama of about this many parameters, in the proportions of the first ones: width 128 per layer, heads of 128,
    feed-forward 8/3 of the width, 32,000 tokens. 7B and 13B give those models.
    """
    from transformers import LlamaConfig

    def total(layers: int) -> float:
        width = 128 * layers
        return layers * (4 * width**2 + 3 * width * _feed_forward(width)) + 2 * 32_000 * width

    if not 1e7 <= parameters <= 1e13:
        raise SurefootError(f"model: a size of {parameters:,} parameters; name one from 10M to 10000B, or a config.json")
    first = max(1, int((parameters / 200_000) ** (1 / 3)) - 8)
    layers = min(range(first, first + 20), key=lambda layers: abs(math.log(total(layers) / parameters)))
    width = 128 * layers
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=_feed_forward(width),
        num_hidden_layers=layers,
        num_attention_heads=layers,
        num_key_value_heads=layers,
        max_position_embeddings=4096,
    )


def _feed_forward(width: int) -> int:
    return -(-8 * width // 3 // 256) * 256


def textbook(parameters: int) -> dict[str, dict[str, float]]:
    """Three ways to count four roles of one size, in bytes."""
    ways = {"textbook": TEXTBOOK, "with AdamW, mixed precision": MIXED, "here: float32 weights": OURS}
    return {way: {role: each * parameters for role, each in bytes_of.items()} for way, bytes_of in ways.items()}


def fits(needed: Estimate) -> list[int]:
    """The GPUs that a run fits; checkpoints are copied to the host."""
    return [card for card in CARDS if running_peak(needed) <= card * 1e9]


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """All of a plan, in bytes."""
    s, needed = plan.workload, plan.estimate
    return {
        "model": plan.model,
        "parameters": plan.counts.total,
        "layers": plan.layers,
        "setup": {
            "kind": s.kind,
            "critic": s.value,
            "precision": "bfloat16" if s.bf16 else "float32",
            "gradient_checkpointing": s.checkpointing,
            "adapter_rank": None if s.adapter is None else s.adapter.rank,
            "responses": s.responses,
            "minibatch_rows": s.rows,
            "micro_batch_rows": s.micro(s.rows).rows,
            "prompt_tokens": s.prompt,
            "response_tokens": s.response,
        },
        "always": needed.always,
        "phases": {name: phase.parts for name, phase in needed.phases.items()},
        "peak": running_peak(needed),
        "peak_with_saving": needed.peak,
        "fits": fits(needed),
        "uncounted": list(needed.uncounted),
        "alternatives": {name: {"peak": running_peak(other), "fits": fits(other)} for name, other in plan.others.items()},
        "textbook": {way: {**roles, "total": sum(roles.values())} for way, roles in textbook(plan.nominal).items()},
    }


# ---- for people ---------------------------------------------------------------------------------------------------------


def tables(plan: MemoryPlan) -> Group:
    """The plan as tables."""
    s, needed = plan.workload, plan.estimate
    micro = s.micro(s.rows)
    rows = f"{s.responses} rows of {s.prompt} + {s.response} tokens, {micro.rows} at once in learning"
    lines: list[Text | Table] = [
        Text(f"{plan.model}: {plan.counts.total:,} parameters in {plan.layers} layers; kind = {s.kind}; {rows}", style="bold"),
        Text(),
        _role_table(needed),
        Text(),
        _phase_table(needed),
        Text(),
        _variant_table(plan),
    ]
    if needed.uncounted:
        lines.insert(2, Text(f"not counted for this family: {', '.join(needed.uncounted)} (shown as 0)", style="yellow"))
    if s.kind == "language":
        lines += [Text(), _textbook_table(plan), Text(_textbook_note(plan))]
    return Group(*lines)


def _role_table(needed: Estimate) -> Table:
    table = Table(title="what always stays", title_justify="left", box=None)
    for name in ("role", *PARTS, "together"):
        table.add_column(name, justify="left" if name == "role" else "right")
    for role, parts in needed.always.items():
        if role != "data":
            cells = [readable(parts[part]) if part in parts else "–" for part in PARTS]
            table.add_row(role, *cells, readable(sum(parts.values())))
    table.add_row("rollout", "", "", "", readable(needed.always["data"]["rollout"]))
    table.add_row("all", "", "", "", readable(needed.permanent), style="bold")
    return table


def _phase_table(needed: Estimate) -> Table:
    table = Table(title="what comes on top, one phase after another", title_justify="left", box=None)
    table.add_column("phase")
    table.add_column("more", justify="right")
    table.add_column("peak", justify="right")
    table.add_column("of what", overflow="fold")
    for name, phase in sorted(needed.phases.items(), key=lambda pair: -pair[1].total):
        parts = ", ".join(f"{part} {readable(count)}" for part, count in phase.parts.items() if count)
        table.add_row(
            name, readable(phase.total), readable(needed.at(name)), parts, style="bold" if name == needed.worst else ""
        )
    return table


def _variant_table(plan: MemoryPlan) -> Table:
    title = "peak, and which GPUs (GB) hold it; a checkpoint is copied to the host"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("setup")
    table.add_column("peak", justify="right")
    for card in CARDS:
        table.add_column(str(card), justify="right")
    for name, needed in {"this recipe": plan.estimate, **plan.others}.items():
        held = fits(needed)
        cells = ["yes" if card in held else "no" for card in CARDS]
        table.add_row(name, readable(running_peak(needed)), *cells, style="bold" if name == "this recipe" else "")
    return table


def _textbook_table(plan: MemoryPlan) -> Table:
    title = f"four roles of {plan.nominal / 1e9:,.3g} B parameters each, counted three ways"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("", *TEXTBOOK, "together"):
        table.add_column(name, justify="right" if name else "left")
    for way, roles in textbook(plan.nominal).items():
        table.add_row(way, *(readable(count) for count in roles.values()), readable(sum(roles.values())))
    return table


def _textbook_note(plan: MemoryPlan) -> str:
    needed = plan.estimate
    passing = {name: needed.phases[name].total for name in ("learning", "sampling", "scoring")}
    most = ", ".join(f"{name} {readable(count)}" for name, count in passing.items())
    return (
        "The textbook's sum is 2 bytes for a weight and 2 for its gradient. It leaves out the optimizer (AdamW in mixed "
        "precision: 12 bytes more per trained parameter) and all that passes through, activations, logits and the cache: "
        f"here {most}."
    )
