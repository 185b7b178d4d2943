"""The doctor as a command: this machine, a recipe before it is run, a run."""

import json
from pathlib import Path
from typing import Any

import click


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
        click.echo(json.dumps({"checks": [each.to_json() for each in checks], "failed": failed(checks)}))
    else:
        width = max(len(each.name) for each in checks)
        for each in checks:
            for line in each.lines(width):
                click.echo(visible(line))  # an error's text may hold what a model said
    ctx.exit(int(failed(checks)))


def _run(folder: Path, as_json: bool) -> int:
    """Print a run's findings; the exit code."""
    from surefoot.compare.runs import read_run

    run = read_run(folder)
    found = run.findings
    if as_json:
        table: dict[str, Any] = {"run": str(folder), "steps": run.steps}
        click.echo(json.dumps({**table, "findings": [finding.to_json() for finding in found]}, ensure_ascii=False))
    elif not found:
        click.echo(f"{folder}: no findings in {len(run.rows):,} iterations, {run.steps:,} steps")
    else:
        click.echo("\n\n".join("\n".join(finding.text) for finding in found))
    return int(any(finding.severity == "serious" for finding in found))
