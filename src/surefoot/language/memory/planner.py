"""``surefoot memory``: plan the memory of a run, what other settings would save, and which GPUs it fits."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from surefoot.errors import SurefootError, cause_of
from surefoot.language import quiet_transformers, require_package
from surefoot.language.language_model import model_folder
from surefoot.language.memory import Estimate, estimate
from surefoot.language.memory.check import peak_text, readable, running_peak
from surefoot.language.memory.parameters import count_parameters, layer_count
from surefoot.language.memory.roles import host_bytes, permanent_bytes
from surefoot.language.memory.savings import alternatives, is_whole
from surefoot.language.memory.workload import (
    Value,
    Workload,
    can_quantise,
    family_note,
    unknown_families,
    with_adapters,
    with_prompts,
    with_ranks,
)
from surefoot.language.models.loading import check_causal, load_config, read_only_config
from surefoot.recipes.models import AdapterSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CARDS = (24, 48, 80, 141)
"""GB, 10⁹ bytes, of common GPUs. Most have 2³⁰ to the GB; the difference is for their context and the allocator's leftovers"""
GPUS = (2, 4, 8)
"""numbers of GPUs that are tried besides the planned one"""
PARTS = ("weights", "gradients", "optimizer")
TEXTBOOK = {"policy": 4, "value": 4, "reference": 2, "reward": 2}
MIXED = {"policy": 16, "value": 16, "reference": 2, "reward": 2}
OURS = {"policy": 16, "value": 16, "reference": 4, "reward": 4}
"""bytes per parameter: 2 for a weight and 2 for its gradient; AdamW in mixed precision; this library"""


Fit = tuple[tuple[str, ...], Estimate]
"""settings of a recipe, and the estimate with them"""
Setting = tuple[tuple[str, ...], Workload]
"""settings of a recipe, and the workload with them"""


class MemoryPlan:
    """A workload with its estimate, the cheapest settings for each GPU, and variants for comparison.

    Each is estimated when it is first read: all of them take some seconds for large models.

    model     the name to show
    nominal   parameters for the textbook's count: the size in the model's name, else the exact number
    """

    def __init__(self, model: str, workload: Workload, nominal: int | None = None) -> None:
        self.model, self.workload = model, workload
        self.counts = count_parameters(workload.policy)
        self.layers = layer_count(workload.policy)
        self.nominal = nominal or self.counts.total

    @cached_property
    def cheapest(self) -> dict[int, Fit | None]:
        """For each GPU the cheapest settings with the ranks as they are."""
        return cheapest(self.workload)

    @cached_property
    def several(self) -> dict[int, dict[int, Fit | None]]:
        """The same for several GPUs that share the models, by their number; empty if the plan has several ranks."""
        ranks = () if self.workload.layout.ranks > 1 or is_whole(self.workload) else GPUS
        return {count: cheapest(with_ranks(self.workload, count)) for count in ranks}

    @cached_property
    def estimate(self) -> Estimate:
        """The memory with the settings as they are."""
        return estimate(self.workload)

    @cached_property
    def others(self) -> dict[str, Estimate]:
        """The memory with other settings."""
        return {name: estimate(other) for name, other in variants(self.workload)}


def cheapest(workload: Workload) -> dict[int, Fit | None]:
    """For each GPU the first of ``settings`` that fits it; None if all of them need more."""
    fits_by_card: dict[int, Fit | None] = dict.fromkeys(CARDS)
    for names, other in settings(workload):
        largest = max((card * 1e9 for card, fit in fits_by_card.items() if fit is None), default=0)
        if not largest:
            break
        if permanent_bytes(other) <= largest:
            needed = estimate(other)
            fits_by_card |= {card: (names, needed) for card in fits(needed) if fits_by_card[card] is None}
    return fits_by_card


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
        if not is_whole(workload):
            yield 'sharding = "full"', replace(workload, layout=replace(layout, sharding="full"))
    if layout.sharded:
        yield "reshard_after_forward = false", replace(workload, layout=replace(layout, reshard=False))
        yield "offload = true", replace(workload, layout=replace(layout, offload=True))
    if workload.kind == "language":
        if workload.value != "own":
            yield "a value model of its own", with_value(workload, "own")
        if workload.value != "head":
            yield "value head on a shared trunk", with_value(workload, "head")
        if workload.value != "none":
            yield "no critic (GRPO, REINFORCE)", with_value(workload, "none")
    if workload.adapter is None:
        yield "adapters of one base, rank 16", with_adapters(workload, AdapterSettings())
    elif can_quantise(workload):
        for kind in ("int8", "nf4"):
            if workload.quantize != kind:
                quantised: Any = {"quantize": kind}
                yield f"a base in {kind}", replace(workload, **quantised)
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
    require_package("transformers", f"model={name!r}")
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
    if re.fullmatch(r"\d[^/]*", name) and not path.exists():
        raise SurefootError(f"model={name!r}: no such size or folder; a size is a number with B or M, such as 7B or 350M")
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
            "precision": "bfloat16-weights" if s.low_weights else "bfloat16" if s.bf16 else "float32",
            "gradient_checkpointing": s.checkpointing,
            "adapter_rank": None if s.adapter is None else s.adapter.rank,
            "quantize": s.quantize,
            "optimizer": "adam-8bit" if s.low_moments else "adam",
            "responses": s.responses,
            "minibatch_rows": s.rows,
            "micro_batch_rows": s.micro(s.rows).rows,
            "prompt_tokens": s.prompt,
            "response_tokens": s.response,
            "ranks": s.layout.ranks,
            "sharding": s.layout.sharding,
            "offload": s.layout.offload or list(s.idle),
            "reshard_after_forward": s.layout.reshard,
        },
        "always": needed.always,
        "offloaded": needed.host,
        "phases": {name: phase.parts for name, phase in needed.phases.items()},
        "peak": running_peak(needed),
        "peak_with_saving": needed.peak,
        "fits": fits(needed),
        "read_as_llama": unknown_families(s),
        "cheapest": {
            str(card): None if fit is None else {"settings": list(fit[0]), "peak": running_peak(fit[1])}
            for card, fit in plan.cheapest.items()
        },
        "alternatives": {name: {"peak": running_peak(other), "fits": fits(other)} for name, other in plan.others.items()},
        "textbook": {way: {**roles, "total": sum(roles.values())} for way, roles in textbook(plan.nominal).items()},
    }


