"""Chat with a model: the conversation so far, and answers written as they are drawn."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.language import quiet_transformers
from surefoot.language.language_model import LanguageModel
from surefoot.language.models.loading import context_length
from surefoot.language.sampling.ends import Ends, cut_at_stop
from surefoot.language.sampling.engines import Request, Samples
from surefoot.language.sampling.sampler import sample

if TYPE_CHECKING:
    from surefoot.language.online.play import Player

PARTIAL = "\ufffd"
"""the text of an incomplete character"""


@dataclass(frozen=True)
class ChatOptions:
    """Sampling options, as in ``LanguageModel.generate``. An answer ends at the model's context at the latest."""

    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 1
    greedy: bool = False
    stop: tuple[str, ...] = ()


class Chat:
    """A model and the conversation so far.

    With a chat template, every answer follows the whole conversation. Without one, each line is a separate prompt, which the
    model continues.

    player  calls tools; an environment is reset at each line
    plain   do without the chat template, as a model was trained
    """

    def __init__(self, model: LanguageModel, options: ChatOptions, player: "Player | None" = None, plain: bool = False) -> None:
        self.model, self.options, self.player = model, options, player
        self.remembers = bool(model.tokens.tokenizer.chat_template) and not plain
        """whether the chat template is used"""
        self.messages: list[Any] = []
        self.answers = 0
        """number of answers drawn; each has its own random stream"""

    def reset(self) -> None:
        """Clear the conversation."""
        self.messages = []

    def answer(self, line: str, write: Callable[[str], None] = lambda piece: None) -> str:
        """The answer to a line, passed to ``write`` piece by piece. A rejected or interrupted line leaves the conversation
        unchanged.

        Raises SurefootError if the model's context is full, or if the chat template rejects the conversation.
        """
        options = self.options
        if self.player is not None:
            return self._with_tools(self.player, line, write)
        tokens, ends = self.model.tokens, Ends(self.model.tokens, options.stop)
        messages = [*self.messages, {"role": "user", "content": line}]
        with quiet_transformers():  # the tokenizer warns of text longer than the context, which is rejected here
            prompt = tokens.encode_prompt(messages if self.remembers else line)
        context = context_length(self.model.model)
        limit = options.max_tokens if context is None else min(options.max_tokens, context - len(prompt))
        if limit < 1:
            remedy = "clear the conversation with /reset" if self.messages else "shorten the line"
            raise SurefootError(f"chat: the prompt has {len(prompt)} tokens and the model's context is {context}; {remedy}")
        sampling: dict[str, Any] = {"max_tokens": limit, "temperature": options.temperature, "greedy": options.greedy}
        seeds = [derived_seed(options.seed, "chat", self.answers)]
        [ids] = write_response(self.model, prompt, ends, write, seeds=seeds, **sampling).responses()
        self.answers += 1
        if self.remembers:
            self.messages = [*messages, {"role": "assistant", "content": ends.text(ids, special=True)}]
        return ends.text(ids)

    def _with_tools(self, player: "Player", line: str, write: Callable[[str], None]) -> str:
        """The answer to a line with the calls and results before it, all at once."""
        prompt = [*self.messages, {"role": "user", "content": line}]
        seed = derived_seed(self.options.seed, "chat", self.answers)
        talk = player.play([prompt], **{**asdict(self.options), "seed": seed})[0]
        write(talk.transcript)
        self.answers += 1
        self.messages = [*talk.history, talk.messages[-1]]
        return talk.transcript


def write_response(
    model: LanguageModel, prompt: Sequence[int], ends: Ends, write: Callable[[str], None], **options: Any
) -> Samples:
    """Draw one response with these options of a request; pass its text to ``write``, piece by piece as soon as it is sure."""
    ids: list[int] = []
    written = ""

    def on_token(token: int) -> None:
        nonlocal written
        ids.append(token)
        text = stable_prefix(ends.text(ids), ends.stop)
        if len(text) > len(written):
            write(text[len(written) :])
            written = text

    drawn = sample(model.model, Request([prompt], **options, **ends.options), on_token=on_token)
    write(ends.text(ids)[len(written) :])
    return drawn


def stable_prefix(text: str, stop: Sequence[str]) -> str:
    """The beginning of a text that further tokens can't change: no incomplete character or stop string at its end."""
    text = cut_at_stop(text, stop).rstrip(PARTIAL)
    parts = (length for word in stop for length in range(1, len(word)) if text.endswith(word[:length]))
    return text[: len(text) - max(parts, default=0)]
