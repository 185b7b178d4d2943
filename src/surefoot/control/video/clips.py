"""Clips that people compare: rendered by exact replay of training, labelled by ``surefoot label RUN``."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from surefoot.control.collect.preferences import Clips, Labels, Tapes
from surefoot.control.environments import task_name
from surefoot.control.environments.looped import LoopedEnvironments, MakeEnvironment
from surefoot.control.spaces import MASK, Array
from surefoot.control.video.encoder import Encoder
from surefoot.control.video.rendering import frames_per_second, rendered
from surefoot.errors import LabelsNeededError, SurefootError, announce
from surefoot.people.agreement import findings, of_people
from surefoot.people.log import LABELS, QUEUE, Round, labelled, waits_for
from surefoot.recipes.control import ControlRecipe
from surefoot.store.manifest import write_listed

SIZE = 320, 240
PEOPLE = "preferences.judge='people': "


class People:
    """A judge of clips that asks people; each round is a folder of the run.

    folder   returns the run's folder, or None

    Raises SurefootError for a task that has no pictures; and before the first update, if its episodes can't be replayed.
    """

    def __init__(self, task: str | MakeEnvironment, recipe: ControlRecipe, folder: Callable[[], Path | None]) -> None:
        self.task, self.recipe, self.folder = task, recipe, folder
        with self._stage() as (environments, picture, _):  # a task without pictures is an error now
            environments.begin(0, 0)
            picture("")

    @contextmanager
    def _stage(self) -> Iterator[tuple[LoopedEnvironments, Callable[[str], Array], float]]:
        """One environment that renders, a function that renders it, and frames per second."""
        with rendered(self.task, self.recipe.environment, SIZE, False, "training") as (environment, picture):
            environments = LoopedEnvironments(lambda: environment, 1, self.recipe.seed, task_name(self.task))
            yield environments, picture, frames_per_second(environment, self.recipe.seed)

    def __call__(self, number: int, pairs: Clips, tapes: Tapes) -> Labels:
        """The labels of a round; the queue is written first.

        Raises LabelsNeededError while a pair has no label and nobody has closed the round.
        """
        if (run := self.folder()) is None:
            raise SurefootError(f"{PEOPLE}needs a folder for the clips; pass --run-dir")
        at = Round(run / f"round-{number}")
        self._write_queue(at, pairs, tapes)
        labels = at.labels
        if not at.closed:
            if len(labelled(labels)) < len(pairs.rewards):
                raise LabelsNeededError(waits_for(run))
            at.close()
        for finding in findings(of_people(at.queue, labels)):
            announce(finding.line)
        judged = [each for _, given in at.read(only_own=True) for each in given if each.preference and not each.repeat]
        value = {"a": 1.0, "b": 0.0, "equal": 0.5}
        return torch.tensor([int(each.key) - 1 for each in judged]), torch.tensor(
            [value[str(each.preference)] for each in judged]
        )

    def _write_queue(self, at: Round, pairs: Clips, tapes: Tapes) -> None:
        """Render the clips that are missing, then write the queue; nothing if it is there."""
        starts = pairs.places[:, :, 0].tolist()
        files = [["clips/{}-{}-{}.mp4".format(*start) for start in pair] for pair in starts]
        text = "".join(json.dumps({"prompt": "", "video_a": a, "video_b": b}) + "\n" for a, b in files)
        if (at.folder / QUEUE).is_file():
            if "".join(json.dumps(pair) + "\n" for pair in at.queue.pairs) != text:
                raise SurefootError(f"{at.folder}: has other clips than this run; move it away")
            return
        (at.folder / LABELS).mkdir(parents=True, exist_ok=True)
        with self._stage() as (environments, picture, speed):
            for pair, names in enumerate(files):
                for side, name in enumerate(names):
                    if not (at.folder / name).is_file():
                        with Encoder(at.folder / name, *SIZE, speed) as encoder:
                            place, inputs = pairs.places[pair, side], pairs.inputs[pair, side]
                            row, episode, _ = place[0].tolist()
                            for _ in _replayed(environments, place, inputs, tapes[row, episode]):
                                encoder.add(picture(""))
        write_listed(at.folder / QUEUE, text)


def _replayed(environments: LoopedEnvironments, places: Tensor, inputs: Tensor, tape: Tensor) -> Iterator[None]:
    """Yield at each step of a clip, while the environment is in that state. Raises SurefootError if it differs."""
    environments.first, episode, first = places[0].tolist()
    environments.begin(0, episode)
    for step, action in enumerate(tape[: first + len(places)].numpy()):
        if step >= first:
            seen = _observed(environments)
            if not torch.equal(seen, inputs[step - first, : len(seen)]):
                raise SurefootError(
                    f"{PEOPLE}needs exact replay, and step {step} of episode {episode} of environment {environments.first} "
                    "differs; draw all randomness from the environment's np_random"
                )
            yield
        environments.act(0, action)


def _observed(environments: LoopedEnvironments) -> Tensor:
    """The observation as reward models read it."""
    parts = [np.ravel(part[0]) for path, part in environments.observations.items() if path != MASK]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))
