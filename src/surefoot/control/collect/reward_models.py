"""Small reward models of observation and action, which learn from labelled pairs of clips."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.seeding import stream
from surefoot.functional.preferences import labelled_clip_loss

MEMBERS, WIDTH = 3, 64
LEARNING_RATE, DECAY = 1e-3, 10.0
"""of AdamW. Strong decay matters with wrong labels (docs/benchmarks/people.md)"""
FIRST, AGAIN, BATCH = 400, 100, 64
"""gradient steps of the first fit, those of a later one, and pairs in each"""
WRONG = 0.1
"""assumed share of random labels"""


class RewardModels(nn.Module):
    """An ensemble of networks r(o, a), trained side by side: every weight has a leading axis of the members.

    Inputs are standardised by the steps of all known clips, and the rewards of each member on them have mean 0 and standard
    deviation 1, so that neither the offset nor the scale, which comparisons leave open, moves from fit to fit.
    """

    def __init__(self, inputs: int, seed: int) -> None:
        super().__init__()
        draw, sizes = stream(seed, "reward models"), (inputs, WIDTH, WIDTH, 1)
        layers = list(pairwise(sizes))
        weights = [torch.randn(MEMBERS, rows, columns, generator=draw) / rows**0.5 for rows, columns in layers]
        self.weights = nn.ParameterList(weights)
        self.biases = nn.ParameterList(torch.zeros(MEMBERS, 1, columns) for _, columns in layers)
        self.mean, self.std = nn.Buffer(torch.zeros(inputs)), nn.Buffer(torch.ones(inputs))
        self.shift, self.scale = nn.Buffer(torch.zeros(MEMBERS, 1)), nn.Buffer(torch.ones(MEMBERS, 1))
        self.adam = torch.optim.AdamW(self.parameters(), LEARNING_RATE, weight_decay=DECAY)
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
