"""Responses of several turns: the model writes, an environment replies, and so on until one of them ends the conversation.

A conversation is one row of a rollout: the first prompt, then all tokens of both; the mask is True at the model's. Sampled
tokens keep their ids; only the replies are encoded.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from surefoot.calls import DeadlineExceeded, in_threads, left_behind, settled
from surefoot.core.seeding import any_algorithm, derived_seed
from surefoot.errors import SurefootError, cause_at, cause_of
from surefoot.files import read_table
from surefoot.language.data.batches import right_padded
from surefoot.language.data.chat import Dialogue, Messages, options_of
from surefoot.language.data.rows import CALLS, TOOLS, fault_in
from surefoot.language.data.tokens import Tokens
from surefoot.language.online.tools import InvalidReply, Rows, ToolEnvironment, check_faults, checked_schemas, load_tools
from surefoot.language.rewards.scores import Prompt, Scores
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import DecodedBy, Samples, padded_samples
from surefoot.recipes.callables import TURNS, Functions, load_function
from surefoot.recipes.language import TurnSettings

A = TypeVar("A")
T = TypeVar("T")
Draw = Callable[[Sequence[Sequence[int]], Sequence[int]], Samples]
"""samples one response to each prompt of token ids, each with its seed"""

SEED = "seed"
"""what an environment gets besides the columns of its row"""
NO_RESPONSE = "got no response from the sampling engine"
PART = "environment"
"""name of the turns' rewards among the parts of a reward"""


@dataclass
class Conversation:
    """One conversation, which grows turn by turn."""

    row: Mapping[str, Any]
    seed: int
    environment: Any = None
    start: Prompt = ""
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """all tokens after the prompt"""
    own: list[bool] = field(default_factory=list)
    """which of them the model wrote"""
    log_probs: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    """the model's turns as text, with special tokens, such as tool markers, but for EOS"""
    answers: list[str] = field(default_factory=list)
    """the same without what ended them"""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """with tools: the model's turns as messages, with their calls"""
    malformed: int = 0
    """turns with a call that can't be read"""
    replies: list[str | Messages] = field(default_factory=list)
    """the environment's reply to each turn"""
    rewards: list[float] = field(default_factory=list)
    """the reward of each turn"""
    ends: list[int] = field(default_factory=list)
    """index in ``ids`` of each turn's last token"""
    ended: bool = False
    """by the environment, after a turn that was not truncated"""
    failure: str | None = None
    """why the environment failed, in a few words"""
    path: DecodedBy = "cached"
    """how the last turn was decoded"""

    @property
    def answer(self) -> str:
        """The last turn, as the environment gets it."""
        return self.answers[-1] if self.answers else ""

    @property
    def last(self) -> range:
        """The indices in ``ids`` of the last turn."""
        if not self.ends:
            return range(0)
        start = self.ends[-1]
        while start > 0 and self.own[start - 1]:
            start -= 1
        return range(start, self.ends[-1] + 1)

    @property
    def history(self) -> Prompt:
        """Everything before the last turn. Text unchanged; the answers in messages are without stop strings."""
        if isinstance(self.start, str):
            pairs = zip(self.turns[:-1], self.replies, strict=False)
            return self.start + "".join(turn + str(reply) for turn, reply in pairs)
        messages = list(self.start)
        for place, reply in enumerate(self.replies[: len(self.answers) - 1]):
            own = self.messages[place] if self.messages else {"role": "assistant", "content": self.answers[place]}
            messages += [own, *_messages(reply)]
        return Dialogue(messages, options_of(self.start), len(self.start))

    @property
    def transcript(self) -> str:
        """Everything after the prompt, for display: text unchanged; messages one per line, without the role of the first; with
        tools, calls and the rewards of turns too.
        """
        if isinstance(self.start, str):
            return "".join(turn + str(reply) for turn, reply in self._pairs(self.turns))
        lines: list[str] = []
        for place, (answer, reply) in enumerate(self._pairs(self.answers)):
            lines.append(f"assistant: {answer}" if lines else answer)
            lines += [f"{message['role']}: {message['content']}" for message in _messages(reply)]
            if self.messages and place < len(self.rewards) and self.rewards[place]:
                lines.append(f"reward: {self.rewards[place]:g}")
        return "\n".join(lines)

    def _pairs(self, turns: Sequence[str]) -> Iterable[tuple[str, str | Messages]]:
        nothing = "" if isinstance(self.start, str) else ()
        return zip(turns, [*self.replies, *[nothing] * (len(turns) - len(self.replies))], strict=True)

    def add_turn(self, ids: list[int], log_probs: list[float], ends: Ends, path: DecodedBy) -> None:
        """Add a turn of the model."""
        self.path = path
        if tools := options_of(self.start).get(TOOLS):
            message = ends.tokens.parse(ids, self.prompt + self.ids, tools)
            self.malformed += message is None
            self.messages.append(message or {"role": "assistant", "content": ends.text(ids, special=True)})
        self.ids += ids
        self.own += [True] * len(ids)
        self.log_probs += log_probs
        self.turns.append(ends.tokens.decode(ids[:-1] if ids and ids[-1] in ends.tokens.eos_ids else ids, special=True))
        self.answers.append(ends.text(ids, special=True))
        self.ends.append(len(self.ids) - 1)


