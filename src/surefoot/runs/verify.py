"""Execute iterations of a run again, and compare their fingerprints with those that it wrote."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from surefoot.core.fingerprints import Fingerprints
from surefoot.core.seeding import as_found, prepare_gpu
from surefoot.diagnostics.differences import CLOSE, WHY, Parting, largest_distance, machine_differences, parting
from surefoot.errors import SurefootError
from surefoot.files import read_toml
from surefoot.ranks.collectives import world_size
from surefoot.ranks.launching import choose_gpu, join_ranks
from surefoot.recipes.base import Recipe
from surefoot.recipes.callables import Functions
from surefoot.recipes.reading import make_recipe
from surefoot.runs.callbacks import Callback
from surefoot.runs.factory import make_world, start_from
from surefoot.runs.session import Session
from surefoot.store.checkpoint import checkpoints_in
from surefoot.store.events import Event, UpdateEnd
from surefoot.store.folder import changed_since, machine, with_own_rows, working_folder
from surefoot.store.hub import local_folder
from surefoot.store.manifest import fault_of, read_listed_table
from surefoot.store.reading import FINGERPRINTS, Fingerprinted, check_is_run, read_fingerprints


class _Done(Exception):
    """The last iteration is done."""


@dataclass(frozen=True)
class Plan:
    """What is executed again."""

    run: Path
    recipe: Recipe
    record: Fingerprinted
    checkpoint: Path | None
    """from which; None: from the start"""
    first: int
    """the first iteration that is executed"""
    last: int

    @property
    def ranks(self) -> int:
        """The number of ranks that computed the last iteration."""
        return int(self.record.machine_of(self.last).get("ranks", 1))

    def budget_of(self, iteration: int) -> int:
        """The run's budget at that time, where its schedules ended."""
        return int(self.record.machine_of(iteration).get("steps", self.recipe.steps))

    @property
    def line(self) -> str:
        """What is repeated, in words."""
        count = self.last - self.first + 1
        many = f"repeats {count:,} iterations" if count > 1 else "repeats one iteration"
        start = "the start" if self.checkpoint is None else f"{self.checkpoint.parent.name}/{self.checkpoint.name}"
        return f"{self.run}: {many}, from {start}"


@dataclass(frozen=True)
class Verified:
    """What a comparison has shown."""

    plan: Plan
    compared: list[int]
    """iterations whose fingerprints were compared"""
    first: Parting | None
    """where the first difference is; None: there is none"""
    largest: Parting | None
    """where the largest is"""
    elsewhere: list[str] = field(default_factory=list)
    """what it was computed with here and was not then: versions, processor, threads, engine, ranks"""
    changed: list[str] = field(default_factory=list)
    """fields of the recipe, and code, that have changed since"""

    @property
    def close(self) -> bool:
        """Whether another machine or version explains all differences."""
        return self.largest is not None and bool(self.elsewhere) and not self.changed and self.largest.distance <= CLOSE

    @property
    def passed(self) -> bool:
        """Whether the iterations are the same to the last bit, or close on another machine."""
        return self.first is None or self.close

    @property
    def line(self) -> str:
        """The result in one line."""
        first, last = self.compared[0], self.compared[-1]
        named = f"iterations {first:,}–{last:,} repeat" if last > first else f"iteration {last:,} repeats"
        if self.first is None:
            sparse = "" if len(self.compared) == last - first + 1 else f" ({len(self.compared):,} of them have fingerprints)"
            return f"{named} to the last bit{sparse}"
        other = f"; {'; '.join(self.elsewhere)}" if self.elsewhere else ""
        if self.close and self.largest is not None:
            return f"close: {self.largest.text}{other}"
        changed = f"; changed since: {'; '.join(self.changed)}" if self.changed else ""
        why = "" if changed or other else f"; the same machine and recipe, so look at {WHY[self.first.stage]}"
        return f"{self.first.text}{changed}{other}{why}"

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        place = None if self.first is None else self.first.to_json()
        result = "same" if self.first is None else "close" if self.close else "different"
        start = None if self.plan.checkpoint is None else self.plan.checkpoint.name
        lists = {"compared": self.compared, "machine": self.elsewhere, "changed": self.changed}
        return {"run": str(self.plan.run), "result": result, "first": place, "checkpoint": start, **lists, "line": self.line}


