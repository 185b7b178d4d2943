"""The time that fingerprints take of an iteration, each time with those of every iteration.

    python benchmarks/fingerprints.py --out table.md

Each row is one short run; its share is the time inside the fingerprints over the time since the end of the first iteration,
checkpoints and evaluations aside, so load on the machine weighs on both alike. Rows of text read a small model that the first
of them trains.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import surefoot
from surefoot.core import fingerprints
from surefoot.demos.language import SFT, write_data
from surefoot.runs import session

QUIET: dict[str, Any] = {"display": False, "traces": {"rows": 0}}
ADAPTER = {"adapter": {"rank": 8}}


class Counted(fingerprints.Fingerprints):
    """Those of the last run."""

    last: "Counted"

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(1, show)
        Counted.last = self


def measure(name: str, task: str, folder: Path, **fields: Any) -> str:
    """A row of the table."""
    surefoot.train(task, run_dir=folder, **QUIET, **fields)
    taken = Counted.last
    each = taken.seconds / taken.iterations
    return f"| {name} | {each / taken.share * 1e3:,.1f} ms | {each * 1e3:.2f} ms | {taken.share:.1%} |"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="rows whose name has this word")
    args = parser.parse_args()
    session.Fingerprints = Counted  # type: ignore[attr-defined]
    lines = ["| run | an iteration | fingerprints | share |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as root:
        place = Path(root)
        write_data(place / "data", 1)
        control = {"evaluation": {"every": 10_000_000}, "checkpoint": {"every": 10_000_000}}
        text = {**SFT, "evaluation": {"every": 100_000}, "checkpoint": {"every": 100_000}}
        text["data"] = {key: str(place / value) for key, value in SFT["data"].items()}
        online = {"data": {"train": str(place / "data/prompts.jsonl")}, "evaluation": {"every": 100_000}}
        online |= {"model": str(place / "sft"), "reward": {"terms": [{"function": "surefoot.language.tasks.reviews:gold"}]}}
        plain = {"critic": {"start": "none"}, "checkpoint": {"every": 100_000}}
        for name, task, fields in (
            ("demo of control, CartPole: 8 × 32 steps", "cartpole", {**control, "steps": 256 * 40, "engine": "eager"}),
            ("the same, compiled", "cartpole", {**control, "steps": 256 * 60, "engine": "compiled"}),
            ("HalfCheetah, compiled: 8 × 256", "mujoco", {**control, "steps": 2048 * 12, "engine": "compiled"}),
            ("4,096 tensor environments × 32", "tensor_cartpole", {**control, "steps": 131072 * 12, **WIDE}),
            ("demo of language, SFT", "reviews_sft", {**text, "steps": 16 * 20}),
            ("SFT with adapters, rank 8", "reviews_sft", {**text, **ADAPTER, "steps": 16 * 20, "model": str(place / "sft")}),
            ("demo of language, PPO of 64 responses", "reviews", {**online, **plain, "steps": 64 * 8}),
            ("PPO with adapters, rank 8", "reviews", {**online, **plain, **ADAPTER, "steps": 64 * 8}),
        ):
            if args.only not in name and not name.endswith("SFT"):  # whose model others start from
                continue
            folder = place / ("sft" if name.endswith("SFT") else f"run{len(lines)}")
            lines.append(measure(name, task, folder, **fields))
            print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


WIDE: dict[str, Any] = {"rollout": {"environments": 4096, "steps": 32}, "engine": "eager"}

if __name__ == "__main__":
    main()
