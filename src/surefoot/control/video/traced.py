"""Films of the very episodes in a run's traces: each is replayed from its seed and its actions, and drawn at every traced step.

A film lies in ``videos/traces/`` under a name that holds the digest of what was observed in training. So it belongs to one
piece of one episode, whatever becomes of the run. Where the replay is another episode, a note beside says so.
"""

import re
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from surefoot.control.actions import sender_for
from surefoot.control.environments.looped import LoopedEnvironments, MakeEnvironment, task_name
from surefoot.control.replay import NO_ORIGIN, NotTheSameError, replay
from surefoot.control.video.encoder import Encoder, program
from surefoot.control.video.film import choose_headless, drawable, frames_per_second, picture_of, prepare_mujoco, small_print
from surefoot.control.video.pictures import caption_height, captioned, fitted
from surefoot.errors import SurefootError
from surefoot.files import read_toml, write_text
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.reading import make_recipe
from surefoot.runs.paths import check_is_run, film_of, refusal_of, traces_in
from surefoot.runs.traces import read_trace


def film_traces(
    run: Path,
    which: str = "last",
    task: MakeEnvironment | None = None,
    *,
    size: tuple[int, int] = (320, 240),
    fps: float | None = None,
    caption: bool = True,
) -> Iterator[str]:
    """Film the traced episodes of a run; a line for each. What is filmed already is left as it is.

    which   "last", "all", or the steps of one trace
    task    where the recipe's can't be imported
    size    (width, height) of the films

    Raises SurefootError when there is no such trace, the task can't be drawn, or no episode came out as it was in training.
    """
    files = chosen_traces(run, which)
    recipe = make_recipe(read_toml(run / "config.toml"))
    if not isinstance(recipe, ControlRecipe):
        raise SurefootError(
            f"{run}: was trained on text, and only environments can be filmed; see it with surefoot inspect {run}"
        )
    program()
    choose_headless()
    width, height = size
    made: str | MakeEnvironment = task or recipe.task
    name = task_name(made)
    filmed, refused = 0, ""
    with closing(drawable(made, name, recipe.environment, "training")) as environment:
        room = height - caption_height(height) if caption else height
        prepare_mujoco(environment, name, width, room)
        environments = LoopedEnvironments(lambda: environment, 1, recipe.seed, name)
        send = sender_for(environment.action_space, recipe.normalise.actions)
        speed = fps or frames_per_second(environment, recipe.seed)
        for file in files:
            for index, row in enumerate(read_trace(file).rows):
                path = film_of(run, int(file.stem), index, row)
                if path is not None and path.is_file():
                    filmed += 1
                    yield f"{path}: is there already"
                    continue
                try:
                    if path is None:
                        raise NotTheSameError(NO_ORIGIN)
                    with Encoder(path, width, height, speed) as encoder:
                        for moment in replay(row, environments, send):
                            picture = fitted(picture_of(environment, name), width, room)
                            encoder.add(captioned(picture, small_print(moment), height) if caption else picture)
                except NotTheSameError as error:
                    refused = f"traces/{file.name}, row {index}: not filmed; {error}"
                    if path is not None:
                        _note(refusal_of(path), f"{error}\n")
                    yield refused
                    continue
                filmed += 1
                refusal_of(path).unlink(missing_ok=True)  # of a machine where it came out otherwise
                told = f"episode {row.about['episode']} of environment {row.row} from its step {row.about['step']} on, replayed"
                yield f"{path}: {told}; {encoder.frames:,} frames at {encoder.fps:g} a second"
    if not filmed:
        raise SurefootError(f"{run}: no traced episode could be filmed; {refused}")


def _note(path: Path, text: str) -> None:
    with suppress(OSError):  # whoever gave the command is told anyway
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def chosen_traces(run: Path, which: str) -> list[Path]:
    """The files of traces that a word names.

    Raises SurefootError, with what there is, when there are none.
    """
    check_is_run(run)
    files = traces_in(run / "traces")
    if not files:
        raise SurefootError(f"{run}: has no traces; they are written while a run is trained, unless traces.rows = 0")
    if which in ("last", "all"):
        return files[-1:] if which == "last" else files
    found = [file for file in files if file.stem == which] if re.fullmatch(r"\d+", which) else []
    if not found:
        there = ", ".join(file.stem for file in files)
        raise SurefootError(f"traced={which!r}: must be last, all, or the steps of a trace: {there}")
    return found
