"""Environment steps per second while learning, beside Stable-Baselines3: the same work, alternately, returns shown.

    python benchmarks/speed.py --python PEER/bin/python --rounds 3

Each round trains every setting once in each library, one torch thread each. What counts is the wall-clock time from the first
environment step to the last update, without the start of Python. Run it on a machine with nothing else to do; only the ratio
within a round means anything elsewhere.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent

WORK: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5, 1 x 2048": {"task": "HalfCheetah-v5", "environments": 1, "horizon": 2048, "setting": "paper"},
    "HalfCheetah-v5, 8 x 256": {"task": "HalfCheetah-v5", "environments": 8, "horizon": 256, "setting": "paper"},
    "CartPole-v1, 8 x 32": {"task": "CartPole-v1", "environments": 8, "horizon": 32, "setting": "cartpole"},
}


def surefoot_cell(work: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """One training by Surefoot in this process."""
    import time

    import torch  # the peer's script has imported it, too, when its clock starts

    import surefoot

    torch.set_num_threads(1)
    seen: list[float | None] = []

    def remember(metrics: dict[str, float | None]) -> None:
        seen.append(metrics["episode_return"])

    rollout = {"environments": work["environments"], "steps": work["horizon"]}
    begun = time.perf_counter()
    surefoot.train(
        work["task"], steps=steps, seed=seed, run_dir=None, rollout=rollout, evaluation={"episodes": 0}, callback=remember
    )
    return {"steps_per_second": steps / (time.perf_counter() - begun), "last_100_mean": seen[-1]}


def in_its_own_process(library: str, python: str, work: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """One training in a fresh Python, so that neither library warms the other's."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        if library == "surefoot":
            command = [sys.executable, __file__, "--cell", json.dumps({"work": work, "seed": seed, "steps": steps}), str(out)]
        else:
            command = [python, str(HERE / "peers" / "sb3.py"), "--seed", str(seed), "--steps", str(steps), "--out", str(out)]
            command += [part for name, value in work.items() for part in (f"--{name}", str(value))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def shown(score: float | None) -> str:
    """A return; no episode may have ended yet."""
    return "–" if score is None else f"{score:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python of the peer's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40_960)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        Path(args.cell[1]).write_text(json.dumps(surefoot_cell(**json.loads(args.cell[0]))))
        return
    print("| work | surefoot, steps/s | stable-baselines3, steps/s | ratio in each round | returns, surefoot | returns, peer |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, work in WORK.items():
        pairs = [
            [in_its_own_process(library, args.python, work, seed, args.steps) for library in ("surefoot", "stable-baselines3")]
            for seed in range(1, args.rounds + 1)
        ]
        speeds = np.array([[cell["steps_per_second"] for cell in pair] for pair in pairs])
        ratios = ", ".join(f"{ratio:.2f}" for ratio in speeds[:, 0] / speeds[:, 1])
        returns = [", ".join(shown(pair[side]["last_100_mean"]) for pair in pairs) for side in (0, 1)]
        ours, theirs = (f"{low:,.0f}–{high:,.0f}" for low, high in zip(speeds.min(0), speeds.max(0), strict=True))
        print(f"| {name} | {ours} | {theirs} | {ratios} | {' | '.join(returns)} |", flush=True)


if __name__ == "__main__":
    main()
