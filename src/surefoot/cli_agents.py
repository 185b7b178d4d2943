"""Commands for what was trained: judge it, film it, export it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.algorithms import MAX_COUNT
from surefoot.cli_attempts import attempt_flags, attempts_from, refuse_for_agents
from surefoot.cli_echo import echo, echo_json
from surefoot.errors import SurefootError
from surefoot.seeding import MAX_SEED
from surefoot.toml import read_toml

if TYPE_CHECKING:
    from surefoot.control.agent import Agent


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--episodes", type=click.IntRange(1, MAX_COUNT), default=20, show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Of episodes, or of responses.")
@click.option("--task", help="Evaluate an agent on another task than the one trained on.")
@click.option("--data", "rows_file", help="Language: judge on these rows instead of the run's held-out ones.")
@click.option("--rows", type=click.IntRange(1, MAX_COUNT), help="Language: how many rows; as the recipe says if not given.")
@attempt_flags
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    run: Path,
    episodes: int,
    seed: int,
    task: str | None,
    rows_file: str | None,
    rows: int | None,
    as_json: bool,
    **attempts: Any,
) -> None:
    """Judge RUN (its best checkpoint, else its latest): an agent by whole greedy episodes, a model on held-out rows."""
    from surefoot import api
    from surefoot.run.folder import checkpoint_to_load

    checkpoint = checkpoint_to_load(run)
    kind = kind_of(run)
    of_language = kind != "control"
    idle = {"control": ("rows_file", "rows"), "language": ("episodes", "task")}
    for name in idle.get(kind, ("episodes", "task", "seed")):  # a held-out loss draws nothing
        if click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            judged = "a model on held-out rows: --data, --rows" if of_language else "an agent by --episodes"
            raise SurefootError(f"--{'data' if name == 'rows_file' else name}: {run} is judged as {judged}; leave it out")
    if of_language:
        from surefoot.language.evaluate import evaluate_run, table

        told = evaluate_run(run, data=rows_file, rows=rows, seed=seed, attempts=attempts_from(**attempts))
        if as_json:
            echo_json(told)
        else:
            echo(table(told))
        return
    refuse_for_agents(attempts)
    result = api.evaluate(agent_in(checkpoint), task, episodes=episodes, seed=seed)
    if as_json:
        echo_json({**result.to_json(), "checkpoint": str(checkpoint)})
        return
    echo(f"return {result.mean_return:.2f} ± {result.std_return:.2f} over {episodes} greedy episodes (seed {seed})")
    echo(f"lengths {min(result.lengths)} to {max(result.lengths)}; checkpoint {checkpoint}")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--episodes", type=click.IntRange(1, MAX_COUNT), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="As in surefoot evaluate.")
@click.option("--out", type=click.Path(path_type=Path), help="The MP4; RUN/videos/TASK-STEP-seedSEED.mp4 if not given.")
@click.option("--size", metavar="WIDTHxHEIGHT", default="320x240", show_default=True)
@click.option("--fps", type=click.FloatRange(1, 240), metavar="N", help="Frames a second, if not the environment's own.")
@click.option(
    "--max-steps", type=click.IntRange(1, MAX_COUNT), default=10_000, show_default=True, help="Cut episodes off there."
)
@click.option("--checkpoint", metavar="best|last|STEP", help="Which agent; the best, else the last, if not given.")
@click.option("--task", help="Watch it on another task than the one trained on.")
@click.option("--no-caption", is_flag=True, help="Leave out the small print: step, reward, return so far.")
@click.option("--traced", metavar="last|all|STEPS", help="Film the episodes in the run's traces instead, for surefoot inspect.")
def watch(
    run: Path,
    episodes: int,
    seed: int,
    out: Path | None,
    size: str,
    fps: float | None,
    max_steps: int,
    checkpoint: str | None,
    task: str | None,
    no_caption: bool,
    traced: str | None,
) -> None:
    """Film greedy episodes of the agent in RUN as an MP4. Needs no display."""
    from surefoot.control.video import film, size_from_text
    from surefoot.run.folder import chosen_checkpoint, output_file

    pixels = size_from_text(size)
    if traced is not None:
        from surefoot.control.traced_film import film_traces

        source = click.get_current_context().get_parameter_source
        for name in ("episodes", "seed", "out", "max_steps", "checkpoint", "task"):
            if source(name) is click.core.ParameterSource.COMMANDLINE:
                flag = name.replace("_", "-")
                raise SurefootError(f"--{flag}: --traced films what the run did in training; leave --{flag} out")
        for line in film_traces(run, traced, size=pixels, fps=fps, caption=not no_caption):
            echo(line)
        return
    found = chosen_checkpoint(run, checkpoint)
    agent = agent_in(found)
    path = out or output_file(run, found, task or agent.recipe.task, "videos", f"-seed{seed}.mp4")
    other = None if task == agent.recipe.task else task
    filmed = film(
        agent, path, other, episodes=episodes, seed=seed, size=pixels, fps=fps, max_steps=max_steps, caption=not no_caption
    )
    echo(filmed.line())


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", type=click.Choice(["onnx", "torch"]), metavar="onnx|torch", default="onnx", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="The file; RUN/exports/TASK-STEP.onnx (or .pt2) if not given.")
@click.option("--checkpoint", metavar="best|last|STEP", help="Which agent; the best, else the last, if not given.")
def export(run: Path, format: str, out: Path | None, checkpoint: str | None) -> None:
    """Write the agent in RUN as a file for other programs: observations in, greedy actions out, normaliser included."""
    from surefoot.control.export import ENDINGS, export_agent
    from surefoot.run.folder import chosen_checkpoint, output_file

    found = chosen_checkpoint(run, checkpoint)
    agent = agent_in(found)
    path = out or output_file(run, found, agent.recipe.task, "exports", ENDINGS[format])
    echo(export_agent(agent, path, format, found.absolute().name).line())


def agent_in(checkpoint: Path) -> "Agent":
    """The agent of a checkpoint.

    Raises SurefootError when it is a model of language.
    """
    from surefoot import api
    from surefoot.control.agent import Agent

    found = api.load(checkpoint)
    if not isinstance(found, Agent):
        raise SurefootError(f"{checkpoint}: holds a model of language and no agent; see surefoot evaluate RUN, and generate")
    return found


def kind_of(run: Path) -> str:
    """What a run trains; "control" for a saved agent, which has no recipe beside it."""
    config = run / "config.toml"
    return str(read_toml(config).get("kind", "control")) if config.is_file() else "control"
