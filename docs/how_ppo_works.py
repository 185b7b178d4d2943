"""Write docs/how-ppo-works.html, a page about PPO that a reader plays with: no server, no network, no run needed.

    python docs/how_ppo_works.py               write the page (``docs/generate.py`` does it too)
    python docs/how_ppo_works.py record        first train, and record the episode of CartPole again
    python docs/how_ppo_works.py answer RUN    first record an answer of RUN, a PPO run of ``surefoot demo language``

Numbers come from the recorded episode and answer (docs/site/how), a recorded step of TRPO (docs/record_step.py), the memory
planner and benchmarks/results. The page's own arithmetic is JavaScript; a test compares it with ``surefoot.functional``.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import surefoot
from surefoot.inspector.clip_table import single_page
from surefoot.language.memory.planner import textbook
from surefoot.store.reading import traces_in

ROOT = Path(__file__).resolve().parent.parent
HOW = ROOT / "docs" / "site" / "how"
EPISODE, ANSWER, STEP = (HOW / f"{name}.json" for name in ("episode", "answer", "step"))
PAGE = ROOT / "docs" / "how-ppo-works.html"
RESULTS = ROOT / "benchmarks" / "results"
SEED, STEPS, ITERATION = 4, 8_192, 3
LENGTHS = range(18, 46)
"""steps or tokens of an episode that fits on the page"""
RUNGS = ("REINFORCE", "REINFORCE_BASELINE", "ACTOR_CRITIC", "A2C", "PPO_UNCLIPPED", "PPO_CLIP")
POINTS = 25
"""points of a curve on the page"""


# ---- the episode ------------------------------------------------------------------------------------------------------


def record() -> dict[str, Any]:
    """Train CartPole a little, and take a whole episode that ended with a fall from one traced iteration."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        surefoot.train(
            "CartPole-v1",
            "PPO_CLIP",
            steps=STEPS,
            seed=SEED,
            run_dir=run,
            rollout={"environments": 8, "steps": 128},
            objective={"reuse": {"epochs": 10, "minibatches": 4}, "normalise_advantages": "none"},
            evaluation={"episodes": 0},
            traces={"rows": 8, "every": 1},
            display=False,
        )
        trace = surefoot.read_trace(traces_in(run / "traces")[ITERATION])
        return numbers_of(trace, min(whole_episodes(trace), key=lambda row: len(row.rewards)))


def whole_episodes(trace: Any) -> list[Any]:
    """Traced rows that are a whole episode which ended with a fall."""
    return [row for row in trace.rows if bool(row.terminated[-1]) and row.about["step"] == 0 and len(row.rewards) in LENGTHS]


def numbers_of(trace: Any, row: Any) -> dict[str, Any]:
    """The numbers of an episode that the page's arithmetic starts from, as the run had them in float32."""

    about = f"CartPole-v1, PPO_CLIP, seed {SEED}, iteration {trace.iteration}. The pole falls after {len(row.rewards)} steps"
    return {
        "name": "CartPole",
        "about": f"{about}; each earns 1.",
        **shared_numbers(trace, row),
        "rewards": numbers(row.rewards),
    }


def numbers(x: Any) -> list[Any]:
    return [float(f"{value:.9g}") for value in x.tolist()]


def shared_numbers(trace: Any, row: Any) -> dict[str, Any]:
    """What control and text have alike."""
    return {
        "gamma": trace.gamma,
        "gae_lambda": trace.gae_lambda,
        "clip": trace.clip,
        "values": numbers(row.values),
        "next_values": numbers(row.next_values),
        "terminated": [bool(flag) for flag in row.terminated.tolist()],
        "old_log_probs": numbers(row.old_log_probs),
        "log_probs": [numbers(epoch) for epoch in row.visits.log_probs],
        "advantages": numbers(row.advantages),
    }


