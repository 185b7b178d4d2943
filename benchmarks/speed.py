"""Environment steps per second while learning, compared with Stable-Baselines3: the same work, alternately, with returns.

    python benchmarks/speed.py --python PEER/bin/python --rounds 3

Each round trains every setting once with each engine of Surefoot and once with Stable-Baselines3, with one torch thread. The
time is wall-clock time from the first environment step to the last update, without Python's start-up. A compiled program is
made once per setting in advance, and its time is printed separately. Run it on an otherwise idle machine; elsewhere only the
ratios within a round are meaningful.
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


CONTESTANTS = ("eager", "compiled", "stable-baselines3")


def surefoot_cell(work: dict[str, Any], seed: int, steps: int, engine: str) -> dict[str, Any]:
    """Train once with Surefoot in this process."""
    import time

    import torch  # the other library's script has also imported torch when its clock starts

    import surefoot

    torch.set_num_threads(1)
    seen: list[float | None] = []

    def remember(metrics: dict[str, float | None]) -> None:
        seen.append(metrics["episode_return"])

    rollout = {"environments": work["environments"], "steps": work["horizon"]}
    started = time.perf_counter()
    surefoot.train(
        work["task"],
        steps=steps,
        seed=seed,
        run_dir=None,
        rollout=rollout,
        engine=engine,
        evaluation={"episodes": 0},
        callback=remember,
    )
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "steps_per_second": steps / seconds, "last_100_mean": seen[-1]}


def in_its_own_process(contestant: str, python: str, work: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """Train once in a fresh Python, so that neither library warms up the other's caches."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        if contestant != "stable-baselines3":
            cell = {"work": work, "seed": seed, "steps": steps, "engine": contestant}
            command = [sys.executable, __file__, "--cell", json.dumps(cell), str(out)]
        else:
            command = [python, str(HERE / "peers" / "sb3.py"), "--seed", str(seed), "--steps", str(steps), "--out", str(out)]
            command += [part for name, value in work.items() for part in (f"--{name}", str(value))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def shown(score: float | None) -> str:
    """A return, or a dash if no episode has ended yet."""
    return "–" if score is None else f"{score:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Python of the other library's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40_960)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        Path(args.cell[1]).write_text(json.dumps(surefoot_cell(**json.loads(args.cell[0]))))
        return
    print("| work | eager, steps/s | compiled, steps/s | peer, steps/s | eager : peer | compiled : peer | made in |", end="")
    print(" returns, eager | returns, compiled | returns, peer |")
    print("|---" * 10 + "|", flush=True)
    for name, work in WORK.items():
        made = in_its_own_process("compiled", args.python, work, 1, work["environments"] * work["horizon"])["seconds"]
        rounds = [
            [in_its_own_process(contestant, args.python, work, seed, args.steps) for contestant in CONTESTANTS]
            for seed in range(1, args.rounds + 1)
        ]
        speeds = np.array([[cell["steps_per_second"] for cell in cells] for cells in rounds])
        spans = [f"{low:,.0f}–{high:,.0f}" for low, high in zip(speeds.min(0), speeds.max(0), strict=True)]
        ratios = [", ".join(f"{ratio:.2f}" for ratio in speeds[:, side] / speeds[:, 2]) for side in (0, 1)]
        returns = [", ".join(shown(cells[side]["last_100_mean"]) for cells in rounds) for side in range(3)]
        print(f"| {' | '.join([name, *spans, *ratios, f'{made:.0f} s', *returns])} |", flush=True)


if __name__ == "__main__":
    main()
