"""How often a model is right before it is trained on a verifier: what is there to learn from?"""

from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot.language import data
from surefoot.language.collect import repeated
from surefoot.language.groups import with_signal
from surefoot.language.rewards import Reward, Scores
from surefoot.language.rows import read_rows
from surefoot.language.trained import LanguageModel

SCARCE = 0.02
"""sampled accuracy below which next to no response teaches anything"""


@dataclass(frozen=True)
class Accuracy:
    """Of a model on some prompts, by a reward that gives from 0 to 1; responses without a score don't count."""

    prompts: int
    samples: int
    """responses to each prompt"""
    greedy: float
    """mean reward of the likeliest responses"""
    sampled: float
    """mean reward of the samples: what training begins with"""
    mixed: float
    """share of the prompts whose samples differ in reward: the others teach a group baseline nothing"""

    def lines(self) -> list[str]:
        """For a person, with what it means for training."""
        told = [
            f"greedy {self.greedy:.3f}, sampled {self.sampled:.3f} ({self.samples} samples to each of {self.prompts} prompts)",
            f"samples of one prompt differ in reward at {self.mixed:.0%} of the prompts",
        ]
        if self.sampled < SCARCE:
            told.append("next to no sample is right: there is no signal; begin with SFT on demonstrations, or easier problems")
        elif self.sampled > 1 - SCARCE:
            told.append("next to every sample is right: take harder problems")
        return told


@torch.no_grad()
def accuracy(
    model: LanguageModel,
    path: str | Path,
    reward: Reward,
    *,
    prompts: int = 64,
    samples: int = 4,
    max_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 1,
) -> Accuracy:
    """Answer the first prompts of a file greedily and by sampling, and let a reward judge both.

    Raises SurefootError for rows that are no prompts, and for what the reward can't judge.
    """
    rows = data.prompts(read_rows(path)[:prompts], model.tokens, 2**53)
    count = len(rows.prompts)

    def scores(each: int, greedy: bool) -> Scores:
        written: list[str] = model.generate(
            rows.prompts, samples=each, max_tokens=max_tokens, temperature=temperature, seed=seed, greedy=greedy
        )
        asked = repeated(rows, range(count), each)
        return reward(asked.prompts, written, asked.columns)

    drawn, likeliest = scores(samples, greedy=False), scores(1, greedy=True)
    mixed = float(with_signal(drawn.total, drawn.valid, samples).float().mean())
    return Accuracy(count, samples, likeliest.mean_of(likeliest.total) or 0.0, drawn.mean_of(drawn.total) or 0.0, mixed)
