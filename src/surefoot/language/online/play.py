"""Conversations with tools outside training, as ``generate`` and ``chat`` have them."""

import sys
from collections.abc import Sequence
from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.language import quiet_transformers
from surefoot.language.data.chat import Messages, columns_of
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.loading import context_length
from surefoot.language.online.turns import Conversation, Environments
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import Request
from surefoot.language.sampling.sampler import sample
from surefoot.recipes.base import Recipe
from surefoot.recipes.callables import TURNS, load_function
from surefoot.recipes.language import LanguageRecipe, TurnSettings


class Player:
    """A model, and tools that it calls.

    recipe     that the model was trained by: its tools, if no others are given
    tools      names of others

    ``ready`` is False without any, as for a recipe whose environment answers whole turns.
    """

    def __init__(self, model: Any, tokens: Tokens, recipe: Recipe | None, tools: tuple[str, ...] = ()) -> None:
        self.model, self.tokens = model, tokens
        turns = recipe.turns if isinstance(recipe, LanguageRecipe) else TurnSettings()
        if tools:
            turns = TurnSettings(tools=tools, response_template=turns.response_template)
        self.turns, self.ready = turns, turns.conversations
        if turns.environment is not None:
            self.ready = not callable(getattr(load_function(TURNS, turns.environment, {}), "step", None))

    def play(
        self,
        prompts: Sequence[str | Messages],
        *,
        samples: int = 1,
        max_tokens: int = 64,
        seed: int = 1,
        first: int = 0,
        stop: Sequence[str] = (),
        **drawing: Any,
    ) -> list[Conversation]:
        """Conversations that begin with these prompts, prompt-major.

        max_tokens   of each turn
        first        number of the first conversation, for its seed
        drawing      other fields of a request: ``temperature``, ``greedy``

        Raises SurefootError if the tokenizer can't call tools, or if a prompt leaves no room for an answer.
        """
        room = (context_length(self.model) or sys.maxsize) - max_tokens
        environments = Environments(self.turns, (room, room), tolerated=0.0)
        environments.check(self.tokens, scored=True)
        ends = Ends(self.tokens, tuple(stop))
        rows = [{"prompt": prompt, **columns_of(prompt)} for prompt in prompts for _ in range(samples)]
        seeds = [derived_seed(seed, "generate", first + number) for number in range(len(rows))]
        options = {**drawing, **ends.options}
        with quiet_transformers():
            return environments.converse(
                rows, seeds, lambda ids, of_turn: sample(self.model, Request(ids, of_turn, max_tokens, **options)), ends
            )
