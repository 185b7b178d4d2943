"""The reward of an online run: terms that are functions, models, servers or judges, and the checks of their fields."""

import os
import re
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from surefoot.recipes.base import Count, Seconds, Section
from surefoot.recipes.faults import SET, FieldsFor, misplaced, named_value

JUDGE_FIELDS = ("prompt", "response", "first", "second")
"""names in a judge's prompt that are not columns"""


def placeholders(template: str) -> list[str]:
    """The names in braces in a judge's prompt."""
    return re.findall(r"\{(\w+)\}", template)


class JudgeSettings(Section):
    """How a language model judges a response."""

    model: str
    """name of the model, as the server knows it"""
    prompt: str
    """the question: {prompt}, {response} and names of columns in braces are replaced; with against, {first} and {second}"""
    pattern: str | None = None
    """regular expression whose last match in the answer, or its first group there, is the score; none: a number. With against:
    1, 2 or tie, for the better answer"""
    key: str | None = None
    """key of the score in a JSON object that the answer contains, instead of a pattern"""
    against: str | None = None
    """column with an answer to compare with, in both orders; the score is 1 for two wins, 0 for two losses"""
    in_flight: int = Field(64, ge=1, le=1024)
    """most requests at a time"""


def judge_error(judge: JudgeSettings) -> str:
    """The error in the settings of a judge, after the name of the term; "" if they are valid."""
    needed = ("response",) if judge.against is None else ("first", "second")
    missing = [name for name in needed if name not in placeholders(judge.prompt)]
    if missing:
        return f".judge.prompt: has no {{{missing[0]}}}; the judge would not see the answer"
    if judge.pattern is not None and judge.key is not None:
        return f".judge.key={judge.key!r}: replaces judge.pattern; unset one of them"
    try:
        re.compile(judge.pattern or "")
    except re.error as error:
        return f".judge.pattern={judge.pattern!r}: is no regular expression ({error}); correct it"
    return ""


class RewardTerm(Section):
    """One term of the reward: a reward model, a function or a server."""

    model: str | None = None
    """folder or hub id of a reward model: a run, or a model that AutoModelForSequenceClassification of transformers loads"""
    label: str | None = None
    """label of the model whose logit is the score; none: the only one"""
    function: str | None = None
    """module:function or file.py:function: prompts, responses and columns in, floats out; or with the signature of TRL or of
    verifiers"""
    url: str | None = None
    """address of a server that works like a function: JSON in, JSON out; or of a judge"""
    judge: JudgeSettings | None = None
    """the server at url is a language model (OpenAI's chat completions) that is asked about each response; none: a function"""
    weight: float = 1.0
    """weight in the sum"""
    per: Literal["response", "token", "step"] | None = None
    """unit that gets a score; none: the function's attribute ``per``, else response"""
    separator: str | None = None
    """text that ends each step; empty: every character is a step; none: the function returns the ends of its steps"""
    arguments: dict[str, Any] = Field({})
    """other keyword arguments of a function, such as { tolerance = 0.01 }; a server gets them with every request"""
    batch: Count = 64
    """responses per request to a server"""
    at_once: Count = 8
    """requests to a server at the same time"""
    token_from: str | None = None
    """environment variable with the token of the Authorization header; its value is never saved"""
    retries: int = Field(5, ge=0, le=100)
    """retries of a request, at growing intervals, while a server is down or busy"""


def term_from_text(text: str) -> dict[str, str]:
    """The table of a term that is a text: the URL of a server; with a colon, and no such folder, a function; else a model."""
    if text.startswith(("http://", "https://")):
        return {"url": text}
    return {"function": text} if ":" in text and not Path(os.path.expanduser(text)).exists() else {"model": text}


def token_error(name: str) -> str:
    """The error in a ``token_from``, without its value, to append to the name of its place; "" if it is valid."""
    if re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        return ""
    return ".token_from: must be the name of an environment variable, in capitals, such as REWARD_TOKEN, not the token"


FIELDS_FOR: FieldsFor = (
    ("arguments", "model", (None,)),
    ("label", "model", (SET,)),
    *((name, "judge", (None,)) for name in ("per", "separator", "batch", "at_once")),  # a judge scores whole responses
    *((name, "url", (SET,)) for name in ("batch", "at_once", "token_from", "retries", "judge")),
    ("separator", "per", ("step", None)),
)
"""what each field of a term is for, as in ``rules.FIELDS_FOR``"""


def term_error(term: Any) -> str:
    """The error in a reward term, to append to the name of its place: ``.weight=nan: …`` or ``: …``; "" if it is valid."""
    kinds = [name for name in ("model", "function", "url") if getattr(term, name) is not None]
    if len(kinds) != 1:
        has = " and ".join(kinds) if kinds else "neither model, function nor url"
        return f": has {has}; give one of model, function and url, and a term for each"
    for field, why in misplaced(term, FIELDS_FOR):
        return f".{named_value(term, field)}: {why}"
    if term.judge is not None and (error := judge_error(term.judge)):
        return error
    if term.token_from is not None and (error := token_error(term.token_from)):
        return error
    if term.model is not None and (term.per in ("step", "token")) != (term.separator is not None):
        return f".per={term.per!r}: a model's steps need both per = 'step' and a separator, such as '\\n'"
    return ""


class RewardSettings(Section):
    """The reward of a response: at its last token, or at each of its steps or tokens."""

    terms: tuple[RewardTerm, ...] = ()
    """terms of the reward, added up; may be empty if the environment rewards turns. A text is a term with only a function, such
    as file.py:function, a model or a URL"""
    missing_eos: Literal["penalty", "subtract", "bootstrap"] | None = None
    """for a truncated response, or a conversation that did not end. penalty: it (or its last turn) earns missing_eos_value
    instead; subtract: it loses that much; bootstrap: V stands for the rest; none: scored like any other"""
    missing_eos_value: float = -1.0
    """the penalty, or what is subtracted"""
    overlong: float | None = Field(None, gt=0, le=1)
    """soft length penalty: falls linearly from 0 to −1 over the last tokens, this share of sampling.max_tokens (times
    turns.max_turns in conversations); DAPO uses 0.2"""
    deadline: Seconds = 60.0
    """seconds that a reward function or server may take for a batch, and an environment for a turn of all conversations"""
    tolerated: float = Field(0.1, ge=0, le=1)
    """share of a batch that may get no finite reward, or whose environments may fail; these responses are masked"""
    special_tokens: bool = False
    """keep special tokens that the policy writes, such as <answer>, in the text that rewards get; environments always get
    them"""
    gold: str | None = None
    """module:function or file.py:function with the true reward, if there is one; measured, never trained on"""

    @pydantic.field_validator("terms", mode="before")
    @classmethod
    def _from_texts(cls, terms: Any) -> Any:
        """Terms that are texts, alone or in a list, as tables."""
        terms = [terms] if isinstance(terms, str) else terms
        return [term_from_text(x) if isinstance(x, str) else x for x in terms] if isinstance(terms, (list, tuple)) else terms
