"""``surefoot demo language`` on several seeds, with and without the KL penalty, and the table of both.

    python benchmarks/language.py train --seeds 1 2 3 4 5     one seed after another; finished seeds are skipped
    python benchmarks/language.py table                       writes docs/benchmarks/language.md from the results

Without the KL penalty (β = 0) only the third stage is trained again, on the same data from the same SFT and reward model. Each
seed has one line of JSON; its runs are in benchmarks/runs/language/SEED.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from record import finished, read, write

from surefoot.compare.statistics import markdown_table
from surefoot.demos import in_folder
from surefoot.demos.language import PPO, UNANCHORED, evaluate_stages

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "language.md"
RESULTS = ROOT / "benchmarks" / "results" / "language"
RUNS = ROOT / "benchmarks" / "runs" / "language"
ROWS = {
    "reward": "proxy reward (learned)",
    "gold": "gold reward (the truth)",
    "kl": "KL to SFT, nats per response",
    "log_likelihood": "log π of demonstrations, per token",
}
OF = {"known_products": "known products", "other_products": "other products"}


def trained(seed: int) -> dict[str, Any]:
    """The demo's results for a seed, and those of the third stage without the KL penalty."""
    from surefoot import train

    folder = RUNS / str(seed) / "demo-language"
    if not (folder / "demo.json").exists():
        shutil.rmtree(RUNS / str(seed), ignore_errors=True)  # an interrupted demo starts over
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        demo = [sys.executable, "-m", "surefoot", "demo", "language"]
        subprocess.run([*demo, "--seed", str(seed), "--run-dir", str(RUNS / str(seed))], check=True)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        (folder / "seconds.json").write_text(json.dumps({"cpu_seconds": round(spent, 1)}))
    result = json.loads((folder / "demo.json").read_text())
    if (folder / "seconds.json").exists():
        result |= json.loads((folder / "seconds.json").read_text())
    hacked = folder / "hacked"
    if not (hacked / "finished.json").exists():
        shutil.rmtree(hacked, ignore_errors=True)
        train("reviews", seed=seed, run_dir=hacked, **in_folder({**PPO, **UNANCHORED}, folder))
    without = evaluate_stages(hacked, folder / "data")
    kept = {of: numbers(table) for of, table in without.items()}
    return {**result, **{of: numbers(result[of]) for of in OF}, "without_anchor": kept}


def numbers(table: dict[str, Any]) -> dict[str, Any]:
    """The measurements, without answers and file paths."""
    return {name: value for name, value in table.items() if name in ("start", "trained", "rows") or name.startswith("win_rate")}


def spread(values: list[float]) -> str:
    """Mean and range over seeds."""
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def tables() -> str:
    """A table over all seeds."""
    records = list(read(RESULTS).values())
    rows = []
    for of, of_label in OF.items():
        for name, label in ROWS.items():
            sft = [result[of]["start"][name] for result in records]
            ppo = [result[of]["trained"][name] for result in records]
            free = [result["without_anchor"][of]["trained"][name] for result in records]
            rows.append([f"{of_label}: {label}", spread(sft), spread(ppo), spread(free)])
        won = [result[of]["win_rate_gold"] for result in records]
        lost = [result["without_anchor"][of]["win_rate_gold"] for result in records]
        rows.append([f"{of_label}: better than SFT by gold", "", spread(won), spread(lost)])
    return markdown_table(["128 held-out prompts each", "SFT", "PPO, β = 0.3", "PPO, β = 0"], rows)


def with_part(page: str, text: str) -> str:
    """A page with other text between its marks."""
    begin, end = "<!-- begin: benchmarks/language.py -->\n", "\n<!-- end -->"
    return page[: page.index(begin) + len(begin)] + text + page[page.index(end) :]


def main() -> None:
    """Train seeds, or write the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    if args.what == "train":
        for seed in args.seeds:
            if not finished(RESULTS / str(seed)):
                write(RESULTS / str(seed), trained(seed))
        return
    PAGE.write_text(with_part(PAGE.read_text("utf-8"), tables()), "utf-8")


if __name__ == "__main__":
    main()
