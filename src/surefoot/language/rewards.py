"""What a response earns: a Python function's number, a reward model's score, or a weighted sum of such.

All of them get text: prompts, responses, and the other columns of the prompts' rows. So a reward model may have a tokenizer
of its own. A response that was cut is treated by whoever sampled it (``reward.missing_eos``), not here.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.dotted import imported
from surefoot.errors import SurefootError, cause_of, did_you_mean
from surefoot.language.deadline import Overdue, within
from surefoot.language.models import RewardModel
from surefoot.language.optional import quiet
from surefoot.language.tokens import Messages, Tokens, right_padded
from surefoot.language.trained import model_folder, named

BATCH_TOKENS = 16_384
"""tokens, padding included, that go through a reward model at once"""

MEND = "mend the function, then resume from the last checkpoint"

Columns = Mapping[str, Sequence[Any]]
Prompt = str | Messages
"""text, or the messages of a conversation"""


@dataclass(frozen=True)
class Scores:
    """What N responses earn.   All [N]."""

    total: Tensor
    """float32, weighted; 0 where not valid"""
    parts: dict[str, Tensor]
    """term -> what it gave, before its weight; 0 where it gave none"""
    valid: Tensor
    """False where a term gave no finite number: nothing is to be learned from that response"""

    def mean_of(self, x: Tensor) -> float | None:
        """The mean over the responses that have a score; None where none has.   [N]"""
        return float(x[self.valid].mean()) if self.valid.any() else None

    def column(self, x: Tensor) -> list[float | None]:
        """Number by number, None where a response has no score.   [N]"""
        return [value if valid else None for value, valid in zip(x.tolist(), self.valid.tolist(), strict=True)]


class Reward(Protocol):
    """Anything that scores text. Raises SurefootError when it can't."""

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns) -> Scores:
        """The scores of N responses, each to the prompt of its index; every column has N entries too."""
        ...


class Term(Protocol):
    """One of a recipe's ``reward.terms``: a model or a function, and its weight."""

    @property
    def model(self) -> str | None: ...
    @property
    def function(self) -> str | None: ...
    @property
    def weight(self) -> float: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...


class FunctionReward:
    """A Python function: ``function(prompts=…, responses=…, **columns)`` gives a number for each response.

    function    ``module:function``, ``file.py:function``, or the function itself. It may take any of prompts, responses and
                the rows' other columns by name, or all of them by ``**``; it returns a list, array or tensor of N numbers.
    weight      of the numbers in the sum
    arguments   given by name at every call, besides
    deadline    seconds that a call may take
    tolerated   share of a call's numbers that may be missing (NaN, infinite, None, text): those responses are not valid
    name        of the part; default: the function's own
    field       of the recipe that names it, for messages

    A function may have an attribute ``ready``, which is called now: it raises SurefootError where the function can't work here.

    Raises SurefootError, one line that names the function, when it can't be imported or asks for what is not there; and from
    a call, when it raises, takes longer, returns another count, or more than the tolerated share is missing.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        weight: float = 1.0,
        *,
        arguments: Mapping[str, Any] | None = None,
        deadline: float = 60.0,
        tolerated: float = 0.1,
        name: str | None = None,
        field: str = "reward.function",
    ) -> None:
        self.field = field
        self.weight, self.deadline, self.tolerated = weight, deadline, tolerated
        self.function: Callable[..., Any] = imported(field, function) if isinstance(function, str) else function
        self.path = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
        if not callable(self.function):
            raise SurefootError(f"{field}={self.path!r}: is a {type(self.function).__name__}, not a function")
        self.name = name or self.path.rpartition(":")[2].rpartition(".")[2]
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

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns) -> Scores:
        given = {name: list(column) for name, column in columns.items()}
        given |= {"prompts": list(prompts), "responses": list(responses), **self.arguments}
        self.check_columns(columns)
        arguments = given if self.wanted is None else {name: given[name] for name in self.wanted if name in given}
        numbers = [_number(value) for value in self._returned(arguments, len(responses))]
        bad = Counter(number for number in numbers if isinstance(number, str))
        if bad.total() > self.tolerated * len(responses) + 1e-9:
            first = next(index for index, number in enumerate(numbers) if isinstance(number, str))
            raise self._refusal(
                f"gave no number for {bad.total()} of {len(responses)} responses ({_counted(bad)}), more than "
                f"reward.tolerated={self.tolerated:g} of them; the first: {_short(responses[first])}; {MEND}"
            )
        raw = torch.tensor([0.0 if isinstance(number, str) else number for number in numbers], dtype=torch.float32)
        valid = torch.tensor([not isinstance(number, str) for number in numbers], dtype=torch.bool)
        return Scores(self.weight * raw, {self.name: raw}, valid)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise SurefootError where the function needs what is neither a column nor given to every one."""
        for name in self.arguments:
            if name in {"prompts", "responses", *columns}:
                raise self._refusal(f"argument {name!r} is a column of the rows too; take it from one of them")
        given = {"prompts", "responses", *columns, *self.arguments}
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

    def _returned(self, arguments: Mapping[str, Any], count: int) -> list[Any]:
        """What the function gives, as a list of ``count`` things."""
        try:
            returned = within(self.deadline, lambda: _listed(self.function(**arguments)))
        except Overdue:
            raise self._refusal(
                f"took longer than reward.deadline={self.deadline:g} s for {count} responses; make it faster, or raise that, "
                "then resume from the last checkpoint"
            ) from None
        except SurefootError as error:  # one of our own functions, whose line says it all
            raise self._refusal(str(error)) from None
        except (Exception, SystemExit) as error:
            raise self._refusal(f"raised {cause_of(error)}; {MEND}") from error
        if not isinstance(returned, list):
            kind = type(returned).__name__
            raise self._refusal(f"returned a {kind}; it must return a list of {count} numbers, one per response; {MEND}")
        if len(returned) != count:
            raise self._refusal(f"returned {len(returned)} numbers for {count} responses, and not one for each; {MEND}")
        return returned

    def _refusal(self, what: str) -> SurefootError:
        return SurefootError(f"{self.field}={self.path!r}: {what}")


