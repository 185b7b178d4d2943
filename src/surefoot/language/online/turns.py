"""Responses of several turns: the model writes, an environment answers, the model goes on, until one of them is done.

A conversation is one row of a rollout: the first prompt, then all tokens, the model's own and those of others. What was sampled
keeps its ids; only what others say is encoded, behind it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, cause_of
from surefoot.language.data.tokens import Messages, Tokens
from surefoot.language.online.conversations import PART, Conversation
from surefoot.language.rewards.deadline import Overdue, within
from surefoot.language.sampling.sampler import Samples
from surefoot.recipes.import_object import import_object
from surefoot.recipes.language import TurnSettings

T = TypeVar("T")
Draw = Callable[[Sequence[Sequence[int]], Sequence[int]], Samples]
"""one response to each prompt of token ids, each by the random numbers of its seed"""

MEND = "mend the environment, then resume from the last checkpoint"
FIELD = "turns.environment"


class Environment(Protocol):
    """The other side of one conversation. Text follows as it stands; messages are written by the chat template."""

    def reset(self, row: Mapping[str, Any]) -> str | Messages:
        """The prompt. ``row`` has the columns of the row, and ``seed``, a number of this conversation's own."""
        ...

    def step(self, response: str) -> tuple[str | Messages, float, bool]:
        """What is answered to a turn of the model's, what the turn earns, and whether the conversation is over."""
        ...


class Unfit(Exception):
    """What an environment gave can't be used; in a few words."""


