"""A training loop of one's own: the parts of a run, without the run."""

from pathlib import Path
from typing import Any

import torch

from surefoot.core.algorithms import Objective
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import Credit, LearnerState, Metrics, Policy, Rollout
from surefoot.core.seeding import prepare_gpu
from surefoot.errors import SurefootError, in_python_words
from surefoot.files import as_path, made_from
from surefoot.recipes.callables import take_objects, with_task
from surefoot.recipes.presets import resolve_recipe
from surefoot.runs.api.launch import with_pinned_names
from surefoot.runs.api.objects import Task, plain_fields, take_agent, take_rows, task_reference
from surefoot.runs.factory import make_learner, make_world, start_from, with_engine
from surefoot.runs.session.arithmetic import arithmetic
from surefoot.store.checkpoint import load_checkpoint, require, save_checkpoint
from surefoot.store.folder import recipe_differences
from surefoot.store.source import kept_by, source_differences, sources_of


class Loop:
    """What a recipe trains, for a loop of your own: ``while not loop.done: loop.update(loop.collect())``.

    The arguments are those of ``surefoot.train`` that describe a recipe. The loop writes nothing unless ``save`` is called,
    and evaluates nothing. One with the same recipe and the same calls gives the same numbers; so does one that was saved and
    loaded in between. PyTorch's number of threads becomes that of the recipe.

    Raises SurefootError for a recipe that can't be trained.

    >>> loop = surefoot.Loop("CartPole-v1", steps=512)
    >>> while not loop.done:
    ...     metrics = loop.update(loop.collect())
    >>> action, _ = loop.result.predict([0.0, 0.0, 0.0, 0.0])
    """

    @in_python_words
    def __init__(
        self, task: Task, algorithm: Objective | str | None = None, *, preset: str | None = None, **fields: Any
    ) -> None:
        fields, functions = take_objects(plain_fields(fields))
        fields, agent = take_agent(fields, None)
        fields, _ = take_rows(fields, None)
        self.recipe, _ = with_engine(with_pinned_names(resolve_recipe(task_reference(task), fields, algorithm, preset).recipe))
        prepare_gpu(self.recipe.device, self.recipe.deterministic)
        torch.set_num_threads(self.recipe.threads)  # first: even the last bits of the initial weights depend on it
        made = None if isinstance(task, (str, Path)) else task
        self._objects = with_task(functions, made)
        self._world = make_world(self.recipe, made, functions=functions)
        self._code = kept_by(self._world, self._objects)
        start_from(self._world, agent)
        self.learner = make_learner(self.recipe, self._world.policy, self._objects)
        self.learner.auxiliary_loss = self._world.auxiliary_loss
        self.state = LearnerState.seeded(self.recipe.seed, self.recipe.steps)
        """counts, coefficients and random generators"""

    @property
    def policy(self) -> Policy:
        """The policy, an ``nn.Module``: ``policy(rollout.inputs, rollout.actions, rollout.mask)`` scores actions."""
        return self._world.policy

    @property
    def result(self) -> Any:
        """The agent or model that ``train`` would return, with the present weights."""
        return self._world.result

    @property
    def done(self) -> bool:
        """Whether the budget, ``steps``, is spent."""
        return self.state.steps >= self.state.total_steps

    def collect(self) -> Rollout:
        """Sample with the policy: the next steps of the environments, or responses to the next prompts with their rewards."""
        with arithmetic(self.recipe), self.learner.resting():
            return self._world.collector.collect(self.state)

    def update(self, rollout: Rollout, credit: Credit | None = None) -> Metrics:
        """Update the policy on a rollout, which may be changed by ``dataclasses.replace``, and return metrics.

        credit   the advantages and returns; default: those of the recipe's objective, from the rollout's rewards

        Raises NotFiniteError if a loss or gradient is not finite; the policy then stays as it is.
        """
        with arithmetic(self.recipe):
            credit = assign_credit(rollout, self.learner.objective) if credit is None else credit
            metrics = {**rollout.metrics, **self.learner.update(rollout, credit, self.state)}
        self.count(rollout)
        return metrics

    def count(self, rollout: Rollout) -> None:
        """Count a rollout to the budget; ``update`` does that."""
        self.state.steps += rollout.steps
        self.state.iteration += 1

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, which ``load`` continues from exactly, and ``surefoot.load`` reads the agent of."""
        save_checkpoint(
            as_path(folder, "folder"),
            {
                **self._world.checkpoint_parts(),
                "recipe": self.recipe.table,
                "learner": self.learner.state_dict(),
                "collector": self._world.collector.state_dict(),
                "state": self.state.state_dict(),
                "code": sources_of(self.recipe.table, self._objects),
                "attributes": self._code.changed(),
            },
        )

    def load(self, folder: str | Path) -> list[str]:
        """Continue from a checkpoint of a loop with this recipe; return one line for each thing that is not restored exactly.

        Raises SurefootError for a checkpoint that is damaged, or of another recipe or other code.
        """
        path = as_path(folder, "folder").absolute()
        parts = load_checkpoint(path)
        require(parts, ("agent", "recipe", "state", "learner", "collector", "code", "attributes"), path)
        with made_from(path):
            changed = recipe_differences(parts["recipe"], self.recipe)
            changed += source_differences(parts["code"], [Path.cwd()], self._objects)
            if changed:
                raise SurefootError(f"{path}: was saved by another loop ({'; '.join(changed)}); repeat its recipe and code")
            lines = self._world.load(parts, path, allow_changes=False) + self._code.lost(parts["attributes"])
            self.learner.load_state_dict(parts["learner"])
            self.state.load_state_dict(parts["state"])
        return lines

    def close(self) -> None:
        """Close the environments and other processes."""
        self._world.close()
