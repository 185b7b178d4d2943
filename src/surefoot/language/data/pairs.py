"""Pairs of a model's own answers, labelled by somebody who knows better: what reward models learn from."""

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surefoot.language.data.tokens import Messages, columns_of

if TYPE_CHECKING:
    from surefoot.language.models.language_model import LanguageModel

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
    size: int = 400,
) -> list[Pair]:
    """Each prompt with two answers to it, drawn for ``size`` prompts at a time."""
    written: list[str] = []
    for start in range(0, len(prompts), size):
        written += model.generate(
            prompts[start : start + size],
            samples=2,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed + start,
            stop=stop,
        )
    return list(zip(prompts, written[::2], written[1::2], strict=True))


def prefers_first(first: float, second: float, noise: float, draw: random.Random) -> bool | None:
    """Whether the first of two answers is chosen, by their scores; None for a draw without noise.

    With noise it is with probability σ((first − second) / noise), which is the model that a Bradley–Terry reward model assumes.
    """
    if noise > 0:
        return draw.random() < _sigmoid((first - second) / noise)
    return None if first == second else first > second


def pair_row(prompt: Prompt, chosen: str, rejected: str) -> dict[str, Any]:
    """A row of pairs as ``kind = "reward"`` and ``kind = "dpo"`` read it."""
    answers = {"chosen": format_answer(prompt, chosen), "rejected": format_answer(prompt, rejected)}
    return {"prompt": prompt, **answers, **columns_of(prompt)}


def format_answer(prompt: Prompt, text: str) -> str | list[dict[str, str]]:
    """An answer in the shape of its prompt: text after text, a message after messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def answer_text(answer: str | list[dict[str, str]]) -> str:
    """What such an answer says."""
    return answer if isinstance(answer, str) else str(answer[-1]["content"])


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
