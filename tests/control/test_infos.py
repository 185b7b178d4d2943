"""Numbers in ``info``: those of an episode's last step become metrics by name, with every backend."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import surefoot
from surefoot import PPO_CLIP, REINFORCE, SurefootError
from surefoot.control.collect.episodes import RECENT_EPISODES
from surefoot.control.environments.observations import mean_numbers, numbers_in
from surefoot.control.world import ControlWorld
from surefoot.core.algorithms import Objective
from surefoot.diagnostics.metrics import TIMING
from surefoot.store.metrics import read_metrics

from .scored import Scored
from .tiny import Endless, fresh_state, one_by_one, world_of

NAMES = ["energy", "is_success"]
MODES = ["looped", "SAME_STEP", "NEXT_STEP", "DISABLED"]


def made(mode: str, environments: list[Scored], algorithm: Objective = PPO_CLIP, **rollout: Any) -> ControlWorld:
    rollout = {"environments": len(environments), "steps": 20, "info": NAMES, **rollout}
    if mode == "looped":
        return world_of(one_by_one(environments), algorithm, rollout=rollout)
    makers: list[Callable[[], Any]] = [partial(next, iter([each])) for each in environments]

    def vector() -> SyncVectorEnv:
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode])

    return world_of(vector, algorithm, rollout=rollout)


@pytest.mark.parametrize("mode", MODES)
def test_metrics_are_the_means_over_the_recent_episodes_in_every_autoreset_mode(mode: str) -> None:
    environments = [Scored() for _ in range(3)]
    collector = made(mode, environments).collector
    for seed in range(12):
        metrics = collector.collect(fresh_state(seed)).metrics
        results = [row for each in environments for row in each.results]
        assert metrics["episodes"] == len(results)
        if len(results) <= RECENT_EPISODES:
            assert metrics["episode_is_success"] == pytest.approx(np.mean([success for success, _ in results]))
            assert metrics["episode_energy"] == pytest.approx(np.mean([energy for _, energy in results]))
    assert len(results) > RECENT_EPISODES


def test_whole_episodes_side_by_side_count_once_each() -> None:
    environments = [Scored() for _ in range(3)]
    metrics = made("looped", environments, REINFORCE, episodes=2).collector.collect(fresh_state()).metrics
    results = [success for each in environments for success, _ in each.results]
    assert len(results) == 6
    assert metrics["episode_is_success"] == pytest.approx(np.mean(results))


RUN: dict[str, Any] = {
    "seed": 3,
    "rollout": {"environments": 3, "steps": 16, "info": NAMES},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    "evaluation": {"episodes": 4, "every": 96},
    "checkpoint": {"every": 48},
    "traces": {"rows": 0},
}


def rows(run: Path) -> list[Any]:
    """Metrics without times, and what the episodes of the last checkpoint are."""
    return [{name: x for name, x in row.items() if name not in TIMING} for row in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("backend", [{}, {"backend": "workers", "workers": 2}], ids=["looped", "workers"])
def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(backend: dict[str, Any], tmp_path: Path) -> None:
    fields = {**RUN, "rollout": {**RUN["rollout"], **backend}}
    surefoot.train(Scored, run_dir=tmp_path / "whole", steps=288, **RUN)
    stops = iter([False, True])
    surefoot.train(Scored, run_dir=tmp_path / "parts", steps=288, callback=lambda row: next(stops), **fields)
    assert len(rows(tmp_path / "parts")) == 2
    surefoot.resume(tmp_path / "parts", task=Scored)
    whole = rows(tmp_path / "whole")
    assert rows(tmp_path / "parts") == whole
    assert len(whole) == 6
    assert all(0 <= row["episode_is_success"] <= 1 and row["episode_energy"] > 0 for row in whole)
    assert [row["steps"] for row in whole if "evaluation_is_success" in row] == [96, 192, 288]


def test_evaluations_have_the_means_over_their_own_episodes() -> None:
    waiting: list[Scored] = []

    def task() -> Scored:
        waiting.append(Scored())
        return waiting[-1]

    agent = surefoot.train(task, steps=48, **{**RUN, "evaluation": {"episodes": 0}})
    waiting.clear()
    result = surefoot.evaluate(agent, task, episodes=7)
    played = [row for each in waiting for row in each.results]
    assert len(played) == 7
    assert result.info == {
        "energy": pytest.approx(np.mean([energy for _, energy in played])),
        "is_success": pytest.approx(np.mean([success for success, _ in played])),
    }
    assert json.loads(json.dumps(result.to_json()))["info"] == result.info


def test_without_names_successes_are_metrics_and_other_numbers_are_not() -> None:
    metrics = made("looped", [Scored()], info="none").collector.collect(fresh_state()).metrics
    assert metrics["episode_is_success"] is not None
    assert "episode_energy" not in metrics
    assert "episode_success" not in metrics
    assert "episode_is_success" not in world_of("CartPole-v1").collector.collect(fresh_state()).metrics
    assert "episode_is_success" not in made("looped", [Scored()], info=[]).collector.collect(fresh_state()).metrics


def test_a_named_number_is_null_before_the_first_episode_ends() -> None:
    fields = {"environments": 1, "steps": 4, "info": ["energy"]}
    assert world_of(Endless, rollout=fields).collector.collect(fresh_state()).metrics["episode_energy"] is None


@pytest.mark.parametrize("mode", MODES)
def test_a_name_that_the_last_info_has_no_number_for_is_rejected_with_those_that_are_there(mode: str) -> None:
    with pytest.raises(SurefootError, match=r"rollout.info=\['enrgy'\]: .* no number 'enrgy' .*; did you mean 'energy'\?"):
        made(mode, [Scored(), Scored()], info=["enrgy"]).collector.collect(fresh_state())
    with pytest.raises(SurefootError, match=r"'name' in the info .*numbers there: 'is_success', 'energy', 'count'"):
        made(mode, [Scored(), Scored()], info=["name"]).collector.collect(fresh_state())


def test_numbers_are_scalars_of_python_and_numpy() -> None:
    info = {"a": True, "b": 2, "c": np.float32(0.5), "d": np.array(3), "e": "4", "f": None, "g": [1], "h": np.ones(1), "i": 1j}
    assert numbers_in(info) == {"a": 1.0, "b": 2.0, "c": 0.5, "d": 3.0}
    assert numbers_in({"a": 10**400, "b": np.datetime64("2026-01-01")}) == {}
    assert numbers_in(None) == {}


def test_a_mean_that_is_not_finite_is_null() -> None:
    assert mean_numbers([{"x": 1.0}, {"x": np.inf}], ["x", "y"]) == {"x": None, "y": None}
    assert mean_numbers([{"x": 1e308}, {"x": 1e308}], ["x"])["x"] in (None, 1e308)
    assert mean_numbers([{"x": 1.0}, {}], ["x"]) == {"x": 1.0}
