"""CPU seconds of the parts of one short command: imports, flags, start, collecting, learning, evaluation, files, the end.

    python benchmarks/short.py --rounds 5
    python benchmarks/short.py --rounds 5 --engine eager

A round is one ``surefoot train`` in a fresh process, whose own CPU clock (all threads) is read where one part ends and the next
begins. What the process takes after that is its end. A first round is not counted: it may compile programs. The table has
the smallest and the largest of the others. Python's caches of compiled modules are used, as in an installed package.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

PARTS = {
    "torch": "import PyTorch",
    "imports": "import Surefoot, its packages, the environment's",
    "flags": "describe the flags, read the line",
    "start": "make environments and network, open the run's folder",
    "collecting": "collecting",
    "learning": "learning",
    "evaluation": "evaluation",
    "files": "rest of the run: metrics, traces, checkpoints, display",
    "end": "the end of the process",
    "whole": "whole command",
}
TASK = ["HalfCheetah-v5", "--steps", "8192", "--rollout.environments", "8", "--rollout.steps", "256"]


class Clock:
    """The process's CPU seconds by part. A part inside another is not counted in it."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.open: list[str] = []
        self.last = 0.0

    def mark(self) -> None:
        """Count what passed since the last mark to the part that is open."""
        now = time.process_time()
        if self.open:
            self.spent[self.open[-1]] += now - self.last
        self.last = now

    def during(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted to a part."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.mark()
            self.open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.mark()
                self.open.pop()

        return counted

    def method(self, part: str, owner: Any, name: str) -> None:
        """Count a method, or a module's function, to a part."""
        setattr(owner, name, self.during(part, getattr(owner, name)))


def measured(path: str, words: list[str]) -> None:
    """Run the command in this process and write what each part took, without the end, which the parent measures."""
    clock = Clock()

    def run() -> None:
        import surefoot.cli.main
        from surefoot.cli import lasting_imports

        def imports() -> None:
            with lasting_imports():
                clock.during("torch", lambda: __import__("torch"))()

        clock.during("imports", imports)()
        from surefoot.control.collect import ControlCollector
        from surefoot.core.learner import Learner
        from surefoot.runs import api
        from surefoot.runs.session import Session

        clock.method("start", api, "start")
        clock.method("files", Session, "_train")
        clock.method("collecting", ControlCollector, "collect")
        clock.method("learning", Learner, "update")
        clock.method("evaluation", Session, "_evaluate")
        sys.argv = ["surefoot", "train", *words]
        try:
            clock.during("flags", surefoot.cli.main.main)()
        except SystemExit as leaving:
            if leaving.code:
                raise

    clock.open = ["imports"]
    run()
    clock.mark()
    with open(path, "w") as file:
        json.dump(clock.spent, file)


def round_of(words: list[str]) -> dict[str, float]:
    """One command's parts."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "parts.json")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, __file__, "--child", path, *words, "--run-dir", os.path.join(folder, "run")]
        cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {**cached, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        with open(path) as file:
            parts: dict[str, float] = json.load(file)
    parts["whole"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    parts["end"] = parts["whole"] - sum(seconds for part, seconds in parts.items() if part not in ("end", "whole"))
    return parts


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        measured(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="compiled")
    args = parser.parse_args()
    words = [*TASK, "--engine", args.engine]
    rounds = [round_of(words) for _ in range(args.rounds + 1)][1:]
    print("| part | CPU s |\n|---|---:|")
    for part, name in PARTS.items():
        column = [each[part] for each in rounds]
        print(f"| {name} | {min(column):.2f}–{max(column):.2f} |")


if __name__ == "__main__":
    main()
