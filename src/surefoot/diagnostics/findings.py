"""Checks of a run's metrics, during training and after it.

from surefoot.diagnostics.findings import of_run
for finding in of_run("runs/mine"):
    print(finding.line)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.diagnostics.curves import RunCurves
from surefoot.diagnostics.metrics import METRICS
from surefoot.diagnostics.reward_findings import REWARD_CHECKS
from surefoot.diagnostics.supervised_findings import SUPERVISED_CHECKS
from surefoot.diagnostics.update_findings import UPDATE_CHECKS
from surefoot.errors import SurefootError, cause_of
from surefoot.recipes.base import Recipe
from surefoot.store.checkpoint import checkpoints_in
from surefoot.store.events import Event, IterationEnd, RunEnd, RunStart
from surefoot.store.finding import SEVERITIES, Evidence, Finding
from surefoot.store.folder import changed_since, lost_checkpoints, recipe_of
from surefoot.store.manifest import LISTING, MANIFEST, check_folder, check_listed
from surefoot.store.metrics import FILE, read_fingerprints, read_history, read_metrics
from surefoot.store.reading import (
    ENVIRONMENT,
    FINGERPRINTS,
    FINISHED,
    START,
    TRACKERS_FILE,
    History,
    check_is_run,
    read_trackers,
    samples_in,
    traces_in,
)

RUN_CHECKS = (*REWARD_CHECKS, *UPDATE_CHECKS, *SUPERVISED_CHECKS)
"""every check of a run: takes its curves and its recipe (or None), and returns a finding or None"""
SUPERSEDES = {
    "no_reward_signal": ("return_flat",),
    "return_collapsed": ("return_flat",),
    "reward_hacked": ("entropy_collapsed", "return_collapsed"),
    "unusable_start": ("loss_flat",),
}
"""findings that make others redundant"""
CHECKS_PER_RUN = 20
"""how often a run is checked while it goes on, over its budget"""
LIVE_NOTES = ("wrong_start",)
"""notes that are shown during training too, since they explain other metrics"""
ENOUGH_ITERATIONS = 10
"""with fewer, most checks have too few numbers to report anything"""


def check_curves(curves: RunCurves, recipe: Recipe | None = None) -> list[Finding]:
    """The findings of a run, the worst first; none for a healthy one."""
    findings = [finding for check in RUN_CHECKS if (finding := check(curves, recipe)) is not None]
    hidden = {name for finding in findings for name in SUPERSEDES.get(finding.name, ())}
    return _worst_first(finding for finding in findings if finding.name not in hidden)


def findings_of(rows: Iterable[Mapping[str, Any]], recipe: Recipe | None = None) -> list[Finding]:
    """The findings of the rows of a metrics.jsonl. With a recipe, they use its budget and quote its fields."""
    return check_curves(RunCurves(rows, None if recipe is None else recipe.steps), recipe)


@dataclass(frozen=True)
class RunCheck:
    """What ``surefoot check RUN`` and the inspector show."""

    findings: list[Finding]
    """the worst first"""
    iterations: int
    steps: int
    changed: Sequence[str]
    """how config.toml differs from the recipe of the newest checkpoint, each as ``field: old -> new``"""

    @property
    def verdict(self) -> str:
        """A run without findings in one line."""
        return without_findings(self.iterations, self.steps)


def without_findings(iterations: int, steps: int) -> str:
    """What a run without findings means, in one line."""
    counts = f"{iterations:,} iterations, {steps:,} steps"
    if iterations < ENOUGH_ITERATIONS:
        return f"too short to judge: {counts}; it takes {ENOUGH_ITERATIONS}"
    return f"no findings in {counts}"


def check_run(folder: str | Path, hashed: bool = True) -> RunCheck:
    """Check a run folder, finished or not.

    hashed   compare every file with the manifests, which reads all of them

    Raises SurefootError when it is not a run.
    """
    path = Path(folder)
    check_is_run(path)
    others = [tracker_failed(name, str(entry["failed"])) for name, entry in read_trackers(path).items() if "failed" in entry]
    history, recipe = read_history(path), recipe_of(path)
    if lost := _lost_checkpoints(path, recipe):
        others.append(checkpoints_lost(lost))
    if hashed and (faults := damaged_files(path)):
        others.append(files_damaged(faults))
    rows, findings = history.rows, findings_in(history, recipe, others)
    steps = int(rows[-1]["steps"]) if rows else 0
    return RunCheck(findings, len(rows), steps, changed_since(path, recipe))


def _lost_checkpoints(run: Path, recipe: Recipe) -> str | None:
    """What shows that a run has lost its checkpoints, or why the newest is none any more."""
    try:
        lost = lost_checkpoints(run, recipe)
    except SurefootError as error:
        return str(error)
    newest = next(reversed(checkpoints_in(run / "checkpoints")), None)
    if newest is not None and not (newest / MANIFEST).exists():
        return f"checkpoints/{newest.name} has no {MANIFEST}"
    return lost and f"there is no checkpoint, but {lost}"


def checkpoints_lost(what: str) -> Finding:
    """The finding for a run whose checkpoints are not there."""
    return Finding(
        "checkpoints_lost",
        "serious",
        f"the run can't be resumed: {what}",
        "its checkpoints are on a disk that is not mounted, were moved, or were copied in part",
        (),
        ("mount the disk, or copy the checkpoints again from where they are whole", "begin another run with its config.toml"),
    )


def damaged_files(run: Path) -> list[str]:
    """The files of a run that are not as its manifests have them, each with its fault; folders of weights come first."""
    saved = [*checkpoints_in(run / "checkpoints"), *checkpoints_in(run / "best"), run / START]
    folders = [*(run / name for name in ("model", "adapter")), *saved]
    single = [run / ENVIRONMENT, run / FINISHED, run / TRACKERS_FILE, *traces_in(run / "traces"), *samples_in(run / "samples")]
    if (run / LISTING).exists():  # a copy from the hub, whose one listing has all of it
        folders, single = [run], []
    faults = [(path.relative_to(run), _fault_of(path) and _fault_of(path)) for path in (*folders, *single)]
    # Twice, since a run that goes on may have replaced it in between.
    faults.append((Path(FINGERPRINTS), read_fingerprints(run).fault))
    return [f"{name}: {fault}" for name, fault in faults if fault]


def _fault_of(path: Path) -> str | None:
    """What is wrong with a file or folder that a manifest should list; None for a sound one, or where there is none."""
    try:
        if path.is_dir():
            check_folder(path, f"{path.name}/", required=True)
        elif path.exists():
            check_listed(path)
    except SurefootError as error:
        if path.exists():  # else the run has just removed it
            return str(error).partition("; ")[0].removeprefix(f"{path.name}/: ").removeprefix(f"{path}: ")
    except OSError as error:
        if path.exists():
            return f"can't be read ({error.strerror})"
    return None


def files_damaged(faults: Sequence[str]) -> Finding:
    """The finding for files that are not what the run wrote."""
    more = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
    return Finding(
        "files_damaged",
        "serious",
        f"files are not what the run wrote: {faults[0]}{more}",
        "they were edited, copied in part, or changed on the disk; commands that need them stop with one line",
        (),
        ("copy them again from where they are whole", "remove traces or samples, or resume the run to export its model again"),
    )


def of_run(folder: str | Path) -> list[Finding]:
    """The findings of a run folder, finished or not.

    Raises SurefootError when it is not a run.
    """
    return check_run(folder).findings


def findings_in(history: History, recipe: Recipe | None = None, others: Iterable[Finding] = ()) -> list[Finding]:
    """The findings of a run's metrics, including damage to the file, with others of its folder."""
    findings = _worst_first([*others, *findings_of(history.rows, recipe)])
    if history.fault is None:
        return findings
    damaged = Finding(
        "metrics_damaged",
        "warning",
        f"{FILE} {history.fault}",
        "it was edited, copied in part, or changed on the disk",
        (),
        ("copy it again from where it is whole", "do without what is missing: resuming a run needs none of it"),
    )
    return _worst_first([damaged, *findings])


