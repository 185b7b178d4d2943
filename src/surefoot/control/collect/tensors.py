"""Rollouts of tensor environments: all that a step needs stays on the policy's device, and no step waits for it.

What only the host can decide (is everything finite, which episodes have ended) is decided once per rollout.
"""

import math
from typing import Any

import torch
from torch import Tensor

from surefoot.control.agent import Agent, CompiledActor
from surefoot.control.collect import BY_ROW, check_actions
from surefoot.control.collect.episodes import RECENT_EPISODES, EpisodeLog
from surefoot.control.collect.scoring import Acted, Finals, Scorer, rollout_of, steps_outside
from surefoot.control.collect.symmetry import Symmetry
from surefoot.control.environments.looped import Lost
from surefoot.control.environments.observations import SUCCESS, not_finite_message
from surefoot.control.environments.tensor import TensorEnvironments, TensorStep
from surefoot.control.networks import EPISODE_STARTS
from surefoot.control.normalise import sent_actions
from surefoot.control.spaces import MASK, part_named
from surefoot.core.rollout import LearnerState, Metrics, Rollout
from surefoot.core.seeding import rank_generator
from surefoot.core.timer import Timer
from surefoot.errors import NotFiniteError, SurefootError
from surefoot.ranks.collectives import all_sum, exact_device, exchange, together, world_size

ROWS_PER_PASS = 4096
"""steps per forward pass without gradient; more would not stay in a core's cache"""