def as_samples(conversations: Sequence[Conversation], tokens: Tokens, device: torch.device) -> Samples:
    """Conversations as rows, with the mask True at the model's tokens; one that never began is an empty row."""
    prompts = [one.prompt or [tokens.eos_id] for one in conversations]
    responses = [(one.ids, one.log_probs) for one in conversations]
    ended, missing = [one.ended for one in conversations], [one.failure == NO_RESPONSE for one in conversations]
    made = padded_samples(prompts, responses, ended, missing, conversations[0].path, tokens.pad_id, device)
    own, _ = right_padded([one.own or [False] for one in conversations], 0)
    return replace(made, mask=own.bool().to(device), real=made.mask)


def last_turn(mask: Tensor) -> Tensor:
    """The model's tokens that no token of the environment separates from its last one.   [N, T] -> [N, T]"""
    mask = mask.bool()
    after = mask.flip(-1).cumsum(-1).flip(-1)  # the model's tokens from here on
    others = (~mask & (after > 0)).flip(-1).cumsum(-1).flip(-1)  # the environment's that one of the model's follows
    return mask & (others == 0)


def add_turn_rewards(scores: Scores, conversations: Sequence[Conversation], shape: Sequence[int]) -> Scores:
    """The scores of the last turns plus the rewards of all turns, each on the last token of its turn; valid where no
    environment failed.

    shape  of the samples: N, T
    """
    fine = torch.tensor([conversation.failure is None for conversation in conversations])
    earned = torch.tensor([sum(conversation.rewards) for conversation in conversations]).where(fine, 0.0)
    valid, dense = scores.valid & fine, torch.zeros(tuple(shape))
    for row, conversation in enumerate(conversations):
        if conversation.failure is not None:  # it has no score, so ``scores.dense`` may be too narrow for its last turn
            continue
        for place, reward in zip(conversation.ends, conversation.rewards, strict=False):
            dense[row, place] += reward
        if (last := conversation.last) and scores.dense is None:
            dense[row, last[-1]] += scores.total[row]
        elif last and scores.dense is not None:
            dense[row, last.start : last.stop] += scores.dense[row, : len(last)]
    return Scores(
        (scores.total + earned).where(valid, 0.0), {PART: earned, **scores.parts}, valid, dense.where(valid.unsqueeze(-1), 0.0)
    )


def _messages(reply: str | Messages) -> Messages:
    return [] if isinstance(reply, str) else reply