def record_answer(run: Path) -> dict[str, Any]:
    """The answer with the most clipped tokens in the later half of a run's traces, of those that ended and fit on the page."""
    traces = [surefoot.read_trace(file) for file in traces_in(run / "traces")]
    found = [
        (int((~row.visits.gradient_flows).sum()), trace, row)
        for trace in traces[len(traces) // 2 :]
        for row in trace.rows
        if len(row.rewards) in LENGTHS and bool(row.terminated[-1])
    ]
    _, trace, row = max(found, key=lambda each: each[0])
    score = float(row.reward_parts["score"].sum())
    about = (
        f"surefoot demo language, iteration {trace.iteration}. Prompt: “{row.about['prompt'].strip()}”. The learned reward "
        f"gives {score:.2f} to the whole answer, at its last token; every token pays β times its KL to the SFT model."
    )
    text = {
        "tokens": row.about["tokens"],
        "score": score,
        "beta": row.about["reference_beta"],
        "ref_log_probs": numbers(row.ref_log_probs),
    }
    return {"name": "an answer of a language model", "about": about, **shared_numbers(trace, row), **text}


# ---- results ----------------------------------------------------------------------------------------------------------


def results(experiment: str, prefix: str = "") -> list[dict[str, Any]]:
    """The finished cells of an experiment whose names begin alike."""
    rows = [json.loads(line) for line in (RESULTS / f"{experiment}.jsonl").read_text("utf-8").splitlines()]
    return [row for row in rows if row["cell"].startswith(prefix)]


def frontier() -> list[dict[str, Any]]:
    """KL, gold and proxy of every run of the reviews task that is finished, in groups by β, in the order of their mean KL.

    Runs are those of benchmarks/language.py, and of E3 of the ledger for a β that it alone has.
    """
    groups: dict[str, list[dict[str, float]]] = {}
    for result in results("language"):
        known = result["known_products"]
        free = result["without_anchor"]["known_products"]["trained"]
        for label, of in (("SFT", known["start"]), ("β = 0.3", known["trained"]), ("β = 0", free)):
            groups.setdefault(label, []).append(of)
    both = set(groups)
    for result in results("ledger/E3", "beta_"):
        label = f"β = {result['cell'].removeprefix('beta_').rpartition('-')[0]}"
        if label not in both:
            groups.setdefault(label, []).append(result["trained"])
    kept = ("kl", "gold", "reward")
    points = {
        label: [{name: max(0.0, of[name]) if name == "kl" else of[name] for name in kept} for of in found]
        for label, found in groups.items()
    }
    order = sorted(points, key=lambda label: sum(point["kl"] for point in points[label]) / len(points[label]))
    return [{"label": label, "points": points[label]} for label in order]


def ladder() -> dict[str, list[dict[str, Any]]]:
    """Mean and range over seeds of the curves of E7 that are finished, at the same steps for all seeds of a rung."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for task in ("CartPole", "Acrobot"):
        for number, name in enumerate(RUNGS):
            if curves := [result["curves"] for result in results("ledger/E7", f"{task}-{number}-")]:
                tasks.setdefault(task, []).append({"number": number, "name": name, "seeds": len(curves), **summary(curves)})
    return tasks


def summary(curves: list[dict[str, list[Any]]]) -> dict[str, list[float]]:
    """Mean, least and largest return of some curves at ``POINTS`` steps that all of them reach."""
    known = [[pair for pair in zip(of["steps"], of["return"], strict=True) if pair[1] is not None] for of in curves]
    first, last = max(pairs[0][0] for pairs in known), min(pairs[-1][0] for pairs in known)
    steps = np.linspace(first, last, POINTS)
    values = np.stack([np.interp(steps, *zip(*pairs, strict=True)) for pairs in known])
    parts = {"steps": steps, "mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return {name: [float(f"{value:.5g}") for value in part] for name, part in parts.items()}


# ---- the page ---------------------------------------------------------------------------------------------------------


def how_ppo_works_page() -> str:
    """The whole page."""
    data = {
        "episodes": [json.loads(file.read_text("utf-8")) for file in (EPISODE, ANSWER)],
        "step": json.loads(STEP.read_text("utf-8")),
        "roles": textbook(1),
        "frontier": frontier(),
        "ladder": ladder(),
    }
    return single_page("How PPO works", "how", data, ["style.css", "how.css"], HOW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["page", "record", "answer"], default="page")
    parser.add_argument("run", nargs="?", type=Path)
    options = parser.parse_args()
    if options.what == "record":
        EPISODE.write_text(json.dumps(record()) + "\n", "utf-8")
    if options.what == "answer":
        ANSWER.write_text(json.dumps(record_answer(options.run)) + "\n", "utf-8")
    PAGE.write_text(how_ppo_works_page(), "utf-8", newline="\n")


if __name__ == "__main__":
    main()
