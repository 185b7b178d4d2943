"""Time for `surefoot inspect` to show a long run: 100,000 iterations, and traces of a million steps.

    python benchmarks/inspector.py [--folder runs/long] [--times 3]

Needs the extras `inspector` and `dev`, and Chromium. The folder is made once: a short run of CartPole-v1 whose numbers are
repeated with noise. A browser with an empty page is already open when the command starts.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import surefoot
from surefoot.store.reading import traces_in
from surefoot.store.traces import read_trace, to_bytes

ITERATIONS, TRACES, ROWS, LENGTH, PASSES = 100_000, 20, 5, 10_000, 10
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def make(folder: Path) -> None:
    """Make a run of 100,000 iterations, with an evaluation every tenth, and 20 traces of 5 rows of 10,000 steps."""
    surefoot.train("CartPole-v1", steps=4_096, seed=1, run_dir=folder, display=None)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last: dict[str, Any] = {name: x for line in lines for name, x in line.items()}
    noise = np.random.default_rng(1).normal(1, 0.1, (ITERATIONS, len(last)))
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(ITERATIONS):
            row = {name: x * noise[i, j] if isinstance(x, float) else x for j, (name, x) in enumerate(last.items())}
            row |= {"iteration": i + 1, "steps": 256 * (i + 1)}
            if i % 10 < 9:
                del row["evaluation_return"]
            file.write(json.dumps(row) + "\n")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("steps = 4096\n", f"steps = {256 * ITERATIONS}\n", 1))
    trace = read_trace(traces_in(folder / "traces")[0])
    first = trace.rows[0]

    def grown(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        x = x if x.ndim == 1 else x[:PASSES]
        return x.repeat(*([1] * (x.ndim - 1)), LENGTH // x.shape[-1] + 1)[..., :LENGTH].contiguous()

    visits = replace(first.visits, **{name: grown(x) for name, x in vars(first.visits).items()})
    parts = {name: grown(x) for name, x in first.reward_parts.items()}
    long = {name: grown(x) for name, x in vars(first).items() if isinstance(x, torch.Tensor)}
    rows = [replace(first, **{**long, "row": i, "visits": visits, "reward_parts": parts}) for i in range(ROWS)]
    for k in range(TRACES):
        steps = 256 * ITERATIONS * (k + 1) // TRACES
        (folder / "traces" / f"{steps}.safetensors").write_bytes(to_bytes(replace(trace, steps=steps, rows=rows)))


def measure(folder: Path, browser: Any) -> dict[str, float]:
    """Seconds between events, and the page's work per frame while panning, in milliseconds."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    whole = f"#curves[data-iterations='{ITERATIONS}']"
    started = time.perf_counter()
    command = [sys.executable, "-u", "-m", "surefoot", "inspect", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            timings = {"address": time.perf_counter() - started}

            def timed(name: str, act: Any, awaited: str) -> None:
                start = time.perf_counter()
                act()
                page.wait_for_selector(awaited)
                timings[name] = time.perf_counter() - start

            timed("curves", lambda: page.goto(address), whole)
            timings["curves, from the command's start"] = time.perf_counter() - started
            timed("curves again", page.reload, whole)
            page.wait_for_timeout(3000)
            timed("steps", lambda: page.click("nav a[data-view=steps]"), "#audit[data-count]")
            timed("largest ratio of all", lambda: page.click("[data-find=ratio]"), "#hits li")
            page.click("nav a[data-view=curves]")
            page.wait_for_selector(".chart[data-metric=kl] canvas")
            page.wait_for_timeout(500)
            frames = panned(page)
            timings |= {"panning, ms in the median frame": frames[len(frames) // 2], "panning, ms in the worst": frames[-1]}
        finally:
            process.terminate()
    page.context.close()
    return timings


def panned(page: Any) -> list[float]:
    """Milliseconds of the main thread in each frame, in ascending order."""
    box = page.query_selector(".chart[data-metric=kl] .u-over").bounding_box()
    x, y = box["x"], box["y"] + 50
    page.mouse.move(x + 100, y)
    page.mouse.down()
    page.mouse.move(x + 300, y, steps=3)
    page.mouse.up()
    page.wait_for_timeout(800)
    page.evaluate("window.surefoot.frames = []")
    page.keyboard.down("Shift")
    page.mouse.move(x + 300, y)
    page.mouse.down()
    for i in range(60):
        page.mouse.move(x + 300 - 5 * i, y)
        page.wait_for_timeout(16)
    page.mouse.up()
    page.keyboard.up("Shift")
    frame_times: list[float] = sorted(page.evaluate("window.surefoot.frames"))
    return frame_times


def main() -> None:
    """Make the folder if it is missing, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/long"))
    parser.add_argument("--times", type=int, default=3)
    chosen = parser.parse_args()
    if not chosen.folder.exists():
        make(chosen.folder)
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=QUIET)
        browser.new_page().goto("data:text/html,ready")
        measurements = [measure(chosen.folder, browser) for _ in range(chosen.times)]
        browser.close()
    for name in measurements[0]:
        print(f"{name:36s} {'  '.join(f'{each[name]:6.2f}' for each in measurements)}")


if __name__ == "__main__":
    main()
