"""Conversations as text and ids: the model's chat template, control tokens in messages, and where the assistant's text is."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

from surefoot.calls import DeadlineExceeded, with_deadline
from surefoot.errors import SurefootError, cause_of
from surefoot.language.data.rows import CALLS, SETTINGS, TOOLS, WEIGHT, common_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]


class Dialogue(list[Mapping[str, Any]]):
    """A list of messages with its own tools and settings for the chat template.

    options   keyword arguments of the template, including ``tools``
    asked     how many messages were there before the model's first turn; default: all
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]], options: Mapping[str, Any], asked: int | None = None) -> None:
        super().__init__(messages)
        self.options, self.asked = options, len(self) if asked is None else asked


def options_of(prompt: str | Messages) -> Mapping[str, Any]:
    """The chat template's options of a prompt; none for plain lists and text."""
    return prompt.options if isinstance(prompt, Dialogue) else {}


def columns_of(prompt: str | Messages) -> dict[str, Any]:
    """The columns that a row with this prompt needs to be rendered the same way."""
    settings = dict(options_of(prompt))
    tools = settings.pop(TOOLS, None)
    return {name: value for name, value in ((TOOLS, tools), (SETTINGS, settings)) if value}


# ---- text and control tokens ------------------------------------------------------------------------------------------


Span = tuple[int, int]
"""first character and the one after the last"""
ENDS = ("1" * 29, "2" * 29)
"""texts whose first and last characters differ"""

ANCHORS = ("\n", ".", "0", "a")
"""texts that another one may follow"""