class TensorCollector:
    """Rollouts of an agent in tensor environments.

    environments    this rank's share
    agent           its policy acts; its normalisers are frozen during a rollout and updated after it
    steps           T
    compiled        act with a compiled program
    symmetry        adds mirror images to the rollouts
    """

    raw = None
    """traces can't be replayed"""

    def __init__(
        self,
        environments: TensorEnvironments,
        agent: Agent,
        steps: int,
        compiled: bool = False,
        symmetry: Symmetry | None = None,
    ) -> None:
        self.environments, self.agent, self.steps, self.symmetry = environments, agent, steps, symmetry
        self.actor = CompiledActor(agent).tensor_actor if compiled else agent.tensor_actor
        self.score = Scorer(agent, ROWS_PER_PASS, compiled)
        self.send = sent_actions(environments.action_space, agent.recipe.normalise.actions, environments.device)
        self.observations = environments.reset()
        count, device = environments.count, environments.device
        self.exact = torch.float64 if exact_device(device) == device else torch.float32
        """the type of sums over an episode"""
        self.discounted = torch.zeros(count, dtype=torch.float64, device=exact_device(device))
        self.running_return = torch.zeros(count, dtype=self.exact, device=device)
        self.running_length = torch.zeros(count, dtype=torch.int64, device=device)
        self.lstm_state = agent.policy.initial_lstm_state(count)
        self.starts = torch.ones(count, dtype=torch.bool, device=device)
        self.log = EpisodeLog(environments.name, environments.first, agent.recipe.rollout.info)
        self.steps_taken = 0
        self.lost: Lost = {}

    def use_eager(self) -> None:
        """Act and score without compiled programs from the next rollout on."""
        self.actor, self.score = self.agent.tensor_actor, Scorer(self.agent, ROWS_PER_PASS)

    def collect(self, state: LearnerState) -> Rollout:
        """One rollout under the current policy.

        Raises NotFiniteError, naming row and step, when an observation or reward is not finite; all rows then start new
        episodes.
        """
        generator = rank_generator(state.generators["sample"])
        before = self.lstm_state
        try:
            with together():
                steps = self._act_out(generator, state.timer)
                acted = steps.acted(self.observations, before, self.lstm_state)
                with state.timer.detail("checks"):
                    self._check(acted, steps)
                    self._add_episodes(steps)
        except NotFiniteError:  # on any rank
            self._restart()
            raise
        self.log.exchange()
        metrics = self.log.metrics() | steps.log_metrics() | self._guessed(steps, acted)
        rollout, self.discounted = rollout_of(
            self.agent, acted, self.discounted, metrics, state.timer, self.score, self.symmetry
        )
        return rollout

    def _act_out(self, generator: torch.Generator, timer: Timer) -> "Steps":
        act = timer.timed("acting", self.actor(generator, self.steps))
        take_step = timer.timed("environment", self.environments.step)
        steps = Steps(self.steps, self._names())
        for _ in range(self.steps):
            steps.see(self.observations, self.starts, self.running_length)
            actions, self.lstm_state = act(steps.observations, self.lstm_state, self.starts)
            step = take_step(self.send(actions))
            done = step.terminated | step.truncated
            self.running_return += step.scores
            self.running_length += 1 if step.ignored is None else ~step.ignored
            steps.add(actions, step, done, self.running_return, self.lstm_state)
            self.running_return.masked_fill_(done, 0)
            self.running_length.masked_fill_(done, 0)
            self.starts = done if step.ignored is None else done | (step.ignored & self.starts)
            self.observations = step.observations
        # Copies: the environment may write into its tensors before the next rollout.
        self.observations = {path: x.clone() for path, x in self.observations.items()}
        return steps

    def _names(self) -> tuple[str, ...]:
        names = self.agent.recipe.rollout.info
        return SUCCESS if names is None else names

    def _check(self, acted: Acted, steps: "Steps") -> None:
        """What a step does not wait for: finite numbers, integers that the space has, and masks that allow an action."""
        if not acted.mask.any():
            raise SurefootError(f"rollout.steps={self.steps}: all rows only reset in this rollout (NEXT_STEP); set at least 2")
        if MASK in acted.observed:
            self._check_masks(acted.observed[MASK])
        if acted.finals is not None and steps.overwritten:
            self._check_overwritten(acted.finals, steps.overwritten)
        integers = {path: part for path, part in self.environments.parts.items() if part.bounds is not None}
        for path, outside in steps_outside(acted.observed, integers).items():
            row, step = outside.nonzero()[0].tolist()
            where = f"row {self.environments.first + row}, step {step} of the rollout"
            what = f"{integers[path].named()} outside {integers[path].space}"
            raise SurefootError(f"{self.environments.name}: returned {what} for {where}; fix the environment")
        floats = {path: x for path, x in acted.observed.items() if x.is_floating_point()}
        finals = {} if acted.finals is None else acted.finals.observations
        others = [tree[path] for tree in (acted.last, finals) for path in floats if path in tree]
        # A sum is not finite if an entry is not.
        if torch.stack([x.float().sum() for x in (*floats.values(), acted.rewards, *others)]).isfinite().all():
            return
        place = f"{self.environments.name}: the observation in infos['final_obs']"
        where = f"{place} is not finite as float32"
        shown = {path: torch.cat([x, acted.last[path].unsqueeze(1)], 1) for path, x in floats.items()}
        for name, x, after in [(part_named(path), x, 0) for path, x in shown.items()] + [("reward", acted.rewards, 1)]:
            bad = ~x.float().isfinite().reshape(*x.shape[:2], -1).all(-1)
            if bad.any():
                step, row = bad.t().nonzero()[0].tolist()
                check_actions(acted.actions[:, : step + after])
                at = (self.running_length[row] if step == self.steps else steps.buffers["lengths"][step, row]) + after
                where = not_finite_message(self.environments.name, name, self.environments.first + row, int(at))
                break
        raise NotFiniteError(f"{where}; the rollout is discarded and the update skipped")

    def _check_overwritten(self, finals: Finals, overwritten: dict[int, str]) -> None:
        """Final observations that are the tensor of the observations show truncated rows after their reset."""
        for step, row in zip(finals.steps.tolist(), finals.rows.tolist(), strict=True):
            if step in overwritten:
                where = f"{overwritten[step]}, row {self.environments.first + row}, step {step} of the rollout"
                raise SurefootError(
                    f"{self.environments.name}: returned final_obs in the memory of the observations, which the reset has "
                    f"overwritten ({where}); return a copy from before the reset"
                )

    def _check_masks(self, masks: Tensor) -> None:
        for of_choice in torch.split(masks, list(self.environments.choices or ()), -1):
            if len(nothing := (~of_choice.any(-1)).nonzero()):
                row, step = nothing[0].tolist()
                raise SurefootError(
                    f"{self.environments.name}: returned an action mask that allows no action (all false) for row {row}, step "
                    f"{step} of the rollout; fix the environment"
                )

    def _restart(self) -> None:
        self.observations = self.environments.reset()
        for x in (self.discounted, self.running_return, self.running_length):
            x.zero_()
        self.starts = torch.ones_like(self.starts)
        self.lstm_state = self.agent.policy.initial_lstm_state(self.environments.count)

    def _add_episodes(self, steps: "Steps") -> None:
        """Add the episodes that ended, of which the recent ones come to the host."""
        ended = torch.stack(steps.done).nonzero()  # by time, then row
        recent = ended[-RECENT_EPISODES:]
        self.log.uncounted += len(ended) - len(recent)
        names, table = steps.numbers_of(recent)
        for (t, row), (total, length, *numbers) in zip(recent.tolist(), table.tolist(), strict=True):
            numbers_of_episode = steps.known | dict(zip(names, numbers, strict=True))
            self.log.add(self.steps_taken + t + 1, row, total, int(length), numbers_of_episode)
        self.steps_taken += self.steps

    def _guessed(self, steps: "Steps", acted: Acted) -> Metrics:
        """The share of truncated episodes whose final observation is missing: V of the observation before stands in."""
        if not steps.without_finals:
            return {}
        cut = acted.truncated & ~acted.terminated
        guessed = cut[:, steps.without_finals].sum()
        some, total = all_sum(torch.stack([guessed, cut.sum()])).tolist()
        return {"truncations_estimated": some / total} if total else {}

    def state_dict(self) -> dict[str, Any]:
        """The environments if they can save their state, running returns, and the recent episodes.

        All ranks must call this; of several ranks only the episodes are kept, so all rows start new ones.
        """
        if world_size() > 1:
            exchange(None)
            return {"environments": {"resets": self.environments.resets}, **self.log.state_dict()}
        return {
            "environments": self.environments.state_dict(),
            "observations": self.observations,
            "memory": self.lstm_state,
            "steps_taken": self.steps_taken,
            **{name: getattr(self, name) for name in BY_ROW},
            **self.log.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. ``lost`` then lists the rows that start new episodes."""
        self.log.load_state_dict(state)
        self.steps_taken = int(state.get("steps_taken", 0))
        saved = {} if world_size() > 1 else {path: torch.as_tensor(x) for path, x in state.get("observations", {}).items()}
        self.observations, self.lost = self.environments.load_state_dict(state["environments"], saved)
        for name in BY_ROW:
            own = getattr(self, name)
            fresh = torch.ones_like(own) if name == "starts" else torch.zeros_like(own)
            setattr(self, name, fresh if self.lost else torch.as_tensor(state[name]).to(own, copy=True))
        self.lstm_state = self.agent.policy.initial_lstm_state(self.environments.count)
        if not self.lost and self.lstm_state is not None:
            self.lstm_state = state["memory"].to(self.agent.device)


class Steps:
    """The steps of a rollout as they come, time first; every tensor that the environment returned is copied."""

    def __init__(self, count: int, names: tuple[str, ...]) -> None:
        self.count, self.names = count, names
        self.time = -1
        self.buffers: dict[str, Tensor] = {}
        """[T, B, ...] each"""
        self.observations: dict[str, Tensor] = {}
        """those of the present step, copied"""
        self.paths: list[str] = []
        self.actions: list[Tensor] = []
        self.starts: list[Tensor] = []
        self.done: list[Tensor] = []
        self.states: list[Tensor] = []
        self.ignored: list[Tensor] = []
        self.known: dict[str, float] = {}
        """every name of a number in the infos, for errors"""
        self.without_finals: list[int] = []
        """steps in which the environment returned no final observations"""
        self.overwritten: dict[int, str] = {}
        """a part whose final observations are those after the resets, by step"""
        self.logged: dict[str, tuple[Any, int]] = {}

    def _keep(self, name: str, x: Tensor) -> Tensor:
        """Copy a tensor [B, ...] of the present step, and return the copy."""
        if name not in self.buffers:
            self.buffers[name] = x.new_empty((self.count, *x.shape))
        kept = self.buffers[name][self.time]
        kept.copy_(x)
        return kept

    def see(self, observations: dict[str, Tensor], starts: Tensor, lengths: Tensor) -> None:
        """The observations that the next actions are for, and the steps of the episodes before them."""
        self.time += 1
        self.paths = list(observations)
        self.observations = {path: self._keep(f"observed {path}", x) for path, x in observations.items()}
        self.starts.append(starts)
        self._keep("lengths", lengths)

    def add(self, actions: Tensor, step: TensorStep, done: Tensor, returns: Tensor, lstm_state: Tensor | None) -> None:
        """The outcome of the actions."""
        self.actions.append(actions)
        self.done.append(done)
        self._keep("rewards", step.rewards)
        self._keep("terminated", step.terminated)
        self._keep("truncated", step.truncated)
        self._keep("returns", returns)
        if step.ignored is not None:
            self.ignored.append(step.ignored)
        else:
            if step.finals is None:
                self.without_finals.append(self.time)
            if step.overwritten:
                self.overwritten[self.time] = step.overwritten[0]
            for path, x in (self.observations if step.finals is None else step.finals).items():
                if path != MASK:
                    self._keep(f"final {path}", x)
        self.known |= dict.fromkeys(step.numbers, math.nan)
        for name in self.names:
            if name in step.numbers:
                self._keep(f"number {name}", step.numbers[name].to(torch.float32))
        if lstm_state is not None:
            self.states.append(lstm_state)
        for name, value in step.log.items():
            total, times = self.logged.get(name, (0.0, 0))
            self.logged[name] = total + value, times + 1

    def acted(self, last: dict[str, Tensor], before: Tensor | None, after: Tensor | None) -> Acted:
        """The steps, rows first."""
        mask = torch.ones_like(self.buffers["terminated"])
        if self.ignored:
            mask = ~torch.stack(self.ignored)
        observed = {path: self.buffers[f"observed {path}"].transpose(0, 1) for path in self.paths}
        if before is not None:
            observed[EPISODE_STARTS] = (torch.stack(self.starts) & mask).transpose(0, 1)
        terminated, truncated = self.buffers["terminated"], self.buffers["truncated"]
        return Acted(
            observed=observed,
            actions=torch.stack(self.actions).transpose(0, 1),
            rewards=self.buffers["rewards"].transpose(0, 1),
            terminated=terminated.transpose(0, 1),
            truncated=truncated.transpose(0, 1),
            mask=mask.transpose(0, 1),
            last=last,
            lstm_state=None if before is None or after is None else (before, after),
            finals=None if self.ignored else self._finals(truncated & ~terminated),
        )

    def _finals(self, cut: Tensor) -> Finals | None:
        steps, rows = cut.nonzero().unbind(1)
        if not len(rows):
            return None
        paths = [path for path in self.paths if path != MASK]
        observations = {path: self.buffers[f"final {path}"][steps, rows] for path in paths}
        state = (
            torch.stack([self.states[t][b] for t, b in zip(steps.tolist(), rows.tolist(), strict=True)])
            if self.states
            else None
        )
        return Finals(rows, steps, observations, state)

    def numbers_of(self, places: Tensor) -> tuple[list[str], Tensor]:
        """Return, length and the numbers of episodes that ended at [n, 2] (step, row), with the names of the numbers."""
        names = [name for name in self.names if f"number {name}" in self.buffers]
        at = places.unbind(1)
        columns = [self.buffers[key][at] for key in ("returns", "lengths", *(f"number {name}" for name in names))]
        columns[1] = columns[1] + 1
        return names, torch.stack([x.to(columns[0].dtype) for x in columns], 1).cpu()

    def log_metrics(self) -> Metrics:
        """Means of what the environment logs itself."""
        means = {name: total / times for name, (total, times) in self.logged.items()}
        return {f"log_{name}": float(mean) for name, mean in means.items()}
