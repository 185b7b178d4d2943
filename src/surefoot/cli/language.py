"""Commands of language models: generate, chat, best-of-n, score, serve, merge, and data."""

import contextlib
import io
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.options import (
    COUNT,
    PATH,
    RUN,
    FiniteFloat,
    Group,
    IntRange,
    check_out,
    check_stop_texts,
    complete_run,
    device_option,
    greedy_option,
    json_option,
    no_tools_option,
    option,
    run_named,
    seed_option,
    special_option,
    stop_option,
    temperature_option,
    tool_option,
    trust_option,
)
from surefoot.cli.output import echo, echo_json, echo_result
from surefoot.core.algorithms import MAX_COUNT
from surefoot.errors import SurefootError
from surefoot.terminal import is_terminal, phase

if TYPE_CHECKING:
    from surefoot.language.chat import Chat
    from surefoot.language.language_model import LanguageModel
    from surefoot.language.online.play import Player

TEMPLATE = "the chat template keeps the conversation; a model trained on plain text needs --plain"
NO_TEMPLATE = "no chat template: each line is a separate prompt, which the model continues"
AT_ONCE = 128
"""responses that ``generate`` samples before it prints them"""


def load_on(model: str, device: str, trust_remote_code: bool) -> "LanguageModel":
    """A model for sampling on a device; SurefootError if the device or the model can't be used."""
    from surefoot.language.language_model import load_language_model
    from surefoot.ranks.collectives import check_device

    check_device(device)
    with phase("loading the model"):
        language_model = load_language_model(run_named(model), trust_remote_code)
        language_model.model.to(device)  # type: ignore[arg-type]
    return language_model


