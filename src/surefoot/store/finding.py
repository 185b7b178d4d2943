"""A finding of a check: its severity, cause, evidence and remedies."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from surefoot.errors import SurefootError

Severity = Literal["serious", "warning", "note", "absent", "ok"]
SEVERITIES: tuple[Severity, ...] = ("serious", "warning", "note", "absent", "ok")
"""worst first. serious: training fails or can't begin; warning: it is probably worse than it could be; note: nothing is wrong,
but the numbers need an explanation; absent: not installed, and needed only by some recipes; ok: the check passed"""
STATES: dict[Severity, tuple[str, str]] = {
    "serious": ("failed", "✗"),
    "warning": ("warning", "!"),
    "note": ("ok", "✓"),
    "absent": ("absent", "–"),
    "ok": ("ok", "✓"),
}
"""how a list of checks shows each severity: a word for programs, a mark for people"""


@dataclass(frozen=True)
class Evidence:
    """One number behind a finding."""

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
    """What a check reports about a run, a recipe or a machine."""

    name: str
    """the same for every run, such as "entropy_collapsed" """
    severity: Severity
    what: str
    """what happened, or what there is"""
    cause: str = ""
    """the usual cause"""
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    """what to try, the likeliest first"""

    @property
    def line(self) -> str:
        """The finding in one line, for a terminal."""
        remedy = f" Try: {self.advice[0]}." if self.advice else ""
        return f"{self.severity}: {self.what}.{remedy}"

    @property
    def text(self) -> list[str]:
        """All of the finding, as lines."""
        return [
            f"{self.severity}: {self.what}",
            f"  why: {self.cause}",
            *(f"  seen: {evidence}" for evidence in self.evidence),
            *(f"  try: {advice}" for advice in self.advice),
        ]

    def to_json(self) -> dict[str, Any]:
        """A table of plain values, with evidence."""
        return {**asdict(self), "evidence": [asdict(each) for each in self.evidence], "advice": list(self.advice)}

    # ---- as a line of a checklist ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """ok, absent, warning or failed"""
        return STATES[self.severity][0]

    @property
    def fix(self) -> str:
        """The likeliest remedy; empty if there is nothing to do."""
        return self.advice[0] if self.advice else ""

    def checklist_lines(self, width: int) -> list[str]:
        """A mark, the name in ``width`` columns, what there is, and the fix below."""
        first = f"{STATES[self.severity][1]} {self.name:<{width}}  {self.what}"
        return [first, *([f"{'':{width + 4}}fix: {self.fix}"] if self.fix else [])]


def check_result(name: str, severity: Severity, what: str, fix: str = "") -> Finding:
    """The finding of a check that needs no evidence."""
    return Finding(name, severity, what, advice=(fix,) if fix else ())


def failure(name: str, error: SurefootError) -> Finding:
    """The finding for an error; the part after its last semicolon is the remedy."""
    wrong, _, fix = str(error).rpartition("; ")
    return check_result(name, "serious", wrong or fix, fix if wrong else "")


def any_failed(findings: Iterable[Finding]) -> bool:
    """Whether one of the findings is serious."""
    return any(finding.severity == "serious" for finding in findings)


def in_words(value: float) -> str:
    """A number of any size in about three digits, with a true minus."""
    text = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
    return text.replace("-", "−", 1) if value < 0 and not text.startswith("0") else text
