"""Text to token ids and back: EOS, replies of environments, and which ids of a conversation are trained."""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from surefoot.errors import SurefootError, missing_extra
from surefoot.language.data.chat import (
    CALL,
    ChatTemplate,
    Dialogue,
    Messages,
    PrefixError,
    options_of,
    placeholder,
    tokens_within,
    within_time,
)
from surefoot.language.data.rows import CALLS, TOOLS, WEIGHT, common_length, message_text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from surefoot.core.rollout import Rollout

SHORTEST = 5
"""characters that two texts share by more than chance"""
Answers = Literal["template", "row"]
"""``data.answers``"""


@dataclass
class Edits:
    """What a chat template changes in the answers of a row, and whether the row has text in place of messages."""

    omitted: str = ""
    """a part of an answer that is not among the trained tokens"""
    other_prompt: bool = False
    """the prompt that an answer to the same messages would get is no beginning of the row"""
    plain: bool = False


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
        self.edits.plain = True
        ids = list(self.tokenizer(prompt)["input_ids"])
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and prompt.startswith(self.tokenizer.bos_token):
            ids = ids[1:]
        while ids and ids[-1] in self.eos_ids:  # some tokenizers append EOS
            ids.pop()
        return ids or [self.eos_id if bos is None else int(bos)]  # a response needs at least one id before it

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
        called: str | None = None,
    ) -> list[int]:
        """The ids between two turns of the model: the environment's reply and the beginning of the next turn.

        Only the reply is encoded. Sampled ids stay unchanged, because encoding their text again may give others.

        reply   text, encoded unchanged; or messages, as the chat template renders them after an assistant's message
        turn    ids of the model's turn. The end that the template writes after it is left out if the turn has one
        ends    ids that end a turn, besides EOS
        options of the chat template
        called  name of the tool that the turn calls; the reply has results then, and the mark is in the call's arguments

        Raises SurefootError if there is no template, or if it rejects the messages or omits the assistant's text or the reply.
        """
        if isinstance(reply, str):
            return self._text_after.encode(reply)[0]
        options = options or {}
        mark = placeholder(self._template(options), repr(reply))
        said = {"role": "assistant", "content": mark} if called is None else _call(called, {"x": mark})
        before = Dialogue([{"role": "user", "content": "?"}, said], options)
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
        if called is not None:
            ids = ids[self._closing(self._text(before)[0].rpartition(mark)[2], ids) :]
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

    def _closing(self, alone: str, ids: Sequence[int]) -> int:
        """How many ids close a call, up to EOS. ``alone``: the text after its arguments when no result follows."""
        closing = self._text_after.encode(alone)[0]
        shared = common_length(closing, ids)
        return next((place for place, token in enumerate(closing[:shared]) if token in self.eos_ids), shared)

    def parse(self, ids: Sequence[int], before: Sequence[int], tools: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The assistant's message with the calls that the ids of a turn write, by the tokenizer's response template; None if a
        call is malformed.

        before  all ids before the turn
        """
        try:
            parsed = self.tokenizer.parse_response([*ids] or "", prefix=[*before], tools=list(tools))
            called = [call["function"] for call in parsed.get(CALLS, ())]
            calls = [{"name": call["name"], "arguments": call.get("arguments") or {}} for call in called]
            json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
        except Exception:  # of json, of a transform, or because a call is no object of strict JSON
            return None
        if not all(isinstance(call["name"], str) and isinstance(call["arguments"], dict) for call in calls):
            return None
        numbered = [{"id": f"call{place:05}", "type": "function", "function": call} for place, call in enumerate(calls)]
        end = self.decode(ids[-1:], special=True) if ids and ids[-1] in self.eos_ids else ""
        content = str(parsed.get("content") or "").removesuffix(end)  # where no field of the template closes with EOS
        return {**parsed, "role": "assistant", "content": content, **({CALLS: numbered} if calls else {})}

    def check_calls(self) -> None:
        """Raise SurefootError unless the response template reads a call that the chat template writes, and reads none after its
        result.
        """
        if "tools" not in signature(self.tokenizer.parse_response).parameters:
            raise missing_extra("transformers 5.15 or newer", "tools", "turns: calling tools")
        if getattr(self.tokenizer, "response_template", None) is None:
            raise SurefootError(
                "turns.response_template: is missing, and the tokenizer has none, so no call could be read; set it (the how-to "
                '"Train with tools" has those of common models)'
            )
        name, key, value = CALL
        schema = {"type": "object", "properties": {key: {"type": "string", "description": "?"}}, "required": [key]}
        tools = [{"type": "function", "function": {"name": name, "description": "?", "parameters": schema}}]
        said = [{"role": "user", "content": "?"}, _call(name, {key: value})]
        result = {"role": "tool", "name": name, "content": "!", "tool_call_id": said[1][CALLS][0]["id"]}
        written = self._text(Dialogue(said, {TOOLS: tools}))[0]
        if written.count(value) != 1:
            raise SurefootError(
                "turns: the chat template omits the model's calls of tools; use another model, or its own template"
            )
        read, after = (
            self.parse([], self.render(Dialogue(messages, {TOOLS: tools}), add_generation_prompt=len(messages) > 2), tools)
            or {}
            for messages in (said, [*said, result])
        )
        if [call["function"] for call in read.get(CALLS, ())] != [{"name": name, "arguments": {key: value}}]:
            raise SurefootError(
                f"turns.response_template: does not read the call that the chat template writes ({written[-80:]!r}); fix its "
                f"fields.{CALLS}"
            )
        if CALLS in after:
            raise SurefootError(
                "turns.response_template: reads a call again after its result; let start_anchor match the beginning of the "
                "turn that follows"
            )
        self.encode_reply([result], [self.eos_id], (), {TOOLS: tools}, called=name)

    def _check_reply(self, before: Messages, reply: Messages) -> None:
        """Raise SurefootError if the template omits a message of a reply, as one of a tool that was not called."""
        marks = [placeholder(str(index), repr(reply)) for index in range(len(reply))]
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
                trained = self.located(messages, turns, ids)
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
        written = "".join(self.decode([i for i, kept in zip(ids, trained, strict=True) if kept], special=True).split())
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
        text, spans = within_time(
            lambda: render_jinja_template(
                conversations=[plain], chat_template=template, return_assistant_tokens_mask=True, **options
            )
        )
        ids, offsets = control.encode(text[0])
        if offsets is None:
            raise SurefootError("messages contain control tokens, and this tokenizer can't locate them; remove them")
        return ids, tokens_within(offsets, spans[0], inside=False)

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


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", CALLS: [call]}


def _omitted(written: str, text: str) -> str:
    """The part of a text that is not in another one, which has no white space; "" if there is none."""
    places = [place for place, character in enumerate(text) if not character.isspace()]
    dense = "".join(text[place] for place in places)
    if dense in written:
        return ""

    def shared(part: Callable[[int], str]) -> int:
        count = bisect_left(range(1, len(dense)), True, key=lambda n: part(n) not in written)
        return count if count >= SHORTEST else 0

    end = shared(lambda count: dense[len(dense) - count :])
    start = min(shared(lambda count: dense[:count]), len(dense) - end - 1)
    return text[places[start] : places[len(dense) - end - 1] + 1]


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
    return prompt if isinstance(prompt, str) else message_text(prompt[-1])


def decode_row(tokens: Tokens, rollout: "Rollout", row: int, steps: slice) -> dict[str, Any]:
    """A row of a rollout as text: ``prompt``, and ``tokens``, one string per step; special tokens by name."""
    prompt = rollout.inputs["prompt"][row][rollout.inputs["prompt_mask"][row]]
    decode = tokens.tokenizer.decode
    return {"prompt": decode(prompt.tolist()), "tokens": [decode([i]) for i in rollout.actions[row, steps].tolist()]}
