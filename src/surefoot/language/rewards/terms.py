"""What a response earns: a Python function's number, a server's, a reward model's score, or a weighted sum of such.

All of them get text: prompts, responses, and the other columns of the prompts' rows. So a reward model may have a tokenizer
of its own. A score is of the whole response, or of each of its steps or tokens. A response that was cut is treated by whoever
sampled it (``reward.missing_eos``), not here.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from surefoot.errors import SurefootError, cause_of, did_you_mean, place_of
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.rewards.deadline import Overdue, within
from surefoot.language.rewards.endpoint import REPEAT, RESUME, Endpoint
from surefoot.language.rewards.model import BATCH_TOKENS as BATCH_TOKENS
from surefoot.language.rewards.model import ModelReward as ModelReward
from surefoot.language.rewards.scores import Columns as Columns
from surefoot.language.rewards.scores import Pieces, listed, number
from surefoot.language.rewards.scores import Prompt as Prompt
from surefoot.language.rewards.scores import Reward as Reward
from surefoot.language.rewards.scores import Scores as Scores
from surefoot.language.rewards.steps import Mark, Per, dense_of, marks_from, steps_of
from surefoot.recipes.import_object import import_object
from surefoot.recipes.language import term_error


class Term(Protocol):
    """One of a recipe's ``reward.terms``: a model, a function or a url, and its weight."""

    @property
    def model(self) -> str | None: ...
    @property
    def function(self) -> str | None: ...
    @property
    def url(self) -> str | None: ...
    @property
    def weight(self) -> float: ...
    @property
    def per(self) -> Per | None: ...
    @property
    def separator(self) -> str | None: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...
    @property
    def batch(self) -> int: ...
    @property
    def token_from(self) -> str | None: ...
    @property
    def retries(self) -> int: ...


