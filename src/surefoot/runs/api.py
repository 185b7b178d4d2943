"""The public verbs: train, resume, load, evaluate."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_type_hints, overload

import torch

from surefoot.control.agent import Agent
from surefoot.control.environments.looped import MakeEnvironment
from surefoot.control.evaluate import EvaluationResult, evaluate_agent
from surefoot.control.world import ControlWorld
from surefoot.core.algorithms import Objective
from surefoot.core.distributed import exchange, from_first, on_first, rank, together, world_size
from surefoot.core.ranks import choose_gpu, join_ranks, note, restarts
from surefoot.core.rollout import World
from surefoot.core.steps.programs import no_compiler
from surefoot.errors import SurefootError
from surefoot.files import steps_named
from surefoot.recipes.arguments import (
    AgentTask,
    Arguments,
    ControlArguments,
    ModelTask,
    RewardModelTask,
)
from surefoot.recipes.base import Recipe, Section
from surefoot.recipes.callables import Functions, check_functions, take_objects
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.presets import Origin, resolve_recipe
from surefoot.recipes.reading import make_recipe, named_functions, to_table
from surefoot.recipes.rows import with_row_fields
from surefoot.recipes.supervised import SupervisedRecipe
from surefoot.runs import hub
from surefoot.runs.callbacks import Callback, MetricsCallback, check_callbacks, metrics_listener
from surefoot.runs.checkpoint import latest_checkpoint, load_checkpoint, require
from surefoot.runs.display import display_here
from surefoot.runs.events import Listener
from surefoot.runs.folder import (
    ROWS,
    RunFolder,
    check_free,
    checkpoint_to_load,
    environment,
    is_model,
    kind_of,
    table_differences,
)
from surefoot.runs.reading import FINISHED
from surefoot.runs.session import Session
from surefoot.runs.trackers.delivery import check_trackers
from surefoot.terminal import visible

if TYPE_CHECKING:
    from surefoot.language.models.language_model import LanguageModel
    from surefoot.language.models.reward_model import RewardModel

Task = str | MakeEnvironment
START = "start"
"""the folder in a run of the agent that it started from, if that was passed as an object"""
Rows = str | Iterable[Mapping[str, Any]]
"""rows of data: a file, a folder or a data set on the hub; or the rows themselves"""
Display = Listener | bool | None
"""shows a run: a listener, True, False, or None, which is True in a terminal or notebook"""


class RunArguments(TypedDict, total=False):
    """The arguments of ``train`` besides a recipe's fields."""

    preset: str | None
    run_dir: str | Path | None
    callback: MetricsCallback | None
    callbacks: Callback | Sequence[Callback] | None
    display: Display
    profile: bool


class AgentTraining(RunArguments, ControlArguments):
    """The keyword arguments of ``train`` for an agent."""


class Training(RunArguments, Arguments):
    """The keyword arguments of ``train`` for any kind of recipe."""


Algorithm = Objective | str | None


