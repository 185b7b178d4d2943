"""Collect rollouts: act T steps in B environments, then score all of them in one pass.

During the steps only actions are computed. Log-probabilities, values and distributions come from one batched pass over the
whole rollout, by the same function that training uses, so the ratio at the start of the update is 1.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from surefoot.control.agent import Agent, CompiledActor
from surefoot.control.collect.episodes import EpisodeLog
from surefoot.control.collect.preferences import Preferences
from surefoot.control.collect.scoring import Acted, Finals, rollout_of
from surefoot.control.collect.symmetry import Symmetry
from surefoot.control.environments.looped import Environments, Lost, Step
from surefoot.control.environments.observations import non_finite, not_finite_message
from surefoot.control.environments.records import check_saved_count
from surefoot.control.environments.slices import concatenate, join_states, slice_state
from surefoot.control.networks import EPISODE_STARTS
from surefoot.control.replay import RawRollout
from surefoot.control.spaces import Array, Observations
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.core.seeding import any_algorithm, rank_generator
from surefoot.core.timer import Timer
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.ranks.collectives import exchange, together, world_size

BY_ROW = ("discounted", "starts", "running_return", "running_length")
"""arrays of a collector's state with one entry per environment"""


class ControlCollector:
    """Rollouts of an agent in environments.

    environments    B of them: this rank's share
    agent           its policy acts; its normalisers are frozen during a rollout and updated after it
    steps           T, or None to run ``episodes`` whole episodes in each environment
    at_least        with steps = None: run whole episodes until the batch has this many steps, instead of ``episodes``
    compiled        act with a compiled program
    symmetry        adds mirror images to the rollouts
    preferences     learns the rewards that the rollouts have
    """

    def __init__(
        self,
        environments: Environments,
        agent: Agent,
        steps: int | None,
        episodes: int = 1,
        at_least: int | None = None,
        compiled: bool = False,
        symmetry: Symmetry | None = None,
        preferences: Preferences | None = None,
    ) -> None:
        self.environments, self.agent, self.steps, self.symmetry = environments, agent, steps, symmetry
        self.preferences = preferences
        self.actor = CompiledActor(agent).actor if compiled else agent.actor
        self.episodes, self.at_least = episodes, at_least
        self.observations: Observations = environments.reset()
        count = environments.count
        self.discounted = torch.zeros(count, dtype=torch.float64)  # the running return of the reward normaliser
        self.running_return = np.zeros(count)
        self.running_length = np.zeros(count, np.int64)
        returns = getattr(environments, "returns", ())  # of single agents
        self.log = EpisodeLog(environments.name, environments.first, agent.recipe.rollout.info, returns)
        self.steps_taken = 0
        self.lost: Lost = {}
        self.lstm_state = agent.policy.initial_lstm_state(count)
        self.starts = np.ones(count, bool)  # whether the next observation may be the first of an episode
        self.raw: RawRollout | None = None

    def use_eager(self) -> None:
        """Act without a compiled program from the next rollout on."""
        self.actor = self.agent.actor

    def collect(self, state: LearnerState) -> Rollout:
        """One rollout under the current policy.

        Raises NotFiniteError, naming environment and step, when an observation or reward is not finite; that environment
        then starts a new episode; and LabelsNeededError while people must label clips.
        """
        generator = rank_generator(state.generators["sample"])
        try:
            with together():
                if self.preferences is not None:
                    self._compare(self.preferences, generator, state)
                acted = self._act_out(generator, state.timer)
        except NotFiniteError:  # on any rank
            self.discounted.zero_()  # the discarded rollout would have added to it
            if self.preferences is not None:
                self.preferences.forget_open()
            raise
        self.log.exchange()
        metrics = self.log.metrics()
        if self.preferences is not None:
            acted = replace(acted, learned=self.preferences.add(acted))
            metrics |= self.preferences.metrics
        rollout, self.discounted = rollout_of(self.agent, acted, self.discounted, metrics, state.timer, symmetry=self.symmetry)
        return rollout

    def _compare(self, preferences: Preferences, generator: torch.Generator, state: LearnerState) -> None:
        """Before the first update act until there are clips, which the budget pays for; then label and learn what is due."""
        while not preferences.enough:
            acted = self._act_out(generator, state.timer)
            preferences.add(acted)
            state.steps += int(acted.mask.sum())
            if state.steps >= state.total_steps:
                raise SurefootError(
                    f"steps={state.total_steps}: are spent on clips for the first {preferences.first} labels; raise steps, or "
                    "lower preferences.labels or preferences.segment"
                )
        with state.timer.detail("preferences"):
            preferences.ask(state)

    def _act_out(self, generator: torch.Generator, timer: Timer) -> Acted:
        count = self.environments.count
        if bad := non_finite(self.observations):
            self._discard(bad, self.running_length.copy())
        self.environments.mark()
        act = timer.timed("acting", self.actor(generator))
        take_step = timer.timed("environment", any_algorithm()(self.environments.step))
        observed: list[Observations] = []
        taken: list[Tensor] = []
        outcomes: list[Step] = []
        before = self.lstm_state
        starts: list[Array] = []
        states_at_cuts: dict[tuple[int, int], Tensor] = {}
        remaining = np.full(count, self.episodes if self.at_least is None else 1)
        active, kept = None, 0
        while self._unfinished(outcomes) if self.steps is not None else remaining.any():
            if self.steps is None:
                active = remaining > 0
            starts.append(self.starts)
            actions, sent, self.lstm_state = act(self.observations, self.lstm_state, self.starts)
            observed.append(self.observations)
            try:
                step = take_step(sent, active)
                # A row that only reset keeps its flag: EnvPool also resets after a lost life, when the game continues.
                self.starts = step.done | (step.ignored & self.starts)
                self._check(step)
            except SurefootError:
                check_actions(actions)  # the environment is not to blame if its action was not finite
                raise
            taken.append(actions)
            outcomes.append(step)
            self.observations = step.observations
            self._count_episodes(step)
            if self.lstm_state is not None:
                states_at_cuts |= {(index, len(outcomes) - 1): self.lstm_state[index] for index in step.final_observations}
            if self.steps is None:
                kept += count - int(step.ignored.sum())
                if self.at_least is None or kept >= self.at_least:  # finish the current episodes: none counts in part
                    remaining -= step.done.astype(int)
        return self._acted(observed, taken, outcomes, before, starts, states_at_cuts)

    def _acted(
        self,
        observed: list[Observations],
        taken: list[Tensor],
        outcomes: list[Step],
        before: Tensor | None,
        starts: list[Array],
        states_at_cuts: dict[tuple[int, int], Tensor],
    ) -> Acted:
        parts = {path: np.stack([observations[path] for observations in observed], 1) for path in self.observations}
        self.raw = RawRollout(dict(parts), np.stack([step.done for step in outcomes], 1))
        ignored = np.stack([step.ignored for step in outcomes], 1)
        if before is not None:  # an ignored row has the last observation of the episode before
            parts[EPISODE_STARTS] = np.stack(starts, 1) & ~ignored
        assert before is None or self.lstm_state is not None
        return Acted(
            observed={path: torch.from_numpy(values) for path, values in parts.items()},
            actions=torch.stack(taken, 1),
            rewards=torch.from_numpy(np.stack([step.rewards for step in outcomes], 1)),
            terminated=torch.from_numpy(np.stack([step.terminated for step in outcomes], 1)),
            truncated=torch.from_numpy(np.stack([step.truncated for step in outcomes], 1)),
            mask=~torch.from_numpy(ignored),
            last=self.agent.tensors(self.observations),
            lstm_state=None if before is None or self.lstm_state is None else (before, self.lstm_state),
            finals=self._finals(outcomes, states_at_cuts),
        )

    def _finals(self, outcomes: list[Step], states_at_cuts: dict[tuple[int, int], Tensor]) -> Finals | None:
        places = [(b, t) for t, step in enumerate(outcomes) for b in step.final_observations]
        if not places:
            return None
        observations = [outcomes[t].final_observations[b] for b, t in places]
        arrays = {path: np.stack([row[path] for row in observations]) for path in observations[0]}
        state = torch.stack([states_at_cuts[at] for at in places]) if states_at_cuts else None
        rows, columns = torch.tensor(places).unbind(1)
        return Finals(rows, columns, self.agent.tensors(arrays), state)

    def _unfinished(self, outcomes: list[Step]) -> bool:
        """Whether a rollout of T steps needs more: also if all its rows were resets."""
        return len(outcomes) < (self.steps or 0) or all(step.ignored.all() for step in outcomes)

    def _check(self, step: Step) -> None:
        bad = non_finite(step.observations, step.final_observations, step.rewards, step.scores)
        if bad:
            at = self.running_length + 1
            self._count_episodes(step, exclude=set(bad))
            self._discard(bad, at)

    def _discard(self, bad: dict[int, str], at: Array) -> NoReturn:
        for index in bad:
            with any_algorithm():
                self.observations, restarted = self.environments.restart(index)
            self._restart_counters(restarted)
        index, what = next(iter(bad.items()))
        where = not_finite_message(self.environments.name, what, self.environments.first + index, at[index])
        raise NotFiniteError(f"{where}; the rollout is discarded and the update skipped")

    def _restart_counters(self, restarted: list[int]) -> None:
        for index in restarted:
            self.running_return[index], self.running_length[index], self.discounted[index] = 0.0, 0, 0.0
            self.starts[index] = True

    def _count_episodes(self, step: Step, exclude: Collection[int] = ()) -> None:
        self.running_return += step.rewards if step.scores is None else step.scores
        self.running_length += ~step.ignored
        self.steps_taken += 1
        if not step.done.any():
            return
        for index in np.flatnonzero(step.done):
            if index in exclude:
                continue
            total, length = float(self.running_return[index]), int(self.running_length[index])
            self.log.add(self.steps_taken, int(index), total, length, step.final_infos.get(int(index), {}))
            self.running_return[index], self.running_length[index] = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """The environments (as actions to replay), running returns, and the recent episodes: those of all ranks as one.

        All ranks must call this.
        """
        parts = exchange(self._own_state())
        if len(parts) == 1:
            return parts[0]
        memories = [part["memory"] for part in parts]
        return parts[0] | {
            "environments": join_states([part["environments"] for part in parts]),
            "memory": None if memories[0] is None else torch.cat(memories),
            **{name: concatenate([np.asarray(part[name]) for part in parts]) for name in BY_ROW},
        }

    def _own_state(self) -> dict[str, Any]:
        return {
            "environments": self.environments.state_dict(),
            "memory": None if self.lstm_state is None else self.lstm_state.cpu(),
            **{name: getattr(self, name) for name in BY_ROW},
            "preferences": None if self.preferences is None else self.preferences.state_dict(),
            **self.log.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. ``lost`` then has the environments that did not replay and started a new episode."""
        if world_size() > 1:
            state = self._own_part(state)
        self.observations, self.lost = self.environments.load_state_dict(state["environments"])
        self.discounted = torch.as_tensor(state["discounted"]).clone()
        self.lstm_state = None if state["memory"] is None else state["memory"].to(self.agent.device)
        self.starts, self.running_return, self.running_length = (
            torch.as_tensor(state[name]).numpy().copy() for name in ("starts", "running_return", "running_length")
        )
        self.log.load_state_dict(state)
        if self.preferences is not None:
            self.preferences.load_state_dict(state["preferences"])
            self.preferences.forget_open(list(self.lost))
        self._restart_counters(list(self.lost))

    def _own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a state. Raises SurefootError if the state has another number of environments."""
        check_saved_count(len(state["starts"]), self.agent.recipe.rollout.environments)
        first = self.environments.first
        rows = slice(first, first + self.environments.count)
        return state | {
            "environments": slice_state(state["environments"], rows),
            "memory": None if state["memory"] is None else state["memory"][rows],
            **{name: torch.as_tensor(state[name])[rows] for name in BY_ROW},
        }


def check_actions(actions: Tensor) -> None:
    """Raise SurefootError, naming the policy, for actions that are not finite."""
    if not actions.isfinite().all():
        raise SurefootError(
            "policy: its actions are not finite for finite observations; fix network.custom if it is set, or lower "
            "optimizer.learning_rate"
        )
