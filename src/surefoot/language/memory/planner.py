"""``surefoot memory``: plan the memory of a run, what other settings would save, and which GPUs it fits."""

import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from surefoot.errors import SurefootError, cause_of, require_package
from surefoot.language import quiet_transformers
from surefoot.language.language_model import model_folder
from surefoot.language.memory import Estimate, estimate, total
from surefoot.language.memory.check import peak_text, readable, running_peak
from surefoot.language.memory.parameters import count_parameters
from surefoot.language.memory.passes import family_note, unknown_families
from surefoot.language.memory.roles import host_bytes, permanent_bytes
from surefoot.language.memory.savings import settings, variants
from surefoot.language.memory.workload import Workload, with_ranks
from surefoot.language.models.loading import check_causal, load_config, read_only_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CARDS = (24, 48, 80, 141)
"""GB, 10⁹ bytes, of common GPUs. Most have 2³⁰ to the GB; the difference is for their context and the allocator's leftovers"""
GPUS = (2, 4, 8)
"""numbers of GPUs that are tried besides the planned one"""
PARTS = ("weights", "gradients", "optimizer")
TEXTBOOK = {
    "textbook": {"policy": 4, "value": 4, "reference": 2, "reward": 2},
    "with AdamW, mixed precision": {"policy": 16, "value": 16, "reference": 2, "reward": 2},
    "here: float32 weights": {"policy": 16, "value": 16, "reference": 4, "reward": 4},
}
"""bytes per parameter: 2 for a weight and 2 for its gradient; AdamW in mixed precision; this library"""
Fit = tuple[tuple[str, ...], Estimate]
"""settings of a recipe, and the estimate with them"""


class MemoryPlan:
    """A workload with its estimate, the cheapest settings for each GPU, and variants for comparison.

    All of them take some seconds for large models, so each is estimated when it is shown.

    model     the name to show
    nominal   parameters for the textbook's count: the size in the model's name, else the exact number
    """

    def __init__(self, model: str, workload: Workload, nominal: int | None = None) -> None:
        self.model, self.workload = model, workload
        self.counts = count_parameters(workload.policy)
        self.nominal = nominal or self.counts.total

    @cached_property
    def estimate(self) -> Estimate:
        """The memory with the settings as they are."""
        return estimate(self.workload)

    def several(self) -> dict[int, dict[int, Fit | None]]:
        """The cheapest settings for several GPUs that share the models, by number; empty if the plan has several ranks."""
        ranks = () if self.workload.layout.ranks > 1 or self.workload.is_whole else GPUS
        return {count: cheapest(with_ranks(self.workload, count)) for count in ranks}

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


def model_config(name: str) -> "tuple[PreTrainedConfig, int | None]":
    """The configuration of a model's name, and its number of parameters if the name is a size.

    name  ``pocket``, a size such as ``7B`` or ``350M``, a config.json, a folder that holds one, a run, or a hub id

    Raises SurefootError for any other name.
    """
    require_package("transformers", "language", f"model={name!r}")
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
    return {way: {role: each * parameters for role, each in bytes_of.items()} for way, bytes_of in TEXTBOOK.items()}


def fits(needed: Estimate) -> list[int]:
    """The GPUs that a run fits; checkpoints are copied to the host."""
    return [card for card in CARDS if running_peak(needed) <= card * 1e9]


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """All of a plan, in bytes."""
    s, needed = plan.workload, plan.estimate
    return {
        "model": plan.model,
        "parameters": plan.counts.total,
        "layers": plan.counts.depth,
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
        "phases": needed.phases,
        "peak": running_peak(needed),
        "peak_with_saving": needed.peak,
        "fits": fits(needed),
        "read_as_llama": unknown_families(s),
        "cheapest": {
            str(card): None if fit is None else {"settings": list(fit[0]), "peak": running_peak(fit[1])}
            for card, fit in cheapest(plan.workload).items()
        },
        "alternatives": {name: {"peak": running_peak(other), "fits": fits(other)} for name, other in plan.others().items()},
        "textbook": {way: {**roles, "total": sum(roles.values())} for way, roles in textbook(plan.nominal).items()},
    }


# ---- for people ---------------------------------------------------------------------------------------------------------


def tables(plan: MemoryPlan) -> Iterator[Text | Table]:
    """The plan as lines and tables, each as soon as it is estimated."""
    s, ranks = plan.workload, plan.workload.layout.ranks
    learned = s.of_one_rank()
    rows = f"{s.responses} rows of {s.prompt} + {s.response} tokens, {learned.micro(learned.rows).rows} at once in learning"
    counts = f"{plan.counts.total:,} parameters in {plan.counts.depth} layers"
    yield Text(f"{plan.model}: {counts}; kind = {s.kind}; {rows}", style="bold")
    if ranks > 1:
        yield Text(_rank_line(plan))
    gpus = "one GPU" if ranks == 1 else f"{ranks} GPUs"
    yield _card_table(f"the cheapest settings that fit on {gpus}", ("GPU", "peak"), {ranks: cheapest(plan.workload)})
    yield _role_table(plan.estimate)
    yield _phase_table(plan.estimate)
    if note := family_note(s):
        yield Text(note, style="yellow")
    yield _variant_table(plan)
    if s.kind == "language":
        yield from _textbook_lines(plan)
    if several := plan.several():
        title = 'the cheapest settings that fit on several GPUs, with --ranks N and sharding = "full"'
        yield _card_table(title, ("GPUs", "peak of each"), several)