class ModelReward:
    """A reward model's score of prompt and response, as whole texts that end, by the model's own tokenizer or chat template.

    folder         what training with ``kind = "reward"`` wrote, or the run
    weight         of the scores in the sum; they are standardised, mean 0 and std 1 on demonstrations
    batch_tokens   tokens, padding included, that go through the model at once; bounds memory, changes no score
    name           of the part
    device         where the model lives
    field          of the recipe that names it, for messages

    Raises SurefootError when the folder holds no reward model, and from a call, when a text is longer than the model's
    context or a score is not finite.
    """

    def __init__(
        self,
        folder: str | Path,
        weight: float = 1.0,
        *,
        batch_tokens: int = BATCH_TOKENS,
        name: str = "reward_model",
        device: str = "cpu",
        field: str = "reward.model",
    ) -> None:
        self.weight, self.batch_tokens, self.name, self.field = weight, batch_tokens, name, field
        with named(field):
            self.path = model_folder(str(folder))
            self.model = RewardModel.load(self.path).requires_grad_(False).to(device)
        assert self.model.tokenizer is not None, "a reward model's folder holds its tokenizer"
        self.tokens = Tokens(self.model.tokenizer)
        self.context: int | None = getattr(self.model.backbone.config, "max_position_embeddings", None)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns) -> Scores:
        with quiet():  # a tokenizer warns of text longer than the context, which is refused here
            rows = [self._ids(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        longest = max(map(len, rows), default=0)
        if self.context is not None and longest > self.context:
            raise self._refusal(
                f"prompt and response have {longest} tokens and its context is {self.context}; "
                "lower data.max_length or sampling.max_tokens"
            )
        device = self.model.mean.device
        raw = torch.zeros(len(rows))
        for chosen in _packed([len(row) for row in rows], self.batch_tokens):
            ids, mask = right_padded([rows[index] for index in chosen], self.tokens.pad_id)
            raw[chosen] = self.model(ids.to(device), mask.to(device)).float().cpu()
        if not torch.isfinite(raw).all():
            raise self._refusal("gave a score that is not finite; train it again, with a lower learning rate")
        return Scores(self.weight * raw, {self.name: raw}, torch.ones(len(rows), dtype=torch.bool))

    def _ids(self, prompt: Prompt, response: str) -> list[int]:
        if isinstance(prompt, str):
            return [*self.tokens.encode_prompt(prompt), *self.tokens.encode_completion(response)]
        return self.tokens.render([*prompt, {"role": "assistant", "content": response}])

    def _refusal(self, what: str) -> SurefootError:
        return SurefootError(f"{self.field}={self.path!r}: {what}")


class WeightedSum:
    """The sum of some rewards' totals, which have their weights in them; valid where all are.

    Terms of one name are told apart by a number: ``gold``, ``gold_2``.
    """

    def __init__(self, rewards: Iterable[Reward]) -> None:
        self.rewards = tuple(rewards)
        if not self.rewards:
            raise SurefootError("reward.terms=[]: there is nothing to learn from; give a term with model or function")

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns) -> Scores:
        scores = [reward(prompts, responses, columns) for reward in self.rewards]
        parts: dict[str, Tensor] = {}
        for score in scores:
            for name, part in score.parts.items():
                parts[_unused(name, parts)] = part
        valid = torch.stack([score.valid for score in scores]).all(0)
        total = torch.stack([score.total for score in scores]).sum(0)
        return Scores(torch.where(valid, total, torch.zeros_like(total)), parts, valid)


class NoReward:
    """Nothing for anything: what is added to what an environment pays."""

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns) -> Scores:
        return Scores(torch.zeros(len(responses)), {}, torch.ones(len(responses), dtype=torch.bool))