@click.command()
@click.argument("model", shell_complete=complete_run)
@option("--prompt", "prompts", multiple=True, help="Prompt; repeatable.")
@option("--file", "--prompts", "file", type=PATH, help="Prompts from a file, a folder or hf://org/name:split.")
@option("--samples", type=COUNT, default=1, help="Responses to each prompt.")
@option("--max-tokens", type=COUNT, default=128, help="Longest response in tokens, with EOS.")
@temperature_option
@greedy_option
@stop_option
@special_option
@tool_option
@no_tools_option
@seed_option(1)
@trust_option
@option("--json", "as_json", is_flag=True, help="Print one JSON object per response.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    file: Path | None,
    max_tokens: int,
    trust_remote_code: bool,
    as_json: bool,
    samples: int,
    tools: tuple[str, ...],
    no_tools: bool,
    **sampling: Any,
) -> None:
    """Sample responses of MODEL to prompts.

    MODEL is a run, a checkpoint, a transformers folder or a hub id.

    With tools the response is the whole conversation: calls, results and the answer. Tools run with your rights.

    On a terminal, control characters in a response are printed as codes. Piped output is not changed; --json escapes it.
    """
    if bool(prompts) == bool(file):
        raise SurefootError("generate: give either --prompt TEXT or --file FILE")
    if named := [prompt for prompt in prompts if prompt.endswith(".jsonl") and Path(prompt).is_file()]:
        raise SurefootError(f"--prompt {named[0]}: takes the text of a prompt; for a file: --file {named[0]}")
    from surefoot.language.analysis.best_of import prompts_that_fit
    from surefoot.language.data.tokens import prompt_text
    from surefoot.language.language_model import check_prompts, load_language_model

    check_prompts(prompts)
    language_model = load_language_model(run_named(model), trust_remote_code)
    inputs: Sequence[Any] = prompts if file is None else prompts_that_fit(file, language_model, max_tokens).prompts
    if player := _player(language_model, tools, no_tools):
        sampling.pop("special_tokens")
    at_once = max(1, AT_ONCE // samples)
    for start in range(0, len(inputs), at_once):  # a signal loses only the batch that is being sampled
        batch = inputs[start : start + at_once]
        options = {"samples": samples, "max_tokens": max_tokens, "first": start * samples, **sampling}
        if player:
            responses = [one.transcript for one in player.play(batch, **options)]
        else:
            responses = language_model.generate_ended(batch, **options)[0]
        for number, response in enumerate(responses):
            prompt = batch[number // samples]
            if as_json:
                echo_json({"prompt": prompt, "response": response})
            else:
                line = f"{prompt_text(prompt)} → {response}"
                (echo if is_terminal(sys.stdout) else click.echo)(line)  # a pipe gets the response as it is


def _player(model: "LanguageModel", tools: tuple[str, ...], no_tools: bool) -> "Player | None":
    """The model with the tools of the command or of its run; None without any."""
    if no_tools:
        return None
    from surefoot.language.online.play import Player

    player = Player(model.model, model.tokens, model.recipe, tools)
    return player if player.ready else None


@click.command()
@click.argument("model", shell_complete=complete_run)
@option("--max-tokens", type=COUNT, default=256, help="Longest answer in tokens, with EOS.")
@option("--plain", is_flag=True, help="Each line is a prompt without the chat template, as in training on plain text.")
@temperature_option
@greedy_option
@stop_option
@tool_option
@no_tools_option
@seed_option(1)
@device_option
@trust_option
def chat(
    model: str, device: str, trust_remote_code: bool, tools: tuple[str, ...], no_tools: bool, plain: bool, **sampling: Any
) -> None:
    """Chat with MODEL in the terminal.

    MODEL is a run, a checkpoint, a transformers folder or a hub id. With a chat template the model gets the whole
    conversation; without one each line is a separate prompt. /reset clears the conversation. /quit, Ctrl-D and Ctrl-C leave.

    Lines may come from a pipe; then only the answers go to stdout.
    """
    check_stop_texts(sampling["stop"])
    from surefoot.language.chat import Chat, ChatOptions

    loaded = load_on(model, device, trust_remote_code)
    talk(Chat(loaded, ChatOptions(**sampling), _player(loaded, tools, no_tools or plain), plain), is_terminal(sys.stdin))


def talk(conversation: "Chat", terminal: bool) -> None:
    """Answer lines from stdin until they end; ``terminal``: whether a person types them.

    Raises SurefootError if a line from a pipe can't be answered. On a terminal the error is printed and the chat continues.
    """
    mode = TEMPLATE if conversation.remembers else NO_TEMPLATE
    echo(f"{mode}{'; /reset clears it' * conversation.remembers}; /quit leaves" if terminal else mode, err=not terminal)
    try:
        for line in read_lines(terminal):
            if line == "/quit":
                return
            if line == "/reset":
                conversation.reset()
                echo("conversation cleared", err=not terminal)
                continue
            try:
                conversation.answer(line, show)
            except SurefootError as error:
                if not terminal:
                    raise
                echo(str(error), err=True, nl=False)
            echo()
    except KeyboardInterrupt:
        echo()


def read_lines(terminal: bool) -> Iterator[str]:
    """Lines of stdin without their ends; on a terminal with a prompt, line editing and a history."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not terminal:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() line editing and a history)
    while True:
        try:
            line = input("> ")
        except EOFError:
            echo()
            return
        if line:
            yield line


def show(piece: str) -> None:
    """Print part of an answer immediately."""
    echo(piece, nl=False)
    sys.stdout.flush()


@click.command(name="best-of-n")
@click.argument("model", shell_complete=complete_run)
@option("--prompts", type=PATH, required=True, help="A file, a folder or hf://org/name:split.")
@option("--samples", type=COUNT, required=True, help="n, responses to each prompt.")
@option(
    "--reward",
    "rewards",
    multiple=True,
    required=True,
    metavar="TERM",
    help="A term as in reward.terms, such as a reward model's folder; repeatable, terms are added.",
)
@option("--out", type=PATH, required=True, help="JSONL file to write.")
@option("--worst", is_flag=True, help="Write pairs of the best and the worst response, for reward models.")
@option("--at-least", type=FiniteFloat(), metavar="R", help="Keep a prompt only if its best response earns R or more.")
@option("--keep-cut", is_flag=True, help="Keep responses that --max-tokens truncated as candidates.")
@option("--max-tokens", type=COUNT, default=64, help="Longest response in tokens, with EOS.")
@temperature_option
@stop_option
@special_option
@seed_option(1)
@option("--batch", type=COUNT, default=256, help="Responses sampled at a time.")
@device_option
@trust_option
@json_option
def best_of_n(
    model: str,
    prompts: Path,
    rewards: tuple[str, ...],
    out: Path,
    worst: bool,
    device: str,
    trust_remote_code: bool,
    as_json: bool,
    **drawing: Any,
) -> None:
    """Write the best of n responses to each prompt.

    The rows are for SFT; with --worst they are pairs for reward models. MODEL is a run, a checkpoint, a transformers folder or
    a hub id.
    """
    replaced = check_out(out, ".jsonl", prompts)
    if worst and drawing["samples"] < 2:
        raise SurefootError("--samples 1: the best and the worst of one response are the same; use 2 or more")
    check_stop_texts(drawing["stop"])
    from surefoot.language.analysis.best_of import BestOfSettings
    from surefoot.language.analysis.best_of import best_of_n as choose_best
    from surefoot.language.data.rows import write_rows
    from surefoot.language.rewards.terms import load_flag_reward
    from surefoot.ranks.collectives import check_device

    check_device(device)
    reward = load_flag_reward(rewards, device)
    language_model = load_on(model, device, trust_remote_code)
    out.parent.mkdir(parents=True, exist_ok=True)
    best = choose_best(language_model, prompts, reward, BestOfSettings(**drawing), worst=worst)
    write_rows(out, best.rows)
    if as_json:
        echo_json(best.to_json())
    else:
        echo("\n".join([*best.lines(), f"the rows are in {out}{replaced}"]))


@click.command()
@click.argument("model", shell_complete=complete_run)
@option("--file", type=PATH, required=True, help="Rows with prompt and completion: a file, a folder or hf://org/name:split.")
@device_option
@option("--json", "as_json", is_flag=True, help="Print one JSON object per row.")
def score(model: str, file: Path, device: str, as_json: bool) -> None:
    """Print the reward of each row of a file by the reward model MODEL.

    MODEL is a run of kind "reward", a folder or a hub id. Text is read as in training.
    """
    from surefoot.language.data.sources import read_rows
    from surefoot.language.data.tokens import prompt_text
    from surefoot.language.rewards.model import ModelReward
    from surefoot.language.served import scored_texts
    from surefoot.ranks.collectives import check_device

    check_device(device)
    texts = [scored_texts(row) for row in read_rows(file)]
    reward = ModelReward(run_named(model), device=device, field="model")
    prompts, completions = [prompt for prompt, _ in texts], [completion for _, completion in texts]
    reward.check_prompts(prompts)
    for prompt, completion, value in zip(prompts, completions, reward(prompts, completions, {}).total.tolist(), strict=True):
        if as_json:
            echo_json({"prompt": prompt, "completion": completion, "reward": value})
        else:
            echo(f"{value:8.3f}  {prompt_text(prompt)} → {completion}")


@click.command()
@click.argument("model", shell_complete=complete_run)
@option("--port", type=IntRange(0, 65535), default=0, help="Port. [default: any free port]", show_default=False)
@option("--token-from", default="SUREFOOT_TOKEN", help="Environment variable with the token; unset, a new one is printed.")
@option("--queue", type=COUNT, default=128, help="Requests that may wait.")
@device_option
@trust_option
def serve(model: str, port: int, token_from: str, queue: int, device: str, trust_remote_code: bool) -> None:
    """Serve MODEL to other programs on this machine, over HTTP.

    A reward model gets the address /score, for reward.terms with url. A policy gets /v1/completions and /v1/chat/completions,
    as in OpenAI's API. MODEL is a run, a checkpoint, a transformers folder or a hub id. Ctrl-C stops the server.
    """
    from surefoot.cli.inspect import require_server
    from surefoot.recipes.rewards import token_error

    require_server("a server")
    if error := token_error(token_from):
        raise SurefootError(f"--token-from {token_from}{error.removeprefix('.token_from')}")
    from surefoot.inspector.server import listen
    from surefoot.inspector.serving import application
    from surefoot.language.served import load_served
    from surefoot.ranks.collectives import check_device

    check_device(device)
    served = load_served(run_named(model), device, trust_remote_code)
    token = os.environ.get(token_from, "").strip() or secrets.token_urlsafe(24)

    def ready(address: str) -> None:
        urls = [f"{address}{path.removeprefix('/')}" for path in served.paths]
        echo("\n".join([*urls, f"{served.version} answers there; Ctrl-C stops it"]))
        if token != os.environ.get(token_from, "").strip():
            echo(f"export {token_from}={token}")
        if len(urls) == 1:
            arguments = f'token_from = "{token_from}", arguments = {{ model = "{served.version}" }}'
            echo(f'reward.terms = [{{ url = "{urls[0]}", {arguments} }}]')

    with contextlib.suppress(KeyboardInterrupt):
        listen(lambda *_: application(served, token, queue), port, ready, path="")


@click.command()
@click.argument("run", type=RUN)
@option("--out", type=PATH, required=True, help="Folder to write; a model in it is replaced.")
@trust_option
def merge(run: Path, out: Path, trust_remote_code: bool) -> None:
    """Merge the adapter of RUN into its base model.

    Writes a transformers folder. RUN is a run or a checkpoint; of a run, the best checkpoint is used, else the last. Runs with
    an [adapter] do this when they end, unless adapter.merge = false.
    """
    from surefoot.language.language_model import LanguageModel
    from surefoot.language.models.reward_model import RewardModel
    from surefoot.runs.api import load

    loaded = load(run, trust_remote_code=trust_remote_code)
    if not isinstance(loaded, LanguageModel | RewardModel):
        raise SurefootError(f"{run}: has an agent, and agents have no adapter; see surefoot export")
    for line in (*loaded.save(out), f"the model is in {out}"):
        echo_result(line)


@click.group(cls=Group)
def data() -> None:
    """Make, preview and test data for language models."""


@data.command()
@click.argument("file", type=PATH)
@option("--model", required=True, help="Model whose tokenizer and chat template are used.")
@option("--rows", type=COUNT, default=5, help="Rows to show.")
@option("--max-length", type=IntRange(2, MAX_COUNT), default=1024, help="As in data.max_length.")
@option(
    "--columns", default="{}", metavar="TABLE", help='As in data.columns, such as { question = "prompt" }.', show_default=False
)
@option(
    "--control-tokens",
    "control",
    type=click.Choice(["split", "keep", "reject"]),
    default="split",
    help="As in data.control_tokens.",
)
@option("--answers", type=click.Choice(["template", "row"]), default="template", help="As in data.answers.")
@trust_option
def preview(file: Path, columns: str, **options: Any) -> None:
    """Show rows of FILE as tokens.

    FILE is a file, a folder, a pattern or hf://org/name:split. Colours mark the tokens that are trained. Lengths and dropped
    rows follow.
    """
    from rich.console import Console

    from surefoot.language.analysis.preview import preview as preview_of
    from surefoot.recipes.reading import parse_flag

    width = None if is_terminal(sys.stdout) else 120
    table = parse_flag(columns)
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise SurefootError(f'--columns {columns}: must be a table of names, such as {{ question = "prompt" }}')
    rendered = preview_of(file, columns=table, **options)
    Console(width=width).print(rendered)


@data.command()
@click.argument("file", type=PATH)
@option("--model", required=True, help="Run, checkpoint, transformers folder or hub id.")
@option("--function", default="surefoot.language.tasks:verify", help="As in reward.terms.")
@option(
    "--arguments", default="{}", metavar="TABLE", help="Its other arguments, such as { tolerance = 0.1 }.", show_default=False
)
@option("--rows", "prompts", type=COUNT, default=64, help="Number of prompts, from the first row.")
@option("--samples", type=IntRange(2, MAX_COUNT), default=4, help="Responses to each prompt.")
@option("--max-tokens", type=COUNT, default=64, help="Longest response in tokens, with EOS.")
@temperature_option
@seed_option(1)
@stop_option
@special_option
@option("--keep-cut", is_flag=True, help="Score truncated responses with the function, instead of 0.")
@trust_option
def accuracy(file: Path, model: str, function: str, arguments: str, trust_remote_code: bool, **sampling: Any) -> None:
    """Measure the accuracy of a model on FILE.

    Answers the prompts greedily and by sampling, and scores them with a reward function. Run it before training.
    """
    from surefoot.language.analysis.accuracy import measure_accuracy
    from surefoot.language.http_client import REPEAT
    from surefoot.language.language_model import load_language_model
    from surefoot.language.rewards.terms import FunctionReward
    from surefoot.recipes.reading import parse_flag

    table = parse_flag(arguments)
    if not isinstance(table, dict):
        raise SurefootError(f"--arguments {arguments}: must be a table, such as {{ tolerance = 0.1 }}")
    reward = FunctionReward(function, arguments=table, field="--function", then=REPEAT)
    check_stop_texts(sampling["stop"])
    result = measure_accuracy(load_language_model(run_named(model), trust_remote_code), file, reward, **sampling)
    for line in result.lines():
        echo(line)


@data.command()
@click.argument("task")
@option("--rows", type=COUNT, default=1000, help="Number of rows.")
@seed_option(1)
@option("--difficulty", type=int, help="Difficulty (surefoot data tasks). [default: the task's usual one]")
@option("--test", is_flag=True, help="Test problems: never in training rows of any seed. For games: other plays.")
@option("--demonstrations", is_flag=True, help="Write a teacher's answers for SFT, not problems.")
@option("--sloppy", type=FiniteFloat(0, 1), help="Share of careless demonstrations. [default: 0.6]")
@option("--out", type=PATH, required=True, help="JSONL file to write.")
def make(
    task: str, rows: int, seed: int, difficulty: int | None, test: bool, demonstrations: bool, sloppy: float | None, out: Path
) -> None:
    """Write problems of TASK, with their answers.

    "surefoot data tasks" lists the tasks. The reward function surefoot.language.tasks:verify scores responses to them.
    """
    from surefoot.language import tasks
    from surefoot.language.data.rows import write_rows

    replaced = check_out(out, ".jsonl")
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
    """List the tasks of "surefoot data make"."""
    from surefoot.language.tasks import GAMES, TASKS

    for name, task in (TASKS | GAMES).items():
        least, greatest = task.difficulties
        echo(f"{name:<10} {task.about} ({least} to {greatest}, usually {task.usual})")
    echo("reasoning_gym/NAME: tasks of that package with one right answer (extra reasoning-gym)")
