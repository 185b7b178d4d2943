"""What the ledger is made of: experiments of resumable cells, claims about them, and the rule that decides a claim.

A claim is a list of bounds that must all hold, such as "the difference of the two returns lies above 0". Each bound has a
number with a 95 % interval from the results. The claim is confirmed if every interval lies on the claimed side, refuted if one
lies entirely on the other side, and undecided otherwise, or while cells are missing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import finished

from surefoot.compare.across_tasks import iqm
from surefoot.compare.statistics import interval, interval_text, number

BENCHMARKS = Path(__file__).resolve().parent.parent
RESULTS, RUNS = BENCHMARKS / "results", BENCHMARKS / "runs" / "ledger"
LEDGER = RESULTS / "ledger"

Result = dict[str, Any]
Results = Mapping[str, Result]
"""name of a cell -> its result; only finished cells"""
CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided"
OUT_OF_REACH = "out of reach here"


@dataclass(frozen=True)
class Cell:
    """One run of an experiment. Its result is one line of JSON; the run itself lies in a folder that may be removed."""

    name: str
    work: Callable[[Path], Result]
    """computes the result; its folder keeps what an interrupted cell continues from, and what cells share lies beside those of
    the experiments: ``folder.parents[1]``"""
    file: Path
    """of the result: EXPERIMENT/CELL, see record.py"""
    first: tuple["Cell", ...] = ()
    """those whose results its work reads; they run before it"""


@dataclass(frozen=True)
class Bound:
    """A number with its 95 % interval, and the side of a limit on which the claim puts it."""

    what: str
    value: float
    low: float
    high: float
    limit: float = 0.0
    above: bool = True
    """whether the claim puts the number above the limit, or below it"""
    runs: int | None = None
    """fewest runs behind the number on a task; None for a number without noise"""

    @property
    def holds(self) -> bool:
        """Whether the whole interval lies on the claimed side."""
        return self.low > self.limit if self.above else self.high < self.limit

    @property
    def fails(self) -> bool:
        """Whether the whole interval lies on the other side."""
        return self.high < self.limit if self.above else self.low > self.limit

    @property
    def number(self) -> str:
        """What it is, the number, and its interval."""
        spread = "" if self.runs is None else " (1 run)" if self.runs == 1 else f" ({interval_text(self.low, self.high)})"
        return f"{self.what}: {number(self.value)}{spread}"


def bounds_text(bounds: Sequence[Bound]) -> str:
    """Numbers and limits: a number with a limit on each side is one, and what neighbours share is written once."""
    limits: dict[str, list[str]] = {}
    for bound in bounds:
        limits.setdefault(bound.number, []).append(f"{'>' if bound.above else '<'} {bound.limit:g}")
    parts = []
    for limit, group in groupby(limits, lambda each: " and ".join(limits[each])):
        shown, before = [], ""
        for each in group:
            shown.append(each.removeprefix(before))
            shared = re.match(r".*(?: minus |, )(?=.*: )", each)
            before = shared[0] if shared else ""
        parts.append(f"{'; '.join(shown)}, {'each ' if len(shown) > 1 else ''}claimed {limit}")
    return "; ".join(parts)


@dataclass(frozen=True)
class Claim:
    """A sentence about PPO, and what decides it."""

    key: str
    sentence: str
    source: str
    """paper and section, or where else it is made"""
    rule: str
    """in words, what the bounds are; written before the runs"""
    bounds: Callable[[Results], list[Bound]]
    """the bounds from the finished cells; may raise KeyError or ValueError while cells are missing"""
    why: Mapping[str, str] = field(default_factory=dict)
    """verdict -> one sentence"""
    needs: Callable[[str], bool] = lambda name: True
    """whether the claim needs the cell of that name"""
    out_of_reach: str = ""
    """why the cells can't be run on the machines of this ledger; empty if they can"""


@dataclass(frozen=True)
class Experiment:
    """Cells, and the claims that they decide."""

    key: str
    title: str
    protocol: str
    """tasks, settings, seeds and what they were chosen on; written before the runs"""
    cells: Mapping[str, Cell]
    claims: tuple[Claim, ...]
    core_hours: float
    """planned, of all cells"""
    setting: str = "cell"
    """what the name of a cell consists of, before its seed"""
    tables: Callable[[Results], list[str]] = lambda results: []
    """tables of its own, beside those of the scores"""

    def results(self) -> dict[str, Result]:
        """The results of the finished cells."""
        return {name: result for name, cell in self.cells.items() if (result := finished(cell.file))}


@dataclass(frozen=True)
class Verdict:
    """What the results say about a claim."""

    word: str
    done: int
    planned: int
    bounds: tuple[Bound, ...]
    """also of an undecided claim, if its finished cells have any"""

    @property
    def text(self) -> str:
        """The word, with the number of cells if some are missing."""
        return self.word if self.done == self.planned else f"{self.word}, {self.done} of {self.planned} cells"


def decided(claim: Claim, experiment: Experiment, results: Results) -> Verdict:
    """The verdict on a claim."""
    if claim.out_of_reach:
        return Verdict(OUT_OF_REACH, 0, 0, ())
    needed = [name for name in experiment.cells if claim.needs(name)]
    done = sum(name in results for name in needed)
    try:
        bounds = tuple(claim.bounds(results)) if done else ()
    except (KeyError, ValueError, ZeroDivisionError):
        if done == len(needed):
            raise
        bounds = ()
    if done < len(needed) or not needed:
        return Verdict(UNDECIDED, done, len(needed), bounds)
    return Verdict(verdict_of(bounds), done, len(needed), bounds)


def verdict_of(bounds: Sequence[Bound]) -> str:
    """Confirmed if all bounds hold, refuted if one fails, else undecided. Nothing follows from no bound, one run or a NaN."""
    if (
        not bounds
        or any(bound.runs == 1 for bound in bounds)
        or not all(isfinite(x) for bound in bounds for x in (bound.value, bound.low, bound.high))
    ):
        return UNDECIDED
    if any(bound.fails for bound in bounds):
        return REFUTED
    return CONFIRMED if all(bound.holds for bound in bounds) else UNDECIDED


# ---- statistics: IQM over seeds and tasks -----------------------------------------------------------------


def arrays(scores: Sequence[Sequence[float]]) -> list[NDArray[Any]]:
    """Scores of each task as arrays. Raises ValueError if a task has none."""
    if not scores or not all(len(task) for task in scores):
        raise ValueError("scores: a task has no finished cell")
    return [np.asarray(task, float) for task in scores]


def single(what: str, scores: Sequence[float], limit: float = 0.0, *, above: bool = True) -> Bound:
    """The interquartile mean of scores over seeds, or of differences between two runs of each seed."""
    each = arrays([scores])
    low, high = interval(iqm, each)
    return Bound(what, float(iqm(each)), low, high, limit, above, len(scores))


def difference(
    what: str,
    scores: Sequence[Sequence[float]],
    base: Sequence[Sequence[float]],
    limit: float = 0.0,
    *,
    above: bool = True,
) -> Bound:
    """IQM(scores) − IQM(base) over all tasks."""
    ours, theirs = arrays(scores), arrays(base)
    low, high = interval(lambda ours, theirs: iqm(ours) - iqm(theirs), ours, theirs)
    return Bound(what, float(iqm(ours) - iqm(theirs)), low, high, limit, above, min(map(len, [*ours, *theirs])))


def exact(what: str, value: float, limit: float = 0.0, *, above: bool = True) -> Bound:
    """A number without noise: a formula or a count of bytes."""
    return Bound(what, value, value, value, limit, above)
