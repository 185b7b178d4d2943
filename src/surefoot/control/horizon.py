"""Episodes of a fixed length, for tasks that terminate."""

from typing import Any

import gymnasium


class FixedHorizon(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Episodes of ``steps`` steps: after an end of the task the last observation stays, with rewards of 0.

    Rewards that are learned from comparisons need it: how long an episode lasts would otherwise depend on an offset of the
    rewards, which comparisons of equally long clips don't show.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], steps: int) -> None:
        super().__init__(env)
        self.steps, self.taken, self.ended = steps, 0, False
        self.last: Any = None
        """observation and info of the last step that was taken"""

    def reset(self, **given: Any) -> Any:
        """Begin an episode."""
        self.taken, self.ended = 0, False
        return self.env.reset(**given)

    def step(self, action: Any) -> Any:
        """Act, unless the episode has terminated."""
        self.taken += 1
        reward: Any = 0.0
        if not self.ended:
            observation, reward, terminated, truncated, info = self.env.step(action)
            self.last, self.ended = (observation, info), terminated or truncated
        observation, info = self.last
        return observation, reward, False, self.taken >= self.steps, info


def fixed_horizon(id: str, steps: int, **arguments: Any) -> gymnasium.Env[Any, Any]:
    """The task with this id, with a fixed horizon.

    ``task = "surefoot.control.horizon:fixed_horizon"`` and ``environment = { id = "CartPole-v1", steps = 500 }`` in a recipe.
    """
    return FixedHorizon(gymnasium.make(id, max_episode_steps=-1, **arguments), steps)
