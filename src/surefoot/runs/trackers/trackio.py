"""Trackio: a local database that ``trackio show`` reads, or a server or Space as its own variables say."""

import contextlib
import contextvars
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.recipes.reading import flatten
from surefoot.runs.trackers.interface import TrackedRun
from surefoot.store.events import Sample
from surefoot.store.finding import Finding


class Trackio:
    """A run of Trackio, resumed by its name; its id shows that no other run has taken the name."""

    def __init__(self, run: TrackedRun) -> None:
        project = run.recipe.tracking.project
        with _warnings_as_errors():
            self._open(run, run.saved.get("name") or _unused(run.name, project))
            if self.last_step >= 0 and run.saved.get("id", self.run.id) != self.run.id:
                self.run.finish()  # another run has taken the name: the rows of this one go to a new run
                self._open(run, _unused(run.name, project))
        self.identity: dict[str, Any] = {"name": self.run.name, "id": self.run.id}

    def _open(self, run: TrackedRun, name: str) -> None:
        import trackio

        tracking = run.recipe.tracking
        config = {**dict(flatten(run.table, is_value=lambda table: False)), "tags": list(tracking.tags)}
        # In an empty context, because init ends the run of its own, which is the program's.
        self.run = contextvars.Context().run(
            trackio.init, tracking.project, name, run.group, config=config, resume="allow", embed=False
        )
        self.last_step = self.run._next_step - 1  # as init read it from the database or the server; there is no other way

    def log(self, steps: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Add a row; a thread of Trackio writes it within half a second."""
        import trackio

        row: dict[str, Any] = dict(metrics)
        if samples:
            row["samples"] = trackio.Table(data=[dict(sample) for sample in samples])
        with _warnings_as_errors():
            self.run.log(row, step=steps)
        self.last_step = steps

    def log_video(self, steps: int, path: Path) -> None:
        """Copy the file into Trackio's folder."""
        import trackio

        with _warnings_as_errors():
            self.run.log({"video": trackio.Video(str(path), format="mp4")}, step=steps)

    def log_finding(self, steps: int, finding: Finding) -> None:
        """Add an alert, which Trackio sends to the webhook of TRACKIO_WEBHOOK_URL, if that is set."""
        import trackio

        level = trackio.AlertLevel.ERROR if finding.severity == "serious" else trackio.AlertLevel.WARN
        with _warnings_as_errors():
            self.run.alert(finding.name, finding.line, level=level, step=steps)

    def close(self, failed: bool) -> None:
        """Wait for the thread. Raises SurefootError if a row is missing in the local database."""
        from trackio.sqlite_storage import SQLiteStorage

        with _warnings_as_errors():
            self.run.finish()
        if self.run._is_local:
            there = SQLiteStorage.get_last_step(self.run.project, run_id=self.run.id)
            if self.last_step >= 0 and there != self.last_step:
                raise SurefootError(f"its database ends at step {there}, and the run at step {self.last_step}")


def _unused(name: str, project: str) -> str:
    """The name, with a number if the project has a run of that name."""
    import trackio

    with contextlib.suppress(ValueError):  # there is no such project yet
        used = {run.name for run in trackio.Api().runs(project)}
        return next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(used) + 3))) if n not in used)
    return name


@contextlib.contextmanager
def _warnings_as_errors() -> Iterator[None]:
    """Trackio warns where it fails, and prints as it goes; here a warning is an error, and nothing is printed."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        yield
    failures = [warning for warning in caught if warning.category is UserWarning]
    if failures:
        raise SurefootError(" ".join(str(failures[0].message).split()))
