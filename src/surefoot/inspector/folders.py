"""Read the folders of the inspected runs: recipes, metrics, samples and videos. Nothing here writes."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.diagnostics.metrics import METRICS, TIMING, title_of
from surefoot.errors import SurefootError
from surefoot.files import made_from, read_toml
from surefoot.inspector.curves import AT_ONCE, Columns, curve, grid_of, numbers
from surefoot.people import agreement
from surefoot.people.agreement import AGREEMENT
from surefoot.people.log import Round, rounds_of, waits_for
from surefoot.store.manifest import read_listed_table
from surefoot.store.reading import FINISHED, PROFILE, SUMMARY, TRACKERS_FILE, check_is_run, read_samples, samples_in, traces_in

LONGEST_TEXT = 20_000
UNITS = {"control": "environment steps", "language": "responses", "sft": "rows", "reward": "rows", "dpo": "rows"}
"""what a step of the budget is, by kind of run"""


class RunFolders:
    """The inspected runs, by number. A run keeps its number.

    Raises SurefootError if a path is not a run.
    """

    def __init__(self, paths: list[Path]) -> None:
        for path in paths:
            check_is_run(path)
        self.paths = paths
        self.names = run_names(paths)
        self.columns = [Columns(path / "metrics.jsonl") for path in paths]
        self.lock = threading.Lock()
        self.checked: dict[int, tuple[Any, dict[str, Any]]] = {}
        """state of the files of a run -> its findings"""
        self.curves_sent = threading.Event()
        """set once the browser has received curves"""

    def path(self, run: int) -> Path:
        """The folder of a run. Raises SurefootError for an unknown number."""
        if not 0 <= run < len(self.paths):
            raise SurefootError(f"run={run}: unknown; there are {len(self.paths)} runs")
        return self.paths[run]

    def open(self, path: Path, name: str) -> int:
        """The number of a run, which is added if it is new. Raises SurefootError if the path is not a run."""
        with self.lock:
            if path not in self.paths:
                check_is_run(path)
                self.names.append(name)
                self.columns.append(Columns(path / "metrics.jsonl"))
                self.paths.append(path)
            return self.paths.index(path)

    def runs(self, numbers: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """The name, recipe, progress and available data of some runs, or of all."""
        chosen = range(len(self.paths)) if numbers is None else numbers
        return [self._run(number, AT_ONCE / len(chosen)) for number in chosen]

    def _run(self, run: int, patience: float) -> dict[str, Any]:
        path, columns = self.path(run), self.columns[run]
        iterations = columns.read_on(patience)  # the rest of a long file follows with later requests
        recipe = read_toml(path / "config.toml")
        return {
            "number": run,
            "name": self.names[run],
            **recipe_summary(recipe),
            "value_lambda": recipe.get("objective", {}).get("value_lambda", "none"),
            "finished": (path / FINISHED).is_file(),
            "iterations": iterations,
            "damage": columns.fault and f"{columns.path.name} {columns.fault}",
            "steps": int(columns.columns["steps"][-1]) if iterations else 0,
            "metrics": columns.names(),
            "traces": [int(file.stem) for file in traces_in(path / "traces")],
            "samples": sample_steps(path),
            "videos": [file.name for file in self.videos(run)],
            "profiled": profile_file(path).is_file(),
            "labelled": bool(labelled_rounds(path)),
            "waiting": waits_for(path),
        }

    def curves(
        self, runs: list[int], names: list[str], start: float, end: float, points: int, smoothing: float
    ) -> dict[str, Any]:
        """Metrics of runs on a common grid of at most ``points`` steps between ``start`` and ``end``.

        smoothing   window of the running mean, as a share of a run
        """
        read = [self.columns[run] for run in runs if self.path(run)]
        counts = [columns.read_on(AT_ONCE / len(read)) for columns in read]
        inside = [c for c in read if len(x := c.columns.get("steps", np.empty(0))) and ((x >= start) & (x <= end)).any()]
        grid = grid_of(inside, start, end, max(2, min(points, 4000))) if inside else np.empty(0)
        curves: dict[str, list[dict[str, Any]]] = {}
        for name in names:
            curves[name] = []
            for columns, count in zip(read, counts, strict=True):
                drawn = curve(columns, name, grid, max(1, round(smoothing * count)))
                same = np.array_equal(drawn.low, drawn.high, equal_nan=True)
                low = None if same else numbers(drawn.low)
                values = {"high": numbers(drawn.high), "low": low, "smooth": numbers(drawn.smooth)}
                curves[name].append({**values, "not_positive": drawn.not_positive})
        self.curves_sent.set()
        return {"steps": [float(x) for x in grid], "curves": curves, "iterations": counts}

    # ---- findings and recipe

    def findings(self, run: int) -> dict[str, Any]:
        """What ``surefoot check`` prints about a run, damaged files aside; checked again once the metrics have changed."""
        from surefoot.diagnostics.findings import check_run  # imports torch

        path = self.path(run)
        files = [path / "metrics.jsonl", path / "config.toml", path / TRACKERS_FILE]
        state = [(at.st_mtime_ns, at.st_size) for at in (file.stat() for file in files if file.exists())]
        if self.checked.get(run, (None, None))[0] != state:
            check = check_run(path, hashed=False)
            findings = [finding.to_json() for finding in check.findings]
            self.checked[run] = state, {"findings": findings, "verdict": check.verdict, "changed": list(check.changed)}
        return self.checked[run][1]

    def recipe(self, run: int) -> dict[str, Any]:
        """The resolved recipe of a run: each field, its meaning, and where its value comes from."""
        from surefoot.recipes.fields import recipe_fields
        from surefoot.recipes.presets import settings_of

        path = self.path(run)
        recipe, preset = read_toml(path / "config.toml"), None
        if (path / "environment.json").exists():
            preset = read_listed_table(path / "environment.json").get("preset")
        preset = preset if isinstance(preset, dict) else None
        settings = [asdict(setting) for setting in settings_of(recipe, preset)]
        meanings = {name: field.meaning for name, field in recipe_fields(recipe_summary(recipe)["kind"])}
        fields = [{**setting, "meaning": meanings.get(setting["name"], "")} for setting in settings]
        return {"preset": preset and preset.get("name"), "fields": fields}

    def profile(self, run: int) -> dict[str, Any]:
        """Where the seconds of a run's iterations went; SurefootError if ``--profile`` did not measure them."""
        file = profile_file(self.path(run))
        if not file.is_file():
            raise SurefootError(f"{self.names[run]}: has no profile; train with --profile")
        with made_from(file, "train with --profile again"):
            summary = read_listed_table(file)
            sections = [
                {"path": [str(name) for name in row["path"]], **{key: row[key] for key in ("seconds", "calls", "first")}}
                for row in summary["sections"]
            ]
            counts = {key: summary[key] for key in ("iterations", "counted", "seconds", "first")}
            return {**counts, "sections": sections, "traces": [str(file.parent / str(name)) for name in summary["traces"]]}

    def labels(self, run: int) -> list[dict[str, Any]]:
        """The labels of the rounds that a run belongs to, as far as training has read them: how well they agree, findings, and
        the pairs in which the reward model before the round prefers the other answer.
        """
        rounds = []
        for at in labelled_rounds(self.path(run)):
            report = read_listed_table(at.folder / AGREEMENT)
            differ = []
            for one in report["model"]["differ"]:
                pair, other = at.queue[one["key"]], "b" if one["preferred"] == "a" else "a"
                sides = {
                    name: as_text(pair.get(side, "a clip")) for name, side in (("chosen", one["preferred"]), ("other", other))
                }
                differ.append({**one, **sides, "prompt": as_text(pair.get("prompt", ""))})
            found = [finding.to_json() for finding in agreement.findings(report)]
            rounds.append({**report, "name": at.folder.name, "findings": found, "differ": differ})
        return rounds

    # ---- samples and videos

    def samples(self, run: int, steps: int) -> list[dict[str, Any]]:
        """The sampled responses of an evaluation: at most 200, with long texts shortened."""
        path = self.path(run)
        if steps not in sample_steps(path):
            raise SurefootError(f"steps={steps}: {self.names[run]} has no samples of this step")
        samples = []
        for sample in read_samples(path / "samples" / f"{steps}.jsonl")[:200]:
            texts = {name: as_text(sample.get(name)) for name in ("prompt", "response")}
            samples.append({**{name: x for name, x in sample.items() if not isinstance(x, str)}, **texts})
        return samples

    def videos(self, run: int) -> list[Path]:
        """The videos of a run, by name."""
        return sorted(file for file in (self.path(run) / "videos").glob("*.mp4") if file.is_file() and not file.is_symlink())

    def video(self, run: int, number: int) -> Path:
        """One video of a run. Raises SurefootError for an unknown number."""
        videos = self.videos(run)
        if number >= len(videos):
            raise SurefootError(f"video={number}: unknown; there are {len(videos)}")
        return videos[number]


