"""``surefoot merge``: an adapter and its base as one model."""

from pathlib import Path

import click

from surefoot.cli.progress import tell
from surefoot.errors import SurefootError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write; an older model is replaced.")
@click.option("--trust-remote-code", is_flag=True, help="Let a model's own code from the hub run.")
def merge(run: Path, out: Path, trust_remote_code: bool) -> None:
    """Write the model of RUN, or of one of its checkpoints, as one folder for transformers: an adapter merged into its base.

    A run with an [adapter] leaves such a folder when it ends, unless adapter.merge = false. Of a run, the best checkpoint
    is taken, else the last.
    """
    from surefoot.language.models.language_model import LanguageModel
    from surefoot.language.models.reward_model import RewardModel
    from surefoot.runs.api import load

    found = load(run, trust_remote_code=trust_remote_code)
    if not isinstance(found, LanguageModel | RewardModel):
        raise SurefootError(f"{run}: holds an agent of control, which has no adapter; see surefoot export")
    found.save(out)
    tell(f"the model is in {out}")