class Continuation:
    """Text that follows other text, as ids and back.

    Many tokenizers add a space at the beginning of a text, and remove it from a decoded one. Here an anchor precedes the text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self._anchors: list[tuple[str, list[int]]] | None = None

    def encode(self, text: str) -> tuple[list[int], list[Span] | None]:
        """The ids, and the characters of each; None for tokenizers without offsets."""
        for anchor, before in self._needed():
            ids, offsets = self.encode_alone(anchor + text)
            if text and before and ids[: len(before)] == before:
                rest = None if offsets is None else offsets[len(before) :]
                return ids[len(before) :], rest and [(start - len(anchor), end - len(anchor)) for start, end in rest]
        return self.encode_alone(text)

    def encode_alone(self, text: str) -> tuple[list[int], list[Span] | None]:
        """The ids and spans of text that follows nothing."""
        fast = self.tokenizer.is_fast
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
        return list(map(int, encoded["input_ids"])), [tuple(pair) for pair in encoded["offset_mapping"]] if fast else None

    def decode(self, ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
        """The text of ids that follow others.

        decode   of the tokenizer
        """
        for _, before in reversed(self._needed()):  # the last are no bytes, with which those of a character could not be joined
            start, whole = decode(before), decode([*before, *ids])
            if start and whole.startswith(start):
                return whole[len(start) :]
        return decode([*ids])

    def _needed(self) -> list[tuple[str, list[int]]]:
        """The anchors with their ids; none for tokenizers that add and remove no space."""
        if self._anchors is None:
            both = [self.encode_alone(text)[0] for text in ("1", " a")]
            texts = [self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (both[0] + both[1], both[1])]
            keeps = texts == ["1 a", " a"] and self.encode_alone("a")[0] != both[1]
            self._anchors = [] if keeps else [(anchor, self.encode_alone(anchor)[0]) for anchor in ANCHORS]
        return self._anchors


class ControlTokens:
    """The control tokens of a tokenizer and a chat template: special tokens, and added tokens that the template writes.

    In the text of a message they would end it, or begin another. ``marked`` replaces them by marks, which a template passes
    on; ``encode`` encodes each mark as the ordinary text of its token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str) -> None:
        self.tokenizer, self._text = tokenizer, Continuation(tokenizer)
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        names = {*tokenizer.all_special_tokens, *(name for name, special in added.items() if special or name in template)}
        longest = sorted((name for name in names if name.strip()), key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        self._mark_of = {name: f"7{index:03}{'7305816942' * 2}{index:03}7" for index, name in enumerate(longest)}
        self._name_of = {mark: name for name, mark in self._mark_of.items()}
        self._marks = re.compile(f"({'|'.join(self._name_of) or '(?!)'})")

    def first_in(self, value: Any) -> str | None:
        """The first control token in the text of a value; None if there is none."""
        for text in _texts(value):
            if match := self._pattern.search(text):
                return match.group()
        return None

    def marked(self, value: Any) -> Any:
        """A value with marks in place of control tokens."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._mark_of[match.group()], value)
        if isinstance(value, Mapping):
            return {key: part if key == "role" else self.marked(part) for key, part in value.items()}
        return [self.marked(part) for part in value] if isinstance(value, (list, tuple)) else value

    def encode(self, text: str, follows: bool = False) -> tuple[list[int], list[Span] | None]:
        """The ids of a rendered text with marks, and the characters of each; None for tokenizers without offsets.

        follows   whether other text precedes it
        """
        ids: list[int] = []
        spans: list[Span] = []
        position = 0
        for piece in self._marks.split(text):
            if piece in self._name_of:
                own = self._as_text(self._name_of[piece])
                offsets: list[Span] | None = [(0, len(piece))] * len(own)
            else:
                own, offsets = (self._text.encode if follows or position else self._text.encode_alone)(piece)
            ids += own
            spans += [(position + start, position + end) for start, end in offsets or ()]
            position += len(piece)
        return ids, spans if len(spans) == len(ids) else None

    def _as_text(self, name: str) -> list[int]:
        """The ids of a control token's name as text: its first character apart, so that the tokenizer can't match it."""
        ids = [i for part in (name[:1], name[1:]) for i in self._text.encode(part)[0]]
        if self.tokenizer.convert_tokens_to_ids(name) in ids and name != self.tokenizer.unk_token:
            raise SurefootError(f"the tokenizer can't encode the control token {name!r} as text; remove it from the row")
        return ids


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def tokens_within(spans: Sequence[Span], characters: Iterable[Span], inside: bool) -> list[bool]:
    """Which tokens are in some of the characters: those that begin there (``inside``), or all that touch them."""
    ranges = list(characters)
    return [
        any(first <= start < last if inside else start < last and end > first for first, last in ranges) for start, end in spans
    ]


# ---- chat templates ---------------------------------------------------------------------------------------------------


CALL = ("fetch", "city", "7305816942")
"""name, argument and value of a tool call with which templates are tried"""
RENDERING = 10.0
"""time limit of a chat template for one conversation, in seconds"""


class PrefixError(SurefootError):
    """A chat template renders the beginning of a conversation differently when more follows."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"the chat template renders the first {count} messages differently when more follow, so the assistant's text "
            "can't be located; use a template with {% generation %} marks, or rows of one answer each"
        )


