"""MLflow: a server or database by MLFLOW_TRACKING_URI; without it ``mlflow.db`` in the working folder, as MLflow has it."""

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.recipes.base import Recipe
from surefoot.runs.trackers.interface import NOTHING, TrackedRun, columns_of, require_installed
from surefoot.store.events import Sample
from surefoot.store.finding import Finding

STEPS = "steps"
"""the metric whose newest value is the step of the newest row"""
LONGEST_VALUE, PARAMETERS = 6_000, 100
"""characters of a parameter, and parameters in one call, that MLflow's server takes"""
SQLITE = "sqlite:///"
"""what the URI of a SQLite file begins with"""
DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_LOGGING_LEVEL": "WARNING"}
"""MLflow's own seven retries take two minutes, and it prints what it does"""


def check(recipe: Recipe) -> None:
    """Raise SurefootError if the extra is missing, or if a tag has the name of one of the run's own."""
    for tag in recipe.tracking.tags:
        if tag in ("group", "kind"):
            raise SurefootError(f"tracking.tags: {tag!r} is a tag that every run of MLflow has; choose another")
    uri = os.environ.get("MLFLOW_TRACKING_URI", "sqlite")
    require_installed("mlflow", "mlflow", *(("sqlalchemy", "alembic") if uri.startswith("sqlite") else ()))


def create_database(uri: str) -> None:
    """Create the SQLite database of a URI, complete or not at all.

    MLflow builds its tables in many steps and can't continue after a kill in between ("duplicate column name").
    """
    from mlflow import MlflowClient

    path = Path(uri.removeprefix(SQLITE))
    if not uri.startswith(SQLITE) or path.exists():
        return
    with tempfile.TemporaryDirectory(".tmp", f"{path.name}.", path.absolute().parent) as folder:
        made = Path(folder) / path.name  # SQLite creates it, with the permissions of other new files
        MlflowClient(tracking_uri=f"{SQLITE}{made}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another run was faster
            os.link(made, path)


class MLflow:
    """A run of MLflow, resumed by its id; a value of a metric is at its number of steps."""

    def __init__(self, run: TrackedRun) -> None:
        self.variables = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
        os.environ.update(self.variables)
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or run.saved.get("uri") or f"{SQLITE}{Path.cwd() / 'mlflow.db'}"
        create_database(uri)
        self.client = MlflowClient(tracking_uri=uri)
        if "run" in run.saved:
            self.identity: dict[str, Any] = dict(run.saved)
            self.client.update_run(run.saved["run"], status="RUNNING")
            self.last_step = int(self.client.get_run(run.saved["run"]).data.metrics.get(STEPS, NOTHING))
        else:
            self.identity = {"run": self._create(run, uri), "uri": uri}
            self.last_step = NOTHING
        self.id: str = self.identity["run"]

    def _create(self, run: TrackedRun, uri: str) -> str:
        from mlflow.entities import Param

        tags = {**dict.fromkeys(run.recipe.tracking.tags, "true"), "group": run.group, "kind": run.recipe.kind}
        experiment = self._experiment(run.recipe.tracking.project, uri)
        created: str = self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        fields = [Param(name, str(value)[:LONGEST_VALUE]) for name, value in run.flat_recipe.items()]
        for start in range(0, len(fields), PARAMETERS):
            self.client.log_batch(created, params=fields[start : start + PARAMETERS])
        self.client.log_dict(created, dict(run.table), "recipe.json")
        return created

    def _experiment(self, project: str, uri: str) -> str:
        """The id of the project's experiment, which is created if there is none."""
        from mlflow.exceptions import MlflowException

        existing = self.client.get_experiment_by_name(project)
        if existing is None:
            local = uri.removeprefix(SQLITE)
            place = (Path(local).absolute().parent / "mlartifacts").as_uri() if local != uri else None
            try:
                return str(self.client.create_experiment(project, artifact_location=place))
            except MlflowException:  # another run may have been faster
                existing = self.client.get_experiment_by_name(project)
                if existing is None:
                    raise
        return str(existing.experiment_id)

    def log(self, steps: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Add a row in one call; ``steps`` is its last metric, so that a row that has it is whole."""
        from mlflow.entities import Metric

        if samples:
            columns = columns_of(samples)
            table = {"columns": columns, "data": [[sample.get(name) for name in columns] for sample in samples]}
            self.client.log_dict(self.id, table, f"samples/{steps}.json")
        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, steps) for name, value in metrics.items() if name != STEPS]
        self.client.log_batch(self.id, metrics=[*rows, Metric(STEPS, float(steps), now, steps)])
        self.last_step = steps

    def log_video(self, steps: int, path: Path) -> None:
        """Add the file as an artifact."""
        self.client.log_artifact(self.id, str(path), "videos")

    def log_finding(self, steps: int, finding: Finding) -> None:
        """Set a tag: MLflow has no alerts."""
        self.client.set_tag(self.id, f"finding.{finding.name}", f"step {steps:,}, {finding.line}")

    def close(self, failed: bool) -> None:
        """Set the run's status."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")
        for name in self.variables:
            os.environ.pop(name, None)
