"""Rewards of whole recipes: a Python function, a server, a reward model, or a weighted sum of them.

All of them read text: prompts, responses, and the other columns of the prompts' rows. So a reward model may have its own
tokenizer. A score is for the whole response, or for each of its steps or tokens. How truncated responses are treated
(``reward.missing_eos``) is not decided here; see ``online.responses``.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
import torch
from torch import Tensor

from surefoot.calls import DeadlineExceeded, left_behind, with_deadline
from surefoot.core.seeding import any_algorithm
from surefoot.errors import SurefootError, cause_at, cause_of, did_you_mean
from surefoot.files import read_toml
from surefoot.functional.masking import keep_only
from surefoot.language.data.steps import split_steps
from surefoot.language.data.tokens import Tokens
from surefoot.language.http_client import REPEAT, RESUME, RESUME_CHANGED
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.rewards.endpoint import Endpoint
from surefoot.language.rewards.judge import Judge
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.scores import (
    Columns,
    Mark,
    Per,
    Prompt,
    Reward,
    Scores,
    TokenTexts,
    dense_scores,
    marks_from,
    to_list,
    to_number,
)
from surefoot.language.rewards.signatures import DEFAULTS, RESERVED, signature_of
from surefoot.recipes.callables import Functions, find_function, import_object, term_field
from surefoot.recipes.reading import parse_flag
from surefoot.recipes.rewards import RewardTerm, term_error, term_from_text


class FunctionReward:
    """A Python function: ``function(prompts=…, responses=…, **columns)`` returns a number for each response.

    function    ``module:function``, ``file.py:function``, or the function itself. It may take any of prompts, responses and
                the rows' other columns by name, or all of them by ``**``; it returns a list, array or tensor of N numbers
    weight      of the numbers in the sum
    per         "response", or what it scores instead: "token", a list of numbers for each response, one per token, for which
                it may take ``tokens``, their texts; or "step". None: the function's attribute ``per``
    separator   what steps end with: the function may take ``steps``, their texts, and returns a number for each. None: the
                function's attribute ``separator``; without one, it splits the steps itself and returns ``(end, score)`` for
                each, where ``end`` counts characters of the response
    arguments   passed by name in every call, besides
    deadline    seconds that a call may take
    tolerated   share of a call's responses for which numbers may be missing (NaN, infinite, None, text): those are not valid
    name        of the part; default: the function's name
    field       of the recipe that names it, for messages
    then        the end of every remedy: how to continue once the function is fixed

    A function may have an attribute ``ready``, which is called now: it raises SurefootError if the function can't work here.
    Its attribute ``valid`` is called with arguments and columns before any row is scored.

    Raises SurefootError, one line that names the function, when it can't be imported or needs an argument that does not exist;
    and from a call, when it raises, takes longer, returns another count, or more than the tolerated share is missing.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        weight: float = 1.0,
        *,
        per: Per | None = None,
        separator: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        deadline: float = 60.0,
        tolerated: float = 0.1,
        name: str | None = None,
        field: str = "reward.function",
        then: str = RESUME,
    ) -> None:
        self.field, self.then = field, then
        self.weight, self.deadline, self.tolerated = weight, deadline, tolerated
        self.function: Callable[..., Any] = import_object(field, function) if isinstance(function, str) else function
        self.path = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
        if not callable(self.function):
            raise SurefootError(f"{field}={self.path!r}: is a {type(self.function).__name__}, not a function; name a function")
        last = self.path.rpartition(":")[2].rpartition(".")[2]
        self.name = name or (last if last.isidentifier() else "function")  # of a lambda
        fix = f"fix the function, {RESUME_CHANGED if then == RESUME else then}"
        self.remedy = f"{self.function.remedy}, {then}" if hasattr(self.function, "remedy") else fix
        self.per: Per = getattr(self.function, "per", "response") if per is None else per
        if self.per not in get_args(Per):
            raise self._error(f"its attribute per is {self.per!r}; set one of {', '.join(get_args(Per))}")
        self.separator = (
            (getattr(self.function, "separator", None) if separator is None else separator) if self.per == "step" else None
        )
        try:
            self.signature = signature_of(self.function)
        except ValueError as error:
            raise self._error(str(error)) from None
        self.arguments = dict(arguments or {})
        if callable(check := getattr(self.function, "ready", None)):
            try:
                check()
            except SurefootError as error:
                raise self._error(str(error)) from None
        parameters = self.signature.parameters
        unknown = [name for name in self.arguments if parameters is not None and name not in parameters]
        if unknown:
            hint = did_you_mean(unknown[0], parameters or ()) or f"; it takes: {', '.join(parameters or ())}"
            raise self._error(f"takes no argument {unknown[0]!r}{hint}")

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: TokenTexts | None = None
    ) -> Scores:
        if self.per == "token" and tokens is None:
            raise self._error("scores tokens, and only whole texts are scored here; use a reward per response or step")
        arguments = self.signature.arguments(prompts, responses, columns)
        if self.per == "token" and tokens is not None:
            arguments["tokens"] = [list(row) for row in tokens]
        if self.separator is not None:
            arguments["steps"] = [[step.text for step in split_steps(response, self.separator)] for response in responses]
        self.check_columns(columns)
        marks = self._marks(self._call(arguments, len(responses), tokens), responses, tokens)
        bad = Counter(one for one in marks if isinstance(one, str))
        if bad.total() > self.tolerated * len(responses) + 1e-9:
            first = next(index for index, one in enumerate(marks) if isinstance(one, str))
            kinds = ", ".join(f"{kind} {count}" for kind, count in bad.most_common())
            raise self._error(
                f"returned no number for {bad.total()} of {len(responses)} responses ({kinds}), more than "
                f"reward.tolerated={self.tolerated:g} allows; the first: {_abbreviated(responses[first])}; {self.remedy}"
            )
        scored = [[] if isinstance(one, str) else one for one in marks]
        raw = torch.tensor([math.fsum(score for _, score in one) for one in scored], dtype=torch.float32)
        valid = torch.tensor([not isinstance(one, str) for one in marks], dtype=torch.bool)
        dense = None
        if self.per != "response" and tokens is not None:
            dense = self.weight * dense_scores(scored, tokens, self.per)
        return Scores(self.weight * raw, {self.name: raw}, valid, dense)

    @property
    def begins_early(self) -> bool:
        """Whether ``begin`` has an effect."""
        return isinstance(self.function, Endpoint) and self.per == "response"

    def begin(self, prompt: Prompt, response: str, row: Mapping[str, Any]) -> None:
        """Request the score of a response from a server while others are sampled. A problem is reported by the call for it."""
        assert isinstance(self.function, Endpoint)
        with contextlib.suppress(SurefootError):
            columns = {name: [value] for name, value in row.items()}
            self.function.begin(**self.signature.arguments([prompt], [response], columns))

    def longest(self, count: int, columns: Columns) -> float | None:
        """The most seconds that ``count`` responses to prompts with these columns can take, by the function's attribute
        ``longest``; None without one.

        Raises SurefootError when the attribute raises, or returns no finite number.
        """
        estimate = getattr(self.function, "longest", None)
        if not callable(estimate):
            return None
        try:
            with any_algorithm():
                seconds = float(estimate(count, self.arguments, columns))
        except SurefootError as error:  # one of our own, about a row
            raise self._error(str(error)) from None
        except Exception as error:  # usually because of invalid arguments
            raise self._error(
                f"its attribute longest raised {cause_of(error)} for {count} responses; fix it, or correct arguments"
            ) from None
        if not math.isfinite(seconds):
            raise self._error(f"its attribute longest returned {seconds}, not a finite number of seconds; correct arguments")
        return seconds

    def deadline_notes(self, *calls: tuple[int, Columns]) -> list[str]:
        """A line if one of some calls may exceed the deadline, which would end the run; else none.

        calls   the number of responses in each, and the columns of their prompts
        """
        times = [(seconds, count) for count, columns in calls if (seconds := self.longest(count, columns)) is not None]
        longest, count = max(times, default=(0.0, 0))
        if longest <= self.deadline:
            return []
        return [
            f"{self.field}={self.path!r}: if all {count} responses hang, a call takes {longest:.0f} s and the run ends at "
            f"reward.deadline={self.deadline:g} s; set reward.deadline = {math.ceil(1.25 * longest)}, or lower "
            "arguments.seconds"
        ]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise SurefootError if a column has a reserved name, or the function requires an argument that does not exist."""
        extra = ["tokens"] if self.per == "token" else ["steps"] if self.separator is not None else []
        reserved = {*RESERVED[self.signature.style], *extra}
        if taken := [name for name in columns if name in reserved]:
            raise self._error(f"the rows have a column {taken[0]!r}, which is the name of another argument; rename the column")
        for name in self.arguments:
            if name in {*reserved, *columns}:
                raise self._error(f"argument {name!r} is also a column of the rows; remove one of them")
        available = {*reserved, *columns, *self.arguments, *(DEFAULTS if self.signature.style == "verifiers" else ())}
        missing = [name for name in self.signature.required if name not in available]
        if missing:
            raise self._error(f"requires {missing[0]!r}; available: {', '.join(sorted(available))}")

    def check_rows(self, columns: Columns) -> None:
        """Check the columns, and call the function's attribute ``valid``, which checks arguments and rows."""
        self.check_columns(columns)
        if callable(valid := getattr(self.function, "valid", None)):
            try:
                valid(self.arguments, columns)
            except SurefootError as error:
                raise self._error(str(error)) from None

    def _call(self, arguments: Mapping[str, list[Any]], count: int, tokens: TokenTexts | None) -> list[Any]:
        """What the function returns, as a list of ``count`` entries."""
        of_tokens, gradients = tokens if self.per == "token" else None, torch.is_grad_enabled()

        def rows() -> Any:
            with torch.set_grad_enabled(gradients):
                returned = self.signature.call(self.function, arguments, self.arguments)
            if self.per == "response" and hasattr(returned, "tolist") and getattr(returned, "shape", ())[1:] == (1,):
                returned = returned[:, 0]  # [N, 1], as heads and classifiers return it
            return _without_padding(returned, of_tokens)

        try:
            with any_algorithm():  # here, and not in the thread that may go on after the deadline
                returned = with_deadline(self.deadline, rows, self.path)
        except DeadlineExceeded as error:
            in_command = self.field in ("--reward", "--function")  # without a recipe whose deadline could be raised
            limit, remedy = ("", "score fewer at a time") if in_command else ("reward.deadline=", "raise reward.deadline")
            raise self._error(
                f"took longer than {limit}{self.deadline:g} s for {count} responses{left_behind(error)}; make it faster, or "
                f"{remedy}, {self.then}"
            ) from None
        except SurefootError as error:  # one of our own functions, whose line is complete
            raise self._error(str(error)) from None
        except (Exception, SystemExit) as error:
            raise self._error(f"raised {cause_at(error)}; {self.remedy}") from error
        what = "numbers" if self.per == "response" else "lists of numbers"
        if not isinstance(returned, list):
            kind = type(returned).__name__
            raise self._error(f"returned a {kind} instead of a list of {count} {what}, one per response; {self.remedy}")
        if len(returned) != count:
            raise self._error(f"returned {len(returned)} {what} for {count} responses; {self.remedy}")
        return returned

    def _marks(self, returned: list[Any], responses: Sequence[str], tokens: TokenTexts | None) -> list[list[Mark] | str]:
        """What each response earns and where, or a word for what was returned instead of a number."""
        if self.per == "response":
            return [one if isinstance(one, str) else [(0, one)] for one in map(to_number, returned)]
        marks: list[list[Mark] | str] = []
        for row, (entry, response) in enumerate(zip(returned, responses, strict=True)):
            try:
                marks.append(marks_from(entry, response, None if tokens is None else tokens[row], self.per, self.separator))
            except ValueError as error:
                raise self._error(f"returned {error} of response {row}, {_abbreviated(response)}; {self.remedy}") from None
        return marks

    def _error(self, what: str) -> SurefootError:
        return SurefootError(f"{self.field}={self.path!r}: {what}")


