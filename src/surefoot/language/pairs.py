"""Pairs of a model's answers, labelled by a scorer, as rows for reward models and DPO."""

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surefoot.language.data.chat import Messages, columns_of
from surefoot.terminal import phase

if TYPE_CHECKING:
    from surefoot.language.language_model import LanguageModel

Prompt = str | Messages
Pair = tuple[Any, str, str]
"""a prompt and two answers"""
AT_ONCE = 400
"""prompts that are answered at a time"""


def sample_pairs(model: "LanguageModel", prompts: Sequence[Any], *, seed: int, **options: Any) -> list[Pair]:
    """Sample two answers to each prompt, with other options of ``LanguageModel.generate``."""
    answers: list[str] = []
    for start in range(0, len(prompts), AT_ONCE):
        with phase(f"sampling answers to {len(prompts):,} prompts, {start:,} done"):
            answers += model.generate(prompts[start : start + AT_ONCE], samples=2, seed=seed + start, **options)
    return list(zip(prompts, answers[::2], answers[1::2], strict=True))


def prefers_first(first: float, second: float, noise: float, draw: random.Random) -> bool | None:
    """Whether the first of two answers is preferred, by their scores; None for a tie without noise.

    With noise the probability is σ((first − second) / noise), as in the Bradley–Terry model.
    """
    if noise > 0:
        return draw.random() < _sigmoid((first - second) / noise)
    return None if first == second else first > second


def pair_row(prompt: Prompt, chosen: str, rejected: str) -> dict[str, Any]:
    """A row for ``kind = "reward"`` and ``kind = "dpo"``."""
    answers = {"chosen": format_answer(prompt, chosen), "rejected": format_answer(prompt, rejected)}
    return {"prompt": prompt, **answers, **columns_of(prompt)}


def format_answer(prompt: Prompt, text: str) -> str | list[dict[str, str]]:
    """An answer in the format of its prompt: text for text, a message for messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