@overload
def train(task: AgentTask | MakeEnvironment, algorithm: Algorithm = None, **arguments: Unpack[AgentTraining]) -> Agent: ...
@overload
def train(task: ModelTask, algorithm: Algorithm = None, **arguments: Unpack[Training]) -> "LanguageModel": ...
@overload
def train(task: RewardModelTask, algorithm: Algorithm = None, **arguments: Unpack[Training]) -> "RewardModel": ...
@overload
def train(task: str, algorithm: Algorithm = None, **arguments: Unpack[Training]) -> Any: ...
def train(
    task: Task,
    algorithm: Objective | str | None = None,
    *,
    preset: str | None = None,
    run_dir: str | Path | None = None,
    callback: MetricsCallback | None = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    display: Display = None,
    profile: bool = False,
    **fields: Any,
) -> Any:
    """Train an agent or a language model, and return it.

    task        a Gymnasium id, ``"module:function"``, or a callable that makes a gymnasium.Env; or the name of a recipe
                (``"sft"``, ``"reward"``, ``"dpo"``, ``"language"``), or a ``.toml`` file
    algorithm   a value such as ``PPO_CLIP`` or its name; default: what the task's recipe says. A named algorithm has its own
                switches and all other settings of the task's preset; a value of your own is taken as it stands
    preset      the preset for all other settings; default: the one tuned for the task. ``"none"``: the plain defaults
    run_dir     the run's folder; None writes nothing
    callback    called with each iteration's metrics; returning True stops the run
    callbacks   one ``surefoot.Callback`` or several, called at the start, evaluations, iterations, checkpoints and the end
    display     None: show the run if this is a terminal or a notebook; True: show it anywhere; False: show nothing; or a
                listener of your own, such as ``surefoot.runs.display.Lines("my run")``
    profile     measure where the seconds of an iteration go: a message at the end, and ``run_dir/profile``
    fields      the recipe's fields: ``steps=100_000, seed=1, rollout={"environments": 4}``. ``reward`` may be a function, or a
                list of functions and terms; a term's ``function`` may be one too. ``network["custom"]`` may be a class or
                function that makes a network, and ``schedule`` in ``optimizer`` and ``trust_region`` a function; ``start`` may
                be an Agent; ``data``, and every field that names rows, may be the rows themselves: dicts, or a Dataset.
                ``data`` alone, a file or rows, is ``data={"train": …}``

    Raises SurefootError for anything the user can fix, before training if possible.

    >>> agent = surefoot.train("CartPole-v1", surefoot.PPO_CLIP, steps=256, seed=1)
    >>> action, _ = agent.predict([0.0, 0.0, 0.0, 0.0], deterministic=True)
    >>> int(action) in (0, 1)
    True
    """
    fields, functions = take_objects(_tables(fields))
    fields, begin = _take_agent(fields, run_dir)
    fields, rows = _take_rows(fields, run_dir)
    resolved = resolve_recipe(_name(task), fields, algorithm, preset)
    folder = None if run_dir is None else Path(run_dir)
    title = f"{resolved.recipe.title}, seed {resolved.recipe.seed}" + ("" if folder is None else f" -> {folder}")
    shown = _display(display, title)
    made = None if isinstance(task, str) else task
    return start(resolved.recipe, folder, made, callback, shown, resolved.origin, functions, callbacks, begin, rows, profile)


