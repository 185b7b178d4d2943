"""One thing that was looked at, how it stands, and what to do about it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "absent", "warning", "failed"]
MARKS: dict[State, str] = {"ok": "✓", "absent": "–", "warning": "!", "failed": "✗"}


@dataclass(frozen=True)
class Check:
    """What was found."""

    name: str
    state: State
    """ok; absent: not here, and needed only where it is asked for; warning; failed: the run can't begin or can't learn"""
    what: str
    """what there is, in a few words"""
    fix: str = ""
    """what to do, where something is to be done"""

    def lines(self, width: int) -> list[str]:
        """For a terminal: a mark, the name in so many columns, what there is, and the fix below."""
        first = f"{MARKS[self.state]} {self.name:<{width}}  {self.what}"
        return [first, *([f"{'':{width + 4}}fix: {self.fix}"] if self.fix else [])]

    def to_json(self) -> dict[str, Any]:
        """As a table."""
        return asdict(self)


def failed(checks: Iterable[Check]) -> bool:
    """Whether anything stands in the way."""
    return any(check.state == "failed" for check in checks)
