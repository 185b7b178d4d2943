"""The commands that draw many responses to a prompt: pass@k in evaluate, and best-of-n."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.algorithms import MAX_COUNT
from surefoot.cli_echo import echo, echo_json
from surefoot.errors import SurefootError
from surefoot.seeding import MAX_SEED

if TYPE_CHECKING:
    from surefoot.language.attempts import Attempts


class Finite(click.FloatRange):
    """A number that is neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; click's own refusal else."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def attempt_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """What ``surefoot evaluate`` takes for several responses to each prompt."""
    for flag, options in reversed(
        (
            (
                "--samples",
                {"type": click.IntRange(1, MAX_COUNT), "help": "Online runs: so many attempts at each prompt, for pass@k."},
            ),
            ("--k", {"metavar": "1,4,8", "help": "Of pass@k; the powers of 2 up to --samples if not given."}),
            (
                "--threshold",
                {"type": Finite(), "help": "Reward from which on an attempt is right. [default: it must be 0 or 1]"},
            ),
            ("--after", {"metavar": "TEXT", "help": "For the vote, an answer is what follows the last TEXT. [default: all]"}),
        )
    ):
        command = click.option(flag, **options)(command)
    return command


def attempts_from(samples: int | None, k: str | None, threshold: float | None, after: str | None) -> "Attempts | None":
    """The flags as a value, None without ``--samples``."""
    if samples is None:
        for flag, value in (("--k", k), ("--threshold", threshold), ("--after", after)):
            if value is not None:
                raise SurefootError(f"{flag} {value}: is about several attempts at each prompt; add --samples N")
        return None
    from surefoot.language.attempts import Attempts, ks_from_text

    return Attempts(samples, () if k is None else ks_from_text(k), threshold, after or "")


def refuse_for_agents(attempts: dict[str, Any]) -> None:
    """Raise SurefootError for a flag about attempts where there is an agent to judge."""
    for name, value in attempts.items():
        if value is not None:
            raise SurefootError(f"--{name} {value}: is for online runs of language; an agent is judged by --episodes")


def rows_to(out: Path) -> str:
    """What is said behind the name of a file of rows, once they are written; SurefootError for one that can't be of rows."""
    if out.suffix != ".jsonl" or out.is_dir():
        raise SurefootError(f"--out {out}: rows are written as JSON lines; name a file that ends in .jsonl")
    return ", instead of those that were there" if out.exists() else ""


@click.command(name="best-of-n")
@click.argument("model")
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSONL or Parquet file, or a datasets folder.")
@click.option("--samples", type=click.IntRange(1, MAX_COUNT), required=True, help="n, responses to each prompt.")
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    required=True,
    metavar="TERM",
    help="A reward model's folder or run, module:function, or a term as in reward.terms; repeatable, they are added up.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSONL file.")
@click.option("--worst", is_flag=True, help="Pairs of the best and the worst, for reward models, instead of demonstrations.")
@click.option("--at-least", type=Finite(), metavar="R", help="Only where the best earns R or more.")
@click.option("--keep-cut", is_flag=True, help="Responses that --max-tokens cut may be chosen too.")
@click.option(
    "--max-tokens", type=click.IntRange(1, MAX_COUNT), default=64, show_default=True, help="As in sampling.max_tokens."
)
@click.option("--temperature", type=Finite(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--stop", multiple=True, help="Text that ends a response, besides EOS; repeatable.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=1, show_default=True)
@click.option("--batch", type=click.IntRange(1, MAX_COUNT), default=256, show_default=True, help="Responses at a time.")
@click.option("--device", default="cpu", show_default=True, help="Where the models compute.")
@click.option("--trust-remote-code", is_flag=True, help="Let a model's own code from the hub run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def best_of_n(
    model: str,
    prompts: Path,
    rewards: tuple[str, ...],
    out: Path,
    worst: bool,
    device: str,
    trust_remote_code: bool,
    as_json: bool,
    **drawing: Any,
) -> None:
    """Write the best of n responses of MODEL (run, checkpoint, folder or hub id) to each prompt, as rows to train on."""
    replaced = rows_to(out)
    if worst and drawing["samples"] < 2:
        raise SurefootError("--samples 1: the best and the worst of one response are the same; take 2 or more")
    if not all(drawing["stop"]):
        raise SurefootError("--stop '': is empty; name a text")
    from surefoot.language import best_of
    from surefoot.language.rows import write_rows
    from surefoot.language.trained import writer
    from surefoot.worlds import check_device

    check_device(device)
    reward = best_of.reward_from(rewards, device)
    language_model = writer(model, trust_remote_code)
    language_model.model.to(device)  # type: ignore[arg-type]
    out.parent.mkdir(parents=True, exist_ok=True)
    found = best_of.best_of_n(language_model, prompts, reward, best_of.Drawing(**drawing), worst=worst)
    write_rows(out, found.rows)
    if as_json:
        echo_json(found.to_json())
    else:
        echo("\n".join([*found.lines(), f"the rows are in {out}{replaced}"]))
