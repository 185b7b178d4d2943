"""The ledger of claims about PPO: run the cells of its experiments, and write docs/ledger.md from the results.

    python benchmarks/ledger.py list                    the experiments, their claims and how many cells are finished
    python benchmarks/ledger.py run E7 --jobs 2         run the missing cells of one experiment
    python benchmarks/ledger.py run E7 --only CELL …    some of them
    python benchmarks/ledger.py repeat E7.5             run all cells of one claim again, in benchmarks/runs, and compare
    python benchmarks/ledger.py show E7                 print an experiment with its rules, tables, hardware and sources
    python benchmarks/ledger.py table                   write the page

A finished cell is skipped and an interrupted one continues, so repeat the command until all cells exist. Several commands may
run at once: a cell that another process works on is left to it. Each process uses one torch thread.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import filelock
from claims import (
    OUT_OF_REACH,
    RUNS,
    UNDECIDED,
    Cell,
    Claim,
    Experiment,
    Result,
    Verdict,
    ablation,
    algorithms,
    bounds_text,
    decided,
    ladder,
    peers,
    reviews,
    roles,
    sentences,
    sweeps,
    verifier,
)
from claims.scores import score_tables
from record import finished, made_with, write

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ledger.md"
BEGIN, END = "<!-- begin: benchmarks/ledger.py -->", "<!-- end -->"
MODULES = (sentences, verifier, roles, reviews, ladder, sweeps, algorithms, ablation, peers)
EXPERIMENTS: dict[str, Experiment] = {
    each.key: each
    for each in sorted((each for module in MODULES for each in module.EXPERIMENTS), key=lambda each: int(each.key[1:]))
}
CLAIMS = {claim.key: (experiment, claim) for experiment in EXPERIMENTS.values() for claim in experiment.claims}


# ---- cells ------------------------------------------------------------------------------------------------------------


def run_cell(experiment: Experiment, cell: Cell, runs: Path, *, wait: bool = False) -> None:
    """Run a cell in its folder inside ``runs``, after those that it reads, unless it is finished.

    A cell that another process works on is left to it, or waited for.
    """
    if finished(cell.file):
        return
    for patient in (False, True):  # all that nobody works on, then the others
        for each in cell.first:
            run_cell(experiment, each, runs, wait=patient)
    folder = runs / cell.file.parent.name / cell.file.name  # of the file, which experiments may share
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / ".cell.lock", timeout=-1 if wait else 0):
            if finished(cell.file):
                return
            started, before = cpu_seconds(), folder / ".cpu_seconds"  # of earlier attempts, which stopped
            spent = float(before.read_text()) if before.exists() else 0.0
            try:
                result = cell.work(folder)
            finally:
                spent += cpu_seconds() - started
                before.write_text(str(spent))
            spent = round(result.get("cpu_seconds") or spent, 1)
            write(cell.file, {**result, "cpu_seconds": spent, "made_with": made_with()})
            print(f"{experiment.key} {cell.name}: {spent:,.0f} s of CPU", flush=True)
    except filelock.Timeout:
        print(f"{experiment.key} {cell.name}: another process works on it", flush=True)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def run_cells(experiment: Experiment, names: Sequence[str], runs: Path) -> int:
    """Run the missing cells one after another; returns the number of those that failed."""
    import torch

    if unknown := [name for name in names if name not in experiment.cells]:
        reject(f"--only {unknown[0]}: {experiment.key} has no such cell; its cells are {', '.join(experiment.cells)}")
    torch.set_num_threads(1)
    failures = 0
    for name in names or experiment.cells:
        try:
            run_cell(experiment, experiment.cells[name], runs)
        except Exception as error:  # the other cells don't depend on it
            failures += 1
            print(f"{experiment.key} {name}: failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return failures


def reject(line: str) -> NoReturn:
    """End with one line, as for bad input everywhere: exit code 2."""
    print(line, file=sys.stderr)
    sys.exit(2)


def in_processes(jobs: int, words: Sequence[str]) -> int:
    """The same command in several processes, which share its cells; returns the largest exit code."""
    processes = [subprocess.Popen([sys.executable, __file__, *words]) for _ in range(jobs)]
    return max(process.wait() for process in processes)


def again(experiment: Experiment, claim: Claim) -> Experiment:
    """The experiment with only the cells of a claim, whose results go to a folder of their own."""
    folder = RUNS / "again" / claim.key / "results"
    cells = {name: replace(cell, file=folder / name) for name, cell in experiment.cells.items() if claim.needs(name)}
    return replace(experiment, cells=cells)


def repeat(key: str, jobs: int) -> int:
    """Run every cell of a claim again, and print its verdict and numbers beside those of the ledger."""
    experiment, claim = CLAIMS[key]
    if claim.out_of_reach:
        reject(f"{key}: can't be repeated here: {claim.out_of_reach}")
    fresh = again(experiment, claim)
    failures = in_processes(jobs, ["repeat", key]) if jobs > 1 else run_cells(fresh, [], RUNS / "again" / key)
    for label, which in (("ledger", experiment), ("again", fresh)):
        verdict = decided(claim, which, which.results())
        print(f"{key} {label + ':':8}{verdict.text}; {bounds_text(verdict.bounds)}", flush=True)
    return failures


# ---- page -------------------------------------------------------------------------------------------------------------


def entry(experiment: Experiment, claim: Claim, verdict: Verdict) -> Iterator[str]:
    """The section of one claim."""
    yield f"### {claim.key}: {claim.sentence}"
    why = why_text(claim, verdict)
    yield f"**{verdict.text[0].upper()}{verdict.text[1:]}.** {why}".rstrip()
    lines = [f"- Made in: {claim.source}", f"- Confirmed if: {claim.rule}"]
    if verdict.bounds:
        so_far = "Measured" if verdict.done == verdict.planned else "So far, which decides nothing"
        lines.append(f"- {so_far}: {bounds_text(verdict.bounds)}")
    yield "\n".join(lines)


def why_text(claim: Claim, verdict: Verdict) -> str:
    """One sentence why; nothing while cells are missing."""
    if verdict.word == OUT_OF_REACH:
        return claim.out_of_reach
    return claim.why.get(verdict.word, "") if verdict.done == verdict.planned else ""


def full(experiment: Experiment) -> str:
    """All of an experiment: protocol, hardware, claims with their rules, and tables."""
    results = experiment.results()
    parts = [f"## {experiment.key}: {experiment.title}", f"Protocol: {experiment.protocol}", made_text(experiment, results)]
    for claim in experiment.claims:
        parts += entry(experiment, claim, decided(claim, experiment, results))
    if tables := list(score_tables(experiment, results)):
        parts += [f"Scores of {experiment.key}, interquartile means over seeds with their intervals:", *tables]
    return "\n\n".join([*parts, *experiment.tables(results)])


def page() -> str:
    """Everything between the marks of the page: first one screen of verdicts, then each claim with its numbers."""
    by_verdict: dict[str, list[str]] = {word: [] for word in ("confirmed", "refuted", UNDECIDED, OUT_OF_REACH)}
    sections: list[str] = []
    open_claims: dict[str, list[str]] = {}
    for experiment in EXPERIMENTS.values():
        results = experiment.results()
        heading = f"{experiment.key}: {experiment.title}"
        rows = []
        for claim in experiment.claims:
            verdict = decided(claim, experiment, results)
            if verdict.word == UNDECIDED:
                open_claims.setdefault(heading, []).append(claim.key)
            by_verdict[verdict.word].append(f"- [{claim.key}](#{anchor(heading)}) {claim.sentence}")
            measured = re.sub("^[a-z]+ ", lambda first: first[0].capitalize(), bounds_text(verdict.bounds))
            parts = (measured and f"{measured}.", why_text(claim, verdict), f"*{claim.source}*")
            rows.append(f"- **{claim.key}, {verdict.text}: {claim.sentence}** {' '.join(part for part in parts if part)}")
        sections.append("\n\n".join([f"## {heading}", experiment.protocol, "\n".join(rows)]))
    undecided = [f"- [{heading}](#{anchor(heading)}): {', '.join(keys)}" for heading, keys in open_claims.items()]
    screen = {word: (len(each), undecided if word == UNDECIDED else each) for word, each in by_verdict.items() if each}
    lists = [f"## {word[0].upper()}{word[1:]}: {count}\n\n" + "\n".join(lines) for word, (count, lines) in screen.items()]
    return "\n\n".join([*lists, *sections])


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return "".join(c for c in heading.lower() if c.isalnum() or c in "-_ ").replace(" ", "-")


def made_text(experiment: Experiment, results: dict[str, Result]) -> str:
    """How many cells are finished, what they cost and where they ran."""
    planned, done = len(experiment.cells), len(results)
    spent = sum(cost(result) or 0 for result in results.values()) / 3600
    by_clock = sum(not result.get("cpu_seconds") and cost(result) is not None for result in results.values())
    clock = f", {by_clock} {'cell' if by_clock == 1 else 'cells'} by the clock" if by_clock else ""
    facts = [f"{done} of {planned} cells are finished ({spent:,.2f} core-hours{clock})"]
    if done < planned:
        facts.append(f"the others need about {hours_left(experiment, results):,.1f} core-hours")
    text = "; ".join(facts) + "."
    made = hardware([result["made_with"] for result in results.values() if "made_with" in result])
    older = sum("made_with" not in result for result in results.values())
    if older:
        made.append("1 older cell has no record" if older == 1 else f"{older} older cells have no record")
    if made:
        text += f" Made with {'; '.join(made)}."
    engines = sorted({result["engine"] for result in results.values() if result.get("engine")})
    if engines:
        text += f" Engine: {' and '.join(engines)}."
    return text


def hours_left(experiment: Experiment, results: dict[str, Result]) -> float:
    """An estimate for the missing cells: each as long as finished ones of its kind, or as planned."""
    seconds: dict[str, list[float]] = {}
    for name, result in results.items():
        if "seed" in result and (spent := cost(result)):  # only cells that train
            for kind in kinds(name):
                seconds.setdefault(kind, []).append(spent)
    hours = {kind: sum(each) / len(each) / 3600 for kind, each in seconds.items()}
    hours[""] = experiment.core_hours / len(experiment.cells)  # nothing alike is finished
    missing = (name for name in experiment.cells if name not in results)
    return sum(hours[next(kind for kind in kinds(name) if kind in hours)] for name in missing)


def kinds(name: str) -> tuple[str, ...]:
    """Names of cells that take about as long: those that differ in the seed, then those that begin alike, then "", all."""
    return name.rpartition("-")[0], name.partition("-")[0], ""


def cost(result: Result) -> float | None:
    """CPU seconds of a cell; those of the clock where it has no others."""
    spent: float | None = result.get("cpu_seconds") or result.get("seconds")
    return spent


def hardware(made: list[dict[str, Any]]) -> list[str]:
    """Hardware and versions of cells in words, each with the hashes of the source that ran there."""
    sources: dict[str, set[str]] = {}
    for each in made:
        threads = "1 thread" if each["threads"] == 1 else f"{each['threads']} threads"
        where = f"PyTorch {each['torch']} on {each['cpu']}, {threads}, Surefoot {each['version']}"
        sources.setdefault(where, set()).add(each["source"])
    return [f"{where} (source {', '.join(sorted(sources[where]))})" for where in sorted(sources)]


def write_page(path: Path = PAGE) -> None:
    """Write the generated part of the page."""
    text = path.read_text("utf-8")
    begin, end = text.index(BEGIN), text.index(END)
    path.write_text(f"{text[:begin]}{BEGIN}\n\n{page()}\n\n{text[end:]}", "utf-8")


def overview() -> str:
    """One line per claim."""
    lines = []
    for experiment in EXPERIMENTS.values():
        results = experiment.results()
        done = f"{len(results)} of {len(experiment.cells)} cells, {experiment.core_hours:g} core-hours in all"
        lines.append(f"{experiment.key:4} {experiment.title} ({done})")
        lines += [
            f"     {claim.key}: {claim.sentence}: {decided(claim, experiment, results).text}" for claim in experiment.claims
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run", help="run the missing cells of an experiment")
    running.add_argument("experiment", choices=EXPERIMENTS)
    running.add_argument("--only", nargs="+", default=[], metavar="CELL", help="some of its cells")
    repeating = verbs.add_parser("repeat", help="run all cells of one claim again, and compare")
    repeating.add_argument("claim", choices=CLAIMS)
    for each in (running, repeating):
        each.add_argument("--jobs", type=int, default=1, help="processes; at most one per core")
    verbs.add_parser("list", help="the experiments, claims and verdicts")
    showing = verbs.add_parser("show", help="print an experiment with its rules and tables")
    showing.add_argument("experiment", choices=EXPERIMENTS)
    verbs.add_parser("table", help="write docs/ledger.md")
    args = parser.parse_args()
    if args.verb == "run" and args.jobs > 1:
        failures = in_processes(args.jobs, ["run", args.experiment, *(["--only", *args.only] if args.only else [])])
    elif args.verb == "run":
        failures = run_cells(EXPERIMENTS[args.experiment], args.only, RUNS)
    elif args.verb == "repeat":
        failures = repeat(args.claim, args.jobs)
    elif args.verb == "show":
        failures = 0
        print(full(EXPERIMENTS[args.experiment]))
    else:
        failures = 0
        write_page() if args.verb == "table" else print(overview())
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
