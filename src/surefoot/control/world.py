"""Control's side of a run: environments, agent, collector, and how the agent is judged."""

from pathlib import Path
from typing import Any

from surefoot.control.agent import Agent
from surefoot.control.arithmetic import arithmetic
from surefoot.control.collect import ControlCollector
from surefoot.control.environments.backends import training_environments
from surefoot.control.environments.looped import MakeEnvironment, task_name
from surefoot.control.evaluate import evaluate_agent
from surefoot.control.replay import origin
from surefoot.control.spaces import MASK
from surefoot.core.distributed import check_device, world_size
from surefoot.core.rollout import EvaluationReport, Rollout
from surefoot.recipes.control import ControlRecipe
from surefoot.runs.checkpoint import load_weights


class ControlWorld:
    """What a recipe of kind "control" is made of. ``task`` replaces the recipe's where it is a callable; ``count``, which is
    for looking at a recipe and not for training by it, the number of its environments.
    """

    exports_model = False
    auxiliary_loss = None
    model_summary = ()

    def __init__(self, recipe: ControlRecipe, task: MakeEnvironment | None = None, count: int | None = None) -> None:
        check_device(recipe.device)
        self.recipe = recipe
        self.warnings: list[str] = []
        self.task: str | MakeEnvironment = task or recipe.task
        rollout = recipe.rollout
        self.environments = training_environments(self.task, recipe, count)
        try:
            spaces = (self.environments.observation_space, self.environments.action_space)
            self.agent = Agent.for_spaces(recipe, *spaces, task_name(self.task))
            self.policy = self.agent.policy
            steps = None if recipe.objective.needs_whole_episodes else rollout.steps
            self.collector = ControlCollector(
                self.environments,
                self.agent,
                steps,
                rollout.episodes,
                rollout.at_least,
                compiled=recipe.engine == "compiled" and world_size() == 1,
            )
            self.agent.masked = MASK in self.collector.observations
        except BaseException:
            self.environments.close()  # nobody else could: no process is left behind
            raise

    @property
    def result(self) -> Agent:
        """The agent."""
        return self.agent

    def arithmetic(self) -> list[str]:
        """Parameter counts and the batch arithmetic."""
        count = sum(p.numel() for p in self.policy.parameters())
        critic = sum(p.numel() for p in self.policy.critic_parameters())
        return [f"parameters: {count:,} in all, {critic:,} of them in a separate critic", *arithmetic(self.recipe)]

    def trees(self) -> dict[str, Any]:
        """What a checkpoint holds of the trained thing itself."""
        return self.agent.trees()

    def load(self, trees: dict[str, Any], where: Path) -> list[str]:
        """Take the agent's weights and the environments' places from a checkpoint; what could not be restored exactly."""
        load_weights(self.agent, trees["agent"], where)
        self.collector.load_state_dict(trees["collector"])
        lost = self.collector.lost
        if not lost:
            return []
        return [
            f"environments {lost} of {task_name(self.task)} did not replay to the same observation: their episodes begin "
            "anew, so this resume is not exact"
        ]

    def evaluate(self) -> EvaluationReport | None:
        """Mean greedy return."""
        settings = self.recipe.evaluation
        if not settings.episodes:
            return None
        judged = evaluate_agent(self.agent, self.task, self.recipe.environment, settings.episodes, settings.seed)
        return EvaluationReport(judged.mean_return, {"evaluation_return": judged.mean_return})

    def describe(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """Where they come from, so that they can be replayed, and drawn then: ``surefoot watch RUN --traced last``."""
        seen = self.collector.seen
        assert seen is not None, "a rollout was collected"
        return origin(self.environments, rollout, seen, row, steps, self.agent.sender(), self.recipe.seed)

    def finish(self, folder: Path) -> list[str]:
        """Nothing: checkpoints hold all of an agent."""
        return []

    def close(self) -> None:
        """Close the environments."""
        self.environments.close()
