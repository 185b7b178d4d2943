"""Everything on one GPU, with a report; docs/benchmarks/gpu.md has what was checked so far.

    python benchmarks/gpu/one.py                            on a machine with a GPU
    python benchmarks/gpu/one.py --device cpu --tiny        try the script

It trains every kind of run with each setting that concerns a GPU, resumes some of them, compares losses with those of the CPU
or of a plain run, measures updates of a larger model, and writes report.json and report.md into ``--out``, after every step.
Exits with 1 if a step failed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from features import features_of
from rates import rates_of
from steps import Settings, chosen, run_steps, steps_of

from surefoot.errors import SurefootError

LIMIT = 30 * 60
"""seconds after which no further step begins"""


def arguments(description: str) -> argparse.Namespace:
    """The command line of both scripts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the runs and the report")
    parser.add_argument("--ranks", type=int, help="several.py: processes; default: one per GPU")
    parser.add_argument("--share", action="store_true", help="several.py: all ranks on one GPU, with gloo")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run only these steps")
    return parser.parse_args()


def main() -> None:
    """The command."""
    given = arguments(__doc__ or "")
    settings = Settings((given.out / "runs").absolute(), given.device, given.tiny)
    steps = {**steps_of(settings), **features_of(settings), **rates_of(settings)}
    try:
        steps = chosen(steps, given.only)
    except SurefootError as error:
        print(f"one.py: {error}", file=sys.stderr)
        sys.exit(2)
    title = "Surefoot on one GPU" if given.device == "cuda" else "Surefoot on a CPU"
    report = run_steps(title, settings, steps, given.out, LIMIT)
    print(f"{given.out / 'report.md'}: {len(report.steps) - len(report.failed)} of {len(report.steps)} steps passed")
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
