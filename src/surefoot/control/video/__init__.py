"""Record greedy episodes of an agent as MP4, rendered without a display.

Browsers play the files: H.264, yuv420p, index first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.control.agent import Agent
from surefoot.control.environments import task_name
from surefoot.control.environments.looped import MakeEnvironment
from surefoot.control.evaluate import EpisodeStep, check_same_spaces, greedy_episode
from surefoot.control.video.encoder import Encoder
from surefoot.control.video.frames import caption_text
from surefoot.control.video.rendering import frames_per_second, rendered
from surefoot.errors import SurefootError, announce


@dataclass(frozen=True)
class Video:
    """A recorded video; ``returns`` and ``lengths`` in the order of the episodes."""

    path: Path
    returns: list[float]
    lengths: list[int]
    truncated: bool
    """whether an episode was cut off at ``max_steps``"""
    frames: int
    fps: float

    def line(self) -> str:
        """All fields in one line, with the duration in seconds."""
        several = "s" if len(self.returns) > 1 else ""
        returns = ", ".join(f"{value:,.1f}" for value in self.returns)
        cut = f" (cut off after {max(self.lengths):,} steps)" if self.truncated else ""
        what = f"{len(self.returns)} greedy episode{several}, return{several} {returns}{cut}"
        return f"{self.path}: {what}; {self.frames / self.fps:.1f} s, {self.frames:,} frames at {self.fps:g} a second"


def record_video(
    agent: Agent,
    path: Path,
    task: str | MakeEnvironment | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    episodes: int = 1,
    seed: int = 0,
    size: tuple[int, int] = (320, 240),
    fps: float | None = None,
    max_steps: int = 10_000,
    caption: bool = True,
) -> Video:
    """Record the first episodes that ``surefoot evaluate`` runs with the same seed.

    path        the MP4, written atomically
    task        default: the task the agent was trained on
    arguments   of the task; default: the recipe's for the recipe's task, else none
    size        (width, height); frames of another shape get black margins
    fps         default: the environment's; for Atari, 60 emulator frames per second
    max_steps   episodes are cut off there
    caption     show step, reward and return below the frame

    Raises SurefootError when the task can't be made or rendered, its spaces are not the agent's, or the encoder fails.
    """
    if path.suffix != ".mp4":
        raise SurefootError(f"out={str(path)!r}: must end in .mp4")
    arguments = (agent.recipe.environment if task is None else {}) if arguments is None else arguments
    task = agent.recipe.task if task is None else task
    name = task_name(task)
    with rendered(task, arguments, size, caption) as (environment, picture):
        if note := check_same_spaces(agent, environment, name):
            announce(note)
        ends: list[EpisodeStep] = []
        with Encoder(path, *size, fps or frames_per_second(environment, seed)) as encoder:
            for episode in range(episodes):
                for at in greedy_episode(agent, environment, name, seed, episode, max_steps):
                    encoder.add(picture(caption_text(at, episode, episodes)))
                ends.append(at)
    returns, lengths = [end.total for end in ends], [end.step for end in ends]
    return Video(path, returns, lengths, not all(end.done for end in ends), encoder.frames, encoder.fps)
