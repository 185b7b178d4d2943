"""Data sets as token ids: demonstrations, pairs of answers, labelled answers, answers in steps, prompts.

Demonstrations are ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``. Pairs are ``{"prompt", "chosen",
"rejected"}``, or ``{"chosen", "rejected"}`` with the prompt as their common beginning. Labelled answers are ``{"prompt",
"completion", "label"}``, answers in steps ``{"prompt", "completions", "labels"}`` with two lists. Each column is text, or
messages with a role and a content; ``tools`` and ``chat_template_kwargs`` are passed to the chat template. Answers may repeat
the messages of their prompt, or its text as the user's message. ``surefoot.language.data.shapes`` converts other shapes. Rows
that are too long and pairs of equal answers are dropped and counted. Any other error is one line with file and line.

All functions that tokenise raise SurefootError, with file and line, for a row of another shape, and if no row remains.
``limit_text`` describes ``max_length`` and its remedy in errors (``token_limit``); ``control`` is ``data.control_tokens``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from surefoot.language.data.cache import Facts, Ragged
from surefoot.language.data.chat import Dialogue, Messages
from surefoot.language.data.preparation import ControlPolicy, prepare
from surefoot.language.data.rows import Row
from surefoot.language.data.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Tokenised:
    """What rows of every kind have besides their tokens."""

    dropped: int = 0
    """number of rows dropped as too long; a pair is if either side is"""
    unused: tuple[str, ...] = ()
    """columns that are not used; of prompts, those that only reward functions read"""
    notes: tuple[str, ...] = ()
    """lines about control tokens in the rows, and about labelled answers without a partner"""
    plain: bool | None = None
    """whether all are text, or all messages; None: some are either"""
    facts: Facts = field(default_factory=Facts)
    """what was computed from all rows before"""


@dataclass(frozen=True)
class Demonstrations(Tokenised):
    """Tokenised demonstrations for supervised fine-tuning."""

    ids: Sequence[list[int]]
    trained: Sequence[list[bool]]
    """which ids are trained, row by row; never the first"""


@dataclass(frozen=True)
class Pairs(Tokenised):
    """Tokenised pairs for a reward model or DPO: each side is prompt and answer."""

    chosen: Sequence[list[int]]
    rejected: Sequence[list[int]]
    prompt_lengths: Sequence[int]
    """number of the prompt's ids at the beginning of both sides"""
    chosen_trained: Sequence[list[bool]]
    """which ids of the chosen side the assistant wrote"""
    rejected_trained: Sequence[list[bool]]
    equal: int = 0
    """number of pairs dropped because both answers are the same"""


@dataclass(frozen=True)
class Labelled(Demonstrations):
    """Tokenised answers, each labelled as good or bad."""

    good: Sequence[bool] = ()
    """the labels, row by row"""


@dataclass(frozen=True)
class Stepped(Tokenised):
    """Tokenised answers in steps, each step labelled as good or bad."""

    ids: Sequence[list[int]]
    ends: Sequence[list[int]]
    """the index of the last token of each step"""
    good: Sequence[list[bool]]


@dataclass(frozen=True)
class Prompts(Tokenised):
    """Tokenised prompts for sampling."""

    prompts: Sequence[str | Messages]
    """as in the file"""
    ids: Sequence[list[int]]
    columns: Mapping[str, Sequence[Any]]
    """every other column, for reward functions; None for rows without it"""


def repeat_prompts(prompts: Prompts, rows: Sequence[int], samples: int = 1) -> Prompts:
    """The prompts in these rows, each repeated ``samples`` times."""
    rows = [row for row in rows for _ in range(samples)]
    columns = {name: [column[row] for row in rows] for name, column in prompts.columns.items()}
    return replace(
        prompts, prompts=[prompts.prompts[row] for row in rows], ids=[prompts.ids[row] for row in rows], columns=columns
    )


NO_LIMIT = 2**53
"""more tokens than any prompt has"""


def drop_notes(path: str, limit: int, made: Tokenised, rows: str = "rows") -> list[str]:
    """Lines about dropped rows, control tokens and unused columns of a file."""
    equal = getattr(made, "equal", 0)
    return [
        *([f"{path}: dropped, because both answers are the same: {equal} rows"] if equal else []),
        *made.notes,
        *([f"{path}: dropped, because longer than {limit} tokens: {made.dropped} {rows}"] if made.dropped else []),
        *([f"{path}: not used: {', '.join(map(repr, made.unused))}"] if made.unused else []),
    ]


