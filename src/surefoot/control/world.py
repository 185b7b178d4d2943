"""The control side of a run: environments by recipe, agent, collector, evaluation and the batch arithmetic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from surefoot.control.agent import Agent
from surefoot.control.collect import ControlCollector
from surefoot.control.collect.cloning import RowCollector
from surefoot.control.collect.preferences import Judge, Preferences
from surefoot.control.collect.symmetry import Symmetry
from surefoot.control.collect.tensors import TensorCollector
from surefoot.control.environments import is_id, make_environments, making_error, spec_of, task_name
from surefoot.control.environments.agents import AgentEnvironments
from surefoot.control.environments.atari import ATARI, make_atari_vector
from surefoot.control.environments.looped import Environments, MakeEnvironment
from surefoot.control.environments.records import close_all
from surefoot.control.environments.tensor import TensorEnvironments
from surefoot.control.environments.vector import EnvPool, VectorEnvironments, check_attributes
from surefoot.control.environments.workers import WorkerEnvironments
from surefoot.control.evaluate import evaluate_agent
from surefoot.control.replay import origin
from surefoot.control.spaces import MASK, SpaceError, check_agreement, space_from_json
from surefoot.core.rollout import EvaluationReport, Rollout
from surefoot.errors import SurefootError
from surefoot.files import available_cores
from surefoot.ranks.collectives import check_device, exchange, share, together, world_size
from surefoot.recipes.callables import SYMMETRY, Functions, load_function
from surefoot.recipes.control import ControlRecipe
from surefoot.store.checkpoint import load_checkpoint
from surefoot.store.folder import checkpoint_to_load


class ControlWorld:
    """The parts of a run of kind "control".

    task    replaces the recipe's task if it is a callable
    count   replaces the recipe's number of environments, to inspect a recipe without training
    functions   the network, if it was passed as an object
    """

    exports_model = False
    auxiliary_loss = None
    model_summary = ()

    def __init__(
        self,
        recipe: ControlRecipe,
        task: MakeEnvironment | None = None,
        count: int | None = None,
        functions: Functions | None = None,
    ) -> None:
        check_device(recipe.device)
        self.recipe, self.functions = recipe, functions
        self.warnings: list[str] = []
        self.task: str | MakeEnvironment = task or recipe.task
        self.folder: Path | None = None
        """of the run, once it has one"""
        self.judge = self._people()  # first, because it decides how MuJoCo renders
        self.environments = training_environments(self.task, recipe, count if recipe.cloning is None else 1)
        try:
            spaces = (self.environments.observation_space, self.environments.action_space)
            self.agent = Agent.for_spaces(recipe, *spaces, task_name(self.task), functions)
            self.policy = self.agent.policy
            self.collector = self._collector()
            self.agent.masked = MASK in self.collector.observations
            if self.agent.masked and recipe.rollout.symmetry is not None:
                raise SurefootError(
                    f"rollout.symmetry={recipe.rollout.symmetry!r}: {task_name(self.task)} masks actions, and a mask has no "
                    "mirror image; unset it"
                )
        except BaseException:
            self.environments.close()  # leave no process behind
            raise

    def _collector(self) -> ControlCollector | TensorCollector | RowCollector:
        if self.recipe.cloning is not None:
            if isinstance(self.environments, TensorEnvironments):
                raise SurefootError(f"task={task_name(self.task)!r}: is a tensor environment; clone in a single one")
            return RowCollector(self.agent, self.recipe.cloning, self.environments.reset())
        rollout, compiled = self.recipe.rollout, self.recipe.engine == "compiled"
        name, preferences = rollout.symmetry, self._preferences()
        symmetry = None if name is None else Symmetry(load_function(SYMMETRY, name, self.functions or {}), name)
        if isinstance(self.environments, TensorEnvironments):
            return TensorCollector(self.environments, self.agent, rollout.steps, compiled, symmetry)
        steps = None if self.recipe.objective.needs_whole_episodes else rollout.steps
        at_least = None if rollout.at_least is None else -(-rollout.at_least // world_size())
        return ControlCollector(
            self.environments, self.agent, steps, rollout.episodes, at_least, compiled, symmetry, preferences
        )

    def _people(self) -> Judge | None:
        """The people who label clips, if they do."""
        if self.recipe.preferences is None or self.recipe.preferences.judge != "people":
            return None
        from surefoot.control.video.clips import People

        return People(self.task, self.recipe, lambda: self.folder)

    def _preferences(self) -> Preferences | None:
        settings = self.recipe.preferences
        if settings is None:
            return None
        if isinstance(self.environments, VectorEnvironments | TensorEnvironments | AgentEnvironments):
            raise SurefootError(
                f"task={task_name(self.task)!r}: makes a vector, and preferences compare clips of single environments; make "
                "single ones"
            )
        return Preferences(settings, self.agent, self.environments, self.judge)

    @property
    def result(self) -> Agent:
        """The agent."""
        return self.agent

    def start_from(self, agent: Agent | None = None) -> None:
        """Take the weights and normalisers of an agent, or of the one that the recipe's ``start`` names.

        Raises SurefootError if there is no such agent, or it does not fit the task or the recipe.
        """
        name = self.recipe.start or "agent"
        if agent is None:
            try:
                checkpoint = checkpoint_to_load(Path(name))
                parts = load_checkpoint(checkpoint)
            except SurefootError as error:
                raise SurefootError(f"start: {error}") from None
            if "spaces" not in parts:
                raise SurefootError(f"start={name!r}: has no agent; name an agent or a run in environments")
            agent = Agent.from_parts(parts, checkpoint, self.functions)
        if note := self.agent.start_from(agent, name):
            self.warnings.append(f"{task_name(self.task)} has {note}")

    def use_eager(self) -> ControlRecipe:
        """Go on without compiled programs; the recipe of the rest of the run."""
        self.recipe = self.agent.recipe = self.recipe.model_copy(update={"engine": "eager"})
        self.collector.use_eager()
        return self.recipe

    def arithmetic(self) -> list[str]:
        """Parameter counts and the batch arithmetic."""
        count = sum(p.numel() for p in self.policy.parameters())
        critic = sum(p.numel() for p in self.policy.critic_parameters())
        engine = []
        if self.recipe.engine == "auto":
            name, reason = self.recipe.engine_choice()
            engine = [f"engine: {name} ({reason})"]
        lines = [f"parameters: {count:,} in total, {critic:,} of them in a separate critic", *batch_arithmetic(self.recipe)]
        return [*lines, *engine]

    def checkpoint_parts(self) -> dict[str, Any]:
        """The agent's part of a checkpoint."""
        return self.agent.checkpoint_parts()

    def load(self, parts: dict[str, Any], where: Path, allow_changes: bool) -> list[str]:
        """Restore the agent and the environments from a checkpoint; return warnings about inexact restoration.

        Raises SurefootError if an environment replays differently, unless ``allow_changes``.
        """
        trained, name = [space_from_json(parts["spaces"][kind]) for kind in ("observation", "action")], task_name(self.task)
        try:
            note = check_agreement(trained, self.agent.spaces)
        except SpaceError as error:
            raise SurefootError(f"task={name!r}: has {error}; resume with the task of the run") from None
        self.agent.load(parts["agent"], where)
        notes = [f"{name} has {note}"] if note else []
        with together():
            self.collector.load_state_dict(parts["collector"])
        if forgotten := self._of_all_ranks(getattr(self.environments, "forgotten", dict)()):
            notes.append(
                f"environments {sorted(forgotten)} of {name} replayed as in training, but {next(iter(forgotten.values()))} "
                "did not come back; if later episodes depend on it, this resume is not exact: give it to state_dict and "
                "load_state_dict of the environment"
            )
        lost = self._of_all_ranks(self.collector.lost)
        if not lost:
            return notes
        if different := next(filter(None, lost.values()), None):
            return [*notes, self._difference(sorted(lost), different, allow_changes)]
        why = "its environments have no state_dict that fits"
        if not isinstance(self.environments, TensorEnvironments):
            why = (
                "its vector environment has no state_dict that fits, and its steps since the last reset can't be replayed (too "
                "many, or of another number of environments)"
            )
        return [*notes, f"{name}: {why}: all {len(lost):,} start new episodes, so this resume is not exact"]

    def _of_all_ranks(self, rows: dict[int, str]) -> dict[int, str]:
        """What each rank has of its environments, by their number in the run."""
        parts = exchange({self.environments.first + index: what for index, what in rows.items()})
        return {number: what for part in parts for number, what in part.items()}

    def _difference(self, lost: list[int], first: str, allow_changes: bool) -> str:
        """The warning about environments that replayed differently; an error unless that is allowed."""
        what = f"environments {lost} of {task_name(self.task)} did not replay as in training (environment {lost[0]}: {first})"
        if allow_changes:
            return f"{what}: they start new episodes, so this resume is not exact"
        raise SurefootError(
            f"{what}; draw from self.np_random alone, give what outlives an episode to state_dict and load_state_dict of the "
            "environment or its wrapper, and train again, or pass --allow-changes to start new episodes"
        )

    def evaluate(self) -> EvaluationReport | None:
        """Mean greedy return. It chooses no best agent where people say what is better."""
        settings, preferences = self.recipe.evaluation, self.recipe.preferences
        if not settings.episodes:
            return None
        arguments, episodes = self.recipe.environment, settings.episodes
        result = evaluate_agent(self.agent, self.task, arguments, episodes, settings.seed, shared=True)
        numbers = {f"evaluation_{name}": mean for name, mean in result.info.items()}
        score = None if preferences is not None and preferences.judge == "people" else result.mean_return
        return EvaluationReport(score, {"evaluation_return": result.mean_return, **numbers})

    def samples(self) -> list[dict[str, Any]]:
        """None: an agent writes no text."""
        return []

    def try_longest(self, learner: Any) -> list[str]:
        """Nothing: the steps of a batch all have one size."""
        return []

    def row_details(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """How to replay these steps, for ``surefoot watch RUN --traced last``."""
        raw = self.collector.raw
        if row >= self.environments.count:  # a mirror image, which no environment has shown
            return {}
        if raw is None or isinstance(self.environments, TensorEnvironments):
            return {}
        return origin(self.environments, rollout, raw, row, steps, self.agent.action_converter(), self.recipe.seed)

    def finish(self, folder: Path) -> list[str]:
        """Write nothing: checkpoints contain all of an agent."""
        return []

    def close(self) -> None:
        """Close the environments."""
        self.environments.close()


# ---- environments of a recipe -----------------------------------------------------------------------------------------


def training_environments(
    task: str | MakeEnvironment, recipe: ControlRecipe, count: int | None = None
) -> Environments | TensorEnvironments:
    """This rank's share of the environments of a recipe, by ``rollout.backend``; ``count`` replaces their number.

    Raises SurefootError when the backend does not have the task, or the task can't be made.
    """
    rollout, arguments, seed, replaced = recipe.rollout, recipe.environment, recipe.seed, count is not None
    numbers = share(rollout.environments) if count is None else range(count)
    first, count = numbers.start, len(numbers)
    if rollout.backend == "workers":
        workers = rollout.workers or available_cores()
        return WorkerEnvironments(task, arguments, count, seed, workers, rollout.deadline, first=first)
    if rollout.backend == "native":
        return _vector(task, recipe, numbers, native)
    if rollout.backend == "envpool":
        return _vector(task, recipe, numbers, EnvPool)
    made = make_environments(task, arguments, count, seed, first=first, device=recipe.device)
    if isinstance(made, AgentEnvironments) and not replaced and (made.count != count or first % made.size):
        close_all([made])
        raise SurefootError(
            f"rollout.environments={rollout.environments}: {task_name(task)} has {made.size} agents, a row each in every "
            f"copy; set it to a multiple of {made.size * world_size()}"
        )
    if isinstance(made, VectorEnvironments | TensorEnvironments):
        try:
            _check_vector(recipe, task_name(task), isinstance(made, VectorEnvironments))
            if not (replaced and made.count == count):
                _check_count(recipe, task_name(task), made.count)
        except SurefootError:
            close_all([made])
            raise
    return made


def native(task: str, count: int, arguments: dict[str, Any]) -> VectorEnv[Any, Any, Any]:
    """The vector environment registered for an id.

    Raises SurefootError when there is none.
    """
    if task.startswith(ATARI):
        return make_atari_vector(task, count, arguments)
    if spec_of(task).vector_entry_point is None:
        raise SurefootError(
            f"rollout.backend='native': {task!r} has no vector environment of its own; set rollout.backend = 'workers' or "
            "'loop'"
        )
    return gymnasium.make_vec(task, num_envs=count, vectorization_mode="vector_entry_point", **arguments)


def _vector(
    task: str | MakeEnvironment,
    recipe: ControlRecipe,
    numbers: range,
    make: Callable[[str, int, dict[str, Any]], VectorEnv[Any, Any, Any]],
) -> VectorEnvironments:
    """A vector environment of an id, with the spaces of its single environments, which evaluation uses."""
    name, backend = task_name(task), recipe.rollout.backend
    if not isinstance(task, str) or not is_id(task):
        raise SurefootError(
            f"rollout.backend={backend!r}: needs an environment id, but task={name!r} makes its own environments; set "
            "rollout.backend = 'workers' or 'loop'"
        )
    try:
        made = make(name, len(numbers), recipe.environment)
    except SurefootError:
        raise
    except (Exception, SystemExit) as error:
        raise making_error(name, error) from error
    try:
        check_attributes(made, name)
        single = make_environments(task, recipe.environment, 1, recipe.seed)
        single.close()
        for kind in ("observation_space", "action_space"):
            vector_space, space = getattr(made, f"single_{kind}"), getattr(single, kind)
            if not _compatible(vector_space, space):
                raise SurefootError(
                    f"rollout.backend={backend!r}: its {kind.replace('_', ' ')} of {name!r} is {vector_space}, that of a "
                    f"single environment is {space}; set rollout.backend = 'workers' or 'loop'"
                )
            setattr(made, f"single_{kind}", space)
        return VectorEnvironments(made, recipe.seed, name, numbers.start)
    except BaseException:
        close_all([made])
        raise


def _compatible(a: gymnasium.Space[Any], b: gymnasium.Space[Any]) -> bool:
    """ActionBounds and number types aside, which differ between implementations."""
    same = type(a) is type(b) and a.shape == b.shape
    return same and all(getattr(a, name, None) == getattr(b, name, None) for name in ("n", "start"))


def _check_vector(recipe: ControlRecipe, task: str, numpy: bool) -> None:
    """Reject at the start what a vector environment can't do during a run; those of numpy have no single environments."""
    if recipe.objective.needs_whole_episodes:
        raise SurefootError(
            f"task={task!r}: a vector environment can't run whole episodes side by side, but {recipe.algorithm} needs them; "
            "use an objective with a critic, or a task that makes single environments"
        )
    if numpy and recipe.evaluation.episodes:
        raise SurefootError(
            f"evaluation.episodes={recipe.evaluation.episodes}: evaluation needs single environments, but task={task!r} makes "
            "a vector environment; set evaluation.episodes = 0"
        )


def _check_count(recipe: ControlRecipe, task: str, count: int) -> None:
    """Reject a vector of another number of environments than the recipe's."""
    total, each = count * world_size(), " on each rank" if world_size() > 1 else ""
    if recipe.rollout.environments != total:
        raise SurefootError(
            f"rollout.environments={recipe.rollout.environments}: task={task!r} makes a vector of {count}{each}; set it to "
            f"{total}"
        )


# ---- arithmetic -------------------------------------------------------------------------------------------------------


def batch_arithmetic(recipe: ControlRecipe) -> list[str]:
    """The batch arithmetic of a recipe, line by line: steps, minibatches, updates."""
    rollout, constraint = recipe.rollout, recipe.objective.constraint
    if recipe.cloning is not None:
        return [f"updates: {recipe.steps:,} rows / {recipe.cloning.batch:,} = {-(-recipe.steps // recipe.cloning.batch):,}"]
    if recipe.objective.needs_whole_episodes and rollout.at_least is not None:
        return [
            f"batch: whole episodes in {rollout.environments} environments until there are "
            f"{rollout.at_least:,} steps; episodes that have started are finished"
        ]
    if recipe.objective.needs_whole_episodes:
        episodes = rollout.environments * rollout.episodes
        return [f"batch: {rollout.environments} environments x {rollout.episodes} whole episodes each = {episodes} episodes"]
    epochs, minibatches = recipe.objective.passes
    iterations = -(-recipe.steps // recipe.batch_size)
    updates, of_the_critic = epochs * minibatches + (constraint is not None), " of the critic" if constraint else ""
    images = "" if rollout.symmetry is None else f", and their mirror images: {recipe.learned_steps:,}"
    lines = [
        f"batch: {rollout.environments} environments x {rollout.steps} steps = {recipe.batch_size:,} steps{images}",
        f"minibatch{of_the_critic}: {recipe.learned_steps:,} / {minibatches} = {recipe.learned_steps // minibatches:,} steps",
        f"updates{of_the_critic}: {epochs} epochs x {minibatches} minibatches = {epochs * minibatches:,} per iteration",
    ]
    if constraint is not None:
        lines.append(
            f"updates of the policy: 1 natural step per iteration on all {recipe.learned_steps:,} steps: "
            f"{constraint.cg_iterations} + 1 Fisher-vector products, at most {constraint.tries} tries of the line search"
        )
    return [
        *lines,
        f"iterations: {recipe.steps:,} / {recipe.batch_size:,} = {iterations:,}",
        f"total updates: {iterations * updates:,}",
    ]