class WeightedSum:
    """The sum of several rewards' totals, which include their weights; valid where all are.

    Terms of one name get a number: ``gold``, ``gold_2``.
    """

    def __init__(self, rewards: Iterable[Reward]) -> None:
        self.rewards = tuple(rewards)
        if not self.rewards:
            raise SurefootError("reward.terms=[]: there is no reward; add a term with model, function or url")

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: TokenTexts | None = None
    ) -> Scores:
        scores = [reward(prompts, responses, columns, tokens) for reward in self.rewards]
        parts: dict[str, Tensor] = {}
        for score in scores:
            for name, part in score.parts.items():
                names = (name, *(f"{name}_{number}" for number in range(2, len(parts) + 2)))
                parts[next(candidate for candidate in names if candidate not in parts)] = part
        valid = torch.stack([score.valid for score in scores]).all(0)
        total = torch.stack([score.total for score in scores]).sum(0)
        dense = None
        if tokens is not None and any(score.dense is not None for score in scores):
            dense = torch.stack([score.per_token(tokens) for score in scores]).sum(0)
            dense = keep_only(dense, valid.unsqueeze(-1))
        return Scores(keep_only(total, valid), parts, valid, dense)


class NoReward:
    """0 for every response: the base that an environment's rewards are added to."""

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: TokenTexts | None = None
    ) -> Scores:
        return Scores(torch.zeros(len(responses)), {}, torch.ones(len(responses), dtype=torch.bool))


