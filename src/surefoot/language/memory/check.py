"""Before a run starts: whether it can fit, and if not, in one line, what would help most.

Twice, and each time with nothing but what is certain then. Before weights are read: those of all roles with gradients and
moments, by exact parameter counts. Once the rows are known: the same and the passes through them. What is not known before (how
long responses become) is taken as short as it can be, and what is counted may be off by 15 %, so that no run is refused that
would fit."""

import math
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from surefoot.errors import SurefootError
from surefoot.files import made_from, read_table
from surefoot.language.adapters.files import BASE, adapter_folder
from surefoot.language.memory.estimate import (
    Estimate,
    Workload,
    alternatives,
    estimate,
    permanent,
    permanent_bytes,
    with_prompts,
)
from surefoot.language.memory.passes import BatchShape, count_parameters, layer_count
from surefoot.language.models.language_model import model_folder
from surefoot.language.models.loading import load_config
from surefoot.language.models.policy import CHUNK
from surefoot.language.rewards.terms import BATCH_TOKENS
from surefoot.recipes.language import AdapterSettings, DpoRecipe, LanguageRecipe, ModelRecipe, RewardRecipe, SupervisedRecipe

Measure = Callable[[Workload], int]

TOLERANCE = 0.15
"""share of the passes' bytes by which a count may be off; docs/benchmarks/memory.md has what was measured"""


