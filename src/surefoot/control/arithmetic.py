"""What a recipe of control comes to: steps, minibatches, updates. For a dry run."""

from surefoot.recipes.control import ControlRecipe


def arithmetic(recipe: ControlRecipe) -> list[str]:
    """The batch arithmetic of a recipe, a line each."""
    rollout, reuse, constraint = recipe.rollout, recipe.objective.reuse, recipe.objective.constraint
    if recipe.objective.needs_whole_episodes and rollout.at_least is not None:
        return [
            f"batch: whole episodes in {rollout.environments} environments until there are "
            f"{rollout.at_least:,} steps; what has begun is finished"
        ]
    if recipe.objective.needs_whole_episodes:
        episodes = rollout.environments * rollout.episodes
        return [f"batch: {rollout.environments} environments x {rollout.episodes} whole episodes each = {episodes} episodes"]
    epochs, minibatches = (reuse.epochs, reuse.minibatches) if reuse else (1, 1)
    iterations = -(-recipe.steps // recipe.batch_size)
    updates, of_the_critic = epochs * minibatches + (constraint is not None), " of the critic" if constraint else ""
    lines = [
        f"batch: {rollout.environments} environments x {rollout.steps} steps = {recipe.batch_size:,} steps",
        f"minibatch{of_the_critic}: {recipe.batch_size:,} / {minibatches} = {recipe.batch_size // minibatches:,} steps",
        f"updates{of_the_critic}: {epochs} epochs x {minibatches} minibatches = {epochs * minibatches:,} per iteration",
    ]
    if constraint is not None:
        lines.append(
            f"updates of the policy: 1 natural step per iteration on all {recipe.batch_size:,} steps: "
            f"{constraint.cg_iterations} + 1 Fisher-vector products, at most {constraint.tries} tries of the line search"
        )
    return [
        *lines,
        f"iterations: {recipe.steps:,} / {recipe.batch_size:,} = {iterations:,}",
        f"updates in all: {iterations * updates:,}",
    ]