def tracker_failed(name: str, cause: str) -> Finding:
    """The finding for a tracker that an error has stopped."""
    return Finding(
        "tracker_failed",
        "warning",
        f"the tracker {name} stopped, and training went on without it ({cause})",
        "its server or disk can't be reached, it rejects the run, or it is too slow",
        (),
        (f"fix {name}, then resume the run: it gets the rows that it lacks", "read the metrics in the run's folder"),
    )


def out_of_range(metrics: Mapping[str, float | None], step: int = 0) -> list[Finding]:
    """A warning for each metric of one iteration that is outside its healthy range; undefined values are skipped."""
    findings = []
    for name, value in metrics.items():
        metric = METRICS.get(name)
        if metric is None or value is None:
            continue
        too_low, too_high = metric.low is not None and value < metric.low, metric.high is not None and value > metric.high
        if (what := metric.why_low if too_low else metric.why_high if too_high else "") != "":
            findings.append(Finding(name, "warning", what, evidence=(Evidence(name, value, "latest", step, step),)))
    return findings


class RunMonitor:
    """Checks a run while it goes on, and reports each serious finding or warning once; a listener.

    recipe    of the run
    message   called with each line
    report    called with each finding, after its line
    """

    def __init__(
        self, recipe: Recipe, message: Callable[[str], None], report: Callable[[Finding], object] = lambda finding: None
    ) -> None:
        self.recipe, self.message, self.report = recipe, message, report
        self.curves = RunCurves(budget=recipe.steps)
        self.reported: set[str] = set()
        self.checks_done = 0
        self.failed = False

    def __call__(self, event: Event) -> None:
        match event:
            case RunStart() if event.folder is not None:
                self.start(read_metrics(event.folder / FILE))
            case IterationEnd():
                self.add(event.metrics)
            case RunEnd() if not event.failed:
                self.end(event.folder)

    def start(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take the rows of a resumed run; their findings have been reported."""
        for row in rows:
            self.curves.add(row)
        self.checks_done = self._checks_due()
        self.reported = {finding.name for finding in self._findings()}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add an iteration; check the run after each twentieth of the budget."""
        self.curves.add(metrics)
        if self._checks_due() == self.checks_done:
            return
        self.checks_done = self._checks_due()
        for finding in self._findings():
            if finding.name not in self.reported:
                self.reported.add(finding.name)
                self.message(f"! step {self.curves.steps:,}, {finding.line}")
                self.report(finding)

    def end(self, folder: Path | None) -> None:
        """Report the names of the findings of the whole run, if there are any."""
        names = [finding.name.replace("_", " ") for finding in self._findings() if finding.severity != "note"]
        if names:
            more = "" if folder is None else f"; more: surefoot check {folder}"
            self.message(f"findings: {', '.join(names)}{more}")

    def _findings(self) -> list[Finding]:
        try:
            findings = check_curves(self.curves, self.recipe)
        except Exception as error:  # a failing check must not end the run
            findings = []
            if not self.failed:
                self.failed = True
                self.message(f"! findings are incomplete: a check failed ({cause_of(error)})")
        return [finding for finding in findings if finding.severity != "note" or finding.name in LIVE_NOTES]

    def _checks_due(self) -> int:
        return CHECKS_PER_RUN * self.curves.steps // self.recipe.steps


def _worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
