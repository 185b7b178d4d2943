"""Experience from environments: act T steps in B environments, then score what was done in one pass.

During the steps only actions are computed. Log-probabilities, values and distributions come from one batched pass over the
whole rollout afterwards, by the very function that training uses; so the ratio at the start of the update is 1.
"""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from surefoot.control.agent import Agent
from surefoot.control.environments.looped import Environments, Step
from surefoot.control.environments.observations import broken_parts, not_finite
from surefoot.control.normalise import share_of
from surefoot.control.policies.compiled import CompiledActor
from surefoot.control.policies.recurrent import REMEMBERED, STARTS
from surefoot.control.replay import Replayable, Seen
from surefoot.control.spaces import Array, Observations
from surefoot.core.rollout import LearnerState, Metrics, Rollout, map_tensors
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.functional import successor_values

EPISODES_REMEMBERED = 100


class ControlCollector:
    """Rollouts of an agent in environments.

    environments    B of them
    agent           its policy acts; its normalisers are applied, frozen, and updated after each rollout
    steps           T, or None to run ``episodes`` whole episodes in each environment
    at_least        with steps = None: whole episodes until the batch has this many steps, instead of a number of them
    compiled        act by a compiled program
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
        self.finished: deque[tuple[float, int]] = deque(maxlen=EPISODES_REMEMBERED)
        self.finished_count = 0
        self.lost: list[int] = []
        self.memory = agent.policy.nothing_remembered(count)
        self.starts = np.ones(count, bool)  # whose next observation may be the first of an episode
        self.seen: Seen | None = None

    def collect(self, state: LearnerState) -> Rollout:
        """One rollout under the current policy.

        Raises NotFiniteError, naming environment and step, when an observation or reward is not finite; that environment
        then begins a new episode.
        """
        count = self.environments.count
        self._check_start()
        if isinstance(self.environments, Replayable):
            self.environments.mark()
        act = self.actor(state.generators["sample"])
        observed: list[Observations] = []
        taken: list[Tensor] = []
        outcomes: list[Step] = []
        before = self.memory
        starts: list[Array] = []
        at_cuts: dict[tuple[int, int], Tensor] = {}
        remaining = np.full(count, self.episodes if self.at_least is None else 1)
        active, kept = None, 0
        while self._few(outcomes) if self.steps is not None else remaining.any():
            if self.steps is None:
                active = remaining > 0
            starts.append(self.starts)
            actions, sent, self.memory = act(self.observations, self.memory, self.starts)
            observed.append(self.observations)
            try:
                step = self.environments.step(sent, active)
                # Still one after a row that only reset; but EnvPool resets after a lost life too, and there the game goes on.
                self.starts = step.over | (step.ignored & self.starts)
                self._check(step)
            except SurefootError:
                check_actions(actions)  # looked at only now: whoever was sent no number is not to blame
                raise
            taken.append(actions)
            outcomes.append(step)
            self.observations = step.observations
            self._count(step)
            if self.memory is not None:
                at_cuts |= {(index, len(outcomes) - 1): self.memory[index] for index in step.final_observations}
            if self.steps is None:
                kept += count - int(step.ignored.sum())
                if self.at_least is None or kept >= self.at_least:  # what has begun is finished: no episode counts in part
                    remaining -= step.over.astype(int)
        together = {path: np.stack([seen[path] for seen in observed], 1) for path in self.observations}
        self.seen = Seen(dict(together), np.stack([step.over for step in outcomes], 1))
        if before is not None:  # an ignored row shows the observation that the episode before it ended on
            together[STARTS] = np.stack(starts, 1) & ~np.stack([step.ignored for step in outcomes], 1)
        return self._rollout(together, torch.stack(taken, 1), outcomes, before, at_cuts)

    def _few(self, outcomes: list[Step]) -> bool:
        """Whether a rollout of so many steps goes on: it does, too, where all that happened was that environments reset."""
        return len(outcomes) < (self.steps or 0) or all(step.ignored.all() for step in outcomes)

    def _rollout(
        self,
        observed: Observations,
        actions: Tensor,
        outcomes: list[Step],
        before: Tensor | None,
        at_cuts: dict[tuple[int, int], Tensor],
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
                inputs[REMEMBERED] = before.clone()  # made in inference mode, where nothing may be learned from it
            evaluation = agent.policy(inputs, actions.to(agent.device))
            values, next_values = self._values(evaluation.values, truncated, outcomes, at_cuts)
            shaped = rewards if agent.reward_normaliser is None else agent.reward_normaliser(rewards)
        if agent.observation_normaliser is not None:
            agent.observation_normaliser.add(raw, mask)
        if agent.reward_normaliser is not None:
            ended = terminated | truncated
            self.discounted = agent.reward_normaliser.observe(rewards, ended, mask, self.discounted)
        device = agent.device
        return Rollout(
            inputs=inputs,
            actions=actions.to(device),
            mask=mask.to(device),
            old_log_probs=evaluation.log_probs,
            old_distribution=map_tensors(torch.clone, evaluation.distribution),  # log σ is a view of θ, which will move
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

    def _values(
        self, values: Tensor | None, truncated: Tensor, outcomes: list[Step], at_cuts: dict[tuple[int, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """V of every observation, and of every true successor: the final observation where an episode was truncated."""
        if values is None:
            zeros = torch.zeros(truncated.shape, device=self.agent.device)
            return zeros, zeros
        last = self.agent.values(self.observations, self.memory)
        places = [(b, t) for t, step in enumerate(outcomes) for b in step.final_observations]
        following = successor_values(values, last, truncated=truncated.to(values.device))
        if places:
            seen = [outcomes[t].final_observations[b] for b, t in places]
            finals = {path: np.stack([final[path] for final in seen]) for path in seen[0]}
            memory = torch.stack([at_cuts[place] for place in places]) if at_cuts else None
            rows, columns = zip(*places, strict=True)
            following[list(rows), list(columns)] = self.agent.values(finals, memory)
        return values, following

    def _check_start(self) -> None:
        bad = broken_parts(self.observations, None, {})
        if bad:
            self._refuse(bad, self.running_length.copy())

    def _check(self, step: Step) -> None:
        bad = broken_parts(step.observations, step.rewards, step.final_observations)
        if bad:
            at = self.running_length + 1
            self._count(step, set(bad))
            self._refuse(bad, at)

    def _refuse(self, bad: dict[int, str], at: Array) -> NoReturn:
        for index in bad:
            self.observations, restarted = self.environments.restart(index)
            self._forget(restarted)
        self.discounted.zero_()  # what the discarded rollout would have added, ends included, is lost
        index, what = next(iter(bad.items()))
        where = not_finite(self.environments.name, what, index, at[index])
        raise NotFiniteError(f"{where}; the rollout was discarded and no update taken")

    def _forget(self, restarted: list[int]) -> None:
        for index in restarted:
            self.running_return[index], self.running_length[index], self.discounted[index] = 0.0, 0, 0.0
            self.starts[index] = True

    def _count(self, step: Step, but: Collection[int] = ()) -> None:
        self.running_return += step.rewards if step.scores is None else step.scores
        self.running_length += ~step.ignored
        if not step.over.any():
            return
        for index in np.flatnonzero(step.over):
            if index in but:
                continue
            self.finished.append((float(self.running_return[index]), int(self.running_length[index])))
            self.finished_count += 1
            self.running_return[index], self.running_length[index] = 0.0, 0

    def _metrics(self) -> Metrics:
        returns = [row[0] for row in self.finished]
        lengths = [row[1] for row in self.finished]
        return {
            "episode_return": float(np.mean(returns)) if returns else None,
            "episode_length": float(np.mean(lengths)) if lengths else None,
            "episodes": float(self.finished_count),
        }

    def _clipped(self, inputs: Mapping[str, Tensor], rewards: Tensor, actions: Tensor, mask: Tensor) -> Metrics:
        """How much of what was normalised is at the limit, and how much of what was done is beyond its bounds."""
        seen, paid = self.agent.observation_normaliser, self.agent.reward_normaliser
        told: Metrics = {}
        if seen is not None and seen.shapes:
            kept = mask.to(self.agent.device)
            flat = [inputs[path].reshape(*mask.shape, -1) for path in seen.shapes]
            told["observations_clipped"] = seen.at_limit(torch.cat(flat, -1), kept)
        if paid is not None:
            told["rewards_clipped"] = paid.at_limit(rewards, mask)
        bounds = self.agent.bounds
        if bounds is not None and bounds.bounded.any():
            told["actions_clipped"] = share_of(bounds.beyond(actions)[mask])
        return told

    def state_dict(self) -> dict[str, Any]:
        """Environments (as actions to replay), running returns, and the last episodes."""
        return {
            "environments": self.environments.state_dict(),
            "discounted": self.discounted,
            "memory": self.memory,
            "starts": self.starts,
            "running_return": self.running_return,
            "running_length": self.running_length,
            "finished": [list(row) for row in self.finished],
            "finished_count": self.finished_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there. ``lost`` then lists environments that did not replay and began a new episode instead."""
        self.observations, self.lost = self.environments.load_state_dict(state["environments"])
        self.discounted = state["discounted"].clone()
        self.memory = None if state["memory"] is None else state["memory"].to(self.agent.device)
        self.starts = torch.as_tensor(state["starts"]).numpy().copy()
        self.running_return = torch.as_tensor(state["running_return"]).numpy().copy()
        self.running_length = torch.as_tensor(state["running_length"]).numpy().copy()
        self.finished = deque(((float(r), int(n)) for r, n in state["finished"]), maxlen=EPISODES_REMEMBERED)
        self.finished_count = state["finished_count"]
        self._forget(self.lost)


def check_actions(actions: Tensor) -> None:
    """Raise SurefootError, naming the policy, for actions that are not finite."""
    if not actions.isfinite().all():
        raise SurefootError(
            "policy: its actions are not finite, for observations that are; mend network.custom where there is one, or lower "
            "optimizer.learning_rate"
        )
