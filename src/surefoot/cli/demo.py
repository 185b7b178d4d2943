"""``surefoot demo``: which one, and its flags."""

from pathlib import Path

import click

from surefoot.cli.progress import display_for
from surefoot.core.seeding import MAX_SEED
from surefoot.errors import SurefootError

DEMOS = ("control", "language", "verifier")


@click.command()
@click.argument("which", type=click.Choice(DEMOS), default="control", metavar=f"[{'|'.join(DEMOS)}]")
@click.option("--run-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=1, show_default=True)
@click.option("--no-anchor", is_flag=True, help="Language: β = 0, to see the reward being hacked.")
def demo(which: str, run_dir: Path, seed: int, no_anchor: bool) -> None:
    """Learn while you watch: PPO on CartPole-v1 in a minute; a language model by SFT, reward model and PPO in five; or one that
    learns to sort from a verifier, by PPO and by GRPO, in two.
    """
    if no_anchor and which != "language":
        raise SurefootError("--no-anchor: is for the demo of language; run: surefoot demo language --no-anchor")
    if which == "language":
        from surefoot.demos.reviews import language_demo

        language_demo(run_dir, seed, display_for, anchored=not no_anchor)
    elif which == "verifier":
        from surefoot.demos.sorting import verifier_demo

        verifier_demo(run_dir, seed, display_for)
    else:
        from surefoot.demos.cartpole import control_demo

        control_demo(run_dir, seed, display_for)