def load_reward(terms: Iterable[Term], *, deadline: float = 60.0, tolerated: float = 0.1, device: str = "cpu") -> Reward:
    """The reward of a recipe's ``reward.terms``; ``deadline`` and ``tolerated`` hold for each function, models live on
    ``device``.

    Raises SurefootError for a term with both or neither of model and function, for none at all, and for what can't be loaded.
    """
    rewards: list[Reward] = []
    for number, term in enumerate(terms):
        if (term.model is None) == (term.function is None):
            what = "neither model nor function" if term.model is None else "both model and function"
            raise SurefootError(f"reward.terms[{number}]: has {what}; give one of them, and a term for each")
        if not math.isfinite(term.weight):
            raise SurefootError(f"reward.terms[{number}].weight={term.weight}: must be a finite number")
        if term.model is not None and term.arguments:
            raise SurefootError(
                f"reward.terms[{number}].arguments={dict(term.arguments)}: are for functions; a model takes none"
            )
        if term.model is not None:
            field = f"reward.terms[{number}].model"
            rewards.append(ModelReward(term.model, term.weight, device=device, field=field))
        elif term.function is not None:
            options: dict[str, Any] = {"deadline": deadline, "tolerated": tolerated, "arguments": term.arguments}
            field = f"reward.terms[{number}].function"
            rewards.append(FunctionReward(term.function, term.weight, field=field, **options))
    return rewards[0] if len(rewards) == 1 else WeightedSum(rewards)


def parts_of(reward: Reward) -> tuple[Reward, ...]:
    """The terms of a sum; else the reward itself."""
    return reward.rewards if isinstance(reward, WeightedSum) else (reward,)


def _packed(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices in batches of rows of like length, so that rows × longest ≤ tokens; a longer row goes alone."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _number(value: Any) -> float | str:
    """A number that float32 can hold, or in a word what it is instead."""
    if not isinstance(value, Real) and hasattr(value, "item"):  # a scalar of numpy or torch
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return "array"
    if not isinstance(value, Real):
        return "None" if value is None else type(value).__name__
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        return "NaN"
    return number if abs(number) <= torch.finfo(torch.float32).max else "infinite"


def _listed(returned: Any) -> Any:
    """Arrays, tensors and sequences as lists; text and anything else as it is. A user's own type may raise here."""
    if hasattr(returned, "tolist"):
        return returned.tolist()
    if isinstance(returned, Sequence) and not isinstance(returned, (str, bytes)):
        return list(returned)
    return returned


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())


def _short(text: str, longest: int = 60) -> str:
    return repr(text if len(text) <= longest else text[:longest] + " …")


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    names = (name, *(f"{name}_{number}" for number in range(2, len(taken) + 2)))
    return next(candidate for candidate in names if candidate not in taken)
