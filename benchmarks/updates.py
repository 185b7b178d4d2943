"""CPU microseconds of one update and of one action, with the eager and the compiled engine in turn.

    python benchmarks/updates.py --rounds 5
    python benchmarks/updates.py --rounds 5 --algorithm TRPO
    python benchmarks/updates.py --rounds 5 --lstm 32

The time is the process's CPU time with one torch thread, so it means something beside other work too. An update is one
minibatch, with its share of what the learner does once per rollout; an action is one call of the policy for all environments.
A round is the update on one rollout, and 2,000 actions. The table has the smallest and the largest round. With an algorithm, it
has the CPU seconds of whole iterations instead: collecting and learning. With an LSTM of this width a minibatch is a quarter of
CartPole's environments.
"""

import argparse
import time
from typing import Any

import torch

from surefoot.compare.statistics import markdown_table
from surefoot.control.world import ControlWorld
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.recipes.presets import find_recipe
from surefoot.runs.factory import make_learner

WORK: dict[str, list[tuple[int, int]]] = {"HalfCheetah-v5": [(8, 256), (1, 2048)], "CartPole-v1": [(8, 32)]}
IN_SEQUENCES = {"CartPole-v1": [(8, 128), (32, 128), (64, 128)]}
"""work with an LSTM"""
ENGINES = ("eager", "compiled")
ACTIONS = 2_000


class Contestant:
    """A run of one engine."""

    def __init__(self, task: str, environments: int, steps: int, engine: str, changes: dict[str, Any]) -> None:
        shape = {"rollout": {"environments": environments, "steps": steps}, "engine": engine}
        self.recipe = find_recipe(task, shape | changes)
        self.world = ControlWorld(self.recipe)
        self.learner = make_learner(self.recipe, self.world.policy)
        self.state = LearnerState.seeded(1, 10_000_000)

    def update(self) -> float:
        """Microseconds of an update."""
        rollout = self.world.collector.collect(self.state)
        before, start = self.state.updates, time.process_time()
        self.learner.update(rollout, assign_credit(rollout, self.recipe.objective), self.state)
        return (time.process_time() - start) / (self.state.updates - before) * 1e6

    def iteration(self) -> tuple[float, float]:
        """Seconds of collecting, and of learning."""
        start = time.process_time()
        rollout = self.world.collector.collect(self.state)
        collected = time.process_time()
        self.learner.update(rollout, assign_credit(rollout, self.recipe.objective), self.state)
        return collected - start, time.process_time() - collected

    def action(self) -> float:
        """Microseconds of an action."""
        collector = self.world.collector
        act, seen = collector.actor(torch.Generator()), (collector.observations, collector.lstm_state, collector.starts)
        start = time.process_time()
        for _ in range(ACTIONS):
            act(*seen)
        return (time.process_time() - start) / ACTIONS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithm", help="such as TRPO: whole iterations")
    parser.add_argument("--lstm", type=int, metavar="WIDTH", help="width of an LSTM")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(updates(args.rounds, args.lstm) if args.algorithm is None else iterations(args.rounds, args.algorithm))


def updates(count: int, lstm: int | None) -> str:
    """The table of updates and actions."""
    rows, changes = [], {"network": {"lstm": lstm}, "objective": {"reuse": {"epochs": 10, "minibatches": 4}}}
    for task, shapes in (IN_SEQUENCES if lstm else WORK).items():
        for environments, steps in shapes:
            contestants = [Contestant(task, environments, steps, engine, changes if lstm else {}) for engine in ENGINES]
            for contestant in contestants:  # compile, or load
                contestant.update()
                contestant.action()
            rounds = [[x for each in contestants for x in (each.update(), each.action())] for _ in range(count)]
            spans = [f"{min(column):,.0f}–{max(column):,.0f}" for column in zip(*rounds, strict=True)]
            reuse = contestants[0].recipe.objective.reuse
            rows_per_update = environments * steps // (reuse.minibatches if reuse else 1)
            rows.append([f"{task}, {environments} x {steps}", str(rows_per_update), spans[0], spans[2], spans[1], spans[3]])
    header = ["work", "rows", "update, eager", "update, compiled", "action, eager", "action, compiled"]
    return markdown_table(header, rows)


def iterations(count: int, algorithm: str) -> str:
    """The table of an algorithm's iterations."""
    rows = []
    for task, shapes in WORK.items():
        for environments, steps in shapes:
            contestants = [Contestant(task, environments, steps, engine, {"algorithm": algorithm}) for engine in ENGINES]
            for contestant in contestants:  # compile, or load
                contestant.iteration()
            rounds = [[x for each in contestants for x in each.iteration()] for _ in range(count)]
            spans = [f"{min(column):.3f}–{max(column):.3f}" for column in zip(*rounds, strict=True)]
            rows.append([f"{task}, {environments} x {steps}", *spans])
    columns = [f"{part}, {engine}" for engine in ENGINES for part in ("collecting", "learning")]
    return markdown_table([f"{algorithm}, CPU s of an iteration", *columns], rows)


if __name__ == "__main__":
    main()