class Environments:
    """Makes an environment for each conversation, and guards every call of it: environments are user code.

    An environment whose public methods are tools is described at ``ToolEnvironment``. Any other has ``reset(row)``, which
    returns the prompt; ``row`` has the columns of the row and ``seed``, a number of this conversation alone. ``step(response)``
    returns the reply, the reward of the turn, and whether the conversation is over. Prompt and replies are text, which follows
    unchanged, or messages, which the chat template writes. It may have ``close()``.

    functions   passed from Python, by field
    room        the most tokens of a prompt, and of a conversation before its last turn
    deadline    seconds for one turn's calls of all conversations together
    tolerated   share of the conversations whose environment may fail; those are not trained on

    Raises SurefootError when the class can't be imported, or an object of it can't be made or closed.
    """

    def __init__(
        self,
        settings: TurnSettings,
        limits: tuple[int, int],
        functions: Functions | None = None,
        *,
        deadline: float = 60.0,
        tolerated: float = 0.1,
    ) -> None:
        self.token_limits, self.settings, self.deadline, self.tolerated = limits, settings, deadline, tolerated
        self.field = "turns.tools" if settings.environment is None else TURNS
        self.path = settings.environment or ", ".join(settings.tools)
        self.make: Any = Rows
        self.functions = load_tools(settings, functions or {})
        if settings.environment is not None:
            self.make = load_function(TURNS, settings.environment, functions or {})
        if not callable(self.make):
            raise self._error(f"is a {type(self.make).__name__}; name a class with reset and step")
        first = self._checked(lambda: self.make(**settings.arguments), "can't be made: {}; check turns.arguments")
        if not callable(getattr(first, "reset", None)):
            raise self._error("has no method reset; add reset(row) and step(response)")
        self.schemas: list[dict[str, Any]] | None = None
        """of methods and functions that are tools; None for environments with ``step``"""
        if not callable(getattr(first, "step", None)):
            self.schemas = checked_schemas(first, self.functions, self._place)
        elif self.functions or hasattr(first, "get_reward"):
            other = "turns.tools is set, and" if self.functions else "it has get_reward, and"
            raise self._error(f"{other} step(response) answers whole turns; rename step if it is a tool")
        self.rewards = self.schemas is None or hasattr(first, "get_reward")
        """whether the environment gives rewards"""
        self._checked(lambda: _close(first), "close before any reset raised {}; make close safe without reset")

    def check(self, tokens: Tokens, scored: bool) -> None:
        """Raise SurefootError if the tokenizer can't call tools, or if nothing rewards a conversation.

        scored  whether ``reward.terms`` do
        """
        template = self.settings.response_template
        if self.schemas is None:
            return
        if isinstance(template, str):
            template = read_table(Path(template))
        if template is not None:
            tokens.tokenizer.response_template = template
        tokens.check_calls()
        if not self.rewards and not scored:
            raise self._error("gives no rewards; add get_reward(), or set reward.terms")

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise SurefootError if a column has the name of the environment's seed."""
        if SEED in columns:
            raise self._error(
                f"the rows have a column {SEED!r}, which is the name of the random seed of a conversation; rename it, for "
                f'example data.columns = {{ {SEED} = "row_seed" }}'
            )

    def converse(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int], draw: Draw, ends: Ends) -> list[Conversation]:
        """One conversation for each row; those that go on take each turn together.

        seeds   one for each: of its sampling, and of its environment
        draw    samples turns
        ends    what ends a turn; environments get it without its end, with special tokens

        Raises SurefootError when more fail than are tolerated, a call takes too long, or the chat template rejects messages.
        """
        conversations = [Conversation(row, seed) for row, seed in zip(rows, seeds, strict=True)]
        self._each(conversations, self._reset)
        self._each(conversations, lambda conversation: self._encode_start(conversation, ends.tokens), at_once=1)
        going = [conversation for conversation in conversations if conversation.failure is None]
        for turn in range(self.settings.max_turns):
            if not going:
                break
            contexts = [conversation.prompt + conversation.ids for conversation in going]
            drawn = draw(
                contexts,
                [conversation.seed if turn == 0 else derived_seed(conversation.seed, "turn", turn) for conversation in going],
            )
            last = turn + 1 == self.settings.max_turns
            answers = zip(going, drawn.responses(), drawn.log_probs.tolist(), drawn.finish_reasons, strict=True)
            for conversation, ids, log_probs, reason in answers:
                if reason == "error":
                    conversation.failure = NO_RESPONSE
                else:
                    conversation.add_turn(ids, log_probs[: len(ids)], ends, drawn.path)
            stops = {id(one) for one, ended in zip(going, drawn.ended.tolist(), strict=True) if last or not ended}
            limit = self.deadline if self.schemas is None else math.inf  # each call of a tool has its own
            self._each(going, lambda conversation, stops=stops: _step(conversation, id(conversation) in stops), seconds=limit)  # type: ignore[misc]
            finished = zip(going, drawn.ended.tolist(), strict=True)
            going = [conversation for conversation, ended in finished if self._goes_on(conversation, ended, turn + 1, ends)]
        if self.schemas is not None:
            self._each([conversation for conversation in conversations if conversation.rewards], _settle)
        self._close_all(conversations)
        self._check(conversations)
        return conversations

    def _error(self, what: str) -> SurefootError:
        return SurefootError(f"{self._place}: {what}")

    @property
    def _place(self) -> str:
        return f"{self.field}={self.path!r}"

    def _checked(self, call: Callable[[], T], message: str) -> T:
        """A call for one object; the cause of an error takes the place of ``{}`` in the message."""
        try:
            return self._timed(lambda _: call(), (None,), "one object")[0]
        except SurefootError:
            raise
        except (Exception, SystemExit) as error:
            raise self._error(message.format(cause_of(error))) from None

    def _reset(self, conversation: Conversation) -> None:
        made, schemas = self.make(**self.settings.arguments), self.schemas
        conversation.environment = made if schemas is None else ToolEnvironment(made, self.functions, schemas, self.settings)
        row = deepcopy(dict(conversation.row))  # environments may change it, and others have the same
        start = _text_or_messages(conversation.environment.reset({**row, SEED: derived_seed(conversation.seed, PART)}), "reset")
        if not start or (not isinstance(start, str) and start[-1]["role"] == "assistant"):
            raise InvalidReply("reset returned no prompt that an answer can follow")
        conversation.start = start

    def _encode_start(self, conversation: Conversation, tokens: Tokens) -> None:
        """A tokenizer serves one thread at a time."""
        conversation.prompt = tokens.encode_prompt(conversation.start)
        if len(conversation.prompt) > self.token_limits[0]:
            raise InvalidReply(
                f"the prompt after reset has {len(conversation.prompt)} tokens; data.max_length, or the context, "
                f"allows {self.token_limits[0]}"
            )

    def _goes_on(self, conversation: Conversation, ended: bool, turn: int, ends: Ends) -> bool:
        """Whether there is another turn; add the reply's tokens if there could be. ``ended``: the turn was not truncated."""
        if conversation.failure is not None or conversation.ended or not ended:
            conversation.ended = conversation.ended and ended
            return False
        own = [conversation.ids[place] for place in conversation.last]
        options = dict(options_of(conversation.start))
        calls = conversation.messages[-1].get(CALLS) if conversation.messages else None
        called = calls[0]["function"]["name"] if calls else None
        try:
            new = ends.tokens.encode_reply(conversation.replies[-1], own, ends.ids, options, called)
        except SurefootError as error:
            raise self._error(str(error)) from None
        length = len(conversation.prompt) + len(conversation.ids) + len(new)
        if length > self.token_limits[1]:  # not added for V either: it may not fit into the context
            return False
        conversation.ids += new
        conversation.own += [False] * len(new)
        conversation.log_probs += [0.0] * len(new)
        return turn < self.settings.max_turns

    def _each(
        self,
        conversations: Sequence[Conversation],
        call: Callable[[Conversation], None],
        at_once: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Make the call for every conversation whose environment has not failed, within the deadline.

        at_once   calls at the same time; None: ``turns.at_once``
        seconds   another deadline
        """

        def one(conversation: Conversation) -> None:
            try:
                call(conversation)
            except SurefootError as error:
                raise error if str(error).startswith("turns.") else self._error(str(error)) from None
            except (Exception, SystemExit) as error:
                conversation.failure = str(error) if isinstance(error, InvalidReply) else f"raised {cause_at(error)}"

        fine = [conversation for conversation in conversations if conversation.failure is None]
        with any_algorithm():  # once for all threads
            self._timed(one, fine, f"{len(conversations)} conversations", at_once or self.settings.at_once, seconds)

    def _close_all(self, conversations: Sequence[Conversation]) -> None:
        """Close every environment; errors of those that have failed are ignored."""
        failed = [conversation for conversation in conversations if conversation.failure is not None]

        def close(conversation: Conversation) -> None:
            with suppress(Exception, SystemExit):
                _close(conversation.environment)

        self._each(conversations, lambda conversation: _close(conversation.environment))
        self._timed(close, failed, f"{len(failed)} conversations")

    def _timed(
        self, call: Callable[[A], T], items: Sequence[A], what: str, at_once: int = 1, seconds: float | None = None
    ) -> list[T]:
        with_gradients = torch.set_grad_enabled(torch.is_grad_enabled())
        try:
            return in_threads(with_gradients(call), items, at_once, seconds or self.deadline, self.path)
        except DeadlineExceeded as error:
            raise self._error(
                f"took longer than reward.deadline={self.deadline:g} s for {what}{left_behind(error)}; make it faster, or "
                "raise reward.deadline, then resume from the last checkpoint"
            ) from None

    def _check(self, conversations: Sequence[Conversation]) -> None:
        check_faults(
            [one.environment for one in conversations if isinstance(one.environment, ToolEnvironment)], self.settings.tolerated
        )
        failures = Counter(one.failure for one in conversations if one.failure not in (None, NO_RESPONSE))
        if failures.total() > self.tolerated * len(conversations) + 1e-9:
            raise self._error(
                f"failed in {failures.total()} of {len(conversations)} conversations, more than "
                f"reward.tolerated={self.tolerated:g} allows; most often: {failures.most_common(1)[0][0]}; fix the "
                "environment, then resume with --allow-changes"
            )


def tool_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Calls of tools per conversation, the share of calls without a result, and of turns with a malformed call; none without
    tools.
    """
    tools = [one.environment for one in conversations if isinstance(one.environment, ToolEnvironment)]
    calls, turns = sum(one.calls for one in tools), sum(len(one.messages) for one in conversations)
    if not tools:
        return {}
    return {
        "tool_calls": calls / len(conversations),
        "tool_calls_failed": sum(one.failed for one in tools) / max(1, calls),
        "tool_calls_malformed": sum(one.malformed for one in conversations) / max(1, turns),
    }


def _settle(conversation: Conversation) -> None:
    """Add the reward of the whole conversation to the last turn's."""
    pairs = zip(conversation.messages, map(_messages, conversation.replies), strict=False)
    said = [message for own, results in pairs for message in (own, *results)]
    conversation.rewards[-1] += conversation.environment.get_reward(said)


def _step(conversation: Conversation, last: bool) -> None:
    """Pass the last turn to the environment and record its reply. ``last``: no turn can follow."""
    if isinstance(conversation.environment, ToolEnvironment):
        results, reward, done = conversation.environment.step(conversation.messages[-1], last)
        conversation.replies.append(results)
        conversation.rewards.append(reward)
        conversation.ended = done
        return
    returned = conversation.environment.step(conversation.answer)
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise InvalidReply(f"step returned {_kind(returned)} instead of reply, reward and done")
    reply, reward, done = returned
    number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise InvalidReply(f"step returned a reward that is no finite number ({reward!r:.40})")
    if done not in (True, False):
        raise InvalidReply(f"step returned {_kind(done)} for done instead of True or False")
    reply = _text_or_messages("" if reply is None and done else reply, "step") or (
        "" if isinstance(conversation.start, str) else []
    )
    if not done and not reply:
        raise InvalidReply("step returned no message and is not done")
    if reply and isinstance(reply, str) != isinstance(conversation.start, str):
        raise InvalidReply("one of reset and step returned text, the other messages; return the same kind")
    conversation.replies.append(reply)
    conversation.rewards.append(number)
    conversation.ended = bool(done)


def _text_or_messages(value: Any, method: str) -> str | list[dict[str, Any]]:
    """Text or messages that a tokenizer encodes; InvalidReply, naming the method, for anything else."""
    if not isinstance(value, str):
        if not isinstance(value, Sequence):
            raise InvalidReply(f"{method} returned {_kind(value)} instead of text or a list of messages")
        for message in value:
            if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise InvalidReply(f"{method} returned a message without a role and a content of text")
        messages = [dict(message) for message in value]
        value = Dialogue(messages, value.options) if isinstance(value, Dialogue) else messages
    if fault := fault_in(value):
        raise InvalidReply(f"{method} returned {fault}")
    return value  # type: ignore[no-any-return]


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _close(environment: Any) -> None:
    """``close`` is optional."""
    if callable(close := getattr(environment, "close", None)):
        settled(close())
