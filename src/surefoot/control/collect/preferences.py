"""Rewards learned from comparisons of clips: which pairs are asked for and when, and what the labels teach.

Christiano et al. 2017 (arXiv 1706.03741). Clips are equally long pieces of episodes. Before the first update, rollouts of the
initial policy fill a pool of them and the first pairs are labelled; the rest follows at refits, chosen from the pool where the
reward models disagree most.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.control.agent import Agent
from surefoot.control.collect.scoring import Acted
from surefoot.control.environments.looped import Environments
from surefoot.core.rollout import LearnerState, Metrics
from surefoot.core.seeding import stream
from surefoot.errors import SurefootError
from surefoot.functional.preferences import labelled_clip_loss
from surefoot.recipes.control import ClipPreferences

CANDIDATES = 10
"""random pairs for each pair that is asked for"""
POOL = 1500
"""newest clips that pairs are chosen from"""
CLIPS_PER_LABEL = 0.75
"""clips for each label of the first ones, at least"""
MEMBERS, WIDTH = 3, 64
FIRST, AGAIN, BATCH = 400, 100, 64
"""gradient steps of the first fit, those of a later one, and pairs in each"""
WRONG = 0.1
"""assumed share of random labels"""


class Clips(NamedTuple):
    """Clips, or steps.   [..., steps, *] each"""

    inputs: Tensor
    """[..., inputs] float32: what reward models read"""
    rewards: Tensor
    """the task's"""
    places: Tensor
    """[..., 3] environment, episode, and steps since its reset; [..., 0] unless clips are rendered"""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Clips":
        """The clips with each tensor changed."""
        return Clips(*map(change, self))

    def between(self, start: int, end: int | None) -> "Clips":
        """A part of the clips."""
        return self.map(lambda x: x[start:end])


def joined(parts: list[Clips]) -> Clips:
    """Clips one after the other."""
    return Clips(*map(torch.cat, zip(*parts, strict=True)))


Labels = tuple[Tensor, Tensor]
"""numbers of the labelled pairs, and 1 for each whose first clip is better, 0 for the second, ½ for equal ones"""
Tapes = dict[tuple[int, int], Tensor]
"""environment and episode -> the actions sent to the environment since its reset"""
Judge = Callable[[int, Clips, Tapes], Labels]
"""labels the pairs of a round, or raises LabelsNeededError until people have"""


