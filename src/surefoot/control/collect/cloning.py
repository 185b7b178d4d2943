"""Behaviour cloning: rows of observations and actions in place of experience.

Every row has a return of 1, which makes REINFORCE maximum likelihood.
"""

import importlib
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.control.agent import Agent
from surefoot.control.environments.looped import Lost
from surefoot.control.normalise import stored_actions
from surefoot.control.spaces import Observations, choices, flat_action, is_nested, mapped
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.core.seeding import fingerprint, stream
from surefoot.errors import SurefootError, cause_of, require_package
from surefoot.files import open_file, parsed
from surefoot.recipes.control import Cloning

MINARI = "minari:"
"""begins the name of one of Minari's data sets"""


class RowCollector:
    """The next rows as a rollout of single steps. The order depends on the seed and the steps of the run alone.

    agent          σ of its numbers stays as it is: demonstrations are often without noise, and training from the agent needs it
    observations   of the environments at a reset
    """

    raw = None
    """rows can't be replayed"""

    def __init__(self, agent: Agent, settings: Cloning, observations: Observations) -> None:
        self.agent, self.name, self.batch, self.observations = agent, settings.data, settings.batch, observations
        self.lost: Lost = {}
        self.seen, self.actions = read_rows(settings.data, agent)
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.int64)
        if agent.policy.log_std is not None:
            agent.policy.log_std.requires_grad_(False)
        if agent.observation_normaliser is not None:  # a checkpoint replaces them
            every = {path: x.unsqueeze(1) for path, x in self.seen.items()}
            agent.observation_normaliser.add(every, torch.ones(len(self.actions), 1, dtype=torch.bool))

    def use_eager(self) -> None:
        """Nothing: no program is compiled."""

    def collect(self, state: LearnerState) -> Rollout:
        """The rows after those that the run has used."""
        device, rows = self.agent.device, self._next(state.steps)
        mask = torch.ones(len(rows), 1, dtype=torch.bool, device=device)
        return Rollout(
            inputs=self.agent.normaliser()({path: x[rows].unsqueeze(1) for path, x in self.seen.items()}),
            actions=self.actions[rows].unsqueeze(1).to(device),
            mask=mask,
            old_log_probs=None,
            values=torch.zeros_like(mask, dtype=torch.float32),
            next_values=torch.zeros_like(mask, dtype=torch.float32),
            rewards=mask.float(),
            terminated=mask,
            truncated=~mask,
            steps=len(rows),
            metrics={"data_epochs": (state.steps + len(rows)) / len(self.actions)},
        )

    def _next(self, position: int) -> Tensor:
        """The numbers of the next rows; a new epoch begins within the same batch."""
        count, taken = len(self.actions), list[Tensor]()
        end = position + self.batch
        while position < end:
            epoch, first = divmod(position, count)
            if epoch != self.epoch:
                generator = stream(self.agent.recipe.seed, f"rows {epoch}")
                self.epoch, self.order = epoch, torch.randperm(count, generator=generator)
            taken.append(self.order[first : first + end - position])
            position += len(taken[-1])
        return torch.cat(taken)

    def state_dict(self) -> dict[str, Any]:
        """A fingerprint of the rows; the position is the run's steps."""
        return {"rows": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise SurefootError if the rows have changed since."""
        if state.get("rows") != self._fingerprint():
            raise SurefootError(
                f"cloning.data={self.name!r}: has other rows than when the checkpoint was written; restore them, or begin a "
                "new run"
            )

    def _fingerprint(self) -> str:
        return fingerprint({**{path: x.numpy() for path, x in self.seen.items()}, "": self.actions.numpy()})


def read_rows(name: str, agent: Agent) -> tuple[dict[str, Tensor], Tensor]:
    """Observations [N, *part] each, as the environment returns them, and actions [N, ...] as the policy stores them.

    name   a file of JSON lines with ``observation`` and ``action``, or ``minari:NAME``

    Raises SurefootError, with the row, for what is not of the agent's spaces.
    """
    space, seen, sent, places = agent.action_space, list[Observations](), list[Any](), list[str]()
    for place, observation, action in _minari_rows(name) if name.startswith(MINARI) else _json_rows(name):
        try:
            parts, batch = agent.read(observation)
            flat = np.asarray(flat_action(space, action), np.float64)
            if batch:
                raise ValueError(f"{batch[0]} observations where one is needed")
            if sent and flat.shape != sent[0].shape:
                raise ValueError(f"an action of shape {flat.shape} where other rows have {sent[0].shape}")
        except Exception as error:
            why = error if isinstance(error, SurefootError) else f"does not fit the task ({cause_of(error)})"
            raise SurefootError(f"cloning.data={name!r}, {place}: {why}") from None
        seen.append(parts)
        sent.append(flat)
        places.append(place)
    if not seen:
        raise SurefootError(f"cloning.data={name!r}: has no rows; write at least one")
    flat = np.stack(sent)
    if not is_nested(space) and flat.shape[1:] != tuple(space.shape or ()):
        raise SurefootError(f"cloning.data={name!r}: has actions of shape {flat.shape[1:]}, the task's are {space}")
    actions = stored_actions(space, agent.recipe.normalise.actions, flat)
    whole = len(choices(space) or ())  # stored, a choice of 0.7 has become 0
    fractions = torch.from_numpy(flat.reshape(len(flat), -1)[:, :whole] % 1 != 0).any(-1)
    for index in (fractions | ~_possible(space, actions)).nonzero().flatten().tolist():
        raise SurefootError(f"cloning.data={name!r}, {places[index]}: its action {flat[index].tolist()} is not of {space}")
    return {path: torch.from_numpy(np.stack([row[path] for row in seen])) for path in seen[0]}, actions


def _possible(space: Any, actions: Tensor) -> Tensor:
    """Which stored actions are finite, with choices that exist.   [N]"""
    columns = actions.reshape(len(actions), -1)
    sizes = torch.tensor(choices(space) or ())
    chosen = columns[:, : len(sizes)]
    return columns.isfinite().all(-1) & ((chosen >= 0) & (chosen < sizes)).all(-1)


def _json_rows(name: str) -> Iterator[tuple[str, Any, Any]]:
    try:
        with open_file(Path(name)) as file:
            for number, line in enumerate(file, 1):
                try:
                    row = parsed(line.decode("utf-8-sig"))
                    yield f"line {number}", row["observation"], row["action"]
                except (ValueError, KeyError, TypeError):
                    example = '{"observation": [0.1, 0.2], "action": 1}'
                    raise SurefootError(f"cloning.data={name!r}, line {number}: is not a row such as {example}") from None
    except OSError as error:
        raise SurefootError(f"cloning.data={name!r}: can't be read ({error.strerror}); name a .jsonl file") from None


def _minari_rows(name: str) -> Iterator[tuple[str, Any, Any]]:
    require_package("minari", "minari", f"cloning.data={name!r}")
    minari: Any = importlib.import_module("minari")
    try:
        episodes = minari.load_dataset(name.removeprefix(MINARI)).iterate_episodes()
    except Exception as error:
        raise SurefootError(f"cloning.data={name!r}: can't be opened ({cause_of(error)}); download it with minari") from None
    for number, episode in enumerate(episodes):
        for step in range(len(episode)):
            row = mapped(operator.itemgetter(step), (episode.observations, episode.actions))
            yield f"episode {number}, step {step}", *row
