"""What the inspector knows of some runs. It reads their folders and never writes to them."""

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.errors import SurefootError
from surefoot.files import parsed, read_toml
from surefoot.inspector.curves import AT_ONCE, Columns, curve, grid_of, numbers
from surefoot.runs.folder import FINISHED, check_is_run, samples_in, traces_in
from surefoot.runs.metrics import METRICS, SHOWN

if TYPE_CHECKING:
    from surefoot.inspector.traced import Traces

LONGEST_TEXT = 20_000


class NotThere(SurefootError):
    """A run, an iteration or a row that is not there, or not any more."""


class Store:
    """Runs by their number.

    Raises SurefootError when a path is no run.
    """

    def __init__(self, paths: list[Path]) -> None:
        for path in paths:
            check_is_run(path)
        self.paths = paths
        self.names = run_names(paths)
        self.columns = [Columns(path / "metrics.jsonl") for path in paths]
        self.lock = threading.Lock()
        self.drawn = threading.Event()
        self._traces: Traces | None = None

    def read_ahead(self) -> None:
        """Read all metrics now, so that whoever asks first waits less; and once curves are drawn, get ready for traces."""
        for columns in self.columns:
            columns.read_all()
        self.drawn.wait()
        time.sleep(1)  # whoever draws needs the processor too
        _ = self.traces

    @property
    def traces(self) -> "Traces":
        """Of all runs."""
        with self.lock:
            if self._traces is None:
                from surefoot.inspector.traced import Traces

                self._traces = Traces(self)
            return self._traces

    def path(self, run: int) -> Path:
        if not 0 <= run < len(self.paths):
            raise NotThere(f"run={run}: there are {len(self.paths)}")
        return self.paths[run]

    def runs(self) -> list[dict[str, Any]]:
        """What there is of each run."""
        return [self._run(number) for number in range(len(self.paths))]

    def _run(self, run: int) -> dict[str, Any]:
        path, columns = self.paths[run], self.columns[run]
        iterations = columns.read_on(AT_ONCE / len(self.paths))  # of a long file the rest comes while the page asks again
        recipe = read_toml(path / "config.toml")
        return {
            "name": self.names[run],
            "kind": recipe.get("kind", "control"),
            "trained": str(recipe.get("task") or Path(str(recipe.get("model", ""))).name),
            "algorithm": recipe.get("algorithm", ""),
            "value_lambda": recipe.get("objective", {}).get("value_lambda", "none"),
            "budget": recipe.get("steps"),
            "finished": (path / FINISHED).is_file(),
            "iterations": iterations,
            "steps": int(columns.columns["steps"][-1]) if iterations else 0,
            "metrics": columns.names(),
            "traces": [int(file.stem) for file in traces_in(path / "traces")],
            "samples": sample_steps(path),
            "videos": [file.name for file in self.videos(run)],
        }

    def curves(
        self, runs: list[int], names: list[str], start: float, end: float, points: int, smoothing: float
    ) -> dict[str, Any]:
        """Metrics of runs on a grid that they share.

        smoothing   the share of a run that the running mean is over
        """
        found = [self.columns[run] for run in runs if self.path(run)]
        counts = [columns.read_on(AT_ONCE / len(found)) for columns in found]
        inside = [c for c in found if len(x := c.columns.get("steps", np.empty(0))) and ((x >= start) & (x <= end)).any()]
        grid = grid_of(inside, start, end, max(2, min(points, 4000))) if inside else np.empty(0)
        told: dict[str, list[dict[str, Any]]] = {}
        for name in names:
            told[name] = []
            for columns, count in zip(found, counts, strict=True):
                drawn = curve(columns, name, grid, max(1, round(smoothing * count)))
                same = np.array_equal(drawn.low, drawn.high, equal_nan=True)
                told[name].append(
                    {"high": numbers(drawn.high), "low": None if same else numbers(drawn.low), "smooth": numbers(drawn.smooth)}
                )
        self.drawn.set()
        return {"steps": numbers_exact(grid), "curves": told, "iterations": counts}

    # ---- what a model said, and what an agent did

    def samples(self, run: int, steps: int) -> list[dict[str, Any]]:
        """What a model said at an evaluation: at most 200 rows, long texts shortened."""
        path = self.path(run)
        if steps not in sample_steps(path):
            raise NotThere(f"steps={steps}: {self.names[run]} has no samples there")
        found = []
        text = (path / "samples" / f"{steps}.jsonl").read_text("utf-8", errors="replace")
        for line in text.strip("\n").split("\n")[:200]:  # and not where a model wrote another kind of line end
            try:
                sample = parsed(line, partial(json.loads, parse_constant=lambda _: None))
            except ValueError:
                continue
            if not isinstance(sample, dict):
                continue
            texts = {name: said(sample.get(name)) for name in ("prompt", "response")}
            found.append({**{name: x for name, x in sample.items() if not isinstance(x, str)}, **texts})
        return found

    def videos(self, run: int) -> list[Path]:
        """The films of a run, by name."""
        return sorted(file for file in (self.path(run) / "videos").glob("*.mp4") if file.is_file() and not file.is_symlink())

    def video(self, run: int, number: int) -> Path:
        """One of them.

        Raises NotThere when there are not so many.
        """
        films = self.videos(run)
        if number >= len(films):
            raise NotThere(f"video={number}: there are {len(films)}")
        return films[number]


def described(names: list[str]) -> dict[str, dict[str, str]]:
    """What a metric is called, and what it means."""
    return {
        name: {"title": SHOWN[name][0] if name in SHOWN else name.replace("_", " "), "meaning": METRICS[name].meaning}
        for name in names
        if name in METRICS
    }


def run_names(paths: list[Path]) -> list[str]:
    """The last part of each path, with as much before it as tells them apart."""
    parts = [path.absolute().parts for path in paths]
    for depth in range(1, max((len(part) for part in parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {path.name}" for number, path in enumerate(paths, 1)]


def sample_steps(path: Path) -> list[int]:
    """After how many steps a model was asked."""
    return [int(file.stem) for file in samples_in(path / "samples")]


def shortened(text: Any, most: int) -> str | None:
    """A text of at most so many characters; the middle is left out."""
    if text is None:
        return None
    text = str(text)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def said(text: Any) -> str:
    """A prompt or a response, which may be a list of messages, as a text."""
    return shortened(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False), LONGEST_TEXT) or ""


def numbers_exact(grid: Any) -> list[float]:
    """Steps, which have more than six digits."""
    return [float(x) for x in grid]