class Preferences:
    """The pool of clips, the labelled pairs and the reward models of a run.

    judge   people; None: the task's rewards, with ``errors``

    Raises SurefootError for observations or actions that reward models can't read.
    """

    def __init__(self, settings: ClipPreferences, agent: Agent, environments: Environments, judge: Judge | None) -> None:
        self.settings, self.agent, self.environments, self.judge = settings, agent, environments, judge
        seed, action_space = agent.recipe.seed, agent.action_space
        if unread := [path for path, part in agent.parts.items() if not part.vector]:
            raise SurefootError(
                f"preferences: reward models read vectors, and the observation has {unread[0]!r}; wrap the task"
            )
        if not isinstance(action_space, spaces.Box | spaces.Discrete):
            raise SurefootError(f"preferences: reward models read Box and Discrete actions, not {action_space}; wrap the task")
        self.choices = int(action_space.n) if isinstance(action_space, spaces.Discrete) else None
        self.send = agent.action_converter()
        shapes = [part.shape for part in agent.parts.values()]
        inputs = sum(map(math.prod, shapes)) + (self.choices or math.prod(action_space.shape or ()))
        self.models = RewardModels(inputs, seed, settings.weight_decay)
        self.generator = stream(seed, "preferences")
        self.nothing = Clips(torch.zeros(0, inputs), torch.zeros(0), torch.zeros(0, 3 if judge else 0, dtype=torch.int64))
        self.open = [self.nothing] * environments.count
        """the steps of each environment that are no whole clip yet"""
        self.pool = self.nothing.map(lambda x: x.new_zeros(0, settings.segment, *x.shape[1:]))
        self.pending: Clips | None = None
        """[pairs, 2, ...] that wait for labels"""
        self.pairs, self.labels = torch.zeros(0, 2, settings.segment, inputs), torch.zeros(0)
        self.tapes: Tapes = {}
        self.asked = self.rounds = 0
        self.accuracy: float | None = None
        """share of the newest labels that the reward models predicted before they were trained on them"""

    @property
    def first(self) -> int:
        """Labels before the first update."""
        return max(1, round(self.settings.labels * self.settings.first))

    @property
    def enough(self) -> bool:
        """Whether there are clips for the first labels."""
        return self.asked > 0 or len(self.pool.rewards) >= max(2, CLIPS_PER_LABEL * self.first)

    @property
    def metrics(self) -> Metrics:
        """Labels so far, and how well the newest were predicted."""
        known: Metrics = {} if self.accuracy is None else {"label_accuracy": self.accuracy}
        return {"labels_trained": len(self.labels), **known}

    # ---- clips -------------------------------------------------------------------------------------------------------------

    def add(self, acted: Acted) -> Tensor:
        """Cut the steps of a rollout into clips, for the pool; return their learned rewards [B, T].

        Raises SurefootError where an episode terminated, unless that is allowed.
        """
        if self.settings.terminations == "reject" and acted.terminated.any():
            raise SurefootError(
                f"preferences.terminations='reject': an episode of {self.environments.name} terminated, and comparisons of "
                "clips don't show whether longer episodes are better; use the task surefoot.control.horizon:fixed_horizon, "
                "or set terminations = 'keep'"
            )
        inputs, ended, new = self._inputs(acted), acted.terminated | acted.truncated, [self.pool]
        size = self.settings.segment
        for row, taken in enumerate(acted.mask):
            ends = [end + 1 for end in ended[row, taken].nonzero().flatten().tolist()]
            places = self._places(row, acted.actions[row, taken], ends)
            steps = Clips(inputs[row, taken], acted.rewards[row, taken], places)
            for start, end in zip([0, *ends], [*ends, len(places)], strict=True):
                steps_so_far = joined([self.open[row], steps.between(start, end)])
                whole = len(steps_so_far.rewards) // size * size
                new.append(steps_so_far.between(0, whole).map(lambda x: x.reshape(len(x) // size, size, *x.shape[1:])))
                self.open[row] = self.nothing if end in ends else steps_so_far.between(whole, None)
        self.pool = joined(new).map(lambda x: x[-POOL:].clone())
        kept = {(row, episode) for row, episode in self.pool.places[:, 0, :2].tolist()} if self.judge else set()
        self.tapes = {place: tape for place, tape in self.tapes.items() if place in kept}
        return self.models.rewards(inputs)

    def _inputs(self, acted: Acted) -> Tensor:
        """What reward models read.   [B, T, inputs]"""
        parts = [
            x.flatten(2) if x.dim() > 2 else x.unsqueeze(2) for path, x in acted.observed.items() if path in self.agent.parts
        ]
        if self.choices is not None:
            parts.append(nn.functional.one_hot(acted.actions.long(), self.choices))
        else:
            parts.append(torch.from_numpy(self.send(acted.actions)).flatten(2))
        return torch.cat([x.float() for x in parts], -1)

    def _places(self, row: int, actions: Tensor, ends: list[int]) -> Tensor:
        """Where steps come from; their actions go to the tapes.   [n, ...], the ends of episodes in it -> [n, 3]"""
        if self.judge is None:
            return torch.zeros(len(actions), 0, dtype=torch.int64)
        episode, before = self.environments.actions_before_mark(row)  # type: ignore[attr-defined]
        sent, lead, places = torch.from_numpy(self.send(actions)), torch.from_numpy(before), []
        for start, end in zip([0, *ends], [*ends, len(actions)], strict=True):
            self.tapes[row, episode] = torch.cat([lead, sent[start:end]]) if len(lead) else sent[start:end]
            places += [[row, episode, len(lead) + step] for step in range(end - start)]
            episode, lead = episode + 1, lead[:0]
        return torch.tensor(places, dtype=torch.int64).reshape(-1, 3)

    def forget_open(self, rows: list[int] | None = None) -> None:
        """Drop the steps that are no whole clip yet, where the next steps don't continue them."""
        for row in range(len(self.open)) if rows is None else rows:
            self.open[row] = self.nothing

    # ---- labels ------------------------------------------------------------------------------------------------------------

    def ask(self, state: LearnerState) -> None:
        """Choose pairs if labels are due, have them labelled, and train the reward models.

        Raises LabelsNeededError until people have labelled them; the pairs stay chosen.
        """
        if self.pending is None and (due := self._due(state)) > self.asked:
            self.pending, self.rounds, self.asked = self._choose(due - self.asked), self.rounds + 1, due
        if self.pending is None:
            return
        judge = self.judge or self._by_return
        numbers, labels = judge(self.rounds, self.pending, self.tapes)
        pairs = self.pending.inputs[numbers]
        if self.models.fits and len(decided := (labels != 0.5).nonzero().flatten()):
            with torch.no_grad():
                first, second = self.models(pairs[decided]).sum(-1).mean(0).unbind(-1)
            self.accuracy = float(((first > second) == labels[decided].bool()).float().mean())
        self.pairs, self.labels = torch.cat([self.pairs, pairs]), torch.cat([self.labels, labels])
        self.models.fit(self.pairs, self.labels, self.pool.inputs.flatten(0, 1), self.agent.recipe.seed)
        self.pending = None

    def _due(self, state: LearnerState) -> int:
        """How many labels are asked for up to now."""
        refits, passed = self.settings.refits, state.steps / state.total_steps / self.settings.until
        share = min(1.0, int(passed * refits) / refits) if self.models.fits else 0.0
        return self.first + round((self.settings.labels - self.first) * share)

    def _choose(self, count: int) -> Clips:
        """Random pairs of different clips; after the first fit those on which the reward models disagree most."""
        size, many = len(self.pool.rewards), count * (CANDIDATES if self.models.fits else 1)
        one = torch.randint(size, (many,), generator=self.generator)
        two = (one + torch.randint(1, size, (many,), generator=self.generator)) % size
        pairs = torch.stack([one, two], 1)
        if self.models.fits:
            with torch.no_grad():
                totals = self.models(self.pool.inputs).sum(-1)
            disagreement = torch.sigmoid(totals[:, one] - totals[:, two]).var(0)
            pairs = pairs[disagreement.argsort(descending=True, stable=True)[:count]]
        return self.pool.map(lambda x: x[pairs])

    def _by_return(self, number: int, pairs: Clips, tapes: Tapes) -> Labels:
        """Labels by the task's rewards, of which a share is wrong."""
        first, second = pairs.rewards.cpu().double().sum(-1).unbind(-1)
        labels = (first > second).float().masked_fill(first == second, 0.5)
        if self.settings.errors:  # else the same pairs are chosen as with people who answer like this
            labels = (labels - (torch.rand(len(labels), generator=self.generator) < self.settings.errors).float()).abs()
        return torch.arange(len(labels)), labels

    # ---- state -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it: labels, reward models with moments, pool, half-open clips, pairs that wait, and the generator."""
        return {
            "models": self.models.saved(),
            "generator": self.generator.get_state(),
            "open": [list(each) for each in self.open],
            "pool": list(self.pool),
            "pending": None if self.pending is None else list(self.pending),
            "pairs": self.pairs,
            "labels": self.labels,
            "tapes": {f"{row} {episode}": tape for (row, episode), tape in self.tapes.items()},
            "counts": [self.asked, self.rounds],
            "accuracy": self.accuracy,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.models.restore(state["models"])
        self.generator.set_state(state["generator"])
        self.open, self.pool = [Clips(*each) for each in state["open"]], Clips(*state["pool"])
        self.pending = None if state["pending"] is None else Clips(*state["pending"])
        self.pairs, self.labels, self.accuracy = state["pairs"], state["labels"], state["accuracy"]
        self.tapes = {
            (int(row), int(episode)): tape
            for (row, episode), tape in ((key.split(), tape) for key, tape in state["tapes"].items())
        }
        self.asked, self.rounds = state["counts"]


class RewardModels(nn.Module):
    """An ensemble of networks r(o, a), trained side by side: every weight has a leading axis of the members.

    Inputs are standardised by the steps of all known clips, and the rewards of each member on them have mean 0 and standard
    deviation 1, so that neither the offset nor the scale, which comparisons leave open, moves from fit to fit.
    """

    def __init__(self, inputs: int, seed: int, weight_decay: float) -> None:
        super().__init__()
        draw, sizes = stream(seed, "reward models"), (inputs, WIDTH, WIDTH, 1)
        layers = list(pairwise(sizes))
        weights = [torch.randn(MEMBERS, rows, columns, generator=draw) / rows**0.5 for rows, columns in layers]
        self.weights = nn.ParameterList(weights)
        self.biases = nn.ParameterList(torch.zeros(MEMBERS, 1, columns) for _, columns in layers)
        self.mean, self.std = nn.Buffer(torch.zeros(inputs)), nn.Buffer(torch.ones(inputs))
        self.shift, self.scale = nn.Buffer(torch.zeros(MEMBERS, 1)), nn.Buffer(torch.ones(MEMBERS, 1))
        self.adam = torch.optim.AdamW(self.parameters(), 1e-3, weight_decay=weight_decay)
        self.fits = 0

    def forward(self, x: Tensor) -> Tensor:
        """The members' rewards before shift and scale.   [..., inputs] -> [members, ...]"""
        h = ((x - self.mean) / self.std).clamp(-5, 5).reshape(-1, x.shape[-1]).expand(MEMBERS, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            h = torch.baddbmm(bias, nn.functional.leaky_relu(h) if weight is not self.weights[0] else h, weight)
        rewards: Tensor = h.reshape(MEMBERS, *x.shape[:-1])
        return rewards

    @torch.no_grad()
    def rewards(self, x: Tensor) -> Tensor:
        """The mean reward of the members.   [..., inputs] -> [...]"""
        rewards: Tensor = ((self(x).flatten(1) - self.shift) / self.scale).mean(0).reshape(x.shape[:-1])
        return rewards

    def fit(self, pairs: Tensor, preferences: Tensor, known: Tensor, seed: int) -> None:
        """Train on all labelled pairs.   [pairs, 2, steps, inputs], [pairs]

        known   the steps of all clips, labelled or not, [n, inputs]
        """
        self.mean.copy_(known.mean(0))
        self.std.copy_(known.std(0, correction=0) + 1e-3)
        draw = stream(seed, "fit", self.fits)
        for _ in range(FIRST if self.fits == 0 else AGAIN):
            batch = torch.randperm(len(pairs), generator=draw)[:BATCH]
            first, second = self(pairs[batch]).sum(-1).unbind(-1)
            loss = labelled_clip_loss(first, second, preferences[batch], WRONG).mean(1).sum()
            self.adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.adam.step()
        with torch.no_grad():
            rewards = self(known)
            self.shift.copy_(rewards.mean(1, keepdim=True))
            self.scale.copy_(rewards.std(1, keepdim=True) + 1e-6)
        self.fits += 1

    def saved(self) -> dict[str, Any]:
        """Weights, scales, moments and the number of fits."""
        moments = [self.adam.state[parameter] for parameter in self.parameters() if parameter in self.adam.state]
        return {"models": dict(self.state_dict()), "moments": [dict(each) for each in moments], "fits": self.fits}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what ``saved`` returned."""
        self.load_state_dict(saved["models"])
        self.fits = int(saved["fits"])
        for parameter, moments in zip(self.parameters(), saved["moments"], strict=False):
            self.adam.state[parameter] = {name: x.clone() for name, x in moments.items()}