class ChatTemplate:
    """A tokenizer with its chat template: conversations as token ids.

    split   encode control tokens in messages of the user, the system and tools as ordinary text
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", split: bool = True) -> None:
        self.tokenizer, self.split = tokenizer, split
        self._control: dict[str, ControlTokens] = {}
        self._call_forms: dict[tuple[str, bool], tuple[bool, Any]] = {}
        self._text_after = Continuation(tokenizer)

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> list[int]:
        """The ids of a conversation, rendered by the chat template.

        Raises SurefootError if the tokenizer has no template, or if the template rejects the messages.
        """
        marked, control = self._marked(messages)
        if control is None:
            ids = self._apply(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
            return [int(i) for i in ids]
        return control.encode(str(self._apply(marked, add_generation_prompt=add_generation_prompt, tokenize=False)))[0]

    def control_tokens(self, value: Any) -> str | None:
        """The first control token in the text of a message or value; None if there is none."""
        return self._controls({}).first_in(value)

    def _controls(self, options: Mapping[str, Any]) -> ControlTokens:
        template = self._template(options) if self.tokenizer.chat_template else ""
        if template not in self._control:
            self._control[template] = ControlTokens(self.tokenizer, template)
        return self._control[template]

    def _text(self, messages: Messages, **options: Any) -> tuple[str, ControlTokens | None]:
        """The rendered text. If messages of others than the assistant contain control tokens, it has marks in their place,
        which the second value encodes.
        """
        messages, control = self._marked(messages)
        return str(self._apply(messages, tokenize=False, **options)), control

    def _marked(self, messages: Messages) -> tuple[Messages, ControlTokens | None]:
        """Messages with marks in place of control tokens, and what encodes the marks; None without any."""
        options = options_of(messages)
        if not self.split:
            return messages, None
        self._template(options)
        control = self._controls(options)
        others = [message for message in messages if message["role"] != "assistant"]
        if control.first_in([{key: part for key, part in m.items() if key != "role"} for m in others]) is None and (
            control.first_in(options) is None
        ):
            return messages, None
        marked = [message if message["role"] == "assistant" else control.marked(message) for message in messages]
        return Dialogue(marked, control.marked(options)), control

    def reads(self, name: str, options: Mapping[str, Any]) -> bool:
        """Whether the chat template for these options contains this name."""
        return re.search(rf"\b{re.escape(name)}\b", self._template(options)) is not None

    def _template(self, options: Mapping[str, Any] | None = None) -> str:
        if not self.tokenizer.chat_template:
            raise SurefootError(
                "messages need a chat template, which this tokenizer lacks; use text, or set tokenizer.chat_template"
            )
        return str(self.tokenizer.get_chat_template(tools=(options or {}).get("tools")))

    def _apply(self, messages: Messages, **options: Any) -> Any:
        template = self._template(options_of(messages))
        if any(CALLS in message for message in messages):
            messages = Dialogue([self._suited(message, template) for message in messages], options_of(messages))
        return _apply_template(self.tokenizer, messages, **options)

    def _suited(self, message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
        """A message whose tool calls have the form that the template renders: arguments as an object or as JSON text, and what
        stands for a missing content.
        """
        if CALLS not in message:
            return message
        key = (template, bool(message.get("content")))
        if key not in self._call_forms:
            self._call_forms[key] = self._call_form(*key)
        return _in_form(message, *self._call_forms[key])

    def _call_form(self, template: str, content: bool) -> tuple[bool, Any]:
        """Whether the arguments of calls are text for a template, and what stands for a missing content (... for none).

        Objects where it renders both, or neither.
        """
        name, key, value = CALL
        call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": name, "arguments": {key: value}}}
        said = {"role": "assistant", **({"content": "!"} if content else {}), CALLS: [call]}
        for as_text, missing in product((False, True), (...,) if content else (..., None, "")):
            messages = [{"role": "user", "content": "?"}, _in_form(said, as_text, missing)]
            with suppress(SurefootError):
                text = str(_apply_template(self.tokenizer, messages, tokenize=False, chat_template=template))
                wrong = (f"'{key}'", f"'{value}'", f'\\"{key}')  # Python's notation, and text within text
                if all(part in text for part in CALL) and not any(part in text for part in wrong):
                    return as_text, missing
        return False, ...

    def check_rendered(self, messages: Messages) -> None:
        """Raise SurefootError if the template omits a message of the user, the system or a tool, or a tool call."""
        options = options_of(messages)
        texts = [str(message.get("content") or "") for message in messages]
        whole, position = self._text(messages)[0], 0
        tools = any(message["role"] == "tool" or CALLS in message for message in messages)
        for message, text in zip(messages, texts, strict=True):
            place = whole.find(text.strip(), position)
            if (place < 0 or tools) and message["role"] != "assistant":
                break
            position = max(position, place)
        else:
            return
        marks = [placeholder(str(index), *texts) if text.strip() else "" for index, text in enumerate(texts)]
        others = [
            message if message["role"] == "assistant" else {**message, "content": mark or text}
            for message, mark, text in zip(messages, marks, texts, strict=True)
        ]
        written = self._text(Dialogue(others, options))[0]
        for number, (message, mark) in enumerate(zip(messages, marks, strict=True), start=1):
            if message["role"] != "assistant" and mark and mark not in written:
                raise SurefootError(
                    f"the chat template omits message {number}, of role {message['role']!r}; write it as the template expects "
                    "it, or use another model"
                )
            for call in message.get(CALLS, ()):
                name = call.get("function", call).get("name") if isinstance(call, dict) else None
                if isinstance(name, str) and name not in written:
                    raise SurefootError(
                        f"the chat template omits a call of {name!r} in message {number}; remove the row, or use another model"
                    )

    def located(self, messages: Messages, turns: Sequence[int], ids: list[int]) -> list[bool]:
        """Which ids belong to some turns of the assistant, in a conversation whose prefixes are rendered differently.

        With another text in place of a turn, the rendered conversation changes exactly there. The turn begins after the
        beginning that the template writes for a new turn.
        """
        text, control = self._text(messages)
        encoded, offsets = (control or self._controls(options_of(messages))).encode(text)
        if encoded != ids or offsets is None:
            raise PrefixError(len(messages))
        return tokens_within(offsets, [self._turn(messages, turn, text) for turn in turns], inside=True)

    def _turn(self, messages: Messages, turn: int, text: str) -> tuple[int, int]:
        """The characters of one turn of the assistant, with the end that the template writes after it."""
        options = options_of(messages)
        start, stop = self._changed(messages, turn, text)
        whole = Dialogue(messages[: turn + 1], options)
        alone = self._text(whole)[0]
        end = alone[self._changed(whole, turn, alone)[1] :]
        stop += len(end) if text.startswith(end, stop) else 0
        before = Dialogue(messages[:turn], options)
        opening = self._text(before, add_generation_prompt=True)[0].removeprefix(self._text(before)[0])
        begin = text.rfind(opening, 0, start)
        if not opening or begin < 0 or (turn and begin < self._changed(messages, turn - 1, text)[1]):
            return start, stop
        return begin + len(opening), stop

    def _changed(self, messages: Messages, index: int, text: str) -> tuple[int, int]:
        """The characters that change with the content of a message. Raises PrefixError if the template omits it."""

        def with_content(content: str) -> str:
            other = {"role": messages[index]["role"], "content": content}
            return self._text(Dialogue([*messages[:index], other, *messages[index + 1 :]], options_of(messages)))[0]

        others = [with_content(content) for content in ENDS]
        if any(content not in other for content, other in zip(ENDS, others, strict=True)):
            raise PrefixError(index + 1)
        start = min(common_length(text, other) for other in others)  # they differ from each other at both ends
        return start, len(text) - min(common_length(text[start:][::-1], other[start:][::-1]) for other in others)


def _in_form(message: Mapping[str, Any], as_text: bool, missing: Any) -> Mapping[str, Any]:
    """A message with its calls' arguments as JSON text, if ``as_text``, and with a content (... for none) where it has none."""
    calls = list(message[CALLS])
    for index, call in enumerate(calls if as_text else ()):
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            calls[index] = {**call, "function": function} if "function" in call else function
    return {**message, CALLS: calls} | ({} if message.get("content") or missing is ... else {"content": missing})


def _apply_template(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **options: Any) -> Any:
    """The chat template's output, within a time limit: a template is a program that came with the model."""
    plain = [{key: part for key, part in message.items() if key != WEIGHT} for message in messages]
    return within_time(lambda: tokenizer.apply_chat_template(plain, **options_of(messages), **options))


def within_time(rendering: Callable[[], Any]) -> Any:
    """What a template renders; any error of it is one line, and so is one that takes too long."""
    try:
        return with_deadline(RENDERING, rendering, "the chat template")
    except DeadlineExceeded:
        raise SurefootError(
            f"the chat template takes longer than {RENDERING:g} s for these messages; fix it, or use another model"
        ) from None
    except Exception as error:
        raise SurefootError(f"the chat template rejects these messages ({cause_of(error)})") from None


def placeholder(*texts: str) -> str:
    """A placeholder for an assistant's message, to find the template's text after it.

    It consists of digits, which no template escapes or strips, and is a hash of the texts, so none of them contains it.
    """
    return str(int.from_bytes(hashlib.sha256("".join(texts).encode("utf-8", "surrogatepass")).digest()[:12]) + 10**28)