def load_reward(
    terms: Iterable[RewardTerm],
    *,
    deadline: float = 60.0,
    tolerated: float = 0.1,
    read: Callable[[str], RewardModel | None] | None = None,
    functions: Functions | None = None,
    as_stored: bool = False,
    bf16: bool = False,
) -> Reward:
    """The reward of a recipe's ``reward.terms``.

    deadline, tolerated   of each function and url
    read                  returns a model that need not be loaded separately, and None for any other
    functions             functions that were passed as objects, by field
    as_stored             keep models that are stored in bfloat16 or float16 so
    bf16                  models multiply in bfloat16 (autocast)

    Raises SurefootError for an invalid term, for no terms, and for what can't be loaded.
    """
    rewards = []
    for place, term in enumerate(terms):
        field = f"reward.terms[{place}]"
        if complaint := term_error(term):
            raise SurefootError(f"{field}{complaint}")
        function = None if term.function is None else find_function(term_field(place), term.function, functions or {})
        of_models = {"read": read, "as_stored": as_stored, "bf16": bf16}
        rewards.append(_load_term(term, field, function, deadline, tolerated, of_models))
    return rewards[0] if len(rewards) == 1 else WeightedSum(rewards)


def load_flag_reward(
    texts: Sequence[str], device: str = "cpu", *, flag: str = "--reward", deadline: float = 60.0, tolerated: float = 0.1
) -> Reward:
    """The reward that ``--reward``, or another ``flag``, names: a term of a recipe's ``reward.terms``, or the sum of several.

    texts   each a folder or run of a reward model, ``module:function``, ``file.py:function``, a URL, or a term in a recipe's
            syntax: ``{ function = "surefoot.verifiers:numeric", arguments = { after = "####" }, weight = 2.0 }``, or a .toml
            file with its table

    Raises SurefootError for an invalid term, and for what can't be loaded.
    """
    terms = [parse_term(text, flag) for text in texts]
    rewards = [
        _load_term(term, flag, term.function, deadline, tolerated, {"device": device}, in_recipe=False) for term in terms
    ]
    return rewards[0] if len(rewards) == 1 else WeightedSum(rewards)