def _rank_line(plan: MemoryPlan) -> str:
    """What each of several ranks needs, and which GPUs hold it."""
    layout, needed = plan.workload.layout, plan.estimate
    models = "whole models" if not layout.sharded else f'sharding = "{layout.sharding}"'
    held = fits(needed)
    verdict = f"fits {layout.ranks} GPUs of {', '.join(map(str, held))} GB" if held else "fits none of these GPUs"
    host = f"; {readable(host_bytes(needed.host))} a rank in the memory of the CPU" if needed.host else ""
    return f"{layout.ranks} ranks, {models}: {verdict}, {readable(running_peak(needed))} a rank ({peak_text(needed)}){host}"


def _table(
    title: str, columns: Sequence[str], rows: Iterator[Sequence[str]], text: Sequence[str] = (), bold: str = ""
) -> Table:
    """A table whose columns are numbers, aligned right, except those in ``text``; the row that begins with ``bold`` is."""
    table = Table(title=title, title_justify="left", box=None)
    for name in columns:
        table.add_column(name, justify="left" if name in text else "right", overflow="fold" if name in text else "ellipsis")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == bold else "")
    return table


def _card_table(title: str, columns: tuple[str, str], by_ranks: dict[int, dict[int, Fit | None]]) -> Table:
    def rows() -> Iterator[Sequence[str]]:
        for ranks, fits_by_card in by_ranks.items():
            for card, fit in fits_by_card.items():
                name = f"{card} GB" if ranks == 1 else f"{ranks} x {card} GB"
                if fit is None:
                    yield name, "–", "none of these settings fits"
                else:
                    yield name, readable(running_peak(fit[1])), ", ".join(fit[0]) or "as planned"

    return _table(title, (*columns, "settings"), rows(), text=("settings",))


def _role_table(needed: Estimate) -> Table:
    resting = ", ".join(needed.host)
    title = "what always stays" + (f" ({resting}: in the memory of the CPU)" if resting else "")

    def rows() -> Iterator[Sequence[str]]:
        for role, parts in {**needed.host, **needed.always}.items():
            if role != "data":
                yield role, *(readable(parts[part]) if part in parts else "–" for part in PARTS), readable(total(parts))
        yield "rollout", "", "", "", readable(needed.always["data"]["rollout"])
        yield "all", "", "", "", readable(needed.permanent)

    return _table(title, ("role", *PARTS, "together"), rows(), text=("role",), bold="all")


def _phase_table(needed: Estimate) -> Table:
    def parts(name: str) -> str:
        return ", ".join(f"{part} {readable(count)}" for part, count in needed.phases[name].items() if count)

    names = sorted(needed.phases, key=needed.at, reverse=True)
    rows = ((name, readable(total(needed.phases[name])), readable(needed.at(name)), parts(name)) for name in names)
    title, columns = "what comes on top, one phase after another", ("phase", "more", "peak", "of what")
    return _table(title, columns, rows, text=("phase", "of what"), bold=needed.worst)


def _variant_table(plan: MemoryPlan) -> Table:
    def rows() -> Iterator[Sequence[str]]:
        for name, needed in {"this recipe": plan.estimate, **plan.others()}.items():
            held = fits(needed)
            yield name, readable(running_peak(needed)), *("yes" if card in held else "no" for card in CARDS)

    title, columns = "other settings: peak, and the GPUs (GB) that hold it", ("setup", "peak", *map(str, CARDS))
    return _table(title, columns, rows(), text=("setup",), bold="this recipe")


def _textbook_lines(plan: MemoryPlan) -> Iterator[Text | Table]:
    """Three ways to count the roles, and what the shortest leaves out."""
    ways = textbook(plan.nominal)
    title = f"four roles of {plan.nominal / 1e9:,.3g} B parameters each, counted three ways"
    rows = ((way, *map(readable, roles.values()), readable(sum(roles.values()))) for way, roles in ways.items())
    yield _table(title, ("", *ways["textbook"], "together"), rows, text=("",))
    needed = plan.estimate.phases
    most = ", ".join(f"{name} {readable(total(needed[name]))}" for name in ("learning", "sampling", "scoring"))
    yield Text(
        "The textbook's sum is 2 bytes for a weight and 2 for its gradient. It leaves out the optimizer (AdamW in mixed "
        "precision: 12 bytes more per trained parameter) and all that passes through, activations, logits and the cache: "
        f"here {most}."
    )
