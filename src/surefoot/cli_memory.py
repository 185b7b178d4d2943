"""The memory planner as a command."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import click

from surefoot.algorithms import MAX_COUNT
from surefoot.cli_echo import echo_json
from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from surefoot.language.memory.estimate import Kind


@click.command()
@click.argument("model")
@click.option("--kind", type=click.Choice(["language", "sft", "reward", "dpo"]), default="language", show_default=True)
@click.option(
    "--critic",
    type=click.Choice(["shared", "own", "none"]),
    default="own",
    show_default=True,
    help="A head on the policy's trunk, a value model of its own, or none.",
)
@click.option("--reference/--no-reference", default=True, show_default=True, help="A frozen copy for the KL.")
@click.option(
    "--rewards", type=click.IntRange(0, MAX_COUNT), default=1, show_default=True, help="Reward models of the same size."
)
@click.option("--adapter", type=click.IntRange(1, MAX_COUNT), metavar="RANK", help="All roles as adapters of one frozen base.")
@click.option("--precision", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--gradient-checkpointing", is_flag=True, help="As in a recipe.")
@click.option("--micro-batch", type=click.IntRange(1, MAX_COUNT), metavar="ROWS", help="As optimizer.micro_batch in a recipe.")
@click.option("--micro-batch-tokens", type=click.IntRange(1, MAX_COUNT), metavar="TOKENS", help="As in a recipe.")
@click.option("--prompts", type=click.IntRange(1, MAX_COUNT), default=64, show_default=True, help="Prompts per iteration.")
@click.option("--samples", type=click.IntRange(1, MAX_COUNT), default=1, show_default=True, help="Responses to each prompt.")
@click.option("--minibatches", type=click.IntRange(1, MAX_COUNT), default=4, show_default=True, help="Updates per epoch.")
@click.option(
    "--batch", type=click.IntRange(1, MAX_COUNT), default=64, show_default=True, help="Rows per update of sft and reward."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1, MAX_COUNT), default=512, show_default=True, help="Of the longest prompt."
)
@click.option("--max-tokens", type=click.IntRange(1, MAX_COUNT), default=64, show_default=True, help="Of a response.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes are bytes.")
def memory(
    model: str,
    kind: "Kind",
    critic: Literal["shared", "own", "none"],
    reference: bool,
    rewards: int,
    adapter: int | None,
    precision: str,
    gradient_checkpointing: bool,
    micro_batch: int | None,
    micro_batch_tokens: int | None,
    prompts: int,
    samples: int,
    minibatches: int,
    batch: int,
    prompt_tokens: int,
    max_tokens: int,
    as_json: bool,
) -> None:
    """Plan the memory of training MODEL: a config.json, a folder, a run, a hub id, pocket, or a size such as 7B.

    No weights are read. Tells what policy, value, reference and reward take, now and with other switches, and what fits where.
    """
    from surefoot.algorithms import PPO_CLIP, REINFORCE
    from surefoot.language.memory.estimate import Setup, with_adapters
    from surefoot.language.memory.planner import model_config, plan, shown, to_json, with_value
    from surefoot.sections import AdapterSettings

    config, nominal = model_config(model)
    responses = prompts * samples if kind == "language" else batch
    if kind == "language" and minibatches > responses:
        raise SurefootError(f"--minibatches {minibatches}: more than the {responses} responses of an iteration; use fewer")
    setup = Setup(
        kind=kind,
        policy=config,
        objective=PPO_CLIP if kind == "language" else REINFORCE,
        bf16=precision == "bfloat16",
        checkpointing=gradient_checkpointing,
        rows=batch,
        responses=responses,
        prompt=prompt_tokens,
        response=0 if kind == "reward" else max_tokens,
        max_tokens=max_tokens,
        micro_batch=micro_batch,
        micro_batch_tokens=micro_batch_tokens,
    )
    if kind == "language":
        setup = replace(
            with_value(setup, "head" if critic == "shared" else critic),
            reference=config if reference else None,
            rewards=(config,) * rewards,
            rows=responses // minibatches,
            samples=samples,
        )
    if adapter is not None:
        setup = with_adapters(setup, AdapterSettings(rank=adapter))
    from rich.console import Console

    with Console(stderr=True).status("counting the passes") if sys.stderr.isatty() else nullcontext():
        made = plan(model, setup, nominal)
    if as_json:
        echo_json(to_json(made))
        return
    Console(width=None if sys.stdout.isatty() else 120).print(shown(made))