def parse_term(text: str, flag: str = "--reward") -> RewardTerm:
    """One ``--reward`` as a term: a table, or that of a .toml file; else a function if there is a colon and no such folder."""
    value = read_toml(Path(text)) if text.endswith(".toml") else parse_flag(text)
    if not isinstance(value, dict):
        return RewardTerm(**term_from_text(text))
    fields = RewardTerm.model_fields
    for name in value:
        if name not in fields:
            hint = did_you_mean(name, fields) or f"; known: {', '.join(fields)}"
            raise SurefootError(f"{flag} {text}: a term has no key {name!r}{hint}")
    try:
        term = RewardTerm(**value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise SurefootError(f"{flag} {text}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if complaint := term_error(term):
        raise SurefootError(f"{flag} {text}{complaint}")
    return term


def _load_term(
    term: RewardTerm,
    field: str,
    function: str | Callable[..., Any] | None,
    deadline: float,
    tolerated: float,
    of_models: Mapping[str, Any],
    in_recipe: bool = True,
) -> Reward:
    """One valid term. Messages name the term's key in a recipe, and only the ``field`` for a flag."""

    def key(name: str) -> str:
        return f"{field}.{name}" if in_recipe else field

    if term.model is not None:
        steps: dict[str, Any] = {"per": term.per or "response", "separator": term.separator}
        return ModelReward(term.model, term.weight, label=term.label, field=key("model"), **steps, **of_models)
    shared: dict[str, Any] = {"per": term.per, "separator": term.separator, "deadline": deadline, "tolerated": tolerated}
    shared["then"] = RESUME if in_recipe else REPEAT
    if term.url is None:
        assert function is not None
        return FunctionReward(function, term.weight, arguments=term.arguments, field=key("function"), **shared)
    requests: dict[str, Any] = {name: getattr(term, name) for name in ("token_from", "retries", "arguments")}
    requests |= {"deadline": deadline, "then": shared["then"]}
    if term.judge is None:
        server = Endpoint(term.url, batch=term.batch, at_once=term.at_once, **requests)
    else:
        server = Judge(term.url, term.judge, tolerated=tolerated, **requests)
    return FunctionReward(server, term.weight, name=server.name, field=key("url"), **shared)


def parts_of(reward: Reward) -> tuple[Reward, ...]:
    """The terms of a sum; else the reward itself."""
    return reward.rewards if isinstance(reward, WeightedSum) else (reward,)


def function_rewards(reward: Reward) -> list[FunctionReward]:
    """The terms that may read columns of the rows."""
    return [part for part in parts_of(reward) if isinstance(part, FunctionReward)]


def check_special_texts(reward: Reward, tokens: Tokens, remedy: str) -> None:
    """Raise SurefootError if a term looks for a special token, in texts that have none.

    remedy   what makes texts have them
    """
    for part in parts_of(reward):
        texts = {"separator": getattr(part, "separator", None), **getattr(part, "arguments", {})}
        for name, text in texts.items():
            if isinstance(text, str) and (token := tokens.special_in(text)) is not None:
                raise SurefootError(
                    f"{getattr(part, 'field', 'reward')}={getattr(part, 'path', '')!r}: {name}={text!r} contains {token!r}, a "
                    f"special token, and rewards get responses without those; {remedy}"
                )


def is_dense(reward: Reward) -> bool:
    """Whether a term scores steps or tokens, so that it needs the tokens of responses."""
    return any(getattr(part, "per", "response") != "response" for part in parts_of(reward))


def _without_padding(returned: Any, tokens: TokenTexts | None) -> Any:
    """What a function returned, as a list; of an array [N, T] of tokens, T the longest response, each row up to its end."""
    rows = to_list(returned)
    if tokens is None or getattr(returned, "ndim", 0) != 2 or len(rows) != len(tokens):
        return rows
    if any(len(row) != max(map(len, tokens)) for row in rows):
        return rows
    return [row[: len(of_row)] for row, of_row in zip(rows, tokens, strict=True)]


def _abbreviated(text: str, longest: int = 60) -> str:
    return repr(text if len(text) <= longest else text[:longest] + " …")
