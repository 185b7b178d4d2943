"""Everything on several GPUs of one machine in under ten minutes, with a report. Not run on several GPUs yet.

    python benchmarks/gpu/several.py                                  one rank per GPU, with NCCL
    python benchmarks/gpu/several.py --share --ranks 2                all ranks on one GPU, with gloo
    python benchmarks/gpu/several.py --device cpu --tiny --ranks 2    try the script, with gloo

The steps of ``one.py`` on all ranks, then sharded models: full, kept gathered, offloaded, hybrid, files in bfloat16; losses as
without sharding, exact resumption, memory beside the planner. Last, a rank is killed and the run restarts by itself. Writes
report.json and report.md into ``--out``; exits with 1 if a step failed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from one import arguments
from steps import LIMIT, Report, Settings, run_steps, steps_of

WAIT = 120
"""seconds for a run to reach its first checkpoint"""


def on_rank(out: Path, settings: Settings, only: list[str] | None, share: bool) -> None:
    """What every rank does. NCCL needs a GPU for each, so ranks that share one use gloo."""
    import torch

    from surefoot.ranks.collectives import rank, together
    from surefoot.ranks.launching import choose_gpu, join_ranks, leave_ranks, process_group

    if share:
        os.environ["LOCAL_RANK"] = "0"
    else:
        join_ranks()
    with process_group("gloo") if share else nullcontext():
        with together():
            choose_gpu(settings.device)
        report = run_steps("Surefoot on several ranks", settings, steps_of(settings, only))
        if rank() == 0:
            report.machine["backend"] = torch.distributed.get_backend()
            report.write(out)
    leave_ranks()


def killed(settings: Settings, ranks: int) -> dict[str, Any]:
    """Train from the command line, kill a rank after its first checkpoint; the run restarts and ends."""
    run = settings.folder / "killed"
    words = [sys.executable, "-m", "surefoot", "train", "CartPole-v1", "--run-dir", str(run), "--ranks", str(ranks)]
    words += ["--max-restarts", "2", "--quiet", "--device", settings.device, "--steps", "20_000", "--checkpoint-every", "2048"]
    process = subprocess.Popen(words)
    began = time.monotonic()
    while not any((run / "checkpoints").glob("[0-9]*")) and process.poll() is None:
        assert time.monotonic() - began < WAIT, "no checkpoint in time"
        time.sleep(0.1)
    os.kill(_rank_of(process.pid, ranks - 1), signal.SIGKILL)
    code = process.wait(timeout=2 * WAIT)
    assert code == 0, f"exit code {code} after a restart"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["steps"] >= 20_000, last["steps"]
    return {"seconds": time.monotonic() - began, "steps": last["steps"]}


def _rank_of(parent: int, number: int) -> int:
    """The process of a rank, among the children of a command."""
    for folder in Path("/proc").iterdir():
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if above == parent and f"RANK={number}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no rank {number}")


def main() -> None:
    """The command; each rank runs it again."""
    given = arguments(__doc__ or "")
    out = given.out.absolute()
    settings = Settings(out / "runs", given.device, given.tiny)
    if "RANK" in os.environ:
        on_rank(out, settings, given.only, given.share)
        return
    import torch

    ranks = given.ranks or torch.cuda.device_count()
    if ranks < 2:
        sys.exit("several.py: needs two GPUs, --share --ranks 2 with one, or --ranks N with --device cpu")
    began = time.monotonic()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*torchrun, __file__, *sys.argv[1:]], check=True)
    report = Report(**json.loads((out / "report.json").read_text()))
    if not given.share:
        kill_a_rank(report, settings, ranks, began)
    report.write(out)
    print(f"{out / 'report.md'}: {len(report.steps) - len(report.failed)} of {len(report.steps)} steps passed")
    sys.exit(1 if report.failed else 0)


def kill_a_rank(report: Report, settings: Settings, ranks: int, began: float) -> None:
    """Add the last step to the report."""
    step: dict[str, Any] = {"name": "a killed rank", "error": None, "seconds": 0.0, "numbers": {}}
    started = time.monotonic()
    if started - began < LIMIT:
        try:
            step["numbers"] = killed(settings, ranks)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            step["error"] = str(error)
    else:
        step["error"] = "not begun: out of time"
    step["seconds"] = time.monotonic() - started
    report.steps.append(step)


if __name__ == "__main__":
    main()
