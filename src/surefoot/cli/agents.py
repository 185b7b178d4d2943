"""Evaluate a run, record its agent, export it, and exchange runs with the Hugging Face hub."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.options import (
    COUNT,
    PATH,
    RUN,
    FiniteFloat,
    IntRange,
    checkpoint_option,
    json_option,
    option,
    reject_options,
    seed_option,
    task_option,
)
from surefoot.cli.output import echo, echo_json
from surefoot.core.algorithms import MAX_COUNT
from surefoot.errors import SurefootError, announced
from surefoot.files import RUNS

if TYPE_CHECKING:
    from surefoot.control.agent import Agent
    from surefoot.language.analysis.accuracy import Attempts


@click.command()
@click.argument("run", type=RUN)
@option("--episodes", type=COUNT, default=20, help="Agents: greedy episodes.")
@seed_option(0, "Seed of the episodes or the responses.")
@task_option
@option("--data", "rows_file", help="Language: evaluate on these rows instead of the held-out ones.")
@option("--rows", type=COUNT, help="Language: number of rows. [default: as in the recipe]")
@option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="TERM",
    help="Language: score the responses by this reward model's folder or run, module:function, or term as in reward.terms; "
    "repeatable.",
)
@option("--samples", type=COUNT, help="Online runs: responses to each prompt, for pass@k.")
@option("--k", metavar="1,4,8", help="The k of pass@k. [default: powers of 2 up to --samples]")
@option("--threshold", type=FiniteFloat(), help="Lowest reward of a correct response. [default: rewards must be 0 or 1]")
@option("--after", metavar="TEXT", help="Majority vote: the answer is the text after the last TEXT. [default: all of it]")
@checkpoint_option
@json_option
def evaluate(
    run: Path,
    episodes: int,
    seed: int,
    task: str | None,
    checkpoint: str | None,
    rows_file: str | None,
    rows: int | None,
    rewards: tuple[str, ...],
    as_json: bool,
    **several: Any,
) -> None:
    """Evaluate a checkpoint of RUN.

    An agent plays whole greedy episodes. A language model is evaluated on held-out rows, beside the model that training started
    from.
    """
    from surefoot.store.folder import chosen_checkpoint, is_model, kind_of
    from surefoot.store.hub import local_folder

    run = local_folder(run)
    kind = kind_of(run)
    if kind != "control":
        unused = ("episodes", "task", "seed") if kind == "reward" else ("episodes", "task")  # a held-out loss draws nothing
        reject_options(unused, f"{run} is a model, evaluated on held-out rows: --data, --rows")
        if is_model(run):
            reject_options(("checkpoint",), f"{run} is a model, not a run")
        else:
            note_changes(chosen_checkpoint(run, checkpoint))
        from surefoot.language.analysis.evaluate import evaluate_run, report_table

        options: dict[str, Any] = {"attempts": attempts_from(**several), "reward": rewards, "checkpoint": checkpoint}
        result = evaluate_run(run, data=rows_file, rows=rows, seed=seed, **options)
        if as_json:
            echo_json(result)
        else:
            echo(report_table(result))
        return
    reject_options(("rows_file", "rows", "rewards", *several), f"{run} is an agent, evaluated with --episodes and --task")
    from surefoot.runs import api

    source = chosen_checkpoint(run, checkpoint)
    with announced(partial(echo, err=True)):
        played = replace(api.evaluate(agent_in(source), task, episodes=episodes, seed=seed), checkpoint=str(source))
    if as_json:
        echo_json(played.to_json())
        return
    if played.note:
        echo(f"note: {played.note}", err=True)
    echo(f"return {played.mean_return:.2f} ± {played.std_return:.2f} over {episodes} greedy episodes (seed {seed})")
    if numbers := [f"{name} {mean:.4g}" for name, mean in played.info.items() if mean is not None]:
        echo(f"mean {', '.join(numbers)}")
    echo(f"lengths {min(played.lengths)} to {max(played.lengths)}; checkpoint {source}")


def attempts_from(samples: int | None, k: str | None, threshold: float | None, after: str | None) -> "Attempts | None":
    """The options of pass@k as a value; None without ``--samples``, and SurefootError for the others without it."""
    if samples is None:
        for flag, value in (("--k", k), ("--threshold", threshold), ("--after", after)):
            if value is not None:
                raise SurefootError(f"{flag} {value}: is for several responses to each prompt; add --samples N")
        return None
    from surefoot.language.analysis.accuracy import Attempts, parse_ks

    return Attempts(samples, () if k is None else parse_ks(k), threshold, after or "")


@click.command()
@click.argument("run", type=RUN)
@option("--episodes", type=COUNT, default=1, help="Greedy episodes.")
@seed_option(0, "Seed of the episodes, as in surefoot evaluate.")
@option("--out", type=PATH, help="MP4 file. [default: RUN/videos/TASK-STEP-seedSEED.mp4]")
@option("--size", metavar="WIDTHxHEIGHT", default="320x240", help="Size in pixels.")
@option("--fps", type=FiniteFloat(1, 240), metavar="N", help="Frames per second. [default: the environment's]")
@option("--max-steps", type=COUNT, default=10000, help="Longest episode, in steps.")
@checkpoint_option
@task_option
@option("--no-caption", is_flag=True, help="Leave out the caption with step, reward and return.")
@option("--traced", metavar="last|all|STEPS", help="Film the traced training episodes instead, for surefoot inspect.")
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
    """Film greedy episodes of the agent in RUN as an MP4."""
    from surefoot.control.video import record_video
    from surefoot.control.video.frames import size_from_text
    from surefoot.control.video.traces import record_traces
    from surefoot.store.folder import chosen_checkpoint, output_file

    pixels = size_from_text(size)
    if traced is not None:
        reject_options(("episodes", "seed", "out", "max_steps", "checkpoint", "task"), "--traced films episodes from training")
        for line in record_traces(run, traced, size=pixels, fps=fps, caption=not no_caption):
            echo(line)
        return
    source = chosen_checkpoint(run, checkpoint)
    agent = agent_in(source)
    path = out or output_file(run, source, task or agent.recipe.task, "videos", f"-seed{seed}.mp4")
    other = None if task == agent.recipe.task else task
    video = record_video(
        agent, path, other, episodes=episodes, seed=seed, size=pixels, fps=fps, max_steps=max_steps, caption=not no_caption
    )
    echo(video.line())


@click.command()
@click.argument("run", type=RUN)
@option("--format", type=click.Choice(["onnx", "torch"]), metavar="onnx|torch", default="onnx")
@option("--out", type=PATH, help="File to write. [default: RUN/exports/TASK-STEP.onnx or .pt2]")
@checkpoint_option
def export(run: Path, format: str, out: Path | None, checkpoint: str | None) -> None:
    """Export the agent in RUN to ONNX or torch.export.

    The file maps observations to greedy actions and includes the normaliser.
    """
    from surefoot.control.export import SUFFIXES, export_agent
    from surefoot.store.folder import chosen_checkpoint, output_file

    source = chosen_checkpoint(run, checkpoint)
    agent = agent_in(source)
    path = out or output_file(run, source, agent.recipe.task, "exports", SUFFIXES[format])
    echo(export_agent(agent, path, format, source.absolute().name).line())


@click.command()
@click.argument("run", type=RUN)
@click.argument("name", metavar="ORG/NAME", required=False)
@option("--public", is_flag=True, help="Make a new repository public; without it, it is private.")
@option("--dry-run", is_flag=True, help="Only write the folder that would be uploaded.")
@option("--out", type=PATH, help="Folder to write with --dry-run. [default: RUN/hub]")
@checkpoint_option
@option("--episodes", type=IntRange(0, MAX_COUNT), default=20, help="Agents: episodes to evaluate.")
@seed_option(0, "Agents: seed of these episodes and of the video.")
@option("--film", is_flag=True, help="Agents: record an episode, if the run has no video of this checkpoint.")
@option("--no-samples", is_flag=True, help="Language: leave out the responses of the last evaluation.")
@option("--verify", is_flag=True, help="Execute the last iterations again, and say in the card that they repeat.")
@option("--license", metavar="ID", help="Licence in the card, by the hub's name, such as apache-2.0.")
@option("--publish", multiple=True, metavar="NAME", help="Publish this argument of the recipe too.")
@option("--message", default="Upload by surefoot push", help="Message of the commit.")
def push(
    run: Path, name: str | None, public: bool, dry_run: bool, out: Path | None, no_samples: bool, message: str, **settings: Any
) -> None:
    """Upload the agent or model in RUN to the Hugging Face hub, with a model card.

    ORG/NAME is the repository. By default it has the run's name and belongs to the owner of the token. A new repository is
    private, except with --public. Every file is listed before it is uploaded. Log in with "hf auth login", or set HF_TOKEN.
    """
    from surefoot.compare.card import Options, write_repository
    from surefoot.store import hub
    from surefoot.store.folder import chosen_checkpoint, kind_of
    from surefoot.store.reading import check_is_run

    if out is not None and not dry_run:
        raise SurefootError(f"--out {out}: is for --dry-run; add that, or leave it out")
    check_is_run(run)
    if kind_of(run) == "control":
        reject_options(("no_samples",), f"{run} is an agent, which writes no text")
    else:
        reject_options(("episodes", "seed", "film"), f"{run} is a model, which plays no episodes")
    repository = hub.parse_repository(name or run.resolve().name)
    if repository.revision is not None:
        raise SurefootError(f"{name}: has a revision; uploads go to the main branch, so leave it out")
    note_changes(chosen_checkpoint(run, settings["checkpoint"]))
    target = None if dry_run else hub.find_target(repository.name, public)
    shown = repository.name if target is None else target.name
    with hub.new_folder((out or run / "hub") if dry_run else None) as folder:
        for line in write_repository(run, folder, shown, Options(samples=not no_samples, **settings)):
            echo(line)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            echo(f"{path.stat().st_size:>13,} bytes  {path.relative_to(folder)}")
        commit = None if target is None else hub.push(folder, target, public, message)
    if commit is None:
        echo(f"nothing is uploaded; the folder is {out or run / 'hub'}")
    else:
        echo(f"uploaded to {hub.HubName(shown, revision=commit)} ({'public' if public else 'private'})")


@click.command()
@click.argument("name", metavar="ORG/NAME")
@click.argument("folder", type=PATH, required=False)
@option("--revision", help="Branch, tag or commit. [default: main]")
def pull(name: str, folder: Path | None, revision: str | None) -> None:
    """Download an agent or model that "surefoot push" uploaded.

    FOLDER must not exist; the default is runs/NAME. Every file is compared with its hash. No pickle and no code is downloaded.
    """
    from surefoot.store import hub

    repository = hub.parse_repository(name, revision)
    target = folder or RUNS / repository.name.rpartition("/")[2]
    commit = hub.pull(repository, target)
    echo(f"{hub.HubName(repository.name, revision=commit)} -> {target}")


def note_changes(checkpoint: Path) -> None:
    """Print a line on stderr if the code that the recipe of a checkpoint's run names has changed since the newest one."""
    from surefoot.store.folder import code_changed_since

    if changed := code_changed_since(checkpoint.absolute().parent.parent):
        echo(f"note: changed since the checkpoint: {'; '.join(changed)}", err=True)


def agent_in(checkpoint: Path) -> "Agent":
    """The agent of a checkpoint; raises SurefootError if it has a language model."""
    from surefoot.control.agent import Agent
    from surefoot.runs import api

    note_changes(checkpoint)
    loaded: Any = api.load(checkpoint)
    if not isinstance(loaded, Agent):
        raise SurefootError(
            f"{checkpoint}: has a language model and no agent; use surefoot evaluate RUN or generate; programs load RUN/model"
        )
    return loaded
