"""``surefoot demo tools``: SFT on a teacher who often guesses, then PPO and GRPO, which learn to call a tool.

Every stage is an ordinary run from files that stay in the folder, so you can repeat each by hand.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.demos import Demo, command_here
from surefoot.demos.verifier import attempts_at, sft_then_online
from surefoot.errors import require_package
from surefoot.language import tasks
from surefoot.language.data.rows import write_rows
from surefoot.terminal import visible

TASK = "calculator"
GROUPS = {"algorithm": "GRPO", "sampling": {"prompts": 16, "samples": 8}}


def demo(demonstrations: int = 16_000, problems: int = 4_096) -> Demo:
    """SFT, then PPO and GRPO from there. Raises SurefootError without ``transformers``."""
    require_package("transformers", "language", "demo tools")  # before anything is written
    lines = (
        "1/3 SFT: a small model sees a teacher who calls multiply, or guesses the result.",
        "2/3 PPO: right answers earn 1; a critic estimates the expected reward.",
        "3/3 GRPO: the same without a critic; 8 conversations about the same problem are compared.",
    )
    write = partial(write_data, demonstrations=demonstrations, problems=problems)
    stages = sft_then_online(("calculator_sft", "calculator"), lines, (demonstrations, problems), write, GROUPS)
    return Demo("demo-tools", stages, report)


def write_data(folder: Path, seed: int, demonstrations: int, problems: int) -> None:
    """Write demonstrations, and problems for training, validation and a test."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "demonstrations.jsonl", tasks.demonstrations(TASK, demonstrations, seed, sloppy=0.5))
    write_rows(folder / "problems.jsonl", tasks.rows(TASK, problems, seed + 1))
    held_out = tasks.rows(TASK, 384, seed, test=True)
    write_rows(folder / "validation.jsonl", held_out[:128])
    write_rows(folder / "test.jsonl", held_out[128:])


def report(folder: Path, seed: int, started: float) -> dict[str, Any]:
    """Print how often SFT, PPO and GRPO are right, some conversations, and what to try next."""
    from surefoot.store.metrics import read_metrics

    test, results, calls = folder / "data" / "test.jsonl", dict[str, Any](), dict[str, float]()
    for name in ("ppo", "grpo"):
        attempts = attempts_at(folder / name, test)
        results |= {"SFT": attempts["start"], name.upper(): attempts["trained"]}
        rows = [row["tool_calls"] for row in read_metrics(folder / name / "metrics.jsonl")]
        calls |= {"SFT": rows[0], name.upper(): rows[-1]}
    print(f"\n{'256 other problems':22}" + "".join(f"{name:>8}" for name in results))
    for line, label in (("greedy_accuracy", "greedy accuracy"), ("sampled_accuracy", "sampled accuracy")):
        print(f"{label:22}" + "".join(f"{of[line]:>8.1%}" for of in results.values()))
    print(f"{'calls (training)':22}" + "".join(f"{calls[name]:>8.2f}" for name in results))
    print(f"{time.monotonic() - started:.0f} s in total; the runs are in {visible(str(folder))}/\n")
    here, ppo = command_here(), visible(str(folder / "ppo"))
    print("Try next:")
    print(f"  {here} generate {ppo} --prompt 'a=347,b=862' --samples 3       # with its calls and their results")
    print(f"  {here} inspect {ppo}       # every token and its arithmetic, in a browser")
    return {"seconds": time.monotonic() - started, "tool_calls": calls, **results}