def _with_fields(signature: inspect.Signature) -> inspect.Signature:
    """The signature with a keyword for each field of a recipe instead of ``**fields``, for notebooks and ``help``."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    fields = [
        inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in get_type_hints(Arguments).items()
    ]
    return signature.replace(parameters=[*own, *fields])


train.__signature__ = _with_fields(inspect.signature(train))  # type: ignore[attr-defined]


@contextmanager
def same_working_folder() -> Iterator[None]:
    """Return to the working folder in the end: an environment may change it."""
    home = None
    with suppress(OSError):  # it was removed
        home = os.getcwd()
    try:
        yield
    finally:
        if home is not None:
            os.chdir(home)


@same_working_folder()
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
    several = check_callbacks(callbacks)
    with together():
        check_trackers(recipe, run_dir)
    run_dir = from_first(run_dir)
    place = None if run_dir is None else run_dir.absolute()  # an environment may change the working folder
    if run_dir is not None and on_first(lambda: note(f"began {run_dir}")):  # and then a rank died
        if on_first(lambda: _is_finished(run_dir, recipe)):
            return load(run_dir)
        return _continue(run_dir, lambda recipe: functions or {}, display, callback, several, task, agent)
    _check_same(recipe)
    recipe.check_ranks(world_size())
    main, folder, world = rank() == 0, None, None
    with together():
        if main and run_dir is not None:
            check_free(run_dir)  # before models are read
    asked = recipe.engine
    recipe, choice = with_engine(make_recipe(on_first(lambda: to_table(with_pinned_data(recipe)))))
    facts = environment(recipe) if main and place is not None else {}
    try:
        with together():
            if main and place is not None and rows:
                folder = RunFolder.reserve(place, rows, run_dir)  # the world reads them there
        with together():
            world = _make_world(recipe, task, functions)
            start_from(world, agent)
            session = Session(recipe, world, None, _listeners(display, callback), several, functions, profile)
            session.opening = choice
            if asked == "auto" and isinstance(world, ControlWorld):
                session.use_eager = world.use_eager
        with together():
            if main and place is not None:  # last, so that a rejected recipe leaves no folder
                session.folder = folder = folder or RunFolder.reserve(place, shown=run_dir)
                folder.begin(recipe, None if origin is None else asdict(origin), facts)
                if agent is not None:
                    agent.save(place / START)
                note(f"began {run_dir}", "yes")
        session.run()
        return world.result
    finally:
        if folder is not None:
            folder.discard()
        if world is not None:
            world.close()


def resume(
    run_dir: str | Path,
    *,
    steps: int | None = None,
    allow_changes: bool = False,
    task: MakeEnvironment | None = None,
    reward: Any = None,
    network: Any = None,
    optimizer: Any = None,
    objective: Any = None,
    rollout: Any = None,
    callback: MetricsCallback | None = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    display: Display = None,
) -> Any:
    """Continue an interrupted run as if it had not stopped, or extend a finished one to ``steps``.

    A run that was stopped before its first checkpoint starts again from its recipe. With a linear schedule, extending
    changes the schedule from here on. ``display`` is that of ``train``.
    A run whose task, reward, network, schedule or symmetry was passed to ``train`` as a function or class needs it again in
    the same argument, unless it can be imported: ``task=make``, ``reward=function``, ``network={"custom": Net}``,
    ``optimizer={"schedule": function}``, ``rollout={"symmetry": function}``.
    Raises SurefootError when the folder is not a run, is in use, is finished, is damaged, or when its config.toml was changed
    since the checkpoint and ``allow_changes`` is False.
    A run may be resumed with another number of ranks. With the same number it continues exactly.

    >>> _ = surefoot.train("CartPole-v1", steps=256, run_dir="runs/short")
    >>> agent = surefoot.resume("runs/short", steps=512)
    >>> agent.recipe.steps
    512
    """
    join_ranks()
    several = check_callbacks(callbacks)
    fields = {"reward": reward, "network": network, "optimizer": optimizer, "objective": objective, "rollout": rollout}
    run_dir, shown = Path(run_dir), _display(display, f"resuming {run_dir}")
    again = partial(_functions_again, **fields)
    return _continue(run_dir, again, shown, callback, several, task, steps=steps, allow_changes=allow_changes)


@same_working_folder()
def _continue(
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
        recipe, checkpoint, began_in = on_first(lambda: _to_continue(folder, steps))
        recipe.check_ranks(world_size())
        with together():
            choose_gpu(recipe.device)
            functions = functions_of(recipe)
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
            session = Session(recipe, world, folder, _listeners(display, callback), callbacks, functions)
        if checkpoint is not None:
            session.restore(checkpoint, allow_changes)
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
    tables = exchange(to_table(recipe))
    for number, table in enumerate(tables):
        if lines := table_differences(tables[0], table):
            more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
            raise SurefootError(
                f"ranks: the recipe of rank {number} differs from that of rank 0 ({'; '.join(lines[:3])}{more}); start all "
                "ranks with the same one"
            )


def _to_continue(folder: RunFolder | None, steps: int | None) -> tuple[Recipe, Path | None, str | None]:
    """Recipe and latest checkpoint of a run that is resumed, and the working folder where it began."""
    assert folder is not None, "only rank 0 asks"
    recipe = folder.recipe()
    if steps is not None:
        recipe = make_recipe({**to_table(recipe), "steps": steps})
    check_trackers(recipe, folder.path)
    return recipe, folder.latest(), folder.began_in


def _is_finished(run_dir: Path, recipe: Recipe) -> bool:
    if recipe.kind != "control":
        return (run_dir / FINISHED).exists()
    latest = latest_checkpoint(run_dir / "checkpoints")
    return latest is not None and (steps_named(latest.name) or 0) >= recipe.steps


def start_from(world: World, agent: Agent | None = None) -> None:
    """Give a new agent the weights that its recipe, or the caller, says that it starts from."""
    if isinstance(world, ControlWorld) and (agent is not None or world.recipe.start is not None):
        world.start_from(agent)


def _take_agent(fields: dict[str, Any], run_dir: str | Path | None) -> tuple[dict[str, Any], Agent | None]:
    """The fields with the place where an agent that is passed as ``start`` will be saved, and that agent."""
    agent = fields.get("start")
    if not isinstance(agent, Agent):
        return fields, None
    return {**fields, "start": None if run_dir is None else str(Path(run_dir) / START)}, agent


def _make_world(recipe: Recipe, task: MakeEnvironment | None, functions: Functions | None) -> World:
    torch.set_num_threads(recipe.threads)  # first: even the last bits of the initial weights depend on it
    return make_world(recipe, task, functions=functions)


def _functions_again(recipe: Recipe, **fields: Any) -> dict[str, Callable[..., Any]]:
    """The functions and classes in fields that ``train`` got as well.

    Raises SurefootError for another function than the recipe names, and for anything but functions in a table.
    """
    passed = {name: value for name, value in fields.items() if value is not None}
    taken, functions = take_objects(_tables(passed))
    check_functions(functions, named_functions(recipe))
    for field in (field for name in sorted(taken.keys() - {"reward"}) for field in _leaves(taken[name], name)):
        if field not in functions:
            raise SurefootError(
                f"{field}: only functions and classes that train got are passed again; change other settings in config.toml, "
                "and set allow_changes=True"
            )
    return functions


def _leaves(value: Any, field: str) -> Iterator[str]:
    """The dotted names of all values in nested tables."""
    if not isinstance(value, Mapping):
        yield field
        return
    for name, part in value.items():
        yield from _leaves(part, f"{field}.{name}")


def _display(display: Display, title: str) -> Listener | None:
    if callable(display):
        return display
    return None if display is False else display_here(visible(title), always=display is True)


def _listeners(display: Listener | None, callback: MetricsCallback | None) -> list[Listener]:
    """A callback runs on every rank, as callbacks do; the display on the first."""
    return [*([display] if display and rank() == 0 else []), *([metrics_listener(callback)] if callback else [])]


def make_world(
    recipe: Recipe,
    task: Callable[..., Any] | None = None,
    environments: int | None = None,
    functions: Functions | None = None,
) -> World:
    """The world of a recipe. For control, ``task`` makes the environments if the recipe's task can't be imported, and
    ``environments`` limits their number, to inspect a recipe without training. ``functions`` are the rewards, or the network,
    that were passed as objects.
    """
    if isinstance(recipe, ControlRecipe):
        return ControlWorld(recipe, task, environments, functions)
    if isinstance(recipe, LanguageRecipe):
        from surefoot.language.online.world import LanguageWorld

        return LanguageWorld(recipe, functions)
    assert isinstance(recipe, SupervisedRecipe)
    from surefoot.language.supervised.world import SupervisedWorld

    return SupervisedWorld(recipe)


def with_engine(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the engine that "auto" stands for, which a resumed run keeps; and a line with the reason, unless it is
    eager in control as in most runs. Without a compiler on one of the ranks it is eager too.
    """
    if recipe.engine != "auto":
        return recipe, ()
    engine, reason = recipe.engine_choice()
    shown = engine == "compiled" or recipe.kind != "control"  # where "auto" was asked for
    if engine == "compiled" and (obstacles := [obstacle for obstacle in exchange(no_compiler()) if obstacle]):
        engine, reason = "eager", f"{obstacles[0]}; with one, this run would be compiled, and faster"
    return make_recipe({**to_table(recipe), "engine": engine}), (f"engine: {engine} ({reason})",) if shown else ()


