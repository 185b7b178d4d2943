"""Check before a run starts whether it fits into memory; if not, name the most helpful setting in one line.

The check runs twice, each time with what is certain. Before weights are read, it adds up weights, gradients and moments of all
roles, by exact parameter counts. Once the rows are known, it adds the passes. Lengths of responses are unknown and assumed as
short as possible, and counts may be off by 15 %, so no run that would fit is rejected.

Of several ranks each makes the same check, of one rank's memory against the least that a rank has.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from surefoot.core.learner import Learner
from surefoot.errors import SurefootError
from surefoot.files import made_from, read_table
from surefoot.language.language_model import model_folder
from surefoot.language.memory import Estimate, estimate, total
from surefoot.language.memory.available import available_memory, total_memory
from surefoot.language.memory.layout import Layout
from surefoot.language.memory.passes import family_note, unknown_families
from surefoot.language.memory.probe import measured_work
from surefoot.language.memory.roles import host_bytes, on_device_and_host, permanent, permanent_bytes
from surefoot.language.memory.savings import alternatives
from surefoot.language.memory.workload import BatchShape, Workload, with_prompts, with_ranks
from surefoot.language.models.adapter_files import BASE, adapter_folder
from surefoot.language.models.adapters import is_print_of
from surefoot.language.models.loading import load_config
from surefoot.ranks.collectives import exchange, world_size
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.models import AdapterSettings, ModelRecipe
from surefoot.recipes.supervised import DpoRecipe, RewardRecipe, SupervisedRecipe
from surefoot.sharding import ranks_per_machine

Measure = Callable[[Workload], int]
MicroBatch = tuple[Any, Tensor, Tensor]

TOLERANCE = 0.15
"""largest error of the passes' bytes; docs/benchmarks/memory.md has the measurements"""
UNKNOWN_TOLERANCE = 0.5
"""the same of families that are read as a Llama"""


