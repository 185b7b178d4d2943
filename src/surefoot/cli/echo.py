"""The one way of commands to the terminal: names of folders, files and tasks may be a stranger's, and move no cursor."""

import sys
from typing import Any

import click

from surefoot.terminal import shown_on, visible_json


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text of one or more lines, in which nothing is a command to the terminal."""
    click.echo(shown_on(sys.stderr if err else sys.stdout, str(text)), err=err, nl=nl)


def echo_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    click.echo(shown_on(sys.stdout, visible_json(value)))
