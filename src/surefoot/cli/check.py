"""Check this machine, a recipe or a run, and plan the memory of a training."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.options import (
    COUNT,
    IntRange,
    changes_from,
    complete_run,
    complete_task,
    json_option,
    option,
    reject_options,
    run_named,
)
from surefoot.cli.output import echo, echo_json
from surefoot.core.algorithms import MAX_COUNT
from surefoot.errors import SurefootError
from surefoot.terminal import is_terminal

if TYPE_CHECKING:
    from surefoot.language.memory.layout import Layout
    from surefoot.language.memory.workload import Workload


@click.command()
@click.argument("what", required=False, metavar="[RECIPE|RUN]", shell_complete=complete_task)
@option("--environment", metavar="TABLE", help="Arguments of the environment, as in a recipe.")
@json_option
@click.pass_context
def check(ctx: click.Context, what: str | None, environment: str | None, as_json: bool) -> None:
    """Check this machine, a RECIPE or a RUN.

    RECIPE is a preset, .toml file or environment (id or file); it is tried without training. RUN is searched for problems.

    Exits with 1 if a needed check fails, or if the run has a serious finding.
    """
    from surefoot.recipes.presets import find_recipe, presets
    from surefoot.terminal import visible

    what = what if what is None or what in presets() else run_named(what)
    if what is not None and Path(what).is_dir() and ((Path(what) / "config.toml").is_file() or what not in presets()):
        reject_options(("environment",), "is for a recipe")
        ctx.exit(check_run(Path(what), as_json))
    from surefoot.diagnostics.machine import check_machine
    from surefoot.diagnostics.recipe import check_recipe
    from surefoot.runs.factory import prepared_world
    from surefoot.store.finding import any_failed

    recipe = None if what is None else find_recipe(what, changes_from({"environment": environment}))
    if recipe is None:
        reject_options(("environment",), "is for a recipe")
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
    from surefoot.people.log import waits_for
    from surefoot.store.finding import any_failed
    from surefoot.terminal import visible

    check = diagnostics.check_run(folder)
    if not check.iterations:
        read_run(folder)  # raises the error: no row is written yet, or none is left
    waits = waits_for(folder)
    if as_json:
        table: dict[str, Any] = {"run": str(folder), "steps": check.steps, **({"waiting": waits} if waits else {})}
        if check.changed:
            table["config_changed"] = list(check.changed)
        echo_json({**table, "findings": [finding.to_json() for finding in check.findings]})
    elif not check.findings:
        echo(f"{folder}: {check.verdict}")
    else:
        echo("\n\n".join("\n".join(finding.text) for finding in check.findings))
    if check.changed and not as_json:
        echo(f"changed since the checkpoint: {'; '.join(map(visible, check.changed))}")
    if waits and not as_json:
        echo(waits)
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
def memory(model: str, as_json: bool, **options: Any) -> None:
    """Plan the memory of training MODEL.

    MODEL is a config.json, a folder, a run, a hub id, "pocket", or a size such as 7B. No weights are read.

    Prints the cheapest settings that fit on one GPU, the memory of policy, value, reference and reward models with these
    settings and with others, and last the cheapest settings for 2, 4 and 8 GPUs. With --ranks, they are for
    each rank. --json prints bytes, for the ranks that are given.
    """
    from rich.console import Console

    from surefoot.language.memory.planner import MemoryPlan, model_config, tables, to_json

    given = SimpleNamespace(**options)
    layout = checked_layout(given)
    config, nominal = model_config(model)
    plan = MemoryPlan(model, memory_workload(config, layout, given), nominal)
    if as_json:
        echo_json(to_json(plan))
        return
    console = Console(width=None if is_terminal(sys.stdout) else 120)
    for table in tables(plan):  # each as soon as it is made
        console.print(table, "")


def checked_layout(given: Any) -> "Layout":
    """The layout that the options describe. Raises SurefootError for those that need several ranks, or sharded models."""
    from surefoot.language.memory.layout import Layout

    sharding, ranks, per_machine = given.sharding, given.ranks, given.ranks_per_machine
    if sharding != "none" and ranks == 1:
        raise SurefootError(f"--sharding {sharding}: shares models among ranks, and there is one; add --ranks 8, for example")
    for flag, value in (("--offload", given.offload), ("--no-reshard-after-forward", not given.reshard)):
        if value and sharding == "none":
            raise SurefootError(f"{flag}: is for sharded models; add --sharding full, or leave it out")
    if sharding == "hybrid" and ranks > per_machine and ranks % per_machine:
        raise SurefootError(f"--ranks {ranks}: is not a multiple of --ranks-per-machine {per_machine}; change one")
    if given.quantize is not None and given.adapter is None:
        raise SurefootError(f"--quantize {given.quantize}: is for the frozen base of adapters; add --adapter 16, for example")
    low_bits = {"quantize": given.quantize, "optimizer": given.optimizer if given.optimizer == "adam-8bit" else None}
    for flag, whole in low_bits.items():
        if whole is not None and sharding != "none":
            raise SurefootError(f"--{flag} {whole}: is whole on every rank; leave out --sharding {sharding}")
    return Layout(ranks, None if sharding == "none" else sharding, per_machine, given.reshard, given.offload)


def memory_workload(config: Any, layout: "Layout", given: Any) -> "Workload":
    """The models and batch sizes that the options describe, for a transformers config."""
    from surefoot.language.memory.workload import Workload, with_adapters
    from surefoot.recipes.models import AdapterSettings

    online, samples = given.kind == "language", given.samples if given.kind == "language" else 1
    rows = given.prompts if online else given.batch
    responses = rows * samples
    if rows < layout.ranks:
        raise SurefootError(f"--ranks {layout.ranks}: more than {rows} {'prompts' if online else 'rows'}; use fewer ranks")
    if online and given.minibatches > responses:
        raise SurefootError(
            f"--minibatches {given.minibatches}: more than the {responses} responses of an iteration; use fewer"
        )
    workload = Workload(
        kind=given.kind,
        policy=config,
        bf16=given.precision == "bfloat16",
        low_weights=given.precision == "bfloat16-weights",
        low_moments=given.optimizer == "adam-8bit",
        checkpointing=given.gradient_checkpointing,
        rows=responses // given.minibatches if online else rows,
        responses=responses,
        samples=samples,
        prompt=given.prompt_tokens,
        response=0 if given.kind == "reward" else given.max_tokens,
        max_tokens=given.max_tokens,
        micro_batch=given.micro_batch,
        micro_batch_tokens=given.micro_batch_tokens,
        value="none" if not online else "head" if given.critic == "shared" else given.critic,
        reference=config if online and given.reference else None,
        rewards=(config,) * given.rewards if online else (),
        layout=layout,
    )
    adapter = given.adapter and AdapterSettings(rank=given.adapter, quantize=given.quantize)
    return workload if adapter is None else with_adapters(workload, adapter)
