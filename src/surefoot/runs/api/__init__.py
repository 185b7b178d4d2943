"""The public verbs: train, resume, load, evaluate."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import torch

from surefoot.control.agent import Agent
from surefoot.control.environments.looped import MakeEnvironment
from surefoot.control.evaluate import EvaluationResult, evaluate_agent
from surefoot.core.algorithms import Objective
from surefoot.core.seeding import as_found
from surefoot.errors import SurefootError, in_python_words
from surefoot.files import as_path, check_flags
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.callables import take_objects
from surefoot.recipes.fields import KINDS
from surefoot.recipes.presets import resolve_recipe
from surefoot.runs.api.launch import continue_run, start
from surefoot.runs.api.loading import load, load_result
from surefoot.runs.api.objects import (
    Task,
    are_rows,
    functions_again,
    plain_fields,
    reject,
    rows_file,
    take_agent,
    take_rows,
    task_place,
    task_reference,
)
from surefoot.runs.callbacks import Callback, MetricsCallback, check_callbacks
from surefoot.runs.display import display_here
from surefoot.store import hub
from surefoot.store.events import Listener
from surefoot.store.folder import checkpoint_to_load, is_model, kind_of
from surefoot.terminal import visible

if TYPE_CHECKING:
    from surefoot.language.language_model import LanguageModel
    from surefoot.language.models.reward_model import RewardModel
    from surefoot.recipes.arguments import AgentTask, Arguments, ControlArguments, ModelTask, RewardModelTask

    class RunArguments(TypedDict, total=False):
        """The arguments of ``train`` besides a recipe's fields."""

        preset: str | None
        run_dir: str | Path | None
        callback: MetricsCallback | None
        callbacks: Callback | Sequence[Callback] | None
        display: Listener | bool | None
        profile: bool

    class AgentTraining(RunArguments, ControlArguments):
        """The keyword arguments of ``train`` for an agent."""

    class Training(RunArguments, Arguments):
        """The keyword arguments of ``train`` for any kind of recipe."""


__all__ = ["evaluate", "load", "load_result", "resume", "start", "train"]

Rows = str | Iterable[Mapping[str, Any]]
"""rows of data: a file, a folder or a data set on the hub; or the rows themselves"""
Display = Listener | bool | None
"""shows a run: a listener, True, False, or None, which is True in a terminal or notebook"""


Algorithm = Objective | str | None


@overload
def train(task: "AgentTask | MakeEnvironment", algorithm: Algorithm = None, **given: "Unpack[AgentTraining]") -> Agent: ...
@overload
def train(task: "ModelTask", algorithm: Algorithm = None, **given: "Unpack[Training]") -> "LanguageModel": ...
@overload
def train(task: "RewardModelTask", algorithm: Algorithm = None, **given: "Unpack[Training]") -> "RewardModel": ...
@overload
def train(task: str | Path, algorithm: Algorithm = None, **given: "Unpack[Training]") -> Any: ...
@in_python_words
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
    algorithm   a value such as ``PPO_CLIP`` or its name; default: that of the task's recipe
    preset      the preset for all other settings; default: the one tuned for the task. ``"none"``: the plain defaults
    run_dir     the run's folder; None writes nothing
    callback    called with each iteration's metrics; returning True stops the run
    callbacks   one ``surefoot.Callback`` or several, called at the start, evaluations, iterations, checkpoints and the end
    display     None: show the run if this is a terminal or a notebook; True: show it anywhere; False: show nothing; or a
                listener of your own, such as ``surefoot.runs.display.Lines("my run")``
    profile     measure where the seconds of an iteration go: a message at the end, and ``run_dir/profile``
    fields      the recipe's fields: ``steps=100_000, rollout={"environments": 4}``. Python objects in place of their names:
                functions in ``reward`` (also a list of functions and terms), ``network["custom"]`` and ``schedule``, an Agent
                in ``start``, rows (dicts or a Dataset) in ``data`` and every field that names rows. ``data`` alone, a file or
                rows, is ``data={"train": …}``

    Raises SurefootError for anything the user can fix, before training if possible.

    >>> agent = surefoot.train("CartPole-v1", surefoot.PPO_CLIP, steps=256, seed=1)
    >>> action, _ = agent.predict([0.0, 0.0, 0.0, 0.0], deterministic=True)
    >>> int(action) in (0, 1)
    True
    """
    check_flags(profile=profile)
    folder = None if run_dir is None else as_path(run_dir, "run_dir")
    fields, functions = take_objects(plain_fields(fields))
    fields, begin = take_agent(fields, run_dir)
    fields, rows = take_rows(fields, run_dir)
    resolved = resolve_recipe(task_reference(task), fields, algorithm, preset)
    title = f"{resolved.recipe.title}, seed {resolved.recipe.seed}" + ("" if folder is None else f" -> {folder}")
    shown = _display(display, title)
    made = None if isinstance(task, (str, Path)) else task
    return start(resolved.recipe, folder, made, callback, shown, resolved.origin, functions, callbacks, begin, rows, profile)


def _with_fields(signature: inspect.Signature) -> inspect.Signature:
    """The signature with a keyword for each field of a recipe instead of ``**fields``, for notebooks and ``help``."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    known = {name: field.annotation for kind in KINDS.values() for name, field in kind.model_fields.items()}
    others = (name for name in known if name not in ("kind", *signature.parameters))
    fields = [inspect.Parameter(name, keyword, default=None, annotation=known[name]) for name in others]
    return signature.replace(parameters=[*own, *fields])


