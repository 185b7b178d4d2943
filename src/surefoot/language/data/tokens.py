"""Text to token ids and back: padding, EOS, chat templates, and which ids of a conversation are trained.

Prompts are padded on the left and responses on the right. A mask is True at real tokens, so no result depends on the pad id.
"""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from surefoot.errors import SurefootError, cause_of
from surefoot.language.calls import DeadlineExceeded, with_deadline
from surefoot.language.data.rendering import ENDS, Continuation, ControlTokens, changed_span, tokens_within
from surefoot.language.data.rows import CALLS, SETTINGS, TOOLS, WEIGHT

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from surefoot.core.rollout import Rollout

Messages = Sequence[Mapping[str, Any]]


class Dialogue(list[Mapping[str, Any]]):
    """A list of messages with its own tools and settings for the chat template.

    options   keyword arguments of the template, including ``tools``
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        super().__init__(messages)
        self.options = options


def options_of(prompt: str | Messages) -> Mapping[str, Any]:
    """The chat template's options of a prompt; none for plain lists and text."""
    return prompt.options if isinstance(prompt, Dialogue) else {}


def columns_of(prompt: str | Messages) -> dict[str, Any]:
    """The columns that a row with this prompt needs to be rendered the same way."""
    settings = dict(options_of(prompt))
    tools = settings.pop(TOOLS, None)
    return {name: value for name, value in ((TOOLS, tools), (SETTINGS, settings)) if value}


