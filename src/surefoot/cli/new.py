"""The first files of a task of one's own."""

import shlex
from pathlib import Path

import click

from surefoot.cli.echo import echo


@click.command()
@click.argument("name", type=click.Path(path_type=Path))
@click.option("--language", is_flag=True, help="A reward for a language model, instead of an environment.")
def new(name: Path, language: bool) -> None:
    """Begin a task in a new folder NAME: a recipe, an environment (or a reward) and a test that pass as they are."""
    from surefoot.cli.scaffold import write_scaffold

    for path in write_scaffold(name, language=language):
        echo(path)
    echo("Try next:")
    for line in (
        f"cd {shlex.quote(str(name))}",
        f"{'python -m pytest':<32} # the tests pass (pip install pytest); keep them so",
        f"{'surefoot check recipe.toml':<32} # what stands between you and a run",
        "surefoot train recipe.toml",
    ):
        echo(f"  {line}")
