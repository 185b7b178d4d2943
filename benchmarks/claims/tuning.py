"""Learning rates that are chosen on seeds of their own: a run that tries a rate is a cell, whose result others read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from record import read

from claims import Cell, Result

Tried = Mapping[float, Sequence[Cell]]
"""learning rate -> the cells that try it"""
Score = Callable[[Result], float]


def cells_of(tried: Tried) -> tuple[Cell, ...]:
    return tuple(cell for cells in tried.values() for cell in cells)


def best_rate(tried: Tried, score: Score) -> float:
    """The rate whose cells have the highest mean score; of equal ones the first. Their results must exist."""
    results = {rate: [read(cell.file.parent)[cell.file.name] for cell in cells] for rate, cells in tried.items()}
    return max(results, key=lambda rate: float(np.mean([score(result) for result in results[rate]])))


def tuned(run: Callable[[float], Cell], tried: Tried, score: Score) -> Cell:
    """A cell that trains with the best rate, after the cells that try the rates; a repeated claim keeps the ledger's rate.

    ``run`` makes the cell of a rate; its name and file are the same for all.
    """

    def work(folder: Path) -> Result:
        rate = best_rate(tried, score)
        return {"learning_rate": rate, **run(rate).work(folder)}

    return replace(run(next(iter(tried))), work=work, first=cells_of(tried))
