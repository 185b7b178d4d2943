"""Execute iterations of a run again, and compare their fingerprints with those that it wrote."""

import contextlib
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.core.fingerprints import Fingerprints
from surefoot.core.rollout import LearnerState
from surefoot.core.seeding import as_found, prepare_gpu
from surefoot.diagnostics.differences import CLOSE, STAGES, Parting, machine_differences, named, partings
from surefoot.errors import SurefootError
from surefoot.ranks.collectives import rank, world_size
from surefoot.ranks.launching import choose_gpu, join_ranks
from surefoot.recipes.base import Recipe
from surefoot.recipes.callables import Functions, with_task
from surefoot.runs.callbacks import Callback
from surefoot.runs.factory import make_world, start_from
from surefoot.runs.session import Session
from surefoot.store.checkpoint import checkpoints_in
from surefoot.store.events import Event, UpdateEnd
from surefoot.store.folder import changed_since, machine, recipe_of, working_folder
from surefoot.store.hub import local_folder
from surefoot.store.manifest import fault_of, read_listed_table
from surefoot.store.metrics import Fingerprinted, read_fingerprints
from surefoot.store.reading import FINGERPRINTS, check_is_run


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
    elsewhere: list[str] = field(default_factory=list)
    """what it is computed with here and was not then: versions, processor, threads, engine"""

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
        return f"{self.run}: {many}, from {start}{self.given}"

    @property
    def given(self) -> str:
        """A clause, if recorded actions are taken."""
        return ", with the recorded actions" if any(self.first <= at <= self.last for at in self.taken) else ""

    @property
    def taken(self) -> dict[int, Any]:
        """Recorded actions, which another machine takes: its own would differ in the last bits, and a simulator soon in all."""
        if not self.elsewhere or getattr(self.recipe, "cloning", None) is not None:  # whose rows have theirs
            return {}
        return {at: each for at, each in self.record.taken.items() if len(each) == self.ranks}


@dataclass(frozen=True)
class Verified:
    """What a comparison has shown."""

    plan: Plan
    compared: list[int]
    """iterations whose fingerprints were compared"""
    first: Parting | None
    """where the first difference is, on another machine the first that rounding does not explain; None: there is none"""
    largest: Parting | None
    """where the largest is; None: all is the same to the last bit"""
    changed: list[str] = field(default_factory=list)
    """fields of the recipe, and code, that have changed since"""

    @property
    def result(self) -> str:
        """Either "same" to the last bit, "close" where another machine or version explains all differences, or "different"."""
        if self.largest is None:
            return "close" if self.plan.given else "same"
        return "close" if self.first is None and not self.changed else "different"

    @property
    def passed(self) -> bool:
        """Whether the iterations are the same to the last bit, or close on another machine."""
        return self.result != "different"

    @property
    def line(self) -> str:
        """The result in one line."""
        if self.largest is None:
            return f"{named(self.compared)} repeat{'s' * (len(self.compared) == 1)} to the last bit{self.plan.given}"
        other = "".join(f"; {line}" for line in self.plan.elsewhere if line not in self.changed)
        if self.result == "close":
            return f"close: {self.largest.text}{other}"
        changed = f"; changed since: {'; '.join(self.changed)}" if self.changed else ""
        place = self.first or self.largest
        why = "" if changed or other else f"; no cause is recorded; look at {STAGES[place.stage][1]}"
        return f"{place.text}{changed}{other}{why}"

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        place = None if self.first is None else self.first.to_json()
        start = None if self.plan.checkpoint is None else self.plan.checkpoint.name
        lists = {"compared": self.compared, "machine": self.plan.elsewhere, "changed": self.changed}
        named = {"run": str(self.plan.run), "result": self.result, "first": place, "checkpoint": start}
        return {**named, **lists, "line": self.line}


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
    recipe = recipe_of(path, shown)
    starts = {} if every else {_iteration_of(folder): folder for folder in checkpoints_in(path / "checkpoints")}
    last = max(record.rows) if iteration is None else iteration
    if last not in record.rows:
        near = min(record.rows, key=lambda there: abs(there - last))
        raise SurefootError(f"--iteration {last}: has no fingerprints; the nearest one that has is {near}")
    there = record.machine_of(last)
    elsewhere = machine_differences(there, machine(recipe, int(there.get("ranks", 1))))
    if elsewhere and iteration is None and not every:
        last = max((at for at in record.taken if at - 1 in starts or at == 1), default=last)
    before = max((at for at in starts if at is not None and at < last), default=0)
    return Plan(shown, recipe, record, starts.get(before), before + 1, last, elsewhere)


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
) -> Verified:
    """Execute a plan and compare. Nothing is written to the run's folder; the ranks are those of this process's launcher.

    The other arguments are those of ``resume``: what ``train`` got as an object.
    """
    join_ranks()
    path = local_folder(plan.run).absolute()
    began_in = working_folder(path)
    choose_gpu(plan.recipe.device)
    prepare_gpu(plan.recipe.device, plan.recipe.deterministic)
    torch.set_num_threads(plan.recipe.threads)
    changed = changed_since(path, plan.recipe, plan.checkpoint)
    repeated: dict[int, Mapping[str, Any]] = {}

    def listener(event: Event) -> None:
        if not isinstance(event, UpdateEnd):
            return
        if event.fingerprints is not None:
            repeated[event.state.iteration] = event.fingerprints
        event.state.total_steps = plan.budget_of(event.state.iteration + 1)
        if event.state.iteration >= plan.last:
            raise _Done

    with contextlib.chdir(began_in if began_in is not None and Path(began_in).is_dir() else "."):
        functions = functions_of(plan.recipe)
        with contextlib.closing(make_world(plan.recipe, task, functions=functions)) as world, suppress(_Done):
            session = Session(plan.recipe, world, None, [listener], callbacks, with_task(functions, task))
            session.learner.fingerprints = Fingerprints(1)
            if plan.taken:
                _take(world.collector, world.result, session.state, plan.taken)
            session.state.total_steps = plan.budget_of(plan.first)
            if plan.checkpoint is None:
                start_from(world, None)
            else:
                session.restore(plan.checkpoint, allow_changes=True)
            session.run()
    rows = plan.record.rows
    compared = sorted(rows.keys() & repeated.keys())
    if not compared:
        raise SurefootError(f"{plan.run}: ended before iteration {plan.last}; nothing was compared")
    here = machine(plan.recipe, world_size())
    plan = replace(plan, elsewhere=machine_differences(plan.record.machine_of(plan.last), here))
    places = partings(rows, repeated)
    first = next((place for place in places if not plan.elsewhere or place.distance > CLOSE), None)
    return Verified(plan, compared, first, max(places, key=lambda place: place.distance, default=None), changed)


def _take(collector: Any, agent: Any, state: LearnerState, taken: Mapping[int, Any]) -> None:
    """Make a collector take the recorded actions in the iterations that have some."""
    actor, convert = collector.actor, agent.action_converter()

    def replaying(*arguments: Any) -> Any:
        act, recorded = actor(*arguments), taken.get(state.iteration + 1)
        if recorded is None:
            return act
        shape, numbers = recorded[rank()]
        actions = torch.frombuffer(bytearray(b64decode(numbers)), dtype=torch.float32).view(*shape)
        steps = iter(actions.unbind(1))

        def act_as_recorded(*seen: Any) -> Any:
            drawn, *sent, after = act(*seen)
            given = next(steps)[: len(drawn)].to(drawn)  # mirror images follow
            return (given, *(convert(given.cpu()) for _ in sent), after)

        return act_as_recorded

    collector.actor = replaying
