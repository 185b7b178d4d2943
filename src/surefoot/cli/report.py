"""What is made of runs that are there: a page of one or more, and a comparison."""

from pathlib import Path

import click

from surefoot.cli.echo import echo, echo_json
from surefoot.errors import SurefootError


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--out", type=click.Path(path_type=Path), help="The page; RUN/report.html, or report.html for several runs.")
@click.option(
    "--figures", type=click.Choice(["svg", "png"]), help="Write the curves as files too, in a folder beside the page."
)
def report(runs: tuple[Path, ...], out: Path | None, figures: str | None) -> None:
    """Write one page of HTML about RUN…: findings, curves, samples, recipe, environment, and how to do it again."""
    from surefoot.compare.report import write_figures, write_page
    from surefoot.compare.runs import read_run

    path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if path.is_dir():
        raise SurefootError(f"--out {path}: is a folder; name a file, such as {path / 'report.html'}")
    found = [read_run(run) for run in runs]
    write_page(found, path)
    echo(f"{path}, {path.stat().st_size / 1000:,.0f} kB")
    if figures is not None:
        folder = path.with_name(f"{path.stem}-figures")
        written = write_figures(found, folder, figures)
        echo(f"{len(written)} figures in {folder}/")


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN RUN...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Tell in what RUN RUN… differ and what came of it. Runs that differ in their seed alone are one group."""
    from surefoot.compare.report import comparison_text
    from surefoot.compare.runs import compare_runs, read_run

    if len(runs) < 2:
        raise SurefootError(f"compare {runs[0]}: one run is nothing to compare; name two or more")
    resolved = [run.resolve() for run in runs]
    for index, run in enumerate(runs):
        if resolved[index] in resolved[:index]:
            raise SurefootError(f"compare: {run} is named twice; name each run once")
    comparison = compare_runs([read_run(run) for run in runs])
    if as_json:
        echo_json(comparison.to_json())
    else:
        echo(comparison_text(comparison))
