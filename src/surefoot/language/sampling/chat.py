"""A conversation with a model, turn by turn: what it is asked, and its answer as it grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.language.extras import quiet_transformers
from surefoot.language.models.language_model import LanguageModel
from surefoot.language.models.loading import context_length
from surefoot.language.sampling.sampler import cut_at_stop, sample

PARTIAL = "\ufffd"
"""what part of a character decodes to"""


@dataclass(frozen=True)
class ChatOptions:
    """How answers are drawn: as in ``LanguageModel.generate``. An answer ends where the model's context does, at the latest."""

    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 1
    greedy: bool = False
    stop: tuple[str, ...] = ()


class Chat:
    """A model, and what was said so far.

    With a chat template, every answer follows the whole conversation. Without one there is no form for what was said before:
    each line is a prompt by itself, which the model continues.
    """

    def __init__(self, model: LanguageModel, options: ChatOptions) -> None:
        self.model, self.options = model, options
        self.remembers = bool(model.tokens.tokenizer.chat_template)
        """whether there is a chat template"""
        self.messages: list[dict[str, str]] = []
        self.answers = 0
        """so many were drawn, each from a random stream of its own"""

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = []

    def answer(self, line: str, write: Callable[[str], None] = lambda piece: None) -> str:
        """The answer to a line; ``write`` gets it piece by piece. A line that is refused, or interrupted, was not said.

        Raises SurefootError when the model's context has no room left, or the chat template refuses the conversation.
        """
        tokens, options = self.model.tokens, self.options
        said = [*self.messages, {"role": "user", "content": line}]
        with quiet_transformers():  # a tokenizer warns of text longer than the context, which is refused here
            prompt = tokens.encode_prompt(said if self.remembers else line)
        context = context_length(self.model.model)
        room = options.max_tokens if context is None else min(options.max_tokens, context - len(prompt))
        if room < 1:
            remedy = "forget the conversation with /reset" if self.messages else "shorten the line"
            raise SurefootError(f"chat: the prompt has {len(prompt)} tokens and the model's context is {context}; {remedy}")
        ids: list[int] = []
        written = ""

        def on_token(token: int) -> None:
            nonlocal written
            ids.append(token)
            text = stable_prefix(tokens.decode(ids), options.stop)
            if len(text) > len(written):
                write(text[len(written) :])
                written = text

        sample(
            self.model.model,
            [prompt],
            max_tokens=room,
            temperature=options.temperature,
            eos_ids=tokens.eos_ids,
            pad_id=tokens.pad_id,
            seeds=[derived_seed(options.seed, "chat", self.answers)],
            stop=options.stop,
            decode=tokens.decode,
            greedy=options.greedy,
            on_token=on_token,
        )
        text = cut_at_stop(tokens.decode(ids), options.stop)
        write(text[len(written) :])
        self.answers += 1
        if self.remembers:
            self.messages = [*said, {"role": "assistant", "content": text}]
        return text


def stable_prefix(text: str, stop: Sequence[str]) -> str:
    """The beginning of a text that no further token changes: without part of a character, or of a stop string, at its end."""
    text = cut_at_stop(text, stop).rstrip(PARTIAL)
    parts = (length for word in stop for length in range(1, len(word)) if text.endswith(word[:length]))
    return text[: len(text) - max(parts, default=0)]