def plan_of(run: str | Path, iteration: int | None = None, every: bool = False) -> Plan:
    """What to execute for an iteration, by default the last one, or for every one.

    Raises SurefootError if the run has no fingerprints, or not of that iteration.
    """
    shown, path = Path(run), local_folder(Path(run)).absolute()
    check_is_run(path)
    record = read_fingerprints(path)
    if not record.rows:
        raise SurefootError(f"{shown}: has no {FINGERPRINTS} to compare with; train it again with fingerprints = true")
    if record.fault:
        raise SurefootError(f"{shown / FINGERPRINTS}: {record.fault}; copy the run again, or compare it with: surefoot diff")
    last = max(record.rows) if iteration is None else iteration
    if last not in record.rows:
        near = min(record.rows, key=lambda there: abs(there - last))
        raise SurefootError(f"--iteration {last}: has no fingerprints; the nearest one that has is {near}")
    recipe = make_recipe(with_own_rows(read_toml(path / "config.toml"), shown))
    starts = {} if every else {_iteration_of(folder): folder for folder in checkpoints_in(path / "checkpoints")}
    before = max((at for at in starts if at is not None and at < last), default=0)
    return Plan(shown, recipe, record, starts.get(before), before + 1, last)


def _iteration_of(checkpoint: Path) -> int | None:
    """The iteration after which a sound checkpoint was saved."""
    with suppress(SurefootError, KeyError, TypeError):
        return None if fault_of(checkpoint) else int(read_listed_table(checkpoint / "state.json")["iteration"])
    return None


@as_found
def verify(
    plan: Plan,
    functions_of: Callable[[Recipe], Functions] = lambda recipe: {},
    task: Any = None,
    callbacks: Sequence[Callback] = (),
    show: Callable[[int], None] = lambda iteration: None,
) -> Verified:
    """Execute a plan and compare. Nothing is written to the run's folder; the ranks are those of this process's launcher.

    show   called with each iteration that is done

    The other arguments are those of ``resume``: what ``train`` got as an object.
    """
    join_ranks()
    path = local_folder(plan.run).absolute()
    began_in = working_folder(path)
    choose_gpu(plan.recipe.device)
    prepare_gpu(plan.recipe.device, plan.recipe.deterministic)
    torch.set_num_threads(plan.recipe.threads)
    changed = changed_since(plan.checkpoint, plan.recipe, began_in)
    repeated: dict[int, Mapping[str, Any]] = {}

    def listener(event: Event) -> None:
        if not isinstance(event, UpdateEnd):
            return
        if event.fingerprints is not None:
            repeated[event.state.iteration] = event.fingerprints
        show(event.state.iteration)
        event.state.total_steps = plan.budget_of(event.state.iteration + 1)
        if event.state.iteration >= plan.last:
            raise _Done

    there = began_in is not None and Path(began_in).is_dir()
    with contextlib.chdir(began_in if there and began_in is not None else "."):
        functions = functions_of(plan.recipe)
        world = make_world(plan.recipe, task, functions=functions)
        try:
            objects = {**functions, **({} if task is None else {"task": task})}
            session = Session(plan.recipe, world, None, [listener], callbacks, objects)
            session.learner.fingerprints = Fingerprints(1)
            session.state.total_steps = plan.budget_of(plan.first)
            if plan.checkpoint is None:
                start_from(world, None)
            else:
                session.restore(plan.checkpoint, allow_changes=True)
            with suppress(_Done):
                session.run()
        finally:
            world.close()
    rows = plan.record.rows
    compared = sorted(rows.keys() & repeated.keys())
    if not compared:
        raise SurefootError(f"{plan.run}: ended before iteration {plan.last}; nothing was compared")
    elsewhere = machine_differences(plan.record.machine_of(plan.last), machine(plan.recipe, world_size()))
    return Verified(plan, compared, parting(rows, repeated), largest_distance(rows, repeated), elsewhere, changed)