# ---- for people ---------------------------------------------------------------------------------------------------------


def tables(plan: MemoryPlan) -> Iterator[Text | Table]:
    """The plan as lines and tables, each as soon as it is estimated."""
    s = plan.workload
    learned = s.of_one_rank()
    rows = f"{s.responses} rows of {s.prompt} + {s.response} tokens, {learned.micro(learned.rows).rows} at once in learning"
    yield Text(f"{plan.model}: {plan.counts.total:,} parameters in {plan.layers} layers; kind = {s.kind}; {rows}", style="bold")
    if s.layout.ranks > 1:
        yield Text(_rank_line(plan))
    yield _card_table(plan)
    yield _role_table(plan.estimate)
    yield _phase_table(plan.estimate)
    if note := family_note(s):
        yield Text(note, style="yellow")
    yield _variant_table(plan)
    if s.kind == "language":
        yield _textbook_table(plan)
        yield Text(_textbook_note(plan))
    if plan.several:
        yield _several_table(plan)


def _rank_line(plan: MemoryPlan) -> str:
    """What each of several ranks needs, and which GPUs hold it."""
    layout, needed = plan.workload.layout, plan.estimate
    models = "whole models" if not layout.sharded else f'sharding = "{layout.sharding}"'
    held = fits(needed)
    verdict = f"fits {layout.ranks} GPUs of {', '.join(map(str, held))} GB" if held else "fits none of these GPUs"
    host = f"; {readable(host_bytes(needed.host))} a rank in the memory of the CPU" if needed.host else ""
    return f"{layout.ranks} ranks, {models}: {verdict}, {readable(running_peak(needed))} a rank ({peak_text(needed)}){host}"


def _table(title: str, columns: Sequence[str], text: Sequence[str] = ()) -> Table:
    """A table whose columns are numbers, aligned right, except those in ``text``."""
    table = Table(title=title, title_justify="left", box=None)
    for name in columns:
        table.add_column(name, justify="left" if name in text else "right", overflow="fold" if name in text else "ellipsis")
    return table


def _card_table(plan: MemoryPlan) -> Table:
    ranks = plan.workload.layout.ranks
    title = f"the cheapest settings that fit on {'one GPU' if ranks == 1 else f'{ranks} GPUs'}"
    table = _table(title, ("GPU", "peak", "settings"), ("settings",))
    for card, fit in plan.cheapest.items():
        table.add_row(*_fit_row(card, ranks, fit))
    return table


def _several_table(plan: MemoryPlan) -> Table:
    title = 'the cheapest settings that fit on several GPUs, with --ranks N and sharding = "full"'
    table = _table(title, ("GPUs", "peak of each", "settings"), ("settings",))
    for count, fits_by_card in plan.several.items():
        for card, fit in fits_by_card.items():
            table.add_row(*_fit_row(card, count, fit))
    return table


def _fit_row(card: int, ranks: int, fit: Fit | None) -> tuple[str, str, str]:
    name = f"{card} GB" if ranks == 1 else f"{ranks} x {card} GB"
    if fit is None:
        return name, "–", "none of these settings fits"
    return name, readable(running_peak(fit[1])), ", ".join(fit[0]) or "as planned"


def _role_table(needed: Estimate) -> Table:
    resting = ", ".join(needed.host)
    title = "what always stays" + (f" ({resting}: in the memory of the CPU)" if resting else "")
    table = _table(title, ("role", *PARTS, "together"), ("role",))
    for role, parts in {**needed.host, **needed.always}.items():
        if role != "data":
            cells = [readable(parts[part]) if part in parts else "–" for part in PARTS]
            table.add_row(role, *cells, readable(sum(parts.values())))
    table.add_row("rollout", "", "", "", readable(needed.always["data"]["rollout"]))
    table.add_row("all", "", "", "", readable(needed.permanent), style="bold")
    return table


def _phase_table(needed: Estimate) -> Table:
    columns = ("phase", "more", "peak", "of what")
    table = _table("what comes on top, one phase after another", columns, ("phase", "of what"))
    for name, phase in sorted(needed.phases.items(), key=lambda pair: -pair[1].total):
        parts = ", ".join(f"{part} {readable(count)}" for part, count in phase.parts.items() if count)
        table.add_row(
            name, readable(phase.total), readable(needed.at(name)), parts, style="bold" if name == needed.worst else ""
        )
    return table


def _variant_table(plan: MemoryPlan) -> Table:
    columns = ("setup", "peak", *map(str, CARDS))
    table = _table("other settings: peak, and the GPUs (GB) that hold it", columns, ("setup",))
    for name, needed in {"this recipe": plan.estimate, **plan.others}.items():
        held = fits(needed)
        cells = ["yes" if card in held else "no" for card in CARDS]
        table.add_row(name, readable(running_peak(needed)), *cells, style="bold" if name == "this recipe" else "")
    return table


def _textbook_table(plan: MemoryPlan) -> Table:
    title = f"four roles of {plan.nominal / 1e9:,.3g} B parameters each, counted three ways"
    table = _table(title, ("", *TEXTBOOK, "together"), ("",))
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