class FunctionReward:
    """A Python function: ``function(prompts=…, responses=…, **columns)`` gives a number for each response.

    function    ``module:function``, ``file.py:function``, or the function itself. It may take any of prompts, responses and
                the rows' other columns by name, or all of them by ``**``; it returns a list, array or tensor of N numbers
    weight      of the numbers in the sum
    per         "response", or what it scores instead: "token", a list of numbers for each response, one per token, for which
                it may take ``tokens``, their texts; or "step". None: what the function's attribute ``per`` says
    separator   what steps end with: the function may take ``steps``, their texts, and gives a number for each. None: as the
                function's attribute ``separator`` says, else it finds steps itself and gives ``(end, score)`` for each, where
                ``end`` counts characters of the response
    arguments   given by name at every call, besides
    deadline    seconds that a call may take
    tolerated   share of a call's responses for which numbers may be missing (NaN, infinite, None, text): those are not valid
    name        of the part; default: the function's own
    field       of the recipe that names it, for messages
    then        what messages say is to be done once the function is mended

    A function may have an attribute ``ready``, which is called now: it raises SurefootError where the function can't work here.

    Raises SurefootError, one line that names the function, when it can't be imported or asks for what is not there; and from
    a call, when it raises, takes longer, returns another count, or more than the tolerated share is missing.
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
        self.field = field
        self.weight, self.deadline, self.tolerated = weight, deadline, tolerated
        self.function: Callable[..., Any] = import_object(field, function) if isinstance(function, str) else function
        self.path = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
        if not callable(self.function):
            raise SurefootError(f"{field}={self.path!r}: is a {type(self.function).__name__}, not a function")
        self.name = name or self.path.rpartition(":")[2].rpartition(".")[2]
        self.then = then
        self.mend = f"{getattr(self.function, 'mend', 'mend the function')}, {then}"
        self.per: Per = getattr(self.function, "per", "response") if per is None else per
        if self.per not in get_args(Per):
            raise self._refusal(f"its attribute per is {self.per!r}; it may be one of {', '.join(get_args(Per))}")
        self.separator = separator or getattr(self.function, "separator", None) if self.per == "step" else None
        self.wanted, self.needed = self._arguments()
        self.arguments = dict(arguments or {})
        if callable(check := getattr(self.function, "ready", None)):
            try:
                check()
            except SurefootError as error:
                raise self._refusal(str(error)) from None
        unknown = [name for name in self.arguments if self.wanted is not None and name not in self.wanted]
        if unknown:
            hint = did_you_mean(unknown[0], self.wanted or ()) or f"; it takes: {', '.join(self.wanted or ())}"
            raise self._refusal(f"takes no argument {unknown[0]!r}{hint}")

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: Pieces | None = None
    ) -> Scores:
        if self.per == "token" and tokens is None:
            raise self._refusal("scores tokens, and here whole texts are scored; give a reward of responses or of steps")
        given = {name: list(column) for name, column in columns.items()}
        given |= {"prompts": list(prompts), "responses": list(responses), **self.arguments}
        if self.per == "token" and tokens is not None:
            given["tokens"] = [list(row) for row in tokens]
        if self.separator is not None:
            given["steps"] = [[step.text for step in steps_of(response, self.separator)] for response in responses]
        self.check_columns(columns)
        arguments = given if self.wanted is None else {name: given[name] for name in self.wanted if name in given}
        found = self._found(self._returned(arguments, len(responses), tokens), responses, tokens)
        bad = Counter(one for one in found if isinstance(one, str))
        if bad.total() > self.tolerated * len(responses) + 1e-9:
            first = next(index for index, one in enumerate(found) if isinstance(one, str))
            raise self._refusal(
                f"gave no number for {bad.total()} of {len(responses)} responses ({_counted(bad)}), more than "
                f"reward.tolerated={self.tolerated:g} of them; the first: {_short(responses[first])}; {self.mend}"
            )
        marks = [[] if isinstance(one, str) else one for one in found]
        raw = torch.tensor([math.fsum(score for _, score in one) for one in marks], dtype=torch.float32)
        valid = torch.tensor([not isinstance(one, str) for one in found], dtype=torch.bool)
        dense = None
        if self.per != "response" and tokens is not None:
            dense = self.weight * dense_of(marks, tokens, self.per)
        return Scores(self.weight * raw, {self.name: raw}, valid, dense)

    def longest(self, count: int, columns: Columns) -> float | None:
        """Seconds that so many responses to prompts with these columns take, if each takes all the time it may; None where the
        function does not say.

        Raises SurefootError where it can't, or says no finite number.
        """
        told = getattr(self.function, "longest", None)
        if not callable(told):
            return None
        try:
            seconds = float(told(count, self.arguments, columns))
        except SurefootError as error:  # one of our own, of a row
            raise self._refusal(str(error)) from None
        except Exception as error:  # as a rule because of arguments that are none
            raise self._refusal(
                f"can't tell how long {count} responses take: its attribute longest raised {cause_of(error)}; mend that, or "
                "arguments"
            ) from None
        if not math.isfinite(seconds):
            raise self._refusal(f"its attribute longest gave {seconds}, and not a number of seconds; mend arguments")
        return seconds

    def late(self, *calls: tuple[int, Columns]) -> list[str]:
        """A line where one of some calls may take longer than the deadline, which would end the run; else none.

        calls   the number of responses in each, and the columns of the prompts that they may be to
        """
        told = [(seconds, count) for count, columns in calls if (seconds := self.longest(count, columns)) is not None]
        longest, count = max(told, default=(0.0, 0))
        if longest <= self.deadline:
            return []
        return [
            f"{self.field}={self.path!r}: {count} responses that all hang would take {longest:.0f} s, and end the run at "
            f"reward.deadline={self.deadline:g} s; set reward.deadline = {math.ceil(1.25 * longest)}, or lower "
            "arguments.seconds"
        ]

    def _found(self, returned: list[Any], responses: Sequence[str], tokens: Pieces | None) -> list[list[Mark] | str]:
        """What each response earns and where, or in a word what came in place of a number."""
        if self.per == "response":
            return [one if isinstance(one, str) else [(0, one)] for one in map(number, returned)]
        found: list[list[Mark] | str] = []
        for row, (entry, response) in enumerate(zip(returned, responses, strict=True)):
            try:
                of_row = None if tokens is None else tokens[row]
                found.append(marks_from(entry, response, of_row, self.per, self.separator))
            except ValueError as error:
                raise self._refusal(f"returned {error} of response {row}, {_short(response)}; {self.mend}") from None
        return found

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise SurefootError where the function needs what is neither a column nor given to every one."""
        own = {"prompts", "responses", *(["tokens"] if self.per == "token" else ["steps"] if self.separator else [])}
        if taken := [name for name in columns if name in own]:
            raise self._refusal(f"the rows have a column {taken[0]!r}, which is what it is given anyway; rename the column")
        for name in self.arguments:
            if name in {*own, *columns}:
                raise self._refusal(f"argument {name!r} is a column of the rows too; take it from one of them")
        given = {*own, *columns, *self.arguments}
        missing = [name for name in self.needed if name not in given]
        if missing:
            raise self._refusal(f"asks for {missing[0]!r}; what there is: {', '.join(sorted(given))}")

    def _arguments(self) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """The names that the function takes (None: any), and those that it must be given."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # built in, without a signature
            return ("prompts", "responses"), ()
        needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
        if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in needed):
            raise self._refusal("takes arguments by position only; it is called with names: prompts, responses, columns")
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = tuple(parameter.name for parameter in parameters if parameter.kind in by_name)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        return None if takes_all else named, tuple(p.name for p in needed if p.kind in by_name)

    def _returned(self, arguments: Mapping[str, Any], count: int, tokens: Pieces | None) -> list[Any]:
        """What the function gives, as a list of ``count`` things."""
        try:
            returned = within(self.deadline, lambda: _rows(self.function(**arguments), tokens if self.per == "token" else None))
        except Overdue:
            fewer = self.field in ("--reward", "--function")  # where there is no recipe whose deadline could be raised
            limit, raised = ("", "give it fewer at a time") if fewer else ("reward.deadline=", "raise that")
            raise self._refusal(
                f"took longer than {limit}{self.deadline:g} s for {count} responses; make it faster, or {raised}, {self.then}"
            ) from None
        except SurefootError as error:  # one of our own functions, whose line says it all
            raise self._refusal(str(error)) from None
        except (Exception, SystemExit) as error:
            line = f" ({where})" if (where := place_of(error)) else ""
            raise self._refusal(f"raised {cause_of(error)}{line}; {self.mend}") from error
        what = "numbers" if self.per == "response" else "lists of numbers"
        if not isinstance(returned, list):
            kind = type(returned).__name__
            raise self._refusal(f"returned a {kind}; it must return a list of {count} {what}, one per response; {self.mend}")
        if len(returned) != count:
            raise self._refusal(f"returned {len(returned)} {what} for {count} responses, and not one for each; {self.mend}")
        return returned

    def _refusal(self, what: str) -> SurefootError:
        return SurefootError(f"{self.field}={self.path!r}: {what}")


class WeightedSum:
    """The sum of some rewards' totals, which have their weights in them; valid where all are.

    Terms of one name are told apart by a number: ``gold``, ``gold_2``.
    """

    def __init__(self, rewards: Iterable[Reward]) -> None:
        self.rewards = tuple(rewards)
        if not self.rewards:
            raise SurefootError("reward.terms=[]: there is nothing to learn from; give a term with model, function or url")

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: Pieces | None = None
    ) -> Scores:
        scores = [scored(reward, prompts, responses, columns, tokens) for reward in self.rewards]
        parts: dict[str, Tensor] = {}
        for score in scores:
            for name, part in score.parts.items():
                parts[_unused(name, parts)] = part
        valid = torch.stack([score.valid for score in scores]).all(0)
        total = torch.stack([score.total for score in scores]).sum(0)
        dense = None
        if tokens is not None and any(score.dense is not None for score in scores):
            dense = torch.stack([score.spread(tokens) for score in scores]).sum(0)
            dense = torch.where(valid.unsqueeze(-1), dense, torch.zeros_like(dense))
        return Scores(torch.where(valid, total, torch.zeros_like(total)), parts, valid, dense)


class NoReward:
    """Nothing for anything: what is added to what an environment pays."""

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: Pieces | None = None
    ) -> Scores:
        return Scores(torch.zeros(len(responses)), {}, torch.ones(len(responses), dtype=torch.bool))


def load_reward(
    terms: Iterable[Term],
    *,
    deadline: float = 60.0,
    tolerated: float = 0.1,
    device: str = "cpu",
    read: Callable[[str], RewardModel | None] | None = None,
) -> Reward:
    """The reward of a recipe's ``reward.terms``; ``deadline`` and ``tolerated`` hold for each function and url, models live on
    ``device`` and are asked of ``read`` first.

    Raises SurefootError for a term that is not one of model, function and url, for none at all, and for what can't be loaded.
    """
    rewards = []
    for place, term in enumerate(terms):
        field = f"reward.terms[{place}]"
        if complaint := term_error(term):
            raise SurefootError(f"{field}{complaint}")
        rewards.append(reward_of(term, field, deadline=deadline, tolerated=tolerated, device=device, read=read))
    return rewards[0] if len(rewards) == 1 else WeightedSum(rewards)


def reward_of(
    term: Term,
    field: str,
    *,
    deadline: float = 60.0,
    tolerated: float = 0.1,
    device: str = "cpu",
    read: Callable[[str], RewardModel | None] | None = None,
    named: bool = True,
) -> Reward:
    """One term, about which there is no complaint. ``named``: messages name the key of the term, too, which is a recipe's; else
    they are about a flag.
    """

    def key(name: str) -> str:
        return f"{field}.{name}" if named else field

    if term.model is not None:
        steps: dict[str, Any] = {"per": term.per or "response", "separator": term.separator}
        return ModelReward(term.model, term.weight, device=device, field=key("model"), read=read, **steps)
    then = RESUME if named else REPEAT
    shared: dict[str, Any] = {"per": term.per, "separator": term.separator, "deadline": deadline, "tolerated": tolerated}
    shared["then"] = then
    if term.url is not None:
        asked: dict[str, Any] = {
            "batch": term.batch,
            "token_from": term.token_from,
            "retries": term.retries,
            "arguments": term.arguments,
            "then": then,
        }
        server = Endpoint(term.url, deadline=deadline, **asked)
        return FunctionReward(server, term.weight, name=server.name, field=key("url"), **shared)
    assert term.function is not None
    return FunctionReward(term.function, term.weight, arguments=term.arguments, field=key("function"), **shared)


def scored(
    reward: Reward, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: Pieces | None
) -> Scores:
    """What a reward gives; it hears of tokens where there is something to tell."""
    return reward(prompts, responses, columns) if tokens is None else reward(prompts, responses, columns, tokens)


def is_dense(reward: Reward) -> bool:
    """Whether a term scores steps or tokens, so that it needs to know the tokens of responses."""
    return any(getattr(part, "per", "response") != "response" for part in parts_of(reward))


def parts_of(reward: Reward) -> tuple[Reward, ...]:
    """The terms of a sum; else the reward itself."""
    return reward.rewards if isinstance(reward, WeightedSum) else (reward,)


def _rows(returned: Any, tokens: Pieces | None) -> Any:
    """What came, as a list; an array [N, T] of tokens, T the longest response, without what stands behind each one's end."""
    found = listed(returned)
    if tokens is None or getattr(returned, "ndim", 0) != 2 or len(found) != len(tokens):
        return found
    if any(len(row) != max(map(len, tokens)) for row in found):
        return found
    return [row[: len(of_row)] for row, of_row in zip(found, tokens, strict=True)]


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())


def _short(text: str, longest: int = 60) -> str:
    return repr(text if len(text) <= longest else text[:longest] + " …")


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    names = (name, *(f"{name}_{number}" for number in range(2, len(taken) + 2)))
    return next(candidate for candidate in names if candidate not in taken)