train.__signature__ = _with_fields(inspect.signature(train))  # type: ignore[attr-defined]


@in_python_words
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

    A run that was stopped before its first checkpoint starts again from its recipe. With a linear schedule, extending changes
    the schedule from here on. With the same number of ranks it continues exactly; another number is allowed.
    A function or class that was passed to ``train`` as task, reward, network, schedule or symmetry is needed again in the same
    argument, unless it can be imported: ``task=make``, ``network={"custom": Net}``, ``optimizer={"schedule": function}``.
    Raises SurefootError when the folder is not a run, is in use, finished or damaged, or when its config.toml was changed since
    the checkpoint and ``allow_changes`` is False.

    >>> _ = surefoot.train("CartPole-v1", steps=256, run_dir="runs/short")
    >>> agent = surefoot.resume("runs/short", steps=512)
    >>> agent.recipe.steps
    512
    """
    join_ranks()
    check_flags(allow_changes=allow_changes)
    several = check_callbacks(callbacks)
    fields = {"reward": reward, "network": network, "optimizer": optimizer, "objective": objective, "rollout": rollout}
    run_dir, shown = as_path(run_dir, "run_dir"), _display(display, f"resuming {run_dir}")
    again = partial(functions_again, **fields)
    return continue_run(run_dir, again, shown, callback, several, task, steps=steps, allow_changes=allow_changes)


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
    reward: str | Sequence[str] = (),
) -> Any: ...
@in_python_words
@as_found
def evaluate(
    what: Any,
    task: Task | None = None,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    deterministic: bool | None = None,
    data: Rows | None = None,
    rows: int | None = None,
    reward: str | Sequence[str] = (),
) -> Any:
    """Evaluate an agent over whole episodes, or a model on held-out rows. The same seed gives the same result.

    what            an agent, a language or reward model that was trained or loaded, the folder of a run, or ``hf://org/name``
    task            agents: the task of the episodes; default: the one trained on
    episodes        agents: how many (20), of which ``seed`` (0) determines the resets
    deterministic   agents: greedy actions (the default); False: sampled
    data, rows      models: other rows than the recipe's held-out ones (a file, or dicts), and how many of them; ``seed`` is
                    that of the samples
    reward          models: terms, as in ``reward.terms``, that score the responses; default: those of an online run's recipe

    Returns an EvaluationResult for an agent, the metrics for a model (``held_out_reward``, …), and the report of
    ``surefoot evaluate --json`` for the folder of a language run.
    Raises SurefootError when there is nothing to evaluate, and for an argument of the other kind.

    >>> agent = surefoot.train("CartPole-v1", steps=256)
    >>> result = surefoot.evaluate(agent, episodes=3)
    >>> result.mean_return == sum(result.returns) / 3
    True
    """
    file: Any = str(rows_file(data, "data")) if are_rows(data) else data
    checkpoint: Path | None = None
    terms = (reward,) if isinstance(reward, str) else tuple(reward)
    if isinstance(what, (str, Path)):
        what = hub.local_folder(what)
        if is_model(what) or kind_of(what) != "control":
            reject(task=task, episodes=episodes, deterministic=deterministic)
            from surefoot.language.analysis.evaluate import evaluate_run

            return evaluate_run(what, data=file, rows=rows, seed=seed, reward=terms)
        checkpoint = checkpoint_to_load(what)
        what = load(checkpoint)
    if isinstance(what, Agent):
        reject(data=file, rows=rows, reward=terms or None)
        torch.set_num_threads(what.recipe.threads)  # even the last bits of an action depend on it
        place = str(task) if isinstance(task, Path) else task or what.recipe.task
        arguments = what.recipe.environment if task_place(place) == task_place(what.recipe.task) else {}
        many, greedy = 20 if episodes is None else episodes, True if deterministic is None else deterministic
        played = evaluate_agent(what, place, arguments, many, 0 if seed is None else seed, greedy)
        return played if checkpoint is None else replace(played, checkpoint=str(checkpoint))
    if not hasattr(what, "recipe"):
        raise SurefootError(f"{what!r}: is not an agent, model or run; load one with surefoot.load(RUN)")
    reject(task=task, episodes=episodes, deterministic=deterministic)
    from surefoot.language.analysis.evaluate import evaluate_model

    return evaluate_model(what, data=file, rows=rows, seed=seed, reward=terms)


def _display(display: Display, title: str) -> Listener | None:
    if callable(display):
        return display
    if display is not None:
        check_flags(display=display)
    return None if display is False else display_here(visible(title), always=display is True)
