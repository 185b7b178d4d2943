"""The first place where two runs part, by the fingerprints of their iterations, and what could explain it."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from surefoot.diagnostics.findings import damaged_files
from surefoot.errors import SurefootError
from surefoot.files import read_bytes
from surefoot.store.checkpoint import checkpoints_in
from surefoot.store.folder import CHANGE_NOTHING, differences, recipe_differences, recipe_of, table_differences, working_folder
from surefoot.store.manifest import read_listed_table
from surefoot.store.metrics import FILE, read_fingerprints, read_history
from surefoot.store.reading import check_is_run
from surefoot.store.source import SHOWN

HASH = re.compile("[0-9a-f]{32,64}")
Rows = Mapping[int, Mapping[str, Sequence[Any]]]
CLOSE = 1e-4
"""relative distance of the sums up to which another processor or version explains a difference"""
IRRELEVANT = ("checkpoint.", "traces.", "evaluation.", *(f"{name}: " for name in CHANGE_NOTHING))
"""beginnings of lines about fields of the recipe that change no fingerprint"""
STAGES = {
    "weights": (
        "the weights before the update",
        "what set the weights: another start, a callback, or an iteration without fingerprints",
    ),
    "inputs": ("the inputs of the policy", "the task or the data: another environment, other rows, or their order"),
    "actions": ("the actions", "the sampling of actions: its random numbers, or the sampler"),
    "log_probs": (
        "the log-probabilities of the actions",
        "how log-probabilities are computed: the network, its precision or the reference",
    ),
    "rewards": ("the rewards", "the reward: its code, a reward model, or a normaliser"),
    "advantages": ("the advantages", "the critic's values, or how advantages are computed"),
    "order": ("the order of the minibatches", "the random numbers that shuffle the rows"),
    "gradient": ("the first gradient", "the loss, or how its gradient is computed"),
    "terms": ("the terms of the first loss, and the norms of its gradient", "the loss, or how its gradient is computed"),
    "updated": ("the weights after the update", "the optimizer: its settings or state, or a callback"),
}
"""the stages of an iteration that have fingerprints, in their order: in words, and what each rests on besides those before"""


@dataclass(frozen=True)
class Parting:
    """A stage in which two runs differ."""

    iteration: int
    stage: str
    distance: float
    """of the sums, relative to the norm; infinite where one is not finite"""

    @property
    def text(self) -> str:
        """The place in words."""
        return f"iteration {self.iteration:,}, {STAGES[self.stage][0]}: relative difference {self.distance:.1g}"

    def to_json(self) -> dict[str, Any]:
        """The place as plain values."""
        return {**vars(self), "distance": self.distance if math.isfinite(self.distance) else None}


def partings(a: Rows, b: Rows) -> list[Parting]:
    """The stages in which two runs differ, in their order, of all that both have."""
    return [
        Parting(iteration, stage, _distance(one[stage], other[stage]))
        for iteration in sorted(a.keys() & b.keys())
        for one, other in [(a[iteration], b[iteration])]
        for stage in STAGES
        if stage in one and stage in other and one[stage][0] != other[stage][0]
    ]


def _distance(one: Sequence[Any], other: Sequence[Any]) -> float:
    if None in one or None in other:
        return math.inf
    apart: float = max(abs(x - y) for x, y in zip(one[1:], other[1:], strict=True))
    return apart / scale if (scale := max(abs(one[1]), abs(other[1]))) else apart


def named(compared: Sequence[int]) -> str:
    """The iterations that were compared, in words."""
    first, last = compared[0], compared[-1]
    span = f"iteration {last:,}" if first == last else f"iterations {first:,}–{last:,}"
    sparse = f" ({len(compared):,} compared; the others have no fingerprints)" if len(compared) <= last - first else ""
    return f"{span}{sparse}"


def machine_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """How versions, processors, threads, engine and ranks differ, each as ``name: old -> new``."""
    return differences({**before, "steps": None}, {**after, "steps": None})


@dataclass(frozen=True)
class Difference:
    """The comparison of two runs."""

    a: Path
    b: Path
    compared: list[int]
    """iterations of which both have fingerprints"""
    first: Parting | None
    before: int
    """the last compared iteration before the first difference; 0: none"""
    causes: list[str]
    """what they differ in besides their numbers"""
    damaged: list[str]
    """files of theirs that are not what a run wrote"""
    longer: str = ""
    """which of them goes on after the other's last iteration, in words"""

    @property
    def same(self) -> bool:
        """Whether iterations were compared, and no difference was found."""
        return bool(self.compared) and self.first is None and not self.damaged

    @property
    def lines(self) -> list[str]:
        """The result in words: where they part, then the causes."""
        if not self.compared:
            common = f"{self.a} and {self.b} have no iteration with fingerprints in common"
            return [common, *(f"they differ in {line}" for line in self.causes), *self.damaged]
        if self.first is None:
            part = f"the same to the last bit, {named(self.compared)}{self.longer}"
            return [part, *(f"although {line}" for line in self.causes), *self.damaged]
        after = f", after {self.before:,}, which is the same" if 0 < self.before < self.first.iteration - 1 else ""
        causes = [f"cause: {line}" for line in (*self.causes, *self.damaged)]
        return [
            f"part in {self.first.text}{after}",
            *(causes or [f"no cause is recorded; look at {STAGES[self.first.stage][1]}"]),
        ]

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        place = None if self.first is None else self.first.to_json()
        lists = {"causes": self.causes, "damaged": self.damaged, "lines": self.lines}
        return {"a": str(self.a), "b": str(self.b), "same": self.same, "compared": len(self.compared), "first": place, **lists}


