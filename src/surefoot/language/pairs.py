"""Pairs of a model's answers, labelled by a scorer, as rows for reward models and DPO."""

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surefoot.language.data.chat import Messages, columns_of

if TYPE_CHECKING:
    from surefoot.language.language_model import LanguageModel

Prompt = str | Messages
Pair = tuple[Any, str, str]
"""a prompt and two answers"""


def sample_pairs(
    model: "LanguageModel",
    prompts: Sequence[Any],
    *,
    max_tokens: int,
    seed: int,
    temperature: float = 1.0,
    stop: Sequence[str] = (),
    special_tokens: bool = False,
    size: int = 400,
) -> list[Pair]:
    """Sample two answers to each prompt, for ``size`` prompts at a time."""
    answers: list[str] = []
    for start in range(0, len(prompts), size):
        answers += model.generate(
            prompts[start : start + size],
            samples=2,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed + start,
            stop=stop,
            special_tokens=special_tokens,
        )
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
