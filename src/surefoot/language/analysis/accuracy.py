"""How often a model is right before it is trained on a verifier: what is there to learn from?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefoot.language.data import datasets as data
from surefoot.language.data.rows import read_rows
from surefoot.language.models.language_model import LanguageModel
from surefoot.language.online.groups import with_signal
from surefoot.language.rewards.terms import Reward, Scores

SCARCE = 0.02
"""sampled accuracy below which next to no response teaches anything"""


@dataclass(frozen=True)
class Accuracy:
    """Of a model on some prompts, by a reward that gives from 0 to 1; responses without a score don't count. Those that were
    cut are wrong, as for training that pays a penalty for them, unless they were asked to count.
    """

    prompts: int
    samples: int
    """responses to each prompt"""
    greedy: float
    """mean reward of the likeliest responses"""
    sampled: float
    """mean reward of the samples: what training begins with"""
    mixed: float
    """share of the prompts whose samples differ in reward, a cut one's being 0: the others teach a group baseline nothing"""
    cut: float
    """share of the samples that were cut, at ``max_tokens``"""
    max_tokens: int
    keep_cut: bool
    """whether these counted as what they earned"""

    def lines(self) -> list[str]:
        """For a person, with what it means for training."""
        told = [
            f"greedy {self.greedy:.3f}, sampled {self.sampled:.3f} ({self.samples} samples to each of {self.prompts} prompts)",
            f"samples of one prompt differ in reward at {self.mixed:.0%} of the prompts",
        ]
        if self.cut:
            how = "judged like the others" if self.keep_cut else "wrong"
            told.append(f"{self.cut:.0%} of the samples were cut at {self.max_tokens} tokens: {how}")
        if self.sampled < SCARCE and self.cut > 1 - SCARCE and not self.keep_cut:
            told.append("next to no sample ends: begin with SFT on demonstrations, or allow more tokens")
        elif self.sampled < SCARCE:
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
    stop: Sequence[str] = (),
    keep_cut: bool = False,
) -> Accuracy:
    """Answer the first prompts of a file greedily and by sampling, and let a reward judge both.

    keep_cut   a response that the length limit cut earns what the reward says; else it is wrong

    Raises SurefootError for rows that are no prompts, and for what the reward can't judge.
    """
    rows = data.prompts(read_rows(path)[:prompts], model.tokens, 2**53)
    count = len(rows.prompts)

    def judged(each: int, greedy: bool) -> tuple[Scores, Tensor, Tensor]:
        """Scores, what they come to, and which responses ended.   [N] both"""
        written, ended = model.generate_ended(
            rows.prompts, samples=each, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop, greedy=greedy
        )
        asked, whole = data.repeat_prompts(rows, range(count), each), torch.tensor(ended)
        scores = reward(asked.prompts, written, asked.columns)
        return scores, scores.total.where(whole | keep_cut, 0.0), whole

    drawn, earned, ended = judged(samples, greedy=False)
    likeliest, best, _ = judged(1, greedy=True)
    mixed = float(with_signal(earned, drawn.valid, samples).float().mean())
    means = likeliest.mean_of(best) or 0.0, drawn.mean_of(earned) or 0.0
    return Accuracy(count, samples, *means, mixed, 1 - float(ended.float().mean()), max_tokens, keep_cut)
