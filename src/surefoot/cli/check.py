"""Check this machine, a recipe or a run, and plan the memory of a training."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from surefoot.cli.options import COUNT, IntRange, complete_run, complete_task, json_option, option, run_named
from surefoot.cli.output import echo, echo_json
from surefoot.core.algorithms import MAX_COUNT
from surefoot.errors import SurefootError
from surefoot.terminal import is_terminal

if TYPE_CHECKING:
    from surefoot.language.memory.layout import Layout
    from surefoot.language.memory.workload import Kind, Workload


@click.command()
@click.argument("what", required=False, metavar="[RECIPE|RUN]", shell_complete=complete_task)
@json_option
@click.pass_context
def check(ctx: click.Context, what: str | None, as_json: bool) -> None:
    """Check this machine, a RECIPE or a RUN.

    RECIPE is a preset, a .toml file or an environment id; it is tried without training. RUN is searched for problems.

    Exits with 1 if a needed check fails, or if the run has a serious finding.
    """
    from surefoot.recipes.presets import find_recipe, presets
    from surefoot.terminal import visible

    what = what if what is None or what in presets() else run_named(what)
    if what is not None and Path(what).is_dir() and ((Path(what) / "config.toml").is_file() or what not in presets()):
        ctx.exit(check_run(Path(what), as_json))
    from surefoot.diagnostics.machine import check_machine
    from surefoot.diagnostics.recipe import check_recipe
    from surefoot.runs.factory import prepared_world
    from surefoot.store.finding import any_failed

    recipe = None if what is None else find_recipe(what)
    if recipe is None:
        checks = check_machine()
    else:
        short = recipe.engine == "auto" and recipe.engine_choice()[0] == "eager"
        engine = "eager" if short else recipe.engine
        checks = [*check_machine(recipe.device, engine), *check_recipe(recipe, prepared_world)]
    if as_json:
        tables = [{"name": each.name, "state": each.state, "what": each.what, "fix": each.fix} for each in checks]
        echo_json({"checks": tables, "failed": any_failed(checks)})
    else:
        width = max(len(each.name) for each in checks)
        for each in checks:
            for line in each.checklist_lines(width):
                echo(visible(line))  # the text of an error may contain line breaks
    ctx.exit(int(any_failed(checks)))


def check_run(folder: Path, as_json: bool) -> int:
    """Print the findings of a run; the exit code."""
    from surefoot.compare.runs import read_run
    from surefoot.diagnostics import findings as diagnostics
    from surefoot.store.finding import any_failed
    from surefoot.terminal import visible

    check = diagnostics.check_run(folder)
    if not check.iterations:
        read_run(folder)  # raises the error: no row is written yet, or none is left
    if as_json:
        table: dict[str, Any] = {"run": str(folder), "steps": check.steps}
        if check.changed:
            table["config_changed"] = list(check.changed)
        echo_json({**table, "findings": [finding.to_json() for finding in check.findings]})
    elif not check.findings:
        echo(f"{folder}: {check.verdict}")
    else:
        echo("\n\n".join("\n".join(finding.text) for finding in check.findings))
    if check.changed and not as_json:
        echo(f"changed since the checkpoint: {'; '.join(map(visible, check.changed))}")
    return int(any_failed(check.findings))


@click.command()
@click.argument("model", shell_complete=complete_run)
@option("--adapter", type=COUNT, metavar="RANK", help="Train all roles as adapters of one frozen base.")
@option(
    "--quantize",
    type=click.Choice(["int8", "nf4"]),
    help="Quantisation of the adapter's base, as adapter.quantize in a recipe.",
)
@option("--optimizer", type=click.Choice(["adam", "adam-8bit"]), default="adam", help="As optimizer.kind in a recipe.")
@option("--ranks", type=COUNT, default=1, help="Ranks that train together, one per GPU.")
@option("--ranks-per-machine", type=COUNT, default=8, help="GPUs of a machine, for --sharding hybrid.")
@option("--offload", is_flag=True, help="As offload in a recipe.")
@option("--kind", type=click.Choice(["language", "sft", "reward", "dpo"]), default="language")
@option(
    "--critic",
    type=click.Choice(["shared", "own", "none"]),
    default="own",
    help="A head on the policy's trunk, a separate value model, or none.",
)
@option("--reference/--no-reference", default=True, help="A frozen reference for the KL.")
@option("--rewards", type=IntRange(0, MAX_COUNT), default=1, help="Reward models of the same size.")
@option(
    "--precision",
    type=click.Choice(["float32", "bfloat16", "bfloat16-weights"]),
    default="float32",
    help="As precision in a recipe.",
)
@option("--gradient-checkpointing", is_flag=True, help="As gradient_checkpointing in a recipe.")
@option("--micro-batch", type=COUNT, metavar="ROWS", help="As optimizer.micro_batch in a recipe.")
@option("--micro-batch-tokens", type=COUNT, metavar="TOKENS", help="As optimizer.micro_batch_tokens in a recipe.")
@option("--sharding", type=click.Choice(["none", "full", "hybrid"]), default="none", help="As sharding in a recipe.")
@option(
    "--reshard-after-forward/--no-reshard-after-forward", "reshard", default=True, help="As reshard_after_forward in a recipe."
)
@option("--prompts", type=COUNT, default=64, help="Prompts per iteration of all ranks.")
@option("--samples", type=COUNT, default=1, help="Responses to each prompt.")
@option("--minibatches", type=COUNT, default=4, help="Updates per epoch.")
@option("--batch", type=COUNT, default=64, help="Rows per update of SFT, reward models and DPO, of all ranks.")
@option("--prompt-tokens", type=COUNT, default=512, help="Longest prompt in tokens.")
@option("--max-tokens", type=COUNT, default=64, help="Longest response in tokens.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def memory(
    model: str,
    as_json: bool,
    ranks: int,
    ranks_per_machine: int,
    sharding: Literal["none", "full", "hybrid"],
    reshard: bool,
    offload: bool,
    **options: Any,
) -> None:
    """Plan the memory of training MODEL.

    MODEL is a config.json, a folder, a run, a hub id, "pocket", or a size such as 7B. No weights are read.

    Prints the cheapest settings that fit on one GPU, the memory of policy, value, reference and reward models with these
    settings and with others, and last the cheapest settings for 2, 4 and 8 GPUs. With --ranks, they are for
    each rank. --json prints bytes, for the ranks that are given.
    """
    from surefoot.language.memory.planner import MemoryPlan, model_config, tables, to_json

    layout = checked_layout(ranks, sharding, ranks_per_machine, reshard, offload)
    config, nominal = model_config(model)
    workload = memory_workload(config, layout, **options)
    plan = MemoryPlan(model, workload, nominal)
    if as_json:
        echo_json(to_json(plan))
    else:
        print_tables(tables(plan))


def print_tables(tables: Iterable[Any]) -> None:
    """Print tables, each as soon as it is made."""
    from rich.console import Console

    console = Console(width=None if is_terminal(sys.stdout) else 120)
    for table in tables:
        console.print(table, "")


def checked_layout(
    ranks: int, sharding: Literal["none", "full", "hybrid"], ranks_per_machine: int, reshard: bool, offload: bool
) -> "Layout":
    """The layout that the options describe. Raises SurefootError for those that need several ranks, or sharded models."""
    from surefoot.language.memory.layout import Layout

    if sharding != "none" and ranks == 1:
        raise SurefootError(f"--sharding {sharding}: shares models among ranks, and there is one; add --ranks 8, for example")
    for flag, value in (("--offload", offload), ("--no-reshard-after-forward", not reshard)):
        if value and sharding == "none":
            raise SurefootError(f"{flag}: is for sharded models; add --sharding full, or leave it out")
    if sharding == "hybrid" and ranks > ranks_per_machine and ranks % ranks_per_machine:
        raise SurefootError(f"--ranks {ranks}: is not a multiple of --ranks-per-machine {ranks_per_machine}; change one")
    return Layout(ranks, None if sharding == "none" else sharding, ranks_per_machine, reshard, offload)


def memory_workload(
    config: Any,
    layout: "Layout",
    *,
    kind: "Kind",
    critic: Literal["shared", "own", "none"],
    reference: bool,
    rewards: int,
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
    adapter: int | None = None,
    quantize: Literal["int8", "nf4"] | None = None,
    optimizer: str = "adam",
) -> "Workload":
    """The models and batch sizes that the options describe, for a transformers config."""
    from surefoot.language.memory.workload import Workload, with_adapters
    from surefoot.recipes.models import AdapterSettings

    online = kind == "language"
    rows, responses = (prompts, prompts * samples) if online else (batch, batch)
    if rows < layout.ranks:
        raise SurefootError(f"--ranks {layout.ranks}: more than {rows} {'prompts' if online else 'rows'}; use fewer ranks")
    if online and minibatches > responses:
        raise SurefootError(f"--minibatches {minibatches}: more than the {responses} responses of an iteration; use fewer")
    check_low_bits(adapter, quantize, optimizer, layout)
    workload = Workload(
        kind=kind,
        policy=config,
        bf16=precision == "bfloat16",
        low_weights=precision == "bfloat16-weights",
        low_moments=optimizer == "adam-8bit",
        checkpointing=gradient_checkpointing,
        rows=responses // minibatches if online else batch,
        responses=responses,
        samples=samples if online else 1,
        prompt=prompt_tokens,
        response=0 if kind == "reward" else max_tokens,
        max_tokens=max_tokens,
        micro_batch=micro_batch,
        micro_batch_tokens=micro_batch_tokens,
        value="none" if not online else "head" if critic == "shared" else critic,
        reference=config if online and reference else None,
        rewards=(config,) * rewards if online else (),
        layout=layout,
    )
    return workload if adapter is None else with_adapters(workload, AdapterSettings(rank=adapter, quantize=quantize))


def check_low_bits(adapter: int | None, quantize: str | None, optimizer: str, layout: "Layout") -> None:
    """Raise SurefootError for weights or moments in few bits that nothing has, or that would be sharded."""
    if quantize is not None and adapter is None:
        raise SurefootError(f"--quantize {quantize}: is for the frozen base of adapters; add --adapter 16, for example")
    for flag, whole in (("quantize", quantize), ("optimizer", optimizer if optimizer == "adam-8bit" else None)):
        if whole is not None and layout.sharding is not None:
            raise SurefootError(f"--{flag} {whole}: is whole on every rank; leave out --sharding {layout.sharding}")