class MemoryCheck:
    """Compares a run's memory with what is available, measured before the run allocates any.

    Raises SurefootError if the permanent memory alone does not fit.
    """

    def __init__(self, recipe: ModelRecipe) -> None:
        self.recipe = recipe
        self.workload = readable_workload(recipe) if recipe.check_memory else None
        self.available = available_to_a_rank(recipe.device) if recipe.check_memory else None
        self.full: Workload | None = None
        """the workload with the longest rows, once they are known"""
        if self.workload is None or self.available is None:
            return
        need = permanent_bytes(self.workload)
        if need > self.available:
            self._reject(self.workload, need, "for weights, gradients and Adam's moments alone", permanent_bytes)
        if host := on_device_and_host(self.workload)[1]:
            self._check_host(host_bytes(host), available_to_a_rank("cpu"))

    def check(
        self,
        *,
        prompt: int,
        response: int,
        most: int,
        evaluated: int,
        demonstrated: BatchShape | None = None,
        mixed: BatchShape | None = None,
        together: int = 1,
    ) -> list[str]:
        """Reject a run that can't fit, and warn of one that may not.

        prompt     tokens of the longest prompt that is certainly read
        response   tokens that are certainly trained in a row
        most       tokens that may be trained in a row
        evaluated  held-out rows
        demonstrated  demonstrations whose likelihood is evaluated, of the length of the longest
        mixed         demonstrations in every update, likewise
        together      rows that may read one prompt together

        Returns a line if the run fits only while responses stay short. Raises SurefootError if it does not fit in any case.
        """
        if self.workload is None or self.available is None:
            return []
        full = replace(self.workload, prompt=prompt, response=most, evaluated=evaluated, demonstrated=demonstrated, mixed=mixed)
        self.full = full
        whole = estimate(full)
        if whole.peak <= self.available:
            return []
        least = replace(full, prompt=max(1, prompt // together), response=response, rounds=1)
        lower = estimate(least)
        if least_needed(lower, UNKNOWN_TOLERANCE if unknown_families(least) else TOLERANCE) > self.available:
            self._reject(least, running_peak(lower), f"({peak_text(lower)})", lambda other: running_peak(estimate(other)))
        helps = self._helps(full, lambda other: estimate(other).peak)
        return [
            f"memory: may need {readable(whole.peak)}{self._each} ({whole.worst}), and {readable(self.available)} are "
            f"available{helps}",
            *([note] if (note := family_note(full)) else []),
        ]

    def try_longest(self, learner: Learner, longest: Callable[[BatchShape], MicroBatch]) -> list[str]:
        """Train on the longest micro-batch, without a step, if the plan takes more than half of the available memory.

        longest   makes it: inputs, actions and mask

        Not on a CPU if the plan exceeds the memory, where it could end the run. Returns a line with what learning needs. It is
        no error if that is more than is available, since the longest rows may never be in one micro-batch.
        """
        full, device = self.full, self.recipe.device
        if full is None or self.available is None:
            return []
        planned, one = estimate(full), full.of_one_rank()
        peak = running_peak(planned)
        if 2 * peak <= self.available or (peak > self.available and not device.startswith("cuda")):
            return []
        work = measured_work(learner, *longest(one.micro(one.rows)), device=device)
        if work is None:
            return []
        helps = self._helps(full, lambda other: running_peak(estimate(other)))
        if work == math.inf:
            return [f"memory: {readable(self.available)} have no room for a pass of the longest micro-batch{helps}"]
        absent = sum(parts.get("gradients", 0) for parts in planned.always.values()) if full.layout.sharded else 0
        needed = planned.permanent - absent + work + planned.phases["learning"]["batch"]
        shown = f"{readable(needed)}{self._each} while learning, by a pass of the longest micro-batch"
        if needed <= self.available:
            return [f"memory: {shown}; {readable(self.available)} were available"]
        return [f"memory: needs {shown}, and {readable(self.available)} were available{helps}"]

    def summary(self) -> list[str]:
        """Lines for a dry run: the peak, its phase, and the available memory."""
        if self.full is None or self.available is None:
            return []
        whole = estimate(self.full)
        lines = [
            f"memory: {readable(running_peak(whole))}{self._each} at its peak ({peak_text(whole)}), {readable(self.available)} "
            "available"
        ]
        lines += [note] if (note := family_note(self.full)) else []
        if whole.host:
            lines.append(f"memory of the CPU: {readable(host_bytes(whole.host))}{self._each}, because of offload")
        return lines

    @property
    def _each(self) -> str:
        """Whose memory it is, if there are several ranks."""
        assert self.workload is not None
        ranks = self.workload.layout.ranks
        return f" on each of {ranks} ranks" if ranks > 1 else ""

    def _check_host(self, need: int, available: int | None) -> None:
        """Raise SurefootError if the memory of the CPU can't hold what is offloaded to it."""
        if available is not None and need > available:
            raise SurefootError(
                f"offload={json.dumps(self.recipe.offload)}: keeps {readable(need)}{self._each} in the memory of the CPU, "
                f"which has {readable(available)} for each; set offload = false, use more ranks, or check_memory = false to "
                "try anyway"
            )

    def _reject(self, workload: Workload, need: int, what: str, measure: Measure) -> NoReturn:
        assert self.available is not None
        setting, after = self._best_setting(workload, measure)
        enough = "" if after <= self.available else ", still too much"
        remedy = f"set {setting} ({readable(after)}{enough})" if setting else "use a smaller model or a larger machine"
        raise SurefootError(
            f"memory: this run needs {readable(need)}{self._each} {what}, and device={self.recipe.device!r} has "
            f"{readable(self.available)} available{' for each' if self._each else ''}; {remedy}, or check_memory = false to "
            f"try anyway{f' ({note})' if (note := family_note(workload)) else ''}"
        )

    def _helps(self, workload: Workload, measure: Measure) -> str:
        """The end of a warning: a setting that saves memory, if there is one."""
        setting, _ = self._best_setting(workload, measure)
        return f"; {setting} would help" if setting else ""

    def _best_setting(self, workload: Workload, measure: Measure) -> tuple[str, int]:
        """The first setting that is enough (they are sorted by cost), else the one that saves most; and the bytes with it."""
        assert self.available is not None
        best, least = "", measure(workload)
        for name, other in chain(alternatives(workload), self._more_ranks(workload), fewer_prompts(workload)):
            after = measure(other)
            if after <= self.available:
                return name, after
            if after < least:
                best, least = name, after
        return best, least

    def _more_ranks(self, workload: Workload) -> Iterator[tuple[str, Workload]]:
        """Models shared by more of the GPUs of this machine, if a single process was to use one of them."""
        if self.recipe.device.startswith("cuda") and workload.layout.ranks == 1 and not workload.is_whole:
            for ranks in range(2, torch.cuda.device_count() + 1):
                yield f'sharding = "full" and add --ranks {ranks}', with_ranks(workload, ranks)


def fewer_prompts(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """At most half of the prompts, the most first: powers of two times the fewest that the minibatches divide."""
    prompts, minibatches = workload.responses // workload.samples, workload.responses // workload.rows
    fewest = minibatches // math.gcd(minibatches, workload.samples) * workload.layout.ranks
    powers = (prompts // 2 // fewest).bit_length() if workload.kind == "language" else 0
    for power in reversed(range(powers)):
        fewer = fewest * 2**power
        rows = f" and evaluation.rows = {fewer}" if workload.evaluated > fewer else ""
        yield f"sampling.prompts = {fewer}{rows}", with_prompts(workload, fewer)


def readable_workload(recipe: ModelRecipe) -> Workload | None:
    """The workload of a recipe before its rows are read; None for a model that can't be read (loading it reports the error), or
    that needs its own code.
    """
    try:
        workload = workload_of(recipe)
        permanent(workload)
    except Exception:
        return None
    return workload


def workload_of(recipe: ModelRecipe, *, prompt: int = 1, response: int = 1) -> Workload:
    """The workload of a recipe with rows of these lengths.

    Raises SurefootError if a model's configuration can't be read.
    """

    def config(name: str) -> Any:
        return load_config(model_folder(name), trust_remote_code=recipe.trust_remote_code)

    policy, settings = config(recipe.model), recipe.optimizer
    common: dict[str, Any] = {
        "policy": policy,
        "bf16": recipe.autocast,
        "low_weights": recipe.low_weights,
        "low_moments": settings.kind == "adam-8bit",
        "checkpointing": recipe.gradient_checkpointing,
        "micro_batch": settings.micro_batch,
        "micro_batch_tokens": settings.micro_batch_tokens,
        "adapter": recipe.adapter,
        "layout": layout_of(recipe),
        "prompt": prompt,
        "response": response,
    }
    if not isinstance(recipe, LanguageRecipe):
        assert isinstance(recipe, SupervisedRecipe)
        common |= {"rows": recipe.data.batch, "responses": recipe.data.batch}
        if isinstance(recipe, DpoRecipe):
            name = recipe.reference.model
            common |= {"labelled": recipe.preference.loss == "kto", "compared": recipe.has_reference}
            return Workload(kind="dpo", **common, reference=None if name is None else config(name))
        if isinstance(recipe, RewardRecipe):
            return Workload(kind="reward", **common, labelled=recipe.preference.loss != "bradley_terry")
        return Workload(kind="sft", **common)
    named = recipe.reference.model
    reference = policy if named is None and recipe.adapter is None else None if named is None else config(named)
    reference = reference if recipe.has_reference else None
    names = [term.model for term in recipe.reward.terms if term.model is not None]
    adapters = {name: adapter for name in names if (adapter := _reward_adapter(recipe, name)) is not None}
    reuse, critic, start = recipe.objective.reuse, recipe.objective.baseline == "critic", recipe.critic.start
    return Workload(
        kind="language",
        **common,
        value="none" if not critic else "own" if recipe.critic.own_model else "head",
        critic=None if start is None or recipe.adapter is not None else config(start),
        reference=reference,
        rewards=tuple(model for name in names if name not in adapters and _is_decoder(model := config(name))),
        reward_adapters=tuple(adapters[name] for name in names if name in adapters),
        idle=recipe.idle_roles,
        rows=recipe.responses // (reuse.minibatches if reuse else 1),
        responses=recipe.responses,
        samples=recipe.sampling.samples,
        rounds=recipe.sampling.rounds,
        sampled=0 if recipe.samples_on_server else recipe.sampling.rows,
        memory=total_memory(recipe.device),
        max_tokens=recipe.max_response_tokens,
    )


def layout_of(recipe: ModelRecipe) -> Layout:
    """The ranks of this run, and how they share a recipe's models."""
    return Layout(
        ranks=world_size(),
        sharding=recipe.sharding,
        per_machine=local_ranks(),
        reshard=recipe.reshard_after_forward,
        offload=recipe.offload is True,
        gpu=not recipe.device.startswith("cpu"),
    )


def local_ranks() -> int:
    """Ranks of this machine, by the launcher."""
    return 1 if world_size() == 1 else ranks_per_machine()


def _is_decoder(config: Any) -> bool:
    """Whether a pass of the model can be counted; encoders can't, so a reward by one is left out of the estimate."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    return config.model_type in KNOWN


def _reward_adapter(recipe: ModelRecipe, name: str) -> AdapterSettings | None:
    """The adapter of a reward model that was trained on the recipe's base, by path; None for any other."""
    folder = adapter_folder(name) if recipe.adapter is not None else None
    if folder is None:
        return None
    with made_from(folder, "copy the whole folder"):
        if Path(read_table(folder / BASE)["model"]) != Path(model_folder(recipe.model)).expanduser().absolute():
            return None
        assert recipe.adapter is not None
        if not is_print_of(read_table(folder / BASE)["print"], recipe.adapter.quantize):
            return None
        config = read_table(folder / "adapter_config.json")
        targets = (*config["target_modules"], *(config.get("target_parameters") or ()))
        return AdapterSettings(rank=config["r"], alpha=config["lora_alpha"], targets=targets)


def guaranteed_length(lengths: Sequence[int], read: int, padding_free: bool = False) -> int:
    """Length of the longest row if all are read; else the mean length, which some row that is read reaches. Without padding
    always the mean, since a row makes no other one longer.
    """
    return max(lengths) if read >= len(lengths) and not padding_free else sum(lengths) // len(lengths)


def running_peak(estimated: Estimate) -> int:
    """The peak without saving, which a run may never do."""
    return max(estimated.at(phase) for phase in estimated.phases if phase != "saving")


def least_needed(estimated: Estimate, tolerance: float = TOLERANCE) -> int:
    """A lower bound of a run's bytes: the passes may be overestimated by ``tolerance``."""
    return estimated.permanent + int((1 - tolerance) * (running_peak(estimated) - estimated.permanent))


def peak_text(estimated: Estimate) -> str:
    """The permanent memory and the largest phase, as text."""
    worst = max((phase for phase in estimated.phases if phase != "saving"), key=estimated.at)
    return f"{readable(estimated.permanent)} throughout and {readable(total(estimated.phases[worst]))} while {worst}"


def readable(count: float) -> str:
    """Bytes as text, with 10⁹ bytes to the GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def available_to_a_rank(device: str) -> int | None:
    """Bytes that every rank can still allocate: of a machine's memory its share, of a GPU all. None if unknown.

    All ranks call this, and none goes on before all have measured.
    """
    available = available_memory(device)
    if available is not None and device.startswith("cpu"):
        available //= local_ranks()
    return min((one for one in exchange(available) if one is not None), default=None)