def with_pinned_data(recipe: Recipe) -> Recipe:
    """The recipe with the commit of every ``hf://…`` in it, so that the resumed run reads the same rows, agent and model.

    Raises SurefootError if one can't be resolved.
    """

    def with_commit(field: str, name: Any) -> Any:
        if not hub.is_hub_name(str(name)):
            return name
        from surefoot.language.data.sources.hub import pinned

        return pinned(name)

    table = with_row_fields(to_table(recipe), with_commit)
    for name in ("start", "model"):
        if hub.is_hub_name(str(table.get(name))):
            table[name] = hub.pinned(table[name])
    return make_recipe(table)


def _take_rows(fields: dict[str, Any], run_dir: str | Path | None) -> tuple[dict[str, Any], list[Path]]:
    """The fields with paths in place of rows that were passed as objects, and the files that have these rows.

    The paths are those of copies in the run's folder, or the files themselves without one.
    """
    files: list[Path] = []

    def named(field: str, value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if not _are_rows(value):
            return value
        files.append(_rows_file(value, field))
        return str(files[-1] if run_dir is None else Path(run_dir) / ROWS / files[-1].name)

    data = fields.get("data")
    if _are_rows(data) or isinstance(data, str):
        fields = {**fields, "data": {"train": data}}
    return with_row_fields(fields, named), files


def _are_rows(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, os.PathLike))


