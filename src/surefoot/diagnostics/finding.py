"""What a finding is: a name, what happened in plain words, why, the numbers it rests on, and what to try."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["serious", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("serious", "warning", "note")
"""worst first: training is failing; it is likely worse than it could be; nothing is wrong, but it wants explaining"""


@dataclass(frozen=True)
class Evidence:
    """One number that a finding rests on."""

    metric: str
    """its key in metrics.jsonl"""
    value: float
    about: str
    """what the value is: "mean", "first", "largest" …"""
    first_step: int
    last_step: int
    """between which steps of the run it was measured"""

    def __str__(self) -> str:
        where = f"step {self.first_step:,}"
        if self.first_step != self.last_step:
            where = f"steps {self.first_step:,} to {self.last_step:,}"
        return f"{self.metric} {in_words(self.value)} ({self.about}, {where})"


@dataclass(frozen=True)
class Finding:
    """Something about a run that a person should know."""

    name: str
    """the same for every run, such as "entropy_collapsed" """
    severity: Severity
    what: str
    """what happened, in plain words"""
    cause: str
    """what usually brings it about"""
    evidence: tuple[Evidence, ...]
    advice: tuple[str, ...]
    """what to try, the likeliest first"""

    @property
    def line(self) -> str:
        """The finding in one line, for a terminal."""
        tried = f" Try: {self.advice[0]}." if self.advice else ""
        return f"{self.severity}: {self.what}.{tried}"

    @property
    def text(self) -> list[str]:
        """The whole of it, as lines."""
        return [
            f"{self.severity}: {self.what}",
            f"  why: {self.cause}",
            *(f"  seen: {evidence}" for evidence in self.evidence),
            *(f"  try: {advice}" for advice in self.advice),
        ]

    def to_json(self) -> dict[str, Any]:
        """As a table of plain values."""
        return {**asdict(self), "evidence": [asdict(each) for each in self.evidence], "advice": list(self.advice)}


def in_words(value: float) -> str:
    """A number of any size in about three digits, with a true minus."""
    text = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
    return text.replace("-", "−", 1) if value < 0 and not text.startswith("0") else text
