"""Record the episodes in a run's traces as MP4.

A traced episode is replayed from its seed and actions and rendered at every traced step. Its video is in ``videos/traces/``
under a name with the digest of the observations in training, so it can't be mistaken for another episode's. If the replay
differs, a note with the same name explains how.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from surefoot.control.environments import task_name
from surefoot.control.environments.looped import LoopedEnvironments, MakeEnvironment
from surefoot.control.normalise import action_converter
from surefoot.control.replay import NOT_REPLAYABLE, ReplayMismatchError, replay
from surefoot.control.video.encoder import Encoder
from surefoot.control.video.frames import caption_text
from surefoot.control.video.rendering import frames_per_second, rendered
from surefoot.errors import SurefootError
from surefoot.files import write_text
from surefoot.recipes.control import ControlRecipe
from surefoot.store.folder import recipe_of
from surefoot.store.reading import check_is_run, replay_failure, trace_video, traces_in
from surefoot.store.traces import read_trace


def record_traces(
    run: Path,
    which: str = "last",
    task: MakeEnvironment | None = None,
    *,
    size: tuple[int, int] = (320, 240),
    fps: float | None = None,
    caption: bool = True,
) -> Iterator[str]:
    """Record the traced episodes of a run; yield a line for each. Existing videos are kept.

    which   "last", "all", or the steps of one trace
    task    replaces the recipe's, if that can't be imported
    size    (width, height) of the videos

    Raises SurefootError when there is no such trace, the task can't be rendered, or no replay matches training.
    """
    files = select_traces(run, which)
    recipe = recipe_of(run)
    if not isinstance(recipe, ControlRecipe):
        raise SurefootError(f"{run}: was trained on text, but only environments can be recorded; use surefoot inspect {run}")
    made: str | MakeEnvironment = task or recipe.task
    recorded, failure = 0, ""
    with rendered(made, recipe.environment, size, caption, "training") as (environment, picture):
        environments = LoopedEnvironments(lambda: environment, 1, recipe.seed, task_name(made))
        convert = action_converter(environment.action_space, recipe.normalise.actions)
        speed = fps or frames_per_second(environment, recipe.seed)
        for file in files:
            for index, row in enumerate(read_trace(file).rows):
                path = trace_video(run, int(file.stem), index, row)
                if path is not None and path.is_file():
                    recorded += 1
                    yield f"{path}: exists already"
                    continue
                try:
                    if path is None:
                        raise ReplayMismatchError(NOT_REPLAYABLE)
                    with Encoder(path, *size, speed) as encoder:
                        for at in replay(row, environments, convert):
                            encoder.add(picture(caption_text(at)))
                except ReplayMismatchError as error:
                    failure = f"traces/{file.name}, row {index}: not recorded; {error}"
                    if path is not None:
                        _write_note(replay_failure(path), f"{error}\n")
                    yield failure
                    continue
                recorded += 1
                replay_failure(path).unlink(missing_ok=True)  # from a machine where the replay differed
                what = f"episode {row.about['episode']} of environment {row.row}, replayed from its step {row.about['step']}"
                yield f"{path}: {what}; {encoder.frames:,} frames at {encoder.fps:g} a second"
    if not recorded:
        raise SurefootError(f"{run}: no traced episode could be recorded; {failure}")


def _write_note(path: Path, text: str) -> None:
    with suppress(OSError):  # the error is printed anyway
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def select_traces(run: Path, which: str) -> list[Path]:
    """The trace files selected by "last", "all" or a number of steps.

    Raises SurefootError, with the traces that exist, when none matches.
    """
    check_is_run(run)
    files = traces_in(run / "traces")
    if not files:
        raise SurefootError(f"{run}: has no traces; training writes them unless traces.rows = 0")
    if which in ("last", "all"):
        return files[-1:] if which == "last" else files
    selected = [file for file in files if file.stem == which] if re.fullmatch(r"\d+", which) else []
    if not selected:
        existing = ", ".join(file.stem for file in files)
        raise SurefootError(f"traced={which!r}: must be last, all, or the steps of a trace: {existing}")
    return selected