def _rows_file(rows: Any, field: str) -> Path:
    """A file with rows that were passed as objects, which exists as long as this process."""
    from surefoot.language.data.sources import process_folder, save_rows

    return save_rows(rows, process_folder(), field)


def load_result(parts: dict[str, Any], where: Path, trust_remote_code: bool = False, network: Any = None) -> Any:
    """The agent or language model in the parts of a checkpoint. ``network`` is that of ``load``.

    Raises SurefootError when the parts hold neither, or don't fit each other.
    """
    require(parts, ("agent", "recipe"), where)
    if parts["recipe"].get("kind", "control") == "control":
        from surefoot.control.agent import Agent

        return Agent.from_parts(parts, where, _functions_again(make_recipe(parts["recipe"]), network=network))
    _reject(network=network)
    from surefoot.language.models.language_model import from_parts

    return from_parts(parts, where, trust_remote_code)


def load(folder: str | Path, *, trust_remote_code: bool = False, network: Any = None) -> Any:
    """Load the agent or language model in a folder: a saved one, a checkpoint, or a run (its best checkpoint, else its latest).

    folder              or the name of one on the hub, ``hf://org/name`` or ``hf://org/name@revision``
    trust_remote_code   allow the custom code of an adapter's base model
    network             ``{"custom": Net}`` if an agent's network was passed to ``train`` as an object and can't be imported

    Raises SurefootError when there is none, or when a file is damaged. Pickles are never read.

    >>> surefoot.train("CartPole-v1", steps=256).save("cartpole")
    >>> surefoot.load("cartpole").recipe.task
    'CartPole-v1'
    """
    path = hub.local_folder(folder)
    if is_model(path):
        from surefoot.language.models.language_model import load_saved

        return load_saved(path, trust_remote_code)
    checkpoint = checkpoint_to_load(path)
    return load_result(load_checkpoint(checkpoint), checkpoint, trust_remote_code, network)