def compare_runs(a: Path, b: Path) -> Difference:
    """Where two runs part, and the causes that can be named. Raises SurefootError if one of them is no run."""
    for run in (a, b):
        check_is_run(run)
    one, other = read_fingerprints(a), read_fingerprints(b)
    first, compared = next(iter(partings(one.rows, other.rows)), None), sorted(one.rows.keys() & other.rows.keys())
    at = first.iteration if first else max(compared, default=1)
    before = max((iteration for iteration in compared if iteration < at), default=0)
    tables = [_in_checkpoint(run, "recipe") or recipe_of(run).table for run in (a, b)]
    found = [f"recipe: {line}" for line in table_differences(*tables) if not line.startswith(IRRELEVANT)]
    for part in ("sources", "model", "code"):
        known = [_shown(_in_checkpoint(run, part)) for run in (a, b)]
        lines = differences(*known) if all(known) else []
        lines = [line for line in lines if part != "sources" or "None" not in line.split(": ")[-1].split(" -> ")]  # other files
        found += [f"{line}{_of_files(line, (a, b))}" if part == "sources" else f"{part}: {line}" for line in lines]
    # Of a run that was resumed elsewhere, the machine counts that computed the iteration.
    machines = [record.machine_of(at) for record in (one, other)]
    found += [line for line in machine_differences(*machines) if all(machines) and f"recipe: {line}" not in found]
    if first and (first.iteration, first.stage) == (1, "weights") and not found and (model := tables[0].get("model")):
        found = [f"weights of model={model!r}"]
    ends = sorted((rows[-1]["iteration"], run) for run in (a, b) if (rows := read_history(run).rows))
    longer = f"; {ends[1][1]} goes on to iteration {ends[1][0]:,}" if ends and ends[0][0] < ends[-1][0] else ""
    return Difference(a, b, compared, first, before, found, [*damaged_in(a), *damaged_in(b)], longer)


def _of_files(line: str, runs: Sequence[Path]) -> str:
    """What is the same in the files of a line such as ``data.train='rows.jsonl': 3fa41c92 -> 9b1c77e0``, in parentheses."""
    name = line.rpartition(": ")[0].partition("=")[2].strip("'")
    files = [Path(working_folder(run) or "") / name for run in runs]
    rows = [read_bytes(file).split(b"\n") for file in files if file.is_file()]
    if len(rows) < 2 or sorted(rows[0]) != sorted(rows[1]) or files[0] == files[1]:
        return ""
    return " (the same rows, other tokens)" if rows[0] == rows[1] else " (the same rows in another order)"


def _in_checkpoint(run: Path, part: str) -> dict[str, Any]:
    """A part of the newest checkpoint, such as the recipe, or the hashes of rows and weights; empty if it is unknown."""
    with suppress(SurefootError, IndexError):
        table = read_listed_table(checkpoints_in(run / "checkpoints")[-1] / f"{part}.json")
        return {key: value for key, value in table.items() if key not in ("roots", "search")}
    return {}


def _shown(value: Any) -> Any:
    if isinstance(value, dict):  # without the name of the model's folder
        return {key: _shown(each) for key, each in value.items() if key != "_name_or_path"}
    if not isinstance(value, str) or len(value) < 32:
        return value
    return (value if HASH.fullmatch(value) else sha256(value.encode()).hexdigest())[:SHOWN]


def damaged_in(run: Path) -> list[str]:
    """The files of a run that are not what it wrote."""
    faults, metrics = damaged_files(run), read_history(run).fault
    faults += [f"{FILE} {metrics}"] if metrics else []
    if written := _in_checkpoint(run, "recipe"):
        try:
            changed = recipe_differences(written, recipe_of(run))
        except SurefootError as error:
            changed = [str(error).removeprefix(f"{run / 'config.toml'}: ")]
        faults += [f"config.toml: changed since the newest checkpoint ({'; '.join(changed)})"] if changed else []
    return [f"{run / fault}" for fault in faults]