def labelled_rounds(run: Path) -> list[Round]:
    """The rounds that a run belongs to whose labels training has read."""
    return [at for at in rounds_of(run.absolute().parent.parent) if (at.folder / AGREEMENT).is_file()]


def profile_file(path: Path) -> Path:
    """Where a run has what ``--profile`` measured."""
    return path / PROFILE / SUMMARY


def recipe_summary(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe trains, and how: kind, task or model, algorithm, seed and budget; None or "" for what it lacks."""
    kind, seed, budget = (recipe.get(name) for name in ("kind", "seed", "steps"))
    kind = kind if isinstance(kind, str) else "control"
    return {
        "kind": kind,
        "trained": str(recipe.get("task") or Path(str(recipe.get("model", ""))).name),
        "algorithm": str(recipe.get("algorithm", "")) if kind in ("control", "language") else "",
        "seed": seed if isinstance(seed, int) else None,
        "budget": budget if isinstance(budget, int) else None,
        "unit": UNITS.get(kind, "steps"),
    }


def metric_descriptions(names: list[str]) -> dict[str, dict[str, Any]]:
    """Title, meaning, group and healthy range of each metric."""
    known = {name: METRICS[name] for name in names if name in METRICS}
    return {
        name: {"title": title_of(name), "meaning": of.meaning, "machine": name in TIMING, "low": of.low, "high": of.high}
        for name, of in known.items()
    }


def run_names(paths: list[Path]) -> list[str]:
    """The last part of each path, and as many parts before it as make the names unique."""
    parts = [path.absolute().parts for path in paths]
    for depth in range(1, max((len(part) for part in parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {path.name}" for number, path in enumerate(paths, 1)]


def sample_steps(path: Path) -> list[int]:
    """The steps of the evaluations that have samples."""
    return [int(file.stem) for file in samples_in(path / "samples")]


def shortened(text: Any, most: int) -> str | None:
    """A text of at most about ``most`` characters, without its middle if it is longer."""
    if text is None:
        return None
    text = str(text)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def as_text(text: Any) -> str:
    """A prompt or a response, which may be a list of messages, as text of limited length."""
    return shortened(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False), LONGEST_TEXT) or ""