class PrefixError(SurefootError):
    """A chat template renders the beginning of a conversation differently when more follows."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"the chat template renders the first {count} messages differently when more follow, so the assistant's text "
            "can't be located; use a template with {% generation %} marks, or rows of one answer each"
        )


CALL = ("fetch", "city", "7305816942")
"""name, argument and value of a tool call with which templates are tried"""
SHORTEST = 5
"""characters that two texts share by more than chance"""
Answers = Literal["template", "row"]
"""``data.answers``"""


@dataclass
class Edits:
    """What a chat template changes in the answers of a row."""

    omitted: str = ""
    """a part of an answer that is not among the trained tokens"""
    other_prompt: bool = False
    """the prompt that an answer to the same messages would get is no beginning of the row"""


RENDERING = 10.0
"""time limit of a chat template for one conversation, in seconds"""


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
        _require_template(self.tokenizer)
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
        marks = [_mark(str(index), *texts) if text.strip() else "" for index, text in enumerate(texts)]
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


class Tokens(ChatTemplate):
    """A tokenizer with the EOS and pad ids for training.

    tokenizer   any tokenizer of ``transformers``; it is not changed
    model       its model, whose generation config may list further EOS ids
    split       encode control tokens in messages of the user, the system and tools as ordinary text
    answers     whether the assistant's messages are trained as the chat template renders them, or as they are written

    Raises SurefootError if there is no EOS token.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        model: "PreTrainedModel | None" = None,
        split: bool = True,
        answers: Answers = "template",
    ) -> None:
        super().__init__(tokenizer, split)
        self.answers: Answers = answers
        self.edits = Edits()
        self.eos_ids: tuple[int, ...] = _eos_ids(tokenizer, model)
        self.pad_id: int = _pad_id(tokenizer, self.eos_ids)

    @classmethod
    def like(cls, other: "Tokens", split: bool) -> "Tokens":
        """The same tokenizer and EOS ids with another treatment of control tokens."""
        tokens = copy.copy(other)
        tokens.split = split
        tokens.edits = Edits()
        return tokens

    def fingerprint(self) -> str | None:
        """A hash of everything that the ids of a row depend on besides the row.

        None for tokenizers in Python, whose code is part of it, and for chat templates that write the date.
        """
        backend, template = getattr(self.tokenizer, "backend_tokenizer", None), self.tokenizer.chat_template
        if backend is None or "strftime_now" in json.dumps(template):
            return None
        parts = [
            backend.to_str(),
            template,
            {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()},
            self.eos_ids,
            self.split,
            self.answers,
            type(self.tokenizer).__qualname__,
            [version(package) for package in ("transformers", "tokenizers")],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def eos_id(self) -> int:
        """The id that ends a demonstration."""
        return self.eos_ids[0]

    def encode_prompt(self, prompt: str | Messages) -> list[int]:
        """The ids of a prompt: text with the tokenizer's special tokens, or messages by the chat template.

        Text that already begins with BOS gets no second one.
        """
        if not isinstance(prompt, str):
            self.check_rendered(prompt)
            return self.render(prompt, add_generation_prompt=True)
        ids = list(self.tokenizer(prompt)["input_ids"])
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and prompt.startswith(self.tokenizer.bos_token):
            ids = ids[1:]
        while ids and ids[-1] in self.eos_ids:  # some tokenizers append EOS
            ids.pop()
        return ids or [self._beginning()]

    def encode_completion(self, completion: str) -> list[int]:
        """The ids of a response, with EOS appended if the text does not end with one. No space is added before the text."""
        ids = self._text_after.encode(completion)[0]
        return ids if ids and ids[-1] in self.eos_ids else [*ids, self.eos_id]

    def encode_reply(
        self,
        reply: str | Messages,
        turn: Sequence[int],
        ends: Collection[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids between two turns of the model: the environment's reply and the beginning of the next turn.

        Only the reply is encoded. Sampled ids stay unchanged, because encoding their text again may give others.

        reply   text, encoded unchanged; or messages, as the chat template renders them after an assistant's message
        turn    ids of the model's turn. The end that the template writes after it is left out if the turn has one
        ends    ids that end a turn, besides EOS
        options of the chat template

        Raises SurefootError if there is no template, or if it rejects the messages or omits the assistant's text or the reply.
        """
        if isinstance(reply, str):
            return self._text_after.encode(reply)[0]
        options = options or {}
        mark = _mark(self._template(options), repr(reply))
        before = Dialogue([{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}], options)
        written, control = self._text(Dialogue([*before, *reply], options), add_generation_prompt=True)
        _, *behind = written.split(mark)
        if not behind:
            raise SurefootError("the chat template omits the assistant's message, so no reply can follow it; use another model")
        if len(behind) > 1:
            raise SurefootError(
                "the chat template repeats the assistant's message, so no reply can follow it; use another model"
            )
        self._check_reply(before, reply)
        ids = (control.encode(behind[0], follows=True) if control else self._text_after.encode(behind[0]))[0]
        if turn and turn[-1] in self.eos_ids and ids and ids[0] in self.special_ids and self._ends_otherwise(before, ids):
            return ids[1:]
        both = {*self.eos_ids, *ends}
        end = next((place for place, token in enumerate(ids) if token in both), None)
        if turn and turn[-1] in both and end is not None and not self.decode(ids[:end], special=True).strip():
            return ids[end + 1 :]
        # A stop text may end with more than a special token, such as the line break that the template writes after it.
        common = (n for n in range(min(len(turn), len(ids)), 0, -1) if list(turn[-n:]) == ids[:n])
        count = next((n for n in common if not self.special_ids.isdisjoint(ids[:n])), 0)
        return ids[count:]

    def _check_reply(self, before: Messages, reply: Messages) -> None:
        """Raise SurefootError if the template omits a message of a reply, as one of a tool that was not called."""
        marks = [_mark(str(index), repr(reply)) for index in range(len(reply))]
        marked = [{**message, "content": mark} for message, mark in zip(reply, marks, strict=True)]
        written = self._text(Dialogue([*before, *marked], options_of(before)), add_generation_prompt=True)[0]
        for message, mark in zip(reply, marks, strict=True):
            if mark not in written and str(message.get("content") or "").strip():
                raise SurefootError(
                    f"the chat template omits a reply of role {message['role']!r} after an answer; reply with another role, "
                    "such as 'user'"
                )

    def _ends_otherwise(self, before: Messages, ids: Sequence[int]) -> bool:
        """Whether the template ends the last answer with EOS, and one before other messages with the first of these ids."""
        last = self.render(before)
        return last[-1] in self.eos_ids and ids[0] not in (*self.eos_ids, last[-1]) and last[-1] not in ids

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which a text leaves out."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset([*self.tokenizer.all_special_ids, *(number for number, token in added if token.special)])

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this name; None if it is no special token."""
        number = self.tokenizer.convert_tokens_to_ids(text)
        return number if number in self.special_ids and self.tokenizer.convert_ids_to_tokens(number) == text else None

    def special_in(self, text: str) -> str | None:
        """A special token whose name is in a text; None if there is none."""
        names = (str(self.tokenizer.convert_ids_to_tokens(number)) for number in sorted(self.special_ids))
        return next((name for name in names if name in text), None)

    def decode(self, ids: "Sequence[int] | Tensor", special: bool = False) -> str:
        """The text that the ids add to a prompt.

        special   keep special tokens, by name
        """

        def alone(ids: list[int]) -> str:
            return str(self.tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

        return self._text_after.decode([int(i) for i in ids], alone)

    def demonstration(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """The ids of a row, and which of them are trained: the assistant's text and its EOS.

        row   ``{"messages"}``, ``{"prompt", "completion"}`` of text or messages, or ``{"text"}``; other keys are ignored

        The assistant's turns are found by the template's ``{% generation %}`` mark, or by rendering the conversation up to the
        start and to the end of each turn. A template that renders a turn differently when more follow, as those that remove
        earlier thoughts, is rendered with other texts in place of the turn, which shows where the turn is. Ids after the last
        trained one are dropped. The first id is never trained: nothing precedes it. ``edits`` has what the template changed.

        Raises SurefootError if the template rejects the messages, or if the assistant's text can't be located.
        """
        if "messages" in row:
            return self.conversation(row["messages"])
        if "text" in row:
            ids = [*self.encode_prompt(row["text"]), self.eos_id]
            return ids, [False] + [True] * (len(ids) - 1)
        prompt, completion = row["prompt"], row["completion"]
        if not isinstance(completion, str):
            return self.conversation(Dialogue([*prompt, *completion], options_of(prompt)), after=len(prompt))
        before, after = self.encode_prompt(prompt), self.encode_completion(completion)
        return before + after, [False] * len(before) + [True] * len(after)

    def conversation(self, messages: Messages, after: int = 0) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and which are trained: the assistant's in ``messages[after:]``, except those of weight 0.
        See ``demonstration``.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= after]
        if not answers:
            raise SurefootError("no message is the assistant's, so nothing would be trained; remove the row")
        turns = [i for i in answers if messages[i].get(WEIGHT, 1)]
        if not turns:
            raise SurefootError("every message of the assistant has weight 0, so nothing would be trained; remove the row")
        if self.answers == "row":
            return self._as_written(messages, answers, turns)
        self.check_rendered(messages)
        if re.search(r"{%-?\s*generation\b", self._template(options_of(messages))):
            ids, trained = self._generated(messages)
            start = self._prefix(messages, answers[0], ids, add_generation_prompt=True) if after else 0
            trained = [marked and i >= start for i, marked in enumerate(trained)]
            for turn in answers:
                if turn not in turns:
                    self._set(trained, messages, turn, ids, False)
        else:
            if turns[0] == 0:
                raise SurefootError(
                    "the first message is the assistant's, so no prompt precedes it; remove it, or give it weight 0"
                )
            ids = self.render(messages)
            trained = [False] * len(ids)
            try:
                for turn in turns:
                    self._set(trained, messages, turn, ids, True)
            except PrefixError:
                trained = self._located(messages, turns, ids)
        if not any(trained):
            raise SurefootError(
                "the chat template marks nothing of the assistant's text as generated, so nothing would be trained; "
                "fix its {% generation %} block"
            )
        self._note_edits(messages, turns, ids, trained)
        return self._ended(ids, trained, ends_in_answer=turns[-1] == len(messages) - 1)

    def _as_written(self, messages: Messages, answers: Sequence[int], turns: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Ids of a conversation as it is sampled: the prompt, the text of each answer with EOS, and replies between them."""
        if answers[0] == 0:
            raise SurefootError("the first message is the assistant's, so no prompt precedes it; remove it")
        options = options_of(messages)
        ids = self.encode_prompt(Dialogue(messages[: answers[0]], options))
        opening, trained = (
            self._text(Dialogue(messages[: answers[0]], options), add_generation_prompt=True)[0],
            [False] * len(ids),
        )
        for turn, following in zip(answers, [*answers[1:], len(messages)], strict=True):
            message = messages[turn]
            if others := [key for key, part in message.items() if key not in ("role", "content", "name", WEIGHT) and part]:
                raise SurefootError(
                    f"message {turn + 1} has {others[0]!r}, which only a chat template writes; set data.answers = 'template'"
                )
            content = str(message.get("content", ""))
            # the prompt may begin the answer: <think>
            shared = max(n for n in range(min(len(opening), len(content)) + 1) if opening.endswith(content[:n]))
            own = self.encode_completion(content[shared:])
            ids += own
            trained += [turn in turns] * len(own)
            if turn == turns[-1]:
                break
            reply = self.encode_reply(messages[turn + 1 : following], own, options=options)
            ids += reply
            trained += [False] * len(reply)
            opening = self.decode(reply, special=True)
        return ids, trained

    def _note_edits(self, messages: Messages, turns: Sequence[int], ids: Sequence[int], trained: Sequence[bool]) -> None:
        """Record a part of the trained answers that is not among the tokens, and whether the row begins with its prompt."""
        written = _dense(self.decode([i for i, kept in zip(ids, trained, strict=True) if kept], special=True))
        if turns[-1] == 0:
            return
        for turn in turns:
            for key, part in messages[turn].items():
                read = key == "content" or (key not in ("role", "name") and self.reads(key, options_of(messages)))
                if isinstance(part, str) and read and not self.edits.omitted and part.strip():
                    self.edits.omitted = _omitted(written, part) and _omitted(
                        written, self.decode(self.encode_completion(part))
                    )
        with suppress(PrefixError):
            self._prefix(messages, turns[-1], [*ids], add_generation_prompt=True)
            return
        self.edits.other_prompt = True

    def _generated(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Ids, and which of them the template marks as generated."""
        marked, control = self._marked(messages)
        if control is None:
            rendered = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)
            return [int(i) for i in rendered["input_ids"]], [bool(mark) for mark in rendered["assistant_masks"]]
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self.tokenizer.special_tokens_map, **options_of(marked)}
        template = self._template(options)
        plain = [{key: part for key, part in self._suited(message, template).items() if key != WEIGHT} for message in marked]
        text, spans = _bounded(
            lambda: render_jinja_template(
                conversations=[plain],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **options,
            )
        )
        ids, offsets = control.encode(text[0])
        if offsets is None:
            raise SurefootError("messages contain control tokens, and this tokenizer can't locate them; remove them")
        return ids, tokens_within(offsets, spans[0], inside=False)

    def _located(self, messages: Messages, turns: Sequence[int], ids: list[int]) -> list[bool]:
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
        return changed_span(text, others)

    def _set(self, trained: list[bool], messages: Messages, turn: int, ids: list[int], value: bool) -> None:
        """Mark the ids of one message as trained or not."""
        start = self._prefix(messages, turn, ids, add_generation_prompt=True)
        stop = len(ids) if turn == len(messages) - 1 else self._prefix(messages, turn + 1, ids)
        trained[start:stop] = [value] * (stop - start)

    def _prefix(self, messages: Messages, count: int, ids: list[int], **options: Any) -> int:
        """The number of ids of the first messages, which must be a prefix of the conversation's ids."""
        first = self.render(Dialogue(messages[:count], options_of(messages)), **options)
        if ids[: len(first)] != first:
            raise PrefixError(count)
        return len(first)

    def _ended(self, ids: list[int], trained: list[bool], ends_in_answer: bool) -> tuple[list[int], list[bool]]:
        """Extend every run of trained ids to its EOS, and append EOS to a final answer.

        A template's text after EOS, often a line break, is never sampled, so it is neither trained nor kept at the end.
        """
        settled, writing = [], False
        for i, (token, marked) in enumerate(zip(ids, trained, strict=True)):
            end = token in self.eos_ids
            begins = marked and i > 0 and not trained[i - 1]
            writing = begins or (writing and (marked or end))
            settled.append(writing)
            writing = writing and not end
        length = len(ids) - settled[::-1].index(True)
        ids, settled = ids[:length], settled[:length]
        if ends_in_answer and ids[-1] not in self.eos_ids:
            return [*ids, self.eos_id], [*settled, True]
        return ids, settled

    def _beginning(self) -> int:
        """The id of an empty prompt: a response needs at least one id before it."""
        bos = self.tokenizer.bos_token_id
        return self.eos_id if bos is None else int(bos)


def _in_form(message: Mapping[str, Any], as_text: bool, missing: Any) -> Mapping[str, Any]:
    """A message with its calls' arguments as JSON text, if ``as_text``, and with a content (... for none) where it has none."""
    calls = list(message[CALLS])
    for index, call in enumerate(calls if as_text else ()):
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            calls[index] = {**call, "function": function} if "function" in call else function
    return {**message, CALLS: calls} | ({} if message.get("content") or missing is ... else {"content": missing})


def _dense(text: str) -> str:
    return "".join(text.split())


def _omitted(written: str, text: str) -> str:
    """The part of a text that is not in another one, which has no white space; "" if there is none."""
    places = [place for place, character in enumerate(text) if not character.isspace()]
    dense = "".join(text[place] for place in places)
    if dense in written:
        return ""

    def shared(part: Callable[[int], str]) -> int:
        low, high = 0, len(dense)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if part(middle) in written else (low, middle)
        return low if low >= SHORTEST else 0

    end = shared(lambda count: dense[len(dense) - count :])
    start = min(shared(lambda count: dense[:count]), len(dense) - end - 1)
    return text[places[start] : places[len(dense) - end - 1] + 1]


def _require_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    if not tokenizer.chat_template:
        raise SurefootError("messages need a chat template and this tokenizer has none; use plain text, or another model")


def _apply_template(tokenizer: "PreTrainedTokenizerBase", messages: Messages, **options: Any) -> Any:
    """The chat template's output, within a time limit: a template is a program that came with the model."""
    plain = [{key: part for key, part in message.items() if key != WEIGHT} for message in messages]
    return _bounded(lambda: tokenizer.apply_chat_template(plain, **options_of(messages), **options))


def _bounded(rendering: Callable[[], Any]) -> Any:
    """What a template renders; any error of it is one line, and so is one that takes too long."""
    try:
        return with_deadline(RENDERING, rendering, "the chat template")
    except DeadlineExceeded:
        raise SurefootError(
            f"the chat template takes longer than {RENDERING:g} s for these messages; fix it, or use another model"
        ) from None
    except Exception as error:
        raise SurefootError(f"the chat template rejects these messages ({cause_of(error)})") from None


def _mark(*texts: str) -> str:
    """A placeholder for an assistant's message, to find the template's text after it.

    It consists of digits, which no template escapes or strips, and is a hash of the texts, so none of them contains it.
    """
    return str(int.from_bytes(hashlib.sha256("".join(texts).encode("utf-8", "surrogatepass")).digest()[:12]) + 10**28)


def _eos_ids(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel | None") -> tuple[int, ...]:
    """The tokenizer's EOS first, then those of the generation config that are special tokens of the tokenizer.

    An unset config has the ids of its class, which may be ordinary tokens of another tokenizer.
    """
    own = tokenizer.eos_token_id
    config = getattr(model, "generation_config", None)
    listed = getattr(config, "eos_token_id", None)
    listed = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = dict.fromkeys([*([] if own is None else [int(own)]), *(int(i) for i in listed if i in special)])
    if not ids:
        raise SurefootError("the tokenizer has no EOS token, so no response could end; set eos_token in tokenizer_config.json")
    return tuple(ids)


def _pad_id(tokenizer: "PreTrainedTokenizerBase", eos_ids: Sequence[int]) -> int:
    """The pad token; else a special token, or any token, that is not EOS. No token is added, and no model resized."""
    names = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    used: list[int] = [int(i) for i in (*names, *tokenizer.all_special_ids) if i is not None]
    candidates: list[int] = [*used, *range(len(tokenizer))]
    return next(i for i in candidates if i not in eos_ids)


def prompt_text(prompt: str | Messages) -> str:
    """The text of a prompt; of a conversation, its last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def decode_row(tokens: Tokens, rollout: "Rollout", row: int, steps: slice) -> dict[str, Any]:
    """A row of a rollout as text: ``prompt``, and ``tokens``, one string per step; special tokens by name."""
    prompt = rollout.inputs["prompt"][row][rollout.inputs["prompt_mask"][row]]
    decode = tokens.tokenizer.decode
    return {"prompt": decode(prompt.tolist()), "tokens": [decode([i]) for i in rollout.actions[row, steps].tolist()]}


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> "tuple[Tensor, Tensor]":
    """Prompts as one batch.   ids [B, P] and mask [B, P], True where real; the last column is real in every row"""
    return _padded(rows, pad, left=True)


def right_padded(rows: Sequence[Sequence[int]], pad: int) -> "tuple[Tensor, Tensor]":
    """Responses as one batch.   ids [B, T] and mask [B, T], True where real"""
    return _padded(rows, pad, left=False)


def positions(mask: "Tensor") -> "Tensor":
    """Position ids from the mask: the first real token has 0.   [B, L] -> [B, L]"""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _padded(rows: Sequence[Sequence[int]], pad: int, left: bool) -> "tuple[Tensor, Tensor]":
    import torch  # here, since processes that tokenise rows do without: half of their start and of their memory

    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[index, place] = torch.tensor(row, dtype=torch.int64)
        mask[index, place] = True
    return ids, mask
