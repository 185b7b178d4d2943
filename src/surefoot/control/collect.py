"""Collect rollouts: act T steps in B environments, then score all of them in one pass.

During the steps only actions are computed. Log-probabilities, values and distributions come from one batched pass over the
whole rollout, by the same function that training uses, so the ratio at the start of the update is 1.
"""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from surefoot.control.agent import Agent, CompiledActor
from surefoot.control.environments.looped import Environments, Step
from surefoot.control.environments.observations import SUCCESS, mean_numbers, non_finite, not_finite_message
from surefoot.control.environments.workers import concatenate, join_states, slice_state
from surefoot.control.networks import EPISODE_STARTS, LSTM_STATE
from surefoot.control.normalise import true_fraction
from surefoot.control.replay import RawRollout, Replayable
from surefoot.control.spaces import Array, Observations
from surefoot.core.distributed import exchange, rank_generator, together, world_size
from surefoot.core.rollout import LearnerState, Metrics, Rollout, map_tensors
from surefoot.errors import NotFiniteError, SurefootError, did_you_mean
from surefoot.functional import gae, successor_values

RECENT_EPISODES = 100
"""episodes whose mean return and length are reported"""
BY_ROW = ("discounted", "starts", "running_return", "running_length")
"""arrays of a collector's state with one entry per environment"""
Episode = tuple[float, int, dict[str, float]]
"""return, length and numbers in the last info"""