class MemoryCheck:
    """The memory that a run finds, measured before it takes any.

    recipe   of a run

    Raises SurefootError when what always stays is more than there is.
    """

    def __init__(self, recipe: ModelRecipe) -> None:
        self.recipe = recipe
        self.setup = known_workload(recipe) if recipe.check_memory else None
        self.available = available_memory(recipe.device) if recipe.check_memory else None
        self.full: Workload | None = None
        """with rows as long as they may become, once they are known"""
        if self.setup is None or self.available is None:
            return
        need = permanent_bytes(self.setup)
        if need > self.available:
            self._refuse(self.setup, need, "for weights, gradients and Adam's moments alone", permanent_bytes)

    def check(
        self,
        *,
        prompt: int,
        response: int,
        most: int,
        evaluated: int,
        demonstrated: tuple[int, int, int] | None = None,
        mixed: tuple[int, int, int] | None = None,
    ) -> list[str]:
        """Refuse what can't fit, and warn of what may not.

        prompt     tokens of the longest prompt that is surely read
        response   tokens that are surely learned from in a row
        most       tokens that may be learned from in a row
        evaluated  held-out rows
        demonstrated  demonstrations whose likelihood is watched: how many, and tokens and trained tokens of the longest
        mixed         those that every update learns from, in the same way

        Returns a line where the run fits only if responses stay short. Raises SurefootError when it does not fit in any case.
        """
        if self.setup is None or self.available is None:
            return []
        shown, taught = (None if rows is None else BatchShape(*rows) for rows in (demonstrated, mixed))
        full = replace(self.setup, prompt=prompt, response=most, evaluated=evaluated, demonstrated=shown, mixed=taught)
        self.full = full
        if upper_bound(full) <= self.available:
            return []
        least = replace(full, response=response, rounds=1)
        found = estimate(least)
        if least_needed(found) > self.available:
            self._refuse(least, running_peak(found), f"({peak_text(found)})", lambda other: running_peak(estimate(other)))
        whole = estimate(full)
        if whole.peak <= self.available:
            return []
        knob, _ = self._knob(full, lambda other: estimate(other).peak)
        helps = f"; {knob} would help" if knob else ""
        return [f"memory: may need {readable(whole.peak)} (in {whole.worst}) and {readable(self.available)} are there{helps}"]

    def summary(self) -> list[str]:
        """What a dry run tells of memory: the peak, when it comes, and what there is."""
        if self.full is None or self.available is None:
            return []
        found = estimate(self.full)
        return [
            f"memory: {readable(running_peak(found))} at its peak ({peak_text(found)}), {readable(self.available)} available"
        ]

    def _refuse(self, setup: Workload, need: int, what: str, measure: Measure) -> NoReturn:
        assert self.available is not None
        knob, after = self._knob(setup, measure)
        enough = "" if after <= self.available else ", still too much"
        remedy = f"set {knob} ({readable(after)}{enough})" if knob else "use a smaller model or a larger machine"
        raise SurefootError(
            f"memory: this run needs {readable(need)} {what}, and device={self.recipe.device!r} has {readable(self.available)} "
            f"available; {remedy}, or check_memory = false to try all the same"
        )

    def _knob(self, setup: Workload, measure: Measure) -> tuple[str, int]:
        """What would help most: of what is enough the first, which costs least; else what saves most."""
        assert self.available is not None
        before = least = measure(setup)
        best = ""
        for name, other in alternatives(setup):
            after = measure(other)
            if after <= self.available:
                return name, after
            if after < least:
                best, least = name, after
        for prompts in self._fewer_prompts(setup, before, measure):
            after = measure(with_prompts(setup, prompts))
            if after < least:
                rows = f" and evaluation.rows = {prompts}" if setup.evaluated > prompts else ""
                best, least = f"sampling.prompts = {prompts}{rows}", after
            if after <= self.available:
                break
        return best, least

    def _fewer_prompts(self, setup: Workload, before: int, measure: Measure) -> Iterator[int]:
        """Numbers that may be few enough, the largest first: powers of two times the fewest that the minibatches divide.

        Bytes are nearly a line in the number of prompts.
        """
        assert self.available is not None
        prompts = setup.responses // setup.samples
        minibatches = setup.responses // setup.rows
        fewest = minibatches // math.gcd(minibatches, setup.samples)
        if setup.kind != "language" or prompts <= fewest:
            return
        each = (before - measure(with_prompts(setup, prompts // 2))) / (prompts - prompts // 2)
        if each <= 0:
            return
        wanted = min(prompts // 2, prompts - int((before - self.available) / each))
        power = 2 ** (max(1, wanted // fewest).bit_length() - 1)
        yield from (fewest * power // 2**step for step in range(4) if power >= 2**step)


def workload_of(recipe: ModelRecipe, *, prompt: int, response: int, evaluated: int = 0) -> Workload:
    """What a recipe comes to with rows of these lengths.

    Raises SurefootError where a model's configuration can't be read.
    """
    return replace(_workload_of(recipe), prompt=prompt, response=response, evaluated=evaluated)


def known_workload(recipe: ModelRecipe) -> Workload | None:
    """What a recipe comes to before its rows are read; None where a model can't be read, which those who load it will say, or
    is made by code of its own.
    """
    try:
        setup = _workload_of(recipe)
        permanent(setup)
    except Exception:
        return None
    return setup


def _workload_of(recipe: ModelRecipe) -> Workload:
    def config(name: str) -> Any:
        return load_config(model_folder(name), trust_remote_code=recipe.trust_remote_code)

    policy, settings = config(recipe.model), recipe.optimizer
    common: dict[str, Any] = {
        "policy": policy,
        "objective": recipe.objective,
        "bf16": recipe.precision == "bfloat16",
        "checkpointing": recipe.gradient_checkpointing,
        "micro_batch": settings.micro_batch,
        "micro_batch_tokens": settings.micro_batch_tokens,
        "adapter": recipe.adapter,
    }
    if not isinstance(recipe, LanguageRecipe):
        assert isinstance(recipe, SupervisedRecipe)
        common |= {"rows": recipe.data.batch, "responses": recipe.data.batch, "prompt": 1, "response": 1}
        if isinstance(recipe, DpoRecipe):
            name = recipe.reference.model
            return Workload(kind="dpo", **common, reference=None if name is None else config(name))
        kind: Any = "reward" if isinstance(recipe, RewardRecipe) else "sft"
        return Workload(kind=kind, **common)
    named = recipe.reference.model
    reference = policy if named is None and recipe.adapter is None else None if named is None else config(named)
    names = [term.model for term in recipe.reward.terms if term.model is not None]
    beside = {name: found for name in names if (found := _reward_adapter(recipe, name)) is not None}
    reuse, critic, start = recipe.objective.reuse, recipe.objective.baseline == "critic", recipe.critic.start
    return Workload(
        kind="language",
        **common,
        value="none" if not critic else "own" if recipe.critic.own_model else "head",
        critic=None if start is None or recipe.adapter is not None else config(start),
        reference=reference,
        rewards=tuple(config(name) for name in names if name not in beside),
        reward_adapters=tuple(beside[name] for name in names if name in beside),
        temperature=recipe.sampling.temperature,
        rows=recipe.responses // (reuse.minibatches if reuse else 1),
        responses=recipe.responses,
        samples=recipe.sampling.samples,
        rounds=recipe.sampling.rounds,
        prompt=1,
        response=1,
        max_tokens=recipe.max_response_tokens,
    )


def _reward_adapter(recipe: ModelRecipe, name: str) -> AdapterSettings | None:
    """The adapter of a reward model that was trained on the recipe's own base, by its path; None for any other."""
    folder = adapter_folder(name) if recipe.adapter is not None else None
    if folder is None:
        return None
    with made_from(folder, "copy the whole folder"):
        if Path(read_table(folder / BASE)["model"]) != Path(model_folder(recipe.model)).expanduser().absolute():
            return None
        config = read_table(folder / "adapter_config.json")
        targets = (*config["target_modules"], *(config.get("target_parameters") or ()))
        return AdapterSettings(rank=config["r"], alpha=config["lora_alpha"], targets=targets)


def guaranteed_length(lengths: Sequence[int], read: int) -> int:
    """Tokens of the longest row, where all are read; else of the mean one, than which some row read is no shorter."""
    return max(lengths) if read >= len(lengths) else sum(lengths) // len(lengths)


def running_peak(found: Estimate) -> int:
    """The peak without saving: a run that is not written down saves nothing."""
    return max(found.at(phase) for phase in found.phases if phase != "saving")


def least_needed(found: Estimate) -> int:
    """What a run needs even if the passes are counted too high by as much as they are known to be."""
    return found.stays + int((1 - TOLERANCE) * (running_peak(found) - found.stays))


def peak_text(found: Estimate) -> str:
    """What stays and what the largest phase adds."""
    worst = max((phase for phase in found.phases if phase != "saving"), key=found.at)
    return f"{readable(found.stays)} that stay and {readable(found.phases[worst].total)} while {worst}"


def readable(count: float) -> str:
    """Bytes as people read them: 10⁹ to a GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def upper_bound(setup: Workload) -> int:
    """More bytes than a run can need, in no time: 40 numbers per token, layer and unit of its width, where a Llama has 10 to
    25, scores of attention included, and a few times all logits that are held.
    """
    largest = 0
    for config in {id(c): c for c in (setup.policy, setup.critic, setup.reference, *setup.rewards) if c is not None}.values():
        text, known, layers = config.get_text_config(), count_parameters(config), layer_count(config)
        wide = max(known.width, int(getattr(text, "intermediate_size", 0) or 4 * known.width))
        heads = int(getattr(text, "num_attention_heads", 1) or 1)
        learned, width = setup.micro(max(setup.rows, setup.evaluated)), setup.prompt + max(setup.response, setup.max_tokens)
        texts = setup.responses + setup.evaluated
        tokens = 2 * learned.rows * width + texts * width + BATCH_TOKENS
        shown, mixed = setup.at_once(setup.demonstrated, setup.rows), setup.at_once(setup.mixed)
        tokens += shown.rows * shown.width + 2 * mixed.rows * mixed.width
        each = layers * (40 * wide + 8 * heads * width)
        logits = 8 * (texts * known.vocabulary + CHUNK) + 8 * known.total
        largest += 4 * (tokens * each + logits)
    return permanent_bytes(setup) + largest + setup.held


PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_memory(device: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that can still be taken; None where nothing says.

    On a CPU the least of what the machine has left (swap included: it is slow, but the run would fit), what the control groups
    of the process allow, and what is left of its limit of address space (``ulimit -v``). On a GPU what its driver says.
    """
    kind, _, _ = device.partition(":")
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    if kind == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    known = [machine_memory(proc), address_space(proc), *(group_memory(folder) for folder in control_groups(proc, cgroups))]
    return min((size for size in known if size is not None), default=None)


def machine_memory(proc: Path = PROC) -> int | None:
    """What the machine has left, by the kernel's own estimate, and its swap."""
    fields = _fields(proc / "meminfo")
    if "MemAvailable" not in fields:
        return None
    return fields["MemAvailable"] + fields.get("SwapFree", 0)


def address_space(proc: Path = PROC) -> int | None:
    """What is left of the process's limit of address space; None without one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - _fields(proc / "self" / "status").get("VmSize", 0))


def control_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """The folders of the groups whose limits hold for this process, of version 1 and 2, from its own up to the root.

    In a container the path may be the host's; then the root that is seen is the container's own group.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        here = root / path.strip("/")
        found += [folder for folder in (here, *here.parents) if folder == root or root in folder.parents]
    return found


def group_memory(group: Path) -> int | None:
    """What a control group still allows, files in memory that can be dropped counted as free; None without a limit."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, now = int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        return max(0, most - now + _fields(group / "memory.stat", 1).get(dropped, 0))
    return None


def _fields(path: Path, unit: int = 1024) -> dict[str, int]:
    """Lines such as ``MemAvailable:   1234 kB`` as bytes."""
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            found[words[0]] = int(words[1]) * unit
    return found
