"""Create a folder for a new task, or run a demo."""

import contextlib
import io
import re
import shlex
from importlib import import_module, resources
from pathlib import Path

import click

from surefoot.cli.options import PATH, option, seed_option
from surefoot.cli.output import display_for, echo
from surefoot.cli.ranks import launch_ranks, ranks_option
from surefoot.errors import SurefootError
from surefoot.files import writing

DEMOS = ("control", "language", "verifier", "people", "tools")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@click.command()
@click.argument("name", type=PATH)
@option("--language", is_flag=True, help="Create a reward for a language model instead of an environment.")
def new(name: Path, language: bool) -> None:
    """Create a folder NAME for a new task.

    The folder has a recipe, an environment or a reward, and tests that pass.
    """
    for path in write_task(name, language=language):
        echo(path)
    echo("Try next:")
    for line in (
        f"cd {shlex.quote(str(name))}",
        f"{'python -m pytest':<32} # run the tests (pip install pytest); keep them passing",
        f"{'surefoot check recipe.toml':<32} # check the recipe before training",
        "surefoot train recipe.toml",
    ):
        echo(f"  {line}")


def write_task(folder: Path, *, language: bool = False) -> list[Path]:
    """Write the files of a new task into a new folder; their paths.

    Raises SurefootError if the folder has files, or its name is not allowed.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", folder.name):
        raise SurefootError(f"name={folder.name!r}: must begin with a letter or digit and have only letters, digits, - and _")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SurefootError(f"{folder}: exists already and is not empty; choose another name")
    templates = resources.files("surefoot.cli") / "scaffold" / ("language" if language else "control")
    files = {file.name.removesuffix(".template"): file.read_text("utf-8") for file in templates.iterdir()}
    if language:
        from surefoot.language.data.rows import rows_text

        rows = [{"prompt": f"{letter}: ", "letter": letter} for letter in LETTERS]
        held_out = rows[4::6]
        files["prompts.jsonl"] = rows_text(row for row in rows if row not in held_out)
        files["held_out.jsonl"] = rows_text(held_out)
    with writing(folder, "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, "utf-8")
    return [folder / name for name in sorted(files)]


@click.command()
@click.argument("which", type=click.Choice(DEMOS), default="control", metavar=f"[{'|'.join(DEMOS)}]")
@option("--run-dir", type=PATH, default=Path("runs"), help="Folder of the demo's runs.")
@seed_option(1)
@option("--no-anchor", is_flag=True, help="Language: no KL penalty (β = 0), to see reward hacking.")
@option("--judge", type=click.Choice(("people", "gold")), help="People: who labels, you or a program. [default: people]")
@ranks_option
def demo(which: str, run_dir: Path, seed: int, no_anchor: bool, judge: str | None) -> None:
    """Run a demo of control, language, a verifier, labels of people or tools.

    control: PPO on CartPole-v1, one minute. language: SFT, a reward model and PPO on short reviews, five minutes. verifier:
    PPO and GRPO teach a model to sort, two minutes. people: you compare 60 reviews, and a reward model and PPO follow; five
    minutes of labels, and as many of training. Repeat the command to go on. tools: PPO and GRPO teach a model to call a
    calculator, seven minutes.
    """
    if no_anchor and which != "language":
        raise SurefootError("--no-anchor: is for the language demo; run: surefoot demo language --no-anchor")
    if judge is not None and which != "people":
        raise SurefootError(f"--judge {judge}: is for the people demo; run: surefoot demo people --judge {judge}")
    given = {"anchored": False} if no_anchor else {} if judge is None else {"judge": judge}
    if launch_ranks():
        return
    from surefoot.demos import run_demo
    from surefoot.ranks.collectives import rank

    module = import_module(f"surefoot.demos.{which}")
    with contextlib.redirect_stdout(io.StringIO()) if rank() else contextlib.nullcontext():  # the first rank prints
        run_demo(module.demo(**given), run_dir, seed, display_for)