@overload
def evaluate(
    what: Agent, task: Task | None = None, *, episodes: int = 20, seed: int | None = None, deterministic: bool = True
) -> EvaluationResult: ...
@overload
def evaluate(
    what: "LanguageModel | RewardModel", *, data: Rows | None = None, rows: int | None = None, seed: int | None = None
) -> dict[str, Any]: ...
@overload
def evaluate(
    what: str | Path,
    task: Task | None = None,
    *,
    episodes: int = 20,
    seed: int | None = None,
    deterministic: bool = True,
    data: Rows | None = None,
    rows: int | None = None,
) -> Any: ...
def evaluate(
    what: Any,
    task: Task | None = None,
    *,
    episodes: int = 20,
    seed: int | None = None,
    deterministic: bool = True,
    data: Rows | None = None,
    rows: int | None = None,
) -> Any:
    """Evaluate an agent over whole episodes, or a model on held-out rows. The same seed gives the same result.

    what            an agent, a language or reward model that was trained or loaded, the folder of a run, or ``hf://org/name``
    task            agents: the task of the episodes; default: the one trained on
    episodes        agents: how many, of which ``seed`` (default 0) determines the resets
    deterministic   agents: greedy actions; False: sampled
    data, rows      models: other rows than the recipe's held-out ones (a file, or dicts), and how many of them; ``seed`` is
                    that of the samples

    Returns an EvaluationResult for an agent, the metrics for a model (``held_out_reward``, …), and the report of
    ``surefoot evaluate --json`` for the folder of a language run.
    Raises SurefootError when there is nothing to evaluate, and for an argument of the other kind.

    >>> agent = surefoot.train("CartPole-v1", steps=256)
    >>> result = surefoot.evaluate(agent, episodes=3)
    >>> result.mean_return == sum(result.returns) / 3
    True
    """
    file: Any = str(_rows_file(data, "data")) if _are_rows(data) else data
    if isinstance(what, (str, Path)):
        what = hub.local_folder(what)
        if is_model(what) or kind_of(what) != "control":
            _reject(task=task)
            from surefoot.language.analysis.evaluate import evaluate_run

            return evaluate_run(what, data=file, rows=rows, seed=seed)
        what = load(what)
    if isinstance(what, Agent):
        _reject(data=file, rows=rows)
        same = task is None or _place(task) == _place(what.recipe.task)
        arguments = what.recipe.environment if same else {}
        return evaluate_agent(what, task or what.recipe.task, arguments, episodes, seed or 0, deterministic)
    if not hasattr(what, "recipe"):
        raise SurefootError(f"{what!r}: is not an agent, model or run; load one with surefoot.load(RUN)")
    _reject(task=task)
    from surefoot.language.analysis.evaluate import evaluate_model

    return evaluate_model(what, data=file, rows=rows, seed=seed)


def _reject(**arguments: Any) -> None:
    """Raise SurefootError for an argument that is for agents if there is a model, or the other way round."""
    agent, model = "an agent, evaluated over episodes", "a model, evaluated on held-out rows"
    kinds = {"data": agent, "rows": agent, "task": model, "network": "a language model, not an agent"}
    for name, value in arguments.items():
        if value is not None:
            raise SurefootError(f"{name}={value!r}: this is {kinds[name]}; leave it out")


def _name(task: Task) -> str:
    """A callable's name as a recipe writes it, ``module:qualified.name``; a string is its own."""
    if isinstance(task, str):
        return task
    if not callable(task):
        raise SurefootError(
            f"task={task!r}: is not a task; give a Gymnasium id, 'module:function', or a function that makes an environment"
        )
    return f"{task.__module__}:{getattr(task, '__qualname__', type(task).__qualname__)}"


def _place(task: Task) -> tuple[str, str]:
    """The file and name behind a task, equal for a class, ``file.py:Class`` and ``file:Class``; an id has itself as name.

    Nothing is imported: the recipe of an agent from elsewhere may name code that was not asked for.
    """
    module, _, name = _name(task).rpartition(":")
    if isinstance(task, str):
        file = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    else:
        file = getattr(sys.modules.get(module), "__file__", None) or module
    return str(Path(file).resolve()) if module else "", name


def _tables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as recipe tables; sections and objectives may be values too."""
    plain = dict(fields)
    for key, value in fields.items():
        if isinstance(value, Section):
            plain[key] = value.model_dump(exclude_unset=True)
        elif isinstance(value, Objective):
            plain[key] = asdict(value)
        elif isinstance(value, os.PathLike):
            plain[key] = os.fspath(value)
    return plain
