"""Load an agent or a language model."""

from pathlib import Path
from typing import Any

from surefoot.core.seeding import as_found
from surefoot.errors import in_python_words
from surefoot.files import as_path, check_flags
from surefoot.recipes.reading import make_recipe
from surefoot.runs.api.objects import functions_again, reject
from surefoot.store import hub
from surefoot.store.checkpoint import load_checkpoint, require
from surefoot.store.folder import checkpoint_to_load, is_model, working_folder


def load_result(parts: dict[str, Any], where: Path, trust_remote_code: bool = False, network: Any = None) -> Any:
    """The agent or language model in the parts of a checkpoint. ``network`` is that of ``load``.

    Raises SurefootError when the parts hold neither, or don't fit each other.
    """
    require(parts, ("agent", "recipe"), where)
    if parts["recipe"].get("kind", "control") == "control":
        from surefoot.control.agent import Agent

        if isinstance(task := parts["recipe"].get("task"), str):
            parts = {**parts, "recipe": {**parts["recipe"], "task": task_from_here(task, where)}}
        return Agent.from_parts(parts, where, functions_again(make_recipe(parts["recipe"]), network=network))
    reject(network=network)
    from surefoot.language.language_model import from_parts

    return from_parts(parts, where, trust_remote_code)


def task_from_here(task: str, checkpoint: Path) -> str:
    """A run's task; with its full path, if its file is not here but where the run began."""
    file, _, name = task.rpartition(":")
    if not file.endswith(".py") or Path(file).is_file() or (began_in := working_folder(checkpoint.parent.parent)) is None:
        return task
    there = Path(began_in) / file
    return f"{there}:{name}" if there.is_file() else task


@in_python_words
@as_found
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
    check_flags(trust_remote_code=trust_remote_code)
    path = hub.local_folder(as_path(folder, "folder"))
    if is_model(path):
        from surefoot.language.language_model import load_saved

        return load_saved(path, trust_remote_code)
    checkpoint = checkpoint_to_load(path)
    return load_result(load_checkpoint(checkpoint), checkpoint, trust_remote_code, network)
