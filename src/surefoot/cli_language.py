"""The commands that are about text alone: generate, and a look at data."""

import sys
from pathlib import Path
from typing import Any

import click

from surefoot.algorithms import MAX_COUNT
from surefoot.cli_attempts import rows_to
from surefoot.cli_echo import echo, echo_json
from surefoot.cli_words import Group
from surefoot.errors import SurefootError
from surefoot.seeding import MAX_SEED


@click.command()
@click.argument("model")
@click.option("--prompt", "prompts", multiple=True, help="A prompt; repeatable.")
@click.option("--file", type=click.Path(path_type=Path), help="Prompts from a JSONL or Parquet file, or a datasets folder.")
@click.option("--samples", type=click.IntRange(1, MAX_COUNT), default=1, show_default=True, help="Responses to each prompt.")
@click.option("--max-tokens", type=click.IntRange(1, MAX_COUNT), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--greedy", is_flag=True, help="The likeliest token each time, instead of sampling.")
@click.option("--stop", multiple=True, help="Text that ends a response, besides EOS; repeatable.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=1, show_default=True)
@click.option("--trust-remote-code", is_flag=True, help="Let a model's own code from the hub run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per response.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    file: Path | None,
    samples: int,
    max_tokens: int,
    temperature: float,
    greedy: bool,
    stop: tuple[str, ...],
    seed: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Answer prompts with MODEL: a run, a checkpoint, a transformers folder or a hub id.

    On a terminal, control characters in a response are shown and not obeyed. Piped output is as the model wrote it; --json
    escapes them.
    """
    from surefoot.language.trained import writer

    if bool(prompts) == bool(file):
        raise SurefootError("generate: give either --prompt TEXT or --file FILE")
    from surefoot.language.tokens import text_of

    language_model = writer(model, trust_remote_code)
    asked: list[Any] = list(prompts)
    if file is not None:
        from surefoot.language import data
        from surefoot.language.models import context_of

        rows = data.read_rows(file)
        found = data.prompts(rows, language_model.tokens, MAX_SEED)
        asked, context = found.prompts, context_of(language_model.model)
        for row, ids in zip(rows, found.ids, strict=True):
            if context is not None and len(ids) + max_tokens > context:
                raise SurefootError(
                    f"{row.where}: its prompt has {len(ids)} tokens, and with --max-tokens {max_tokens} they don't fit into "
                    f"the model's context of {context}; shorten one of them"
                )
    written = language_model.generate(
        asked,
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop=stop,
        greedy=greedy,
    )
    for number, response in enumerate(written):
        prompt = asked[number // samples]
        if as_json:
            echo_json({"prompt": prompt, "response": response})
        else:
            line = f"{text_of(prompt)} → {response}"
            (echo if sys.stdout.isatty() else click.echo)(line)  # a pipe gets what the model wrote


@click.group(cls=Group)
def data() -> None:
    """Make rows of tasks with verifiers, and look at rows before they are trained on."""


@data.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="The model whose tokenizer and chat template read them.")
@click.option("--rows", type=click.IntRange(1, MAX_COUNT), default=5, show_default=True, help="How many rows to show.")
@click.option("--max-length", type=click.IntRange(2, MAX_COUNT), default=1024, show_default=True, help="As in data.max_length.")
@click.option("--trust-remote-code", is_flag=True, help="Let a model's own code from the hub run.")
def preview(file: Path, model: str, rows: int, max_length: int, trust_remote_code: bool) -> None:
    """Show rows of FILE with their tokens coloured by what is trained, lengths, and what would be dropped."""
    from rich.console import Console

    from surefoot.language.preview import preview as preview_of

    width = None if sys.stdout.isatty() else 120
    shown = preview_of(file, model, rows=rows, max_length=max_length, trust_remote_code=trust_remote_code)
    Console(width=width).print(shown)


@data.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="What answers: a run, a checkpoint, a transformers folder or a hub id.")
@click.option("--function", default="surefoot.language.tasks:verify", show_default=True, help="As in reward.terms.")
@click.option("--arguments", default="{}", metavar="TABLE", help="The function's other arguments, such as { tolerance = 0.1 }.")
@click.option(
    "--rows", type=click.IntRange(1, MAX_COUNT), default=64, show_default=True, help="How many prompts, from the first on."
)
@click.option("--samples", type=click.IntRange(2, MAX_COUNT), default=4, show_default=True, help="Responses to each.")
@click.option(
    "--max-tokens", type=click.IntRange(1, MAX_COUNT), default=64, show_default=True, help="As in sampling.max_tokens."
)
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=1, show_default=True)
@click.option("--stop", multiple=True, help="Text that ends a response, besides EOS; repeatable. As in sampling.stop.")
@click.option("--keep-cut", is_flag=True, help="A response that --max-tokens cut earns what the function says, not 0.")
@click.option("--trust-remote-code", is_flag=True, help="Let a model's own code from the hub run.")
def accuracy(
    file: Path,
    model: str,
    function: str,
    arguments: str,
    rows: int,
    samples: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    stop: tuple[str, ...],
    keep_cut: bool,
    trust_remote_code: bool,
) -> None:
    """Tell how often a model answers the prompts of FILE rightly before it is trained: greedily, and by sampling."""
    from surefoot.language.accuracy import accuracy as accuracy_of
    from surefoot.language.endpoint import REPEAT
    from surefoot.language.rewards import FunctionReward
    from surefoot.language.trained import writer
    from surefoot.toml import parse_value

    given = parse_value(arguments)
    if not isinstance(given, dict):
        raise SurefootError(f"--arguments {arguments}: must be a table, such as {{ tolerance = 0.1 }}")
    reward = FunctionReward(function, arguments=given, field="--function", then=REPEAT)
    if not all(stop):
        raise SurefootError("--stop '': is empty; name a text")
    options: dict[str, Any] = {"prompts": rows, "samples": samples, "max_tokens": max_tokens, "seed": seed, "stop": stop}
    answering = writer(model, trust_remote_code)
    found = accuracy_of(answering, file, reward, temperature=temperature, keep_cut=keep_cut, **options)
    for line in found.lines():
        echo(line)


@data.command()
@click.argument("task")
@click.option("--rows", type=click.IntRange(1, MAX_COUNT), default=1000, show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=1, show_default=True)
@click.option("--difficulty", type=int, help="As the task counts it (surefoot data tasks); its usual one if not given.")
@click.option("--test", is_flag=True, help="Problems that no training rows have, of any seed; of games, other plays.")
@click.option("--demonstrations", is_flag=True, help="Answers of a teacher, for SFT, instead of problems.")
@click.option("--sloppy", type=click.FloatRange(0, 1), help="Share of demonstrations that are careless. [default: 0.6]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSONL file.")
def make(
    task: str,
    rows: int,
    seed: int,
    difficulty: int | None,
    test: bool,
    demonstrations: bool,
    sloppy: float | None,
    out: Path,
) -> None:
    """Write problems of TASK (surefoot data tasks), for the reward function surefoot.language.tasks:verify."""
    from surefoot.language import tasks
    from surefoot.language.rows import write_rows

    replaced = rows_to(out)
    if sloppy is not None and not demonstrations:
        raise SurefootError(f"--sloppy {sloppy:g}: is for demonstrations; add --demonstrations")
    if demonstrations:
        share = 0.6 if sloppy is None else sloppy
        made = tasks.demonstrations(task, rows, seed, difficulty, sloppy=share, test=test)
    else:
        made = tasks.rows(task, rows, seed, difficulty, test=test)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_rows(out, made)
    echo(f"{len(made)} rows in {out}{replaced}")


@data.command(name="tasks")
def list_tasks() -> None:
    """List the tasks that data make knows, with their difficulties."""
    from surefoot.language.tasks import GAMES, TASKS

    for name, task in TASKS.items():
        least, greatest = task.difficulties
        echo(f"{name:<10} {task.about} ({least} to {greatest}, usually {task.usual})")
    for name, game in GAMES.items():
        least, greatest = game.DIFFICULTIES
        echo(f"{name:<10} {game.ABOUT} ({least} to {greatest}, usually {game.USUAL})")
    echo("reasoning_gym/NAME: tasks of that package with one right answer (extra reasoning-gym)")
