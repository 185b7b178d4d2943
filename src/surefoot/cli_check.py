"""The doctor as a command: this machine, a recipe before it is run, a run."""

from pathlib import Path
from typing import Any

import click

from surefoot.cli_echo import echo, echo_json


@click.command()
@click.argument("what", required=False, metavar="[RECIPE|RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def check(ctx: click.Context, what: str | None, as_json: bool) -> None:
    """Check this machine; a RECIPE (name, .toml file or environment id) before it is run; or a RUN, for findings.

    Exit code 1 if something fails that the recipe needs, or if the run has a serious finding.
    """
    from surefoot.recipes import find_recipe, presets
    from surefoot.run.visible import visible

    if what is not None and Path(what).is_dir() and ((Path(what) / "config.toml").is_file() or what not in presets()):
        ctx.exit(_run(Path(what), as_json))
    from surefoot.checkup import check_machine, check_recipe, failed

    recipe = None if what is None else find_recipe(what)
    if recipe is None:
        checks = check_machine()
    else:
        checks = [*check_machine(recipe.device, recipe.engine == "compiled"), *check_recipe(recipe)]
    if as_json:
        echo_json({"checks": [each.to_json() for each in checks], "failed": failed(checks)})
    else:
        width = max(len(each.name) for each in checks)
        for each in checks:
            for line in each.lines(width):
                echo(visible(line))  # an error's text may hold line breaks of a model
    ctx.exit(int(failed(checks)))


def _run(folder: Path, as_json: bool) -> int:
    """Print a run's findings; the exit code."""
    from surefoot.compare.runs import read_run
    from surefoot.run.visible import visible

    run = read_run(folder)
    found = run.findings
    if as_json:
        table: dict[str, Any] = {"run": str(folder), "steps": run.steps}
        if run.changed:
            table["config_changed"] = list(run.changed)
        echo_json({**table, "findings": [finding.to_json() for finding in found]})
    elif not found:
        echo(f"{folder}: no findings in {len(run.rows):,} iterations, {run.steps:,} steps")
    else:
        echo("\n\n".join("\n".join(finding.text) for finding in found))
    if run.changed and not as_json:
        echo(f"config.toml was changed since the checkpoint: {'; '.join(map(visible, run.changed))}")
    return int(any(finding.severity == "serious" for finding in found))