class Environments:
    """Makes an environment for each conversation, and calls it as code that may be broken is called.

    room        tokens that a prompt may have, and that a conversation may have before its last turn begins
    deadline    seconds that all calls for a turn of all conversations may take
    tolerated   share of the conversations whose environment may fail; nothing is learned from those

    Raises SurefootError when there is no such class, or it can't be made.
    """

    def __init__(
        self, settings: TurnSettings, room: tuple[int, int], *, deadline: float = 60.0, tolerated: float = 0.1
    ) -> None:
        assert settings.environment is not None
        self.room = room
        self.settings, self.path, self.deadline, self.tolerated = settings, settings.environment, deadline, tolerated
        self.make = import_object(FIELD, self.path)
        if not callable(self.make):
            raise self.refusal(f"is a {type(self.make).__name__}; it must be a class with reset and step")
        try:
            found = self._timed(self._made, "one object")
        except (Exception, SystemExit) as error:
            raise error if isinstance(error, SurefootError) else self.refusal(f"can't be made ({cause_of(error)})") from None
        missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if missing:
            raise self.refusal(f"has no method {missing[0]}; it needs reset(row) and step(response)")
        try:
            self._timed(lambda: _close(found), "one object")
        except (Exception, SystemExit) as error:
            if isinstance(error, SurefootError):
                raise
            raise self.refusal(f"close before any reset raised {cause_of(error)}; let it close what was never begun") from None

    def converse(
        self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int], draw: Draw, tokens: Tokens, stop: Sequence[str] = ()
    ) -> list[Conversation]:
        """One conversation for each row; those that still go on take their turns together.

        seeds   one for each: of its sampling, and of its environment
        draw    samples turns
        stop    strings that end a turn, and are no part of what an environment is told

        Raises SurefootError where more fail than are tolerated, a call takes too long, or the chat template refuses messages.
        """
        talks = [Conversation(row, seed) for row, seed in zip(rows, seeds, strict=True)]
        self._each(talks, lambda talk: self._begin(talk, tokens))
        going = [talk for talk in talks if talk.failure is None]
        for turn in range(self.settings.max_turns):
            if not going:
                break
            contexts = [talk.prompt + talk.ids for talk in going]
            drawn = draw(contexts, [talk.seed if turn == 0 else derived_seed(talk.seed, "turn", turn) for talk in going])
            for talk, ids, log_probs in zip(going, drawn.responses(), drawn.log_probs.tolist(), strict=True):
                talk.write(ids, log_probs[: len(ids)], tokens, drawn.path, stop)
            self._each(going, _step)
            whole = zip(going, drawn.ended.tolist(), strict=True)
            going = [talk for talk, ended in whole if self._goes_on(talk, ended, turn + 1, tokens)]
        self._close_all(talks)
        self._check(talks)
        return talks

    def refusal(self, what: str) -> SurefootError:
        """One line about the environment."""
        return SurefootError(f"{FIELD}={self.path!r}: {what}")

    def _made(self) -> Any:
        return self.make(**self.settings.arguments)

    def _begin(self, talk: Conversation, tokens: Tokens) -> None:
        talk.environment = self._made()
        start = _said(talk.environment.reset({"seed": derived_seed(talk.seed, PART), **talk.row}), "reset")
        if not start or (not isinstance(start, str) and start[-1]["role"] == "assistant"):
            raise Unfit("reset gave no prompt that an answer can follow")
        talk.start = start
        talk.prompt = self._encoded(lambda: tokens.encode_prompt(talk.start))
        if len(talk.prompt) > self.room[0]:
            raise Unfit(f"reset gave a prompt of {len(talk.prompt)} tokens and there is room for {self.room[0]}")

    def _goes_on(self, talk: Conversation, whole: bool, turn: int, tokens: Tokens) -> bool:
        """Whether there is another turn; where one could have been, what was answered is there to be read."""
        if talk.failure is not None or talk.ended or not whole:
            talk.ended = talk.ended and whole
            return False
        closed = talk.ids[-1] in tokens.eos_ids
        new = self._encoded(lambda: tokens.encode_reply(talk.replies[-1], closed))
        length = len(talk.prompt) + len(talk.ids) + len(new)
        if length > self.room[1]:  # what does not fit is not read for V either: it may not fit into the context
            return False
        talk.hear(new)
        return turn < self.settings.max_turns

    def _encoded(self, encode: Callable[[], list[int]]) -> list[int]:
        try:
            return encode()
        except SurefootError as error:
            raise self.refusal(str(error)) from None

    def _each(self, talks: Sequence[Conversation], call: Callable[[Conversation], None]) -> None:
        """The call for every conversation whose environment has not failed, within the deadline."""

        def all_of_them() -> None:
            for talk in talks:
                if talk.failure is None:
                    try:
                        call(talk)
                    except SurefootError as error:
                        said = str(error)
                        raise error if said.startswith(FIELD) else self.refusal(said) from None
                    except (Exception, SystemExit) as error:
                        talk.failure = str(error) if isinstance(error, Unfit) else f"raised {cause_of(error)}"

        self._timed(all_of_them, f"{len(talks)} conversations")

    def _close_all(self, talks: Sequence[Conversation]) -> None:
        """Close every environment; those that have failed too, as far as they still can."""
        failed = [talk for talk in talks if talk.failure is not None]

        def the_failed() -> None:
            for talk in failed:
                with suppress(Exception, SystemExit):
                    _close(talk.environment)

        self._each(talks, lambda talk: _close(talk.environment))
        self._timed(the_failed, f"{len(failed)} conversations")

    def _timed(self, call: Callable[[], T], what: str) -> T:
        try:
            return within(self.deadline, call)
        except Overdue:
            raise self.refusal(
                f"took longer than reward.deadline={self.deadline:g} s for {what}; make it faster, or raise that, then resume "
                "from the last checkpoint"
            ) from None

    def _check(self, talks: Sequence[Conversation]) -> None:
        failures = Counter(talk.failure for talk in talks if talk.failure is not None)
        if failures.total() > self.tolerated * len(talks) + 1e-9:
            raise self.refusal(
                f"failed in {failures.total()} of {len(talks)} conversations, more than reward.tolerated={self.tolerated:g} of "
                f"them; most often: {failures.most_common(1)[0][0]}; {MEND}"
            )


def _step(talk: Conversation) -> None:
    """Have the environment answer the last turn."""
    given = talk.environment.step(talk.answer)
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        raise Unfit(f"step gave {_kind(given)}, and not messages, reward and done")
    reply, reward, done = given
    number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise Unfit(f"step gave a reward that is no finite number ({reward!r:.40})")
    if done not in (True, False):
        raise Unfit(f"step gave {_kind(done)} for done, and not True or False")
    reply = _said("" if reply is None and done else reply, "step") or ("" if isinstance(talk.start, str) else [])
    if not done and not reply:
        raise Unfit("step gave no message and is not done")
    if reply and isinstance(reply, str) != isinstance(talk.start, str):
        raise Unfit("reset and step gave text and messages; give one of them")
    talk.replies.append(reply)
    talk.rewards.append(number)
    talk.ended = bool(done)


def _said(given: Any, who: str) -> str | list[dict[str, Any]]:
    """Text or messages, checked."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Sequence):
        raise Unfit(f"{who} gave {_kind(given)}, and not text or a list of messages")
    for message in given:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise Unfit(f"{who} gave a message that is not an object with a role and a content of text")
    return [dict(message) for message in given]


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _close(environment: Any) -> None:
    """Environments that hold something may have ``close``."""
    if callable(close := getattr(environment, "close", None)):
        close()
