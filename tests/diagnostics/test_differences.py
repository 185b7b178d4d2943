"""Planted differences between two runs: ``diff`` names the iteration, the stage and the cause of each."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import surefoot
from surefoot.cli.main import cli
from surefoot.core import fingerprints, learner, rollout, steps
from surefoot.core.steps.eager import EagerPasses
from surefoot.diagnostics.differences import compare_runs, named, partings
from surefoot.store import folder
from surefoot.store.metrics import read_fingerprints
from surefoot.store.reading import FINGERPRINTS

FIELDS: dict[str, Any] = {
    "algorithm": "PPO_CLIP",
    "preset": "none",
    "steps": 192,
    "seed": 1,
    "engine": "eager",
    "display": False,
    "rollout": {"environments": 4, "steps": 16},
    "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
    "network": {"hidden": [8]},
    "evaluation": {"every": 192, "episodes": 1},
    "traces": {"rows": 0},
}
"""three iterations of 64 steps"""
TASK = """
import gymnasium

class Task(gymnasium.Wrapper):
    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward, *rest

def make(bonus=0.0):
    return Task(gymnasium.make("CartPole-v1"))
"""


def train(path: Path, change: dict[str, Any] | None = None, task: str = "CartPole-v1", callback: Any = None) -> Path:
    fields = {**FIELDS}
    for name, value in (change or {}).items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) and name in fields else value
    surefoot.train(task, run_dir=path, callbacks=callback, **fields)
    return path


@pytest.fixture(scope="module", autouse=True)
def of_every_iteration() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "SHARE", 1e9)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("differences") / "a")


Field = tuple[dict[str, Any], str, str]
RECIPES: dict[str, Field] = {
    "seed": ({"seed": 2}, "weights", "seed: 1 -> 2"),
    "width": ({"network": {"hidden": [9]}}, "weights", "network.hidden: [8] -> [9]"),
    "environments": ({"rollout": {"environments": 2, "steps": 32}}, "inputs", "rollout.environments: 4 -> 2"),
    "normalised rewards": ({"normalise": {"rewards": True}}, "rewards", "normalise.rewards"),
    "gamma": ({"objective": {"gamma": 0.9}}, "advantages", "objective.gamma"),
    "minibatches": ({"objective": {"reuse": {"epochs": 2, "minibatches": 4}}}, "gradient", "minibatches: 2 -> 4"),
    "entropy bonus": ({"objective": {"entropy_coefficient": 0.1}}, "gradient", "entropy_coefficient"),
    "learning rate": ({"optimizer": {"learning_rate": 2.9e-4}}, "updated", "learning_rate: 0.0003 -> 0.00029"),
    "critic's rate": ({"optimizer": {"critic_learning_rate": 1e-3}}, "updated", "critic_learning_rate: none -> 0.001"),
    "schedule": ({"optimizer": {"schedule": "linear"}}, "updated", "optimizer.schedule"),
}


@pytest.mark.parametrize("plant", RECIPES)
def test_a_field_of_the_recipe_is_the_cause_from_the_stage_that_reads_it(plant: str, whole: Path, tmp_path: Path) -> None:
    change, stage, cause = RECIPES[plant]
    found = compare_runs(whole, train(tmp_path / "b", change))
    assert found.first is not None
    first = 2 if plant in ("schedule", "normalised rewards") else 1  # the first has no statistics
    assert (found.first.iteration, found.first.stage) == (first, stage)
    assert any(cause in line for line in found.causes), found.lines
    assert len(found.causes) <= 2, "nothing else is blamed"


def once(function: Callable[..., Any], at: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function, whose result ``at`` a call is another."""
    calls = iter(range(10**6))

    def changed(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        return change(result) if next(calls) == at else result

    return changed


def with_first(x: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(x, dict):
        return {name: with_first(part, change) for name, part in x.items()}
    x = x.clone()
    x.view(-1)[0] = change(x.view(-1)[0])
    return x


def in_rollout(field: str, change: Callable[[torch.Tensor], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Another first element of a field of the second rollout."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original, calls = learner.Learner.update, iter(range(10))

        def update(self: Any, collected: rollout.Rollout, *rest: Any) -> Any:
            if next(calls) == 1:
                collected = replace(collected, **{field: with_first(getattr(collected, field), change)})
            return original(self, collected, *rest)

        patch.setattr(learner.Learner, "update", update)

    return plant


def in_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps, "random_order", once(steps.random_order, 2, lambda order: order.flip(0)))


def in_gradient(patch: pytest.MonkeyPatch) -> None:
    original, calls = EagerPasses.add, iter(range(100))

    def add(self: EagerPasses, *arguments: Any) -> Any:
        sums = original(self, *arguments)
        if next(calls) == 4:  # the first step of the second iteration
            next(iter(self.policy.parameters())).grad.view(-1)[0] += 1e-6  # type: ignore[union-attr]
        return sums

    patch.setattr(EagerPasses, "add", add)


CODE: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "one observation": (in_rollout("inputs", lambda x: x + 1e-6), "inputs"),
    "one action": (in_rollout("actions", lambda x: 1 - x), "actions"),
    "one log-probability": (in_rollout("old_log_probs", lambda x: x + 1e-6), "log_probs"),
    "one reward": (in_rollout("rewards", lambda x: x + 1e-6), "rewards"),
    "the order of rows": (in_order, "order"),
    "the gradient": (in_gradient, "gradient"),
}


@pytest.mark.parametrize("plant", CODE)
def test_a_number_that_no_record_explains_is_located_and_its_stage_named(
    plant: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, stage = CODE[plant]
    change(monkeypatch)
    found = compare_runs(whole, train(tmp_path / "b"))
    assert found.first is not None
    assert (found.first.iteration, found.first.stage) == (2, stage)
    assert (found.causes, found.before) == ([], 1)
    assert found.lines[1].startswith("no cause is recorded; look at")


def test_a_callback_that_moves_a_weight_is_seen_before_the_next_update(whole: Path, tmp_path: Path) -> None:
    class Moves(surefoot.Callback):
        def on_iteration(self, run: Any, metrics: Any) -> None:
            if run.state.iteration == 1:
                with torch.no_grad():
                    next(run.agent.policy.parameters()).view(-1)[0].add_(1e-3)

    found = compare_runs(whole, train(tmp_path / "b", callback=Moves()))
    assert found.first is not None
    assert (found.first.iteration, found.first.stage) == (2, "weights")
    assert found.lines[1].endswith("another start, a callback, or an iteration without fingerprints")


def test_changed_code_of_an_environment_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "task.py"
    file.write_text(TASK)
    a = train(tmp_path / "a", task="task.py:make")
    file.write_text(TASK.replace("observation, reward, *rest\n\n", "observation, reward + 1.0, *rest\n\n"))
    found = compare_runs(a, train(tmp_path / "b", task="task.py:make"))
    assert found.first is not None
    assert (found.first.iteration, found.first.stage) == (1, "rewards")
    assert [line.partition(" ->")[0].rpartition(":")[0] for line in found.causes] == ["code: code.task.py"]


def test_a_processor_a_version_and_threads_are_causes(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_processor", lambda device: "Another, AVX2")
    monkeypatch.setattr(folder, "_versions", lambda: (("torch", "3.0"),))
    in_gradient(monkeypatch)
    found = compare_runs(whole, train(tmp_path / "b", {"threads": 2}))
    assert found.first is not None
    assert found.first.distance < 1e-4
    told = "\n".join(found.causes)
    assert "processor: " in told
    assert "versions.torch: " in told
    assert "threads: 1 -> 2" in told


DAMAGED = (
    "config.toml",
    "fingerprints.jsonl",
    "metrics.jsonl",
    "checkpoints/192/learner.safetensors",
    "best/192/agent.safetensors",
)


@pytest.mark.parametrize("name", DAMAGED)
def test_one_damaged_byte_is_named_with_its_file(name: str, whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "b"
    shutil.copytree(whole, copy)
    content = bytearray((copy / name).read_bytes())
    content[-5] ^= 1
    (copy / name).write_bytes(content)
    found = compare_runs(whole, copy)
    assert not found.same
    assert len(found.lines) == 2 == 1 + len(found.damaged)
    assert name.split("/")[0] in found.damaged[0]


def test_gradients_of_one_engine_and_terms_of_the_other_are_not_compared_and_gaps_are_counted() -> None:
    eager, compiled = (
        {1: {"weights": ["a", 1.0, 1.0], stage: ["b", at, at]}} for stage, at in (("gradient", 1.0), ("terms", 2.0))
    )
    assert partings(eager, compiled) == []
    assert named([1, 2, 4]).endswith("1–4 (3 compared; the others have no fingerprints)")


def test_equal_runs_are_the_same_and_the_command_says_each_with_its_exit_code(whole: Path, tmp_path: Path) -> None:
    again = train(tmp_path / "again")
    for other, code in ((again, 0), (train(tmp_path / "other", {"seed": 2}), 1)):
        result = CliRunner().invoke(cli, ["diff", str(whole), str(other), "--json"])
        assert result.exit_code == code, result.output
        assert json.loads(result.output)["same"] == (code == 0)
    assert read_fingerprints(whole).rows == read_fingerprints(again).rows
    assert len(read_fingerprints(whole).rows) == 3
    text = CliRunner().invoke(cli, ["diff", str(whole), str(again)]).output
    assert text == "the same to the last bit, iterations 1–3\n"
    text = CliRunner().invoke(cli, ["diff", str(train(tmp_path / "short", {"steps": 128})), str(again)]).output
    assert text.startswith(f"the same to the last bit, iterations 1–2; {again} goes on to iteration 3\n")
    (again / FINGERPRINTS).unlink()
    result = CliRunner().invoke(cli, ["diff", str(whole), str(again)])
    assert result.exit_code == 2
    assert [line.partition("fingerprints")[0] for line in result.output.splitlines()] == [
        f"{whole} and {again} have no iteration with ",
        f"{again}/",
    ], "of what is not recorded nothing is said to differ"
