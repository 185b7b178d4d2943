"""Everything on one GPU in under ten minutes, with a report. Not run on a GPU yet.

    python benchmarks/gpu/one.py                            on a machine with a GPU
    python benchmarks/gpu/one.py --device cpu --tiny        try the script

It trains control, SFT and PPO in float32 and bfloat16, resumes them, compares the first losses with those of the CPU, measures
tokens per second, waits for checkpoints and memory, and writes report.json and report.md into ``--out``. Exits with 1 if a step
failed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from steps import Settings, run_steps, steps_of


def arguments(description: str) -> argparse.Namespace:
    """The command line of both scripts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the runs and the report")
    parser.add_argument("--ranks", type=int, help="several.py: processes; default: one per GPU")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run only these steps")
    return parser.parse_args()


def main() -> None:
    """The command."""
    given = arguments(__doc__ or "")
    settings = Settings((given.out / "runs").absolute(), given.device, given.tiny)
    report = run_steps(
        "Surefoot on one GPU" if given.device == "cuda" else "Surefoot on a CPU", settings, steps_of(settings, given.only)
    )
    report.write(given.out)
    print(f"{given.out / 'report.md'}: {len(report.steps) - len(report.failed)} of {len(report.steps)} steps passed")
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