def token_limit(max_length: int, context: int | None, answer: int = 0) -> tuple[int, str]:
    """The token limit of a row, by ``data.max_length`` or the model's context; and its text with a remedy for errors.

    answer   tokens of the context reserved for a response
    """
    if context is None or max_length <= context - answer:
        return max_length, f"data.max_length={max_length}; raise it"
    less = f", less sampling.max_tokens={answer}" if answer else ""
    return context - answer, f"the model's context is {context}{less}; shorten them"


def demonstrations(
    rows: Iterable[Row], tokens: Tokens, max_length: int, limit_text: str = "", control: ControlPolicy = "split"
) -> Demonstrations:
    """Tokenise the rows of at most ``max_length`` ids, and mark trained ids; see ``Tokens.demonstration``."""
    made, _, common = prepare("demonstrations", rows, tokens, max_length, limit_text, control)
    return Demonstrations(made["ids"], made["trained"], **common)


def pairs(
    rows: Iterable[Row], tokens: Tokens, max_length: int, limit_text: str = "", control: ControlPolicy = "split"
) -> Pairs:
    """Tokenise both answers of every row, with prompt and EOS, if they differ and have at most ``max_length`` ids.

    Rows with one labelled answer each are paired first; see ``surefoot.language.data.shapes.paired``.
    """
    made, tally, common = prepare("pairs", rows, tokens, max_length, limit_text, control)
    lengths = common["facts"].once("prompt-lengths", lambda: [length for (length,) in made["prompt_lengths"]])
    trained = made["chosen_trained"], made["rejected_trained"]
    return Pairs(made["chosen"], made["rejected"], lengths, *trained, tally.equal, **common)


def labelled(
    rows: Iterable[Row], tokens: Tokens, max_length: int, limit_text: str = "", control: ControlPolicy = "split"
) -> Labelled:
    """Tokenise answers of at most ``max_length`` ids with their prompt and their label; a pair is a good and a bad answer."""
    made, _, common = prepare("labelled", rows, tokens, max_length, limit_text, control)
    good = common["facts"].once("labels", lambda: [label for (label,) in made["good"]])
    return Labelled(made["ids"], made["trained"], good, **common)


def stepped(
    rows: Iterable[Row],
    tokens: Tokens,
    max_length: int,
    limit_text: str = "",
    control: ControlPolicy = "split",
    separator: str = "\n",
) -> Stepped:
    """Tokenise answers in steps, joined by ``separator``, of at most ``max_length`` ids with their prompt."""
    made, _, common = prepare("steps", rows, tokens, max_length, limit_text, control, separator)
    return Stepped(made["ids"], made["ends"], made["good"], **common)


def prompts(
    rows: Iterable[Row], tokens: Tokens, max_length: int, limit_text: str = "", control: ControlPolicy = "split"
) -> Prompts:
    """Tokenise the prompts of at most ``max_length`` ids: column ``prompt``, or ``messages`` without the last answer."""
    made, tally, common = prepare("prompts", rows, tokens, max_length, limit_text, control)
    columns = {name: _listed(made["row"], partial(_column, name)) for name in tally.columns}
    return Prompts(_listed(made["row"], _prompt_of), made["ids"], columns, **common)


class Mapped(Sequence[Any]):
    """A function of every element of a sequence, computed when it is read."""

    def __init__(self, values: Sequence[Any], function: Callable[[Any], Any]) -> None:
        self._values, self._function = values, function

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._function(value) for value in self._values[index]]
        return self._function(self._values[index])


def _listed(stored: Sequence[Any], function: Callable[[Any], Any]) -> Sequence[Any]:
    return Mapped(stored, function) if isinstance(stored, Ragged) else [function(value) for value in stored]


def _prompt_of(stored: Mapping[str, Any]) -> str | Messages:
    options = stored["options"]
    prompt: str | Messages = stored["prompt"]
    return Dialogue(prompt, options) if options and not isinstance(prompt, str) else prompt


def _column(name: str, stored: Mapping[str, Any]) -> Any:
    return stored["columns"].get(name)


def prompts_without_ids(rows: Sequence[Row]) -> Prompts:
    """Rows for an environment, which makes the prompts: every column is kept, and there are no ids."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    return Prompts(["" for _ in rows], [[] for _ in rows], columns)
