"""Start a run, or continue one, on one process or several ranks."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from surefoot.control.agent import Agent
from surefoot.control.environments.looped import MakeEnvironment
from surefoot.control.world import ControlWorld
from surefoot.core.rollout import World
from surefoot.core.seeding import as_found, prepare_gpu
from surefoot.errors import SurefootError
from surefoot.files import steps_named
from surefoot.ranks.collectives import exchange, from_first, on_first, rank, together, world_size
from surefoot.ranks.launching import choose_gpu, join_ranks, note, restarts
from surefoot.recipes.base import Recipe
from surefoot.recipes.callables import Functions, with_task
from surefoot.recipes.faults import value_of
from surefoot.recipes.presets import Origin
from surefoot.recipes.reading import make_recipe
from surefoot.recipes.rows import ROW_FIELDS
from surefoot.runs.api.loading import load
from surefoot.runs.callbacks import Callback, MetricsCallback, check_callbacks, metrics_listener
from surefoot.runs.factory import make_world, start_from, with_engine
from surefoot.runs.session import Session
from surefoot.runs.trackers.delivery import check_trackers
from surefoot.store import hub
from surefoot.store.checkpoint import latest_checkpoint
from surefoot.store.events import Listener
from surefoot.store.folder import RunFolder, check_free, check_unchanged, environment, table_differences, working_folder
from surefoot.store.reading import FINISHED, START
from surefoot.terminal import phase


@as_found
def start(
    recipe: Recipe,
    run_dir: Path | None,
    task: MakeEnvironment | None = None,
    callback: MetricsCallback | None = None,
    display: Listener | None = None,
    origin: Origin | None = None,
    functions: Functions | None = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    agent: Agent | None = None,
    rows: Sequence[Path] = (),
    profile: bool = False,
) -> Any:
    """Train a recipe from the beginning.

    task       makes the environments, if the recipe's task can't be imported
    origin     the settings that the recipe has from a preset
    functions  functions and classes that were passed as objects
    agent      the agent that the recipe's ``start`` stands for; it is saved there
    rows       files of rows that were passed as objects, which the recipe has in the run's folder

    ``callback``, ``callbacks``, ``display`` and ``profile`` are those of ``train``.

    Started by a launcher as several processes, these are the ranks of one run: all must call this with the same arguments.
    Raises SurefootError for what can't be trained.
    """
    # long because the order is the point: what can be rejected comes before the folder, and all ranks end a phase together
    join_ranks()
    with together():
        choose_gpu(recipe.device)
    prepare_gpu(recipe.device, recipe.deterministic)
    several = check_callbacks(callbacks)
    with together():
        check_trackers(recipe, run_dir)
    run_dir = from_first(run_dir)
    place = None if run_dir is None else run_dir.absolute()  # an environment may change the working folder
    if run_dir is not None and on_first(lambda: note(f"began {run_dir}") and (run_dir / "config.toml").is_file()):
        # and then a rank died
        if on_first(lambda: _is_finished(run_dir, recipe)):
            return load(run_dir)
        return continue_run(run_dir, lambda recipe: functions or {}, display, callback, several, task, agent)
    _check_same(recipe)
    recipe.check_ranks(world_size())
    main, folder, world = rank() == 0, None, None
    with together():
        if main and run_dir is not None:
            check_free(run_dir)  # before models are read
    asked = recipe.engine
    recipe, choice = with_engine(with_pinned_names(recipe))
    facts = environment(recipe, world_size()) if main and place is not None else {}
    try:
        with together():
            if main and place is not None and rows:
                folder = RunFolder.reserve(place, rows, run_dir)  # the world reads them there
        with together():
            world = _make_world(recipe, task, functions)
            start_from(world, agent)
            objects = with_task(functions, task)
            session = Session(recipe, world, None, _listeners(display, callback), several, objects, profile)
            session.opening = choice
            if asked == "auto" and isinstance(world, ControlWorld):
                session.use_eager = world.use_eager
        with together():
            if main and place is not None:  # last, so that a rejected recipe leaves no folder
                session.folder = folder = folder or RunFolder.reserve(place, shown=run_dir)
                _show_folder(world, folder)
                if agent is not None:
                    agent.save(place / START)
                note(f"began {run_dir}", "yes")
                folder.begin(recipe, None if origin is None else asdict(origin), facts)
        session.run()
        return world.result
    finally:
        if folder is not None:
            folder.discard()
        if world is not None:
            world.close()


@as_found
def continue_run(
    run_dir: Path,
    functions_of: Callable[[Recipe], Functions],
    display: Listener | None,
    callback: MetricsCallback | None,
    callbacks: Sequence[Callback],
    task: MakeEnvironment | None,
    agent: Agent | None = None,
    steps: int | None = None,
    allow_changes: bool = False,
) -> Any:
    """Continue the run in a folder: what it trains. The arguments are those of ``resume`` and ``start``."""
    folder, world = None, None
    try:
        with together():
            folder = RunFolder.open(run_dir) if rank() == 0 else None
        recipe, checkpoint, began_in = on_first(lambda: _to_continue(folder, steps, allow_changes))
        recipe.check_ranks(world_size())
        with together():
            choose_gpu(recipe.device)
            prepare_gpu(recipe.device, recipe.deterministic)
            functions = functions_of(recipe)
            objects = with_task(functions, task)
            if checkpoint is not None:
                check_unchanged(checkpoint, recipe, objects, allow_changes)
        try:
            with together():
                world = _make_world(recipe, task, functions)
        except SurefootError as error:
            if began_in in (None, os.getcwd()):
                raise
            where = f"relative paths are from {began_in}, where the run began: resume it there"
            raise SurefootError(f"{error}; {where}") from None
        with together():
            if checkpoint is None:
                start_from(world, agent)
            session = Session(recipe, world, folder, _listeners(display, callback), callbacks, objects)
            _show_folder(world, folder)
        if checkpoint is not None:
            session.restore(checkpoint, allow_changes)
        else:
            session.opening = (f"{run_dir}: was stopped before its first checkpoint, so it begins again at step 0",)
        if restarts():
            session.opening = (f"restart {restarts()}, because a rank died: all continue from step {session.state.steps:,}",)
        with together():
            if folder is not None:
                folder.write_recipe(recipe)
        session.run()
        return world.result
    finally:
        if folder is not None:
            folder.close()
        if world is not None:
            world.close()


def _check_same(recipe: Recipe) -> None:
    """Raise SurefootError, on every rank, if ranks have other recipes than the first."""
    if world_size() == 1:
        return
    tables = exchange(recipe.table)
    for number, table in enumerate(tables):
        if lines := table_differences(tables[0], table):
            more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
            raise SurefootError(
                f"ranks: the recipe of rank {number} differs from that of rank 0 ({'; '.join(lines[:3])}{more}); start all "
                "ranks with the same one"
            )


def _to_continue(folder: RunFolder | None, steps: int | None, allow_changes: bool) -> tuple[Recipe, Path | None, str | None]:
    """Recipe and latest checkpoint of a run that is resumed, and the working folder where it began.

    Raises SurefootError if the recipe or its code has changed since the checkpoint, before any of it runs.
    """
    assert folder is not None, "only rank 0 asks"
    recipe = folder.recipe()
    checkpoint = folder.latest(recipe)
    if steps is not None:
        recipe = make_recipe({**recipe.table, "steps": steps})
    if checkpoint is not None:
        check_unchanged(checkpoint, recipe, None, allow_changes)
    check_trackers(recipe, folder.path)
    return recipe, checkpoint, working_folder(folder.path)


def _is_finished(run_dir: Path, recipe: Recipe) -> bool:
    if recipe.kind != "control":
        return (run_dir / FINISHED).exists()
    latest = latest_checkpoint(run_dir / "checkpoints")
    return latest is not None and (steps_named(latest.name) or 0) >= recipe.steps


def _make_world(recipe: Recipe, task: MakeEnvironment | None, functions: Functions | None) -> World:
    torch.set_num_threads(recipe.threads)  # first: even the last bits of the initial weights depend on it
    with phase("making the environments" if recipe.kind == "control" else "loading models and data"):
        return make_world(recipe, task, functions=functions)


def _show_folder(world: World, folder: RunFolder | None) -> None:
    """Clips that people label are in the run's folder."""
    if isinstance(world, ControlWorld) and folder is not None:
        world.folder = folder.path


def _listeners(display: Listener | None, callback: MetricsCallback | None) -> list[Listener]:
    """A callback runs on every rank, as callbacks do; the display on the first."""
    return [*([display] if display and rank() == 0 else []), *([metrics_listener(callback)] if callback else [])]


def with_pinned_names(recipe: Recipe) -> Recipe:
    """The recipe with the commit of every ``hf://…`` in it, so that the resumed run reads the same rows, agent and model.

    Raises SurefootError if one can't be resolved.
    """
    return reduce(lambda changed, commit: changed.with_value(*commit), on_first(lambda: _commits(recipe)), recipe)


def _commits(recipe: Recipe) -> list[tuple[str, str]]:
    """The name with its commit of each field that names something on the hub."""
    names = {field: str(value_of(recipe, field)) for field in (*ROW_FIELDS, "start", "model")}
    names = {field: name for field, name in names.items() if hub.is_hub_name(name)}
    if names.keys() & set(ROW_FIELDS):
        from surefoot.language.data.sources.hub import pinned
    return [(field, pinned(name) if field in ROW_FIELDS else hub.pinned(name)) for field, name in names.items()]