class ControlCollector:
    """Rollouts of an agent in environments.

    environments    B of them: this rank's share
    agent           its policy acts; its normalisers are frozen during a rollout and updated after it
    steps           T, or None to run ``episodes`` whole episodes in each environment
    at_least        with steps = None: run whole episodes until the batch has this many steps, instead of ``episodes``
    compiled        act with a compiled program
    """

    def __init__(
        self,
        environments: Environments,
        agent: Agent,
        steps: int | None,
        episodes: int = 1,
        at_least: int | None = None,
        compiled: bool = False,
    ) -> None:
        self.environments, self.agent, self.steps = environments, agent, steps
        self.actor = CompiledActor(agent).actor if compiled else agent.actor
        self.episodes, self.at_least = episodes, at_least
        self.observations: Observations = environments.reset()
        count = environments.count
        self.discounted = torch.zeros(count, dtype=torch.float64)  # the running return of the reward normaliser
        self.running_return = np.zeros(count)
        self.running_length = np.zeros(count, np.int64)
        self.finished: deque[Episode] = deque(maxlen=RECENT_EPISODES)
        """the recent episodes of all ranks"""
        self.finished_count = 0
        self.steps_taken = 0
        self.ended: list[tuple[int, int, Episode]] = []
        """the episodes of this rank that are not in ``finished`` yet, with the step and environment where they ended"""
        self.lost: list[int] = []
        self.lstm_state = agent.policy.initial_lstm_state(count)
        self.starts = np.ones(count, bool)  # whether the next observation may be the first of an episode
        self.raw: RawRollout | None = None

    def collect(self, state: LearnerState) -> Rollout:
        """One rollout under the current policy.

        Raises NotFiniteError, naming environment and step, when an observation or reward is not finite; that environment
        then starts a new episode.
        """
        generator = rank_generator(state.generators["sample"])
        try:
            with together():
                acted = self._act_out(generator)
        except NotFiniteError:  # on any rank
            self.discounted.zero_()  # the discarded rollout would have added to it
            raise
        self._add_episodes()
        return self._rollout(*acted)

    def _act_out(
        self, generator: torch.Generator
    ) -> tuple[Observations, Tensor, list[Step], Tensor | None, dict[tuple[int, int], Tensor]]:
        """Act in the environments: what ``_rollout`` needs."""
        count = self.environments.count
        self._check_start()
        if isinstance(self.environments, Replayable):
            self.environments.mark()
        act = self.actor(generator)
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
                step = self.environments.step(sent, active)
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
        observed_parts = {path: np.stack([observations[path] for observations in observed], 1) for path in self.observations}
        self.raw = RawRollout(dict(observed_parts), np.stack([step.done for step in outcomes], 1))
        if before is not None:  # an ignored row has the last observation of the episode before
            observed_parts[EPISODE_STARTS] = np.stack(starts, 1) & ~np.stack([step.ignored for step in outcomes], 1)
        return observed_parts, torch.stack(taken, 1), outcomes, before, states_at_cuts

    def _unfinished(self, outcomes: list[Step]) -> bool:
        """Whether a rollout of T steps needs more: also if all its rows were resets."""
        return len(outcomes) < (self.steps or 0) or all(step.ignored.all() for step in outcomes)

    def _rollout(
        self,
        observed: Observations,
        actions: Tensor,
        outcomes: list[Step],
        before: Tensor | None,
        states_at_cuts: dict[tuple[int, int], Tensor],
    ) -> Rollout:
        agent = self.agent
        mask = ~torch.from_numpy(np.stack([step.ignored for step in outcomes], 1))
        rewards = torch.from_numpy(np.stack([step.rewards for step in outcomes], 1))
        terminated = torch.from_numpy(np.stack([step.terminated for step in outcomes], 1))
        truncated = torch.from_numpy(np.stack([step.truncated for step in outcomes], 1))
        raw = {path: torch.from_numpy(values) for path, values in observed.items()}
        with torch.no_grad():
            inputs = agent.normaliser()({path: values.to(agent.device) for path, values in raw.items()})
            if before is not None:
                inputs[LSTM_STATE] = before.clone()  # inference tensors can't be used in autograd
            evaluation = agent.policy(inputs, actions.to(agent.device))
            values, next_values = self._values(evaluation.values, truncated, outcomes, states_at_cuts)
            shaped = rewards if agent.reward_normaliser is None else agent.reward_normaliser(rewards)
        if agent.observation_normaliser is not None:
            agent.observation_normaliser.add(raw, mask)
        if agent.reward_normaliser is not None:
            self._follow_critic(shaped, values, next_values, terminated, truncated, mask)
            ended = terminated | truncated
            self.discounted = agent.reward_normaliser.observe(rewards, ended, mask, self.discounted)
        device = agent.device
        return Rollout(
            inputs=inputs,
            actions=actions.to(device),
            mask=mask.to(device),
            old_log_probs=evaluation.log_probs,
            old_distribution=map_tensors(torch.clone, evaluation.distribution),  # log σ is a view of θ, which changes
            values=values,
            next_values=next_values,
            rewards=shaped.to(device),
            terminated=terminated.to(device),
            truncated=truncated.to(device),
            unit="step" if before is None else "row",
            reward_parts={"environment": rewards},
            steps=int(mask.sum()),
            metrics=self._metrics() | self._clipped(inputs, shaped, actions, mask),
        )

    def _follow_critic(
        self, rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor
    ) -> None:
        """Update the unit of the critic's values, for ``agent.value``, from the parts of its targets.   [B, T] each"""
        objective, normaliser = self.agent.recipe.objective, self.agent.reward_normaliser
        if objective.baseline != "critic" or normaliser is None:
            return
        ends = {"terminated": terminated.repeat(2, 1), "truncated": truncated.repeat(2, 1)}
        v, following = values.cpu(), next_values.cpu()
        with_and_without = [torch.cat([x, torch.zeros_like(x)]) for x in (v, following)]  # one recursion for both
        options: dict[str, Any] = {**ends, "gamma": objective.gamma, "lam": objective.target_lambda, "mask": mask.repeat(2, 1)}
        advantages, from_rewards = gae(rewards.repeat(2, 1), *with_and_without, **options).chunk(2)
        normaliser.follow_critic(from_rewards, advantages + v - from_rewards, mask)

    def _values(
        self, values: Tensor | None, truncated: Tensor, outcomes: list[Step], states_at_cuts: dict[tuple[int, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """V of every observation, and of every successor: the final observation where an episode was truncated."""
        if values is None:
            zeros = torch.zeros(truncated.shape, device=self.agent.device)
            return zeros, zeros
        last = self.agent.values(self.observations, self.lstm_state)
        places = [(b, t) for t, step in enumerate(outcomes) for b in step.final_observations]
        following = successor_values(values, last, truncated=truncated.to(values.device))
        if places:
            rows_ = [outcomes[t].final_observations[b] for b, t in places]
            finals = {path: np.stack([row[path] for row in rows_]) for path in rows_[0]}
            state = torch.stack([states_at_cuts[at] for at in places]) if states_at_cuts else None
            rows, columns = zip(*places, strict=True)
            following[list(rows), list(columns)] = self.agent.values(finals, state)
        return values, following

    def _check_start(self) -> None:
        bad = non_finite(self.observations, None, {})
        if bad:
            self._discard(bad, self.running_length.copy())

    def _check(self, step: Step) -> None:
        bad = non_finite(step.observations, step.rewards, step.final_observations)
        if bad:
            at = self.running_length + 1
            self._count_episodes(step, exclude=set(bad))
            self._discard(bad, at)

    def _discard(self, bad: dict[int, str], at: Array) -> NoReturn:
        for index in bad:
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
            numbers = self._chosen(step.final_infos.get(int(index), {}), int(index))
            episode = float(self.running_return[index]), int(self.running_length[index]), numbers
            self.ended.append((self.steps_taken, self.environments.first + int(index), episode))
            self.running_return[index], self.running_length[index] = 0.0, 0

    def _add_episodes(self) -> None:
        """Add the episodes that have ended on all ranks to the recent ones, in the order in which they ended."""
        ended = sorted((row for rows in exchange(self.ended) for row in rows), key=lambda row: row[:2])
        self.finished.extend(episode for _, _, episode in ended)
        self.finished_count += len(ended)
        self.ended = []

    def _chosen(self, numbers: Mapping[str, float], index: int) -> dict[str, float]:
        """The numbers of an episode that become metrics. Raises SurefootError if the recipe names one that is missing."""
        names = self.agent.recipe.rollout.info
        missing = [name for name in names or () if name not in numbers]
        if missing:
            raise SurefootError(
                f"rollout.info={list(names or ())}: {self.environments.name} has no number {missing[0]!r} in the info of an "
                f"episode's last step (environment {self.environments.first + index}){did_you_mean(missing[0], numbers)} "
                f"(numbers there: {', '.join(map(repr, numbers)) or 'none'})"
            )
        return {name: numbers[name] for name in (SUCCESS if names is None else names) if name in numbers}

    def _metrics(self) -> Metrics:
        returns = [row[0] for row in self.finished]
        lengths = [row[1] for row in self.finished]
        numbers = mean_numbers((row[2] for row in self.finished), self.agent.recipe.rollout.info)
        return {
            "episode_return": float(np.mean(returns)) if returns else None,
            "episode_length": float(np.mean(lengths)) if lengths else None,
            "episodes": float(self.finished_count),
            **{f"episode_{name}": mean for name, mean in numbers.items()},
        }

    def _clipped(self, inputs: Mapping[str, Tensor], rewards: Tensor, actions: Tensor, mask: Tensor) -> Metrics:
        """Fractions of normalised observations and rewards at ±clip, and of actions outside their bounds."""
        observations, reward = self.agent.observation_normaliser, self.agent.reward_normaliser
        metrics: Metrics = {}
        if observations is not None and observations.shapes:
            kept = mask.to(self.agent.device)
            flat = [inputs[path].reshape(*mask.shape, -1) for path in observations.shapes]
            metrics["observations_clipped"] = observations.clipped_fraction(torch.cat(flat, -1), kept)
        if reward is not None:
            metrics["rewards_clipped"] = reward.clipped_fraction(rewards, mask)
        bounds = self.agent.bounds
        if bounds is not None and bounds.bounded.any():
            metrics["actions_clipped"] = true_fraction(bounds.clipped(actions)[mask])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The environments (as actions to replay), running returns, and the recent episodes: those of all ranks as one.

        All ranks must call this.
        """
        parts = exchange(self._own_state())
        firsts = exchange(self.environments.first)
        if len(parts) == 1:
            return parts[0]
        memories = [part["memory"] for part in parts]
        return parts[0] | {
            "environments": join_states([part["environments"] for part in parts], firsts),
            "memory": None if memories[0] is None else torch.cat(memories),
            **{name: concatenate([np.asarray(part[name]) for part in parts]) for name in BY_ROW},
        }

    def _own_state(self) -> dict[str, Any]:
        return {
            "environments": self.environments.state_dict(),
            "discounted": self.discounted,
            "memory": None if self.lstm_state is None else self.lstm_state.cpu(),
            "starts": self.starts,
            "running_return": self.running_return,
            "running_length": self.running_length,
            "finished": [list(row) for row in self.finished],
            "finished_count": self.finished_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. ``lost`` then lists the environments that did not replay and started a new episode."""
        if world_size() > 1:
            state = self._own_part(state)
        self.observations, self.lost = self.environments.load_state_dict(state["environments"])
        self.discounted = torch.as_tensor(state["discounted"]).clone()
        self.lstm_state = None if state["memory"] is None else state["memory"].to(self.agent.device)
        self.starts = torch.as_tensor(state["starts"]).numpy().copy()
        self.running_return = torch.as_tensor(state["running_return"]).numpy().copy()
        self.running_length = torch.as_tensor(state["running_length"]).numpy().copy()
        rows = ((float(r), int(n), dict(*numbers)) for r, n, *numbers in state["finished"])  # older checkpoints: no numbers
        self.finished = deque(rows, maxlen=RECENT_EPISODES)
        self.finished_count = state["finished_count"]
        self._restart_counters(self.lost)

    def _own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a state. Raises SurefootError if the state has another number of environments."""
        total, saved = self.agent.recipe.rollout.environments, len(state["starts"])
        if saved != total:
            raise SurefootError(f"rollout.environments={total}: the checkpoint has {saved} environments; set that many")
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
